"""Two reports side by side: what became faster or slower, as far as the spread of both shows it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from mcinfer.bench.figures import UNKNOWN, LoadFigures, Spread, WayFigures, load_figures
from mcinfer.bench.report import OTHERS, Report
from mcinfer.bench.table import folded, new_table, print_lines, print_whole
from mcinfer.bench.texts import (
    FLAWED,
    MEGABYTE,
    Unit,
    busy_text,
    flaw_text,
    machine_text,
    middle_text,
    notes,
    printable,
    spread_text,
    time_unit,
)
from mcinfer.errors import MissingDependencyError

try:
    from rich.console import Console
    from rich.text import Text
except ImportError as exc:
    raise MissingDependencyError(
        "comparing reports needs the package rich: pip install 'mcinfer[bench]'"
    ) from exc

WITHIN = "within the spread"
ONE_REPEAT = "spread not known"
FELL_SHORT = "one fell short"
"""In one of the reports not all requests were answered, or not as fast as they came."""
ONE_SIDED = "not known in both"

_STYLES = {"faster": "green", "less": "green", "slower": "red", "more": "red"}
_RATES, _TIMES, _AMOUNTS = ("slower", "faster"), ("faster", "slower"), ("less", "more")
_PASSING = ("load_average_before", OTHERS)
"""Facts about a machine at one moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure in both reports.

    Attributes:
        figure: Its name, with its unit.
        a: In the first report; `b` in the second, in the same unit.
        ratio: The second over the first: of the medians, with the least and the greatest that the repeats
            allow.
        verdict: ``"faster"``, ``"slower"``, ``"more"`` or ``"less"``, of the second, where all its repeats
            are beyond all of the first's; else why nothing is clear.
    """

    figure: str
    a: Spread
    b: Spread
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
    return tuple(group for group in (*_loads(a, b), _ways(a, b)) if group.ways)


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
            ways[measurement.way] = tuple(_load_changes(old, new))
            remarks += [
                f"{printable(figures.way)} in {name}: {flaw_text(figures)}"
                for name, figures in (("A", old), ("B", new))
                if not figures.sound
            ]
        yield Group(title=str(load), ways=ways, remarks=tuple(remarks))


def _load_changes(a: LoadFigures, b: LoadFigures) -> Iterator[Change]:
    sound = (a.sound, b.sound)
    yield from _change("rows/s", a.rows, b.rows, _RATES, Unit(), sound)
    yield from _change("speed-up", a.speedup, b.speedup, _RATES, Unit(), sound)
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        times = a.latency(fraction), b.latency(fraction)
        yield from _change(name, *times, _TIMES, None, sound)
    yield from _change("overhead", a.overhead, b.overhead, _TIMES, None, sound)
    yield from _change("cores", a.cores, b.cores, _AMOUNTS, Unit(), sound)


def _ways(a: Report, b: Report) -> Group:
    others = {way.name: way for way in b.ways}
    pairs = [(way, others[way.name]) for way in a.ways if way.name in others]
    changes = {w.name: tuple(_way_changes(WayFigures(w), WayFigures(o))) for w, o in pairs}
    return Group(title="start and memory", ways={name: c for name, c in changes.items() if c})


def _way_changes(a: WayFigures, b: WayFigures) -> Iterator[Change]:
    if a.start.known and b.start.known:
        yield from _change("start", a.start, b.start, _TIMES)
        yield from _change("PSS", a.pss, b.pss, _AMOUNTS, Unit(MEGABYTE, "MB"))
        yield from _change("USS", a.uss, b.uss, _AMOUNTS, Unit(MEGABYTE, "MB"))


def _change(
    name: str,
    a: Spread,
    b: Spread,
    words: tuple[str, str],
    unit: Unit | None = None,
    sound: tuple[bool, bool] = (True, True),
) -> Iterator[Change]:
    """The change of one figure, of a time in a unit that suits it; none where neither report knows it."""
    if a.known or b.known:
        unit = unit or time_unit((a.middle, b.middle))
        yield Change(
            figure=f"{name} {unit.sign}".rstrip(),
            a=Spread(tuple(value / unit.scale for value in a.values)),
            b=Spread(tuple(value / unit.scale for value in b.values)),
            ratio=ratio_of(a, b),
            verdict=_verdict(a, b, words, sound),
        )


def ratio_of(a: Spread, b: Spread) -> Spread:
    """The second over the first, with the least and the greatest that their repeats allow."""
    known = a.known and b.known and a.low > 0 and b.low >= 0
    if not known or math.isinf(a.high) or math.isinf(b.high):
        return UNKNOWN
    return Spread((b.low / a.high, b.middle / a.middle, b.high / a.low))


def _verdict(a: Spread, b: Spread, words: Sequence[str], sound: tuple[bool, bool]) -> str:
    if not (a.known and b.known):
        return ONE_SIDED
    if min(a.count, b.count) < 2:
        return ONE_REPEAT
    down, up = words
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
        _show_group(group, console)
        print_lines([f"{FLAWED} {remark}" for remark in group.remarks], console, "yellow")
        verdicts += [change.verdict for changes in group.ways.values() for change in changes]
    if why := dict.fromkeys((*notes(a), *notes(b))):
        print_lines(("", *why), console)
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
    text = f"B has {len(verdicts)} figures: {counts}." if verdicts else "Nothing is in both."
    print_lines(("", text), console, "bold")


def _show_group(group: Group, console: Console) -> None:
    table = new_table(group.title)
    for name in ("way", "figure", "A", "B", "B/A", "B is"):
        left = name in ("way", "figure", "B is")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for way, changes in group.ways.items():
        for index, change in enumerate(changes):
            table.add_row(
                folded(printable(way)) if index == 0 else Text(),
                Text(change.figure),
                Text(middle_text(change.a)),
                Text(middle_text(change.b)),
                Text(spread_text(change.ratio)),
                Text(change.verdict, style=_STYLES.get(change.verdict, "")),
                end_section=index == len(changes) - 1,
            )
    print_whole(table, console)
