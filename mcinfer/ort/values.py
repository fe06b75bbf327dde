"""Tensors between what a master takes and gives, and ONNX Runtime's values and bindings.

A master takes NumPy arrays, and tensors of cards by DLPack; it gives NumPy arrays, and CuPy arrays on a card.
A run that wrote to a program's memory on a card ends when that is written. Like other work of CUDA, it comes
after what the card's default stream has queued.
"""

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native
from onnxruntime.capi.onnxruntime_inference_collection import OrtValue

from mcinfer.cards.cuda import Card
from mcinfer.cards.dlpack import DlpackTensor
from mcinfer.config import Device
from mcinfer.errors import PredictTimeoutError, is_refusal
from mcinfer.model_cache.protobuf import encode_field
from mcinfer.ort.errors import (
    InvalidArgument,
    InvalidBinding,
    InvalidValue,
    RunFailed,
    Unsupported,
    invalid_argument,
)
from mcinfer.ort.face import tiny_session
from mcinfer.specs import ELEMENT_TYPES, STRING, TensorSpec, numpy_dtype, tensor_bytes

__tracebackhide__ = is_refusal

_HOST = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)

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

_BY_NUMBER = {element.onnx: name for name, element in ELEMENT_TYPES.items()}

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
    if not value.is_tensor():
        raise Unsupported(f"OrtValue of {value.data_type()} for {spec.name!r}: expected a tensor")
    if value.data_type() != runtime_type(spec.element_type):
        raise _wrong_type(value.data_type(), spec, side)
    card = None
    if _is_on_card(value):
        card = Device("cuda", value.__dlpack_device__()[1])
    elif value.device_name().lower() != "cpu":
        raise Unsupported(
            f"OrtValue on {value.device_name()} for {spec.name!r}: expected one in the memory of the host "
            "or of an NVIDIA card"
        )
    elif spec.element_type == STRING:
        texts: NDArray[Any] = value.numpy()
        return texts
    return _tensor_at(value.data_ptr(), tuple(value.shape()), spec, card, owner or value)


def _is_on_card(value: Any) -> bool:
    return bool(value.is_tensor() and value.device_name().lower() == "cuda")


def _tensor_at(
    address: int, shape: tuple[int, ...], spec: TensorSpec, card: Device | None, owner: object
) -> Tensor:
    """A tensor over memory of the host or of a card; it keeps the memory's owner, if there is one."""
    if spec.element_type == STRING:
        raise Unsupported(
            f"{spec.element_type} elements of {spec.name!r} in bound memory: expected bytes"
        )
    if card is not None:
        return DlpackTensor(
            address=address,
            shape=shape,
            element_type=spec.element_type,
            device=card,
            owner=owner,
            ready=lambda _: Card.open(card).follow(_DEFAULT_STREAM),  # whichever the consumer's is
        )
    size = tensor_bytes(spec.element_type, prod(shape))
    if not size:
        return np.empty(shape, spec.dtype)
    memory = (ctypes.c_char * size).from_address(address)
    vars(memory)["owner"] = owner
    return np.ndarray(shape, spec.dtype, memoryview(memory).cast("B"))


def _given(array: Any, spec: TensorSpec) -> Tensor:
    """An output as the master gives it, without CuPy's class."""
    if isinstance(array, np.ndarray | DlpackTensor):
        return array
    card = Device("cuda", array.device.id)
    return _tensor_at(array.data.ptr, array.shape, spec, card, array)


def value_of(array: Any, spec: TensorSpec) -> Any:
    """A ``C.OrtValue`` with the elements of an output, whose memory it keeps."""
    tensor = _given(array, spec)
    if isinstance(tensor, np.ndarray):
        if spec.element_type == STRING:
            return _string_value(tensor)
        if not tensor.size:
            return native.OrtValue.ortvalue_from_shape_and_onnx_type(
                tensor.shape, ELEMENT_TYPES[spec.element_type].onnx, _HOST
            )
        tensor = np.asarray(tensor, order="C")
        tensor = DlpackTensor(
            address=tensor.ctypes.data,
            shape=tensor.shape,
            element_type=spec.element_type,
            device=None,
            owner=tensor,
        )
    return OrtValue.from_dlpack(tensor)._get_c_value()


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
    session = tiny_session(model + encode_field(8, encode_field(2, 17)))
    (value,) = session.run_with_ort_values({}, ["y"], None)
    return value


