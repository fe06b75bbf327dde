"""Measure what n processes that hold the same model take of the machine's memory, plain and with mcinfer.

    python benchmarks/processes_memory.py [--rounds N] [--quick] [--write docs/weights.md] [--plot FILE]

Each way has n sessions of one thread, and each session runs the model some times:

- plain: n programs, each with an `onnxruntime.InferenceSession` of its own;
- inline: n programs, each with a `mcinfer.ort.InferenceSession` of its own, in the program's process;
- in each: the same with `devices=1`, so that each session has a worker;
- pool: one program with a pool of n workers.

The sum counts the programs themselves and all processes that they started. `--write` puts the table between
the marks of a page; `--plot` draws it, which needs matplotlib.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from measuring import (
    MEGABYTE,
    Lines,
    Ratio,
    Series,
    Setting,
    add_plot,
    figure,
    main,
    markdown,
    pss_with_children,
    rates_in_turns,
    save_figure,
)
from models import BERT, Arrays, Model, bert_model, normal, unet_inputs, unet_model

COUNTS = (1, 2, 4, 8)
RUNS = 3
"""Of each session, before the processes are looked at."""

ONE_TARGET = 1.05
"""How many times the memory of one plain session an inline one may take."""
ALL_TARGET = 0.30
"""What part of the memory of the most plain sessions as many inline ones may take."""

PLAIN = "plain"
INLINE = "inline"
ALWAYS = "inline, prepared whatever its size"
EACH = "in each"
POOL = "pool"

WAYS = {
    PLAIN: "n programs with a session of onnxruntime each",
    INLINE: "n programs with an inline session of mcinfer.ort each",
    EACH: "n programs with a session of mcinfer.ort and a worker each",
    POOL: "one program, a pool of n workers",
}
LINES = {
    PLAIN: ("#b2182b", "s", (-6, 4), "right"),
    EACH: ("#67a9cf", "^", (0, 7), "center"),
    POOL: ("#92c5de", "o", None, ""),
    INLINE: ("#2166ac", "D", (0, -14), "center"),
}
"""How each way is drawn: its colour, marker, and where its numbers stand, if they do."""

# What a program does: no more than one of a user would import. It ends when its input is closed.
_HOLD = """
import sys
from time import perf_counter
model, inputs, count, runs = *sys.argv[1:3], *map(int, sys.argv[3:])
begin = perf_counter()
import numpy as np
{body}
seconds = perf_counter() - begin
inputs = dict(np.load(inputs))
for _ in range(runs):
    run()
print("ready", seconds, flush=True)
for line in sys.stdin:
    times = []
    for _ in range(int(line)):
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    print(*times, flush=True)
"""
_SESSION_BODY = """
import {package} as ort
options = ort.SessionOptions()
options.intra_op_num_threads = count
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]{more})
def run():
    session.run(None, inputs)
"""
_POOL_BODY = """
import mcinfer
options = mcinfer.EngineOptions(threads=1, prepare="wait")
master = mcinfer.Master(model, devices=count, options=options).start()
def run():
    least = min(worker.runs for worker in master.statistics().workers)
    while min(worker.runs for worker in master.statistics().workers) == least:
        for future in [master.submit(inputs) for _ in range(count)]:
            future.result()
