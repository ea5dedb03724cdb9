"""Packages an approved model as a Bento: service/ + decode.py + model.onnx + provenance, in one archive.

    python -m tasks.package

The archive (artifacts/bento/service.bento) is what ``bentoml import`` takes, and byte for byte a function of its inputs.
It holds no torch and no path of the machine that built it.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.core.artifacts import (
    Artifact,
    BentoRef,
    DatasetRef,
    EvaluationReport,
    GateDecision,
    ImageCache,
    TrainedModel,
    TrainingSet,
    ValidationReport,
    file_digests,
    lineage,
    require_approval,
)
from tasks.core.config import PackageConfig, load_params
from tasks.core.errors import BadInput, Rejected, run
from tasks.core.files import canonical_json, digest_of, sha256_file, write_atomic
from tasks.core.process import QUIET, die_with_parent, quiet_environment

CODE = (
    "service/__init__.py",
    "service/app.py",
    "service/limits.py",
    "service/page.html",
    "service/uploads.py",
    "tasks/__init__.py",
    "tasks/images/__init__.py",
    "tasks/images/decode.py",
)
"""Files of ours in the Bento, below the project's root."""

REQUIRES = ("bentoml", "numpy", "onnxruntime", "pillow", "prometheus-client", "starlette", "typing-extensions")
"""Distributions that CODE imports; what they need in turn is pinned with them."""

ANCESTORS: Mapping[str, type[Artifact]] = {
    kind.__name__: kind for kind in (DatasetRef, ValidationReport, ImageCache, TrainingSet, TrainedModel, EvaluationReport)
}

README = """# {tag}

An image classifier with {classes} classes, packaged by Trainyard. `GET /provenance` says what it was made from.

    bentoml import service.bento
    bentoml serve {tag}
    curl -F image=@photo.jpg http://127.0.0.1:3000/classify
"""


def package(
    model: TrainedModel,
    report: EvaluationReport,
    decision: GateDecision,
    config: PackageConfig,
    *,
    data_version: str | None,
    code: Path,
    out: Path,
) -> BentoRef:
    """Build the Bento of ``model`` and export it to artifacts/bento/service.bento below ``out``.

    ``code`` is the folder that holds service/ and tasks/; ``data_version`` the hash in data.dvc, where there is one.
    Raises Rejected ``rejected`` without the gate's approval of exactly this model and evaluation, and BadInput
    ``artifact_foreign``, ``artifact_edited`` or ``artifact_missing`` where the chain back to the data is broken.
    """
    _refuse_unapproved(model, report, decision)
    model.verify()
    chain = trace(model, report)
    pins = pinned(REQUIRES)
    service = {"code": {name: sha256_file(code / name) for name in CODE}, "config": config.model_dump(mode="json"), "packages": pins}
    service_digest = digest_of(service)
    version = digest_of({"model": model.digest, "service": service_digest})[:16]
    tag = f"{config.name.lower()}:{version}"
    origin = _provenance(tag, service_digest, model, report, decision, chain, data_version)
    facts = {"classes": model.classes, "decode": model.decode.model_dump(mode="json"), "digest": model.digest}
    sources = {name: (code / name).read_bytes() for name in CODE}
    sources |= {
        "model/model.onnx": model.path("model.onnx").read_bytes(),
        "model/model.json": canonical_json(facts),
        "model/service.json": canonical_json(config.model_dump(mode="json")),
        "model/provenance.json": canonical_json(origin),
        "bentofile.yaml": canonical_json(_recipe(tag, len(model.classes), pins)),  # JSON is YAML
    }
    with tempfile.TemporaryDirectory(prefix="trainyard-bento-") as scratch:
        archive = pack(build(sources, tag, Path(scratch)))
    folder = (out / BentoRef.PATH).parent
    (out / BentoRef.PATH).unlink(missing_ok=True)  # marker last: no half pair of an old marker and a new archive
    write_atomic(folder / "service.bento", archive)
    return BentoRef(
        tag=tag,
        model_digest=model.digest,
        service_digest=service_digest,
        made_from=lineage(model, report, decision),
        files=file_digests(folder, "service.bento"),
    ).save(out)


