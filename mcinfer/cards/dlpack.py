"""DLPack (https://dmlc.github.io/dlpack/latest/c_api.html): tensors of one library in the hands of another.

::

    read(value) ── value.__dlpack__() ──► capsule ──► DlpackTensor, which keeps the producer's memory
    DlpackTensor.__dlpack__() ──► capsule ──► the consumer calls the deleter ──► our owner is let go

Ownership: memory belongs to its producer. A capsule that no consumer took is deleted with the memory's hold,
by its destructor; a consumer renames the capsule that it takes, and calls the deleter once, from any thread.
Our capsules are those of a NumPy array over the memory, which keeps the owner, with our device and type
written in: destructor and deleter must be functions in C, since consumers in C drop a capsule while an
exception is set, in which state no Python code can run.
"""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mcinfer.config import Device
from mcinfer.errors import InvalidInputError
from mcinfer.specs import ELEMENT_TYPES

_HOST, _CUDA, _PINNED, _MANAGED = 1, 2, 3, 13
"""`DLDeviceType`: pinned is the host's memory that cards reach too, managed lies on both."""

_MAJOR, _MINOR = 1, 1
"""The version of DLPack that is spoken; where the other side is older, the one before 1.0."""

_READ_ONLY = 1 << 0
"""`DLPACK_FLAG_BITMASK_READ_ONLY`."""

