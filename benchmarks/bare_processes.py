"""mcinfer's workers against processes that do the same with nothing around them: speed and start."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from build_unet import CONTEXT_TOKENS, LATENT_CHANNELS, SIZES, build_unet
from measuring import (
    Effort,
    Ratio,
    Record,
    Series,
    ratio_line,
    report_times,
    table,
)
from numpy.typing import NDArray
from round_trips import identity_model

from mcinfer import Master

WORKERS = 2
UNET_TARGET = 0.97
"""What part of the throughput of independent processes is wanted."""
START_TARGET = 1.3
"""How many times as long as one bare process the start of a pool may take."""

_LOAD = """
import sys
import onnxruntime as ort
options = ort.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print("ready", flush=True)
"""
_RUN = (
    """
import os
os.sched_setaffinity(0, [int(__import__("sys").argv[3])])
"""
    + _LOAD
    + """
import json
import statistics
import time
import numpy as np
inputs = dict(np.load(sys.argv[2]))
for line in sys.stdin:
    count, start = json.loads(line)
    while time.monotonic() < start:
        pass
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        session.run(None, inputs)
        times.append(time.perf_counter() - begin)
    print(json.dumps(times), flush=True)
"""
)
_LEAD = 0.05
"""Seconds from telling the processes to start until they do, both at the same time."""


class _BareProcess:
    """A process with a session of one thread, and no orchestration."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        line = self._stream(self._process.stdout).readline()
        if line != "ready\n":
            raise RuntimeError(f"a bare process did not start: {line!r}")

    def begin(self, count: int, start: float) -> None:
        stream = self._stream(self._process.stdin)
        stream.write(json.dumps([count, start]) + "\n")
        stream.flush()

    def times(self) -> list[float]:
        times: list[float] = json.loads(self._stream(self._process.stdout).readline())
        return times

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        if stream is None:
            raise RuntimeError("the process has no pipe")
        return stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()  # closes its input, which is its end


# Throughput.


def unet_inputs(rows: int, name: str = "small") -> dict[str, NDArray[Any]]:
    """Inputs of the UNet of a size, of so many rows."""
    size = SIZES[name]
    rng = np.random.default_rng(0)
    side = size.latent_side
    return {
        "sample": rng.standard_normal((rows, LATENT_CHANNELS, side, side), np.float32),
        "timestep": np.array([500], np.int64),
        "encoder_hidden_states": rng.standard_normal(
            (rows, CONTEXT_TOKENS, size.context_channels), np.float32
        ),
    }


def measure_unet(folder: Path, effort: Effort, say: Callable[[str], None]) -> Record:
    """The small UNet: two workers on batch 2, and two independent processes on the same rows."""
    model = build_unet(folder / "unet.onnx", "small")
    inputs = unet_inputs(WORKERS)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        processes = []
        for i in range(WORKERS):
            shard = folder / f"shard{i}.npz"
            rows = {k: v if k == "timestep" else v[i : i + 1] for k, v in inputs.items()}
            np.savez(shard, allow_pickle=False, **rows)
            core = str(cores[i % len(cores)])
            process = _BareProcess(_RUN, str(model), str(shard), core)
            processes.append(stack.enter_context(process))
        for process in processes:
            process.wait_ready()
        master = stack.enter_context(Master(model, WORKERS))
        series = _unet_rounds(master, inputs, processes, effort)
    return _report_unet(series, effort, say)


_INDEPENDENT = "independent processes"
_LOCKSTEP = "the same, each pair of runs waiting for its slower one"
_MCINFER = "mcinfer.predict"


