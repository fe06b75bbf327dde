"""Tests of mcinfer/mslite/model.py: models in this process, on ONNX Runtime."""

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import mcinfer
from mcinfer.engines._onnxruntime import OnnxRuntimeEngine
from mcinfer.engines.adapters import open_engine
from mcinfer.engines.base import Engine, EngineRequest
from mcinfer.mslite import (
    Context,
    DataType,
    Model,
    ModelGroup,
    ModelGroupFlag,
    ModelType,
    Tensor,
    TensorMeta,
    _loaded,
)
from tests.process.models import AFFINE, OnnxModel
from tests.sliced_models import save

HEAD = '<ir_version: 8, opset_import: ["": 17]>'

FIXED = f"{HEAD} fixed (float[2, 3] x) => (float[2, 3] y) {{ y = Neg(x) }}"

MIXED = f"""{HEAD}
mixed (float[2, 3] a, float[n, 3] b) => (float[2, 3] y, float[n, 3] z) {{ y = Neg(a) z = Neg(b) }}
"""
"""One input of fixed sizes, one whose rows are open."""

MATMUL = f"""{HEAD}
matmul (float[2, 3] x) => (float[2, 1] y) <float[3, 1] w = {{1, 2, 3}}> {{ y = MatMul(x, w) }}
"""

WEIGHED = "(float[n, 2] x) => (float[n, 2] y) { y = Add(x, w) }"
WEIGHTS = {"w": np.array([10, 20], np.float32)}


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def built(path: Path, context: Context | None = None, **more: Any) -> Model:
    model = Model()
    model.build_from_file(str(path), ModelType.ONNX, context, **more)
    return model


def arrays(tensors: list[Tensor]) -> list[list[Any]]:
    return [tensor.get_data_to_numpy().tolist() for tensor in tensors]


def floats(*shape: int) -> NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


ABSENT = "/nowhere/model.onnx"
ONNX = ModelType.ONNX
BUILD = "build_from_file failed"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 0, 1), "model_path must be str, but got <class 'int'>."),
        ((ABSENT, 0, 1, 1), "model_type must be ModelType, but got <class 'int'>."),
        ((ABSENT, ONNX, "cpu", 1), "context must be Context, but got <class 'str'>."),
        ((ABSENT, ONNX, None, None), "config_path must be str, but got <class 'NoneType'>."),
        ((ABSENT, ONNX, None, ABSENT, 1), f"{BUILD}, model_path does not exist!"),
        (("here", ONNX, None, ABSENT, 1), f"{BUILD}, config_path does not exist!"),
        (("here", ONNX, None, "broken", {1: 1}), f"{BUILD}! Error is config_path: "),
        (("here", ONNX, None, "", [], 1), "config_dict must be dict, but got <class 'list'>."),
        (("here", ONNX, None, "", {}, None, 1), "dec_mode must be str, but got <class 'int'>."),
        (("here", ONNX, None, "", {}, None, "", "1"), "dec_num_parallel must be int, but got"),
        (("here", ONNX, None, "", {"a": {"x": 1}}), "config_dict_value_value must be str, but got"),
        (("here", ONNX, None, "", {}, "key"), "dec_key must be bytes, but got <class 'str'>."),
        (("here", ONNX, None, "", {}, b"key"), f"{BUILD}! Error is dec_key: "),
    ],
)
def test_arguments_of_a_build_are_checked_in_upstreams_order(
    onnx_model: OnnxModel, tmp_path: Path, arguments: tuple[Any, ...], text: str
) -> None:
    (tmp_path / "broken").write_text("no section\n", encoding="utf-8")
    paths = {"here": str(onnx_model(AFFINE)), "broken": str(tmp_path / "broken")}
    given: list[Any] = [paths.get(v, v) if isinstance(v, str) else v for v in arguments]
    error = TypeError if "must be" in text else RuntimeError
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        Model().build_from_file(*given)


ARRAY = np.ones((1, 4), np.float32)


