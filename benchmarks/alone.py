"""What a request that comes alone takes, and what the whole CPU for it costs others.

    python benchmarks/alone.py [--quick] [--only PART] [--write docs/benchmark_parts.md]

A worker on the CPU has its share of the cores, and all cores for a run whose request comes alone. Against a
plain session of ONNX Runtime with all cores, and against workers that keep to their share (`threads=`), in
turns: one caller with one row; eight callers; a load that swings between one caller and eight every 50 ms;
ever shorter runs; and the memory of two workers. The rows of the encoders take some 1 and 20 ms on one core.
"""

import statistics
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter, sleep

import onnxruntime as ort
from measuring import (
    Lines,
    Ratio,
    Series,
    Setting,
    in_turns,
    main,
    pss_of_workers,
    rate_of_callers,
    rates_in_turns,
)
from models import TOKENS, Model, encoder_model, mlp, normal, usual_models

from mcinfer import EngineOptions, Master
from mcinfer.bench.load import rotated
from mcinfer.scheduler import dispatch

WORKERS = 2
SWING_SECONDS = 0.05
SHORT = ((1, 64), (1, 128), (1, 192), (2, 128), (1, 256), (2, 192))
"""Layers of an encoder, and their width."""
WARM_SECONDS = 1.5


def pool(model: Model, workers: int = WORKERS, *, narrow: bool = False) -> Master:
    """A pool of which each worker has a core; with `narrow`, always no more than that."""
    return Master(model.path, workers, options=EngineOptions(threads=1 if narrow else None))


def warmed(opened: ExitStack, model: Model, master: Master) -> Master:
    """Ask until the workers have opened what they open for requests that come alone."""
    opened.enter_context(master)
    end = perf_counter() + WARM_SECONDS
    while perf_counter() < end:
        master.predict(model.inputs)
    return master


def session(model: Model) -> Callable[[], object]:
    plain = ort.InferenceSession(model.path, providers=["CPUExecutionProvider"])
    return partial(plain.run, None, model.inputs)


def models_of(setting: Setting) -> list[Model]:
    found = usual_models(setting.folder)
    return found[1:2] if setting.quick else found


def measure_single(setting: Setting) -> Lines:
    """One caller, one row: ratios to a plain session with all cores."""
    for model in models_of(setting):
        with ExitStack() as opened:
            pools = {
                "2 workers": warmed(opened, model, pool(model)),
                "4 workers": warmed(opened, model, pool(model, 4)),
                "2 workers, own cores alone": warmed(opened, model, pool(model, narrow=True)),
            }
            ways: dict[str, Callable[[], object]] = {"session": session(model)}
            ways |= {name: partial(master.predict, model.inputs) for name, master in pools.items()}
            times = in_turns(ways, setting.effort(0.5))
            wide = [sum(w.wide for w in pools[n].statistics().workers) for n in [*pools][:2]]
        for name in pools:
            series = times[name].over(times["session"])
            bound = None if name.endswith("alone") else 1.08
            text = f"{model.name}: {name} / session"
            yield str(Ratio(text=text, series=series, bound=bound, at_least=False))
        p50 = ", ".join(f"{name} {1e3 * one.middle:.3g} ms" for name, one in times.items())
        yield f"    {p50}; wide runs {wide}"


def measure_clients(setting: Setting) -> Lines:
    """Eight callers: answers a second, over those of workers that keep to their cores."""
    for model in models_of(setting):
        with ExitStack() as opened:
            ask = {
                "ours": warmed(opened, model, pool(model)),
                "narrow": warmed(opened, model, pool(model, narrow=True)),
            }
            seconds = setting.seconds(1.5)
            ways = {
                name: partial(rate_of_callers, partial(one.predict, model.inputs), 8, seconds)
                for name, one in ask.items()
            }
            rates = rates_in_turns(ways, setting.rounds)
        series = rates["ours"].over(rates["narrow"])
        text = f"{model.name}: answers a second, 8 callers / own cores alone"
        yield str(Ratio(text=text, series=series, bound=0.98))


