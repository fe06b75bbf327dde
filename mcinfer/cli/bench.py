"""``mcinfer bench`` and ``mcinfer tune``: what is fast, and which pool or session is best for a load."""

from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mcinfer.bench import BASELINES, MODES
from mcinfer.bench.report import Report
from mcinfer.cli.options import (
    MAX_CLIENTS,
    BatchAxisOption,
    DevicesOption,
    DimOption,
    InputOption,
    IntegersOption,
    ModelArgument,
    OutputAxisOption,
    SeedOption,
    axes_of,
    input_options,
    parse_clients,
    parse_counts,
    parse_duration,
    parse_pause,
    parse_rate,
    parse_rates,
    parsed,
    refused_as_usage,
)
from mcinfer.cli.output_files import check_outputs, write_output
from mcinfer.cli.progress import counted, let_workers_tell, say, showing_work
from mcinfer.engines.names import engines_for
from mcinfer.errors import McinferError

_DEFAULT_BASELINES = "session,threads,pipe"
_ALL_MODES = ",".join(MODES)
_BASELINES_HELP = f"Baselines: some of {', '.join(BASELINES)}, FILE.py:Class; or none."
_MODES_HELP = f"Modes of mcinfer: some of {', '.join(MODES)}; or none."


_JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
]


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(dict.fromkeys(text.split(",")))


_EngineOption = Annotated[
    Any,
    parsed(
        "ENGINES",
        _names,
        "Engines of the workers, and after a colon the precision: onnxruntime,openvino,openvino:bf16. "
        "Default: bench: the first that is installed; tune: those that are installed.",
    ),
]


def bench(
    model: ModelArgument,
    devices: DevicesOption = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="THREADS",
            min=1,
            help="Threads of each worker; default: as many as it has cores.",
        ),
    ] = None,
    batch: Annotated[Any, parsed("ROWS", parse_counts, "Rows of each request: 1,2,8.")] = "1",
    concurrency: Annotated[
        Any,
        parsed(
            "CLIENTS",
            parse_clients,
            "Requests under way at once: 1,4,16. Default: 1,4, or none with --rate.",
        ),
    ] = None,
    load: Annotated[
        Literal["clients", "mlperf"],
        typer.Option(
            "--load",
            metavar="GENERATOR",
            help="What makes the load: our clients; or mlperf: LoadGen's SingleStream and Offline, and with "
            "--rate its Server.",
        ),
    ] = "clients",
    rate: Annotated[
        Any,
        parsed("RATES", parse_rates, "Requests a second that arrive at random (open loop): 20,50."),
    ] = None,
    duration: Annotated[Any, parsed("SECONDS", parse_duration, "Length of each turn.")] = "2",
    count: Annotated[
        int,
        typer.Option(
            metavar="REQUESTS", min=0, help="Requests in each turn, instead of --duration."
        ),
    ] = 0,
    repeat: Annotated[
        int, typer.Option(metavar="TIMES", min=1, help="Repeats of the whole measurement.")
    ] = 3,
    warmup: Annotated[Any, parsed("SECONDS", parse_pause, "Warm-up before each turn.")] = "0.3",
    against: Annotated[Any, parsed("WAYS", _names, _BASELINES_HELP)] = _DEFAULT_BASELINES,
    modes: Annotated[Any, parsed("MODES", _names, _MODES_HELP, "--modes")] = _ALL_MODES,
    max_batch_size: Annotated[
        int, typer.Option(metavar="ROWS", min=1, help="Mode batched: most rows in one run.")
    ] = 8,
    engine: _EngineOption = None,
    input: InputOption = None,  # noqa: A002 the option's name
    dim: DimOption = None,
    integers: IntegersOption = "0:10",
    seed: SeedOption = 0,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    json: _JsonOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with bars to this file.")
    ] = None,
) -> None:
    """Measure your speed-up: mcinfer and the usual alternatives, on your model.

    With an engine that is no ONNX Runtime in float32, the table says how far its answers differ from that.
    There is no verdict where other programs kept the machine busy: the exit status is 1 then.
    """
    from mcinfer.bench.runner import Benchmark, BenchOptions

    if load == "mlperf":
        if concurrency is not None:
            raise typer.BadParameter("--load mlperf goes without --concurrency")
        import mcinfer.bench.mlperf  # noqa: F401 a missing package is an error before the work
    if concurrency is None:
        concurrency = () if rate else (1, 4)
    ways = (*against, *modes)
    if unknown := [name for name in modes if name not in MODES]:
        raise typer.BadParameter(
            f"--modes: got {unknown[0]!r}, expected some of {[*MODES]}, or none"
        )
    if not ways:
        raise typer.BadParameter("--against none with --modes none: nothing to measure")
    plan = BenchOptions(
        model=model,
        devices=devices,
        threads=threads,
        batches=batch,
        clients=concurrency,
        rates=rate or (),
        mlperf=load == "mlperf",
        seconds=duration,
        count=count,
        repeats=repeat,
        warmup=warmup,
        ways=ways,
        engines=engine or engines_for(model)[:1],
        max_batch_size=max_batch_size,
        inputs=input_options(input, dim, integers, seed),
        **axes_of(batch_axis, output_axis),
    )
    outputs = {"--json": json, "--html": html}
    with refused_as_usage():
        benchmark = Benchmark(plan, lambda done, note: work.show(done, note))
    check_outputs(outputs, model)
    let_workers_tell()
    facts = _watched()
    if benchmark.turn_seconds:
        starts = counted(benchmark.starts, "start")
        say(f"measuring takes {benchmark.turn_seconds:.0f} s and the time of {starts}")
    try:
        with showing_work("measuring", benchmark.steps) as work:
            report = benchmark.run(facts)
    except KeyboardInterrupt:
        if benchmark.has_measured:
            _show(benchmark.report(), outputs)
        raise
    _show(report, outputs if benchmark.has_measured else {})
    if not benchmark.has_measured:
        raise McinferError("nothing was measured: no way has answered a request")
    if report.disturbed:
        raise McinferError(report.verdict)


