"""Measure what workers of one card give, against one session of ONNX Runtime on it.

    python benchmarks/gpu.py [--quick] [--only PART] [--json FILE] [--write docs/gpu.md]
    python benchmarks/gpu.py --emulated

Latency and throughput, with tensors of NumPy and of CuPy (`speed`); what workers take of the card's memory,
with one copy of the weights and with one each (`memory`); what requests meet when workers are killed
(`kills`). Models are the UNet of Stable Diffusion 2.1 in float16, and an encoder of BERT's sizes, both with
random weights. Ways take turns, and ratios are of one round. `--quick` takes smaller models and fewer
samples. `--write` puts the tables between the marks of a page.

`--emulated` runs all of it in tiny sizes on the tests' emulation of a driver, where ONNX Runtime serves
with its CPU provider. It shows that the benchmark works; its numbers say nothing, so they go to no page.

Targets stand beside the numbers. A target that is missed is a finding, not a failure: the exit status is 0
all the same.
"""

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal

# The model of the example is one of those to measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

import numpy as np
import onnxruntime as ort
from bare_processes import unet_inputs
from build_unet import build_unet
from measuring import (
    Effort,
    Record,
    Series,
    in_turns,
    rates_in_turns,
    write_page,
)
from numpy.typing import NDArray
from rank_collectives import Measured, Say, markdown, spread
from rank_models import BERT_HEADS, BERT_LAYERS, BERT_WIDTH, encoder, encoder_inputs

from mcinfer import EngineOptions, Master, McinferError
from mcinfer.bench.runner import machine
from mcinfer.cards.cuda import Card
from mcinfer.config import Device
from mcinfer.machine import driver_cuda_version, gpus, mps_folder

DEVICE = "cuda:0"
WORKERS = (1, 2, 4)
IN_FLIGHT = 8
"""Requests that are under way at any moment, where throughput is measured."""

WEIGHTS_TARGET = 1.35
"""How often the weights may lie in the memory of a card with four workers."""
TOLERANCES = {"float16": 2e-2, "float32": 1e-3}
"""Largest difference of two answers, relative to the largest element; TensorFloat-32 is on by default."""

