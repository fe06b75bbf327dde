"""Tests of mcinfer/engines/_mindspore_lite.py against a stand-in for the package.

The stand-in has the documented calls alone, and checks the types of their arguments as documented; what
the adapter calls beyond that fails here. Whether the package does what its documentation says is not
tested.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.config import Device
from mcinfer.engines import open_engine
from mcinfer.engines.base import Buffer, Engine, EngineRequest, Produced, RunCancelledError, Strings
from mcinfer.errors import BuildError, InvalidInputError, PredictError
from mcinfer.specs import TensorSpec, numpy_dtype

ROOT = Path(__file__).parents[1]
ADAPTER = "mcinfer.engines._mindspore_lite"

Array = NDArray[Any]


# The stand-in.


class DataType(IntEnum):
    UNKNOWN = 0
    BOOL = 30
    INT8 = 32
    INT16 = 33
    INT32 = 34
    INT64 = 35
    UINT8 = 37
    UINT16 = 38
    UINT32 = 39
    UINT64 = 40
    FLOAT16 = 42
    FLOAT32 = 43
    FLOAT64 = 44
    INVALID = 2147483647


class ModelType(IntEnum):
    MINDIR = 0
    MINDIR_LITE = 4


def check_type(name: str, value: object, cls: type) -> None:
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be {cls}, but got {type(value)}.")


def check_size(name: str, value: object) -> None:
    check_type(name, value, int)
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} must be a non-negative int.")


class Sizes:
    """Part of a context: properties that are ints of 0 or more."""

    _PREFIX: str
    _NAMES: tuple[str, ...]

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "given":
            if name not in self._NAMES:
                raise AttributeError(name)
            check_size(f"{self._PREFIX}_{name}", value)
            self.given[name] = value
        object.__setattr__(self, name, value)


class Cpu(Sizes):
    _PREFIX = "cpu"
    _NAMES = ("thread_num", "inter_op_parallel_num")


class Gpu(Sizes):
    _PREFIX = "gpu"
    _NAMES = ("device_id",)


class Ascend(Sizes):
    _PREFIX = "ascend"
    _NAMES = ("device_id", "rank_id")


class Context:
    __slots__ = ("_target", "ascend", "cpu", "gpu")

    def __init__(self) -> None:
        self._target = ["cpu"]
        self.cpu, self.gpu, self.ascend = Cpu(), Gpu(), Ascend()

    @property
    def target(self) -> list[str]:
        return self._target

    @target.setter
    def target(self, target: list[str]) -> None:
        check_type("target", target, list)
        for element in target:
            check_type("target element", element, str)
            if element.lower() not in ("cpu", "gpu", "ascend"):
                raise ValueError(
                    f"target elements must be in ['cpu', 'gpu', 'ascend'], but got {element}."
                )
        self._target = target or ["cpu"]


class TensorMeta:
    __slots__ = ("_dtype", "_name", "_shape")

    def __init__(self, name: str, dtype: DataType, shape: list[int]) -> None:
        self._name, self._dtype, self._shape = name, dtype, shape

    @property
    def name(self) -> str:
        return self._name

    @property
    def dtype(self) -> DataType:
        return self._dtype

    @property
    def shape(self) -> list[int]:
        return self._shape


class Tensor(TensorMeta):
    __slots__ = ("_data",)

    def __init__(self, name: str, dtype: DataType, shape: list[int]) -> None:
        super().__init__(name, dtype, shape)
        self._data: Array | None = None

    def set_data_from_numpy(self, array: Array) -> None:
        check_type("numpy_obj", array, np.ndarray)
        if DataType[array.dtype.name.upper()] != self.dtype:
            raise RuntimeError(f"data type not equal! Numpy type: {array.dtype}")
        if array.size != np.prod(self.shape, dtype=np.int64):
            raise RuntimeError(f"data size not equal! Numpy size: {array.nbytes}")
        assert array.flags.c_contiguous
        self._data = array.reshape(self.shape)

    def get_data_to_numpy(self) -> Array:
        if any(size <= 0 for size in self.shape):
            return np.empty(0, self.dtype.name.lower())
        assert self._data is not None
        return self._data


Compute = Callable[..., list[Array]]


class Model:
    """y = 2x + 1 on float32[-1, 3] and the positions of what is not 0, unless a test says otherwise."""

    built: "list[Model]" = []
    inputs: list[tuple[str, DataType, list[int]]]
    outputs: list[tuple[str, DataType, list[int]]]
    compute: Compute
    broken = ""

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self._memory: list[Array] = []
        self.resized: list[list[list[int]]] = []

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = None,
        config_path: str = "",
        config_dict: dict[str, dict[str, str]] | None = None,
    ) -> None:
        check_type("model_path", model_path, str)
        check_type("model_type", model_type, ModelType)
        check_type("context", context, Context)
        assert config_path == ""
        assert config_dict is None
        if not Path(model_path).exists():
            raise RuntimeError("build_from_file failed, model_path does not exist!")
        if self.broken == "build":
            raise RuntimeError("build_from_file failed! Error is Common error code.")
        self.model_type, self.context = model_type, context
        self._tensors = [Tensor(*given) for given in self.inputs]
        Model.built.append(self)

    def get_inputs(self) -> list[Tensor]:
        assert self._tensors is not None
        return [Tensor(t.name, t.dtype, t.shape) for t in self._tensors]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(*given) for given in self.outputs)

    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None:
        check_type("inputs", inputs, list)
        check_type("dims", dims, list)
        for tensor, shape in zip(inputs, dims, strict=True):
            check_type("inputs element", tensor, Tensor)
            check_type("dims element", shape, list)
            for size in shape:
                check_type("dims element element", size, int)
                if size <= 0:
                    raise RuntimeError("resize failed! Error is Input shape is invalid.")
        self.resized.append(dims)
        self._tensors = [Tensor(t.name, t.dtype, [*d]) for t, d in zip(inputs, dims, strict=True)]

    def predict(self, inputs: list[Tensor], outputs: list[Tensor] | None = None) -> list[Tensor]:
        check_type("inputs", inputs, list)
        assert outputs is None
        if len(inputs) != len(self.inputs):
            raise RuntimeError(
                f"model input len:{len(self.inputs)} not equal input len:{len(inputs)}!"
            )
        if self.broken == "predict":
            raise RuntimeError("predict failed!")
        for memory in self._memory:  # the last run's, which this one may reuse
            memory[...] = 0
        arrays = type(self).compute(*(tensor.get_data_to_numpy() for tensor in inputs))
        self._memory = arrays
        tensors = []
        for array, (name, dtype, _) in zip(arrays, self.outputs, strict=True):
            tensor = Tensor(name, dtype, [*array.shape])
            if array.size:
                tensor.set_data_from_numpy(np.ascontiguousarray(array))
            tensors.append(tensor)
        return tensors


def affine(x: Array) -> list[Array]:
    return [2 * x + 1, np.argwhere(x)]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, where the adapter imports the package from; `Model` as its docstring says."""
    module = ModuleType("mindspore_lite")
    for value in (Context, DataType, Model, ModelType, Tensor):
        setattr(module, value.__name__, value)
    monkeypatch.setitem(sys.modules, "mindspore_lite", module)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    monkeypatch.setattr(Model, "inputs", [("x", DataType.FLOAT32, [-1, 3])], raising=False)
    outputs = [("y", DataType.FLOAT32, [-1, 3]), ("where", DataType.INT64, [-1, 2])]
    monkeypatch.setattr(Model, "outputs", outputs, raising=False)
    monkeypatch.setattr(Model, "compute", staticmethod(affine), raising=False)
    Model.built.clear()
    yield module
    # Another import is to meet what is really there.
    sys.modules.pop(ADAPTER, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.mindir"
    path.write_bytes(b"model")
    return path


def open_lite(path: Path, device: str = "cpu:0", **options: Any) -> Engine:
    given = {"threads": 3, **options}
    return open_engine(
        "mindspore_lite", EngineRequest(model=str(path), device=Device.parse(device), **given)
    )


def buffer(name: str, array: Array) -> Buffer:
    return Buffer(
        name=name,
        element_type=array.dtype.name,
        shape=array.shape,
        address=array.ctypes.data,
        size=array.nbytes,
    )


def content(item: Produced | Strings) -> Array:
    assert isinstance(item, Produced)
    raw = ctypes.string_at(item.address, item.size)
    return np.frombuffer(raw, numpy_dtype(item.element_type)).reshape(item.shape)


def rows(count: int, start: int = 0) -> NDArray[np.float32]:
    return np.arange(start, start + 3 * count, dtype=np.float32).reshape(count, 3)


# The build.


def test_engine_says_what_the_model_takes_and_gives(path: Path) -> None:
    engine = open_lite(path)
    float32 = np.dtype(np.float32)
    assert engine.spec.inputs == (TensorSpec(name="x", dtype=float32, shape=(None, 3)),)
    assert engine.spec.outputs == (
        TensorSpec(name="y", dtype=float32, shape=(None, 3)),
        TensorSpec(name="where", dtype=np.dtype(np.int64), shape=(None, 2)),
    )
    assert engine.providers == ("cpu",)
    assert not engine.concurrent


@pytest.mark.parametrize(
    ("device", "fallback", "target", "gpu", "ascend"),
    [
        ("cpu:1", True, ["cpu"], {}, {}),
        ("gpu:1", False, ["gpu"], {"device_id": 1}, {}),
        ("cuda:2", True, ["gpu", "cpu"], {"device_id": 2}, {}),
        ("ascend:3", False, ["ascend"], {}, {"device_id": 3}),
    ],
)
def test_context_is_that_of_the_device(
    path: Path,
    device: str,
    fallback: bool,
    target: list[str],
    gpu: dict[str, int],
    ascend: dict[str, int],
) -> None:
    engine = open_lite(path, device, allow_fallback=fallback, inter_op_threads=2)
    (model,) = Model.built
    assert model.context is not None
    assert model.context.target == target
    assert engine.providers == tuple(target)
    assert model.context.cpu.given == {"thread_num": 3, "inter_op_parallel_num": 2}
    assert model.context.gpu.given == gpu
    assert model.context.ascend.given == ascend


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("model.mindir", ModelType.MINDIR),
        ("model.ms", ModelType.MINDIR_LITE),
        ("model", ModelType.MINDIR),
    ],
)
def test_type_of_the_model_is_told_by_its_name(
    tmp_path: Path, name: str, model_type: ModelType
) -> None:
    (tmp_path / name).write_bytes(b"model")
    open_lite(tmp_path / name)
    assert Model.built[0].model_type is model_type


