"""Pools brought to a moment of their life, so that a fault can be put to them there.

A worker is held where a test wants it by a named pipe: an import, a build or a run that reads it stands still
until the test writes, and then does what was written. So a moment is reached when the pipe has a reader, and
no fault depends on a sleep.
"""

import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from mcinfer import Limits, Master, McinferError, RestartPolicy, Timeouts
from mcinfer.config import TransportKind
from tests.process.hostile_worker import become
from tests.process.models import FakeModel, Inputs, assert_answers, rows
from tests.process.waiting import pids, states, wait_for_states, wait_until

CLOSE = 0.3
"""Seconds that workers have to end by themselves."""

_IMPORTED_FIRST = "msgpack"
"""What a worker imports before it says HELLO, and the master has imported long before."""

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
"""A module in the place of another one: stands still first, and then is the other one."""

_IN_PYTHON = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "exit": "os._exit(3)",
    "fail": "raise ImportError('told to fail')",
    "allocate": "bytearray(1 << 30)",
}
"""The engine's acts, for an import."""


class HeldPipe:
    """A named pipe at which the first who reads it stands still; owns its writing end."""

    def __init__(self, path: Path) -> None:
        """Make it."""
        self._path = path
        self._fd: int | None = None
        os.mkfifo(path)

    def wait(self) -> None:
        """Return once a reader stands there. A later one finds no pipe."""

        def has_reader() -> bool:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return False
            return True

        wait_until(has_reader)
        self._path.unlink()

    def tell(self, text: str) -> None:
        """Let the reader go on, with this text; once only."""
        if self._fd is not None:
            with suppress(BrokenPipeError):
                os.write(self._fd, text.encode())
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Let go of it."""
        self._path.unlink(missing_ok=True)
        self.tell("")


def hold_imports(folder: Path) -> tuple[str, HeldPipe]:
    """Have the first worker of a master stand still in its imports.

    Returns:
        What is to be the first of that master's `sys.path`, and the pipe.
    """
    late = folder / "late"
    late.mkdir()
    (late / f"{_IMPORTED_FIRST}.py").write_text(_SLOW_IMPORT, encoding="utf-8")
    return str(late), HeldPipe(late / "import0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a pool is like before anything happens to it.

    Attributes:
        start: `Timeouts.start`.
        grace: `Timeouts.cancel_grace`.
        hit_timeout: Seconds for the request that the fault hits.
        limits: Of the pool.
        hostile: What one of the workers sends, of `hostile_worker.KINDS`.
        transport: Of the pool.
    """

    start: float = 30.0
    grace: float = 0.1
    hit_timeout: float = 20.0
    limits: Limits = field(default_factory=Limits)
    hostile: str = ""
    transport: TransportKind = "zeromq"


@dataclass(slots=True)
class Caller:
    """A caller that waits: for the start of the pool, or for the answer to these inputs."""

    future: "Future[Any]"
    inputs: Inputs | None = None

    def outcome(self) -> BaseException | None:
        """The error that came; None for the right answer, or a start that was one.

        Raises:
            AssertionError: The answer is not right, or neither came.
        """
        error = self.future.exception(timeout=40.0)
        if error is None and self.inputs is not None:
            assert_answers(self.future.result(), self.inputs)
        return error


