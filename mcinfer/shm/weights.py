"""Shares a prepared model's weights: chosen processes of this user map them, without a copy.

::

    owner   WeightOwner(model) ──► handle ──► the user passes it on
    other   open_weights(handle) ── connects to the socket that the handle names ──► the owner's thread
                                                                 is this process allowed? (kernel's word)
            SharedWeights ◄── one packet: the entry's folder and its lock (SCM_RIGHTS), or a refusal

The kernel says which process and user has connected (`SO_PEERCRED`), so no process can pass for another.
The owner never reads data from a client, and never waits for a client.

Ownership: an owner has its own descriptors for the folder and the lock. A process with access holds the entry
just as the owner does: the lock is the same open file, so the entry stays until the last process has closed
it or ended. The owner's thread closes its descriptors when it ends. Forked children close them at once, or
the socket's name would stay without an owner.
"""

import errno
import functools
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from mcinfer.config import EngineOptions, check_count, check_seconds
from mcinfer.errors import ClosedError, InvalidInputError, ProtocolError, WeightAccessError
from mcinfer.model_cache.building import MODEL_FILE, ensure_prepared
from mcinfer.model_cache.cache import CacheUnusableError, Held
from mcinfer.process import start_time
from mcinfer.shm.descriptors import WakeUp, close_all, receive, send

_GRANTED = b'{"ok": true}'
"""The answer that comes with the descriptors of the folder and of its lock, in this order."""

_NOT_ALLOWED, _OTHER_USER, _NO_PID = "process", "user", "namespace"
"""Reasons for ``{"refused": reason, "pid": pid}``, with the client's pid as the owner sees it."""

_MAX_ANSWER_BYTES = 128

MAX_HANDLE = (1 << 63) - 1
"""MindSpore Lite's handles travel through signed 64-bit integers."""

_REFUSALS = {
    _NOT_ALLOWED: "process {pid}: allow it there with WeightOwner.allow({pid})",
    _OTHER_USER: "process {pid}: it belongs to another user",
    _NO_PID: "this process: it has no pid in the owner's pid namespace, so nothing there can name it",
}
_CONNECT_PAUSE = 0.01
_LONGEST_WAIT = 86400.0
"""Seconds of one wait: poll(2) takes no more than 24 days."""

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_LAST_ANSWER = 5.0
"""Seconds that `_Listener.close` gives to the answer being sent, which takes next to none."""
_BACK_OFF = 0.1
"""Seconds until an owner that had no descriptor left tries to accept again."""


def address(handle: int) -> str:
    """The owner's abstract address (unix(7)). Handles are random, and no secret."""
    return f"\0mcinfer-weights-{handle:016x}"


def _peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The pid and user id of the other side, at its connect or listen; pid 0 if it has none here."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


@functools.cache
def _listeners() -> "weakref.WeakSet[_Listener]":
    """The listeners of this process, which the children that it forks close.

    Made once, with the first of them: what is registered for forks stays registered.
    """
    listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()

    def leave() -> None:
        for listener in [*listeners]:
            listener.leave_to_parent()

    os.register_at_fork(after_in_child=leave)
    return listeners


