"""The request path in the fewest steps, with one thread that owns all shared state: the budget of mcinfer's.

::

    caller                        owner (one thread)                       worker (one process per core)
    ------                        ------------------                       -----------------------------
    plan by the inputs' shapes
    idle frame of that plan
    copy the inputs in
    inbox.append(request)  ─────► number it, choose workers  ══ a head ══► run the layout that it names
    ring, if the owner sleeps     count the answers          ◄═ a head ═══ answer
    wait on a lock of its own ◄── release that lock
    views over the outputs

A *plan* is what follows from the shapes of a request. A *frame* is memory for one request of a plan, with the
description of each piece's layout ready to be sent; each worker gets that once. A frame is idle again when
the last array over it is gone, and no worker has a piece of it.

Ownership: the owner alone has the messages, the numbers and the table of requests. Callers only append to
the inbox, so no lock is held that an exception could leave behind. Only a new frame is made under a lock,
which the owner never takes.

`full` adds what a master needs beyond the bare path, to see what it costs: a time-out of each request, deaths
of workers (the pieces of a dead one go to another), at most `OUTSTANDING` pieces ahead of a worker and a
queue by priority for the others, cancelling, futures, latencies, and plans for several inputs. There is no
restart, and no check of what the inputs are: this is to measure against, not to use.
"""

import heapq
import json
import math
import mmap
import os
import secrets
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import onnx
import owned_worker
import zmq
from numpy.typing import NDArray
from onnx import helper
from owned_worker import EXIT, HEAD, RUN, RUN_NEW

from mcinfer.errors import (
    BuildError,
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictTimeoutError,
    QueueFullError,
    WorkerDiedError,
)
from mcinfer.process import environment
from mcinfer.scheduler.dispatch import Tally
from mcinfer.statistics import LATENCY_BOUNDS, Histogram

MEMORY_BYTES = 4 << 30
"""Of the file for tensors; only what is touched takes memory."""
OUTSTANDING = 4
"""Pieces that one worker has at most."""
MAX_REQUESTS = 10_000
"""Accepted and not answered."""

_ALIGNMENT = 64
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_MAX_ATTEMPTS = 2
_LOOK_EVERY = 64
"""Messages after which a busy owner looks at deaths and deadlines as well; a power of two."""
_DEAD = 1 << 40
"""The load of a worker that is gone: more than any other's."""

Arrays = dict[str, NDArray[Any]]


# Messages.


class _Router:
    """ROUTER and DEALER over ipc."""

    def __init__(self, workers: int, poller: select.poll) -> None:
        # In the abstract namespace, where nothing is left of it if this process is killed.
        self.address = f"ipc://@mcinfer-owned-{secrets.token_hex(8)}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.bind(self.address)
        self._names = [owned_worker.identity(i) for i in range(workers)]
        # As plain numbers: operations on ZeroMQ's enumerations cost more than the calls they are for.
        self._more, self._events = int(zmq.SNDMORE), int(zmq.EVENTS)
        self._readable = int(zmq.POLLIN)
        poller.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)

    def send(self, worker: int, message: bytes) -> None:
        self._socket.send(self._names[worker], self._more)
        self._socket.send(message)

    def receive(self) -> tuple[int, bytes] | None:
        # Asking first takes half as long as the exception for none.
        if not int(self._socket.getsockopt(self._events)) & self._readable:
            return None
        return self._socket.recv()[0] - 1, self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=1000)


# Plans and frames.


class _Model:
    """Names, dtypes and shapes of a model's tensors."""

    def __init__(self, path: str) -> None:
        graph = onnx.load(path, load_external_data=False).graph
        self._inputs = {value.name: self._tensor(value) for value in graph.input}
        self._outputs = {value.name: self._tensor(value) for value in graph.output}

    @staticmethod
    def _tensor(value: onnx.ValueInfoProto) -> tuple[np.dtype[Any], list[str | int]]:
        kind = value.type.tensor_type
        sides = [side.dim_param or side.dim_value for side in kind.shape.dim]
        return helper.tensor_dtype_to_np_dtype(kind.elem_type), sides

    def tensors(self, inputs: Mapping[str, NDArray[Any]]) -> tuple["_Tensors", "_Tensors"]:
        """The inputs and outputs of a request, the symbols in their shapes taken from the inputs.

        Raises:
            InvalidInputError: An input is missing, or of another dtype.
        """
        symbols: dict[str | int, int] = {}
        if inputs.keys() != self._inputs.keys():
            raise InvalidInputError(f"inputs: got {[*inputs]}, expected {[*self._inputs]}")
        for name, array in inputs.items():
            dtype, sides = self._inputs[name]
            if array.dtype != dtype:
                raise InvalidInputError(f"{name}: got {array.dtype}, expected {dtype}")
            symbols.update(zip(sides, array.shape, strict=True))
        given = [(name, array.dtype, array.shape) for name, array in inputs.items()]
        made = [
            (name, dtype, tuple(symbols[side] if isinstance(side, str) else side for side in sides))
            for name, (dtype, sides) in self._outputs.items()
        ]
        return given, made


