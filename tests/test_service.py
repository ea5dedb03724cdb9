"""The served Bento over real HTTP: right answers, every refusal in one shape, no request of its own, metrics, no torch."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tiny_project import CLASSES, REPO, Running, make_project, picture, predict, serve_bento

from service.limits import STATUS, Guard, Refused
from tasks.backends import serving
from tasks.core.config import PackageConfig
from tasks.core.errors import CODES
from tasks.package import package

CONFIG = PackageConfig(max_request_bytes=2_000_000, max_batch=3, max_concurrency=6, timeout_s=8.0)
DATA = Path(os.environ.get("TRAINYARD_DATA", REPO.parent / "shared" / "data"))
BAD_INPUTS = DATA.parent / "badinputs"
CASES: list[dict[str, Any]] = []
if (BAD_INPUTS / "cases.json").is_file():
    listed = json.loads((BAD_INPUTS / "cases.json").read_text())["cases"]
    CASES = [case for case in listed if case.get("serve_status") and case["reader"] == "image"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("service")
    project = make_project(root)
    bento = package(project.model, project.report, project.decision, CONFIG, data_version=None, code=REPO, out=root)
    with serve_bento(bento, root) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as made:
        yield made


def refusal(response: httpx.Response) -> str:
    """The code of a refusal, after checking that it is one in the only shape there is."""
    error = response.json()["error"]
    assert error["reason"]
    assert "/" not in error["reason"].replace("multipart/form-data", ""), "a path in the message"
    assert response.headers["x-error-code"] == error["code"]
    assert STATUS[error["code"]] == response.status_code
    assert response.headers["content-type"] == "application/json"
    return str(error["code"])


def send(client: httpx.Client, data: bytes, name: str = "image.png") -> httpx.Response:
    return client.post("/classify", files={"image": (name, data)})


def test_the_answer_is_the_models_and_sorted(client: httpx.Client, server: Running) -> None:
    files = [picture(label, 4) for label in CLASSES]
    truth = predict(server.root / "artifacts" / "model" / "model.onnx", files)
    for data, row in zip(files, truth, strict=True):
        answer = send(client, data).raise_for_status().json()
        assert answer["label"] == CLASSES[int(row.argmax())] == answer["probabilities"][0]["label"]
        shares = [entry["probability"] for entry in answer["probabilities"]]
        assert shares == sorted(shares, reverse=True)
        served = {entry["label"]: entry["probability"] for entry in answer["probabilities"]}
        np.testing.assert_allclose([served[label] for label in CLASSES], row, atol=1e-6)
        assert answer["model"]["tag"] == server.tag


def test_a_batch_answers_in_order_as_one_by_one(client: httpx.Client) -> None:
    files = [picture("red", 2), picture("blue", 2), picture("red", 3)]
    batch = client.post("/classify_batch", files=[("images", (f"{index}.png", data)) for index, data in enumerate(files)]).raise_for_status().json()
    assert batch == [send(client, data).json() for data in files]


def test_provenance_walks_back_to_the_data(client: httpx.Client, server: Running) -> None:
    origin = client.get("/provenance").raise_for_status().json()
    project = json.loads((server.root / "data" / "dataset.json").read_text())
    assert origin["artifacts"]["DatasetRef"] == project["digest"]
    assert origin["model_digest"] == json.loads((server.root / "artifacts" / "model" / "model.json").read_text())["digest"]
    assert origin["tag"] == server.tag
    assert origin["accuracy"]["low"] < origin["accuracy"]["value"]


def test_the_probes_and_the_description_answer(client: httpx.Client) -> None:
    for path in ("/livez", "/readyz", "/healthz", "/docs.json", "/schema.json", "/metrics"):
        assert client.get(path).status_code == 200, path
    assert {"/classify", "/classify_batch"} <= set(client.get("/docs.json").json()["paths"])


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"files": {"image": ("a.png", b"")}}, "empty_file"),
        ({"files": {"image": ("a.png", b"GIF is what this is not")}}, "not_an_image"),
        ({"files": {"other": ("a.png", picture("red", 1))}}, "image_missing"),
        ({"data": {"image": "text"}, "files": {"x": b"y"}}, "image_missing"),
        ({}, "image_missing"),
        ({"json": {"image": "aGVsbG8="}}, "not_multipart"),
        ({"content": picture("red", 1), "headers": {"content-type": "image/png"}}, "not_multipart"),
        ({"content": b"x", "headers": {"content-type": "application/vnd.bentoml+pickle"}}, "not_multipart"),
        ({"content": b"no parts", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "bad_request"),
        ({"content": b"no boundary", "headers": {"content-type": "multipart/form-data"}}, "bad_request"),
        ({"files": [("image", ("a.png", picture("red", 1)))] * 2}, "too_many_images"),
        ({"files": [("image", ("a.png", picture("red", 1)))] * 9}, "too_many_images"),
        ({"files": {"image": ("a.png", picture("red", 1))}, "data": {f"f{index}": "x" for index in range(50)}}, "bad_request"),
    ],
)
def test_a_bad_request_is_refused_with_its_code(client: httpx.Client, request_: dict[str, Any], code: str) -> None:
    assert refusal(client.post("/classify", **request_)) == code


def test_a_batch_says_which_image_is_bad_and_how_many_are_allowed(client: httpx.Client) -> None:
    good, bad = ("images", ("a.png", picture("red", 1))), ("images", ("b.png", b"junk"))
    response = client.post("/classify_batch", files=[good, good, bad])
    assert refusal(response) == "not_an_image"
    assert response.json()["error"]["image"] == 2
    response = client.post("/classify_batch", files=[good] * (CONFIG.max_batch + 1))
    assert refusal(response) == "too_many_images"
    assert response.json()["error"]["limit"] == CONFIG.max_batch


def test_wrong_addresses_and_methods_have_the_same_shape(client: httpx.Client) -> None:
    assert refusal(client.get("/no/such")) == "not_found"
    response = client.get("/classify")
    assert refusal(response) == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_refused_by_its_declared_length(client: httpx.Client) -> None:
    """The refusal comes before the body is sent: a client that asks first need not send it."""
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), 10) as raw:
        head = "POST /classify HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        head += f"Content-Length: {CONFIG.max_request_bytes + 1}\r\n\r\n"
        raw.sendall(head.encode())
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
    assert refusal(send(client, b"x" * CONFIG.max_request_bytes)) == "request_too_large"


def test_a_body_over_the_limit_is_refused_while_it_streams(client: httpx.Client) -> None:
    """Chunked encoding declares no length: the bytes are counted."""

    def chunks() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 100_000
        yield b"\r\n--b--\r\n"

    response = client.post("/classify", content=chunks(), headers={"content-type": "multipart/form-data; boundary=b"})
    assert refusal(response) == "request_too_large"


def test_an_upload_that_never_ends_times_out_and_a_crowd_is_turned_away(client: httpx.Client) -> None:
    """Slow uploads hold their places; probes still answer, one more request does not wait, and the places come free."""
    head = b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000\r\n\r\n--b"

    def slowly() -> socket.socket:
        connection = socket.create_connection((client.base_url.host, client.base_url.port or 80), 20)
        connection.sendall(head)
        return connection

    slow = [slowly() for _ in range(CONFIG.max_concurrency)]
    try:
        deadline = time.monotonic() + 6
        while (response := send(client, picture("red", 1))).status_code == 200 and time.monotonic() < deadline:
            for turned_away in select.select(slow, [], [], 0.02)[0]:  # it came while our own request held a place
                turned_away.close()
                slow[slow.index(turned_away)] = slowly()
        assert refusal(response) == "too_many_requests"
        assert response.headers["retry-after"] == "1"
        assert client.get("/readyz").status_code == 200
        for connection in slow:
            assert b" 504 " in connection.recv(4096).split(b"\r\n")[0]
    finally:
        for connection in slow:
            connection.close()
    assert send(client, picture("red", 1)).status_code == 200


def test_a_text_in_place_of_a_file_is_never_fetched_as_a_url(client: httpx.Client) -> None:
    """BentoML's own reader takes it for a URL and fetches it, unless the address is private (server-side request forgery)."""
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(1.0)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/secret"

        def wait() -> None:
            try:
                trap.accept()[0].close()
                asked.set()
            except TimeoutError:
                pass

        watcher = threading.Thread(target=wait)
        watcher.start()
        codes = [
            refusal(client.post("/classify", data={"image": url}, files={"x": b"y"})),
            refusal(client.post("/classify", data={"image": url})),
            refusal(client.post("/classify", json={"image": url})),
            refusal(client.post("/classify_batch", json={"images": [url]})),
            refusal(client.post("/classify", content=url.encode(), headers={"content-type": "text/plain"})),
        ]
        watcher.join()
    assert codes == ["image_missing"] + ["not_multipart"] * 4, "seen to be no file before anything is done with it"
    assert not asked.is_set()


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    wanted = {case["entry"] for case in CASES}
    with tarfile.open(BAD_INPUTS / "tree.tar.gz") as tar:
        tar.extractall(folder, members=[member for member in tar if member.name.removeprefix("./") in wanted], filter="data")
    return folder


