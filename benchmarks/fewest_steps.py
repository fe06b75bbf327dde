"""mcinfer against the same request path in its fewest steps (`owned.py`), as ratios within one run.

Where mcinfer takes longer than `Owned` with all that a master needs, its own steps cost it; where `Owned`
does not do better, the architecture does. `dispatch.py` runs these parts.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from operator import or_
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import onnxruntime as ort
from encoder import HIDDEN, TOKENS, encoder_model
from measuring import (
    Effort,
    Ratio,
    Record,
    Series,
    Way,
    in_turns,
    rates_in_turns,
    ratio_line,
    report_rates,
    report_times,
    table,
)
from numpy.typing import NDArray
from owned import ALL, BARE, Arrays, Extra, Owned
from round_trips import BATCH, SIZES, WORKERS, Size, check_answer, identity_model, pipe_setup

from mcinfer import Master
from mcinfer.bench.baselines import Pipe
from mcinfer.bench.figures import seconds_text
from mcinfer.bench.load import nearest_rank, offer
from mcinfer.bench.report import Load
from mcinfer.errors import McinferError

BARE_NAME = "owned, bare"
ALL_NAME = "owned, with all"
PREDICT = "mcinfer.predict"
SUBMIT = "mcinfer.submit"
PIPE = "pipe: pickled through multiprocessing.Pipe"
THREADS = "threads on one session of one thread"

_MAX_PREDICT = {"8 KB": 1.4, "0.8 MB": 1.3, "8 MB": 1.2}
"""By size, how many times as long as the bare path a predict may take."""
_LEAST_PIPE = {"8 KB": 0.6, "0.8 MB": 3.0, "8 MB": 10.0, "64 MB": 25.0}
"""By size, how many times as long as a predict the pipe is to take."""
_LEAST_RATE = {1: None, 4: 0.5, 16: 0.5}
"""By callers, what part of the bare path's requests per second is wanted."""
_LEAST_WHOLE = {BARE_NAME: 0.85, THREADS: 0.5}
_MAX_TAIL = 2.5
"""p99 over p50 at half load."""

_BESIDE = ", beside Python"

WHOLE_CALLERS = 8
FUTURES = 64
"""Under way at once, of one thread."""
_OPEN_CLIENTS = 32
_PATIENCE = 60.0
"""Seconds that one answer may take."""

Say = Callable[[str], None]
Call = Callable[[], object]


def _name(extra: Extra) -> str:
    return f"+ {(extra.name or '').lower()}"


_LAST = _name([*Extra][-1])
"""With it, all are there."""


def _additions() -> dict[str, Extra]:
    """The bare path, and with one extra more each time."""
    members = [*Extra]
    sums = [reduce(or_, members[: i + 1]) for i in range(len(members))]
    return {BARE_NAME: BARE} | dict(zip(map(_name, members), sums, strict=True))


def _over_bare(series: Mapping[str, Series]) -> list[Ratio]:
    """What additions are against the bare path, as far as they are there."""
    bare = series[BARE_NAME]
    return [
        Ratio(text=f"{name} / {BARE_NAME}", series=series[name].over(bare))
        for name in _additions()
        if name in series and name != BARE_NAME
    ]


def _rows(size: Size) -> NDArray[np.float32]:
    """Rows that differ: a request of equal ones does not show how it splits, and would run whole."""
    return np.random.default_rng(0).standard_normal((BATCH, size.row_elements), np.float32)


# One caller: what each step costs.


def measure_steps(folder: Path, effort: Effort, say: Say) -> Record:
    """A batch of 2 over 2 workers: the bare path, each addition to it, mcinfer, and pipes."""
    model = str(identity_model(folder / "identity.onnx"))
    say(
        f"\nFewest steps: batch {BATCH} over {WORKERS} workers, an Identity model, {effort.rounds} "
        "rounds in turns; p50 [least … greatest round]. Each + is on top of those above it"
    )
    record: Record = {}
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(Owned(model, WORKERS, extras=extras))
            for name, extras in _additions().items()
        }
        master = stack.enter_context(Master(model, WORKERS))
        masters = {PREDICT: master}
        pipe = Pipe(pipe_setup(model))
        stack.callback(pipe.close)
        for size in SIZES:
            record[size.name] = _measure_size(size, pools, masters, pipe, effort, say)
        inputs = {"x": _rows(SIZES[0])}
        calls = {name: partial(pool.predict, inputs) for name, pool in pools.items()}
        calls[PREDICT] = partial(master.predict, inputs)
        record["processor"] = _measure_processor(calls, effort, say)
    return record


