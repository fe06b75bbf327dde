"""What a server is beside its models: who may ask, what it says of itself, and its figures."""

import asyncio
import hashlib
import hmac
import logging
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from mcinfer import __version__
from mcinfer.errors import InvalidInputError
from mcinfer.exporters.prometheus import families
from mcinfer.serve.documents import (
    AllStatistics,
    IndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
    Times,
)
from mcinfer.serve.figures import Figures
from mcinfer.serve.models import Models, RefusedError
from mcinfer.serve.regions import Regions
from mcinfer.serve.tensors import DATATYPES, shape_of
from mcinfer.specs import TensorSpec

EXTENSIONS = (
    "binary_tensor_data",
    "logging",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)

_LEVELS = {"log_verbose_level": 10, "log_info": 20, "log_warning": 30, "log_error": 40}
"""Triton's settings of its log, and the levels of Python's that they switch."""

_REQUEST_ID = re.compile("[!-~]{1,128}")
"""Visible characters of ASCII."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a server allows.

    Attributes:
        max_request_bytes: Most bytes of a request's body, also when it is decompressed.
        timeout: Seconds for a request to come.
        client_shared_memory: Whether clients may register shared memory.
        key_file: Has a key in each line: who shows one is admitted. None admits all.
        strict_readiness: Whether the server is ready only while all its models are.
        traces: Whether requests become spans of OpenTelemetry.
        why_fixed: Why no client may change the server, as one of several processes alone would take the
            change; empty if clients may.
    """

    max_request_bytes: int = 64 << 20
    timeout: float = 60.0
    client_shared_memory: bool = False
    key_file: Path | None = None
    strict_readiness: bool = True
    traces: bool = False
    why_fixed: str = ""


