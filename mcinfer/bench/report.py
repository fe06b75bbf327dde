"""The report of a benchmark, and its JSON file: the schema ``mcinfer.bench``, version 2.

docs/bench_report.md describes every field. All times are float seconds, all sizes bytes. Where something was
measured several times there is one entry for each repeat, in the order of the repeats.
"""

import json
import os
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mcinfer.errors import InvalidInputError

VERSION = 2

QUANTILES = (0.0, *(n / 50 for n in range(1, 50)), 0.99, 0.995, 0.999, 1.0)
"""Fractions at which latencies are kept: 0 is the least, 0.5 the median, 1 the greatest."""

OTHERS = "others_cores"
OTHERS_BEFORE = "others_cores_before"
"""The facts about the machine that say how many cores other programs used during the run, and before it."""

Role = Literal["baseline", "mcinfer"]

Scenario = Literal["", "SingleStream", "Offline", "Server"]
"""Of MLPerf's LoadGen, where that makes the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load on a way: rows of each request, requests under way at most, and the rate of an open loop.

    In an open loop requests arrive at random moments (a Poisson process), answered or not. Without a rate it
    is a closed loop: each client makes its next request when its last one is answered.
    """

    batch: int
    clients: int
    rate: float | None = None
    scenario: Scenario = ""

    def __str__(self) -> str:
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        text = self.scenario or clients if self.rate is None else f"{self.scenario} {self.rate:g}/s"
        return f"batch {self.batch}, {text.strip()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One way under one load, once.

    Attributes:
        latencies: Those at `QUANTILES`, empty without an answer.
        runs: Runs of the engine; 0 where they are not known.
    """

    requests: int
    failed: int
    unfinished: int
    seconds: float
    latencies: tuple[float, ...]
    mean_latency: float
    run_seconds: float | None
    cpu_seconds: float
    kept_up: bool = True
    error: str = ""
    runs: int = 0

    @property
    def made(self) -> int:
        return self.requests + self.failed + self.unfinished

    @property
    def throughput(self) -> float:
        return self.requests / self.seconds if self.seconds > 0 else 0.0

    @property
    def cores(self) -> float:
        return self.cpu_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def overhead(self) -> float | None:
        """Latency less the engine's own run, of the means; None where it is not known."""
        if self.run_seconds is None or not self.requests:
            return None
        return self.mean_latency - self.run_seconds

    def latency(self, fraction: float) -> float:
        """The latency at one of `QUANTILES`; NaN where nothing was answered."""
        return self.latencies[QUANTILES.index(fraction)] if self.latencies else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    way: str
    load: Load
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of all processes of a way after it has run: proportional and unique set sizes."""

    pss: int
    uss: int
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way that was measured.

    Attributes:
        engine: Of mcinfer's workers, and after a colon the precision.
        difference: Of its answer from ONNX Runtime's in float32, at most, over the largest value there; None
            where it was not compared, or has another shape.
    """

    name: str
    text: str
    role: Role
    workers: int
    start_seconds: tuple[float, ...]
    memory: tuple[Memory, ...]
    error: str = ""
    engine: str = "onnxruntime"
    difference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a benchmark measured.

    Attributes:
        arrays: By batch and input, the element type and the shape of a request's array.
    """

    devices: tuple[str, ...]
    seconds: float
    count: int
    repeats: int
    warmup_seconds: float
    seed: int
    dims: dict[str, int]
    max_batch_size: int
    threads: int | None = None
    arrays: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    batch_axes: dict[str, int | None] = field(default_factory=dict)
    output_axes: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole benchmark. `measurements` go load by load, way by way, in the order of the tables.

    Attributes:
        verdict: Whether to use mcinfer; says why there is no verdict where that is so.
        disturbed: What disturbed the measurement: then there is no verdict.
        remarks: Other warnings.
    """

    made_at: str
    took_seconds: float
    mcinfer: str
    machine: dict[str, str | int | float]
    model: ModelFacts
    settings: Settings
    ways: tuple[Way, ...]
    measurements: tuple[Measurement, ...]
    finished: bool = True
    verdict: str = ""
    disturbed: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    quantiles: tuple[float, ...] = QUANTILES
    schema: Literal["mcinfer.bench"] = "mcinfer.bench"
    version: Literal[2] = field(default=2)

    def way(self, name: str) -> Way:
        return {way.name: way for way in self.ways}[name]

    def find(self, way: str, load: Load) -> Measurement | None:
        found = (m for m in self.measurements if m.way == way and m.load == load)
        return next(found, None)

    @property
    def loads(self) -> tuple[Load, ...]:
        """All loads that ways were measured under, in their order."""
        return tuple(dict.fromkeys(m.load for m in self.measurements))


def dump(report: Report) -> bytes:
    """A report as JSON."""
    return (
        json.dumps(asdict(report), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    )


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report. Fields that this version does not know are passed over.

    Raises:
        InvalidInputError: The file is no report, or one of another version.
        OSError: The file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        for name, expected in (("schema", "mcinfer.bench"), ("version", VERSION)):
            if content.get(name) != expected:
                raise ValueError(f"{name}: got {content.get(name)!r}, expected {expected!r}")
        report: Report = _made(Report, content)
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise InvalidInputError(
            f"{os.fspath(path)} is no benchmark report of version {VERSION}: {exc}"
        ) from exc
    return report


def _made(kind: Any, value: Any) -> Any:
    """A value of that type, from what JSON has for it."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], value[name]) for name in hints.keys() & value})
    kinds = get_args(kind)
    if get_origin(kind) is dict:
        return {name: _made(kinds[1], each) for name, each in value.items()}
    if get_origin(kind) is tuple:
        kinds = kinds if kinds[-1] is not ... else kinds[:1] * len(value)
        return tuple(_made(*pair) for pair in zip(kinds, value, strict=True))
    return value