def test_device_that_it_does_not_have_is_a_build_error_that_names_it(path: Path) -> None:
    with pytest.raises(BuildError, match=r"^engine mindspore_lite has no device npu:3, .*ascend:0"):
        open_lite(path, "npu:3")


@pytest.mark.parametrize("name", ["session_config", "provider_options"])
def test_option_that_would_do_nothing_is_a_build_error_that_names_it(path: Path, name: str) -> None:
    with pytest.raises(BuildError, match=f"has no {name}, got the key 'speed'"):
        open_lite(path, "cpu:0", **{name: {"speed": "9"}})


def test_build_that_fails_is_a_build_error_in_its_own_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_model_is_resized_where_shapes_differ_and_only_there(path: Path) -> None:
    engine = open_lite(path)
    arrays = [rows(2), rows(2, 5), rows(7)]
    for x in arrays:
        run = engine.bind([buffer("x", x)], [])
        assert np.array_equal(content(run.execute()[0]), 2 * x + 1)
    assert Model.built[0].resized == [[[2, 3]], [[7, 3]]]


def test_what_was_produced_outlives_runs_of_other_layouts(path: Path) -> None:
    engine = open_lite(path)
    arrays = [rows(2), rows(3), rows(2, 9)]
    runs = [engine.bind([buffer("x", x)], []) for x in arrays]
    produced = [run.execute()[0] for run in runs]
    for x, item in zip(arrays, produced, strict=True):
        assert np.array_equal(content(item), 2 * x + 1)


