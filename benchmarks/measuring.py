"""What the programs of this folder have in common: timing in turns, ratios, tables, memory, command lines.

Each round runs every way for a moment, A B C, B C A, …, so that other work on the machine disturbs all of
them. A ratio is taken within each round; its median over all rounds is reported, with the least and the
greatest. Turns and spreads are those of `mcinfer bench`.

A program is its *parts*: functions that get a `Setting` and yield lines. `main` is the command line around
them: it prints the lines as they come, and puts them between the marks of a page.
"""

import argparse
import os
import re
import signal
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from mcinfer.bench.figures import Spread, seconds_text
from mcinfer.bench.load import offer, rotated
from mcinfer.bench.report import Load
from mcinfer.bench.runner import machine

LIMIT = 1800
"""Seconds after which a part hangs."""
MEGABYTE = 1e6

Way = Callable[[], object]
Lines = Iterator[str]


# Time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often every way has its turn, and how many seconds one takes."""

    rounds: int
    seconds: float

    def samples(self, estimate: float) -> int:
        """How many calls of `estimate` seconds make a turn."""
        return max(3, min(1000, int(self.seconds / max(estimate, 1e-9))))


class Series(Spread):
    """One number per round, such as the median seconds of a call."""

    __slots__ = ()


def in_turns(ways: Mapping[str, Way], effort: Effort) -> dict[str, Series]:
    """Time calls of all ways in turns; by name, the median seconds of each round.

    The result of a call is kept until the next one is there, as a program that uses it would.
    """
    samples = {name: effort.samples(_estimate(way)) for name, way in ways.items()}
    turns = {
        name: lambda name=name, way=way: _turn(way, samples[name]) for name, way in ways.items()
    }
    return rates_in_turns(turns, effort.rounds)


def rates_in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Series]:
    """What each way gives, such as its requests per second, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in rotated([*ways.items()], number):
            rates[name].append(way())
    return {name: Series(tuple(values)) for name, values in rates.items()}


def _estimate(way: Way) -> float:
    """Seconds of a call, from a few that also warm it up."""
    times: list[float] = []
    stop = perf_counter() + 0.2
    while len(times) < 3 or (perf_counter() < stop and len(times) < 200):
        start = perf_counter()
        way()
        times.append(perf_counter() - start)
    return statistics.median(times)


def _turn(way: Way, samples: int) -> float:
    """The median seconds of so many calls, after some that are not counted: other ways came between."""
    for _ in range(min(samples, 10)):
        result = way()
    times: list[float] = []
    for _ in range(samples):
        start = perf_counter()
        result = way()
        times.append(perf_counter() - start)
    del result
    return statistics.median(times)


def rate_of_callers(call: Way, callers: int, seconds: float) -> float:
    """Answers a second of so many threads, each of which asks again when it has its answer."""
    load = Load(batch=1, clients=callers)
    offer(call, load, seconds=seconds / 4, count=0, seed=0)  # warm
    outcome = offer(call, load, seconds=seconds, count=0, seed=0)
    if outcome.errors:
        raise RuntimeError(outcome.errors[0])
    return len(outcome.answers) / outcome.seconds


def answer(submit: Callable[[], Any]) -> object:
    return submit().result()


def rate_of_futures(submit: Callable[[], Any], seconds: float, under_way: int) -> float:
    """Answers a second of one thread that always has so many futures under way."""
    waiting: deque[Any] = deque(submit() for _ in range(under_way))
    begin, done = perf_counter(), 0
    while perf_counter() < begin + seconds:
        waiting.popleft().result()
        waiting.append(submit())
        done += 1
    rate = done / (perf_counter() - begin)
    while waiting:
        waiting.popleft().result()
    return rate


def used_seconds() -> float:
    """Seconds of processor time that this process and its children have used so far."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


def others_seconds() -> float:
    """Seconds of these cores that all other programs and the host have used so far."""
    cores = os.sched_getaffinity(0)
    times = [t for i, t in enumerate(psutil.cpu_times(percpu=True)) if i in cores]
    return float(sum(sum(t) - t.idle - t.iowait for t in times)) - used_seconds()


# Memory.


def pss(pid: int) -> int:
    """Bytes of a process's own pages, and of its part of those that others have mapped, too.

    Summed over processes, this is what they take of the machine's memory (proc_pid_smaps(5)).
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (kilobytes,) = re.findall(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    return int(kilobytes) * 1024


def pss_with_children(pid: int) -> int:
    """Bytes of PSS of a process and all that it or a child of it started."""
    own = psutil.Process(pid)
    return sum(pss(each.pid) for each in (own, *own.children(recursive=True)))


def pss_of_workers(master: Any) -> int:
    """Bytes of PSS of a master's workers, together."""
    return sum(pss(worker.pid) for worker in master.statistics().workers if worker.pid)


