"""The fault matrix: what callers get when something goes wrong, by fault and by moment.

`FAULTS` has for each fault how it hits a pool or a program, and what is expected at each moment. `run_cell`
puts one fault to a real pool, or to a real program with one, at one moment.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from mcinfer import (
    BuildError,
    ClosedError,
    Limits,
    MemoryFullError,
    PredictError,
    PredictTimeoutError,
)
from tests.process.fault_pools import Pool
from tests.process.fault_programs import (
    end_service,
    start_with_full_disk,
    start_without_descriptors,
)
from tests.process.models import FakeModel, Inputs
from tests.process.waiting import pids, states, wait_for_states, wait_until

MOMENTS = ("starting", "importing", "building", "idle", "busy", "exiting", "being restarted")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a caller gets: an error whose text matches `words`, a right answer, or a program's exit status."""

    words: str
    error: type[BaseException] | None = None
    status: int = 0

    def check(self, came: BaseException | None) -> None:
        if self.error is None:
            assert came is None, f"expected {self.words}, got {came!r}"
            return
        assert type(came) is self.error, f"expected {self.error.__name__}, got {came!r}"
        assert re.search(self.words, str(came)), f"expected {self.words!r} in {str(came)!r}"

    def __str__(self) -> str:
        return self.words if self.error is None else f"`{self.error.__name__}`: {self.words}"


RIGHT = Outcome("right answers")
CLOSED = Outcome("closed", ClosedError)
TIMED_OUT = Outcome("no answer within", PredictTimeoutError)
NOT_READY = Outcome("not ready within", BuildError)
MEMORY_FULL = Outcome("memory_bytes", MemoryFullError)
DESCRIPTORS_NEEDED = Outcome("descriptors are needed", BuildError)
KILLED = Outcome("the program is killed", status=-signal.SIGKILL)
TERMINATED = Outcome("the program is terminated", status=-signal.SIGTERM)
EXITED = Outcome("`SystemExit`; the program's own status", status=7)
INTERRUPTED = Outcome("`KeyboardInterrupt`", status=-signal.SIGINT)

# What becomes of the worker. If it is replaced or kept, both workers serve in the end, and all other callers
# get right answers; if none is left, the pool is closed or its start failed.
REPLACED, KEPT, NONE_LEFT = "replaced", "kept", "none left"

