"""Shares a prepared model's weights: chosen processes of this user map them, without a copy.

::

    owner   WeightOwner(model) ──► handle (a random number, no secret) ──► the user passes it on
    other   open_weights(handle) ── connects to the socket that the handle names ──► the owner's thread
            SharedWeights ◄── one packet: the entry's path and its lock (SCM_RIGHTS), or a refusal;
                              for weights on a card also their block: a descriptor, and a token in the packet

The kernel says which process and user has connected (`SO_PEERCRED`), so no process can pass for another.
The owner never reads what a client sends, and never waits for a client.

Ownership: an owner has its own descriptor of the lock, which its thread closes. The lock is the same open
file in every process, so the entry stays until the last process has closed it or ended. A forked child closes
the descriptors at once, or the socket's name would stay without an owner.

The block of weights on a card is a slab (`mcinfer.cards.slabs`), whose descriptor travels as a second one. It
stays until the last process has closed it or ended, or, if it is of the kind "handles", until its owner ends.
"""

import functools
import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcinfer.checks import check_count, check_seconds
from mcinfer.config import Device, EngineOptions
from mcinfer.errors import ClosedError, InvalidInputError, ProtocolError, WeightAccessError
from mcinfer.model_cache.cache import MODEL_FILE, CacheUnusableError, Held
from mcinfer.process import check_threads, start_time
from mcinfer.shm.descriptors import close_all, peer_credentials, receive, send

if TYPE_CHECKING:  # it is loaded where weights are on a card
    from mcinfer.cards.slabs import OpenSlab

_GRANTED = b"granted "
"""The answer that comes with the descriptor of the entry's lock; the entry's path follows. For weights on a
card a zero and the token of their block follow, and its descriptor comes second."""

_REFUSED = b"refused "
"""A refusal begins with this; the reason follows, in words."""

_MAX_ANSWER_BYTES = 8192  # a path has 4,096 at most

MAX_HANDLE = (1 << 63) - 1
"""MindSpore Lite's handles travel through signed 64-bit integers."""

_log = logging.getLogger("mcinfer.shm")

_CONNECT_PAUSE = 0.01
_LONGEST_WAIT = 86400.0
"""Seconds of one wait: poll(2) takes no more than 24 days."""

_LAST_ANSWER = 5.0
"""Seconds that `_Listener.close` waits for the answer being sent, which takes almost no time."""
_BACK_OFF = 0.1
"""Seconds until an owner that had no descriptor left tries to accept again."""


def address(handle: int) -> str:
    """The abstract address (unix(7)) that the owner of a handle listens on."""
    return f"\0mcinfer-weights-{handle:016x}"


@functools.cache
def _listeners() -> "weakref.WeakSet[_Listener]":
    """All listeners of this process. A child that it forks gives them up."""
    listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()

    def give_up() -> None:
        for listener in [*listeners]:
            listener.stopped = True
            listener.give_up()

    os.register_at_fork(after_in_child=give_up)  # once: it cannot be undone
    return listeners


class _Listener:
    """Answers each process that connects, until `stop`.

    It does not know its `WeightOwner`, so an owner can be garbage-collected while the thread runs.

    Attributes:
        handle: Its socket's name is made from this.
        stopped: Whether it was stopped, or belongs to the process that forked this one.
        give_up: Closes the socket, and all else that it owns.
    """

    def __init__(
        self,
        socket_: socket.socket,
        granted: tuple[bytes, Sequence[int]],
        allowed: Mapping[int, int],
        owned: ExitStack,
    ) -> None:
        # `owned` closes the socket and what is granted: this object does so from now on, even if this call
        # fails. `allowed` has the start times of processes by pid, since the system reuses pids. Another
        # thread may change it.
        self.stopped = False
        self.handle = 1 + secrets.randbelow(MAX_HANDLE)
        self._socket = socket_
        self._granted = granted
        self._allowed = allowed
        self.give_up = owned.pop_all().close
        self._thread = threading.Thread(target=self._serve, name="mcinfer-weights", daemon=True)
        try:
            _listeners().add(self)  # before it has a name, which forked children would keep
            self._socket.setblocking(False)
            self._socket.bind(address(self.handle))
            self._socket.listen(socket.SOMAXCONN)
            self._thread.start()
        except BaseException:
            self.stop()
            if self._thread.ident is None:
                self.give_up()
            raise

    def stop(self) -> None:
        """End the thread soon. Takes no lock and never waits; has no effect in a forked child."""
        self.stopped = True
        with suppress(OSError):  # it is closed, or does not listen yet
            # This also ends the socket in a child that was forked without Python's knowledge.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop, and wait until all descriptors are closed."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LAST_ANSWER)

    def _serve(self) -> None:
        try:
            # Not a blocking accept: it would keep a descriptor from the rest of the process.
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            while not self.stopped:
                poll.poll()
                try:
                    connection, _ = self._socket.accept()
                except OSError:
                    if not self.stopped:
                        # No descriptor is left. The client still waits: accepting again at once would
                        # take a whole core.
                        time.sleep(_BACK_OFF)
                    continue
                with connection, suppress(OSError):  # the client is gone, or sees the hang-up
                    self._answer(connection)
        finally:
            self.give_up()

    def _answer(self, connection: socket.socket) -> None:
        pid, uid = peer_credentials(connection)
        if uid != os.geteuid():
            why = f"process {pid}: it belongs to another user"
        elif pid == 0:
            why = "this process: it has no pid in the owner's pid namespace, so the owner cannot allow it"
        elif (start := self._allowed.get(pid)) is None or start != start_time(pid):
            why = f"process {pid}: allow it there with WeightOwner.allow({pid})"
        else:
            send(connection, *self._granted)
            return
        send(connection, _REFUSED + why.encode())


