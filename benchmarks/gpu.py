"""Measure what workers of one card give, against one session of ONNX Runtime on it.

    python benchmarks/gpu.py [--quick] [--only PART] [--write docs/gpu.md]
    python benchmarks/gpu.py --emulated

Latency and throughput, with tensors of NumPy and of CuPy (`speed`); what workers take of the card's memory,
with one copy of the weights and with one each (`memory`); what requests meet when workers are killed
(`kills`). Models are the UNet of Stable Diffusion 2.1 in float16, and an encoder of BERT's sizes. `--quick`
takes smaller models and fewer samples.

`--emulated` runs all of it in tiny sizes on the tests' emulation of a driver, where ONNX Runtime serves
with its CPU provider. It shows that the benchmark works; its numbers say nothing, so they go to no page.
"""

import argparse
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from measuring import (
    Lines,
    Series,
    Setting,
    a_second,
    in_turns,
    main,
    markdown,
    rate_of_callers,
    rate_of_futures,
    rates_in_turns,
    spread,
)
from models import BERT, Arrays, Model, encoder_model, normal, unet_inputs, unet_model

from mcinfer import EngineOptions, Master, McinferError
from mcinfer.cards.cuda import Card
from mcinfer.cards.nvidia_smi import gpus
from mcinfer.cli.probes import gpus_and_driver
from mcinfer.config import Device

DEVICE = "cuda:0"
WORKERS = (1, 2, 4)
IN_FLIGHT = 8
"""Requests that are under way at any moment, where throughput is measured."""

WEIGHTS_TARGET = 1.35
"""How often the weights may lie in the memory of a card with four workers."""
TOLERANCE = 2e-2
"""Largest difference of two answers, relative to the largest element; float16, and TensorFloat-32."""
GB = 1e9

EMULATED = "--emulated" in sys.argv
if EMULATED:
    # Before all else; workers get the same path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu" / "emulated"))
    os.environ["MCINFER_EMULATED_CARDS"] = "1"


def models_of(setting: Setting) -> Iterator[Model]:
    """The models of the page; for a first look, smaller ones of the same kinds."""
    size = "tiny" if EMULATED else "small" if setting.quick else "sd21"
    inputs = {
        name: array.astype(np.float16) if array.dtype == np.float32 else array
        for name, array in unet_inputs(1, size).items()
    }
    path = unet_model(setting.folder / "unet.onnx", size, half=True)
    yield Model(name=f"UNet `{size}`", path=path, inputs=inputs)
    # Emulated, weights of several pieces of the driver's 2 MiB.
    sizes = {"layers": 2, "width": 256, "heads": 4} if EMULATED else BERT
    path = setting.folder / "encoder.onnx"
    encoder_model(path, **sizes, tokens="sequence", external_data=True)
    width = sizes["width"]
    yield Model(
        name=f"encoder {sizes['layers']} x {width}", path=path, inputs=normal(1, 128, width)
    )


def pool(model: Model, workers: int, prepare: Literal["always", "never"] = "always") -> Master:
    """Workers of the card, not started yet; prepared weights lie on it once."""
    options = EngineOptions(prepare=prepare, allow_fallback=EMULATED)
    return Master(model.path, [DEVICE] * workers, options=options)


def session_of(model: Model) -> ort.InferenceSession:
    """One session on the card, in this process."""
    ort.preload_dlls()  # CUDA's libraries, if they are installed as packages
    return ort.InferenceSession(
        model.path, providers=["CPUExecutionProvider" if EMULATED else "CUDAExecutionProvider"]
    )


def answer_of(session: ort.InferenceSession, inputs: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def is_right(got: Arrays, expected: Arrays) -> bool:
    """Whether these outputs are those, as far as the type is exact."""
    return all(
        np.max(np.abs(np.asarray(got[name], np.float32) - array.astype(np.float32)))
        <= TOLERANCE * np.max(np.abs(array))
        for name, array in expected.items()
    )


# Speed.


def bound_on_card(session: ort.InferenceSession, inputs: Arrays) -> Callable[[], None]:
    """A run whose inputs lie on the card already, and whose outputs stay there."""
    kind = "cpu" if EMULATED else "cuda"
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, kind, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, kind, 0)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run


