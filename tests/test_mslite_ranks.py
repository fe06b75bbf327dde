"""Tests of mcinfer/mslite/_ranks.py: from a context and a configuration to a place among ranks."""

import gc
import json
import os
from collections.abc import Callable
from copy import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from mcinfer.errors import CollectiveTimeoutError, InvalidInputError
from mcinfer.mslite import Model, ModelType
from mcinfer.mslite._checks import Sections, failure
from mcinfer.mslite._ranks import Membership, is_slice, place_of
from mcinfer.mslite.context import Context
from mcinfer.ranks.collectives.launch import Ranks
from tests.test_ranks_collectives_launch import device, table

LAUNCHED = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "job",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process in which no model has joined."""
    monkeypatch.setattr(Membership, "_process", None)


RankTable = Callable[[int], Sections]


def write_table(folder: Path, size: int) -> Path:
    """Write a rank table of so many ranks on this machine, which is the folder's own."""
    made = table([device(rank) for rank in range(size)])
    made["server_list"][0]["server_id"] = f"{os.getpid()} {folder}"
    path = folder / f"table{size}.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


@pytest.fixture
def rank_table(tmp_path: Path) -> RankTable:
    """A configuration that names a rank table of so many ranks."""
    return lambda size: {"ascend_context": {"rank_table_file": str(write_table(tmp_path, size))}}


def context_of(target: str, rank: int = 0) -> Context:
    context = Context()
    context.target = [target]
    context.ascend.rank_id = rank
    return context


def ranks_of(sections: Sections, rank: int = 0, target: str = "ascend") -> Ranks:
    found = place_of(context_of(target, rank), sections)
    assert found is not None
    return found


@pytest.mark.parametrize("target", ["Ascend", "cpu"])
def test_rank_table_makes_a_process_a_rank(target: str, rank_table: RankTable) -> None:
    ranks = ranks_of(rank_table(2), 1, target=target)
    assert (ranks.rank, ranks.size, ranks.backend) == (1, 2, "shm")
    with pytest.raises(InvalidInputError, match="got rank 2, expected 0 to 1"):
        place_of(context_of(target, 2), rank_table(2))
    elsewhere = {"ascend": rank_table(2)["ascend_context"], "ascend_context": {}}
    assert place_of(context_of(target), elsewhere) is None


def test_launcher_makes_a_process_a_rank_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, rank_table: RankTable
) -> None:
    assert place_of(context_of("gpu"), {}) is None
    for name, text in LAUNCHED.items():
        monkeypatch.setenv(name, text)
    ranks = ranks_of(rank_table(4), target="gpu")
    assert (ranks.rank, ranks.size, ranks.key) == (1, 2, "PMIX_NAMESPACE=job")
    for target in ("cpu", "ascend"):
        assert place_of(context_of(target, 1), {}) is None
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert place_of(context_of("gpu"), {}) is None


# Slices.

WHOLE = """
<ir_version: 8, opset_import: ["": 17]>
whole (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }
"""
TENSOR = """
<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
part (float[1, 4] x) => (float[1, 4] y) { y = com.microsoft.AllReduce(x) }
"""
TENSORRT = """
<ir_version: 8, opset_import: ["": 17, "trt": 1]>
part (float[1, 4] x) => (float[1, 4] y) { y = trt.DistCollective(x) }
"""
STAGE = """
<ir_version: 8, opset_import: ["": 17], metadata_props: ["mcinfer.slice": "{}"]>
part (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }
"""


def test_slice_says_so_or_has_a_collective_node(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for text, expected in ((WHOLE, False), (TENSOR, True), (TENSORRT, True), (STAGE, True)):
        onnx.save(parser.parse_model(text), path)
        assert is_slice(str(path)) is expected


# Membership.


@pytest.mark.usefixtures("own_process")
def test_process_has_one_place_for_all_its_models(rank_table: RankTable) -> None:
    alone = ranks_of(rank_table(1))
    first, second = Membership(alone), Membership(alone)
    third = Membership(ranks_of(rank_table(2), 1))
    with first.group() as one, second.group() as two:
        assert first.group() is one is not two
        with pytest.raises(InvalidInputError, match="got rank 1 of 2, expected rank 0 of 1 by the"):
            third.group()
    third.close()


@pytest.mark.usefixtures("own_process")
def test_rank_that_does_not_come_is_named_within_the_time_of_hccls_variable(
    rank_table: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1")
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1.* 2") as raised:
        Membership(ranks_of(rank_table(3))).group()
    both = failure("build_from_file", raised.value)
    assert isinstance(both, CollectiveTimeoutError)
    assert isinstance(both, RuntimeError)
    both.add_note("as a program adds it")
    again = copy(both)  # as to another process
    assert type(again) is type(both)
    assert (str(again), again.__notes__) == (str(both), both.__notes__)


# Models.


def build(folder: Path, sections: Sections) -> Model:
    path = folder / "matmul0.mindir"
    onnx.save(parser.parse_model(WHOLE), path)
    model = Model()
    context = context_of("Ascend")
    model.build_from_file(str(path), ModelType.MINDIR, context, "", sections)
    return model


@pytest.mark.usefixtures("own_process")
def test_job_of_one_rank_runs_the_model_which_leaves_its_group_with_its_last_user(
    rank_table: RankTable, tmp_path: Path
) -> None:
    def run() -> tuple[Model, object]:
        # The device is missing: the CPU serves, with the one warning that says so.
        with pytest.warns(UserWarning, match=r"^target ascend cannot be used here") as warned:
            model = build(tmp_path, rank_table(1))
        assert len(warned) == 1
        [output] = model.predict([np.array([[-1, 0, 1, 2]], np.float32)])
        return model, output.get_data_to_numpy().tolist()

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    assert run()[1] == [[0, 0, 1, 2]]  # what is opened once for all is open now
    before = descriptors()
    model, _ = run()
    assert descriptors() > before
    del model
    assert descriptors() == before


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("entry", ["shareable_weight_pid_list", "shareable_weight_mem_handle"])
def test_what_a_slice_cannot_do_is_refused_before_the_others_are_waited_for(
    rank_table: RankTable, tmp_path: Path, entry: str
) -> None:
    sections = rank_table(2)
    sections["ascend_context"][entry] = "1"
    text = "weights are shared between processes of whole"
    with pytest.raises(RuntimeError, match=f"build_from_file failed! Error is {text}"):
        build(tmp_path, sections)
