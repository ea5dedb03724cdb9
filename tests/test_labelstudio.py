"""Label Studio: exports of one or several people's choices, and the way of an image from a run to a person and back as a label layer."""

from __future__ import annotations

import base64
import io
import json
import xml.etree.ElementTree as ElementTree
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Project
from PIL import Image
from source_trees import from_folder, labels_of, pictures, png, write_tree

from tasks.core.artifacts import DatasetRef, EvaluationReport, SetAside, TrainedModel
from tasks.core.config import IngestConfig
from tasks.core.errors import BadInput
from tasks.images.decode import load_pixels
from tasks.images.shards import find_rows, iter_rows
from tasks.ingest import ingest
from tasks.sources import Item, fingerprint_of, open_source
from tasks.sources.review import configuration
from tasks.training.predict import predict


def answer(*choices: str, control: str = "class", cancelled: bool = False) -> dict[str, Any]:
    result = [{"type": "choices", "from_name": control, "to_name": "image", "value": {"choices": list(choices)}}] if choices else []
    return {"was_cancelled": cancelled, "result": [*result, {"type": "rectanglelabels", "value": {"rectanglelabels": ["box"]}}]}


def embedded(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def task(image: Any, *answers: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {"id": 1, "data": {"image": image, **data}, "annotations": list(answers)}


def read(root: Path, tasks: Any, **options: Any) -> tuple[list[Item], dict[str, str]]:
    write_tree(root, {"export.json": tasks if isinstance(tasks, bytes) else json.dumps(tasks).encode()})
    found = list(open_source("labelstudio", "export.json", root, options=options).items)
    return [item for item in found if isinstance(item, Item)], {item.name: item.code for item in found if isinstance(item, SetAside)}


def test_what_most_people_chose_is_the_class(tmp_path: Path) -> None:
    write_tree(tmp_path, {f"photos/{number}.png": png(number) for number in range(9)} | {"up load.png": png(50)})
    local = "/data/local-files/?d=photos/"
    tasks = [
        task(f"{local}0.png", answer("cat"), answer("dog"), answer("cat")),
        task("/data/upload/up%20load.png", answer("dog"), answer("cat", cancelled=True)),
        task("photos/2.png", answer("dog")),
        task(embedded(png(60)), answer("cat"), name="seen/60.png"),
        task(f"{local}3.png", answer("cat"), answer("dog")),
        task(f"{local}4.png", answer("cat", "dog")),
        task(f"{local}5.png"),
        task(f"{local}6.png", answer()),
        task(f"{local}../../etc/passwd", answer("cat")),
        task("https://x.test/7.png?sig=secret", answer("cat")),
        {**task(None, answer("cat")), "id": 41},
        {**task("data:image/png;base64,%%%", answer("cat")), "id": 42},
    ]
    items, aside = read(tmp_path, tasks)
    assert [(item.name, item.label, item.data) for item in items] == [
        ("photos/0.png", "cat", png(0)),
        ("up load.png", "dog", png(50)),
        ("photos/2.png", "dog", png(2)),
        ("seen/60.png", "cat", png(60)),
    ]
    (signed,) = (name for name in aside if name.startswith("https://"))
    assert "secret" not in signed
    assert {name: code for name, code in aside.items() if name != signed} == {
        "photos/3.png": "conflicting_label",
        "photos/4.png": "conflicting_label",
        "photos/5.png": "missing_label",
        "photos/6.png": "missing_label",
        "photos/../../etc/passwd": "path_outside_root",
        "task 41": "bad_row",
        "task 42": "bad_row",
    }
    assert aside[signed] == "url_not_allowed"


def test_which_choices_are_the_class_is_told_or_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.png": png(1)})
    both = {**answer("cat"), "result": [*answer("cat")["result"], *answer("good", control="quality")["result"]]}
    tasks = [task("a.png", both)]
    assert [item.label for item in read(tmp_path, tasks, choices="quality")[0]] == ["good"]
    for options in ({}, {"choices": "kind"}):
        with pytest.raises(BadInput, match=r"class, quality.*ingest\.options\.choices"):
            read(tmp_path, tasks, **options)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "manifest_corrupt"),
        (b'{"a": 1}', "manifest_corrupt"),
        (b'[{"image": "a.png", "choice": "cat"}]', "manifest_corrupt"),
        (b"[]", "empty_manifest"),
        (b"\xff\xfe[]", "manifest_corrupt"),
    ],
)
def test_exports_that_are_none_are_refused_in_a_line(data: bytes, code: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, data)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_answers_become_a_layer_that_the_first_source_does_not_undo(tmp_path: Path) -> None:
    files = pictures(cat=3, dog=3)
    first = from_folder(write_tree(tmp_path / "source", files))
    before = ingest(first, tmp_path)
    wrong = files["cat/0001.png"]
    write_tree(tmp_path, {"answers.json": json.dumps([task(embedded(wrong), answer("dog"), name="cat/0001.png")]).encode()})
    answers = IngestConfig(source="labelstudio", location="answers.json")
    reviewed = ingest(answers, tmp_path)
    assert reviewed.counts == {"cat": 2, "dog": 4}
    assert reviewed.shards == before.shards, "no image is stored again"
    assert [layer.source for layer in reviewed.layers] == ["labelstudio"]
    assert labels_of(reviewed)["cat/0001.png"] == "dog"
    assert ingest(first, tmp_path).digest == reviewed.digest, "the folder's word does not undo a person's"
    write_tree(tmp_path / "source", {"cat/new.png": png(900)})
    assert ingest(first, tmp_path).counts == {"cat": 3, "dog": 4}
    write_tree(tmp_path, {"answers.json": json.dumps([task(embedded(wrong), answer("cat"), name="cat/0001.png")]).encode()})
    assert ingest(answers, tmp_path).counts == {"cat": 4, "dog": 3}, "a person may change their mind"
    assert fingerprint_of("labelstudio", "answers.json", tmp_path)


