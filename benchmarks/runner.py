"""Measure the runner: many clients, two workers, as ratios within one run.

    python benchmarks/runner.py [--quick] [--only throughput|batching|latency] [--json FILE]

Throughput of small requests against threads on one ONNX Runtime session and against a pool of processes
that pickles; what dynamic batching gains; latency at half of the throughput. All ways run in turns (see
measuring.py). A target that is missed is a finding: the exit status is 0 all the same.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import onnxruntime as ort
from encoder import HIDDEN, TOKENS, batching_model, encoder_model
from measuring import (
    Ratio,
    Record,
    Series,
    rates_in_turns,
    ratio_line,
    report_rates,
    table,
)
from numpy.typing import NDArray

import mcinfer.mslite as mslite
from mcinfer.bench.figures import seconds_text
from mcinfer.bench.runner import machine

WORKERS = 2
CLIENTS = 8
BATCHING_CLIENTS = 16
BATCH = 8
MAX_DELAY = 0.001
"""Seconds; it has no effect where requests are not joined."""

PARTS = ("throughput", "batching", "latency")
LIMIT = 600
"""Seconds after which something hangs."""

Array = NDArray[np.float32]
Request = Callable[[Array], object]
"""Runs one request and waits for its answer."""


def _say(text: str) -> None:
    print(text, flush=True)


# Ways to run the model.


def _session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _session_way(path: Path, threads: int) -> Request:
    session = _session(path, threads)
    return lambda x: session.run(None, {"x": x})


def _load(path: Path) -> None:
    """In a process of the pool: one session, as a program would keep it."""
    global _loaded
    _loaded = _session(path, 1)


def _run(x: Array) -> list[Any]:
    answer: list[Any] = _loaded.run(None, {"x": x})
    return answer


_loaded: Any = None


@contextmanager
def _pool_way(path: Path) -> Iterator[Request]:
    with ProcessPoolExecutor(
        WORKERS, mp_context=get_context("spawn"), initializer=_load, initargs=(path,)
    ) as pool:
        yield lambda x: pool.submit(_run, x).result()


@contextmanager
def _runner(path: Path, max_batch_size: int = 1) -> Iterator[mslite.ModelParallelRunner]:
    config = mslite.RunnerConfig(
        workers_num=WORKERS, max_batch_size=max_batch_size, max_delay=MAX_DELAY
    )
    with mslite.ModelParallelRunner() as runner:
        runner.init(str(path), config)
        yield runner


def _runner_way(runner: mslite.ModelParallelRunner) -> Request:
    return lambda x: runner.predict([x])


# Measuring.


def _throughput(request: Request, clients: int, data: Sequence[Array], seconds: float) -> float:
    """Requests per second of so many clients, each of which sends the next when it has an answer."""
    stop = threading.Event()
    counts = [0] * clients

    def client(index: int) -> None:
        x = data[index % len(data)]
        while not stop.is_set():
            request(x)
            counts[index] += 1

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    sleep(seconds / 4)
    before, start = sum(counts), perf_counter()
    sleep(seconds)
    done, elapsed = sum(counts) - before, perf_counter() - start
    stop.set()
    for thread in threads:
        thread.join()
    return done / elapsed


def _submitted(
    runner: mslite.ModelParallelRunner, outstanding: int, x: Array, seconds: float
) -> float:
    """Requests per second of one program that keeps so many futures going; each one's end sends the next."""
    stop = perf_counter() + seconds
    answered, open_ends, over = 0, outstanding, threading.Event()

    def go_on(future: "Future[list[mslite.Tensor]]") -> None:
        nonlocal answered, open_ends
        assert future.exception() is None
        answered += 1
        if perf_counter() < stop:
            runner.submit([x]).add_done_callback(go_on)
            return
        open_ends -= 1
        if not open_ends:
            over.set()

    start = perf_counter()
    for _ in range(outstanding):
        runner.submit([x]).add_done_callback(go_on)
    assert over.wait(seconds + 30)
    return answered / (perf_counter() - start)


def measure_throughput(folder: Path, rounds: int, seconds: float) -> Record:
    """Small requests of many clients."""
    path = encoder_model(folder / "encoder.onnx")
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((1, TOKENS, HIDDEN), np.float32) for _ in range(CLIENTS)]
    with ExitStack() as opened:
        runner = opened.enter_context(_runner(path))
        ways = {
            f"runner, {WORKERS} workers, {CLIENTS} clients": (_runner_way(runner), CLIENTS),
            "2 threads, one session of 1 thread": (_session_way(path, 1), 2),
            "2 threads, one session of all cores": (_session_way(path, 0), 2),
            f"pool of {WORKERS} processes, {CLIENTS} clients": (
                opened.enter_context(_pool_way(path)),
                CLIENTS,
            ),
        }
        for request, _ in ways.values():
            request(data[0])
        rates = rates_in_turns(
            {
                name: partial(_throughput, request, clients, data, seconds)
                for name, (request, clients) in ways.items()
            },
            rounds,
        )
    runner_rate, single, default, pool = rates.values()
    ratios = [
        Ratio(
            text="runner / 2 threads, session of 1 thread", series=runner_rate.over(single), bound=1
        ),
        Ratio(
            text="runner / 2 threads, session of all cores (default)",
            series=runner_rate.over(default),
            bound=1,
        ),
        Ratio(text="runner / pool of processes", series=runner_rate.over(pool), bound=3),
    ]
    return report_rates("encoder, batch 1", rates, ratios, _say)


