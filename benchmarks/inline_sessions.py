"""Measure an inline session beside a plain one: its start, its runs, and from which size it saves memory.

    python benchmarks/inline_sessions.py [--rounds N] [--quick] [--write docs/processes.md]

In each round `PROCESSES` fresh programs with a plain session and as many with an inline one start one after
another, with a warm cache; then one of each runs the model in turns. Every session has one thread. The small
models show from which size preparing pays (`LEAST_PREPARED_BYTES`): they are prepared whatever their size.
"""

import argparse
import compileall
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from measuring import Ratio, Series, ratio_line, table, write_page
from processes_memory import (
    ALWAYS,
    LIMIT,
    PLAIN,
    Held,
    Program,
    give_up,
    large_models,
    page_table,
    saved,
    setting_of,
)
from rank_models import MLP_LAYERS, MLP_WIDTH, mlp, mlp_inputs
from worker_memory import MEGABYTE

import mcinfer
from mcinfer.bench.figures import seconds_text
from mcinfer.bench.load import rotated

PROCESSES = 4
SMALL = (1, 2, 4, 8, 16, 32, 64)
"""MiB of weights."""
LAYERS = 4
"""Of the small models."""
TURNS, TURN = 5, 0.3
"""Turns of runs in a round, and the seconds of one."""
RUN_TARGET, START_TARGET = 1.03, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Of one way in one round: seconds of a start and of a run, bytes of all its processes."""

    start: float
    run: float
    pss: int


def _models(folder: Path, quick: bool) -> list[Held]:
    sizes = [(f"MLP, {mib} MiB", LAYERS, 256 * mib**0.5, 1) for mib in SMALL]
    if not quick:
        sizes.insert(0, ("MLP of 24 layers", MLP_LAYERS, MLP_WIDTH, 8))
    found = [] if quick else large_models(folder, quick=False)
    for number, (name, layers, side, rows) in enumerate(sizes):
        width = round(side)
        held = Held(
            name=name,
            path=mlp(folder / f"{number}.onnx", layers=layers, width=width),
            weight_bytes=layers * width * width * 4,
            inputs=saved(folder / f"{number}.npz", mlp_inputs(rows, width=width)),
        )
        found.append(held)
    return found


def _round(model: Held, ways: Sequence[str]) -> dict[str, _Cost]:
    """One round, the ways in this order."""
    with ExitStack() as stack:
        programs: dict[str, list[Program]] = {way: [] for way in ways}
        starts: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(PROCESSES):
            for way in ways:
                programs[way].append(stack.enter_context(Program(way, model.path, model.inputs)))
                starts[way].append(programs[way][-1].wait_ready())
        pss = {way: sum(program.pss() for program in programs[way]) for way in ways}
        count = max(3, round(TURN / statistics.median(programs[PLAIN][0].times(3))))
        runs: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(TURNS):
            for way in rotated(ways, turn):
                runs[way].append(statistics.median(programs[way][0].times(count)))
    return {
        way: _Cost(
            start=statistics.median(starts[way]), run=statistics.median(runs[way]), pss=pss[way]
        )
        for way in ways
    }


def _measure(models: Sequence[Held], rounds: int) -> str:
    """All models; the table of a page."""
    rows = []
    for model in models:
        with Program(ALWAYS, model.path, model.inputs) as first:
            first.wait_ready()  # prepares it
        found = [_round(model, rotated((PLAIN, ALWAYS), number)) for number in range(rounds)]

        def series(name: str, way: str, found: list[dict[str, _Cost]] = found) -> Series:
            return Series(tuple(getattr(one[way], name) for one in found))

        start, run, pss = (
            (series(name, PLAIN), series(name, ALWAYS)) for name in ("start", "run", "pss")
        )
        ratios = [inline.over(plain) for plain, inline in (start, run, pss)]
        row = (
            model.name,
            *(seconds_text(one.middle) for one in start),
            *(f"{one.middle:.2f}" for one in ratios[:2]),
            *(f"{one.middle / MEGABYTE:,.0f}" for one in pss),
            f"{ratios[2].middle:.2f}",
        )
        rows.append(row)
        print(f"\n{model.name}, {model.weight_bytes / MEGABYTE:.0f} MB of weights", flush=True)
        for text, one, bound in zip(
            ("start", "run", "PSS"), ratios, (START_TARGET, RUN_TARGET, None), strict=True
        ):
            text = f"{text}: inline / plain"
            print(ratio_line(Ratio(text=text, series=one, bound=bound, at_least=False)), flush=True)
    header = (
        *("model", "start, plain", "start, inline", "ratio", "run, ratio"),
        *(f"MB of {PROCESSES}, plain", f"MB of {PROCESSES}, inline", "ratio"),
    )
    print(f"\n{table(header, rows)}")
    return page_table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small models alone")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way has its turn")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    # As pip does with what it installs: where PYTHONDONTWRITEBYTECODE is set, each start would compile it.
    compileall.compile_dir(Path(mcinfer.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        lines = _measure(_models(Path(name), options.quick), options.rounds)
    signal.alarm(0)
    setting = setting_of(options.rounds)
    print(f"\n{setting}")
    if options.write is not None:
        write_page(options.write, {"inline": f"{lines}\n\n{setting[0].upper()}{setting[1:]}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
