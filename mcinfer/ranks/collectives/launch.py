"""Which rank this process is, and what it has in common with the others: from whatever started the ranks.

::

    rank table ─┬─► find_ranks ──► Ranks: rank, size, key ──► join
    launcher ───┘

The first of these that is there counts. A rank table says which ranks there are; which of them this process
is comes from an argument, else from the launcher.

Sources of the names: for the rank table HCCL's user guide in the documentation of CANN ("rank table"); Open
MPI's mpirun(1), its variables as Open MPI 5.0 sets them; the PMIx standard; for PMI those of MPICH, Intel MPI
and Cray PALS; Slurm's srun(1); for torchrun https://docs.pytorch.org/docs/stable/elastic/run.html.
"""

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from typing import Any, Literal, NamedTuple

from mcinfer.errors import InvalidInputError
from mcinfer.model_cache.onnx_files import read_small

Backend = Literal["shm", "mpi"]

_MAX_RANKS = 1024
_MAX_TABLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process among the ranks of a job.

    Attributes:
        rank: This process's number, from 0.
        size: How many ranks there are.
        key: What all ranks of the job have in common, and no other job has at the same time; may be empty
            if an MPI launcher started them on several hosts.
        hosts: On how many hosts the ranks are. A launcher that gives no number but shows that some ranks are
            elsewhere counts as one host for every so many ranks as are here.
        source: Where all this comes from, for messages.
        mpi: Whether an MPI launcher started this process, as this rank; of ranks on one host it may not be
            known.
    """

    rank: int
    size: int
    key: str
    hosts: int
    source: str
    mpi: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= _MAX_RANKS:
            raise InvalidInputError(
                f"{self.source}: got {self.size} ranks, expected 1 to {_MAX_RANKS}"
            )
        if not 0 <= self.rank < self.size:
            raise InvalidInputError(
                f"{self.source}: got rank {self.rank}, expected 0 to {self.size - 1}: there are "
                f"{self.size} ranks"
            )

    @property
    def backend(self) -> Backend:
        """Shared memory on one host, MPI on several; InvalidInputError if there is no MPI launcher then."""
        if self.hosts == 1:
            return "shm"
        if self.mpi:
            return "mpi"
        raise InvalidInputError(
            f"{self.source}: the {self.size} ranks are on {self.hosts} hosts, expected 1, or a start by "
            "mpirun: ranks of several hosts meet by MPI alone"
        )


def find_ranks(
    *,
    rank: int | None = None,
    rank_table: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Ranks:
    """The place of this process, from the rank table, else from the launcher's variables.

    Args:
        rank: This process's `rank_id` in the rank table.
        rank_table: Path of HCCL's rank table, a JSON file of version 1.0 or 1.2.
        environment: Where launchers put their variables.

    Raises:
        InvalidInputError: Nothing says which rank this is, or what says it is wrong; names the argument, the
            variable or the table's field.
    """
    if rank_table:
        return _placed(rank_table, rank, environment)
    launched = from_launcher(environment)
    if launched is None:
        raise InvalidInputError(
            "which rank this process is: got no rank_table, and of no launcher both the rank and the number "
            f"of ranks: {_known_variables()}"
        )
    if not (launched.key or launched.hosts > 1):  # MPI needs no key
        raise InvalidInputError(
            f"{launched.source}: got none that all ranks of the job share; expected {_known_keys()}"
        )
    return launched


# Launchers.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """The variables of one launcher; of several names, the first that is set counts.

    Attributes:
        size: How many ranks there are.
        key: What all ranks of the job have in common: the first of these groups that is set as a whole.
        hosts: How many hosts there are.
        local_size: How many ranks there are on this host.
    """

    rank: str
    size: tuple[str, ...]
    key: tuple[tuple[str, ...], ...]
    hosts: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    mpi: bool = False


_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_SLURM_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_SLURM_HOSTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")

_LAUNCHERS = (
    _Launcher(
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        key=(("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",), _SLURM_STEP),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        mpi=True,
    ),
    _Launcher(
        rank="PMIX_RANK",
        size=_SLURM_SIZE,  # PMIx has no variable for it
        key=(("PMIX_NAMESPACE",), _SLURM_STEP),
        hosts=_SLURM_HOSTS,
        mpi=True,
    ),
    _Launcher(
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        key=(("PMI_JOBID",), ("I_MPI_HYDRA_UUID",), _SLURM_STEP),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        mpi=True,
    ),
    _Launcher(rank="SLURM_PROCID", size=_SLURM_SIZE, key=(_SLURM_STEP,), hosts=_SLURM_HOSTS),
    _Launcher(
        rank="RANK",
        size=("WORLD_SIZE",),
        key=(
            ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
            ("MASTER_ADDR", "MASTER_PORT"),
            ("TORCHELASTIC_RUN_ID",),
        ),
        hosts=("GROUP_WORLD_SIZE",),
        local_size=("LOCAL_WORLD_SIZE",),
    ),
)
"""In the order in which they count: mpirun may run in a Slurm job, and sets variables of its own."""


def from_launcher(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """The place that a launcher gave this process; None if there is none, or its number of ranks is missing.

    The key is empty if there is no variable for it. A Slurm batch script has the variables of its first task,
    though it is none: it is not in a step.

    Raises:
        InvalidInputError: A variable is not a number, or the rank is none of so many.
    """
    given = {name: text for name, text in environment.items() if text}

    def number(names: Sequence[str], default: int) -> int:
        name = next(filter(given.get, names), None)
        if name is None:
            return default
        return _Field(f"environment variable {name}", given[name]).number()

    for launcher in _LAUNCHERS:
        sizes = [*filter(given.get, launcher.size)]
        is_batch_script = launcher.rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in given
        if launcher.rank not in given or not sizes or is_batch_script:
            continue
        size = number(sizes, 0)
        key = next((names for names in launcher.key if given.keys() >= {*names}), ())
        return Ranks(
            rank=number([launcher.rank], 0),
            size=size,
            key=" ".join(f"{name}={given[name]}" for name in key),
            hosts=number(launcher.hosts, 0)
            or ceil(size / max(1, number(launcher.local_size, size))),
            source=f"environment variables {launcher.rank} and {sizes[0]}",
            mpi=launcher.mpi,
        )
    return None


def _known_variables() -> str:
    return ", ".join(f"{launcher.rank} with {launcher.size[-1]}" for launcher in _LAUNCHERS)


def _known_keys() -> str:
    """The variables that may be the key, as text."""
    groups = dict.fromkeys(names for launcher in _LAUNCHERS for names in launcher.key)
    return " or ".join(" with ".join(names) for names in groups)


# The rank table.


class RankTable(NamedTuple):
    """What a rank table says.

    Attributes:
        ranks: The server of each rank, by rank.
        key: A digest of the content, however it is written.
    """

    ranks: tuple[str, ...]
    key: str


def _placed(path: str, rank: int | None, environment: Mapping[str, str]) -> Ranks:
    """The place in a table of the rank that is given, else of the launcher's."""
    table = read_rank_table(path)
    source, size, hosts = f"rank table {path}", len(table.ranks), len({*table.ranks})
    launched = from_launcher(environment) if rank is None or hosts > 1 else None
    if launched is not None:
        by = f"by the {launched.source}; expected the same"
        if launched.size != size:
            raise InvalidInputError(f"{source}: got {size} ranks, but {launched.size} {by}")
        if rank not in (None, launched.rank):
            raise InvalidInputError(f"{source}: got rank {rank}, but {launched.rank} {by}")
        rank = launched.rank
    elif rank is None:
        raise InvalidInputError(
            f"{source}: which of its ranks this process is: got no rank, and of no launcher both the rank "
            f"and the number of ranks: {_known_variables()}"
        )
    return Ranks(
        rank=rank,
        size=size,
        key=table.key,
        hosts=hosts,
        source=source,
        mpi=launched is not None and launched.mpi,
    )


