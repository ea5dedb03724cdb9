"""data/ under attack: growth, contradictions, kills between any two writes, two ingests at once, more images than memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from source_trees import contents, from_folder, labels_of, pictures, png, snapshot, write_tree

from tasks.core.artifacts import DatasetRef, SetAside
from tasks.core.config import IngestConfig
from tasks.core.errors import BadInput
from tasks.images.claims import Claim, Outcome, settle
from tasks.images.shards import Standing, iter_rows
from tasks.ingest import ingest
from tasks.sources import folder

ROOT = Path(__file__).parents[1]
DIGITS = IngestConfig()


def aside(ref: DatasetRef) -> dict[str, str]:
    return {item.name: item.code for item in ref.set_aside}


def refused(config: IngestConfig, root: Path) -> BadInput:
    with pytest.raises(BadInput) as caught:
        ingest(config, root)
    return caught.value


def test_a_shard_is_an_image_data_set_for_hugging_face_and_holds_the_bytes_as_they_came(tmp_path: Path) -> None:
    files = pictures(cat=2, dog=2)
    ref = ingest(from_folder(write_tree(tmp_path / "source", files)), tmp_path)
    table = pq.read_table(tmp_path / "data" / "shards" / "000001-00000.parquet")
    assert table.schema.names == ["image", "label", "sha256", "split", "group"]
    assert str(table.schema.field("image").type) == "struct<bytes: binary, path: string>"
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert {row["image"]["path"]: row["image"]["bytes"] for row in table.to_pylist()} == files
    assert (ref.classes, ref.counts, ref.splits) == (("cat", "dog"), {"cat": 2, "dog": 2}, {})
    assert ref.verify() == DatasetRef.load(tmp_path)


def test_equal_sources_give_equal_bytes_wherever_they_lie_and_whatever_carries_them(tmp_path: Path) -> None:
    files = pictures(cat=5, dog=5)
    write_tree(tmp_path / "one" / "source", files)
    write_tree(tmp_path / "elsewhere" / "deep" / "in", dict(reversed(files.items())))
    ingest(IngestConfig(source="folder", location="source"), tmp_path / "one")
    ingest(from_folder(tmp_path / "elsewhere" / "deep" / "in"), tmp_path / "two")
    assert contents(tmp_path / "one" / "data") == contents(tmp_path / "two" / "data")
    assert str(tmp_path) not in (tmp_path / "one" / "data" / "dataset.json").read_text(encoding="utf-8")


def test_growth_appends_only_what_is_new_and_touches_nothing_old(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", pictures(cat=4, dog=4))
    ingest(from_folder(source), tmp_path)
    old = snapshot(tmp_path / "data" / "shards")
    write_tree(source, pictures(first=1, cat=3, bird=2))
    ref = ingest(from_folder(source), tmp_path)
    new = snapshot(tmp_path / "data" / "shards")
    assert {name: new[name] for name in old} == old
    assert set(new) - set(old) == {"000002-00000.parquet"}
    assert [(shard.file, shard.rows) for shard in ref.shards] == [("shards/000001-00000.parquet", 8), ("shards/000002-00000.parquet", 5)]
    assert ref.counts == {"bird": 2, "cat": 7, "dog": 4}
    assert labels_of(ref) == {name: name.split("/")[0] for name in contents(source)}


def test_an_ingest_that_finds_nothing_new_touches_no_file(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", pictures(cat=4, dog=4))
    first = ingest(from_folder(source), tmp_path)
    before = snapshot(tmp_path / "data")
    write_tree(source, {".DS_Store": b"junk", "loose.png": png(77)})
    assert ingest(from_folder(source), tmp_path) == first
    assert snapshot(tmp_path / "data") == before


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "SETTLED_NS", 0)
    read: list[str] = []
    really = folder.read_file

    def reading(path: Path, limit: int) -> bytes | str:
        read.append(path.name)
        return really(path, limit)

    monkeypatch.setattr(folder, "read_file", reading)
    source, root = write_tree(tmp_path / "source", pictures(cat=4, dog=4)), tmp_path / "root"
    config = from_folder(source)
    ingest(config, root)
    assert len(read) == 8
    read.clear()
    before = DatasetRef.load(root)
    assert ingest(config, root) == before
    assert not read
    changed = source / "cat" / "0001.png"
    facts = changed.stat()
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    os.utime(changed, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # the same size and time of modification
    (source / "dog" / "0000.png").rename(source / "dog" / "moved.png")
    write_tree(source, {"cat/new.png": png(902)})
    after = ingest(config, root)
    assert sorted(read) == ["0001.png", "moved.png", "new.png"]
    assert sum(shard.rows for shard in after.shards) == 10
    shutil.copytree(root, tmp_path / "slow", ignore=shutil.ignore_patterns("known"))
    assert ingest(config, tmp_path / "slow").digest == after.digest, "the same as with every file read"
    read.clear()
    for file in (root / ".trainyard" / "known").iterdir():
        file.write_bytes(b"PAR1 damaged")
    assert ingest(config, root) == after
    assert len(read) == 9


def test_what_is_known_counts_only_where_data_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "SETTLED_NS", 0)
    source, root = write_tree(tmp_path / "source", pictures(cat=4, dog=4)), tmp_path / "root"
    first = ingest(from_folder(source), root)
    shutil.rmtree(root / "data")
    assert ingest(from_folder(source), root) == first
    first.verify()


def test_a_file_that_changed_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    source, root = write_tree(tmp_path / "source", pictures(cat=2, dog=2)), tmp_path / "root"
    ingest(from_folder(source), root)
    assert not list((root / ".trainyard").rglob("known/*"))
    (source / "cat" / "0000.png").write_bytes(png(77))  # within the grain of a clock, and of the same size perhaps
    assert ingest(from_folder(source), root).counts == {"cat": 3, "dog": 2}


def test_another_source_appends_and_an_image_that_it_repeats_is_known(tmp_path: Path) -> None:
    files = pictures(cat=3, dog=3)
    ingest(from_folder(write_tree(tmp_path / "may", files)), tmp_path)
    june = write_tree(tmp_path / "june", {"dog/renamed.png": files["dog/0000.png"], **pictures(first=1, dog=2)})
    ref = ingest(from_folder(june), tmp_path)
    assert ref.counts == {"cat": 3, "dog": 5}
    assert not ref.set_aside
    assert [shard.rows for shard in ref.shards] == [6, 2]


def test_a_new_label_for_a_known_image_becomes_a_layer_and_a_later_one_wins(tmp_path: Path) -> None:
    files = pictures(cat=3, dog=3)
    source = write_tree(tmp_path / "source", files)
    ingest(from_folder(source), tmp_path)
    shards = snapshot(tmp_path / "data" / "shards")
    (source / "cat" / "0000.png").rename(source / "dog" / "moved.png")
    ref = ingest(from_folder(source), tmp_path)
    assert [layer.file for layer in ref.layers] == ["labels/000002.parquet"]
    assert labels_of(ref)["cat/0000.png"] == "dog"
    assert ref.counts == {"cat": 2, "dog": 4}
    (source / "dog" / "moved.png").rename(source / "cat" / "back.png")
    ref = ingest(from_folder(source), tmp_path)
    assert [layer.file for layer in ref.layers] == ["labels/000002.parquet", "labels/000003.parquet"]
    assert ref.counts == {"cat": 3, "dog": 3}
    assert snapshot(tmp_path / "data" / "shards") == shards


def test_a_contradiction_about_a_stored_image_removes_it_and_its_end_brings_it_back(tmp_path: Path) -> None:
    files = pictures(cat=3, dog=3)
    source = write_tree(tmp_path / "source", files)
    ingest(from_folder(source), tmp_path)
    write_tree(source, {"dog/copy.png": files["cat/0000.png"]})
    ref = ingest(from_folder(source), tmp_path)
    assert aside(ref) == {"cat/0000.png": "conflicting_label", "dog/copy.png": "conflicting_label"}
    assert (ref.counts, len(labels_of(ref))) == ({"cat": 2, "dog": 3}, 5)
    (source / "cat" / "0000.png").unlink()
    ref = ingest(from_folder(source), tmp_path)
    assert ref.counts == {"cat": 2, "dog": 4}
    assert labels_of(ref)["cat/0000.png"] == "dog"


def test_copies_and_leaks_are_set_aside_in_one_batch_and_over_two_alike(tmp_path: Path) -> None:
    """Training's copy goes, even where it came first; test's stays, even where it comes again as training."""
    train, test = {"train/cat/a.png": png(1), "train/dog/b.png": png(2)}, {"test/cat/z.png": png(1), "test/dog/y.png": png(3)}
    at_once = ingest(from_folder(write_tree(tmp_path / "all", {**train, **test})), tmp_path / "one")
    assert aside(at_once) == {"train/cat/a.png": "leak_exact"}
    ingest(from_folder(write_tree(tmp_path / "first", train)), tmp_path / "two")
    later = ingest(from_folder(tmp_path / "all"), tmp_path / "two")
    assert aside(later) == {"train/cat/a.png": "leak_exact"}
    assert at_once.splits == later.splits == {"test": 2, "train": 1}
    again = ingest(from_folder(tmp_path / "first"), tmp_path / "two")
    assert {row.sha256: row.split for row in iter_rows(again)} == {row.sha256: row.split for row in iter_rows(at_once)}


CAT, DOG = Claim("cat/1.png", "cat", None, None), Claim("dog/1.png", "dog", None, None)


@pytest.mark.parametrize(("claims", "stored", "standing", "set_aside"), [
    ([CAT], None, ("cat/1.png", "cat", None), []),
    ([CAT, CAT._replace(name="cat/0.png")], None, ("cat/0.png", "cat", None), ["cat/1.png duplicate"]),
    ([CAT, CAT._replace(name="cat/0.png")], ("cat/1.png", "cat", None), ("cat/1.png", "cat", None), ["cat/0.png duplicate"]),
    ([CAT, DOG], None, ("cat/1.png", None, None), ["cat/1.png conflicting_label", "dog/1.png conflicting_label"]),
    ([CAT, DOG], ("old.png", "cat", "test"), ("old.png", None, "test"), ["cat/1.png conflicting_label", "dog/1.png conflicting_label"]),
    ([DOG], ("cat/1.png", "cat", "val"), ("cat/1.png", "dog", "val"), []),
    ([CAT], ("cat/1.png", None, None), ("cat/1.png", "cat", None), []),
    ([CAT._replace(split="train")], ("cat/1.png", "cat", "test"), ("cat/1.png", "cat", "test"), ["cat/1.png leak_exact"]),
    ([CAT._replace(split="test")], ("cat/1.png", "cat", "train"), ("cat/1.png", "cat", "test"), []),
    ([CAT._replace(split=at, name=at) for at in ("train", "val", "test")], None, ("test", "cat", "test"), ["train leak_exact", "val leak_exact"]),
])  # fmt: skip
def test_settling_what_a_source_says_of_one_image(
    claims: list[Claim], stored: tuple[str, str | None, str | None] | None, standing: tuple[str, str | None, str | None], set_aside: list[str]
) -> None:
    outcome: Outcome = settle(claims, Standing(*stored) if stored else None)
    assert outcome.standing == Standing(*standing)
    assert [f"{item.name} {item.code}" for item in outcome.set_aside] == set_aside
    assert settle(list(reversed(claims)), Standing(*stored) if stored else None).standing == outcome.standing


def test_files_that_claim_to_be_images_are_stored_for_validate_to_judge_and_others_are_not(tmp_path: Path) -> None:
    odd = {"cat/no_ending": png(50), "cat/broken.png": b"<html>", "cat/notes.txt": b"hello", "cat/empty.jpg": b"", "dog/inner.zip": b"PK\x03\x04"}
    ref = ingest(from_folder(write_tree(tmp_path / "source", {**pictures(cat=2, dog=2), **odd})), tmp_path)
    assert aside(ref) == {"cat/notes.txt": "not_an_image", "cat/empty.jpg": "empty_file", "dog/inner.zip": "not_an_image"}
    assert {"cat/no_ending", "cat/broken.png"} <= set(labels_of(ref))


def test_a_file_that_was_mended_is_no_longer_listed_as_set_aside(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", {**pictures(cat=2, dog=2), "cat/bad.png": b""})
    assert aside(ingest(from_folder(source), tmp_path)) == {"cat/bad.png": "empty_file"}
    write_tree(source, {"cat/bad.png": png(99)})
    ref = ingest(from_folder(source), tmp_path)
    assert (aside(ref), ref.counts["cat"]) == ({}, 3)


@pytest.mark.parametrize(("files", "code", "named"), [
    (pictures(cat=2), "too_few_classes", "cat"),
    ({**pictures(cat=2, dog=2), "bird/note.txt": b"x"}, "empty_class", "bird"),
    (pictures(Cat=2, cat=2, dog=2), "class_name_collision", "Cat"),
])  # fmt: skip
def test_a_source_that_is_refused_leaves_nothing(files: dict[str, bytes], code: str, named: str, tmp_path: Path) -> None:
    error = refused(from_folder(write_tree(tmp_path / "source", files)), tmp_path)
    assert error.code == code
    assert named in str(error)
    assert not (tmp_path / "data").exists()


def test_a_refused_growth_leaves_the_version_as_it_was(tmp_path: Path) -> None:
    ingest(from_folder(write_tree(tmp_path / "source", pictures(cat=2, dog=2))), tmp_path)
    before = snapshot(tmp_path / "data")
    assert refused(from_folder(write_tree(tmp_path / "june", pictures(first=1, CAT=2))), tmp_path).code == "class_name_collision"
    assert refused(from_folder(tmp_path / "nowhere"), tmp_path).code == "source_unavailable"
    assert snapshot(tmp_path / "data") == before


def test_one_class_may_grow_alone(tmp_path: Path) -> None:
    ingest(from_folder(write_tree(tmp_path / "source", pictures(cat=2, dog=2))), tmp_path)
    assert ingest(from_folder(write_tree(tmp_path / "june", pictures(first=1, cat=2))), tmp_path).counts == {"cat": 4, "dog": 2}


def test_the_embedded_demonstration_gives_way_to_a_users_data_and_is_never_mixed_into_it(tmp_path: Path) -> None:
    config = from_folder(write_tree(tmp_path / "source", pictures(cat=2, dog=2)))
    ingest(config, tmp_path / "fresh")
    for root in (tmp_path / "over", tmp_path / "more"):
        ingest(DIGITS, root)
    assert refused(from_folder(write_tree(tmp_path / "lone", pictures(cat=1))), tmp_path / "over").code == "too_few_classes"
    assert len(DatasetRef.load(tmp_path / "over").verify().classes) == 10
    ingest(config, tmp_path / "over")
    assert contents(tmp_path / "over" / "data") == contents(tmp_path / "fresh" / "data")
    own = {"7/own.png": png(1), "8/own.png": png(2)}  # class names of the digits
    assert ingest(from_folder(write_tree(tmp_path / "digits of mine", own)), tmp_path / "more").counts == {"7": 1, "8": 1}
    before = contents(tmp_path / "over" / "data")
    assert refused(DIGITS, tmp_path / "over").code == "data_foreign"
    assert contents(tmp_path / "over" / "data") == before


def test_shards_are_cut_at_the_set_size_without_losing_an_image(tmp_path: Path) -> None:
    files = pictures(cat=20, dog=20)
    ref = ingest(from_folder(write_tree(tmp_path / "source", files), shard_mb=0.003), tmp_path)
    assert len(ref.shards) > 5
    assert {row.path: row.data for row in iter_rows(ref)} == files


CRASH = """
import os, sys
from pathlib import Path
from tasks.core.config import IngestConfig
from tasks import ingest
real, left = Path.replace, int(sys.argv[3])
def replace(self, target):
    global left
    if left == 0:
        os._exit(9)
    left -= 1
    return real(self, target)
