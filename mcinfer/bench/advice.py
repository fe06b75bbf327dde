"""The result of a search for the best way, for its reader: tables, a verdict, a program to copy, and JSON."""

import json
import math
from dataclasses import asdict
from typing import Any

from mcinfer import __version__
from mcinfer.bench import texts
from mcinfer.bench.figures import Spread, percentile, spread_of
from mcinfer.bench.table import Cell, Grid
from mcinfer.bench.texts import (
    SESSIONS,
    TIMES,
    Unit,
    number,
    printable,
    seconds_text,
    spread_text,
    time_unit,
)
from mcinfer.bench.tune import ENOUGH_REQUESTS, Candidate, Found, ranked, turns_of
from mcinfer.bench.way import why_whole

_SESSION_CLASSES = dict.fromkeys(SESSIONS, "onnxruntime.InferenceSession") | {
    "inline": "mcinfer.ort.InferenceSession"
}


def arguments(candidate: Candidate, found: Found) -> dict[str, Any]:
    """A candidate as arguments of `mcinfer.Master`; those of its `options` as a mapping, by name.

    For a session its providers, and what is set in its `SessionOptions`.
    """
    if candidate.call in SESSIONS:
        return {"intra_op_num_threads": candidate.threads, "providers": ["CPUExecutionProvider"]}
    chosen = candidate != found.default
    axes = {"batch_axes": found.batch_axes, "output_axes": found.output_axes}
    return {
        "devices": candidate.workers if chosen else None,
        "options": {"threads": candidate.threads} if chosen else {},
        "max_batch_size": candidate.max_batch_size,
        "max_delay": candidate.max_delay,
        **{name: dict(said) for name, said in axes.items() if said},
    }


def program(model: str, candidate: Candidate, found: Found) -> str:
    given = arguments(candidate, found)
    if candidate.max_batch_size == 1:
        given.pop("max_batch_size", None)
    return texts.program(model, given, found.arrays, candidate.call, found.aim.load.clients)


def grids(found: Found) -> list[Grid]:
    numbers = sorted({trial.rung for trial in found.trials})
    return [grid for rung in numbers if (grid := _grid(found, rung)).rows]


def _grid(found: Found, rung: int) -> Grid:
    trials = [trial for trial in found.trials if trial.rung == rung]
    turns = {c: turns_of(trials, c) for c in ranked(found.aim, trials, found.default)}
    unit = time_unit(percentile(each, 0.5).low for each in turns.values())
    rows: list[tuple[Cell, ...]] = []
    for one, each in turns.items():
        joins = one.max_batch_size > 1
        names = (one.call, "default" * (one == found.default))
        rows.append(
            (
                ", ".join(filter(None, names)),
                "" if one.call in SESSIONS else str(one.workers),
                "auto" if one.threads is None else str(one.threads),
                str(one.max_batch_size) if joins else "no",
                f"{one.max_delay * 1e3:g}" if joins else "",
                (spread_of(map(found.aim.rows, each)), Unit()),
                (percentile(each, 0.5), unit),
                (percentile(each, 0.99), unit),
                (found.over_default(one, trials), Unit()),
            )
        )
    ways = "1 way" if len(turns) == 1 else f"{len(turns)} ways"
    interrupted = "" if rung <= found.finished_rungs else ", interrupted"
    header = ("call", "workers", "threads", "joined", "delay ms", "rows/s", "p50", "p99")
    return Grid(
        title=f"round {rung}{interrupted}: {ways} (p50 and p99 in {unit.sign})",
        header=(*header, f"{TIMES} default"),
        rows=tuple(rows),
    )