_Tensors = list[tuple[str, np.dtype[Any], tuple[int, ...]]]
"""Name, dtype and shape of each."""


class _Plan:
    """What follows from the shapes of a request. Callers take frames from `idle`, leases put them back."""

    __slots__ = ("idle", "inputs", "outputs")

    def __init__(self, inputs: _Tensors, outputs: _Tensors) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.idle: deque[_Frame] = deque()


class _Frame:
    """Memory for one request of a plan.

    Attributes:
        inputs: Views to copy to, by name.
        first: The view of the first input.
        outputs: By name, NumPy's array interface of each.
        layout: Number of the first piece's layout; those of the others follow.
        bodies: By piece, the layout's description.
        known: By piece, a bit for each worker that has the description.
    """

    __slots__ = ("bodies", "first", "inputs", "known", "layout", "outputs")

    def __init__(
        self, inputs: Arrays, outputs: Arrays, layout: int, bodies: Sequence[bytes]
    ) -> None:
        self.inputs = inputs
        self.first = next(iter(inputs.values()))
        self.outputs = [(name, view.__array_interface__) for name, view in outputs.items()]
        self.layout = layout
        self.bodies = bodies
        self.known = [0] * len(bodies)


class _Lease:
    """One request's use of a frame: the frame is idle when this is gone."""

    __slots__ = ("frame", "idle")

    def __init__(self, frame: _Frame, idle: deque[_Frame]) -> None:
        self.frame, self.idle = frame, idle

    # Called by any thread and at any point: an append to a deque is all that it may do. A finalizer of
    # `weakref` does the same in twice the time.
    def __del__(self) -> None:
        self.idle.append(self.frame)


class _Output:
    """The base of an array over a frame's output, which keeps the frame leased."""

    __slots__ = ("__array_interface__", "lease")

    def __init__(self, interface: dict[str, Any], lease: _Lease) -> None:
        self.__array_interface__, self.lease = interface, lease


# Requests.


class _Shard:
    """What is known of one piece of a request.

    It has the request's number: were it to hold the request, which holds it, the frame of each would wait for
    the garbage collector.
    """

    __slots__ = ("attempts", "number", "piece", "worker")

    def __init__(self, number: int, piece: int) -> None:
        self.number, self.piece = number, piece
        self.attempts, self.worker = 0, -1


class Request:
    """One request, from its call until the last worker has answered. All but `result` is the owner's."""

    __slots__ = (
        "called",
        "deadline",
        "done",
        "error",
        "future",
        "lease",
        "left",
        "number",
        "rank",
        "settled",
        "shards",
    )
    called: float
    deadline: float
    done: threading.Lock
    future: "Future[Arrays] | None"
    number: int
    rank: int
    shards: list[_Shard]

    def __init__(self, lease: _Lease, pieces: int) -> None:
        self.lease, self.left = lease, pieces
        self.settled = False
        self.error: BaseException | None = None
        self.future = None

    def result(self) -> Arrays:
        """Wait for the answer: arrays by output name, the caller's for as long as wanted.

        Raises:
            McinferError: What became of it.
            CancelledError: It was cancelled.
        """
        if self.future is not None:
            return self.future.result()
        with self.done:
            pass
        if self.error is not None:
            raise self.error
        return self.answer()

    def answer(self) -> Arrays:
        """Arrays over the outputs."""
        lease = self.lease
        return {
            name: np.asarray(_Output(interface, lease)) for name, interface in lease.frame.outputs
        }


class _Cancel:
    """The message that a request is not wanted any more."""

    __slots__ = ("request",)

    def __init__(self, request: Request) -> None:
        self.request = request


