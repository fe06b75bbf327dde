"""Weights through mcinfer.mslite: replaced while models serve, and shared with other processes."""

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.mslite import (
    Context,
    DataType,
    Model,
    ModelParallelRunner,
    ModelType,
    RunnerConfig,
    Tensor,
)
from mcinfer.mslite._checks import Sections
from tests.process.models import OnnxModel
from tests.process.scripts import Program
from tests.test_preparation import write

HEAD = '<ir_version: 8, opset_import: ["": 17]>'

PAIR = f"""{HEAD}
pair (float[n, 2] x) => (float[n, 2] y, float[n, 2] z)
<float[2] a = {{1, 2}}, float[2] b = {{10, 20}}> {{
    y = Add(x, a)
    z = Add(x, b)
}}
"""

Serving = Model | ModelParallelRunner


def model(path: Path, sections: Sections) -> Model:
    made = Model()
    made.build_from_file(str(path), ModelType.ONNX, None, "", sections)
    return made


@contextmanager
def serving(kind: str, path: Path, sections: Sections) -> Iterator[Serving]:
    if kind == "model":
        yield model(path, sections)
        return
    context = Context()
    context.parallel.workers_num = 2
    with ModelParallelRunner() as runner:
        runner.init(str(path), RunnerConfig(context, config_info=sections))
        yield runner


both = pytest.mark.parametrize("kind", ["model", "runner"])


def named(folder: Path, *names: str) -> Sections:
    """A configuration whose file of replaceable weights holds these lines."""
    path = folder / "names of weights.txt"
    path.write_text("\n".join(names), encoding="utf-8")
    return {"ascend_context": {"variable_weights_file": f' "{path}" '}}


def tensor(values: Sequence[float], name: str = "", dtype: Any = np.float32) -> Tensor:
    made = Tensor(np.array(values, dtype))
    made.name = name
    return made


def answers(serves: Serving) -> list[list[float]]:
    """Both outputs for zeros: the weights themselves."""
    outputs = serves.predict([np.zeros((1, 2), np.float32)])
    return [output.get_data_to_numpy()[0].tolist() for output in outputs]


@both
def test_weights_are_replaced_by_name_and_by_position(
    onnx_model: OnnxModel, tmp_path: Path, kind: str
) -> None:
    sections = named(tmp_path, "", " b ", "a", "")
    with serving(kind, onnx_model(PAIR), sections) as serves:
        assert answers(serves) == [[1, 2], [10, 20]]
        serves.update_weights([[tensor([3, 4], "a")], [tensor([5, 6], "b")]])
        assert answers(serves) == [[3, 4], [5, 6]]
        serves.update_weights([[tensor([7, 8]), tensor([9, 0])]])  # in the file's order
        assert answers(serves) == [[9, 0], [7, 8]]
        values = np.array([1, 1], np.float32)
        serves.update_weights([[Tensor(values), tensor([2, 2], "a")], []])
        values[:] = 0  # it was copied
        assert answers(serves) == [[2, 2], [1, 1]]


