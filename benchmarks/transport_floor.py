"""What no dispatch over ZeroMQ and shared memory can be below.

    mcinfer bench identity.onnx --against benchmarks/transport_floor.py:TransportFloor

For a model that copies its input, y = x, float32[batch, n], such as `round_trips.identity_model` writes: one
small message to each worker and back, and the copies that cannot be avoided. Nothing is checked, scheduled or
watched. Its start and its memory say nothing: no runtime is loaded.
"""

import os
import threading
from itertools import pairwise
from mmap import PAGESIZE, mmap
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from zeromq_baseline import EchoPool

from mcinfer.bench.way import Arrays, RunningWay, Setup
from mcinfer.errors import InvalidInputError
from mcinfer.requests.tensors import Copier


class TransportFloor(RunningWay):
    """Bare messages and bare copies, one request at a time.

    A request's rows are copied into memory that all processes map (by several threads where they are many,
    as mcinfer does); each process is told by one message of its rows, copies them to where the answer is
    to be, which is what the model does, and says so; the answer is read in place. Two answers have room, so
    that one client may keep its last one.
    """

    text = "the floor: bare ZeroMQ messages, bare copies in shared memory"

    def __init__(self, setup: Setup) -> None:
        """Start the processes.

        Raises:
            InvalidInputError: The model is not a single Identity of one input that is cut by rows.
        """
        graph = onnx.load(setup.model, load_external_data=False).graph
        operators = [node.op_type for node in graph.node]
        names = [name for name, axis in setup.split.inputs.items() if axis == 0]
        if operators != ["Identity"] or len(names) != 1:
            raise InvalidInputError(
                f"model: got the operators {operators[:5]} with the inputs {names} cut by rows, "
                "expected a single Identity with one such input"
            )
        self.workers = len(setup.devices)
        (self._name,) = names
        self._turn = threading.Lock()
        self._runs = 0
        self._seconds = 0.0
        self._size = 0
        self._last = 1
        self._memory = np.empty(0, np.uint8)
        self._copier = Copier(setup.cores)
        self._pool = EchoPool(self.workers)

    def run(self, inputs: Arrays) -> NDArray[Any]:
        """Over all processes; the answer holds until the one after the next.

        Raises:
            InvalidInputError: The input is not float32[batch, n].
        """
        rows = inputs[self._name]
        if rows.dtype != np.float32 or rows.ndim != 2:
            raise InvalidInputError(
                f"{self._name}: got {rows.dtype}{list(rows.shape)}, expected float32[batch, n]"
            )
        with self._turn:
            if rows.nbytes > self._size:
                self._grow(rows.nbytes)
            self._copier.copy(self._part(0, rows), rows)
            self._last = 3 - self._last  # the first answer's place or the second's
            place = self._last * self._size
            count = min(self.workers, len(rows))
            row_bytes = rows.nbytes // len(rows)
            ends = [len(rows) * i // count * row_bytes for i in range(count + 1)]
            pieces = [(place + start, start, end - start) for start, end in pairwise(ends)]
            self._seconds += self._pool.copy(pieces)
            self._runs += count
            return self._part(place, rows)

    def run_seconds(self) -> tuple[int, float]:
        """As the processes tell of their copies: for this model they are the run."""
        with self._turn:
            return self._runs, self._seconds

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
        self._copier.close()

    def _part(self, offset: int, like: NDArray[Any]) -> NDArray[Any]:
        """An array in the shared memory, of the type and shape of another one."""
        return self._memory[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)

    def _grow(self, size: int) -> None:
        """Share memory with room for an input and two answers of so many bytes."""
        self._size = -(-size // PAGESIZE) * PAGESIZE
        fd = os.memfd_create("transport-floor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 3 * self._size)
            self._pool.attach(f"/proc/{os.getpid()}/fd/{fd}")
            self._memory = np.frombuffer(mmap(fd, 0), np.uint8)
        finally:
            os.close(fd)
