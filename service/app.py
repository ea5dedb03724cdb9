"""The served classifier: a BentoML service on ONNX Runtime. It runs inside the Bento that tasks/package.py builds.

    POST /classify        multipart field ``image``: one file  -> {"label", "probabilities", "model"}
    POST /classify_batch  multipart field ``images``: files    -> a list of those, in order
    GET  /provenance      what every answer was made from, back to the data version
    GET  /                a page to drop an image on
    /livez /readyz /healthz /metrics /docs.json are BentoML's

The model, its classes, decode rules, limits and provenance are files beside the code (``model/``), so an unpacked Bento
is all that the service reads. Errors are ``{"error": {"code", "reason"}}``; see limits.py.
"""

from __future__ import annotations

import base64
import functools
import gc
import hashlib
import io
import json
import logging
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bentoml
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from typing_extensions import TypedDict

from service.limits import Guard, Refused, meters
from service.uploads import read_images
from tasks.images.decode import BadImage, load_pixels

if TYPE_CHECKING:
    import onnxruntime

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "model"
"""Folder of model.onnx, model.json, service.json and provenance.json in the Bento."""

log = logging.getLogger("bentoml.trainyard")


@dataclass(frozen=True)
class Settings:
    """The package section of params.yaml, as written into the Bento (defaults: where the code lies outside of one)."""

    workers: int = 1
    threads: int = 1
    max_request_bytes: int = 16_777_216
    max_batch: int = 64
    max_concurrency: int = 64
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Spec:
    """Decode rules in the form that tasks.images.decode takes."""

    image_size: int
    resize: str
    max_pixels: int
    max_bytes: int
    background: tuple[int, int, int]


class LabelProbability(TypedDict):
    """One class and its probability."""

    label: str
    probability: float


class ModelName(TypedDict):
    """Which model answered."""

    tag: str
    digest: str


class Answer(TypedDict):
    """What the model says of one image; ``probabilities`` holds every class, the largest first."""

    label: str
    probabilities: list[LabelProbability]
    model: ModelName


def read_json(name: str) -> dict[str, Any]:
    """One of the Bento's JSON files."""
    content: dict[str, Any] = json.loads((MODEL / name).read_bytes())
    return content


def read_settings() -> Settings:
    """The settings in the Bento. Unknown keys (of a newer params.yaml) are passed over."""
    if not (MODEL / "service.json").is_file():
        return Settings()
    known = {field.name for field in fields(Settings)}
    return Settings(**{key: value for key, value in read_json("service.json").items() if key in known})


SETTINGS = read_settings()  # BentoML wants workers, threads and limits when the class is made


class OneImage(bentoml.IODescriptor):
    """Input of classify: for OpenAPI and clients a file, for the method its bytes or a refusal."""

    image: Path

    @classmethod
    async def from_http_request(cls, request: Request, serde: object) -> OneImage:
        """Read the request; never raises for what a client sent."""
        upload: OneImage = cls.model_construct(image=await read_images(request, "image", 1))
        return upload


