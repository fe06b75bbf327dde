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

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import IO, Any, Self

# The model of the example is one of those to measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

import memory_plot
import numpy as np
from bare_processes import unet_inputs
from build_unet import SIZES, build_unet
from measuring import Ratio, Record, Series, ratio_line, table, write_page
from numpy.typing import NDArray
from rank_models import BERT_HEADS, BERT_LAYERS, BERT_WIDTH, encoder, encoder_inputs
from worker_memory import MEGABYTE, MemoryCurve, pss_with_children

from mcinfer.bench.runner import machine

COUNTS = (1, 2, 4, 8)
RUNS = 3
"""Of each session, before the processes are looked at."""
LIMIT = 3600
"""Seconds after which something hangs."""

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
    PLAIN: memory_plot.Line(
        label="n processes, onnxruntime in each",
        colour="#b2182b",
        marker="s",
        place=(-6, 4),
        align="right",
    ),
    EACH: memory_plot.Line(
        label="n processes, a worker in each",
        colour="#67a9cf",
        marker="^",
        place=(0, 7),
    ),
    POOL: memory_plot.Line(
        label="one process, n workers", colour="#92c5de", marker="o", place=None
    ),
    INLINE: memory_plot.Line(
        label="n processes, mcinfer.ort inline", colour="#2166ac", marker="D", place=(0, -14)
    ),
}

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
master = mcinfer.Master(model, devices=count, options=mcinfer.EngineOptions(threads=1)).start()
def run():
    least = min(worker.runs for worker in master.statistics().workers)
    while min(worker.runs for worker in master.statistics().workers) == least:
        for future in [master.submit(inputs) for _ in range(count)]:
            future.result()
"""
_PROGRAMS = {
    PLAIN: _SESSION_BODY.format(package="onnxruntime", more=""),
    INLINE: _SESSION_BODY.format(package="mcinfer.ort", more=""),
    ALWAYS: _SESSION_BODY.format(
        package="mcinfer, mcinfer.ort", more=", options=mcinfer.EngineOptions(prepare='always')"
    ),
    EACH: _SESSION_BODY.format(package="mcinfer.ort", more=", devices=1"),
    POOL: _POOL_BODY,
}


class Program:
    """A program that holds a model; a context manager that leaves no process behind.

    Args:
        way: What opens the model.
        model: Its file.
        inputs: A file of inputs for one run.
        count: Workers of a pool, or threads of a session.
    """

    def __init__(self, way: str, model: Path, inputs: Path, count: int = 1) -> None:
        code = _HOLD.format(body=_PROGRAMS[way])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(model), str(inputs), str(count), str(RUNS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> float:
        """Seconds that its imports and the opening took; returns once all its sessions have run."""
        line = self._stream(self._process.stdout).readline()
        ready, _, seconds = line.partition(" ")
        if ready != "ready":
            raise RuntimeError(f"a program did not get ready: {line!r}")
        return float(seconds)

    def times(self, runs: int) -> list[float]:
        """Seconds of so many runs, one after another."""
        stream = self._stream(self._process.stdin)
        stream.write(f"{runs}\n")
        stream.flush()
        return [float(word) for word in self._stream(self._process.stdout).readline().split()]

    def pss(self) -> int:
        """Bytes: its own, and those of all processes that it started."""
        return sum(pss_with_children(self._process.pid))

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        if stream is None:
            raise RuntimeError("the program has no pipe")
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
            self._process.kill()  # its workers end with it
        self._process.communicate()  # closes its input, which is its end


# Measuring.


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A model to hold.

    Attributes:
        name: What it is called in tables.
        path: Its file.
        weight_bytes: Of all its weights.
        inputs: A file of inputs for one run.
    """

    name: str
    path: Path
    weight_bytes: int
    inputs: Path


def large_models(folder: Path, quick: bool) -> list[Held]:
    """An encoder of BERT-base's size and the example's small UNet; the UNet alone for a first look."""
    unet = build_unet(folder / "unet.onnx", "small")
    found = [
        Held(
            name="UNet of 50 M parameters",
            path=unet,
            weight_bytes=SIZES["small"].parameters * 4,
            inputs=saved(folder / "unet.npz", unet_inputs(1)),
        )
    ]
    if not quick:
        sizes = {"layers": BERT_LAYERS, "width": BERT_WIDTH, "heads": BERT_HEADS}
        bert = encoder(folder / "bert.onnx", **sizes, external_data=True)
        held = Held(
            name="encoder of BERT-base's size",
            path=bert,
            weight_bytes=bert.with_name("bert.onnx.data").stat().st_size,
            inputs=saved(folder / "bert.npz", encoder_inputs(1, 128, width=BERT_WIDTH)),
        )
        found.insert(0, held)
    return found


