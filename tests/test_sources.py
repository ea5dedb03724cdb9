"""Sources under attack: names, trees, plug-ins, and archives cut, damaged and forged at every place."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from source_trees import pictures, png, write_tree

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.core.png import encode_png
from tasks.sources import Item, Limits, fingerprint_of, open_source

ROOT = Path(__file__).parents[1]
ANY = Limits()
FILES = {"cat/a.png": png(1), "cat/deep/b.png": png(2), "dog/a.png": png(3), "dog/b.jpg": png(4)}


def read(name: str, location: Path | str, root: Path, limits: Limits = ANY) -> tuple[list[Item], list[SetAside], int, tuple[str, ...]]:
    opened = open_source(name, str(location), root, limits)
    everything = list(opened.items)
    items = [item for item in everything if isinstance(item, Item)]
    return items, [item for item in everything if isinstance(item, SetAside)], opened.ignored, opened.labels


def refused(name: str, location: Path | str, root: Path, limits: Limits = ANY) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(name, location, root, limits)
    assert "\n" not in str(caught.value)
    return caught.value


def test_digits_are_those_of_scikit_learn_pixel_for_pixel(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    truth = load_digits()
    items, _, _, labels = read("digits", "", tmp_path)
    assert labels == tuple("0123456789")
    assert [item.label for item in items] == [str(label) for label in truth.target]
    assert [item.name for item in items] == sorted(item.name for item in items)
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(item.data))) for item in items])
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, np.floor(truth.images * 255 / 16 + 0.5))


def test_the_digits_bytes_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """The pinned digest is what data.dvc rests on: no zlib, Pillow or NumPy version may move it."""
    whole = hashlib.sha256()
    for item in read("digits", "", tmp_path)[0]:
        whole.update(f"{item.name} {item.label} {len(item.data)}\n".encode() + item.data)
    assert whole.hexdigest() == "10328d67ba8189a8dd12e1729a6920d51779f2c6f13df422097f9c31aa8391b0"


@pytest.mark.parametrize(("width", "height", "channels"), [(1, 1, 1), (8, 8, 1), (3, 5, 3), (300, 200, 3), (65_535, 1, 1), (21_845, 3, 3)])
def test_png_writer_round_trips_through_pillow_across_the_block_limit(width: int, height: int, channels: int) -> None:
    pixels = random.Random(0).randbytes(width * height * channels)
    with Image.open(io.BytesIO(encode_png(pixels, width, height, channels))) as image:
        image.verify()
    with Image.open(io.BytesIO(encode_png(pixels, width, height, channels))) as image:
        assert image.tobytes() == pixels


def test_importing_the_registry_loads_no_source_library() -> None:
    code = "import sys, tasks.sources; tasks.sources.names(); print({'sklearn', 'numpy', 'PIL', 'pyarrow', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("typo", "right"), [("foldr", "folder"), ("digit", "digits"), ("Archive", "archive"), ("zzz", "one of archive, arrays, coco, digits, folder")]
)
def test_an_unknown_source_names_the_nearest(typo: str, right: str, tmp_path: Path) -> None:
    error = refused(typo, "", tmp_path)
    assert error.code == "unknown_source"
    assert right in str(error)


PLUG_IN = b"""
from tasks.sources import Item, Source

def open(location, root, limits):
    return Source(Item(f"{location}/{n}", ("even", "odd")[n % 2], b"GIF8" + bytes([n])) for n in range(4))
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with one sound and one broken source."""
    site = tmp_path / "site"
    write_tree(site, {"made_up.py": PLUG_IN})
    points = b"[trainyard.sources]\nnumbers = made_up:open\nbroken = made_up:missing\n"
    write_tree(site / "made_up-1.dist-info", {"METADATA": b"Metadata-Version: 2.1\nName: made-up\nVersion: 1\n", "entry_points.txt": points})
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("plug_in")
def test_a_plug_in_is_found_by_its_entry_point(tmp_path: Path) -> None:
    items, _, _, _ = read("numbers", "here", tmp_path)
    assert [(item.name, item.label) for item in items] == [("here/0", "even"), ("here/1", "odd"), ("here/2", "even"), ("here/3", "odd")]
    assert "numbers" in str(refused("nubmers", "", tmp_path))


@pytest.fixture
def with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package outside the tree whose source and fingerprint take options."""
    module = """
from pathlib import Path
from pydantic import Field
from tasks.core.config import Section
from tasks.sources import Item, Limits, Source, fingerprint, source

class CountOptions(Section):
    how_many: int = Field(2, ge=1, description="items")
    names: dict[str, str] = Field({}, description="class names")

@source("counted", options=CountOptions)
def counted(location: str, root: Path, limits: Limits, options: CountOptions) -> Source:
    return Source([Item(f"{i}.png", options.names.get(str(i % 2), str(i % 2)), b"BM") for i in range(options.how_many)])

@fingerprint("counted")
def counted_fingerprint(location: str, root: Path, options: CountOptions) -> str:
    return f"{location}: {options.how_many}"
"""
    points = "[trainyard.sources]\ncounted = with_options:counted\n"
    site = tmp_path / "site"
    about = "Metadata-Version: 2.1\nName: with-options\nVersion: 1\n"
    write_tree(site, {"with_options.py": module.encode()})
    write_tree(site / "with_options-1.dist-info", {"METADATA": about.encode(), "entry_points.txt": points.encode()})
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("with_options")
def test_a_plug_in_gets_the_options_that_it_declares(tmp_path: Path) -> None:
    opened = open_source("counted", "", tmp_path, ANY, {"how_many": 3, "names": {"1": "odd"}})
    assert [item.label for item in opened.items if isinstance(item, Item)] == ["0", "odd", "0"]
    assert fingerprint_of("counted", "x", tmp_path, {"how_many": 5}) == "x: 5"
    assert fingerprint_of("counted", "x", tmp_path) == "x: 2"


