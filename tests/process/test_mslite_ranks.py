"""MindSpore Lite's two programs for ranks, as real processes: started by hand, and by a real mpirun."""

import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.ranks.slicing.slicer import slice_model
from tests.process.scripts import ROOT, Ended, Program
from tests.test_mslite_ranks import write_table
from tests.test_preparation import write

BY_TABLE = str(ROOT / "examples/distributed/by_table.py")
BY_LAUNCHER = str(ROOT / "examples/distributed/by_launcher.py")

WIDTH, LAYERS = 32, 4
RNG = np.random.default_rng(5)
WEIGHTS = {
    f"w{i}": RNG.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
    for i in range(LAYERS)
}

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
    nodes = "".join(f"p{i} = MatMul(r{i}, w{i}) r{i + 1} = Relu(p{i}) " for i in range(LAYERS))
    nodes = nodes.replace("r0,", "x,").replace(f"r{LAYERS} =", "y =")
    graph = f"chain (float[2, {WIDTH}] x) => (float[2, {WIDTH}] y) {{ {nodes} }}"
    model = write(folder / "model.onnx", (graph, WEIGHTS))
    found = {"whole": folder}
    for name in ("tensor", "pipeline"):
        found[name] = folder / name
        cut = {"tensor": 1, "pipeline": 1, name: 2}
        slice_model(model, found[name], tensor=cut["tensor"], pipeline=cut["pipeline"], check=False)
        for rank in range(2):
            (found[name] / f"model{rank}.onnx").rename(found[name] / f"matmul{rank}.mindir")
    return found


@pytest.fixture(scope="module")
def expected() -> NDArray[Any]:
    """The first values of the unsliced model's output for ones."""
    values = np.ones(WIDTH, np.float32)
    for weight in WEIGHTS.values():
        values = np.maximum(values @ weight, 0)
    return values[:10]


def config_file(folder: Path) -> Path:
    """Write a rank table of two ranks of this machine, and the configuration that names it."""
    path = folder / "config_file.ini"
    path.write_text(
        f"[ascend_context]\nrank_table_file={write_table(folder, 2)}\n", encoding="utf-8"
    )
    return path


def program(path: str, *arguments: object, launcher: Sequence[str] = ()) -> Program:
    """A program of the examples, which is a file."""
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return Program(run, path, *arguments, env=AS_ROOT, command=(*launcher, sys.executable))


def rank(folder: Path, number: int, config: Path) -> Program:
    """One rank by the rank table, as a user starts it in the background."""
    arguments = {
        "--model_path": folder / f"matmul{number}.mindir",
        "--device_id": number,
        "--rank_id": number,
        "--config_file": config,
    }
    return program(BY_TABLE, *(word for item in arguments.items() for word in item))


def check_printed(out: str, expected: NDArray[Any], times: int = 1) -> None:
    """Check what so many ranks print, in any order of the lines."""
    about, data = ([x for x in out.splitlines() if x.startswith(k)] for k in ("name: ", "data: "))
    assert about == [f"name: y, data_size: {2 * WIDTH * 4}, element_num: {2 * WIDTH}"] * times
    assert len(data) == times
    for line in data:
        values = np.array(line.removeprefix("data: ").split(), np.float32)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


def test_ranks_started_by_hand_print_the_values_of_the_unsliced_model(
    slices: Slices, expected: NDArray[Any], tmp_path: Path
) -> None:
    config = config_file(tmp_path)
    with ExitStack() as stack:
        started = [stack.enter_context(rank(slices["pipeline"], n, config)) for n in range(2)]
        ended = [one.wait() for one in started]
    assert ended[0].out == ended[1].out  # the same bits
    for one in ended:
        assert one.status == 0, one.err
        check_printed(one.out, expected)
        # The device is missing here: the CPU serves, and nothing else has no effect.
        assert one.err.count("UserWarning") == 1
        assert "target ascend cannot be used here" in one.err


# Deaths, and several models in one process.

BUILDING = """
import sys
import numpy as np
import mcinfer
import mcinfer.mslite as mslite

folder, number, config = sys.argv[1:]
context = mslite.Context()
context.target = ["ascend"]
context.ascend.rank_id = int(number)
ones = np.ones((2, 32), np.float32)

def built(cut):
    model = mslite.Model()
    path = f"{folder}/{cut}/matmul{number}.mindir"
    model.build_from_file(path, mslite.ModelType.MINDIR, context, config)
    return model

def run(model, x=ones):
    print(*model.predict([x])[0].get_data_to_numpy().flatten()[:10], flush=True)
"""

ONCE = f"""{BUILDING}
run(built("tensor"))
"""
SERVING = f"""{BUILDING}
model = built("tensor")
run(model)
try:
    while True:
        model.predict([ones])
except mcinfer.RankDiedError as exc:
    print(isinstance(exc, RuntimeError), exc, flush=True)
del model
run(built("tensor"))
"""
"""Runs the model for ever; once another rank has died, builds it again."""


def check_values(line: str, expected: NDArray[Any]) -> None:
    np.testing.assert_allclose(np.array(line.split(), np.float32), expected, rtol=1e-5)


def test_rank_killed_in_a_run_ends_the_others_which_build_again_with_a_new_one(
    slices: Slices, expected: NDArray[Any], tmp_path: Path
) -> None:
    config = config_file(tmp_path)

    def start(text: str, number: int) -> Program:
        return Program(text, slices["whole"], number, config)

    with start(SERVING, 1) as survivor:
        with start(SERVING, 0) as killed:  # the one that the others look for
            check_values(survivor.line(), expected)
            check_values(killed.line(), expected)
            killed.send_signal(signal.SIGKILL)
            failure = survivor.line()  # well within the time limit of an operation, 300 s
        assert failure.startswith("True predict failed! Error is ")
        assert f"(pid {killed.pid}) killed by SIGKILL" in failure
        with start(ONCE, 0) as restarted:
            assert restarted.wait().status == 0
        ended = survivor.wait()
    assert ended.status == 0, ended.err
    check_values(ended.out, expected)


def mpirun(path: str, *arguments: object) -> Ended:
    assert MPIRUN is not None
    launcher = (MPIRUN, "-n", "2", "--oversubscribe")
    with program(path, *arguments, launcher=launcher) as started:
        return started.wait()


@needs_mpirun
@pytest.mark.thorough
@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_ranks_started_by_mpirun_print_the_values_of_the_unsliced_model(
    slices: Slices, expected: NDArray[Any], cut: str
) -> None:
    ended = mpirun(BY_LAUNCHER, "--model_path", slices[cut] / "matmul.mindir")
    assert ended.status == 0, ended.err
    check_printed(ended.out, expected, times=2)
