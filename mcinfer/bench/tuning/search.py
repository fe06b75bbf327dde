"""Searching for the pool that answers a load best.

```
 Search (this process)
   │  looks at the model with one worker; makes a request's arrays; tries the default pool for a moment
   ├── Halving        which candidates to measure next, and for how long
   └── for each rung, in heats of a few:
         Subject ── process: Master ── workers      the heat's pools, all open: they take turns, so that
         Subject ── …                               what else the machine does hits all alike
```

Ownership: a `Search` starts the pools of one heat, only one of which has something to do at any moment, and
has ended them before the next heat, and before `run` returns or raises.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import monotonic

from mcinfer.bench.inputs import InputOptions, make_inputs, split_inputs
from mcinfer.bench.request_file import write_request
from mcinfer.bench.tuning.candidates import Aim, Candidate, Space, default_candidate, pieces_of
from mcinfer.bench.tuning.halving import Halving, Results, Rung, ranked
from mcinfer.bench.tuning.heats import LEAST_REPEATS, Pools, Trial
from mcinfer.bench.views.figures import Spread, spread_of
from mcinfer.bench.way import Setup
from mcinfer.errors import InvalidInputError
from mcinfer.machine import whole_cpus
from mcinfer.master import Master
from mcinfer.sharding import plan
from mcinfer.specs import ModelSpec

_HEAT = 4
"""Pools that are open at once."""

Progress = Callable[[float, str], None]
"""Called with the seconds of the budget that are over, and what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a search; in the middle of one, what is known so far.

    Attributes:
        aim: What was searched for.
        cores: That could be used.
        default: The pool that all others were compared with.
        arrays: By input name, element type and shape of the arrays of the requests that were made.
        trials: Rung by rung; within a rung in the order in which they were measured.
        best: The best of the last whole rung; None where there was none.
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
    trials: tuple[Trial, ...]
    best: Candidate | None
    candidates: int
    left_out: int
    needed_seconds: float
    ended: str
    took_seconds: float

    def last(self, candidate: Candidate) -> Trial | None:
        """The last trial of a candidate: the longest."""
        return next((t for t in reversed(self.trials) if t.candidate == candidate), None)

    def over_default(self, trial: Trial) -> Spread:
        """How many times better than the default, which was measured beside it, within each repeat."""
        default = [t for t in self.trials if t.candidate == self.default and t.rung == trial.rung]
        pairs = zip(trial.turns, default[0].turns if default else [], strict=False)
        return spread_of(
            self.aim.result(other).cost / self.aim.result(mine).cost for mine, other in pairs
        )

    def keeps_bound(self, candidate: Candidate) -> bool:
        """Whether it kept the bound on latency, in its last rung."""
        trial = self.last(candidate)
        strains = [self.aim.result(turn).strain for turn in trial.turns] if trial else []
        return spread_of(strains).middle <= 1.0

    @property
    def fits(self) -> bool:
        """Whether there is a pool that keeps the bound, and keeps up with the load."""
        return self.best is not None and self.keeps_bound(self.best)

    @property
    def default_is_as_good(self) -> bool:
        """Whether nothing is better than the default by more than the repeats differ."""
        trial = None if self.best is None else self.last(self.best)
        if trial is None or not self.keeps_bound(self.default):
            return False
        return self.best == self.default or not self.over_default(trial).low > 1.0

    @property
    def recommended(self) -> Candidate | None:
        """The default, if it is as good as the best."""
        return self.default if self.default_is_as_good else self.best