@pytest.mark.skipif(not CASES, reason=f"no {BAD_INPUTS}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_catalogued_image_is_answered_as_the_catalogue_says(client: httpx.Client, bad_inputs: Path, case: dict[str, Any]) -> None:
    path = bad_inputs / case["entry"]
    start = time.monotonic()
    response = send(client, path.read_bytes(), path.name)
    assert time.monotonic() - start < case["limits"].get("max_seconds", 10) + 1
    assert response.status_code == case["serve_status"], response.text
    if response.status_code != 200:
        assert refusal(response) == case["code"]


def test_metrics_count_answers_and_refusals(client: httpx.Client) -> None:
    def read() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line.startswith("trainyard_")]
        return {name: float(value) for name, value in lines}

    before = read()
    send(client, picture("green", 1))
    send(client, b"junk")
    client.get("/no/such")
    grown = {name: value - before.get(name, 0.0) for name, value in read().items() if value != before.get(name, 0.0)}
    assert grown['trainyard_answers_total{label="green"}'] == 1
    assert grown["trainyard_top_probability_count"] == 1
    assert grown['trainyard_refusals_total{code="not_an_image"}'] == 1
    assert grown['trainyard_refusals_total{code="not_found"}'] == 1


def test_the_page_allows_only_its_own_script(client: httpx.Client) -> None:
    response = client.get("/").raise_for_status()
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy
    assert response.headers["content-type"].startswith("text/html")
    assert not [word for word in ("https://", 'src="http', "@import") if word in response.text]


