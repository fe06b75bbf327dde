"""One image through one model: build, fill the input, predict, print what comes out.

The steps and the printed lines are those of MindSpore Lite's quick start.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import mcinfer.mslite as mslite

BUILDER = Path(__file__).with_name("build_mobilenet.py")
VALUES_SHOWN = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="with one input; built on the spot if not given")
    parser.add_argument("--input", type=Path, help="raw float32 file (default: generated data)")
    parser.add_argument("--size", type=int, default=224, help="side of the built model's image")
    options = parser.parse_args(arguments)
    if options.size < 1:
        parser.error(f"--size: got {options.size}, expected at least 1")
    try:
        with tempfile.TemporaryDirectory(prefix="quick_start-") as folder:
            model = options.model or _build(Path(folder) / "mobilenetv2.onnx", options.size)
            _run(model, options.input)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _build(path: Path, size: int) -> Path:
    command = [sys.executable, str(BUILDER), "--output", str(path), "--size", str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def _run(model_path: Path, data_path: Path | None) -> None:
    context = mslite.Context()
    context.target = ["cpu"]
    context.cpu.thread_num = 1

    model = mslite.Model()
    model.build_from_file(str(model_path), mslite.ModelType.ONNX, context)

    inputs = model.get_inputs()
    if len(inputs) != 1:
        raise ValueError(f"the model has {len(inputs)} inputs, this example fills one")
    _fill(inputs[0], data_path)
    outputs = model.predict(inputs)

    for output in outputs:
        print(
            f"tensor name is:{output.name} tensor size is:{output.data_size} "
            f"tensor elements num is:{output.element_num}"
        )
        print("output data is:", *output.get_data_to_numpy().flatten()[:VALUES_SHOWN])


def _fill(tensor: mslite.Tensor, path: Path | None) -> None:
    """Set the input's data: the file's, which must have its size, or normal noise, always the same."""
    if any(side < 1 for side in tensor.shape):
        raise ValueError(f"the input {tensor.name} has an open shape, {tensor.shape}")
    if path is None:
        data = np.random.default_rng(0).standard_normal(tensor.shape, np.float32)
    else:
        size = path.stat().st_size
        if size != tensor.data_size:
            raise ValueError(
                f"{path} has {size} bytes, the input {tensor.name} takes {tensor.data_size}"
            )
        data = np.fromfile(path, "<f4")
    tensor.set_data_from_numpy(data)


if __name__ == "__main__":
    sys.exit(main())
