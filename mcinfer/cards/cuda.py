"""Memory of NVIDIA cards that several processes map, by the CUDA driver.

::

    owner: Card.create ─► DeviceBlock ── fd, token ──► socket ──► Card.attach ─► DeviceBlock: importer
             │               address A                                           address B
             └─ work on its stream, then `record` ─── the block's event ───► `wait` before work on its stream

This is the only module that imports the driver (``cuda.bindings.driver`` of the package cuda-bindings), and
it does so once a card is opened. A *block* is one allocation, of one of two kinds:

- *descriptors*: a POSIX descriptor stands for the memory (cuMemCreate, cuMemExportToShareableHandle). The
  memory lives until the last descriptor and the last mapping are gone, in whichever process (CUDA driver
  API, "Virtual Memory Management": cuMemRelease, cuMemUnmap).
- *handles*: for drivers and cards without those. 64 bytes name an allocation (cuMemAlloc,
  cuIpcGetMemHandle). Any process that has the bytes can open it, so they travel over checked sockets only;
  a process cannot open its own. Freeing the memory while another process has it open "will result in
  undefined behavior" (cuIpcOpenMemHandle). So the block's descriptor is the write end of a pipe, and each
  importer keeps it open as long as it maps the memory: the owner frees the memory once the pipe hangs up,
  which the end of an importer's process brings about too. Allocations are multiples of 2 MiB: smaller ones
  may lie together in one piece of memory, which would be shared as a whole (CUDA C++ Programming Guide,
  "Interprocess Communication").

Ownership: the `DeviceBlock` owns its descriptor until `close`. The mapping lives as long as any object made
by `DeviceBlock.memory`. Its end calls no driver, since it may come in any thread: `Card.reclaim` gives the
memory back, once this process's work on the card is done. `create`, `attach` and `DeviceBlock.close` call
it.

A process that was forked from one that uses a card cannot use it: each call raises `ClosedError`. It closes
the descriptors at once: else memory would stay, and owners would wait, until its end.
"""

import contextlib
import ctypes
import functools
import math
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from mcinfer.config import CARD_KIND, Device
from mcinfer.errors import (
    BuildError,
    CardError,
    CardLostError,
    CardMemoryError,
    ClosedError,
    InvalidInputError,
    ProtocolError,
)
from mcinfer.extras import requires
from mcinfer.locks import Turn

MEMORY_VARIABLE = "MCINFER_CARD_MEMORY"
"""Environment variable: ``descriptors`` or ``handles``, in place of what the card supports best."""

ALIGNMENT = 256
"""Bytes that `cuMemAlloc` aligns to, and kernels may count on."""

LOAD_BYTES = 16
"""Bytes to which tensors in place must be aligned: the most that a thread of a kernel loads at once."""

_TOKEN = struct.Struct("<4s11s?QQ16s64s64s")
# mark, kind, whether there is an event, bytes wanted and mapped, the card's UUID, handles of memory and event
_MARK = b"mcc1"
_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""
_BACKENDS = ("descriptors", "handles")
_NAME_BYTES = 256
_SHARED_PAGE_BYTES = 2 << 20
_MOST_PAUSE = 0.001
_LONGEST_WAIT = 86400.0
"""Seconds of one wait: poll(2) takes no more than 24 days."""

_LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("DEINITIALIZED", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED"),
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED", "ASSERT"),
        *("HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS"),
        *("INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK"),
        *("MPS_RPC_FAILURE", "MPS_CLIENT_TERMINATED", "EXTERNAL_DEVICE"),
    )
)
"""Results after which "the process must be terminated and relaunched" (CUresult), or the context is gone."""


@functools.cache
def _kept() -> set[int]:
    """The descriptors in this process that keep memory of cards. A child that it forks closes them."""
    kept: set[int] = set()

    def give_up() -> None:
        while kept:
            os.close(kept.pop())

    os.register_at_fork(after_in_child=give_up)  # once: it cannot be undone
    return kept