def test_resize_refuses_other_inputs_and_another_number_of_shapes(onnx_model: OnnxModel) -> None:
    model = built(onnx_model(AFFINE))
    with pytest.raises(ValueError, match=r"^inputs' size does not match dims' size: got 1 and 0$"):
        model.resize(model.get_inputs(), [])
    other = model.get_inputs()[0]
    stranger = Tensor(ARRAY)
    stranger.name = "z"
    with pytest.raises(
        RuntimeError, match=rf"inputs: unknown 'z', expected some of \['{other.name}'\]"
    ):
        model.resize([stranger], [[1, 4]])


def test_build_that_fails_can_be_followed_by_one_that_succeeds_and_by_no_other(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    broken, path = tmp_path / "broken.onnx", onnx_model(AFFINE)
    broken.write_bytes(b"nothing of the kind")
    model = Model()
    with pytest.raises(mcinfer.BuildError, match=r"^build_from_file failed! Error is .*: got text"):
        model.build_from_file(str(broken), ModelType.MINDIR)
    model.build_from_file(str(path), ModelType.MINDIR)  # the ending counts
    text = "build_from_file failed! Error is the model was built already; make a new Model"
    with pytest.raises(RuntimeError, match=exactly(text)):
        model.build_from_file(str(path), ModelType.ONNX)
    with pytest.raises(RuntimeError, match=r"^build_from_buffer failed! Error is .*built already"):
        model.build_from_buffer(path.read_bytes())
    assert arrays(model.predict([floats(1, 4)])) == [[[3, 5, 7, 9]]]


@pytest.mark.parametrize(
    ("name", "what", "arguments"),
    [
        ("get_inputs", "get_inputs", ()),
        ("get_outputs", "get_outputs", ()),
        ("predict", "predict", ([],)),
        ("resize", "resize", ([], [])),
        ("update_weights", "update weight", ([[Tensor(ARRAY)]],)),
    ],
)
def test_model_that_is_not_built_does_nothing(
    name: str, what: str, arguments: tuple[Any, ...]
) -> None:
    text = f"{what} failed! Error is Session is null, please build model first!"
    with pytest.raises(mcinfer.ClosedError, match=exactly(text)):
        getattr(Model(), name)(*arguments)


def test_buffer_is_built_and_runs_and_leaves_no_descriptor(onnx_model: OnnxModel) -> None:
    before = len(os.listdir("/proc/self/fd"))
    content = onnx_model(AFFINE.replace("batch, 4", "batch, n")).read_bytes()
    held = sys.getrefcount(content)
    model = Model()
    model.build_from_buffer(content)
    assert sys.getrefcount(content) == held  # no resize can need it
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(model) == "model_path: buffer."
    for shape in ([1, 4], [2, 3]):
        model.resize(model.get_inputs(), [shape])
        assert arrays(model.predict([floats(*shape)])) == [(2 * floats(*shape) + 1).tolist()]


def test_buffer_finds_its_weights_in_another_one_or_in_the_folder_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "model.onnx", WEIGHED, WEIGHTS, external=True)
    content, weights = path.read_bytes(), (tmp_path / "model.data").read_bytes()
    monkeypatch.chdir(tmp_path)
    folders = [{"model_file": {"mindir_path": str(p)}} for p in (path, tmp_path, path.name)]
    for own, entries in ((weights, None), *((None, folder) for folder in folders)):
        model = Model()
        model.build_from_buffer(content, own, config_dict=entries)
        assert arrays(model.predict([floats(1, 2)])) == [[[11, 22]]]
    elsewhere = {"model_file": {"mindir_path": "/"}}
    nowhere = {"model_file": {"mindir_path": "no/model.onnx"}}
    with pytest.raises(RuntimeError, match=r"Error is .*mindir_path: .* does not exist"):
        Model().build_from_buffer(content, config_dict=nowhere)
    inside = onnx.load(path).SerializeToString()
    for model_bytes, own, kind, entries in (
        (content, None, None, None),
        (content, None, None, elsewhere),
        # Weights for what has none elsewhere.
        (inside, weights, None, None),
        (b"garbage", weights, ModelType.ONNX, None),
        (b"\x0a\x05", weights, ModelType.MINDIR, None),
    ):
        with pytest.raises(mcinfer.McinferError, match=r"^build_from_buffer failed! "):
            Model().build_from_buffer(model_bytes, own, kind, config_dict=entries)