@pytest.mark.usefixtures("with_options")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("counted", {"how_meny": 3}, "must be how_many"),
        ("counted", {"how_many": 0}, "ingest.options.how_many; got 0"),
        ("counted", {"how_many": "many"}, "ingest.options.how_many; got 'many'"),
        ("digits", {"how_many": 3}, "takes no options; got how_many"),
    ],
)
def test_options_are_checked_against_what_the_source_declares(name: str, options: dict[str, object], said: str, tmp_path: Path) -> None:
    for ask in (lambda: open_source(name, "", tmp_path, ANY, options), lambda: fingerprint_of(name, "", tmp_path, options)):
        with pytest.raises(BadInput) as caught:
            ask()
        assert caught.value.code == "params_invalid"
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("plug_in")
def test_a_plug_in_that_does_not_load_is_said_as_such(tmp_path: Path) -> None:
    error = refused("broken", "", tmp_path)
    assert error.code == "source_unavailable"
    assert "made_up:missing" in str(error)


def test_a_folder_gives_sorted_files_with_the_first_folder_as_class(tmp_path: Path) -> None:
    items, aside, ignored, labels = read("folder", write_tree(tmp_path / "source", {**FILES, "README.md": b"x", "cat/.hidden.png": b"x"}), tmp_path)
    assert {item.name: (item.label, item.data, item.split) for item in items} == {name: (name[:3], data, None) for name, data in FILES.items()}
    assert [item.name for item in items] == sorted(FILES)
    assert (aside, ignored, labels) == ([], 2, ("cat", "dog"))


def test_split_folders_under_their_many_names(tmp_path: Path) -> None:
    names = {"training": "train", "Validation": "val", "dev": "val", "TEST": "test"}
    source = write_tree(tmp_path / "source", {f"{name}/cat/{name}.png": png(index) for index, name in enumerate(names)})
    items, _, _, labels = read("folder", source, tmp_path)
    assert {item.name: item.split for item in items} == {f"{name}/cat/{name}.png": split for name, split in names.items()}
    assert labels == ("cat",)


def test_classes_that_are_named_like_splits_stay_classes_beside_others(tmp_path: Path) -> None:
    """COCO has a class "train"."""
    items, _, _, labels = read("folder", write_tree(tmp_path / "source", pictures(train=1, car=1)), tmp_path)
    assert labels == ("car", "train")
    assert {item.split for item in items} == {None}


@pytest.mark.parametrize("files", [
    {"train/cat/1.png": png(1), "test/cat/2.png": png(2), "holdout/cat/3.png": png(3)},
    {"train/1.png": png(1), "test/2.png": png(2)},
])  # fmt: skip
def test_a_tree_that_is_half_splits_is_refused_instead_of_guessed(files: dict[str, bytes], tmp_path: Path) -> None:
    assert refused("folder", write_tree(tmp_path / "source", files), tmp_path).code == "unknown_split"


def test_a_class_name_in_decomposed_unicode_is_stored_composed(tmp_path: Path) -> None:
    assert read("folder", write_tree(tmp_path / "source", {"cafe\u0301/1.png": png(1)}), tmp_path)[3] == ("caf\u00e9",)


def test_a_split_folder_cannot_hide_a_collision(tmp_path: Path) -> None:
    files = {"train/Cat/1.png": png(1), "test/cat/2.png": png(2)}
    assert refused("folder", write_tree(tmp_path / "source", files), tmp_path).code == "class_name_collision"


