"""The sentences and numbers of a report, the same in the terminal, on the page and in the plots."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mcinfer.bench.figures import (
    SHORTEST_FOR_CORES,
    Figures,
    Gain,
    Kind,
    Spread,
    best_gain,
    busy,
    compared_loads,
    gains,
    kept_up,
    memory_beside,
    pools,
    quicker_alone,
    spread_of,
    under,
)
from mcinfer.bench.report import OTHERS, Load, Report, Way
from mcinfer.errors import printable as shown
from mcinfer.specs import STRING, numpy_dtype

FLAWED = "!"
"""After the name of a way that did not answer all requests, or not as fast as they came."""
MEGABYTE = 1e6
TO = "\N{EN DASH}"
"""Between the least and the greatest; alone: not known."""
TIMES = "\N{MULTIPLICATION SIGN}"

SESSIONS = {
    "session": "a plain session, one request at a time",
    "threads": "a plain session",
    "inline": "an inline session",
}
"""Ways that hold a session in the program's own process, as bench names them."""

_KEPT_DIGITS = 3
_LINE_CHARACTERS = 88
_MAX_ERRORS = 5
"""Different ones that are shown; some count requests or name moments, so that no two are equal."""
_LIKE = 0.05
"""Memory within this part is about the same."""


@dataclass(frozen=True, slots=True)
class Unit:
    scale: float = 1.0
    sign: str = ""


def time_unit(seconds: Iterable[float]) -> Unit:
    """The largest unit in which the least of these times is not below a tenth."""
    least = min((s for s in seconds if math.isfinite(s) and s > 0), default=1e-3)
    if least >= 0.1:
        return Unit(1.0, "s")
    return Unit(1e-3, "ms") if least >= 1e-4 else Unit(1e-6, "µs")


def latency_unit(all_figures: Iterable[Figures]) -> Unit:
    return time_unit(figures.latency(0.5).low for figures in all_figures)


def unit_of(kind: Kind, times: Unit) -> Unit:
    units = {"bytes": Unit(MEGABYTE, "MB"), "part": Unit(0.01, "%"), "amount": Unit()}
    return units.get(kind, times)


def number(value: float, like: float | None = None) -> str:
    """Three digits of a number, or more before the point; with as many after it as `like` would have."""
    if math.isnan(value):
        return TO
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = value if like is None or not math.isfinite(like) else like
    # 9.996 is written 10.0, so its digits are counted after rounding.
    rounded = float(f"{abs(size):.{_KEPT_DIGITS - 1}e}")
    whole = 0 if rounded < 1 else 1 + math.floor(math.log10(rounded))
    return f"{value:.{max(0, _KEPT_DIGITS - whole)}f}"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def middle_text(spread: Spread, unit: Unit = Unit()) -> str:
    return number(spread.middle / unit.scale)


def range_text(spread: Spread, unit: Unit = Unit()) -> str:
    """The least and the greatest, with the digits of the median; empty where they do not differ."""
    middle = spread.middle / unit.scale
    low, high = (number(value / unit.scale, like=middle) for value in (spread.low, spread.high))
    return "" if low == high else f"{low}{TO}{high}"


def spread_text(spread: Spread, unit: Unit = Unit()) -> str:
    range_ = range_text(spread, unit)
    return f"{middle_text(spread, unit)} ({range_})" if range_ else middle_text(spread, unit)


def plus_minus(spread: Spread, unit: Unit = Unit()) -> str:
    """Such as ``±5``: the farthest repeat from the median; empty where none differs."""
    if not range_text(spread, unit):
        return ""
    farthest = max(spread.middle - spread.low, spread.high - spread.middle)
    if math.isinf(spread.high):
        farthest = math.inf
    return f"±{number(farthest / unit.scale, like=spread.middle / unit.scale)}"


def seconds_text(seconds: float) -> str:
    unit = time_unit([seconds])
    return f"{number(seconds / unit.scale)} {unit.sign}"


def printable(text: object) -> str:
    """One line of it, whatever characters it may have."""
    return shown(" ".join(str(text).split()))


# Facts.


def model_line(report: Report) -> str:
    model = report.model
    inputs, outputs = ", ".join(model.inputs), ", ".join(model.outputs)
    return printable(f"{model.name}, {number(model.bytes / MEGABYTE)} MB: {inputs} → {outputs}")


def machine_line(report: Report) -> str:
    return ", ".join(machine_text(key, value) for key, value in report.machine.items())