def test_model_says_what_it_takes_and_gives_at_the_sizes_as_they_are(onnx_model: OnnxModel) -> None:
    model = built(onnx_model(MIXED))
    first, second = model.get_inputs(), model.get_inputs()
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert [(t.name, t.dtype, t.shape) for t in first] == [
        ("a", DataType.FLOAT32, [2, 3]),
        ("b", DataType.FLOAT32, [-1, 3]),
    ]
    assert model.get_model_info("input_shape") == "a:2,3;b:-1,3"
    assert model.get_model_info("dynamic_dims") == "b:-1,3"
    outputs = model.get_outputs()
    assert isinstance(outputs[1], TensorMeta)
    assert [(m.name, m.dtype, m.shape) for m in outputs][1] == ("z", DataType.FLOAT32, [-1, 3])
    model.resize(first[1:], [[5, 3]])
    assert [meta.shape for meta in model.get_outputs()] == [[2, 3], [5, 3]]
    assert model.get_model_info("input_shape") == "a:2,3;b:5,3"
    assert model.get_model_info("dynamic_dims") == ""


def test_inputs_of_all_kinds_are_run_and_those_that_do_not_fit_are_named(
    onnx_model: OnnxModel,
) -> None:
    model, data = built(onnx_model(AFFINE)), floats(2, 4)
    [own] = model.get_inputs()
    own.set_data_from_numpy(data)
    strided = np.repeat(data, 2, axis=1)[:, ::2]
    for inputs in ([own], (Tensor(data),), [data.astype(">f4")], [strided]):
        [output] = model.predict(inputs)
        assert (output.name, output.dtype, output.shape) == ("y", DataType.FLOAT32, [2, 4])
        np.testing.assert_array_equal(output.get_data_to_numpy(), data * 2 + 1)
    model.resize([own], [[3, 4]])  # an open size is only noted
    own.set_data_from_numpy(floats(12))  # flat, as programs do
    assert arrays(model.predict([own])) == [(floats(3, 4) * 2 + 1).tolist()]
    assert arrays(model.predict([data])) == [(data * 2 + 1).tolist()]
    for bad in (data.astype(np.float64), floats(2, 5), floats(8)):
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is input 'x' has ") as e:
            model.predict([bad])
        assert isinstance(e.value, mcinfer.InvalidInputError)
    with pytest.raises(RuntimeError, match=exactly("model input len:1 not equal input len:2!")):
        model.predict([data, data])


def test_tensor_that_was_neither_set_nor_looked_at_fails_the_run(onnx_model: OnnxModel) -> None:
    model = built(onnx_model(FIXED))
    text = "predict failed! Error is input 'x' has no data, set it first"
    with pytest.raises(RuntimeError, match=exactly(text)) as caught:
        model.predict(model.get_inputs())
    assert isinstance(caught.value, mcinfer.InvalidInputError)
    [tensor] = model.get_inputs()
    tensor.get_data_to_numpy()[...] = 3
    assert arrays(model.predict([tensor])) == [[[-3] * 3] * 2]
    tensor.shape = [3, 3]
    with pytest.raises(RuntimeError, match=exactly(text)):
        model.predict([tensor])


