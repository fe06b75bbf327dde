"""The fault matrix: what callers get when something goes wrong, by what it is and when it happens.

`CELLS` says what is expected, a row for each fault and moment; `run_cell` puts the fault to a real pool, or
to a real program with one, and measures.
"""

import re
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import onnx
from onnx.parser import parse_model

from mcinfer import (
    BuildError,
    ClosedError,
    PredictError,
    PredictTimeoutError,
    QueueFullError,
)
from mcinfer.config import TRANSPORTS, TransportKind
from tests.process.fault_kinds import FAULTS, HIT_TIMEOUT
from tests.process.fault_pools import Pool, Setting
from tests.process.fault_programs import (
    Service,
    start_with_full_disk,
    start_without_descriptors,
)
from tests.process.models import AFFINE, FakeModel
from tests.process.waiting import pids, states, wait_until

MOMENTS = ("starting", "importing", "building", "idle", "busy", "exiting", "being restarted")

# What callers get.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a caller gets.

    Attributes:
        error: The type of the error; None is no error.
        words: What its text matches, or what a program's end is like.
        status: For a program: its exit status, negative for a signal.
    """

    words: str
    error: type[BaseException] | None = None
    status: int | None = None

    def check(self, came: BaseException | None) -> None:
        """Fail unless this is what came."""
        if self.error is None:
            assert came is None, f"expected {self.words}, got {came!r}"
            return
        assert type(came) is self.error, f"expected {self.error.__name__}, got {came!r}"
        assert re.search(self.words, str(came)), f"expected {self.words!r} in {str(came)!r}"

    def __str__(self) -> str:
        return self.words if self.error is None else f"`{self.error.__name__}`: {self.words}"


RIGHT = Outcome(words="right answers")
CLOSED = Outcome(error=ClosedError, words="closed")
TIMED_OUT = Outcome(error=PredictTimeoutError, words="no answer within")
NOT_READY = Outcome(error=BuildError, words="not ready within")
TOLD_TO_FAIL = Outcome(error=BuildError, words="told to fail")
RUN_FAILED = Outcome(error=PredictError, words="told to fail")
NO_MEMORY = Outcome(error=BuildError, words="Unable to allocate")
RUN_NO_MEMORY = Outcome(error=PredictError, words="Unable to allocate")
MEMORY_FULL = Outcome(error=QueueFullError, words="memory_bytes")
DESCRIPTORS_NEEDED = Outcome(error=BuildError, words="descriptors are needed")
NO_DESCRIPTOR = Outcome(error=PredictError, words="Too many open files")
KILLED = Outcome(words="the program is killed", status=-signal.SIGKILL)
TERMINATED = Outcome(words="the program is terminated", status=-signal.SIGTERM)
EXITED = Outcome(words="`SystemExit`; the program's own status", status=7)
INTERRUPTED = Outcome(words="`KeyboardInterrupt`", status=-signal.SIGINT)

REPLACED, KEPT, NONE_LEFT = "replaced", "kept", "none left"


@dataclass(frozen=True, slots=True)
class Cell:
    """One expectation.

    Attributes:
        fault: A name in `FAULTS`.
        moment: One of `MOMENTS`.
        hit: What the call gets that the fault hits: the start of the pool, or a request.
        worker: What becomes of the worker: ``"replaced"``, ``"kept"``, or ``"none left"`` where the pool is
            closed, or failed to start. Unless that, it then serves, and all other callers get right answers.
        transport: Of the pool.
    """

    fault: str
    moment: str
    hit: Outcome
    worker: str
    transport: TransportKind = "zeromq"

    def __str__(self) -> str:
        over = "" if self.transport == "zeromq" else f", {self.transport}"
        return f"{self.fault}, {self.moment}{over}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a cell took.

    Attributes:
        settled: Seconds from the fault until every caller had its answer.
        whole: Seconds until all workers served again; None where none is left.
    """

    settled: float
    whole: float | None = None


# The expectations.

_Row = tuple[Outcome, str]

_DIES: _Row = (RIGHT, REPLACED)
_CLOSING: _Row = (CLOSED, NONE_LEFT)

