"""Pools that may answer a load best: workers, their threads, and how requests are joined. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mcinfer.bench.report import Load, Turn
from mcinfer.bench.tuning.halving import Result
from mcinfer.bench.views.figures import latency
from mcinfer.config import TransportKind, automatic_workers
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import Shape, Split, plan
from mcinfer.specs import ModelSpec

Goal = Literal["throughput", "latency"]
Call = Literal["submit", "predict"]

_SHORT_RUN = 1e-3
"""Seconds: the transports differ by some 10 microseconds for each request."""

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a pool is to be good at.

    Attributes:
        goal: ``"throughput"``: most rows a second. ``"latency"``: the least median latency.
        load: Under this load.
        max_latency: Seconds within which 99 % of the requests are to be answered; None is no bound.
    """

    goal: Goal
    load: Load
    max_latency: float | None = None

    def __post_init__(self) -> None:
        if self.goal == "throughput" and self.load.rate is not None:
            raise InvalidInputError(
                f"--rate: got {self.load.rate:g} with --goal throughput, expected --goal latency: "
                f"at a given rate every pool that keeps up has the same throughput"
            )
        if self.max_latency is not None and self.max_latency <= 0:
            raise InvalidInputError(
                f"--max-latency: got {self.max_latency:g}, expected seconds above 0"
            )

    def rows(self, turn: Turn) -> float:
        """Answered rows a second."""
        return self.load.batch * turn.throughput

    def result(self, turn: Turn) -> Result:
        """What a turn is worth. One that did not keep up with the rate breaks any bound."""
        if self.goal == "latency":
            cost = latency(turn, 0.5)
        else:
            cost = 1 / self.rows(turn) if turn.requests else math.inf
        if turn.unfinished or not turn.kept_up or cost == math.inf:
            return Result(cost=cost, strain=math.inf)  # in the long run nothing is answered in time
        strain = latency(turn, 0.99) / self.max_latency if self.max_latency else 0.0
        return Result(cost=cost, strain=strain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pool, and the call that it is used by.

    Attributes:
        workers: How many, each with an equal share of the cores.
        threads: Of each worker's run; None is what a pool gets that is not told.
        call: The method of `mcinfer.Master`.
        max_batch_size: As `mcinfer.Master` takes it.
        max_delay: Likewise.
        transport: Likewise.
    """

    workers: int
    threads: int | None
    call: Call
    max_batch_size: int = 1
    max_delay: float = 0.0
    transport: TransportKind = "zeromq"

    @property
    def way(self) -> str:
        """The way that measures it."""
        if self.call == "predict":
            return "sharded"
        return "batched" if self.max_batch_size > 1 else "concurrent"

    def __str__(self) -> str:
        """Such as ``2 workers, 1 thread, submit, 8 rows within 1 ms``."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        parts = [workers, *([threads] if self.threads else []), self.call]
        if self.max_batch_size > 1:
            parts.append(f"{self.max_batch_size} rows within {self.max_delay * 1e3:g} ms")
        if self.transport != "zeromq":
            parts.append(self.transport)
        return ", ".join(parts)


# What there is to choose from.


def pieces_of(model: ModelSpec, shapes: Sequence[Shape], split: Split) -> int:
    """How many pieces mcinfer can cut a request of these shapes in, by model input."""
    most = max((size for shape in shapes for size in shape), default=1)
    return len(plan(model, shapes, most, split).rows)


def default_candidate(aim: Aim, cores: int) -> Candidate:
    """The pool of those who name nothing but the model."""
    call: Call = "predict" if aim.goal == "latency" else "submit"
    return Candidate(workers=automatic_workers(cores), threads=None, call=call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What candidates are made of.

    Attributes:
        aim: What they are for.
        cores: That may be used.
        pieces: That one request can be cut in.
        joins: Whether requests can be joined to one run.
        run_seconds: Of one run of the model.
    """

    aim: Aim
    cores: int
    pieces: int
    joins: bool
    run_seconds: float

    def candidates(self) -> list[Candidate]:
        """All pools that make sense, the default first.

        Then those that use all cores, then the others. Where there is no time for all, those at the end are
        left out: so that those at the start are of all kinds, each group is in the order of the multiples of
        the golden ratio, less their whole parts, which fill a range evenly however many there are.
        """
        everything = [
            candidate
            for workers in _powers(self.cores)
            for threads in _powers(self.cores // workers)
            for use in self._uses(workers, threads)
            for candidate in self._transports(use)
            if not self._is_default(candidate)
        ]
        full = [c for c in everything if c.threads == self.cores // c.workers]
        rest = [c for c in everything if c not in full]
        return [default_candidate(self.aim, self.cores), *_spread_out(full), *_spread_out(rest)]

    def _is_default(self, candidate: Candidate) -> bool:
        """Whether it is the same pool in other words."""
        default = default_candidate(self.aim, self.cores)
        share, uneven = divmod(self.cores, default.workers)
        told = Candidate(workers=default.workers, threads=share, call=default.call)
        return candidate == told and not uneven

    def _uses(self, workers: int, threads: int) -> Iterator[Candidate]:
        """Ways to use such a pool that leave none of its workers idle all the time."""
        load = self.aim.load
        if self._predicts and workers <= load.clients * self.pieces:
            yield Candidate(workers=workers, threads=threads, call="predict")
        if not self._submits or workers > load.clients:
            return
        yield Candidate(workers=workers, threads=threads, call="submit")
        for size, delay in self._joinings():
            yield Candidate(
                workers=workers,
                threads=threads,
                call="submit",
                max_batch_size=size,
                max_delay=delay,
            )

    def _transports(self, candidate: Candidate) -> Iterator[Candidate]:
        """It, and for runs that are short enough for messages to count, with the other transport as well."""
        yield candidate
        all_cores = candidate.threads == self.cores // candidate.workers
        # One core leaves the master and its worker to wait for each other, whatever messages go by.
        if self.run_seconds <= _SHORT_RUN and all_cores and self.cores > 1:
            yield replace(candidate, transport="socketpair")

    @property
    def _predicts(self) -> bool:
        return self.aim.goal == "latency" or self.pieces > 1

    @property
    def _submits(self) -> bool:
        return self.aim.goal == "throughput" or self.aim.load.clients > 1

    def _joinings(self) -> Iterator[tuple[int, float]]:
        """Rows that are joined, up to all that can be waiting at once, and how long to wait for them."""
        size, most = 2 * self.aim.load.batch, self.aim.load.batch * self.aim.load.clients
        while self.joins and size <= most:
            yield from ((size, delay) for delay in self._delays())
            size *= 2

    def _delays(self) -> list[float]:
        """0, 1 ms and 5 ms where a run takes 4 ms or less, and more where it takes more."""
        unit = float(f"{min(max(1e-3, self.run_seconds / 4), 20e-3):.0e}")
        bound = self.aim.max_latency or math.inf
        return [delay for delay in (0.0, unit, 5 * unit) if delay < bound]


def _powers(most: int) -> list[int]:
    """1, 2, 4, … up to a number, and that number."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def _spread_out(candidates: Sequence[Candidate]) -> list[Candidate]:
    order = sorted(range(len(candidates)), key=lambda i: i * _GOLDEN % 1)
    return [candidates[i] for i in order]