def remarks(found: Found) -> list[str]:
    lines = ["The search was interrupted: these are the results so far."]
    if found.ended:
        lines = [f"The search ended after {number(found.took_seconds)} s: {found.ended}."]
    if found.left_out:
        lines.append(
            f"{found.left_out} of {found.candidates} ways were left out for lack of time: "
            f"--budget {math.ceil(found.needed_seconds)} is enough for all."
        )
    if found.split is not None and not found.split.splits:
        lines.append(printable(f"Requests are not split, nor joined: {why_whole(found.split)}."))
    turns = [] if found.best is None else found.turns(found.best)
    count = min((turn.requests for turn in turns), default=0)
    if found.aim.max_latency and 0 < count < ENOUGH_REQUESTS:
        lines.append(
            f"The bound was checked with {count} requests in each turn: below {ENOUGH_REQUESTS} p99 is the "
            f"slowest of them. A longer --budget gives longer turns."
        )
    lines += [
        printable(f"{trial.candidate}: {trial.error}") for trial in found.trials if trial.error
    ]
    return lines


def verdict(found: Found) -> str:
    best, chosen = found.best, found.recommended
    if best is None or chosen is None:
        return "no way could be measured"
    if not found.fits:
        bound, strain, load = found.aim.max_latency, found.strain(best), found.aim.load
        if bound is None or math.isinf(strain):
            return f"no way keeps up with {load}; {best} came nearest"
        return (
            f"no way answers 99 % of the requests within {seconds_text(bound)} under {load}; "
            f"{best} came nearest with {seconds_text(strain * bound)}"
        )
    better = found.over_default(best)
    over = f"{spread_text(better)} {TIMES} the default" if better.known else "the default failed"
    if chosen == found.default:
        text = f"Use the default: no other way is clearly better. {_figure(found, chosen)}."
        return text if best == chosen else f"{text} The best other, {best}: {over}."
    text = f"Use {best}: {_figure(found, best)}, {over}."
    if found.turns(found.default) and found.strain(found.default) > 1.0:
        keeps_up = not math.isinf(found.strain(found.default))
        what = "keep the bound" if keeps_up else f"keep up with {found.aim.load}"
        text += f" The default does not {what}: {_figure(found, found.default)}."
    return text


def _figure(found: Found, candidate: Candidate) -> str:
    """The figure of the goal, and the p99 that has a bound."""
    turns = found.turns(candidate)
    rows, median = spread_of(map(found.aim.rows, turns)), percentile(turns, 0.5)
    unit = time_unit([median.low])
    first = f"{spread_text(rows)} rows/s"
    if found.aim.goal == "latency":
        first = f"p50 {spread_text(median, unit)} {unit.sign}"
    tail = percentile(turns, 0.99)
    return f"{first}, p99 {spread_text(tail, unit)} {unit.sign}" if tail.known else first


def as_json(model: str, found: Found, machine: dict[str, str | int | float]) -> bytes:
    """All figures, and the recommendation (docs/tuning.md).

    Args:
        model: Path of the model.
        found: The results of the search.
        machine: Facts about the machine before it.
    """
    chosen = found.recommended
    content = {
        "schema": "mcinfer.tune",
        "version": 1,
        "mcinfer": __version__,
        "machine": machine,
        "cores": found.cores,
        "model": model,
        "aim": asdict(found.aim),
        "recommended": chosen
        and {
            "class": _SESSION_CLASSES.get(chosen.call, "mcinfer.Master"),
            "arguments": arguments(chosen, found),
            "call": chosen.call,
            "is_default": chosen == found.default,
            "keeps_bound": found.strain(chosen) <= 1.0,
            "over_default": _finite(found.over_default(chosen)),
            "program": program(model, chosen, found),
        },
        "candidates": found.candidates,
        "left_out": found.left_out,
        "ended": found.ended,
        "finished": bool(found.ended),
        "took_seconds": found.took_seconds,
        "trials": [
            {
                "rung": trial.rung,
                "heat": trial.group,
                "candidate": asdict(trial.candidate),
                "is_default": trial.candidate == found.default,
                "over_default": _finite(found.over_default(trial.candidate, [trial])),
                "error": trial.error,
                "turns": [asdict(turn) for turn in trial.turns],
            }
            for trial in found.trials
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def _finite(spread: Spread) -> dict[str, float] | None:
    """JSON has neither NaN nor infinities."""
    values = {"middle": spread.middle, "low": spread.low, "high": spread.high}
    return values if all(map(math.isfinite, values.values())) else None
