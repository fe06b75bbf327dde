"""OpenVINO's engine beside ONNX Runtime's, and beside OpenVINO's own `benchmark_app`.

    python benchmarks/engines.py [--rounds N] [--only PART] [--write docs/openvino.md]

It needs ``pip install 'mcinfer[cpu,onnx,openvino]'``. Three models: the example's UNet `small`, an encoder,
and MobileNetV2's structure. *latency*: one caller whose batch of two is split over two workers, over one
session of ONNX Runtime with all cores, and how far the answers differ. *throughput*: requests of one row from
eight callers, over what ``benchmark_app -hint throughput`` answers. *memory*: of the workers, and of one
worker with a stream for each core. All in turns. ``benchmark_app`` compiles the model for the shapes of its
requests alone; so do the pools with *fixed shapes* (``free_dimensions``).
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

import numpy as np
from alone import Case, cases, ratio_of, session, throughput
from bare_processes import unet_inputs
from measuring import Effort, Ratio, in_turns, rates_in_turns, ratio_line, write_page
from worker_memory import process_memory

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


def pool(
    case: Case, precision: PrecisionKind | None, workers: int = WORKERS, **more: Any
) -> Master:
    """A pool of OpenVINO in a precision; of ONNX Runtime without one."""
    if precision is None:
        return Master(case.path, workers, **more)
    options = EngineOptions(precision=precision, **more)
    return Master(case.path, workers, engine="openvino", options=options)


def two_rows(case: Case) -> Case:
    """The same model with a batch of two."""
    if "UNet" in case.name:
        return Case(name=case.name, path=case.path, inputs=unet_inputs(2))
    rng = np.random.default_rng(1)
    inputs = {n: rng.random((2, *row.shape[1:]), np.float32) for n, row in case.inputs.items()}
    return Case(name=case.name, path=case.path, inputs=inputs)


def measure_latency(case: Case, rounds: int) -> list[str]:
    """A batch of two over two workers, over one session of ONNX Runtime with all cores."""
    one, case, lines = case, two_rows(case), []
    targets = {"f32": 0.95, "bf16": 0.6 if has_bf16() else None} if "UNet" in case.name else {}
    with ExitStack() as opened:
        plain = opened.enter_context(pool(case, None))
        pools: dict[str, tuple[PrecisionKind | None, Master]] = {"onnxruntime": (None, plain)}
        for precision in PRECISIONS:
            for name, sizes in (("", {}), (", fixed shapes", sizes_of(plain, one))):
                master = opened.enter_context(pool(case, precision, free_dimensions=sizes))
                pools[f"openvino {precision}{name}"] = precision, master
        ways: dict[str, Callable[[], object]] = {"session": session(case)}
        answers = {}
        for name, (_, master) in pools.items():
            if not name.endswith("fixed shapes"):
                master.learn(case.inputs)
            ways[name] = partial(master.predict, case.inputs)
            answers[name] = dict(master.predict(case.inputs))
        times = in_turns(ways, Effort(rounds=rounds, seconds=1.0))
    for name, (kind, _) in pools.items():
        series = ratio_of(times[name], times["session"])
        text = f"{case.name}: 2 rows, {name}, 2 workers / session"
        ratio = Ratio(text=text, series=series, bound=targets.get(kind or ""), at_least=False)
        differs = difference_text(largest_difference(answers[name], answers["onnxruntime"]))
        lines.append(ratio_line(ratio) + (f"  difference {differs}" if kind else ""))
    p50 = ", ".join(f"{name} {1e3 * each.middle:.3g} ms" for name, each in times.items())
    return [*lines, f"    {p50}"]


def sizes_of(master: Master, case: Case) -> dict[str, int]:
    """The model's symbolic dimensions, with their sizes in the case's inputs."""
    shapes = [(spec.shape, case.inputs[spec.name].shape) for spec in master.inputs]
    pairs = [pair for shape in shapes for pair in zip(*shape, strict=True)]
    return {name: size for name, size in pairs if isinstance(name, str)}


def app_rate(case: Case, precision: str, seconds: float) -> float:
    """Requests a second of OpenVINO's `benchmark_app` in its throughput mode, inputs of the same shapes."""
    shapes = ",".join(f"{name}[{','.join(map(str, x.shape))}]" for name, x in case.inputs.items())
    command = [
        str(Path(sys.executable).with_name("benchmark_app")),
        "-m",
        str(case.path),
        "-d",
        "CPU",
    ]
    command += ["-hint", "throughput", "-infer_precision", precision, "-t", f"{seconds:.0f}"]
    command += ["-shape", shapes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = _RATE.search(ended.stdout)
    if found is None:
        raise SystemExit(f"benchmark_app: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return float(found[1])


def measure_throughput(case: Case, rounds: int) -> list[str]:
    """Eight callers, over `benchmark_app` in its throughput mode."""
    lines = []
    for precision in PRECISIONS:
        with ExitStack() as opened:
            first = opened.enter_context(pool(case, precision))
            fixed = pool(case, precision, free_dimensions=sizes_of(first, case))
            pools = {
                "2 workers": first,
                "2 workers, fixed shapes": opened.enter_context(fixed),
                "1 worker, streams": opened.enter_context(pool(case, precision, 1, streams=CORES)),
            }
            ask = {name: partial(one.predict, case.inputs) for name, one in pools.items()}
            seconds = max(3.0, LEAST_ANSWERS / throughput(ask["2 workers"], CLIENTS))
            ways: dict[str, Callable[[], float]] = {
                name: partial(throughput, request, CLIENTS, seconds)
                for name, request in ask.items()
            }
            app = partial(app_rate, case, precision, seconds)
            rates = rates_in_turns({**ways, "app": app}, rounds)
        for name in pools:
            series = ratio_of(rates[name], rates["app"])
            text = f"{case.name}: requests/s, {precision}, {name} / benchmark_app"
            lines.append(ratio_line(Ratio(text=text, series=series, bound=0.95)))
        lines.append("    " + ", ".join(f"{n} {one.middle:.4g}/s" for n, one in rates.items()))
    return lines


def measure_memory(case: Case, rounds: int) -> list[str]:
    """Memory (PSS) of the workers after runs of each, in MB."""
    del rounds
    ways: Mapping[str, Callable[[], Master]] = {
        "onnxruntime, 2 workers": partial(pool, case, None),
        "openvino, 1 worker": partial(pool, case, "f32", 1),
        "openvino, 2 workers": partial(pool, case, "f32"),
        "openvino, 1 worker, 2 streams": partial(pool, case, "f32", 1, streams=2),
    }
    found = []
    for name, start in ways.items():
        with start() as master:
            throughput(partial(master.predict, case.inputs), CLIENTS, 1.0)
            pids = [w.pid for w in master.statistics().workers if w.pid is not None]
            found.append(f"{name} {sum(process_memory(pid).pss for pid in pids) / 1e6:.0f} MB")
    return [f"  {case.name}: {', '.join(found)}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = {
        "latency": measure_latency,
        "throughput": measure_throughput,
        "memory": measure_memory,
    }
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[*parts])
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the lines into")
    options = parser.parse_args(arguments)
    # Importing OpenVINO would send that it was; without this package it does not.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    load = os.getloadavg()[0]
    lines: list[str] = []

    def show(found: Sequence[str]) -> None:
        print(*found, sep="\n", flush=True)
        lines.extend(found)

    with tempfile.TemporaryDirectory() as name:
        found = [case for case in cases(Path(name)) if case.name != SKIPPED]
        for part, measure in parts.items():
            if options.only in (None, part):
                for case in found:
                    show(measure(case, options.rounds))
    has = "has" if has_bf16() else "has not"
    show(
        [
            f"{options.rounds} rounds on {CORES} cores; the processor {has} bfloat16. Load average before: "
            f"{load:.1f}. Python {platform.python_version()}, OpenVINO {openvino.__version__}."
        ]
    )
    if options.write is not None:
        write_page(options.write, {"engines": "\n".join(["```text", *lines, "```"])})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
