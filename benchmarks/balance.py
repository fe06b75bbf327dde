"""Rows by the measured speed of workers, where one of them is slower. It takes about a minute.

    python benchmarks/balance.py [--write docs/benchmark_parts.md] [--rounds N]

Two workers on two cores answer batches: one pool splits them evenly, the other by the speeds that it
measures, in turns. The *ideal* of a request is what it would have taken had both workers ended together, by
the rows a second that its own two runs have shown; so what else the machine does meanwhile is in the ideal as
well.

The target: with worker 1 slowed to a third, the longest run takes at most 1.15 times the ideal. This is
measured twice. An engine that only waits needs three times as long for each row there, also on a machine with
other work. And the worker of a real model (`encoder.py`) is stopped for two thirds of the time. In the other
cases its core is shared, with two busy processes, and with one while it has a lower priority.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from mcinfer.bench.figures import seconds_text
from mcinfer.config import BALANCES, BalanceKind

LIMIT = 1800
"""Seconds after which something hangs."""

WORKERS = 2
ROWS = 24
_LEARNING = 5
"""Requests before the first turn, from which the speeds are learned."""

TARGET = 1.15
"""How many times the ideal the longest run may take, with a worker slowed to a third."""

_NICE = 10
_ROW_SECONDS = (0.005, 0.015)
_PERIOD = 0.012

_BUSY = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
while os.getppid() == parent:
    pass
"""
"""A program that keeps a core busy until its parent is gone."""

_SLOW_DOWN = """
import contextlib, os, signal, sys, time
period, parent, *pids = sys.argv[1:]
on, parent, pids = float(period) / 3, int(parent), [int(pid) for pid in pids]
with contextlib.suppress(OSError):
    os.setpriority(os.PRIO_PROCESS, 0, -10)  # so that it is on time on a machine with other work
while os.getppid() == parent:
    for number, seconds in ((signal.SIGSTOP, 2 * on), (signal.SIGCONT, on)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
"""
"""A program that stops processes for two thirds of each period until its parent is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What slows worker 1 down.

    Attributes:
        text: In words.
        waits: Whether the engine only waits, three times as long for each row there.
        stopped: Whether it is stopped for two thirds of the time.
        busy: Processes that keep the core of worker 1 busy.
        nice: By how much the nice value of worker 1 is higher, so that its priority is lower.
    """

    text: str
    waits: bool = False
    stopped: bool = False
    busy: int = 0
    nice: int = 0

    @property
    def is_third(self) -> bool:
        """Whether worker 1 is slowed to a third."""
        return self.waits or self.stopped

    @property
    def how(self) -> str:
        """How it is slowed to a third."""
        return "The engine only waits" if self.waits else "The worker is stopped in between"


CASES = (
    Case(text="nothing"),
    Case(text="to a third: a row takes 15 ms, not 5 ms (the engine only waits)", waits=True),
    Case(text="to a third: it is stopped for 8 of each 12 ms", stopped=True),
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
def beside(case: Case, core: int, pids: Sequence[int]) -> Iterator[None]:
    """The processes that slow down these workers, whose core it is."""
    command = [sys.executable, "-c", _BUSY, str(core), str(os.getpid())]
    commands = [command] * case.busy
    if case.stopped:
        ids = map(str, (_PERIOD, os.getpid(), *pids))
        commands.append([sys.executable, "-c", _SLOW_DOWN, *ids])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(map(subprocess.Popen, commands))
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for pid in pids if case.stopped else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def waiting_model(folder: Path) -> Path:
    """A model of the engine "fake", whose rows take `_ROW_SECONDS` by worker."""
    for worker, seconds in enumerate(_ROW_SECONDS):
        (folder / f"seconds{worker}").write_text(str(seconds), "utf-8")
    tensor = ["float32", ["batch", TOKENS, HIDDEN]]
    content = {
        "inputs": [["x", *tensor]],
        "outputs": [["y", *tensor, {"from": "x", "scale": 2, "add": 1}]],
        "row_seconds": str(folder / "seconds"),
    }
    path = folder / "waiting.json"
    path.write_text(json.dumps(content), "utf-8")
    return path


def measure(model: Path, case: Case, rounds: int) -> dict[BalanceKind, Found]:
    """Both pools in turns, with what goes on beside them."""
    batch = np.random.default_rng(0).standard_normal((ROWS, TOKENS, HIDDEN), np.float32)
    with ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {}
        traces: dict[BalanceKind, list[RequestTrace]] = {}
        cores: set[int] = set()
        pids: list[int] = []
        engine = "fake" if case.waits else "onnxruntime"
        for balance in BALANCES:
            traces[balance] = []
            master = Master(
                model, WORKERS, engine=engine, balance=balance, trace=traces[balance].append
            )
            stack.enter_context(master)
            pid = master.statistics().workers[1].pid
            assert pid is not None
            pids.append(pid)
            cores = os.sched_getaffinity(pid)
            for thread in os.listdir(f"/proc/{pid}/task") if case.nice else ():
                os.setpriority(os.PRIO_PROCESS, int(thread), os.nice(0) + case.nice)
            ways[balance] = partial(master.predict, {"x": batch})
            master.predict({"x": batch})  # what the split is
        stack.enter_context(beside(case, min(cores), pids))
        for _ in range(_LEARNING):
            ways["measured"]()

        def begin() -> None:
            for one in traces.values():
                one.clear()

        times = in_turns(ways, Effort(rounds=rounds, seconds=0.4), before=begin)
        return {balance: found(times[balance], traces[balance]) for balance in BALANCES}


def as_table(
    results: Sequence[tuple[Case, dict[BalanceKind, Found]]], rounds: int, load: float
) -> str:
    """The figures, in Markdown."""
    lines = [
        "| what slows worker 1 down | rows a second of each worker | even: rows | p50 | over the ideal "
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
    lines += ["", f"Target: with worker 1 slowed to a third, at most {TARGET} times the ideal."]
    for case, by_balance in results:
        if case.is_third:
            over = by_balance["measured"].over_ideal
            lines.append(f"{case.how}: {over:.2f}, {'met' if over <= TARGET else 'missed'}.")
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
    parser.add_argument("--rounds", type=int, default=4, help="turns of each pool; default: 4")
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
        encoder = encoder_model(Path(folder) / "encoder.onnx")
        waiting = waiting_model(Path(folder))
        for case in CASES:
            by_balance = measure(waiting if case.waits else encoder, case, options.rounds)
            results.append((case, by_balance))
            even, measured = by_balance["even"], by_balance["measured"]
            print(f"worker 1 is slowed down: {case.text}", flush=True)
            values = Series((measured.over_ideal,))
            bound = TARGET if case.is_third else None
            text = "longest run / ideal, measured"
            ratios = [
                Ratio(text=text, series=values, bound=bound, at_least=False),
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
