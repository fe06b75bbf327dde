"""``mcinfer run``: a batch from a file, split over the devices, into another file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.cli.options import (
    BatchAxisOption,
    DevicesOption,
    ModelArgument,
    OutputAxisOption,
    axes_of,
    engine_for,
    parse_seconds,
)
from mcinfer.progress import let_workers_tell


def parse_timeout(text: str) -> float:
    """``"2.5"``: seconds, above 0."""
    seconds = parse_seconds(text)
    if seconds == 0:
        raise typer.BadParameter(f"got {text!r}, expected seconds above 0")
    return seconds


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
        help="Rows of one request; if not given 64 for each device, fewer if they have over 64 MiB. "
        "Memory is for some requests, with all that the model needs inside.",
        show_default=False,
    ),
]
_Timeout = Annotated[
    Any,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        parser=parse_timeout,
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
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
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
        model,
        source,
        target,
        engine=engine_for(model),
        devices=devices,
        rows=batch,
        batch_axes=axes_of("--batch-axis", batch_axis),
        output_axes=axes_of("--output-axis", output_axis),
        timeout=timeout,
        restart=restart,
    )
    print(*lines, sep="\n")