class Search:
    """One search. `run` it once, then ask what was `found`; also after it was interrupted.

    Args:
        model: Path of the model.
        aim: What a pool is to be good at.
        inputs: What the requests' arrays are made of.
        budget: Seconds for the search, from when the model has been looked at (and prepared, if it had not
            been before).
        progress: Told how far it is.
    """

    def __init__(
        self, model: Path, aim: Aim, inputs: InputOptions, *, budget: float, progress: Progress
    ) -> None:
        self._model = model
        self._aim = aim
        self._inputs = inputs
        self._budget = budget
        self._progress = progress
        self._cores = whole_cpus()
        self._arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._candidates: list[Candidate] = []
        self._halving: Halving | None = None
        self._needed = 0.0
        self._trials: list[Trial] = []
        self._began = monotonic()

    def run(self) -> Found:
        """Search; what was found.

        Raises:
            InvalidInputError: The options do not fit the model, or the budget is too small.
            BuildError: mcinfer cannot load the model.
            WayFailedError: The default pool cannot be started or used.
        """
        with tempfile.TemporaryDirectory(prefix="mcinfer-tune-") as name:
            self._progress(0.0, "loading the model")
            spec = self._look()
            arrays = make_inputs(spec, self._aim.load.batch, self._inputs)
            request = Path(name) / "request"
            write_request(request, arrays)
            self._began = monotonic()
            types = {tensor.name: tensor.element_type for tensor in spec.inputs}
            self._arrays = {n: (types[n], tuple(a.shape)) for n, a in arrays.items()}
            pools = Pools(self._setup(spec), self._aim.load, request)
            self._halving = halving = self._begin(spec, pools)
            while rung := halving.plan(self._left(), pools.overhead):
                halving.finish(self._measure(rung, halving, pools))
        return self.found()

    def found(self) -> Found:
        """What is known so far."""
        halving = self._halving
        ranking = (halving.ranking if halving else ()) or ranked(self._results(1))
        return Found(
            aim=self._aim,
            cores=self._cores,
            default=default_candidate(self._aim, self._cores),
            arrays=self._arrays,
            trials=tuple(self._trials),
            best=self._candidates[ranking[0]] if ranking else None,
            candidates=len(self._candidates),
            left_out=halving.left_out if halving else 0,
            needed_seconds=self._needed,
            ended=(halving.ended or "") if halving else "",
            took_seconds=monotonic() - self._began,
        )

    def _look(self) -> ModelSpec:
        """What the model takes and gives. It is prepared by that, if it has not been."""
        with Master(self._model, 1) as master:
            return ModelSpec(inputs=master.inputs, outputs=master.outputs)

    def _setup(self, spec: ModelSpec) -> Setup:
        """What pools are made with, but for what candidates differ in."""
        return Setup(
            model=str(self._model.absolute()),
            cores=self._cores,
            devices=(),
            threads=None,
            outputs=tuple(tensor.name for tensor in spec.outputs),
            split=split_inputs(spec, self._aim.load.batch),
            max_batch_size=1,
            max_delay=0.0,
        )

    def _begin(self, spec: ModelSpec, pools: Pools) -> Halving:
        """Try the default, and make the candidates."""
        default = default_candidate(self._aim, self._cores)
        self._progress(0.0, f"trying the default: {default}")
        turn = pools.try_out(default)
        shapes = [shape for _, shape in self._arrays.values()]
        space = Space(
            aim=self._aim,
            cores=self._cores,
            pieces=pieces_of(spec, shapes),
            joins=plan(spec, shapes, 1).rowwise,
            run_seconds=turn.run_seconds or turn.mean_latency,
        )
        self._candidates = space.candidates()
        halving = Halving(len(self._candidates), kept=0, least=LEAST_REPEATS * pools.least_turn)
        before = monotonic() - self._began
        self._needed = before + halving.needs(len(self._candidates), pools.overhead)
        least = before + halving.needs(min(2, len(self._candidates)), pools.overhead)
        if least > self._budget:
            raise InvalidInputError(
                f"--budget: got {self._budget:g} s, expected at least {ceil(least)} to compare two "
                f"pools of this model, and {ceil(self._needed)} for all {len(self._candidates)}"
            )
        return halving

    def _left(self) -> float:
        return self._budget - (monotonic() - self._began)

    def _results(self, rung: int) -> Results:
        """By candidate, what it gave so far."""
        return {
            self._candidates.index(trial.candidate): [*map(self._aim.result, trial.turns)]
            for trial in self._trials
            if trial.rung == rung and not trial.error
        }

    def _measure(self, rung: Rung, halving: Halving, pools: Pools) -> Results:
        """A rung: heat after heat, as far as there is time."""

        def hopeless() -> list[Candidate]:
            dropped = halving.hopeless(self._results(rung.number))
            return [self._candidates[c] for c in dropped]

        def tell(words: str) -> None:
            note = f"round {rung.number} of {rung.of}: {words}"
            self._progress(self._budget - max(0.0, self._left()), note)

        repeats, seconds = pools.share_out(rung.seconds)
        for first in range(0, len(rung.candidates), _HEAT):
            if first and self._left() <= 0:
                break
            heat = [
                Trial(rung=rung.number, candidate=self._candidates[c])
                for c in rung.candidates[first : first + _HEAT]
            ]
            self._trials += heat
            pools.run_heat(heat, repeats, seconds, hopeless=hopeless, tell=tell)
        return self._results(rung.number)
