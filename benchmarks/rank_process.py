"""One rank, as a process that does what a benchmark asks it for over a socket.

    python benchmarks/rank_process.py shm SOCKET RANK SIZE KEY
    mpirun … python benchmarks/rank_process.py mpi SOCKET

`shm` is a group of mcinfer's, in shared memory; `mpi` is plain mpi4py, without mcinfer. Between two commands
a rank sleeps in a read of its socket: an MPI library that waits in an operation uses its core, and would
disturb what else has its turn.

Commands and answers are lines of JSON.
"""

import hashlib
import importlib
import json
import socket
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_WARM_RUNS = 5
_TIMEOUT = 120.0
"""Seconds that a rank waits for the others."""

Call = Callable[[], object]
Command = dict[str, Any]


class Rank(Protocol):
    """A rank of some group.

    Attributes:
        rank: Its number.
    """

    rank: int

    def all_reduce(self, size_bytes: int) -> Call:
        """A sum over all ranks, of float32 values with so many bytes, ready to be called."""
        ...

    def barrier(self) -> Call:
        """A barrier, ready to be called."""
        ...


class MpiRank:
    """A rank of MPI's; see `Rank`."""

    def __init__(self) -> None:
        # The import makes this process a rank of mpirun's.
        self._world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
        self.rank = self._world.Get_rank()

    def all_reduce(self, size_bytes: int) -> Call:
        """See `Rank`."""
        given = np.ones(size_bytes // 4, np.float32)
        result = np.empty_like(given)
        return lambda: self._world.Allreduce(given, result)

    def barrier(self) -> Call:
        """See `Rank`."""
        return lambda: self._world.Barrier()


class ShmRank:
    """A rank of mcinfer's, which can also run a slice of a model; see `Rank`."""

    def __init__(self, rank: int, size: int, key: str) -> None:
        """Meet the others at the key."""
        from mcinfer.ranks import collectives

        self.rank = rank
        self._group = collectives.join(key, rank, size, backend="shm", timeout=_TIMEOUT)

    def all_reduce(self, size_bytes: int) -> Call:
        """See `Rank`."""
        collective = self._group.prepare_all_reduce((size_bytes // 4,), np.float32)
        collective.input[...] = 1
        return collective.run

    def barrier(self) -> Call:
        """See `Rank`."""
        return self._group.barrier

    def digest_of(self, model: str, inputs: dict[str, NDArray[Any]]) -> str:
        """Run a slice; the digest of its outputs."""
        from mcinfer.config import CoreShare, Device, EngineOptions
        from mcinfer.engines.base import Buffer, EngineRequest, array_over
        from mcinfer.ranks import open_slice

        request = EngineRequest(
            model=model,
            device=Device.parse("cpu:0"),
            options=EngineOptions(threads=1, prepare="never"),
            share=CoreShare(shared=True),
        )
        engine = open_slice("onnxruntime", request, self._group)
        given = [
            Buffer(
                name=one.name,
                element_type=one.element_type,
                shape=inputs[one.name].shape,
                address=inputs[one.name].ctypes.data,
                size=inputs[one.name].nbytes,
            )
            for one in engine.spec.inputs
        ]
        engine.arm()
        produced = engine.bind(given, []).execute()
        outputs = {one.name: array_over(one).copy() for one in produced if isinstance(one, Buffer)}
        joined = b"".join(outputs[name].tobytes() for name in sorted(outputs))
        return hashlib.sha256(joined).hexdigest()


def median_seconds(call: Call, count: int) -> float:
    """Of so many calls, after some that are not counted."""
    for _ in range(_WARM_RUNS):
        call()
    times = []
    for _ in range(count):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return statistics.median(times)


def _obey(rank: Rank, command: Command, made: dict[str, Any]) -> Command:
    """Carry one command out. What has fixed memory is made once, and kept in `made` for the next time."""
    match command["do"]:
        case "all_reduce":
            size = str(command["bytes"])
            if size not in made:
                made[size] = rank.all_reduce(command["bytes"])
            return {"seconds": median_seconds(made[size], command["count"])}
        case "barrier":
            return {"seconds": median_seconds(rank.barrier(), command["count"])}
        case "run" if isinstance(rank, ShmRank):
            with np.load(command["inputs"]) as file:
                return {"digest": rank.digest_of(command["model"], dict(file))}
        case unknown:
            raise ValueError(f"{type(rank).__name__}: got the command {unknown!r}")


def main(arguments: list[str]) -> int:
    """Serve until the benchmark closes its end; the exit status."""
    backend, path, *place = arguments
    rank = MpiRank() if backend == "mpi" else ShmRank(int(place[0]), int(place[1]), place[2])
    made: dict[str, Any] = {}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8")
        stream.write(json.dumps({"rank": rank.rank}) + "\n")
        stream.flush()
        for line in stream:
            stream.write(json.dumps(_obey(rank, json.loads(line), made)) + "\n")
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