class SomeImages(bentoml.IODescriptor):
    """Input of classify_batch."""

    images: list[Path]

    @classmethod
    async def from_http_request(cls, request: Request, serde: object) -> SomeImages:
        """Read the request; never raises for what a client sent."""
        upload: SomeImages = cls.model_construct(images=await read_images(request, "images", SETTINGS.max_batch))
        return upload


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Its inline style and script are allowed by their hashes, so injected ones do not run."""
    html = (HERE / "page.html").read_bytes()

    def allowed(tag: bytes) -> str:
        blocks = re.findall(b"<" + tag + b">(.*?)</" + tag + b">", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'" for block in blocks)

    policy = (
        f"default-src 'self'; script-src {allowed(b'script')}; style-src {allowed(b'style')}; img-src 'self' blob: data:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return html, headers


async def show_page(request: Request) -> Response:
    """GET /"""
    html, headers = page()
    return HTMLResponse(html, headers=headers)


async def show_provenance(request: Request) -> Response:
    """GET /provenance"""
    return Response(provenance(), media_type="application/json", headers={"cache-control": "no-store"})


@functools.cache
def provenance() -> bytes:
    """provenance.json, byte for byte as it was packaged."""
    return (MODEL / "provenance.json").read_bytes()


PAGES = Starlette(routes=[Route("/", show_page), Route("/provenance", show_provenance)])


@bentoml.service(
    name="trainyard",
    workers=SETTINGS.workers,
    threads=SETTINGS.threads,
    # Guard's own limit comes first and answers in our shape; this one only catches what Guard cannot.
    traffic={"timeout": SETTINGS.timeout_s + 5.0},
    # A line for each request would fill the disk of a service that nobody watches; /metrics counts requests.
    logging={"access": {"enabled": False}},
)
@bentoml.asgi_app(PAGES, path="/")
class Classifier:
    """Classifies images with the model in this Bento."""

    def __init__(self) -> None:
        facts = read_json("model.json")
        origin = json.loads(provenance())
        decode = facts["decode"]
        self.spec = Spec(**{**decode, "background": tuple(decode["background"])})
        self.classes: list[str] = facts["classes"]
        self.name: ModelName = {"tag": origin["tag"], "digest": origin["model_digest"]}
        self.session = open_session(MODEL / "model.onnx", SETTINGS.workers)
        self._rehearse()
        page()
        meters()
        # What was loaded lives as long as the process: keep the collector from walking it during requests (docs/decisions).
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)
        log.info("%s is ready: %d classes", self.name["tag"], len(self.classes))

    # Both return ready responses: from an annotated result BentoML would make the JSON schema anew for every answer, a quarter
    # of this process's time. The annotations are for /docs.json and its clients.

    @bentoml.api(route="/classify", input_spec=OneImage)
    def classify(self, image: list[bytes] | Refused) -> Answer:
        """Names one image: multipart/form-data with the file in the field ``image``."""
        try:
            return JSONResponse(self._answers(image)[0])  # type: ignore[return-value]
        except Refused as refused:
            refused.detail.pop("image", None)
            return refused.response()  # type: ignore[return-value]

    @bentoml.api(route="/classify_batch", input_spec=SomeImages)
    def classify_batch(self, images: list[bytes] | Refused) -> list[Answer]:
        """Names several images: multipart/form-data with the files in the field ``images``. One bad image refuses the
        request; ``error.image`` is its position, from 0."""
        try:
            return JSONResponse(self._answers(images))  # type: ignore[return-value]
        except Refused as refused:
            return refused.response()  # type: ignore[return-value]

    def _answers(self, files: list[bytes] | Refused) -> list[Answer]:
        if isinstance(files, Refused):
            raise files
        pixels = np.empty((len(files), self.spec.image_size, self.spec.image_size, 3), np.uint8)
        for position, data in enumerate(files):
            try:
                pixels[position] = load_pixels(data, self.spec)
            except BadImage as error:
                raise Refused(error.code, str(error), image=position) from None
        return [self._answer(row) for row in self._infer(pixels)]

    def _infer(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [N, S, S, 3] -> float32 [N, C]."""
        probabilities: np.ndarray = self.session.run(["probabilities"], {"image": pixels})[0]
        return probabilities

    def _answer(self, row: np.ndarray) -> Answer:
        order = np.argsort(-row, kind="stable")
        ranked: list[LabelProbability] = [{"label": self.classes[i], "probability": round(float(row[i]), 7)} for i in order]
        meters()["answers"].labels(ranked[0]["label"]).inc()
        meters()["top"].observe(ranked[0]["probability"])
        return {"label": ranked[0]["label"], "probabilities": ranked, "model": self.name}

    def _rehearse(self) -> None:
        """One image through decoder and model, so that ready means ready; raises where the files do not fit each other."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.new("RGB", (self.spec.image_size, self.spec.image_size), self.spec.background).save(buffer, "PNG")
        row = self._infer(load_pixels(buffer.getvalue(), self.spec)[None])[0]
        if row.shape != (len(self.classes),) or abs(float(row.sum()) - 1.0) > 1e-3:
            raise RuntimeError(f"model.onnx gives {row.shape} summing to {row.sum():.4f}; must be {len(self.classes)} probabilities")


def open_session(path: Path, workers: int) -> onnxruntime.InferenceSession:
    """The model on this worker's share of the CPUs. Its threads sleep between requests: spinning ones would starve
    the other workers and the decoder."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.intra_op_num_threads = max(1, cpus // workers)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


Classifier.add_asgi_middleware(  # type: ignore[attr-defined]  # the decorator made it a bentoml.Service
    Guard, max_request_bytes=SETTINGS.max_request_bytes, max_concurrency=SETTINGS.max_concurrency, timeout_s=SETTINGS.timeout_s
)
