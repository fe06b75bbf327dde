"""Measure mcinfer with its own runner, and write what came of it into docs/benchmarks.md.

    python benchmarks/page.py [--only NAME] [--folder FOLDER] [--write FILE]

Each run is a command line of `mcinfer bench`, which the page shows; its report and its page go to the folder
(build/bench). `--write` puts tables and targets between the page's marks; with `--only` those of these runs,
and the others stay as they are. A target that is missed is a finding: the exit status is 0 all the same.
"""

import argparse
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from measuring import Ratio, Series
from models import encoder_model, identity_model, mobilenet_model, unet_model
from rich.console import Console

from mcinfer.bench.figures import latency
from mcinfer.bench.report import Load, Report, Turn, load
from mcinfer.bench.table import show

ROOT = Path(__file__).resolve().parent.parent

_WIDTH = 110
"""Columns of the page's tables."""


@dataclass(frozen=True, slots=True)
class Run:
    """One command of the runner's: the name of its files, the model's file, and other options."""

    name: str
    model: str
    options: str

    def command(self, folder: Path) -> list[str]:
        """What the page shows: the command without the files to write."""
        return ["mcinfer", "bench", str(folder / self.model), *shlex.split(self.options)]


_THREADS = "--against session,threads,threads-1,pipe-each --duration 1.5 --repeat 4"
_PEERS = ",".join(
    f"benchmarks/peers.py:{name}" for name in ("RayActors", "LokyPool", "OpenVinoAsync")
)
RUNS = (
    Run(
        "unet",
        "unet.onnx",
        "--batch 2 --concurrency 1,4 --against session,threads,threads-1,pipe,pipe-each "
        "--modes sharded,concurrent --duration 5 --repeat 4",
    ),
    Run("mobilenet", "mobilenet.onnx", f"--batch 1,8 --concurrency 1,8 {_THREADS}"),
    Run("encoder", "encoder.onnx", f"--concurrency 1,4,16 --rate 300 {_THREADS}"),
    Run(
        "megabyte",
        "identity.onnx",
        "--dim elements=262144 --concurrency 1 --rate 300 --against session,pipe,pipe-each "
        "--modes sharded,concurrent --duration 2 --repeat 5",
    ),
)
PEERS = Run(
    "peers",
    "encoder.onnx",
    f"--concurrency 1,8 --against session,threads-1,{_PEERS} "
    "--modes concurrent --duration 1.5 --repeat 4",
)
"""Only where it is asked for: these packages are installed elsewhere."""


def build_models(folder: Path) -> None:
    """Write the models that the runs are of, unless they are there."""
    makers: dict[str, Callable[[Path], object]] = {
        "unet.onnx": unet_model,
        "mobilenet.onnx": mobilenet_model,
        "encoder.onnx": encoder_model,
        "identity.onnx": identity_model,
    }
    for name, make in makers.items():
        if not (folder / name).exists():
            make(folder / name)


# Targets.


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio of two ways' figures that mcinfer is to reach, in each repeat of a run.

    Attributes:
        run: The run whose report has it.
        text: What is divided by what: `above` by `below`.
        figure: The figure of a turn.
        at_least: Whether the middle ratio is to be the bound or more; else the bound or less.
    """

    run: str
    text: str
    above: str
    below: str
    figure: Callable[[Turn], float]
    load: Load
    bound: float
    at_least: bool = False

    def line(self, report: Report) -> str:
        """The target's row of a table in Markdown; not measured: not all repeats of it."""
        start = f"{self.start} {'≥' if self.at_least else '≤'} {self.bound:g}"
        above, below = report.find(self.above, self.load), report.find(self.below, self.load)
        if above is None or below is None or len(above.turns) != len(below.turns):
            return f"{start} | **not measured** | |"
        pairs = zip(above.turns, below.turns, strict=True)
        series = Series(tuple(self.figure(a) / self.figure(b) for a, b in pairs))
        ratio = Ratio(text=self.text, series=series, bound=self.bound, at_least=self.at_least)
        verdict = ratio.verdict.partition(": ")[2]
        figures = f"{series.middle:.3g} [{series.low:.3g} … {series.high:.3g}]"
        return f"{start} | {figures} | {verdict if ratio.met else f'**{verdict}**'} |"

    @property
    def start(self) -> str:
        return f"| {self.text} |"


