"""What the service refuses, and the one shape in which it says so.

``Guard`` is the ASGI middleware that bounds a request's size, time and company: BentoML has no limit on bodies, and its
own errors come in three shapes. Every refusal, ours or the framework's, leaves as ``{"error": {"code", "reason"}}`` with
the code also in the header X-Error-Code, and is counted in ``trainyard_refusals_total``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from tasks.images.decode import STATUS as IMAGE_STATUS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("bentoml.trainyard")

STATUS = IMAGE_STATUS | {
    "image_missing": 400,
    "bad_request": 400,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_too_large": 413,
    "too_many_images": 413,
    "not_multipart": 415,
    "too_many_requests": 429,
    "internal_error": 500,
    "not_ready": 503,
    "timeout": 504,
}
"""HTTP status of each code."""

FOREIGN = {
    400: ("bad_request", "the request cannot be read"),
    404: ("not_found", "there is nothing at this address"),
    405: ("method_not_allowed", "this address does not take this method"),
    413: ("request_too_large", "the request is too large"),
    415: ("not_multipart", "send the image as multipart/form-data"),
    429: ("too_many_requests", "too many requests at once; try again"),
    503: ("not_ready", "the service is not ready"),
    504: ("timeout", "the request took too long"),
}
"""Status of an error that the framework made -> our code and words; any other is ``internal_error``."""

INTERNAL = "the service failed; see its log"
CODE_HEADER = "x-error-code"
UNLIMITED = frozenset({"/livez", "/readyz", "/healthz", "/metrics"})
"""Probes: they must answer while the service is busy."""


class Refused(Exception):
    """A request that will not be answered. ``reason`` is for people and holds no path of this machine."""

    def __init__(self, code: str, reason: str, **detail: int) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.detail = detail

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """The refusal as HTTP."""
        content = {"error": {"code": self.code, "reason": self.reason, **self.detail}}
        return JSONResponse(content, STATUS[self.code], {CODE_HEADER: self.code, "cache-control": "no-store", **(headers or {})})


@functools.cache
def meters() -> dict[str, Any]:
    """Our Prometheus metrics, made at the first call.

    Late on purpose: prometheus_client decides at its import whether it counts across worker processes, and BentoML sets
    that up only when a worker starts.
    """
    from prometheus_client import Counter, Histogram

    tenths = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]
    return {
        "answers": Counter("trainyard_answers_total", "Classified images by answered label", ["label"]),
        "top": Histogram("trainyard_top_probability", "Probability of the answered label", buckets=tenths),
        "refusals": Counter("trainyard_refusals_total", "Refused requests by error code", ["code"]),
    }


class Guard:
    """Bounds on one worker's requests: 413 above ``max_request_bytes`` (declared or streamed), 429 above ``max_concurrency``
    at once, 504 after ``timeout_s`` seconds from the first byte of the request to the first byte of the answer."""

    def __init__(self, app: ASGIApp, max_request_bytes: int, max_concurrency: int, timeout_s: float) -> None:
        self.app = app
        self.max_request_bytes = max_request_bytes
        self.max_concurrency = max_concurrency
        self.timeout_s = timeout_s
        self.running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self.max_request_bytes)
        if scope["path"] in UNLIMITED:
            await self.app(scope, exchange.receive, exchange.send)
        elif exchange.declared_bytes() > self.max_request_bytes:
            await exchange.refuse(exchange.too_large())
        elif len(self.running) >= self.max_concurrency:
            refused = Refused("too_many_requests", f"this process answers {self.max_concurrency} requests at once; try again")
            await exchange.refuse(refused, {"retry-after": "1"})
        else:
            await self._within_time(exchange)

    async def _within_time(self, exchange: _Exchange) -> None:
        """Run the request. After the time limit its answer is dropped, but its thread cannot be ended: it keeps its place."""
        task = asyncio.ensure_future(self.app(exchange.scope, exchange.receive, exchange.send))
        self.running.add(task)
        task.add_done_callback(self._done)
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        if not done and not exchange.started:
            await exchange.refuse(Refused("timeout", f"the request took more than {self.timeout_s:g} seconds"))
            task.cancel()
            return
        try:
            await task
        except Exception:
            if exchange.started:
                raise
            log.exception("%s failed", exchange.scope["path"])
            await exchange.refuse(exchange.refused or Refused("internal_error", INTERNAL))

    def _done(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not log it a second time


class _Exchange:
    """One request and its answer: counts what comes in, and puts errors that go out into our shape."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        self.scope = scope
        self.started = False
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._bytes = 0
        self._closed = False
        self.refused: Refused | None = None
        self._foreign: dict[str, str] | None = None

    def declared_bytes(self) -> int:
        """Content-Length, or 0 where there is none (the bytes are counted as they come)."""
        declared = dict(self.scope["headers"]).get(b"content-length", b"0")
        return int(declared) if declared.isdigit() else 0

    def too_large(self) -> Refused:
        """The refusal of this request's body."""
        return Refused("request_too_large", f"the request has more than {self._max_bytes} bytes", limit=self._max_bytes)

    async def receive(self) -> Message:
        """The next part of the request; raises Refused once there are more bytes than allowed."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._max_bytes:
            self.refused = self.too_large()
            raise self.refused
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on; replace an error that is not in our shape; drop what comes after a time-out."""
        if self._closed:
            return
        if message["type"] == "http.response.start":
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            if message["status"] >= 400 and CODE_HEADER not in headers:
                code, reason = FOREIGN.get(message["status"], ("internal_error", INTERNAL))
                self.refused = self.refused or Refused(code, reason)
                self._foreign = {"allow": headers["allow"]} if "allow" in headers else {}
                return
            if CODE_HEADER in headers:
                meters()["refusals"].labels(headers[CODE_HEADER]).inc()
            self.started = True
        elif self._foreign is not None:
            if not message.get("more_body", False) and self.refused is not None:
                await self.refuse(self.refused, self._foreign)
            return
        await self._send(message)

    async def refuse(self, refused: Refused, headers: dict[str, str] | None = None) -> None:
        """Answer with ``refused`` and let nothing follow."""
        self._closed = self.started = True
        meters()["refusals"].labels(refused.code).inc()
        await refused.response(headers)(self.scope, self._receive, self._send)
