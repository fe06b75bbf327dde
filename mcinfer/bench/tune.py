"""Searching for what answers a load best: a coarse grid of pools and sessions, and successive halving.

```
 Search (this process)
   │  looks at the model with one worker; makes a request's arrays; tries the default pool for a moment
   └── for each round, in groups of a few candidates:
         Subject ── process: Master ── workers      the default, in every group, and up to three others: they
         Subject ── process: a session              take turns, so that other work disturbs all alike
         Subject ── …
```

Each round drops the worse half and the candidates that are clearly behind, and gives the others turns of
twice the length, until one is left or the time is over (K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm
Identification and Hyperparameter Optimization", 2016, https://arxiv.org/abs/1502.07943). Candidates of
different groups are compared by their ratio to the default in the same repeat of the same group.

Ownership: a `Search` ends the ways of one group before the next one, and before `run` returns or raises.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, inf, isfinite, isinf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Literal

from mcinfer import __version__
from mcinfer.bench import DEFAULT_ENGINE, check_engines, texts
from mcinfer.bench.figures import (
    ONE,
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
from mcinfer.bench.load import MAX_ARRIVALS, read_request
from mcinfer.bench.report import Load, Turn
from mcinfer.bench.runner import START_SECONDS, Contender, Progress, powers, prepared, take_turns
from mcinfer.bench.subject import Subject, WayFailedError
from mcinfer.bench.table import Cell, Grid
from mcinfer.bench.texts import SESSIONS, TIMES, printable
from mcinfer.bench.way import engine_arguments, why_whole
from mcinfer.config import automatic_workers
from mcinfer.errors import InvalidInputError
from mcinfer.machine import whole_cpus
from mcinfer.sharding import Axes, Split, cut_batch

Goal = Literal["throughput", "latency"]
Call = Literal["submit", "predict", "session", "threads", "inline"]

ENOUGH_REQUESTS = 100
"""Requests of a turn whose p99 is more than the slowest of them."""

_GROUP = 4
"""Ways that are open at once: the default, and those that are compared with it."""
REPEATS = 3
_ALIKE = 1.05
"""Within this factor a candidate is not behind the best."""
_GOLDEN = (5**0.5 - 1) / 2
_LEAST_ARRIVALS = 5
"""In a turn of an open loop, on average."""
_LEAST_TURN, _FIRST_TURN, _MOST_TURN, _WARMUP, _REST = 0.1, 0.3, 5.0, 0.1, 0.05
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

    `threads` of a run; None: its worker's share of the cores, and all of them if its request comes alone.
    `call` is the method of `mcinfer.Master` that uses the pool, or the kind of session, one of `SESSIONS`;
    `engine` is that of the workers, and after a colon its precision.
    """

    workers: int
    threads: int | None
    call: Call = "submit"
    max_batch_size: int = 1
    max_delay: float = 0.0
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
        joined = f"{self.max_batch_size} rows within {self.max_delay * 1e3:g} ms"
        joins = self.max_batch_size > 1
        engine = self.engine != DEFAULT_ENGINE and self.engine
        parts = (workers, self.threads and threads, engine, self.call, joins and joined)
        return ", ".join(part for part in parts if part)


# The grid.


def default_candidate(aim: Aim, cores: int, engine: str = DEFAULT_ENGINE) -> Candidate:
    call: Call = "predict" if aim.goal == "latency" else "submit"
    return Candidate(workers=automatic_workers(cores), threads=None, call=call, engine=engine)