def measure_batching(folder: Path, rounds: int, seconds: float) -> Record:
    """What joining requests gains, for a model whose cost hardly grows with its batch."""
    path = batching_model(folder / "batching.onnx")
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((1, 1024), np.float32) for _ in range(BATCHING_CLIENTS)]
    with _runner(path) as plain, _runner(path, BATCH) as batching:
        ways = {
            f"{BATCHING_CLIENTS} threads": partial(
                _throughput, _runner_way(plain), BATCHING_CLIENTS, data, seconds
            ),
            f"{BATCHING_CLIENTS} threads, batching": partial(
                _throughput, _runner_way(batching), BATCHING_CLIENTS, data, seconds
            ),
            f"{BATCHING_CLIENTS} futures": partial(
                _submitted, plain, BATCHING_CLIENTS, data[0], seconds
            ),
            f"{BATCHING_CLIENTS} futures, batching": partial(
                _submitted, batching, BATCHING_CLIENTS, data[0], seconds
            ),
        }
        rates = rates_in_turns(ways, rounds)
        workers = batching.statistics().workers
    threads, joined_threads, futures, joined_futures = rates.values()
    size = sum(w.completed for w in workers) / sum(w.runs for w in workers)
    ratios = [
        Ratio(
            text="futures: with / without batching", series=joined_futures.over(futures), bound=2
        ),
        Ratio(
            text="threads: with / without batching", series=joined_threads.over(threads), bound=2
        ),
    ]
    title = f"max_batch_size={BATCH}, max_delay={MAX_DELAY:g}"
    record = report_rates(title, rates, ratios, _say)
    _say(f"  requests in a joined run: {size:.1f} on the average\n")
    return {**record, "joined": size}


def _latencies(runner: mslite.ModelParallelRunner, x: Array, gaps: Sequence[float]) -> list[float]:
    """Seconds from when each request was due to be sent until its answer was there.

    Answers are let go at once, as a program that has used them would.
    """
    latencies: list[float] = []
    all_there = threading.Event()

    def note(due: float, future: "Future[list[mslite.Tensor]]") -> None:
        latencies.append(perf_counter() - due)
        assert future.exception() is None
        if len(latencies) == len(gaps):
            all_there.set()

    due = perf_counter() + 0.05
    for gap in gaps:
        due += gap
        wait = due - perf_counter()
        if wait > 0:
            sleep(wait)
        runner.submit([x]).add_done_callback(partial(note, due))
    assert all_there.wait(60)
    return latencies


def _ideal(gaps: Sequence[float], service: float) -> list[float]:
    """Latencies of a queue with as many servers and no cost at all but the runs themselves."""
    free, now, latencies = [0.0] * WORKERS, 0.0, []
    for gap in gaps:
        now += gap
        server = free.index(min(free))
        free[server] = max(now, free[server]) + service
        latencies.append(free[server] - now)
    return latencies


def _percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return cuts[49], cuts[98]


def measure_latency(folder: Path, rounds: int, seconds: float) -> Record:
    """Latency at half of what the runner can do, requests coming evenly and at random (Poisson)."""
    path = encoder_model(folder / "encoder.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, TOKENS, HIDDEN), np.float32)
    figures: dict[str, list[tuple[float, float]]] = {}
    with _runner(path) as runner:
        rate = _throughput(_runner_way(runner), CLIENTS, [x], seconds) / 2
        workers = runner.statistics().workers
        service = sum(w.busy_seconds for w in workers) / sum(w.runs for w in workers)
        count = max(200, int(rate * seconds))
        for _ in range(rounds):
            random = rng.exponential(1 / rate, count).tolist()
            for name, latencies in (
                ("evenly", _latencies(runner, x, [1 / rate] * count)),
                ("at random", _latencies(runner, x, random)),
                ("at random, ideal queue", _ideal(random, service)),
            ):
                figures.setdefault(name, []).append(_percentiles(latencies))
    rows, ratios = [], []
    for name, pairs in figures.items():
        middle, high = Series(tuple(p[0] for p in pairs)), Series(tuple(p[1] for p in pairs))
        rows.append((name, seconds_text(middle.middle), seconds_text(high.middle)))
        bound = None if "ideal" in name else 2
        ratios.append(
            Ratio(text=f"p99 / p50, {name}", series=high.over(middle), bound=bound, at_least=False)
        )
    _say(table((f"{rate:.0f} requests a second", "p50", "p99"), rows))
    for ratio in ratios:
        _say(ratio_line(ratio))
    _say("")
    return {"rate": rate, "service": service, "ratios": [ratio.record() for ratio in ratios]}


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the measurement did not end within {LIMIT} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Measure mcinfer's runner.")
    parser.add_argument("--quick", action="store_true", help="fewer samples: for a first look")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    options = parser.parse_args(arguments)
    # Two workers, two baselines, two cores: on larger machines all would get more.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT)
    described = machine()
    _say(", ".join(f"{name} {value}" for name, value in described.items()))
    _say("")
    record: Record = {"machine": described, "quick": options.quick}
    rounds, seconds = (3, 1.0) if options.quick else (9, 2.0)
    parts = dict(zip(PARTS, (measure_throughput, measure_batching, measure_latency), strict=True))
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        for part, measure in parts.items():
            if options.only in (None, part):
                record[part] = measure(Path(name), rounds, seconds)
    signal.alarm(0)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
