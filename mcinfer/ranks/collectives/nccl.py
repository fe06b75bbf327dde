"""Collectives between CUDA devices of one machine, through NCCL (cupy.cuda.nccl).

Not verified: this module is written to the documentation of CuPy and NCCL and has not run on a card yet.

::

    each rank ── a step of a group of the backend shm: cells, deaths, time limits ──► all compare
    each rank ── NCCL, on the device ──► waits for an event of its stream, and for the others' ends

A rank that dies while the devices exchange data leaves the others' kernels waiting: they are aborted
(``ncclCommAbort``) as soon as the shm group notices it, and the group is closed.

Transfers, `send` and `recv` go through host memory: NCCL cannot take back a send that no rank receives.

`Collective.input` and `output` are CuPy arrays on the device that was current when the rank joined. What the
caller writes there must be done, or in CuPy's current stream. Other methods take and give NumPy or CuPy
arrays; the result is of the kind of the argument. NCCL adds in an order and precision of its own. It does not
reduce bfloat16 through CuPy, which has no such type.

Ownership: a group owns its communicator and the shm group; arrays outlive both.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcinfer.errors import (
    CollectiveTimeoutError,
    EngineError,
    InvalidInputError,
    MissingDependencyError,
    requires,
)
from mcinfer.ranks.collectives import shm
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Collective, Group, closing
from mcinfer.ranks.collectives.operations import Signature, cell, until

_NEEDS = (
    "collectives of the backend nccl need CuPy with NCCL: pip install 'mcinfer[cupy]', or CuPy's package for "
    "another version of CUDA, and NCCL as its installation guide says"
)
with requires(_NEEDS, "cupy"):
    import cupy
try:
    from cupy.cuda import nccl
except ImportError as exc:  # CuPy finds no library of NCCL's
    raise MissingDependencyError(_NEEDS) from exc

_TYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)
"""NumPy's names of the types that CuPy has for NCCL."""

_CHECK = 0.02
"""Seconds between two looks for ranks that have ended while NCCL starts."""


