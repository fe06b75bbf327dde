"""Prepared models against plain ones: the speed of a run, and how long a pool takes to start."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from measuring import Effort, Ratio, Record, Series, Way, in_turns, report_times
from round_trips import EngineTime, identity_model
from weight_models import LargeModel, check_prepared, pool
from worker_memory import MEGABYTE, PLAIN, SHARED

from mcinfer import EngineOptions, Master

SPEED_TARGET = 1.03
"""How many times as long as a plain run one on prepared weights may take."""
START_WORKERS = 4
START_TARGET = 0.4
"""What part of a plain start the start with a warm cache may take."""

SESSION = "one plain session, this process"


# Speed.


def measure_speed(
    models: Sequence[LargeModel], effort: Effort, say: Callable[[str], None]
) -> Record:
    """One worker with a plain model, one with a prepared one, and a session here, in turns."""
    return {model.name: _measure_speed_of(model, effort, say) for model in models}


def _plain_session(model: LargeModel) -> Any:
    # Imported here: a process that has the runtime's library mapped would take a part of it off the
    # workers' PSS, which is measured before.
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])


def _measure_speed_of(model: LargeModel, effort: Effort, say: Callable[[str], None]) -> Record:
    inputs = model.inputs(model.rows)
    session = _plain_session(model)
    with ExitStack() as stack:
        masters = {
            way: stack.enter_context(pool(model, 1, prepared=way == SHARED))
            for way in (PLAIN, SHARED)
        }
        check_prepared()
        engines = {way: EngineTime(master) for way, master in masters.items()}
        ways: dict[str, Way] = {
            SESSION: lambda: session.run(None, inputs),
            f"predict, {PLAIN}": lambda: masters[PLAIN].predict(inputs),
            f"predict, {SHARED}": lambda: masters[SHARED].predict(inputs),
        }
        series = in_turns(
            ways,
            effort,
            before=partial(_for_all, [engine.begin for engine in engines.values()]),
            after_round=partial(_for_all, [engine.note for engine in engines.values()]),
        )
    runs = {way: Series(tuple(engine.rounds)) for way, engine in engines.items()}
    here, plain, shared = series.values()
    series |= {f"the engine's own run (mean), {way}": one for way, one in runs.items()}
    ratios = [
        _speed_ratio("predict: shared / plain", shared.over(plain)),
        _speed_ratio("engine's own run: shared / plain", runs[SHARED].over(runs[PLAIN])),
        _speed_ratio("engine's own run, shared / session here", runs[SHARED].over(here)),
        Ratio(text="engine's own run, plain / session here", series=runs[PLAIN].over(here)),
    ]
    title = (
        f"Speed: {model.name}, batch {model.rows}, one worker of one thread, {effort.rounds} rounds"
    )
    return report_times(title, "one run", series, ratios, say)


def _for_all(calls: Sequence[Way]) -> None:
    for call in calls:
        call()


def _speed_ratio(text: str, series: Series) -> Ratio:
    return Ratio(text=text, series=series, bound=SPEED_TARGET, at_least=False)


# Start.


def measure_start(
    folder: Path, models: Sequence[LargeModel], rounds: int, say: Callable[[str], None]
) -> Record:
    """From nothing to ready: plain, with a prepared model, and with a model that has no weights at all."""
    identity = identity_model(folder / "identity.onnx")
    return {model.name: _measure_start_of(model, identity, rounds, say) for model in models}


def _measure_start_of(
    model: LargeModel, identity: Path, rounds: int, say: Callable[[str], None]
) -> Record:
    with _own_cache(model.path.parent / f"cache of {model.name}") as cache:
        cold = _start(pool(model, START_WORKERS, prepared=True))
        stored = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        ways: dict[str, Callable[[], Master]] = {
            PLAIN: lambda: pool(model, START_WORKERS, prepared=False),
            SHARED: lambda: pool(model, START_WORKERS, prepared=True),
            "a model without weights": lambda: Master(
                identity, START_WORKERS, options=EngineOptions(threads=1)
            ),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, new_pool in ways.items():
                seconds[way].append(_start(new_pool()))
    series = {way: Series(tuple(times)) for way, times in seconds.items()}
    plain, shared, empty = series.values()
    first = Series((cold,) * rounds)
    ratios = [
        Ratio(text="shared / plain", series=shared.over(plain), bound=START_TARGET, at_least=False),
        Ratio(text="a model without weights / plain", series=empty.over(plain)),
        Ratio(text="the first start, which prepares the model / plain", series=first.over(plain)),
    ]
    title = (
        f"Start: {model.name}, {START_WORKERS} workers, page cache warm, {rounds} rounds in turns"
    )
    record = report_times(title, "from nothing to ready", series, ratios, say)
    say(
        f"  the first start: {cold:.2f} s; it left {stored / MEGABYTE:.0f} MB on the disk for "
        f"{model.weight_bytes / MEGABYTE:.0f} MB of weights"
    )
    return {**record, "cold_seconds": cold, "stored_bytes": stored}


def _start(master: Master) -> float:
    begin = perf_counter()
    with master:
        return perf_counter() - begin


@contextmanager
def _own_cache(folder: Path) -> Iterator[Path]:
    """An empty cache for the workers that are started meanwhile."""
    before = os.environ["MCINFER_CACHE"]
    os.environ["MCINFER_CACHE"] = str(folder)
    try:
        yield folder
    finally:
        os.environ["MCINFER_CACHE"] = before
