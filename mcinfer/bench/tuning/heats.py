"""Pools that take turns, so that whatever else the machine does hits all of them alike.

Ownership: the pools of one heat are started in `Pools.run_heat`, and have ended before it returns or raises.
Only one of them has something to do at any moment.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from mcinfer.bench.failures import WayFailedError
from mcinfer.bench.load import MAX_ARRIVALS
from mcinfer.bench.report import Load, Turn
from mcinfer.bench.subject import Subject
from mcinfer.bench.tuning.candidates import Candidate
from mcinfer.bench.way import Setup

LEAST_REPEATS = 3
ENOUGH_REQUESTS = 100
"""That a turn is to have for its p99 to be more than the slowest of them."""

_ENOUGH_MARGIN = 1.5
"""For pools that are slower than the default, and arrivals that are fewer than on average."""
_LEAST_ARRIVALS = 5
"""In a turn, on average."""
_MAX_REPEATS = 7
_LEAST_TURN = 0.1
_FIRST_TURN = 0.3
_WARMUP = 0.1
_REST = 0.05
"""Seconds that a subject rests before a turn."""
_FIRST_START = 900.0
"""Seconds that the default pool may take to start; others, a multiple of what that took."""
_REQUEST_SECONDS = 600.0
"""That the first request may take: as `mcinfer.Timeouts` has it."""
_PATIENCE = 10.0
"""Seconds on top of what something is expected to take, and times that, until it is given up."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One candidate in one heat.

    Attributes:
        rung: From 1.
        heat: Of the rung, from 1.
        repeats: Turns that it is to have.
        turns: One for each repeat; fewer where the candidate was dropped at once, or interrupted.
        error: Why it could not be measured; empty if it was.
    """

    rung: int
    heat: int = 1
    candidate: Candidate
    repeats: int = LEAST_REPEATS
    turns: list[Turn] = field(default_factory=list)
    error: str = ""


def least_rate(budget: float) -> float:
    """Requests a second of an open loop that two pools can be compared under in so many seconds."""
    return 2 * LEAST_REPEATS * _LEAST_ARRIVALS / budget


class Pools:
    """Starts pools, and has them take turns.

    Args:
        setup: What they are made with, but for what candidates differ in.
        load: Of each turn.
        request: File with a request's arrays.

    Attributes:
        least_turn: Seconds.
        enough_turn: Seconds of a turn with `ENOUGH_REQUESTS`.
    """

    def __init__(self, setup: Setup, load: Load, request: Path) -> None:
        self._setup = setup
        self._load = load
        self._files = {load.batch: request}
        self._start_timeout = _FIRST_START
        self._turn_patience = _REQUEST_SECONDS
        self._starts: list[float] = []
        self._turn_extra = 0.0
        self.least_turn = _LEAST_TURN
        self.enough_turn = 0.0

    @property
    def overhead(self) -> float:
        """Seconds that a candidate costs in a heat beside being measured, as far as is known."""
        return sum(self._starts) / len(self._starts) + LEAST_REPEATS * self._turn_extra

    def try_out(self, candidate: Candidate) -> Turn:
        """Start a pool and take one short turn, to know how long such things take.

        Raises:
            WayFailedError: It cannot be started, or answers no request.
        """
        trial = Trial(rung=0, candidate=candidate, repeats=1)
        self.run_heat([trial], _FIRST_TURN, hopeless=list, tell=lambda _: None)
        if trial.error:
            raise WayFailedError(f"the default pool: {trial.error}")
        turn, *_ = trial.turns
        self._start_timeout = _PATIENCE * (1 + self._starts[0])
        # A turn goes on until the last answer, and begins with a request of each client that is not counted.
        self._turn_extra = _REST + 2 * turn.mean_latency
        self._turn_patience = _PATIENCE * (1 + self._turn_extra)
        few = _LEAST_ARRIVALS / self._load.rate if self._load.rate else 0.0
        self.least_turn = max(_LEAST_TURN, 2 * turn.mean_latency, few)
        self.enough_turn = _ENOUGH_MARGIN * ENOUGH_REQUESTS / (self._load.rate or turn.throughput)
        return turn

    def share_out(self, seconds: float) -> tuple[int, float]:
        """How many turns to take, and the seconds of each: where there is time for it, more of them.

        Longer ones come before more of them: each is to have enough requests.
        """
        repeats = int(seconds / max(4 * self.least_turn, self.enough_turn))
        repeats = min(max(repeats, LEAST_REPEATS), _MAX_REPEATS)
        if self._load.rate:
            seconds = min(seconds, repeats * MAX_ARRIVALS / self._load.rate)
        # The extra of so many is not in the overhead, so it is to come out of the turns.
        more = (repeats - LEAST_REPEATS) * self._turn_extra
        return repeats, (seconds - more) / repeats

    def run_heat(
        self,
        trials: Sequence[Trial],
        seconds: float,
        *,
        hopeless: Callable[[], Collection[Candidate]],
        tell: Callable[[str], None],
    ) -> None:
        """Start the pools of a few candidates, have them take turns, and end them.

        Args:
            trials: Their turns, or errors, are added.
            seconds: Of each turn.
            hopeless: Says which candidates need no further turn.
            tell: Called before each start and turn, with a few words.
        """
        began, in_turns = monotonic(), 0.0
        with ExitStack() as stack:
            subjects = [stack.enter_context(self._subject(t.candidate)) for t in trials]
            pools = [*zip(trials, subjects, strict=True)]
            try:
                for trial, subject in pools:
                    tell(f"starting {trial.candidate}")
                    with _noting(trial, subject):
                        subject.start(self._start_timeout)
                for repeat in range(max(trial.repeats for trial in trials)):
                    first = repeat % len(pools)
                    for trial, subject in (*pools[first:], *pools[:first]):
                        if trial.error or trial.candidate in hopeless():
                            continue
                        tell(str(trial.candidate))
                        start = monotonic()
                        with _noting(trial, subject):
                            self._take_turn(trial, subject, seconds, repeat)
                        in_turns += monotonic() - start
            except KeyboardInterrupt:
                for subject in subjects:  # all at once, and then one after another is waited for
                    subject.interrupt()
                raise
        self._starts.append((monotonic() - began - in_turns) / len(trials))

    def _subject(self, candidate: Candidate) -> Subject:
        setup = replace(
            self._setup,
            devices=tuple(f"cpu:{i}" for i in range(candidate.workers)),
            threads=candidate.threads,
            max_batch_size=candidate.max_batch_size,
            max_delay=candidate.max_delay,
            transport=candidate.transport,
        )
        return Subject(candidate.way, setup, self._files)

    def _take_turn(self, trial: Trial, subject: Subject, seconds: float, repeat: int) -> None:
        warmup = 0.0 if trial.turns else _WARMUP
        turn = subject.turn(
            self._load,
            seconds=seconds,
            warmup=warmup,
            seed=repeat,
            timeout=self._turn_patience + 3 * (warmup + seconds),
        )
        if turn.failed:
            made = turn.requests + turn.failed
            raise WayFailedError(f"{turn.failed} of {made} requests failed: {turn.error}")
        trial.turns.append(turn)


@contextmanager
def _noting(trial: Trial, subject: Subject) -> Iterator[None]:
    """A candidate that fails is out, with its reason; the others go on."""
    try:
        yield
    except WayFailedError as exc:
        trial.error = str(exc)
        subject.close()
