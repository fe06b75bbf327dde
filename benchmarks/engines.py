"""OpenVINO's engine beside ONNX Runtime's, and beside OpenVINO's own `benchmark_app`.

    python benchmarks/engines.py [--quick] [--only PART] [--write docs/openvino.md]

It needs ``pip install onnx openvino``. Three models: the example's UNet `small`, an encoder,
and MobileNetV2's structure. *latency*: one caller whose batch of two is split over two workers, over one
session of ONNX Runtime with all cores, and how far the answers differ. *throughput*: requests of one row from
eight callers, over what ``benchmark_app -hint throughput`` answers. *memory*: of the workers, and of one
worker with a stream for each core. All in turns. ``benchmark_app`` compiles the model for the shapes of its
requests alone; so do the pools with *fixed shapes* (``free_dimensions``).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from alone import session
from measuring import (
    MEGABYTE,
    Lines,
    Ratio,
    Setting,
    a_second,
    in_turns,
    main,
    pss_of_workers,
    rate_of_callers,
    rates_in_turns,
)
from models import Model, unet_inputs, usual_models

from mcinfer import EngineOptions, Master
from mcinfer.bench.figures import difference_text
from mcinfer.bench.load import largest_difference
from mcinfer.config import PrecisionKind

WORKERS = 2
CLIENTS = 8
CORES = len(os.sched_getaffinity(0))
PRECISIONS: tuple[PrecisionKind, ...] = ("f32", "bf16")
LEAST_ANSWERS = 100
"""In a turn: a rate of fewer is too coarse."""
SKIPPED = "encoder, 20 ms"

_RATE = re.compile(r"Throughput:\s+([\d.]+) FPS")


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 matrices by itself."""
    flags = Path("/proc/cpuinfo").read_text("utf-8").split("flags", 1)[1].partition("\n")[0].split()
    return bool({"amx_bf16", "avx512_bf16"} & {*flags})


def models_of(setting: Setting) -> list[Model]:
    found = [model for model in usual_models(setting.folder) if model.name != SKIPPED]
    return found[1:2] if setting.quick else found


def pool(
    model: Model, precision: PrecisionKind | None, workers: int = WORKERS, **more: Any
) -> Master:
    """A pool of OpenVINO in a precision; of ONNX Runtime without one."""
    if precision is None:
        return Master(model.path, workers, **more)
    options = EngineOptions(precision=precision, **more)
    return Master(model.path, workers, engine="openvino", options=options)


def two_rows(model: Model) -> Model:
    """The same model with a batch of two."""
    if "UNet" in model.name:
        return Model(name=model.name, path=model.path, inputs=unet_inputs(2))
    rng = np.random.default_rng(1)
    inputs = {n: rng.random((2, *row.shape[1:]), np.float32) for n, row in model.inputs.items()}
    return Model(name=model.name, path=model.path, inputs=inputs)


def measure_latency(setting: Setting) -> Lines:
    """A batch of two over two workers, over one session of ONNX Runtime with all cores."""
    for one in models_of(setting):
        model = two_rows(one)
        bounds = {"f32": 0.95, "bf16": 0.6 if has_bf16() else None} if "UNet" in one.name else {}
        with ExitStack() as opened:
            plain = opened.enter_context(pool(model, None))
            pools: dict[str, tuple[PrecisionKind | None, Master]] = {"onnxruntime": (None, plain)}
            for precision in PRECISIONS:
                for name, sizes in (("", {}), (", fixed shapes", sizes_of(plain, one))):
                    master = opened.enter_context(pool(model, precision, free_dimensions=sizes))
                    pools[f"openvino {precision}{name}"] = precision, master
            ways: dict[str, Callable[[], object]] = {"session": session(model)}
            answers = {}
            for name, (_, master) in pools.items():
                if not name.endswith("fixed shapes"):
                    master.learn(model.inputs)
                ways[name] = partial(master.predict, model.inputs)
                answers[name] = dict(master.predict(model.inputs))
            times = in_turns(ways, setting.effort(1.0))
        for name, (kind, _) in pools.items():
            series = times[name].over(times["session"])
            text = f"{model.name}: 2 rows, {name}, 2 workers / session"
            ratio = Ratio(text=text, series=series, bound=bounds.get(kind or ""), at_least=False)
            differs = difference_text(largest_difference(answers[name], answers["onnxruntime"]))
            yield f"{ratio}{f'  difference {differs}' if kind else ''}"
        yield "    " + ", ".join(f"{n} {1e3 * each.middle:.3g} ms" for n, each in times.items())