def grid(
    aim: Aim,
    *,
    cores: int,
    pieces: int,
    joins: bool,
    run_seconds: float,
    whole: bool = True,
    engines: Sequence[str] = (DEFAULT_ENGINE,),
) -> list[Candidate]:
    """What to try: the default first, then sessions, pools that use all cores, and other pools.

    Pools that use all cores are tried with each of the engines, the default's like before others; pools that
    do not with the first engine alone.

    Pools are in the order of the multiples of the golden ratio, less their whole parts: the first of them
    are of all kinds, however many there is time for. A request can be cut in `pieces`; `joins`: requests can
    be joined to one run; `whole`: a request is one run, as a session needs it.
    """
    clients, batch = aim.load.clients, aim.load.batch
    default = default_candidate(aim, cores, engines[0])
    # Rows to join: those of four requests and of all clients. Delays: none, and about a quarter of a run.
    most, quarter = batch * clients, min(max(1e-3, run_seconds / 4), 20e-3)
    sizes = sorted({min(4 * batch, most), most} - {batch}) if joins else []
    delays = [d for d in (0.0, float(f"{quarter:.0e}")) if d < (aim.max_latency or inf)]
    joinings = [(1, 0.0), *((size, delay) for size in sizes for delay in delays)]
    full: list[Candidate] = []
    rest: list[Candidate] = []
    for workers in powers(cores):
        for threads in (None, 1) if workers < cores else (None,):
            pool = Candidate(workers=workers, threads=threads, engine=engines[0])
            uses = []  # that leave none of its workers idle all the time
            if (aim.goal == "latency" or pieces > 1) and workers <= clients * pieces:
                uses.append(replace(pool, call="predict"))
            if (aim.goal == "throughput" or clients > 1) and workers <= clients:
                uses += [replace(pool, max_batch_size=n, max_delay=d) for n, d in joinings]
            kept = [use for use in uses if use != default]
            if threads is None:
                kept += [replace(use, engine=other) for use in uses for other in engines[1:]]
            (rest if threads else full).extend(kept)
    # Sessions whose runs use all cores or one; called for one request at a time, or by all clients.
    one = Candidate(workers=1, threads=1, call="threads")
    all_cores = replace(one, threads=cores, call="session")
    inline = [replace(each, call="inline") for each in (all_cores, one)]
    sessions = [*dict.fromkeys((all_cores, one, *inline))] if whole else []
    likes = [one for one in full if replace(one, engine=default.engine) == default]
    full = [one for one in full if one not in likes]
    return [default, *sessions, *likes, *_spread_out(full), *_spread_out(rest)]


def _spread_out(candidates: Sequence[Candidate]) -> list[Candidate]:
    order = sorted(range(len(candidates)), key=lambda i: i * _GOLDEN % 1)
    return [candidates[i] for i in order]


# The results.


@dataclass(slots=True, kw_only=True)
class Trial:
    """One candidate in one group of one round (`rung`), both counted from 1.

    Attributes:
        turns: One for each repeat.
        beside: The default's turns in the same repeats of the same group.
        error: Why the candidate is out; empty while it is not.
        difference: Of its answer from that of ONNX Runtime in float32 (`bench.report.Way`).
    """

    rung: int
    candidate: Candidate
    group: int = 1
    turns: list[Turn] = field(default_factory=list)
    beside: list[Turn] = field(default_factory=list)
    error: str = ""
    difference: float | None = None