def _keep(fd: int) -> int:
    _kept().add(fd)
    return fd


def _close(fd: int) -> None:
    """Close a descriptor that was kept, unless that was done, here or after a fork."""
    if fd in _kept():
        _kept().discard(fd)
        os.close(fd)


@dataclass(slots=True, eq=False)
class _Piece:
    """What this process holds of the driver for one block."""

    kind: str
    own: bool
    address: int
    size: int  # as mapped
    pipe: int = -1  # handles: the owner's read end, or an importer's write end
    event: tuple[Any, bytes] | None = None  # the driver's object, and its handle


@dataclass(slots=True, eq=False)
class _Mapping:
    """A piece in use. Its end only appends to a deque: it may come in any thread, and in the collector."""

    card: "Card"
    piece: _Piece

    def __del__(self) -> None:
        self.card.unused.append(self.piece)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceMemory:
    """Bytes of a card's block at an address; keeps the mapping, and can be referred to weakly."""

    _mapping: _Mapping
    device: Device
    address: int
    size: int

    def is_lent(self, timeout: float = 0.0) -> bool:
        """Whether the memory cannot be freed yet, since another process has a block of ours open.

        Only blocks of the kind *handles* are lent; the others can always be freed.

        Args:
            timeout: Seconds to wait until none has it. The block's own descriptor counts while it is open.
        """
        piece = self._mapping.piece
        return piece.own and piece.pipe in _kept() and not _hung_up(piece.pipe, timeout)


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """Memory of a card that other processes can map, and this process's mapping of it."""

    number: int  # what messages call it
    size: int  # its bytes, with any content at first
    device: Device  # the card that it lies on
    _mapping: _Mapping | None
    fd: int = -1  # sent with the token; it keeps the memory, in any process; -1: attached or closed
    token: bytes = b""  # what another process needs to open it, besides that; empty: attached
    address: int = field(init=False)  # where it lies for the card, in this process
    _card: "Card" = field(init=False)

    def __post_init__(self) -> None:
        self._card = self.mapping.card
        self.address = self.mapping.piece.address

    @property
    def mapping(self) -> _Mapping:
        """What keeps the memory mapped here; raise `ClosedError` once the block is closed."""
        if self._mapping is None:
            raise ClosedError(f"block {self.number} of {self.device} is closed")
        return self._mapping

    def memory(self, offset: int, size: int) -> DeviceMemory:
        """Bytes of the block, which stays mapped as long as they are held.

        Raises:
            InvalidInputError: The block does not have these bytes.
            ClosedError: The block is closed.
        """
        if not 0 <= offset <= offset + size <= self.size:
            raise InvalidInputError(
                f"got bytes {offset} to {offset + size} of a block of {self.size}"
            )
        return DeviceMemory(self.mapping, self.device, self.address + offset, size)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last `memory`."""
        self.drop()
        with contextlib.suppress(CardLostError):  # then the card's memory is gone already
            self._card.reclaim()

    def drop(self) -> None:
        """As `close`, without a call of the driver, which may wait: the next `reclaim` frees the memory."""
        self._mapping = None
        fd, self.fd = self.fd, -1
        _close(fd)

    def __del__(self) -> None:
        self.drop()


class Card:
    """One card as this process sees it: its primary context and a stream of its own; for any thread.

    Attributes:
        device: ``cuda:`` and the index.
        stream: The handle of the stream; it does not wait for the default stream, nor that one for it.
        kind: ``"descriptors"`` or ``"handles"``: what `create` makes.
        count: How many cards this process sees.
        unused: Mappings that ended, for `reclaim`.
    """

    _opened: ClassVar[dict[int, "Card"]] = {}
    _opening: ClassVar[Turn] = Turn()

    @classmethod
    def open(cls, device: Device) -> "Card":
        """The card of a device; the same object each time.

        Raises:
            InvalidInputError: The device is no NVIDIA card, or `MEMORY_VARIABLE` has another value.
            MissingDependencyError: The package cuda-bindings is missing.
            BuildError: There is no driver, or no such card, or the driver refuses to use it.
            ClosedError: This process was forked from one that uses the card.
        """
        if device.kind != CARD_KIND:
            raise InvalidInputError(f"device: got {device}, expected one of the kind {CARD_KIND!r}")
        for card in [*cls._opened.values()]:
            card._check_process()
        if device.index not in cls._opened:
            with cls._opening:
                if device.index not in cls._opened:
                    cls._opened[device.index] = cls(device)
        return cls._opened[device.index]

    @classmethod
    def find(cls, token: bytes) -> "Card | None":
        """The card that a block lies on, by its token; None if this process does not see that card.

        Its index may be another one than in the block's own process. No other card gets a context.

        Raises:
            ProtocolError: It is no token.
            MissingDependencyError: As in `open`, as are `BuildError` and `ClosedError`.
        """
        wanted, driver, index = _read_token(token)[3], _driver(), 0
        with contextlib.suppress(RuntimeError):  # the driver cannot be used: `open` says why
            if driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS:
                ordinals = [driver.cuDeviceGet(i)[1] for i in range(driver.cuDeviceGetCount()[1])]
                uuids = [driver.cuDeviceGetUuid(ordinal)[1] for ordinal in ordinals]
                found = [i for i, uuid in enumerate(uuids) if uuid and bytes(uuid.bytes) == wanted]
                if not found:
                    return None
                index = found[0]
        return cls.open(Device(CARD_KIND, index))

    def __init__(self, device: Device) -> None:
        self.device = device
        self.unused: deque[_Piece] = deque()
        self._awaited: list[_Piece] = []  # to be freed when their importers are gone
        self._events: list[tuple[Any, bytes]] = []  # of blocks that ended
        self._reclaiming = threading.Lock()
        self._registered: set[int] = set()
        self._pid = os.getpid()
        self._driver = _driver()
        try:
            self._ask("cuInit", 0)
            self.count = int(self._ask("cuDeviceGetCount"))
            if device.index >= self.count:
                raise BuildError(f"{self.device}: this process sees {self.count} NVIDIA cards")
            self._ordinal = self._ask("cuDeviceGet", device.index)
            self.kind = self._chosen_kind()
            self._shares_events = bool(self._fact("IPC_EVENT_SUPPORTED"))
            self._context = self._ask("cuDevicePrimaryCtxRetain", self._ordinal)
            with self.current():
                flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
                self.stream = int(self._ask("cuStreamCreate", flags))
        except CardError as exc:
            raise BuildError(f"{self.device} cannot be used: {exc}") from exc

    # Memory.

    def create(self, number: int, size: int) -> DeviceBlock:
        """Memory that other processes can map; `number` is what messages call it.

        Raises:
            InvalidInputError: The size is less than one byte.
            CardMemoryError: The card has no room for it.
            CardError: The driver refused.
            ClosedError: This process was forked.
        """
        if size < 1:
            raise InvalidInputError(f"size: got {size}, expected at least 1 byte")
        self.reclaim()
        with self.current():
            make = self._make_exported if self.kind == "descriptors" else self._make_named
            piece, fd, handle = make(size)
            block = DeviceBlock(number, size, self.device, _Mapping(self, piece), fd)
            piece.event = self._own_event()
            event = piece.event[1] if piece.event is not None else b""
            uuid = self._uuid(self.device)
        kind = self.kind.encode()
        block.token = _TOKEN.pack(_MARK, kind, bool(event), size, piece.size, uuid, handle, event)
        return block

    def attach(self, number: int, size: int, fd: int, token: bytes, owner: Device) -> DeviceBlock:
        """Map memory that another process has made; the descriptor is this object's from now on.

        A process cannot attach what it made itself: CUDA opens no event in the process that made it.

        Args:
            number: What messages call the block.
            size: Its bytes.
            fd: The descriptor that came with the token.
            token: The owner's `DeviceBlock.token`.
            owner: The card that the memory lies on: this one, or another one that this card `reaches`.

        Raises:
            ProtocolError: The token is none, or one of memory of another size or card.
            CardMemoryError: The card has no room for the mapping.
            CardError: The driver refused, or this card does not reach the other one.
            ClosedError: This process was forked.
        """
        try:
            if not self.reaches(owner):
                raise CardError(
                    f"block {number} lies on {owner}, and {self.device} does not reach that card's memory"
                )
            kind, wanted, mapped, uuid, handle, event = _read_token(token, f"block {number}: ")
            if wanted != size:
                raise ProtocolError(
                    f"block {number}: got a token of {wanted} bytes, expected {size}"
                )
            self.reclaim()
            with self.current():
                if uuid != self._uuid(owner):
                    raise ProtocolError(f"block {number}: got a token of another card than {owner}")
                if kind == "descriptors":
                    piece = self._import(fd, mapped)
                else:
                    piece = self._open_named(fd, mapped, handle)
                block = DeviceBlock(number, size, owner, _Mapping(self, piece))
                try:
                    if event:
                        named = self._handle("CUipcEventHandle", event)
                        piece.event = self._ask("cuIpcOpenEventHandle", named), event
                except BaseException:
                    block.close()  # the exception's traceback would keep it
                    raise
        finally:
            os.close(fd)
        return block

    def reclaim(self) -> None:
        """Give back memory that nothing refers to any more, after this process's work on the card is done.

        Memory of the *handles* kind stays until its importers have closed it or are gone.

        Raises:
            CardError: The driver refused.
        """
        if not (self.unused or self._awaited) or os.getpid() != self._pid:
            return
        if not self._reclaiming.acquire(blocking=False):
            return  # another thread does it
        try:
            with self.current():
                if count := len(self.unused):
                    self._ask("cuCtxSynchronize")
                    self._awaited += [self.unused.popleft() for _ in range(count)]
                for piece in [*self._awaited]:
                    if not piece.own or piece.kind == "descriptors" or _hung_up(piece.pipe):
                        self._awaited.remove(piece)
                        self._free(piece)
        finally:
            self._reclaiming.release()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the card, over all processes."""
        with self.current():
            free, total = self._ask("cuMemGetInfo")
        return int(free), int(total)

    def host_address(self, address: int) -> int | None:
        """Where the host can read memory of a card, if it can."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER
        try:
            with self.current():
                return int(self._ask("cuPointerGetAttribute", attribute, address)) or None
        except CardError as exc:
            if exc.status != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None  # "there exists no host pointer value" (cuPointerGetAttribute)

    def register(self, address: int, size: int) -> bool:
        """Pin host memory, so that copies from and to it are fast and need not wait for the host.

        Returns:
            Whether it is pinned by this call; a system may allow little or nothing.
        """
        portable = self._driver.CU_MEMHOSTREGISTER_PORTABLE
        with self.current():
            try:
                self._ask("cuMemHostRegister", address, size, portable)
            except CardLostError:
                raise
            except CardError:
                return False
        self._registered.add(address)
        return True

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory is unmapped; nothing if that returned False."""
        if address in self._registered:
            with self.current():
                self._ask("cuMemHostUnregister", address)
            self._registered.discard(address)

    def reaches(self, other: Device) -> bool:
        """Whether this card can read and write that one's memory: it is the same, or a peer."""
        if other.kind != CARD_KIND or other.index >= self.count:
            return False
        if other.index == self.device.index:
            return True
        with self.current():
            peer = self._ask("cuDeviceGet", other.index)
            return bool(self._ask("cuDeviceCanAccessPeer", self._ordinal, peer))

    def model(self) -> str:
        """The card's name and its compute capability, on which programs for it depend."""
        name = bytes(self._ask("cuDeviceGetName", _NAME_BYTES, self._ordinal)).split(b"\0")[0]
        major, minor = (self._fact(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        return f"{name.decode(errors='replace')}, compute capability {major}.{minor}"

    @contextlib.contextmanager
    def current(self, context: Any = None) -> Iterator[None]:
        """A context as the calling thread's current one, which other libraries go by; by default the card's.

        The thread's own one is the current one again afterwards.
        """
        self._check_process()
        self._ask("cuCtxPushCurrent", self._context if context is None else context)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent")

    # Work on the stream.

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes; each address may be of this card, of another one, or of the host.

        Host memory that is not pinned may hold up the caller until the stream has done the copy. Memory of
        another card is to be held until then: `reclaim` waits for the work on its own card alone.
        """
        if size:
            with self.current():
                self._ask("cuMemcpyAsync", target, source, size, self.stream)

    def synchronize(self, timeout: float = math.inf) -> None:
        """Wait for what this stream, and no other one, has queued.

        Raises:
            TimeoutError: It was not done within these seconds.
            CardLostError: Work that was queued has failed.
        """
        with self.current():
            if timeout == math.inf:
                self._ask("cuStreamSynchronize", self.stream)
                return
            end, pause = time.monotonic() + timeout, 1e-5
            while not self._is_done("cuStreamQuery", self.stream):
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"{self.device}: the work queued on its stream took longer than {timeout:g} s"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE)

    def record(self, block: DeviceBlock) -> None:
        """Mark on the block's event what the stream has queued; `wait`, in any process, waits for that.

        Only the block's maker records: an event remembers one mark, so a second process's would hide it. On
        a card without events for other processes, this waits until the work is done.

        Raises:
            InvalidInputError: The block was not made by this card in this process.
        """
        piece = block.mapping.piece
        if not piece.own or block.mapping.card is not self:
            raise InvalidInputError(
                f"block: got block {block.number} of {block.device}, expected one that {self.device} made "
                "in this process"
            )
        if piece.event is None:
            self.synchronize()
            return
        with self.current():
            self._ask("cuEventRecord", piece.event[0], self.stream)

    def wait(self, block: DeviceBlock) -> None:
        """Have all later work of the stream wait for the work last marked on the block's event."""
        piece = block.mapping.piece
        if piece.event is not None:
            with self.current():
                self._ask("cuStreamWaitEvent", self.stream, piece.event[0], 0)

    def follow(self, stream: int) -> None:
        """Have all later work of the stream wait for what another stream of this process has queued.

        Args:
            stream: Its handle, which may be another card's; 0, 1 and 2 are this card's default streams (CUDA
                driver API, "Stream synchronization behavior").
        """
        with self.current():
            with self.current(self._ask("cuStreamGetCtx", stream)):
                event = self._marked(stream)
            self._ask("cuStreamWaitEvent", self.stream, event, 0)
            self._ask("cuEventDestroy", event)  # its resources stay until it is complete

    def lead(self, stream: int) -> None:
        """Have all later work of another stream, as in `follow`, wait for what this stream has queued."""
        with self.current():
            event = self._marked(self.stream)
            with self.current(self._ask("cuStreamGetCtx", stream)):
                self._ask("cuStreamWaitEvent", stream, event, 0)
            self._ask("cuEventDestroy", event)

    def mark(self) -> Callable[[], bool]:
        """A function that says, without waiting, whether what the stream has queued by now is done.

        Raises:
            CardError: The driver refused; so may the function, where work has failed.
        """
        with self.current():
            event = self._marked(self.stream)

        def is_done() -> bool:
            with self.current(), contextlib.ExitStack() as ended:
                ended.callback(self._ask, "cuEventDestroy", event)
                if not self._is_done("cuEventQuery", event):
                    ended.pop_all()
                    return False
            return True

        return is_done

    def _marked(self, stream: int) -> Any:
        """An event of the current context, recorded on a stream of that context."""
        event = self._ask("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        self._ask("cuEventRecord", event, stream)
        return event

    # Descriptors.

    def _make_exported(self, size: int) -> tuple[_Piece, int, bytes]:
        driver = self._driver
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.device.index
        wanted.requestedHandleTypes = self._descriptor_type
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(self._ask("cuMemGetAllocationGranularity", wanted, least))
        mapped = -(-size // unit) * unit
        handle = self._ask("cuMemCreate", mapped, wanted, 0, asked=mapped)
        try:
            fd = int(self._ask("cuMemExportToShareableHandle", handle, self._descriptor_type, 0))
            try:
                os.set_inheritable(fd, False)
                return self._map(handle, mapped, own=True), _keep(fd), b""
            except BaseException:
                os.close(fd)
                raise
        finally:
            self._ask("cuMemRelease", handle)  # the mapping and the descriptor keep the memory

    def _import(self, fd: int, size: int) -> _Piece:
        handle = self._ask("cuMemImportFromShareableHandle", fd, self._descriptor_type)
        try:
            return self._map(handle, size, own=False)
        finally:
            self._ask("cuMemRelease", handle)

    def _map(self, handle: Any, size: int, *, own: bool) -> _Piece:
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with contextlib.ExitStack() as undo:
            address = int(self._ask("cuMemAddressReserve", size, 0, 0, 0, asked=size))
            undo.callback(self._ask, "cuMemAddressFree", address, size)
            self._ask("cuMemMap", address, size, 0, handle, 0, asked=size)
            undo.callback(self._ask, "cuMemUnmap", address, size)
            self._ask("cuMemSetAccess", address, size, [access], 1)
            undo.pop_all()
        return _Piece("descriptors", own, address, size)

    @property
    def _descriptor_type(self) -> Any:
        types = self._driver.CUmemAllocationHandleType
        return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    # Handles.

    def _make_named(self, size: int) -> tuple[_Piece, int, bytes]:
        mapped = -(-size // _SHARED_PAGE_BYTES) * _SHARED_PAGE_BYTES
        address = int(self._ask("cuMemAlloc", mapped, asked=mapped))
        try:
            handle = _handle_bytes(self._ask("cuIpcGetMemHandle", address))
            pipe, fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except BaseException:
            self._ask("cuMemFree", address)
            raise
        return _Piece("handles", True, address, mapped, _keep(pipe)), _keep(fd), handle

    def _open_named(self, fd: int, size: int, handle: bytes) -> _Piece:
        # Opening it on another card enables peer access (cuIpcOpenMemHandle).
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        pipe = os.dup(fd)
        try:
            opened = self._ask("cuIpcOpenMemHandle", self._handle("CUipcMemHandle", handle), lazily)
        except BaseException:
            os.close(pipe)
            raise
        return _Piece("handles", False, int(opened), size, _keep(pipe))

    # Both.

    def _free(self, piece: _Piece) -> None:
        if piece.event is not None:
            if piece.own:  # an importer may wait for it still: it is used again, never destroyed
                self._events.append(piece.event)
            else:
                self._ask("cuEventDestroy", piece.event[0])
        if piece.kind == "descriptors":
            self._ask("cuMemUnmap", piece.address, piece.size)
            self._ask("cuMemAddressFree", piece.address, piece.size)
        elif piece.own:
            self._ask("cuMemFree", piece.address)
        else:
            self._ask("cuIpcCloseMemHandle", piece.address)
        _close(piece.pipe)

    def _own_event(self) -> tuple[Any, bytes] | None:
        if not self._shares_events:
            return None
        with contextlib.suppress(IndexError):
            return self._events.pop()
        flags = self._driver.CUevent_flags
        shared = flags.CU_EVENT_INTERPROCESS.value | flags.CU_EVENT_DISABLE_TIMING.value
        event = self._ask("cuEventCreate", shared)
        return event, _handle_bytes(self._ask("cuIpcGetEventHandle", event))

    def _handle(self, name: str, data: bytes) -> Any:
        handle = getattr(self._driver, name)()
        ctypes.memmove(handle.getPtr(), data, _HANDLE_BYTES)
        return handle

    # The driver.

    def _chosen_kind(self) -> str:
        chosen = os.environ.get(MEMORY_VARIABLE, "")
        if chosen and chosen not in _BACKENDS:
            raise InvalidInputError(
                f"environment variable {MEMORY_VARIABLE}: got {chosen!r}, expected one of {[*_BACKENDS]}"
            )
        able = self._fact("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        return chosen or ("descriptors" if able else "handles")

    def _fact(self, attribute: str) -> int:
        named = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(self._ask("cuDeviceGetAttribute", named, self._ordinal))

    def _uuid(self, device: Device) -> bytes:
        ordinal = self._ask("cuDeviceGet", device.index)
        return bytes(self._ask("cuDeviceGetUuid", ordinal).bytes)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.device}: CUDA cannot be used in process {os.getpid()}, which was forked from process "
                f"{self._pid}, where it is in use; start a new process instead"
            )

    def _ask(self, name: str, *arguments: Any, asked: int = 0) -> Any:
        """What a call of the driver returns: one value, a tuple of several, or None.

        Raises:
            CardError: Its status is not success; of the class that says what that means.
        """
        try:
            status, *values = getattr(self._driver, name)(*arguments)
        except RuntimeError as exc:  # no driver, or an older one without this call
            raise CardError(f"{self.device}: {name}: {exc}", "CUDA_ERROR_NOT_FOUND") from exc
        if status == self._driver.CUresult.CUDA_SUCCESS:
            return values[0] if len(values) == 1 else (tuple(values) or None)
        text = f"{self.device}: {name}: {status.name}"
        if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
            if asked:
                text += f": {asked} bytes wanted"
            failed, *memory = self._driver.cuMemGetInfo()
            if failed == self._driver.CUresult.CUDA_SUCCESS:
                text += f", {memory[0]} of {memory[1]} are free"
            raise CardMemoryError(text, status.name)
        if status.name in _LOST:
            raise CardLostError(f"{text}: only a new process can use the card again", status.name)
        raise CardError(text, status.name)

    def _is_done(self, query: str, what: Any) -> bool:
        """Whether the work that a stream or an event stands for is done; raise `CardError` if it failed."""
        try:
            self._ask(query, what)
        except CardError as exc:
            if exc.status != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True


def model_of(device: Device) -> str:
    """The model of a card, which is opened; errors as of `Card.open`."""
    return Card.open(device).model()


def _driver() -> Any:
    with requires("NVIDIA cards need the package cuda-bindings", "cuda", extra="gpu"):
        return import_module("cuda.bindings.driver")


def _read_token(token: bytes, what: str = "") -> tuple[str, int, int, bytes, bytes, bytes]:
    """The kind, bytes wanted and mapped, the card's UUID, handles of memory and event (empty: none)."""
    if len(token) == _TOKEN.size and token.startswith(_MARK):
        _, kind, has_event, wanted, mapped, uuid, handle, event = _TOKEN.unpack(token)
        text = kind.rstrip(b"\0").decode(errors="replace")
        if text in _BACKENDS and 0 < wanted <= mapped:
            return text, wanted, mapped, uuid, handle, event if has_event else b""
    raise ProtocolError(f"{what}got {len(token)} bytes that are no token of a card's block")


def _handle_bytes(handle: Any) -> bytes:
    """The bytes of a CUipcMemHandle or CUipcEventHandle, whose field cuda-bindings 13.5 does not show."""
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def _hung_up(pipe: int, timeout: float = 0.0) -> bool:
    """Whether no process has the other end open; waits that many seconds for it."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(min(timeout, _LONGEST_WAIT) * 1000))
