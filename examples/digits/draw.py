"""Draw handwritten digits with a diffusion model over several worker processes, and write them to a PNG file.

Each step of the drawing runs the model on all pictures twice, without and with the digit that is asked for
(classifier-free guidance), as one batch that is split over the workers. The same is then drawn with one ONNX
Runtime session and compared. `train.py` made the model.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from sampling import Array, Inputs, Model, draw, first_noise, png, sheet

from mcinfer import Master, McinferError

MODEL = Path(__file__).resolve().parent / "digits.onnx"
MAX_DIFFERENCE = 1e-3
"""Of a pixel, from -1 to 1, at the end of all steps: each step passes on the differences before it."""


class WrongPictureError(Exception):
    """The workers drew something else than one session."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; its exit status."""
    options = _parse(arguments)
    try:
        _run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (McinferError, OSError, WrongPictureError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print("=========== success ===========")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--digits", default="0123456789", help="one column for each")
    parser.add_argument("--rows", type=int, default=8, help="pictures of each digit")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="the picture")
    parser.add_argument("--devices", type=int, default=2, help="how many worker processes")
    parser.add_argument("--steps", type=int, default=50, help="from noise to a picture")
    parser.add_argument("--guidance", type=float, default=1.5, help="how much the digits count")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--model", type=Path, default=MODEL, help="one that train.py has written")
    options = parser.parse_args(arguments)
    if not (options.digits.isascii() and options.digits.isdigit()):
        parser.error(f"--digits: got {options.digits!r}, expected digits, such as 2026")
    for name in ("rows", "devices", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, expected at least 1")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"--output: there is no folder {str(options.output.parent)!r}")
    if options.seed < 0:
        parser.error(f"--seed: got {options.seed}, expected at least 0")
    if not 0 <= options.guidance < float("inf"):
        parser.error(f"--guidance: got {options.guidance:g}, expected a number from 0 upwards")
    return options


def _run(options: argparse.Namespace) -> None:
    digits = [int(digit) for digit in options.digits] * options.rows
    noise = first_noise(digits, options.seed)

    def timed(model: Model) -> tuple[Array, float]:
        begin = time.perf_counter()
        pictures = draw(model, noise, digits, options.steps, options.guidance)
        return pictures, time.perf_counter() - begin

    with Master(options.model, devices=options.devices) as master:
        print(master)
        pictures, seconds = timed(lambda inputs: master.predict(inputs)["velocity"])
    print(
        f"{len(digits)} pictures, {options.steps} steps of {2 * len(digits)} rows: {seconds:.2f} s"
    )
    expected, seconds = timed(_session(options.model))
    print(f"One session, all cores, the same steps: {seconds:.2f} s")
    difference = float(np.abs(pictures - expected).max())
    print(f"Largest difference of a pixel to one session: {difference:.3g}")
    options.output.write_bytes(png(sheet(pictures, len(options.digits))))
    print(f"Written: {options.output}")
    if not difference <= MAX_DIFFERENCE:
        raise WrongPictureError(
            f"the pictures are {difference:.3g} from those of one session, expected at most "
            f"{MAX_DIFFERENCE:g}"
        )


def _session(path: Path) -> Model:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> Array:
        velocity: Array = session.run(["velocity"], inputs)[0]
        return velocity

    return run


if __name__ == "__main__":
    sys.exit(main())
