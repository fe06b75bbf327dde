"""Tensors between what a master takes and gives, and ONNX Runtime's values and bindings.

A master takes NumPy arrays, and tensors of cards by DLPack; it gives NumPy arrays, and CuPy arrays on a card.
A run that wrote to a program's memory on a card ends when that is written. Like other work of CUDA, it comes
after what the card's default stream has queued.
"""

import ctypes
import threading
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native
from onnxruntime.capi.onnxruntime_inference_collection import OrtValue

from mcinfer.cards.cuda import Card
from mcinfer.cards.dlpack import DlpackTensor
from mcinfer.config import Device
from mcinfer.errors import PredictTimeoutError
from mcinfer.model_cache.protobuf import encode_field
from mcinfer.ort.errors import (
    InvalidArgument,
    InvalidBinding,
    InvalidValue,
    RunFailed,
    Unsupported,
    invalid_argument,
)
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, numpy_dtype, tensor_bytes

Tensor = NDArray[Any] | DlpackTensor
"""On the host, or on a card."""

_Side = Literal["input", "output"]

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


def fed(value: Any, spec: TensorSpec) -> Tensor:
    """A value of a feed as the master takes it; what a plain session refuses is refused.

    Raises:
        InvalidArgument: An array of another type, number of dimensions or size.
        InvalidValue: Neither an array, nor a list, nor an ``OrtValue``.
    """
    if type(value) is not np.ndarray or value.dtype is not spec.dtype or spec.dtype.kind == "O":
        value = _as_tensor(value, spec)
    _check_shape(value.shape, spec)
    return value  # type: ignore[no-any-return] # narrowed above


def _as_tensor(value: Any, spec: TensorSpec, side: _Side = "input") -> Tensor:
    if isinstance(value, OrtValue):
        return tensor_of(value._get_c_value(), spec, side, value)
    if isinstance(value, native.OrtValue):
        return tensor_of(value, spec, side)
    if value is None:
        raise RunFailed(f"Missing Input: {spec.name}")
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
    actual = STRING if value.dtype.kind in _TEXT_KINDS else value.dtype.name
    raise _wrong_type(runtime_type(actual), spec)


def _wrong_type(actual: str, spec: TensorSpec, side: _Side = "input") -> InvalidArgument:
    """The runtime's error for another type than the model's; `actual` is in the runtime's words."""
    return invalid_argument(
        f"Unexpected {side} data type. Actual: ({actual}) , expected: ({runtime_type(spec.element_type)})"
    )


def _text(item: Any, kind: str) -> str:
    """A string as the runtime makes it of an element of an array of text, bytes, raw data or objects."""
    return item.decode() if kind in "SV" else str(item)


def _check_shape(shape: tuple[int, ...], spec: TensorSpec, side: _Side = "input") -> None:
    """Raise what the runtime raises for a shape; where the model says none, the worker checks it."""
    if not spec.shape or spec.admits(shape):
        return
    if len(shape) != len(spec.shape):
        raise invalid_argument(
            f"Invalid rank for {side}: {spec.name} Got: {len(shape)} Expected: {len(spec.shape)} Please fix "
            "either the inputs/outputs or the model."
        )
    wrong = "".join(
        f" index: {i} Got: {got} Expected: {size}\n"
        for i, (got, size) in enumerate(zip(shape, spec.shape, strict=True))
        if isinstance(size, int) and size != got
    )
    raise invalid_argument(
        f"Got invalid dimensions for {side}: {spec.name} for the following indices\n{wrong} Please fix "
        "either the inputs/outputs or the model."
    )


# The runtime's values.


def tensor_of(value: Any, spec: TensorSpec, side: _Side = "input", owner: object = None) -> Tensor:
    """The elements of a ``C.OrtValue``, in place.

    The tensor keeps the `owner` of the memory, None for the value itself. An ``OrtValue`` over an array of
    NumPy's keeps that array, and its ``C.OrtValue`` does not.

    Raises:
        InvalidArgument: It is of another type than the input or output.
        Unsupported: It is no tensor, or lies on a device that is neither the host nor an NVIDIA card.
    """
    owner = value if owner is None else owner
    if not value.is_tensor():
        raise Unsupported(f"OrtValue of {value.data_type()} for {spec.name!r}: expected a tensor")
    if value.data_type() != runtime_type(spec.element_type):
        raise _wrong_type(value.data_type(), spec, side)
    shape = tuple(value.shape())
    if is_on_card(value):
        index = value.__dlpack_device__()[1]
        return _tensor_at(value.data_ptr(), shape, spec, Device("cuda", index), owner)
    if value.device_name().lower() != "cpu":
        raise Unsupported(
            f"OrtValue on {value.device_name()} for {spec.name!r}: expected one in the memory of the host "
            "or of an NVIDIA card"
        )
    if spec.element_type == STRING:
        texts: NDArray[Any] = value.numpy()
        return texts
    return array_at(value.data_ptr(), shape, spec, owner)