def on_card(master: Master, inputs: Arrays) -> Arrays:
    """CuPy arrays with the same values, in memory that workers open."""
    shapes = {name: array.shape for name, array in inputs.items()}
    arrays: Any = master.allocate(shapes, device=DEVICE)
    for name, array in inputs.items():
        arrays[name].set(array)
    return dict(arrays)


def measure_speed(setting: Setting) -> Lines:
    """Latency of one request, and requests a second, in all ways, in turns."""
    import cupy

    rows: list[list[str]] = []
    for model in models_of(setting):
        with ExitStack() as stack:
            pools = {count: stack.enter_context(pool(model, count)) for count in WORKERS}
            session = session_of(model)
            run = partial(answer_of, session, model.inputs)
            bound = bound_on_card(session, model.inputs)
            inside = {count: on_card(pool, model.inputs) for count, pool in pools.items()}
            outside = {name: cupy.asarray(array) for name, array in model.inputs.items()}
            predict = partial(pools[1].predict, shards=1)
            for given in (model.inputs, inside[1], outside):
                if not is_right(predict(given), run()):
                    raise SystemExit(f"{model.name}: a worker's answer is not the session's")
            calls: dict[str, Callable[[], object]] = {
                "session, NumPy": run,
                "session, bound on the card": bound,
                "1 worker, NumPy": partial(predict, model.inputs),
                "1 worker, CuPy in and out": partial(predict, outside, outputs_on="device"),
                "1 worker, `allocate` in, CuPy out": partial(
                    predict, inside[1], outputs_on="device"
                ),
            }
            latencies = in_turns(calls, setting.effort(3.0))
            seconds = setting.seconds(3.0)
            rates: dict[str, Callable[[], float]] = {
                "session, NumPy": partial(rate_of_callers, run, 1, seconds),
                "session, NumPy, 4 threads": partial(rate_of_callers, run, 4, seconds),
                "session, bound on the card": partial(rate_of_callers, bound, 1, seconds),
            }
            for count, master in pools.items():
                workers = f"{count} worker{'s' if count > 1 else ''}"
                for name, submit in (
                    ("NumPy", partial(master.submit, model.inputs)),
                    (
                        "`allocate` in, CuPy out",
                        partial(master.submit, inside[count], outputs_on="device"),
                    ),
                ):
                    rates[f"{workers}, {name}"] = partial(
                        rate_of_futures, submit, seconds, IN_FLIGHT
                    )
            throughput = rates_in_turns(rates, setting.rounds)
        alone, served = latencies["session, NumPy"], throughput["session, NumPy"]
        for name in rates | calls:
            latency, rate = latencies.get(name), throughput.get(name)
            cells = [
                spread(latency) if latency else "",
                f"{latency.over(alone).middle:.3g}" if latency else "",
                spread(rate, a_second) if rate else "",
                f"{rate.over(served).middle:.3g}" if rate else "",
            ]
            rows.append([model.name, name, *cells])
    over = "over the session's"
    yield markdown(["model", "way", "latency", over, "requests", over], rows)
    yield from card_lines()


# Memory.


def card_bytes() -> int:
    """What of the card's memory is in use, by whatever process."""
    if EMULATED:
        free, total = Card.open(Device.parse(DEVICE)).memory()
        return total - free
    gpu = gpus()[0]  # not `Card.memory`: it would make a context in this process
    if gpu.memory_bytes is None or gpu.free_bytes is None:
        raise SystemExit("nvidia-smi does not say how much memory the card has and has free")
    return gpu.memory_bytes - gpu.free_bytes


