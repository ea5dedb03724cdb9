"""A data set of torchvision.datasets by the name of its class, for classification: CIFAR10, MNIST, Food101, ImageFolder ...

Its pictures become PNG files whose bytes depend on their pixels alone. Nothing is downloaded unless that is asked for.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks.core.artifacts import SetAside, Split
from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.core.png import encode_png
from tasks.sources import Item, Limits, Source, source
from tasks.sources.layout import located

KIND = "the name of a class of torchvision.datasets"
KNOB = "ingest.options.arguments"
SPLITS: tuple[tuple[Split, dict[str, Any], dict[str, Any]], ...] = (
    ("train", {"train": True}, {"split": "train"}),
    ("test", {"train": False}, {"split": "test"}),
)
"""Our split, and the argument that chooses it in classes that take `train`, or `split`."""


class TorchvisionOptions(Section):
    """How the data set is made."""

    root: str = Field("", description="folder of the data set, where its class takes one")
    arguments: dict[str, Any] = Field({}, description="further arguments of the class; with train or split among them, only that part is read")
    part: str = Field("", description="split of all images (train, val or test), where arguments choose a part; empty: none")
    download: bool = Field(False, description="let the class download what is not there")


@source("torchvision", options=TorchvisionOptions)
def torchvision(location: str, root: Path, limits: Limits, options: TorchvisionOptions) -> Source:
    """Make the data set and read it, one picture at a time.

    Raises BadInput ``source_unavailable`` where there is no such class, it cannot be made (most often: its files are not there),
    or its targets are no classes; ``params_invalid`` for arguments that it does not take.
    """
    from tasks.sources.columns import split_of

    made = _class(location)
    takes = inspect.signature(made).parameters
    given: dict[str, Any] = dict(options.arguments)
    if "root" in takes:
        given["root"] = str(located(options.root, root, f"the folder of {location}, in ingest.options.root"))
    if "download" in takes:
        given["download"] = options.download
    unknown = sorted(set(given) - set(takes))
    if unknown:
        value = ", ".join(unknown)
        raise BadInput("params_invalid", f"{location} does not take these arguments", value=value, constraint=", ".join(takes), knob=KNOB)
    chosen = next((name for name in ("train", "split") if name in takes), "")
    parts: list[tuple[Split | None, dict[str, Any]]] = [(split_of(options.part, "ingest.options.part"), {})]
    if chosen and chosen not in given:
        parts = [(split, by_train if chosen == "train" else by_split) for split, by_train, by_split in SPLITS]
    sets = [(split, _made(made, location, {**given, **extra})) for split, extra in parts]
    return Source(_items(location, sets))


def _class(name: str) -> Any:
    import torchvision.datasets as datasets

    names = sorted(known for known in datasets.__all__ if isinstance(getattr(datasets, known, None), type))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        must = near[0] if near else KIND
        raise BadInput("source_unavailable", "torchvision has no such data set", value=repr(name), constraint=must, knob="ingest.location")
    return getattr(datasets, name)


def _made(made: Any, name: str, arguments: dict[str, Any]) -> Any:
    try:
        found = made(**arguments)
    except (TypeError, ValueError, RuntimeError, OSError, ImportError, KeyError) as error:
        why = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise BadInput(
            "source_unavailable", f"{name} cannot be made", value=why, constraint="its files below ingest.options.root, or download: true", knob=KNOB
        ) from None
    if not hasattr(found, "__len__"):
        raise BadInput("source_unavailable", f"{name} is no list of pictures", constraint="a classification", knob="ingest.location")
    return found


def _items(name: str, sets: list[tuple[Split | None, Any]]) -> Iterator[Item | SetAside]:
    import numpy as np
    from PIL.Image import Image

    for split, found in sets:
        classes = [str(one) for one in getattr(found, "classes", None) or ()]
        for number in range(len(found)):
            where = f"{name}/{split or 'all'}/{number:07d}.png"
            try:
                picture, target = found[number]
            except (OSError, SyntaxError) as error:  # Pillow's, of one file
                yield SetAside(name=where, code="unreadable" if isinstance(error, FileNotFoundError) else "image_corrupt")
                continue
            except (TypeError, ValueError, AttributeError) as error:
                raise _no_classes(name, str(error)) from None
            if not isinstance(picture, Image) or not isinstance(target, int | np.integer) or (classes and not 0 <= int(target) < len(classes)):
                raise _no_classes(name, f"a {type(picture).__name__} and {str(target)[:80]!r}")
            plain = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
            data = encode_png(plain.tobytes(), plain.width, plain.height, len(plain.getbands()))
            yield Item(where, classes[int(target)] if classes else str(int(target)), data, split)


def _no_classes(name: str, value: str) -> BadInput:
    must = "a picture and the number of its class, as in CIFAR10"
    return BadInput("source_unavailable", f"{name} is no classification", value=value[:200], constraint=must, knob="ingest.location")
