"""Tests of mcinfer/serve/configuration.py: what a model's configuration says, and what refuses the model."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mcinfer.serve
from mcinfer import EngineOptions, InvalidInputError, Limits, PredictError, Timeouts
from mcinfer.machine import whole_cpus
from mcinfer.serve.configuration import Configuration, Reshape
from mcinfer.serve.messages import message
from mcinfer.specs import TensorSpec

X = TensorSpec(name="x", dtype=np.dtype(np.float32), shape=("batch", 4))
IDS = TensorSpec(name="ids", dtype=np.dtype(np.int64), shape=("batch", "length"))
TEXT = TensorSpec(name="text", dtype=np.dtype(object), shape=("batch", 1))


def read(folder: Path, text: str) -> Configuration:
    (folder / "config.pbtxt").write_text(text)
    return Configuration(folder, "m")


def options_of(text: str) -> dict[str, Any]:
    before = {"limits": Limits(memory_bytes=1 << 20), "timeouts": Timeouts(start=5)}
    return Configuration(Path("unused"), "m", text).options(before)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"max_batch_size": 8}, {}),
        (
            {"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 500}},
            {"max_batch_size": 8, "max_delay": 0.0005},
        ),
        (
            {"dynamic_batching": {"max_queue_delay_microseconds": 1 << 62}},
            {"max_delay": Timeouts(start=5).predict},
        ),
        ({"backend": "openvino"}, {"engine": "openvino"}),
        (
            {
                "platform": "onnxruntime_onnx",
                "instance_group": [{"count": 2, "kind": "KIND_CPU"}, {}],
            },
            {"engine": "onnxruntime", "devices": ["cpu:0", "cpu:1", "cpu:2"]},
        ),
        (
            {"instance_group": [{"count": 2, "gpus": [0, 3]}, {"kind": "KIND_GPU"}]},
            {"devices": ["cuda:0", "cuda:0", "cuda:3", "cuda:3", "cuda:0"]},
        ),
        (
            {
                "dynamic_batching": {
                    "default_queue_policy": {
                        "max_queue_size": 3,
                        "default_timeout_microseconds": 2000000,
                    }
                }
            },
            {
                "limits": Limits(memory_bytes=1 << 20, queue=3),
                "timeouts": Timeouts(start=5, predict=2.0),
            },
        ),
        (
            {
                "optimization": {"graph": {"level": -1}},
                "parameters": {
                    "intra_op_thread_count": {"string_value": "3"},
                    "inter_op_thread_count": {"string_value": "2"},
                },
            },
            {
                "options": EngineOptions(
                    threads=3, session_options={"graph_optimization_level": "ORT_ENABLE_BASIC"}
                )
            },
        ),
        (
            {"parameters": {"execution_mode": {"string_value": "1"}}},
            {"options": EngineOptions(inter_op_threads=whole_cpus())},
        ),
    ],
)
def test_configuration_gives_options_of_the_master(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert options_of(json.dumps(config)) == {"max_batch_size": 1, "max_delay": 0.0} | expected


def test_options_of_the_command_line_stay_beside_those_of_the_configuration(tmp_path: Path) -> None:
    said = read(tmp_path, 'model_operations { op_library_filename: ["own.so", "/a/b.so"] }')
    before = EngineOptions(threads=2, custom_operators=["first.so"])
    own = ["first.so", str(tmp_path / "own.so"), "/a/b.so"]
    options = said.options({"options": before})["options"]
    assert options == EngineOptions(threads=2, custom_operators=own)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"backend": "tensorflow"}, "backend: got 'tensorflow', expected one of"),
        ({"instance_group": [{"kind": "KIND_MODEL"}]}, "got count 1 of KIND_MODEL"),
        ({"instance_group": [{"kind": 99}]}, "got count 1 of 99"),
        ({"instance_group": [{"count": -1}]}, "got count -1"),
        ({"max_batch_size": "many"}, "it is no model configuration"),
        ({"sequence_batching": {"direct": {}}}, "sequence_batching: .* docs/howto/fastapi.md"),
        ({"ensemble_scheduling": {"step": [{}]}}, "ensemble_scheduling: .* docs/howto/fastapi.md"),
        ({"model_transaction_policy": {"decoupled": True}}, "one answer"),
        ({"optimization": {"graph": {"level": 5}}}, "got 5, expected one of"),
        ({"parameters": {"execution_mode": {"string_value": "2"}}}, "got '2', expected .* 0 to 1"),
        ({"parameters": {"intra_op_thread_count": {"string_value": "-1"}}}, "got '-1'"),
        ({"model_operations": {"op_library_filename": ["x.so"]}}, "expected it in config.pbtxt"),
        ({"model_warmup": [{"batch_size": 1}]}, "expected it in config.pbtxt"),
        ({"name": "another"}, "name: got 'another', expected 'm'"),
        ({"name": "m" * (1 << 18)}, "characters, the limit"),
    ],
)
def test_configuration_that_cannot_be_followed_is_refused(config: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        options_of(json.dumps(config))


# As others write them; the comments say where files with these fields are.

PUBLIC = {
    "a model without a name, sizes that are free in the configuration alone": (
        # https://github.com/omarabid59/yolov8-triton, models/yolov8_onnx
        """platform: "onnxruntime_onnx"
        max_batch_size: 0
        output [
        { name: "x" data_type: TYPE_FP32 dims: [-1, -1] }
        ]""",
        [],
    ),
    "lists in messages, with a colon and without": (
        # https://github.com/kyle-paul/triton, model_repository/densenet_onnx
        """backend: "onnxruntime"
        dynamic_batching { }
        input [
          { name: "x" format: FORMAT_NCHW dims: [ 4 ] reshape { shape: [ 1, 4 ] } }
        ]
        output [ { name: "x" dims: [ 4 ] reshape { shape: [ 1, 4 ] } label_filename: "a.txt" } ]
        instance_group [ { kind: KIND_CPU } ]
        optimization { execution_accelerators {
            gpu_execution_accelerator: [
              { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } }
            ]
        } }""",
        ["input.format", "output.label_filename", "optimization.execution_accelerators"],
    ),
    "colons after a space": (
        # https://github.com/triton-inference-server/tutorials,
        # Conceptual_Guide/Part_4-inference_acceleration/sample_configs/ORT_openvino_config.pbtxt
        """backend: "onnxruntime"
        max_batch_size : 16
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
        optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "openvino" } ] } }
        """,
        ["optimization.execution_accelerators"],
    ),
    "sizes of batches that it prefers": (
        # https://github.com/danieljdevine/model-serving-triton, model_repository/resnet50
        """name: "m"
        platform: "onnxruntime_onnx"
        max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
        instance_group [ { count: 1 kind: KIND_GPU } ]
        dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 } """,
        ["dynamic_batching.preferred_batch_size"],
    ),
    "warm-ups in a list without a colon": (
        # https://github.com/triton-inference-server/server, qa/L0_warmup/failing_infer
        """name: "m"
        backend: "onnxruntime"
        instance_group [ { kind: KIND_CPU, } ]
        model_warmup [{
            name : "warmup sample"
            batch_size: 1
            inputs { key: "x" value: { data_type: TYPE_FP32 dims: [ 1, 4 ] zero_data: true } }
        }]""",
        [],
    ),
}


@pytest.mark.parametrize(("config", "passed_over"), PUBLIC.values(), ids=PUBLIC.keys())
def test_configuration_of_others_is_read_as_it_is(
    tmp_path: Path, config: str, passed_over: list[str]
) -> None:
    said = read(tmp_path, config)
    assert said.passed_over == passed_over
    assert said.options({})["engine"] == "onnxruntime"
    said.seen("input", [X])


def test_steps_of_an_ensemble_refuse_it_by_name(tmp_path: Path) -> None:
    # https://github.com/thelimar/mlops_course_tensorrt_conversion_deploy, model_repository/ensemble
    config = """
        platform: "ensemble"
        ensemble_scheduling {
          step [
            { model_name: "tokenizer" model_version: -1 input_map { key: "T" value: "T" } },
            { model_name: "model" model_version: -1 output_map { key: "P" value: "P" } }
          ]
        }"""
    with pytest.raises(InvalidInputError, match=r"^ensemble_scheduling: "):
        read(tmp_path, config)


def test_field_that_nothing_knows_is_passed_over_and_named(tmp_path: Path) -> None:
    said = read(tmp_path, "optimization { enable_pinned_input: true } max_batch_size: 8")
    assert "has no field named" in said.passed_over[0]
    assert "enable_pinned_input" in said.passed_over[0]
    assert said.rows == 8
    said = Configuration(tmp_path, "m", '{"sidecar": 1, "parameters": {"own": {}}}')
    assert said.passed_over[0] == "parameters.own"
    assert "sidecar" in said.passed_over[1]


def test_pipe_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.pbtxt")
    with pytest.raises(InvalidInputError, match="is no file"):
        Configuration(tmp_path, "m")


def test_each_field_of_a_configuration_is_in_the_table() -> None:
    page = Path(mcinfer.serve.__file__).parents[2] / "docs" / "serving.md"
    table = page.read_text().partition("| field |")[2].partition("\n\n")[0]
    fields = message("ModelConfig").DESCRIPTOR.fields
    assert [each.name for each in fields if f"`{each.name}`" not in table] == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [10]),
        ("latest { }", [10]),
        ("latest { num_versions: 2 }", [9, 10]),
        ("latest { num_versions: 9 }", [2, 9, 10]),
        ("all { }", [2, 9, 10]),
        ("specific { versions: 9 versions: [2, 9] }", [2, 9]),
    ],
)
def test_policy_says_which_versions_are_served(
    tmp_path: Path, policy: str, expected: list[int]
) -> None:
    said = read(tmp_path, f"version_policy {{ {policy} }}" if policy else "")
    assert said.versions([10, 2, 9]) == expected


def test_version_that_is_not_there_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = read(tmp_path, "version_policy { specific { versions: [1, 3] } }")
    with caplog.at_level(logging.WARNING):
        assert said.versions([1, 2]) == [1]
    assert "not there: [3]" in caplog.text
    with pytest.raises(InvalidInputError, match=r"got the versions \[2\], expected \[1, 3\]"):
        said.versions([2])
    with pytest.raises(InvalidInputError, match="expected one or more"):
        read(tmp_path, "").versions([])


# Tensors.


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('input { name: "z" }', "input 'z': got a name that the model does not have"),
        ('input { name: "x" data_type: TYPE_INT8 }', "got TYPE_INT8, expected TYPE_FP32"),
        ('input { name: "x" dims: [ -1, 5 ] }', r"got \[-1, 5\] .*, and the model has \[-1, 4\]"),
        ('input { name: "x" dims: [ 4 ] }', r"got \[4\]"),
        ('max_batch_size: 8 input { name: "x" dims: [ 1, 4 ] }', r"got \[-1, 1, 4\]"),
        ('input { name: "x" optional: true }', "got optional, expected false"),
        (
            'input { name: "x" dims: [ 3 ] reshape { shape: [ 1, 4 ] } }',
            "expected the same number of elements",
        ),
    ],
)
def test_tensor_that_the_model_does_not_have_refuses_it(
    tmp_path: Path, config: str, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        read(tmp_path, config).seen("input", [X])


@pytest.mark.parametrize(
    "config",
    [
        "",
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }',
        'max_batch_size: 8 input { name: "x" dims: 4 }',
        'input { name: "x" dims: [ 2, -1 ] } input { name: "spare" optional: true }',
    ],
)
def test_tensor_of_the_model_is_taken(tmp_path: Path, config: str) -> None:
    assert read(tmp_path, config).seen("input", [X]) == ((X,), {})


def test_free_sizes_of_a_reshape_are_those_of_the_request() -> None:
    reshape = Reshape((-1, 1, -1, 4), (-1, -1, 2, 2))
    assert reshape.to_model((3, 1, 7, 4)) == (3, 7, 2, 2)
    assert reshape.to_clients("y", np.zeros((3, 7, 2, 2))).shape == (3, 1, 7, 4)
    with pytest.raises(PredictError, match="output 'y'"):
        reshape.to_clients("y", np.zeros((3, 7, 2, 1)))


def test_inputs_of_warm_ups(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "row").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    said = read(
        tmp_path,
        """max_batch_size: 8
        model_warmup [
            { name: "a" batch_size: 2 count: 3
              inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "row" } }
              inputs { key: "ids" value { data_type: TYPE_INT64 dims: [ 5 ] random_data: true } }
              inputs { key: "text" value { data_type: TYPE_STRING dims: [ 1 ] random_data: true } } },
            { name: "b" batch_size: 1
              inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
              inputs { key: "ids" value { data_type: TYPE_INT64 dims: [ 2 ] zero_data: true } } },
            { name: "without rows" }
        ]""",
    )
    (times, first), (once, second) = said.warm_ups([X, IDS, TEXT])
    assert (times, once) == (3, 1)
    np.testing.assert_array_equal(first["x"], [np.arange(4), np.arange(4)])
    assert (first["ids"].shape, first["ids"].dtype.name) == ((2, 5), "int64")
    assert {*first["ids"].ravel()} == {0, 1}
    assert first["text"].tolist() == [[""], [""]]
    assert (second["x"].shape, second["x"].dtype.name) == ((1, 4), "float32")
    assert len({*second["x"].ravel()}) == 4
    assert second["ids"].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("data_type: TYPE_FP32 dims: [ -1 ] zero_data: true", "expected sizes"),
        ("data_type: TYPE_INT64 dims: [ 4 ] zero_data: true", "got datatype 'INT64'"),
        ("data_type: TYPE_FP32 dims: [ 5 ] zero_data: true", "got shape"),
        ('data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "../row"', "expected a name"),
        ('data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "short"', "got 3 bytes"),
    ],
)
def test_warm_up_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, value: str, text: str
) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"123")
    inputs = f'inputs {{ key: "x" value {{ {value} }} }}'
    said = read(tmp_path, f"max_batch_size: 8 model_warmup {{ batch_size: 1 {inputs} }}")
    with pytest.raises(InvalidInputError, match=text):
        [*said.warm_ups([X])]
