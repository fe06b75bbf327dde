"""The sentences and programs of a report, the same in the terminal, on the page and in the file.

`judged` decides whether there may be a verdict: what disturbed the measurement takes its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from mcinfer.bench.figures import (
    CLEAR_GAIN,
    FLAWED,
    MEGABYTES,
    Figures,
    best_gain,
    difference_text,
    gains,
    kept_up,
    memory,
    number,
    seconds_text,
    spread_of,
    spread_text,
    under,
)
from mcinfer.bench.report import OTHERS, OTHERS_BEFORE, Load, Report, Way
from mcinfer.bench.way import engine_arguments
from mcinfer.engines.names import DEFAULT_ENGINE
from mcinfer.errors import printable as shown
from mcinfer.specs import STRING, numpy_dtype

TIMES = "\N{MULTIPLICATION SIGN}"

SESSIONS = {
    "session": "a plain session, one request at a time",
    "threads": "a plain session",
    "inline": "an inline session",
}
"""Ways that hold a session in the program's own process, as bench names them."""

_LINE_CHARACTERS = 88
_MAX_ERRORS = 5
"""Different ones that are shown; some count requests or name moments, so that no two are equal."""
_LIKE = 0.05
"""Memory within this part is about the same."""
NO_VERDICT = "No verdict"
BUSY_CORES = 0.1
"""Cores that other programs may use until figures are not to be trusted: a quiet machine has 0.02."""
_BUSY_SPREAD = 0.3
"""The same of the usual spread of throughput, as a part of its median."""


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def printable(text: object) -> str:
    """One line of it, whatever characters it may have."""
    return shown(" ".join(str(text).split()))


# Facts.


def model_line(report: Report) -> str:
    model = report.model
    inputs, outputs = ", ".join(model.inputs), ", ".join(model.outputs)
    return printable(
        f"{model.name}, {number(model.bytes / MEGABYTES.scale)} MB: {inputs} → {outputs}"
    )


def machine_line(report: Report) -> str:
    return ", ".join(machine_text(key, value) for key, value in report.machine.items())


def machine_text(key: str, value: str | float) -> str:
    """One fact about the machine, its unit taken from the end of its name."""
    if key == "cpu":
        return printable(value)
    if key in (OTHERS, OTHERS_BEFORE):
        before = " before" * (key == OTHERS_BEFORE)
        return f"other programs used {value} cores{before}"
    name, _, unit = key.rpartition("_")
    return f"{name} {value} GiB" if unit == "gib" else printable(f"{key.replace('_', ' ')} {value}")


def settings_line(report: Report) -> str:
    settings = report.settings
    length = f"{settings.count} requests" if settings.count else f"{settings.seconds:g} s"
    parts = [
        f"devices {', '.join(settings.devices)}",
        f"{settings.repeats} repeats of {length} after {settings.warmup_seconds:g} s of warm-up",
    ]
    if any(figures.joined for figures in _all_figures(report)):
        parts.append(f"requests joined up to {settings.max_batch_size} rows")
    parts += [f"{name} = {size}" for name, size in settings.dims.items()]
    return printable("; ".join([*parts, f"seed {settings.seed}"]))


def marked(figures: Figures) -> str:
    return printable(figures.way.name) + ("" if figures.sound else f" {FLAWED}")


# The verdict.


def judged(report: Report) -> Report:
    """The report with what disturbed it, the other remarks, and the verdict that these allow."""
    disturbed = (*busy(report.machine), *_unsettled(report))
    verdict = no_verdict(disturbed) or _verdict(report)
    return replace(report, disturbed=disturbed, remarks=_remarks(report), verdict=verdict)


def no_verdict(disturbed: Sequence[str]) -> str:
    """What is said in place of a verdict after such disturbances; empty where there is none."""
    return f"{NO_VERDICT}. {' '.join(disturbed)}" if disturbed else ""


def busy(machine: Mapping[str, str | float]) -> tuple[str, ...]:
    """What other programs disturbed, and what to do; empty where they left the machine alone."""
    times = {OTHERS_BEFORE: "before this began", OTHERS: "while it measured"}
    used = {when: float(machine.get(key, 0.0)) for key, when in times.items()}
    found = [f"{number(cores)} cores {when}" for when, cores in used.items() if cores > BUSY_CORES]
    if not found:
        return ()
    which = " and ".join(found)
    return (f"The machine was busy: other programs used {which}. End them, and measure again.",)


def _unsettled(report: Report) -> list[str]:
    """What else takes back any figure."""
    found = ["It was interrupted: some turns are missing."] * (not report.finished)
    closed = [f for load in report.loads if load.rate is None for f in under(report, load)]
    usual = median([f.rows.width for f in closed if f.sound] or [0.0])
    if usual > _BUSY_SPREAD:
        found.append(f"Repeats differ by {percent(usual)}: measure longer (--duration, --repeat).")
    return found


