"""What the leader of a group of ranks and its followers say to each other, over a socket for each follower.

::

    leader                                   follower
                          Hello  ◄──────     its process is there
    slices are made
    ──────► Load                             opens the entry of the cache
                          Found  ◄──────
    ──────► Join ═══════ both join the group, and load their slices ═══════
                   Ready or Ended ◄──────
    ──────► Bind          Bound  ◄──────     a layout has its memory and its bound run, in all ranks
    ──────► Start         Done   ◄──────     one run; followers keep the order of what they are sent
    ──────► Exit

One MessagePack map per packet, checked like those between a master and its workers (`mcinfer.protocol`).
The socket is the group's own while the ranks join it. Tensors never travel here, but outputs whose shape only
a run shows lie in a block (`mcinfer.shm.block`), which does.
"""

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgpack

from mcinfer.checks import (
    is_count,
    is_flag,
    is_shape,
    is_text,
    is_texts,
    or_none,
)
from mcinfer.engines.base import RunCancelledError
from mcinfer.errors import (
    BuildError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictError,
    ProtocolError,
    RankDiedError,
    shortened,
)
from mcinfer.protocol import Message
from mcinfer.shm.block import Block
from mcinfer.shm.descriptors import close_all, send, take_packet

ENDINGS: dict[str, type[McinferError]] = {
    "missing": MissingDependencyError,
    "build": BuildError,
    "died": RankDiedError,
    "timeout": CollectiveTimeoutError,
    "closed": ClosedError,
}
"""Errors after which a rank ends."""

FAILURES: dict[str, type[McinferError]] = {
    "cancelled": RunCancelledError,
    "invalid": InvalidInputError,
    "predict": PredictError,
}
"""Errors of one run, or of one layout."""


def kind_of(exc: BaseException, kinds: Mapping[str, type[McinferError]]) -> str | None:
    """The first of these kinds that an error is of."""
    return next((kind for kind, error in kinds.items() if isinstance(exc, error)), None)


_MAX_BYTES = 1 << 20
"""Largest packet; the kernel's own limit (net.core.wmem_max) may be less."""

_LOST = -1
"""In the place of a descriptor that found no room in this process."""


def _is_each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is tuple and all(map(check, value))


def _is_named_shape(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and is_text(value[0]) and is_shape(value[1])


_Count = Annotated[int, is_count]
_Text = Annotated[str, is_text]
_Texts = Annotated[tuple[str, ...], is_texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Follower: its process is there."""

    ID = 1
    rank: _Count
    pid: Annotated[int, lambda value: is_count(value) and value > 0]
    device: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Message):
    """Leader: the slices are this entry of this cache."""

    ID = 2
    cache: _Text
    key: _Text
    tensor: _Count
    pipeline: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Message):
    """Follower: it holds the entry."""

    ID = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Message):
    """Leader: all followers hold the entry; join the group, then load."""

    ID = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Follower: its slice is loaded, and takes and makes these inputs and outputs of the whole model."""

    ID = 5
    takes: _Texts
    makes: _Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind(Message):
    """Leader: bind a lane of a layout; if it is to be `renewed`, forget all layouts and their memory before.

    Shapes are in the model's order; that of an output is None if only a run shows it.
    """

    ID = 7
    layout: _Count
    lane: _Count
    inputs: Annotated[tuple[tuple[int, ...], ...], _is_each(is_shape)]
    outputs: Annotated[tuple[tuple[int, ...] | None, ...], _is_each(or_none(is_shape))]
    renewed: Annotated[bool, is_flag]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound(Message):
    """Follower: the lane is bound, or the error why not (see `Done`)."""

    ID = 8
    kind: _Text
    text: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Message):
    """Leader: run the model on a lane of a layout."""

    ID = 9
    layout: _Count
    lane: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """Follower: the oldest run is done.

    `kind` is empty, or that of an error, a key of `FAILURES`. `produced` are the
    name and the shape of each output besides those whose memory is bound; a block with them comes along.
    """

    ID = 10
    kind: _Text = ""
    text: _Text = ""
    produced: Annotated[tuple[tuple[str, tuple[int, ...]], ...], _is_each(_is_named_shape)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Message):
    """Follower: it cannot load its slice, or cannot go on, and ends; `kind` is a key of `ENDINGS`."""

    ID = 11
    kind: Annotated[str, lambda value: value in ENDINGS]
    text: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(Message):
    """Leader: end."""

    ID = 12


_MESSAGES = {
    message.ID: message
    for message in (
        *(Hello, Load, Found, Join, Ready),
        *(Bind, Bound, Start, Done, Ended, Exit),
    )
}
_FIELDS: dict[type[Message], tuple[str, ...]] = {
    message: tuple(item.name for item in fields(message)) for message in _MESSAGES.values()
}


class Channel:
    """One end of the socket between a leader and a follower, which it owns."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        self.socket = end
        self._blocks: deque[int] = deque()  # descriptors that have come

    def send(self, message: Message, block: Block | None = None) -> None:
        """Send a message, and hand over a block with it, without waiting.

        Raises:
            ProtocolError: It is larger than a packet may be, or than the kernel takes.
            OSError: The other side is gone, or does not read (BlockingIOError).
        """
        content = {name: getattr(message, name) for name in _FIELDS[type(message)]}
        data = msgpack.packb({"id": message.ID, **content}, unicode_errors="surrogatepass")
        try:
            if len(data) > _MAX_BYTES:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            send(self.socket, data, () if block is None else (block.fd,))
        except OSError as exc:
            if exc.errno == errno.EMSGSIZE:
                raise ProtocolError(
                    f"{type(message).__name__}: got {len(data)} bytes, more than a packet between ranks "
                    "may have"
                ) from exc
            raise

    def receive(self) -> Message | None:
        """The next message; waits for it. None if the other side is gone.

        Raises:
            ProtocolError: It is not a message between ranks.
        """
        try:
            data, descriptors, cut_off = take_packet(self.socket, _MAX_BYTES)
        except ConnectionResetError:
            # The other side has left without reading all; said once, before what it has sent.
            data, descriptors, cut_off = take_packet(self.socket, _MAX_BYTES)
        if cut_off & socket.MSG_CTRUNC and not descriptors:
            descriptors = [_LOST]
        self._blocks += descriptors
        if not data:
            return None
        if cut_off & socket.MSG_TRUNC:
            raise ProtocolError(f"got a packet of more than {_MAX_BYTES} bytes")
        return _decode(data)

    def take_block(self, size: int) -> Block:
        """The oldest block that has come, of so many bytes.

        Raises:
            ProtocolError: None has come, or another one.
            OSError: This process has no descriptor or memory left.
        """
        if not self._blocks:
            raise ProtocolError(f"no block of {size} bytes has come")
        fd = self._blocks.popleft()
        if fd == _LOST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        block = Block.attach(0, size, fd)
        block.close()  # the mapping stays
        return block

    def close(self) -> None:
        self.socket.close()
        close_all([fd for fd in self._blocks if fd != _LOST])
        self._blocks.clear()


def _decode(data: bytes) -> Message:
    try:
        content = msgpack.unpackb(
            data, use_list=False, strict_map_key=True, unicode_errors="surrogatepass"
        )
        message = _MESSAGES[content.pop("id")]
        return message(**content)
    except ProtocolError:
        raise
    except Exception as exc:  # msgpack raises ValueError, TypeError, its own, and more on bad data
        raise ProtocolError(
            f"not a message between ranks: {shortened(f'{type(exc).__name__}: {exc}')}"
        ) from exc
