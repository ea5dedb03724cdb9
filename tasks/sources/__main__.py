"""Print the fingerprint of the source that params.yaml names, or look through any source without storing anything.

    python -m tasks.sources                                     in a project's root
    python -m tasks.sources KIND [LOCATION] [key=value ...]     anywhere

The first prints one line, "" where the source has none; the section `ingest` is part of it: another location is another source.
The second reads a whole source, decodes every image, and prints one JSON object: what ingest and validate would take and set
aside, or the code that they would refuse with. In a project's root the limits are those of its params.yaml. Values are YAML
1.2. Exit code 0, or 2 where the source is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tasks.core import errors
from tasks.core.artifacts import SetAside, Split
from tasks.core.config import PARAMS, DecodeConfig, IngestConfig, ValidateConfig, load_params
from tasks.core.errors import BadInput, Transient
from tasks.core.files import digest_of
from tasks.core.process import die_with_parent
from tasks.sources import fingerprint_of, open_source
from tasks.sources.layout import printable

if TYPE_CHECKING:
    from tasks.images.claims import Claim
    from tasks.images.likeness import Likeness

OPTION = re.compile(r"[A-Za-z_]\w*=")
PASSWORD = re.compile(r"(?<=//)([^/@:]*):[^/@]*@")


class Bounds(NamedTuple):
    """The limits that the stages would hold the source to."""

    ingest: IngestConfig = IngestConfig()
    decode: DecodeConfig = DecodeConfig()
    near_duplicate_bits: int = ValidateConfig().near_duplicate_bits


DEFAULTS = Bounds()


def dry_run(kind: str, location: str, root: Path, options: dict[str, Any], bounds: Bounds = DEFAULTS) -> dict[str, Any]:
    """What comes of the source ``kind``: accepted (count), classes and splits (name -> count), quarantined ({name, code}),
    ignored (count) and notices; or rejected ({code, message}). Nothing is stored, and one image is in memory at a time.
    """
    shown = PASSWORD.sub(r"\1:***@", location)
    try:
        return {"source": kind, "location": shown, **_look(kind, location, root, options, bounds)}
    except (BadInput, Transient) as error:
        return {"source": kind, "location": shown, "rejected": {"code": error.code, "message": str(error)}}


def _look(kind: str, location: str, root: Path, options: dict[str, Any], bounds: Bounds) -> dict[str, Any]:
    from tasks.images.claims import Claim, settle
    from tasks.images.decode import BadImage, decode, policy_of
    from tasks.images.likeness import likeness
    from tasks.ingest import check_classes, fits, limits_of

    limits = limits_of(bounds.ingest)
    source = open_source(kind, location, root, limits, options)
    stated, aside, policy = set(source.labels), list[SetAside](), policy_of(bounds.decode)
    claims: dict[bytes, list[Claim]] = {}
    bad: dict[bytes, str] = {}
    alike: dict[bytes, Likeness] = {}
    for item in source.items:
        if isinstance(item, SetAside):
            aside.append(item)
            continue
        stated.add(item.label)
        code = fits(item, limits)
        if code:
            aside.append(SetAside(name=printable(item.name), code=code))
            continue
        key = hashlib.sha256(item.data).digest()
        if key not in claims:
            try:
                alike[key] = likeness(decode(item.data, policy))
            except BadImage as error:
                bad[key] = error.code
        claims.setdefault(key, []).append(Claim(item.name, item.label, item.split, item.group))
    outcomes = {key: settle(found, None) for key, found in claims.items()}
    aside += [item for outcome in outcomes.values() for item in outcome.set_aside]
    kept = {key: outcome.kept for key, outcome in outcomes.items() if outcome.kept}
    aside += [SetAside(name=claim.name, code=bad[key]) for key, claim in kept.items() if key in bad]
    sound, copies = _without_copies({key: claim for key, claim in kept.items() if key not in bad}, alike, bounds.near_duplicate_bits)
    aside += copies
    check_classes(stated, {claim.label for claim in sound}, {})
    _check_train(sound)
    return {
        "accepted": len(sound),
        "classes": dict(sorted(Counter(claim.label for claim in sound).items())),
        "splits": dict(sorted(Counter(claim.split for claim in sound if claim.split).items())),
        "quarantined": [{"name": item.name, "code": item.code} for item in sorted(aside, key=lambda item: (item.name, item.code))],
        "ignored": source.ignored,
        "notices": [notice._asdict() for notice in source.notices],
    }


def _without_copies(kept: dict[bytes, Claim], alike: dict[bytes, Likeness], near_duplicate_bits: int) -> tuple[list[Claim], list[SetAside]]:
    """What validate would leave of ``kept``, and what it would set aside as a copy, as far as the source's own splits tell."""
    from tasks.images.likeness import exact_copies, leaks, near_copies

    claims, found = list(kept.values()), [alike[key] for key in kept]
    splits = cast("list[Split]", [claim.split or "train" for claim in claims])
    exact = exact_copies(found, [claim.name for claim in claims], [claim.label for claim in claims], splits)
    gone = {copy.place: copy.code for copy in exact}
    pairs = near_copies(found, near_duplicate_bits)
    gone |= {copy.place: copy.code for copy in leaks(pairs, splits) if not {copy.place, copy.of} & gone.keys()}
    return [claim for place, claim in enumerate(claims) if place not in gone], [
        SetAside(name=claims[place].name, code=code) for place, code in gone.items()
    ]


def _check_train(sound: list[Any]) -> None:
    """Refuse a source that splits everything and leaves a class out of train, as validate would."""
    if not sound or any(claim.split is None for claim in sound):
        return
    missing = sorted({claim.label for claim in sound} - {claim.label for claim in sound if claim.split == "train"})
    if missing:
        raise BadInput(
            "class_not_in_train", f"class {missing[0]!r} has no image in train", value=0, constraint="at least 1", knob="the source's splits"
        )


def _bounds(root: Path) -> Bounds:
    """Those of the project at ``root``, the defaults where none is there."""
    if not (root / PARAMS).is_file():
        return Bounds()
    params = load_params(root / PARAMS)
    return Bounds(params.ingest, params.prepare.decode, params.validate_.near_duplicate_bits)


def _options(arguments: list[str]) -> dict[str, Any]:
    """key=value arguments as a mapping; raises BadInput ``unknown_option``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    options: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key in options:
            raise BadInput("unknown_option", "an argument after the location", value=repr(argument), constraint="key=value, each key once")
        try:
            options[key] = YAML(typ="safe", pure=True).load(value)
        except YAMLError:
            raise BadInput("unknown_option", f"the value of {key} is not YAML 1.2", value=repr(value), constraint="quoted as YAML asks") from None
    return options


def main() -> None:
    """Ask the source and print."""
    die_with_parent()
    if len(sys.argv) == 1:
        config = load_params().ingest
        found = fingerprint_of(config.source, config.location, Path(), config.options)
        print(f"fingerprint {digest_of([config.model_dump(mode='json'), found]) if found else ''}")
        return
    kind, *rest = sys.argv[1:]
    location = rest.pop(0) if rest and not OPTION.match(rest[0]) else ""
    told = dry_run(kind, location, Path(), _options(rest), _bounds(Path()))
    print(json.dumps(told, indent=2, ensure_ascii=False))
    if "rejected" in told:
        sys.exit(2)


if __name__ == "__main__":
    sys.exit(errors.run(main))
