"""What a search has found: how good each pool was beside the default, and which to recommend. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isinf

from mcinfer.bench.report import Turn
from mcinfer.bench.tuning.candidates import Aim, Candidate
from mcinfer.bench.tuning.halving import Result, ranked
from mcinfer.bench.tuning.heats import Trial
from mcinfer.bench.views.figures import Spread, spread_of
from mcinfer.sharding import Axes, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a candidate gave in one rung, in all heats that it was in.

    Attributes:
        pairs: Each of its turns, and the default's in the same repeat of the same heat, if it had one.
    """

    candidate: Candidate
    pairs: tuple[tuple[Turn, Turn | None], ...]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Its own."""
        return tuple(turn for turn, _ in self.pairs)

    def over_default(self, aim: Aim) -> Spread:
        """How many times better than the default, within each repeat; unknown where that failed."""
        costs = [(aim.result(turn).cost, aim.result(o).cost) for turn, o in self.pairs if o]
        return spread_of(other / mine for mine, other in costs if not isinf(other))


def standing(trials: Sequence[Trial], default: Candidate, candidate: Candidate) -> Standing | None:
    """A candidate's standing by the trials of one rung; None where it failed, or had no turn."""
    mine = [trial for trial in trials if trial.candidate == candidate]
    beside = {trial.heat: trial.turns for trial in trials if trial.candidate == default}
    pairs = tuple(
        (turn, other)
        for trial in mine
        for turn, other in zip_longest(trial.turns, beside.get(trial.heat, ())[: len(trial.turns)])
    )
    if not pairs or any(trial.error for trial in mine):
        return None
    return Standing(candidate=candidate, pairs=pairs)


def results(
    aim: Aim, trials: Sequence[Trial], default: Candidate
) -> dict[Candidate, Sequence[Result]]:
    """What each candidate gave in one rung, to be compared.

    Heats come one after another, and what else the machine does has changed by then. So costs are told as
    multiples of the default's in the same repeat of the same heat; but where the default failed or did
    not keep up, so that there is no such measure, as they are.
    """
    among = dict.fromkeys(trial.candidate for trial in trials)
    known = [found for each in among if (found := standing(trials, default, each))]
    base = next((each.turns for each in known if each.candidate == default), ())
    if not base or any(isinf(aim.result(turn).strain) for turn in base):
        return {each.candidate: [*map(aim.result, each.turns)] for each in known}
    return {
        each.candidate: [
            _over(aim.result(turn), aim.result(other))
            for turn, other in each.pairs
            if other is not None
        ]
        for each in known
    }


def _over(result: Result, base: Result) -> Result:
    return replace(result, cost=result.cost / base.cost)


def ranking(aim: Aim, trials: Sequence[Trial], default: Candidate) -> list[Candidate]:
    """The candidates of one rung that did not fail, the best first."""
    found = results(aim, trials, default)
    candidates = [*found]
    return [candidates[i] for i in ranked(dict(enumerate(found.values())))]


def decisive(trials: Sequence[Trial], finished_rungs: int) -> list[Trial]:
    """What a verdict rests on: the last rung that was finished.

    Where none was, what had all its turns in the first one: fewer say little.
    """
    if finished_rungs:
        return [trial for trial in trials if trial.rung == finished_rungs]
    return [t for t in trials if t.rung == 1 and (t.error or len(t.turns) == t.repeats)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a search; in the middle of one, what is known so far.

    Attributes:
        aim: What was searched for.
        cores: That could be used.
        default: The pool that all others were compared with.
        arrays: By input name, element type and shape of the arrays of the requests that were made.
        split: How the model's batch is split; None where that is not known yet.
        batch_axes: What the user says of it, as `mcinfer.Master` takes it.
        output_axes: Likewise.
        trials: Rung by rung; within a rung in the order in which they were measured.
        finished_rungs: How many rungs were measured to their end.
        candidates: How many there were.
        left_out: How many of them there was no time for.
        needed_seconds: For all of them.
        ended: Why the search was over; empty where it was interrupted.
        took_seconds: In all, but for looking at the model.
    """

    aim: Aim
    cores: int
    default: Candidate
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    split: Split | None
    batch_axes: Axes
    output_axes: Axes
    trials: tuple[Trial, ...]
    finished_rungs: int
    candidates: int
    left_out: int
    needed_seconds: float
    ended: str
    took_seconds: float

    @property
    def best(self) -> Candidate | None:
        """The best by what the verdict rests on; None where that is nothing."""
        first, *_ = (*ranking(self.aim, self._decisive, self.default), None)
        return first

    def last(self, candidate: Candidate) -> Standing | None:
        """The standing of a candidate by what the verdict rests on."""
        return standing(self._decisive, self.default, candidate)

    def keeps_bound(self, candidate: Candidate) -> bool:
        """Whether it kept the bound on latency, and kept up with the load."""
        last = self.last(candidate)
        return last is not None and self._strain(last) <= 1.0

    def keeps_up(self, candidate: Candidate) -> bool:
        """Whether it kept up with the load."""
        last = self.last(candidate)
        return last is not None and not isinf(self._strain(last))

    @property
    def fits(self) -> bool:
        """Whether there is a pool that keeps the bound, and keeps up with the load."""
        return self.best is not None and self.keeps_bound(self.best)

    @property
    def default_is_as_good(self) -> bool:
        """Whether nothing is better than the default by more than the repeats differ."""
        best = self.best
        last = None if best is None else self.last(best)
        if last is None or not self.keeps_bound(self.default):
            return False
        return best == self.default or not last.over_default(self.aim).low > 1.0

    @property
    def recommended(self) -> Candidate | None:
        """The default, if it is as good as the best."""
        return self.default if self.default_is_as_good else self.best

    @property
    def _decisive(self) -> list[Trial]:
        return decisive(self.trials, self.finished_rungs)

    def _strain(self, last: Standing) -> float:
        return spread_of(self.aim.result(turn).strain for turn in last.turns).middle
