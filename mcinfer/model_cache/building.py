"""Preparing a model in a process of its own, so that the serving process keeps no memory of that work.

::

    caller   run_child(function, arguments) ──► python -m mcinfer.model_cache.building FD, one for each task
    child    one line of JSON in; lines of JSON out: {"progress": …}, the first of them empty and at once,
             then {"result": …} or {"error": text}

The child ends with its parent (`mcinfer.process`), and `run_child` returns or raises only after its end.
"""

import json
import os
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from mcinfer.checks import as_map
from mcinfer.config import EngineOptions
from mcinfer.errors import BuildError, McinferError, raised_by_handler, shortened
from mcinfer.model_cache.cache import Cache, CacheUnusableError, Held
from mcinfer.private import inherited
from mcinfer.process import ORPHANED, command, cpu_time, environment, import_path, watch_parent

MODEL_FILE = "model.onnx"
"""File of an entry: the optimised graph; its packed weights lie beside it."""

ABOUT_FILE = "about.json"
"""File of an entry: ``name`` of the model, ``bytes`` of its files, ``seconds`` that preparing took."""

FAILURE_FILE = "failure.txt"
"""File in place of a model: the runtime's message why the model cannot be prepared."""

Progress = Callable[[Mapping[str, Any]], None]
"""Called with ``seconds`` so far, ``written`` bytes, and ``bytes`` of the model."""

_READ_BYTES = 1 << 16
_TICK = 0.5
_HELLO_SECONDS = 60.0
_MAX_SECONDS = 4 * 3600.0
"""Default time limit of one task."""

_MAX_ANSWER_BYTES = 1 << 20


class ChildFailedError(McinferError):
    """The child ended without a result; another try may succeed."""


def about(entry: Path) -> Mapping[str, Any]:
    """The content of an entry's `ABOUT_FILE`; empty if it is damaged or missing."""
    try:
        content = json.loads((entry / ABOUT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def ensure_prepared(
    model: str | os.PathLike[str],
    options: EngineOptions = EngineOptions(),
    progress: Progress | None = None,
    device: str = "cpu:0",
) -> Held:
    """The prepared form of an ONNX model; a child process makes it if there is none yet.

    Args:
        model: Path of an ONNX model.
        options: Options of the engine that will load it.
        progress: Called while it is made.
        device: The CPU, or a CUDA device.

    Returns:
        The entry of the cache, for the caller to close.

    Raises:
        BuildError: The model cannot be prepared (the engine's message), or the cache cannot be used.
    """
    path = Path(model).absolute()
    request = _request(path, options, device)

    def tick(state: Mapping[str, Any]) -> None:
        if "seconds" in state and progress is not None:
            progress(state)

    try:
        arguments = ["onnxruntime", request, progress is not None]
        function = "mcinfer.engines.preparation:ensure"
        key = run_child(function, arguments, tick, pass_fds=inherited(str(path)))
        held = Cache.default().open(key)
    except ChildFailedError as exc:
        raise BuildError(f"{path}: it could not be prepared: {exc}") from exc
    except CacheUnusableError as exc:
        raise BuildError(f"{path}: {exc}") from exc
    if held is None:  # its limit is too small, or it has just been cleared
        raise BuildError(f"{path}: it was prepared, and is not in the cache any more")
    return held


def save_optimised(
    model: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: EngineOptions = EngineOptions(),
    device: str = "cpu:0",
) -> None:
    """Write the optimised form of an ONNX model to a file, as ONNX Runtime does; a child process does it.

    Args:
        model: Path of an ONNX model.
        target: ``SessionOptions.optimized_model_filepath``; further files as the options say.
        options: Options of the engine, by which the model is optimised.
        device: The device for which it is optimised.

    Raises:
        BuildError: The model cannot be loaded, or the file cannot be written.
    """
    path = Path(model).absolute()
    try:
        arguments = [_request(path, options, device), str(Path(target).absolute())]
        function = "mcinfer.engines._onnxruntime:save"
        run_child(function, arguments, lambda _: None, pass_fds=inherited(str(path)))
    except ChildFailedError as exc:
        raise BuildError(f"{path}: its optimised form could not be saved: {exc}") from exc


def _request(path: Path, options: EngineOptions, device: str) -> dict[str, Any]:
    """The request of an engine, as JSON (`mcinfer.engines.preparation`)."""
    alone = replace(options, threads=1, inter_op_threads=None, cores=None)
    return {"model": str(path), "device": device, "options": as_map(alone)}


def run_child(
    function: str,
    arguments: Sequence[Any],
    tick: Progress,
    *,
    pass_fds: Sequence[int] = (),
    most_seconds: float = _MAX_SECONDS,
) -> Any:
    """Call a function of this package in a process of its own.

    Args:
        function: ``module:name``. Its first argument is a function to call with its progress.
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
    import subprocess  # not at every worker's start

    if getattr(sys, "frozen", False):
        raise ChildFailedError("this program is frozen, and has no Python to start a process with")
    start = {
        "function": function,
        "arguments": arguments,
        "parent": os.getpid(),
        "path": import_path(),
    }
    ours, theirs = socket.socketpair()
    with ours:
        try:
            process = subprocess.Popen(  # noqa: S603 nothing in it comes from outside
                command("mcinfer.model_cache.building", str(theirs.fileno())),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                process_group=0,  # Ctrl-C reaches the parent only
            )
        except OSError as exc:
            if raised_by_handler(exc):
                raise
            raise ChildFailedError(f"a process for it could not be started: {exc}") from exc
        finally:
            theirs.close()
        try:
            ours.sendall(json.dumps(start).encode() + b"\n")
            answer = _answer(ours, process.pid, tick, most_seconds)
        except (OSError, ValueError, EOFError) as exc:
            if raised_by_handler(exc):
                raise
            process.kill()
            status = process.wait()
            raise ChildFailedError(f"the process that did it ended with status {status}") from exc
        finally:
            process.kill()
            process.wait()
    if "error" in answer:
        raise BuildError(answer["error"])
    return answer["result"]


def _answer(
    channel: socket.socket, pid: int, tick: Progress, most_seconds: float
) -> dict[str, Any]:
    """The child's answer; EOFError, OSError or ValueError if it ended without one."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    begin, heard = monotonic(), False
    rest, end = b"", begin + most_seconds
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
        if len(rest) > _MAX_ANSWER_BYTES:
            raise EOFError
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
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        line = lines.readline()
        if not line:
            return ORPHANED
        task = json.loads(line)
        watch_parent(task["parent"], channel.fileno())
        sys.path[:] = task["path"]

        def answer(kind: str, content: object) -> None:
            print(json.dumps({kind: content}), file=lines, flush=True)

        answer("progress", {})  # that it has begun: `sys.executable` may be no Python
        module, _, name = task["function"].partition(":")
        try:
            function = getattr(import_module(module), name)
            answer("result", function(lambda state: answer("progress", state), *task["arguments"]))
        except McinferError as exc:
            answer("error", shortened(str(exc)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
