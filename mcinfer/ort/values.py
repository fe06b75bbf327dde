"""Tensors between NumPy's arrays, which a master takes and gives, and ONNX Runtime's values and bindings."""

import ctypes
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native
from onnxruntime.capi.onnxruntime_inference_collection import OrtValue

from mcinfer.dlpack import DlpackTensor
from mcinfer.model_cache.protobuf import encode_field
from mcinfer.ort.errors import InvalidBinding, InvalidValue, Unsupported, invalid_argument
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, tensor_bytes

_RUNTIME_NAMES = {
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e4m3fnuz": "float8e4m3fnuz",
    "float8_e5m2": "float8e5m2",
    "float8_e5m2fnuz": "float8e5m2fnuz",
}
"""The runtime's names of element types that differ from ours."""

_TEXT_KINDS = "OUSV"
"""Kinds of NumPy's types of which the runtime makes strings."""


def runtime_type(element_type: str) -> str:
    """A type as the runtime writes it: ``tensor(float)``."""
    return f"tensor({_RUNTIME_NAMES.get(element_type, element_type)})"


# What a feed may hold.


def fed(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """A value of a feed as an array for the master; what a plain session refuses is refused.

    Raises:
        InvalidArgument: An array of another type, number of dimensions or size.
        InvalidValue: Neither an array, nor a list, nor an ``OrtValue``.
    """
    if type(value) is not np.ndarray or value.dtype is not spec.dtype or spec.dtype.kind == "O":
        value = _as_array(value, spec)
    _check_shape(value.shape, spec)
    return value  # type: ignore[no-any-return] # narrowed above


def _as_array(value: Any, spec: TensorSpec) -> NDArray[Any]:
    if isinstance(value, OrtValue):
        value = value._get_c_value()
    if isinstance(value, native.OrtValue):
        return array_of(value, spec)
    if value is None:
        raise InvalidValue(f"Missing Input: {spec.name}")
    if isinstance(value, list):
        try:
            value = np.array(value, None if spec.element_type == STRING else spec.dtype)
        except (ValueError, TypeError, OverflowError) as exc:
            raise InvalidValue(f"input {spec.name!r}: a list that is no array: {exc}") from exc
    if not isinstance(value, np.ndarray):
        raise InvalidValue(
            f"Unable to handle object of type {type(value)} for input {spec.name!r}: expected a numpy array, "
            "a list or an OrtValue"
        )
    if spec.element_type == STRING and value.dtype.kind in _TEXT_KINDS:
        texts = [_text(item, value.dtype.kind) for item in value.ravel().tolist()]
        return np.array([*texts, ""], dtype=object)[:-1].reshape(value.shape)
    if value.dtype == spec.dtype or value.dtype.newbyteorder("=") == spec.dtype:
        return value
    actual = next((n for n in ELEMENT_TYPES if n == value.dtype.name), value.dtype.name)
    raise invalid_argument(
        f"Unexpected input data type. Actual: ({runtime_type(actual)}) , expected: "
        f"({runtime_type(spec.element_type)})"
    )


def _text(item: Any, kind: str) -> str:
    """A string as the runtime makes it of an element of an array of text, bytes, raw data or objects."""
    return item.decode() if kind in "SV" else str(item)


def _check_shape(shape: tuple[int, ...], spec: TensorSpec) -> None:
    """Raise what the runtime raises for a shape; where the model says none, the worker checks it."""
    if not spec.shape or spec.admits(shape):
        return
    if len(shape) != len(spec.shape):
        raise invalid_argument(
            f"Invalid rank for input: {spec.name} Got: {len(shape)} Expected: {len(spec.shape)} Please fix "
            "either the inputs/outputs or the model."
        )
    wrong = "".join(
        f" index: {i} Got: {got} Expected: {size}\n"
        for i, (got, size) in enumerate(zip(shape, spec.shape, strict=True))
        if isinstance(size, int) and size != got
    )
    raise invalid_argument(
        f"Got invalid dimensions for input: {spec.name} for the following indices\n{wrong} Please fix either "
        "the inputs/outputs or the model."
    )


# The runtime's values.


def array_of(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """The elements of a ``C.OrtValue`` on the host, in place; the value must outlive the array.

    Raises:
        InvalidArgument: It is of another type than the input.
        Unsupported: It is no tensor, or lies on another device than the host.
    """
    if not value.is_tensor():
        raise Unsupported(f"OrtValue of {value.data_type()} for {spec.name!r}: expected a tensor")
    if value.data_type() != runtime_type(spec.element_type):
        raise invalid_argument(
            f"Unexpected input data type. Actual: ({value.data_type()}) , expected: "
            f"({runtime_type(spec.element_type)})"
        )
    if value.device_name().lower() != "cpu":
        raise Unsupported(
            f"OrtValue on {value.device_name()} for {spec.name!r}: expected one in the host's memory; "
            "Master.predict takes tensors of cards"
        )
    if spec.element_type == STRING:
        texts: NDArray[Any] = value.numpy()
        return texts
    return array_at(value.data_ptr(), tuple(value.shape()), spec)


def array_at(address: int, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """An array over memory that belongs to others."""
    if ELEMENT_TYPES[spec.element_type].bits % 8:
        raise Unsupported(
            f"{spec.element_type} elements of {spec.name!r} in packed memory: expected bytes"
        )
    size = tensor_bytes(spec.element_type, prod(shape))
    if not size:
        return np.empty(shape, spec.dtype)
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return np.ndarray(shape, spec.dtype, memory)


def value_of(array: NDArray[Any], spec: TensorSpec) -> Any:
    """A ``C.OrtValue`` with the elements of an array, whose memory it keeps."""
    if spec.element_type == STRING:
        return _string_value(array)
    if ELEMENT_TYPES[spec.element_type].bits % 8:
        raise Unsupported(
            f"an OrtValue of {spec.element_type} for {spec.name!r}: call run() for it"
        )
    array = np.ascontiguousarray(array)
    if array.size and hasattr(OrtValue, "from_dlpack"):
        tensor = DlpackTensor(
            address=array.ctypes.data,
            shape=array.shape,
            element_type=spec.element_type,
            device=None,
            owner=array,
        )
        return OrtValue.from_dlpack(tensor)._get_c_value()
    value = native.OrtValue.ortvalue_from_shape_and_onnx_type(
        array.shape, ELEMENT_TYPES[spec.element_type].onnx, host()
    )
    ctypes.memmove(value.data_ptr(), array.ctypes.data, array.nbytes)
    return value


def host() -> Any:
    """The host, as the runtime's bindings name it."""
    return native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)


def _string_value(array: NDArray[Any]) -> Any:
    """A ``C.OrtValue`` of strings, which only a session of the runtime can make: of a constant model."""
    texts = b"".join(encode_field(6, str(item).encode()) for item in array.ravel().tolist())
    dimensions = b"".join(encode_field(1, size) for size in array.shape)
    number = ELEMENT_TYPES[STRING].onnx
    tensor = dimensions + encode_field(2, number) + texts + encode_field(8, b"x")
    node = encode_field(1, b"x") + encode_field(2, b"y") + encode_field(4, b"Identity")
    output = encode_field(1, b"y") + encode_field(2, encode_field(1, encode_field(1, number)))
    graph = encode_field(1, node) + encode_field(2, b"strings") + encode_field(5, tensor)
    model = encode_field(1, 8) + encode_field(7, graph + encode_field(12, output))
    model += encode_field(8, encode_field(2, 17))
    session = native.InferenceSession(native.SessionOptions(), model, False, False)
    session.initialize_session([], [], set())
    (value,) = session.run_with_ort_values({}, ["y"], None)
    return value


# Bindings. ONNX Runtime's own class checks what is bound and keeps it, but does not say what it has.


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Memory that a program bound by its address."""

    device: Any
    onnx_type: int
    shape: tuple[int, ...]
    address: int


@dataclass(slots=True)
class Bound:
    """What is bound to one ``C.SessionIOBinding`` of a session of mcinfer's.

    Attributes:
        inputs: An array, a ``C.OrtValue`` or a place, by name.
        outputs: A ``C.OrtValue``, a place, or None for one that the run allocates, by name, in the order in
            which they were bound.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


_BOUND = "_mcinfer_bound"
_WRAPPING = threading.Lock()


def note_bindings(session: type) -> None:
    """Have ``C.SessionIOBinding`` note what is bound for sessions of this class; those of others as ever."""
    kind = native.SessionIOBinding
    with _WRAPPING:
        if hasattr(kind, _BOUND):
            return
        notes: MutableMapping[Any, Bound] = WeakKeyDictionary()
        begin = kind.__init__

        @wraps(begin)
        def initialise(self: Any, bound_to: Any) -> None:
            begin(self, bound_to)
            if isinstance(bound_to, session):
                notes[self] = Bound()

        kind.__init__ = initialise
        kind.bind_input = _noting(kind.bind_input, notes, "inputs")
        kind.bind_ortvalue_input = _noting(kind.bind_ortvalue_input, notes, "inputs")
        bind_value = kind.bind_ortvalue_output
        kind.bind_output = _noting(kind.bind_output, notes, "outputs")
        kind.bind_ortvalue_output = _noting(bind_value, notes, "outputs")
        for name in ("inputs", "outputs"):
            clear = getattr(kind, f"clear_binding_{name}")
            setattr(kind, f"clear_binding_{name}", _clearing(clear, notes, name))
        setattr(kind, _BOUND, (notes, bind_value))


def _noting(method: Any, notes: MutableMapping[Any, Bound], side: str) -> Any:
    @wraps(method)
    def noting(self: Any, name: str, *what: Any) -> None:
        method(self, name, *what)
        bound = notes.get(self)
        if bound is not None:
            getattr(bound, side)[name] = _what(*what)

    return noting


def _what(first: Any, *rest: Any) -> Any:
    """What a method of a binding got after the name: a value, a device alone, or a place."""
    if not rest:
        return _Device(first) if isinstance(first, native.OrtDevice) else first
    onnx_type, shape, address = rest
    if not isinstance(onnx_type, int):
        name = np.dtype(onnx_type).name
        onnx_type = ELEMENT_TYPES[name].onnx if name in ELEMENT_TYPES else 0
    return Place(
        device=first, onnx_type=int(onnx_type), shape=tuple(map(int, shape)), address=int(address)
    )


@dataclass(frozen=True, slots=True)
class _Device:
    """A device on which the run is to allocate an output."""

    device: Any


def _clearing(method: Any, notes: MutableMapping[Any, Bound], side: str) -> Any:
    @wraps(method)
    def clearing(self: Any) -> None:
        method(self)
        bound = notes.get(self)
        if bound is not None:
            getattr(bound, side).clear()

    return clearing


def bound_to(binding: Any) -> Bound:
    """What a program bound; `InvalidBinding` if the binding is not of a session of mcinfer's."""
    notes, _ = getattr(native.SessionIOBinding, _BOUND)
    bound: Bound | None = notes.get(binding)
    if bound is None:
        raise InvalidBinding(
            "the binding was made for another session, or before mcinfer.ort was imported"
        )
    return bound


def bound_array(what: Any, spec: TensorSpec) -> NDArray[Any]:
    """The array of what is bound, in place."""
    if isinstance(what, Place):
        check_host(what.device, spec.name)
        if what.onnx_type != ELEMENT_TYPES[spec.element_type].onnx:
            raise invalid_argument(
                f"Unexpected data type of what is bound to {spec.name!r}: got ONNX's type number "
                f"{what.onnx_type}, expected {runtime_type(spec.element_type)}"
            )
        return array_at(what.address, what.shape, spec)
    return _as_array(what, spec)


def deliver(binding: Any, array: NDArray[Any], spec: TensorSpec) -> None:
    """Put an output where a program has bound it; raises `InvalidBinding` if it does not fit."""
    notes, bind_value = getattr(native.SessionIOBinding, _BOUND)
    target = notes[binding].outputs[spec.name]
    if isinstance(target, _Device):
        check_host(target.device, spec.name)
        bind_value(binding, spec.name, value_of(array, spec))
        return
    place = bound_array(target, spec)
    if place.shape != array.shape:
        raise InvalidBinding(
            f"OrtValue shape verification failed for output {spec.name!r}. Current shape:"
            f"{{{','.join(map(str, place.shape))}}} Requested shape:{{{','.join(map(str, array.shape))}}}"
        )
    np.copyto(place, array, "equiv")


def check_outputs(bound: Bound, specs: Mapping[str, TensorSpec]) -> None:
    """Raise what does not fit among the outputs that are bound, before a run."""
    for name, target in bound.outputs.items():
        if specs[name].element_type == STRING and not isinstance(target, _Device):
            raise Unsupported(
                f"{name}: strings bound to memory; bind the name and the device alone"
            )
        if isinstance(target, _Device | Place):
            check_host(target.device, name)


def check_host(device: Any, name: str) -> None:
    """Raise `Unsupported` for memory that is not the host's."""
    if device.device_type() != native.OrtDevice.cpu():
        raise Unsupported(
            f"{name}: got a device of type {device.device_type()}: expected the host's memory; "
            "Master.predict takes and gives tensors of cards"
        )
