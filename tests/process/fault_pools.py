"""A pool at a moment of its life, so that a fault can hit it there.

A named pipe holds a worker: an import, a build or a run that reads the pipe stands still until the test
writes to it, and then does what was written. So a moment is reached when the pipe has a reader, and no
fault depends on a sleep.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from mcinfer import Limits, Master, McinferError, RestartPolicy, Timeouts
from tests.process.models import FakeModel, Inputs, assert_answers, fake_master, rows
from tests.process.waiting import HeldPipe, pids, states, wait_for_states, wait_until

CLOSE = 0.3
"""`Timeouts.close` of the pool, in seconds."""

_SLOW_IMPORT = """
import os, sys
folder = os.path.dirname(__file__)
sys.path.remove(folder)
del sys.modules[__name__]
try:
    told = open(os.path.join(folder, "import" + sys.argv[2])).read()
except FileNotFoundError:
    told = ""
exec(told)
import msgpack
"""
"""In the place of msgpack, which a worker imports before it says HELLO: waits, then imports the real one."""

_IN_PYTHON = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "exit": "os._exit(3)",
    "fail": "raise ImportError('asked to fail')",
    "allocate": "bytearray(1 << 30)",
}
"""Acts of the engine "fake", for an import."""


def hold_imports(folder: Path) -> tuple[str, HeldPipe]:
    """Hold the first worker of a master in its imports.

    Returns:
        The folder to put first in that master's `sys.path`, and the pipe.
    """
    late = folder / "late"
    late.mkdir()
    (late / "msgpack.py").write_text(_SLOW_IMPORT, encoding="utf-8")
    return str(late), HeldPipe(late / "import0")


@dataclass(slots=True)
class Caller:
    """A caller that waits for the start of the pool, or for the answer to these inputs."""

    future: "Future[Any]"
    inputs: Inputs | None = None

    def outcome(self) -> BaseException | None:
        """The error, or None for the right answer or a start; fails after 40 s or for a wrong answer."""
        error = self.future.exception(timeout=40.0)
        if error is None and self.inputs is not None:
            assert_answers(self.future.result(), self.inputs)
        return error


class Pool:
    """Two workers, of the engine "fake" unless `_made` says otherwise, and their callers; a context manager.

    Attributes:
        hit: The callers that the fault hits.
        others: All other callers.
        closing: The call of `Master.close` that goes on, if any.
        undo: Ends the fault, if it has an end.
        pid: The process of the worker that the fault hits.
        concurrent_runs: Of each worker.
    """

    concurrent_runs = 1

    def __init__(
        self,
        folder: Path,
        fake_model: FakeModel,
        moment: str,
        *,
        start: float = 30.0,
        grace: float = 0.1,
        hit_timeout: float = 20.0,
        limits: Limits | None = None,
    ) -> None:
        """Start nothing yet.

        `start` and `grace` are of `Timeouts`; the request that the fault hits has `hit_timeout` seconds.
        """
        self.moment = moment
        self.hit_timeout = hit_timeout
        self.hit: list[Caller] = []
        self.others: list[Caller] = []
        self.closing: Future[None] | None = None
        self.undo: Callable[[], None] = lambda: None
        self.pid = 0
        self._folder = folder
        self._held: HeldPipe | None = None
        self._beside: HeldPipe | None = None
        self._asked = 0
        self._stack = ExitStack()
        if moment == "importing":
            late, self._held = hold_imports(folder)
            patch = self._stack.enter_context(pytest.MonkeyPatch.context())
            patch.syspath_prepend(late)  # the master reads the path when it is made
            self._stack.callback(self._held.close)
        self.master = self._made(
            fake_model,
            timeouts=Timeouts(start=start, predict=20.0, cancel_grace=grace, close=CLOSE),
            restart=RestartPolicy(budget=1000, backoff=0.02, backoff_limit=0.1),
            limits=limits or Limits(),
        )
        self._threads = self._stack.enter_context(ThreadPoolExecutor(4))
        self._stack.callback(self.master.close, 0.2)

    def _made(self, fake_model: FakeModel, **options: Any) -> Master:
        """A master of two workers, whose builds and runs read the folder's pipes ``build`` and ``run``."""
        told = f"told:{self._folder}"
        return fake_master(fake_model(build=f"{told}/build", run=f"{told}/run"), 2, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
        self._stack.close()

    # Callers.

    def submit(self, timeout: float = 20.0) -> Caller:
        """One more request, unlike all before."""
        self._asked += 1
        inputs = rows(4, first=100.0 * self._asked)
        try:
            future = self.master.submit(inputs, timeout=timeout)
        except (McinferError, OSError) as exc:
            future = Future()
            future.set_exception(exc)
        return Caller(future, inputs)

    def predict(self) -> Caller:
        """A request for all workers, from a thread that waits for its answer."""
        self._asked += 1
        inputs = rows(5, first=100.0 * self._asked)
        return Caller(self._threads.submit(self.master.predict, inputs), inputs)

    def ask(self) -> None:
        """Send the request that the fault hits, if no call waits already."""
        if self.moment in ("idle", "being restarted"):
            self.hit = [self.submit(self.hit_timeout)]

    # Workers that a pipe holds.

    @property
    def is_held(self) -> bool:
        """Whether a pipe holds the victim, or did."""
        return self._held is not None

    def tell(self, act: str) -> None:
        """Let the victim continue, if a pipe holds it, with an act of the engine; "" is none."""
        if self._held is not None:
            is_import = self.moment == "importing"
            self._held.tell(_IN_PYTHON.get(act.partition(":")[0], "") if is_import else act)

    def release_beside(self) -> None:
        """Let the other worker continue, if a pipe holds it."""
        if self._beside is not None:
            self._beside.tell("")

    def _pipe(self, name: str, index: int = 0) -> HeldPipe:
        pipe = HeldPipe(self._folder / f"{name}{index}")
        self._stack.callback(pipe.close)
        return pipe

    def _hold(self, state: str) -> None:
        """Wait until its pipe holds the victim, which is in this state."""
        assert self._held is not None
        self._held.wait()
        self.pid = pids(self.master)[0]
        assert states(self.master)[0] == state

    # The moments.

    def reach(self) -> None:
        """Bring the pool to its moment."""
        match self.moment:
            case "starting":  # the process exists, and no more
                self._begin()
                wait_until(lambda: pids(self.master))
                self.pid = pids(self.master)[0]
            case "importing":
                self._begin()
                self._hold("spawned")
            case "building":
                self._held = self._pipe("build")
                self._begin()
                self._hold("building")
            case "idle":
                self._start()
                wait_for_states(self.master, "ready", "ready")
            case "busy":
                self._reach_busy()
            case "exiting":
                self._reach_busy()
                self.closing = self._threads.submit(self.master.close)
                wait_until(lambda: states(self.master)[0] == "exiting")
            case "being restarted":
                self._start()
                assert self.predict().outcome() is None
                self._held = self._pipe("build")
                os.kill(self.pid, signal.SIGKILL)
                self._hold("building")

    def _begin(self) -> None:
        self.hit = [Caller(self._threads.submit(self.master.start))]

    def _start(self) -> None:
        self._begin()
        self.hit.pop().future.result(timeout=40.0)
        self.pid = pids(self.master)[0]

    def _reach_busy(self) -> None:
        """Both workers are in a run; more requests are queued."""
        self._start()
        pipes = [self._pipe("run", index) for index in range(2)]
        callers = []
        for index, pipe in enumerate(pipes):
            callers.append(self.submit(20.0 if index else self.hit_timeout))
            pipe.wait()
        self._held, self._beside = pipes
        self.hit = callers[:1]
        self.others = [*callers[1:], self.submit(), self.submit()]