def machine_text(key: str, value: str | float) -> str:
    """One fact about the machine, its unit taken from the end of its name."""
    if key == "cpu":
        return printable(value)
    if key == OTHERS:
        return f"other programs used {value} cores"
    name, _, unit = key.rpartition("_")
    return f"{name} {value} GiB" if unit == "gib" else printable(f"{key.replace('_', ' ')} {value}")


def settings_line(report: Report) -> str:
    settings = report.settings
    length = f"{settings.count} requests" if settings.count else f"{settings.seconds:g} s"
    parts = [
        f"devices {', '.join(settings.devices)}",
        f"{settings.repeats} repeats of {length} after {settings.warmup_seconds:g} s of warm-up",
        *(
            [
                f"requests joined up to {settings.max_batch_size} rows"
                f" within {seconds_text(settings.max_delay)}"
            ]
            if any(figures.joined for figures in _all_figures(report))
            else []
        ),
        *(f"{name} = {size}" for name, size in settings.dims.items()),
        f"seed {settings.seed}",
    ]
    return printable("; ".join(parts))


def marked(figures: Figures) -> str:
    return printable(figures.way.name) + ("" if figures.sound else f" {FLAWED}")


# The verdict.


def verdict(report: Report) -> str:
    """Whether to use mcinfer for this model, and why; and what answers one request alone sooner."""
    best = best_gain(report)
    if best is None:
        return "No verdict: no way of mcinfer's and no baseline answered all requests of one load."
    all_gains = gains(report)
    clear = [gain for gain in all_gains if gain.clear > 0]
    what = "the throughput" if best.load.rate is None else "the speed of answers"
    others = ", ".join(dict.fromkeys(printable(gain.other) for gain in (clear or [best])))
    memory = _memory_text(report, best)
    if clear:
        most = f"{number(best.ratio.middle)} {TIMES} {what} of {others}"
        if len(clear) < len(all_gains):
            few = " and ".join(str(gain.load) for gain in clear)
            most += f" with {few if len(clear) < 3 else f'{len(clear)} of the loads'}"
        elif len(clear) > 1:
            most = f"up to {most}"
        link = ", but " if " more " in memory or TIMES in memory else " and "
        text = f"Use mcinfer: {most}{f'{link}{memory}' if memory else ''}."
        return f"{text}{_alone_text(report, best)}"
    crash = "" if best.own == "inline" else "a crash costs no request"
    if all(gain.clear < 0 for gain in all_gains):
        slow = f"mcinfer has {number(best.ratio.middle)} {TIMES} {what}"
        return f"Keep {others}: {'; '.join(filter(None, (slow, memory, crash)))}."
    text = "; ".join(filter(None, ("No clear gain in speed", memory, crash)))
    return f"{text}.{_alone_text(report, best)}"


def _memory_text(report: Report, best: Gain) -> str:
    """The memory of mcinfer's way beside that of the baseline that its speed is beside."""
    name, part = printable(best.other), memory_beside(report, best.own, best.other)
    if math.isnan(part):
        return ""
    if abs(part - 1) < _LIKE:
        return f"about the memory of {name}"
    if part > 2:
        return f"{number(part)} {TIMES} the memory of {name}"
    return f"{percent(abs(part - 1))} {'less' if part < 1 else 'more'} memory than {name}"


def _alone_text(report: Report, best: Gain) -> str:
    """The way that answers one small request sooner than the workers do; empty where none does."""
    found = quicker_alone(report, best.own)
    if found is None:
        return ""
    quickest, mine = found
    times = [seconds_text(each.latency(0.5).middle) for each in found]
    name, workers = printable(quickest.way.name), mine.way.workers
    return (
        f" For the latency of one request: {name} ({times[0]}, {best.own} {times[1]}); "
        f"{workers} workers are for many clients."
    )


def gain_lines(report: Report) -> tuple[str, ...]:
    """For each load: mcinfer's speed-up, and whether it is clear; then the scaling."""
    lines = []
    for gain in gains(report):
        words = {1: "faster", -1: "slower", 0: "no clear difference"}
        if len(gain.ratio.values) < 2:
            words[0] = "measured once"
        range_ = range_text(gain.ratio).replace(TO, " to ") or middle_text(gain.ratio)
        own, other = printable(gain.own), printable(gain.other)
        text = f"{own} has {range_} {TIMES} the throughput of {other}"
        if gain.load.rate is not None:
            text = f"{own} answers {range_} {TIMES} as fast as {other}"
        lines.append(f"{gain.load}: {text} ({words[gain.clear]}).")
    for pool in pools(report)[-1:]:
        if pool.way.workers > 1 and pool.speedup.known:
            efficiency = spread_text(pool.speedup, Unit(0.01, "%"))
            lines.append(f"Scaling efficiency, {pool.way.workers} workers: {efficiency} %.")
    return tuple(lines)


