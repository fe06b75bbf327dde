"""What goes wrong: each fault by its name, and how it is done to a pool or a program."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from mcinfer import Limits, QueueFullError
from tests.process.fault_pools import Pool
from tests.process.models import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        words: What it is, for the page.
        inflict: Put it to the pool.
        relent: What comes once callers have asked.
        setting: Of the pool, as `Setting` has it.
        inside: Whether it is an act of the worker's own, so that an idle one needs a thread for it.
        signals: For one that befalls a whole program: what it is sent.
        handles: Not empty if that program has a handler of SIGTERM.
    """

    words: str
    inflict: Callable[[Pool], None] = lambda _: None
    relent: Callable[[Pool], None] = lambda _: None
    setting: Mapping[str, Any] = field(default_factory=dict)
    inside: bool = False
    signals: tuple[signal.Signals, ...] = ()
    handles: str = ""


HIT_TIMEOUT = 1.0
"""Seconds of a request that is to run out of time."""

LATE = 0.15
"""Seconds that a fault lasts which passes by itself."""


def _kill(pool: Pool) -> None:
    os.kill(pool.pid, signal.SIGKILL)


def _stop(pool: Pool) -> None:
    os.kill(pool.pid, signal.SIGSTOP)


def _continue(pool: Pool) -> None:
    """SIGCONT, after the request that it hit is given up, or after a while."""
    if pool.setting.hit_timeout == HIT_TIMEOUT:
        pool.hit[0].outcome()
    else:
        time.sleep(LATE)
    with suppress(ProcessLookupError):
        os.kill(pool.pid, signal.SIGCONT)
    pool.tell("")


def _tell(act: str) -> Callable[[Pool], None]:
    return lambda pool: pool.tell(act)


def _take_memory(pool: Pool) -> None:
    """Less address space than what it then asks for; at its very start, none at all."""
    has = psutil.Process(pool.pid).memory_info().vms
    most = has + (256 << 20) if pool.is_held else 1 << 20
    resource.prlimit(pool.pid, resource.RLIMIT_AS, (most, most))
    pool.tell(f"allocate:{1 << 30}")


def _take_workers_descriptors(pool: Pool) -> None:
    resource.prlimit(pool.pid, resource.RLIMIT_NOFILE, (3, 3))
    pool.tell("")


def _take_descriptors(pool: Pool) -> None:
    """Leave this process none that is free, now or later, until `Pool.undo`.

    A worker that is being started again dies once more, so that its start needs some.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/", os.O_RDONLY)]
    # As many as poll(2) may be asked for; whatever is open above stays so.
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
        _kill(pool)
    pool.tell("")


def _give_back(pool: Pool) -> None:
    time.sleep(LATE)
    pool.undo()


def _take_arena(pool: Pool) -> None:
    """All of the shared memory, until `Pool.undo`."""
    kept: list[Inputs] = []
    pool.undo = kept.clear
    with suppress(QueueFullError):
        while True:
            kept.append(pool.master.allocate({"x": (16, 4)}))
    if pool.hit:  # it waits for memory
        pool.tell("")
        pool.others += pool.hit
        pool.hit = [pool.predict()]


def _set_clock_back(pool: Pool) -> None:
    """An hour, for all in this process; whether mcinfer asks for the time of day is seen as well."""
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
    "worker: SIGKILL": Fault(words="an outside process kills the worker", inflict=_kill),
    "worker: SIGSTOP": Fault(words="stopped and never continued", inflict=_stop),
    "worker: SIGSTOP, late SIGCONT": Fault(
        words="stopped, and continued after its request timed out, or a moment later",
        inflict=_stop,
        relent=_continue,
        setting={"grace": 5.0},
    ),
    "worker: segfault": Fault(words="reads address 0", inflict=_tell("segfault"), inside=True),
    "worker: _exit": Fault(words="`os._exit(3)`", inflict=_tell("exit"), inside=True),
    "worker: out of memory": Fault(
        words="asks for 1 GiB with 256 MiB of address space left (`RLIMIT_AS`); during the start, "
        "with none left",
        inflict=_take_memory,
    ),
    "worker: past worker_memory_bytes": Fault(
        words="asks for 1 GiB, with `Limits.worker_memory_bytes` at 512 MiB",
        inflict=_tell(f"allocate:{1 << 30}"),
        setting={"limits": Limits(worker_memory_bytes=512 << 20)},
    ),
    "worker: never ends": Fault(words="its current run or build never ends"),
    "worker: exception": Fault(words="the engine or an import raises", inflict=_tell("fail")),
    "worker: no descriptors": Fault(
        words="can open no more files (`RLIMIT_NOFILE`)", inflict=_take_workers_descriptors
    ),
    "worker: answers twice": Fault(
        words="sends every answer twice", inflict=_tell(""), setting={"hostile": "twice"}
    ),
    "worker: answers late": Fault(
        words="holds back each answer until the next one",
        inflict=_tell(""),
        setting={"hostile": "late"},
    ),
    "worker: wrong place": Fault(
        words="answers with a wrong place in memory",
        inflict=_tell(""),
        setting={"hostile": "forged_block:overlap"},
    ),
    "worker: garbage": Fault(
        words="sends random bytes instead of an answer",
        inflict=_tell(""),
        setting={"hostile": "garbage"},
    ),
    "master: SIGKILL": Fault(words="killed", signals=(signal.SIGKILL,)),
    "master: SIGTERM": Fault(words="terminated; no handler", signals=(signal.SIGTERM,)),
    "master: SIGTERM, handled": Fault(
        words="a handler calls `sys.exit`", signals=(signal.SIGTERM,), handles="yes"
    ),
    "master: SIGINT": Fault(words="Ctrl-C", signals=(signal.SIGINT,)),
    "master: SIGINT twice": Fault(
        words="Ctrl-C, and another one while the pool closes",
        signals=(signal.SIGINT, signal.SIGINT),
    ),
    "master: no descriptors": Fault(
        words="can open no more files for a moment; at a start, permanently",
        inflict=_take_descriptors,
        relent=_give_back,
    ),
    "shared memory full": Fault(
        words='callers hold all of `Limits.memory_bytes`; idle: `when_full="raise"`, busy: `"wait"`',
        inflict=_take_arena,
        relent=_give_back,
        setting={"limits": Limits(memory_bytes=1 << 20)},
    ),
    "disk full": Fault(words="no room for the prepared model in the cache's folder"),
    "clock set back": Fault(words="`time.time` goes back by an hour", inflict=_set_clock_back),
}
