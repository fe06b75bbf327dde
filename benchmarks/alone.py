"""What a request that comes alone takes, and what the whole CPU for it costs others.

    python benchmarks/alone.py [--rounds N] [--only PART] [--write docs/benchmark_parts.md]

A worker on the CPU has its share of the cores, and all cores for a run whose request comes alone. Against a
plain session of ONNX Runtime with all cores, and against workers that keep to their share (`threads=`), in
turns: one caller with one row; eight callers; a load that swings between one caller and eight every 50 ms;
ever shorter runs; and the memory of two workers. The rows of the encoders take some 1 and 20 ms on one core.
"""

import argparse
import os
import runpy
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

import numpy as np
import onnxruntime as ort
from bare_processes import unet_inputs
from build_unet import build_unet
from encoder import encoder_model
from measuring import Effort, Ratio, Series, in_turns, rates_in_turns, ratio_line, write_page
from numpy.typing import NDArray
from weight_models import products_model
from worker_memory import process_memory

from mcinfer import EngineOptions, Master
from mcinfer.scheduler import dispatch

ROOT = Path(__file__).resolve().parent.parent

Inputs = dict[str, NDArray[Any]]
WORKERS = 2
SWING_SECONDS = 0.05
SHORT = ((1, 64), (1, 128), (1, 192), (2, 128), (1, 256), (2, 192))
"""Layers of an encoder, and their width."""