# Programs.


def report_program(report: Report) -> str:
    """A program that runs the model in the way that the verdict is about; empty where there is none."""
    best = best_gain(report)
    if best is None:
        return ""
    settings = report.settings
    many = len(settings.devices)
    simple = settings.devices == tuple(f"cpu:{n}" for n in range(many))
    arguments: dict[str, Any] = {"devices": many if simple else [*settings.devices]}
    if any(f.joined for f in under(report, best.load) if f.way.name == best.own):
        arguments |= {"max_batch_size": settings.max_batch_size, "max_delay": settings.max_delay}
    if best.own == "inline":
        arguments = {"providers": ["CPUExecutionProvider"]} if simple else {}
    arrays = {}
    for text in report.model.inputs:
        name, _, rest = text.rpartition(": ")
        kind, _, dims = rest.rstrip("]").partition("[")
        shape = []
        for axis, size in enumerate(filter(None, dims.split(", "))):
            key = f"{name}:{axis}" if size == "?" else size
            known = int(size) if size.isdecimal() else settings.dims.get(key, best.load.batch)
            shape.append(known)
        arrays[name] = kind, tuple(shape)
    call = {"sharded": "predict", "inline": "inline"}.get(best.own, "submit")
    return program(report.model.name, arguments, arrays, call, best.load.clients)


def program(
    model: str,
    arguments: Mapping[str, Any],
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    call: str,
    clients: int,
) -> str:
    """A whole program that opens a session, or starts a pool, and calls it.

    Args:
        model: Path of the model.
        arguments: Arguments of `mcinfer.Master`, with `options` as a mapping, empty ones are left out; of a
            session: its `providers`, and attributes of its `SessionOptions`.
        arrays: By input name, element type and shape.
        call: The method of a pool, ``"predict"`` or ``"submit"``; or one of `SESSIONS`.
        clients: Requests under way at once.
    """
    made = [f"{_quoted(name)}: {_zeros(*kind)}" for name, kind in arrays.items()]
    foreign = "import ml_dtypes\n" if any("ml_dtypes." in text for text in made) else ""
    inputs = f"inputs = {_joined('{', made, '}')}  # your own arrays here\n"
    if call in SESSIONS:
        begin, calls = _session(model, arguments, call, clients)
        inline = "\nimport mcinfer.ort as onnxruntime\n"
        runtime = inline if call == "inline" else "import onnxruntime\n"
        return f"{begin}{foreign}import numpy as np\n{runtime}\n{inputs}{calls}"
    written = [_quoted(model)]
    for name, value in arguments.items():
        if name == "options" and value:
            options = ", ".join(f"{key}={option!r}" for key, option in value.items())
            written.append(f"options=mcinfer.EngineOptions({options})")
        elif value:
            written.append(f"{name}={_quoted(value)}")
    if call == "predict":
        calls = "    answer = master.predict(inputs)"
    else:
        calls = (
            f"    futures = [master.submit(inputs) for _ in range({clients})]\n"
            "    answers = [future.result() for future in futures]"
        )
    return (
        f"{foreign}import numpy as np\n\nimport mcinfer\n\n{inputs}"
        f"with {_joined('mcinfer.Master(', written, ')')} as master:\n{calls}"
    )


def _session(model: str, arguments: Mapping[str, Any], call: str, clients: int) -> tuple[str, str]:
    """The first line of a program that holds a session, if it needs one, and its last lines."""
    given, more = dict(arguments), [_quoted(model)]
    providers = given.pop("providers", None)
    options = [f"options.{name} = {value!r}\n" for name, value in given.items()]
    if options:
        options.insert(0, "options = onnxruntime.SessionOptions()\n")
        more.append("options")
    if providers:
        more.append(f"providers=[{', '.join(map(_quoted, providers))}]")
    opened = f"session = {_joined('onnxruntime.InferenceSession(', more, ')')}\n"
    begin = ""
    if clients > 1 and call != "session":
        begin = "from concurrent.futures import ThreadPoolExecutor\n\n"
        calls = (
            f"with ThreadPoolExecutor({clients}) as clients:\n"
            f"    answers = [*clients.map(lambda _: session.run(None, inputs), range({clients}))]"
        )
    elif clients > 1:
        calls = f"answers = [session.run(None, inputs) for _ in range({clients})]"
    else:
        calls = "answer = session.run(None, inputs)"
    return begin, "".join(options) + opened + calls