@dataclass(slots=True, kw_only=True)
class Found:
    """The results of a search so far.

    Attributes:
        arrays: By input name, element type and shape of the requests' arrays.
        split: How the model's batch is split; None where that is not known yet.
        trials: Round by round.
        finished_rungs: Rounds that were measured to their end.
        candidates: All of the grid; `left_out` of them there was no time for.
        needed_seconds: A budget for all of them.
        ended: Why the search was over; empty while it is not, and where it was interrupted.
    """

    aim: Aim
    cores: int
    default: Candidate
    batch_axes: Axes
    output_axes: Axes
    arrays: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    split: Split | None = None
    trials: list[Trial] = field(default_factory=list)
    finished_rungs: int = 0
    candidates: int = 0
    left_out: int = 0
    needed_seconds: float = 0.0
    ended: str = ""
    took_seconds: float = 0.0
    engines: tuple[str, ...] = (DEFAULT_ENGINE,)

    @property
    def decisive(self) -> list[Trial]:
        """The trials of the last finished round; before there is one, those that had all their turns."""
        if self.finished_rungs:
            return [trial for trial in self.trials if trial.rung == self.finished_rungs]
        return [t for t in self.trials if t.rung == 1 and (t.error or len(t.turns) == REPEATS)]

    def among(self, trials: Sequence[Trial]) -> "Found":
        """The same with some trials of one round as the decisive ones."""
        return replace(self, trials=[*trials], finished_rungs=trials[0].rung)

    def turns(self, candidate: Candidate) -> list[Turn]:
        """A candidate's decisive turns; none where it failed."""
        mine = [trial for trial in self.decisive if trial.candidate == candidate]
        return [] if any(t.error for t in mine) else [turn for t in mine for turn in t.turns]

    def difference(self, candidate: Candidate) -> float | None:
        """See `Trial.difference`."""
        found = (trial.difference for trial in self.trials if trial.candidate == candidate)
        return next((each for each in found if each is not None), None)

    def costs(self) -> dict[Candidate, list[float]]:
        """The cost of each candidate in each of its turns; those that failed are left out.

        As a multiple of the default's in the same repeat; but where the default failed or did not keep up, so
        that there is no such measure, as it is.
        """
        measured = not isinf(max(map(self.aim.strain, self.turns(self.default)), default=inf))
        found: dict[Candidate, list[float]] = {}
        for one in dict.fromkeys(trial.candidate for trial in self.decisive):
            found[one] = [self.aim.cost(turn) for turn in self.turns(one)]
            if measured:
                ratios = self.over_default(one).values
                found[one] = [1 / ratio if ratio else inf for ratio in ratios]
        return {candidate: each for candidate, each in found.items() if each}

    def ranked(self) -> list[Candidate]:
        """The candidates that did not fail, the best first.

        Those that keep the bound go by their cost; behind them are the others, by how far they are from it.
        """
        found = self.costs()
        return sorted(found, key=lambda c: (max(self.strain(c), 1.0), median(found[c])))

    def better_half(self, contenders: Sequence[Candidate]) -> list[Candidate]:
        """The better half of a round, without those that are behind the best by 5 % in every repeat."""
        order, found = self.ranked(), self.costs()
        half = [c for c in order if c in contenders][: ceil(len(contenders) / 2)]
        return [c for c in half if min(found[c]) <= _ALIKE * max(found[order[0]])]

    def over_default(self, candidate: Candidate) -> Spread:
        """How many times better than the default, within each repeat; unknown where that failed."""
        return spread_of(
            self.aim.cost(other) / self.aim.cost(turn)
            for trial in self.decisive
            if trial.candidate == candidate and self.turns(candidate)
            for turn, other in zip(trial.turns, trial.beside, strict=False)
            if not isinf(self.aim.cost(other))
        )

    def strain(self, candidate: Candidate) -> float:
        """The median of its strain (`Aim.strain`); infinite where it has no turns."""
        return median([self.aim.strain(turn) for turn in self.turns(candidate)] or [inf])

    @property
    def best(self) -> Candidate | None:
        return next(iter(self.ranked()), None)

    @property
    def fits(self) -> bool:
        return self.best is not None and self.strain(self.best) <= 1.0

    @property
    def recommended(self) -> Candidate | None:
        """The best; the default, unless the best is better in every repeat."""
        if self.best is None:
            return None
        better = self.strain(self.default) > 1.0 or self.over_default(self.best).low > 1.0
        return self.best if better else self.default


# The search.


def rounds(others: int) -> list[tuple[int, int]]:
    """How many are measured in each round, the default once a group, and the factor of their turns."""
    counts = [others]
    while counts[-1] > 2:
        counts.append(ceil(counts[-1] / 2))
    return [(n + max(1, ceil(n / (_GROUP - 1))), 1 << i) for i, n in enumerate(counts)]


