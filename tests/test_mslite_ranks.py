"""Tests of mcinfer/mslite/_ranks.py: from a context and a configuration to a place among ranks."""

import gc
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)
from onnx import parser

from mcinfer.errors import CollectiveTimeoutError, InvalidInputError
from mcinfer.mslite import Model, ModelType
from mcinfer.mslite._checks import Sections, failure
from mcinfer.mslite._ranks import Membership, check_groups, is_slice, place_of, read_groups
from mcinfer.mslite.context import Context

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


@pytest.fixture
def rank_table(tmp_path: Path) -> RankTable:
    """Write a rank table of so many ranks: a configuration that names it."""

    def write(size: int) -> Sections:
        devices = [{"device_id": str(rank), "rank_id": str(rank)} for rank in range(size)]
        table = {
            "version": "1.0",
            "server_list": [{"server_id": f"{os.getpid()} {tmp_path}", "device": devices}],
            "status": "completed",
        }
        path = tmp_path / f"table{size}.json"
        path.write_text(json.dumps(table))
        return {"ascend_context": {"rank_table_file": str(path)}}

    return write


def context_of(target: str, rank: int = 0, groups: str = "") -> Context:
    context = Context()
    context.target = [target]
    context.ascend.rank_id = rank
    context.group_info_file = groups
    return context


@pytest.mark.parametrize("target", ["Ascend", "cpu"])
def test_rank_table_makes_a_process_a_rank(target: str, rank_table: RankTable) -> None:
    ranks = place_of(context_of(target, 1), rank_table(2))
    assert ranks is not None
    assert (ranks.rank, ranks.size, ranks.backend) == (1, 2, "shm")
    with pytest.raises(InvalidInputError, match="got rank 2, expected 0 to 1"):
        place_of(context_of(target, 2), rank_table(2))


def test_launcher_makes_a_process_a_rank_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, rank_table: RankTable
) -> None:
    assert place_of(context_of("gpu"), {}) is None
    for name, text in LAUNCHED.items():
        monkeypatch.setenv(name, text)
    ranks = place_of(context_of("gpu"), rank_table(4))
    assert ranks is not None
    assert (ranks.rank, ranks.size, ranks.key) == (1, 2, "PMIX_NAMESPACE=job")
    assert place_of(context_of("cpu"), {}) is None
    assert place_of(context_of("ascend", 1), {}) is None
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert place_of(context_of("gpu"), {}) is None


def test_entry_in_another_section_is_not_a_rank_table(rank_table: RankTable) -> None:
    entries = rank_table(2)["ascend_context"]
    assert place_of(context_of("ascend"), {"ascend": entries, "ascend_context": {}}) is None


# Groups of ranks, in bytes as protobuf's own writer makes them.

PACKED = b"\x0a\x0d\x0a\x07hccl_01\x12\x02\x08\x00"  # a group of rank 0
TWO_GROUPS = (
    b"\x0a\x0f\x0a\x07hccl_01\x12\x04\x08\x00\x08\x01"  # ranks 0, 1, one field each
    b"\x0a\x0c\x0a\x04rest\x12\x04\x0a\x02\x03\x02"  # ranks 3, 2, packed
)


@pytest.mark.parametrize(
    ("content", "groups"),
    [
        (PACKED, {"hccl_01": (0,)}),
        (TWO_GROUPS, {"hccl_01": (0, 1), "rest": (3, 2)}),
        (b"\x0a\x0b\x0a\x03far\x12\x04\x08\x80\x80\x04", {"far": (65536,)}),
    ],
)
def test_groups_are_read(
    tmp_path: Path, content: bytes, groups: dict[str, tuple[int, ...]]
) -> None:
    path = tmp_path / "groups.pb"
    path.write_bytes(content)
    assert read_groups(str(path)) == groups


def test_groups_are_those_that_protobuf_itself_reads(tmp_path: Path) -> None:
    file = descriptor_pb2.FileDescriptorProto(
        name="groups.proto", package="straspb", syntax="proto2"
    )
    fields = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *described: tuple[str, int, int, int, str | None]) -> None:
        made = file.message_type.add(name=name)
        for field, number, kind, label, type_name in described:
            made.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)

    one, many = fields.LABEL_OPTIONAL, fields.LABEL_REPEATED
    message("Ranks", ("dim", 1, fields.TYPE_UINT32, many, None))
    message(
        "Item",
        ("group_name", 1, fields.TYPE_STRING, one, None),
        ("parallel_group_ranks", 2, fields.TYPE_MESSAGE, one, ".straspb.Ranks"),
    )
    message("Map", ("parallel_group_item", 1, fields.TYPE_MESSAGE, many, ".straspb.Item"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("straspb.Map"))()
    expected = {"hccl_world_group": (0, 1, 2, 3), "4-8877": (200, 300), "größe": (1,)}
    for name, ranks in expected.items():
        item = made.parallel_group_item.add(group_name=name)
        item.parallel_group_ranks.dim.extend(ranks)
    path = tmp_path / "groups.pb"
    path.write_bytes(made.SerializeToString())
    assert read_groups(str(path)) == expected


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "got no group"),
        (b"{}", "got .* at byte 0, expected a map of groups to ranks"),
        (TWO_GROUPS[:-1], "got a field of 12 bytes where 11 are left"),
        (b"\x0a\x04\x12\x02\x08\x00", "got the name '' of a group, missing or"),
        (PACKED + PACKED, "got the name 'hccl_01' of a group, missing or not the only one"),
        (b"\x0a\x04\x0a\x02\xff\xfe", "got a name that is not UTF-8"),
        (b"\0" * ((1 << 20) + 1), "got 1048577 bytes, expected at most 1048576"),
    ],
)
def test_file_that_is_no_map_of_groups_is_refused(
    tmp_path: Path, content: bytes, text: str
) -> None:
    path = tmp_path / "groups.pb"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"^group_info_file {path}: {text}"):
        read_groups(str(path))


