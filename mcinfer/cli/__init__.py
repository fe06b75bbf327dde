"""The command line: ``mcinfer run``, ``mcinfer inspect``, ``mcinfer devices``, ``mcinfer cache``.

Exit status 0 on success, 1 on a failure with one clear line on standard error, 2 on wrong usage.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer import __version__
from mcinfer.cli import cache
from mcinfer.config import automatic_workers, check_seconds, parse_devices, share_cores
from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.master import Master
from mcinfer.sharding import batch_symbol
from mcinfer.specs import ModelSpec, element_type_name
from mcinfer.staging import Arrays

_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("mcinfer: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (McinferError, OSError) as exc:
        print(f"mcinfer: {' '.join(str(exc).split())}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcinfer", description="One ONNX model on all the devices of this machine."
    )
    parser.add_argument("--version", action="version", version=f"mcinfer {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a batch from a file, split over the devices")
    run.add_argument("model", help="path of an ONNX model")
    run.add_argument("--input", required=True, help="an .npz file, an array for each input by name")
    run.add_argument("--output", required=True, help="the .npz file to write, by output name")
    run.add_argument("--timeout", type=_seconds, help="seconds for the whole run")
    _add_devices(run)
    run.set_defaults(command=_run)

    inspect = commands.add_parser("inspect", help="what a model takes and gives, and what is split")
    inspect.add_argument("model", help="path of an ONNX model")
    inspect.set_defaults(command=_inspect)

    devices = commands.add_parser("devices", help="how the CPU is shared out over workers")
    _add_devices(devices)
    devices.set_defaults(command=_devices)

    prepared = commands.add_parser("cache", help="models that were prepared for all workers to map")
    cache.add_commands(prepared)
    return parser


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=_chosen,
        help="how many (2), or which (cpu:0,cpu:1); all of the CPU if not given",
    )


def _chosen(text: str) -> int | list[str]:
    chosen = int(text) if text.isdecimal() else text.split(",")
    try:
        parse_devices(chosen, 1)
    except InvalidInputError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return chosen


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
        check_seconds("seconds", seconds)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return seconds


def _run(options: argparse.Namespace) -> None:
    inputs = _read(options.input)
    folder = Path(options.output).absolute().parent
    if not folder.is_dir():
        # Before the work, not after it.
        raise InvalidInputError(f"--output: there is no folder {folder}")
    _let_workers_tell()
    with Master(options.model, options.devices) as master:
        outputs = master.predict(inputs, timeout=options.timeout)
    _write(Path(options.output), outputs)
    for name, array in outputs.items():
        print(f"{name}: {element_type_name(array.dtype)}{[*array.shape]}")


def _read(path: str) -> Arrays:
    try:
        # Opened here: NumPy leaves a file open that turns out to be a broken archive.
        with open(path, "rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.lib.npyio.NpzFile):
                with content:
                    return dict(content)
    except OSError:
        raise
    except Exception as exc:  # NumPy, zipfile and zlib raise many kinds on what is not theirs
        raise InvalidInputError(f"--input: {path} is not an .npz file: {exc}") from exc
    raise InvalidInputError(f"--input: {path} holds one array, expected an .npz file")


def _write(path: Path, outputs: Arrays) -> None:
    """Write beside and move, so that no half-written file is ever under that name.

    As numpy.savez does, which takes no array by the name of one of its own arguments ("file").
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(beside, "x") as archive:
            for name, array in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, _storable(array), allow_pickle=False)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _storable(array: NDArray[Any]) -> NDArray[Any]:
    """Strings in a type that can be stored without pickling."""
    return array.astype(np.str_) if array.dtype == object else array


def _let_workers_tell() -> None:
    """Preparing a large model takes a while: have workers say so to whoever watches."""
    if sys.stderr.isatty():
        logging.getLogger("mcinfer.worker").setLevel(logging.INFO)


def _inspect(options: argparse.Namespace) -> None:
    _let_workers_tell()
    with Master(options.model, 1) as master:
        model = ModelSpec(inputs=master.inputs, outputs=master.outputs)
        providers = master.statistics().workers[0].providers
    print("inputs:", *(f"  {spec}" for spec in model.inputs), sep="\n")
    print("outputs:", *(f"  {spec}" for spec in model.outputs), sep="\n")
    symbol = batch_symbol(model)
    fixed = all(not spec.shape or isinstance(spec.shape[0], int) for spec in model.inputs)
    if symbol is not None:
        print(f"batch: the symbol {symbol!r}; inputs that have it are split, others go whole")
    elif fixed:
        print("batch: fixed; inputs with a multiple of their rows are split in so many runs")
    else:
        print("batch: none is known; requests run whole unless batch_axes says what to split")
    print(f"runs on: {', '.join(providers)}")


def _devices(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    devices = parse_devices(options.devices, len(cores))
    shares = share_cores(devices, cores)
    print(f"{len(cores)} usable cores; by default {automatic_workers(len(cores))} workers")
    for index, device in enumerate(devices):
        share = shares.get(index)
        if isinstance(share, InvalidInputError):
            raise share
        place = "not a share of the CPU" if share is None else f"cores {[*share.cores]}"
        print(f"worker {index}: {device}, {place}{', shared' if share and share.shared else ''}")