def test_outputs_that_do_not_fit_fail_the_run_and_are_not_touched(onnx_model: OnnxModel) -> None:
    model = built(onnx_model(AFFINE))
    read_only = np.full((2, 4), -1, np.float32)
    read_only.flags.writeable = False
    for places in (
        [np.full((2, 4), -1, np.float32)] * 2,
        [np.full((2, 4), -1, np.float64)],
        [np.full((4, 2), -1, np.float32)],
        [np.full(8, -1, np.float32)],
        [read_only],
    ):
        with pytest.raises(RuntimeError, match=r"^predict failed! Error is output"):
            model.predict([floats(2, 4)], [Tensor(place) for place in places])
        assert all((place == -1).all() for place in places)
    # The run fails in its middle, or its result does not fit the second of two.
    late = f"""{HEAD}
    late (float[2] x, int64[r] to) => (float[2] first, float[a, b] second) {{
        first = Neg(x)
        second = Reshape(first, to)
    }}
    """
    model = built(onnx_model(late))
    first, second = np.full(2, 7, np.float32), np.full((2, 1), 7, np.float32)
    given = [Tensor(first), Tensor(second)]
    for bad, error in (([3, 1], mcinfer.PredictError), ([1, 2], mcinfer.InvalidInputError)):
        with pytest.raises(error, match=r"^predict failed! "):
            model.predict([floats(2), np.array(bad)], given)
        assert (first.tolist(), second.tolist()) == ([7, 7], [[7], [7]])
    model.predict([floats(2), np.array([2, 1])], given)
    assert (first.tolist(), second.tolist()) == ([-1, -2], [[-1], [-2]])


def test_fixed_sizes_are_built_again_wherever_the_model_and_its_weights_lie(
    tmp_path: Path,
) -> None:
    fixed = WEIGHED.replace("[n, 2]", "[1, 2]")
    path = save(tmp_path / "model.onnx", fixed, WEIGHTS, external=True)
    from_buffer = Model()
    weights = (tmp_path / "model.data").read_bytes()
    from_buffer.build_from_buffer(path.read_bytes(), weights)
    for model in (built(path), from_buffer):
        for rows in (2, 1):
            model.resize(model.get_inputs(), [[rows, 2]])
            assert model.get_inputs()[0].shape == model.get_outputs()[0].shape == [rows, 2]
            assert arrays(model.predict([floats(rows, 2)])) == [[[11, 22], [13, 24]][:rows]]
            assert model.get_model_info("input_shape") == f"x:{rows},2"


def test_open_sizes_stay_open_where_fixed_ones_are_built_again(onnx_model: OnnxModel) -> None:
    model = built(onnx_model(MIXED))
    fixed, free = model.get_inputs()
    model.resize([free], [[6, 3]])
    model.resize([fixed], [[4, 3]])
    for rows in (6, 5, 1):
        assert [t.shape for t in model.predict([floats(4, 3), floats(rows, 3)])] == [
            [4, 3],
            [rows, 3],
        ]
    with pytest.raises(RuntimeError, match=r"^predict failed! "):
        model.predict([floats(2, 3), floats(1, 3)])


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (FIXED, [0, 3]),
        (FIXED, [6]),
        (AFFINE, [0, 4]),
        (MATMUL, [2, 4]),
    ],
)
def test_resize_that_fails_leaves_the_model_as_it_was(
    onnx_model: OnnxModel, text: str, shape: list[int]
) -> None:
    model = built(onnx_model(text))
    [tensor] = model.get_inputs()
    before = [*tensor.shape]
    works = floats(*(size if size > 0 else 2 for size in before))
    expected = arrays(model.predict([works]))
    with pytest.raises(RuntimeError, match=r"^resize failed! Error is "):
        model.resize([tensor], [shape])
    assert tensor.shape == before
    assert model.get_inputs()[0] is tensor
    assert arrays(model.predict([works])) == expected


