"""Collective operations between ranks: processes that run one model together, each a slice of it."""

from importlib import import_module

from mcinfer.checks import check_count, check_seconds
from mcinfer.errors import InvalidInputError
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Group

BACKENDS = {"shm": "meeting", "mpi": "mpi"}
"""The modules here that join the ranks of one machine, and of several hosts."""


def join(
    key: str, rank: int, size: int, backend: str = "shm", *, timeout: float = DEFAULT_TIMEOUT
) -> Group:
    """Make ranks that were started by hand, or by a launcher such as mpirun, a group. All of them call this.

    Args:
        key: What all ranks of this group have in common, and no other group of this user at this time.
        rank: This rank's number, from 0 on.
        size: How many ranks there are.
        backend: ``"shm"`` for ranks on one machine; ``"mpi"`` for ranks that mpirun started, on any hosts.
        timeout: Seconds to wait for the others, here and in each operation.

    Raises:
        InvalidInputError: An argument does not fit; two ranks have one number or different sizes; or two
            groups have one key. All ranks get this error.
        CollectiveTimeoutError: A rank did not come in time; names it.
        RankDiedError: A rank ended before all had come.
        ProtocolError: Another program has the group's address.
        MissingDependencyError: The backend's package is not installed; says what to install.
        OSError: No descriptor is left, or no folder for the group's address is this user's alone.
    """
    check_count("size", size, 1)
    check_count("rank", rank, 0)
    if rank >= size:
        raise InvalidInputError(f"rank: got {rank}, expected one below the size, {size}")
    if not isinstance(key, str) or not key:
        raise InvalidInputError(f"key: got {key!r}, expected a text")
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend: got {backend!r}, expected one of {[*BACKENDS]}")
    check_seconds("timeout", timeout)
    module = import_module(f"mcinfer.ranks.collectives.{BACKENDS[backend]}")
    group: Group = module.join(key, rank, size, timeout=timeout)
    return group