LIMIT = 1800
"""Seconds after which a part hangs."""
GB = 1e9

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """On what, and how long, is measured.

    Attributes:
        emulated: Whether the driver is the tests' emulation.
        quick: Whether models are small.
        folder: For models and the cache.
    """

    emulated: bool
    quick: bool
    folder: Path
    effort: Effort

    def pool(self, path: Path, workers: int, prepare: Literal["always", "never"]) -> Master:
        """Workers of the card, not started yet; prepared weights lie on it once."""
        options = EngineOptions(prepare=prepare, allow_fallback=self.emulated)
        return Master(path, [DEVICE] * workers, options=options)

    def session(self, path: Path) -> ort.InferenceSession:
        """One session on the card, in this process."""
        ort.preload_dlls()  # CUDA's libraries, if they are installed as packages
        return ort.InferenceSession(
            path, providers=["CPUExecutionProvider" if self.emulated else "CUDAExecutionProvider"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardModel:
    """A model to measure with.

    Attributes:
        name: What tables call it.
        path: Its file; the weights are in it or beside it.
        inputs: One row.
        element_type: Of its weights.
    """

    name: str
    path: Path
    inputs: Arrays
    element_type: str

    @property
    def bytes(self) -> int:
        """Of its files, which are weights but for some KB."""
        files = [self.path, self.path.with_name(f"{self.path.name}.data")]
        return sum(file.stat().st_size for file in files if file.exists())

    def is_right(self, got: Arrays, expected: Arrays) -> bool:
        """Whether these outputs are those, as far as the type is exact."""
        return all(
            np.max(np.abs(np.asarray(got[name], np.float32) - array.astype(np.float32)))
            <= TOLERANCES[self.element_type] * np.max(np.abs(array))
            for name, array in expected.items()
        )


def card_models(setting: Setting) -> Iterator[CardModel]:
    """The models of the page; for a first look, smaller ones of the same kinds."""
    size = "tiny" if setting.emulated else "small" if setting.quick else "sd21"
    inputs = {
        name: array.astype(np.float16) if array.dtype == np.float32 else array
        for name, array in unet_inputs(1, size).items()
    }
    path = build_unet(setting.folder / "unet.onnx", size, half=True)
    yield CardModel(name=f"UNet `{size}`", path=path, inputs=inputs, element_type="float16")
    layers, width, heads = BERT_LAYERS, BERT_WIDTH, BERT_HEADS
    if setting.emulated:
        layers, width, heads = 2, 256, 4  # weights of several pieces of the driver's 2 MiB
    path = encoder(
        setting.folder / "encoder.onnx",
        layers=layers,
        width=width,
        heads=heads,
        external_data=True,
    )
    yield CardModel(
        name=f"encoder {layers} x {width}",
        path=path,
        inputs=encoder_inputs(1, 128, width=width),
        element_type="float32",
    )


# Speed.


def _run_session(session: ort.InferenceSession, inputs: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def _bound_on_card(
    session: ort.InferenceSession, inputs: Arrays, emulated: bool
) -> Callable[[], None]:
    """A run whose inputs lie on the card already, and whose outputs stay there."""
    kind = "cpu" if emulated else "cuda"
    binding = session.io_binding()
    for name, array in inputs.items():
        value = ort.OrtValue.ortvalue_from_numpy(array, kind, 0)
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, kind, 0)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run


def _on_card(master: Master, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """CuPy arrays with the same values, in memory that workers open."""
    arrays: Arrays = master.allocate(
        {name: array.shape for name, array in inputs.items()}, device=DEVICE
    )
    for name, array in inputs.items():
        arrays[name].set(array)
    return arrays


def _elsewhere_on_card(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """CuPy arrays with the same values, in CuPy's own memory."""
    import cupy

    return {name: cupy.asarray(array) for name, array in inputs.items()}


def _rate(call: Callable[[], Any], seconds: float) -> float:
    """Calls a second; `call` gives a future, and `IN_FLIGHT` of them are under way."""
    waiting = deque(call() for _ in range(IN_FLIGHT))
    begin, done = perf_counter(), 0
    while perf_counter() < begin + seconds:
        waiting.popleft().result()
        waiting.append(call())
        done += 1
    rate = done / (perf_counter() - begin)
    while waiting:
        waiting.popleft().result()
    return rate


def _rate_of_threads(call: Callable[[], Any], threads: int, seconds: float) -> float:
    """Calls a second from so many threads, each of which waits for its answer."""
    counts = [0] * threads
    begin = perf_counter()

    def work(thread: int) -> None:
        while perf_counter() < begin + seconds:
            call()
            counts[thread] += 1

    started = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return sum(counts) / (perf_counter() - begin)


def measure_speed(setting: Setting, say: Say) -> Measured:
    """Latency of one request, and requests a second, in all ways, in turns."""
    record: Record = {}
    rows: list[list[str]] = []
    for model in card_models(setting):
        with ExitStack() as stack:
            pools = {
                count: stack.enter_context(setting.pool(model.path, count, "always"))
                for count in WORKERS
            }
            session = setting.session(model.path)
            run = partial(_run_session, session, model.inputs)
            expected = run()
            bound = _bound_on_card(session, model.inputs, setting.emulated)
            inside = {count: _on_card(pool, model.inputs) for count, pool in pools.items()}
            outside = _elsewhere_on_card(model.inputs)
            single = pools[1]
            for given in (model.inputs, inside[1], outside):
                got = single.predict(given, shards=1)
                if not model.is_right(got, expected):
                    raise SystemExit(f"{model.name}: a worker's answer is not the session's")

            calls: dict[str, Callable[[], object]] = {
                "session, NumPy": run,
                "session, bound on the card": bound,
                "1 worker, NumPy": partial(single.predict, model.inputs, shards=1),
                "1 worker, CuPy in and out": partial(
                    single.predict, outside, shards=1, outputs_on="device"
                ),
                "1 worker, `allocate` in, CuPy out": partial(
                    single.predict, inside[1], shards=1, outputs_on="device"
                ),
            }
            latencies = in_turns(calls, setting.effort)
            seconds = setting.effort.seconds
            rates: dict[str, Callable[[], float]] = {
                "session, NumPy": partial(_rate_of_threads, run, 1, seconds),
                "session, NumPy, 4 threads": partial(_rate_of_threads, run, 4, seconds),
                "session, bound on the card": partial(_rate_of_threads, bound, 1, seconds),
            }
            for count, pool in pools.items():
                workers = f"{count} worker{'s' if count > 1 else ''}"
                submit = partial(pool.submit, model.inputs)
                rates[f"{workers}, NumPy"] = partial(_rate, submit, seconds)
                submit = partial(pool.submit, inside[count], outputs_on="device")
                rates[f"{workers}, `allocate` in, CuPy out"] = partial(_rate, submit, seconds)
            throughput = rates_in_turns(rates, setting.effort.rounds)
        alone, served = latencies["session, NumPy"], throughput["session, NumPy"]
        for name in rates | calls:
            latency, rate = latencies.get(name), throughput.get(name)
            cells = [
                spread(latency) if latency else "",
                f"{latency.over(alone).middle:.3g}" if latency else "",
                spread(rate, "{:.1f}/s".format) if rate else "",
                f"{rate.over(served).middle:.3g}" if rate else "",
            ]
            rows.append([model.name, name, *cells])
            say(" · ".join(rows[-1]))
        record[model.name] = {
            "latencies": {name: one.record() for name, one in latencies.items()},
            "throughput": {name: one.record() for name, one in throughput.items()},
        }
    header = "model | way | latency | over the session's | requests | over the session's"
    return Measured(record, markdown(header, rows))


# Memory.


def _card_bytes(setting: Setting) -> int:
    """What of the card's memory is in use, by whatever process."""
    if setting.emulated:
        free, total = Card.open(Device.parse(DEVICE)).memory()
        return total - free
    gpu = gpus()[0]  # not `Card.memory`: it would make a context in this process
    if gpu.memory_bytes is None or gpu.free_bytes is None:
        raise SystemExit("nvidia-smi does not say how much memory the card has and has free")
    return gpu.memory_bytes - gpu.free_bytes


@contextmanager
def _warm_pool(
    setting: Setting, model: CardModel, workers: int, prepare: Literal["always", "never"]
) -> Iterator[Master]:
    """A pool each of whose workers has run."""
    with setting.pool(model.path, workers, prepare) as master:
        master.warm_up(model.inputs)
        yield master


def measure_memory(setting: Setting, say: Say) -> Measured:
    """The card's memory that 1, 2 and 4 workers take, and how often the weights are in it."""
    record: Record = {}
    rows: list[list[str]] = []
    for model in card_models(setting):
        taken: dict[tuple[str, int], int] = {}
        for prepare in ("never", "always"):
            for workers in WORKERS:
                before = _card_bytes(setting)
                with _warm_pool(setting, model, workers, prepare):
                    taken[prepare, workers] = _card_bytes(setting) - before
        # What one worker takes beside its weights: a context, activations; on an emulated card nothing.
        besides = max(0, taken["never", 1] - model.bytes)
        copies = {
            workers: (taken["always", workers] - workers * besides) / model.bytes
            for workers in WORKERS
        }
        for workers in WORKERS:
            own, shared = taken["never", workers], taken["always", workers]
            target = ""
            if workers == max(WORKERS):
                target = "met" if copies[workers] <= WEIGHTS_TARGET else "**missed**"
                target = f" (≤ {WEIGHTS_TARGET:g}: {target})"
            rows.append(
                [
                    model.name,
                    f"{workers}",
                    f"{own / GB:.3f} GB",
                    f"{shared / GB:.3f} GB",
                    f"{copies[workers]:.2f} times{target}",
                ]
            )
            say(" · ".join(rows[-1]))
        record[model.name] = {
            "weights": model.bytes,
            "taken": {f"{prepare} {workers}": size for (prepare, workers), size in taken.items()},
            "copies": copies,
        }
    header = "model | workers | a copy of the weights each | one copy | the weights in it"
    return Measured(record, markdown(header, rows))


# Deaths.


@dataclass(slots=True, kw_only=True)
class Counts:
    """What callers got."""

    answered: int = 0
    failed: int = 0
    wrong: int = 0


def _kill_one(
    master: Master, model: CardModel, expected: Arrays, victim: int, counts: Counts
) -> float:
    """Kill a worker under load; seconds until all workers serve again."""
    waiting = deque(master.submit(model.inputs) for _ in range(IN_FLIGHT))

    def take() -> None:
        try:
            right = model.is_right(waiting.popleft().result(), expected)
        except McinferError as exc:
            print(f"failed: {exc}", file=sys.stderr)
            counts.failed += 1
        else:
            counts.answered += right
            counts.wrong += not right

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


def measure_kills(setting: Setting, say: Say) -> Measured:
    """Workers are killed in turns under load: one that others do not depend on, and the leader."""
    record: Record = {}
    rows: list[list[str]] = []
    for model in card_models(setting):
        expected = _run_session(setting.session(model.path), model.inputs)
        with _warm_pool(setting, model, max(WORKERS), "always") as master:
            for name, victim in (("a follower", max(WORKERS) - 1), ("the leader", 0)):
                counts = Counts()
                again = Series(
                    tuple(
                        _kill_one(master, model, expected, victim, counts)
                        for _ in range(setting.effort.rounds)
                    )
                )
                rows.append(
                    [
                        model.name,
                        name,
                        f"{setting.effort.rounds}",
                        f"{counts.answered}",
                        f"{counts.failed} ({'met' if not counts.failed else '**missed**'})",
                        f"{counts.wrong} ({'met' if not counts.wrong else '**missed**'})",
                        spread(again),
                    ]
                )
                say(" · ".join(rows[-1]))
                record[f"{model.name}, {name}"] = {
                    "answered": counts.answered,
                    "failed": counts.failed,
                    "wrong": counts.wrong,
                    "again": again.record(),
                }
    header = "model | killed | times | answered | failed | wrong | all workers serve again after"
    return Measured(record, markdown(header, rows))


PARTS = {"speed": measure_speed, "memory": measure_memory, "kills": measure_kills}


# The command line.


def _emulate() -> None:
    """Put the emulation of the driver, and of CuPy, before all else; workers get the same path."""
    tests = Path(__file__).resolve().parent.parent / "tests"
    sys.path.insert(0, str(tests / "gpu" / "emulated"))
    os.environ["MCINFER_EMULATED_CARDS"] = "1"


def _card_text() -> str:
    """The card, and what serves it, in words."""
    gpu = gpus()[0]
    mps = "with MPS" if mps_folder() else "without MPS"
    return f"{gpu.name}, driver {gpu.driver}, CUDA {driver_cuda_version()}, {mps}"


def _setting_text(described: Mapping[str, object], emulated: bool) -> str:
    """What a table was measured on, in words."""
    versions = [f"numpy {described['numpy']}"]
    for name in ("onnxruntime-gpu", "onnxruntime", "cupy-cuda13x", "cupy-cuda12x"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return (
        f"{'NO CARD, emulated driver' if emulated else _card_text()}; {described['cores']} cores "
        f"({described['cpu']}), Python {described['python']}, {', '.join(versions)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Measure workers of a card.")
    parser.add_argument("--quick", action="store_true", help="a smaller UNet, few samples")
    parser.add_argument("--emulated", action="store_true", help="without a card, in tiny sizes")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the page to put the tables into"
    )
    options = parser.parse_args(arguments)
    if options.emulated and options.write is not None:
        parser.error("--write: numbers of the emulated driver go to no page")
    if options.emulated:
        _emulate()
    else:
        try:
            gpus()
        except OSError as exc:
            parser.error(f"no card: {exc} (--emulated does without)")
    logging.getLogger("mcinfer").setLevel(logging.ERROR)  # not the deaths that are wanted
    signal.signal(signal.SIGALRM, _give_up)
    begin = perf_counter()
    described = machine()
    text = _setting_text(described, options.emulated)
    _say(text)
    effort = Effort(rounds=5, seconds=3.0)
    if options.quick or options.emulated:
        effort = Effort(rounds=2, seconds=0.1)
    record: Record = {"machine": described, "setting": text, "quick": options.quick}
    tables = {}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        setting = Setting(
            emulated=options.emulated, quick=options.quick, folder=Path(name), effort=effort
        )
        for part, measure in PARTS.items():
            if options.only in (None, part):
                signal.alarm(LIMIT)
                measured = measure(setting, _say)
                record[part] = measured.record
                tables[part] = f"{measured.table}\n\n{effort.rounds} rounds, {text}."
    signal.alarm(0)
    record["seconds"] = round(perf_counter() - begin, 1)
    _say(f"\nmeasured in {record['seconds']} s")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    if options.write is not None:
        write_page(options.write, tables)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the part did not end within {LIMIT} s")


if __name__ == "__main__":
    sys.exit(main())
