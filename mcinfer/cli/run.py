"""``mcinfer run``: a batch from a file, split over the devices, into another file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.cli.options import DevicesOption, ModelArgument, parse_seconds
from mcinfer.progress import let_workers_tell

_Input = Annotated[
    Path,
    typer.Option(
        "--input",
        metavar="FILE",
        help="An .npz file, an array for each input by name; or an .npy file for the only one.",
    ),
]
_Output = Annotated[
    Path, typer.Option("--output", metavar="FILE", help="The .npz file to write, by output name.")
]
_Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="ROWS",
        min=1,
        help="Rows of one request; as many as have 64 MiB of inputs and outputs if not given.",
        show_default=False,
    ),
]
_Timeout = Annotated[
    Any,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        parser=parse_seconds,
        help="Seconds for one request, of which two are under way; 600 if not given.",
        show_default=False,
    ),
]
_Restart = Annotated[
    bool,
    typer.Option("--restart", help="Discard what an interrupted run of this output has done."),
]


def run(
    model: ModelArgument,
    source: _Input,
    target: _Output,
    devices: DevicesOption = None,
    batch: _Batch = None,
    timeout: _Timeout = None,
    restart: _Restart = False,
) -> None:
    """Run a batch of any size from a file, split over the devices; given again, it goes on where it was.

    It takes the memory of a few requests. What is done is in a folder beside the output, ``.NAME.partial``,
    until all is, or until ``--restart``.
    """
    from mcinfer.large_batches.running import run_batch

    let_workers_tell()
    lines = run_batch(
        model, source, target, devices=devices, rows=batch, timeout=timeout, restart=restart
    )
    print(*lines, sep="\n")
