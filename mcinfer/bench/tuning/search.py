"""Searching for the pool that answers a load best.

```
 Search (this process)
   │  looks at the model with one worker; makes a request's arrays; tries the default pool for a moment
   ├── Halving        which candidates to measure next, and for how long
   └── for each rung, in heats of a few:
         Subject ── process: Master ── workers      the default, in every heat, and a few others, all open:
         Subject ── …                               they take turns, so that what else the machine does
                                                    hits all alike
```

Ownership: a `Search` starts the pools of one heat, only one of which has something to do at any moment, and
has ended them before the next heat, and before `run` returns or raises.
"""

import tempfile
from collections.abc import Callable
from math import ceil
from pathlib import Path
from time import monotonic

from mcinfer.bench.inputs import InputOptions, fixed_batch, make_inputs
from mcinfer.bench.looking import look_at, own_records
from mcinfer.bench.request_file import write_request
from mcinfer.bench.tuning.candidates import Aim, Candidate, Space, default_candidate, pieces_of
from mcinfer.bench.tuning.found import Found, results
from mcinfer.bench.tuning.halving import Halving, Results, Rung
from mcinfer.bench.tuning.heats import LEAST_REPEATS, Pools, Trial, least_rate
from mcinfer.bench.views.texts import number
from mcinfer.bench.way import Setup
from mcinfer.errors import InvalidInputError
from mcinfer.machine import whole_cpus
from mcinfer.master import Master
from mcinfer.sharding import Axes, Split, plan
from mcinfer.specs import ModelSpec

_HEAT = 4
"""Pools that are open at once: the default, and others that are compared with it."""

Progress = Callable[[float, str], None]
"""Called with the seconds of the budget that are over, and what comes next."""


