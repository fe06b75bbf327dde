"""Where the parts of a tensor lie in memory, and how data is copied in and out.

A part along the first axis (or one that only axes of size one precede) is an offset into the whole tensor:
cutting and joining copy nothing. Parts along another axis lie one after another instead, and are copied.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.config import DLPACK_KINDS, Device
from mcinfer.errors import InvalidInputError, is_refusal
from mcinfer.sharding import Cut, InputCut, JoinError, OutputJoin, Shape
from mcinfer.shm.arena import align
from mcinfer.specs import (
    ELEMENT_TYPES,
    STRING,
    ModelSpec,
    TensorSpec,
    element_type_name,
    tensor_bytes,
)

__tracebackhide__ = is_refusal

Inputs = Mapping[str, Any] | Sequence[Any]
"""Values by name, or in the model's order."""

Arrays = dict[str, NDArray[Any]]
"""Outputs by name, in the model's order."""

TOLERANCES = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""By element type, how far a batch and its pieces may differ: relative to the element, and half as much
relative to the largest element of the output. Runtimes choose kernels by the size of a batch, which makes
some 1e-6 for float32. Integers, booleans and strings are to be equal, eight-bit floats within 0.25."""

_EIGHT_BIT_FLOAT = 0.25

_MARKS = 100.0
"""An element that is the same and so many times larger than all that differ counts as no measure for them."""

LARGE_BYTES = 16 << 20
"""From here on several threads are faster: below, the caches of one core are (benchmarks/dispatch.py)."""

_MAX_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a tensor's parts lie in its memory.

    Attributes:
        size: Bytes of all of it.
        offsets: Bytes from its start to each shard's part.
        contiguous: Whether the memory is that of the whole C-contiguous array, so that a part is only
            an offset. Otherwise the parts lie one after another, and are copied part by part.
    """

    size: int
    offsets: tuple[int, ...]
    contiguous: bool


class Copier:
    """Copies arrays, large ones with a few threads, which start with the first such copy.

    NumPy releases the GIL in a copy. The threads hold views of both arrays until their part is done, so an
    interrupted caller takes no memory from them.
    """

    def __init__(self, cores: int) -> None:
        # Not above: it can be imported no more when the interpreter is about to end.
        from concurrent.futures import ThreadPoolExecutor

        self._helpers = min(cores, _MAX_THREADS) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="mcinfer-copy")

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy `source` into the C-contiguous `target` of its shape, and its type but for byte order."""
        if not self._helpers or target.nbytes < LARGE_BYTES or not source.flags.c_contiguous:
            np.copyto(target, source, casting="equiv")
            return
        into, out_of = target.reshape(-1), source.reshape(-1)
        ends = [into.size * i // (self._helpers + 1) for i in range(self._helpers + 2)]
        mine, *theirs = [slice(start, stop) for start, stop in pairwise(ends)]
        handed: list[Future[None]] = []
        for part in theirs:
            try:
                handed.append(self._pool.submit(np.copyto, into[part], out_of[part], "equiv"))
            except RuntimeError:  # it was closed meanwhile: what is left is ours
                np.copyto(into[part], out_of[part], casting="equiv")
        np.copyto(into[mine], out_of[mine], casting="equiv")
        for part_done in handed:
            part_done.result()

    def close(self) -> None:
        """Finish the current copies and end the threads; from then on callers copy alone."""
        self._pool.shutdown()


def as_input(value: Any, spec: TensorSpec, element_type: str, role: str = "input") -> NDArray[Any]:
    """The value for an input (or for another `role`) as an array of the input's type.

    An array must have that type already (in any byte order and layout); values without a type of their own
    (numbers, lists) take it if no kind of value is lost.

    Raises:
        InvalidInputError: It is no such array; names the input. What else an object's own conversion raises
            comes out as it is.
    """
    if type(value) is np.ndarray and value.dtype is spec.dtype and element_type != STRING:
        return value
    typed = hasattr(value, "dtype")
    try:
        if not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
            # https://dmlc.github.io/dlpack; memory of a device is refused
            value = np.from_dlpack(value)
        # NumPy's own types of text take zeros off the end.
        array = np.asarray(value, object if element_type == STRING and not typed else None)
    except (TypeError, ValueError, OverflowError, BufferError) as exc:
        dtype = str(getattr(value, "dtype", ""))  # PyTorch's bfloat16 has no array of NumPy's
        other = dtype.startswith("torch.") and dtype != f"torch.{element_type}"
        cure = _cure(value, spec, element_type) if other else ""
        raise InvalidInputError(f"{role} {spec.name!r} is not an array: {exc}{cure}") from exc
    if element_type == STRING:
        if array.dtype.kind in "US" or all(isinstance(v, (str, bytes)) for v in array.flat):
            return array
    elif array.dtype == spec.dtype or array.dtype.newbyteorder("=") == spec.dtype:
        return array
    elif (
        not typed
        and array.dtype.kind in "biuf"
        and (
            array.size == 0
            or np.can_cast(array.dtype, spec.dtype, "same_kind")
            or array.dtype.kind + spec.dtype.kind
            == "iu"  # of which `check_range` takes those above -1
        )
    ):
        check_range(array, spec, role)
        return array.astype(spec.dtype)
    may_fit = typed and array.dtype.kind in "biuf" and element_type != STRING
    cure = _cure(value, spec, element_type) if may_fit else ""
    raise InvalidInputError(
        f"{role} {spec.name!r} has dtype {array.dtype}, expected {element_type} ({spec}){cure}"
    )


def _cure(value: Any, spec: TensorSpec, element_type: str) -> str:
    """For the end of an error: how an array, or a tensor of PyTorch, becomes one of the input's type."""
    if str(value.dtype).startswith("torch."):
        return f": {spec.name}.to(torch.{element_type})"
    return f': {spec.name}.astype("{element_type}")'


