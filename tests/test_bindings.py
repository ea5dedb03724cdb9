"""What the flow makes of its children's words: reasons, errors, retries; and that it never guesses that all is well."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from makers import tiny_model
from prefect import Task
from prefect.client.schemas.objects import TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.logging import disable_run_logger
from prefect.states import Failed

from flows import bindings
from flows.bindings import explain_status, failure_of, in_service, is_transient, outlasting
from tasks.core.artifacts import BentoRef, Endpoint
from tasks.core.config import DeployConfig
from tasks.core.errors import StageFailed
from tasks.core.process import spare_port


def test_reasons_in_words() -> None:
    status = {
        "validate": [{"changed deps": {"data": "modified", "tasks/core": "modified"}}],
        "train": [{"changed deps": {"params.yaml": {"train.lr": "modified", "train.epochs": "new"}, "artifacts/cache": "modified"}}],
        "evaluate": [{"changed outs": {"artifacts/evaluation/report.json": "deleted"}}],
        "package": ["changed command"],
        "data.dvc": [{"changed outs": {"data": "modified"}}],
    }
    assert explain_status(status) == [
        "changed code tasks/core",
        "changed command of package",
        "changed params train.epochs, train.lr",
        "new data",
        "no output of data.dvc yet",
        "no output of evaluate yet",
    ]
    assert explain_status({}) == []
    assert explain_status({"train": [{"changed deps": {"artifacts/training_set": "modified"}}]}) == ["train is behind artifacts/training_set"]


def test_the_stages_own_line_and_exit_code_come_through_dvc() -> None:
    lines = [
        "Running stage 'train':",
        "> python -m tasks.train",
        "error[loss_not_finite]: the loss is no number; got nan; must be finite; set train.lr",
        "ERROR: failed to reproduce 'train': failed to run: python -m tasks.train, exited with 2",
    ]
    failure = failure_of("train", 255, lines)
    assert str(failure) == lines[2]
    assert failure.exit_code == 2
    transient = failure_of("gate", 255, ["error[registry_unavailable]: away", "ERROR: ..., exited with 75"])
    assert transient.exit_code == 75


def test_a_bug_without_an_error_line_names_the_stage_and_its_last_words() -> None:
    failure = failure_of("train", 1, ["Traceback (most recent call last):", "KeyError: 'x'", ""])
    assert str(failure).startswith("error[stage_failed]: train ended with exit code 1; got \"KeyError: 'x'\"")
    assert "no output" in str(failure_of("train", -9, []))


def test_a_run_that_lost_a_race_in_dvcs_run_cache_is_retried() -> None:
    entry = f"/p/.dvc/cache/runs/2d/2d{'0' * 62}/.ytWerxCQC-wZLrR-frhMRQ.tmp"
    failure = failure_of("augment", 255, [f"ERROR: failed to reproduce 'augment': [Errno 2] No such file or directory: '{entry}'"])
    assert (failure.exit_code, str(failure).split(":")[0]) == (75, "error[lock_busy]")
    other = failure_of("augment", 255, ["ERROR: failed to reproduce 'augment': [Errno 2] No such file or directory: '/p/artifacts/cache/index.json'"])
    assert other.exit_code == 1


def test_a_busy_repository_is_retried_and_bad_input_is_not() -> None:
    busy = failure_of("train", 255, ["ERROR: Unable to acquire lock. Most likely another DVC process is running"])
    task, run = Task(lambda: None), TaskRun(task_key="t", dynamic_key="0")
    for error, expected in ((busy, True), (StageFailed("x", 75), True), (StageFailed("x", 2), False), (ValueError("bug"), False)):
        assert is_transient(task, run, Failed(data=error)) is expected


@contextmanager
def answering(body: Any) -> Iterator[str]:
    """An HTTP server that answers every GET with ``body`` as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("served", "expected"), [({"tag": "c:1"}, True), ({"tag": "c:2"}, False), ({}, False), ([], False)])
def test_in_service_means_that_exactly_this_bento_answers(tmp_path: Path, served: Any, expected: bool) -> None:
    with answering(served) as url:
        model = tiny_model(tmp_path)
        endpoint = Endpoint(url=url, tag="c:1", model_digest=model.digest, model_version="1", smoke_images=1, max_probability_difference=0.1)
        here = DeployConfig(port=int(url.rsplit(":", 1)[1]))
        assert not in_service(tmp_path, here)
        endpoint.save(tmp_path)
        assert not in_service(tmp_path, here)
        bento = BentoRef(tag="c:1", model_digest=model.digest, service_digest="s").save(tmp_path)
        assert in_service(tmp_path, here) is expected
        assert not in_service(tmp_path, DeployConfig(port=1))
        bento.model_copy(update={"tag": "c:9"}).save(tmp_path)
        assert not in_service(tmp_path, here)
        bento.save(tmp_path)
        endpoint.model_copy(update={"model_digest": "0" * 64}).save(tmp_path)
        assert not in_service(tmp_path, here)
    endpoint.save(tmp_path)
    assert not in_service(tmp_path, here)


@pytest.mark.parametrize("wrapped", [False, True], ids=["refused", "refused a slot"])
def test_a_server_that_refuses_connections_for_a_while_is_waited_for(wrapped: bool) -> None:
    """A real port on which nobody listens at first."""
    port = spare_port()

    def ask() -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/", timeout=5).status_code
        except httpx.ConnectError as error:
            if not wrapped:
                raise
            raise ConcurrencySlotAcquisitionError("no slot") from error

    class Late(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    def listen() -> None:
        time.sleep(1.5)
        with HTTPServer(("127.0.0.1", port), Late) as server:
            server.handle_request()

    thread = threading.Thread(target=listen)
    thread.start()
    with disable_run_logger():
        assert outlasting(ask) == 204
    thread.join()


def test_a_server_that_stays_away_or_says_no_is_no_longer_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "AWAY_S", 2.0)
    port = spare_port()
    start = time.monotonic()
    with disable_run_logger(), pytest.raises(httpx.ConnectError):
        outlasting(lambda: httpx.get(f"http://127.0.0.1:{port}/", timeout=5))
    assert time.monotonic() - start >= 0.5

    def refused() -> None:
        raise ConcurrencySlotAcquisitionError("no such limit") from ValueError("422")

    with disable_run_logger(), pytest.raises(ConcurrencySlotAcquisitionError):
        outlasting(refused)
