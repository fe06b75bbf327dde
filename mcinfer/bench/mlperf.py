"""Load made by LoadGen, the load generator of MLPerf Inference; it also measures the latencies.

SingleStream: the next query when the last one is answered, in LoadGen's thread. Offline: all queries at once.
Server: Poisson arrivals, answered by the clients' threads; a latency counts from the planned arrival.
https://github.com/mlcommons/inference/tree/master/loadgen
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from mcinfer.bench.load import LoadOutcome
from mcinfer.bench.load import offer as offer_closed
from mcinfer.bench.report import Load, Scenario
from mcinfer.extras import requires
from mcinfer.private import PrivateFolder

with requires("LoadGen is in the package mlcommons-loadgen", "mlperf_loadgen", extra="mlperf"):
    import mlperf_loadgen as loadgen

LATENCIES = {
    0.0: "result_min_latency_ns",
    **{
        part: f"result_{part:.2%}".replace("%", "_percentile_latency_ns")
        for part in (0.5, 0.9, 0.99)
    },
    1.0: "result_max_latency_ns",
}
"""LoadGen's names of latencies, by their fraction."""


def complete(number: int) -> None:
    """Tell LoadGen that a query is answered; from any thread."""
    loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(number, 0, 0)])


def ask(
    issue: Callable[[Sequence[Any]], None],
    scenario: Scenario,
    folder: Path,
    *,
    seconds: float,
    count: int = 0,
    rate: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Let LoadGen ask, until all queries are answered; what its log says, by key.

    Args:
        issue: Called with queries, in LoadGen's thread; each has an `id`, which `complete` takes.
        scenario: Of LoadGen's.
        folder: For LoadGen's logs.
        seconds: Length of the load.
        count: Queries in all, whatever the length; 0: as many as there is time for.
        rate: Queries a second of Server; of others those that are expected, so that there are as many.
        seed: Of the arrivals.
    """
    settings, logs = loadgen.TestSettings(), loadgen.LogSettings()
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = settings.max_duration_ms = 0 if count else round(1000 * seconds)
    settings.min_query_count, settings.max_query_count = count or 1, count
    settings.schedule_rng_seed = seed
    settings.server_target_qps = settings.offline_expected_qps = rate
    settings.single_stream_expected_latency_ns = round(1e9 / rate)
    logs.log_output.outdir = str(folder)
    logs.enable_trace = False
    system = loadgen.ConstructSUT(issue, lambda: None)
    samples = loadgen.ConstructQSL(1, 1, lambda _: None, lambda _: None)
    loadgen.StartTestWithLogSettings(system, samples, settings, logs)
    loadgen.DestroyQSL(samples)
    loadgen.DestroySUT(system)
    lines = (folder / "mlperf_log_detail.txt").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line.partition(" ")[2]) for line in lines]
    return {entry["key"]: entry["value"] for entry in entries}


def offer(
    request: Callable[[], object], load: Load, *, seconds: float, count: int, seed: int
) -> LoadOutcome:
    """Answer LoadGen's queries by requests, as `mcinfer.bench.load.offer` makes its own.

    A closed loop just before shows how many queries there will be, which LoadGen has to know.
    """
    outcome = LoadOutcome()

    def answer(number: int, begin: float) -> None:
        try:
            request()
        except BaseException as exc:  # the report shows it; LoadGen waits for every answer
            outcome.errors.append(f"{type(exc).__name__}: {exc}")
        else:
            outcome.answers.append((begin, perf_counter()))
        complete(number)

    def issue(samples: Sequence[Any]) -> None:
        begin = perf_counter()
        for sample in samples:
            if load.scenario == "SingleStream":
                answer(sample.id, begin)
            else:
                clients.submit(answer, sample.id, begin)

    rate = load.rate or 1.0
    if load.rate is None and not count:
        before = offer_closed(request, load, seconds=seconds / 4, count=0, seed=seed)
        if not before.answers:
            return before  # with the errors
        rate = len(before.answers) / before.seconds
    with PrivateFolder() as folder, ThreadPoolExecutor(load.clients) as clients:
        path = Path(folder.path)
        log = ask(issue, load.scenario, path, seconds=seconds, count=count, rate=rate, seed=seed)
    outcome.measured = {part: log[key] / 1e9 for part, key in LATENCIES.items()}
    if outcome.answers:
        begins, ends = zip(*outcome.answers, strict=True)
        outcome.seconds = max(ends) - min(begins)
    return outcome
