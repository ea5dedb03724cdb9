"""WebDataset's shards under attack: pairs, ranges of shards, labels that are none, and the dangers of archives."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from source_trees import png

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.sources import Item, Limits, fingerprint_of, open_source


def shard(path: Path, files: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def read(location: Path, limits: Limits = Limits(), **options: Any) -> tuple[list[Item], list[tuple[str, str]]]:  # noqa: B008
    found = list(open_source("webdataset", str(location), location.parent, limits, options).items)
    return [item for item in found if isinstance(item, Item)], [(item.name, item.code) for item in found if isinstance(item, SetAside)]


def test_pairs_of_every_kind_of_label(tmp_path: Path) -> None:
    files = [
        *(("1.png", png(1)), ("1.cls", b"0\n"), ("a/2.cls", b"1"), ("a/2.png", png(2))),
        *(("3.PNG", png(3)), ("3.txt", b" cat\n"), ("4.png", png(4)), ("4.json", b'{"label": "dog", "kind": 0}')),
        *(("5.seg.png", png(5)), ("5.json", b"1")),
    ]
    items, aside = read(shard(tmp_path / "x.tar", files), class_names=["cat", "dog"])
    names = ["1.png", "a/2.png", "3.PNG", "4.png", "5.seg.png"]
    assert [(item.name, item.label) for item in items] == [
        (f"x.tar/{name}", label) for name, label in zip(names, ("cat", "dog", "cat", "dog", "dog"), strict=True)
    ]
    assert [item.data for item in items] == [png(seed) for seed in range(1, 6)]
    assert not aside
    assert [item.label for item in read(tmp_path / "x.tar", ending="json", label="kind")[0]] == ["0", "1"]


def test_shards_by_range_glob_and_folder_are_the_same(tmp_path: Path) -> None:
    for index in range(3):
        shard(tmp_path / f"t-{index:03d}.tar.gz", [("1.png", png(index)), ("1.txt", b"cat")])
    ways = [read(tmp_path / "t-{000..002}.tar.gz"), read(tmp_path / "t-*.tar.gz"), read(tmp_path)]
    assert ways[0] == ways[1] == ways[2]
    assert [item.name for item in ways[0][0]] == [f"t-{index:03d}.tar.gz/1.png" for index in range(3)]
    for wrong in ("t-{000..003}.tar.gz", "t-{002..000}.tar.gz", "t-{0..99999999}.tar.gz", "u-*.tar"):
        with pytest.raises(BadInput) as caught:
            read(tmp_path / wrong)
        assert caught.value.code == "source_unavailable"
    first = fingerprint_of("webdataset", str(tmp_path), tmp_path)
    shard(tmp_path / "t-003.tar", [])
    assert fingerprint_of("webdataset", str(tmp_path), tmp_path) != first


def test_samples_that_are_no_pair_are_set_aside(tmp_path: Path) -> None:
    files = [
        *(("1.png", png(1)), ("2.cls", b"0"), ("3.png", png(3)), ("3.jpg", png(4)), ("3.cls", b"0")),
        *(("4.png", png(4)), ("4.json", b"[" * 90_000), ("5.png", png(5)), ("5.cls", b"\xff"), ("6.png", png(6)), ("6.cls", b"9")),
        *(("7.png", png(7) * 40), ("7.cls", b"0"), ("._8.png", b"junk"), ("9.png", png(9)), ("9.cls", b"1")),
    ]
    limits = Limits(max_file_bytes=len(png(7)) * 30)
    items, aside = read(shard(tmp_path / "x.tar", files), limits, class_names=["a", "b"])
    assert [(item.name, item.label) for item in items] == [("x.tar/9.png", "b")]
    codes = ["missing_label", "missing_file", "bad_row", "bad_row", "bad_row", "bad_row", "image_too_large"]
    assert [code for _, code in aside] == codes


def test_a_shard_is_as_safe_as_an_archive(tmp_path: Path) -> None:
    good = shard(tmp_path / "a.tar", [("1.png", png(1)), ("1.cls", b"0")])
    for name, code in (("../1.png", "archive_unsafe_path"), ("/1.png", "archive_unsafe_path")):
        shard(tmp_path / "b.tar", [(name, png(1))])
        with pytest.raises(BadInput) as caught:
            read(tmp_path)
        assert caught.value.code == code
    (tmp_path / "b.tar").write_bytes(good.read_bytes()[:700])
    with pytest.raises(BadInput) as caught:
        read(tmp_path)
    assert caught.value.code == "archive_corrupt"
    shard(tmp_path / "b.tar.gz", [("1.png", bytes(20 << 20))])
    (tmp_path / "b.tar").unlink()
    with pytest.raises(BadInput) as caught:
        read(tmp_path)
    assert caught.value.code == "archive_ratio"
