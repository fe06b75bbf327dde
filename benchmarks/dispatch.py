"""Measure what mcinfer costs beside the model's own run, as ratios within one run.

    python benchmarks/dispatch.py [--quick] [--only PART]

mcinfer stands beside the same request path in its fewest steps (`owned.py`), bare and with all that a master
needs: one caller whose batch is split over two workers, in four sizes, also against pipes (`split`); requests
of 8 KB of 1, 4 and 16 callers, and of one with many futures (`callers`); runs of a millisecond, also against
threads on one session (`runs`). Where mcinfer takes longer than the path with all, its own steps cost it;
where that path does not do better, the architecture does. Last, requests that may be joined, over requests
that may not (`joins`), and an inline master beside a plain session, 8 KB, in the caller's process (`inline`).
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from measuring import (
    Lines,
    Ratio,
    Series,
    Setting,
    a_second,
    answer,
    in_turns,
    main,
    rate_of_callers,
    rate_of_futures,
    rates_in_turns,
    series_table,
)
from models import TOKENS, Arrays, Model, encoder_model, identity_model, mlp, normal, usual_models
from owned import Owned

from mcinfer import Master
from mcinfer.bench.baselines import Pipe, open_session
from mcinfer.bench.way import Setup
from mcinfer.sharding import Split

BATCH = 2
WORKERS = 2
SIZES = {"8 KB": 1024, "0.8 MB": 100_000, "8 MB": 1_000_000, "64 MB": 8_000_000}
"""Of a batch, by name: elements of a row."""
FUTURES = 64
"""Under way at once, of one thread."""

BARE = "owned, bare"
FULL = "owned, with all"
PREDICT = "mcinfer.predict"
SUBMIT = "mcinfer.submit"
PIPE = "pipe: pickled through multiprocessing.Pipe"
THREADS = "threads on one session of one thread"

MOST_PREDICT = {"8 KB": 1.4, "0.8 MB": 1.3, "8 MB": 1.2}
"""By size, how many times as long as the bare path a predict may take."""
LEAST_PIPE = {"8 KB": 0.6, "0.8 MB": 3.0, "8 MB": 10.0, "64 MB": 25.0}
"""By size, how many times as long as a predict the pipe is to take."""
LEAST_RATE = {1: None, 4: 0.5, 16: 0.5}
"""By callers, what part of the bare path's requests per second is wanted."""
MOST_INLINE = 15.0
"""Microseconds that an inline predict may add to the session's run."""


def pipe_of(model: str) -> Pipe:
    """The pipe's processes, one for each worker."""
    return Pipe(
        Setup(
            model=model,
            cores=WORKERS,
            devices=("cpu:0",) * WORKERS,
            threads=1,
            split=Split(inputs={"x": 0}, outputs={"y": 0}, known="declared"),
            max_batch_size=1,
        )
    )


def measure_split(setting: Setting) -> Lines:
    """A batch of 2 over 2 workers, of an Identity model."""
    model = str(identity_model(setting.folder / "identity.onnx"))
    with ExitStack() as stack:
        pipe = pipe_of(model)
        stack.callback(pipe.close)
        calls: dict[str, Callable[[Arrays], Any]] = {
            BARE: stack.enter_context(Owned(model, WORKERS)).predict,
            FULL: stack.enter_context(Owned(model, WORKERS, full=True)).predict,
            PREDICT: stack.enter_context(Master(model, WORKERS)).predict,
            PIPE: pipe.run,
        }
        for size in SIZES:
            inputs = normal(BATCH, SIZES[size])
            for name, call in calls.items():
                if not np.array_equal(call(inputs)["y"], inputs["x"]):
                    raise RuntimeError(f"{name}: a wrong answer")
            ways = {name: partial(call, inputs) for name, call in calls.items()}
            series = in_turns(ways, setting.effort(0.25))
            predict = series[PREDICT]
            yield series_table(f"{size}, split", series)
            yield str(
                Ratio(
                    text=f"{PREDICT} / {BARE}",
                    series=predict.over(series[BARE]),
                    bound=MOST_PREDICT.get(size),
                    at_least=False,
                )
            )
            yield str(Ratio(text=f"{PREDICT} / {FULL}", series=predict.over(series[FULL])))
            over = series[PIPE].over(predict)
            yield str(Ratio(text=f"pipe / {PREDICT}", series=over, bound=LEAST_PIPE[size]))