def device_of(value: object, spec: TensorSpec) -> Device | None:
    """The device whose memory the value for an input lies in, as DLPack says; None for the host's.

    Raises:
        InvalidInputError: It does not say where it lies; names the input.
    """
    where = getattr(value, "__dlpack_device__", None)
    try:
        kind, index = (0, 0) if where is None else map(int, where())
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidInputError(f"input {spec.name!r} is not an array: {exc}") from exc
    return Device(DLPACK_KINDS[kind], index) if kind in DLPACK_KINDS else None


def check_range(array: NDArray[Any], spec: TensorSpec, role: str = "input") -> None:
    """Raise `InvalidInputError` for integers that the input's type, if it is of integers, cannot hold."""
    if array.size == 0 or array.dtype.kind not in "iu" or "int" not in spec.element_type:
        return
    values = 1 << ELEMENT_TYPES[spec.element_type].bits
    least = 0 if spec.element_type.startswith("u") else -values // 2
    low, high, most = int(array.min()), int(array.max()), least + values - 1
    if low < least or high > most:
        raise InvalidInputError(
            f"{role} {spec.name!r} has values from {low} to {high}, expected {least} to {most} ({spec})"
        )


def lay_input(spec: TensorSpec, shape: Shape, cut: InputCut) -> Layout | None:
    """The layout of an input; None for strings, which travel inline."""
    if spec.element_type == STRING:
        return None
    if cut.axis is None:
        size = tensor_bytes(spec.element_type, prod(shape))
        return Layout(size=size, offsets=(0,) * len(cut.shapes), contiguous=True)
    return _lay_parts(spec, shape, cut.axis, cut.shapes)


def lay_output(spec: TensorSpec, join: OutputJoin) -> Layout | None:
    """The layout of an output; None for strings, and if its shape is not known before the run."""
    if spec.element_type == STRING or not join.shapes or join.shape is None:
        return None
    if join.axis is None:
        # Each shard has a place of its own, so that the answers can be compared.
        size = tensor_bytes(spec.element_type, prod(join.shape))
        shards = len(join.shapes)
        offsets = tuple(i * align(size) for i in range(shards))
        return Layout(size=shards * align(size), offsets=offsets, contiguous=shards == 1)
    return _lay_parts(spec, join.shape, join.axis, join.shapes)


def _lay_parts(spec: TensorSpec, shape: Shape, axis: int, parts: Sequence[Shape]) -> Layout:
    starts = sharding.offsets(shape, axis, [part[axis] for part in parts])
    if starts is not None:
        itemsize = spec.dtype.itemsize
        offsets = tuple(start * itemsize for start in starts)
        return Layout(size=prod(shape) * itemsize, offsets=offsets, contiguous=True)
    sizes = (align(tensor_bytes(spec.element_type, prod(part))) for part in parts)
    *places, end = accumulate(sizes, initial=0)
    return Layout(size=end, offsets=tuple(places), contiguous=False)