class WeightOwner:
    """Lets chosen processes of this user map a prepared model's weights.

    A context manager; it also closes at interpreter exit and when it is garbage-collected. All threads may
    use it. In a forked child it is closed from the start.

    Attributes:
        handle: The argument of `open_weights` in the other process: above 0 and below 2**63. It is no
            secret.
        weights: The same weights for this process. None if they are in the host's memory: any session here
            that loads the prepared model maps them.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Held,
        allow_pids: Iterable[int] = (),
        *,
        options: EngineOptions = EngineOptions(),
        device: str | None = None,
    ) -> None:
        """Prepare the model, unless it is prepared, and start a thread that answers.

        Args:
            model: Path of an ONNX model; or a prepared model, borrowed for this call only.
            allow_pids: Processes to `allow` before any process can connect.
            options: Options of the engines that will load a model given by its path.
            device: The card to share the weights on, such as ``"cuda:0"``: they are copied there once, and
                this process has a CUDA context from then on. None shares them in the host's memory.

        Raises:
            InvalidInputError: A pid is invalid, as in `allow`, `model` is not a model, or is prepared for
                another kind of device.
            BuildError: The model cannot be prepared, with the engine's message, or its cache cannot be
                used; or there is no such card; or threads are not Python's own (gevent, eventlet).
            CardMemoryError: The card has too little memory left.
            MissingDependencyError: The package for cards is not installed.
            ClosedError: The model is closed.
            OSError: The entry cannot be opened, or no descriptor is left.
        """
        if isinstance(allow_pids, (str, bytes)) or not isinstance(allow_pids, Iterable):
            raise InvalidInputError(f"allow_pids: got {allow_pids!r}, expected a list of pids")
        check_threads("a WeightOwner")
        self._allowed: dict[int, int] = {}
        for pid in allow_pids:
            _admit(self._allowed, pid)
        card = None
        if device is not None:
            from mcinfer.cards.slabs import card_to_share_on, put

            card = card_to_share_on(device, options)
        kind = "cpu" if card is None else card.device.kind
        with ExitStack() as opened, ExitStack() as owned:
            if isinstance(model, (str, os.PathLike)):
                from mcinfer.engines.preparation import ensure_prepared  # not for an entry

                about = ("cpu:0", "") if card is None else (str(device), card.model())
                held = ensure_prepared(model, options, None, *about)
                model = opened.enter_context(closing(held))
            lock = _lock_of(model, kind)
            owned.callback(os.close, lock)
            granted: tuple[bytes, Sequence[int]] = _GRANTED + os.fsencode(model.folder), (lock,)
            self.weights: SharedWeights | None = None
            if card is not None:
                block, slab = put(card, model.folder / MODEL_FILE)
                owned.callback(block.close)
                self.weights = SharedWeights(Held.adopt(model.folder, _lock_of(model, kind)), slab)
                granted = granted[0] + b"\0" + block.token, (lock, block.fd)
            socket_ = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._listener = _Listener(socket_, granted, self._allowed, owned)
        weakref.finalize(self, self._listener.stop)
        self.handle = self._listener.handle

    def allow(self, pid: int) -> None:
        """Let a process map the weights from now on.

        Args:
            pid: The process that has this pid now, not a later one. The pid is the one that this process
                sees; in containers `os.getpid` may give another, and a refusal names the right one. 0 is
                ignored: in MindSpore Lite's lists it marks an unused place.

        Raises:
            InvalidInputError: The value is not a pid, or no such process exists.
            ClosedError: The owner is closed, or belongs to the process that forked this one.
            OSError: No descriptor is left to check the process.
        """
        if self._listener.stopped:
            raise ClosedError(
                "this WeightOwner is closed, or belongs to the process that forked this one"
            )
        _admit(self._allowed, pid)

    def revoke(self, pid: int) -> None:
        """Refuse a process from now on; open weights stay usable."""
        self._allowed.pop(pid, None)

    def close(self, timeout: float = 10.0) -> None:
        """Stop answering and release the entry; open weights of other processes stay usable.

        `weights` end with it, but for sessions and tensors of this process that still use a card's memory.
        If that memory is shared by handles (`MCINFER_CARD_MEMORY`), it cannot be freed before the other
        processes have closed it or ended. If they have not done so in time, a warning says so, and the memory
        is freed by a later use of the card in this process, or at its end.

        Args:
            timeout: Seconds to wait for them.
        """
        check_seconds("timeout", timeout)
        self._listener.close()
        weights = self.weights
        if weights is not None:
            if weights.slab is not None and weights.slab.memory.is_lent(timeout):
                _log.warning(
                    "weights %d: another process still has them open on %s, so their memory is not free yet",
                    self.handle,
                    weights.device,
                )
            weights.close()

    def __enter__(self) -> "WeightOwner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _admit(allowed: dict[int, int], pid: int) -> None:
    """Allow the process that has this pid now, and no later one."""
    check_count("pid", pid, 0)
    if pid == 0:
        return
    if os.readlink("/proc/self") != str(os.getpid()):
        raise InvalidInputError(
            f"pid: got {pid}, but /proc here shows another pid namespace, so the process is unknown"
        )
    start = start_time(pid)
    if start is None:
        raise InvalidInputError(f"pid: got {pid}, expected a process that is there: none has it")
    allowed[pid] = start


def _lock_of(model: Held, kind: str) -> int:
    """A descriptor of an entry's lock, which is the caller's."""
    if not isinstance(model, Held):
        raise InvalidInputError(f"model: got {model!r}, expected a path or a prepared model")
    if model.lock < 0:
        raise ClosedError(f"the prepared model {model.folder} is closed")
    made_for = model.facts.get("device", kind)
    if made_for != kind:
        raise InvalidInputError(
            f"model: got one that is prepared for {made_for}, expected one for {kind}"
        )
    model.folder.stat()  # those who open it will look for it there
    return os.dup(model.lock)  # the same open file, so the same lock


class SharedWeights:
    """A prepared model that another process shares; it stays usable when that process ends.

    A context manager. Weights on a card that another process lends by a handle (`mcinfer.cards.cuda`) are the
    exception: they end with that process.

    Attributes:
        folder: Folder of its files, read-only. Processes that load the model map these files, and never
            copy them.
        model: The path of its graph, for `mcinfer.Master` or `onnxruntime.InferenceSession`.
        facts: What the entry was made from.
        held: The entry, which cannot be removed from the cache while this is open.
        device: The card that the weights are on, by its index in this process; None if they are in the host's
            memory.
        tensors: The weights on the card by name, for any consumer of DLPack (`cupy.from_dlpack`); empty if
            they are in the host's memory. All processes see what one of them writes there. Small weights,
            which lie in the graph's own file, are not among them.
        slab: All of `tensors` in one piece; None if they are in the host's memory, or this is closed.
    """

    def __init__(self, held: Held, slab: "OpenSlab | None" = None) -> None:
        self.held = held
        self.folder = held.folder
        self.model = str(held.folder / MODEL_FILE)
        self.facts = held.facts
        self.device: Device | None = None if slab is None else slab.device
        self.slab = slab
        self.tensors: Mapping[str, Any] = {} if slab is None else slab.tensors() or {}

    def add_to(self, session_options: Any) -> None:
        """Let a session of ONNX Runtime use the weights on the card where they are.

        The session is one of `model`, made with these options. Its graph is optimised already, and a weight
        that is packed is a copy, so optimisation and prepacking are turned off in the options. Weights in the
        host's memory need nothing: a session of `model` maps them.

        Args:
            session_options: An `onnxruntime.SessionOptions`. It keeps the memory open, even after `close`,
                and so does each session that is made with it.

        Raises:
            ClosedError: This is closed.
            MissingDependencyError: ONNX Runtime is not installed, or not the one for cards.
        """
        if self.held.lock < 0:
            raise ClosedError(f"the shared weights {self.folder} are closed")
        if self.slab is not None:
            self.slab.add_to(session_options)

    def close(self) -> None:
        """Release the entry; do not use what was loaded from it any more.

        A card's memory stays open until the last of `tensors`, and of the sessions with it, is gone.
        """
        self.held.close()
        if self.slab is not None:
            card = self.slab.card
            self.slab, self.tensors = None, {}
            card.reclaim()

    def __enter__(self) -> "SharedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(handle: int, timeout: float = 10.0) -> SharedWeights:
    """Share the weights of an owner that has allowed this process.

    Args:
        handle: `WeightOwner.handle`.
        timeout: Seconds for the owner to answer.

    Raises:
        InvalidInputError: The handle is not an int above 0 and below 2**63, or the timeout is invalid.
        WeightAccessError: The owner refused, did not answer in time, does not exist, or belongs to another
            user; or this process cannot use the entry. The text says which.
        ProtocolError: The process that answered is not a `WeightOwner`.
        BuildError: The weights are on a card, and this process cannot use it: there is no driver.
        MissingDependencyError: They are on a card, and the package for cards is not installed.
        OSError: No descriptor is left.
    """
    check_count("handle", handle, 1)
    check_seconds("timeout", timeout)
    data, descriptors = _ask(handle, timeout)
    folder, _, token = data.removeprefix(_GRANTED).partition(b"\0")
    if not data.startswith(_GRANTED) or len(descriptors) != 1 + bool(token):
        close_all(descriptors)
        if not data.startswith(_REFUSED) or descriptors:
            raise ProtocolError(
                f"weights {handle}: got {data!r} and {len(descriptors)} descriptors, expected "
                "the answer of a WeightOwner"
            )
        raise WeightAccessError(f"the owner of weights {handle} {data.decode(errors='replace')}")
    with ExitStack() as failed:
        lock, *blocks = descriptors
        failed.callback(close_all, blocks)
        try:
            held = Held.adopt(Path(os.fsdecode(folder)), lock)
        except CacheUnusableError as exc:
            raise WeightAccessError(f"weights {handle}: {exc}") from exc
        failed.callback(held.close)
        slab = None
        if token:
            from mcinfer.cards.slabs import open_slab

            slab = open_slab(handle, held.folder / MODEL_FILE, token, blocks.pop())
        failed.pop_all()
    return SharedWeights(held, slab)


def _ask(handle: int, timeout: float) -> tuple[bytes, list[int]]:
    deadline = time.monotonic() + timeout
    owner = f"the owner of weights {handle}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            _connect(connection, handle, deadline)
            # Abstract names have no owner: any user can take that of a process that has ended.
            pid, uid = peer_credentials(connection)
            owner += f" (pid {pid})" if pid else ""
            if uid != os.geteuid():
                raise WeightAccessError(
                    f"weights {handle} are shared by a process of user {uid}, and this one "
                    f"is of user {os.geteuid()}"
                )
            connection.settimeout(min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT))
            data, descriptors = receive(connection, _MAX_ANSWER_BYTES)
        except (BlockingIOError, TimeoutError):
            raise WeightAccessError(f"{owner} did not answer within {timeout:g} s") from None
        except ConnectionRefusedError:
            raise WeightAccessError(
                f"weights {handle}: no process shares any by this number: it is wrong, or its owner has "
                "ended or closed them, or lives in another network namespace"
            ) from None
        except ConnectionResetError:
            data, descriptors = b"", []
    if not data and not descriptors:
        raise WeightAccessError(
            f"{owner} hung up: it has just ended or closed them, or has no descriptor left"
        )
    return data, descriptors


def _connect(connection: socket.socket, handle: int, deadline: float) -> None:
    while True:
        try:
            connection.connect(address(handle))
            return
        except BlockingIOError:
            # Too many clients wait to be accepted: poll(2) does not show when this ends.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_CONNECT_PAUSE)