def test_links_pipes_and_large_files_are_set_aside_and_never_opened(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", {**FILES, "dog/huge.png": b"x" * 2000})
    (source / "cat" / "link.png").symlink_to("a.png")
    (source / "bird").symlink_to(source / "cat")
    os.mkfifo(source / "cat" / "pipe.png")
    items, aside, _, labels = read("folder", source, tmp_path, Limits(max_file_bytes=1000))
    assert {(item.name, item.code) for item in aside} == {
        ("cat/link.png", "symlink"),
        ("bird", "symlink"),
        ("cat/pipe.png", "not_a_regular_file"),
        ("dog/huge.png", "image_too_large"),
    }
    assert len(items) == 4
    assert labels == ("cat", "dog")


def test_a_file_that_vanishes_or_turns_into_a_link_while_it_is_read_is_set_aside(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", FILES)
    opened = open_source("folder", str(source), tmp_path)
    (source / "cat" / "a.png").unlink()
    (source / "dog" / "a.png").unlink()
    (source / "dog" / "a.png").symlink_to("/etc/passwd")
    aside = [item for item in opened.items if isinstance(item, SetAside)]
    assert {(item.name, item.code) for item in aside} == {("cat/a.png", "unreadable"), ("dog/a.png", "unreadable")}


@pytest.mark.parametrize(
    ("name", "location"),
    [
        *((name, location) for name in ("folder", "archive") for location in ("", "no", "data/inside")),
        ("archive", "."),
        ("folder", "f"),
        ("folder", "data"),
    ],
)
def test_a_location_that_cannot_be_right(name: str, location: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {"f": b"", "data/inside/cat/1.png": png(1)})
    error = refused(name, location, tmp_path)
    assert error.code == "source_unavailable"
    assert "ingest." in str(error)


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return path


def tarred(mode: str) -> Callable[[Path, dict[str, bytes]], Path]:
    def write(path: Path, files: dict[str, bytes]) -> Path:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return path

    return write


def zstd(path: Path, files: dict[str, bytes]) -> Path:
    plain = tarred("w")(path, files).read_bytes()
    with pa.OSFile(str(path), "wb") as file, pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(plain)
    return path


WRITERS = {"zip": zipped, "tar": tarred("w"), "tar.gz": tarred("w:gz"), "tar.bz2": tarred("w:bz2"), "tar.xz": tarred("w:xz"), "tar.zst": zstd}


@pytest.mark.parametrize("kind", WRITERS)
def test_an_archive_gives_what_its_folder_gives_whatever_its_name_says(kind: str, tmp_path: Path) -> None:
    wrapped = {f"./around it/{name}": data for name, data in FILES.items()} | {"__MACOSX/around it/._x": b"x", "around it/README.md": b"x"}
    path = WRITERS[kind](tmp_path / "no-ending", wrapped)
    items, aside, ignored, labels = read("archive", path, tmp_path)
    assert sorted(items) == read("folder", write_tree(tmp_path / "source", FILES), tmp_path)[0]
    assert (aside, ignored, labels) == ([], 2, ("cat", "dog"))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_cut_archive_is_refused_wherever_it_is_cut(kind: str, tmp_path: Path) -> None:
    """Above all at a member's border, where a tar reader sees nothing wrong."""
    path = WRITERS[kind](tmp_path / "archive", FILES)
    whole = path.read_bytes()
    end = len(whole) - 9216 if kind == "tar" else len(whole)  # a tar is padded to 10 kB after its end mark
    cuts = range(512, end, 512) if kind == "tar" else range(1, end, max(1, end // 40))
    for cut in cuts:
        path.write_bytes(whole[:cut])
        assert refused("archive", path, tmp_path).code == "archive_corrupt", cut


@pytest.mark.parametrize("kind", WRITERS)
def test_flipped_bits_give_the_same_files_or_a_refusal_never_fewer_or_others(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path / "archive", FILES)
    whole, truth, noise = path.read_bytes(), read("archive", path, tmp_path)[0], random.Random(kind)
    for _ in range(60):
        at = noise.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << noise.randrange(8))]) + whole[at + 1 :])
        try:
            items, aside, ignored, _ = read("archive", path, tmp_path)
        except BadInput:
            continue
        if kind not in ("tar", "tar.zst"):  # they need not have a checksum over their content
            assert {item.data for item in items} <= {item.data for item in truth}
        assert len(items) + len(aside) + ignored == len(truth)