def test_weights_that_do_not_fit_are_named_and_nothing_is_changed(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    cases: list[tuple[list[list[Tensor]], list[str]]] = [
        ([[tensor([1, 2])] * 3], ["got 3 tensors, expected 2"]),
        ([[tensor([1, 2], "a"), tensor([1, 2], "c")]], ["['a', 'c']", "expected each of"]),
        ([[tensor([1, 2], "a"), tensor([1, 2], "a")]], ["['a', 'a']", "expected each of"]),
        ([[tensor([3, 4]), tensor([1, 2], "", np.float64)]], ["'b'", "float64", "float32"]),
        ([[tensor([1, 2, 3]), tensor([3, 4])]], ["'a'", "[3]", "float32[2]"]),
        ([[tensor([3, 4]), Tensor(None, [2], DataType.FLOAT32)]], ["has no data"]),
    ]
    serves = model(onnx_model(PAIR), named(tmp_path, "a", "b"))
    for weights, words in cases:
        with pytest.raises(RuntimeError, match=r"^update weight failed! Error is ") as caught:
            serves.update_weights(weights)
        assert isinstance(caught.value, InvalidInputError)
        for word in words:
            assert word in str(caught.value)
        assert answers(serves) == [[1, 2], [10, 20]]


def test_file_of_names_that_does_not_fit_fails_the_build(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    absent = {"ascend_context": {"variable_weights_file": str(tmp_path / "none.txt")}}
    cases: list[tuple[list[str] | None, str]] = [
        (["c"], "'c'"),
        (["a", "a"], "2 names, 1 different ones"),
        (["", " "], "0 names"),
        (None, r"variable_weights_file: .*none\.txt"),
    ]
    for names, words in cases:
        sections = absent if names is None else named(tmp_path, *names)
        with pytest.raises(RuntimeError, match=f"^build_from_file failed! Error is .*{words}"):
            model(onnx_model(PAIR), sections)


def test_replaced_weights_stay_where_resize_builds_the_model_again(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    serves = model(onnx_model(PAIR.replace("[n, 2]", "[1, 2]")), named(tmp_path, "a", "b"))
    serves.update_weights([[tensor([3, 4]), tensor([5, 6])]])
    serves.resize(serves.get_inputs(), [[3, 2]])
    y, z = (item.get_data_to_numpy() for item in serves.predict([np.zeros((3, 2), np.float32)]))
    assert (y.tolist(), z.tolist()) == ([[3, 4]] * 3, [[5, 6]] * 3)
    serves.update_weights([[tensor([7, 8]), tensor([9, 0])]])
    serves.resize(serves.get_inputs(), [[1, 2]])
    assert answers(serves) == [[7, 8], [9, 0]]


def test_runs_beside_updates_see_one_version_and_their_own_inputs(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    over = threading.Event()
    seen: set[float] = set()
    serves = model(onnx_model(PAIR), named(tmp_path, "a", "b"))

    def ask(thread: int) -> None:
        before, count = 0.0, 0
        while not over.is_set():
            count += 1
            x = np.full((1 + count % 7, 2), 1000 * thread, np.float32)
            into = [Tensor(np.empty_like(x)) for _ in range(2)] if count % 3 == 0 else None
            y, z = (output.get_data_to_numpy() - x for output in serves.predict([x], into))
            version = float(y[0, 0])
            assert (y == version).all()
            assert (z == version).all()
            assert version >= before
            before = version
            seen.add(version)

    def update(version: int) -> None:
        serves.update_weights([[tensor([version] * 2), tensor([version] * 2)]])

    update(0)
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, thread) for thread in range(3)]
        try:
            for version in itertools.count(1):
                update(version)
                if len(seen) >= 30 or any(done.done() for done in asking):
                    break
        finally:
            over.set()
        for done in asking:
            done.result()
    assert len(seen) >= 30
    assert answers(serves) == [[version] * 2] * 2


WIDTH = 64
SLAVE = """
import sys
from pathlib import Path
import numpy as np
from mcinfer.errors import WeightAccessError
from mcinfer.mslite import Model, ModelType
from tests.process.waiting import wait_until

folder, path = Path(sys.argv[1]), sys.argv[2]
model = Model()
print(model.get_model_info("current_pid"), flush=True)
given = folder / "handle"
wait_until(given.exists, 60.0)
sections = {"ascend_context": {"shareable_weight_mem_handle": given.read_text()}}
try:
    model.build_from_file(path, ModelType.ONNX, None, "", sections)
except RuntimeError as exc:
    print("refused", isinstance(exc, WeightAccessError), exc)
else:
    [y] = model.predict([np.ones((1, 64), np.float32)])
    mapped = "/weights.bin" in Path("/proc/self/maps").read_text()
    print("shared", mapped, y.get_data_to_numpy().tobytes().hex())
"""


def square(path: Path, seed: int = 0) -> Path:
    """A model of one matrix, large enough to lie in the prepared model's file of weights."""
    weight = np.random.default_rng(seed).random((WIDTH, WIDTH), np.float32)
    graph = f"g (float[batch, {WIDTH}] x) => (float[batch, {WIDTH}] y) {{ y = MatMul(x, w) }}"
    return Path(write(path, (graph, {"w": weight})))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return square(tmp_path / "square.onnx")


def owner(path: Path, pids: str) -> Model:
    return model(path, {"ascend_context": {"shareable_weight_pid_list": pids}})


def handle_of(owns: Model) -> str:
    return owns.get_model_info("shareable_weight_mem_handle")


def slave(path: Path, handle: str, **more: str) -> Model:
    return model(path, {"ascend_context": {"shareable_weight_mem_handle": handle, **more}})


def result(serves: Model) -> NDArray[np.float32]:
    [output] = serves.predict([np.ones((1, WIDTH), np.float32)])
    return output.get_data_to_numpy()


def test_listed_processes_share_the_owners_weights_and_others_are_refused(
    path: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        listed, also, unlisted = (
            stack.enter_context(Program(SLAVE, tmp_path, path)) for _ in range(3)
        )
        pids = [program.line() for program in (listed, also, unlisted)]
        assert pids == [str(program.pid) for program in (listed, also, unlisted)]
        owns = owner(path, f"{pids[0]}, {pids[1]}, 0,")
        expected = f"shared True {result(owns).tobytes().hex()}"
        draft = tmp_path / "draft"
        draft.write_text(handle_of(owns), encoding="ascii")
        draft.rename(tmp_path / "handle")
        assert [listed.line(), also.line()] == [expected, expected]
        refusal = unlisted.line()
    assert refusal.startswith("refused True build_from_file failed! Error is ")
    assert f"refused process {pids[2]}" in refusal


def test_shared_weights_can_be_replaced_in_each_process_by_itself(
    path: Path, tmp_path: Path
) -> None:
    more = named(tmp_path, "w")["ascend_context"]
    pids = {"shareable_weight_pid_list": str(os.getpid())}
    owns = model(path, {"ascend_context": {**pids, **more}})
    serves = slave(path, handle_of(owns), **more)
    before = result(owns).copy()
    serves.update_weights([[Tensor(np.zeros((WIDTH, WIDTH), np.float32))]])
    assert not result(serves).any()
    np.testing.assert_array_equal(result(owns), before)
