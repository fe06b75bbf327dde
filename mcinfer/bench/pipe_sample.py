"""A baseline: one process per device, arrays pickled through a pipe.

The way of the multi-card sample of MindSpore Lite: the parent slices the batch, sends each process its
part with `Connection.send`, receives the parts of the answer in order, and concatenates them. Written as
anyone would write it well; its known faults (it waits for ever for a process that died, …) stay.
"""

import multiprocessing
import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from mcinfer.bench.pieces import cut, join
from mcinfer.bench.sessions import Providers, open_session, providers_of
from mcinfer.bench.way import Arrays, RunningWay, Setup
from mcinfer.errors import EngineError

ERROR, PREDICT, REPLY, BUILD_FINISH, EXIT = range(5)

_END_SECONDS = 10.0

Answer = dict[str, NDArray[Any]]


def _work(connection: Connection, model: str, threads: int, providers: Providers) -> None:
    """A process: build the model, then answer until EXIT."""
    try:
        session = open_session(model, threads, providers)
    except Exception as exc:  # the parent is to hear of it, whatever it is
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
        except Exception as exc:  # likewise
            connection.send((ERROR, str(exc)))
            continue
        seconds = perf_counter() - begin
        connection.send((REPLY, (dict(zip(names, outputs, strict=True)), seconds)))


class PipePool:
    """A process with the model for each device."""

    def __init__(self, setup: Setup) -> None:
        """Start them; returns when all have loaded the model."""
        # Not fork: it is not safe in a parent with threads. Requests cost the same either way.
        context = multiprocessing.get_context("spawn")
        self._setup = setup
        self._connections: list[Connection] = []
        self._processes = []
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = 0
        self._seconds = 0.0
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
                _answer(connection, BUILD_FINISH)
                self._free.put(connection)
        except BaseException:
            self.close()
            raise

    def predict(self, inputs: Arrays) -> Answer:
        """Cut the inputs that have rows, run the parts at the same time, join the answers."""
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

    def predict_each(self, inputs: Arrays) -> Answer:
        """Run a request whole, on the next process that is free."""
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
        """How many runs there were, and their seconds."""
        with self._lock:
            return self._runs, self._seconds

    def _joined(self, replies: Sequence[tuple[int, Any]]) -> Answer:
        answers = [_expected(kind, content, REPLY) for kind, content in replies]
        with self._lock:
            self._runs += len(answers)
            self._seconds += sum(seconds for _, seconds in answers)
        outputs = join([[*outputs.values()] for outputs, _ in answers], self._setup)
        return dict(zip(answers[0][0], outputs, strict=True))

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            try:
                connection.send((EXIT, None))
            except OSError:
                continue  # it is gone
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(connection: Connection, expected: int) -> Any:
    try:
        kind, content = connection.recv()
    except EOFError as exc:
        raise EngineError("a process of the pipe sample ended before it was ready") from exc
    return _expected(kind, content, expected)


def _expected(kind: int, content: Any, expected: int) -> Any:
    if kind != expected:
        raise EngineError(f"a process of the pipe sample answered {kind}: {content}")
    return content


class _PipeWay(RunningWay):
    """What the two ways of using the processes share."""

    def __init__(self, setup: Setup) -> None:
        """Start the processes."""
        self.workers = len(setup.devices)
        self._pool = PipePool(setup)

    def run_seconds(self) -> tuple[int, float]:
        """As the processes tell."""
        return self._pool.run_seconds()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class Pipe(_PipeWay):
    """The sample as it is: each batch is cut and joined, one request at a time."""

    text = "the pipe sample: processes, pickled arrays, the batch cut and joined"

    def __init__(self, setup: Setup) -> None:
        """Start the processes."""
        super().__init__(setup)
        if why := setup.why_uncut(setup.split):
            self.text = f"the pipe sample: processes, pickled arrays, not cut: {why}"

    def run(self, inputs: Arrays) -> object:
        """Over all processes."""
        return self._pool.predict(inputs)


class PipeEach(_PipeWay):
    """The same processes for requests that run whole."""

    text = "the pipe sample's processes, each request whole on a free one"

    def run(self, inputs: Arrays) -> object:
        """On one process."""
        return self._pool.predict_each(inputs)