def test_a_damaged_header_in_the_middle_of_a_tar_does_not_end_it_early(tmp_path: Path) -> None:
    path = tarred("w")(tmp_path / "archive", FILES)
    data = bytearray(path.read_bytes())
    data[1024:1100] = b"\xff" * 76  # the second member's header; tarfile alone would end there without a word
    path.write_bytes(data)
    assert refused("archive", path, tmp_path).code == "archive_corrupt"


def test_sizes_out_of_proportion(tmp_path: Path) -> None:
    zeros = {"cat/1.bmp": bytes(12 << 20), "dog/1.png": png(1)}
    for kind in ("zip", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"):
        assert refused("archive", WRITERS[kind](tmp_path / kind, zeros), tmp_path).code == "archive_ratio"
        assert refused("archive", tmp_path / kind, tmp_path, Limits(max_unpacked_ratio=1e9, max_unpacked_bytes=1 << 20)).code == "too_large"
    items, aside, _, _ = read("archive", WRITERS["tar"](tmp_path / "tar", zeros), tmp_path, Limits(max_file_bytes=1 << 20))
    assert ([item.name for item in items], aside) == (["dog/1.png"], [SetAside(name="cat/1.bmp", code="image_too_large")])


def test_many_small_entries_cannot_add_up_to_a_bomb(tmp_path: Path) -> None:
    path = zipped(tmp_path / "archive", {f"cat/{index}.bmp": bytes(1 << 20) for index in range(12)})
    assert refused("archive", path, tmp_path).code == "archive_ratio"


def test_an_extended_header_of_any_size_is_not_read_into_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 200 << 20
    path = tmp_path / "archive"
    path.write_bytes(header.tobuf())
    os.truncate(path, 201 << 20)
    tracemalloc.start()
    try:
        assert refused("archive", path, tmp_path).code == "archive_corrupt"
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["/etc/x.png", "a/../../x.png", "..", "C:\\x.png", "c:x.png", "\\\\host\\x.png", "a\\..\\..\\x.png"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_that_lead_outside(kind: str, name: str, tmp_path: Path) -> None:
    assert refused("archive", WRITERS[kind](tmp_path / "archive", {**FILES, name: b"x"}), tmp_path).code == "archive_unsafe_path"


def test_a_name_that_is_written_in_two_ways_is_one_entry_twice(tmp_path: Path) -> None:
    for kind in ("zip", "tar"):
        path = WRITERS[kind](tmp_path / kind, {**FILES, "./cat//a.png": b"x"})
        assert refused("archive", path, tmp_path).code == "archive_duplicate_entry"


@pytest.mark.timeout(60)
def test_a_zip_read_in_one_go_gives_what_zipfile_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: stored, deflated and otherwise packed entries, names in two encodings, streamed ones, with bytes changed anywhere."""

    def outcome(path: Path) -> object:
        try:
            return read("archive", path, tmp_path)
        except BadInput as error:
            return error.code, str(error)

    path, rng = tmp_path / "archive", random.Random(4)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cat/stored.png", png(1), zipfile.ZIP_STORED)
        archive.writestr("cat/Größe.png", png(2), zipfile.ZIP_DEFLATED)
        archive.writestr("dog/lzma.png", png(3), zipfile.ZIP_LZMA)
        archive.writestr("dog/empty.png", b"", zipfile.ZIP_DEFLATED)
        with archive.open("dog/streamed.png", "w", force_zip64=True) as entry:
            entry.write(png(4))
    whole = path.read_bytes()
    cases = [whole]
    for _ in range(600):
        broken = bytearray(whole)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        cases.append(bytes(broken))
    found = []
    for case in cases:
        path.write_bytes(case)
        found.append(outcome(path))
    assert isinstance(found[0], tuple)
    assert [item.data for item in found[0][0]] == [png(2), png(1), b"", png(3), png(4)]
    assert 50 < sum(isinstance(each, tuple) and each[0] == "archive_corrupt" for each in found) < 550
    monkeypatch.setattr("tasks.sources.archive._zip_read", lambda file, info: None)
    for case, expected in zip(cases, found, strict=True):
        path.write_bytes(case)
        assert outcome(path) == expected, case.hex()


def test_windows_separators_in_a_zip_part_folders(tmp_path: Path) -> None:
    path = zipped(tmp_path / "archive", {name.replace("/", "\\"): data for name, data in FILES.items()})
    assert [item.name for item in read("archive", path, tmp_path)[0]] == sorted(FILES)


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 but no more", b"\x1f\x8b\x08\x00 no gzip"])
def test_what_is_no_archive(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(data)
    assert refused("archive", tmp_path / "archive", tmp_path).code == "archive_corrupt"
