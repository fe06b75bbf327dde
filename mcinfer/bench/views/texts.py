"""How a report's figures are written, the same in the terminal, on the page and in the plots."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mcinfer.bench.report import Load, Report, Way
from mcinfer.bench.views.figures import (
    REFERENCE,
    SHORTEST_FOR_CORES,
    LoadFigures,
    Spread,
    compared_loads,
    pools,
    under,
)
from mcinfer.printable import printable as shown

FLAWED = "!"
"""Stands after a way's name where not all of its requests were answered, or not as fast as they came."""

MEGABYTE = 1e6
TO = "\N{EN DASH}"
"""Between the least and the greatest."""
UNKNOWN_TEXT = "\N{EN DASH}"
"""In the place of a figure that is not known."""

_KEPT_DIGITS = 3
_MAX_ERRORS = 5
"""Different ones that are told; some count requests or name moments, so that no two are equal."""

_MILLISECOND, _MICROSECOND = 1e-3, 1e-6
_LEAST_OF_A_UNIT = 0.1


@dataclass(frozen=True, slots=True)
class Unit:
    """What figures of one column are divided by, and its sign."""

    scale: float = 1.0
    sign: str = ""


def time_unit(seconds: Iterable[float]) -> Unit:
    """The largest unit in which the least of these times is not below a tenth."""
    least = min((s for s in seconds if math.isfinite(s) and s > 0), default=_MILLISECOND)
    for unit in (Unit(1.0, "s"), Unit(_MILLISECOND, "ms")):
        if least >= _LEAST_OF_A_UNIT * unit.scale:
            return unit
    return Unit(_MICROSECOND, "µs")


def latency_unit(all_figures: Iterable[LoadFigures]) -> Unit:
    """The unit for all latencies of one table."""
    return time_unit(figures.p50.low for figures in all_figures)


def number(value: float, like: float | None = None) -> str:
    """Three digits of a number, or more before the point; with as many after it as `like` would have."""
    if math.isnan(value):
        return UNKNOWN_TEXT
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    return f"{value:.{_decimals(value if like is None or not math.isfinite(like) else like)}f}"


def _decimals(value: float) -> int:
    # 9.996 is written 10.0, so its digits are counted after rounding.
    rounded = float(f"{abs(value):.{_KEPT_DIGITS - 1}e}")
    whole = 0 if rounded < 1 else 1 + math.floor(math.log10(rounded))
    return max(0, _KEPT_DIGITS - whole)


def middle_text(spread: Spread, unit: Unit = Unit()) -> str:
    """The middle alone."""
    return number(spread.middle / unit.scale)


def spread_text(spread: Spread, unit: Unit = Unit()) -> str:
    """The middle, with the least and the greatest in brackets where they differ."""
    middle, low, high = _scaled(spread, unit)
    return middle if low == high else f"{middle} ({low}{TO}{high})"


def range_text(spread: Spread, unit: Unit = Unit()) -> str:
    """The least and the greatest; empty where they do not differ."""
    _, low, high = _scaled(spread, unit)
    return "" if low == high else f"{low}{TO}{high}"


def plus_minus(spread: Spread, unit: Unit = Unit()) -> str:
    """Such as ``±5``: how far the repeats are from the middle at most; empty if nowhere."""
    _, low, high = _scaled(spread, unit)
    if low == high:
        return ""
    if math.isinf(spread.high):
        return "±∞"
    farthest = max(spread.middle - spread.low, spread.high - spread.middle)
    return f"±{number(farthest / unit.scale, like=spread.middle / unit.scale)}"


def _scaled(spread: Spread, unit: Unit) -> tuple[str, str, str]:
    middle = spread.middle / unit.scale
    low, high = (number(value / unit.scale, like=middle) for value in (spread.low, spread.high))
    return number(middle), low, high


