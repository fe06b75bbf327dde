"""Measure what mcinfer costs beside the model's own run, as ratios within one run.

    python benchmarks/dispatch.py [--quick] [--only dispatch|observing|unet|start] [--json FILE]

Four questions: what dispatching a batch costs, against a plain pipe and against the raw messages; what
looking on costs (traces, statistics); what part of the speed of independent processes is left; how long a
start takes. Targets stand beside the
ratios. A target that is missed is a finding, not a failure: the exit status is 0 all the same.
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

# The model of the example is the one to measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

from bare_processes import measure_start, measure_unet
from measuring import Effort, Record
from observing import measure_observing
from round_trips import measure_dispatch

from mcinfer.bench.surroundings import machine

PARTS = ("dispatch", "observing", "unet", "start")
LIMIT = 600
"""Seconds after which something hangs."""


def _say(text: str) -> None:
    print(text, flush=True)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the measurement did not end within {LIMIT} s")


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
    quick = options.quick
    # Two workers, two baselines, two cores: on larger machines mcinfer's workers would get more threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT)
    begin = perf_counter()
    described = machine()
    _say(", ".join(f"{name} {value}" for name, value in described.items()))
    _say("")
    record: Record = {"machine": described, "quick": quick}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        folder = Path(name)
        if options.only in (None, "dispatch"):
            effort = Effort(rounds=3, seconds=0.1) if quick else Effort(rounds=9, seconds=0.25)
            record["dispatch"] = measure_dispatch(folder, effort, _say)
        if options.only in (None, "observing"):
            effort = Effort(rounds=3, seconds=0.1) if quick else Effort(rounds=15, seconds=0.25)
            record["observing"] = measure_observing(folder, effort, _say)
        if options.only in (None, "unet"):
            effort = Effort(rounds=3, seconds=1.0) if quick else Effort(rounds=9, seconds=2.5)
            record["unet"] = measure_unet(folder, effort, _say)
        if options.only in (None, "start"):
            effort = Effort(rounds=3 if quick else 9, seconds=0.0)
            record["start"] = measure_start(folder, effort, _say)
    signal.alarm(0)
    record["seconds"] = round(perf_counter() - begin, 1)
    _say(f"\nmeasured in {record['seconds']} s")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
