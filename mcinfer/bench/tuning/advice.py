"""What a search for a pool comes to, for its reader: tables, a program to copy, and JSON."""

import json
import math
from dataclasses import asdict
from typing import Any

from mcinfer import __version__
from mcinfer.bench.tuning.candidates import Candidate
from mcinfer.bench.tuning.found import Found, Standing, ranking, standing
from mcinfer.bench.tuning.heats import ENOUGH_REQUESTS, Trial
from mcinfer.bench.views.figures import Spread, latency, spread_of
from mcinfer.bench.views.tables import Cell, Grid
from mcinfer.bench.views.texts import Unit, number, printable, seconds_text, spread_text, time_unit
from mcinfer.bench.way import why_whole
from mcinfer.specs import STRING, numpy_dtype

SCHEMA = "mcinfer.tune"
VERSION = 1

_LINE_CHARACTERS = 88
_TIMES = "\N{MULTIPLICATION SIGN}"


def arguments(candidate: Candidate, found: Found) -> dict[str, Any]:
    """A candidate as arguments of `mcinfer.Master`; those of its `options` as a mapping, by name."""
    told = candidate != found.default
    axes = {"batch_axes": found.batch_axes, "output_axes": found.output_axes}
    return {
        "devices": candidate.workers if told else None,
        "options": {"threads": candidate.threads} if told else {},
        "max_batch_size": candidate.max_batch_size,
        "max_delay": candidate.max_delay,
        **({"transport": candidate.transport} if candidate.transport != "zeromq" else {}),
        **{name: dict(said) for name, said in axes.items() if said},
    }


# A program.


def program(model: str, candidate: Candidate, found: Found) -> str:
    """A whole program that starts the pool and calls it as it was called here.

    Args:
        model: Path of the model, as the program is to name it.
        candidate: The pool.
        found: Says what the inputs are like.
    """
    arrays = [f"{_quoted(name)}: {_zeros(*kind)}" for name, kind in found.arrays.items()]
    types = {kind for kind, _ in found.arrays.values()}
    imports = ["import ml_dtypes"] if any(map(_is_foreign, types)) else []
    if candidate.call == "predict":
        calls = ["answer = master.predict(inputs)"]
    else:
        calls = [
            f"futures = [master.submit(inputs) for _ in range({found.aim.load.clients})]",
            "answers = [future.result() for future in futures]",
        ]
    return "\n".join(
        [
            *imports,
            "import numpy as np",
            "",
            "import mcinfer",
            "",
            f"inputs = {_joined('{', arrays, '}')}  # your own arrays here",
            f"with {_joined('mcinfer.Master(', _written(model, candidate, found), ')')} as master:",
            *(f"    {call}" for call in calls),
        ]
    )


def _zeros(kind: str, shape: tuple[int, ...]) -> str:
    if kind == STRING:
        return f'np.full({shape}, "", object)'
    return f"np.zeros({shape}, {f'ml_dtypes.{kind}' if _is_foreign(kind) else _quoted(kind)})"


def _quoted(text: str) -> str:
    """As a literal; in the quotes that programs are written with, where that is as simple."""
    simple = text.isprintable() and not {'"', "\\"} & {*text}
    return f'"{text}"' if simple else repr(text)


def _is_foreign(kind: str) -> bool:
    """Whether NumPy lacks the type."""
    return kind != STRING and numpy_dtype(kind).isbuiltin != 1


def _written(model: str, candidate: Candidate, found: Found) -> list[str]:
    """The arguments as they are written in a program, but for those that need not be."""
    given = arguments(candidate, found)
    written = [_quoted(model)]
    if given["devices"] is not None:
        written.append(f"devices={given['devices']}")
    if given["options"]:
        options = ", ".join(f"{name}={value!r}" for name, value in given["options"].items())
        written.append(f"options=mcinfer.EngineOptions({options})")
    if candidate.max_batch_size > 1:
        written.append(f"max_batch_size={candidate.max_batch_size}")
    if candidate.max_delay:
        written.append(f"max_delay={candidate.max_delay:g}")
    if "transport" in given:
        written.append(f"transport={_quoted(given['transport'])}")
    for name in ("batch_axes", "output_axes"):
        if name in given:
            axes = ", ".join(f"{_quoted(tensor)}: {axis}" for tensor, axis in given[name].items())
            written.append(f"{name}={{{axes}}}")
    return written


