"""One rank of a model, its number from the launcher: ``mpirun -n 2 python by_launcher.py --model_path …``.

The steps and the printed facts are those of MindSpore Lite's example for GPUs.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import mcinfer.mslite as mslite

ENDING = ".mindir"
VALUES_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model_path", required=True, help=f"the slices' paths without the rank before {ENDING}"
    )
    options = parser.parse_args(arguments)

    context = mslite.Context()
    context.target = ["gpu"]
    context.gpu.device_id = context.gpu.rank_id
    context.gpu.provider = "tensorrt"

    model = mslite.Model()
    path = f"{options.model_path.removesuffix(ENDING)}{context.gpu.rank_id}{ENDING}"
    model.build_from_file(path, mslite.ModelType.MINDIR, context)

    inputs = model.get_inputs()
    for tensor in inputs:
        tensor.set_data_from_numpy(np.ones(tensor.shape, np.float32))
    for output in model.predict(inputs):
        print(
            f"name: {output.name}, data_size: {output.data_size}, element_num: {output.element_num}"
        )
        print("data:", *output.get_data_to_numpy().flatten()[:VALUES_SHOWN])
    return 0


if __name__ == "__main__":
    sys.exit(main())