Path.replace = replace
ingest.ingest(IngestConfig(source="folder", location=sys.argv[2], shard_mb=0.003), Path(sys.argv[1]))
"""


def killed_at(rename: int, root: Path, source: Path) -> bool:
    """Run an ingest that dies just before its ``rename``-th rename; whether it died."""
    done = subprocess.run([sys.executable, "-c", CRASH, str(root), str(source), str(rename)], cwd=ROOT, check=False)
    assert done.returncode in (0, 9)
    return done.returncode == 9


def test_a_kill_before_any_rename_leaves_the_old_version_whole_and_the_rerun_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", pictures(cat=4, dog=4))
    start = tmp_path / "start"
    ingest(from_folder(source, shard_mb=0.003), start)
    write_tree(source, pictures(first=1, cat=8, dog=8))
    (source / "cat" / "0000.png").rename(source / "dog" / "moved.png")
    unbroken = tmp_path / "unbroken"
    shutil.copytree(start, unbroken)
    ingest(from_folder(source, shard_mb=0.003), unbroken)
    deaths = published = 0
    while killed_at(deaths, shutil.copytree(start, tmp_path / f"killed{deaths}"), source):
        root = tmp_path / f"killed{deaths}"
        old = DatasetRef.load(root).verify()
        assert (old.digest, len(labels_of(old))) in [(ref.digest, len(labels_of(ref))) for ref in map(DatasetRef.load, (start, unbroken))]
        published += old.digest != DatasetRef.load(start).digest
        ingest(from_folder(source, shard_mb=0.003), root)
        assert contents(root / "data") == contents(unbroken / "data")
        assert not [path for path in (root / ".trainyard").rglob("*.part") if path.parent.name != "known"]  # that one the sweep takes
        deaths += 1
    assert deaths - published >= 4  # shards, layer, dataset.json; after that the version stands


def test_a_kill_while_the_demonstration_gives_way_loses_nothing(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", pictures(cat=2, dog=2))
    ingest(DIGITS, tmp_path / "start")
    fresh = tmp_path / "fresh"
    ingest(from_folder(source, shard_mb=0.003), fresh)
    deaths = 0
    while killed_at(deaths, shutil.copytree(tmp_path / "start", tmp_path / f"killed{deaths}"), source):
        root = tmp_path / f"killed{deaths}"
        assert not DatasetRef.exists(root) or DatasetRef.load(root).verify()
        ingest(from_folder(source, shard_mb=0.003), root)
        assert contents(root / "data") == contents(fresh / "data")
        deaths += 1
    assert deaths >= 4


def test_two_ingests_at_once_take_turns_and_both_arrive(tmp_path: Path) -> None:
    sources = [write_tree(tmp_path / name, pictures(first=index, cat=30, dog=30)) for index, name in enumerate(("may", "june"))]
    code = "import sys; from pathlib import Path; from tasks.core.config import IngestConfig; from tasks.ingest import ingest\n"
    code += "ingest(IngestConfig(source='folder', location=sys.argv[2]), Path(sys.argv[1]))"
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "root"), str(source)], cwd=ROOT) for source in sources]
    assert [child.wait(timeout=60) for child in running] == [0, 0]
    ref = DatasetRef.load(tmp_path / "root").verify()
    assert ref.counts == {"cat": 60, "dog": 60}
    assert [shard.rows for shard in ref.shards] == [60, 60]


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """160 MB of images in 16 classes, and the reading back of them, within 90 MB above the start."""
    code = textwrap.dedent("""
        import random, resource, sys
        from pathlib import Path
        from tasks import sources
        from tasks.core.config import IngestConfig
        from tasks.images.shards import iter_rows
        from tasks.ingest import ingest
        @sources.source("noise")
        def noise(location, root, limits):
            draw = random.Random(0)
            return sources.Source(sources.Item(f"{i:03d}.png", f"class{i % 16}", draw.randbytes(2_000_000)) for i in range(80))
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ref = ingest(IngestConfig(source="noise", shard_mb=50.0), Path(sys.argv[1]))
        assert sum(len(row.data) for row in iter_rows(ref)) == 160_000_000
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024, len(ref.shards))
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    grown, shards = map(int, done.stdout.split())
    assert grown < 90
    assert shards == 4


def test_a_plug_in_that_names_an_unknown_split_or_an_unstorable_name(tmp_path: Path) -> None:
    from tasks.sources import Item, Source, source

    items = [Item(f"{index}.png", "ab"[index % 2], png(index)) for index in range(4)]

    @source("test-odd")
    def odd(location: str, root: Path, limits: object) -> Source:
        extra = [Item("\udcff.png", "a", png(9))] if location == "name" else [Item("x", "a", png(9), "holdout")]  # type: ignore[arg-type]
        return Source([*items, *extra])

    assert refused(IngestConfig(source="test-odd"), tmp_path).code == "unknown_split"
    assert ingest(IngestConfig(source="test-odd", location="name"), tmp_path).set_aside == (SetAside(name="\\xff.png", code="bad_file_name"),)