def measure_memory(setting: Setting) -> Lines:
    """The card's memory that 1, 2 and 4 workers take, and how often the weights are in it."""
    rows: list[list[str]] = []
    for model in models_of(setting):
        taken: dict[tuple[str, int], int] = {}
        for prepare in ("never", "always"):
            for workers in WORKERS:
                before = card_bytes()
                with pool(model, workers, prepare) as master:
                    master.warm_up(model.inputs)
                    taken[prepare, workers] = card_bytes() - before
        # What one worker takes beside its weights: a context, activations; on an emulated card nothing.
        besides = max(0, taken["never", 1] - model.weight_bytes)
        for workers in WORKERS:
            own, shared = taken["never", workers], taken["always", workers]
            copies = (shared - workers * besides) / model.weight_bytes
            target = "met" if copies <= WEIGHTS_TARGET else "**missed**"
            target = f" (≤ {WEIGHTS_TARGET:g}: {target})" if workers == max(WORKERS) else ""
            sizes = [f"{size / GB:.3f} GB" for size in (own, shared)]
            rows.append([model.name, f"{workers}", *sizes, f"{copies:.2f} times{target}"])
    header = ["model", "workers", "a copy of the weights each", "one copy", "the weights in it"]
    yield markdown(header, rows)
    yield from card_lines()


# Deaths.


def measure_kills(setting: Setting) -> Lines:
    """Workers are killed in turns under load: one that others do not depend on, and the first."""
    rows: list[list[str]] = []
    for model in models_of(setting):
        expected = answer_of(session_of(model), model.inputs)
        with pool(model, max(WORKERS)) as master:
            master.warm_up(model.inputs)
            for name, victim in (("the last", max(WORKERS) - 1), ("the first", 0)):
                counts = dict.fromkeys(("answered", "failed", "wrong"), 0)
                again = Series(
                    tuple(
                        kill_one(master, model, expected, victim, counts)
                        for _ in range(setting.rounds)
                    )
                )
                bad = [
                    f"{counts[kind]} ({'**missed**' if counts[kind] else 'met'})"
                    for kind in ("failed", "wrong")
                ]
                times, answered = f"{setting.rounds}", f"{counts['answered']}"
                rows.append([model.name, name, times, answered, *bad, spread(again)])
    header = ["model", "killed worker", "times", "answered", "failed", "wrong"]
    yield markdown([*header, "all workers serve again after"], rows)
    yield from card_lines()


def kill_one(
    master: Master, model: Model, expected: Arrays, victim: int, counts: dict[str, int]
) -> float:
    """Kill a worker under load; seconds until all workers serve again."""
    waiting = deque(master.submit(model.inputs) for _ in range(IN_FLIGHT))

    def take() -> None:
        try:
            right = is_right(waiting.popleft().result(), expected)
        except McinferError as exc:
            print(f"failed: {exc}", file=sys.stderr)
            counts["failed"] += 1
        else:
            counts["answered" if right else "wrong"] += 1

    worker = master.statistics().workers[victim]
    if worker.pid is None:
        raise SystemExit(f"worker {victim} has no process: {worker.last_error}")
    os.kill(worker.pid, signal.SIGKILL)
    begin = monotonic()
    while True:
        take()
        workers = master.statistics().workers
        again = workers[victim].restarts > worker.restarts
        if again and all(one.state in ("ready", "busy") for one in workers):
            break
        waiting.append(master.submit(model.inputs))
    seconds = monotonic() - begin
    while waiting:
        take()
    return seconds


# The command line.


def card_lines() -> Lines:
    """The card, and what serves it."""
    if EMULATED:
        yield "\nNO CARD, emulated driver;"
        return
    (gpu, *_), driver = gpus_and_driver()
    yield f"\n{gpu.name}, {driver};"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--emulated", action="store_true", help="without a card, in tiny sizes")
    if EMULATED and "--write" in sys.argv:
        parser.error("--write: numbers of the emulated driver go to no page")
    if not EMULATED and not {"-h", "--help"} & {*sys.argv}:
        try:
            gpus()
        except OSError as exc:
            parser.error(f"no card: {exc} (--emulated does without)")


PARTS = {"speed": measure_speed, "memory": measure_memory, "kills": measure_kills}

if __name__ == "__main__":
    logging.getLogger("mcinfer").setLevel(logging.ERROR)  # not the deaths that are wanted
    sys.exit(main(__doc__, PARTS, cores=None, add_options=add_options))
