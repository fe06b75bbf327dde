"""Replacing weights while a pool serves: how long it takes, and what replaceable weights cost each run."""

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from math import inf
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
from measuring import Effort, Ratio, Record, Series, Way, in_turns, report_times
from weight_models import (
    LAYERS,
    WEIGHT_BYTES,
    WEIGHTS,
    Array,
    LargeModel,
    check_prepared,
    drawn_weights,
    pool,
    products_answer,
    run_every_worker,
)
from worker_memory import MEGABYTE

from mcinfer import Master, McinferError

WORKERS = 4
CLIENTS = 3
REPLACED = WEIGHTS[:: LAYERS // 6]
"""Six of them: 100 MB."""
TARGET = 5.0
"""How many times as long as one copy of the new weights an update may take."""
FRESH = 2
"""How many updates of a pool go to memory that nobody has touched: the old version is kept until then."""
PATIENCE = 60.0
"""Seconds until something hangs."""

Weights = Mapping[str, Array]


class _Traffic:
    """Clients that send a batch, split over all workers, as soon as they have the last answer.

    Every answer has to be that of one version, whole. As a context manager.

    Attributes:
        answered: How many requests were.
        faults: What went wrong, in words.
    """

    def __init__(self, master: Master, x: Array, expected: Sequence[Array]) -> None:
        self._master = master
        self._x = x
        self._expected = expected
        self._over = False
        self._began = [-inf] * CLIENTS
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(target=self._send, args=(index,)) for index in range(CLIENTS)
        ]
        self.answered = 0
        self.faults: list[str] = []

    def _send(self, index: int) -> None:
        while not self._over:
            begin = perf_counter()
            fault = None
            try:
                y = self._master.predict({"x": self._x}, shards=WORKERS)["y"]
                if not any(np.allclose(y, one, 1e-3, 1e-3) for one in self._expected):
                    fault = "an answer is of no version"
            except McinferError as exc:
                fault = str(exc)
            with self._change:
                self._began[index] = begin
                self.answered += 1
                if fault is not None:
                    self.faults.append(fault)
                self._change.notify_all()

    def wait_for_all_workers(self, after: float) -> None:
        """Wait until every worker has answered a request that was made after that time.

        Which worker ran what is not known. So first each client has to have the answer to a request
        that was made after it, hence to all before; whatever ends from then on was made after it, too.
        That is later than need be by as much as a request takes.
        """
        self._wait(lambda: min(self._began) > after)
        then = self._runs()
        self._wait(lambda: all(a > b for a, b in zip(self._runs(), then, strict=True)))

    def _runs(self) -> list[int]:
        return [worker.runs for worker in self._master.statistics().workers]

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._change:
            if not self._change.wait_for(condition, PATIENCE):
                raise TimeoutError(f"the workers did not answer within {PATIENCE:g} s")

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()


# Updates.


UPDATE = "update_weights"
COPY = "one memcpy, warm private memory"
COPY_FRESH = "one memcpy, fresh private memory"
SEEN = "until all workers have answered with it"

Times = dict[str, list[float]]


def measure_updates(
    model: LargeModel, pools: int, updates: int, say: Callable[[str], None]
) -> Record:
    """Update the same weights again and again, with requests all the time and then without any.

    Args:
        model: That of `products_model`.
        pools: How many pools are started, one after another.
        updates: Of each pool, after the `FRESH` first ones, in each of the two ways.
        say: Prints.
    """
    sources = [_replacements(seed) for seed in (1, 2)]
    x = model.inputs(WORKERS)["x"]
    expected = [products_answer(model, x, one) for one in ({}, *sources)]
    first, busy, idle = Times(), Times(), Times()
    answered = 0
    for _ in range(pools):
        with pool(model, WORKERS, prepared=True, variable_weights=REPLACED) as master:
            check_prepared()
            run_every_worker(master, {"x": x}, 2)
            turn = cycle(sources)
            with _Traffic(master, x, expected) as traffic:
                traffic.wait_for_all_workers(perf_counter())
                for times, count in ((first, FRESH), (busy, updates)):
                    for weights in islice(turn, count):
                        _update(master, weights, traffic.wait_for_all_workers, times)
            if traffic.faults:
                raise RuntimeError(f"{len(traffic.faults)} requests failed: {traffic.faults[0]}")
            answered += traffic.answered

            for weights in islice(turn, updates):
                _update(master, weights, partial(_run_all, master, x), idle)
    return _report_updates(first, busy, idle, answered, say)