def join(key: str, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> "NcclGroup":
    """Make ranks a group, each with CuPy's current device; see `mcinfer.ranks.collectives.join`."""
    return NcclGroup(shm.join(key, rank, size, timeout=timeout))


class _Collective(Collective):
    """An operation of all ranks on their devices."""

    def __init__(
        self,
        group: "NcclGroup",
        signature: Signature,
        arrays: tuple[Any, Any],
        begin: Callable[[int], None],
    ) -> None:
        self.input, self.output = arrays
        self._group = group
        self._text = str(signature)
        self._cell = cell(self._text)
        self._begin = begin

    def run(self) -> None:
        self._group.meet(self._cell)
        self._group.run_on_device(self._begin, self._text)


class _Transfer(Collective):
    """An array from a device to another, through host memory."""

    def __init__(self, group: "NcclGroup", signature: Signature, root: int, to: int) -> None:
        self._array: Any = cupy.zeros(signature.shape, signature.dtype)
        self.input = self.output = self._array
        self._is_source = group.rank == root
        self._host = group.control.prepare_transfer(signature.shape, signature.dtype, root, to)

    def run(self) -> None:
        if self._is_source:
            self._host.input[...] = cupy.asnumpy(self._array)
            self._host.run()
        else:
            self._host.run()
            self._array.set(self._host.output)


class NcclGroup(Group):
    """A group of ranks with a CUDA device each; see `join`.

    Attributes:
        control: The group of the same ranks that compares, and notices ends.
    """

    def __init__(self, control: shm.ShmGroup) -> None:
        # The control group is this object's from now on, even if this call fails.
        super().__init__()
        self.control = control
        self.rank = control.rank
        self.size = control.size
        self.timeout = control.timeout
        self._communicator: Any = None
        self._start()

    def send(self, array: NDArray[Any], to: int) -> None:
        self.control.send(cupy.asnumpy(array), to)

    def recv(self, shape: Sequence[int], dtype: DTypeLike, source: int) -> NDArray[Any]:
        """Receive what one rank sends. A new NumPy array."""
        return self.control.recv(shape, dtype, source)

    def meet(self, packed: bytes) -> None:
        self.control.meet(packed)

    def fail(self, text: str, *, cancelled: bool = False) -> None:
        self.control.fail(text, cancelled=cancelled)

    def _subgroup(self, members: Sequence[int]) -> "NcclGroup | None":
        control = self.control._subgroup(members)
        return None if control is None else NcclGroup(control)

    @closing
    def run_on_device(self, begin: Callable[[int], None], text: str) -> None:
        """Begin an operation in CuPy's current stream, and return when the device has finished it."""

        def is_done() -> bool:
            if event.done:
                return True
            self._communicator.check_async_error()
            self.control.check()
            return False

        try:
            with self._device:
                stream = cupy.cuda.get_current_stream()
                begin(stream.ptr)
                event = stream.record()
                is_in_time = until(is_done, self.timeout)
        except nccl.NcclError as exc:
            raise EngineError(f"{text}: NCCL reports: {exc}") from exc
        if not is_in_time:
            raise CollectiveTimeoutError(f"{text}: NCCL has not finished within {self.timeout:g} s")

    @closing
    def _start(self) -> None:
        """Make the communicator, in a thread of its own: NCCL waits for all ranks without a limit."""
        self._device = cupy.cuda.Device()
        number = np.array(nccl.get_unique_id() if self.rank == 0 else (0,) * 128, np.int8)
        number = self.control.broadcast(number)
        found: list[Any] = []

        def start() -> None:
            try:
                with self._device:
                    found.append(
                        nccl.NcclCommunicator(self.size, tuple(number.tolist()), self.rank)
                    )
            except Exception as exc:
                found.append(exc)

        thread = threading.Thread(target=start, name="mcinfer-nccl", daemon=True)
        thread.start()

        def is_started() -> bool:
            thread.join(_CHECK)
            if not thread.is_alive():
                return True
            self.control.check()
            return False

        if not until(is_started, self.timeout):
            raise CollectiveTimeoutError(f"NCCL has not started within {self.timeout:g} s")
        (outcome,) = found
        if isinstance(outcome, Exception):
            raise EngineError(f"NCCL does not start: {outcome}") from outcome
        self._communicator = outcome

    def leave(self, text: str, cause: str) -> None:
        self._cause = cause
        if not self.control.is_closed:
            self.control.leave(text, cause)
        if self._communicator is not None:
            self._communicator.abort()  # destroy() would wait for kernels that wait for ended ranks

    # Making operations.

    def _prepare_transfer(self, signature: Signature, root: int, to: int) -> Collective:
        return _Transfer(self, signature, root, to)

    def _run_once(self, signature: Signature, array: NDArray[Any]) -> NDArray[Any]:
        collective = self._prepare(signature)
        collective.input[...] = cupy.asarray(array)
        collective.run()
        is_on_host = isinstance(array, np.ndarray)
        output: NDArray[Any] = collective.output
        return cupy.asnumpy(output) if is_on_host else output

    def _prepare(self, signature: Signature) -> Collective:
        with self._device:
            mine = cupy.zeros(signature.shape, signature.dtype)
            if signature.root is not None:
                output = mine
            else:
                output = cupy.zeros(signature.output_shape, signature.dtype)
            begin = self._plan(signature, mine, output)
        return _Collective(self, signature, (mine, output), begin)

    def _plan(self, signature: Signature, mine: Any, output: Any) -> Callable[[int], None]:
        """A function that begins the operation in a stream."""
        communicator = self._communicator
        if signature.root is not None:
            root = signature.root
            return lambda stream: communicator.broadcast(
                mine.data.ptr, mine.data.ptr, mine.nbytes, nccl.NCCL_UINT8, root, stream
            )
        if signature.kind == "all_gather":
            return self._gather_plan(signature, mine, output)
        kind, operation = _type_of(signature), _reduction_of(signature)
        if signature.kind == "all_reduce":

            def reduce(stream: int) -> None:
                communicator.allReduce(
                    mine.data.ptr, output.data.ptr, mine.size, kind, operation, stream
                )
                self._divide(signature, output)

            return reduce
        packed = cupy.empty((self.size, *signature.output_shape), signature.dtype)

        def scatter(stream: int) -> None:
            signature.scatter(mine, packed)
            communicator.reduceScatter(
                packed.data.ptr, output.data.ptr, output.size, kind, operation, stream
            )
            self._divide(signature, output)

        return scatter

    def _gather_plan(self, signature: Signature, mine: Any, output: Any) -> Callable[[int], None]:
        communicator = self._communicator
        parts = output
        if signature.axis:
            parts = cupy.empty((self.size, *signature.shape), signature.dtype)

        def gather(stream: int) -> None:
            communicator.allGather(
                mine.data.ptr, parts.data.ptr, mine.nbytes, nccl.NCCL_UINT8, stream
            )
            if parts is not output:
                signature.gather(parts, output)

        return gather

    def _divide(self, signature: Signature, output: Any) -> None:
        if signature.operation == "mean":
            cupy.divide(output, self.size, out=output)


def _type_of(signature: Signature) -> int:
    name = signature.dtype.name
    if name not in _TYPES:
        raise InvalidInputError(
            f"dtype: got {name} to reduce with NCCL, expected one of {[*_TYPES]}"
        )
    return int(getattr(nccl, f"NCCL_{name.upper()}"))


def _reduction_of(signature: Signature) -> int:
    return int(nccl.NCCL_MAX if signature.operation == "max" else nccl.NCCL_SUM)
