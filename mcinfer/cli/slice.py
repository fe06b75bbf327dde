"""``mcinfer slice``: cut a model that does not fit one device into a slice for each of several.

docs/command_line.md lists the fields of ``--json``.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcinfer.cli.options import ModelArgument, check_model
from mcinfer.cli.progress import counted, megabytes, showing_work
from mcinfer.errors import printable

if TYPE_CHECKING:
    from mcinfer.ranks.slicing.slicer import SliceReport
    from mcinfer.ranks.slicing.tensor import StageReport

_MAX_LINES = 3
"""Reasons that are listed; the report has all."""


def slice_model(
    model: ModelArgument,
    output: Annotated[
        Path,
        typer.Option("--output", metavar="FOLDER", help="Folder to write.", show_default=False),
    ],
    tensor: Annotated[
        int,
        typer.Option(
            "--tensor",
            metavar="RANKS",
            min=1,
            help="Ranks over which each layer's weights are cut.",
        ),
    ] = 1,
    pipeline: Annotated[
        int,
        typer.Option(
            "--pipeline",
            metavar="STAGES",
            min=1,
            help="Stages of layers that run one after another.",
        ),
    ] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Replace slices that are in the folder.")
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option("--no-check", help="Do not run the slices to compare them with the model."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The whole report, as one JSON object.")
    ] = False,
) -> None:
    """Cut a model into slices, one for each of several devices. Together they give what the model gives."""
    if tensor * pipeline < 2:
        raise typer.BadParameter("--tensor, --pipeline: expected 2 or more for one of them")
    check_model(model)
    from mcinfer.ranks.slicing import slicer

    def show(state: Mapping[str, Any]) -> None:
        work.show(0, str(state["phase"]))

    with showing_work(f"cutting {printable(model.name)}") as work:
        report = slicer.slice_model(
            model,
            output,
            tensor=tensor,
            pipeline=pipeline,
            check=not no_check,
            force=force,
            progress=show,
        )
    print(json.dumps(report.as_json(), indent=1) if as_json else "\n".join(_lines(report, output)))


def _lines(report: "SliceReport", folder: Path) -> Iterator[str]:
    ranks = counted(len(report.ranks), "rank")
    yield f"{printable(folder)}: {printable(report.model)} cut for {ranks}, {_shape(report)}"
    yield from _table(report)
    batch, other = report.assumed
    yield f"bytes that are sent: of one run with batch {batch}, and {other} for other symbols"
    for number, stage in enumerate(report.stages):
        title = f"stage {number}: " if report.pipeline > 1 else ""
        if report.tensor > 1:
            yield from _lines_of_weights(stage, title, report.tensor)
    check = report.check
    if check.state == "passed":
        worst = max(check.difference.values(), default=0.0)
        yield f"checked: the slices give what the model gives; largest relative difference {worst:.1e}"
    else:
        yield f"not checked: {check.reason}"


def _shape(report: "SliceReport") -> str:
    parts = []
    if report.pipeline > 1:
        parts.append(f"{report.pipeline} stages")
    if report.tensor > 1:
        parts.append(f"each layer over {report.tensor}")
    return ", ".join(parts)


def _table(report: "SliceReport") -> Iterator[str]:
    rows = [("rank", "stage", "file", "weights", "share", "receives", "collectives")]
    for rank in report.ranks:
        stage = report.stages[rank.stage]
        share = rank.weight_bytes / report.weight_bytes if report.weight_bytes else 0.0
        received = "-"
        if rank.receives:
            values = counted(len(rank.receives), "value")
            received = f"{values}, {megabytes(rank.bytes_received)}"
        joined = "-"
        if stage.collectives:
            joined = f"{len(stage.collectives)}, {megabytes(stage.collective_bytes)}"
        rows.append(
            (
                *(str(rank.rank), str(rank.stage), rank.file, megabytes(rank.weight_bytes)),
                *(f"{share:.0%}", received, joined),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _lines_of_weights(stage: "StageReport", title: str, tensor: int) -> Iterator[str]:
    """How much is cut, and why the rest is not; the largest first."""
    cut = sum(weight.bytes for weight in stage.sharded)
    sharded = counted(len(stage.sharded), "weight")
    yield f"{title}cut over {tensor} ranks: {sharded}, {megabytes(cut)}"
    whole: dict[str, list[int]] = defaultdict(list)
    for weight in stage.whole:
        whole[weight.reason].append(weight.bytes)
    if not whole:
        return
    size = megabytes(sum(weight.bytes for weight in stage.whole))
    yield f"{title}whole in every rank: {counted(len(stage.whole), 'weight')}, {size}"
    for reason, sizes in sorted(whole.items(), key=lambda item: -sum(item[1]))[:_MAX_LINES]:
        weights = counted(len(sizes), "weight")
        yield f"  {weights}, {megabytes(sum(sizes))}: {printable(reason)}"
    if len(whole) > _MAX_LINES:
        yield "  and others; slices.json has all"
