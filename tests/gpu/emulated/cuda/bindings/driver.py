"""The CUDA driver without a card: the calls of ``cuda.bindings.driver`` that mcinfer makes, on host memory.

A card's memory is a memfd, so other processes can map it and the host can read it. What the real driver
leaves undefined is an error here; memory that is no longer mapped stays reserved, so that no other memory
comes to lie at its address.

- A stream is a queue of work with a thread of its own. Work that touches memory that is not mapped makes the
  context fail for good, as an illegal address does.
- A copy from or to host memory that is not pinned returns once it is done, as NVIDIA's "API synchronization
  behavior" allows; all others are asynchronous.
- An event is a shared page with the marks that were recorded and the last ones that are complete.
- How much memory is in use is what any process has open or mapped: the name of each memfd says its card.

Environment variables, read by each process at its start:

- ``MCINFER_EMULATED_CARDS``: how many cards there are (0).
- ``MCINFER_EMULATED_BYTES``: the memory of each (1 GiB).
- ``MCINFER_EMULATED_LEDGER``: processes with the same text share the cards' memory (empty).
- ``MCINFER_EMULATED_WITHOUT``: what there is not: any of ``driver``, ``descriptors``, ``events``,
  ``peers``, ``pinning``.
"""

import contextlib
import ctypes
import enum
import fcntl
import functools
import itertools
import mmap
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

CU_IPC_HANDLE_SIZE = 64
CU_MEMHOSTREGISTER_PORTABLE = 1

_CARDS = int(os.environ.get("MCINFER_EMULATED_CARDS", "0"))
_BYTES = int(os.environ.get("MCINFER_EMULATED_BYTES", str(1 << 30)))
_LEDGER = os.environ.get("MCINFER_EMULATED_LEDGER", "")
_WITHOUT = os.environ.get("MCINFER_EMULATED_WITHOUT", "").split(",")

_GRANULARITY = 2 << 20
_WAIT = 0.001


def _enum(name: str, prefix: str, **members: int) -> Any:
    return enum.IntEnum(name, {prefix + member: number for member, number in members.items()})


CUresult = _enum(
    "CUresult", "CUDA_",
    SUCCESS=0, ERROR_INVALID_VALUE=1, ERROR_OUT_OF_MEMORY=2, ERROR_NOT_INITIALIZED=3,
    ERROR_NO_DEVICE=100, ERROR_INVALID_DEVICE=101, ERROR_INVALID_CONTEXT=201, ERROR_MAP_FAILED=205,
    ERROR_PEER_ACCESS_UNSUPPORTED=217, ERROR_INVALID_HANDLE=400, ERROR_ILLEGAL_STATE=401,
    ERROR_NOT_READY=600, ERROR_ILLEGAL_ADDRESS=700, ERROR_HOST_MEMORY_ALREADY_REGISTERED=712,
    ERROR_HOST_MEMORY_NOT_REGISTERED=713, ERROR_LAUNCH_FAILED=719, ERROR_NOT_PERMITTED=800,
    ERROR_NOT_SUPPORTED=801,
)  # fmt: skip
CUdevice_attribute = _enum(
    "CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_",
    COMPUTE_MODE=20, COMPUTE_CAPABILITY_MAJOR=75, COMPUTE_CAPABILITY_MINOR=76,
    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103, IPC_EVENT_SUPPORTED=125,
)  # fmt: skip
CUmemAllocationHandleType = _enum(
    "CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_", NONE=0, POSIX_FILE_DESCRIPTOR=1
)
CUmemAllocationType = _enum("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_", INVALID=0, PINNED=1)
CUmemLocationType = _enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_", INVALID=0, DEVICE=1)
CUmemAccess_flags = _enum(
    "CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_", PROT_NONE=0, PROT_READ=1, PROT_READWRITE=3
)
CUmemAllocationGranularity_flags = _enum(
    "CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_", MINIMUM=0, RECOMMENDED=1
)
CUipcMem_flags = _enum("CUipcMem_flags", "CU_IPC_MEM_", LAZY_ENABLE_PEER_ACCESS=1)
CUevent_flags = _enum(
    "CUevent_flags", "CU_EVENT_", DEFAULT=0, BLOCKING_SYNC=1, DISABLE_TIMING=2, INTERPROCESS=4
)
CUstream_flags = _enum("CUstream_flags", "CU_STREAM_", DEFAULT=0, NON_BLOCKING=1)
CUpointer_attribute = _enum("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_", HOST_POINTER=4)