def is_on_card(value: Any) -> bool:
    """Whether a ``C.OrtValue`` lies on an NVIDIA card."""
    return bool(value.is_tensor() and value.device_name().lower() == "cuda")


def _tensor_at(
    address: int, shape: tuple[int, ...], spec: TensorSpec, device: Device, owner: object
) -> DlpackTensor:
    """A tensor over memory of a card that belongs to others."""
    _check_bytes(spec)

    def follow(_stream: int | None) -> None:  # which is that of the card
        Card.open(device).follow(_DEFAULT_STREAM)

    return DlpackTensor(
        address=address,
        shape=shape,
        element_type=spec.element_type,
        device=device,
        owner=owner,
        ready=follow,
    )


def _check_bytes(spec: TensorSpec) -> None:
    if spec.element_type == STRING or ELEMENT_TYPES[spec.element_type].bits % 8:
        raise Unsupported(
            f"{spec.element_type} elements of {spec.name!r} in bound memory: expected bytes"
        )


def array_at(address: int, shape: tuple[int, ...], spec: TensorSpec, owner: object) -> NDArray[Any]:
    """An array over memory that belongs to others; it keeps the owner, if there is one."""
    _check_bytes(spec)
    size = tensor_bytes(spec.element_type, prod(shape))
    if not size:
        return np.empty(shape, spec.dtype)
    memory = (ctypes.c_char * size).from_address(address)
    vars(memory)["owner"] = owner
    return np.ndarray(shape, spec.dtype, memoryview(memory).cast("B"))


def value_of(array: Any, spec: TensorSpec) -> Any:
    """A ``C.OrtValue`` with the elements of an array of NumPy or CuPy, whose memory it keeps."""
    if not isinstance(array, np.ndarray):
        tensor = _tensor_at(array.data.ptr, array.shape, spec, _card_of(array), array)
        return OrtValue.from_dlpack(tensor)._get_c_value()
    if spec.element_type == STRING:
        return _string_value(array)
    if ELEMENT_TYPES[spec.element_type].bits % 8:
        raise Unsupported(
            f"an OrtValue of {spec.element_type} for {spec.name!r}: call run() for it"
        )
    array = np.asarray(array, order="C")
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
class BoundMemory:
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
        bind_place, bind_value = kind.bind_input, kind.bind_ortvalue_output
        kind.bind_input = _noting(bind_place, notes, "inputs", bind_place)
        kind.bind_ortvalue_input = _noting(kind.bind_ortvalue_input, notes, "inputs", bind_place)
        kind.bind_output = _noting(kind.bind_output, notes, "outputs")
        kind.bind_ortvalue_output = _noting(bind_value, notes, "outputs")
        for name in ("inputs", "outputs"):
            clear = getattr(kind, f"clear_binding_{name}")
            setattr(kind, f"clear_binding_{name}", _clearing(clear, notes, name))
        kind.copy_outputs_to_cpu = _copying(kind.copy_outputs_to_cpu, notes)
        setattr(kind, _BOUND, (notes, bind_value))


def _noting(method: Any, notes: MutableMapping[Any, Bound], side: str, place: Any = None) -> Any:
    """A method that also notes what it binds.

    The runtime copies an input to where its session needs it, and sessions of mcinfer's have no CUDA in this
    process. So an input on a card is bound by `place`, the runtime's method for memory, as if it were the
    host's: this checks its name and type, and nothing reads it.
    """

    @wraps(method)
    def noting(self: Any, name: str, *what: Any) -> None:
        bound = notes.get(self)
        if bound is None:
            method(self, name, *what)
            return
        noted = _what(*what)
        if place is not None and isinstance(noted, BoundMemory) and card_of(noted.device, name):
            place(self, name, host(), *what[1:])
        elif place is not None and isinstance(noted, native.OrtValue) and is_on_card(noted):
            kind, shape = noted.element_type(), noted.shape()
            place(self, name, host(), kind, shape, noted.data_ptr())
        else:
            method(self, name, *what)
        getattr(bound, side)[name] = noted

    return noting