class Search:
    """One search. `run` it once, then ask what was `found`; also after it was interrupted.

    Args:
        model: Path of the model.
        aim: What a pool is to be good at.
        inputs: What the requests' arrays are made of.
        budget: Seconds for the search, from when the model has been looked at (and prepared, if it had not
            been before).
        progress: Called as the search goes on.
        batch_axes: As `mcinfer.Master` takes them.
        output_axes: Likewise.

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
    ) -> None:
        rate, least = aim.load.rate, least_rate(budget)
        if rate is not None and rate < least:
            raise InvalidInputError(
                f"--rate: got {rate:g} with --budget {budget:g}, expected at least {number(least * 1.005)}: "
                f"two pools are compared by a few requests in each turn, which --budget "
                f"{ceil(budget * least / rate)} has time for"
            )
        self._model = model
        self._aim = aim
        self._inputs = inputs
        self._budget = budget
        self._progress = progress
        self._batch_axes = dict(batch_axes or {})
        self._output_axes = dict(output_axes or {})
        self._split: Split | None = None
        self._cores = whole_cpus()
        self._arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._candidates: list[Candidate] = []
        self._halving: Halving | None = None
        self._needed = 0.0
        self._trials: list[Trial] = []
        self._finished_rungs = 0
        self._began = monotonic()

    def run(self) -> Found:
        """Search; what was found.

        Raises:
            InvalidInputError: The options do not fit the model, or the budget is too small.
            BuildError: mcinfer cannot load the model.
            WayFailedError: The default pool cannot be started or used.
        """
        with (
            tempfile.TemporaryDirectory(prefix="mcinfer-tune-") as name,
            own_records(Path(name)),
        ):
            self._progress(0.0, "loading the model")
            spec, split = self._look()
            self._split = split
            arrays = make_inputs(spec, split, self._aim.load.batch, self._inputs)
            request = Path(name) / "request"
            write_request(request, arrays)
            self._began = monotonic()
            types = {tensor.name: tensor.element_type for tensor in spec.inputs}
            self._arrays = {n: (types[n], tuple(a.shape)) for n, a in arrays.items()}
            pools = Pools(self._setup(spec, split), self._aim.load, request)
            self._halving = halving = self._begin(spec, split, pools)
            while rung := halving.plan(self._left(), pools.overhead):
                halving.finish(self._measure(rung, halving, pools))
                self._finished_rungs = rung.number
        return self.found()

    def found(self) -> Found:
        """What is known so far."""
        halving = self._halving
        return Found(
            aim=self._aim,
            cores=self._cores,
            default=default_candidate(self._aim, self._cores),
            arrays=self._arrays,
            split=self._split,
            batch_axes=self._batch_axes,
            output_axes=self._output_axes,
            trials=tuple(self._trials),
            finished_rungs=self._finished_rungs,
            candidates=len(self._candidates),
            left_out=halving.left_out if halving else 0,
            needed_seconds=self._needed,
            ended=(halving.ended or "") if halving else "",
            took_seconds=monotonic() - self._began,
        )

    def _look(self) -> tuple[ModelSpec, Split]:
        """What the model is like. It is prepared by that, if it has not been."""
        axes = self._batch_axes, self._output_axes
        with Master(self._model, 1, batch_axes=axes[0], output_axes=axes[1]) as master:
            self._progress(0.0, "learning how its batch is split")
            return look_at(master, [self._aim.load.batch], self._inputs, *axes)

    def _setup(self, spec: ModelSpec, split: Split) -> Setup:
        """What pools are made with, but for what candidates differ in."""
        return Setup(
            model=str(self._model.absolute()),
            cores=self._cores,
            devices=(),
            threads=None,
            split=split,
            fixed_batch=fixed_batch(spec, split),
            batch_axes=self._batch_axes,
            output_axes=self._output_axes,
            max_batch_size=1,
            max_delay=0.0,
        )

    def _begin(self, spec: ModelSpec, split: Split, pools: Pools) -> Halving:
        """Try the default, and make the candidates."""
        default = default_candidate(self._aim, self._cores)
        self._progress(0.0, f"trying the default: {default}")
        turn = pools.try_out(default)
        shapes = [shape for _, shape in self._arrays.values()]
        space = Space(
            aim=self._aim,
            cores=self._cores,
            pieces=pieces_of(spec, shapes, split),
            joins=plan(spec, shapes, 1, split).rowwise,
            run_seconds=turn.run_seconds or turn.mean_latency,
        )
        self._candidates = space.candidates()
        halving = Halving(
            len(self._candidates),
            kept=0,
            heat=_HEAT,
            least=LEAST_REPEATS * pools.least_turn,
            enough=LEAST_REPEATS * pools.enough_turn if self._aim.max_latency else 0.0,
        )
        before = monotonic() - self._began
        self._needed = before + halving.needs(len(self._candidates), pools.overhead)
        self._needed += halving.needs_to_confirm(pools.overhead)
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
        trials = [trial for trial in self._trials if trial.rung == rung]
        found = results(self._aim, trials, self._candidates[0])
        return {self._candidates.index(candidate): given for candidate, given in found.items()}

    def _measure(self, rung: Rung, halving: Halving, pools: Pools) -> Results:
        """A rung: heat after heat, as far as there is time."""

        def hopeless() -> list[Candidate]:
            dropped = halving.hopeless(self._results(rung.number))
            return [self._candidates[c] for c in dropped]

        def tell(words: str) -> None:
            note = f"round {rung.number} of {rung.of}: {words}"
            self._progress(self._budget - max(0.0, self._left()), note)

        repeats, seconds = pools.share_out(rung.seconds)
        for place, heat in enumerate(rung.heats, 1):
            if place > 1 and self._left() <= 0:
                break
            trials = [
                Trial(rung=rung.number, heat=place, candidate=self._candidates[c], repeats=repeats)
                for c in heat
            ]
            self._trials += trials
            pools.run_heat(trials, seconds, hopeless=hopeless, tell=tell)
        return self._results(rung.number)
