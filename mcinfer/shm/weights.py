"""Shares a prepared model's weights: chosen processes of this user map them, without a copy.

::

    owner   WeightOwner(model) ──► handle (a random number, no secret) ──► the user passes it on
    other   open_weights(handle) ── connects to the socket that the handle names ──► the owner's thread
            SharedWeights ◄── one packet: the entry's folder and its lock (SCM_RIGHTS), or a refusal

The kernel says which process and user has connected (`SO_PEERCRED`), so no process can pass for another.
The owner never reads what a client sends, and never waits for a client.

Ownership: an owner has its own descriptors for the folder and the lock, which its thread closes. The lock is
the same open file in every process, so the entry stays until the last process has closed it or ended. A
forked child closes the descriptors at once, or the socket's name would stay without an owner.
"""

import errno
import functools
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress

from mcinfer.config import EngineOptions, check_count, check_seconds
from mcinfer.errors import ClosedError, InvalidInputError, ProtocolError, WeightAccessError
from mcinfer.model_cache.building import MODEL_FILE, ensure_prepared
from mcinfer.model_cache.cache import CacheUnusableError, Held
from mcinfer.process import start_time
from mcinfer.shm.descriptors import close_all, peer_credentials, receive, send

_GRANTED = b'{"ok": true}'
"""The answer that comes with the descriptors of the folder and of its lock, in this order."""

_REFUSED = b"refused "
"""A refusal begins with this; the reason follows, in words."""

_MAX_ANSWER_BYTES = 256

MAX_HANDLE = (1 << 63) - 1
"""MindSpore Lite's handles travel through signed 64-bit integers."""

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
    """

    def __init__(self, descriptors: tuple[int, ...], allowed: Mapping[int, int]) -> None:
        # This object owns the descriptors from now on, even if this call fails.
        # `allowed` has the start times of processes by pid, since the system reuses pids. Another thread
        # may change it.
        self.stopped = False
        self.handle = 1 + secrets.randbelow(MAX_HANDLE)
        self._allowed = allowed
        self._descriptors = descriptors
        self._thread = threading.Thread(target=self._serve, name="mcinfer-weights", daemon=True)
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            close_all(descriptors)
            raise
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

    def give_up(self) -> None:
        """Close the socket and the descriptors."""
        self._socket.close()
        descriptors, self._descriptors = self._descriptors, ()
        close_all(descriptors)

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
            send(connection, _GRANTED, self._descriptors)
            return
        send(connection, _REFUSED + why.encode())


class WeightOwner:
    """Lets chosen processes of this user map a prepared model's weights.

    A context manager; it also closes at interpreter exit and when it is garbage-collected. All threads may
    use it. In a forked child it is closed from the start.

    Attributes:
        handle: The argument of `open_weights` in the other process: above 0 and below 2**63. It is no
            secret.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Held,
        allow_pids: Iterable[int] = (),
        *,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        """Prepare the model, unless it is prepared, and start a thread that answers.

        Args:
            model: Path of an ONNX model; or a prepared model, borrowed for this call only.
            allow_pids: Processes to `allow` before any process can connect.
            options: Options of the engines that will load a model given by its path.

        Raises:
            InvalidInputError: A pid is invalid, as in `allow`, or `model` is not a model.
            BuildError: The model cannot be prepared, with the engine's message, or its cache cannot be
                used.
            ClosedError: The model is closed.
            OSError: The entry cannot be opened, or no descriptor is left.
        """
        if isinstance(allow_pids, (str, bytes)) or not isinstance(allow_pids, Iterable):
            raise InvalidInputError(f"allow_pids: got {allow_pids!r}, expected a list of pids")
        self._allowed: dict[int, int] = {}
        for pid in allow_pids:
            _admit(self._allowed, pid)
        if isinstance(model, (str, os.PathLike)):
            with closing(ensure_prepared(model, options)) as held:
                entry = _open_entry(held)
        else:
            entry = _open_entry(model)
        self._listener = _Listener(entry, self._allowed)
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

    def close(self) -> None:
        """Stop answering and release the entry; open weights of other processes stay usable."""
        self._listener.close()

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
    try:
        os.close(os.pidfd_open(pid))
    except (ProcessLookupError, OverflowError):
        pass  # `start_time` shows that there is none
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        raise InvalidInputError(f"pid: got {pid}, which is a thread, expected a process") from exc
    start = start_time(pid)
    if start is None:
        raise InvalidInputError(f"pid: got {pid}, expected a process that is there: none has it")
    allowed[pid] = start


def _open_entry(model: Held) -> tuple[int, int]:
    """Descriptors of an entry's folder and of its lock, which are the caller's."""
    if not isinstance(model, Held):
        raise InvalidInputError(f"model: got {model!r}, expected a path or a prepared model")
    if model.lock < 0:
        raise ClosedError(f"the prepared model {model.folder} is closed")
    lock = os.dup(model.lock)  # the same open file, so the same lock
    try:
        return os.open(model.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), lock
    except OSError:
        os.close(lock)
        raise


class SharedWeights:
    """A prepared model that another process shares; it stays usable when that process ends.

    A context manager.

    Attributes:
        folder: Folder of its files, read-only. Processes that load the model map these files, and never
            copy them.
        model: The path of its graph, for `mcinfer.Master` or `onnxruntime.InferenceSession`.
        facts: What the entry was made from.
        held: The entry, which cannot be removed from the cache while this is open.
    """

    def __init__(self, held: Held) -> None:
        self.held = held
        self.folder = held.folder
        self.model = str(held.folder / MODEL_FILE)
        self.facts = held.facts

    def close(self) -> None:
        """Release the entry; do not use what was loaded from it any more."""
        self.held.close()

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
        OSError: No descriptor is left.
    """
    check_count("handle", handle, 1)
    check_seconds("timeout", timeout)
    data, descriptors = _ask(handle, timeout)
    if data != _GRANTED or len(descriptors) != 2:
        close_all(descriptors)
        if not data.startswith(_REFUSED) or descriptors:
            raise ProtocolError(
                f"weights {handle}: got {data!r} and {len(descriptors)} descriptors, expected "
                "the answer of a WeightOwner"
            )
        raise WeightAccessError(f"the owner of weights {handle} {data.decode(errors='replace')}")
    try:
        return SharedWeights(Held.adopt(*descriptors))
    except CacheUnusableError as exc:
        raise WeightAccessError(f"weights {handle}: {exc}") from exc


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
