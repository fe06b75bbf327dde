"""Timing that a busy machine cannot fool much: several ways in turn, and ratios within one round.

Each round runs every way for a moment, A B C, B C A, …, so that other work on the machine disturbs all of
them. A ratio is taken within each round; its median over all rounds is reported, with the least and the
greatest. Turns and spreads are those of `mcinfer bench`.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from mcinfer.bench.figures import Spread, seconds_text
from mcinfer.bench.load import rotated

Way = Callable[[], object]
Record = dict[str, object]
"""What goes to JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: How often every way has its turn.
        seconds: Of one turn, as far as `least` and `most` samples allow.
    """

    rounds: int
    seconds: float
    least: int = 3
    most: int = 1000

    def samples(self, estimate: float) -> int:
        """How many calls of `estimate` seconds make a turn."""
        return max(self.least, min(self.most, int(self.seconds / max(estimate, 1e-9))))


class Series(Spread):
    """One number per round, such as the median seconds of a call."""

    __slots__ = ()

    def record(self) -> Record:
        """For JSON."""
        return {"p50": self.middle, "low": self.low, "high": self.high, "rounds": [*self.values]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio and what it is wanted to be.

    Attributes:
        text: What is divided by what.
        bound: The target; None where there is none.
        at_least: Whether the target is met from `bound` on upwards, or downwards.
    """

    text: str
    series: Series
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

    def record(self) -> Record:
        """For JSON."""
        target = {"bound": self.bound, "at_least": self.at_least, "met": self.met}
        return {"text": self.text, **self.series.record(), "target": target}


def in_turns(
    ways: Mapping[str, Way],
    effort: Effort,
    *,
    before: Way = lambda: None,
    after_round: Way = lambda: None,
) -> dict[str, Series]:
    """Time calls of all ways in turns; by name, the median seconds of each round.

    The result of a call is kept until the next one is there, as a program that uses it would.

    Args:
        ways: What to call, by name.
        effort: How long.
        before: Called once, when all ways are warm.
        after_round: Called at the end of each round.
    """
    samples = {name: effort.samples(_estimate(way)) for name, way in ways.items()}
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    before()
    for number in range(effort.rounds):
        for name, way in rotated([*ways.items()], number):
            rounds[name].append(_turn(way, samples[name]))
        after_round()
    return {name: Series(tuple(times)) for name, times in rounds.items()}


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


def series_row(name: str, series: Series) -> tuple[str, str, str]:
    """A row for `table`: name, p50, spread of the rounds."""
    spread = f"{seconds_text(series.low)} … {seconds_text(series.high)}"
    return name, seconds_text(series.middle), spread


def ratio_line(ratio: Ratio) -> str:
    """A line of text on a ratio."""
    spread = f"[{ratio.series.low:.3g} … {ratio.series.high:.3g}]"
    line = f"  {ratio.text:<58} {ratio.series.middle:6.3g} {spread:<17} {ratio.verdict}"
    return line.rstrip()


def report_times(
    title: str,
    header: str,
    series: Mapping[str, Series],
    ratios: Sequence[Ratio],
    say: Callable[[str], None],
) -> Record:
    """Print a table of seconds and the ratios below it; for JSON, both."""
    say("")
    say(title)
    say(table((header, "p50", "rounds"), [series_row(*item) for item in series.items()]))
    for ratio in ratios:
        say(ratio_line(ratio))
    return {
        "seconds": {name: one.record() for name, one in series.items()},
        "ratios": [ratio.record() for ratio in ratios],
    }


def report_rates(
    title: str, rates: Mapping[str, Series], ratios: Sequence[Ratio], say: Callable[[str], None]
) -> Record:
    """Print a table of requests per second and the ratios below it; for JSON, both."""
    rows = [
        (name, f"{series.middle:.0f}/s", f"{series.low:.0f} … {series.high:.0f}")
        for name, series in rates.items()
    ]
    say("")
    say(table((title, "p50", "rounds"), rows))
    for ratio in ratios:
        say(ratio_line(ratio))
    return {
        "rates": {name: series.record() for name, series in rates.items()},
        "ratios": [ratio.record() for ratio in ratios],
    }


def write_page(path: Path, parts: Mapping[str, str]) -> None:
    """Put texts between the page's marks, `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    page = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        marked = re.compile(f"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if not marked.search(page):
            raise SystemExit(f"{path}: expected a line '<!-- {name}: begin -->', and its end below")
        page = marked.sub(lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", page)  # type: ignore[misc]
    path.write_text(page, encoding="utf-8")