def read_rank_table(path: str) -> RankTable:
    """Read and check HCCL's rank table.

    Raises:
        InvalidInputError: The file cannot be read, is not JSON, or is not such a table; names the field.
    """
    where = f"rank table {path}"
    content = read_small(where, path, _MAX_TABLE_BYTES)
    try:
        table = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise InvalidInputError(f"{where}: is not JSON: {exc}") from exc
    ranks = _servers_of_ranks(_Field(where, table))
    canonical = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return RankTable(ranks, f"rank-table-{sha256(canonical.encode()).hexdigest()[:32]}")


@dataclass(frozen=True, slots=True)
class _Field:
    """What a table, or a variable, says, and its place: ``rank table t.json: server_list[0].server_id``."""

    place: str
    value: Any

    def wrong(self, expected: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.place}: got {reprlib.repr(self.value)}, expected {expected}"
        )

    def __getitem__(self, name: str) -> "_Field":
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        place = f"{self.place}{'.' if self.place.endswith(']') else ': '}{name}"
        if name not in self.value:
            raise InvalidInputError(f"{place}: is missing; got {reprlib.repr(sorted(self.value))}")
        return _Field(place, self.value[name])

    def each(self) -> list["_Field"]:
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong("a list of objects")
        return [_Field(f"{self.place}[{i}]", value) for i, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong("a text")
        return self.value

    def number(self) -> int:
        if not isinstance(self.value, str) or not re.fullmatch("[0-9]{1,9}", self.value):
            raise self.wrong("a number, as text")
        return int(self.value)

    def add(self, value: Any, seen: set[Any], what: str) -> None:
        if value in seen:
            raise InvalidInputError(f"{self.place}: got {value!r} again, expected different {what}")
        seen.add(value)


def _servers_of_ranks(table: _Field) -> tuple[str, ...]:
    """The server of each rank, by rank."""
    for name, known in (("version", ("1.0", "1.2")), ("status", ("completed",))):
        if table[name].value not in known:
            raise table[name].wrong(" or ".join(map(repr, known)))
    places: dict[int, tuple[str, str]] = {}
    servers: set[str] = set()
    for server in table["server_list"].each():
        name = server["server_id"].text()
        server["server_id"].add(name, servers, "servers")
        devices: set[int] = set()
        for device in server["device"].each():
            device["device_id"].add(device["device_id"].number(), devices, "devices")
            field = device["rank_id"]
            rank = field.number()
            if rank in places:
                raise InvalidInputError(
                    f"{field.place}: got {rank}, which is {places[rank][1]} as well; expected different "
                    "ranks"
                )
            places[rank] = name, field.place.removeprefix(f"{table.place}: ")
    count = table.value.get("server_count")
    if count is not None and table["server_count"].number() != len(servers):
        raise table["server_count"].wrong(f"{len(servers)}, the length of server_list")
    if "super_pod_list" in table.value:  # of version 1.2
        for pod in table["super_pod_list"].each():
            pod["super_pod_id"].text()
            for server in pod["server_list"].each():
                if server["server_id"].text() not in servers:
                    raise server["server_id"].wrong(f"one of {sorted(servers)}")
    if {*places} != {*range(len(places))}:
        raise InvalidInputError(
            f"{table.place}: rank_id: got {reprlib.repr(sorted(places))}, expected 0 to {len(places) - 1}"
        )
    return tuple(places[rank][0] for rank in range(len(places)))