_P50, _P99 = partial(latency, fraction=0.5), partial(latency, fraction=0.99)
_RATE = attrgetter("throughput")
_ONE, _FOUR = Load(batch=2, clients=1), Load(batch=2, clients=4)
_OPEN = Load(batch=1, clients=32, rate=300.0)
_UNET = "UNet, 4 clients, throughput: concurrent / threads on one session"
_MEGABYTE = "1 MiB inputs, 300/s, p99"

TARGETS = (
    Target(
        "unet",
        "UNet, batch 2, p50: sharded / one session with all cores",
        *("sharded", "session", _P50, _ONE, 1.0),
    ),
    Target("unet", f"{_UNET}, all cores", "concurrent", "threads", _RATE, _FOUR, 1.0, True),
    Target(
        "unet", f"{_UNET}, one thread a run", "concurrent", "threads-1", _RATE, _FOUR, 1.0, True
    ),
    *(
        Target(
            "megabyte",
            f"{_MEGABYTE}: {pipe} / concurrent",
            pipe,
            "concurrent",
            _P99,
            _OPEN,
            2.0,
            True,
        )
        for pipe in ("pipe", "pipe-each")
    ),
)
"""In the page's order."""


def target_table(reports: Mapping[str, Report], page: str) -> str:
    """The targets as a table in Markdown; those of other runs as they are on the page."""
    lines = ["| | target | measured | |", "|---|---|---|---|"]
    for target in TARGETS:
        if target.run in reports:
            lines.append(target.line(reports[target.run]))
        else:
            lines += [line for line in page.splitlines() if line.startswith(target.start)]
    return "\n".join(lines)


# The page.


def run_text(run: Run, report: Report, folder: Path) -> str:
    """A run's command, and what it printed."""
    page = io.StringIO()
    show(report, Console(file=page, width=_WIDTH, color_system=None))
    table = "\n".join(line.rstrip() for line in page.getvalue().splitlines()).strip("\n")
    table = table.partition("\n\nmcinfer's best mode")[0]  # the program is no figure
    return f"    {shlex.join(run.command(folder))}\n\n```\n{table}\n```"


def write_page(path: Path, folder: Path, runs: Iterable[Run]) -> None:
    """Put the reports of these runs, where they are in the folder, between the page's marks."""
    reports = {run: load(file) for run in runs if (file := folder / f"{run.name}.json").exists()}
    text = path.read_text(encoding="utf-8")
    parts = {"targets": target_table({run.name: report for run, report in reports.items()}, text)}
    parts |= {run.name: run_text(run, report, folder) for run, report in reports.items()}
    for name, part in parts.items():
        start, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, rest = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"{path}: expected a line '<!-- {name} -->', and '<!-- end -->' below")
        text = f"{start}{mark}{part}\n{end}{rest}"
    path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Measure mcinfer with its own runner.")
    names = [run.name for run in (*RUNS, PEERS)]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put it into")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    build_models(folder)
    # Not the user's: and what a run does not find there it prepares first, before anything is measured.
    environment = {**os.environ, "MCINFER_CACHE": str((folder / "cache").absolute())}
    chosen = RUNS if options.only is None else [r for r in (*RUNS, PEERS) if r.name in options.only]
    for run in chosen:
        files = [f"--{kind}={folder / run.name}.{kind}" for kind in ("json", "html")]
        command = [*run.command(folder), *files]
        print(f"$ {shlex.join(command)}", flush=True)
        subprocess.run(  # what makes this environment's interpreter run mcinfer
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True
        )
    if options.write is not None:
        write_page(options.write, folder, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