"""
_PROGRAMS = {
    PLAIN: _SESSION_BODY.format(package="onnxruntime", more=""),
    INLINE: _SESSION_BODY.format(package="mcinfer.ort", more=", prepare='wait'"),
    ALWAYS: _SESSION_BODY.format(package="mcinfer.ort", more=", prepare='always'"),
    EACH: _SESSION_BODY.format(
        package="mcinfer, mcinfer.ort",
        more=", devices=1, options=mcinfer.EngineOptions(prepare='wait')",
    ),
    POOL: _POOL_BODY,
}


class Program:
    """A program that holds a model; a context manager that leaves no process behind.

    Args:
        way: What opens the model.
        model: What it holds.
        count: Workers of a pool, or threads of a session.
    """

    def __init__(self, way: str, model: Model, count: int = 1) -> None:
        code = _HOLD.format(body=_PROGRAMS[way])
        inputs = model.path.with_suffix(".npz")
        if not inputs.exists():
            _save(inputs, model.inputs)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(model.path), str(inputs), str(count), str(RUNS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> float:
        """Seconds that its imports and the opening took; returns once all its sessions have run."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ready, _, seconds = line.partition(" ")
        if ready != "ready":
            raise RuntimeError(f"a program did not get ready: {line!r}")
        return float(seconds)

    def times(self, runs: int) -> list[float]:
        """Seconds of so many runs, one after another."""
        print(runs, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        return [float(word) for word in self._process.stdout.readline().split()]

    def pss(self) -> int:
        """Bytes: its own, and those of all processes that it started."""
        return pss_with_children(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()  # its workers end with it
        self._process.communicate()  # closes its input, which is its end


def _save(path: Path, inputs: Arrays) -> None:
    np.savez(path, allow_pickle=False, **inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The summed PSS of a model, by way, in bytes for each number of `COUNTS`."""

    title: str
    weight_bytes: int
    pss: Mapping[str, Sequence[float]]


def large_models(setting: Setting) -> list[Model]:
    """An encoder of BERT-base's size and the example's small UNet; the UNet alone for a first look."""
    unet = unet_model(setting.folder / "unet.onnx")
    found = [Model(name="UNet of 50 M parameters", path=unet, inputs=unet_inputs(1))]
    if not setting.quick:
        path = bert_model(setting.folder / "bert.onnx")
        inputs = normal(1, 128, BERT["width"])
        found.insert(0, Model(name="Encoder of BERT-base's size", path=path, inputs=inputs))
    return found


def summed_pss(model: Model, way: str, count: int) -> int:
    """Bytes that all processes of so many sessions take together."""
    programs, sessions = (1, count) if way == POOL else (count, 1)
    with ExitStack() as stack:
        held = [stack.enter_context(Program(way, model, sessions)) for _ in range(programs)]
        for program in held:
            program.wait_ready()
        return sum(program.pss() for program in held)


def measure(setting: Setting) -> Lines:
    """All ways, in turns, for 1 to 8 sessions."""
    curves = []
    for model in large_models(setting):
        for way in (INLINE, EACH):
            with Program(way, model) as first:
                first.wait_ready()  # the cache is warm from here on
        found: dict[tuple[str, int], Series] = {}
        for count in COUNTS:
            ways = {
                way: lambda way=way, count=count, model=model: summed_pss(model, way, count)
                for way in WAYS
            }
            for way, series in rates_in_turns(ways, setting.rounds).items():
                found[way, count] = series
        title = f"{model.name}, {model.weight_bytes / MEGABYTE:.0f} MB of weights"
        pss = {way: [found[way, n].middle for n in COUNTS] for way in WAYS}
        rows = [[WAYS[way], *(f"{size / MEGABYTE:,.0f}" for size in pss[way])] for way in WAYS]
        ratios = [found[INLINE, n].over(found[PLAIN, n]) for n in COUNTS]
        rows.append(["inline / onnxruntime", *(f"{one.middle:.2f}" for one in ratios)])
        yield markdown([title, *(f"n = {n}" for n in COUNTS)], rows) + "\n"
        for n, bound, series in (
            (COUNTS[0], ONE_TARGET, ratios[0]),
            (COUNTS[-1], ALL_TARGET, ratios[-1]),
        ):
            text = f"n = {n}: inline / onnxruntime"
            ratio = Ratio(text=text, series=series, bound=bound, at_least=False)
            print(ratio, file=sys.stderr)
        curves.append(Curves(title=title, weight_bytes=model.weight_bytes, pss=pss))
    yield "MB of PSS in all:"
    if setting.options.plot is not None:
        draw(curves, setting.options.plot)


def draw(curves: Sequence[Curves], path: Path) -> None:
    """Draw one panel for each model, in the format that the file's suffix names."""
    picture = figure(5.0 * len(curves), 4.2)
    for axes, curve in zip(picture.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        for way, sizes in curve.pss.items():
            (colour, marker, place, align), megabytes = LINES[way], [s / MEGABYTE for s in sizes]
            axes.plot(COUNTS, megabytes, marker=marker, color=colour, label=WAYS[way])
            for count, value in zip(COUNTS, megabytes, strict=True):
                if place is None or (way != PLAIN and count == 1):
                    continue  # these points lie upon others
                text = {"ha": align, "fontsize": 8, "color": colour}
                axes.annotate(
                    f"{value:,.0f}", (count, value), place, textcoords="offset points", **text
                )
        once = {"color": "#777777", "linestyle": ":", "label": "the weights, once"}
        axes.axhline(curve.weight_bytes / MEGABYTE, **once)
        axes.set(title=curve.title, xlabel="n, one thread each", ylabel="summed PSS (MB)")
        axes.set_xticks(range(max(COUNTS) + 1))
        axes.set_xlim(0, max(COUNTS) + 0.5)
        axes.set_ylim(0, 1.12 * max(max(sizes) for sizes in curve.pss.values()) / MEGABYTE)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="upper left", frameon=False)
    save_figure(picture, path)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"processes": measure}, rounds=3, cores=None, add_options=add_plot))