def measure_callers(setting: Setting) -> Lines:
    """Requests of 8 KB a second: split, of some threads; then whole, of threads and of futures."""
    model = str(identity_model(setting.folder / "identity.onnx"))
    inputs = normal(BATCH, SIZES["8 KB"])
    seconds = setting.seconds(1.5)
    with ExitStack() as stack:
        split, whole = (
            {
                BARE: stack.enter_context(Owned(model, WORKERS, whole=one)),
                FULL: stack.enter_context(Owned(model, WORKERS, whole=one, full=True)),
            }
            for one in (False, True)
        )
        master = stack.enter_context(Master(model, WORKERS))
        predicts: dict[str, Callable[[], object]] = {
            name: partial(pool.predict, inputs) for name, pool in split.items()
        }
        predicts[PREDICT] = partial(master.predict, inputs)
        submits: dict[str, Callable[[], Any]] = {
            name: partial(pool.submit, inputs) for name, pool in whole.items()
        }
        submits[SUBMIT] = partial(master.submit, inputs)
        for callers, bound in LEAST_RATE.items():
            title = f"8 KB, split, callers: {callers}"
            ways = {n: partial(rate_of_callers, c, callers, seconds) for n, c in predicts.items()}
            yield from rates(title, ways, setting.rounds, PREDICT, {BARE: bound})
        for callers in LEAST_RATE:
            title = f"8 KB, whole, callers: {callers}"
            ways = {
                name: partial(rate_of_callers, partial(answer, submit), callers, seconds)
                for name, submit in submits.items()
            }
            yield from rates(title, ways, setting.rounds, SUBMIT)
        title = f"8 KB, whole, one caller, {FUTURES} futures"
        ways = {n: partial(rate_of_futures, s, seconds, FUTURES) for n, s in submits.items()}
        yield from rates(title, ways, setting.rounds, SUBMIT)


def rates(
    title: str,
    ways: Mapping[str, Callable[[], float]],
    rounds: int,
    ours: str,
    bounds: Mapping[str, float | None] = {},
) -> Lines:
    """A table of rates, with ours over the others."""
    series = rates_in_turns(ways, rounds)
    yield series_table(title, series, a_second)
    for name in [name for name in series if name != ours]:
        over = series[ours].over(series[name])
        yield str(Ratio(text=f"{ours} / {name}", series=over, bound=bounds.get(name)))


def measure_runs(setting: Setting) -> Lines:
    """One row of an encoder, some 0.6 to 1 ms on one core, of 8 callers."""
    model = str(encoder_model(setting.folder / "encoder.onnx"))
    inputs = normal(1, TOKENS, 256)
    session = open_session(model, 1, ["CPUExecutionProvider"])
    with (
        Owned(model, WORKERS, whole=True) as bare,
        Owned(model, WORKERS, whole=True, full=True) as full,
        Master(model, WORKERS) as master,
    ):
        calls: dict[str, Callable[[], object]] = {
            BARE: lambda: bare.predict(inputs),
            FULL: lambda: full.predict(inputs),
            THREADS: lambda: session.run(None, inputs),
            SUBMIT: lambda: master.submit(inputs).result(),
        }
        seconds = setting.seconds(1.5)
        ways = {name: partial(rate_of_callers, call, 8, seconds) for name, call in calls.items()}
        bounds = {BARE: 0.85, THREADS: 0.5}
        yield from rates("encoder, callers: 8", ways, setting.rounds, SUBMIT, bounds)


def measure_joins(setting: Setting) -> Lines:
    """Answers a second of callers of one row each: with `max_batch_size`, over those without."""
    models = usual_models(setting.folder)[1:]
    for layers, width in ((6, 1024), (8, 1536)):
        path = mlp(setting.folder / f"mlp{layers}.onnx", layers, width)
        models.append(Model(name=f"MLP, {layers} x {width}", path=path, inputs=normal(1, width)))
    for model in models:
        with (
            Master(model.path, WORKERS) as apart,
            Master(model.path, WORKERS, max_batch_size=8) as joined,
        ):
            joined.learn(model.inputs)
            calls = {
                name: partial(answer, partial(master.submit, model.inputs))
                for name, master in (("apart", apart), ("joined", joined))
            }
            for callers in (1, 8, 16):
                rate_of_callers(calls["joined"], callers, setting.seconds(3.0))  # it compares
                ways = {
                    name: partial(rate_of_callers, call, callers, setting.seconds(1.5))
                    for name, call in calls.items()
                }
                series = rates_in_turns(ways, setting.rounds)
                over = series["joined"].over(series["apart"])
                yield str(
                    Ratio(
                        text=f"{model.name}, callers: {callers}: joined / apart",
                        series=over,
                        bound=0.97,
                    )
                )


def measure_inline(setting: Setting) -> Lines:
    """One request of 8 KB: what an inline master adds to the session's own run."""
    model = str(identity_model(setting.folder / "identity.onnx"))
    inputs = normal(BATCH, SIZES["8 KB"])
    session = open_session(model, 1, ["CPUExecutionProvider"])
    with Master(model, "inline") as master:
        ways = {
            "session.run": partial(session.run, None, inputs),
            PREDICT: partial(master.predict, inputs),
        }
        series = in_turns(ways, setting.effort(0.25))
    yield series_table("8 KB, inline", series)
    pairs = zip(series[PREDICT].values, series["session.run"].values, strict=True)
    more = Series(tuple(1e6 * (ours - plain) for ours, plain in pairs))
    text = f"µs of {PREDICT} beside those of session.run"
    yield str(Ratio(text=text, series=more, bound=MOST_INLINE, at_least=False))


PARTS = {
    "split": measure_split,
    "callers": measure_callers,
    "runs": measure_runs,
    "joins": measure_joins,
    "inline": measure_inline,
}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, rounds=9))
