"""HTTP and HTTPS by a policy: which hosts may be asked, that what was checked is what is connected to, and bodies that are whole or absent.

A name is resolved here, each of its addresses is checked, and the connection goes to one of the very addresses that were checked; a
redirect is checked from the start again. Proxies are not used. Certificates are verified with the system's authorities, or those of
SSL_CERT_FILE. No message shows a URL's user, password, query or fragment, nor the value of a header that comes from the environment.
"""

from __future__ import annotations

import email.utils
import fcntl
import hashlib
import http.client
import io
import ipaddress
import json
import os
import random
import re
import shutil
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urljoin, urlsplit, urlunsplit

from pydantic import Field, field_validator, model_validator

from tasks.core.config import Section
from tasks.core.errors import BadInput, TrainyardError, Transient, of_machine
from tasks.core.files import digest_of, file_lock, fsync_dir, link_or_copy, publish_dir, sha256_file, write_atomic
from tasks.sources.remote import KEEP_S, folder_of

KNOB = "ingest.options.web"
CHUNK = 1 << 16
RETRY_AFTER_MAX_S = 30.0
COPY_LOCK_S = 6 * 3600.0
COPIES = 8
"""Files of a range that are fetched at once."""
CONNECT_S = 10.0
"""Seconds that one address is waited for, at most."""
RENEWS = 1 << 20
"""Bytes of a download that buy it another ``timeout_s``."""
PLAIN_HEADERS = frozenset({"accept", "accept-language", "user-agent"})
"""Headers whose value may stand in params; every other one comes from the environment."""
OWN_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "range", "if-range", "te", "upgrade"})
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_ENV = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_CARRIERS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""NAT64, that of private networks, and the old IPv4-compatible addresses: the last 32 bits are an IPv4 address."""
_SHARED = ipaddress.IPv4Network("100.64.0.0/10")

T = TypeVar("T")
Resolver = Callable[[str, int], list[str]]
"""(host, port) to the host's addresses, as text; raises socket.gaierror."""


class WebPolicy(Section):
    """What may be fetched, from where, and with how much patience."""

    schemes: list[Literal["https", "http"]] = Field(["https"], min_length=1, description="schemes that are allowed")
    hosts: list[str] = Field([], description="hosts that are allowed, *.example.org for those below one; empty: every public host")
    allow_private: bool = Field(False, description="allow addresses of private networks and of this machine; link-local ones never are")
    headers: dict[str, str] = Field({}, description="headers to send to hosts, as {Authorization: env:MY_TOKEN}; needs hosts")
    timeout_s: float = Field(30.0, gt=0.0, le=3600.0, description="seconds for one try of one file, in all; large downloads: for each MiB")
    max_redirects: int = Field(5, ge=0, le=20, description="redirects that are followed, each checked as the first URL is")
    retries: int = Field(3, ge=0, le=20, description="further tries after a time-out, a cut, 429 or 5xx")
    backoff_s: float = Field(0.5, ge=0.0, le=60.0, description="seconds before the second try, doubled for each further one, with jitter")
    max_bytes: int = Field(67_108_864, ge=1, description="largest file, in bytes, unpacked where the server packs it")

    @field_validator("hosts")
    @classmethod
    def _plain_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not re.fullmatch(r"(\*\.)?[^\s/@*?#]+", host):
                raise ValueError("a host's name, or *.name for those below it")
        return [host.casefold() for host in hosts]

    @field_validator("headers")
    @classmethod
    def _no_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        """BadInput, not ValueError, whose report would show the value."""
        for name, value in headers.items():
            if not _TOKEN.fullmatch(name) or name.casefold() in OWN_HEADERS:
                raise BadInput("params_invalid", "a header that cannot be set", value=repr(name[:64]), knob=f"{KNOB}.headers")
            if not _ENV.fullmatch(value) and (name.casefold() not in PLAIN_HEADERS or not value.isprintable()):
                rule = "env:NAME, the name of an environment variable that holds it"
                raise BadInput("params_invalid", f"the header {name}", value="a value in params", constraint=rule, knob=f"{KNOB}.headers")
        return headers

    @model_validator(mode="after")
    def _headers_need_hosts(self) -> WebPolicy:
        if self.headers and not self.hosts:
            raise BadInput("params_invalid", "headers without hosts", value="any host", constraint="the hosts to send them to", knob=f"{KNOB}.hosts")
        return self