# What is printed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio and what it is wanted to be.

    Attributes:
        text: What is divided by what.
        bound: The target; None where there is none.
        at_least: Whether the target is met from `bound` on upwards, or downwards.
    """

    text: str
    series: Spread
    bound: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the middle ratio meets the target; None without one."""
        if self.bound is None:
            return None
        value = self.series.middle
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def verdict(self) -> str:
        """In words: the target, and whether it is met or by how much it is missed."""
        if self.bound is None:
            return ""
        wanted = f"{'≥' if self.at_least else '≤'} {self.bound:g}"
        if self.met:
            return f"target {wanted}: met"
        return f"target {wanted}: missed by {abs(self.series.middle / self.bound - 1):.1%}"

    def __str__(self) -> str:
        """A line of text."""
        spread = f"[{self.series.low:.3g} … {self.series.high:.3g}]"
        return f"  {self.text:<58} {self.series.middle:6.3g} {spread:<17} {self.verdict}".rstrip()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one to the left and all others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    texts = []
    for line in lines:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    texts.insert(1, "-" * max(map(len, texts)))
    return "\n".join(texts)


def series_table(
    title: str, series: Mapping[str, Spread], text: Callable[[float], str] = seconds_text
) -> str:
    """A table of ways: the middle, and the least and the greatest of the rounds."""
    rows = [
        (name, text(one.middle), f"{text(one.low)} … {text(one.high)}")
        for name, one in series.items()
    ]
    return table((title, "p50", "rounds"), rows)


def a_second(rate: float) -> str:
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:.0f}/s"


def spread(series: Spread, text: Callable[[float], str] = seconds_text) -> str:
    """A cell of a page's table: the middle, and the least and the greatest of the rounds."""
    return f"{text(series.middle)} [{text(series.low)} … {text(series.high)}]"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_page(path: Path, parts: Mapping[str, str]) -> None:
    """Put texts between the page's marks, `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    page = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        marked = re.compile(f"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if not marked.search(page):
            raise SystemExit(f"{path}: expected a line '<!-- {name}: begin -->', and its end below")
        page = marked.sub(lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", page)  # type: ignore[misc]
    path.write_text(page, encoding="utf-8")


# Pictures, which need matplotlib.


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    # The same numbers make the same file.
    import_module("matplotlib").rcParams["svg.hashsalt"] = "mcinfer"
    # Not pyplot: that would look for a screen, and keep the figure.
    make = import_module("matplotlib.figure").Figure
    return make(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write it in the format that the file's suffix names."""
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def add_plot(parser: argparse.ArgumentParser) -> None:
    """The option that asks for them."""
    parser.add_argument("--plot", type=Path, metavar="PATH", help="where to draw the figures")


# The command line.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a part is measured with.

    Attributes:
        folder: For models, as long as the program runs.
        rounds: How often each way has its turn.
        quick: Whether it is a first look: shorter turns, smaller models.
        options: All of the command line.
    """

    folder: Path
    rounds: int
    quick: bool
    options: argparse.Namespace

    def seconds(self, usual: float) -> float:
        """Of a turn."""
        return usual / 5 if self.quick else usual

    def effort(self, seconds: float) -> Effort:
        return Effort(rounds=self.rounds, seconds=self.seconds(seconds))


Part = Callable[[Setting], Lines]


def main(
    about: str | None,
    parts: Mapping[str, Part],
    *,
    rounds: int = 5,
    mark: str = "",
    cores: int | None = 2,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> int:
    """Run the command line of a program; the exit status.

    A target that is missed is a finding, not a failure.

    Args:
        about: The program's docstring.
        parts: By name, in their order.
        rounds: How many, unless `--rounds` says otherwise.
        mark: Of the place in a page where the lines of all parts go, as they are printed; without it each
            part has a mark of its name, and its lines are Markdown.
        cores: So many are used, for figures that can be compared; None: all that there are.
        add_options: Adds what this program has beside `--only`, `--quick`, `--rounds` and `--write`.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--only", choices=parts, help="one part (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer samples: for a first look")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the page to put the results into"
    )
    add_options(parser)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    signal.signal(signal.SIGALRM, _give_up)
    setting_text = f"{options.rounds} rounds; {machine_text()}."
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        setting = Setting(
            folder=Path(name), rounds=options.rounds, quick=options.quick, options=options
        )
        for part, measure in parts.items():
            if options.only in (None, part):
                signal.alarm(LIMIT)
                lines = []
                for line in measure(setting):
                    print(line, flush=True)
                    lines.append(line)
                texts[part] = "\n".join(lines)
    signal.alarm(0)
    print(setting_text)
    if options.write is not None and mark:
        texts = {mark: "\n".join(["```text", *texts.values(), setting_text, "```"])}
        write_page(options.write, texts)
    elif options.write is not None:
        write_page(options.write, {k: f"{text}\n\n{setting_text}" for k, text in texts.items()})
    return 0


def machine_text() -> str:
    """The machine and what runs on it, in words."""
    on = machine()
    names = ("python", "onnxruntime", "numpy", "pyzmq")
    versions = ", ".join(f"{name} {on[name]}" for name in names if name in on)
    return f"{on['cores']} cores ({on['cpu']}), load average before {on['load_average_before']}, {versions}"


def _give_up(*_: object) -> None:
    raise TimeoutError(f"a part did not end within {LIMIT} s")