def copy_in(
    array: NDArray[Any],
    spec: TensorSpec,
    cut: InputCut,
    layout: Layout,
    memory: memoryview,
    copier: Copier,
) -> None:
    """Copy an input to its place, in the byte order and layout that workers read."""
    if layout.contiguous:
        copier.copy(np.ndarray(array.shape, spec.dtype, memory), array)
        return
    parts = parts_of(array, cut)
    for offset, shape, part in zip(layout.offsets, cut.shapes, parts, strict=True):
        np.copyto(np.ndarray(shape, spec.dtype, memory, offset), part, casting="equiv")


def string_rows(array: NDArray[Any], cut: InputCut) -> list[tuple[str | bytes, ...]]:
    """The texts of each shard."""
    # The protocol takes exactly these types; NumPy's scalars of text are subclasses.
    return [
        tuple(str(v) if isinstance(v, str) else bytes(v) for v in part.ravel().tolist())
        for part in parts_of(array, cut)
    ]


def outputs_of_no_rows(model: ModelSpec, cut: Cut) -> Arrays:
    """The answer to a batch of no rows, which needs no run."""
    joins = zip(model.outputs, cut.outputs, strict=True)
    return {spec.name: np.empty(join.shape or (), spec.dtype) for spec, join in joins}


def parts_of(array: NDArray[Any], cut: InputCut) -> list[NDArray[Any]]:
    """An input's parts, as views."""
    axis = cut.axis
    rows = [0 if axis is None else shape[axis] for shape in cut.shapes]
    return split_rows(array, axis, rows)


def split_rows(array: NDArray[Any], axis: int | None, rows: Sequence[int]) -> list[NDArray[Any]]:
    """The parts of so many rows along an axis, as views; without an axis, the whole array for each."""
    if axis is None:
        return [array] * len(rows)
    return np.split(array, np.cumsum(rows)[:-1], axis)


def join_parts(
    spec: TensorSpec, join: OutputJoin, parts: Sequence[NDArray[Any]], workers: Sequence[str]
) -> NDArray[Any]:
    """One array of the shards' parts; `workers` names the worker of each part.

    Raises:
        JoinError: A part has another shape than expected, or other values than the first part although all
            must be the same.
    """
    sharding.check_join(spec.name, join, [part.shape for part in parts], workers)
    if len(parts) == 1:
        return parts[0]
    if join.axis is not None:
        return np.concatenate(parts, axis=join.axis)
    for part, worker in zip(parts[1:], workers[1:], strict=True):
        fits, far = difference(part, parts[0])
        if not fits:
            raise JoinError(
                f"output {spec.name!r} is to be the same from every worker: {worker} gave others than "
                f"{workers[0]}, up to {far:.2g} of the largest element apart"
            )
    return parts[0]


def difference(got: NDArray[Any], want: NDArray[Any]) -> tuple[bool, float]:
    """Whether two arrays of one shape are equal within the tolerance of their type, and how far they differ.

    The difference is relative to the largest element of `want`; infinite if that has none.
    """
    if got.dtype.kind in "OSUT":
        equal = bool(np.all(got == want))
        return equal, 0.0 if equal else np.inf
    name = element_type_name(want.dtype)
    exact = want.dtype.kind in "biu"
    if exact and np.array_equal(got, want):
        return True, 0.0
    if exact:
        got, want = got.astype(np.float64), want.astype(np.float64)
    elif want.dtype.isbuiltin != 1:  # of ml_dtypes
        got, want = got.astype(np.float32), want.astype(np.float32)
    tolerance = 0.0 if exact else TOLERANCES.get(name, _EIGHT_BIT_FLOAT)
    with np.errstate(all="ignore"):
        alike = (got == want) | (np.isnan(got) & np.isnan(want))
        if np.all(alike):
            return not exact, 0.0  # large integers may be alike as floats
        sizes = np.abs(want)
        finite = np.isfinite(sizes)
        largest = float(np.max(sizes, where=finite, initial=0.0))
        # One that marks what is masked out is the same everywhere, and must not hide what differs.
        scale = min(largest, _MARKS * float(np.max(sizes, where=finite & ~alike, initial=0.0)))
        apart = np.where(alike, 0.0, np.abs(got - want))
        # Each by itself: the sum may be more than the type has.
        allowed = tolerance * np.where(finite, sizes, 0.0) + tolerance * scale / 2
        fits = bool(np.all(alike | (apart <= allowed)))
        most = float(np.max(np.where(np.isnan(apart), np.inf, apart)))
        return fits, most / largest if largest else (np.inf if most else 0.0)
