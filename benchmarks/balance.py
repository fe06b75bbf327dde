"""Rows by the measured speed of workers, where the core of one of them has other work as well.

    python benchmarks/balance.py [--write docs/splitting.md] [--rounds N]

Two workers on two cores answer batches of an encoder's rows (`encoder.py`): one pool splits them evenly, the
other by the speeds that it measures, in turns. The core of worker 1 is shared: with two busy processes, and
with one while the worker has a lower priority. The *ideal* of a request is what it would have taken had both
workers ended together, by the rows a second that its own two runs have shown; so what else the machine does
meanwhile is in the ideal as well.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from statistics import median

import numpy as np
from encoder import HIDDEN, TOKENS, encoder_model
from measuring import Effort, Ratio, Series, in_turns, ratio_line, write_page

from mcinfer import Master, RequestTrace
from mcinfer.bench.texts import seconds_text
from mcinfer.config import BALANCES, BalanceKind

LIMIT = 1800
"""Seconds after which something hangs."""

WORKERS = 2
ROWS = 48
_LEARNING = 30
"""Requests before the first turn, from which the speeds are learned."""

_NICE = 10

_BUSY = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
while os.getppid() == parent:
    pass
"""
"""A program that keeps a core busy until its parent is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What goes on beside the pools.

    Attributes:
        text: In words.
        busy: Processes that keep the core of worker 1 busy.
        nice: By how much the nice value of worker 1 is higher, so that its priority is lower.
    """

    text: str
    busy: int = 0
    nice: int = 0


CASES = (
    Case(text="nothing"),
    Case(text="two busy processes on its core", busy=2),
    Case(text=f"one, and the worker's nice value is higher by {_NICE}", busy=1, nice=_NICE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of the requests of one pool.

    Attributes:
        seconds: Of a request, round by round.
        over_ideal: How many times the ideal its longest run takes, the median of all requests.
        rows: By worker, the median of its rows.
        speeds: By worker, the median of its rows a second.
    """

    seconds: Series
    over_ideal: float
    rows: tuple[float, ...]
    speeds: tuple[float, ...]


def found(seconds: Series, traces: Sequence[RequestTrace]) -> Found:
    """The figures of requests from their traces."""
    over_ideal = []
    rows: dict[int, list[float]] = {worker: [] for worker in range(WORKERS)}
    speeds: dict[int, list[float]] = {worker: [] for worker in range(WORKERS)}
    for trace in traces:
        given = {run.worker: run.rows for run in trace.shards}
        rates = {run.worker: run.rows / run.run_seconds for run in trace.shards}
        for worker in range(WORKERS):
            rows[worker].append(given.get(worker, 0))
        for worker, rate in rates.items():
            speeds[worker].append(rate)
        if len(rates) == WORKERS:
            longest = max(run.run_seconds for run in trace.shards)
            over_ideal.append(longest * sum(rates.values()) / trace.rows)
    return Found(
        seconds=seconds,
        over_ideal=median(over_ideal),
        rows=tuple(median(values) for values in rows.values()),
        speeds=tuple(median(values) for values in speeds.values()),
    )


@contextmanager
def busy(core: int, count: int) -> Iterator[None]:
    """So many processes that keep a core busy."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-c", _BUSY, str(core), str(os.getpid())]
            processes.append(subprocess.Popen(command))
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def measure(model: Path, case: Case, rounds: int) -> dict[BalanceKind, Found]:
    """Both pools in turns, with what goes on beside them."""
    batch = np.random.default_rng(0).standard_normal((ROWS, TOKENS, HIDDEN), np.float32)
    with ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {}
        traces: dict[BalanceKind, list[RequestTrace]] = {}
        cores: set[int] = set()
        for balance in BALANCES:
            traces[balance] = []
            master = Master(model, WORKERS, balance=balance, trace=traces[balance].append)
            stack.enter_context(master)
            pid = master.statistics().workers[1].pid
            assert pid is not None
            cores = os.sched_getaffinity(pid)
            for thread in os.listdir(f"/proc/{pid}/task") if case.nice else ():
                os.setpriority(os.PRIO_PROCESS, int(thread), os.nice(0) + case.nice)
            ways[balance] = partial(master.predict, {"x": batch})
        stack.enter_context(busy(min(cores), case.busy))
        for way in ways.values():
            for _ in range(_LEARNING):
                way()

        def begin() -> None:
            for one in traces.values():
                one.clear()

        times = in_turns(ways, Effort(rounds=rounds, seconds=1.0, least=5), before=begin)
        return {balance: found(times[balance], traces[balance]) for balance in BALANCES}


def as_table(
    results: Sequence[tuple[Case, dict[BalanceKind, Found]]], rounds: int, load: float
) -> str:
    """The figures, in Markdown."""
    lines = [
        "| beside worker 1 | rows a second of each worker | even: rows | p50 | over the ideal "
        "| measured: rows | p50 | over the ideal | measured / even |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, by_balance in results:
        even, measured = by_balance["even"], by_balance["measured"]
        cells = [case.text, " and ".join(f"{speed:.0f}" for speed in measured.speeds)]
        for one in (even, measured):
            rows = " + ".join(f"{count:.0f}" for count in one.rows)
            cells += [rows, seconds_text(one.seconds.middle), f"{one.over_ideal:.2f}"]
        ratio = measured.seconds.over(even.seconds)
        cells.append(f"{ratio.middle:.2f} [{ratio.low:.2f} … {ratio.high:.2f}]")
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "numpy"))
    cores = len(os.sched_getaffinity(0))
    lines += [
        "",
        f"{ROWS} rows, {WORKERS} workers on {cores} cores, {rounds} rounds (in brackets the least and the "
        "greatest).",
        f"Load average of the machine before: {load:.1f}. Python {python_version()}, {versions}.",
    ]
    return "\n".join(lines)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done within {LIMIT} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Rows by the measured speed of workers.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each pool; default: 9")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected 1 or more")
    if len(os.sched_getaffinity(0)) < WORKERS:
        print(f"expected {WORKERS} cores, got {len(os.sched_getaffinity(0))}", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORKERS])
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT)
    load = os.getloadavg()[0]
    results = []
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as folder:
        os.environ["MCINFER_CACHE"] = str(Path(folder) / "cache")  # not the user's
        model = encoder_model(Path(folder) / "encoder.onnx")
        for case in CASES:
            by_balance = measure(model, case, options.rounds)
            results.append((case, by_balance))
            even, measured = by_balance["even"], by_balance["measured"]
            print(f"beside worker 1: {case.text}", flush=True)
            values = Series((measured.over_ideal,))
            ratios = [
                Ratio(
                    text="longest run / ideal, measured", series=values, bound=1.15, at_least=False
                ),
                Ratio(text="the same, even", series=Series((even.over_ideal,))),
                Ratio(text="measured / even", series=measured.seconds.over(even.seconds)),
            ]
            print(*map(ratio_line, ratios), sep="\n", flush=True)
    text = as_table(results, options.rounds, load)
    print(f"\n{text}")
    if options.write is not None:
        write_page(options.write, {"balance": text})
    signal.alarm(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