def test_core_list_binds_the_callers_thread_during_a_run_and_not_after(
    onnx_model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores, bound = os.sched_getaffinity(0), []
    context = Context()
    context.cpu.thread_num = 1
    context.cpu.thread_affinity_core_list = [max(cores)]
    model = built(onnx_model(AFFINE), context)

    plain = OnnxRuntimeEngine.compute

    def look_and_run(*arguments: Any) -> Any:
        bound.append(os.sched_getaffinity(0))
        return plain(*arguments)

    monkeypatch.setattr(OnnxRuntimeEngine, "compute", look_and_run)
    model.predict([floats(1, 4)])
    assert bound == [{max(cores)}]
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("target", [["gpu"], ["cpu", "Ascend"]])
def test_device_that_is_not_here_is_replaced_by_the_cpu_with_one_warning_at_the_callers_line(
    onnx_model: OnnxModel, monkeypatch: pytest.MonkeyPatch, target: list[str]
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    context, path = Context(), onnx_model(FIXED)
    context.target = target
    text = rf"^target {target[-1].lower()} cannot be used here \(device .*\): the model runs on the cpu$"
    with pytest.warns(UserWarning, match=text) as caught:
        model = built(path, context)
    assert len(caught) == 1
    assert arrays(model.predict([floats(2, 3)])) == [[[-1, -2, -3], [-4, -5, -6]]]
    assert caught[0].filename == __file__
    model.resize(model.get_inputs(), [[1, 3]])  # without another warning
    assert model.predict([floats(1, 3)])[0].shape == [1, 3]


FAILED = "ModelGroup's add model failed. Error is "
WRONG_KIND = f"{FAILED}SHARE_WORKSPACE takes paths; SHARE_WEIGHT and SHARE_WEIGHT_WORKSPACE take"


def test_models_that_cannot_be_grouped_are_refused_and_none_beside_them_is_added(
    onnx_model: OnnxModel,
) -> None:
    fresh, used, other = Model(), built(onnx_model(AFFINE)), Model()
    ModelGroup(ModelGroupFlag.SHARE_WEIGHT).add_model((other,))
    cases: list[tuple[int, Any, type[Exception], str]] = [
        (2, "a.onnx", TypeError, "models must be list/tuple, but got <class 'str'>."),
        (2, [], RuntimeError, "models cannot be empty"),
        (2, [fresh, "a.onnx"], TypeError, "models element must be all str or Model, but got"),
        (1, ["a.onnx"], RuntimeError, WRONG_KIND),
        (2, [fresh], RuntimeError, WRONG_KIND),
        (1, [fresh, used], RuntimeError, FAILED),
        (1, [fresh, other], RuntimeError, FAILED),
    ]
    for flags, models, error, text in cases:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            ModelGroup(ModelGroupFlag(flags)).add_model(models)
    ModelGroup(ModelGroupFlag.SHARE_WEIGHT).add_model([fresh])


def test_models_of_a_group_map_one_prepared_copy_of_their_weights(tmp_path: Path) -> None:
    text = "(float[n, 2048] x) => (float[n, 2048] y) { y = MatMul(x, w) }"  # 16 MiB
    path = save(tmp_path / "large.onnx", text, {"w": (2048, 2048)})
    models = [Model(), Model()]
    ModelGroup(ModelGroupFlag.SHARE_WEIGHT).add_model(models)
    for model in models:
        model.build_from_file(str(path), ModelType.ONNX)
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split()[4:] for line in maps if os.environ["MCINFER_CACHE"] in line]
    assert len(files) >= 2
    assert len({inode for inode, *_ in files}) == 1
    first, second = (arrays(model.predict([floats(1, 2048)])) for model in models)
    assert first == second


def test_models_of_a_groups_paths_share_the_workspace_and_no_others_do(
    onnx_model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[bool] = []

    def opened(name: str, request: EngineRequest, **options: Any) -> Engine:
        shared.append("session.use_env_allocators" in request.options.session_config)
        return open_engine(name, request, **options)

    monkeypatch.setattr(_loaded, "open_engine", opened)
    inside, outside, late = onnx_model(FIXED), onnx_model(FIXED), onnx_model(FIXED)
    monkeypatch.chdir(inside.parent)
    group = ModelGroup()
    group.add_model((inside.name, str(late)))
    group.cal_max_size_of_workspace(ModelType.ONNX)
    model = built(inside)
    model.resize(model.get_inputs(), [[1, 3]])  # loads it again
    built(outside)
    assert shared == [True, True, False]
    del group, model
    gc.collect()
    built(late)
    assert shared[3:] == [False]