def _verdict(report: Report) -> str:
    """Whether to use mcinfer for this model, and why; and what answers one request alone sooner."""
    best = best_gain(report)
    if best is None:
        return (
            f"{NO_VERDICT}: no way of mcinfer's and no baseline answered all requests of one load."
        )
    if report.settings.repeats == 1:
        return (
            f"{NO_VERDICT}: everything was measured once, so the spread is not known (--repeat 3)."
        )
    all_gains = gains(report)
    clear = [gain for gain in all_gains if gain.clear > 0]
    what = "the throughput" if best.load.rate is None else "the speed of answers"
    others = ", ".join(dict.fromkeys(printable(gain.other) for gain in (clear or [best])))
    memory, speed = _memory_text(best), f"{number(best.speedup.middle)} {TIMES} {what}"
    if clear:
        text = f"{speed} of {others}"
        if len(clear) < len(all_gains):
            few = " and ".join(str(gain.load) for gain in clear)
            text += f" with {few if len(clear) < 3 else f'{len(clear)} of the loads'}"
        elif len(clear) > 1:
            text = f"up to {text}"
        link = ", but " if " more " in memory or TIMES in memory else " and "
        text = f"Use mcinfer: {text}{f'{link}{memory}' if memory else ''}"
        return f"{text}.{_engine_text(best.way)}{_alone_text(report, best)}"
    slower = all(gain.clear < 0 for gain in all_gains)
    crash = "" if best.way.name == "inline" else "a crash costs no request"
    first = f"Keep {others}: mcinfer has {speed}" if slower else "No clear gain in speed"
    alone = "" if slower else _alone_text(report, best)
    return f"{'; '.join(filter(None, (first, memory, crash)))}.{alone}"


def _engine_text(way: Way) -> str:
    if way.engine == DEFAULT_ENGINE:
        return ""
    return (
        f" With {way.engine}, whose answer differs by {difference_text(way.difference)} of ONNX Runtime's "
        "largest value."
    )


def _memory_text(best: Figures) -> str:
    """The memory of mcinfer's way beside that of the baseline that its speed is beside."""
    own, others = (memory(each.way)[0].middle if each else math.nan for each in (best, best.base))
    name, part = printable(best.other), own / others
    if math.isnan(part):
        return ""
    if abs(part - 1) < _LIKE:
        return f"about the memory of {name}"
    if part > 2:
        return f"{number(part)} {TIMES} the memory of {name}"
    return f"{percent(abs(part - 1))} {'less' if part < 1 else 'more'} memory than {name}"


def _alone_text(report: Report, best: Figures) -> str:
    """The way without several workers that answers one small request sooner; empty where none does.

    By the median latency of one client's requests of the fewest rows, in every repeat.
    """
    loads = [load for load in report.loads if load.rate is None and load.clients == 1]
    least = min(loads, key=lambda load: load.batch, default=None)
    found = [each for each in under(report, least) if each.sound] if least else []
    mine = next((each for each in found if each.way.name == best.way.name), None)
    single = [each for each in found if each.way.workers == 1]
    if mine is None or mine.way.workers == 1 or not single:
        return ""
    quickest = min(single, key=lambda each: each.latency(0.5).middle)
    slow, quick = mine.latency(0.5), quickest.latency(0.5)
    ratio = spread_of(a / b for a, b in zip(slow.values, quick.values, strict=False))
    if not (ratio.low > 1 and ratio.middle >= CLEAR_GAIN):
        return ""
    return (
        f" For the latency of one request: {printable(quickest.way.name)} "
        f"({seconds_text(quick.middle)}, {best.way.name} {seconds_text(slow.middle)}); "
        f"{mine.way.workers} workers are for many clients."
    )


# Programs.


def report_program(report: Report) -> str:
    """A program that runs the model in the way that the verdict is about; empty where there is none."""
    best, settings = best_gain(report), report.settings
    if best is None or report.verdict.startswith(NO_VERDICT):
        return ""
    arrays = settings.arrays.get(str(best.load.batch))
    if not arrays:  # of an earlier version
        return ""
    own, threads = best.way.name.partition("/")[0], settings.threads
    many = len(settings.devices)
    simple = settings.devices == tuple(f"cpu:{n}" for n in range(many))
    if own == "inline":
        arguments: dict[str, Any] = {"providers": ["CPUExecutionProvider"]} if simple else {}
        arguments |= {"intra_op_num_threads": threads} if threads else {}
    else:
        engine = engine_arguments(best.way.engine)
        options = engine.pop("options") | ({"threads": threads} if threads else {})
        arguments = {
            "devices": many if simple else [*settings.devices],
            **(engine if best.way.engine != DEFAULT_ENGINE else {}),
            "options": options,
            "max_batch_size": settings.max_batch_size if best.joined else None,
            "batch_axes": settings.batch_axes,
            "output_axes": settings.output_axes,
        }
    call = {"sharded": "predict", "inline": "inline"}.get(own, "submit")
    rate = max(turn.throughput for turn in best.turns)
    return program(report.model.name, arguments, arrays, call, best.load.clients, rate)