_TABLE: dict[str, dict[str, _Row]] = {
    "worker: SIGKILL": {
        "starting": _DIES,
        "importing": _DIES,
        "building": _DIES,
        "idle": _DIES,
        "busy": _DIES,
        "exiting": _CLOSING,
        "being restarted": _DIES,
    },
    "worker: SIGSTOP": {
        "importing": (NOT_READY, NONE_LEFT),
        "building": (NOT_READY, NONE_LEFT),
        "idle": (TIMED_OUT, REPLACED),
        "busy": (TIMED_OUT, REPLACED),
        "exiting": _CLOSING,
        "being restarted": _DIES,
    },
    "worker: SIGSTOP, late SIGCONT": {
        "importing": (RIGHT, KEPT),
        "building": (RIGHT, KEPT),
        "busy": (TIMED_OUT, KEPT),
        "exiting": _CLOSING,
    },
    "worker: segfault": dict.fromkeys(("building", "idle"), _DIES),
    "worker: _exit": dict.fromkeys(("importing", "busy"), _DIES),
    "worker: out of memory": {
        "starting": _DIES,
        "building": (NO_MEMORY, NONE_LEFT),
        "busy": (RUN_NO_MEMORY, KEPT),
    },
    "worker: past worker_memory_bytes": {
        "building": (NO_MEMORY, NONE_LEFT),
        "busy": (RUN_NO_MEMORY, KEPT),
    },
    "worker: never ends": {
        "building": (NOT_READY, NONE_LEFT),
        "busy": (TIMED_OUT, REPLACED),
        "being restarted": _DIES,
    },
    "worker: exception": {
        "building": (TOLD_TO_FAIL, NONE_LEFT),
        "busy": (RUN_FAILED, KEPT),
        "being restarted": _DIES,
    },
    "worker: no descriptors": {
        "building": _DIES,
        "idle": _DIES,
        "busy": (RIGHT, KEPT),
    },
    "worker: answers twice": {"busy": _DIES},
    "worker: answers late": {"busy": (TIMED_OUT, REPLACED)},
    "worker: wrong place": {"busy": _DIES},
    "worker: garbage": {"busy": _DIES, "exiting": _CLOSING},
    "master: SIGKILL": dict.fromkeys(
        ("importing", "busy", "exiting", "being restarted"), (KILLED, NONE_LEFT)
    ),
    "master: SIGTERM": dict.fromkeys(("building", "busy"), (TERMINATED, NONE_LEFT)),
    "master: SIGTERM, handled": {"busy": (EXITED, NONE_LEFT)},
    "master: SIGINT": dict.fromkeys(("building", "busy", "exiting"), (INTERRUPTED, NONE_LEFT)),
    "master: SIGINT twice": dict.fromkeys(("busy", "exiting"), (INTERRUPTED, NONE_LEFT)),
    "master: no descriptors": {
        "starting": (DESCRIPTORS_NEEDED, NONE_LEFT),
        "idle": (NO_DESCRIPTOR, KEPT),
        "busy": (RIGHT, KEPT),
        "exiting": _CLOSING,
        "being restarted": _DIES,
    },
    "shared memory full": {"idle": (MEMORY_FULL, KEPT), "busy": (RIGHT, KEPT)},
    "disk full": {"building": (RIGHT, KEPT)},
    "clock set back": dict.fromkeys(("building", "busy"), (RIGHT, KEPT)),
}

_OVER_SOCKET_PAIRS: dict[str, Collection[str]] = {
    "worker: SIGKILL": ("importing", "busy", "exiting", "being restarted"),
    "worker: SIGSTOP": ("busy",),
    "worker: garbage": ("busy",),
    "master: SIGKILL": ("busy",),
    "master: no descriptors": ("starting", "being restarted"),
}
"""What a transport has a part in: messages, their order, ends of processes, descriptors."""

CELLS = tuple(
    Cell(fault, moment, *row[moment], transport)
    for transport in TRANSPORTS
    for fault, row in _TABLE.items()
    for moment in (MOMENTS if transport == "zeromq" else _OVER_SOCKET_PAIRS.get(fault, ()))
    if moment in row
)

OTHER_CELLS = tuple(
    Cell(fault, moment, *row[moment], "socketpair")
    for fault, row in _TABLE.items()
    for moment in MOMENTS
    if moment in row and moment not in _OVER_SOCKET_PAIRS.get(fault, ())
)
"""The rest over socket pairs, which `make faults` runs and `make test` does not."""

# Running a cell.