def _joined(start: str, parts: list[str], end: str) -> str:
    """In one line, or where that would be long in one for each part."""
    line = start + ", ".join(parts) + end
    if len(line) <= _LINE_CHARACTERS:
        return line
    return "\n".join([start, *(f"    {part}," for part in parts), end])


# In words.


def grids(found: Found) -> list[Grid]:
    """What was tried: a table for each rung in which anything was measured, the best first."""
    numbers = sorted({trial.rung for trial in found.trials})
    return [grid for rung in numbers if (grid := _grid(found, rung)).rows]


def _grid(found: Found, rung: int) -> Grid:
    trials = [trial for trial in found.trials if trial.rung == rung]
    order = ranking(found.aim, trials, found.default)
    standings = [s for each in order if (s := standing(trials, found.default, each))]
    unit = time_unit(latency(turn, 0.5) for each in standings for turn in each.turns)
    pools = "1 pool" if len(standings) == 1 else f"{len(standings)} pools"
    interrupted = "" if rung <= found.finished_rungs else ", interrupted"
    has_pairs = any(each.candidate.transport == "socketpair" for each in standings)
    pairs = "; pairs: over socketpair" if has_pairs else ""
    header = (
        "call",
        "workers",
        "threads",
        "joined",
        "delay ms",
        "rows/s",
        "p50",
        "p99",
        f"{_TIMES} default",
    )
    return Grid(
        title=f"round {rung}{interrupted}: {pools} (p50 and p99 in {unit.sign}{pairs})",
        header=header,
        rows=tuple(_row(found, each, unit) for each in standings),
    )


def _row(found: Found, measured: Standing, unit: Unit) -> tuple[Cell, ...]:
    candidate = measured.candidate
    joins = candidate.max_batch_size > 1
    call = [candidate.call, *(["default"] if candidate == found.default else [])]
    call += ["pairs"] if candidate.transport == "socketpair" else []
    return (
        ", ".join(call),
        str(candidate.workers),
        "auto" if candidate.threads is None else str(candidate.threads),
        str(candidate.max_batch_size) if joins else "no",
        f"{candidate.max_delay * 1e3:g}" if joins else "",
        (spread_of(map(found.aim.rows, measured.turns)), Unit()),
        *((_latency(measured, fraction), unit) for fraction in (0.5, 0.99)),
        (measured.over_default(found.aim), Unit()),
    )


def _latency(measured: Standing, fraction: float) -> Spread:
    return spread_of(latency(turn, fraction) for turn in measured.turns)


def remarks(found: Found) -> list[str]:
    """What a reader has to know beside the tables."""
    told = ["The search was interrupted: this is what is known so far."]
    if found.ended:
        told = [f"The search ended after {number(found.took_seconds)} s: {found.ended}."]
    if found.left_out:
        told.append(
            f"{found.left_out} of {found.candidates} pools were left out: there was no time for them. "
            f"--budget {math.ceil(found.needed_seconds)} is enough for all."
        )
    if found.split is not None and not found.split.splits:
        told.append(printable(f"Requests are not split, nor joined: {why_whole(found.split)}."))
    told += _few_requests(found)
    told += [
        printable(f"{trial.candidate}: {trial.error}") for trial in found.trials if trial.error
    ]
    return told


def _few_requests(found: Found) -> list[str]:
    last = None if found.best is None else found.last(found.best)
    count = min((turn.requests for turn in last.turns), default=0) if last else 0
    if not 0 < count < ENOUGH_REQUESTS:
        return []
    requests = "1 request" if count == 1 else f"{count} requests"
    return [
        f"p99 rests on {requests} in each turn: of fewer than {ENOUGH_REQUESTS} it is the slowest. "
        f"More --budget gives longer turns."
    ]