def _run_all(master: Master, x: Array, _: float) -> None:
    """What is to be waited for where nobody else sends anything: one run of every worker."""
    run_every_worker(master, {"x": x}, 1)


def _replacements(seed: int) -> dict[str, Array]:
    drawn = drawn_weights(seed)
    return dict(zip(REPLACED, drawn, strict=False))


def _update(master: Master, weights: Weights, wait: Callable[[float], None], times: Times) -> None:
    """Time one update, and copies of the same arrays, whose order changes from one to the next."""
    turn = len(times.get(UPDATE, ()))
    if turn % 2:
        _time_copies(weights, times)
    begin = perf_counter()
    master.update_weights(weights)
    done = perf_counter()
    wait(done)
    seen = perf_counter()
    times.setdefault(UPDATE, []).append(done - begin)
    times.setdefault(SEEN, []).append(seen - begin)
    if not turn % 2:
        _time_copies(weights, times)


def _time_copies(weights: Weights, times: Times) -> None:
    """Copy into memory that was never touched, and into the same again."""
    size = sum(weight.nbytes for weight in weights.values())
    memory = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE), np.float32)
    targets = memory.reshape(len(weights), *next(iter(weights.values())).shape)
    for name in (COPY_FRESH, COPY):
        begin = perf_counter()
        for target, weight in zip(targets, weights.values(), strict=True):
            np.copyto(target, weight)
        times.setdefault(name, []).append(perf_counter() - begin)


def _report_updates(
    first: Times, busy: Times, idle: Times, answered: int, say: Callable[[str], None]
) -> Record:
    megabytes = len(REPLACED) * WEIGHT_BYTES / MEGABYTE
    record: Record = {"requests": answered}
    parts = {
        f"{CLIENTS} clients sending all the time": (busy, TARGET),
        f"the first {FRESH} of each pool, with the same clients": (first, None),
        "no other requests": (idle, None),
    }
    for name, (times, bound) in parts.items():
        series = {key: Series(tuple(values)) for key, values in times.items()}
        title = (
            f"Updates: {megabytes:.1f} MB over {WORKERS} workers, {name}; "
            f"{len(times[UPDATE])} updates"
        )
        ratios = [
            Ratio(
                text="update_weights / memcpy",
                series=series[UPDATE].over(series[COPY]),
                bound=bound,
                at_least=False,
            ),
            Ratio(
                text="update_weights / memcpy into fresh memory",
                series=series[UPDATE].over(series[COPY_FRESH]),
            ),
        ]
        record[name] = report_times(title, "seconds", series, ratios, say)
    say(f"  {answered} requests were answered meanwhile, none failed")
    return record


# What replaceable weights cost.


def measure_cost(
    model: LargeModel, batches: Sequence[int], effort: Effort, say: Callable[[str], None]
) -> Record:
    """The same model on one worker, some or all weights replaceable, as they were and replaced."""
    record: Record = {}
    some = _replacements(1)
    every = dict(zip(WEIGHTS, drawn_weights(1), strict=True))
    with ExitStack() as stack:

        def new_pool(names: Sequence[str], weights: Weights | None = None) -> Master:
            master = pool(model, 1, prepared=True, variable_weights=names)
            stack.enter_context(master)
            if weights is not None:
                master.update_weights(weights)
            return master

        masters = {
            "constant weights": new_pool(()),
            f"{len(REPLACED)} replaceable": new_pool(REPLACED),
            f"{len(REPLACED)} replaced": new_pool(REPLACED, some),
            f"{LAYERS} replaceable": new_pool(WEIGHTS),
            f"{LAYERS} replaced": new_pool(WEIGHTS, every),
        }
        check_prepared()
        for batch in batches:
            inputs = model.inputs(batch)
            ways: dict[str, Way] = {
                name: partial(master.predict, inputs) for name, master in masters.items()
            }
            series = in_turns(ways, effort)
            constant, *others = series
            ratios = [
                Ratio(text=f"{name} / {constant}", series=series[name].over(series[constant]))
                for name in others
            ]
            title = (
                f"Replaceable weights: {model.name}, batch {batch}, one worker, "
                f"{effort.rounds} rounds in turns"
            )
            record[f"batch {batch}"] = report_times(title, "predict", series, ratios, say)
    return record