def program(
    model: str,
    arguments: Mapping[str, Any],
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    call: str,
    clients: int,
    rate: float,
) -> str:
    """A whole program that opens a session, or starts a pool, calls it for a second, and says how fast it is.

    Args:
        model: Path of the model.
        arguments: Arguments of `mcinfer.Master`, with `options` as a mapping, empty ones are left out; of a
            session: its `providers`, and attributes of its `SessionOptions`.
        arrays: By input name, element type and shape.
        call: The method of a pool, ``"predict"`` or ``"submit"``; or one of `SESSIONS`.
        clients: Requests under way at once.
        rate: Requests a second that were measured.
    """
    made = [f"{_quoted(name)}: {_random(*kind)}" for name, kind in arrays.items()]
    imports = ["from time import perf_counter", "", "import numpy as np"]
    if any("ml_dtypes." in text for text in made):
        imports.insert(2, "import ml_dtypes")
    given, written, lines = {**arguments}, [_quoted(model)], []
    count = max(clients, round(float(f"{rate:.1e}")))
    first = run = "answer = session.run(None, inputs)"
    called, start = f"for _ in range({count}):", ""
    if call in SESSIONS:
        imports.append(
            "import onnxruntime" if call != "inline" else "\nimport mcinfer.ort as onnxruntime"
        )
        if clients > 1 and call != "session":
            imports.insert(0, "from concurrent.futures import ThreadPoolExecutor")
            start = f"clients = ThreadPoolExecutor({clients})"
            called = (
                f"for answer in clients.map(lambda _: session.run(None, inputs), range({count})):"
            )
        providers = given.pop("providers", None)
        if given:
            lines = ["options = onnxruntime.SessionOptions()"]
            lines += [f"options.{name} = {value!r}" for name, value in given.items()]
            written.append("options")
        if providers:
            written.append(f"providers=[{', '.join(map(_quoted, providers))}]")
        lines.append(f"session = {_joined('onnxruntime.InferenceSession(', written, ')')}")
    else:
        imports.append("\nimport mcinfer")
        for name, value in given.items():
            if value:
                text = _quoted(value)
                if name == "options":
                    chosen = ", ".join(f"{key}={option!r}" for key, option in value.items())
                    text = f"mcinfer.EngineOptions({chosen})"
                written.append(f"{name}={text}")
        lines.append(f"with {_joined('mcinfer.Master(', written, ')')} as master:")
        first = run = "answer = master.predict(inputs)"
        if call == "submit":
            first = "master.warm_up(inputs)"
            called = f"for answer in master.map([inputs] * {count}, ahead={clients}):"
    indent = "" if call in SESSIONS else "    "
    body = [
        start,
        f"{first}  # not counted: the first takes longer",
        "begin = perf_counter()",
        called,
    ]
    body += [
        f"    {'pass' if 'answer' in called else run}",
        f'print(f"{{{count} / (perf_counter() - begin):.1f}} requests a second")',
    ]
    lines += [indent + line for line in body if line]
    inputs = f"inputs = {_joined('{', made, '}')}  # your own arrays here"
    return "\n".join([*imports, "", "random = np.random.default_rng(0)", inputs, *lines])


def _random(kind: str, shape: tuple[int, ...]) -> str:
    """An array of random values, so that the rows differ."""
    if kind == STRING:
        return f'np.asarray(random.choice(["red", "green", "blue"], {shape}), object)'
    least_most = "0, 2" if kind == "bool" else "0, 10"
    whole = "int" in kind or kind == "bool"
    values = f"random.integers({least_most}, {shape})" if whole else f"random.normal(size={shape})"
    native = numpy_dtype(kind).isbuiltin == 1
    return f"np.asarray({values}, {_quoted(kind) if native else f'ml_dtypes.{kind}'})"


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


def _remarks(report: Report) -> tuple[str, ...]:
    """Warnings that take back no verdict: without them the figures would be misread."""
    found = []
    measured = {m.way for m in report.measurements if m.turns}
    found += [
        printable(
            f"{way.name} could not be measured{' under all loads' * (way.name in measured)}: {way.error}"
        )
        for way in report.ways
        if way.error
    ]
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
    return tuple(found)


def _all_figures(report: Report) -> list[Figures]:
    return [figures for load in report.loads for figures in under(report, load)]


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