def test_groups_of_other_ranks_than_those_of_the_table_are_refused(
    tmp_path: Path, rank_table: RankTable
) -> None:
    path = tmp_path / "groups.pb"
    path.write_bytes(TWO_GROUPS)
    assert place_of(context_of("ascend", 0, str(path)), rank_table(4)) is not None
    ranks = place_of(context_of("ascend"), rank_table(2))
    assert ranks is not None
    with pytest.raises(
        InvalidInputError,
        match=r"group 'rest': got the ranks \[3, 2\], expected different ones of 0 to 1, as by the rank t",
    ):
        check_groups(str(path), ranks)
    path.write_bytes(b"\x0a\x0c\x0a\x04rest\x12\x04\x08\x01\x08\x01")
    with pytest.raises(InvalidInputError, match=r"got the ranks \[1, 1\]"):
        check_groups(str(path), ranks)
    with pytest.raises(InvalidInputError, match=r"^group_info_file /no: .*No such file"):
        place_of(context_of("ascend", 0, "/no"), rank_table(2))


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
    alone = place_of(context_of("ascend"), rank_table(1))
    other = place_of(context_of("ascend", 1), rank_table(2))
    assert alone is not None
    assert other is not None
    first, second, third = Membership(alone), Membership(alone), Membership(other)
    with first.group() as one, second.group() as two:
        assert first.group() is one is not two
        with pytest.raises(
            InvalidInputError, match=r"got rank 1 of 2, expected rank 0 of 1 by the r"
        ):
            third.group()
    third.close()


@pytest.mark.usefixtures("own_process")
def test_rank_that_does_not_come_is_named_within_the_time_of_hccls_variable(
    rank_table: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1")
    ranks = place_of(context_of("ascend"), rank_table(3))
    assert ranks is not None
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1.* 2") as raised:
        Membership(ranks).group()
    both = failure("build_from_file", raised.value)
    assert isinstance(both, CollectiveTimeoutError)
    assert isinstance(both, RuntimeError)


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("text", ["soon", "0", "-1", "1.5", "9" * 40])
def test_time_that_is_none_is_refused(
    rank_table: RankTable, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", text)
    ranks = place_of(context_of("ascend"), rank_table(1))
    assert ranks is not None
    with pytest.raises(
        InvalidInputError, match=f"HCCL_CONNECT_TIMEOUT: got '{text}', expected a n"
    ):
        Membership(ranks).group()


@pytest.mark.usefixtures("own_process")
def test_time_of_one_operation_is_that_of_hccls_variable(
    rank_table: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "7")
    ranks = place_of(context_of("ascend"), rank_table(1))
    assert ranks is not None
    with Membership(ranks).group() as group:
        assert group.timeout == 7.0


# Models.


def built(path: Path, sections: Sections, groups: str = "") -> Model:
    """A model whose device is missing: the CPU serves, with the one warning that says so."""
    onnx.save(parser.parse_model(WHOLE), path)
    model = Model()
    with pytest.warns(UserWarning, match=r"^target ascend cannot be used here") as warned:
        model.build_from_file(
            str(path), ModelType.MINDIR, context_of("Ascend", 0, groups), "", sections
        )
    assert len(warned) == 1
    return model


@pytest.mark.usefixtures("own_process")
def test_job_of_one_rank_runs_the_model(rank_table: RankTable, tmp_path: Path) -> None:
    model = built(tmp_path / "matmul0.mindir", rank_table(1))
    [output] = model.predict([np.array([[-1, 0, 1, 2]], np.float32)])
    assert output.get_data_to_numpy().tolist() == [[0, 0, 1, 2]]


@pytest.mark.usefixtures("own_process")
def test_model_leaves_its_group_with_its_last_user(rank_table: RankTable, tmp_path: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    build = partial(built, tmp_path / "matmul0.mindir", rank_table(1))
    build().predict([np.ones((1, 4), np.float32)])  # what is opened once for all
    before = descriptors()
    model = build()
    model.predict([np.ones((1, 4), np.float32)])
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
    path = tmp_path / "matmul0.mindir"
    onnx.save(parser.parse_model(WHOLE), path)
    with pytest.raises(RuntimeError, match=f"build_from_file failed! Error is {text}"):
        Model().build_from_file(str(path), ModelType.MINDIR, context_of("Ascend"), "", sections)


def test_wrong_groups_fail_the_build(rank_table: RankTable, tmp_path: Path) -> None:
    groups = tmp_path / "groups.pb"
    groups.write_bytes(TWO_GROUPS)
    path = tmp_path / "matmul0.mindir"
    onnx.save(parser.parse_model(WHOLE), path)
    context = context_of("Ascend", 0, str(groups))
    with pytest.raises(RuntimeError, match=r"group_info_file .* group 'rest': got the ranks"):
        Model().build_from_file(str(path), ModelType.MINDIR, context, "", rank_table(2))