def needs(others: int, overhead: float, turn: float) -> float:
    """Seconds for so many candidates beside the default, whose first turns are that long."""
    return sum(n * (overhead + REPEATS * turn * times) for n, times in rounds(others))


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
        rate, least = aim.load.rate, 2 * REPEATS * _LEAST_ARRIVALS / budget
        if rate is not None and rate < least:
            raise InvalidInputError(
                f"--rate: got {rate:g} with --budget {budget:g}, expected at least {number(least * 1.005)}, "
                f"or --budget {ceil(budget * least / rate)}: two ways are compared by a few requests each"
            )
        cores = whole_cpus()
        self.found = Found(
            aim=aim,
            cores=cores,
            default=default_candidate(aim, cores, engines[0]),
            engines=tuple(engines),
            batch_axes=dict(batch_axes or {}),
            output_axes=dict(output_axes or {}),
        )
        self._model = model
        self._inputs = inputs
        self._budget = budget
        self._progress = progress
        self._began = monotonic()
        self._patience = START_SECONDS
        self._starts: list[float] = []

    def run(self) -> Found:
        """Search.

        Raises:
            InvalidInputError: The options do not fit the model.
            BuildError: mcinfer cannot load the model.
            WayFailedError: The default pool cannot be started or used.
        """
        found, batch = self.found, self.found.aim.load.batch
        axes = {"batch_axes": found.batch_axes, "output_axes": found.output_axes}
        show = partial(self._progress, 0.0)
        engines = found.engines
        looking = prepared(self._model, [batch], self._inputs, axes, show, engines, devices=1)
        with looking as (spec, self._setup, self._files, self._expected):
            found.split = self._setup.split
            arrays = read_request(self._files[batch])
            shapes = [array.shape for array in arrays.values()]
            found.arrays = {
                tensor.name: (tensor.element_type, arrays[tensor.name].shape)
                for tensor in spec.inputs
            }
            self._began = monotonic()
            try:
                # One short turn of the default, to know how long such things take.
                trial = Trial(rung=0, candidate=found.default)
                self._run_group([trial], _FIRST_TURN, 1, "trying the default")
                if trial.error:
                    raise WayFailedError(f"the default pool: {trial.error}")
                (turn,) = trial.turns
                # As many pieces as mcinfer can cut a request in.
                most = max((size for shape in shapes for size in shape), default=1)
                candidates = grid(
                    found.aim,
                    cores=found.cores,
                    pieces=len(cut_batch(spec, shapes, most, found.split).rows),
                    joins=cut_batch(spec, shapes, 1, found.split).rowwise,
                    run_seconds=turn.run_seconds or turn.mean_latency,
                    whole=self._setup.fixed_batch in (None, batch) and engines[0] == DEFAULT_ENGINE,
                    engines=engines,
                )
                found.candidates = len(candidates)
                found.ended = self._halve(candidates[1:], turn)
            finally:
                found.took_seconds = monotonic() - self._began
        return found

    def _left(self) -> float:
        return self._budget - (monotonic() - self._began)

    def _halve(self, contenders: list[Candidate], first: Turn) -> str:
        """Round after round; why it ended. The default's first turn says how long turns are to be."""
        found, rate = self.found, self.found.aim.load.rate
        # A turn goes on until the last answer, and begins with a request of each client that is not counted.
        extra = _REST + 2 * first.mean_latency
        self._patience = _PATIENCE * (1 + self._starts[0] + extra)
        least = max(_LEAST_TURN, 2 * first.mean_latency, _LEAST_ARRIVALS / rate if rate else 0.0)
        enough = (
            1.5 * ENOUGH_REQUESTS / (rate or first.throughput) if found.aim.max_latency else 0.0
        )
        while True:
            # Seconds that a candidate costs in a group beside its turns.
            overhead = sum(self._starts) / len(self._starts) + REPEATS * extra
            left = self._left()
            counts = range(len(contenders), -1, -1)
            count = next((n for n in counts if needs(n, overhead, least) <= left), 0)
            if found.finished_rungs and not count:
                return "the time is over"
            if not found.finished_rungs:
                found.left_out = len(contenders) - count
                found.needed_seconds = self._budget - left
                found.needed_seconds += needs(len(contenders), overhead, least)
            # The default alone is only to be checked.
            most = max(_MOST_TURN if count else _FIRST_TURN, enough)
            fixed, unit = needs(count, overhead, 0.0), needs(count, 0.0, 1.0)
            seconds = max(least, min(most, (left - fixed) / unit))
            if rate:
                seconds = min(seconds, MAX_ARRIVALS / rate)
            self._run_round(contenders[:count], seconds, len(rounds(count)))
            found.finished_rungs += 1
            contenders = found.better_half(contenders[:count])
            if not count:
                left_out = "there was time for the default alone"
                return left_out if found.left_out else "there is nothing else to try"
            if len(contenders) < 2:
                return "one is left" if contenders else "no other is as good as the default"

    def _run_round(self, others: Sequence[Candidate], seconds: float, more: int) -> None:
        """Group after group, as far as there is time."""
        found, number = self.found, self.found.finished_rungs + 1
        for group, start in enumerate(range(0, max(1, len(others)), _GROUP - 1), 1):
            if group > 1 and self._left() <= 0:
                break
            trials = [
                Trial(rung=number, group=group, candidate=candidate)
                for candidate in (found.default, *others[start : start + _GROUP - 1])
            ]
            found.trials += trials
            self._run_group(trials, seconds, REPEATS, f"round {number} of {number + more - 1}")

    def _run_group(self, trials: Sequence[Trial], seconds: float, repeats: int, what: str) -> None:
        """Start a few candidates, the default first, have them take turns, and end them."""
        began, load = monotonic(), self.found.aim.load

        def show(contender: Contender, load: Load | None) -> None:
            step = contender.name if load else f"starting {contender.name}"
            self._progress(self._budget - max(0.0, self._left()), f"{what}: {step}")

        contenders = []
        for trial in trials:
            candidate = trial.candidate
            setup = replace(
                self._setup,
                devices=tuple(f"cpu:{i}" for i in range(candidate.workers)),
                threads=candidate.threads,
                max_batch_size=candidate.max_batch_size,
                max_delay=candidate.max_delay,
                engine=candidate.engine,
            )
            subject = Subject(candidate.way, setup, self._files, self._expected)
            contenders.append(Contender(str(candidate), subject, turns={load: trial.turns}))
        try:
            in_turns = take_turns(
                contenders,
                [load],
                repeats,
                show,
                patience=self._patience,
                anew=False,
                seconds=seconds,
                warmup=_WARMUP,
                timeout=self._patience + 3 * (_WARMUP + seconds),
            )
        finally:
            for trial, contender in zip(trials, contenders, strict=True):
                trial.beside = trials[0].turns
                trial.error = "; ".join(contender.errors)
                trial.difference = contender.subject.difference
        self._starts.append((monotonic() - began - in_turns) / len(trials))


