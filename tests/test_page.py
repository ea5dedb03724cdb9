"""The page at /, driven in a real headless Chromium over its DevTools protocol: choose an image, read the bars.

Skipped where no Chromium or Chrome is installed (`apt-get install chromium`).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_project import CLASSES, REPO, Running, make_project, picture, predict, serve_bento

from tasks.core.config import PackageConfig
from tasks.core.process import spare_port
from tasks.package import package

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""
pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome on PATH")


class Page:
    """One tab of a headless browser, spoken to over the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that come before its answer are kept in ``events``."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=20))
            if message.get("id") == self.number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 10.0) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never became true: {script}\n{self.value('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Go to ``url`` and wait until it has loaded with its facts."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !document.getElementById('facts').hidden")

    def choose(self, file: Path) -> None:
        """Put a file into the page's file field, as the chooser would."""
        node = self.call("DOM.querySelector", nodeId=self.call("DOM.getDocument")["root"]["nodeId"], selector="#file")
        self.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(file)])

    def shot(self, path: Path) -> None:
        """A screenshot, for people."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("page")
    project = make_project(root)
    bento = package(project.model, project.report, project.decision, PackageConfig(), data_version="a" * 32 + ".dir", code=REPO, out=root)
    with serve_bento(bento, root) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from websockets.sync.client import connect

    port, profile = spare_port(), tmp_path_factory.mktemp("profile")
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={profile}", f"--remote-debugging-port={port}", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with connect(_tab(port), max_size=None, proxy=None) as socket:
            tab = Page(socket)
            for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
                tab.call(f"{domain}.enable")
            yield tab
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def _tab(port: int) -> str:
    """The websocket address of the browser's first tab."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 60
    while True:
        try:
            with opener.open(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                return str(next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page"))
        except (OSError, StopIteration):
            assert time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.1)


def bars(page: Page) -> list[tuple[str, str]]:
    cell = "row.querySelector('.{}').textContent"
    rows = page.value(f"[...document.querySelectorAll('#bars li')].map(row => [{cell.format('name')}, {cell.format('share')}])")
    return [(name, share) for name, share in rows]


def test_an_image_becomes_bars_with_the_models_percentages(page: Page, server: Running, tmp_path: Path) -> None:
    file = tmp_path / "a red one.png"
    file.write_bytes(picture("red", 3))
    page.open(server.url)
    page.choose(file)
    page.wait("!document.getElementById('answer').hidden")
    truth = predict(server.root / "artifacts" / "model" / "model.onnx", [file.read_bytes()])[0]
    expected = sorted(zip(CLASSES, truth, strict=True), key=lambda pair: -pair[1])
    assert bars(page) == [(label, f"{100 * share:.1f}\u00a0%") for label, share in expected]
    assert page.value("document.getElementById('winner').textContent") == "red"
    width = "document.querySelector('#bars .{}').getBoundingClientRect().width"
    page.wait(f"{width.format('fill')} > 0.9 * {width.format('track')}")
    assert page.value("document.getElementById('preview').naturalWidth") == 12


def test_the_page_says_what_answers_and_how_good_it_is(page: Page, server: Running) -> None:
    page.open(server.url)
    facts = page.value("document.getElementById('facts').innerText")
    assert server.tag in facts
    assert "100.0 % on 24 test images (86.2 % to 100.0 % with 95 % confidence)".replace(" %", "\u00a0%") in facts
    assert "a" * 12 in facts
    assert "blue, green, red" in page.value("document.getElementById('scope').textContent")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "This file is empty."),
        (b"<html>not found</html>", "This file is not an image."),
        (picture("red", 1)[:60], "This image is cut off before its end."),
        (b"\xff" * 16_800_000, "This file is too large."),
    ],
    ids=["empty", "text", "truncated", "large"],
)
def test_a_refusal_is_told_in_words_and_the_next_image_works(page: Page, server: Running, tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "bad.png"
    file.write_bytes(content)
    page.open(server.url)
    page.choose(file)
    page.wait("!document.getElementById('error').hidden")
    assert page.value("document.getElementById('error-title').textContent") == told
    assert len(page.value("document.getElementById('error-reason').textContent")) > 10
    file.write_bytes(picture("blue", 1))
    page.choose(file)
    page.wait("!document.getElementById('answer').hidden")
    assert page.value("document.getElementById('error').hidden")
    assert bars(page)[0][0] == "blue"


def test_an_image_can_be_dropped_and_pasted(page: Page, server: Running) -> None:
    page.open(server.url)
    encoded = base64.b64encode(picture("green", 2)).decode()
    carry = f"""(() => {{
      const bytes = Uint8Array.from(atob("{encoded}"), (c) => c.charCodeAt(0));
      const data = new DataTransfer();
      data.items.add(new File([bytes], "green.png", {{ type: "image/png" }}));
      return data;
    }})()"""
    page.value(f"void window.dispatchEvent(new DragEvent('drop', {{ dataTransfer: {carry}, cancelable: true }}))")
    page.wait("document.getElementById('winner').textContent === 'green'")
    page.open(server.url)
    page.value(f"void window.dispatchEvent(new ClipboardEvent('paste', {{ clipboardData: {carry} }}))")
    page.wait("document.getElementById('winner').textContent === 'green'")


def test_the_keyboard_reaches_the_chooser_and_everything_has_a_name(page: Page, server: Running) -> None:
    page.open(server.url)
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert page.value("document.activeElement.id") == "file"
    assert page.value("document.activeElement.labels[0].innerText").startswith("Choose an image")
    assert page.value("getComputedStyle(document.getElementById('drop')).outlineStyle") == "solid"
    assert page.value("document.getElementById('result').getAttribute('aria-live')") == "polite"
    assert page.value("document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_in_both_colour_schemes(page: Page, server: Running, tmp_path: Path, scheme: str) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        page.open(server.url)
        file = tmp_path / "x.png"
        file.write_bytes(picture("red", 1))
        page.choose(file)
        page.wait("!document.getElementById('answer').hidden")
        assert page.value("document.documentElement.scrollWidth") <= 360
        red, green, blue = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red + green + blue > 384) == (scheme == "light")
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
        page.call("Emulation.setEmulatedMedia", features=[])


def test_nothing_is_loaded_from_elsewhere_and_nothing_breaks_the_policy(page: Page, server: Running) -> None:
    page.events.clear()
    page.open(server.url)
    page.value("new Promise((done) => setTimeout(done, 200))")
    urls = [event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
    assert urls
    assert all(url.startswith((server.url, "data:", "blob:")) for url in urls), urls
    complaints = [event for event in page.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert not complaints
    page.value("(() => { const s = document.createElement('script'); s.textContent = 'window.ran = true'; document.body.append(s); })()")
    assert not page.value("Boolean(window.ran)")
