"""What mcinfer is measured against: one process per device, arrays pickled through a pipe.

The way of the multi-card sample of MindSpore Lite: the parent slices the batch, sends each process its
part with `Connection.send`, receives the parts of the answer in order, and concatenates them. Written as
anyone would write it well; its known faults (it waits for ever for a process that died, …) stay.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

ERROR, PREDICT, REPLY, BUILD_FINISH, EXIT = range(5)

Arrays = dict[str, NDArray[Any]]


def _work(connection: Connection, model: str) -> None:
    """A process: build the model, then answer until EXIT."""
    import onnxruntime as ort  # here, since the parent imports this file and needs no runtime

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    connection.send((BUILD_FINISH, None))
    while True:
        kind, inputs = connection.recv()
        if kind == EXIT:
            return
        try:
            outputs = session.run(names, inputs)
        except Exception as exc:  # the parent is to hear of it, whatever it is
            connection.send((ERROR, str(exc)))
            continue
        connection.send((REPLY, dict(zip(names, outputs, strict=True))))


class PipePool:
    """So many processes with the model, as a context manager."""

    def __init__(self, model: str, processes: int) -> None:
        # Not fork: it is not safe in a parent with threads. Requests cost the same either way.
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, model), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for connection in self._connections:
            _answer(connection, BUILD_FINISH)

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Split all inputs by rows, run the parts at the same time, join the answers."""
        count = len(self._connections)
        parts = {name: np.array_split(array, count) for name, array in inputs.items()}
        for i, connection in enumerate(self._connections):
            connection.send((PREDICT, {name: rows[i] for name, rows in parts.items()}))
        answers: Sequence[Arrays] = [_answer(c, REPLY) for c in self._connections]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in self._connections:
            connection.send((EXIT, None))
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(connection: Connection, expected: int) -> Any:
    kind, content = connection.recv()
    if kind != expected:
        raise RuntimeError(f"the process answered {kind}, expected {expected}: {content}")
    return content
