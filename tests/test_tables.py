"""Manifests and Parquet shards under attack: columns, cells, paths that lead out, rows that contradict, and the command that looks through them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_trees import png, write_tree

from tasks.core.artifacts import SetAside
from tasks.core.config import IngestConfig, apply_overrides
from tasks.core.errors import CODES, BadInput
from tasks.images.shards import iter_rows
from tasks.ingest import ingest
from tasks.sources import BUILT_IN, Item, fingerprint_of, open_source
from tasks.sources.__main__ import dry_run

ROOT = Path(__file__).parents[1]
PICTURES = {f"images/{name}.png": png(seed) for seed, name in enumerate("abcd", 1)}


def made(folder: Path, name: str, text: str) -> Path:
    write_tree(folder, {**PICTURES, name: text.encode()})
    return folder / name


def read(kind: str, path: Path, **options: Any) -> tuple[list[Item], list[tuple[str, str]]]:
    found = list(open_source(kind, str(path), path.parent, options=options).items)
    return [item for item in found if isinstance(item, Item)], [(item.name, item.code) for item in found if isinstance(item, SetAside)]


def refusal(kind: str, path: Path, **options: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(kind, path, **options)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.csv", "path,label,split,group\nimages/a.png,cat,train,g1\nimages/b.png,dog,valid,\n"),
        ("m.tsv", "File_Name\tClass\tsubset\tgroup_id\nimages/a.png\tcat\tTrain\tg1\nimages/b.png\tdog\tdev\t\n"),
        (
            "m.jsonl",
            '{"image": "images/a.png", "label": "cat", "split": "train", "group": "g1"}\n\n'
            '{"image": "images/b.png", "label": "dog", "split": "val"}\n',
        ),
    ],
)
def test_the_text_formats_say_the_same(name: str, text: str, tmp_path: Path) -> None:
    items, aside = read("table", made(tmp_path, name, text))
    assert items == [Item("images/a.png", "cat", png(1), "train", "g1"), Item("images/b.png", "dog", png(2), "val", None)]
    assert not aside


def test_a_parquet_manifest_holds_paths_or_bytes(tmp_path: Path) -> None:
    write_tree(tmp_path, PICTURES)
    pq.write_table(pa.table({"path": ["images/a.png", "images/b.png"], "label": ["cat", "dog"]}), tmp_path / "paths.parquet")
    items, _ = read("table", tmp_path / "paths.parquet")
    assert [(item.name, item.label, item.data) for item in items] == [("images/a.png", "cat", png(1)), ("images/b.png", "dog", png(2))]
    pq.write_table(pa.table({"image": [png(1), png(2), None], "label": [7, None, 8]}), tmp_path / "bytes.parquet")
    items, aside = read("table", tmp_path / "bytes.parquet")
    assert [(item.name, item.label, item.data) for item in items] == [("bytes.parquet/00000001", "7", png(1))]
    assert sorted(code for _, code in aside) == ["bad_row", "missing_label"]


def hugging_face(path: Path, labels: list[int], names: list[str] | None) -> None:
    feature = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}, "label": feature}}})}
    images = [{"bytes": png(seed), "path": f"{seed}.png"} for seed in range(len(labels))]
    pq.write_table(pa.table({"image": images, "label": labels}).replace_schema_metadata(metadata), path, row_group_size=2)


def test_hugging_face_shards_give_class_names_from_their_metadata(tmp_path: Path) -> None:
    hugging_face(tmp_path / "train-00001.parquet", [0, 1, -1, 2], ["cat", "dog"])
    hugging_face(tmp_path / "train-00000.parquet", [1, 0], ["cat", "dog"])
    items, aside = read("parquet", tmp_path)
    assert [item.label for item in items] == ["dog", "cat", "cat", "dog"]
    assert [item.data for item in items] == [png(0), png(1), png(0), png(1)]
    assert aside == [("train-00001.parquet/00000003-2.png", "missing_label"), ("train-00001.parquet/00000004-3.png", "bad_row")]
    items, _ = read("parquet", tmp_path / "train-*0.parquet")
    assert [item.name for item in items] == ["train-00000.parquet/00000001-0.png", "train-00000.parquet/00000002-1.png"]


def test_class_ids_without_names_stay_whole_numbers(tmp_path: Path) -> None:
    hugging_face(tmp_path / "x.parquet", [10, 9], None)
    assert [item.label for item in read("parquet", tmp_path / "x.parquet")[0]] == ["10", "9"]
    hugging_face(tmp_path / "x.parquet", [0, 1], None)
    assert [item.label for item in read("parquet", tmp_path / "x.parquet", class_names=["cat", "dog"])[0]] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("../secret.png", "path_outside_root"),
        ("images/../../secret.png", "path_outside_root"),
        ("\\\\host\\share.png", "path_outside_root"),
        ("C:\\a.png", "path_outside_root"),
        ("data:image/png;base64,AAAA", "url_not_allowed"),
        ("linked/a.png", "symlink"),
        ("link.png", "symlink"),
        ("images", "not_a_regular_file"),
        ("images/e.png", "missing_file"),
        ("i" * 300, "bad_file_name"),
        ("i" * 5000, "bad_row"),
        ("", "bad_row"),
        ("a\0b", "bad_row"),
    ],
)
def test_a_path_never_leads_out_of_the_manifests_folder(path: str, code: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {"secret.png": png(9)})
    manifest = made(tmp_path / "set", "m.jsonl", json.dumps({"path": path, "label": "cat"}))
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "set" / "images")
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "secret.png")
    items, aside = read("table", manifest)
    assert not items
    assert [found for _, found in aside] == [code]


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        ("path,label,image\na,b,c\n", {}, "duplicate_column"),
        ("path,label\n", {"image": "pathh"}, "missing_column"),
        ('path,label\n"a.png,cat\nb.png,dog\n', {}, "manifest_corrupt"),
        ("path,label\nimages/a.png,cat\n", {"delimeter": ";"}, "params_invalid"),
        ("\n\n", {}, "empty_manifest"),
    ],
)
def test_a_manifest_that_cannot_be_understood_is_refused(text: str, options: dict[str, str], code: str, tmp_path: Path) -> None:
    assert refusal("table", made(tmp_path, "m.csv", text), **options).code == code


def test_rows_that_do_not_fit_are_set_aside_and_the_run_goes_on(tmp_path: Path) -> None:
    text = f"path,label\nimages/a.png,cat\nimages/b.png\nimages/b.png,dog,extra\n{'x,' * 600_000}\nimages/c.png,dog\nimages/d.png,fox\n"
    items, aside = read("table", made(tmp_path, "m.csv", text), classes=["cat", "dog"])
    assert [item.name for item in items] == ["images/a.png", "images/c.png"]
    assert aside == [*((f"m.csv line {line}", "bad_row") for line in (3, 4, 5)), ("images/d.png", "unknown_class")]


def test_json_lines_that_are_no_objects_are_set_aside(tmp_path: Path) -> None:
    good = '{"path": "images/a.png", "label": 3}'
    text = "\n".join([good, "[" * 100_000, '{"path": "x", "path": "y", "label": "z"}', "3", '{"path": "images/b.png", "label": 1.5}'])
    items, aside = read("table", made(tmp_path, "m.jsonl", text))
    assert [item.label for item in items] == ["3"]
    assert {code for _, code in aside} == {"bad_row"}
    assert len(aside) == 4


@pytest.mark.timeout(120)
def test_a_damaged_manifest_is_read_set_aside_or_refused_and_nothing_else(tmp_path: Path) -> None:
    """Bit flips, cuts and splices of good manifests, seeded: no other error, and no file but the manifest's own is given."""
    draw = random.Random(4)
    pq.write_table(pa.table({"path": list(PICTURES), "label": ["a", "b", "a", "b"]}), tmp_path / "good.parquet")
    csv = b'path,label,split\nimages/a.png,cat,train\n"images/b.png",dog,val\nimages/c.png,cat,\n'
    lines = b'{"path": "images/a.png", "label": "cat"}\n{"path": "images/b.png", "label": 2}\n'
    write_tree(tmp_path, PICTURES)
    for index in range(600):
        form, good = draw.choice([("csv", csv), ("jsonl", lines), ("parquet", (tmp_path / "good.parquet").read_bytes())])
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data)) if data else 0
            kind = draw.randrange(3)
            if kind == 0 and data:
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del data[at : at + draw.randint(1, 40)]
            else:
                data[at:at] = good[draw.randrange(len(good)) :][: draw.randint(1, 40)]
        path = tmp_path / f"m{index % 7}.{form}"
        path.write_bytes(data)
        try:
            items, aside = read("table", path)
        except BadInput:
            continue
        assert {item.name for item in items} <= set(PICTURES)
        assert {code for _, code in aside} <= set(CODES)


