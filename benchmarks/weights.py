"""Measure what one copy of the weights for all workers is worth, and what replacing weights costs.

    python benchmarks/weights.py [--quick] [--only PART]

Workers that map one prepared model (`shared`) beside workers that each load it (`plain`): the speed of a run
(`speed`), the time until a pool is ready (`start`), and, with shared ones, how long replacing weights takes
while requests run (`update`) and what replaceable weights cost a run (`replaceable`). What processes take of
the memory is in `processes_memory.py`. The models have 403 and 201 MB of weights.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter

import numpy as np
from measuring import (
    Lines,
    Ratio,
    Series,
    Setting,
    in_turns,
    main,
    rates_in_turns,
    series_table,
)
from models import (
    MLP_LAYERS,
    MLP_WIDTH,
    Arrays,
    Model,
    identity_model,
    mlp,
    normal,
    unet_inputs,
    unet_model,
)

from mcinfer import EngineOptions, Master
from mcinfer.bench.baselines import open_session
from mcinfer.model_cache.cache import Cache

PLAIN = "plain"
SHARED = "shared"
START_WORKERS = 4
UPDATE_WORKERS = 4
CLIENTS = 3
WEIGHTS = [f"layers.{layer}.weight" for layer in range(MLP_LAYERS)]
REPLACED = WEIGHTS[:: MLP_LAYERS // 6]
"""Six of them: 100 MB."""

SPEED_TARGET = 1.03
"""How many times as long as a plain run one on prepared weights may take."""
START_TARGET = 0.4
"""What part of a plain start the start with a warm cache may take."""
UPDATE_TARGET = 5.0
"""How many times as long as one copy of the new weights an update may take."""


def mlp_of(setting: Setting) -> Model:
    """Layers of products; eight rows."""
    path = setting.folder / "mlp.onnx"
    if not path.exists():
        mlp(path)
    return Model(name="24 MatMul layers, 8 rows", path=path, inputs=normal(8, MLP_WIDTH))


def models_of(setting: Setting) -> list[Model]:
    path = setting.folder / "unet.onnx"
    if not path.exists():
        unet_model(path)
    return [mlp_of(setting), Model(name="small UNet, 1 row", path=path, inputs=unet_inputs(1))]


def pool(model: Model, workers: int, way: str = SHARED, names: Sequence[str] = ()) -> Master:
    """A pool, not started yet, of workers with one thread each; those of `names` are replaceable."""
    prepare = "always" if way == SHARED else "never"
    options = EngineOptions(threads=1, prepare=prepare, variable_weights=names)  # type: ignore[arg-type]
    return Master(model.path, workers, options=options)


def check_prepared() -> None:
    """Raise unless some process holds a prepared model: without one, what is measured is another thing."""
    if not any(entry.in_use for entry in Cache.default().entries()):
        raise RuntimeError("no prepared model is in use: it could not be prepared or not be mapped")


def measure_speed(setting: Setting) -> Lines:
    """One worker with a plain model, one with a prepared one, and a session here."""
    for model in models_of(setting):
        session = open_session(str(model.path), 1, ["CPUExecutionProvider"])
        with pool(model, 1, PLAIN) as plain, pool(model, 1, SHARED) as shared:
            check_prepared()
            ways: dict[str, Callable[[], object]] = {
                "one plain session, this process": partial(session.run, None, model.inputs),
                PLAIN: partial(plain.predict, model.inputs),
                SHARED: partial(shared.predict, model.inputs),
            }
            series = in_turns(ways, setting.effort(1.5))
        yield series_table(f"{model.name}, one worker of one thread", series)
        over = series[SHARED].over(series[PLAIN])
        yield str(Ratio(text="shared / plain", series=over, bound=SPEED_TARGET, at_least=False))


def measure_start(setting: Setting) -> Lines:
    """From nothing to ready, page cache warm: plain, prepared, and a model that has no weights at all."""

    def start(new_pool: Callable[[], Master]) -> float:
        begin = perf_counter()
        with new_pool():
            return perf_counter() - begin

    cache = setting.folder / "cache of starts"
    usual, os.environ["MCINFER_CACHE"] = os.environ["MCINFER_CACHE"], str(cache)
    empty = identity_model(setting.folder / "identity.onnx")
    for model in models_of(setting):
        before = _bytes(cache)
        cold = start(partial(pool, model, START_WORKERS))
        options = EngineOptions(threads=1)
        pools: dict[str, Callable[[], Master]] = {
            PLAIN: partial(pool, model, START_WORKERS, PLAIN),
            SHARED: partial(pool, model, START_WORKERS),
            "a model without weights": partial(Master, empty, START_WORKERS, options=options),
        }
        ways = {name: partial(start, new_pool) for name, new_pool in pools.items()}
        series = rates_in_turns(ways, setting.rounds)
        yield series_table(f"{model.name}, start of {START_WORKERS} workers", series)
        over = series[SHARED].over(series[PLAIN])
        yield str(Ratio(text="shared / plain", series=over, bound=START_TARGET, at_least=False))
        yield (
            f"  the first start, which prepares the model: {cold:.2f} s; it left "
            f"{(_bytes(cache) - before) / 1e6:.0f} MB on the disk for {model.weight_bytes / 1e6:.0f} MB"
        )
    os.environ["MCINFER_CACHE"] = usual


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure_update(setting: Setting) -> Lines:
    """Update 100 MB again and again while clients ask; each answer has to be that of one version, whole."""
    model = mlp_of(setting)
    versions = [_replacements(seed) for seed in (1, 2)]
    x = {"x": model.inputs["x"][:UPDATE_WORKERS]}
    over, faults, answered = threading.Event(), list[str](), [0] * CLIENTS
    times: dict[str, list[float]] = {"update_weights": [], "one memcpy": []}

    def ask(client: int) -> None:
        while not over.is_set():
            y = master.predict(x, shards=UPDATE_WORKERS)["y"]
            answered[client] += 1
            if not any(np.allclose(y, one, 1e-3, 1e-3) for one in expected):
                faults.append("an answer is of no version")

    with pool(model, UPDATE_WORKERS, names=REPLACED) as master:
        check_prepared()
        expected = [master.predict(x)["y"].copy()]
        for weights in versions:
            master.update_weights(weights)
            expected.append(master.predict(x)["y"].copy())
        target = {name: np.empty_like(weight) for name, weight in versions[0].items()}
        clients = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
        for client in clients:
            client.start()
        for weights in islice(cycle(versions), 2 + setting.rounds):
            begin = perf_counter()
            for name, weight in weights.items():
                np.copyto(target[name], weight)
            copied = perf_counter()
            master.update_weights(weights)
            times["one memcpy"].append(copied - begin)
            times["update_weights"].append(perf_counter() - copied)
        over.set()
        for client in clients:
            client.join()
    if faults:
        raise RuntimeError(f"{len(faults)} requests failed: {faults[0]}")
    # The first two go to memory that nobody has touched, or are the first copies.
    series = {name: Series(tuple(values[2:])) for name, values in times.items()}
    size = sum(weight.nbytes for weight in versions[0].values())
    title = f"{size / 1e6:.1f} MB, {UPDATE_WORKERS} workers, {CLIENTS} clients"
    yield series_table(title, series)
    ratio = series["update_weights"].over(series["one memcpy"])
    text = "update_weights / memcpy"
    yield str(Ratio(text=text, series=ratio, bound=UPDATE_TARGET, at_least=False))
    yield f"  {sum(answered)} requests were answered meanwhile, none failed"


def _replacements(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    scale = np.float32((2 / MLP_WIDTH) ** 0.5)
    return {
        name: rng.standard_normal((MLP_WIDTH, MLP_WIDTH), np.float32) * scale for name in REPLACED
    }


def measure_replaceable(setting: Setting) -> Lines:
    """The same model on one worker, some or all weights replaceable."""
    model = mlp_of(setting)
    with ExitStack() as stack:
        masters = {
            name: stack.enter_context(pool(model, 1, names=names))
            for name, names in (
                ("constant weights", ()),
                (f"{len(REPLACED)} replaceable", REPLACED),
                (f"{MLP_LAYERS} replaceable", WEIGHTS),
            )
        }
        check_prepared()
        for rows in (1, 8):
            inputs = normal(rows, MLP_WIDTH)
            ways = {name: partial(one.predict, inputs) for name, one in masters.items()}
            series = in_turns(ways, setting.effort(0.4))
            constant, *others = series
            yield series_table(f"replaceable weights, batch {rows}", series)
            for name in others:
                over = series[name].over(series[constant])
                yield str(Ratio(text=f"{name} / {constant}", series=over))


PARTS = {
    "speed": measure_speed,
    "start": measure_start,
    "update": measure_update,
    "replaceable": measure_replaceable,
}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, rounds=9))
