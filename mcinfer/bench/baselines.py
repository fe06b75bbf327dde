"""Baselines, as one would write them without mcinfer: ONNX Runtime sessions, and processes with pipes.

Beside them the way of mcinfer's that is such a session: `Inline`.
"""

import multiprocessing
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mcinfer.bench.way import Arrays, RunningWay, Setup
from mcinfer.config import INLINE, Device
from mcinfer.errors import EngineError, InvalidInputError

Providers = list[str | tuple[str, dict[str, int]]]
"""As ``onnxruntime.InferenceSession`` takes them."""

_PROVIDERS = {"cuda": "CUDAExecutionProvider", "rocm": "ROCMExecutionProvider"}
_END_SECONDS = 10.0


def providers_of(device: str) -> Providers:
    """ONNX Runtime's providers for a device such as ``"cpu:0"`` or ``"cuda:1"``.

    Raises:
        InvalidInputError: The baselines know no provider for it.
    """
    parsed = Device.parse(device)
    if parsed.kind in ("cpu", INLINE):
        return ["CPUExecutionProvider"]
    if parsed.kind not in _PROVIDERS:
        raise InvalidInputError(
            f"devices: got {device!r}, expected for the baselines one of "
            f"{['cpu', *_PROVIDERS]} (--against none measures without them)"
        )
    return [(_PROVIDERS[parsed.kind], {"device_id": parsed.index}), "CPUExecutionProvider"]


def open_session(model: str, threads: int, providers: Providers) -> ort.InferenceSession:
    # The runtime's own class, also where `mcinfer.ort.install` has put another one in its place.
    plain = next(c for c in ort.InferenceSession.__mro__ if c.__module__.startswith("onnxruntime."))
    return plain(model, options_for(threads), providers=providers)


