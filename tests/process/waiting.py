"""Waiting for other processes: for a condition, with a time limit."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from mcinfer import Master
from mcinfer.inline import InlinePool
from mcinfer.runtime.inbox import Question
from mcinfer.runtime.loop import Loop


def wait_until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Return once the condition holds; fail the test after so many seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s")
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def marked(name: str, value: str) -> list[psutil.Process]:
    """The processes with this environment variable, such as all that a program has started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process)
    return found


def all_gone(pids: Sequence[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def pids(master: Master) -> list[int]:
    """Of the workers that have a process, by index."""
    return [worker.pid for worker in master.statistics().workers if worker.pid is not None]


def states(master: Master) -> list[str]:
    return [worker.state for worker in master.statistics().workers]


def wait_for_states(master: Master, *expected: str, timeout: float = 30.0) -> None:
    """Wait until the workers are in these states, whichever is in which."""
    wait_until(lambda: sorted(states(master)) == sorted(expected), timeout)


def in_line(master: Master) -> int:
    """How many callers wait for room in the queue."""
    if isinstance(master._loop, InlinePool):
        return len(master._loop.line)
    return len(loop_of(master).admission.places.waiting)


@contextmanager
def no_run(pool: InlinePool) -> Iterator[None]:
    """No run of an inline pool begins meanwhile; at the end its threads look for one."""
    with pool._lock:
        lanes, pool._lanes = pool._lanes, []
    try:
        yield
    finally:
        with pool._lock:
            pool._lanes = lanes
            pool._work.notify_all()


def loop_of(master: Master) -> Loop:
    """The loop of a master with workers."""
    assert isinstance(master._loop, Loop)
    return master._loop


def call_in_loop(master: Master, function: Callable[[], object]) -> None:
    """Have the loop's thread call the function, in its next turn."""
    loop_of(master).inbox.post(Question(function))


def busy_pid(master: Master) -> int:
    """The process of the one worker that is in a run, once there is one."""
    found: list[int] = []

    def find() -> list[int]:
        workers = master.statistics().workers
        found[:] = [w.pid for w in workers if w.state == "busy" and w.pid is not None]
        return found

    wait_until(find)
    (pid,) = found
    return pid


def stop(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text("ascii").rpartition(")")[2].split()[0] == "T")


def settle(outcome: "Future[Any]", function: Callable[[], object]) -> None:
    """Call the function, and put what it returns or raises into the future."""
    try:
        outcome.set_result(function())
    except BaseException as exc:
        outcome.set_exception(exc)


@contextmanager
def running(function: Callable[[], object]) -> Iterator["Future[object]"]:
    """Call the function in a thread, which has ended after the with statement."""
    outcome: Future[object] = Future()
    thread = threading.Thread(target=settle, args=(outcome, function))
    thread.start()
    try:
        yield outcome
    finally:
        thread.join()


class HeldPipe:
    """A named pipe, and its writing end: a process that reads the pipe waits until the test writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        os.mkfifo(path)

    def wait(self) -> None:
        """Return once a process reads; the pipe's name is gone then, so a later reader finds none."""

        def has_reader() -> bool:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return False
            return True

        wait_until(has_reader)
        self._path.unlink()

    def tell(self, text: str) -> None:
        """Let the reader continue with this text; a second call does nothing."""
        if self._fd is not None:
            with suppress(BrokenPipeError):
                os.write(self._fd, text.encode())
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self.tell("")
