"""CuPy without a card: the calls that tests of tensors on cards make, over the emulated driver.

Memory of an emulated card is the host's, so an array is a NumPy array inside. As with CuPy, what writes to
an array is queued on the current stream, `get` waits for that stream, and DLPack orders one stream before
another.
"""

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver

_CUDA, _HOST = 2, 1
_LEGACY = 1
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_DEVICE_AT = {b"dltensor": 8, b"dltensor_versioned": 40}  # in DLManagedTensor, and its later form

_calls: list[Any] = []  # host functions, which may be queued still
_pools: dict[tuple[int, int], list[int]] = defaultdict(list)  # addresses, by card and size
_local = threading.local()


def _ok(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None


class Device:
    """A card, and the current one in a ``with`` statement."""

    def __init__(self, number: int = 0) -> None:
        self.id = number
        _ok(driver.cuInit(0))
        self._context = _ok(driver.cuDevicePrimaryCtxRetain(number))

    def __enter__(self) -> "Device":
        _ok(driver.cuCtxPushCurrent(self._context))
        _devices().append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        _devices().pop()
        _ok(driver.cuCtxPopCurrent())


class Stream:
    """A queue of work of the current card."""

    null: "Stream"

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.device = _devices()[-1]
        self.ptr = 0
        if not null:
            with Device(self.device):
                self.ptr = int(_ok(driver.cuStreamCreate(int(non_blocking))))

    def __enter__(self) -> "Stream":
        _streams().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams().pop()

    def launch_host_func(self, callback: Callable[[Any], object], arg: Any) -> None:
        held = [(callback, arg)]  # no longer than until it is called

        def make(_: int) -> None:
            called, what = held.pop()
            called(what)

        call = _HOST_FUNCTION(make)
        _calls.append(call)
        address = ctypes.cast(call, ctypes.c_void_p).value
        with Device(self.device):
            _ok(driver.cuLaunchHostFunc(self.ptr, driver.CUhostFn(address), 0))

    def synchronize(self) -> None:
        with Device(self.device):
            _ok(driver.cuStreamSynchronize(self.ptr))

    def queue_before(self, other: int) -> None:
        """Have another stream wait for what this one has queued."""
        with Device(self.device):
            event = _ok(driver.cuEventCreate(2))
            _ok(driver.cuEventRecord(event, self.ptr))
            _ok(driver.cuStreamWaitEvent(other, event, 0))
            _ok(driver.cuEventDestroy(event))


class ndarray:
    """An array on a card: `view` is the same memory for NumPy, `device` the card's number."""

    def __init__(self, view: Any, device: int) -> None:
        self.view = view
        self.device = Device(device)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)

    @property
    def dtype(self) -> Any:
        return self.view.dtype

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.view.__array_interface__["data"][0])

    def __array__(self, *_: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getitem__(self, key: Any) -> "ndarray":
        return ndarray(self.view[key], self.device.id)

    def __setitem__(self, key: Any, value: "ndarray") -> None:
        part, source = self.view[key], value.view
        get_current_stream(self.device.id).launch_host_func(lambda _: np.copyto(part, source), None)

    def get(self) -> Any:
        get_current_stream(self.device.id).synchronize()
        return self.view.copy()

    def set(self, array: Any) -> None:
        self._write(np.array(array, self.dtype).tobytes())

    def _write(self, source: Any) -> None:
        """Queue a write of bytes, or of what lies at an address; like CuPy, keep neither alive."""
        assert self.view.flags.c_contiguous
        target, size = self.data.ptr, self.view.nbytes
        get_current_stream(self.device.id).launch_host_func(
            lambda source: ctypes.memmove(target, source, size), source
        )

    def fill(self, value: Any) -> None:
        self.set(np.full(self.shape, value, self.dtype))

    def copy(self) -> "ndarray":
        made = empty(self.shape, self.dtype, self.device.id)
        made._write(self.data.ptr)
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device.id

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if stream != -1:
            get_current_stream(self.device.id).queue_before(_LEGACY if stream is None else stream)
        return _moved(self.view.__dlpack__(**options), _CUDA, self.device.id)


def from_dlpack(tensor: Any) -> ndarray:
    kind, number = tensor.__dlpack_device__()
    if kind != _CUDA:
        raise TypeError(f"CuPy takes tensors on CUDA devices, got device type {kind}")
    stream = get_current_stream(number).ptr or _LEGACY
    capsule = _moved(tensor.__dlpack__(stream=stream, max_version=(1, 1)), _HOST, 0)
    held = SimpleNamespace(__dlpack_device__=lambda: (_HOST, 0), __dlpack__=lambda **_: capsule)
    view: Any = np.from_dlpack(held)
    return ndarray(view, number)


def empty(shape: Sequence[int], dtype: Any = np.float64, device: int | None = None) -> ndarray:
    """Memory of the card that no other process knows."""
    number = _devices()[-1] if device is None else device
    size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
    free = _pools[number, size]
    with Device(number):
        address = free.pop() if free else int(_ok(driver.cuMemAlloc(size)))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, free.append, address)  # as CuPy's pool keeps memory
    count = int(np.prod(shape))
    return ndarray(np.frombuffer(memory, dtype, count).reshape(shape), number)


class MemoryPool:
    """Memory that arrays have given back."""

    def free_all_blocks(self) -> None:
        for (number, _), free in _pools.items():
            while free:
                with Device(number):
                    _ok(driver.cuMemFree(free.pop()))


def get_default_memory_pool() -> MemoryPool:
    return MemoryPool()


def asarray(array: Any) -> ndarray:
    made = empty(array.shape, array.dtype)
    made.set(array)
    return made


def get_current_stream(device: int | None = None) -> Stream:
    found = _streams()[-1] if _streams() else None
    number = _devices()[-1] if device is None else device
    if found is None or found.device != number:
        with Device(number):
            return Stream(null=True)
    return found


def _devices() -> list[int]:
    if not hasattr(_local, "devices"):
        _local.devices = [0]
    found: list[int] = _local.devices
    return found


def _streams() -> list[Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = []
    found: list[Stream] = _local.streams
    return found


def _moved(capsule: Any, kind: int, number: int) -> Any:
    """A capsule whose tensor says that it lies on another device."""
    name = _name(capsule)
    where = (ctypes.c_int32 * 2).from_address(_pointer(capsule, name) + _DEVICE_AT[name])
    where[:] = [kind, number]
    return capsule


cuda = SimpleNamespace(Device=Device, Stream=Stream, get_current_stream=get_current_stream)