# For the reader.


def arguments(candidate: Candidate, found: Found) -> dict[str, Any]:
    """A candidate as arguments of `mcinfer.Master`; those of its `options` as a mapping, by name.

    For a session its providers, and what is set in its `SessionOptions`.
    """
    if candidate.call in SESSIONS:
        return {"intra_op_num_threads": candidate.threads, "providers": ["CPUExecutionProvider"]}
    chosen, engine = candidate != found.default, engine_arguments(candidate.engine)
    options = engine.pop("options")
    axes = {"batch_axes": found.batch_axes, "output_axes": found.output_axes}
    return {
        "devices": candidate.workers if chosen else None,
        **(engine if candidate.engine != DEFAULT_ENGINE else {}),
        "options": options | ({"threads": candidate.threads} if candidate.threads else {}),
        "max_batch_size": candidate.max_batch_size,
        "max_delay": candidate.max_delay,
        **{name: dict(said) for name, said in axes.items() if said},
    }


def program(model: str, candidate: Candidate, found: Found) -> str:
    given = arguments(candidate, found)
    if candidate.max_batch_size == 1:
        given.pop("max_batch_size", None)
    rate = max((turn.throughput for turn in found.turns(candidate)), default=0.0)
    return texts.program(model, given, found.arrays, candidate.call, found.aim.load.clients, rate)