def _unet_rounds(
    master: Master,
    inputs: dict[str, NDArray[Any]],
    processes: list[_BareProcess],
    effort: Effort,
) -> dict[str, Series]:
    """Rows per second of each way, by round; the ways never run at the same time."""
    _run_bare(processes, 2)
    count = effort.samples(float(np.median(_run_master(master, inputs, 3))))
    rows: dict[str, list[float]] = {_INDEPENDENT: [], _LOCKSTEP: [], _MCINFER: []}
    for _ in range(effort.rounds):
        mine = _run_master(master, inputs, count)
        theirs = _run_bare(processes, count)
        rows[_MCINFER].append(WORKERS / float(np.median(mine)))
        rows[_INDEPENDENT].append(sum(1 / float(np.median(times)) for times in theirs))
        rows[_LOCKSTEP].append(WORKERS / float(np.median(np.max(theirs, axis=0))))
    return {name: Series(tuple(values)) for name, values in rows.items()}


def _run_master(master: Master, inputs: dict[str, NDArray[Any]], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = perf_counter()
        result = master.predict(inputs)
        times.append(perf_counter() - start)
    del result
    return times


def _run_bare(processes: list[_BareProcess], count: int) -> list[list[float]]:
    start = monotonic() + _LEAD
    for process in processes:
        process.begin(count, start)
    return [process.times() for process in processes]


def _report_unet(series: dict[str, Series], effort: Effort, say: Callable[[str], None]) -> Record:
    ratios = [
        Ratio(
            text="mcinfer / independent",
            series=series[_MCINFER].over(series[_INDEPENDENT]),
            bound=UNET_TARGET,
        ),
        Ratio(text="mcinfer / lockstep", series=series[_MCINFER].over(series[_LOCKSTEP])),
    ]
    say("")
    say(f"UNet (small), batch {WORKERS}: {effort.rounds} rounds in turns")
    rows = [
        (name, f"{one.middle:.3g}", f"{one.low:.3g} … {one.high:.3g}")
        for name, one in series.items()
    ]
    say(table(("rows per second", "p50", "rounds"), rows))
    for ratio in ratios:
        say(ratio_line(ratio))
    return {
        "rows_per_second": {name: one.record() for name, one in series.items()},
        "ratios": [ratio.record() for ratio in ratios],
    }


# Start.


def measure_start(folder: Path, effort: Effort, say: Callable[[str], None]) -> Record:
    """How long a pool of two takes to be ready, against bare processes that load the same model."""
    models = {
        "small UNet": build_unet(folder / "unet.onnx", "small"),
        "identity": identity_model(folder / "identity.onnx"),
    }
    record: Record = {}
    for name, model in models.items():
        bound = START_TARGET if name == "small UNet" else None
        record[name] = _measure_start_of(name, model, bound, effort, say)
    return record


def _measure_start_of(
    name: str, model: Path, bound: float | None, effort: Effort, say: Callable[[str], None]
) -> Record:
    masters: list[float] = []
    alone: list[float] = []
    together: list[float] = []
    _start_bare(model, 1)  # the page cache
    for _ in range(effort.rounds):
        alone.append(_start_bare(model, 1))
        masters.append(_start_master(model))
        together.append(_start_bare(model, WORKERS))
    series = {
        "one bare process": Series(tuple(alone)),
        f"{WORKERS} bare processes at once": Series(tuple(together)),
        f"Master(model, {WORKERS}).start()": Series(tuple(masters)),
    }
    one, several, ours = series.values()
    ratios = [
        Ratio(text="start / one bare process", series=ours.over(one), bound=bound, at_least=False),
        Ratio(text=f"start / {WORKERS} bare processes", series=ours.over(several)),
    ]
    title = f"Start: {name}, page cache warm, {effort.rounds} rounds in turns"
    return report_times(title, "from nothing to ready", series, ratios, say)


def _start_bare(model: Path, count: int) -> float:
    """Seconds until so many processes, spawned at once, have all loaded the model."""
    with ExitStack() as stack:
        begin = perf_counter()
        processes = [stack.enter_context(_BareProcess(_LOAD, str(model))) for _ in range(count)]
        for process in processes:
            process.wait_ready()
        return perf_counter() - begin


def _start_master(model: Path) -> float:
    begin = perf_counter()
    with Master(model, WORKERS):
        return perf_counter() - begin