def swing(request: Callable[[], object], seconds: float) -> tuple[float, float]:
    """p50 and p99 of a load that has one caller, then eight, and so on."""
    begin, found, clients = perf_counter(), [], 8

    def ask(i: int) -> None:
        while (now := perf_counter()) < begin + seconds:
            phase, since = divmod(now - begin, SWING_SECONDS)
            if i and int(phase) % 2 == 0:
                sleep(SWING_SECONDS - since)
                continue
            request()
            found.append(perf_counter() - now)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuts = statistics.quantiles(found, n=100)
    return cuts[49], cuts[98]


def measure_swing(setting: Setting) -> Lines:
    """p50 and p99 of a load that swings, over those of the better of both fixed ways."""
    for model in models_of(setting):
        with ExitStack() as opened:
            pools = {
                "ours": warmed(opened, model, pool(model)),
                "narrow": warmed(opened, model, pool(model, narrow=True)),
                "one": warmed(opened, model, pool(model, 1)),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in pools}
            for number in range(setting.rounds):
                for name in rotated([*pools], number):
                    request = partial(pools[name].predict, model.inputs)
                    found[name].append(swing(request, setting.seconds(3.0)))
        for place, what in enumerate(("p50", "p99")):
            ours, narrow, one = ([values[place] for values in found[name]] for name in pools)
            series = Series(tuple(a / min(b, c) for a, b, c in zip(ours, narrow, one, strict=True)))
            text = f"{model.name}: {what} of a swinging load / the better fixed way"
            yield str(Ratio(text=text, series=series, bound=1.1, at_least=False))


def measure_short(setting: Setting) -> Lines:
    """Ever longer runs, all of them wide, over those on one core: where `dispatch.WIDE_RUN` has to be."""
    least, dispatch.WIDE_RUN = dispatch.WIDE_RUN, 0.0
    try:
        for layers, width in SHORT[:2] if setting.quick else SHORT:
            path = setting.folder / f"{layers}_{width}.onnx"
            encoder_model(path, layers=layers, width=width)
            model = Model(name="", path=path, inputs=normal(1, TOKENS, width))
            with ExitStack() as opened:
                ways = {
                    "ours": warmed(opened, model, pool(model)),
                    "narrow": warmed(opened, model, pool(model, narrow=True)),
                }
                calls = {name: partial(way.predict, model.inputs) for name, way in ways.items()}
                times = in_turns(calls, setting.effort(0.4))
                all_cores, one = (f"{1e3 * mean_run(way):.2f} ms" for way in ways.values())
            text = f"a run of {one} on one core, {all_cores} with all: request, all cores / one"
            yield str(Ratio(text=text, series=times["ours"].over(times["narrow"])))
    finally:
        dispatch.WIDE_RUN = least


def mean_run(master: Master) -> float:
    workers = master.statistics().workers
    return sum(w.busy_seconds for w in workers) / sum(w.runs for w in workers)


def measure_memory(setting: Setting) -> Lines:
    """Memory (PSS) of two workers after requests that came alone, over that without wide runs."""
    path = mlp(setting.folder / "mlp.onnx")
    model = Model(name="24 MatMul layers", path=path, inputs=normal(8, 2048))

    def memory(narrow: bool) -> float:
        with ExitStack() as opened:
            master = warmed(opened, model, pool(model, narrow=narrow))
            for _ in range(3):
                master.predict(model.inputs, shards=WORKERS)
            return pss_of_workers(master)

    ways = {name: partial(memory, name == "narrow") for name in ("ours", "narrow")}
    found = rates_in_turns(ways, setting.rounds)
    series = found["ours"].over(found["narrow"])
    text = f"{model.name}: memory of two workers / own cores alone"
    yield str(Ratio(text=text, series=series, bound=1.1, at_least=False))


PARTS = {
    "single": measure_single,
    "clients": measure_clients,
    "swing": measure_swing,
    "short": measure_short,
    "memory": measure_memory,
}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, mark="alone", cores=None))