def verdict(found: Found) -> str:
    """What is best, and by how much; or that nothing is good enough, and what came nearest."""
    best = None if found.best is None else found.last(found.best)
    if best is None:
        return "no pool could be measured"
    if not found.fits:
        return _nearest(found, best)
    default = found.last(found.default)
    better = best.over_default(found.aim)
    over = "not to be compared with the default"
    if better.known:
        low, high = number(better.low, better.middle), number(better.high, better.middle)
        over = f"{number(better.middle)} {_TIMES} the default ({low} … {high})"
    elif default is None:
        over += ", which failed"
    if default is not None and found.default_is_as_good:
        said = f"The default is as good as any: {_figure(found, default)}."
        is_best = best.candidate == found.default
        return said if is_best else f"{said} The best other, {best.candidate}: {over}."
    text = f"Best: {best.candidate}: {_figure(found, best)}, {over}."
    if default is not None and not found.keeps_bound(found.default):
        keeps_up = found.keeps_up(found.default)
        what = "keep the bound" if keeps_up else f"keep up with {found.aim.load}"
        text += f" The default does not {what}: {_figure(found, default)}."
    return text


def _figure(found: Found, measured: Standing) -> str:
    """What the goal is about, and the bound."""
    rows = spread_of(map(found.aim.rows, measured.turns))
    median, tail = _latency(measured, 0.5), _latency(measured, 0.99)
    unit = time_unit([median.low])
    first = f"{spread_text(rows)} rows/s"
    if found.aim.goal == "latency":
        first = f"p50 {spread_text(median, unit)} {unit.sign}"
    return f"{first}, p99 {spread_text(tail, unit)} {unit.sign}"


def _nearest(found: Found, best: Standing) -> str:
    tail = _latency(best, 0.99).middle
    if found.aim.max_latency is None or not found.keeps_up(best.candidate):
        return f"no pool keeps up with {found.aim.load}; {best.candidate} came nearest"
    return (
        f"no pool answers 99 % of the requests within {seconds_text(found.aim.max_latency)} under "
        f"{found.aim.load}; {best.candidate} came nearest with {seconds_text(tail)}"
    )


# For machines.


def as_json(model: str, found: Found, machine: dict[str, str | int | float]) -> bytes:
    """All that was measured, and what it comes to.

    Args:
        model: Path of the model.
        found: What the search found.
        machine: Where it ran.
    """
    chosen = found.recommended
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "mcinfer": __version__,
        "machine": machine,
        "cores": found.cores,
        "model": model,
        "aim": asdict(found.aim),
        "recommended": None if chosen is None else _recommended(model, chosen, found),
        "candidates": found.candidates,
        "left_out": found.left_out,
        "ended": found.ended,
        "finished": bool(found.ended),
        "took_seconds": found.took_seconds,
        "trials": [_trial(found, trial) for trial in found.trials],
    }
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def _recommended(model: str, chosen: Candidate, found: Found) -> dict[str, Any]:
    last = found.last(chosen)
    return {
        "arguments": arguments(chosen, found),
        "call": chosen.call,
        "is_default": chosen == found.default,
        "keeps_bound": found.keeps_bound(chosen),
        "over_default": None if last is None else _finite(last.over_default(found.aim)),
        "program": program(model, chosen, found),
    }


def _trial(found: Found, trial: Trial) -> dict[str, Any]:
    heat = [t for t in found.trials if (t.rung, t.heat) == (trial.rung, trial.heat)]
    measured = standing(heat, found.default, trial.candidate)
    return {
        "rung": trial.rung,
        "heat": trial.heat,
        "candidate": asdict(trial.candidate),
        "is_default": trial.candidate == found.default,
        "over_default": None if measured is None else _finite(measured.over_default(found.aim)),
        "error": trial.error,
        "turns": [asdict(turn) for turn in trial.turns],
    }


def _finite(spread: Spread) -> dict[str, float] | None:
    """JSON has neither NaN nor infinities."""
    values = {"middle": spread.middle, "low": spread.low, "high": spread.high}
    return values if all(map(math.isfinite, values.values())) else None
