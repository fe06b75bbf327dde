"""Measure an inline session beside a plain one: its start, its runs, and from which size it saves memory.

    python benchmarks/inline_sessions.py [--rounds N] [--quick] [--write docs/processes.md]

In each round `PROCESSES` fresh programs with a plain session and as many with an inline one start one after
another, with a warm cache; then one of each runs the model in turns. Every session has one thread. The small
models show from which size preparing pays (`LEAST_PREPARED_BYTES`): they are prepared whatever their size.
"""

import compileall
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from measuring import MEGABYTE, Lines, Ratio, Series, Setting, main, markdown
from models import MLP_LAYERS, MLP_WIDTH, Model, mlp, normal
from processes_memory import ALWAYS, PLAIN, Program, large_models

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


class Cost(NamedTuple):
    """Of one way in one round: seconds of a start and of a run, bytes of all its processes."""

    start: float
    run: float
    pss: float


def models_of(setting: Setting) -> list[Model]:
    sizes = [(f"MLP, {mib} MiB", LAYERS, round(256 * mib**0.5), 1) for mib in SMALL]
    if setting.quick:
        sizes = sizes[:2]
    else:
        sizes.insert(0, ("MLP of 24 layers", MLP_LAYERS, MLP_WIDTH, 8))
    found = [] if setting.quick else large_models(setting)
    for number, (name, layers, width, rows) in enumerate(sizes):
        path = mlp(setting.folder / f"{number}.onnx", layers, width, external_data=False)
        found.append(Model(name=name, path=path, inputs=normal(rows, width)))
    return found


def one_round(model: Model, ways: Sequence[str]) -> dict[str, Cost]:
    """One round, the ways in this order."""
    with ExitStack() as stack:
        programs: dict[str, list[Program]] = {way: [] for way in ways}
        starts: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(PROCESSES):
            for way in ways:
                programs[way].append(stack.enter_context(Program(way, model)))
                starts[way].append(programs[way][-1].wait_ready())
        pss = {way: sum(program.pss() for program in programs[way]) for way in ways}
        count = max(3, round(TURN / statistics.median(programs[PLAIN][0].times(3))))
        runs: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(TURNS):
            for way in rotated(ways, turn):
                runs[way].append(statistics.median(programs[way][0].times(count)))
    middle = statistics.median
    return {way: Cost(middle(starts[way]), middle(runs[way]), pss[way]) for way in ways}


def measure(setting: Setting) -> Lines:
    """All models; the table of a page."""
    # As pip does with what it installs: where PYTHONDONTWRITEBYTECODE is set, each start would compile it.
    compileall.compile_dir(Path(mcinfer.__file__).parent, quiet=2)
    rows = []
    for model in models_of(setting):
        with Program(ALWAYS, model) as first:
            first.wait_ready()  # prepares it
        rounds = [one_round(model, rotated((PLAIN, ALWAYS), n)) for n in range(setting.rounds)]
        plain, inline = (
            [Series(values) for values in zip(*(one[way] for one in rounds), strict=True)]
            for way in (PLAIN, ALWAYS)
        )
        over = [b.over(a) for a, b in zip(plain, inline, strict=True)]
        rows.append(
            [
                model.name,
                *(seconds_text(one.middle) for one in (plain[0], inline[0])),
                *(f"{one.middle:.2f}" for one in over[:2]),
                *(f"{one.middle / MEGABYTE:,.0f}" for one in (plain[2], inline[2])),
                f"{over[2].middle:.2f}",
            ]
        )
        targets = {"start": START_TARGET, "run": RUN_TARGET, "PSS": None}
        for (what, bound), series in zip(targets.items(), over, strict=True):
            text = f"{model.name}: {what}, inline / plain"
            ratio = Ratio(text=text, series=series, bound=bound, at_least=False)
            print(ratio, file=sys.stderr)
    memory = [f"MB of {PROCESSES}, plain", f"MB of {PROCESSES}, inline", "ratio"]
    header = ["model", "start, plain", "start, inline", "ratio", "run, ratio", *memory]
    yield markdown(header, rows)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"inline": measure}, cores=None))