def test_the_fingerprint_moves_with_the_manifest_and_the_shards(tmp_path: Path) -> None:
    path = made(tmp_path, "m.csv", "path,label\n")
    first = fingerprint_of("table", str(path), tmp_path)
    path.write_text("path,label\nimages/a.png,cat\n")
    assert fingerprint_of("table", str(path), tmp_path) != first
    hugging_face(tmp_path / "x.parquet", [0, 1], None)
    shards = fingerprint_of("parquet", str(tmp_path), tmp_path)
    hugging_face(tmp_path / "y.parquet", [0, 1], None)
    assert fingerprint_of("parquet", str(tmp_path), tmp_path) != shards


def asked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tasks.sources", *arguments], cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


def test_the_command_looks_through_a_source_and_stores_nothing(tmp_path: Path) -> None:
    made(tmp_path, "m.csv", "path;what\nimages/a.png;cat\nimages/b.png;dog\nimages/e.png;dog\n")
    before = sorted(path for path in tmp_path.rglob("*"))
    done = asked(tmp_path, "table", "m.csv", "delimiter=;", "label=what", "classes=[cat, dog]")
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert (told["accepted"], told["classes"]) == (2, {"cat": 1, "dog": 1})
    assert told["quarantined"] == [{"name": "images/e.png", "code": "missing_file"}]
    done = asked(tmp_path, "table", "m.csv")
    assert done.returncode == 2
    assert json.loads(done.stdout)["rejected"]["code"] == "missing_column"
    done = asked(tmp_path, "table", "m.csv", "delimiter")
    assert done.returncode == 2
    assert done.stderr.startswith("error[unknown_option]")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_in_a_project_its_own_limits_count(tmp_path: Path) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    made(tmp_path, "m.csv", "path,label\nimages/a.png,cat\nimages/b.png,dog\n")
    assert json.loads(asked(tmp_path, "table", "m.csv").stdout)["accepted"] == 2
    apply_overrides({"prepare": {"decode": {"max_pixels": 4}}}, tmp_path / "params.yaml")
    told = json.loads(asked(tmp_path, "table", "m.csv").stdout)
    assert told["rejected"]["code"] == "empty_class"
    apply_overrides({"ingest": {"max_file_bytes": 10}, "prepare": {"decode": {"max_pixels": 40_000}}}, tmp_path / "params.yaml")
    assert json.loads(asked(tmp_path, "table", "m.csv").stdout)["rejected"]["code"] == "too_few_classes"  # every file is too large


