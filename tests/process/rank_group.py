"""A group of ranks: the leader in the test's process, followers in their own; and the models that it runs."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from mcinfer.config import CoreShare, Device, EngineOptions
from mcinfer.engines.base import EngineRequest, Run, array_over
from mcinfer.process import watch_parent
from mcinfer.ranks.engine import LeaderEngine, follow, lead
from tests.engine_tensors import buffer
from tests.process.scripts import ROOT
from tests.sliced_models import save, value

Arrays = Mapping[str, NDArray[Any]]

TIMEOUT = 120.0
"""Seconds for a collective: more than any test takes, unless it asks for less."""


def request(model: Path, device: str = "cpu:0", **options: Any) -> EngineRequest:
    return EngineRequest(
        model=str(model),
        device=Device.parse(device),
        options=EngineOptions(**{"threads": 1, "prepare": "never", **options}),
        share=CoreShare(shared=True),
    )


class Followers:
    """The processes of ranks 1, 2, …, each of which ends with this one."""

    def __init__(
        self, ranks: int, model: Path, *, timeout: float = TIMEOUT, **options: Any
    ) -> None:
        """`options`: ``devices`` of the ranks, ``prepare``, and ``watch`` for an end with this process."""
        parent = os.getpid() if options.pop("watch", True) else 0
        devices = options.pop("devices", ("cpu:0",) * ranks)
        self.sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[str]] = []
        self._lifelines: list[socket.socket] = []
        for rank in range(1, ranks):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            lifeline, watched = socket.socketpair()
            arguments = [theirs.fileno(), watched.fileno(), parent, rank, ranks, timeout]
            command = [sys.executable, "-m", "tests.process.rank_group", *map(str, arguments)]
            process = subprocess.Popen(
                [*command, str(model), devices[rank], options.get("prepare", "never")],
                cwd=ROOT,
                pass_fds=(theirs.fileno(), watched.fileno()),
                stderr=subprocess.PIPE,
                text=True,
            )
            theirs.close()
            watched.close()
            self.sockets.append(ours)
            self.processes.append(process)
            self._lifelines.append(lifeline)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def statuses(self) -> list[int]:
        """The exit statuses, once all have ended."""
        return [process.wait(timeout=50) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        for end in (*self.sockets, *self._lifelines):
            end.close()


@contextmanager
def followers(ranks: int, model: Path, **options: Any) -> Iterator[Followers]:
    found = Followers(ranks, model, **options)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def group(
    model: Path,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    timeout: float = TIMEOUT,
    prepare: str = "never",
    **options: Any,
) -> Iterator[tuple[LeaderEngine, Followers]]:
    """A group with its leader in this process."""
    ranks = tensor * pipeline
    with followers(ranks, model, timeout=timeout, prepare=prepare, **options) as others:
        engine = lead(
            request(model, prepare=prepare), (tensor, pipeline), others.sockets, timeout=timeout
        )
        try:
            yield engine, others
        finally:
            engine.close()


class Bound:
    """A run, with the arrays that it is bound to."""

    def __init__(self, engine: LeaderEngine, inputs: Arrays, outputs: Arrays | None = None) -> None:
        self.inputs = {name: np.array(array, order="C") for name, array in inputs.items()}
        self.outputs = dict(outputs or {})
        self.run: Run = engine.bind(
            [buffer(spec.name, self.inputs[spec.name]) for spec in engine.spec.inputs],
            [buffer(name, array) for name, array in self.outputs.items()],
        )

    def execute(self) -> Arrays:
        return self._collect(self.run.execute())

    def finish(self) -> Arrays:
        return self._collect(self.run.finish())

    def _collect(self, produced: Sequence[Any]) -> Arrays:
        found = {item.name: array_over(item).copy() for item in produced}
        return {name: array.copy() for name, array in self.outputs.items()} | found


# Models.


def write_mlp(path: Path, layers: int = 4, width: int = 32) -> Path:
    """Layers of relu(x @ w + b): float32[batch, width], with the weights in a file beside the model."""
    random = np.random.default_rng(7)
    nodes: list[NodeProto] = []
    weights: dict[str, NDArray[Any]] = {}
    for layer in range(layers):
        product, biased, active = (f"{kind}{layer}" for kind in ("product", "sum", "relu"))
        last = "y" if layer == layers - 1 else active
        weights[f"w{layer}"] = random.normal(0, width**-0.5, (width, width)).astype(np.float32)
        weights[f"b{layer}"] = random.normal(0, 0.1, (width,)).astype(np.float32)
        nodes += [
            helper.make_node(
                "MatMul", [f"relu{layer - 1}" if layer else "x", f"w{layer}"], [product]
            ),
            helper.make_node("Add", [product, f"b{layer}"], [biased]),
            helper.make_node("Relu", [biased], [last]),
        ]
    x, y = (value(name, "batch", width) for name in "xy")
    return save(path, nodes, [x], [y], weights, external=True)


def write_lookup(path: Path, width: int = 32) -> Path:
    """An MLP, then rows that the input `index` names: a run with an index out of range fails there."""
    random = np.random.default_rng(8)
    weights = {
        f"w{layer}": random.normal(0, width**-0.5, (width, width)).astype(np.float32)
        for layer in range(4)
    }
    nodes = [
        helper.make_node("MatMul", [f"h{layer}" if layer else "x", f"w{layer}"], [f"h{layer + 1}"])
        for layer in range(4)
    ]
    nodes.append(helper.make_node("Gather", ["h4", "index"], ["y"], axis=0, name="lookup"))
    index = helper.make_tensor_value_info("index", TensorProto.INT64, ["rows"])
    inputs, outputs = [value("x", "batch", width), index], [value("y", "rows", width)]
    return save(path, nodes, inputs, outputs, weights, external=True)


def expected(model: Path, inputs: Arrays) -> Arrays:
    """What ONNX Runtime gives for the whole model."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def assert_close(got: Arrays, wanted: Arrays) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def rows(count: int, width: int = 32, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


# A follower's process.


def main() -> int:
    end, lifeline, parent, rank, ranks = map(int, sys.argv[1:6])
    timeout, model, device, prepare = sys.argv[6:]
    if parent:
        watch_parent(parent, lifeline)
    wanted = request(Path(model), device, prepare=prepare)
    return follow(rank, ranks, socket.socket(fileno=end), wanted, timeout=float(timeout))


if __name__ == "__main__":
    sys.exit(main())