_Row = tuple[Outcome, str]
_DIES: _Row = (RIGHT, REPLACED)
_KEPT: _Row = (RIGHT, KEPT)
_CLOSING: _Row = (CLOSED, NONE_LEFT)
_NOT_READY: _Row = (NOT_READY, NONE_LEFT)
_HANGS: _Row = (TIMED_OUT, REPLACED)
_BUILD_MEMORY: _Row = (Outcome("Unable to allocate", BuildError), NONE_LEFT)
_RUN_MEMORY: _Row = (Outcome("Unable to allocate", PredictError), KEPT)
_INTERRUPTED: _Row = (INTERRUPTED, NONE_LEFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        words: What it is, for the page.
        cells: For each moment: what the call gets that the fault hits, and what becomes of the worker.
        thorough: The moments that `make test` leaves to `make test-thorough` and `make faults`.
        inflict: Puts the fault to the pool.
        relent: Runs once callers have asked.
        setting: Arguments of the pool.
        signals: For a fault of the whole program: the signals that it gets.
        handles: That program handles SIGTERM.
    """

    words: str
    cells: Mapping[str, _Row]
    thorough: Collection[str] = ()
    inflict: Callable[[Pool], None] = lambda _: None
    relent: Callable[[Pool], None] = lambda _: None
    setting: Mapping[str, Any] = field(default_factory=dict)
    signals: tuple[signal.Signals, ...] = ()
    handles: bool = False


HIT_TIMEOUT = 1.0
"""Time limit of a request that must run out of time, in seconds."""

LATE = 0.15
"""How long a fault lasts that passes by itself, in seconds."""


def _kill(pool: Pool) -> None:
    os.kill(pool.pid, signal.SIGKILL)


def _stop(pool: Pool) -> None:
    os.kill(pool.pid, signal.SIGSTOP)


def _continue(pool: Pool) -> None:
    """Continue the worker after the request that the fault hit has timed out, or after a while."""
    if pool.hit_timeout == HIT_TIMEOUT:
        pool.hit[0].outcome()
    else:
        time.sleep(LATE)
    with suppress(ProcessLookupError):
        os.kill(pool.pid, signal.SIGCONT)
    pool.tell("")


def _tell(act: str, pool: Pool) -> None:
    pool.tell(act)


def _take_memory(pool: Pool) -> None:
    """Leave the worker less address space than it then asks for; at its very start, none."""
    has = psutil.Process(pool.pid).memory_info().vms
    most = has + (256 << 20) if pool.is_held else 1 << 20
    resource.prlimit(pool.pid, resource.RLIMIT_AS, (most, most))
    pool.tell(f"allocate:{1 << 30}")


def _take_workers_descriptors(pool: Pool) -> None:
    resource.prlimit(pool.pid, resource.RLIMIT_NOFILE, (3, 3))
    pool.tell("")


def _take_descriptors(pool: Pool) -> None:
    """Leave this process no free descriptor until `Pool.undo`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/", os.O_RDONLY)]
    # As many as poll(2) accepts; descriptors above stay open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, limits[1]))
    with suppress(OSError):
        while True:
            taken.append(os.dup(taken[0]))

    def give_back() -> None:
        while taken:
            os.close(taken.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    pool.undo = give_back
    if pool.moment == "being restarted":
        _kill(pool)  # once more, so that its next start needs descriptors
    pool.tell("")


def _give_back(pool: Pool) -> None:
    time.sleep(LATE)
    pool.undo()


def _take_arena(pool: Pool) -> None:
    """Take all of the shared memory until `Pool.undo`."""
    kept: list[Inputs] = []
    pool.undo = kept.clear
    with suppress(MemoryFullError):
        while True:
            kept.append(pool.master.allocate({"x": (16, 4)}))
    if pool.hit:  # the request that waits for memory comes now
        pool.tell("")
        pool.others += pool.hit
        pool.hit = [pool.predict()]


def _set_clock_back(pool: Pool) -> None:
    """Set `time.time` back by an hour in this process, and note which modules of mcinfer call it."""
    real, readers = time.time, list[str]()

    def earlier() -> float:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == "mcinfer":
            readers.append(caller)
        return real() - 3600.0

    def set_right() -> None:
        time.time = real
        assert not readers, f"{readers} ask for the time of day"

    time.time = earlier
    pool.undo = set_right
    pool.tell("")


FAULTS = {
    "worker: SIGKILL": Fault(
        words="an outside process kills the worker",
        cells=dict.fromkeys(MOMENTS, _DIES) | {"exiting": _CLOSING},
        thorough=("starting", "importing", "building", "idle", "exiting"),
        inflict=_kill,
    ),
    "worker: SIGSTOP": Fault(
        words="stopped and never continued",
        cells=dict.fromkeys(("importing", "building"), _NOT_READY)
        | {"idle": _HANGS, "busy": _HANGS, "exiting": _CLOSING, "being restarted": _DIES},
        thorough=("importing", "building", "idle", "exiting", "being restarted"),
        inflict=_stop,
    ),
    "worker: SIGSTOP, late SIGCONT": Fault(
        words="stopped, and continued after its request timed out, or a moment later",
        cells=dict.fromkeys(("importing", "building"), _KEPT)
        | {"busy": (TIMED_OUT, KEPT), "exiting": _CLOSING},
        thorough=("importing", "building", "exiting"),
        inflict=_stop,
        relent=_continue,
        setting={"grace": 5.0},
    ),
    "worker: segfault": Fault(
        words="reads address 0",
        cells={"building": _DIES},
        inflict=partial(_tell, "segfault"),
    ),
    "worker: _exit": Fault(
        words="`os._exit(3)`",
        cells={"importing": _DIES, "busy": _DIES},
        thorough=("importing", "busy"),
        inflict=partial(_tell, "exit"),
    ),
    "worker: out of memory": Fault(
        words="asks for 1 GiB with 256 MiB of address space left (`RLIMIT_AS`); during the start, "
        "with none left",
        cells={"starting": _DIES, "building": _BUILD_MEMORY, "busy": _RUN_MEMORY},
        thorough=("starting", "building"),
        inflict=_take_memory,
    ),
    "worker: past worker_memory_bytes": Fault(
        words="asks for 1 GiB, with `Limits.worker_memory_bytes` at 512 MiB",
        cells={"building": _BUILD_MEMORY, "busy": _RUN_MEMORY},
        thorough=("building", "busy"),
        inflict=partial(_tell, f"allocate:{1 << 30}"),
        setting={"limits": Limits(worker_memory_bytes=512 << 20)},
    ),
    "worker: never ends": Fault(
        words="its current run or build never ends",
        cells={"building": _NOT_READY, "busy": _HANGS, "being restarted": _DIES},
        thorough=("building", "being restarted"),
    ),
    "worker: exception": Fault(
        words="the engine or an import raises",
        cells={
            "building": (Outcome("asked to fail", BuildError), NONE_LEFT),
            "busy": (Outcome("asked to fail", PredictError), KEPT),
            "being restarted": _DIES,
        },
        thorough=("building", "busy", "being restarted"),
        inflict=partial(_tell, "fail"),
    ),
    "worker: no descriptors": Fault(
        words="can open no more files (`RLIMIT_NOFILE`)",
        cells={"building": _DIES, "idle": _DIES, "busy": _KEPT},
        thorough=("building", "idle", "busy"),
        inflict=_take_workers_descriptors,
    ),
    "master: SIGKILL": Fault(
        words="killed",
        cells=dict.fromkeys(
            ("importing", "busy", "exiting", "being restarted"), (KILLED, NONE_LEFT)
        ),
        thorough=("importing", "exiting", "being restarted"),
        signals=(signal.SIGKILL,),
    ),
    "master: SIGTERM": Fault(
        words="terminated; no handler",
        cells=dict.fromkeys(("building", "busy"), (TERMINATED, NONE_LEFT)),
        thorough=("building",),
        signals=(signal.SIGTERM,),
    ),
    "master: SIGTERM, handled": Fault(
        words="a handler calls `sys.exit`",
        cells={"busy": (EXITED, NONE_LEFT)},
        signals=(signal.SIGTERM,),
        handles=True,
    ),
    "master: SIGINT": Fault(
        words="Ctrl-C",
        cells=dict.fromkeys(("building", "busy", "exiting"), _INTERRUPTED),
        thorough=("building", "exiting"),
        signals=(signal.SIGINT,),
    ),
    "master: SIGINT twice": Fault(
        words="Ctrl-C, and another one while the pool closes",
        cells=dict.fromkeys(("busy", "exiting"), _INTERRUPTED),
        thorough=("busy",),
        signals=(signal.SIGINT, signal.SIGINT),
    ),
    "master: no descriptors": Fault(
        words="can open no more files for a moment; at a start, permanently",
        cells={
            "starting": (DESCRIPTORS_NEEDED, NONE_LEFT),
            "idle": (Outcome("Too many open files", PredictError), KEPT),
            "busy": _KEPT,
            "exiting": _CLOSING,
            "being restarted": _DIES,
        },
        thorough=("starting", "busy", "exiting", "being restarted"),
        inflict=_take_descriptors,
        relent=_give_back,
    ),
    "shared memory full": Fault(
        words='callers hold all of `Limits.memory_bytes`; idle: `when_full="raise"`, busy: `"wait"`',
        cells={"idle": (MEMORY_FULL, KEPT), "busy": _KEPT},
        thorough=("idle",),
        inflict=_take_arena,
        relent=_give_back,
    ),
    "disk full": Fault(
        words="no room for the prepared model in the cache's folder",
        cells={"building": _KEPT},
        thorough=("building",),
    ),
    "clock set back": Fault(
        words="`time.time` goes back by an hour",
        cells={"building": _KEPT, "busy": _KEPT},
        thorough=("building", "busy"),
        inflict=_set_clock_back,
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    fault: str
    moment: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.moment}"

    @property
    def row(self) -> _Row:
        return FAULTS[self.fault].cells[self.moment]

    @property
    def is_thorough(self) -> bool:
        return self.moment in FAULTS[self.fault].thorough


CELLS = [Cell(name, moment) for name, fault in FAULTS.items() for moment in fault.cells]


def run_cell(cell: Cell, folder: Path, fake_model: FakeModel, kind: type[Pool] = Pool) -> str:
    """Put the fault to a pool of this kind, or to a program, at that moment; fail unless all is as it says.

    Returns the time from the fault until every caller had its answer, and, after a slash, until all workers
    served again. The folder is for this cell alone.
    """
    fault, (hit, worker) = FAULTS[cell.fault], cell.row
    if cell.fault == "disk full":
        return _text(start_with_full_disk(folder))
    if hit is DESCRIPTORS_NEEDED:
        seconds, said = start_without_descriptors(fake_model)
        assert said.startswith("BuildError: ")
        hit.check(BuildError(said))
        return _text(seconds)
    if fault.signals:
        return _text(_run_in_program(cell, folder, fake_model))
    with kind(folder, fake_model, cell.moment, **_setting(cell)) as pool:
        pool.reach()
        _check_health(pool, before=True)
        began = monotonic()
        fault.inflict(pool)
        pool.release_beside()
        pool.ask()
        fault.relent(pool)
        for caller in pool.hit:
            hit.check(caller.outcome())
        if worker != NONE_LEFT:
            pool.others += [pool.submit(), pool.submit(), pool.predict()]
        for caller in pool.others:
            (CLOSED if cell.moment == "exiting" else RIGHT).check(caller.outcome())
        if pool.closing is not None:
            pool.closing.result(timeout=40.0)
        settled = _text(monotonic() - began)
        if worker == NONE_LEFT:
            assert states(pool.master) == ["gone", "gone"]
            CLOSED.check(pool.submit().outcome())
            expected = "closed" if cell.moment == "exiting" else "failed"
            assert pool.master.health().state == expected
            return settled
        if worker == REPLACED:
            wait_until(lambda: pool.pid not in pids(pool.master))
        wait_for_states(pool.master, "ready", "ready")
        whole = _text(monotonic() - began)
        assert (pool.pid in pids(pool.master)) is (worker == KEPT)
        RIGHT.check(pool.predict().outcome())
        _check_health(pool, before=False)
        return f"{settled} / {whole}"


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _check_health(pool: Pool, *, before: bool) -> None:
    health = pool.master.health()
    state = "ready"
    if before and pool.moment in MOMENTS[:3]:
        state = "starting"
    elif before:
        state = {"exiting": "closing", "being restarted": "degraded"}.get(pool.moment, state)
    assert health.state == state, health
    if not before:
        assert (health.reasons, health.serving) == ((), 2), health


def _setting(cell: Cell) -> dict[str, Any]:
    """Arguments of the pool: time limits are short where the expected outcome is that they end."""
    (hit, _), setting = cell.row, {**FAULTS[cell.fault].setting}
    if hit is TIMED_OUT:
        setting["hit_timeout"] = HIT_TIMEOUT
    stands = cell.fault in ("worker: SIGSTOP", "worker: never ends")
    if hit is NOT_READY or (cell.moment == "being restarted" and stands):
        setting["start"] = 4.0  # a worker must come to that moment in this time on a busy machine
    if cell.fault == "shared memory full":
        wait = Limits(memory_bytes=1 << 20)
        setting["limits"] = replace(wait, when_full="raise") if hit is MEMORY_FULL else wait
    return setting


def _run_in_program(cell: Cell, folder: Path, fake_model: FakeModel) -> float:
    fault, (hit, _) = FAULTS[cell.fault], cell.row
    where = folder, fake_model, cell.moment
    seconds, ended = end_service(*where, *fault.signals, handles=fault.handles)
    assert ended.status == hit.status, ended
    assert not re.search(r"^\[.* worker \d", ended.err, re.MULTILINE)
    if len(fault.signals) == 1 and hit is INTERRUPTED:
        assert ended.err.count("Traceback") == 1
        assert ended.err.endswith("KeyboardInterrupt\n")
    return seconds