def _zeros(kind: str, shape: tuple[int, ...]) -> str:
    if kind == STRING:
        return f'np.full({shape}, "", object)'
    native = numpy_dtype(kind).isbuiltin == 1
    return f"np.zeros({shape}, {_quoted(kind) if native else f'ml_dtypes.{kind}'})"


def _quoted(value: Any) -> str:
    """As a literal; a text in double quotes, where that needs no escapes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(key)}: {one}' for key, one in value.items())}}}"
    simple = isinstance(value, str) and value.isprintable() and not {'"', "\\"} & {*value}
    return f'"{value}"' if simple else repr(value)


def _joined(start: str, parts: list[str], end: str) -> str:
    line = start + ", ".join(parts) + end
    if len(line) <= _LINE_CHARACTERS:
        return line
    return "\n".join([start, *(f"    {part}," for part in parts), end])


# What a reader has to know.


def busy_text(report: Report) -> str:
    """A warning where other work disturbed the benchmark; empty otherwise."""
    others, spread = busy(report)
    why = [f"other programs used {number(others)} cores"] if others else []
    why += [f"repeats differ by {percent(spread)}"] if spread else []
    return f"The machine was busy: do not trust these figures ({', '.join(why)})." if why else ""


def remarks(report: Report) -> tuple[str, ...]:
    """Warnings: without them the figures would be misread."""
    found = [] if report.finished else ["The benchmark was interrupted: some turns are missing."]
    if report.settings.repeats == 1:
        found.append("Everything was measured once: the spread is not known.")
    found += [_way_error(report, way) for way in report.ways if way.error]
    flaws: dict[Load, list[str]] = {}
    errors: dict[str, list[str]] = {}
    for figures in _all_figures(report):
        name = printable(figures.way.name)
        if not figures.sound:
            flaws.setdefault(figures.load, []).append(f"{name} ({flaw_text(figures)})")
        for error in filter(None, (turn.error for turn in figures.turns)):
            errors.setdefault(printable(error), []).append(name)
    found += [f"Fell short under {load}: {', '.join(texts)}." for load, texts in flaws.items()]
    found += [
        f"Requests of {', '.join(dict.fromkeys(ways))} failed: {error}"
        for error, ways in [*errors.items()][:_MAX_ERRORS]
    ]
    if len(errors) > _MAX_ERRORS:
        found.append(f"Requests failed for {len(errors) - _MAX_ERRORS} more reasons.")
    return tuple(found)


def _all_figures(report: Report) -> list[Figures]:
    compared = [figures for load in compared_loads(report) for figures in under(report, load)]
    return [*compared, *pools(report)]


def notes(report: Report) -> tuple[str, ...]:
    all_figures = [figures for figures in _all_figures(report) if figures.made]
    found = []
    if any(not figures.latency(0.99).known for figures in all_figures):
        found.append(f"{TO}: p90 and p99 need at least 10 and 100 requests in each turn (n).")
    if any(not figures.cores.known for figures in all_figures):
        found.append(f"{TO}: cores need turns of at least {SHORTEST_FOR_CORES:g} s.")
    return tuple(found)


def _way_error(report: Report, way: Way) -> str:
    partly = any(m.way == way.name and m.turns for m in report.measurements)
    where = " under all loads" if partly else ""
    return printable(f"{way.name} could not be measured{where}: {way.error}")


def flaw_text(figures: Figures) -> str:
    """The requests that were not answered, or late; empty if there were none."""
    turns, rate = figures.turns, figures.load.rate
    if not figures.made:
        return "no request was made"
    parts = []
    behind = sum(not kept_up(turn) for turn in turns)
    if behind and rate is not None:
        times = "" if behind == len(turns) else f" in {behind} of {len(turns)} repeats"
        answered = spread_text(spread_of(turn.throughput for turn in turns))
        parts.append(f"did not keep up{times}: {answered} of {rate:g} requests/s answered")
    if failed := sum(turn.failed for turn in turns):
        parts.append(f"{failed} of {figures.made} failed")
    if unfinished := sum(turn.unfinished for turn in turns):
        parts.append(f"{unfinished} of {figures.made} never begun")
    return ", ".join(parts)
