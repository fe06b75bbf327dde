"""``mcinfer tune``: the best pool or session for a model and a load, as a program to copy."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mcinfer.cli.options import (
    MAX_CLIENTS,
    BatchAxisOption,
    DimOption,
    InputOption,
    IntegersOption,
    ModelArgument,
    OutputAxisOption,
    SeedOption,
    axes_of,
    input_options,
    parse_duration,
    parse_rate,
    parsed,
)
from mcinfer.cli.output_files import check_outputs, write_output
from mcinfer.cli.progress import let_workers_tell, say, showing_work
from mcinfer.errors import InvalidInputError, McinferError


def tune(
    model: ModelArgument,
    goal: Annotated[
        Literal["throughput", "latency"],
        typer.Option(help="throughput: most rows a second. latency: lowest median latency."),
    ] = "throughput",
    max_latency: Annotated[
        Any,
        parsed(
            "SECONDS",
            parse_duration,
            "Bound for the latency of 99 % of the requests; default: none.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of each request.")] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_CLIENTS,
            help="Requests under way at once. Default: twice the cores, or 1 with --goal latency.",
        ),
    ] = None,
    rate: Annotated[
        Any,
        parsed(
            "RATE",
            parse_rate,
            "Requests a second that arrive at random (open loop), with --goal latency.",
        ),
    ] = None,
    budget: Annotated[Any, parsed("SECONDS", parse_duration, "Time limit of the search.")] = "60",
    input: InputOption = None,  # noqa: A002 the option's name
    dim: DimOption = None,
    integers: IntegersOption = "0:10",
    seed: SeedOption = 0,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Find the best pool or session for your model and load, and print a program that uses it.

    It tries sessions in one process, numbers of workers and threads, and how requests are joined.
    """
    # Both need packages: a missing one is an error before the work, not after it.
    from mcinfer.bench.advice import as_json, verdict
    from mcinfer.bench.report import Load
    from mcinfer.bench.runner import OPEN_LOOP_CLIENTS, machine
    from mcinfer.bench.tune import Aim, Search
    from mcinfer.machine import whole_cpus

    if concurrency is None and rate is not None:
        concurrency = OPEN_LOOP_CLIENTS
    elif concurrency is None:
        concurrency = 1 if goal == "latency" else 2 * whole_cpus()
    load = Load(batch=batch, clients=concurrency, rate=rate and rate[0])
    options = input_options(input, dim, integers, seed)
    try:
        search = Search(
            model,
            Aim(goal=goal, load=load, max_latency=max_latency),
            options,
            budget=budget,
            progress=lambda done, note: work.show(done, note),
            **axes_of(batch_axis, output_axis),
        )
    except InvalidInputError as exc:
        raise typer.BadParameter(str(exc)) from exc
    check_outputs({"--json": json})
    before = machine()
    let_workers_tell()
    say(f"tuning takes {budget:g} s at most, from when the model has been loaded once")
    try:
        with showing_work(sys.stderr, "tuning", budget) as work:
            search.run()
    finally:  # the results so far, also where it was interrupted
        found = search.found
        if any(trial.turns or trial.error for trial in found.trials):
            _show(str(model), found)
            if json is not None:
                content = as_json(str(model), found, before)
                write_output("--json", json, content, finished=bool(found.ended))
    if not found.fits:
        raise McinferError(verdict(found))


def _show(model: str, found: Any) -> None:
    """Print what was tried, the best, and a program that uses it; none where nothing fits."""
    from rich.console import Console

    from mcinfer.bench.advice import arguments, grids, program, remarks, verdict
    from mcinfer.bench.table import print_lines, print_program, show_grid

    console = Console()
    for grid in grids(found):
        show_grid(grid, console)
        console.print()
    print_lines([*remarks(found), ""], console)
    if not found.fits:
        return
    print_lines([verdict(found)], console, "bold")
    chosen = found.recommended
    print_program(program(model, chosen, found), console)
    print_program(dumps(arguments(chosen, found)), console)