def test_a_dry_run_decodes_and_sets_aside_what_is_no_sound_image(tmp_path: Path) -> None:
    path = made(tmp_path, "m.csv", "path,label\nimages/a.png,cat\nimages/b.png,dog\nimages/cut.png,dog\nempty.png,dog\n")
    write_tree(tmp_path, {"images/cut.png": png(7)[:-20], "empty.png": b""})
    told = dry_run("table", str(path), tmp_path, {})
    assert {item["name"]: item["code"] for item in told["quarantined"]} == {"images/cut.png": "image_truncated", "empty.png": "empty_file"}


def test_a_table_is_ingested_and_an_unchanged_one_adds_nothing(tmp_path: Path) -> None:
    path = made(tmp_path / "set", "m.csv", "path,label,split\nimages/a.png,cat,train\nimages/b.png,dog,train\nimages/c.png,dog,test\n")
    config = IngestConfig(source="table", location=str(path))
    ref = ingest(config, tmp_path)
    assert [(row.path, row.split) for row in iter_rows(ref)] == [("images/a.png", "train"), ("images/b.png", "train"), ("images/c.png", "test")]
    assert ingest(config, tmp_path) == ref


def test_the_plug_in_of_the_docs_works_from_outside_the_tree(tmp_path: Path) -> None:
    """The example of docs/sources.md, word for word, as an installed package that the command finds by its entry point."""
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    code, point = (page.split(f"```{language}\n")[1].split("```")[0] for language in ("python", "toml"))
    line = point.splitlines()[1].replace('"', "")
    site = write_tree(tmp_path / "site", {"lab_scans.py": code.encode()})
    about = b"Metadata-Version: 2.1\nName: lab-scans\nVersion: 1\n"
    write_tree(site / "lab_scans-1.dist-info", {"METADATA": about, "entry_points.txt": f"[trainyard.sources]\n{line}\n".encode()})
    write_tree(tmp_path / "scans", {"cat_1.png": png(1), "dog_1.png": png(2), "dog_2.bmp": png(3)})
    arguments = ("scans", "scans", "ending=.png")
    done = subprocess.run(
        [sys.executable, "-m", "tasks.sources", *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["classes"] == {"cat": 1, "dog": 1}


def test_every_built_in_kind_stands_in_the_docs() -> None:
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert {row.split("`")[1] for row in page.splitlines() if row.startswith("| `")} == set(BUILT_IN)