def _what(first: Any, *rest: Any) -> Any:
    """What a method of a binding got after the name: a value, a device alone, or a place.

    Of an array that is not contiguous the runtime binds a copy.
    """
    if isinstance(first, np.ndarray):
        return np.asarray(first, order="C")
    if not rest:
        return _AllocateOn(first) if isinstance(first, native.OrtDevice) else first
    onnx_type, shape, address = rest
    if not isinstance(onnx_type, int):
        dtype = np.dtype(onnx_type)
        name = STRING if dtype.kind in _TEXT_KINDS else dtype.name
        onnx_type = ELEMENT_TYPES[name].onnx if name in ELEMENT_TYPES else 0
    return BoundMemory(
        device=first, onnx_type=int(onnx_type), shape=tuple(map(int, shape)), address=int(address)
    )


@dataclass(frozen=True, slots=True)
class _AllocateOn:
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


def _copying(method: Any, notes: MutableMapping[Any, Bound]) -> Any:
    @wraps(method)
    def copying(self: Any) -> list[NDArray[Any]]:
        found = [*self.get_outputs()] if self in notes else []
        if not any(map(is_on_card, found)):
            arrays: list[NDArray[Any]] = method(self)
            return arrays
        return [_on_host(value) if is_on_card(value) else value.numpy() for value in found]

    return copying


def bound_to(binding: Any) -> Bound:
    """What a program bound; `InvalidBinding` if the binding is not of a session of mcinfer's."""
    notes, _ = getattr(native.SessionIOBinding, _BOUND)
    bound: Bound | None = notes.get(binding)
    if bound is None:
        raise InvalidBinding(
            "the binding was made for another session, or before mcinfer.ort was imported"
        )
    return bound


def bound_tensor(what: Any, spec: TensorSpec, side: _Side = "input") -> Tensor:
    """What is bound, in place; the program owns the memory of a `BoundMemory`."""
    if not isinstance(what, BoundMemory):
        return _as_tensor(what, spec, side)
    if what.onnx_type != ELEMENT_TYPES[spec.element_type].onnx:
        names = {element.onnx: name for name, element in ELEMENT_TYPES.items()}
        actual = names.get(what.onnx_type, f"type {what.onnx_type}")
        raise _wrong_type(runtime_type(actual), spec, side)
    card = card_of(what.device, spec.name)
    if card is not None:
        return _tensor_at(what.address, what.shape, spec, card, None)
    return array_at(what.address, what.shape, spec, None)


