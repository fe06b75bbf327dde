"""One worker that executes two runs at once (`EngineOptions(concurrent_runs=2)`), against two workers.

    python benchmarks/concurrent_runs.py [--rounds N] [--write docs/benchmark_parts.md]

In turns, on the same cores: answers a second to one, two and eight callers with one row each, and the memory
of the workers' processes, for encoders whose rows take some 1 and 20 ms on one core, and for MobileNetV2's
structure.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from alone import Case, cases, ratio_of, throughput, warm
from measuring import Ratio, Series, rates_in_turns, ratio_line, write_page
from worker_memory import process_memory

from mcinfer import EngineOptions, Master

RUNS = 2
CALLERS = (1, 2, 8)


def one_worker(case: Case) -> Master:
    """A worker with all cores, and two runs at once."""
    return Master(case.path, 1, options=EngineOptions(concurrent_runs=RUNS))


def two_workers(case: Case) -> Master:
    """Workers with a core each; a request that comes alone gets both."""
    return Master(case.path, RUNS)


def memory(master: Master) -> float:
    """Megabytes (PSS) of the workers' processes."""
    pids = [w.pid for w in master.statistics().workers if w.pid is not None]
    return sum(process_memory(pid).pss for pid in pids) / 1e6


def measure(case: Case, rounds: int) -> list[str]:
    lines = []
    with one_worker(case) as one, two_workers(case) as two:
        for master in (one, two):
            warm(master, case.inputs)
        for callers in CALLERS:
            ways = {
                name: partial(throughput, partial(master.predict, case.inputs), callers)
                for name, master in {"one": one, "two": two}.items()
            }
            rates = rates_in_turns(ways, rounds)
            who = "1 caller" if callers == 1 else f"{callers} callers"
            text = f"{case.name}: answers a second, {who}: one worker / two"
            lines.append(ratio_line(Ratio(text=text, series=ratio_of(rates["one"], rates["two"]))))
            each = ", ".join(f"{name} {rate.middle:.0f}" for name, rate in rates.items())
            lines.append(f"    {each} a second")
        sizes = memory(one), memory(two)
    text = f"{case.name}: memory: one worker / two"
    lines.append(ratio_line(Ratio(text=text, series=Series((sizes[0] / sizes[1],)))))
    lines.append(f"    {sizes[0]:.0f} and {sizes[1]:.0f} MB")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the lines into")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name))[1:]:  # the UNet's activations are not small
            found = measure(case, options.rounds)
            print(*found, sep="\n", flush=True)
            lines += found
    lines.append(f"{options.rounds} rounds. Load average of the machine before: {load:.1f}.")
    print(lines[-1])
    if options.write is not None:
        text = "\n".join(["```text", *lines, "```"])
        write_page(options.write, {"concurrent_runs": text})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
