"""Tests of mcinfer/engines/_mindspore_lite.py against a stand-in for the package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import Engine, RunCancelledError
from mcinfer.errors import BuildError, InvalidInputError, PredictError
from mcinfer.mslite import DataType, ModelType
from tests.engine_requests import engine_request
from tests.engine_tensors import Array, buffer, content, rows
from tests.mindspore_lite_stand_in import Model, given, installed


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed(monkeypatch):
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.mindir"
    path.write_bytes(b"model")
    return path


def open_lite(path: Path, device: str = "cpu:0", **options: Any) -> Engine:
    options = {"threads": 3, **options}
    return open_engine("mindspore_lite", engine_request(path, device, **options))


# The build.


@pytest.mark.parametrize(
    ("device", "options", "target", "part"),
    [
        ("cpu:1", {}, ["cpu"], {}),
        ("gpu:1", {}, ["gpu"], {"device_id": 1}),
        (
            "cuda:2",
            {"precision_mode": "preferred_fp16", "provider": "tensorrt"},
            ["gpu", "cpu"],
            {"device_id": 2, "precision_mode": "preferred_fp16", "provider": "tensorrt"},
        ),
        (
            "ascend:3",
            {"precision_mode": "enforce_fp16", "provider": "ge", "rank_id": "3"},
            ["ascend"],
            {"device_id": 3, "precision_mode": "enforce_fp16", "provider": "ge", "rank_id": 3},
        ),
    ],
)
def test_context_is_that_of_the_device(
    path: Path, device: str, options: dict[str, str], target: list[str], part: dict[str, Any]
) -> None:
    how = {"allow_fallback": "cpu" in target, "inter_op_threads": 2}
    engine = open_lite(path, device, provider_options=options, **how)
    context = Model.built[0].context
    assert context.target == target
    assert engine.providers == tuple(target)
    assert given(context.cpu) == {"thread_num": 3, "inter_op_parallel_num": 2}
    for name in ("gpu", "ascend"):
        assert given(getattr(context, name)) == (part if name == target[0] else {})


def test_rank_table_and_groups_reach_the_package(path: Path) -> None:
    open_lite(path, "ascend:1")
    table, groups = {"rank_table_file": "/table.json"}, {"group_info_file": "/groups.pb"}
    open_lite(path, "ascend:1", provider_options={"rank_id": "1", **table, **groups})
    alone, rank = Model.built
    assert (alone.config, alone.context.group_info_file) == ({}, "")
    assert (rank.config, rank.context.group_info_file) == ({"ascend_context": table}, "/groups.pb")
    assert given(rank.context.ascend) == {"device_id": 1, "rank_id": 1}


@pytest.mark.parametrize(
    ("device", "name", "key"),
    [
        ("cpu:0", "session_config", "speed"),
        ("cpu:0", "provider_options", "speed"),
        ("cpu:0", "provider_options", "precision_mode"),
        ("gpu:0", "provider_options", "rank_id"),
        ("ascend:0", "provider_options", "device_id"),
    ],
)
def test_option_that_would_do_nothing_is_a_build_error_that_names_it(
    path: Path, device: str, name: str, key: str
) -> None:
    with pytest.raises(BuildError, match=f"has no {name}.*, got the key '{key}'"):
        open_lite(path, device, **{name: {key: "9"}})


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("model.mindir", ModelType.MINDIR_LITE), ("model.ms", ModelType.MINDIR)],
)
def test_type_that_is_said_counts_more_than_the_name(
    tmp_path: Path, name: str, model_type: ModelType
) -> None:
    (tmp_path / name).write_bytes(b"model")
    open_lite(tmp_path / name, session_config={"model_type": model_type.name})
    open_lite(tmp_path / name)
    of_the_name = ModelType.MINDIR_LITE if name.endswith(".ms") else ModelType.MINDIR
    assert [made.model_type for made in Model.built] == [model_type, of_the_name]
    with pytest.raises(BuildError, match="model_type: got 'ONNX', expected one of"):
        open_lite(tmp_path / name, session_config={"model_type": "ONNX"})


def test_device_or_build_that_fails_is_a_build_error_in_its_own_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match=r"^engine mindspore_lite has no device npu:3, .*ascend:0"):
        open_lite(path, "npu:3")
    with pytest.raises(BuildError, match=r"^mindspore_lite: .*model_path does not exist!"):
        open_lite(path.parent / "nowhere.mindir")
    monkeypatch.setattr(Model, "broken", "build")
    with pytest.raises(BuildError, match=r"^mindspore_lite: build_from_file failed! Error is"):
        open_lite(path)


def test_element_type_that_there_is_not_is_a_build_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "inputs", [("x", DataType.UNKNOWN, [1])])
    with pytest.raises(BuildError, match=r"input 'x' is of type .*, expected one of"):
        open_lite(path)


# Runs.


def test_bound_output_is_written_in_place_and_the_other_is_produced(path: Path) -> None:
    x, y = rows(4), np.zeros((4, 3), np.float32)
    run = open_lite(path).bind([buffer("x", x)], [buffer("y", y)])
    for start in range(3):
        x[:] = rows(4, start)
        (where,) = run.execute()
        assert np.array_equal(y, 2 * x + 1)
        assert where.name == "where"
        assert np.array_equal(content(where), np.argwhere(x))


def test_model_is_resized_where_shapes_differ_and_what_it_produced_stays(path: Path) -> None:
    engine = open_lite(path)
    arrays = [rows(2), rows(2, 5), np.zeros((7, 3), np.float32)]
    produced = [engine.bind([buffer("x", x)], []).execute() for x in arrays]
    for x, (y, where) in zip(arrays, produced, strict=True):
        assert np.array_equal(content(y), 2 * x + 1)
        assert np.array_equal(content(where), np.argwhere(x))
    assert Model.built[0].resized == [[[2, 3]], [[7, 3]]]


@pytest.mark.parametrize(
    "x", [np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros((0, 3), np.float32)], ids=str
)
def test_input_that_does_not_fit_is_refused(path: Path, x: Array) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^mindspore_lite: input 'x' is .*float32\[\?, 3\]"
    ):
        open_lite(path).bind([buffer("x", x)], [])


def test_output_of_another_shape_is_produced_and_of_another_type_a_predict_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, wrong = rows(2), np.full((3, 3), 7, np.float32)
    engine = open_lite(path)
    produced = engine.bind([buffer("x", x)], [buffer("y", wrong)]).execute()
    assert np.array_equal(content(produced[0]), 2 * x + 1)
    assert (wrong == 7).all()
    monkeypatch.setattr(Model, "compute", staticmethod(lambda x: [x.astype(int), np.argwhere(x)]))
    with pytest.raises(PredictError, match="data type not equal"):
        engine.bind([buffer("x", x)], []).execute()


def test_failed_run_is_a_predict_error_and_the_next_one_is_right(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rows(2)
    run = open_lite(path).bind([buffer("x", x)], [])
    with monkeypatch.context() as patch:
        patch.setattr(Model, "broken", "predict")
        with pytest.raises(PredictError, match=r"^mindspore_lite: predict failed!"):
            run.execute()
    assert np.array_equal(content(run.execute()[0]), 2 * x + 1)


def test_cancelled_engine_runs_again_once_it_is_armed(path: Path) -> None:
    x = rows(2)
    engine = open_lite(path)
    run = engine.bind([buffer("x", x)], [])
    engine.arm()
    engine.cancel()
    with pytest.raises(RunCancelledError):
        run.execute()
    engine.arm()
    assert np.array_equal(content(run.execute()[0]), 2 * x + 1)
