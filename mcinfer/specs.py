"""Element types, and the inputs and outputs of a model.

The element types and their numbers are those of ONNX (``onnx.TensorProto.DataType``). ONNX Runtime accepts
the numbers for types that NumPy lacks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.extras import requires

Dimension = int | str | None
"""A fixed size, a symbol whose size a run decides, or None: free and without a name."""

STRING = "string"
"""The only element type without a fixed size."""

MOST_COPIED = 1 << 20
"""Most bytes of an output of no declared shape that has a place before the run, to which it is copied."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type: its ONNX number and its size in bits (0 for strings)."""

    onnx: int
    bits: int


ELEMENT_TYPES: dict[str, ElementType] = {
    "float32": ElementType(1, 32),
    "uint8": ElementType(2, 8),
    "int8": ElementType(3, 8),
    "uint16": ElementType(4, 16),
    "int16": ElementType(5, 16),
    "int32": ElementType(6, 32),
    "int64": ElementType(7, 64),
    STRING: ElementType(8, 0),
    "bool": ElementType(9, 8),
    "float16": ElementType(10, 16),
    "float64": ElementType(11, 64),
    "uint32": ElementType(12, 32),
    "uint64": ElementType(13, 64),
    "complex64": ElementType(14, 64),
    "complex128": ElementType(15, 128),
    "bfloat16": ElementType(16, 16),
    "float8_e4m3fn": ElementType(17, 8),
    "float8_e4m3fnuz": ElementType(18, 8),
    "float8_e5m2": ElementType(19, 8),
    "float8_e5m2fnuz": ElementType(20, 8),
    "uint4": ElementType(21, 4),
    "int4": ElementType(22, 4),
}
"""By the name in NumPy or ml_dtypes. Four-bit types are packed two to a byte, low half first."""


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """The NumPy dtype of an element type: object for strings, ml_dtypes' for types that NumPy lacks.

    Raises:
        InvalidInputError: The element type is unknown.
        MissingDependencyError: The type needs ml_dtypes, which is not installed.
    """
    if name not in ELEMENT_TYPES:
        raise InvalidInputError(f"element type: got {name!r}, expected one of {[*ELEMENT_TYPES]}")
    if name == STRING:
        return np.dtype(object)
    with suppress(TypeError):
        return np.dtype(name)
    needs = f"element type {name} needs the package ml_dtypes"
    with requires(needs, "ml_dtypes", extra="ml-dtypes"):
        import ml_dtypes
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@cache
def element_type_name(dtype: "np.dtype[Any]") -> str:
    """The name of a dtype in `ELEMENT_TYPES`, in any byte order; `InvalidInputError` if there is none."""
    if dtype.kind in "OUST":
        return STRING
    if dtype.name not in ELEMENT_TYPES:
        raise InvalidInputError(f"dtype: got {dtype}, expected one of {[*ELEMENT_TYPES]}")
    return dtype.name


def tensor_bytes(name: str, elements: int) -> int:
    """Bytes of a tensor in shared memory; 0 for strings, which are never there."""
    return (elements * ELEMENT_TYPES[name].bits + 7) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: As in the model.
        dtype: NumPy dtype; object for strings.
        shape: Each dimension is a fixed size, a symbol (``"batch"``), or ``None`` without a name.
    """

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[Dimension, ...]

    @property
    def element_type(self) -> str:
        """The element type's name, a key of `ELEMENT_TYPES`."""
        return element_type_name(self.dtype)

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape fits: the same number of dimensions, and all fixed sizes equal."""
        return len(shape) == len(self.shape) and all(
            size == given or not isinstance(size, int)
            for size, given in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        dimensions = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.element_type}[{dimensions}]"


def specs_of(fields: Iterable[tuple[str, str, tuple[Dimension, ...]]]) -> tuple[TensorSpec, ...]:
    """The tensors with these names, element types and shapes."""
    return tuple(
        TensorSpec(name=name, dtype=numpy_dtype(kind), shape=shape) for name, kind, shape in fields
    )


def check_whole_bytes(specs: Sequence[TensorSpec]) -> None:
    """Raise `BuildError` if elements of one have less than a byte, which no array holds as they lie."""
    for spec in specs:
        if ELEMENT_TYPES[spec.element_type].bits % 8:
            raise BuildError(
                f"model: {spec} has elements of less than a byte, which only weights may have: expected an "
                "input or output that the model casts to int8 or uint8"
            )


def declared_shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of an output by these sizes of the model's symbols; None if they do not give all of it."""
    shape = []
    for declared in spec.shape:
        size = sizes.get(declared) if isinstance(declared, str) else declared
        if size is None:
            return None
        shape.append(size)
    return tuple(shape)


def symbol_sizes(specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The size of each symbol in these shapes; without those of several sizes, which runtimes allow."""
    bound: dict[str, int] = {}
    unsure = set()
    for spec, shape in zip(specs, shapes, strict=True):
        for symbol, size in zip(spec.shape, shape, strict=False):
            if isinstance(symbol, str) and bound.setdefault(symbol, size) != size:
                unsure.add(symbol)
    return {symbol: size for symbol, size in bound.items() if symbol not in unsure}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The inputs and outputs of a model.

    Attributes:
        inputs: In the model's order.
        outputs: In the model's order.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        """Raise `BuildError` if inputs, or outputs, share a name: answers are by name."""
        for role, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = Counter(spec.name for spec in specs)
            twice = [name for name, number in names.items() if number > 1]
            if twice:
                raise BuildError(
                    f"model: it declares the {role} {twice} more than once, expected different names"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What ONNX Runtime says of a loaded model, beside its inputs and outputs.

    Attributes:
        about: What the model's file says of itself, by the names of ``onnxruntime.ModelMetadata``:
            ``producer_name``, ``graph_name``, ``domain``, ``description``, ``graph_description``,
            ``version``.
        properties: The model's own properties (``custom_metadata_map``).
        overridable: The initialisers that are inputs too.
        provider_options: Options of each execution provider in use, by its name.
    """

    about: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    overridable: tuple[TensorSpec, ...] = ()
    provider_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