class Owned:
    """A pool of workers for one model, as a context manager; any thread may call it."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        workers: int = 2,
        *,
        whole: bool = False,
        full: bool = False,
    ) -> None:
        """Start the workers; returns when all have loaded the model.

        Args:
            model: An ONNX file; all inputs and outputs have the batch as their first axis.
            workers: How many, each on a core of its own as far as there are enough.
            whole: Whether a request goes to the worker that has the fewest, in the place of a piece to each.
            full: Whether it has what a master needs.

        Raises:
            BuildError: A worker ended, or was not ready in time.
        """
        self._full = full
        self._model = _Model(os.fspath(model))
        self._workers, self._whole = workers, whole
        self._pieces = 1 if whole else workers
        self._plans: dict[object, _Plan] = {}
        self._making = threading.Lock()
        self._top = self._layouts = 0
        self._inbox: deque[Request | _Cancel] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = self._closing = False

        self._requests = 0
        self._table: dict[int, Request] = {}
        self._load = [0] * workers
        self._due: list[tuple[float, int]] = []
        self._queue: list[tuple[int, int, int]] = []
        self._held: list[set[_Shard]] = [set() for _ in range(workers)]
        self._broken: McinferError | None = None
        self._latency = Tally(LATENCY_BOUNDS)

        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        self._messages = _Router(workers, self._poller)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: dict[int, int] = {}
        self._thread = threading.Thread(target=self._own, name="owner", daemon=True)
        try:
            self._memory = self._start_workers(os.path.abspath(model))
            self._await_ready()
        except BaseException:
            for process in self._processes:
                process.kill()  # one that is not connected yet does not hear that it is to end
            self._end_workers()
            raise
        if full:
            for i, process in enumerate(self._processes):
                fd = os.pidfd_open(process.pid)
                self._pidfds[fd] = i
                self._poller.register(fd, select.POLLIN)
        self._thread.start()

    # Called by any thread.

    def predict(self, inputs: Arrays, *, timeout: float = 600.0, priority: int = 0) -> Arrays:
        """Run a request and wait for its answer; the errors are those of `Request.result`."""
        return self.submit(inputs, timeout=timeout, priority=priority).result()

    def submit(self, inputs: Arrays, *, timeout: float = 600.0, priority: int = 0) -> Request:
        """Hand a request to the owner; the inputs are copied before this returns.

        Args:
            inputs: By name. Without `full` there is one, whose dtype is not looked at.
            timeout: Seconds, with `full`.
            priority: The higher goes first, with `full`.

        Raises:
            ClosedError: It is closed.
            InvalidInputError: The inputs do not fit the model, or have too few rows.
            MemoryError: The memory is all in use.
        """
        called = monotonic() if self._full else 0.0
        if self._closing:
            raise ClosedError("it is closed")
        key: object
        if self._full:
            key = tuple([(name, array.shape, array.dtype.num) for name, array in inputs.items()])
        else:
            (only,) = inputs.values()
            key = only.shape
        plan = self._plans.get(key) or self._add_plan(key, inputs)
        try:
            frame = plan.idle.pop()
        except IndexError:
            frame = self._make_frame(plan)
        request = Request(_Lease(frame, plan.idle), self._pieces)
        if self._full:
            for name, array in inputs.items():
                np.copyto(frame.inputs[name], array)
            request.called, request.deadline = called, called + timeout
            request.rank = -priority
            request.future = Future()
        else:
            np.copyto(frame.first, only)
            request.done = threading.Lock()
            request.done.acquire()
        self._post(request)
        return request

    def cancel(self, request: Request) -> None:
        """Give a request up, with `full`; a run of it is not stopped."""
        self._post(_Cancel(request))

    def latency(self) -> Histogram:
        """Seconds from each call to its answer, with `full`."""
        return self._latency.snapshot()

    def close(self) -> None:
        """End the owner and the workers; what is under way fails."""
        self._closing = True
        self._ring()
        self._thread.join(_END_SECONDS)
        self._end_workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _post(self, item: Request | _Cancel) -> None:
        self._inbox.append(item)
        if self._asleep:
            self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _add_plan(self, key: object, inputs: Arrays) -> _Plan:
        given, made = self._model.tensors(inputs)
        for name, _, shape in given + made:
            if not shape or shape[0] < self._pieces:
                raise InvalidInputError(f"{name}: got {shape}, expected {self._pieces} rows")
        # Where two callers come here at once, both get the same one.
        return self._plans.setdefault(key, _Plan(given, made))

    def _make_frame(self, plan: _Plan) -> _Frame:
        layouts: list[dict[str, list[Any]]] = [{"in": [], "out": []} for _ in range(self._pieces)]
        views: dict[str, Arrays] = {"in": {}, "out": {}}
        with self._making:
            top = self._top
            for side, tensors in (("in", plan.inputs), ("out", plan.outputs)):
                for name, dtype, shape in tensors:
                    size = math.prod(shape) * dtype.itemsize
                    if top + size > MEMORY_BYTES:
                        raise MemoryError(f"more than {MEMORY_BYTES:,} bytes are in use")
                    part = self._memory[top : top + size]
                    views[side][name] = part.view(dtype).reshape(shape)
                    for i, layout in enumerate(layouts):
                        begin, end = (shape[0] * n // self._pieces for n in (i, i + 1))
                        offset = top + size // shape[0] * begin
                        rows = (end - begin, *shape[1:])
                        layout[side].append((name, dtype.str, rows, offset))
                    top += -(-size // _ALIGNMENT) * _ALIGNMENT
            number, self._layouts = self._layouts, self._layouts + self._pieces
            self._top = top
        bodies = [msgpack.packb(layout) for layout in layouts]
        return _Frame(views["in"], views["out"], number, bodies)

    # The owner's thread.

    def _own(self) -> None:
        error: BaseException = ClosedError("it was closed")
        try:
            self._serve()
        except BaseException as exc:  # a fault of this file must not leave callers waiting
            error = exc
            raise
        finally:
            self._closing = True
            self._fail_all(error)

    def _serve(self) -> None:
        inbox, receive = self._inbox, self._messages.receive
        taken = 0
        while not self._closing:
            while inbox:
                item = inbox.popleft()
                if isinstance(item, Request):
                    self._accept(item)
                elif not item.request.settled:
                    self._settle(item.request, CancelledError())
            message = receive()
            if message is None:
                # Both in this order: who appends after the look finds that it must ring.
                self._asleep = True
                if not inbox:
                    self._look(self._patience_ms())
                self._asleep = False
                continue
            self._take(*message)
            if self._full:
                taken += 1
                if not taken & (_LOOK_EVERY - 1):
                    self._look(0)

    def _patience_ms(self) -> int | None:
        """How long the next deadline leaves to sleep."""
        if not self._due:
            return None
        return max(0, math.ceil((self._due[0][0] - monotonic()) * 1000))

    def _look(self, patience_ms: int | None) -> None:
        """Wait for messages, deaths and the bell, and see whose time is over."""
        for fd, _ in self._poller.poll(patience_ms):
            if fd == self._bell:
                os.eventfd_read(fd)
            elif fd in self._pidfds:
                self._on_death(fd)
        if self._due:
            now = monotonic()
            while self._due and self._due[0][0] <= now:
                request = self._table.get(heapq.heappop(self._due)[1])
                if request is not None and not request.settled:
                    self._settle(request, PredictTimeoutError("the time is over"))

    def _accept(self, request: Request) -> None:
        if self._broken is not None:
            self._settle(request, self._broken)
            return
        table = self._table
        if self._full and len(table) >= MAX_REQUESTS:
            self._settle(request, QueueFullError(f"{MAX_REQUESTS} requests are not answered"))
            return
        self._requests += 1
        request.number = number = self._requests
        table[number] = request
        if self._full:
            if len(self._due) > 2 * len(table) + _LOOK_EVERY:  # most of them are answered
                self._due = [entry for entry in self._due if entry[1] in table]
                heapq.heapify(self._due)
            heapq.heappush(self._due, (request.deadline, number))
            request.shards = [_Shard(number, piece) for piece in range(self._pieces)]
        for piece in range(self._pieces):
            if not (self._full or self._whole):
                self._send(piece, request, piece)
                continue
            load = self._load
            least = min(load)
            if self._full and (least >= OUTSTANDING or self._queue):
                heapq.heappush(self._queue, (request.rank, number, piece))
            else:
                self._send(load.index(least), request, piece)

    def _send(self, worker: int, request: Request, piece: int) -> None:
        self._load[worker] += 1
        if self._full:
            shard = request.shards[piece]
            shard.worker = worker
            shard.attempts += 1
            self._held[worker].add(shard)
        frame = request.lease.frame
        if frame.known[piece] >> worker & 1:
            message = HEAD.pack(RUN, request.number, piece, frame.layout + piece)
        else:
            frame.known[piece] |= 1 << worker
            head = HEAD.pack(RUN_NEW, request.number, piece, frame.layout + piece)
            message = head + frame.bodies[piece]
        self._messages.send(worker, message)

    def _fill(self) -> None:
        """Send what waits, as far as workers have room."""
        load = self._load
        while self._queue:
            least = min(load)
            if least >= OUTSTANDING:
                return
            _, number, piece = heapq.heappop(self._queue)
            request = self._table[number]
            if request.settled:  # cancelled, or its time is over
                self._piece_done(request)
            else:
                self._send(load.index(least), request, piece)

    def _take(self, worker: int, message: bytes) -> None:
        """An answer."""
        _, number, piece, _ = HEAD.unpack_from(message)
        request = self._table.get(number)
        if request is None:
            return  # a worker's that was taken for dead, or all have failed
        if self._full:
            shard = request.shards[piece]
            if shard.worker != worker:
                return  # it died, and the piece was sent to another
            self._held[worker].discard(shard)
        self._load[worker] -= 1
        if self._queue:
            self._fill()
        self._piece_done(request)

    def _piece_done(self, request: Request) -> None:
        request.left -= 1
        if request.left:
            return
        table, due = self._table, self._due
        del table[request.number]
        while due and due[0][1] not in table:
            heapq.heappop(due)
        if not request.settled:
            self._settle(request, None)

    def _settle(self, request: Request, error: BaseException | None) -> None:
        """Let the caller have the answer or the error; once for each request."""
        request.settled, request.error = True, error
        if self._full and error is None:
            self._latency.add(monotonic() - request.called)
        future = request.future
        if future is None:
            request.done.release()
        elif future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(request.answer())
            else:
                future.set_exception(error)

    def _on_death(self, fd: int) -> None:
        """A worker has died."""
        worker = self._pidfds.pop(fd)
        self._poller.unregister(fd)
        os.close(fd)
        process = self._processes[worker]
        error = WorkerDiedError(f"worker {worker} (pid {process.pid}) died: {process.wait()}")
        self._load[worker] = _DEAD
        if not self._pidfds:
            self._broken = error
            self._fail_all(error)
            return
        shards = [*self._held[worker]]
        self._held[worker].clear()
        for shard in shards:
            request, shard.worker = self._table[shard.number], -1
            if shard.attempts < _MAX_ATTEMPTS and not request.settled:
                # By age within a rank, so it goes before those that were not sent yet.
                heapq.heappush(self._queue, (request.rank, shard.number, shard.piece))
                continue
            if not request.settled:
                self._settle(request, error)
            self._piece_done(request)
        self._fill()

    def _fail_all(self, error: BaseException) -> None:
        requests = [*self._table.values()]
        self._table.clear()
        self._queue.clear()
        self._due.clear()
        while self._inbox and self._closing:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                requests.append(item)
        for request in requests:
            if not request.settled:
                self._settle(request, error)

    # The workers' processes.

    def _start_workers(self, model: str) -> NDArray[np.uint8]:
        """Start them, and map the memory that they are given."""
        memory = os.memfd_create("owned", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, MEMORY_BYTES)
            cores = sorted(os.sched_getaffinity(0))
            for i in range(self._workers):
                start = {
                    "index": i,
                    "core": cores[i % len(cores)],
                    "model": model,
                    "memory": memory,
                    "size": MEMORY_BYTES,
                    "address": self._messages.address,
                }
                command = [sys.executable, str(Path(owned_worker.__file__)), json.dumps(start)]
                process = subprocess.Popen(command, pass_fds=[memory], env=environment())
                self._processes.append(process)
            return np.frombuffer(mmap.mmap(memory, MEMORY_BYTES), np.uint8)
        finally:
            os.close(memory)

    def _await_ready(self) -> None:
        missing, end = self._workers, monotonic() + _START_SECONDS
        while missing:
            self._poller.poll(100)
            while self._messages.receive() is not None:
                missing -= 1
            ended = [i for i, process in enumerate(self._processes) if process.poll() is not None]
            if ended or (missing and monotonic() > end):
                raise BuildError(f"{missing} workers are not ready; {ended} have ended")

    def _end_workers(self) -> None:
        for i, process in enumerate(self._processes):
            if process.poll() is None:
                self._messages.send(i, HEAD.pack(EXIT, 0, 0, 0))
        end = monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._messages.close()
        for fd in (*self._pidfds, self._bell):
            os.close(fd)
        self._pidfds.clear()
