"""Five clients at once, two requests each, served by three workers of one ModelParallelRunner.

The steps and the printed times are those of MindSpore Lite's quick start for parallel inference. Every
answer is held against that of a single model.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mcinfer.mslite as mslite

BUILDER = Path(__file__).parents[1] / "quick_start" / "build_mobilenet.py"
WORKERS = 3
CLIENTS = 5
TASKS = 2
MAX_RELATIVE_ERROR = 1e-4

Array = NDArray[Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="with one input; built on the spot if not given")
    parser.add_argument("--size", type=int, default=224, help="side of the built model's image")
    options = parser.parse_args(arguments)
    if options.size < 1:
        parser.error(f"--size: got {options.size}, expected at least 1")
    try:
        with tempfile.TemporaryDirectory(prefix="quick_start_parallel-") as folder:
            model = options.model or _build(Path(folder) / "mobilenetv2.onnx", options.size)
            _run(model)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print("=========== success ===========")
    return 0


def _build(path: Path, size: int) -> Path:
    command = [sys.executable, str(BUILDER), "--output", str(path), "--size", str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def _run(model_path: Path) -> None:
    context = mslite.Context()
    context.target = ["cpu"]
    context.cpu.thread_num = 1
    context.parallel.workers_num = WORKERS

    with mslite.ModelParallelRunner() as runner:
        runner.build_from_file(str(model_path), context)
        data = _tasks(runner.get_inputs())
        start = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as clients:
            futures = [clients.submit(_client, runner, i, data[i]) for i in range(CLIENTS)]
            answers = [future.result() for future in futures]
        print(f"total run time: {time.perf_counter() - start:.6f} s")
    _compare(answers, model_path, data)


def _tasks(inputs: list[mslite.Tensor]) -> Array:
    """Normal noise float32[CLIENTS, TASKS, *shape of the input]: no two requests are alike."""
    if len(inputs) != 1:
        raise ValueError(f"the model has {len(inputs)} inputs, this example fills one")
    if any(side < 1 for side in inputs[0].shape):
        raise ValueError(f"the input {inputs[0].name} has an open shape, {inputs[0].shape}")
    shape = (CLIENTS, TASKS, *inputs[0].shape)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _client(runner: mslite.ModelParallelRunner, number: int, data: Array) -> list[Array]:
    """One client: sends its tasks one after the other; the first output of each."""
    answers = []
    for index, task in enumerate(data, start=1):
        inputs = runner.get_inputs()
        inputs[0].set_data_from_numpy(task)
        start = time.perf_counter()
        outputs = runner.predict(inputs)
        seconds = time.perf_counter() - start
        line = f"parallel id: {number} | task index: {index} | run once time: {seconds:.6f} s\n"
        print(line, end="")  # written in one piece, which another client's line cannot part
        answers.append(outputs[0].get_data_to_numpy().copy())
    return answers


def _compare(answers: list[list[Array]], model_path: Path, data: Array) -> None:
    """Fail unless each answer is that of a single model with the same input."""
    context = mslite.Context()
    context.cpu.thread_num = 1
    model = mslite.Model()
    model.build_from_file(str(model_path), mslite.ModelType.ONNX, context)
    inputs = model.get_inputs()
    for number, index in np.ndindex(CLIENTS, TASKS):
        inputs[0].set_data_from_numpy(data[number, index])
        expected = model.predict(inputs)[0].get_data_to_numpy()
        scale = float(np.abs(expected).max()) or 1.0
        error = float(np.abs(answers[number][index] - expected).max()) / scale
        if not error <= MAX_RELATIVE_ERROR:  # a NaN is none either
            raise ValueError(
                f"the answer to client {number}, task {index + 1} is {error:.3g} from that of a "
                f"single model, expected at most {MAX_RELATIVE_ERROR:g}"
            )


if __name__ == "__main__":
    sys.exit(main())