def _measure_size(
    size: Size,
    pools: Mapping[str, Owned],
    masters: Mapping[str, Master],
    pipe: Pipe,
    effort: Effort,
    say: Say,
) -> Record:
    rows = _rows(size)
    inputs = {"x": rows}
    compared = {
        name: pool
        for name, pool in pools.items()
        # At the largest size what is added to the messages cannot be seen, and the frames are large.
        if name == BARE_NAME or size.name in _MAX_PREDICT
    }
    calls: dict[str, Callable[[Arrays], Arrays]] = {n: pool.predict for n, pool in compared.items()}
    calls |= {name: master.predict for name, master in masters.items()}
    calls[PIPE] = pipe.run
    for call in calls.values():
        check_answer(call(inputs)["y"], rows)
    ways: dict[str, Way] = {name: partial(call, inputs) for name, call in calls.items()}
    series = in_turns(ways, effort)
    predict, bare = series[PREDICT], series[BARE_NAME]
    ratios = [
        Ratio(
            text="predict / owned, bare",
            series=predict.over(bare),
            bound=_MAX_PREDICT.get(size.name),
            at_least=False,
        ),
        Ratio(
            text="pipe / predict", series=series[PIPE].over(predict), bound=_LEAST_PIPE[size.name]
        ),
    ]
    if _LAST in series:
        ratios.insert(1, Ratio(text=f"predict / {ALL_NAME}", series=predict.over(series[_LAST])))
    ratios += _over_bare(series)
    return report_times(f"{size.name} ({size.input_bytes:,} bytes)", "way", series, ratios, say)


def _measure_processor(calls: Mapping[str, Way], effort: Effort, say: Say) -> Record:
    """Processor time of this process per request, which other work on the machine hardly moves."""

    def spent(call: Way) -> float:
        begin = process_time()
        for _ in range(effort.most):
            call()
        return (process_time() - begin) / effort.most

    ways = {name: partial(spent, call) for name, call in calls.items()}
    series = rates_in_turns(ways, effort.rounds)
    title = f"{SIZES[0].name}: processor time of the caller's process, all its threads, per request"
    ratio = Ratio(text=f"{PREDICT} / {BARE_NAME}", series=series[PREDICT].over(series[BARE_NAME]))
    return report_times(title, "way", series, [ratio, *_over_bare(series)], say)


# Many callers.


def _rate(call: Call, callers: int, seconds: float) -> float:
    """Requests per second of so many threads, each of which asks when it has its answer."""
    outcome = offer(call, Load(batch=1, clients=callers), seconds=seconds, count=0, seed=0)
    if outcome.errors:
        raise McinferError(outcome.errors[0])
    return len(outcome.answers) / outcome.seconds


def _rate_of_futures(submit: Callable[[], Any], seconds: float) -> float:
    """Requests per second of one thread that always has `FUTURES` under way."""
    under_way: deque[Any] = deque(submit() for _ in range(FUTURES))
    start, done = perf_counter(), 0
    while perf_counter() < start + seconds:
        under_way.popleft().result()
        under_way.append(submit())
        done += 1
    rate = done / (perf_counter() - start)
    while under_way:
        under_way.popleft().result()
    return rate


def measure_callers(folder: Path, effort: Effort, say: Say) -> Record:
    """Requests of 8 KB per second, split over 2 workers, of 1, 4 and 16 threads."""
    model = str(identity_model(folder / "identity.onnx"))
    inputs = {"x": _rows(SIZES[0])}
    record: Record = {}
    with (
        Owned(model, WORKERS) as bare,
        Owned(model, WORKERS, extras=ALL) as full,
        Master(model, WORKERS) as master,
    ):
        calls: dict[str, Call] = {
            BARE_NAME: lambda: bare.predict(inputs),
            ALL_NAME: lambda: full.predict(inputs),
            PREDICT: lambda: master.predict(inputs),
        }
        for callers, bound in _LEAST_RATE.items():
            ways = {name: partial(_rate, c, callers, effort.seconds) for name, c in calls.items()}
            rates = rates_in_turns(_warm(ways), effort.rounds)
            title = f"{SIZES[0].name}, split, {callers} threads"
            record[str(callers)] = _report_rates(title, rates, PREDICT, {BARE_NAME: bound}, say)
    return record