WARM_SECONDS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and one row of its inputs."""

    name: str
    path: Path
    inputs: Inputs


def cases(folder: Path) -> list[Case]:
    """The models, written into a folder."""
    classifier = runpy.run_path(str(ROOT / "examples" / "quick_start" / "build_mobilenet.py"))
    mobilenet = folder / "mobilenet.onnx"
    classifier["build_mobilenet"](mobilenet, batch=None)
    found = [
        Case(
            name="UNet `small`",
            path=build_unet(folder / "unet.onnx", "small"),
            inputs=unet_inputs(1),
        )
    ]
    for name, path in (
        ("encoder, 1 ms", encoder_model(folder / "encoder.onnx")),
        ("encoder, 20 ms", encoder_model(folder / "large.onnx", layers=10, hidden=512)),
        ("MobileNetV2's structure", mobilenet),
    ):
        found.append(case_of(name, path))
    return found


def case_of(name: str, path: Path) -> Case:
    """A model with one input, and a row of it."""
    (spec,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
    shape = [size if isinstance(size, int) else 1 for size in spec.shape]
    row = np.random.default_rng(0).random(shape, np.float32)
    return Case(name=name, path=path, inputs={spec.name: row})


def pool(case: Case, workers: int = WORKERS, *, narrow: bool = False) -> Master:
    """A pool of which each worker has a core; with `narrow`, always no more than that."""
    return Master(case.path, workers, options=EngineOptions(threads=1 if narrow else None))


def warm(master: Master, inputs: Inputs) -> None:
    """Ask until the workers have opened what they open for requests that come alone."""
    end = perf_counter() + WARM_SECONDS
    while perf_counter() < end:
        master.predict(inputs)


def session(case: Case) -> Callable[[], object]:
    plain = ort.InferenceSession(case.path, providers=["CPUExecutionProvider"])
    return partial(plain.run, None, case.inputs)


def measure_single(all_cases: Sequence[Case], rounds: int) -> list[str]:
    """One caller, one row: ratios to a plain session with all cores."""
    lines = []
    for case in all_cases:
        with ExitStack() as opened:
            pools = {
                "2 workers": opened.enter_context(pool(case)),
                "4 workers": opened.enter_context(pool(case, 4)),
                "2 workers, own cores alone": opened.enter_context(pool(case, narrow=True)),
            }
            for master in pools.values():
                warm(master, case.inputs)
            ways: dict[str, Callable[[], object]] = {"session": session(case)}
            ways |= {name: partial(master.predict, case.inputs) for name, master in pools.items()}
            times = in_turns(ways, Effort(rounds=rounds, seconds=0.5))
            wide = [sum(w.wide for w in pools[n].statistics().workers) for n in [*pools][:2]]
        for name in pools:
            series = ratio_of(times[name], times["session"])
            bound = None if name.endswith("alone") else 1.08
            text = f"{case.name}: {name} / session"
            ratio = Ratio(text=text, series=series, bound=bound, at_least=False)
            lines.append(ratio_line(ratio))
        p50 = ", ".join(f"{name} {1e3 * one.middle:.3g} ms" for name, one in times.items())
        lines.append(f"    {p50}; wide runs {wide}")
    return lines


def ratio_of(one: Series, other: Series) -> Series:
    return Series(tuple(a / b for a, b in zip(one.values, other.values, strict=True)))


def throughput(request: Callable[[], object], clients: int, seconds: float = 1.5) -> float:
    """Answers a second, of so many callers that ask again at once."""
    stop, counts = threading.Event(), [0] * clients

    def ask(i: int) -> None:
        while not stop.is_set():
            request()
            counts[i] += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    sleep(seconds / 4)
    before, start = sum(counts), perf_counter()
    sleep(seconds)
    rate = (sum(counts) - before) / (perf_counter() - start)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


def measure_clients(all_cases: Sequence[Case], rounds: int) -> list[str]:
    """Eight callers: answers a second, over those of workers that keep to their cores."""
    lines = []
    for case in all_cases:
        with pool(case) as ours, pool(case, narrow=True) as narrow:
            for master in (ours, narrow):
                warm(master, case.inputs)
            ask = {"ours": ours, "narrow": narrow}
            ways = {
                n: partial(throughput, partial(m.predict, case.inputs), 8) for n, m in ask.items()
            }
            rates = rates_in_turns(ways, rounds)
        series = ratio_of(rates["ours"], rates["narrow"])
        text = f"{case.name}: answers a second, 8 callers / own cores alone"
        lines.append(ratio_line(Ratio(text=text, series=series, bound=0.98)))
    return lines


def swing(request: Callable[[], object], seconds: float = 3.0) -> tuple[float, float]:
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


def measure_swing(all_cases: Sequence[Case], rounds: int) -> list[str]:
    """p50 and p99 of a load that swings, over those of the better of both fixed ways."""
    lines = []
    for case in all_cases:
        with ExitStack() as opened:
            pools = {
                "ours": opened.enter_context(pool(case)),
                "narrow": opened.enter_context(pool(case, narrow=True)),
                "one": opened.enter_context(pool(case, 1)),
            }
            for master in pools.values():
                warm(master, case.inputs)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in pools}
            for number in range(rounds):
                names = [*pools][number % 3 :] + [*pools][: number % 3]
                for name in names:
                    found[name].append(swing(partial(pools[name].predict, case.inputs)))
        for place, what in enumerate(("p50", "p99")):
            ours, narrow, one = ([values[place] for values in found[name]] for name in pools)
            series = Series(tuple(a / min(b, c) for a, b, c in zip(ours, narrow, one, strict=True)))
            text = f"{case.name}: {what} of a swinging load / the better fixed way"
            lines.append(ratio_line(Ratio(text=text, series=series, bound=1.1, at_least=False)))
    return lines


def measure_short(folder: Path, rounds: int) -> list[str]:
    """Ever longer runs, all of them wide, over those on one core: where `dispatch.WIDE_RUN` has to be."""
    lines, least = [], dispatch.WIDE_RUN
    dispatch.WIDE_RUN = 0.0
    try:
        for layers, hidden in SHORT:
            path = encoder_model(folder / f"{layers}_{hidden}.onnx", layers=layers, hidden=hidden)
            case = case_of("", path)
            with pool(case) as ours, pool(case, narrow=True) as narrow:
                ways = {"ours": ours, "narrow": narrow}
                for master in ways.values():
                    warm(master, case.inputs)
                calls = {name: partial(way.predict, case.inputs) for name, way in ways.items()}
                times = in_turns(calls, Effort(rounds=rounds, seconds=0.4))
                seconds = [mean_run(way) for way in (narrow, ours)]
            one, all_cores = (f"{1e3 * each:.2f} ms" for each in seconds)
            text = f"a run of {one} on one core, {all_cores} with all: request, all cores / one"
            series = ratio_of(times["ours"], times["narrow"])
            lines.append(ratio_line(Ratio(text=text, series=series)))
    finally:
        dispatch.WIDE_RUN = least
    return lines


def mean_run(master: Master) -> float:
    workers = master.statistics().workers
    return sum(w.busy_seconds for w in workers) / sum(w.runs for w in workers)


def measure_memory(folder: Path, rounds: int) -> list[str]:
    """Memory (PSS) of two workers after requests that came alone, over that without wide runs."""
    large = products_model(folder / "products.onnx")
    case = Case(name=large.name, path=large.path, inputs=large.inputs(1))
    ratios = []
    for _ in range(rounds):
        sums = []
        for narrow in (False, True):
            with pool(case, narrow=narrow) as master:
                warm(master, case.inputs)
                for _ in range(3):
                    master.predict(large.inputs(8), shards=WORKERS)
                pids = [w.pid for w in master.statistics().workers if w.pid is not None]
                sums.append(sum(process_memory(pid).pss for pid in pids))
        ratios.append(sums[0] / sums[1])
    text = f"{case.name}: memory of two workers / own cores alone"
    return [ratio_line(Ratio(text=text, series=Series(tuple(ratios)), bound=1.1, at_least=False))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    of_cases = {"single": measure_single, "clients": measure_clients, "swing": measure_swing}
    of_folder = {"short": measure_short, "memory": measure_memory}
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[*of_cases, *of_folder])
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the lines into")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    lines: list[str] = []

    def show(found: Sequence[str]) -> None:
        print(*found, sep="\n", flush=True)
        lines.extend(found)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = cases(folder) if options.only in (None, *of_cases) else []
        for part, of_all in of_cases.items():
            if options.only in (None, part):
                for case in found:
                    show(of_all([case], options.rounds))
        for part, measure in of_folder.items():
            if options.only in (None, part):
                show(measure(folder, options.rounds))
    show([f"{options.rounds} rounds. Load average of the machine before: {load:.1f}."])
    if options.write is not None:
        write_page(options.write, {"alone": "\n".join(["```text", *lines, "```"])})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