def _refuse_unapproved(model: TrainedModel, report: EvaluationReport, decision: GateDecision) -> None:
    """The same verdict as require_approval's, from the arguments alone: no caller gets round it."""
    report.require_made_from(model)
    decision.require_made_from(model, report)
    if not (decision.approved and decision.checks and all(check.passed for check in decision.checks) and decision.model_digest == model.digest):
        raise Rejected("rejected", "the gate did not approve this model", value=decision.reason, knob="see artifacts/gate/decision.json")


def trace(*artifacts: Artifact) -> dict[str, Artifact]:
    """All artifacts that ``artifacts`` were made from, themselves included, by type name, back to the DatasetRef.

    Raises BadInput ``artifact_foreign`` where an ancestor on disk is not the one that was used, or the walk ends before
    the data, and what ``Artifact.load`` raises.
    """
    chain: dict[str, Artifact] = {type(artifact).__name__: artifact for artifact in artifacts}
    pending = list(artifacts)
    while pending:
        child = pending.pop()
        for name in sorted(set(child.made_from) & set(ANCESTORS)):
            if name not in chain:
                chain[name] = ANCESTORS[name].load(child.root)
                pending.append(chain[name])
            child.require_made_from(chain[name])
    if "DatasetRef" not in chain:
        raise BadInput(
            "artifact_foreign", "the model does not say which data it was made from", value=sorted(chain), constraint="traced to data/dataset.json"
        )
    return chain


def pinned(names: Iterable[str]) -> list[str]:
    """``name==version`` of the distributions ``names`` and all that they need, as installed here, sorted."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    pending = [(name, frozenset[str]()) for name in names]
    seen = set(pending)
    while pending:
        name, extras = pending.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # another platform's or optional: nothing here ran with it
        found[canonicalize_name(name)] = distribution.version
        for line in distribution.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                entry = (canonicalize_name(need.name), frozenset(need.extras))
                if entry not in seen:
                    seen.add(entry)
                    pending.append(entry)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _recipe(tag: str, classes: int, pins: list[str]) -> dict[str, Any]:
    """bentofile.yaml."""
    return {
        "name": tag.partition(":")[0],
        "service": "service.app:Classifier",
        "description": README.format(tag=tag, classes=classes),
        "include": ["service/*", "tasks/*", "model/*"],
        "python": {"packages": pins, "lock_packages": False},  # locking asks the package index; these are exact already
        "docker": {"python_version": f"{sys.version_info.major}.{sys.version_info.minor}"},
    }


def _provenance(
    tag: str,
    service_digest: str,
    model: TrainedModel,
    report: EvaluationReport,
    decision: GateDecision,
    chain: Mapping[str, Artifact],
    data_version: str | None,
) -> dict[str, Any]:
    """What GET /provenance answers: canonical facts only, so no time, host or path."""
    dataset = chain["DatasetRef"]
    assert isinstance(dataset, DatasetRef)
    return {
        "format": 1,
        "tag": tag,
        "model_digest": model.digest,
        "service_digest": service_digest,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "classes": list(model.classes),
        "decode": model.decode.model_dump(mode="json"),
        "accuracy": {
            "value": report.accuracy,
            "low": report.accuracy_low,
            "high": report.accuracy_high,
            "confidence": report.confidence,
            "correct": report.correct,
            "images": report.images,
            "macro_f1": report.macro_f1,
            "calibration_error": report.calibration_error,
        },
        "data": {
            "version": data_version,
            "images": sum(dataset.counts.values()),
            "batches": len({shard.file.split("-")[0] for shard in dataset.shards}),
        },
        "verdict": {"reason": decision.reason, "compared_with": decision.champion.version if decision.champion else None},
        "artifacts": {name: artifact.digest for name, artifact in chain.items()} | {"GateDecision": decision.digest},
    }


def build(sources: Mapping[str, bytes], tag: str, scratch: Path) -> Path:
    """Run ``bentoml build`` on ``sources`` (path -> bytes) in a process of its own; returns the Bento's folder in ``scratch``.

    A child, because building imports the service: in this process it would find our ``tasks``, not the Bento's.
    """
    context = scratch / "context"
    for name, data in sources.items():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_bytes(data)
    name, _, version = tag.partition(":")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "BENTOML_CONFIG", "BENTOML_CONFIG_OPTIONS")}
    environment |= QUIET | {"BENTOML_HOME": str(scratch / "home"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "bentoml", "build", "--version", version, "--output", "tag", "."]
    done = subprocess.run(command, cwd=context, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"bentoml build failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return scratch / "home" / "bentos" / name / version


def pack(bento: Path) -> bytes:
    """The Bento's folder as an xz tar, the format of ``bentoml export``, with nothing in it that differs from run to run."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(bento.rglob("*"), key=lambda path: path.relative_to(bento).as_posix()):
            if path.is_file() and path.suffix != ".pyc":
                data = path.read_bytes()
                if path == bento / "bento.yaml":
                    data = re.sub(rb"(?m)^creation_time: .*$", b"creation_time: '2000-01-01T00:00:00.000000+00:00'", data)
                entry = tarfile.TarInfo(path.relative_to(bento).as_posix())
                entry.size = len(data)
                entry.mode = 0o755 if path.suffix == ".sh" else 0o644
                tar.addfile(entry, io.BytesIO(data))
    return stored_xz(raw.getvalue())


