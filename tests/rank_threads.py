"""Ranks as threads of one process, joined over socket pairs: for tests of what ranks do together."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcinfer.collectives.base import Group
from mcinfer.collectives.shm import join_sockets
from mcinfer.engines.base import Engine, Run
from mcinfer.specs import numpy_dtype
from tests.engine_tensors import buffer, content

_T = TypeVar("_T")
PATIENCE = 30.0

Arrays = dict[str, NDArray[Any]]


def run_ranks(
    size: int, rank: Callable[[Group, ExitStack], _T], timeout: float = PATIENCE
) -> list[_T]:
    """What the function returns in each rank; if it raises, the first rank's exception.

    Args:
        size: How many ranks there are.
        rank: Called in a thread for each rank, with the group and a stack that ends before the group does.
        timeout: Seconds that one operation waits for the other ranks.
    """
    with ExitStack() as opened:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size - 1)]
        for pair in pairs:
            for end in pair:
                opened.callback(end.close)
        ends = [[first for first, _ in pairs], *([second] for _, second in pairs)]

        def run(number: int) -> _T:
            with ExitStack() as stack:
                group = join_sockets(number, size, ends[number], timeout=timeout)
                stack.enter_context(group)
                return rank(group, stack)

        threads = opened.enter_context(ThreadPoolExecutor(size))
        return [future.result() for future in [threads.submit(run, n) for n in range(size)]]


class Bound:
    """A run with arrays of its own for inputs and outputs."""

    def __init__(self, engine: Engine, inputs: Arrays, shapes: dict[str, Sequence[int]]) -> None:
        specs = {spec.name: spec for spec in engine.spec.outputs}
        self.inputs = {name: array.copy() for name, array in inputs.items()}
        self.outputs = {
            name: np.full(shape, 77, numpy_dtype(specs[name].element_type))
            for name, shape in shapes.items()
        }
        self.run: Run = engine.bind(
            [buffer(spec.name, self.inputs[spec.name]) for spec in engine.spec.inputs],
            [buffer(name, array) for name, array in self.outputs.items()],
        )

    def __call__(self, inputs: Arrays) -> Arrays:
        """The outputs for inputs of the same shapes: those bound and those that the run produced."""
        for name, array in inputs.items():
            self.inputs[name][...] = array
        produced = {item.name: content(item) for item in self.run.execute()}
        return {name: array.copy() for name, array in self.outputs.items()} | produced