class CUmemLocation:
    def __init__(self) -> None:
        self.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
        self.id = 0


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        self.requestedHandleTypes = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        self.location = CUmemLocation()


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location = CUmemLocation()
        self.flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


class _Opaque:
    """Bytes that a caller may only copy, at `getPtr`."""

    size = CU_IPC_HANDLE_SIZE

    def __init__(self) -> None:
        self._data = ctypes.create_string_buffer(self.size)

    def getPtr(self) -> int:
        return ctypes.addressof(self._data)

    def text(self) -> list[str]:
        return self._data.value.decode(errors="replace").split(" ")

    @classmethod
    def of(cls, *words: object) -> Any:
        made = cls()
        made._data.value = " ".join(map(str, words)).encode()
        return made


CUipcMemHandle: Any = type("CUipcMemHandle", (_Opaque,), {})
CUipcEventHandle: Any = type("CUipcEventHandle", (_Opaque,), {})


class CUuuid:
    def __init__(self, data: bytes) -> None:
        self.bytes = data


class _Number:
    """A pointer or handle of the driver: converts to int, and has no arithmetic."""

    def __init__(self, value: Any = 0) -> None:
        self._value = int(value)

    def __int__(self) -> int:
        return self._value


CUdeviceptr, CUstream, CUevent, CUcontext, CUdevice, CUmemGenericAllocationHandle = (
    type(f"CU{name}", (_Number,), {})
    for name in ("deviceptr", "stream", "event", "context", "device", "memGenericAllocationHandle")
)


class CUhostFn(_Number):
    def __init__(self, value: Any = 0, _ptr: int = 0) -> None:
        super().__init__(value or _ptr)


class _Refusal(Exception):  # noqa: N818 not an error of the tests
    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


def _refuse(name: str) -> NoReturn:
    raise _Refusal(CUresult[f"CUDA_ERROR_{name}"])


def _refuse_if(wrong: object, name: str) -> None:
    if wrong:
        _refuse(name)


# Memory.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FIXED, _NO_RESERVE, _NO_ACCESS, _NOT_FOR_CHILDREN = 0x10, 0x4000, 0, 10
_FAILED = ctypes.c_void_p(-1).value


def _map(address: int, size: int, flags: int, fd: int, access: int) -> int:
    found = _libc.mmap(address or None, size, access, flags, fd, 0)
    if found is None or found == _FAILED:
        _refuse("OUT_OF_MEMORY")
    return int(found)