class Pool:
    """Two workers and those who wait for them; a context manager.

    Attributes:
        master: Of the engine "fake", which imports, builds and runs as pipes in `folder` say.
        folder: Of this pool alone.
        hit: Whom the fault is to hit.
        others: All others who wait.
        closing: The call of `Master.close` that goes on.
        moment: That it was brought to.
        undo: What ends the fault, for one that has an end.
        logged: What the pool logged.
        victim: The index of the worker that the fault is put to.
        pid: Of its process.
    """

    def __init__(
        self, folder: Path, fake_model: FakeModel, setting: Setting, *, importing: bool = False
    ) -> None:
        """Make it; nothing starts. With `importing`, it is to be brought to that moment."""
        self.folder = folder
        self.setting = setting
        self._stack = ExitStack()
        self._held: HeldPipe | None = None
        if importing:
            late, self._held = hold_imports(folder)
            patch = self._stack.enter_context(pytest.MonkeyPatch.context())
            patch.syspath_prepend(late)  # the master looks at the path when it is made
            self._stack.callback(self._held.close)
        model = fake_model(build=f"told:{folder}/build", run=f"told:{folder}/run")
        timeouts = Timeouts(
            start=setting.start, predict=20.0, cancel_grace=setting.grace, close=CLOSE
        )
        self.master = Master(
            model,
            2,
            engine="fake",
            verify="never",
            timeouts=timeouts,
            restart=RestartPolicy(budget=1000, backoff=0.02, backoff_limit=0.1),
            limits=setting.limits,
            transport=setting.transport,
        )
        self.hit: list[Caller] = []
        self.others: list[Caller] = []
        self.closing: Future[None] | None = None
        self.undo: Callable[[], None] = lambda: None
        self.logged: list[str] = []
        self.moment = ""
        self.victim = 0
        self.pid = 0
        self._beside: HeldPipe | None = None
        self._asked = 0
        self._imports = False
        self._threads = ThreadPoolExecutor(4)

    def __enter__(self) -> Self:
        log = logging.getLogger("mcinfer.master")
        handler = logging.Handler()
        handler.emit = lambda record: self.logged.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        self._stack.callback(log.removeHandler, handler)
        self._stack.callback(self._threads.shutdown)
        self._stack.callback(self.master.close, 0.2)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()
        self._stack.close()

    # Its callers.

    def begin(self) -> None:
        """Call `Master.start`, in a thread."""
        if self.setting.hostile:
            patch = self._stack.enter_context(pytest.MonkeyPatch.context())
            become(self.folder, patch, self.setting.hostile)
        self.hit = [Caller(self._threads.submit(self.master.start))]

    def start(self) -> None:
        """Start it, and find out which worker is the victim."""
        self.begin()
        self.hit.pop().future.result(timeout=40.0)
        for index, pid in enumerate(pids(self.master)):
            if self.setting.hostile and b"hostile" in Path(f"/proc/{pid}/cmdline").read_bytes():
                self.victim = index
        self.pid = pids(self.master)[self.victim]

    def submit(self, timeout: float = 20.0) -> Caller:
        """One request more, unlike all before."""
        self._asked += 1
        inputs = rows(4, first=100.0 * self._asked)
        try:
            future = self.master.submit(inputs, timeout=timeout)
        except (McinferError, OSError) as exc:
            future = Future()
            future.set_exception(exc)
        return Caller(future, inputs)

    def predict(self, count: int = 5) -> Caller:
        """One for all workers, from a thread that waits for it."""
        self._asked += 1
        inputs = rows(count, first=100.0 * self._asked)
        return Caller(self._threads.submit(self.master.predict, inputs), inputs)

    def close(self) -> None:
        """Call `Master.close`, in a thread."""
        self.closing = self._threads.submit(self.master.close)

    # What holds a worker, and lets it go.

    def pipe(self, name: str, index: int) -> HeldPipe:
        """A pipe for what the worker of this index does next."""
        pipe = HeldPipe(self.folder / f"{name}{index}")
        self._stack.callback(pipe.close)
        return pipe

    def hold(self, name: str) -> None:
        """Wait until the victim stands at a pipe that was made for it."""
        assert self._held is not None
        self._held.wait()
        self._imports = name == "import"
        self.pid = pids(self.master)[self.victim]

    def tell(self, act: str) -> None:
        """Have the victim, if it is held, go on with an act of the engine's; an empty one is none."""
        if self._held is None:
            return
        if self._imports:
            act = _IN_PYTHON.get(act.partition(":")[0], "")
        self._held.tell(act)

    @property
    def is_held(self) -> bool:
        """Whether the victim stands at a pipe, or did."""
        return self._held is not None

    def release_beside(self) -> None:
        """Have the other worker go on, if it is held."""
        if self._beside is not None:
            self._beside.tell("")

    # The moments.

    def reach(self, moment: str, *, inside: bool) -> None:
        """Bring it to that moment; `inside` if an idle worker is to be told an act."""
        self.moment = moment
        match moment:
            case "starting":
                self.reach_starting()
            case "importing":
                self.reach_importing()
            case "building":
                self.reach_building()
            case "idle":
                self.reach_idle(inside=inside)
            case "busy":
                self.reach_busy()
            case "exiting":
                self.reach_exiting()
            case "being restarted":
                self.reach_restarting()

    def reach_starting(self) -> None:
        """The process exists, and no more."""
        self.begin()
        wait_until(lambda: pids(self.master))
        self.pid = pids(self.master)[0]

    def reach_importing(self) -> None:
        """It has not said HELLO: it imports."""
        self.begin()
        self.hold("import")
        assert states(self.master)[0] == "spawned"

    def reach_building(self) -> None:
        """It loads its model."""
        self._held = self.pipe("build", 0)
        self.begin()
        self.hold("build")
        assert states(self.master)[0] == "building"

    def reach_idle(self, *, inside: bool) -> None:
        """It has nothing to do; for an act that it is told, a thread of it waits."""
        self.start()
        if inside:
            first = self.pipe("run", 0)
            self._held = self.pipe("aside", 0)
            caller = self.submit()
            first.wait()
            first.tell(f"aside:told:{self.folder}/aside")
            assert caller.outcome() is None
            self.hold("aside")
        wait_for_states(self.master, "ready", "ready")

    def reach_busy(self) -> None:
        """It is in a run, and so is the other one; more requests are queued."""
        self.start()
        pipes = [self.pipe("run", index) for index in range(2)]
        callers = []
        for index, pipe in enumerate(pipes):
            is_hit = index == self.victim
            callers.append(self.submit(self.setting.hit_timeout if is_hit else 20.0))
            pipe.wait()
        self._held, self._beside = pipes[self.victim], pipes[1 - self.victim]
        self.hit = [callers.pop(self.victim)]
        self.others = [*callers, self.submit(), self.submit()]

    def reach_exiting(self) -> None:
        """It is in a run, and `Master.close` goes on."""
        self.reach_busy()
        self.close()
        wait_until(lambda: states(self.master)[self.victim] == "exiting")

    def reach_restarting(self) -> None:
        """It is dead, and the one in its place loads the model."""
        self.start()
        assert self.predict().outcome() is None
        self._held = self.pipe("build", 0)
        os.kill(self.pid, signal.SIGKILL)
        self.hold("build")
        assert states(self.master)[0] == "building"

    def ask(self) -> None:
        """What callers ask directly after the fault, where the one that it hits does not wait already."""
        if self.moment in ("idle", "being restarted"):
            self.hit = [self.submit(self.setting.hit_timeout)]

    def is_whole(self) -> None:
        """Return once both workers serve."""
        wait_for_states(self.master, "ready", "ready")