class _Again(Exception):
    """A failure that another try may mend: what to tell if none does, and the seconds that the server asked to wait."""

    def __init__(self, error: TrainyardError, wait_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.wait_s = error, wait_s


class _Address(NamedTuple):
    url: SplitResult
    host: str
    port: int
    addresses: list[str]

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.url.scheme, self.host, self.port


def masked(url: str) -> str:
    """``url`` without user, password, query and fragment, at most 200 characters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that cannot be read"
    place = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"***@{place[2]}" if place[1] else place[2], parts.path, "***" if parts.query else "", ""))[:200]


def may_ask(address: str, private: bool = False) -> bool:
    """Whether an IP address is public, or with ``private`` one of a private network or of this machine.

    Link-local addresses (metadata of clouds), multicast and reserved ones never are. One that carries an IPv4 address (mapped,
    NAT64, 6to4, Teredo) is as that one is. Raises ValueError where the text is no address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and not ip.is_loopback:
        carried = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        carried += [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) for network in _CARRIERS if ip in network]
        inner = [str(one) for one in carried if one is not None]
        if inner:
            return all(may_ask(one, private) for one in inner)
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or (ip.is_reserved and not ip.is_loopback):
        return False
    return ip.is_global or (private and (ip.is_private or ip in _SHARED))


def resolve(host: str, port: int) -> list[str]:
    """The addresses of ``host``, by the system's resolver; raises socket.gaierror."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def refused(url: str, policy: WebPolicy) -> str:
    """Why ``policy`` refuses ``url`` by its text alone, "" where it does not; no name is resolved."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "a URL that cannot be read"
    host = (parts.hostname or "").casefold().rstrip(".")
    if not host or port == 0 or re.search(r"[\s\\\x00-\x1f\x7f]", url):
        return "a URL that cannot be read"
    if parts.scheme not in policy.schemes:
        return f"the scheme {parts.scheme or '(none)'}"
    if "@" in parts.netloc:
        return "a user or password in a URL"
    if policy.hosts and not any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in policy.hosts):
        return f"the host {host}"
    try:
        return "" if may_ask(host, policy.allow_private) else f"the address {host}"
    except ValueError:
        return ""


def fetch(url: str, policy: WebPolicy, max_bytes: int | None = None, *, resolver: Resolver = resolve) -> bytes:
    """The whole body at ``url``, at most ``max_bytes`` (``policy.max_bytes`` where None or larger), in memory.

    Raises BadInput ``url_not_allowed``, ``download_too_large``, or ``download_failed`` where the server says no (4xx); and where the tries
    are used up Transient ``download_truncated``, ``download_timeout`` or ``source_unavailable``.
    """
    most = min(policy.max_bytes, max_bytes or policy.max_bytes)

    def once() -> bytes:
        clock = _Clock(policy.timeout_s)
        with _get(url, policy, {}, clock, resolver) as response:
            if response.status != 200:
                raise _failed(url, f"status {response.status}")
            return b"".join(_body(url, response, most, clock))

    return _tried(once, policy)


def version(url: str, policy: WebPolicy, *, resolver: Resolver = resolve) -> str:
    """What the server says that moves with the body at ``url``: its ETag, else its time and length; "" where it says neither. Raises as ``fetch``."""

    def once() -> str:
        with _get(url, policy, {}, _Clock(policy.timeout_s), resolver) as response:
            if response.status != 200:
                raise _failed(url, f"status {response.status}")
            told = response.headers
            return told.get("ETag", "") or (told.get("Last-Modified", "") and f"{told['Last-Modified']} {told.get('Content-Length', '')}")

    return _tried(once, policy)


def copy_of(url: str, policy: WebPolicy, root: Path, max_bytes: int) -> Path:
    """A local copy of the file at ``url`` as it is now, under its own last name; not fetched again while its ``version`` stands still.

    Raises as ``download`` does, BadInput ``source_unavailable`` for a URL without a file's name, and Transient ``lock_busy``.
    """
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    if not name or name.startswith(".") or "\0" in name or len(name.encode("utf-8", "replace")) > 200:
        raise BadInput(
            "source_unavailable", "the URL names no file", value=masked(url), constraint="a file's name at its end", knob="ingest.location"
        )
    folder = folder_of(url, root) / "web"
    target, known = folder / name, folder / ".version"
    with file_lock(folder.with_name("lock"), COPY_LOCK_S, f"the copy of {masked(url)}"):
        now = version(url, policy)
        if not (now and target.is_file() and known.is_file() and known.read_text(encoding="utf-8") == now):
            known.unlink(missing_ok=True)
            download(url, policy, target, max_bytes=max_bytes)
            write_atomic(known, now.encode(), 0o600)
    return target