_CODES = {
    **{f"int{bits}": (0, bits) for bits in (4, 8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (4, 8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
}
"""`DLDataTypeCode` and bits of our element types: all but strings."""

_LIKE = {4: "|u1", 8: "|u1", 16: "<u2", 32: "<u4", 64: "<u8", 128: "<c16"}
"""By bits, a type of NumPy's that stands in for ours. Elements of four bits count as bytes there: that array
is larger than the memory, and nothing reads it."""

_ELEMENT_TYPES = {code: name for name, code in _CODES.items()}


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_KINDS: dict[bool, tuple[type[_Managed] | type[_ManagedVersioned], bytes, bytes]] = {
    True: (_ManagedVersioned, b"dltensor_versioned", b"used_dltensor_versioned"),
    False: (_Managed, b"dltensor", b"used_dltensor"),
}
"""By whether it is of 1.0 or later: a capsule's content, and its name before and after a consumer took it."""

# Functions of Python's own, with types of their own: those of `ctypes.pythonapi` belong to everyone.
_python = ctypes.PyDLL(None)
_is_valid = _python.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_int
_pointer = _python.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
_rename = _python.PyCapsule_SetName
_rename.argtypes, _rename.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_int


@dataclass(slots=True)
class _HostView:
    """What NumPy makes an array of, which keeps this, and so the owner."""

    __array_interface__: dict[str, Any]
    owner: object


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class DlpackTensor:
    """A C-contiguous tensor in memory of a card or of the host, for any consumer of DLPack.

    Attributes:
        address: Of its first byte, on the device.
        element_type: A key of `mcinfer.specs.ELEMENT_TYPES`, not strings; four-bit elements are packed.
        device: The card; None for the host's memory.
        owner: Keeps the memory; every consumer holds it as long as it uses the tensor.
        read_only: Whether the memory must not be written to.
        ready: Called with the consumer's stream (as in `__dlpack__`) before the memory is lent, to order the
            work that still writes to it before the consumer's; None if nothing writes to it.
    """

    address: int
    shape: tuple[int, ...]
    element_type: str
    device: Device | None
    owner: object
    read_only: bool = False
    ready: Callable[[int | None], object] | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return (prod(self.shape) * ELEMENT_TYPES[self.element_type].bits + 7) // 8

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_HOST, 0) if self.device is None else (_CUDA, self.device.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule; see the array API standard.

        Raises:
            BufferError: A copy, or another device, is asked for; or the memory is read-only, and the consumer
                speaks a version of DLPack that cannot say so.
        """
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(
                f"got copy={copy}, dl_device={dl_device}: this memory is only lent, where it lies, on "
                f"{self.device or 'the host'}"
            )
        versioned = max_version is not None and max_version[0] >= _MAJOR
        if self.read_only and not versioned:
            raise BufferError("this memory is read-only, which DLPack can say from version 1.0 on")
        if self.ready is not None:
            self.ready(stream)
        code, bits = _CODES[self.element_type]
        memory = {
            "version": 3,
            "typestr": _LIKE[bits],
            "shape": self.shape,
            "data": (self.address, self.read_only),
        }
        array = np.asarray(_HostView(memory, self.owner))
        capsule = array.__dlpack__(max_version=(_MAJOR, _MINOR) if versioned else None)
        kind, name, _ = _KINDS[versioned]
        tensor = kind.from_address(_pointer(id(capsule), name)).tensor
        tensor.data = self.address or None
        tensor.device = _Device(*self.__dlpack_device__())
        tensor.dtype = _DataType(code, bits, 1)
        return capsule


class _Held:
    """Memory of a producer: its deleter is called when the last reference to this is gone."""

    __slots__ = ("__weakref__",)


def read(value: Any, stream: int | None = None) -> DlpackTensor:
    """Take a tensor of another library, in place.

    Args:
        value: Any object with ``__dlpack__`` and ``__dlpack_device__`` (array API standard).
        stream: The CUDA stream that will use it: the producer orders its own work before what that stream
            gets from now on. None for the legacy default stream. Not used for tensors of the host.

    Returns:
        The tensor; its owner keeps the producer's memory.

    Raises:
        InvalidInputError: It is no such object, lies on a device of another kind, has an element type that
            ONNX lacks, or is not C-contiguous. The producer's own exceptions pass through.
    """
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        raise InvalidInputError(
            f"got {type(value).__name__}, expected an object with __dlpack__ and __dlpack_device__"
        )
    kind, index = map(int, value.__dlpack_device__())
    if kind not in (_HOST, _CUDA, _PINNED, _MANAGED):
        raise InvalidInputError(
            f"got a tensor on DLPack's device {kind}, expected the host ({_HOST}) or CUDA ({_CUDA})"
        )
    on_card = kind in (_CUDA, _MANAGED)
    # By the protocol handle 0 is ambiguous: 1 is the legacy default stream.
    options = {"stream": stream or 1} if on_card else {}
    try:
        capsule = value.__dlpack__(max_version=(_MAJOR, _MINOR), **options)
    except TypeError:  # a producer from before 1.0 does not know the argument
        capsule = value.__dlpack__(**options)
    tensor, flags, owner = _take(capsule)
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = tensor.dtype
    element_type = _ELEMENT_TYPES.get((dtype.code, dtype.bits))
    if element_type is None or dtype.lanes != 1:
        raise InvalidInputError(
            f"got elements of DLPack's type {dtype.code} with {dtype.bits} bits and {dtype.lanes} lanes, "
            f"expected one of {[*_CODES]}"
        )
    expected = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))  # elements, in C order
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else expected
    moved = (s != e for size, s, e in zip(shape, strides, expected, strict=True) if size != 1)
    if prod(shape) and any(moved):
        raise InvalidInputError(
            f"got a tensor of shape {[*shape]} with strides {[*strides]}, expected C-contiguous memory "
            f"(strides {[*expected]}): copy it first, as ascontiguousarray does"
        )
    return DlpackTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        element_type=element_type,
        device=Device("cuda", index) if on_card else None,
        owner=owner,
        read_only=bool(flags & _READ_ONLY),
    )


def _take(capsule: object) -> tuple[_Tensor, int, _Held]:
    """What a capsule holds, its flags, and what keeps it: from now on this process owes the deleter."""
    for kind, name, used in _KINDS.values():
        if not _is_valid(id(capsule), name):
            continue
        address = _pointer(id(capsule), name)
        managed = kind.from_address(address)
        _rename(id(capsule), used)
        held = _Held()
        if managed.deleter:
            # Not at exit: until the very end others may use the memory.
            weakref.finalize(held, _Deleter(managed.deleter), address).atexit = False
        flags = 0
        if isinstance(managed, _ManagedVersioned):
            if managed.major != _MAJOR:
                raise InvalidInputError(
                    f"got a capsule of DLPack {managed.major}.{managed.minor}, expected {_MAJOR}"
                )
            flags = managed.flags
        return managed.tensor, flags, held
    raise InvalidInputError(
        f"got {capsule!r} from __dlpack__, expected a capsule that is not used yet"
    )
