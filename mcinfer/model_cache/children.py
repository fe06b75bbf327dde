"""Work in a process of its own, so that the serving process keeps no memory of that work.

::

    caller   run_child(function, arguments) ──► python -m mcinfer.model_cache.children FD, one for each task
    child    one line of JSON in; lines of JSON out: {"progress": …}, the first of them empty and at once,
             then {"result": …} or {"error": text}

The child ends with its parent (`mcinfer.process`), and `run_child` returns or raises only after its end. A
child that `run_beside` starts does neither: it goes on alone, at the lowest priority, for a bounded time.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from mcinfer.errors import BuildError, McinferError, shortened
from mcinfer.private import fill_streams
from mcinfer.process import (
    ORPHANED,
    command,
    cpu_time,
    end,
    environment,
    import_path,
    watch_parent,
)

if TYPE_CHECKING:
    from subprocess import Popen

Progress = Callable[[Mapping[str, Any]], None]
"""Called with what a child says of its work, such as ``seconds`` so far and ``written`` bytes."""

_READ_BYTES = 1 << 16
_TICK = 0.5
_HELLO_SECONDS = 60.0
_MAX_SECONDS = 4 * 3600  # default time limit of one task


class ChildFailedError(McinferError):
    """The child ended without a result; another try may succeed."""


def run_child(
    function: Callable[..., Any] | str,
    arguments: Sequence[Any],
    tick: Progress = lambda _: None,
    *,
    pass_fds: Sequence[int] = (),
    most_seconds: float = _MAX_SECONDS,
) -> Any:
    """Call a function of this package in a process of its own.

    Args:
        function: At the top of a module; or its name, ``module:name``, if this process must not import it.
            Its first argument is a function to call with its progress.
        arguments: Further arguments: what JSON can say.
        tick: Called with the progress, and every half second with the child's processor time so far,
            ``{"cpu": clock ticks}``.
        pass_fds: Descriptors for the child to inherit, by the same numbers.
        most_seconds: Time limit.

    Returns:
        What the function returned, as JSON gives it back.

    Raises:
        BuildError: The function raised a `McinferError`; its text.
        ChildFailedError: The child crashed, was killed, took too long, or could not be started.
    """
    if not hasattr(select, "poll"):
        raise ChildFailedError("select.poll was taken away (monkey patching), as eventlet does")
    process, ours, task = _start(function, arguments, os.getpid(), pass_fds)
    with ours:
        try:
            ours.sendall(task)
            answer = _answer(ours, process.pid, tick, most_seconds)
        except (OSError, ValueError, EOFError) as exc:
            process.kill()
            status = process.wait()
            raise ChildFailedError(f"the process that did it ended with status {status}") from exc
        finally:
            process.kill()
            process.wait()
    if "error" in answer:
        raise BuildError(answer["error"])
    return answer["result"]


def run_beside(
    function: Callable[..., Any] | str,
    arguments: Sequence[Any],
    failed: Callable[[str], None],
    *,
    pass_fds: Sequence[int] = (),
) -> None:
    """Call a function in a process of its own, which others do not wait for and which may outlive this one.

    It has the lowest priority for processor and disk, is the first that the kernel ends where memory runs
    out, and ends after `_MAX_SECONDS` at most. The arguments are those of `run_child`; `failed` is called in
    a thread with the text of an error, if this process is still there and SIGTERM did not end that one.

    Raises:
        ChildFailedError: The process could not be started.
    """
    process, ours, task = _start(function, arguments, 0, pass_fds)

    def wait() -> None:
        answer: dict[str, Any] = {}
        with ours, suppress(OSError, ValueError), ours.makefile(encoding="utf-8") as lines:
            ours.settimeout(_HELLO_SECONDS)
            for line in lines:
                ours.settimeout(None)
                answer = {**answer, **json.loads(line)}
        if not answer:  # a program that is no Python may run for ever
            process.kill()
        status = process.wait()
        if "result" not in answer and status != -signal.SIGTERM:
            failed(answer.get("error", f"the process that did it ended with status {status}"))

    with suppress(OSError):  # it has ended already
        ours.sendall(task)  # not in the thread: this process may end before that runs
    # No thread starts at the interpreter's end; the kernel sees to the rest.
    with suppress(RuntimeError):
        threading.Thread(target=wait, name="mcinfer-beside", daemon=True).start()


def _start(
    function: Callable[..., Any] | str,
    arguments: Sequence[Any],
    parent: int,
    pass_fds: Sequence[int],
) -> "tuple[Popen[bytes], socket.socket, bytes]":
    """A child, the channel to it, and its task; a parent of 0 is for one that goes on alone."""
    import subprocess  # not at every worker's start

    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    task = {"function": function, "arguments": arguments, "parent": parent, "path": import_path()}
    line = json.dumps(task).encode() + b"\n"
    fill_streams()
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
            command("-m", "mcinfer.model_cache.children", str(theirs.fileno())),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A program whose errors are read to their end would else wait for one that goes on alone.
            stderr=None if parent else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *pass_fds),
            start_new_session=True,  # Ctrl-C and hang-ups reach the parent only
        )
    except OSError as exc:
        ours.close()
        raise ChildFailedError(f"a process for it could not be started: {exc}") from exc
    finally:
        theirs.close()
    return process, ours, line


def _go_on_alone() -> None:
    import psutil

    # These end this process, and with it its own child; what started it may have blocked them.
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.alarm(_MAX_SECONDS)
    os.nice(19)
    with suppress(OSError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _answer(
    channel: socket.socket, pid: int, tick: Progress, most_seconds: float
) -> dict[str, Any]:
    """The child's answer; EOFError, OSError or ValueError if it ended without one."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    begin, heard, rest = monotonic(), False, b""
    end = begin + most_seconds
    while (now := monotonic()) < end:
        if not heard and now >= begin + _HELLO_SECONDS:
            raise ChildFailedError(f"the process did not begin within {_HELLO_SECONDS:g} s")
        if not poll.poll(_TICK * 1000):
            tick({"cpu": cpu_time(pid)})
            continue
        data = channel.recv(_READ_BYTES)
        if not data:
            raise EOFError
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            heard = True
            answer: dict[str, Any] = json.loads(line)
            if "progress" not in answer:
                return answer
            if answer["progress"]:
                tick(answer["progress"])
    raise ChildFailedError(f"it was not done within {most_seconds:g} s")


def main() -> int:
    """The child: do one task; the exit status."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with channel, channel.makefile(encoding="utf-8") as lines:
        line = lines.readline()
        if not line:
            return ORPHANED
        task = json.loads(line)
        sys.path[:] = task["path"]

        def answer(kind: str, content: object) -> None:
            with suppress(BrokenPipeError):  # the parent of one that goes on alone is gone
                channel.sendall(json.dumps({kind: content}).encode() + b"\n")

        answer("progress", {})  # that it has begun: `sys.executable` may be no Python
        if task["parent"]:
            watch_parent(task["parent"], channel.fileno())
        else:
            _go_on_alone()
        with suppress(
            OSError
        ):  # its session has a share of the cores, of no priority yet: sched(7), autogroup
            Path("/proc/self/autogroup").write_text(str(os.nice(0)), encoding="ascii")
        module, _, name = task["function"].partition(":")
        try:
            gc.disable()  # as in a worker: its looks for garbage take a twentieth of the imports' time
            function = getattr(import_module(module), name)
            gc.freeze()
            gc.enable()
            answer("result", function(lambda state: answer("progress", state), *task["arguments"]))
        except McinferError as exc:
            answer("error", shortened(str(exc)))
    return 0


if __name__ == "__main__":
    end(main())