def _watched() -> Callable[[], dict[str, str | int | float]]:
    """The machine's facts, as `mcinfer.bench.runner.watched_machine`; says at once if it is busy."""
    from mcinfer.bench.runner import watched_machine
    from mcinfer.bench.texts import busy

    facts = watched_machine()
    for text in busy(facts()):
        say(f"there will be no verdict. {text}")
    return facts


def _show(report: Report, outputs: Mapping[str, Path | None]) -> None:
    """Print the report, and write the files that were asked for."""
    from rich.console import Console

    from mcinfer.bench.page import render
    from mcinfer.bench.report import dump
    from mcinfer.bench.table import show

    show(report, Console())
    for option, path in outputs.items():
        if path is not None:
            content = dump(report) if option == "--json" else render(report).encode()
            write_output(option, path, content, finished=report.finished)


def tune(
    model: ModelArgument,
    goal: Annotated[
        Literal["throughput", "latency"],
        typer.Option(
            "--goal",
            metavar="GOAL",
            help="throughput: most rows a second. latency: lowest median latency.",
        ),
    ] = "throughput",
    max_latency: Annotated[
        Any,
        parsed(
            "SECONDS",
            parse_duration,
            "Bound for the latency of 99 % of the requests; default: none.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="ROWS", min=1, help="Rows of each request.")] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="CLIENTS",
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
            "--rate",
        ),
    ] = None,
    budget: Annotated[Any, parsed("SECONDS", parse_duration, "Time limit of the search.")] = "60",
    engine: _EngineOption = None,
    input: InputOption = None,  # noqa: A002 the option's name
    dim: DimOption = None,
    integers: IntegersOption = "0:10",
    seed: SeedOption = 0,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    json: _JsonOption = None,
) -> None:
    """Find the best pool or session for your model and load, and print a program that uses it.

    It tries sessions in one process first, then numbers of workers and threads, how requests are joined, and
    the engines that are installed. A precision below float32 is tried only if it is asked for, such as
    openvino:bf16. There is no verdict where other programs kept the machine busy: the exit status is 1 then.
    """
    # Both need packages: a missing one is an error before the work, not after it.
    from mcinfer.bench.report import Load
    from mcinfer.bench.runner import OPEN_LOOP_CLIENTS
    from mcinfer.bench.tune import Aim, Search, as_json, verdict
    from mcinfer.machine import whole_cpus

    if concurrency is None:
        concurrency = 1 if goal == "latency" else 2 * whole_cpus()
        concurrency = OPEN_LOOP_CLIENTS if rate is not None else concurrency
    load = Load(batch=batch, clients=concurrency, rate=rate and rate[0])
    options = input_options(input, dim, integers, seed)
    with refused_as_usage():
        search = Search(
            model,
            Aim(goal=goal, load=load, max_latency=max_latency),
            options,
            budget=budget,
            progress=lambda done, note: work.show(done, note),
            engines=engine or engines_for(model),
            **axes_of(batch_axis, output_axis),
        )
    check_outputs({"--json": json}, model)
    let_workers_tell()
    facts = _watched()
    say(f"tuning takes {budget:g} s at most, from when the model has been loaded once")
    try:
        with showing_work("tuning", budget) as work:
            search.run()
    finally:  # the results so far, also where it was interrupted
        found = search.found
        found.machine = facts()
        if found.trials:
            _show_search(str(model), found)
            if json is not None:
                write_output("--json", json, as_json(str(model), found), finished=found.finished)
    if found.disturbed or not found.fits:
        raise McinferError(verdict(found))


def _show_search(model: str, found: Any) -> None:
    """Print what was tried, the verdict, and a program that uses the best where there is one."""
    from rich.console import Console

    from mcinfer.bench.table import print_lines, print_program, show_grid
    from mcinfer.bench.tune import arguments, grids, program, remarks, verdict

    console = Console()
    for grid in grids(found):
        show_grid(grid, console)
        console.print()
    print_lines(remarks(found), console)
    print_lines([verdict(found)], console, "bold")
    if found.fits and not found.disturbed:
        print_program(program(model, found.best, found), console)
        print_program(dumps(arguments(found.best.candidate, found)), console)
