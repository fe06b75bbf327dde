"""Three processes, one copy of a model's weights: an owner, and two others that it allows to map them.

The steps are those of MindSpore Lite's sharing of weights between processes: the others tell their process
ids, the owner builds the model for these ids, and they build theirs with the handle that it gives.

::

    owner (this program)                              other (the same file, started twice)
      ◄── "pid 123"                                     get_model_info("current_pid")
      build with shareable_weight_pid_list
      ──► the handle                                    build with shareable_weight_mem_handle, and run
      ◄── "ready"
      ──► "report", once all are ready                  what it takes of memory while all are there
"""

import argparse
import hashlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.random import default_rng
from onnx import TensorProto, helper, numpy_helper

import mcinfer.mslite as mslite

OTHERS = 2
WIDTH = 1024
LAYERS = 24
"""Matrices of 4 MB each."""

WAIT_SECONDS = 60.0
"""Of any single answer."""

MAX_OF_MODEL = 0.6
"""USS of another process in the model's bytes: the interpreter and the runtime take some 40 MB."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--other", type=Path, help=argparse.SUPPRESS)  # the role, and the model
    options = parser.parse_args(arguments)
    try:
        if options.other is not None:
            _share(options.other)
            return 0
        with tempfile.TemporaryDirectory(prefix="weight_sharing-") as folder:
            # Weights that nobody will use again are not for the user's cache.
            os.environ["MCINFER_CACHE"] = str(Path(folder) / "cache")
            _own(_build(Path(folder) / "model.onnx"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print("=========== success ===========")
    return 0


def _build(path: Path) -> Path:
    """Write a stack of matrices: float32[batch, WIDTH] in and out."""
    rng = default_rng(0)
    weights = [
        numpy_helper.from_array(
            rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5), f"w{i}"
        )
        for i in range(LAYERS)
    ]
    names = ["x", *(f"y{i}" for i in range(1, LAYERS)), "y"]
    shape: list[str | int] = ["batch", WIDTH]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"layer{i}")
            for i in range(LAYERS)
        ],
        "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        weights,
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


# The owner.


def _own(path: Path) -> None:
    size = path.stat().st_size
    print(f"model: {size / 1e6:.1f} MB")
    with ExitStack() as stack:
        others = [stack.enter_context(_Other(path)) for _ in range(OTHERS)]
        pids = [other.line().removeprefix("pid ") for other in others]
        model = _open(path, "shareable_weight_pid_list", ", ".join(pids))
        handle = model.get_model_info("shareable_weight_mem_handle")
        print(f"handle: {handle}, for the processes {', '.join(pids)}")
        for other in others:
            other.tell(handle)
        checksum = _checksum(model)
        for other in others:
            other.line()
        reports = [_report(checksum)]
        for other in others:
            other.tell("report")
            reports.append(json.loads(other.line()))
        for other in others:
            other.end()
    for role, report in zip(("owner", "other", "other"), reports, strict=True):
        print(
            f"{role} {report['pid']}: PSS {report['pss'] / 1e6:.1f} MB, "
            f"USS {report['uss'] / 1e6:.1f} MB, result {report['checksum']}"
        )
    _check(reports, size)


def _check(reports: Sequence[dict[str, Any]], size: int) -> None:
    """Fail unless all results are the same, and the other processes have no copy of their own."""
    if len({report["checksum"] for report in reports}) > 1:
        raise ValueError("the results differ")
    for report in reports[1:]:
        if report["uss"] > MAX_OF_MODEL * size:
            raise ValueError(
                f"process {report['pid']} has {report['uss'] / 1e6:.1f} MB for itself, expected at "
                f"most {MAX_OF_MODEL * size / 1e6:.1f} MB where the weights are shared"
            )


class _Other:
    """Another process, as its parent sees it; a context manager that leaves none behind."""

    def __init__(self, path: Path) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, "--other", str(path)]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())

    def line(self) -> str:
        """The next line that it says; RuntimeError where it ends instead."""
        line = _read_line(self._link.fileno(), f"process {self._process.pid}")
        if not line:
            status = self._process.wait(WAIT_SECONDS)
            raise RuntimeError(f"process {self._process.pid} ended early with status {status}")
        return line

    def tell(self, text: str) -> None:
        """Send it a line; that it is gone is noticed when it should answer."""
        with suppress(BrokenPipeError):
            self._link.sendall(f"{text}\n".encode())

    def end(self) -> None:
        """See that it ends well, now that nothing more will be said."""
        self._link.close()
        try:
            status = self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired as exc:
            raise RuntimeError(f"process {self._process.pid} does not end") from exc
        if status:
            raise RuntimeError(f"process {self._process.pid} ended with status {status}")

    def __enter__(self) -> "_Other":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._link.close()


# The others.


def _share(path: Path) -> None:
    print("pid", mslite.Model().get_model_info("current_pid"), flush=True)
    handle = _read_line(0, "the owner")
    if not handle:
        return  # it has said why
    model = _open(path, "shareable_weight_mem_handle", handle)
    checksum = _checksum(model)
    print("ready", flush=True)
    if _read_line(0, "the owner"):
        print(json.dumps(_report(checksum)), flush=True)
        _read_line(0, "the owner")  # it closes the line: until then the others measure


# Both.


def _open(path: Path, key: str, value: str) -> mslite.Model:
    context = mslite.Context()
    context.target = ["cpu"]
    context.cpu.thread_num = 1
    model = mslite.Model()
    sections = {"ascend_context": {key: value}}
    model.build_from_file(str(path), mslite.ModelType.ONNX, context, config_dict=sections)
    return model


def _checksum(model: mslite.Model) -> str:
    """Of the result for ones; the run touches all weights."""
    [output] = model.predict([np.ones((1, WIDTH), np.float32)])
    return hashlib.sha256(output.get_data_to_numpy().tobytes()).hexdigest()[:16]


def _report(checksum: str) -> dict[str, Any]:
    """What this process takes of memory (proc_pid_smaps(5)), in bytes.

    PSS counts a page that n processes share as an n-th for each, USS only what is this one's alone.
    """
    kilobytes: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, _ = line.split()
        kilobytes[name] = int(value)
    return {
        "pid": os.getpid(),
        "pss": kilobytes["Pss:"] * 1024,
        "uss": (kilobytes["Private_Clean:"] + kilobytes["Private_Dirty:"]) * 1024,
        "checksum": checksum,
    }


def _read_line(fd: int, whose: str) -> str:
    """A line, each of which is sent only once it is waited for; empty where the other end is closed.

    Raises:
        RuntimeError: None came in time.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = b""
    while not data.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise RuntimeError(f"{whose} said nothing for {WAIT_SECONDS:g} s")
        try:
            part = os.read(fd, 4096)
        except ConnectionResetError:  # closed before it read all that it was told
            part = b""
        if not part:
            return ""
        data += part
    return data.decode().strip()


if __name__ == "__main__":
    sys.exit(main())
