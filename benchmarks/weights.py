"""Measure what one copy of the weights for all workers is worth, and what replacing weights costs.

    python benchmarks/weights.py [--quick] [--only memory|speed|start|update] [--json FILE] [--plot FILE]

Four questions: what the workers take of the memory; whether a run on prepared weights is as fast as a plain
one; how much sooner a pool is ready; how long replacing weights takes while requests run. Targets stand
beside the ratios. A target that is missed is a finding, not a failure: the exit status is 0 all the same.

The cache of prepared models is a temporary folder; the user's own is not touched.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

# The model of the example is one to measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

import memory_plot
from measuring import Effort, Record
from prepared_speed import measure_speed, measure_start
from weight_models import large_models
from weight_updates import measure_cost, measure_updates
from worker_memory import PLAIN, SHARED, measure_memory

from mcinfer.bench.runner import machine

PARTS = ("memory", "speed", "start", "update")
LINES = {
    PLAIN: memory_plot.Line(
        label="each worker its own weights",
        colour="#b2182b",
        marker="s",
        place=(-6, 4),
        align="right",
    ),
    SHARED: memory_plot.Line(
        label="one prepared copy, shared", colour="#2166ac", marker="o", place=(0, 7)
    ),
}
LIMIT = 1200
"""Seconds after which something hangs."""


def _say(text: str) -> None:
    print(text, flush=True)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the measurement did not end within {LIMIT} s")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure mcinfer's prepared and replaced weights.")
    parser.add_argument("--quick", action="store_true", help="fewer samples: for a first look")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory: .svg or .png")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        if options.only not in (None, "memory"):
            parser.error(f"--plot: it draws the part 'memory', not {options.only!r}")
        if options.plot.suffix not in (".svg", ".png"):
            parser.error(f"--plot: got {options.plot}, expected a name that ends in .svg or .png")
        if not options.plot.parent.is_dir():
            parser.error(f"--plot: there is no folder {options.plot.parent}")
    if options.json is not None:
        try:
            options.json.write_text("", encoding="utf-8")
        except OSError as exc:
            parser.error(f"--json: {exc}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = _options(arguments)
    why = None if options.plot is None else memory_plot.missing()
    if why is not None:
        _say(why)
    # The same two cores as the other benchmarks have.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT)
    begin = perf_counter()
    described = machine()
    _say(", ".join(f"{name} {value}" for name, value in described.items()))
    record: Record = {"machine": described, "quick": options.quick}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")
        plot = options.plot if why is None else None
        _measure(Path(name), options.only, options.quick, plot, record)
    signal.alarm(0)
    record["seconds"] = round(perf_counter() - begin, 1)
    _say(f"\nmeasured in {record['seconds']} s")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    return 0


def _measure(
    folder: Path, only: str | None, quick: bool, plot: Path | None, record: Record
) -> None:
    """Measure one part, or all; the memory first: see `prepared_speed`."""
    models = large_models(folder)
    products = models[0]
    if only in (None, "memory"):
        record["memory"], curves = measure_memory(models, 1 if quick else 3, _say)
        if plot is not None:
            across, up = "workers, one thread each", "all workers"
            memory_plot.draw(curves, LINES, across, up, plot)
            _say(f"\ndrawn: {plot}")
    if only in (None, "speed"):
        effort = Effort(rounds=3, seconds=0.5) if quick else Effort(rounds=9, seconds=1.5)
        record["speed"] = measure_speed(models, effort, _say)
    if only in (None, "start"):
        record["start"] = measure_start(folder, models, 3 if quick else 7, _say)
    if only in (None, "update"):
        record["update"] = measure_updates(products, *((1, 5) if quick else (3, 10)), _say)
        effort = Effort(rounds=3, seconds=0.2) if quick else Effort(rounds=7, seconds=0.4)
        record["replaceable"] = measure_cost(products, (1, 8), effort, _say)


if __name__ == "__main__":
    sys.exit(main())