def run_cell(cell: Cell, folder: Path, fake_model: FakeModel) -> Measured:
    """Put the fault to a pool or a program at that moment; fail unless all is as the cell says.

    Args:
        cell: One of `CELLS`.
        folder: For this cell alone.
        fake_model: The fixture.
    """
    if cell.fault == "disk full":
        model = folder / "model.onnx"
        onnx.save(parse_model(AFFINE), model)
        return Measured(settled=start_with_full_disk(folder, model))
    if cell.hit is DESCRIPTORS_NEEDED:
        seconds, text = start_without_descriptors(fake_model, cell.transport)
        assert text.startswith("BuildError: ")
        cell.hit.check(BuildError(text))
        return Measured(settled=seconds)
    if FAULTS[cell.fault].signals:
        return _run_in_program(cell, folder, fake_model)
    return _run_in_pool(cell, folder, fake_model)


_HEALTH = {
    **dict.fromkeys(MOMENTS[:3], "starting"),
    "being restarted": "degraded",
    "exiting": "closing",
}
"""What `Master.health` says at that moment; else that the pool is ready."""


_STAND_STILL = ("worker: SIGSTOP", "worker: never ends")


def _setting(cell: Cell) -> Setting:
    """With time-outs as short as the outcome that is expected needs them."""
    setting = Setting(**FAULTS[cell.fault].setting, transport=cell.transport)
    if cell.hit is TIMED_OUT:
        setting = replace(setting, hit_timeout=HIT_TIMEOUT)
    if cell.hit is NOT_READY:
        # It has to come as far as that moment in this time, also where others have the cores.
        setting = replace(setting, start=3.0)
    elif cell.moment == "being restarted" and cell.fault in _STAND_STILL:
        setting = replace(setting, start=3.0)
    if cell.hit is MEMORY_FULL:
        setting = replace(setting, limits=replace(setting.limits, when_full="raise"))
    return setting


def _run_in_pool(cell: Cell, folder: Path, fake_model: FakeModel) -> Measured:
    fault = FAULTS[cell.fault]
    with Pool(folder, fake_model, _setting(cell), importing=cell.moment == "importing") as pool:
        pool.reach(cell.moment, inside=fault.inside)
        health = pool.master.health()
        assert health.state == _HEALTH.get(cell.moment, "ready"), health
        began = monotonic()
        fault.inflict(pool)
        pool.release_beside()
        pool.ask()
        fault.relent(pool)
        for caller in pool.hit:
            cell.hit.check(caller.outcome())
        if cell.worker != NONE_LEFT:
            pool.others += [pool.submit(), pool.submit(), pool.predict()]
        for caller in pool.others:
            (CLOSED if cell.moment == "exiting" else RIGHT).check(caller.outcome())
        if pool.closing is not None:
            pool.closing.result(timeout=40.0)
        measured = Measured(settled=monotonic() - began)
        if cell.worker == NONE_LEFT:
            assert states(pool.master) == ["gone", "gone"]
            CLOSED.check(pool.submit().outcome())
            health = pool.master.health()
            assert health.state == ("closed" if cell.moment == "exiting" else "failed"), health
            assert health.serving == 0
            return measured
        if cell.worker == REPLACED:
            wait_until(lambda: pool.pid not in pids(pool.master))
        pool.is_whole()
        whole = monotonic() - began
        assert (pool.pid in pids(pool.master)) is (cell.worker == KEPT)
        RIGHT.check(pool.predict().outcome())
        health = pool.master.health()
        assert (health.state, health.reasons, health.serving) == ("ready", (), 2), health
        if cell.worker == REPLACED and cell.moment in ("idle", "busy"):
            assert any(text.startswith("degraded: 1 of 2 workers serve") for text in pool.logged)
        return replace(measured, whole=whole)


def _run_in_program(cell: Cell, folder: Path, fake_model: FakeModel) -> Measured:
    fault = FAULTS[cell.fault]
    with Service(folder, fake_model, cell.moment, fault.handles, cell.transport) as service:
        end = service.end(*fault.signals)
        assert end.status == cell.hit.status, end
        assert "[worker" not in end.err
        if len(fault.signals) == 1 and cell.hit is INTERRUPTED:
            assert end.err.count("Traceback") == 1
            assert end.err.endswith("KeyboardInterrupt\n")
        return Measured(settled=end.seconds)
