"""One rank of a model, its number from the command line and the other ranks from a rank table.

The steps and the printed facts are those of MindSpore Lite's example for Ascend devices. Start the program
once for each rank.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import mcinfer.mslite as mslite

VALUES_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model_path", required=True, help="this rank's slice of the model")
    parser.add_argument("--device_id", type=int, required=True, help="device to run on")
    parser.add_argument("--rank_id", type=int, required=True, help="this process's rank")
    parser.add_argument("--config_file", required=True, help="names the rank table")
    options = parser.parse_args(arguments)

    context = mslite.Context()
    context.target = ["Ascend"]
    context.ascend.device_id = options.device_id
    context.ascend.rank_id = options.rank_id
    context.ascend.provider = "ge"

    model = mslite.Model()
    model.build_from_file(options.model_path, mslite.ModelType.MINDIR, context, options.config_file)

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
