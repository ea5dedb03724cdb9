"""tasks.sources.web against real servers on loopback: what is refused, what is retried, and that a body is whole or absent."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import socket
import ssl
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tasks.core.config import check_options
from tasks.core.errors import BadInput, TrainyardError, Transient
from tasks.sources.web import WebPolicy, download, fetch, masked, may_ask, refused

CATALOGUE = Path(os.environ.get("TRAINYARD_BADINPUTS", Path(__file__).parents[2] / "shared" / "badinputs"))
BODY = bytes(range(256)) * 8192
"""2 MiB."""

pytestmark = pytest.mark.timeout(60)


class Step(NamedTuple):
    """One answer: ``drip`` bytes of the body at a time with ``pause_s`` between them, ``cut`` of them in all."""

    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""
    cut: int | None = None
    drip: int = 1 << 30
    pause_s: float = 0.0


class Server(NamedTuple):
    url: str
    port: int
    asked: list[tuple[str, dict[str, str]]]


Answer = Callable[[str, dict[str, str], int], Step]


@contextmanager
def serving(answer: Answer | list[Step], context: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server that answers the nth request by ``answer(path, headers, n)``, or with the nth step, the last one for ever."""
    asked: list[tuple[str, dict[str, str]]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, dict(self.headers)))
            number = len(asked) - 1
            step = answer[min(number, len(answer) - 1)] if isinstance(answer, list) else answer(self.path, dict(self.headers), number)
            self.send_response(step.status)
            for name, value in {"Content-Length": str(len(step.body)), **step.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            body = step.body[: step.cut]
            try:
                for start in range(0, len(body), step.drip):
                    self.wfile.write(body[start : start + step.drip])
                    if over.wait(step.pause_s):
                        return
            except OSError:
                pass

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        port = int(server.server_address[1])
        yield Server(f"http{'s' if context else ''}://127.0.0.1:{port}", port, asked)
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def policy(**given: Any) -> WebPolicy:
    return WebPolicy(**{"schemes": ["http", "https"], "allow_private": True, "backoff_s": 0.01, "retries": 2, "timeout_s": 10.0, **given})


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(TrainyardError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return caught.value.code


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:4700::1111", True, True),
        ("::ffff:93.184.216.34", True, True),
        ("64:ff9b::5db8:d822", True, True),
        ("10.1.2.3", False, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("fd00::1", False, True),
        ("100.64.0.1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("64:ff9b::a00:1", False, True),
        ("2002:a00:1::", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:a9fe:a9fe::", False, False),
        ("::169.254.169.254", False, False),
        ("fe80::1", False, False),
        ("fe80::1%eth0", False, False),
        ("224.0.0.1", False, False),
        ("ff02::1", False, False),
        ("240.0.0.1", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
    ],
)
def test_addresses(address: str, public: bool, private: bool) -> None:
    assert may_ask(address) is public
    assert may_ask(address, private=True) is private


@pytest.mark.parametrize(
    ("url", "given", "word"),
    [
        ("http://example.org/a", {}, "scheme http"),
        ("file:///etc/passwd", {}, "cannot be read"),
        ("ftp://example.org/a", {}, "scheme ftp"),
        ("https://me:pass@example.org/a", {}, "user or password"),
        ("https://127.0.0.1/a", {}, "127.0.0.1"),
        ("https://[::ffff:10.0.0.1]/a", {}, "::ffff"),
        ("https://other.org/a", {"hosts": ["example.org"]}, "other.org"),
        ("https://example.org.evil.com/a", {"hosts": ["*.example.org"]}, "evil.com"),
        ("https://example.org:99999/", {}, "cannot be read"),
        ("https://exa mple.org/", {}, "cannot be read"),
        ("https://example.org\\@evil.com/", {}, "cannot be read"),
    ],
)
def test_refused_by_the_text_alone(url: str, given: dict[str, Any], word: str) -> None:
    assert word in refused(url, WebPolicy(**given))


def test_allowed_by_the_text() -> None:
    assert refused("https://example.org/a?b=c", WebPolicy()) == ""
    assert refused("https://IMG.example.org./a", WebPolicy(hosts=["*.Example.org"])) == ""


def test_messages_mask_user_query_and_fragment() -> None:
    assert masked("https://me:pass@example.org/a.png?token=abc#frag") == "https://***@example.org/a.png?***"
    for url in ("https://me:sesame@example.org/a?key=sesame", "gopher://example.org/?sesame"):
        with pytest.raises(BadInput) as caught:
            fetch(url, WebPolicy())
        assert caught.value.code == "url_not_allowed"
        assert "sesame" not in str(caught.value)


def test_a_body_comes_whole_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving([Step(body=BODY)]) as server:
        assert fetch(f"{server.url}/a b.png".replace(" ", "%20"), policy()) == BODY
        assert server.asked[0][1]["Accept-Encoding"] == "identity"
        assert server.asked[0][1]["Host"] == f"127.0.0.1:{server.port}"


def test_the_address_that_was_checked_is_the_one_connected_to() -> None:
    """A name that resolves to something else each time (DNS rebinding) is looked up once for each request."""
    asked: list[str] = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    with serving([Step(body=b"x")]) as server:
        url = f"http://pictures.test:{server.port}/a"
        assert fetch(url, policy(), resolver=rebinding) == b"x"
        assert asked == ["pictures.test"]
        assert server.asked[0][1]["Host"] == f"pictures.test:{server.port}"
        assert code_of(lambda: fetch(url, policy(), resolver=rebinding)) == "url_not_allowed"
        assert code_of(lambda: fetch(url, policy(allow_private=False), resolver=lambda *_: ["93.184.216.34", "127.0.0.1"])) == "url_not_allowed"
        assert len(server.asked) == 1


def test_a_name_that_is_not_there() -> None:
    def nowhere(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert code_of(lambda: fetch("https://nowhere.test/a", policy(), resolver=nowhere)) == "source_unavailable"


@pytest.mark.parametrize("target", ["http://169.254.169.254/latest/", "//[fe80::1]/", "file:///etc/passwd", "http://0x7f000001.evil.test/"])
def test_each_redirect_is_checked_again(target: str) -> None:
    with serving([Step(302, {"Location": target})]) as server:
        given = policy(hosts=["127.0.0.1", "169.254.169.254", "fe80::1"])
        assert code_of(lambda: fetch(f"{server.url}/a", given)) == "url_not_allowed"
        assert len(server.asked) == 1


def test_redirects_are_followed_and_bounded() -> None:
    with serving(lambda path, _headers, _n: Step(body=b"end") if path == "/b/c" else Step(301, {"Location": "b/c"})) as server:
        assert fetch(f"{server.url}/a", policy()) == b"end"
    with serving([Step(302, {"Location": "/again"})]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy(max_redirects=3))) == "download_failed"
        assert len(server.asked) == 4


def test_secrets_come_from_the_environment_and_go_to_the_first_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICTURES_TOKEN", "Bearer sesame")
    given = policy(hosts=["127.0.0.1"], headers={"Authorization": "env:PICTURES_TOKEN", "Accept": "image/png"})
    assert "sesame" not in repr(given)
    with serving([Step(body=b"x")]) as other, serving([Step(302, {"Location": f"{other.url}/x"})]) as server:
        assert fetch(f"{server.url}/a", given) == b"x"
        assert server.asked[0][1]["Authorization"] == "Bearer sesame"
        assert server.asked[0][1]["Accept"] == "image/png"
        assert "Authorization" not in other.asked[0][1]
    with pytest.raises(BadInput, match="https, it is secret"):
        fetch("http://127.0.0.1:1/a", given, resolver=lambda *_: ["10.0.0.1"])
    for value in ("", "two\nlines sesame"):
        monkeypatch.setenv("PICTURES_TOKEN", value)
        with pytest.raises(BadInput, match="PICTURES_TOKEN") as caught:
            fetch("http://127.0.0.1:1/a", given)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer sesame"}, {"X-Api-Key": "sesame"}, {"Host": "sesame"}, {"a b": "sesame"}, {"Accept": "a\r\nsesame: b"}]
)
def test_a_secret_in_params_is_refused_unshown(headers: dict[str, str]) -> None:
    with pytest.raises(BadInput) as caught:
        check_options(WebPolicy, {"hosts": ["example.org"], "headers": headers}, "ingest.options.web")
    assert caught.value.code == "params_invalid"
    assert "sesame" not in str(caught.value)


def test_headers_need_hosts() -> None:
    with pytest.raises(BadInput, match="headers without hosts"):
        check_options(WebPolicy, {"headers": {"Authorization": "env:T"}}, "ingest.options.web")


def test_a_short_body_is_tried_again_and_never_taken() -> None:
    with serving([Step(body=BODY, cut=1000)]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy())) == "download_truncated"
        assert len(server.asked) == 3
    with serving([Step(body=BODY, cut=1000), Step(body=BODY)]) as server:
        assert fetch(f"{server.url}/a", policy()) == BODY


def test_a_slow_body_ends_by_the_total_time() -> None:
    with serving([Step(body=BODY, drip=1, pause_s=0.05)]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy(timeout_s=0.4, retries=1))) == "download_timeout"
        assert len(server.asked) == 2


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
        assert code_of(lambda: fetch(url, policy(timeout_s=0.3, retries=0))) == "download_timeout"
    assert code_of(lambda: fetch(url, policy())) == "source_unavailable"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(status: int) -> None:
    with serving([Step(status, {"Retry-After": "0"}), Step(body=b"x")]) as server:
        assert fetch(f"{server.url}/a", policy()) == b"x"
    with serving([Step(status)]) as server:
        with pytest.raises(Transient) as caught:
            fetch(f"{server.url}/a?key=sesame", policy())
        assert caught.value.code == "source_unavailable"
        assert str(status) in str(caught.value)
        assert "sesame" not in str(caught.value)
        assert len(server.asked) == 3


def test_retry_after_is_waited_for_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with serving([Step(429, {"Retry-After": "7"}), Step(503, {"Retry-After": "9999"}), Step(body=b"x")]) as server:
        assert fetch(f"{server.url}/a", policy()) == b"x"
    assert [seconds for seconds in waited if seconds >= 1] == [7, 30]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_no_is_no(status: int) -> None:
    with serving([Step(status, body=b"no")]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy())) == "download_failed"
        assert len(server.asked) == 1