def test_bentomls_own_client_works(server: Running, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("red", 1))
    code = (
        "import bentoml, pathlib, sys\n"
        "with bentoml.SyncHTTPClient(sys.argv[1]) as client:\n"
        "    path = pathlib.Path(sys.argv[2])\n"
        "    print(client.classify(image=path)['label'], [one['label'] for one in client.classify_batch(images=[path, path])])\n"
    )
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    done = subprocess.run([sys.executable, "-c", code, server.url, str(tmp_path / "a.png")], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "red ['red', 'red']", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_service_has_no_torch_in_memory_and_runs_the_bentos_code(server: Running) -> None:
    processes = [process for group in serving.running(server.root).values() for process in group]
    assert len(processes) >= 2
    for process in processes:
        assert not [region.path for region in process.memory_maps() if "/torch/" in region.path]
    assert any(process.cwd().startswith(str(server.root.resolve() / ".trainyard" / "bentoml")) for process in processes)


def test_every_code_of_the_service_is_documented() -> None:
    shared = {"image_missing", "image_corrupt", "image_truncated", "image_too_large", "not_an_image", "unsupported_format", "empty_file"}
    assert shared <= set(STATUS)
    assert shared <= set(CODES)


def through_guard(app: Callable[..., Awaitable[None]]) -> tuple[int, dict[str, Any]]:
    """Status and body of a GET that ``app`` answers behind a Guard."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"12345678"}

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/x", "headers": []}
    asyncio.run(Guard(app, max_request_bytes=4, max_concurrency=1, timeout_s=5.0)(scope, receive, keep))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_bug_in_the_service_is_a_500_without_its_traceback() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("/secret/path")

    async def wordy(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Traceback: /secret", "more_body": True})
        await send({"type": "http.response.body", "body": b"/path"})

    for app in (broken, wordy):
        status, body = through_guard(app)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(body)


def test_a_reader_that_knows_nothing_of_the_limit_is_answered_for() -> None:
    async def greedy(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    assert through_guard(greedy)[0] == 413


def test_a_refusal_holds_no_more_than_its_code_reason_and_numbers() -> None:
    response = Refused("too_many_images", "at most 3", limit=3).response()
    assert json.loads(bytes(response.body)) == {"error": {"code": "too_many_images", "reason": "at most 3", "limit": 3}}
