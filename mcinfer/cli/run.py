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
)
from mcinfer.cli.progress import let_workers_tell

_Input = Annotated[
    Path,
    typer.Option(
        "--input",
        metavar="FILE",
        help="An .npz file, an array for each input by name; or an .npy file for the only one.",
    ),
]
_Output = Annotated[
    Path,
    typer.Option(
        "--output",
        metavar="FILE",
        help="The .npz file to write, by output name; or an .npy file for the only one.",
    ),
]
_Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="ROWS",
        min=1,
        help="Rows of one request; if not given 64 for each device, fewer if they have over 64 MiB. "
        "Peak memory: a few requests plus activations.",
        show_default=False,
    ),
]
_Timeout = Annotated[
    Any,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        parser=parse_timeout,
        help="Time limit of a request; two run at once. 600 if not given.",
        show_default=False,
    ),
]
_Restart = Annotated[
    bool,
    typer.Option("--restart", help="Discard what an interrupted run of this output has done."),
]
_Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]


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
    force: _Force = False,
) -> None:
    """Run a batch of any size from a file, split over the devices; rerun to resume.

    Until all is done, the results lie in a file beside the output, ``.NAME.partial``.
    """
    from mcinfer.cli.batch import run_batch  # it imports most of mcinfer
    from mcinfer.sharding import SaidAxes

    said = SaidAxes(
        inputs=axes_of("--batch-axis", batch_axis), outputs=axes_of("--output-axis", output_axis)
    )
    let_workers_tell()
    lines = run_batch(
        model,
        source,
        target,
        engine=engine_for(model),
        devices=devices,
        rows=batch,
        said=said,
        timeout=timeout,
        restart=restart,
        force=force,
    )
    print(*lines, sep="\n")