def measure_futures(folder: Path, effort: Effort, say: Say) -> Record:
    """Requests of 8 KB per second, each whole on one worker: 16 threads, and one with 64 futures.

    The queue and what is added to it are in use here, so the second shows best what each addition costs.
    """
    model = str(identity_model(folder / "identity.onnx"))
    inputs = {"x": _rows(SIZES[0])}
    record: Record = {}
    with ExitStack() as stack:
        submits: dict[str, Callable[[], Any]] = {
            name: partial(
                stack.enter_context(Owned(model, WORKERS, whole=True, extras=extras)).submit, inputs
            )
            for name, extras in _additions().items()
        }
        master = stack.enter_context(Master(model, WORKERS))
        submits[SUBMIT] = partial(master.submit, inputs)
        by_threads = {
            name: partial(_rate, partial(_answer, submits[key]), 16, effort.seconds)
            for name, key in ((BARE_NAME, BARE_NAME), (ALL_NAME, _LAST), (SUBMIT, SUBMIT))
        }
        by_one = {
            name: partial(_rate_of_futures, submit, effort.seconds)
            for name, submit in submits.items()
        }
        for name, ways in (("16 threads", by_threads), (f"1 thread, {FUTURES} futures", by_one)):
            rates = rates_in_turns(_warm(ways), effort.rounds)
            title = f"{SIZES[0].name}, whole, {name}"
            record[name] = _report_rates(title, rates, SUBMIT, {}, say)
    return record


def _answer(submit: Callable[[], Any]) -> object:
    return submit().result()


def _warm(ways: Mapping[str, Callable[[], float]]) -> Mapping[str, Callable[[], float]]:
    for way in ways.values():
        way()
    return ways


def _report_rates(
    title: str,
    rates: dict[str, Series],
    ours: str,
    bounds: Mapping[str, float | None],
    say: Say,
) -> Record:
    """A table of rates, with ours over the others, and what additions are against the bare path."""
    ratios = [
        Ratio(text=f"{ours} / {name}", series=rates[ours].over(rates[name]), bound=bounds.get(name))
        for name in (BARE_NAME, ALL_NAME, _LAST, THREADS)
        if name in rates
    ]
    if _LAST in rates:
        ratios += _over_bare(rates)
    return report_rates(title, rates, ratios, say)


# Requests of about a millisecond.