def copies_of(location: str, urls: list[str], policy: WebPolicy, root: Path, max_bytes: int) -> Path:
    """A folder with a copy of each of ``urls``, which ``location`` names together, by last name, with a number before it where two are alike.

    Some are fetched at once. The folder stays as it is for whoever reads it; a week after its last use it goes. Raises as ``copy_of`` does.
    """
    with ThreadPoolExecutor(COPIES, "download") as pool:
        waiting = [pool.submit(copy_of, url, policy, root, max_bytes) for url in urls]
        try:
            copies = [future.result() for future in waiting]
        finally:
            for future in waiting:
                future.cancel()
    alike = len({copy.name for copy in copies}) < len(copies)
    names = [f"{number:06d}-{copy.name}" if alike else copy.name for number, copy in enumerate(copies)]
    facts = [[name, copy.stat().st_ino, copy.stat().st_mtime_ns] for name, copy in zip(names, copies, strict=True)]
    home = folder_of(location, root)
    view = home / "shards" / digest_of(facts)[:20]
    with file_lock(home / "shards.lock", COPY_LOCK_S, f"the copies of {masked(location)}"):
        if not view.is_dir():
            with publish_dir(view) as made:
                for name, copy in zip(names, copies, strict=True):
                    link_or_copy(copy, made / name)
        os.utime(view)
        for other in view.parent.iterdir():
            if other.stat().st_mtime < time.time() - KEEP_S:
                shutil.rmtree(other, ignore_errors=True)
    return view


def download(url: str, policy: WebPolicy, target: Path, sha256: str | None = None, max_bytes: int = 1 << 40, *, resolver: Resolver = resolve) -> Path:
    """Store the body at ``url`` as ``target``, whole, or not at all, and return ``target``.

    It grows in a part file beside ``target``, which a later call goes on with where the server still holds the same (a strong ETag). Raises
    as ``fetch`` does, ``download_failed`` too where the sha256 (hex) is another one, and Transient ``lock_busy`` where another process is at it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part, facts = target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.json")
    with part.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Transient("lock_busy", "the download is under way elsewhere", value=target.name, knob="nothing; wait for it") from None
        try:
            _tried(lambda: _go_on(url, policy, handle, facts, max_bytes, resolver), policy)
        except TrainyardError as error:
            if isinstance(error, BadInput) or not _tag_of(facts, url):  # nothing to go on with
                part.unlink()
                facts.unlink(missing_ok=True)
            raise
        handle.flush()
        os.fsync(handle.fileno())
        if sha256 is not None and (found := sha256_file(part)) != sha256.casefold():
            part.unlink()
            facts.unlink(missing_ok=True)
            raise BadInput("download_failed", f"{masked(url)} is another file", value=f"sha256 {found}", constraint=f"sha256 {sha256}")
        part.replace(target)
    facts.unlink(missing_ok=True)
    fsync_dir(target.parent)
    return target


def _go_on(url: str, policy: WebPolicy, handle: IO[bytes], facts: Path, most: int, resolver: Resolver) -> None:
    """One try of a download: from where the part file ends, or from the start."""
    held, tag = handle.seek(0, os.SEEK_END), _tag_of(facts, url)
    asked = {"Range": f"bytes={held}-", "If-Range": tag} if held and tag else {}
    clock = _Clock(policy.timeout_s)
    with _get(url, policy, asked, clock, resolver) as response:
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
        goes_on = response.status == 206 and bool(asked) and span is not None and int(span[1]) == held and response.headers.get("ETag") == tag
        if response.status == 416 or (response.status == 206 and not goes_on):
            handle.truncate(0)
            facts.unlink(missing_ok=True)
            raise _Again(_failed(url, "another range than was asked for"))
        if response.status not in (200, 206):
            raise _failed(url, f"status {response.status}")
        if response.headers.get("Content-Encoding", "identity").casefold() != "identity":
            raise _failed(url, "a packed body that was not asked for")
        if not goes_on:
            handle.truncate(0)
            held = 0
            tag = response.headers.get("ETag", "")
            if tag.startswith('"'):
                write_atomic(facts, json.dumps({"url": _digest(url), "etag": tag}).encode(), 0o600)
            else:
                facts.unlink(missing_ok=True)
        for block in _body(url, response, most - held, clock, renews=RENEWS):
            handle.write(block)
        handle.flush()
        if goes_on and span is not None and span[3] != "*" and handle.tell() != int(span[3]):
            raise _Again(Transient("download_truncated", masked(url), value=f"{handle.tell()} bytes", constraint=f"{span[3]} bytes"))


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


def _tag_of(facts: Path, url: str) -> str:
    """The ETag that the part file was begun under, "" where it is not known, or is of another URL."""
    try:
        found = json.loads(facts.read_text(encoding="utf-8"))
        return str(found["etag"]) if found["url"] == _digest(url) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _tried(once: Callable[[], T], policy: WebPolicy) -> T:
    for number in range(policy.retries + 1):
        try:
            return once()
        except _Again as failure:
            if number == policy.retries:
                raise failure.error from None
            time.sleep(max(min(failure.wait_s, RETRY_AFTER_MAX_S), min(policy.backoff_s * 2**number, RETRY_AFTER_MAX_S) * random.uniform(0.5, 1.0)))
    raise AssertionError("unreachable")


class _Clock:
    """What is left of a try's seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Raises TimeoutError at the end."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class _Timed(io.RawIOBase):
    """A socket's bytes, each read with the time that the clock has left: a byte a second does not live for ever."""

    def __init__(self, sock: socket.socket, clock: _Clock) -> None:
        self._sock, self._clock, self._raw = sock, clock, sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._clock.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Connection(http.client.HTTPConnection):
    """A connection to one of the addresses that were checked, whatever the name resolves to by now."""

    def __init__(self, to: _Address, clock: _Clock) -> None:
        super().__init__(to.host, to.port)
        self._to, self._clock = to, clock
        self.default_port = 443 if to.url.scheme == "https" else 80
        self.response_class = self._response  # type: ignore[assignment]

    def connect(self) -> None:
        problem: OSError = OSError("no address")
        for address in self._to.addresses:
            try:
                sock = socket.create_connection((address, self._to.port), timeout=min(CONNECT_S, self._clock.left()))
            except OSError as error:
                problem = error
                continue
            sock.settimeout(self._clock.left())
            try:
                secure = self._to.url.scheme == "https"
                self.sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._to.host) if secure else sock
            except BaseException:
                sock.close()
                raise
            return
        raise problem

    def _response(self, sock: socket.socket, *given: Any, **named: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *given, **named)
        response.fp.close()
        response.fp = io.BufferedReader(_Timed(sock, self._clock))
        return response