def test_sizes_are_bounded_told_or_not() -> None:
    with serving([Step(body=BODY)]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy(max_bytes=1000))) == "download_too_large"
        assert code_of(lambda: fetch(f"{server.url}/a", policy(), max_bytes=1000)) == "download_too_large"
    bomb = gzip.compress(bytes(32 << 20))
    with serving([Step(200, {"Content-Encoding": "gzip"}, bomb)]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy(max_bytes=1 << 20))) == "download_too_large"
        assert code_of(lambda: fetch(f"{server.url}/a", policy(max_bytes=len(bomb)))) == "download_too_large"
    with serving([Step(200, {"Content-Encoding": "gzip"}, gzip.compress(BODY)), Step(200, {"Content-Encoding": "br"}, b"x")]) as server:
        assert fetch(f"{server.url}/a", policy()) == BODY
        assert code_of(lambda: fetch(f"{server.url}/a", policy())) == "download_failed"
    packed = gzip.compress(BODY)
    with serving([Step(200, {"Content-Encoding": "gzip"}, packed[: len(packed) // 2])]) as server:
        assert code_of(lambda: fetch(f"{server.url}/a", policy())) == "download_truncated"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of pictures.test, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    name = ["-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out", str(cert), *name]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_keeps_the_name_and_verifies_it(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    names: list[str | None] = []
    context.sni_callback = lambda _sock, name, _context: names.append(name)
    with serving([Step(body=BODY), Step(302, {"Location": "http://pictures.test/"})], context) as server:
        url = f"https://pictures.test:{server.port}/a"

        def loopback(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        assert code_of(lambda: fetch(url, policy(), resolver=loopback)) == "download_failed"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert fetch(url, policy(), resolver=loopback) == BODY
        assert names[-1] == "pictures.test"
        assert code_of(lambda: fetch(url.replace("pictures", "other"), policy(), resolver=loopback)) == "download_failed"
        with pytest.raises(BadInput, match="from https to http"):
            fetch(url, policy(), resolver=loopback)


def ranged(path: str, headers: dict[str, str], number: int) -> Step:
    """Cut at the first request; then as RFC 9110 says of Range and If-Range."""
    start = int(headers["Range"].removeprefix("bytes=").removesuffix("-")) if "Range" in headers else 0
    if not start or headers.get("If-Range") != '"v1"':
        return Step(200, {"ETag": '"v1"'}, BODY, cut=700_000 if number == 0 else None)
    return Step(206, {"ETag": '"v1"', "Content-Range": f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"}, BODY[start:])


def test_a_download_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    target, digest = tmp_path / "all.zip", hashlib.sha256(BODY).hexdigest()
    with serving(ranged) as server:
        assert code_of(lambda: download(f"{server.url}/a", policy(retries=0), target)) == "download_truncated"
        assert not target.exists()
        assert download(f"{server.url}/a", policy(), target, digest) == target
        assert server.asked[1][1]["Range"] == "bytes=700000-"
    assert target.read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["all.zip"]


def test_a_download_begins_anew_where_the_file_is_another_now(tmp_path: Path) -> None:
    target = tmp_path / "all.zip"
    old, new = Step(200, {"ETag": '"old"'}, b"o" * 5000, cut=3000), Step(200, {"ETag": '"new"'}, b"n" * 4000)
    with serving([old, new]) as server:
        download(f"{server.url}/a", policy(), target)
        assert server.asked[1][1]["If-Range"] == '"old"'
    assert target.read_bytes() == b"n" * 4000
    lying = Step(206, {"ETag": '"old"', "Content-Range": "bytes 0-4999/5000"}, b"o" * 5000)
    with serving([old, lying, new]) as server:
        download(f"{server.url}/a", policy(), target)
        assert "Range" not in server.asked[2][1]
    assert target.read_bytes() == b"n" * 4000


def test_a_download_that_fails_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "all.zip"
    target.write_bytes(b"former")
    with serving([Step(body=BODY)]) as server:
        assert code_of(lambda: download(f"{server.url}/a", policy(), target, "0" * 64)) == "download_failed"
        assert code_of(lambda: download(f"{server.url}/a", policy(), target, max_bytes=1000)) == "download_too_large"
    with serving([Step(body=BODY, cut=1000)]) as server:
        assert code_of(lambda: download(f"{server.url}/a", policy(), target)) == "download_truncated"
    with serving([Step(404)]) as server:
        assert code_of(lambda: download(f"{server.url}/a", policy(), target)) == "download_failed"
    assert target.read_bytes() == b"former"
    assert [path.name for path in tmp_path.iterdir()] == ["all.zip"]


def cases() -> list[dict[str, Any]]:
    if not (CATALOGUE / "cases.json").is_file():
        return []
    return [case for case in json.loads((CATALOGUE / "cases.json").read_text(encoding="utf-8"))["cases"] if case["reader"] == "http"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases()])
def test_case_of_the_catalogue(case: dict[str, Any]) -> None:
    """The bytes' own verdict (not_an_image) is decode's; all others are fetch's."""
    with tarfile.open(CATALOGUE / "tree.tar.gz", errors="surrogateescape") as archive:
        held = archive.extractfile(case["entry"])
        assert held is not None
        script = json.load(held)["steps"]
    steps = []
    for step in script:
        body, pause = base64.b64decode(step["body_b64"]), float(step.get("seconds_per_byte", 0))
        steps.append(Step(step["status"], step["headers"], body, step.get("close_after_bytes"), 1 if pause else 1 << 30, pause))
    given = policy(max_bytes=1 << 20, timeout_s=2.0, retries=1)
    with serving(steps) as server:
        if case["behaviour"] == "accept" or case["code"] == "not_an_image":
            assert fetch(f"{server.url}/a.png", given) == steps[-1].body
        else:
            assert code_of(lambda: fetch(f"{server.url}/a.png", given)) == case["code"]
        assert len(server.asked) >= case["expect"].get("attempts_min", case["expect"].get("attempts", 1))
        assert len(server.asked) == 1 or "connections_beyond_first" not in case["expect"]
