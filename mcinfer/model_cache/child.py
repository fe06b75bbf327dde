"""A process that prepares a model, so that nothing of that work stays in the process that serves.

It is `python -m mcinfer.preparing FD`, one for each task. What it is told is one line of JSON on the socket
that it inherits, what it answers are lines of JSON: ``{"progress": …}`` any number of times, then its result.
It ends with its parent (`mcinfer.process`).

Ownership: the child belongs to the caller of `run_child`, which returns or raises after its end only.
"""

import json
import os
import select
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from mcinfer.errors import McinferError
from mcinfer.process import command, cpu_time, environment, import_path

_READ_BYTES = 1 << 16
_TICK = 0.5
_MAX_SECONDS = 4 * 3600.0
"""Of one task, unless told otherwise: nothing that is worth preparing takes as long."""

_MAX_ANSWER_BYTES = 1 << 20

Tick = Callable[[Mapping[str, Any]], None]
"""Called with each line of progress that the child sends, and every half second with its processor time so
far, ``{"cpu": clock ticks}``."""


class ChildFailedError(McinferError):
    """The child ended without a result; another try may do better."""


def run_child(
    task: Mapping[str, Any],
    tick: Tick,
    *,
    pass_fds: Sequence[int] = (),
    most_seconds: float = _MAX_SECONDS,
) -> dict[str, Any]:
    """Have a task done; see `mcinfer.preparing` for what there is.

    Args:
        task: What to do, as JSON has it.
        tick: For progress.
        pass_fds: Descriptors that the child is to hold, by the same numbers.
        most_seconds: That it may take.

    Returns:
        What the child answered.

    Raises:
        ChildFailedError: It crashed, was killed, took too long, or could not be started.
    """
    start = {**task, "parent": os.getpid(), "path": import_path()}
    ours, theirs = socket.socketpair()
    with ours:
        try:
            process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                command("mcinfer.preparing", str(theirs.fileno())),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                process_group=0,  # Ctrl-C is for the parent to hear
            )
        except OSError as exc:
            raise ChildFailedError(f"a process for it could not be started: {exc}") from exc
        finally:
            theirs.close()
        try:
            return _talk(ours, process.pid, json.dumps(start).encode() + b"\n", tick, most_seconds)
        except (OSError, ValueError, EOFError) as exc:
            process.kill()
            status = process.wait()
            raise ChildFailedError(f"the process that did it ended with status {status}") from exc
        finally:
            process.kill()
            process.wait()


def _talk(
    channel: socket.socket, pid: int, task: bytes, tick: Tick, most_seconds: float
) -> dict[str, Any]:
    """The child's answer.

    Raises:
        EOFError, OSError, ValueError: It ended without one.
        ChildFailedError: It takes too long.
    """
    channel.sendall(task)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    rest, end = b"", monotonic() + most_seconds
    while monotonic() < end:
        if not poll.poll(_TICK * 1000):
            tick({"cpu": cpu_time(pid)})
            continue
        data = channel.recv(_READ_BYTES)
        if not data:
            raise EOFError
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MAX_ANSWER_BYTES:
            raise EOFError
        for line in lines:
            answer: dict[str, Any] = json.loads(line)
            if "progress" not in answer:
                return answer
            tick(answer["progress"])
    raise ChildFailedError(f"it was not done within {most_seconds:g} s")