class _Listener:
    """Answers each process that connects, from `start` until `stop`.

    It does not know its `WeightOwner`, so an unused owner is collected though the thread runs.
    """

    def __init__(self, descriptors: tuple[int, ...], allowed: Mapping[int, int]) -> None:
        """Listen.

        Args:
            descriptors: Descriptors to pass on. This object owns them from now on, even if this call fails.
            allowed: Start times of the processes that may map, by pid, since pids are reused. Borrowed;
                another thread may change it.
        """
        self.is_parents = False
        self._allowed = allowed
        self._descriptors = descriptors
        self._wakeup: WakeUp | None = None
        self._socket: socket.socket | None = None
        self.handle = 1 + secrets.randbelow(MAX_HANDLE)
        try:
            self._wakeup = WakeUp()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _listeners().add(self)  # before it has a name, which forked children would keep
            self._socket.bind(address(self.handle))
            self._socket.setblocking(False)
            self._socket.listen(socket.SOMAXCONN)
            self._thread = threading.Thread(
                target=self._serve,
                args=(self._socket, self._wakeup.fd),
                name="mcinfer-weights",
                daemon=True,
            )
        except BaseException:
            self._end()
            raise

    def start(self) -> None:
        """Start answering. This is a separate call, so that the owner can arrange `close` first."""
        try:
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:
                self._end()
            raise

    def stop(self) -> None:
        """Make the thread end. Takes no lock and never waits; does nothing in a forked child."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.set()

    def close(self) -> None:
        """Make the thread end, and wait for that."""
        self.stop()
        started = self._thread.ident is not None
        if started and not self.is_parents and threading.current_thread() is not self._thread:
            self._thread.join(_LAST_ANSWER)

    def leave_to_parent(self) -> None:
        """In a forked child: close what was inherited; the parent's stays open."""
        self.is_parents = True
        self._give_up()

    def _serve(self, listening: socket.socket, woken: int) -> None:
        try:
            while True:
                ready = _readable(None, woken, listening.fileno())
                if woken in ready:
                    break
                try:
                    connection, _ = listening.accept()
                except OSError:
                    # No descriptor is left. The client still waits: accepting again at once would
                    # take a whole core.
                    if _readable(_BACK_OFF, woken):
                        break
                    continue
                with connection, suppress(OSError):  # the client is gone, or sees the hang-up
                    self._answer(connection)
        finally:
            self._end()

    def _answer(self, connection: socket.socket) -> None:
        pid, uid = _peer_credentials(connection)
        if uid != os.geteuid():
            refused = _OTHER_USER
        elif pid == 0:
            refused = _NO_PID
        elif (start := self._allowed.get(pid)) is None or start != start_time(pid):
            refused = _NOT_ALLOWED
        else:
            send(connection, _GRANTED, self._descriptors)
            return
        send(connection, json.dumps({"refused": refused, "pid": pid}).encode())

    def _end(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it does not listen yet
                # A child that native code forked holds the socket too: this ends it there as well.
                self._socket.shutdown(socket.SHUT_RDWR)
        self._give_up()

    def _give_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._wakeup = None
        descriptors, self._descriptors = self._descriptors, ()
        close_all(descriptors)


def _readable(seconds: float | None, *descriptors: int) -> list[int]:
    """Those that are readable, once one is or the time is over."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)]


class WeightOwner:
    """Lets chosen processes of this user map a prepared model's weights.

    A context manager; it also closes at interpreter exit and when it is garbage-collected. All threads may
    use it. In a forked child it is closed from the start, and closing it there does not affect the
    parent's.

    Attributes:
        handle: The argument of `open_weights` in the other process: above 0 and below 2**63. It is no
            secret.
    """

    handle: int

    def __init__(
        self,
        model: str | os.PathLike[str] | Held,
        allow_pids: Iterable[int] = (),
        *,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        """Prepare the model, if there is no prepared one, and start a thread that answers.

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
            held = ensure_prepared(model, options)
            try:
                entry = _open_entry(held)
            finally:
                held.close()
        else:
            entry = _open_entry(model)
        self._listener = _Listener(entry, self._allowed)
        self._finalizer = weakref.finalize(self, self._listener.stop)
        self._listener.start()
        self.handle = self._listener.handle

    def allow(self, pid: int) -> None:
        """Let a process map the weights from now on.

        Args:
            pid: As this process sees it. In containers `os.getpid` may give another number there; a refusal
                names the right one. Means the process that has this pid now, not a later one. 0 is ignored:
                in MindSpore Lite's lists it marks an unused place.

        Raises:
            InvalidInputError: The value is not a pid, or no such process exists.
            ClosedError: The owner is closed, or belongs to the process that forked this one.
            OSError: No descriptor is left to check the process.
        """
        if self._listener.is_parents:
            raise ClosedError("this WeightOwner belongs to the process that forked this one")
        if not self._finalizer.alive:
            raise ClosedError("this WeightOwner is closed")
        _admit(self._allowed, pid)

    def revoke(self, pid: int) -> None:
        """Refuse a process from now on, whether allowed before or not; open weights stay usable."""
        self._allowed.pop(pid, None)

    def close(self) -> None:
        """Stop answering and release the entry; open weights of other processes stay usable."""
        self._finalizer.detach()
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
            f"pid: got {pid}, but /proc here is that of another pid namespace, so that nothing can be "
            "known of it"
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
    """Descriptors of an entry's folder and of its lock, which the caller owns."""
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
        held: The entry, which cannot be removed from the cache while this is open. This object owns it.
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
    if handle > MAX_HANDLE:
        raise InvalidInputError(f"handle: got {handle}, expected an int below 2**63")
    check_seconds("timeout", timeout)
    data, descriptors = _ask(handle, timeout)
    _check_answer(handle, data, descriptors)
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
            pid, uid = _peer_credentials(connection)
            owner += f" (pid {pid})" if pid else ""
            if uid != os.geteuid():
                raise WeightAccessError(
                    f"weights {handle} are shared by a process of user {uid}, and this one "
                    f"is of user {os.geteuid()}"
                )
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            left = min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT)
            if not poll.poll(left * 1000):
                raise TimeoutError
            data, descriptors = receive(connection, _MAX_ANSWER_BYTES)
        except TimeoutError:
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
            # Too many clients wait, and poll(2) cannot wait for the end of that.
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError from None
            time.sleep(min(_CONNECT_PAUSE, left))


def _check_answer(handle: int, data: bytes, descriptors: list[int]) -> None:
    """Return if the owner granted access; else close the descriptors and raise the reason."""
    if data == _GRANTED and len(descriptors) == 2:
        return
    close_all(descriptors)
    try:
        answer: Any = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    fields = answer if isinstance(answer, dict) and not descriptors else {}
    refused, pid = fields.get("refused"), fields.get("pid")
    if {*fields} != {"refused", "pid"} or refused not in [*_REFUSALS] or type(pid) is not int:
        raise ProtocolError(
            f"weights {handle}: got {data!r} and {len(descriptors)} descriptors, expected "
            "the answer of a WeightOwner"
        )
    raise WeightAccessError(
        f"the owner of weights {handle} refused {_REFUSALS[refused].format(pid=pid)}"
    )
