"""A process that prepares a model, so that nothing of that work stays in the process that serves.

It is `python -m mcinfer.preparing`, one for each task. What it is told is one line of JSON on its standard
input, what it answers are lines of JSON on its standard output: ``{"progress": …}`` any number of times, then
its result. Its input stays open as long as its parent lives: at the end of it the child ends as well.

Ownership: the child belongs to the caller of `run_child`, which returns or raises after its end only.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from mcinfer.errors import McinferError

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""As for workers: unless the user says otherwise, no runtime sends anything anywhere."""

_READ_BYTES = 1 << 16
_TICK = 0.5
_MOST_SECONDS = 4 * 3600.0
"""Of one task: nothing that is worth preparing takes as long."""

Tick = Callable[[Mapping[str, Any]], None]
"""Called with each line of progress that the child sends, and with an empty one every half second."""


class ChildFailedError(McinferError):
    """The child ended without a result; another try may do better."""


def run_child(task: Mapping[str, Any], tick: Tick, *, pass_fds: Sequence[int] = ()) -> Any:
    """Have a task done; see `mcinfer.preparing` for what there is.

    Args:
        task: What to do, as JSON has it.
        tick: For progress.
        pass_fds: Descriptors that the child is to hold, by the same numbers.

    Returns:
        What the child answered.

    Raises:
        ChildFailedError: It crashed, was killed, or could not be started.
    """
    start = {**task, "path": [os.path.abspath(entry) for entry in sys.path]}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mcinfer.preparing"],
            env={**_QUIET, **os.environ, "PYTHONPATH": _PACKAGE_PARENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            process_group=0,  # Ctrl-C is for the parent to hear
        )
    except OSError as exc:
        raise ChildFailedError(f"a process for it could not be started: {exc}") from exc
    with process:
        try:
            result = _talk(process, json.dumps(start).encode() + b"\n", tick)
        finally:
            process.kill()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # of what the child did not take
                    process.stdin.close()
    if result is None:
        raise ChildFailedError(f"the process that did it ended with status {process.returncode}")
    return result


def _talk(process: "subprocess.Popen[bytes]", task: bytes, tick: Tick) -> Any:
    """The child's answer; None if it ended without one."""
    if process.stdin is None or process.stdout is None:
        return None
    with contextlib.suppress(BrokenPipeError):  # then there is no answer either
        process.stdin.write(task)
        process.stdin.flush()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    rest, end = b"", monotonic() + _MOST_SECONDS
    while monotonic() < end:
        if not poll.poll(_TICK * 1000):
            tick({})
            continue
        data = os.read(process.stdout.fileno(), _READ_BYTES)
        if not data:
            process.wait()
            return None
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "progress" not in answer:
                return answer
            tick(answer["progress"])
    raise ChildFailedError(f"it was not done within {_MOST_SECONDS:g} s")
