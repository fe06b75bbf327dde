"""The examples run as a user runs them, and say what they promise to say."""

import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sd_dual_core"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "main.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_example_prints_the_samples_lines() -> None:
    done = run("--size", "tiny", "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "Success to build model 0" in lines
    assert "Success to build model 1" in lines
    assert lines.count("Receive exit message  and start to exit") == 2
    assert lines[-1] == "=========== success ==========="
    assert re.search(r"^Total predict time =  \d+\.\d+$", done.stdout, re.MULTILINE)
    difference = re.search(
        r"^Largest relative difference to one session =  (\S+)$", done.stdout, re.MULTILINE
    )
    assert difference is not None
    assert float(difference[1]) <= 1e-4


@pytest.mark.parametrize("batch", [[], ["--batch", "1"]], ids=["symbolic", "fixed"])
def test_example_takes_a_model_of_ones_own(tmp_path: Path, batch: list[str]) -> None:
    model = tmp_path / "unet.onnx"
    build = [str(EXAMPLE / "build_unet.py"), "--size", "tiny", "--output", str(model), *batch]
    subprocess.run([sys.executable, *build], check=True, timeout=50, capture_output=True)
    done = run("--model", str(model), "--size", "tiny", "--steps", "1", "--devices", "3")
    assert done.returncode == 0, done.stderr
    assert "Success to build model 2" in done.stdout


def test_example_says_in_one_line_that_there_is_no_such_model(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path / "none.onnx"))
    assert done.returncode == 1
    assert "none.onnx" in done.stderr
    assert "Traceback" not in done.stderr


def test_example_refuses_no_steps() -> None:
    assert run("--steps", "0").returncode == 2


def test_example_fails_where_the_joined_result_is_not_that_of_one_session(tmp_path: Path) -> None:
    # The rows of this "UNet" are not independent: each is held against the mean of its batch.
    def value(
        name: str, shape: list[str | int], kind: int = TensorProto.FLOAT
    ) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    latents: list[str | int] = ["batch", 4, 8, 8]
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["encoder_hidden_states"], ["mean"], keepdims=1),
            helper.make_node("Add", ["sample", "mean"], ["out_sample"]),
        ],
        "dependent",
        [
            value("sample", latents),
            value("timestep", [1], TensorProto.INT64),
            value("encoder_hidden_states", ["batch", 77, 4]),
        ],
        [value("out_sample", latents)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.save(model, tmp_path / "dependent.onnx")
    done = run("--model", str(tmp_path / "dependent.onnx"), "--size", "tiny", "--steps", "1")
    assert done.returncode == 1
    assert "from that of one session" in done.stderr
    assert "success" not in done.stdout