@contextmanager
def _encoder_calls(folder: Path) -> Iterator[dict[str, Call]]:
    """Ways to run one row of the encoder, some 0.6 to 1 ms on one core, and wait for it."""
    model = str(encoder_model(folder / "encoder.onnx"))
    x = np.random.default_rng(0).standard_normal((1, TOKENS, HIDDEN), np.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with (
        Owned(model, WORKERS, whole=True) as bare,
        Owned(model, WORKERS, whole=True, extras=ALL) as full,
        Master(model, WORKERS) as master,
    ):
        yield {
            BARE_NAME: lambda: bare.predict({"x": x}),
            ALL_NAME: lambda: full.predict({"x": x}),
            THREADS: lambda: session.run(None, {"x": x}),
            SUBMIT: lambda: master.submit({"x": x}).result(),
        }


def measure_whole(folder: Path, effort: Effort, say: Say) -> Record:
    """Whole requests per second of 8 threads, over 2 workers, against threads on one session."""
    with _encoder_calls(folder) as calls:
        run = in_turns({THREADS: calls[THREADS]}, Effort(rounds=1, seconds=0.1))[THREADS].middle
        ways = {
            name: partial(_rate, call, WHOLE_CALLERS, effort.seconds)
            for name, call in calls.items()
        }
        rates = rates_in_turns(_warm(ways), effort.rounds)
    title = f"encoder, a run {seconds_text(run)}, {WHOLE_CALLERS} threads"
    return {"run": run, **_report_rates(title, rates, SUBMIT, _LEAST_WHOLE, say)}


def measure_half_load(folder: Path, effort: Effort, say: Say) -> Record:
    """Latency of whole requests that arrive at random, at half of what mcinfer takes of 8 threads."""
    with _encoder_calls(folder) as calls:
        rate = _rate(calls[SUBMIT], WHOLE_CALLERS, effort.seconds) / 2
        load = Load(batch=1, clients=_OPEN_CLIENTS, rate=rate)
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for seed in range(effort.rounds):
            for name, call in calls.items():
                outcome = offer(call, load, seconds=effort.seconds, count=0, seed=seed)
                if outcome.errors:
                    raise McinferError(outcome.errors[0])
                late = outcome.latencies
                figures[name].append((nearest_rank(late, 0.5), nearest_rank(late, 0.99)))
    p50 = {name: Series(tuple(pair[0] for pair in pairs)) for name, pairs in figures.items()}
    p99 = {name: Series(tuple(pair[1] for pair in pairs)) for name, pairs in figures.items()}
    ratios = [
        Ratio(
            text=f"p99 / p50, {name}",
            series=p99[name].over(p50[name]),
            bound=_MAX_TAIL if name == SUBMIT else None,
            at_least=False,
        )
        for name in calls
    ]
    rows = [
        (name, seconds_text(p50[name].middle), seconds_text(p99[name].middle)) for name in calls
    ]
    say("")
    say(table((f"encoder, {rate:.0f} requests a second at random", "p50", "p99"), rows))
    for ratio in ratios:
        say(ratio_line(ratio))
    return {
        "rate": rate,
        "p50": {name: series.record() for name, series in p50.items()},
        "p99": {name: series.record() for name, series in p99.items()},
        "ratios": [ratio.record() for ratio in ratios],
    }


# Callbacks.


@contextmanager
def _computing() -> Iterator[None]:
    """A thread that computes in Python meanwhile."""
    over = threading.Event()

    def compute() -> None:
        number = 1
        while not over.is_set():
            for _ in range(1000):
                number = number * 69069 % 4294967296 + 1

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _called_back(submit: Callable[[], Any], most: int, limit: float) -> tuple[float, float]:
    """So many futures with a callback, or as many as `limit` seconds allow, `FUTURES` under way at most.

    Returns:
        The median seconds from a `submit` to its callback, and the callbacks per second.

    Raises:
        TimeoutError: No callback came for a minute.
    """
    seconds: list[float] = []
    room = threading.Semaphore(FUTURES)

    def note(begin: float, _: object) -> None:
        seconds.append(perf_counter() - begin)
        room.release()

    def enter() -> None:
        if not room.acquire(timeout=_PATIENCE):
            raise TimeoutError(f"no callback came after {len(seconds)} of them")

    start, made = perf_counter(), 0
    while made < most and perf_counter() < start + limit:
        enter()
        begin, made = perf_counter(), made + 1
        submit().add_done_callback(partial(note, begin))
    for _ in range(FUTURES):
        enter()
    return median(seconds), made / (perf_counter() - start)


def measure_callbacks(folder: Path, effort: Effort, say: Say) -> Record:
    """Futures with callbacks, by themselves and beside a thread that computes in Python."""
    model = str(identity_model(folder / "identity.onnx"))
    inputs = {"x": _rows(SIZES[0])}
    rounds: dict[str, list[tuple[float, float]]] = {}
    with (
        Owned(model, WORKERS, whole=True, extras=ALL) as full,
        Master(model, WORKERS) as master,
    ):
        submits: dict[str, Callable[[], Any]] = {
            ALL_NAME: lambda: full.submit(inputs).future,
            SUBMIT: lambda: master.submit(inputs),
        }
        for submit in submits.values():
            _called_back(submit, FUTURES, _PATIENCE)
        for _ in range(effort.rounds):
            for name, submit in submits.items():
                rounds.setdefault(name, []).append(
                    _called_back(submit, effort.most, effort.seconds)
                )
                with _computing():
                    pair = _called_back(submit, effort.most, effort.seconds)
                rounds.setdefault(f"{name}{_BESIDE}", []).append(pair)
    p50 = {name: Series(tuple(pair[0] for pair in pairs)) for name, pairs in rounds.items()}
    rates = {name: Series(tuple(pair[1] for pair in pairs)) for name, pairs in rounds.items()}
    title = (
        f"Callbacks: {effort.most} futures of {SIZES[0].name}, or {effort.seconds:g} s of them; "
        f"{FUTURES} under way at most"
    )
    times = report_times(title, "from call to callback", p50, _callback_ratios(p50), say)
    return {**times, "rates": report_rates("callbacks", rates, _callback_ratios(rates), say)}


def _callback_ratios(series: Mapping[str, Series]) -> list[Ratio]:
    ours, theirs = series[SUBMIT], series[ALL_NAME]
    beside = series[f"{SUBMIT}{_BESIDE}"]
    return [
        Ratio(text=f"{SUBMIT} / {ALL_NAME}", series=ours.over(theirs)),
        Ratio(text=f"the same{_BESIDE}", series=beside.over(series[f"{ALL_NAME}{_BESIDE}"])),
        Ratio(text=f"{SUBMIT}{_BESIDE} / without", series=beside.over(ours)),
    ]