def grids(found: Found) -> list[Grid]:
    """A table of each round."""
    made = []
    for rung in sorted({trial.rung for trial in found.trials}):
        trials = [trial for trial in found.trials if trial.rung == rung]
        among = found.among(trials)
        turns = {c: among.turns(c) for c in among.ranked()}
        unit = time_unit(percentile(each, 0.5).low for each in turns.values())
        rows: list[tuple[Cell, ...]] = []
        for one, each in turns.items():
            joins = one.max_batch_size > 1
            differs = difference_text(found.difference(one))
            rows.append(
                (
                    f"{one.call}{', default' * (one == found.default)}",
                    *([one.engine, differs] if len(found.engines) > 1 else []),
                    "" if one.call in SESSIONS else str(one.workers),
                    str(one.threads or "auto"),
                    str(one.max_batch_size) if joins else "no",
                    f"{one.max_delay * 1e3:g}" if joins else "",
                    (spread_of(map(found.aim.rows, each)), ONE),
                    (percentile(each, 0.5), unit),
                    (percentile(each, 0.99), unit),
                    (among.over_default(one), ONE),
                )
            )
        ways = "1 way" if len(turns) == 1 else f"{len(turns)} ways"
        interrupted = "" if rung <= found.finished_rungs else ", interrupted"
        title = f"round {rung}{interrupted}: {ways} (p50 and p99 in {unit.sign})"
        header: tuple[str, ...] = (
            "workers",
            "threads",
            "joined",
            "delay ms",
            "rows/s",
            "p50",
            "p99",
        )
        header = ("call", *(["engine", "difference"] if len(found.engines) > 1 else []), *header)
        if rows:
            made.append(Grid(title=title, header=(*header, f"{TIMES} default"), rows=tuple(rows)))
    return made


def remarks(found: Found) -> list[str]:
    lines = ["The search was interrupted: these are the results so far."]
    if found.ended:
        lines = [f"The search ended after {number(found.took_seconds)} s: {found.ended}."]
    if found.left_out:
        lines.append(
            f"{found.left_out} of {found.candidates} ways were left out for lack of time: "
            f"--budget {ceil(found.needed_seconds)} is enough for all."
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
        if bound is None or isinf(strain):
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
        keeps_up = not isinf(found.strain(found.default))
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
    text = f"{first}, p99 {spread_text(tail, unit)} {unit.sign}" if tail.known else first
    if found.difference(candidate) is not None:
        text += f", difference {difference_text(found.difference(candidate))}"
    return text


def as_json(model: str, found: Found, machine: dict[str, str | int | float]) -> bytes:
    """All figures, and the recommendation (docs/tuning.md).

    Args:
        model: Path of the model.
        found: The results of the search.
        machine: Facts about the machine before it.
    """
    chosen, recommended = found.recommended, None
    if chosen is not None:
        kind = "onnxruntime.InferenceSession" if chosen.call in SESSIONS else "mcinfer.Master"
        recommended = {
            "class": "mcinfer.ort.InferenceSession" if chosen.call == "inline" else kind,
            "arguments": arguments(chosen, found),
            "call": chosen.call,
            "is_default": chosen == found.default,
            "keeps_bound": found.strain(chosen) <= 1.0,
            "over_default": _finite(found.over_default(chosen)),
            "program": program(model, chosen, found),
        }
    content = {
        "schema": "mcinfer.tune",
        "version": 1,
        "mcinfer": __version__,
        "machine": machine,
        "cores": found.cores,
        "model": model,
        "aim": asdict(found.aim),
        "recommended": recommended,
        "engines": found.engines,
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
                "over_default": _finite(found.among([trial]).over_default(trial.candidate)),
                "error": trial.error,
                "difference": trial.difference,
                "turns": [asdict(turn) for turn in trial.turns],
            }
            for trial in found.trials
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def _finite(spread: Spread) -> dict[str, float] | None:
    """JSON has neither NaN nor infinities."""
    values = {"middle": spread.middle, "low": spread.low, "high": spread.high}
    return values if all(map(isfinite, values.values())) else None