def test_output_without_elements_keeps_its_shape(path: Path) -> None:
    x = np.zeros((2, 3), np.float32)
    where = open_lite(path).bind([buffer("x", x)], []).execute()[1]
    assert where.shape == (0, 2)


def test_scalars_are_tensors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "inputs", [("x", DataType.INT32, [])])
    monkeypatch.setattr(Model, "outputs", [("y", DataType.INT32, [])])
    monkeypatch.setattr(Model, "compute", staticmethod(lambda x: [np.array(-x)]))
    (y,) = open_lite(path).bind([buffer("x", np.array(3, np.int32))], []).execute()
    assert np.array_equal(content(y), np.array(-3))


@pytest.mark.parametrize(
    "x", [np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros((0, 3), np.float32)], ids=str
)
def test_input_that_does_not_fit_is_refused(path: Path, x: Array) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^mindspore_lite: input 'x' is .*float32\[\?, 3\]"
    ):
        open_lite(path).bind([buffer("x", x)], [])


def test_strings_are_refused(path: Path) -> None:
    with pytest.raises(InvalidInputError, match="string"):
        open_lite(path).bind([Strings(name="x", shape=(1, 3), values=("", "", ""))], [])


def test_output_of_another_shape_or_type_than_bound_is_a_predict_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, wrong = rows(2), np.full((3, 3), 7, np.float32)
    engine = open_lite(path)
    with pytest.raises(PredictError, match=r"\(2, 3\), expected \(3, 3\)"):
        engine.bind([buffer("x", x)], [buffer("y", wrong)]).execute()
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


# Without the package.

WITHOUT = """
import sys
sys.modules["mindspore_lite"] = None
from mcinfer.config import Device
from mcinfer.engines import open_engine
from mcinfer.engines.base import EngineRequest
from mcinfer.errors import MissingDependencyError
try:
    open_engine("mindspore_lite", EngineRequest(model="m", device=Device("cpu", 0), threads=1))
except MissingDependencyError as exc:
    print(exc)
"""


def test_without_the_package_the_error_says_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "engine mindspore_lite needs the package mindspore_lite" in run.stdout
