"""COCO annotation files: one category an image, and what else stands in such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from source_trees import png, write_tree

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.sources import Item, fingerprint_of, open_source

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 7, "name": " dog "}, {"id": 9, "name": "bird"}]


def document(files: dict[int, str], stated: list[tuple[int, int]], /, **changes: Any) -> bytes:
    return json.dumps(
        {
            "images": [{"id": key, "file_name": name} for key, name in files.items()],
            "annotations": [{"id": number, "image_id": image, "category_id": kind} for number, (image, kind) in enumerate(stated)],
            "categories": CATEGORIES,
            **changes,
        }
    ).encode()


def read(root: Path, **options: Any) -> tuple[list[Item], dict[str, str], list[str]]:
    source = open_source("coco", "a.json", root, options=options)
    found = list(source.items)
    aside = {item.name: item.code for item in found if isinstance(item, SetAside)}
    return [item for item in found if isinstance(item, Item)], aside, [notice.code for notice in source.notices]


def test_the_one_category_of_an_image_is_its_class(tmp_path: Path) -> None:
    images = {
        1: "x/1.png",
        2: "2.png",
        3: "two.png",
        4: "none.png",
        5: "gone.png",
        6: "../out.png",
        7: "odd.png",
        8: "http://x.test/8.png?key=secret",
    }
    stated = [(1, 3), (1, 3), (2, 7), (3, 3), (3, 7), (5, 3), (6, 3), (7, 99), (8, 3), (1000, 3)]
    write_tree(tmp_path, {"a.json": document(images, stated), "x/1.png": png(1), "2.png": png(2), "two.png": png(3)})
    items, aside, notices = read(tmp_path, split="val")
    assert [(item.name, item.label, item.split, item.data) for item in items] == [("2.png", "dog", "val", png(2)), ("x/1.png", "cat", "val", png(1))]
    assert aside == {
        "two.png": "conflicting_label",
        "none.png": "missing_label",
        "gone.png": "missing_file",
        "../out.png": "path_outside_root",
        "odd.png": "unknown_class",
        "http://x.test/8.png": "url_not_allowed",
    }
    assert notices == ["orphan_annotations"]


def test_images_may_lie_elsewhere_and_one_file_may_be_listed_twice(tmp_path: Path) -> None:
    write_tree(
        tmp_path, {"a.json": document({1: "1.png", 2: "1.png", 3: "3.png"}, [(1, 3), (2, 3), (3, 9)]), "there/1.png": png(1), "there/3.png": png(3)}
    )
    items, aside, _ = read(tmp_path, images="there")
    assert [(item.name, item.label) for item in items] == [("1.png", "cat"), ("3.png", "bird")]
    assert not aside
    before = fingerprint_of("coco", "a.json", tmp_path, {"images": "there"})
    write_tree(tmp_path, {"a.json": document({1: "1.png"}, [(1, 3)])})
    assert fingerprint_of("coco", "a.json", tmp_path, {"images": "there"}) != before


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "manifest_corrupt"),
        (b"[]", "manifest_corrupt"),
        (b'{"images": [], "annotations": [], "categories": []}', "empty_manifest"),
        (b'{"images": [1], "annotations": [], "categories": []}', "manifest_corrupt"),
        ('{"images": "ä"}'.encode("latin-1"), "manifest_encoding"),
        (document({1: "1.png"}, [], images=[{"id": 1, "file_name": "1.png"}, {"id": 1, "file_name": "2.png"}]), "manifest_corrupt"),
        (document({1: "1.png"}, [], images=[{"id": True, "file_name": "1.png"}]), "manifest_corrupt"),
        (document({1: "1.png"}, [], images=[{"id": 1}]), "manifest_corrupt"),
        (document({1: "1.png"}, [], annotations=[{"image_id": 1}]), "manifest_corrupt"),
        (document({1: "1.png"}, [(1, 3)], categories=[{"id": 3, "name": "cat"}, {"id": 4, "name": "Cat"}]), "class_name_collision"),
        (b"[" * 100_000, "manifest_corrupt"),
    ],
)
def test_files_that_are_none_are_refused_in_a_line(data: bytes, code: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.json": data, "1.png": png(1)})
    with pytest.raises(BadInput) as caught:
        read(tmp_path)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_an_annotation_file_in_a_store_needs_its_images_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.json": document({1: "1.png"}, [(1, 3)])})
    with pytest.raises(BadInput, match=r"ingest\.options\.images"):
        open_source("coco", f"file://{tmp_path}/a.json", tmp_path)