def seconds_text(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    unit = time_unit([seconds])
    return f"{number(seconds / unit.scale)} {unit.sign}"


def printable(text: object) -> str:
    """One line of it, whatever characters it may have."""
    return shown(" ".join(str(text).split()))


def model_line(report: Report) -> str:
    """The model: its name, size, inputs and outputs."""
    model = report.model
    inputs, outputs = ", ".join(model.inputs), ", ".join(model.outputs)
    return printable(f"{model.name}, {number(model.bytes / MEGABYTE)} MB: {inputs} → {outputs}")


def machine_line(report: Report) -> str:
    """The machine, and the versions of what ran on it."""
    return ", ".join(machine_text(key, value) for key, value in report.machine.items())


def machine_text(key: str, value: str | float) -> str:
    """One fact about the machine, its unit taken from the end of its name."""
    if key == "cpu":
        return printable(value)
    name, _, unit = key.rpartition("_")
    if unit == "gib":
        return f"{name} {value} GiB"
    return printable(f"{key.replace('_', ' ')} {value}")


def settings_line(report: Report) -> str:
    """How it was measured."""
    settings = report.settings
    length = f"{settings.count} requests" if settings.count else f"{settings.seconds:g} s"
    parts = [
        f"devices {', '.join(settings.devices)}",
        f"{settings.repeats} repeats of {length} after {settings.warmup_seconds:g} s of warm-up",
        f"requests joined up to {settings.max_batch_size} rows"
        f" within {seconds_text(settings.max_delay)}",
        *([f"transport {settings.transport}"] if settings.transport != "zeromq" else []),
        *(f"{name} = {size}" for name, size in settings.dims.items()),
        f"seed {settings.seed}",
    ]
    return printable("; ".join(parts))


def way_lines(report: Report) -> tuple[str, ...]:
    """What each way is; the pools of the scaling apart, which are all alike."""
    ways = [way for way in report.ways if way.role != "scaling"]
    return tuple(printable(f"{way.name}: {way.text}") for way in ways)


def marked(figures: LoadFigures) -> str:
    """The name of a way, and whether it is to be believed."""
    return printable(figures.way) + ("" if figures.sound else f" {FLAWED}")


def summary(report: Report) -> tuple[str, ...]:
    """What was found, in a few sentences."""
    sentences = (_best(report), _against_reference(report), _scaling(report))
    return tuple(sentence for sentence in sentences if sentence)


def _sound(report: Report) -> list[LoadFigures]:
    return [f for load in compared_loads(report) for f in under(report, load) if f.sound]


def _best(report: Report) -> str:
    best = max(_sound(report), key=lambda figures: figures.rows.middle, default=None)
    if best is None:
        return ""
    rows = spread_text(best.rows)
    return f"Most rows a second: {printable(best.way)} with {rows}, under {best.load}."


def _against_reference(report: Report) -> str:
    """The best of mcinfer's ways against one session, over all loads that both kept up with."""
    own = {way.name for way in report.ways if way.role == "mcinfer"}
    best: list[LoadFigures] = []
    for load in compared_loads(report):
        figures = under(report, load)
        whole = any(f.way == REFERENCE and f.sound for f in figures)
        # In an open loop all that keep up answer as much.
        if whole and load.rate is None:
            candidates = [f for f in figures if f.way in own and f.sound and f.speedup.known]
            best += sorted(candidates, key=lambda f: f.speedup.middle)[-1:]
    if not best:
        return ""
    best.sort(key=lambda f: f.speedup.middle)
    least, most = (
        f"{spread_text(f.speedup)} times ({printable(f.way)}, {f.load})"
        for f in (best[0], best[-1])
    )
    range_ = least if len(best) == 1 else f"from {least} to {most}"
    return f"In closed loops the best of mcinfer's ways has {range_} the throughput of {REFERENCE}."


def _scaling(report: Report) -> str:
    largest = next(reversed(pools(report)), None)
    if largest is None or largest.workers == 1 or not largest.efficiency.known:
        return ""
    percent = spread_text(largest.efficiency, Unit(0.01, "%"))
    return (
        f"{largest.workers} workers have {percent} % of the throughput of {largest.workers} times one"
        f" worker, under {largest.figures.load}."
    )


def remarks(report: Report) -> tuple[str, ...]:
    """What a reader has to know before believing the figures."""
    found = [] if report.finished else ["The benchmark was interrupted: some turns are missing."]
    if report.settings.repeats == 1:
        found.append("Everything was measured once: how far figures spread is not known.")
    found += [error_text(report, way) for way in report.ways if way.error]
    flaws: dict[Load, list[str]] = {}
    errors: dict[str, list[str]] = {}
    for figures in _all_figures(report):
        if not figures.sound:
            text = f"{printable(figures.way)} ({flaw_text(figures)})"
            flaws.setdefault(figures.load, []).append(text)
        for error in figures.errors:
            errors.setdefault(printable(error), []).append(printable(figures.way))
    found += [f"Fell short under {load}: {', '.join(texts)}." for load, texts in flaws.items()]
    found += [
        f"Requests of {', '.join(dict.fromkeys(ways))} failed: {error}"
        for error, ways in [*errors.items()][:_MAX_ERRORS]
    ]
    if len(errors) > _MAX_ERRORS:
        found.append(f"Requests failed for {len(errors) - _MAX_ERRORS} more reasons.")
    return tuple(found)


def _all_figures(report: Report) -> list[LoadFigures]:
    """Load by load, then those of the scaling."""
    compared = [figures for load in compared_loads(report) for figures in under(report, load)]
    return compared + [pool.figures for pool in pools(report)]


def notes(report: Report) -> tuple[str, ...]:
    """Why some figures are not there."""
    all_figures = _all_figures(report)
    few = any(f.made and not f.p99.known for f in all_figures)
    short = any(f.made and not f.cores.known for f in all_figures)
    told = (
        (few, "p90 and p99 need at least 10 and 100 requests in each turn (n)."),
        (short, f"cores need turns of at least {SHORTEST_FOR_CORES:g} s."),
    )
    return tuple(f"{UNKNOWN_TEXT}: {text}" for applies, text in told if applies)


def error_text(report: Report, way: Way) -> str:
    """Why a way could not be measured, or not under all loads."""
    partly = any(m.way == way.name and m.turns for m in report.measurements)
    where = " under all loads" if partly else ""
    return printable(f"{way.name} could not be measured{where}: {way.error}")


def flaw_text(figures: LoadFigures) -> str:
    """What became of the requests that were not answered, or late; empty if there were none."""
    if not figures.made:
        return "no request was made"
    failed = f"{figures.failed} of {figures.made} failed" if figures.failed else ""
    late = f"{figures.unfinished} of {figures.made} never begun" if figures.unfinished else ""
    return ", ".join(part for part in (_behind_text(figures), failed, late) if part)


def _behind_text(figures: LoadFigures) -> str:
    """The rate that was asked for, and the one that was answered, where an open loop was not kept up with."""
    if not figures.behind or figures.load.rate is None:
        return ""
    repeats = figures.requests.count
    times = "" if figures.behind == repeats else f" in {figures.behind} of {repeats} repeats"
    answered = spread_text(figures.requests)
    return f"did not keep up{times}: {answered} of {figures.load.rate:g} requests/s answered"