def deliver(binding: Any, answer: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Put outputs where a program has bound them; raises `InvalidBinding` if one does not fit."""
    notes, bind_value = getattr(native.SessionIOBinding, _BOUND)
    copies: list[tuple[Tensor, Any]] = []
    for name, target in notes[binding].outputs.items():
        found, spec = answer[name], specs[name]
        if isinstance(target, _AllocateOn):
            card = card_of(target.device, name)
            on_card = None if isinstance(found, np.ndarray) else _card_of(found)
            if card is None and on_card is not None:
                found = _downloaded(found.data.ptr, found.shape, spec.dtype, on_card)
            elif card != on_card:
                raise Unsupported(
                    f"{name}: bound to {card} without an address, which is not possible for "
                    f"{spec.element_type}, nor if another output is bound so to another card"
                )
            bind_value(binding, name, value_of(found, spec))
            continue
        place = bound_tensor(target, spec, "output")
        if place.shape != found.shape:
            raise InvalidBinding(
                f"OrtValue shape verification failed for output {name!r}. Current shape:"
                f"{{{','.join(map(str, place.shape))}}} Requested shape:"
                f"{{{','.join(map(str, found.shape))}}}"
            )
        if isinstance(place, np.ndarray) and isinstance(found, np.ndarray):
            np.copyto(place, found, "equiv")
        else:
            copies.append((place, found))
    _copy(copies)


def outputs_on(devices: Iterable[Any], specs: Iterable[TensorSpec]) -> str:
    """Where a run is to leave its outputs, as `Master.predict` takes it: on the first card among these.

    Types that CuPy lacks come by way of the host.
    """
    card = next(filter(None, (card_of(device, "output") for device in devices)), None)
    in_cupy = all(spec.element_type != STRING and spec.dtype.isbuiltin == 1 for spec in specs)
    return str(card) if card is not None and in_cupy else "host"


def output_devices(bound: Bound, specs: Mapping[str, TensorSpec]) -> list[Any]:
    """The devices that a program named for its outputs, those without an address first.

    Raises what does not fit among these outputs, before a run.
    """
    alone, others = [], []
    for name, target in bound.outputs.items():
        if specs[name].element_type == STRING and not isinstance(target, _AllocateOn):
            raise Unsupported(
                f"{name}: strings bound to memory; bind the name and the device alone"
            )
        if isinstance(target, _AllocateOn):
            alone.append(target.device)
            card_of(target.device, name)
            continue
        place = bound_tensor(target, specs[name], "output")
        _check_shape(place.shape, specs[name], "output")
        if isinstance(place, DlpackTensor):
            others.append(_device_of(target))
    return [*alone, *others]


# Memory of cards.

_DEFAULT_STREAM = 1  # cudaStreamLegacy
_NVIDIA = (
    0x10DE  # the vendor's number on the PCI bus, which old versions of the runtime do not have
)
_PATIENCE = 600.0  # seconds for the work on a card that copies wait for


def card_of(device: Any, name: str) -> Device | None:
    """The card that is a runtime's device; None for the host; `Unsupported` for others."""
    kind = device.device_type()
    if kind == native.OrtDevice.cpu():
        return None
    vendor = device.vendor_id() if hasattr(device, "vendor_id") else _NVIDIA
    if kind != native.OrtDevice.cuda() or vendor not in (0, _NVIDIA):
        raise Unsupported(
            f"{name}: got a device of type {kind} of vendor {vendor:#x}: expected the host's memory, or that "
            "of an NVIDIA card"
        )
    return Device("cuda", device.device_id())


def _device_of(target: Any) -> Any:
    if isinstance(target, BoundMemory):
        return target.device
    value = target._get_c_value() if isinstance(target, OrtValue) else target
    index = value.__dlpack_device__()[1]
    return native.OrtDevice(native.OrtDevice.cuda(), native.OrtDevice.default_memory(), index)


def _card_of(array: Any) -> Device:
    """The card of an array of CuPy's."""
    return Device("cuda", array.device.id)


def _on_host(value: Any) -> NDArray[Any]:
    """A copy of the elements of a ``C.OrtValue`` on a card."""
    element_type = next(n for n in ELEMENT_TYPES if runtime_type(n) == value.data_type())
    device = Device("cuda", value.__dlpack_device__()[1])
    return _downloaded(value.data_ptr(), tuple(value.shape()), numpy_dtype(element_type), device)


def _downloaded(address: int, shape: Sequence[int], dtype: Any, device: Device) -> NDArray[Any]:
    array = np.empty(shape, dtype)
    card = Card.open(device)
    card.follow(_DEFAULT_STREAM)
    card.copy(array.ctypes.data, address, array.nbytes)
    _finish([card])
    return array


def _copy(copies: Sequence[tuple[Tensor, Any]]) -> None:
    """Copy arrays of NumPy or CuPy, one of each pair on a card, to a program's memory, and wait for it."""
    used, held = [], []
    for target, source in copies:
        if isinstance(source, np.ndarray):
            held.append(np.ascontiguousarray(source))
            start = held[-1].ctypes.data
        else:
            start = source.data.ptr
        if isinstance(target, DlpackTensor):
            card = Card.open(cast(Device, target.device))
            end, size = target.address, target.size
        else:
            card = Card.open(_card_of(source))
            end, size = target.ctypes.data, target.nbytes
        card.follow(_DEFAULT_STREAM)  # the program's kernels may still read what was there
        card.copy(end, start, size)
        used.append(card)
    _finish(used)


def _finish(cards: Iterable[Card]) -> None:
    for card in dict.fromkeys(cards):
        try:
            card.synchronize(_PATIENCE)
        except TimeoutError as exc:
            raise PredictTimeoutError(str(exc)) from exc
