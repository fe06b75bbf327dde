"""Measure what mcinfer costs beside the model's own run, as ratios within one run.

    python benchmarks/dispatch.py [--quick] [--only PART] [--json FILE]

What dispatching a batch costs, against a plain pipe and against the raw messages (`dispatch`); what looking
on costs: traces, statistics (`observing`); what part of the speed of independent processes is left (`unet`);
how long a start takes (`start`). The other parts set mcinfer against the same request path in its fewest
steps (`fewest_steps.py`): one caller and each step of it (`steps`), many callers (`callers`, `futures`), runs
of a millisecond (`whole`, `half-load`), and callbacks (`callbacks`). Targets stand beside the ratios. A
target that is missed is a finding, not a failure: the exit status is 0 all the same.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

# The model of the example is the one to measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

from bare_processes import measure_start, measure_unet
from fewest_steps import (
    measure_callbacks,
    measure_callers,
    measure_futures,
    measure_half_load,
    measure_steps,
    measure_whole,
)
from measuring import Effort, Record
from observing import measure_observing
from round_trips import measure_dispatch

from mcinfer.bench.runner import machine

LIMIT = 600
"""Seconds after which a part hangs."""


class Part(NamedTuple):
    """One thing to measure, and how long, for a first look and in full."""

    measure: Callable[[Path, Effort, Callable[[str], None]], Record]
    quick: Effort
    full: Effort


PARTS = {
    "dispatch": Part(
        measure_dispatch, Effort(rounds=3, seconds=0.1), Effort(rounds=9, seconds=0.25)
    ),
    "observing": Part(
        measure_observing, Effort(rounds=3, seconds=0.1), Effort(rounds=15, seconds=0.25)
    ),
    "unet": Part(measure_unet, Effort(rounds=3, seconds=1.0), Effort(rounds=9, seconds=2.5)),
    "start": Part(measure_start, Effort(rounds=3, seconds=0.0), Effort(rounds=9, seconds=0.0)),
    "steps": Part(measure_steps, Effort(rounds=3, seconds=0.1), Effort(rounds=9, seconds=0.25)),
    "callers": Part(measure_callers, Effort(rounds=3, seconds=0.5), Effort(rounds=9, seconds=1.5)),
    "futures": Part(measure_futures, Effort(rounds=3, seconds=0.5), Effort(rounds=9, seconds=1.5)),
    "whole": Part(measure_whole, Effort(rounds=3, seconds=0.5), Effort(rounds=9, seconds=1.5)),
    "half-load": Part(
        measure_half_load, Effort(rounds=3, seconds=1.0), Effort(rounds=9, seconds=3.0)
    ),
    "callbacks": Part(
        measure_callbacks,
        Effort(rounds=3, seconds=3.0, most=1000),
        Effort(rounds=5, seconds=20.0, most=10_000),
    ),
}


def _say(text: str) -> None:
    print(text, flush=True)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the part did not end within {LIMIT} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Measure mcinfer's dispatch, speed and start.")
    parser.add_argument("--quick", action="store_true", help="fewer samples: for a first look")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    options = parser.parse_args(arguments)
    if options.json is not None:
        try:
            options.json.write_text("", encoding="utf-8")
        except OSError as exc:
            parser.error(f"--json: {exc}")
    # Two workers, two baselines, two cores: on larger machines mcinfer's workers would get more threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    signal.signal(signal.SIGALRM, _give_up)
    begin = perf_counter()
    described = machine()
    _say(", ".join(f"{name} {value}" for name, value in described.items()))
    _say("")
    record: Record = {"machine": described, "quick": options.quick}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        for part, (measure, quick, full) in PARTS.items():
            if options.only in (None, part):
                signal.alarm(LIMIT)
                record[part] = measure(Path(name), quick if options.quick else full, _say)
    signal.alarm(0)
    record["seconds"] = round(perf_counter() - begin, 1)
    _say(f"\nmeasured in {record['seconds']} s")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
