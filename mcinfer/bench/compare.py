"""Two reports side by side: what became faster or slower, as far as the spread of both shows it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from rich.console import Console

from mcinfer.bench.figures import UNKNOWN, Kind, Spread, load_figures, way_columns
from mcinfer.bench.report import OTHERS, Report
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure in both reports.

    Attributes:
        figure: Its name, with its unit.
        a: In the first report, as text; `b` in the second, in the same unit.
        ratio: The second over the first: of the medians, with the least and the greatest that the repeats
            allow.
        verdict: ``"faster"``, ``"slower"``, ``"more"`` or ``"less"``, of the second, where all its repeats
            are beyond all of the first's; else why nothing is clear.
    """

    figure: str
    a: str
    b: str
    ratio: Spread
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Changes that are shown together, by way: those of a load, or start and memory."""

    title: str
    ways: dict[str, tuple[Change, ...]]
    remarks: tuple[str, ...] = ()


def groups(a: Report, b: Report) -> tuple[Group, ...]:
    """All that is in both reports: load by load, then start and memory."""
    others = {way.name: way for way in b.ways}
    started = {
        way.name: tuple(_changes(way_columns(way), way_columns(others[way.name])))
        for way in a.ways
        if way.start_seconds and way.name in others and others[way.name].start_seconds
    }
    found = (*_loads(a, b), Group(title="start and memory", ways=started))
    return tuple(group for group in found if group.ways)


def differences(a: Report, b: Report) -> tuple[str, ...]:
    """What was not the same in the settings and the versions; then what is in one report alone."""
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
    """The ways and loads that the other report lacks."""
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


def _loads(a: Report, b: Report) -> Iterator[Group]:
    for load in dict.fromkeys(measurement.load for measurement in a.measurements):
        ways, remarks = {}, []
        for measurement in (m for m in a.measurements if m.load == load and m.turns):
            other = b.find(measurement.way, load)
            if other is None or not other.turns:
                continue
            old, new = load_figures(a, measurement), load_figures(b, other)
            sound = (old.sound, new.sound)
            ways[measurement.way] = tuple(_changes(old.columns(), new.columns(), sound))
            remarks += [
                f"{printable(figures.way.name)} in {name}: {flaw_text(figures)}"
                for name, figures in (("A", old), ("B", new))
                if not figures.sound
            ]
        yield Group(title=str(load), ways=ways, remarks=tuple(remarks))


def _changes(
    a: Mapping[str, tuple[Spread, Kind]],
    b: Mapping[str, tuple[Spread, Kind]],
    sound: tuple[bool, bool] = (True, True),
) -> Iterator[Change]:
    """The changes of all figures, a time in a unit that suits it; without those that neither report knows."""
    for name, (old, kind) in a.items():
        new, _ = b[name]
        if old.known or new.known:
            unit = unit_of(kind, time_unit((old.middle, new.middle)))
            yield Change(
                figure=f"{name} {unit.sign}".rstrip(),
                a=middle_text(old, unit),
                b=middle_text(new, unit),
                ratio=ratio_of(old, new),
                verdict=_verdict(old, new, kind, sound),
            )


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
    """Compare two reports, the second with the first: what is not comparable, then a table for each load."""
    print_lines([f"{FLAWED} {warning}" for warning in warnings(a, b)], console, "yellow")
    print_lines(differences(a, b), console)
    verdicts = []
    for group in groups(a, b):
        console.print()
        show_grid(_grid(group), console)
        print_lines([f"{FLAWED} {remark}" for remark in group.remarks], console, "yellow")
        verdicts += [change.verdict for changes in group.ways.values() for change in changes]
    if why := dict.fromkeys((*notes(a), *notes(b))):
        print_lines(("", *why), console)
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
    text = f"B has {len(verdicts)} figures: {counts}." if verdicts else "Nothing is in both."
    print_lines(("", text), console, "bold")


def _grid(group: Group) -> Grid:
    rows: list[tuple[str, ...]] = []
    sections = []
    for way, changes in group.ways.items():
        for index, change in enumerate(changes):
            name = "" if index else printable(way)
            ratio = spread_text(change.ratio)
            rows.append((name, change.figure, change.a, change.b, ratio, change.verdict))
        sections.append(len(rows) - 1)
    return Grid(
        title=group.title,
        header=("way", "figure", "A", "B", "B/A", "B is"),
        rows=tuple(rows),
        left=(0, 1, 5),
        sections=frozenset(sections),
    )
