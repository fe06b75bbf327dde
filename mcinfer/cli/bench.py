"""``mcinfer bench``: the speed and memory of a model in mcinfer and in the usual alternatives."""

import io
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.bench.report import Report
from mcinfer.bench.way import BASELINES, MODES, check_names
from mcinfer.cli.input_options import (
    DimOption,
    InputOption,
    IntegersOption,
    SeedOption,
    input_options,
    parse_clients,
    parse_duration,
    parse_pause,
)
from mcinfer.cli.options import (
    BatchAxisOption,
    DevicesOption,
    ModelArgument,
    OutputAxisOption,
    axes_of,
    parse_counts,
    parse_rates,
    parse_transport,
)
from mcinfer.cli.output_files import check_outputs, parse_png, write_output
from mcinfer.cli.progress import let_workers_tell, showing_work
from mcinfer.errors import InvalidInputError, McinferError, MissingDependencyError

_DEFAULT_BASELINES = "session,threads,pipe"
_ALL_MODES = ",".join(MODES)
_PACKAGES = {
    "--json": ("pydantic",),
    "--html": ("pydantic", "matplotlib", "jinja2"),
    "--png": ("pydantic", "matplotlib", "jinja2"),
}
_DPI = 100


def parse_baselines(text: str) -> tuple[str, ...]:
    """``"session,pipe"``, ``"my_ways.py:Mine"``, or ``"none"``."""
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(text.split(",")))
    try:
        check_names(names)
    except InvalidInputError as exc:
        raise typer.BadParameter(str(exc).removeprefix("--against: ")) from exc
    return names


def parse_modes(text: str) -> tuple[str, ...]:
    """``"sharded,concurrent"``, or ``"none"``."""
    names = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise typer.BadParameter(f"got {unknown[0]!r}, expected some of {[*MODES]}, or none")
    return names


def bench(
    model: ModelArgument,
    devices: DevicesOption = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each worker; default: as many as it has cores."),
    ] = None,
    batch: Annotated[
        Any, typer.Option(metavar="ROWS", parser=parse_counts, help="Rows of each request: 1,2,8.")
    ] = "1",
    concurrency: Annotated[
        Any,
        typer.Option(
            metavar="CLIENTS",
            parser=parse_clients,
            help="Requests under way at once: 1,4,16. Default: 1,4, or none with --rate.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        Any,
        typer.Option(
            metavar="RATES",
            parser=parse_rates,
            help="Requests a second that arrive at random (open loop): 20,50.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        Any, typer.Option(metavar="SECONDS", parser=parse_duration, help="Length of each turn.")
    ] = "2",
    count: Annotated[
        int, typer.Option(min=0, help="Requests in each turn, instead of --duration.")
    ] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Repeats of the whole measurement.")] = 3,
    warmup: Annotated[
        Any,
        typer.Option(metavar="SECONDS", parser=parse_pause, help="Warm-up before each turn."),
    ] = "0.3",
    against: Annotated[
        Any,
        typer.Option(
            metavar="WAYS",
            parser=parse_baselines,
            help=f"Baselines: some of {', '.join(BASELINES)}, FILE.py:Class; or none.",
        ),
    ] = _DEFAULT_BASELINES,
    modes: Annotated[
        Any,
        typer.Option(
            metavar="MODES",
            parser=parse_modes,
            help=f"Modes of mcinfer: some of {', '.join(MODES)}; or none.",
        ),
    ] = _ALL_MODES,
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Mode batched: most rows in one run.")
    ] = 8,
    max_delay: Annotated[
        Any,
        typer.Option(
            metavar="SECONDS",
            parser=parse_pause,
            help="Mode batched: longest wait of a request for others.",
        ),
    ] = "0.001",
    transport: Annotated[
        Any,
        typer.Option(
            metavar="TRANSPORT",
            parser=parse_transport,
            help="Transport of mcinfer: zeromq or socketpair.",
        ),
    ] = "zeromq",
    scaling: Annotated[
        bool, typer.Option(help="Also measure pools of fewer workers.", show_default=False)
    ] = True,
    input: InputOption = None,  # noqa: A002 the option's name
    dim: DimOption = None,
    integers: IntegersOption = "0:10",
    seed: SeedOption = 0,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots to this file.")
    ] = None,
    png: Annotated[
        Any, typer.Option(metavar="FILE", parser=parse_png, help="Write the plots to this file.")
    ] = None,
) -> None:
    """Measure your speed-up: mcinfer and the usual alternatives, on your model.

    `mcinfer bench compare A.json B.json` compares two of its files.
    """
    from mcinfer.bench.runner import Benchmark, Plan

    if concurrency is None:
        concurrency = () if rate else (1, 4)
    ways = (*against, *modes)
    if not ways:
        raise typer.BadParameter("--against none with --modes none: nothing to measure")
    plan = Plan(
        model=model,
        devices=devices,
        threads=threads,
        batches=batch,
        clients=concurrency,
        rates=rate or (),
        seconds=duration,
        count=count,
        repeats=repeat,
        warmup=warmup,
        ways=ways,
        max_batch_size=max_batch_size,
        max_delay=max_delay,
        transport=transport,
        scaling=scaling and "concurrent" in modes,
        inputs=input_options(input, dim, integers, seed),
        batch_axes=axes_of("--batch-axis", batch_axis),
        output_axes=axes_of("--output-axis", output_axis),
    )
    outputs = {"--json": json, "--html": html, "--png": png}
    _check_packages(outputs)
    check_outputs(outputs)
    let_workers_tell()
    benchmark = Benchmark(plan, lambda done, note: work.show(done, note))
    try:
        with showing_work(sys.stderr, "measuring", benchmark.steps) as work:
            report = benchmark.run()
    except KeyboardInterrupt:
        if benchmark.turns_taken:
            _show(benchmark.report(), outputs)
        raise
    if benchmark.turns_taken:
        _show(report, outputs)
        return
    _show(report, {})
    raise McinferError("nothing was measured: no way has answered a request")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="JSON file of bench")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="JSON file to compare with it")],
) -> None:
    """Show what became faster or slower from report A to report B, with the spread."""
    from rich.console import Console

    from mcinfer.bench.compare import show
    from mcinfer.bench.report import load

    show(load(a), load(b), Console(highlight=False))


def _check_packages(outputs: Mapping[str, Path | None]) -> None:
    """Raise `MissingDependencyError` where a package is needed for a file."""
    for option, path in outputs.items():
        for package in _PACKAGES[option] if path is not None else ():
            if find_spec(package) is None:
                raise MissingDependencyError(
                    f"{option} needs the package {package}: pip install 'mcinfer[bench]'"
                )


def _show(report: Report, outputs: Mapping[str, Path | None]) -> None:
    """Print it, and write the files that were asked for."""
    from rich.console import Console

    from mcinfer.bench.table import show

    show(report, Console())
    for option, path in outputs.items():
        if path is not None:
            write_output(option, path, _CONTENTS[option](report), finished=report.finished)


def _json(report: Report) -> bytes:
    from mcinfer.bench.report import dump

    return dump(report)


def _html(report: Report) -> bytes:
    from mcinfer.bench.page import render

    return render(report).encode()


def _png(report: Report) -> bytes:
    from mcinfer.bench.page import figure

    content = io.BytesIO()
    figure(report).savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


_CONTENTS: dict[str, Callable[[Report], bytes]] = {"--json": _json, "--html": _html, "--png": _png}
