"""Tests of mcinfer/ranks/collectives/launch.py: rank and size from rank tables and launchers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcinfer.errors import InvalidInputError
from mcinfer.ranks.collectives.launch import find_ranks, from_launcher, read_rank_table

Fields = dict[str, Any]
Written = Callable[[object], str]


def device(rank: int, index: int | None = None, **more: str) -> Fields:
    return {"device_id": str(rank if index is None else index), "rank_id": str(rank), **more}


def table(*servers: list[Fields], **more: Any) -> Fields:
    """A rank table with these devices of its servers."""
    listed = [
        {"server_id": f"10.0.0.{i}", "device": devices, "host_nic_ip": "reserve"}
        for i, devices in enumerate(servers)
    ]
    return {
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": listed,
        "status": "completed",
        **more,
    }


def superpod(*servers: list[Fields]) -> Fields:
    """The same of version 1.2, as in HCCL's documentation."""
    made = table(*servers, version="1.2")
    for server in made["server_list"]:
        for entry in server["device"]:
            entry |= {"super_device_id": entry["device_id"], "device_ip": "192.168.1.6"}
    pods = [{"server_id": server["server_id"]} for server in made["server_list"]]
    return {**made, "super_pod_list": [{"super_pod_id": "0", "server_list": pods}]}


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write a table (or a text) to a file: its path."""

    def write(content: object) -> str:
        path = tmp_path / "table.json"
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# Launchers.

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-11718@1",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "1",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environment", "place", "key"),
    [
        (OPEN_MPI, (1, 4, 1, True), "PMIX_NAMESPACE=prterun-host-11718@1"),
        (OPEN_MPI | SLURM | TORCHRUN, (1, 4, 1, True), "PMIX_NAMESPACE=prterun-host-11718@1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 4, 2, True), None),
        (SLURM | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "n"}, (2, 4, 1, True), "PMIX_NAMESPACE=n"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_JOBID": "j"}, (0, 2, 1, True), "PMI_JOBID=j"),
        (
            SLURM | {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"},
            (0, 2, 2, True),
            "SLURM_JOB_ID=77 SLURM_STEP_ID=0",
        ),
        (SLURM, (3, 4, 1, False), "SLURM_JOB_ID=77 SLURM_STEP_ID=0"),
        (SLURM | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4, 1, False), None),
        (TORCHRUN, (2, 4, 1, False), "MASTER_ADDR=localhost MASTER_PORT=29500"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, (2, 4, 4, False), None),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "r"},
            (0, 1, 1, False),
            "TORCHELASTIC_RUN_ID=r",
        ),
    ],
)
def test_launchers_variables_are_read(
    environment: dict[str, str], place: tuple[int, int, int, bool], key: str | None
) -> None:
    found = find_ranks(environment=environment)
    assert (found.rank, found.size, found.hosts, found.mpi) == place
    assert key in (None, found.key)
    assert found == from_launcher(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "", "WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": ""},
        {"RANK": "1"},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "n"},
        # A Slurm batch script has the variables of its first task.
        {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"},
    ],
)
def test_process_that_no_launcher_made_a_rank_has_no_place(environment: dict[str, str]) -> None:
    assert from_launcher(environment) is None
    with pytest.raises(InvalidInputError, match="which rank this process is: "):
        find_ranks(environment=environment)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"}, "variable OMPI_COMM_WORLD_RANK: got 'one'"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"},
            "^environment variables OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE: got rank 4, "
            "expected 0 to 3: there are 4 ranks",
        ),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "got 0 ranks, expected 1 to 1024"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "^environment variables PMI_RANK and PMI_SIZE: got none that all ranks of the job share; "
            "expected PMIX_NAMESPACE or .*PMI_JOBID or ",
        ),
    ],
)
def test_wrong_variables_are_named(environment: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        find_ranks(environment=environment)


# Rank tables.


@pytest.mark.parametrize("form", [table, superpod])
def test_table_says_which_ranks_there_are(written: Written, form: Callable[..., Fields]) -> None:
    path = written(form([device(0), device(1)]))
    found = [find_ranks(rank=rank, rank_table=path, environment={}) for rank in range(2)]
    assert [(ranks.rank, ranks.size, ranks.hosts) for ranks in found] == [(0, 2, 1), (1, 2, 1)]
    assert found[0].key == found[1].key
    assert found[0].source == f"rank table {path}"


def test_key_is_that_of_the_content_however_it_is_written(tmp_path: Path) -> None:
    made = table([device(0), device(1)])
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    paths[0].write_text(json.dumps(made))
    paths[1].write_text("\ufeff" + json.dumps(dict(reversed(made.items())), indent=2), "utf-8")
    paths[2].write_text(json.dumps(table([device(0), device(1, 5)])))
    first, same, other = (read_rank_table(str(path)).key for path in paths)
    assert first == same != other


def test_ranks_may_be_listed_in_any_order(written: Written) -> None:
    path = written(table([device(2, 0), device(0, 1)], [device(1, 0)]))
    assert read_rank_table(path).ranks == ("10.0.0.0", "10.0.0.1", "10.0.0.0")


def test_rank_in_a_table_comes_from_the_launcher_if_it_is_not_given(written: Written) -> None:
    path = written(table([device(rank) for rank in range(4)]))
    found = find_ranks(rank_table=path, environment=OPEN_MPI)
    assert (found.rank, found.size, found.key) == (1, 4, read_rank_table(path).key)
    with pytest.raises(
        InvalidInputError, match=f"^rank table {path}: got 4 ranks, but 2 by the env"
    ):
        find_ranks(rank_table=path, environment=OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(InvalidInputError, match=f"^rank table {path}: which of its ranks this"):
        find_ranks(rank_table=path, environment={})


def test_ranks_on_several_hosts_need_mpi(written: Written) -> None:
    path = written(table([device(0), device(1)], [device(2), device(3)]))
    by_hand = find_ranks(rank=1, rank_table=path, environment={})
    assert by_hand.hosts == 2
    with pytest.raises(
        InvalidInputError,
        match=f"^rank table {path}: the 4 ranks are on 2 hosts, expected 1, or a start by mpirun",
    ):
        by_hand.backend  # noqa: B018
    assert find_ranks(rank=1, rank_table=path, environment=OPEN_MPI).backend == "mpi"
    with pytest.raises(InvalidInputError, match="got rank 2, but 1 by the environment variables"):
        find_ranks(rank=2, rank_table=path, environment=OPEN_MPI)


def without(made: Fields, *path: Any) -> Fields:
    """The table without the field at this path."""
    at: Any = made
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    return made


TWO = (device(0), device(1))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is not JSON: "),
        ("{}", r"version: is missing; got \[\]"),
        ([], "expected an object"),
        (table([*TWO], version="2.0"), "version: got '2.0', expected '1.0' or '1.2'"),
        (table([*TWO], status="initializing"), "status: got 'initializing', expected 'completed'"),
        (without(table([*TWO]), "status"), "status: is missing"),
        (table(), r"server_list: got \[\], expected a list of objects"),
        (table([*TWO], server_count="2"), "server_count: got '2', expected 1, the length of serv"),
        (table([{"rank_id": "0"}]), r"server_list\[0\]\.device\[0\]\.device_id: is missing"),
        (table([{"device_id": "0"}]), r"server_list\[0\]\.device\[0\]\.rank_id: is missing"),
        (
            table([device(0)], [device(0, 1)]),
            r"server_list\[1\]\.device\[0\]\.rank_id: got 0, which is server_list\[0\]\.device\[0\]"
            r"\.rank_id as well; expected different ranks",
        ),
        (table([device(0), device(2)]), r"rank_id: got \[0, 2\], expected 0 to 1"),
        (table([device(i) for i in range(1025)]), "got 1025 ranks, expected 1 to 1024"),
        (
            superpod([*TWO])
            | {"super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "b"}]}]},
            r"super_pod_list\[0\]\.server_list\[0\]\.server_id: got 'b', expected one of \['10",
        ),
    ],
)
def test_table_that_is_none_is_refused(written: Written, content: object, text: str) -> None:
    path = written(content)
    with pytest.raises(InvalidInputError, match=f"^rank table {path}: .*{text}"):
        find_ranks(rank=0, rank_table=path, environment={})


def test_file_that_cannot_be_a_table_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with open(large, "wb") as file:
        file.truncate((1 << 20) + 1)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, text in (
        (large, "got 1048577 bytes, expected at most 1048576"),
        (pipe, "got a pipe, expected a regular file"),
        (tmp_path, "got a folder, expected a regular file"),
        (tmp_path / "none.json", "No such file"),
        (binary, "is not JSON"),
    ):
        with pytest.raises(InvalidInputError, match=f"^rank table {path}: .*{text}"):
            read_rank_table(str(path))