def _checked(url: str, policy: WebPolicy, resolver: Resolver) -> _Address:
    """``url`` with the addresses that it may be fetched from; raises BadInput ``url_not_allowed`` or, by the resolver, _Again."""
    if why := refused(url, policy):
        raise BadInput("url_not_allowed", masked(url), value=why, constraint="what the policy allows", knob=KNOB)
    parts = urlsplit(url)
    try:
        host = (parts.hostname or "").rstrip(".")
        host = host if ":" in host else host.encode("idna").decode("ascii")
    except UnicodeError:
        raise BadInput("url_not_allowed", masked(url), value="a host's name that cannot be", knob=KNOB) from None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = resolver(host, port)
    except OSError as error:
        raise _Again(Transient("source_unavailable", f"the host {host} cannot be found", value=str(error.strerror), knob="its name")) from None
    closed = [one for one in addresses if not may_ask(one, policy.allow_private)]
    if closed or not addresses:
        value = f"{host} at {closed[0]}" if closed else f"{host} without an address"
        raise BadInput("url_not_allowed", masked(url), value=value, constraint="at a public address", knob=f"{KNOB}.allow_private")
    return _Address(parts, host, port, addresses)


@contextmanager
def _get(url: str, policy: WebPolicy, extra: dict[str, str], clock: _Clock, resolver: Resolver) -> Iterator[http.client.HTTPResponse]:
    """The answer to GET after redirects, its body unread; closed at the end. Failures that may pass are raised as _Again."""
    first: tuple[str, str, int] | None = None
    at = url
    for _ in range(policy.max_redirects + 1):
        to = _checked(at, policy, resolver)
        first = first or to.origin
        if first[0] == "https" and to.url.scheme != "https":
            raise BadInput("url_not_allowed", masked(at), value="a redirect from https to http", knob=KNOB)
        connection, response = _Connection(to, clock), None
        with _told(at):
            try:
                path = _quoted(to.url.path or "/") + (f"?{_quoted(to.url.query)}" if to.url.query else "")
                own = _headers(policy, to) if to.origin == first else {}
                connection.request("GET", path, headers={"User-Agent": "trainyard", **own, "Accept-Encoding": "identity", **extra})
                response = connection.getresponse()
                if response.status not in (301, 302, 303, 307, 308):
                    if response.status in (408, 429) or response.status >= 500:
                        error = Transient(
                            "source_unavailable", masked(at), value=f"status {response.status}", constraint="200", knob="nothing; try later"
                        )
                        raise _Again(error, _retry_after(response))
                    yield response
                    return
                at = urljoin(at, response.headers.get("Location", ""))
            finally:
                if response is not None:
                    response.close()
                connection.close()
    raise _failed(url, f"more than {policy.max_redirects} redirects")