def stored_xz(data: bytes) -> bytes:
    """``data`` in an xz stream without compression (https://tukaani.org/xz/xz-file-format.txt).

    `bentoml import` wants xz, but weights hardly shrink: for the 45 MB of a resnet18 liblzma's preset 0 took 11 s (two
    busy cores) to save 8 %. Stored, the bytes do not depend on a version of liblzma either.
    """

    def checked(part: bytes) -> bytes:
        return part + zlib.crc32(part).to_bytes(4, "little")

    def padded(part: bytes) -> bytes:
        return part + bytes(-len(part) % 4)

    def number(value: int) -> bytes:
        digits = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
        return bytes([digit | 0x80 for digit in digits[:-1]] + digits[-1:])

    flags = b"\x00\x01"  # the check is CRC32
    header = checked(b"\x02\x00\x21\x01\x08\x00\x00\x00")  # one filter: LZMA2 with a dictionary of 64 KiB
    chunks = []
    for start in range(0, len(data), 65_536):
        chunk = data[start : start + 65_536]
        chunks += [b"\x02" if start else b"\x01", (len(chunk) - 1).to_bytes(2, "big"), chunk]
    body = b"".join([*chunks, b"\x00"])
    index = checked(padded(b"\x00" + number(1) + number(len(header) + len(body) + 4) + number(len(data))))
    footer = (len(index) // 4 - 1).to_bytes(4, "little") + flags
    check = zlib.crc32(data).to_bytes(4, "little")
    magic = b"\xfd7zXZ\x00" + flags + zlib.crc32(flags).to_bytes(4, "little")
    return magic + header + padded(body) + check + index + zlib.crc32(footer).to_bytes(4, "little") + footer + b"YZ"


def data_version(root: Path) -> str | None:
    """The data's content hash in data.dvc, or None where the project's data is not under DVC."""
    try:
        text = (root / "data.dvc").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found = re.search(r"(?m)^\W*md5: ([0-9a-f]{32}(?:\.dir)?)\s*$", text)
    return found.group(1) if found else None


def main() -> None:
    """Package the approved model of the project in the working directory."""
    die_with_parent()
    quiet_environment()
    root, params = Path(), load_params()
    decision = require_approval(root)
    model, report = TrainedModel.load(root), EvaluationReport.load(root)
    code = Path(__file__).resolve().parents[1]
    bento = package(model, report, decision, params.package, data_version=data_version(root), code=code, out=root)
    print(f"packaged {bento.tag}: {bento.path('service.bento').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(run(main))
