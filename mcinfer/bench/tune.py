"""Searching for what answers a load best: sessions first, then pools, each beside the best so far.

```
 Search (this process)
   │  looks at the model with one worker; makes a request's arrays
   └── for each group of a few ways:
         Subject ── process: a session            the best so far, and up to three others: they take turns,
         Subject ── process: Master ── workers    so that other work disturbs all alike
         Subject ── …
```

Ways are compared within a group alone. The best so far stays the best unless another way is better in every
repeat, so what is simpler, and comes first, is kept where nothing else is clearly better. The time decides
how many groups there are, and how long their turns are.

Ownership: a `Search` ends the ways of one group before the next one, and before `run` returns or raises.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, inf, isinf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Literal

from mcinfer import __version__
from mcinfer.bench import check_engines, texts
from mcinfer.bench.figures import (
    CLEAR_GAIN,
    ONE,
    UNKNOWN,
    Spread,
    difference_text,
    latency,
    number,
    percentile,
    seconds_text,
    spread_of,
    spread_text,
    time_unit,
)
from mcinfer.bench.inputs import InputOptions
from mcinfer.bench.load import MAX_ARRIVALS, request_types
from mcinfer.bench.report import Load, Turn
from mcinfer.bench.runner import START_SECONDS, Contender, Progress, prepared, take_turns
from mcinfer.bench.subject import Subject
from mcinfer.bench.table import Cell, Grid
from mcinfer.bench.texts import SESSIONS, TIMES, busy, no_verdict, printable
from mcinfer.bench.way import engine_arguments, why_whole
from mcinfer.config import automatic_workers
from mcinfer.engines.names import DEFAULT_ENGINE
from mcinfer.errors import InvalidInputError
from mcinfer.machine import whole_cpus
from mcinfer.sharding import Axes, Split, cut_batch
from mcinfer.specs import ModelSpec

Goal = Literal["throughput", "latency"]
Call = Literal["submit", "predict", "session", "threads", "inline"]

ENOUGH_REQUESTS = 100
"""Requests of a turn whose p99 is more than the slowest of them."""

_GROUP = 4
"""Ways that are open at once: the best so far, and those that are compared with it."""
REPEATS = 3
_LEAST_ARRIVALS = 5
"""In a turn of an open loop, on average."""
_LEAST_TURN, _MOST_TURN, _WARMUP, _REST = 0.3, 2.0, 0.1, 0.05
_USUAL_START = 2.0
"""Seconds of a way's start, until it is known."""
_MARGIN = 1.2
"""Of the budget that is said to be enough: starts do not always take as long."""
_PATIENCE = 10.0
"""Seconds on top of the usual time of a step, and times that, until it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The goal of the search: most rows a second, or the least median latency, under a load.

    Attributes:
        max_latency: Seconds within which 99 % of the requests are to be answered; None is no bound.
    """

    goal: Goal
    load: Load
    max_latency: float | None = None

    def __post_init__(self) -> None:
        if self.goal == "throughput" and self.load.rate is not None:
            raise InvalidInputError(
                f"--rate: got {self.load.rate:g} with --goal throughput, expected --goal latency: "
                f"at a given rate all that keep up have the same throughput"
            )

    def rows(self, turn: Turn) -> float:
        return self.load.batch * turn.throughput

    def cost(self, turn: Turn) -> float:
        """What is to be small: median latency, or seconds for a row."""
        if self.goal == "latency":
            return latency(turn, 0.5)
        return 1 / self.rows(turn) if turn.requests else inf

    def strain(self, turn: Turn) -> float:
        """The 99th percentile over its bound: up to 1 is good. Infinite where the turn did not keep up."""
        if turn.unfinished or not turn.kept_up or isinf(self.cost(turn)):
            return inf  # in the long run nothing is answered in time
        return latency(turn, 0.99) / self.max_latency if self.max_latency else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pool, or a session in the program's own process.

    `threads` of a session's run. `call` is the method of `mcinfer.Master` that uses the pool, or the kind of
    session, one of `SESSIONS`; `engine` is that of the workers, and after a colon its precision.
    """

    workers: int
    threads: int | None
    call: Call = "submit"
    max_batch_size: int = 1
    engine: str = DEFAULT_ENGINE

    @property
    def way(self) -> str:
        """Its name in `mcinfer bench`."""
        if self.call == "predict":
            return "sharded"
        if self.call == "submit":
            return "batched" if self.max_batch_size > 1 else "concurrent"
        return "threads-1" if (self.call, self.threads) == ("threads", 1) else self.call

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        if self.call in SESSIONS:
            return f"{SESSIONS[self.call]}, {threads} a run"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        joined = self.max_batch_size > 1 and f"{self.max_batch_size} rows"
        engine = self.engine != DEFAULT_ENGINE and self.engine
        parts = (workers, engine, self.call, joined)
        return ", ".join(part for part in parts if part)


# What to try.


def sessions(cores: int) -> list[Candidate]:
    """Plain and inline ones, with all cores or one a run; of the plain ones the first takes turns."""
    one = Candidate(workers=1, threads=1, call="threads")
    all_cores = replace(one, threads=cores, call="session")
    inline = [replace(each, call="inline") for each in (all_cores, one)]
    return [*dict.fromkeys((all_cores, one, *inline))]


def pools(
    aim: Aim, *, cores: int, pieces: int, joins: bool, engines: Sequence[str] = (DEFAULT_ENGINE,)
) -> list[Candidate]:
    """Pools that use all cores, with each of the engines: those of the usual number of workers first.

    A request can be cut in `pieces`; `joins`: requests can be joined to one run.
    """
    clients, batch = aim.load.clients, aim.load.batch
    most = batch * clients
    sizes = sorted({min(4 * batch, most), most} - {batch}) if joins else []
    usual = automatic_workers(cores)
    found = []
    for workers in (usual, *(n for n in _powers(cores) if n != usual)):
        pool = Candidate(workers=workers, threads=None)
        uses = []  # that leave none of its workers idle all the time
        if (aim.goal == "latency" or pieces > 1) and workers <= clients * pieces:
            uses.append(replace(pool, call="predict"))
        if (aim.goal == "throughput" or clients > 1) and workers <= clients:
            uses += [replace(pool, max_batch_size=size) for size in (1, *sizes)]
        found += [replace(use, engine=engine) for use in uses for engine in engines]
    return found


def _powers(most: int) -> list[int]:
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


# The results.


@dataclass(slots=True, kw_only=True)
class Trial:
    """One candidate in one group, counted from 1.

    Attributes:
        turns: One for each repeat.
        error: Why the candidate is out; empty while it is not.
        difference: Of its answer from that of ONNX Runtime in float32 (`bench.report.Way`).
    """

    group: int
    candidate: Candidate
    turns: list[Turn] = field(default_factory=list)
    error: str = ""
    difference: float | None = None

    def strain(self, aim: Aim) -> float:
        """The median of its strain (`Aim.strain`); infinite where it failed."""
        return inf if self.error else median([aim.strain(turn) for turn in self.turns] or [inf])

    def over(self, other: "Trial", aim: Aim) -> Spread:
        """How many times better than another of its group, within each repeat; unknown where one failed."""
        if self.error or other.error:
            return UNKNOWN
        pairs = zip(self.turns, other.turns, strict=False)
        return spread_of(
            aim.cost(theirs) / aim.cost(mine)
            for mine, theirs in pairs
            if not isinf(aim.cost(theirs))
        )

    def beats(self, other: "Trial", aim: Aim) -> bool:
        """Whether it is nearer to the bound, where one does not keep it; else better in every repeat."""
        mine, theirs = self.strain(aim), other.strain(aim)
        if max(mine, theirs) > 1.0:
            return mine < theirs
        gain = self.over(other, aim)
        return gain.low > 1.0 and gain.middle >= CLEAR_GAIN


def best_of(group: Sequence[Trial], aim: Aim) -> Trial:
    """The best of those that are clearly better than the first; the first where none is."""

    def order(trial: Trial) -> tuple[float, float]:
        cost = median([aim.cost(turn) for turn in trial.turns] or [inf])
        return max(trial.strain(aim), 1.0), cost

    better = (trial for trial in group[1:] if trial.beats(group[0], aim))
    return min(better, key=order, default=group[0])


@dataclass(slots=True, kw_only=True)
class Found:
    """The results of a search so far.

    Attributes:
        arrays: By input name, element type and shape of the requests' arrays.
        split: How the model's batch is split; None where that is not known yet.
        trials: Group by group; the first of a group is the best of those before it.
        best: The trial of what is recommended, in the last group that was measured to its end.
        over: How many times better it was than the best before it, `before`, in the group in which it won.
        left_out: Ways that were not measured, for lack of time.
        needed_seconds: A budget for all ways.
        machine: Facts about it, and how busy other programs kept it.
        finished: Whether it was not interrupted.
    """

    aim: Aim
    cores: int
    batch_axes: Axes
    output_axes: Axes
    arrays: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    split: Split | None = None
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    before: Candidate | None = None
    over: Spread = UNKNOWN
    left_out: int = 0
    needed_seconds: float = 0.0
    machine: dict[str, str | int | float] = field(default_factory=dict)
    finished: bool = False
    took_seconds: float = 0.0
    engines: tuple[str, ...] = (DEFAULT_ENGINE,)

    def settle(self, group: Sequence[Trial]) -> None:
        """Take the best of a group that was measured to its end."""
        best = best_of(group, self.aim)
        if best is not group[0]:
            self.before, self.over = group[0].candidate, best.over(group[0], self.aim)
        self.best = None if best.error else best

    @property
    def measured(self) -> int:
        """Ways that were measured, or tried in vain."""
        return len({trial.candidate for trial in self.trials})

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.strain(self.aim) <= 1.0

    @property
    def disturbed(self) -> tuple[str, ...]:
        """What disturbed the search, so that there is no verdict."""
        interrupted = "It was interrupted: these are the results so far."
        return (*busy(self.machine), *([] if self.finished else [interrupted]))


# The search.


class Search:
    """One search. `run` it once; the results are in `found`, also after it was interrupted.

    The budget is seconds for the search, from when the model has been looked at.

    Raises:
        InvalidInputError: Requests come too seldom for the budget.
    """

    def __init__(
        self,
        model: Path,
        aim: Aim,
        inputs: InputOptions,
        *,
        budget: float,
        progress: Progress,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
        engines: Sequence[str] = (DEFAULT_ENGINE,),
    ) -> None:
        check_engines(engines)
        rate, least = aim.load.rate, _GROUP * REPEATS * _LEAST_ARRIVALS / budget
        if rate is not None and rate < least:
            raise InvalidInputError(
                f"--rate: got {rate:g} with --budget {budget:g}, expected at least {number(least * 1.005)}, "
                f"or --budget {ceil(budget * least / rate)}: ways are compared by a few requests each"
            )
        self.found = Found(
            aim=aim,
            cores=whole_cpus(),
            engines=tuple(engines),
            batch_axes=dict(batch_axes or {}),
            output_axes=dict(output_axes or {}),
        )
        self._model = model
        self._inputs = inputs
        self._budget = budget
        self._progress = progress
        self._began = monotonic()
        self._start = _USUAL_START

    def run(self) -> Found:
        """Search.

        Raises:
            InvalidInputError: The options do not fit the model.
            BuildError: mcinfer cannot load the model.
        """
        found, batch = self.found, self.found.aim.load.batch
        axes = {"batch_axes": found.batch_axes, "output_axes": found.output_axes}
        show = partial(self._progress, 0.0)
        engines = found.engines
        looking = prepared(self._model, [batch], self._inputs, axes, show, engines, devices=1)
        with looking as (spec, self._setup, self._files, self._expected):
            found.split = self._setup.split
            found.arrays = request_types(self._files[batch])
            self._began = monotonic()
            try:
                self._search(spec, found.split)
                found.finished = True
            finally:
                found.took_seconds = monotonic() - self._began
        return found

    def _search(self, spec: ModelSpec, split: Split) -> None:
        """Group after group, as far as there is time."""
        found, batch = self.found, self.found.aim.load.batch
        shapes = [shape for _, shape in found.arrays.values()]
        # As many pieces as mcinfer can cut a request in.
        most = max((size for shape in shapes for size in shape), default=1)
        waiting = pools(
            found.aim,
            cores=found.cores,
            pieces=len(cut_batch(spec, shapes, most, split).rows),
            joins=cut_batch(spec, shapes, 1, split).rowwise,
            engines=found.engines,
        )
        whole = self._setup.fixed_batch in (None, batch) and found.engines[0] == DEFAULT_ENGINE
        waiting = [*(sessions(found.cores) if whole else []), *waiting]
        number = 0
        while waiting and (seconds := self._turn_seconds(len(waiting))):
            best = [] if found.best is None else [found.best.candidate]
            chosen = [*best, *waiting][:_GROUP]
            del waiting[: len(chosen) - len(best)]
            found.left_out = len(waiting)
            number += 1
            group = [Trial(group=number, candidate=candidate) for candidate in chosen]
            found.trials += group
            self._run_group(group, seconds)
            found.settle(group)

    def _turn_seconds(self, waiting: int) -> float:
        """The length of turns in the next group; 0 where there is no time for one."""
        found, rate = self.found, self.found.aim.load.rate
        turns = [turn for trial in found.trials for turn in trial.turns]
        usual = median([turn.mean_latency for turn in turns] or [0.0])
        throughput = median([turn.throughput for turn in turns] or [inf])
        # A turn goes on until the last answer, and begins with a request of each client that is not counted.
        extra = _REST + 2 * usual
        least = max(_LEAST_TURN, 2 * usual, _LEAST_ARRIVALS / rate if rate else 0.0)
        enough = 1.5 * ENOUGH_REQUESTS / (rate or throughput) if found.aim.max_latency else 0.0
        ways = waiting + ceil(waiting / (_GROUP - 1))  # the best is in each group
        left = self._budget - (monotonic() - self._began)
        fixed = ways * (self._start + REPEATS * extra)
        more = fixed + ways * REPEATS * least
        found.needed_seconds = _MARGIN * (self._budget - left + more)
        if found.trials and left < min(_GROUP, ways) / ways * more:
            return 0.0
        seconds = max(least, min(max(_MOST_TURN, enough), (left - fixed) / (ways * REPEATS)))
        return min(seconds, MAX_ARRIVALS / rate) if rate else seconds

    def _run_group(self, trials: Sequence[Trial], seconds: float) -> None:
        """Start a few candidates, the first one first, have them take turns, and end them."""
        began, load, first = monotonic(), self.found.aim.load, trials[0].group == 1
        patience = START_SECONDS if first else _PATIENCE * (1 + self._start + seconds)

        def show(contender: Contender, load: Load | None) -> None:
            step = contender.name if load else f"starting {contender.name}"
            done = min(self._budget, monotonic() - self._began)
            self._progress(done, f"group {trials[0].group}: {step}")

        contenders = []
        for trial in trials:
            candidate = trial.candidate
            setup = replace(
                self._setup,
                devices=tuple(f"cpu:{i}" for i in range(candidate.workers)),
                threads=candidate.threads,
                max_batch_size=candidate.max_batch_size,
                engine=candidate.engine,
            )
            subject = Subject(candidate.way, setup, self._files, self._expected)
            contenders.append(Contender(str(candidate), subject, turns={load: trial.turns}))
        try:
            in_turns = take_turns(
                contenders,
                [load],
                REPEATS,
                show,
                patience=patience,
                anew=False,
                seconds=seconds,
                warmup=_WARMUP,
                timeout=patience + 3 * (_WARMUP + seconds),
            )
        finally:
            for trial, contender in zip(trials, contenders, strict=True):
                trial.error = "; ".join(contender.errors)
                trial.difference = contender.subject.difference
        self._start = max(self._start, (monotonic() - began - in_turns) / len(trials))


# For the reader.


def arguments(candidate: Candidate, found: Found) -> dict[str, Any]:
    """A candidate as arguments of `mcinfer.Master`; those of its `options` as a mapping, by name.

    For a session its providers, and what is set in its `SessionOptions`.
    """
    if candidate.call in SESSIONS:
        return {"intra_op_num_threads": candidate.threads, "providers": ["CPUExecutionProvider"]}
    engine = engine_arguments(candidate.engine)
    options = engine.pop("options")
    axes = {"batch_axes": found.batch_axes, "output_axes": found.output_axes}
    joined = {"max_batch_size": candidate.max_batch_size} if candidate.max_batch_size > 1 else {}
    return {
        "devices": candidate.workers,
        **(engine if candidate.engine != DEFAULT_ENGINE else {}),
        **({"options": options} if options else {}),
        **joined,
        **{name: dict(said) for name, said in axes.items() if said},
    }


def program(model: str, best: Trial, found: Found) -> str:
    """A program that uses the best as it was measured."""
    candidate, rate = best.candidate, max((turn.throughput for turn in best.turns), default=0.0)
    return texts.program(
        model,
        arguments(candidate, found),
        found.arrays,
        candidate.call,
        found.aim.load.clients,
        rate,
    )


def grids(found: Found) -> list[Grid]:
    """A table of each group; its first row is the best so far."""
    made = []
    for group in sorted({trial.group for trial in found.trials}):
        trials = [t for t in found.trials if t.group == group and t.turns and not t.error]
        unit = time_unit(percentile(trial.turns, 0.5).low for trial in trials)
        rows: list[tuple[Cell, ...]] = []
        for trial in trials:
            one = trial.candidate
            differs = difference_text(trial.difference)
            rows.append(
                (
                    one.call,
                    *([one.engine, differs] if len(found.engines) > 1 else []),
                    "" if one.call in SESSIONS else str(one.workers),
                    str(one.threads or "auto"),
                    str(one.max_batch_size) if one.max_batch_size > 1 else "no",
                    (spread_of(map(found.aim.rows, trial.turns)), ONE),
                    (percentile(trial.turns, 0.5), unit),
                    (percentile(trial.turns, 0.99), unit),
                    (trial.over(trials[0], found.aim), ONE),
                )
            )
        names = ["engine", "difference"] if len(found.engines) > 1 else []
        header = ("workers", "threads", "joined", "rows/s", "p50", "p99")
        title = f"group {group} (p50 and p99 in {unit.sign})"
        if rows:
            whole = ("call", *names, *header, f"{TIMES} first")
            made.append(Grid(title=title, header=whole, rows=tuple(rows)))
    return made


def remarks(found: Found) -> list[str]:
    """What a reader has to know beside the verdict."""
    lines = []
    if found.split is not None and not found.split.splits:
        lines.append(printable(f"Requests are not split, nor joined: {why_whole(found.split)}."))
    count = min((turn.requests for turn in found.best.turns), default=0) if found.best else 0
    if found.aim.max_latency and 0 < count < ENOUGH_REQUESTS:
        lines.append(
            f"The bound was checked with {count} requests in each turn: below {ENOUGH_REQUESTS} p99 is the "
            f"slowest of them. A longer --budget gives longer turns."
        )
    errors = [f"{trial.candidate}: {trial.error}" for trial in found.trials if trial.error]
    return [*lines, *map(printable, errors)]


def verdict(found: Found) -> str:
    """What to use, of what was measured; or why there is no verdict."""
    if why := no_verdict(found.disturbed):
        return why
    best, aim, measured = found.best, found.aim, found.measured
    missing = (
        f" Not measured, for lack of time: {found.left_out} of {measured + found.left_out} ways; "
        f"--budget {ceil(found.needed_seconds)} is enough for all."
    ) * bool(found.left_out)
    if best is None:
        return (
            f"No verdict. None of the {measured} ways that were tried could be measured.{missing}"
        )
    if not found.fits:
        bound, strain = aim.max_latency, best.strain(aim)
        fails = f"keeps up with {aim.load}"
        if bound is not None and not isinf(strain):
            fails = (
                f"answers 99 % of the requests within {seconds_text(bound)} under {aim.load}; "
                f"{best.candidate} came nearest with {seconds_text(strain * bound)}"
            )
        return f"No verdict. None of the {measured} ways that were measured {fails}.{missing}"
    gain = f"; {spread_text(found.over)} {TIMES} {found.before}" * found.over.known
    text = f"Use {best.candidate}: {_figure(best, aim)}{gain}."
    others = f" No other of the {measured} ways that were measured is clearly better."
    return f"{text}{others * (measured > 1)}{missing}"


def _figure(trial: Trial, aim: Aim) -> str:
    """The figure of the goal, and the p99 that has a bound."""
    middle = percentile(trial.turns, 0.5)
    unit = time_unit([middle.low])
    text = f"{spread_text(spread_of(map(aim.rows, trial.turns)))} rows/s"
    if aim.goal == "latency":
        text = f"p50 {spread_text(middle, unit)} {unit.sign}"
    tail = percentile(trial.turns, 0.99)
    text += f", p99 {spread_text(tail, unit)} {unit.sign}" * tail.known
    if trial.difference is not None:
        text += f", difference {difference_text(trial.difference)}"
    return text


def as_json(model: str, found: Found) -> bytes:
    """All figures, and the recommendation (docs/tuning.md); `model` is its path."""
    best, recommended = found.best, None
    if best is not None and found.fits and not found.disturbed:
        call = best.candidate.call
        kind = "onnxruntime.InferenceSession" if call in SESSIONS else "mcinfer.Master"
        recommended = {
            "class": "mcinfer.ort.InferenceSession" if call == "inline" else kind,
            "arguments": arguments(best.candidate, found),
            "call": call,
            "program": program(model, best, found),
        }
    content = {
        "schema": "mcinfer.tune",
        "version": 2,
        "mcinfer": __version__,
        "machine": found.machine,
        "cores": found.cores,
        "model": model,
        "aim": asdict(found.aim),
        "verdict": verdict(found),
        "disturbed": found.disturbed,
        "remarks": remarks(found),
        "recommended": recommended,
        "engines": found.engines,
        "candidates": found.measured + found.left_out,
        "left_out": found.left_out,
        "needed_seconds": found.needed_seconds,
        "finished": found.finished,
        "took_seconds": found.took_seconds,
        "trials": [
            {
                "group": trial.group,
                "candidate": asdict(trial.candidate),
                "error": trial.error,
                "difference": trial.difference,
                "turns": [asdict(turn) for turn in trial.turns],
            }
            for trial in found.trials
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