def _quoted(text: str) -> str:
    """Characters that are not ASCII as UTF-8 in %XX; what is quoted already stays."""
    return "".join(c if c.isascii() else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "replace")) for c in text)


def _failed(url: str, value: str) -> BadInput:
    return BadInput("download_failed", masked(url), value=value, constraint="a file that is given")


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Failures of the network as what they mean: _Again where another try may help, BadInput where a certificate does not hold."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise BadInput(
            "download_failed", masked(url), value=f"a certificate that does not hold: {error.verify_message}", knob="SSL_CERT_FILE"
        ) from None
    except TimeoutError:
        raise _Again(Transient("download_timeout", masked(url), value="no end in time", knob=f"{KNOB}.timeout_s")) from None
    except http.client.IncompleteRead:
        raise _Again(Transient("download_truncated", masked(url), value="a body that ends early", constraint="whole")) from None
    except (OSError, http.client.HTTPException, zlib.error) as error:
        if of_machine(error) is not None:
            raise
        raise _Again(Transient("source_unavailable", masked(url), value=f"{type(error).__name__}", constraint="an answer")) from None


def _headers(policy: WebPolicy, to: _Address) -> dict[str, str]:
    """The policy's headers with their values; those from the environment go over https alone, or to this machine."""
    found = {}
    for name, value in policy.headers.items():
        variable = _ENV.fullmatch(value)
        if variable:
            if to.url.scheme != "https" and not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in to.addresses):
                raise BadInput("url_not_allowed", f"the header {name} for {to.host}", value="http", constraint="https, it is secret", knob=KNOB)
            value = os.environ.get(variable[1], "")
            if not value or not value.isascii() or not value.isprintable():
                why = "a value that is no header's" if value else "no value"
                raise BadInput(
                    "params_invalid", f"the environment variable {variable[1]}", value=why, constraint=f"the value of {name}", knob=variable[1]
                )
        found[name] = value
    return found


def _retry_after(response: http.client.HTTPResponse) -> float:
    """Seconds that Retry-After asks for, as a number or a date; 0 without."""
    text = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _body(url: str, response: http.client.HTTPResponse, most: int, clock: _Clock, renews: int = 0) -> Iterator[bytes]:
    """The body in blocks, unpacked: at most ``most`` bytes, and as many as Content-Length says. Each ``renews`` bytes wind the clock."""
    packed = response.headers.get("Content-Encoding", "identity").strip().casefold()
    if packed not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise _failed(url, "a packing that was not asked for")
    unpack = zlib.decompressobj(47) if packed not in ("identity", "") else None
    promised = response.length
    if promised is not None and promised > most:
        raise _too_large(url, most)
    came = given = since = 0
    while block := response.read1(CHUNK):
        came += len(block)
        since += len(block)
        if renews and since >= renews:
            since = 0
            clock.renew()
        while block:
            out = unpack.decompress(block, CHUNK) if unpack else block
            block = unpack.unconsumed_tail if unpack else b""
            given += len(out)
            if given > most or came > most:
                raise _too_large(url, most)
            yield out
    if (promised is not None and came != promised) or (unpack is not None and not unpack.eof):
        value = f"{came} of {promised} bytes" if promised is not None else f"{came} bytes of a packed body"
        raise _Again(Transient("download_truncated", masked(url), value=value, constraint="whole"))


def _too_large(url: str, most: int) -> BadInput:
    return BadInput("download_too_large", masked(url), value=f"more than {most} bytes", constraint=f"at most {most} bytes", knob=f"{KNOB}.max_bytes")