class Service(Collector):
    """The models, and what the protocols say of them.

    Attributes:
        ending: Is set when the server ends; load balancers should send no more requests.
        figures: What was counted.
        join_trace: Makes the span that a request's headers name that of its caller; None without tracing.
    """

    def __init__(
        self, models: Models, options: ServeOptions, figures: Figures | None = None
    ) -> None:
        self.models, self.options = models, options
        self.figures = figures or Figures(models)
        self.regions = Regions(options.client_shared_memory)
        self.ending = asyncio.Event()
        self.join_trace: Callable[[Iterable[tuple[str, Any]]], None] | None = None
        if options.traces:
            from mcinfer.exporters.opentelemetry import join_trace

            self.join_trace = join_trace
        self._ids = (f"{prefix}-{n:x}" for prefix in (token_hex(6),) for n in count())
        self._keys: list[bytes] = []
        self.read_keys()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def read_keys(self) -> None:
        """Read the file of keys, maybe again; raises as `keys_in`, and then those before stay."""
        if file := self.options.key_file:
            self._keys = [hashlib.sha256(key.encode()).digest() for key in keys_in(file)]

    def admits(self, authorization: str) -> bool:
        """Whether a header ``Authorization`` has a key: ``Bearer KEY``, or ``Basic`` with it as password."""
        if not self._keys:
            return True
        # What a client has sent: of a key that is not ASCII, the bytes of UTF-8.
        sent = authorization.encode("latin-1", "replace")
        scheme, _, shown = sent.strip().partition(b" ")
        if scheme.lower() == b"basic":
            with suppress(ValueError):
                shown = b64decode(shown, validate=True).partition(b":")[2]
        digest = hashlib.sha256(shown.strip()).digest()
        fits = [hmac.compare_digest(digest, key) for key in self._keys]  # all, for an equal time
        return any(fits)

    def request_id(self, given: str) -> str:
        """A client's name for a request if headers and logs can have it, else a new one."""
        return given if _REQUEST_ID.fullmatch(given) else next(self._ids)

    # What it says of itself.

    def metadata(self) -> ServerMetadata:
        own = ("system_shared_memory",) if self.regions.allowed else ()
        return {"name": "mcinfer", "version": __version__, "extensions": [*EXTENSIONS, *own]}

    @property
    def ready(self) -> bool:
        """Whether load balancers should send requests."""
        ready = self.models.ready or not self.options.strict_readiness
        return ready and not self.ending.is_set() and self.figures.all_serve

    def model_ready(self, name: str, version: str = "") -> bool:
        with suppress(RefusedError):
            return self.models.instance(name, version).ready
        return False

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        instance = self.models.instance(name, version)
        return {
            "name": name,
            "versions": [each.version for _, each in self.models.loaded(name)],
            "platform": instance.config["platform"],
            "inputs": [*map(_tensor, instance.inputs)],
            "outputs": [*map(_tensor, instance.outputs)],
        }

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        return self.models.instance(name, version).config

    def statistics(self, name: str = "", version: str = "") -> AllStatistics:
        """Of one model, in one version or all, or of all models. Times that masters do not count are 0."""
        if name:
            self.models.instance(name, version)  # it is served
        found: list[ModelStatistics] = []
        for each in self.figures.taken().models:
            if name not in ("", each.name) or version not in ("", each.version):
                continue
            now = each.statistics
            busy = sum(worker.busy_seconds for worker in now.workers)
            parts = ("queue", "compute_input", "compute_output", "cache_hit", "cache_miss")
            times = {
                "success": _times(now.succeeded, now.latency.total),
                "fail": _times(now.failed + now.cancelled),
                "compute_infer": _times(now.batch_sizes.count, busy),
                **{part: _times() for part in parts},
            }
            found.append(
                {
                    "name": each.name,
                    "version": each.version,
                    "last_inference": int(each.last * 1e3),
                    "inference_count": int(now.batch_sizes.total),
                    "execution_count": now.batch_sizes.count,
                    "inference_stats": times,
                }
            )
        return {"model_stats": found}

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """All models, or those that are loaded alone."""
        return [e for e in self.models.index() if e["state"] == "READY" or not ready]

    async def load(self, name: str, *, parameters: dict[str, Any] | None = None) -> None:
        """Load a model, maybe with a configuration in JSON among the parameters, as ``config``."""
        self._check_change()
        if any(key.startswith("file:") for key in parameters or ()):
            text = f"failed to load '{name}', models come from files of the server alone"
            raise RefusedError(400, text)
        config = (parameters or {}).get("config")
        await self.models.load(name, None if config is None else str(config))

    async def unload(self, name: str) -> None:
        """Serve a model no more."""
        self._check_change()
        await self.models.unload(name)

    def _check_change(self) -> None:
        if self.options.why_fixed:
            raise RefusedError(501, self.options.why_fixed)

    # Figures.

    def collect(self) -> Iterator[Metric]:
        """All figures, for Prometheus' registry."""
        taken = self.figures.taken()
        snapshots = [((each.name, each.version), each.statistics) for each in taken.models]
        yield from families(("model", "version"), snapshots)
        text = "Answers over HTTP to requests for a model's outputs, by status."
        answers = CounterMetricFamily("mcinfer_http_answers", text, labels=("model", "status"))
        for model, status, number in taken.answers:
            answers.add_metric((model, str(status)), number)
        yield answers

    def metrics(self) -> bytes:
        return generate_latest(self._registry)

    def log_settings(
        self,
        *,
        log_verbose_level: int | None = None,
        log_info: bool | None = None,
        log_warning: bool | None = None,
        log_error: bool | None = None,
    ) -> dict[str, Any]:
        """What the logger ``mcinfer`` shows after these changes, by Triton's names."""
        logger = logging.getLogger("mcinfer")
        asked = (log_verbose_level, log_info, log_warning, log_error)
        if any(wanted is not None for wanted in asked):
            self._check_change()
        for wanted, level in zip(asked, _LEVELS.values(), strict=True):
            if wanted is not None and bool(wanted) != logger.isEnabledFor(level):
                logger.setLevel(level if wanted else level + 10)
        shown: dict[str, Any] = {n: logger.isEnabledFor(level) for n, level in _LEVELS.items()}
        verbose = int(shown["log_verbose_level"])
        return {"log_file": "", **shown, "log_verbose_level": verbose, "log_format": "default"}


def keys_in(file: Path) -> list[str]:
    """The keys of a file, one in each line; ``#`` begins a comment.

    Raises:
        InvalidInputError: There is no such file, no text, or no key in it.
    """
    if not file.is_file():  # a pipe may say nothing for ever
        raise InvalidInputError(f"--api-key-file: {file} is no regular file")
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"--api-key-file: {file} is no text in UTF-8") from exc
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidInputError(f"--api-key-file: {file} has no key, expected one in each line")
    return keys


def _tensor(spec: TensorSpec) -> TensorMetadata:
    return {"name": spec.name, "datatype": DATATYPES[spec.element_type], "shape": shape_of(spec)}


def _times(number: int = 0, seconds: float = 0.0) -> Times:
    return {"count": number, "ns": int(seconds * 1e9)}
