"""Two reports side by side: what became faster or slower, as far as the spread of both shows it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import chain, groupby, repeat
from typing import NamedTuple

from rich.console import Console

from mcinfer.bench.figures import UNKNOWN, Figures, Kind, Spread, load_figures, way_columns
from mcinfer.bench.report import OTHERS, Load, Report
from mcinfer.bench.table import Grid, print_lines, show_grid
from mcinfer.bench.texts import (
    FLAWED,
    busy_text,
    flaw_text,
    machine_text,
    middle_text,
    notes,
    printable,
    spread_text,
    time_unit,
    unit_of,
)

WITHIN = "within the spread"
ONE_REPEAT = "spread not known"
FELL_SHORT = "one fell short"
"""In one of the reports not all requests were answered, or not as fast as they came."""
ONE_SIDED = "not known in both"

_WORDS: dict[Kind, tuple[str, str]] = {
    "rate": ("slower", "faster"),
    "part": ("slower", "faster"),
    "time": ("faster", "slower"),
    "bytes": ("less", "more"),
    "amount": ("less", "more"),
}
"""For a figure that is less in the second report, and for one that is more."""
_PASSING = ("load_average_before", OTHERS)
"""Facts about a machine at one moment."""


class Change(NamedTuple):
    """One figure of a way in both reports.

    Attributes:
        title: The load; or "start and memory".
        figure: Its name, with its unit.
        a: In the first report, as text; `b` in the second, in the same unit.
        ratio: The second over the first: of the medians, with the least and the greatest that the repeats
            allow.
        verdict: ``"faster"``, ``"slower"``, ``"more"`` or ``"less"``, of the second, where all its repeats
            are beyond all of the first's; else why nothing is clear.
    """

    title: str
    way: str
    figure: str
    a: str
    b: str
    ratio: Spread
    verdict: str


def changes(a: Report, b: Report) -> Iterator[Change]:
    for load, name, old, new in _shared(a, b):
        sound = (old.sound, new.sound)
        yield from _changes(str(load), name, old.columns(), new.columns(), sound)
    others = {way.name: way for way in b.ways}
    for way in a.ways:
        if way.start_seconds and way.name in others and others[way.name].start_seconds:
            columns = way_columns(way), way_columns(others[way.name])
            yield from _changes("start and memory", way.name, *columns)


def flaws(a: Report, b: Report) -> Iterator[str]:
    """The ways that did not answer all requests, or not as fast as they came."""
    for load, way, old, new in _shared(a, b):
        for name, figures in (("A", old), ("B", new)):
            if not figures.sound:
                yield f"{printable(way)} under {load} in {name}: {flaw_text(figures)}"


def _shared(a: Report, b: Report) -> Iterator[tuple[Load, str, Figures, Figures]]:
    """Load by load, the ways that were measured in both reports."""
    for load in dict.fromkeys(measurement.load for measurement in a.measurements):
        for measurement in a.measurements:
            other = b.find(measurement.way, load)
            if measurement.load == load and measurement.turns and other and other.turns:
                yield load, measurement.way, load_figures(a, measurement), load_figures(b, other)


def differences(a: Report, b: Report) -> tuple[str, ...]:
    lines = [f"The settings differ: {text}." for text in _differing(a.settings, b.settings)]
    if a.mcinfer != b.mcinfer:
        lines.append(printable(f"The versions of mcinfer differ: {a.mcinfer} and {b.mcinfer}."))
    return (*lines, *_missing(a, b, "A"), *_missing(b, a, "B"))


def warnings(a: Report, b: Report) -> Iterator[str]:
    """Why the reports may not be comparable: another machine or model, an interruption, a busy machine."""
    for name, report in (("A", a), ("B", b)):
        if not report.finished:
            yield f"{name} was interrupted: some turns are missing."
        if busy := busy_text(report):
            yield f"{name}: {busy}"
    for key in {**a.machine, **b.machine}:
        old, new = a.machine.get(key), b.machine.get(key)
        if old != new and key not in _PASSING:
            texts = ("unknown" if v is None else machine_text(key, v) for v in (old, new))
            yield f"The machines differ: {' and '.join(texts)}."
    yield from (f"The models differ: {text}." for text in _differing(a.model, b.model))


def _differing(a: object, b: object) -> Iterator[str]:
    """The fields of two dataclasses of one type in which they differ."""
    for field in fields(a):  # type: ignore[arg-type]  # both are dataclasses
        old, new = (getattr(one, field.name) for one in (a, b))
        if old != new:
            yield printable(f"{field.name} {old!r} and {new!r}")


def _missing(report: Report, other: Report, name: str) -> Iterator[str]:
    there = _measured(other)
    alone = [way for way in _measured(report) if way not in there]
    for way in alone:
        failed = [one for one in other.ways if one.name == way and one.error]
        why = "".join(f"; in the other it could not be measured: {one.error}" for one in failed)
        yield printable(f"Only in {name}: {way}{why}.")
    for measurement in report.measurements:
        match = other.find(measurement.way, measurement.load)
        if measurement.way not in alone and measurement.turns and not (match and match.turns):
            yield printable(f"Only in {name}: {measurement.way} under {measurement.load}.")


def _measured(report: Report) -> list[str]:
    taken = {measurement.way for measurement in report.measurements if measurement.turns}
    return [way.name for way in report.ways if way.start_seconds or way.name in taken]


def _changes(
    title: str,
    way: str,
    a: Mapping[str, tuple[Spread, Kind]],
    b: Mapping[str, tuple[Spread, Kind]],
    sound: tuple[bool, bool] = (True, True),
) -> Iterator[Change]:
    for name, (old, kind) in a.items():
        new, _ = b[name]
        # Speed-ups are over the best baseline of each report, which may be different ones.
        if name != "speed-up" and (old.known or new.known):
            unit = unit_of(kind, time_unit((old.middle, new.middle)))
            figure = f"{name} {unit.sign}".rstrip()
            verdict = _verdict(old, new, kind, sound)
            before, after = middle_text(old, unit), middle_text(new, unit)
            yield Change(title, way, figure, before, after, ratio_of(old, new), verdict)


def ratio_of(a: Spread, b: Spread) -> Spread:
    """The second over the first, with the least and the greatest that their repeats allow."""
    known = a.known and b.known and a.low > 0 and b.low >= 0
    if not known or math.isinf(a.high) or math.isinf(b.high):
        return UNKNOWN
    return Spread((b.low / a.high, b.middle / a.middle, b.high / a.low))


def _verdict(a: Spread, b: Spread, kind: Kind, sound: tuple[bool, bool]) -> str:
    if not (a.known and b.known):
        return ONE_SIDED
    if min(len(a.values), len(b.values)) < 2:
        return ONE_REPEAT
    down, up = _WORDS[kind]
    word = up if b.low > a.high else down if b.high < a.low else WITHIN
    # A way that leaves requests unanswered, or falls behind, looks better than it is. So it may be called
    # worse than the other report's, and the other's better than it; but not the reverse.
    believed = {"faster": sound[1], "less": sound[1], "slower": sound[0], "more": sound[0]}
    return word if believed.get(word, all(sound)) else FELL_SHORT


def show(a: Report, b: Report, console: Console) -> None:
    print_lines([f"{FLAWED} {warning}" for warning in warnings(a, b)], console, "yellow")
    print_lines(differences(a, b), console)
    found = [*changes(a, b)]
    for title, group in groupby(found, key=lambda change: change.title):
        rows: list[tuple[str, ...]] = []
        sections = []
        for way, mine in groupby(group, key=lambda change: change.way):
            names = chain([printable(way)], repeat(""))
            rows += [
                (name, c.figure, c.a, c.b, spread_text(c.ratio), c.verdict)
                for name, c in zip(names, mine, strict=False)
            ]
            sections.append(len(rows) - 1)
        console.print()
        show_grid(
            Grid(
                title=title,
                header=("way", "figure", "A", "B", "B/A", "B is"),
                rows=tuple(rows),
                left=(0, 1, 5),
                sections=frozenset(sections),
            ),
            console,
        )
    print_lines([f"{FLAWED} {flaw}" for flaw in flaws(a, b)], console, "yellow")
    if why := dict.fromkeys((*notes(a), *notes(b))):
        print_lines(("", *why), console)
    verdicts = Counter(change.verdict for change in found)
    counts = ", ".join(f"{count} {word}" for word, count in verdicts.items())
    text = f"B has {len(found)} figures: {counts}." if found else "Nothing is in both."
    print_lines(("", text), console, "bold")