# Bindings. ONNX Runtime's own class checks what is bound and keeps it, but does not say what it has.


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMemory:
    """Memory that a program bound by its address; without one, a run allocates the output there."""

    card: Device | None
    onnx_type: int = 0
    shape: tuple[int, ...] = ()
    address: int | None = None


Bound = dict[str, Any]
"""What is bound, by name, in that order: an array, a value of the runtime's, or a `BoundMemory`."""


class Binding(native.SessionIOBinding):  # type: ignore[misc] # no types
    """``C.SessionIOBinding``, which notes what is bound for a session of mcinfer's; for others as ever.

    The runtime copies an input to where its session needs it, and sessions of mcinfer's have no CUDA in this
    process. So an input on a card is bound as if it were the host's: this checks its name and type, and
    nothing reads it.
    """

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.is_noted = hasattr(session, "master")
        self.bound_inputs: Bound = {}
        self.bound_outputs: Bound = {}

    def bind_input(self, name: str, *what: Any) -> None:
        noted = _what(name, *what) if self.is_noted else None
        if isinstance(noted, BoundMemory) and noted.card is not None:
            what = (_HOST, *what[1:])
        super().bind_input(name, *what)
        self.bound_inputs[name] = noted

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        if self.is_noted and _is_on_card(value):
            place = (value.element_type(), value.shape(), value.data_ptr())
            super().bind_input(name, _HOST, *place)
        else:
            super().bind_ortvalue_input(name, value)
        self.bound_inputs[name] = value

    def bind_output(self, name: str, *what: Any) -> None:
        noted = _what(name, *what) if self.is_noted else None
        super().bind_output(name, *what)
        self.bound_outputs[name] = noted

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        super().bind_ortvalue_output(name, value)
        self.bound_outputs[name] = value

    def clear_binding_inputs(self) -> None:
        super().clear_binding_inputs()
        self.bound_inputs.clear()

    def clear_binding_outputs(self) -> None:
        super().clear_binding_outputs()
        self.bound_outputs.clear()

    def copy_outputs_to_cpu(self) -> list[NDArray[Any]]:
        found = [*self.get_outputs()] if self.is_noted else []
        if not any(map(_is_on_card, found)):
            arrays: list[NDArray[Any]] = super().copy_outputs_to_cpu()
            return arrays
        return [_copied(value) if _is_on_card(value) else value.numpy() for value in found]

    def deliver(self, answer: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
        """Put outputs where a program has bound them; raises `InvalidBinding` if one does not fit."""
        copies: list[tuple[Tensor, Tensor]] = []
        for name, target in self.bound_outputs.items():
            spec = specs[name]
            found = _given(answer[name], spec)
            if _is_place_alone(target):
                card = None if isinstance(found, np.ndarray) else found.device
                if target.card is None and card is not None:
                    host = np.empty(found.shape, spec.dtype)
                    _copy([(host, found)])
                    found = host
                elif target.card != card:
                    raise Unsupported(
                        f"{name}: bound to {target.card} without an address, which is not possible for "
                        f"{spec.element_type}, nor if another output is bound so to another card"
                    )
                super().bind_ortvalue_output(name, value_of(found, spec))
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


def _what(name: str, first: Any, *rest: Any) -> Any:
    """What a method of a binding got after the name: an array or a place.

    Of an array that is not contiguous the runtime binds a copy.
    """
    if isinstance(first, np.ndarray):
        return np.asarray(first, order="C")
    if not isinstance(first, native.OrtDevice):
        return first
    card = card_of(first, name)
    if not rest:
        return BoundMemory(card=card)
    onnx_type, shape, address = rest
    if not isinstance(onnx_type, int):
        dtype = np.dtype(onnx_type)
        element_type = STRING if dtype.kind in _TEXT_KINDS else dtype.name
        onnx_type = ELEMENT_TYPES[element_type].onnx if element_type in ELEMENT_TYPES else 0
    return BoundMemory(
        card=card, onnx_type=int(onnx_type), shape=tuple(map(int, shape)), address=int(address)
    )


def bound_tensor(what: Any, spec: TensorSpec, side: _Side = "input") -> Tensor:
    """What is bound, in place; the program owns the memory of a `BoundMemory`."""
    if not isinstance(what, BoundMemory):
        return _as_tensor(what, spec, side)
    if what.onnx_type != ELEMENT_TYPES[spec.element_type].onnx:
        actual = _BY_NUMBER.get(what.onnx_type, f"type {what.onnx_type}")
        raise _wrong_type(runtime_type(actual), spec, side)
    return _tensor_at(what.address or 0, what.shape, spec, what.card, None)


def _is_place_alone(target: Any) -> bool:
    return isinstance(target, BoundMemory) and target.address is None


def outputs_on(cards: Iterable[Device | None], specs: Iterable[TensorSpec]) -> str:
    """Where a run is to leave its outputs, as `Master.predict` takes it: on the first card among these.

    Types that CuPy lacks come by way of the host.
    """
    card = next(filter(None, cards), None)
    in_cupy = all(spec.element_type != STRING and spec.dtype.isbuiltin == 1 for spec in specs)
    return str(card) if card is not None and in_cupy else "host"


def output_cards(outputs: Bound, specs: Mapping[str, TensorSpec]) -> list[Device | None]:
    """The cards that a program named for its outputs, those without an address first.

    Raises what does not fit among these outputs, before a run.
    """
    alone, others = [], []
    for name, target in outputs.items():
        if _is_place_alone(target):
            alone.append(target.card)
            continue
        if specs[name].element_type == STRING:
            raise Unsupported(
                f"{name}: strings bound to memory; bind the name and the device alone"
            )
        place = bound_tensor(target, specs[name], "output")
        _check_shape(place.shape, specs[name], "output")
        if isinstance(place, DlpackTensor):
            others.append(place.device)
    return [*alone, *others]


# Memory of cards.

_DEFAULT_STREAM = 1  # cudaStreamLegacy
_NVIDIA = 0x10DE  # the vendor's number on the PCI bus
_PATIENCE = 600.0  # seconds for the work on a card that copies wait for


def card_of(device: Any, name: str) -> Device | None:
    """The card that is a runtime's device; None for the host; `Unsupported` for others."""
    kind, vendor = device.device_type(), device.vendor_id()
    if kind == native.OrtDevice.cpu():
        return None
    if kind != native.OrtDevice.cuda() or vendor not in (0, _NVIDIA):
        raise Unsupported(
            f"{name}: got a device of type {kind} of vendor {vendor:#x}: expected the host's memory, or that "
            "of an NVIDIA card"
        )
    return Device("cuda", device.device_id())


def _copied(value: Any) -> NDArray[Any]:
    """A copy of the elements of a ``C.OrtValue`` on a card."""
    dtype = numpy_dtype(_BY_NUMBER[value.element_type()])
    spec = TensorSpec(name="", dtype=dtype, shape=())
    array = np.empty(value.shape(), dtype)
    _copy([(array, tensor_of(value, spec))])
    return array


def _copy(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first one of each pair, of which at least one is on a card, and wait for it."""
    used: list[Card] = []
    held = [(t, np.ascontiguousarray(s) if isinstance(s, np.ndarray) else s) for t, s in copies]
    for target, source in held:
        on_card: Any = target if isinstance(target, DlpackTensor) else source
        used.append(Card.open(on_card.device))
        used[-1].follow(_DEFAULT_STREAM)  # the program's kernels may still read what was there
        used[-1].copy(_address(target), _address(source), on_card.size)
    for card in dict.fromkeys(used):
        try:
            card.synchronize(_PATIENCE)
        except TimeoutError as exc:
            raise PredictTimeoutError(str(exc)) from exc


def _address(tensor: Tensor) -> int:
    return tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.address