def test_the_configuration_holds_any_class_name() -> None:
    names = ("cat", 'a "quoted" <one>', "Ærø & co")
    found = ElementTree.fromstring(configuration(names))
    assert [choice.get("value") for choice in found.iter("Choice")] == list(names)


@pytest.mark.slow
def test_the_least_sure_test_images_of_a_run_go_out_and_come_back(finished: Project, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    said = finished.run("python", "-m", "tasks.sources.review", "--count", "5", "--out", str(out))
    assert said.stdout.startswith("review: 5 images")
    tasks = json.loads(out.read_bytes())
    scores = [one["predictions"][0]["score"] for one in tasks]
    assert scores == sorted(scores)
    assert max(scores) < 0.9
    ref, report = DatasetRef.load(finished.root), EvaluationReport.load(finished.root)
    rows = find_rows(ref, [one["data"]["sha256"] for one in tasks])
    assert len(rows) == 5
    assert {one["predictions"][0]["model_version"] for one in tasks} == {report.digest[:12]}
    for one in tasks:
        one["annotations"] = [answer(one["data"]["label"])]
    items, aside = read(tmp_path, tasks)
    assert not aside
    assert sorted(item.data for item in items) == sorted(row.data for row in rows.values())
    assert out.with_suffix(".xml").is_file()
    refused = finished.run("python", "-m", "tasks.sources.review", "--count", "0", check=False)
    assert refused.returncode == 2
    assert "error[unknown_option]" in refused.stderr


@pytest.mark.slow
def test_the_least_sure_of_a_pool_go_out_and_come_back_as_new_images(finished: Project, tmp_path: Path) -> None:
    """Digits turned by some degrees are new; copies of known ones, links, hidden files and what is no image are not asked about."""
    ref = DatasetRef.load(finished.root)
    rows = list(islice(iter_rows(ref), 300))
    pool: dict[str, bytes] = {}
    for number, row in enumerate(rows):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(row.data)).rotate(number % 90).save(buffer, "PNG", pnginfo=None)
        pool[f"day {number // 100}/{number:04d}.png"] = buffer.getvalue()
    extra = {"known.png": rows[0].data, "twice.png": pool["day 1/0150.png"], ".hidden.png": png(1), "note.txt": b"no image", "cut.png": png(2)[:40]}
    folder = write_tree(tmp_path / "pool", {**pool, **extra})
    (folder / "link.png").symlink_to(folder / "known.png")
    out = tmp_path / "out.json"
    said = finished.run("python", "-m", "tasks.sources.review", "--pool", str(folder), "--count", "7", "--out", str(out))
    assert said.stdout.startswith("review: 7 images of ")
    assert "; 2 passed over (image_truncated 1, not_an_image 1)" in said.stdout
    tasks = json.loads(out.read_bytes())
    model = TrainedModel.load(finished.root)
    known = {row.sha256 for row in iter_rows(ref)}
    fresh = {name: data for name, data in pool.items() if sha256(data).hexdigest() not in known}
    assert len(fresh) > 250
    answers = predict(model.path("model.onnx"), np.stack([load_pixels(data, model.decode) for data in fresh.values()]), 64)
    sure = dict(zip(fresh, answers.max(axis=1).tolist(), strict=True))
    expected = sorted(fresh, key=sure.__getitem__)[:7]
    assert {one["data"]["name"] for one in tasks} == set(expected)
    assert [one["predictions"][0]["score"] for one in tasks] == pytest.approx([sure[name] for name in expected], abs=1e-5)
    assert all("label" not in one["data"] for one in tasks)
    for one in tasks:
        one["annotations"] = [answer("3")]
    items, aside = read(tmp_path / "back", tasks)
    assert not aside
    assert {item.name: item.data for item in items} == {name: pool[name] for name in expected}
    write_tree(tmp_path / "project", {"answers.json": json.dumps(tasks).encode()})
    first = ingest(from_folder(write_tree(tmp_path / "source", pictures(cat=3, dog=3))), tmp_path / "project")
    grown = ingest(IngestConfig(source="labelstudio", location="answers.json"), tmp_path / "project")
    assert grown.counts == {**first.counts, "3": 7}
    refused = finished.run("python", "-m", "tasks.sources.review", "--pool", str(folder / "known.png"), check=False)
    assert (refused.returncode, refused.stderr.splitlines()[-1][:26]) == (2, "error[source_unavailable]:")