def options_for(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def cut(inputs: Arrays, setup: Setup, most: int) -> list[dict[str, NDArray[Any]]]:
    """A request's pieces: at most this many of about one size, or of the model's fixed batch each."""
    axes = {name: axis for name, axis in setup.split.inputs.items() if axis is not None}
    if not setup.split.splits:
        return [dict(inputs)]
    rows = next(inputs[name].shape[axis] for name, axis in axes.items())
    fixed = setup.fixed_batch
    # Inputs of a fixed batch may have other numbers of rows than each other, but as many pieces.
    count = rows // fixed if fixed else min(rows, most)
    if count < 2 or (fixed and rows % fixed):  # nothing to cut, or nothing that the model takes
        return [dict(inputs)]
    parts = {name: np.array_split(inputs[name], count, axis) for name, axis in axes.items()}
    return [
        {name: parts[name][i] if name in parts else array for name, array in inputs.items()}
        for i in range(count)
    ]


def join(answers: Sequence[Sequence[NDArray[Any]]], setup: Setup) -> list[NDArray[Any]]:
    """The pieces' outputs, one after another along the split's axes."""
    if len(answers) == 1:
        return [*answers[0]]
    axes = setup.split.outputs.values()
    return [
        np.concatenate(parts, axis) if isinstance(axis, int) else parts[0]
        for parts, axis in zip(zip(*answers, strict=True), axes, strict=True)
    ]


class Threads(RunningWay):
    """One session; each run uses all cores, and runs go side by side."""

    text = "one session with all cores, called from all clients' threads"
    all_cores: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        self.session = self.open(setup, providers_of(setup.devices[0]))
        self._outputs = list(setup.outputs)
        self._setup = setup

    def open(self, setup: Setup, providers: Providers) -> ort.InferenceSession:
        return open_session(setup.model, setup.cores if self.all_cores else 1, providers)

    def run(self, inputs: Arrays) -> object:
        """One run; where the batch is fixed, one for each piece."""
        pieces = [inputs] if self._setup.fixed_batch is None else cut(inputs, self._setup, 1)
        return join([self.session.run(self._outputs, piece) for piece in pieces], self._setup)

    def close(self) -> None:
        """The session ends with its process."""


class SingleThreads(Threads):
    """One session; each run uses one core, and runs go side by side."""

    text = "one session with one thread a run, called from all clients' threads"
    all_cores = False


class Inline(Threads):
    """mcinfer's session in this process; with the threads that the setup says, or else its own choice."""

    text = "mcinfer.ort's session, called from all clients' threads"

    def open(self, setup: Setup, providers: Providers) -> ort.InferenceSession:
        import mcinfer.ort  # more than a baseline needs

        options = options_for(setup.threads) if setup.threads else None
        return mcinfer.ort.InferenceSession(setup.model, options, providers=providers)


class PlainSession(Threads):
    """One session; one run at a time uses all cores."""

    text = "one ONNX Runtime session with all cores, one request at a time"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._turn = threading.Lock()

    def run(self, inputs: Arrays) -> object:
        with self._turn:
            return super().run(inputs)


# One process per device, arrays pickled through a pipe: the way of the multi-card sample of MindSpore Lite.
# The parent slices the batch, sends each process its part, receives the answers in order and joins them. The
# sample's known faults stay (it waits for ever for a process that died, …).

ERROR, PREDICT, REPLY, BUILD_FINISH, EXIT = range(5)


def _work(connection: Connection, model: str, threads: int, providers: Providers) -> None:
    """A process: build the model, then answer until EXIT."""
    try:
        session = open_session(model, threads, providers)
    except Exception as exc:  # the parent reports it, of whatever kind it is
        connection.send((ERROR, str(exc)))
        return
    names = [output.name for output in session.get_outputs()]
    connection.send((BUILD_FINISH, None))
    while True:
        kind, inputs = connection.recv()
        if kind == EXIT:
            return
        begin = perf_counter()
        try:
            outputs = session.run(names, inputs)
        except Exception as exc:  # of any class: the runtime's
            connection.send((ERROR, str(exc)))
            continue
        seconds = perf_counter() - begin
        connection.send((REPLY, (dict(zip(names, outputs, strict=True)), seconds)))


class PipeEach(RunningWay):
    """A process with the model for each device; each request whole on one of them."""

    text = "the pipe sample's processes, each request whole on a free one"

    def __init__(self, setup: Setup) -> None:
        # Not fork: it is not safe in a parent with threads. Requests cost the same either way.
        context = multiprocessing.get_context("spawn")
        self.workers = len(setup.devices)
        self._setup = setup
        self._connections: list[Connection] = []
        self._processes = []
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs, self._seconds = 0, 0.0
        for device in setup.devices:
            ours, theirs = context.Pipe()
            loads = (theirs, setup.model, setup.worker_threads, providers_of(device))
            process = context.Process(target=_work, args=loads, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            for connection in self._connections:
                _expected(connection.recv(), BUILD_FINISH)
                self._free.put(connection)
        except EOFError as exc:
            self.close()
            raise EngineError("a process of the pipe sample ended before it was ready") from exc
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Arrays) -> object:
        replies = []
        connection = self._free.get()
        try:
            for piece in cut(inputs, self._setup, 1):
                connection.send((PREDICT, piece))
                replies.append(connection.recv())
        finally:
            self._free.put(connection)
        return self._joined(replies)

    def run_seconds(self) -> tuple[int, float]:
        with self._lock:
            return self._runs, self._seconds

    def _joined(self, replies: Sequence[Any]) -> dict[str, NDArray[Any]]:
        answers = [_expected(reply, REPLY) for reply in replies]
        with self._lock:
            self._runs += len(answers)
            self._seconds += sum(seconds for _, seconds in answers)
        outputs = join([[*outputs.values()] for outputs, _ in answers], self._setup)
        return dict(zip(answers[0][0], outputs, strict=True))

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # the process is gone
                connection.send((EXIT, None))
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _expected(reply: tuple[int, Any], expected: int) -> Any:
    kind, content = reply
    if kind != expected:
        raise EngineError(f"a process of the pipe sample answered {kind}: {content}")
    return content


class Pipe(PipeEach):
    """The sample as it is: each batch is cut and joined, one request at a time."""

    text = "the pipe sample: processes, pickled arrays, the batch cut and joined"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if why := setup.why_uncut(setup.split):
            self.text = f"the pipe sample: processes, pickled arrays, not cut: {why}"

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        pieces = cut(inputs, self._setup, len(self._connections))
        replies = []
        with self._lock:  # the pipes hold one request at a time
            for i in range(0, len(pieces), len(self._connections)):
                wave = [*zip(self._connections, pieces[i:], strict=False)]
                for connection, piece in wave:
                    connection.send((PREDICT, piece))
                # All answers are taken before the first error is raised: the next request has its own.
                replies += [connection.recv() for connection, _ in wave]
        return self._joined(replies)