def saved(path: Path, inputs: Mapping[str, NDArray[Any]]) -> Path:
    """A file of inputs, for `Program`."""
    np.savez(path, allow_pickle=False, **inputs)
    return path


def _summed_pss(model: Held, way: str, count: int) -> int:
    """Bytes that all processes of so many sessions take together."""
    programs, sessions = (1, count) if way == POOL else (count, 1)
    with ExitStack() as stack:
        held = []
        for _ in range(programs):
            program = Program(way, model.path, model.inputs, sessions)
            held.append(stack.enter_context(program))
        for program in held:
            program.wait_ready()
        return sum(program.pss() for program in held)


def _measure(
    models: Sequence[Held], rounds: int, say: Callable[[str], None]
) -> tuple[Record, list[MemoryCurve], str]:
    """All ways in turns; for JSON, to draw, and the tables of a page."""
    record: Record = {}
    curves, tables = [], []
    for model in models:
        for way in (INLINE, EACH):
            with Program(way, model.path, model.inputs) as first:
                first.wait_ready()  # the cache is warm from here on
        found: dict[tuple[str, int], list[int]] = {}
        for _ in range(rounds):
            for count in COUNTS:
                for way in WAYS:
                    pss = _summed_pss(model, way, count)
                    found.setdefault((way, count), []).append(pss)
        series = {key: Series(tuple(values)) for key, values in found.items()}
        curve = MemoryCurve(
            model=model.name,
            weight_bytes=model.weight_bytes,
            workers=COUNTS,
            pss={way: tuple(series[way, n].middle for n in COUNTS) for way in WAYS},
        )
        title = f"{model.name}, {model.weight_bytes / MEGABYTE:.0f} MB of weights"
        header = ("MB in all", *(f"n = {n}" for n in COUNTS))
        rows = [(WAYS[way], *_row(curve.pss[way])) for way in WAYS]
        ratios = {n: series[INLINE, n].over(series[PLAIN, n]) for n in COUNTS}
        rows.append(("inline / onnxruntime", *(f"{one.middle:.2f}" for one in ratios.values())))
        say(f"\n{title}; rounds in turns: {rounds}\n{table(header, rows)}")
        for n, bound in ((COUNTS[0], ONE_TARGET), (COUNTS[-1], ALL_TARGET)):
            text = f"n = {n}: inline / onnxruntime"
            say(ratio_line(Ratio(text=text, series=ratios[n], bound=bound, at_least=False)))
        tables.append(page_table((title[0].upper() + title[1:], *header[1:]), rows))
        curves.append(curve)
        record[model.name] = {f"{way}, {n}": one.record() for (way, n), one in series.items()}
    return record, curves, "\n\n".join(tables)


def _row(sizes: Sequence[float]) -> list[str]:
    return [f"{size / MEGABYTE:,.0f}" for size in sizes]


def page_table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 0) -> str:
    """A table of a page; its first column is text, and so are so many of the last ones."""
    numbers = len(header) - 1 - texts
    lines = [header, ["---", *numbers * ["---:"], *texts * ["---"]], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def setting_of(rounds: int) -> str:
    """Below a table: how often, where and with what it was measured."""
    times = "one round" if rounds == 1 else f"the middle of {rounds} rounds"
    on = machine()
    return (
        f"{times}; {on['cores']} cores ({on['cpu']}), load average {os.getloadavg()[2]:.1f}, "
        f"Python {on['python']}, onnxruntime {on['onnxruntime']}."
    )


def _say(text: str) -> None:
    print(text, flush=True)


def give_up(*_: object) -> None:
    raise TimeoutError(f"the measurement did not end within {LIMIT} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model alone: for a first look")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way has its turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory: .svg or .png")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    why = None if options.plot is None else memory_plot.missing()
    if why is not None:
        parser.error(f"--plot: {why}")
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    begin = perf_counter()
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        models = large_models(Path(name), options.quick)
        record, curves, tables = _measure(models, options.rounds, _say)
    signal.alarm(0)
    setting = f"MB of PSS in all; {setting_of(options.rounds)}"
    if options.plot is not None:
        across, up = "n sessions of the model, one thread each", "all their processes"
        memory_plot.draw(curves, LINES, across, up, options.plot)
    if options.write is not None:
        write_page(options.write, {"processes": f"{tables}\n\n{setting}"})
    seconds = round(perf_counter() - begin, 1)
    _say(f"\n{setting}\nmeasured in {seconds} s")
    if options.json is not None:
        whole = {"machine": machine(), "quick": options.quick, "pss": record, "seconds": seconds}
        options.json.write_text(json.dumps(whole, indent=2, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