def sizes_of(master: Master, model: Model) -> dict[str, int]:
    """The model's symbolic dimensions, with their sizes in its row."""
    shapes = [(spec.shape, model.inputs[spec.name].shape) for spec in master.inputs]
    pairs = [pair for shape in shapes for pair in zip(*shape, strict=True)]
    return {name: size for name, size in pairs if isinstance(name, str)}


def app_rate(model: Model, precision: str, seconds: float) -> float:
    """Requests a second of OpenVINO's `benchmark_app` in its throughput mode, inputs of the same shapes."""
    shapes = ",".join(f"{name}[{','.join(map(str, x.shape))}]" for name, x in model.inputs.items())
    command = [str(Path(sys.executable).with_name("benchmark_app")), "-m", str(model.path)]
    command += ["-d", "CPU", "-hint", "throughput", "-infer_precision", precision]
    command += ["-t", f"{seconds:.0f}", "-shape", shapes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = _RATE.search(ended.stdout)
    if found is None:
        raise SystemExit(f"benchmark_app: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return float(found[1])


def measure_throughput(setting: Setting) -> Lines:
    """Eight callers, over `benchmark_app` in its throughput mode."""
    for model in models_of(setting):
        for precision in PRECISIONS:
            with ExitStack() as opened:
                first = opened.enter_context(pool(model, precision))
                fixed = pool(model, precision, free_dimensions=sizes_of(first, model))
                streams = pool(model, precision, 1, streams=CORES)
                pools = {
                    "2 workers": first,
                    "2 workers, fixed shapes": opened.enter_context(fixed),
                    "1 worker, streams": opened.enter_context(streams),
                }
                ask = {name: partial(one.predict, model.inputs) for name, one in pools.items()}
                rate = rate_of_callers(ask["2 workers"], CLIENTS, 1.0)
                seconds = max(3.0, LEAST_ANSWERS / rate)
                ways: dict[str, Callable[[], float]] = {
                    name: partial(rate_of_callers, request, CLIENTS, seconds)
                    for name, request in ask.items()
                }
                ways["app"] = partial(app_rate, model, precision, seconds)
                rates = rates_in_turns(ways, setting.rounds)
            for name in pools:
                series = rates[name].over(rates["app"])
                text = f"{model.name}: requests/s, {precision}, {name} / benchmark_app"
                yield str(Ratio(text=text, series=series, bound=0.95))
            yield "    " + ", ".join(f"{n} {a_second(one.middle)}" for n, one in rates.items())


def measure_memory(setting: Setting) -> Lines:
    """Memory (PSS) of the workers after runs of each, in MB."""
    for model in models_of(setting):
        ways: Mapping[str, Callable[[], Master]] = {
            "onnxruntime, 2 workers": partial(pool, model, None),
            "openvino, 1 worker": partial(pool, model, "f32", 1),
            "openvino, 2 workers": partial(pool, model, "f32"),
            "openvino, 1 worker, 2 streams": partial(pool, model, "f32", 1, streams=2),
        }
        found = []
        for name, start in ways.items():
            with start() as master:
                rate_of_callers(partial(master.predict, model.inputs), CLIENTS, 1.0)
                found.append(f"{name} {pss_of_workers(master) / MEGABYTE:.0f} MB")
        yield f"  {model.name}: {', '.join(found)}"
    yield f"The processor {'has' if has_bf16() else 'has not'} bfloat16."


PARTS = {
    "latency": measure_latency,
    "throughput": measure_throughput,
    "memory": measure_memory,
}

if __name__ == "__main__":
    # Importing OpenVINO would send that it was; without this package it does not.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    sys.exit(main(__doc__, PARTS, mark="engines", cores=None))