def _reserve(address: int, size: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | (_FIXED if address else 0)
    return _map(address, size, flags, -1, _NO_ACCESS)


@dataclass(eq=False)
class _Range:
    """Addresses that belong, or belonged, to a card."""

    size: int
    card: int = -1
    fd: int = -1
    maker: str = ""  # alloc, import, map
    state: str = "reserved"  # mapped, accessible, freed

    def __post_init__(self) -> None:
        self.address = _reserve(0, self.size)
        if self.fd >= 0:
            self.set_memory(self.fd, access=True)
        with _lock:
            _ranges.append(self)

    def set_memory(self, fd: int, access: bool) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if access else _NO_ACCESS
        _map(self.address, self.size, mmap.MAP_SHARED | _FIXED, fd, protection)
        _libc.madvise(self.address, self.size, _NOT_FOR_CHILDREN)
        self.state = "accessible" if access else "mapped"

    def allow(self) -> None:
        _libc.mprotect(self.address, self.size, mmap.PROT_READ | mmap.PROT_WRITE)
        self.state = "accessible"

    def drop(self, state: str) -> None:
        """Take the memory away; the addresses stay reserved."""
        _reserve(self.address, self.size)
        self.state = state
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Memory(NamedTuple):
    """What a generic allocation handle refers to."""

    fd: int
    card: int
    size: int
    shared: bool


def _card_and_size(fd: int) -> tuple[int, int]:
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        _refuse("INVALID_VALUE")
    parts = name.removeprefix("/memfd:").split("-")
    _refuse_if(not name.startswith("/memfd:card-") or parts[1] != _LEDGER, "INVALID_VALUE")
    return int(parts[2]), int(parts[3])


def _used(card: int) -> int:
    """Bytes of the card's memory that any Python process has open or mapped."""
    prefix = f"/memfd:card-{_LEDGER}-{card}-".encode()
    mapped = re.compile(re.escape(prefix) + b"[^\n]*")
    names: set[bytes] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if "python" not in os.readlink(f"/proc/{pid}/exe"):
                continue
            for entry in os.scandir(f"/proc/{pid}/fd".encode()):
                with contextlib.suppress(OSError):
                    names.add(os.readlink(entry.path))
            with open(f"/proc/{pid}/maps", "rb") as lines:
                names.update(mapped.findall(lines.read()))
    return sum(int(name.split(b"-")[3]) for name in names if name.startswith(prefix))


def _new_memory(card: int, size: int) -> int:
    _refuse_if(_used(card) + size > _BYTES, "OUT_OF_MEMORY")
    name = f"card-{_LEDGER}-{card}-{size}-{os.getpid()}-{next(_numbers)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


_numbers = itertools.count(1)
_lock = threading.RLock()
_ranges: list[_Range] = []
_memories: dict[int, _Memory] = {}
_pinned: dict[int, int] = {}


def _forked() -> None:
    """A card's memory is not that of a forked child, which the driver does not serve."""
    for one in _ranges:
        if one.fd >= 0:
            os.close(one.fd)
            one.fd = -1


os.register_at_fork(after_in_child=_forked)


def _range_of(address: int, size: int) -> _Range | None:
    """The card's addresses that hold these, wholly or in part."""
    with _lock:
        for one in _ranges:
            if address < one.address + one.size and one.address < address + size:
                return one
    return None


def _found(address: Any, *states: str, maker: str = "", size: int = 0) -> _Range:
    for one in _ranges:
        if one.address == int(address) and one.state in states:
            _refuse_if(
                (maker and one.maker != maker) or (size and one.size != size), "INVALID_VALUE"
            )
            return one
    _refuse("INVALID_VALUE")


# Contexts, streams and events.


class _Context:
    def __init__(self, card: int) -> None:
        self.number = (0xC0 << 32) | (card + 1)
        self.card = card
        self.failure: Any = None
        self.streams: dict[int, _Stream] = {}

    def stream(self, number: int) -> "_Stream":
        number = number or 1  # CU_STREAM_LEGACY
        if number in (0, 1, 2) and number not in self.streams:
            self.streams[number] = _Stream(self)
        _refuse_if(number not in self.streams, "INVALID_HANDLE")
        return self.streams[number]


class _Stream:
    def __init__(self, context: _Context) -> None:
        self.context = context
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._asked = 0
        self._done = 0
        self._progress = threading.Condition()
        threading.Thread(target=self._run, name="emulated stream", daemon=True).start()

    def put(self, work: Callable[[], None]) -> int:
        with self._progress:
            self._asked += 1
            self._work.put(work)
            return self._asked

    def idle(self) -> bool:
        with self._progress:
            return self._done == self._asked

    def wait(self, number: int | None = None) -> None:
        with self._progress:
            wanted = self._asked if number is None else number
            self._progress.wait_for(lambda: self._done >= wanted)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if self.context.failure is None:
                try:
                    work()
                except _Refusal as exc:
                    self.context.failure = exc.status
                except (
                    Exception
                ):  # none of the driver's: whoever waits for the stream is to learn of it
                    traceback.print_exc()
                    self.context.failure = CUresult.CUDA_ERROR_LAUNCH_FAILED
            del work  # which holds an event, and its page a descriptor
            with self._progress:
                self._done += 1
                self._progress.notify_all()


_MARKS = 64


class _Event:
    """A page: the number of marks, whether it is destroyed, and by mark modulo 64 which is complete."""

    def __init__(self, context: _Context, flags: int, fd: int, imported: bool) -> None:
        self.context = context
        self.flags = flags
        self.fd = fd
        self.imported = imported
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    def destroy(self) -> None:
        if not self.imported:
            self._put(1, 1)
        os.close(self.fd)
        self.fd = -1

    @property
    def destroyed(self) -> bool:
        return self.fd < 0 or bool(self._get(1))

    def record(self) -> Callable[[], None]:
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        mark = self._get(0) + 1
        self._put(0, mark)
        self._put(2, os.getpid())
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return lambda: self._put(3 + mark % _MARKS, mark)

    def mark(self) -> int:
        return self._get(0)

    def complete(self, mark: int) -> bool:
        """Whether the mark is complete; one whose process is gone is, as its work is."""
        return mark == 0 or self._get(3 + mark % _MARKS) >= mark or not _alive(self._get(2))

    def wait_for(self, mark: int) -> None:
        while not self.complete(mark):
            time.sleep(_WAIT)

    def _get(self, place: int) -> int:
        return int.from_bytes(self._page[8 * place : 8 * place + 8], "little")

    def _put(self, place: int, value: int) -> None:
        self._page[8 * place : 8 * place + 8] = value.to_bytes(8, "little")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in b"ZX"
    except OSError:
        return False


_state = threading.local()
_pid = -1
_contexts: dict[int, _Context] = {}
_events: dict[int, _Event] = {}


def _call(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The function as a call of the driver: a tuple of a status and what it returned."""

    @functools.wraps(function)
    def call(*arguments: Any) -> tuple[Any, ...]:
        try:
            _refuse_if(function.__name__ != "cuInit" and os.getpid() != _pid, "NOT_INITIALIZED")
            value = function(*arguments)
        except _Refusal as exc:
            return (exc.status, *([None] * _values_of(function)))
        if value is None:
            return (CUresult.CUDA_SUCCESS,)
        values = value if isinstance(value, tuple) else (value,)
        return (CUresult.CUDA_SUCCESS, *values)

    return call


def _values_of(function: Callable[..., Any]) -> int:
    """How many values a call returns besides its status, which a failed one returns as None."""
    returned = function.__annotations__["return"]
    return 0 if returned is None else len(getattr(returned, "__args__", "1"))


def _stack() -> list[_Context]:
    stack: list[_Context] = vars(_state).setdefault("contexts", [])
    return stack


def _context() -> _Context:
    """The current context, if it is whole."""
    _refuse_if(not _stack(), "INVALID_CONTEXT")
    context = _stack()[-1]
    if context.failure is not None:
        raise _Refusal(context.failure)
    return context


def _stream(handle: Any) -> _Stream:
    return _context().stream(int(handle))


def _event(handle: Any) -> _Event:
    event = _events.get(int(handle))
    if event is None or event.destroyed:
        _refuse("INVALID_HANDLE")
    return event


def _card(device: Any) -> int:
    _refuse_if(not 0 <= int(device) < _CARDS, "INVALID_DEVICE")
    return int(device)


def cuInit(flags: int) -> None:
    global _pid
    if "driver" in _WITHOUT:
        raise RuntimeError("the driver is not found")  # DynamicLibNotFoundError of cuda.pathfinder
    _refuse_if(flags, "INVALID_VALUE")
    _refuse_if(not _CARDS, "NO_DEVICE")
    _refuse_if(_pid not in (-1, os.getpid()), "NOT_INITIALIZED")  # forked
    _pid = os.getpid()


def cuDeviceGetCount() -> int:
    return _CARDS


def cuDeviceGet(ordinal: int) -> Any:
    return CUdevice(_card(ordinal))


def cuDeviceGetName(length: int, device: Any) -> bytes:
    return (f"Emulated card {_card(device)}".encode() + b"\0").ljust(length)


def cuDeviceGetUuid(device: Any) -> CUuuid:
    return CUuuid(f"emulated-{_card(device):07}".encode())


def cuDeviceGetAttribute(attribute: int, device: Any) -> int:
    _card(device)
    values = (0, 9, 0, "descriptors" not in _WITHOUT, "events" not in _WITHOUT)
    return int(dict(zip(CUdevice_attribute, values, strict=True))[attribute])


def cuDeviceCanAccessPeer(device: Any, peer: Any) -> int:
    return int(_card(device) != _card(peer) and "peers" not in _WITHOUT)


def cuDevicePrimaryCtxRetain(device: Any) -> Any:
    with _lock:
        card = _card(device)
        if card not in _contexts:
            _contexts[card] = _Context(card)
        return CUcontext(_contexts[card].number)


def cuCtxPushCurrent(context: Any) -> None:
    made = [one for one in _contexts.values() if one.number == int(context)]
    _refuse_if(not made, "INVALID_CONTEXT")
    _stack().append(made[0])


def cuCtxPopCurrent() -> Any:
    _refuse_if(not _stack(), "INVALID_CONTEXT")
    return CUcontext(_stack().pop().number)


def cuCtxGetCurrent() -> Any:
    return CUcontext(_stack()[-1].number if _stack() else 0)


def cuCtxSynchronize() -> None:
    for stream in [*_context().streams.values()]:
        stream.wait()
    _context()


# Streams and events.


def cuStreamCreate(flags: int) -> Any:
    context = _context()
    number = (0x5E << 32) | next(_numbers)
    context.streams[number] = _Stream(context)
    return CUstream(number)


def cuStreamGetCtx(stream: Any) -> Any:
    if int(stream) in (0, 1, 2):
        return CUcontext(_context().number)
    for context in _contexts.values():
        if int(stream) in context.streams:
            return CUcontext(context.number)
    _refuse("INVALID_HANDLE")


def cuStreamSynchronize(stream: Any) -> None:
    _stream(stream).wait()
    _context()


def cuStreamQuery(stream: Any) -> None:
    _refuse_if(not _stream(stream).idle(), "NOT_READY")
    _context()


def cuStreamWaitEvent(stream: Any, event: Any, flags: int) -> None:
    waiting, awaited = _stream(stream), _event(event)
    mark = awaited.mark()
    waiting.put(lambda: awaited.wait_for(mark))


def cuLaunchHostFunc(stream: Any, function: Any, data: Any) -> None:
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(function))
    _stream(stream).put(lambda: called(int(data or 0)))


def cuEventCreate(flags: int) -> Any:
    if flags & CUevent_flags.CU_EVENT_INTERPROCESS:
        _refuse_if(not flags & CUevent_flags.CU_EVENT_DISABLE_TIMING, "INVALID_VALUE")
        _refuse_if("events" in _WITHOUT, "NOT_SUPPORTED")
    fd = os.memfd_create("event", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    return _new_event(_Event(_context(), flags, fd, imported=False))


def _new_event(event: _Event) -> Any:
    number = (0xE0 << 32) | next(_numbers)
    _events[number] = event
    return CUevent(number)


def cuEventRecord(event: Any, stream: Any) -> None:
    recorded, on = _event(event), _stream(stream)
    _refuse_if(recorded.context is not on.context, "INVALID_HANDLE")
    on.put(recorded.record())


def cuEventQuery(event: Any) -> None:
    queried = _event(event)
    _refuse_if(not queried.complete(queried.mark()), "NOT_READY")


def cuEventDestroy(event: Any) -> None:
    _event(event).destroy()
    del _events[int(event)]


def cuIpcGetEventHandle(event: Any) -> Any:
    named = _event(event)
    _refuse_if(
        named.imported or not named.flags & CUevent_flags.CU_EVENT_INTERPROCESS, "INVALID_HANDLE"
    )
    return CUipcEventHandle.of("event", os.getpid(), named.fd)


def cuIpcOpenEventHandle(handle: Any) -> Any:
    fd = _opened(handle, "event")
    flags = CUevent_flags.CU_EVENT_DISABLE_TIMING
    return _new_event(_Event(_context(), flags, fd, imported=True))


def _opened(handle: _Opaque, kind: str) -> int:
    """A descriptor of another process's event or memory."""
    words = handle.text()
    _refuse_if(
        len(words) != 3 or words[0] != kind or not (words[1] + words[2]).isdecimal(),
        "INVALID_VALUE",
    )
    _refuse_if(int(words[1]) == os.getpid(), "INVALID_CONTEXT")
    try:
        return os.open(f"/proc/{words[1]}/fd/{words[2]}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        _refuse("MAP_FAILED")


# Memory.


def cuMemGetInfo() -> tuple[int, int]:
    return max(_BYTES - _used(_context().card), 0), _BYTES


def cuMemGetAllocationGranularity(wanted: CUmemAllocationProp, option: int) -> int:
    return _GRANULARITY


def cuMemCreate(size: int, wanted: CUmemAllocationProp, flags: int) -> Any:
    located = wanted.location
    if (
        wanted.type is not CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        or located.type is not CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        or size <= 0
        or size % _GRANULARITY
    ):
        _refuse("INVALID_VALUE")
    none = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    shared = wanted.requestedHandleTypes is not none
    _refuse_if(shared and "descriptors" in _WITHOUT, "NOT_SUPPORTED")
    card = _card(located.id)
    return _new_handle(_Memory(_new_memory(card, size), card, size, shared))


def _new_handle(memory: _Memory) -> Any:
    number = next(_numbers)
    _memories[number] = memory
    return CUmemGenericAllocationHandle(number)


def _memory(handle: Any) -> _Memory:
    _refuse_if(int(handle) not in _memories, "INVALID_VALUE")
    return _memories[int(handle)]


def cuMemRelease(handle: Any) -> None:
    os.close(_memory(handle).fd)
    del _memories[int(handle)]


def cuMemExportToShareableHandle(handle: Any, kind: int, flags: int) -> int:
    memory = _memory(handle)
    _refuse_if(not memory.shared or kind != 1, "NOT_PERMITTED")
    exported = os.dup(memory.fd)
    os.set_inheritable(exported, True)  # the real driver does not say
    return exported


def cuMemImportFromShareableHandle(descriptor: Any, kind: int) -> Any:
    card, size = _card_and_size(int(descriptor))
    return _new_handle(_Memory(os.dup(int(descriptor)), card, size, True))


def cuMemAddressReserve(size: int, alignment: int, address: Any, flags: int) -> Any:
    _refuse_if(size <= 0 or size % mmap.PAGESIZE, "INVALID_VALUE")
    return CUdeviceptr(_Range(size).address)


def cuMemAddressFree(address: Any, size: int) -> None:
    _found(address, "reserved", size=size).state = "freed"  # and never used again


def cuMemMap(address: Any, size: int, offset: int, handle: Any, flags: int) -> None:
    found, memory = _found(address, "reserved"), _memory(handle)
    _refuse_if(
        offset or size != found.size or size > memory.size or size % _GRANULARITY, "INVALID_VALUE"
    )
    found.card, found.maker = memory.card, "map"
    found.set_memory(memory.fd, access=False)


def cuMemSetAccess(address: Any, size: int, wanted: list[CUmemAccessDesc], count: int) -> None:
    found = _found(address, "mapped", "accessible")
    _refuse_if(found.size != size or count != len(wanted), "INVALID_VALUE")
    for one in wanted:
        _refuse_if(one.location.id != found.card and "peers" in _WITHOUT, "INVALID_DEVICE")
    found.allow()


def cuMemUnmap(address: Any, size: int) -> None:
    _found(address, "mapped", "accessible", maker="map", size=size).drop("reserved")


def cuMemAlloc(size: int) -> Any:
    _refuse_if(size <= 0, "INVALID_VALUE")
    card = _context().card
    whole = -(-size // _GRANULARITY) * _GRANULARITY
    return CUdeviceptr(_Range(whole, card, _new_memory(card, whole), "alloc").address)


def cuMemFree(address: Any) -> None:
    _finish_work()
    found = _found(address, "accessible", maker="alloc")
    # Importers hold a shared lock, which ends with their process.
    opened = os.open(f"/proc/self/fd/{found.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _refuse("ILLEGAL_STATE")  # undefined, for the real driver
    finally:
        os.close(opened)
    found.drop("freed")


def cuIpcGetMemHandle(address: Any) -> Any:
    found = _found(address, "accessible", maker="alloc")
    return CUipcMemHandle.of("memory", os.getpid(), found.fd)


def cuIpcOpenMemHandle(handle: Any, flags: int) -> Any:
    context = _context()
    fd = _opened(handle, "memory")
    card, size = _card_and_size(fd)
    if card != context.card and "peers" in _WITHOUT:
        os.close(fd)
        _refuse("PEER_ACCESS_UNSUPPORTED")
    fcntl.flock(fd, fcntl.LOCK_SH)
    return CUdeviceptr(_Range(size, card, fd, "import").address)


def cuIpcCloseMemHandle(address: Any) -> None:
    _finish_work()
    found = _found(address, "accessible", maker="import")
    found.drop("freed")


def _finish_work() -> None:
    for stream in [*_context().streams.values()]:
        stream.wait()


def cuMemHostRegister(address: Any, size: int, flags: int) -> None:
    _context()
    _refuse_if("pinning" in _WITHOUT, "NOT_PERMITTED")
    _refuse_if(int(address) in _pinned, "HOST_MEMORY_ALREADY_REGISTERED")
    _pinned[int(address)] = size


def cuMemHostUnregister(address: Any) -> None:
    _context()
    _refuse_if(_pinned.pop(int(address), None) is None, "HOST_MEMORY_NOT_REGISTERED")


def cuPointerGetAttribute(attribute: int, address: Any) -> int:
    found = _range_of(int(address), 1)
    if found is None or found.state != "accessible":
        _refuse("INVALID_VALUE")
    return int(address)


def _is_pageable(address: int, size: int) -> bool:
    """Whether it is host memory that is not pinned."""
    if _range_of(address, size) is not None:
        return False
    return not any(a <= address and address + size <= a + n for a, n in [*_pinned.items()])


def _check_access(address: int, size: int) -> None:
    found = _range_of(address, size)
    if found is not None and (
        found.state != "accessible"
        or address < found.address
        or address + size > found.address + found.size
    ):
        _refuse("ILLEGAL_ADDRESS")


def cuMemcpyAsync(target: Any, source: Any, size: int, stream: Any) -> None:
    to, start, on = int(target), int(source), _stream(stream)

    def copy() -> None:
        _check_access(to, size)
        _check_access(start, size)
        ctypes.memmove(to, start, size)

    number = on.put(copy)
    if _is_pageable(to, size) or _is_pageable(start, size):
        on.wait(number)
        _context()


for _name, _function in [*globals().items()]:
    if _name.startswith("cu"):
        globals()[_name] = _call(_function)
