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
    parse_timeout,
    parsed,
)
from mcinfer.cli.progress import let_workers_tell


def run(
    model: ModelArgument,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="FILE",
            help="An .npz file, an array for each input by name; or an .npy file for the only one.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="FILE",
            help="The .npz file to write, by output name; or an .npy file for the only one.",
        ),
    ],
    devices: DevicesOption = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            min=1,
            help="Rows of one request; if not given 64 for each device, fewer if they have over 64 MiB. "
            "Peak memory: a few requests plus activations.",
        ),
    ] = None,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    timeout: Annotated[
        Any,
        parsed(
            "SECONDS",
            parse_timeout,
            "Time limit of a request; two run at once. 600 if not given.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard what an interrupted run of this output has done."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the output if it exists.")
    ] = False,
) -> None:
    """Run a batch of any size from a file, split over the devices; rerun to resume.

    Until all is done, the results lie in a file beside the output, ``.NAME.partial``.
    """
    from mcinfer.cli.batch import run_batch  # it imports most of mcinfer

    let_workers_tell()
    lines = run_batch(
        model,
        source,
        target,
        engine=engine_for(model),
        devices=devices,
        rows=batch,
        axes=axes_of(batch_axis, output_axis),
        timeout=timeout,
        restart=restart,
        force=force,
    )
    print(*lines, sep="\n")
