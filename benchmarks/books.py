"""What clients ask for and what becomes of it, written down, and compared with what was promised.

Each request is written down when it begins, when its caller learns how it ended, and when the pool tells of
it (`Master`'s trace hook, in the context of the call). What does not fit is a *finding*: an error that
nothing done to the request explains, an end that comes twice or too late, an answer that is not bit-right.
"""

import threading
from collections import Counter
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcinfer import PredictTimeoutError, RequestTrace, WorkerDiedError
from mcinfer.requests.tensors import Arrays

COLUMNS = 256
"""Of the model's input and output: a row is 1 KiB."""

ROW_BYTES = COLUMNS * 4
MAX_ROWS = 65_536
"""A request's input of so many rows has 64 MiB, and so has its output."""

SLACK = 3.0
"""Seconds that a request may settle after its own time-out: here for two busy cores and a large copy."""

_SPARE_ROWS = 4096
_CHECKED_ROWS = 4096
_MAX_FINDINGS = 50
_DEATHS = "given up after 3 workers died on it"

Harm = Literal["none", "cancel", "time-out", "bad", "fail", "crash", "hang"]
"""What is done to a request: nothing; it is cancelled; it has next to no time; it does not fit the model;
its run raises; its run ends the worker; its run does not end."""

_MISFORTUNE = frozenset(
    {"WorkerDiedError", "RankDiedError", "PredictTimeoutError", "QueueFullError"}
)
"""What may happen to any request: three workers killed, no answer until its deadline, no room."""

ALLOWED: dict[Harm, frozenset[str]] = {
    "none": _MISFORTUNE | {"ok"},
    "cancel": _MISFORTUNE | {"ok", "cancelled"},
    "time-out": _MISFORTUNE | {"ok"},
    "bad": frozenset({"InvalidInputError", "QueueFullError"}),
    "fail": _MISFORTUNE | {"PredictError"},
    "crash": _MISFORTUNE,
    "hang": _MISFORTUNE,
}
"""How a request may end, by what was done to it."""

_TOLD_AS = {"ok": "succeeded", "cancelled": "cancelled"}
_REFUSED = frozenset({"InvalidInputError", "QueueFullError"})


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request of a client's.

    Attributes:
        client: Who asks.
        harm: What is done to it.
        rows: How many.
        first: Of the sample's rows, which is its first.
        timeout: Seconds.
        began: When its call came, by `time.monotonic`.
        oldest: Of the versions of the weights, the first that its answer may show.
        outcome: How it ended for its caller: "ok", "cancelled", the error's name; empty until then.
        told: How it ended for the pool, once that told.
        ends: How often it ended.
        traces: How often the pool told.
    """

    client: str
    harm: Harm
    rows: int
    first: int
    timeout: float
    began: float = 0.0
    oldest: int = 0
    outcome: str = ""
    told: str = ""
    ends: int = 0
    traces: int = 0

    def __str__(self) -> str:
        """In a few words."""
        return (
            f"{self.client}'s request of {self.rows} rows in {self.timeout:.3g} s, "
            f"done to it: {self.harm}"
        )


_current: ContextVar[Request | None] = ContextVar("request", default=None)


class Sample:
    """What inputs are cut from: whole numbers that float32 holds exactly, also twice them and a version."""

    def __init__(self) -> None:
        """64 MiB of rows, and some more to begin at."""
        rows = MAX_ROWS + _SPARE_ROWS
        numbers = np.arange(rows * COLUMNS, dtype=np.int32) % 999_983
        self._data = numbers.astype(np.float32).reshape(rows, COLUMNS)
        self._data[:, 0] = np.arange(rows) % 97  # what a model's acts go by: none of them
        self._data.flags.writeable = False

    def rows(self, first: int, count: int) -> NDArray[np.float32]:
        """So many rows; they cannot be written to.

        Args:
            first: 0 to 4096.
            count: At most `MAX_ROWS`.
        """
        return self._data[first : first + count]

    def fault(self, y: NDArray[Any], request: Request, newest: int) -> str:
        """What is wrong with an answer; empty if nothing.

        Args:
            y: It is to be twice the request's input, and a version's number.
            request: What was asked.
            newest: Version that it may show.
        """
        if y.dtype != np.float32 or y.shape != (request.rows, COLUMNS):
            return f"an answer of {y.dtype}{[*y.shape]}"
        if not request.rows:
            return ""
        x = self.rows(request.first, request.rows)
        version = y[0, 0] - 2 * x[0, 0]
        if not (request.oldest <= version <= newest and float(version).is_integer()):
            return f"an answer of version {version}, expected {request.oldest} to {newest}"
        for start in range(0, request.rows, _CHECKED_ROWS):
            part = slice(start, start + _CHECKED_ROWS)
            wrong = y[part] != 2 * x[part] + version
            if wrong.any():
                row, column = np.argwhere(wrong)[0]
                return (
                    f"an answer of version {version:g} with {int(wrong.sum())} wrong numbers in rows from "
                    f"{start} on, the first in row {start + row}, column {column}: "
                    f"{y[start + row, column]} of {x[start + row, column]}"
                )
        return ""


class Books:
    """All that clients and their disturbers did and saw. Any thread may call any method.

    Attributes:
        outcomes: Requests by what was done to them and how they ended.
        told: Requests that the pool told of, by what it says became of them.
        events: All else that is counted, by name.
        latest: Seconds from its time-out to its end, of the request that was the latest.
        updating: The newest version of the weights whose update has begun.
        updated: The newest whose update has returned.
    """

    def __init__(self, sample: Sample) -> None:
        """Empty ones."""
        self._lock = threading.Lock()
        self._sample = sample
        self.outcomes: Counter[tuple[Harm, str]] = Counter()
        self.told: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.latest = 0.0
        self.updating = 0
        self.updated = 0
        self._findings: Counter[str] = Counter()
        self._open: set[Request] = set()
        self._untold: set[Request] = set()

    def begin(self, request: Request) -> None:
        """Its call comes next, in this thread or task."""
        request.oldest = self.updated
        _current.set(request)
        with self._lock:
            self._open.add(request)
        request.began = monotonic()

    def end(
        self, request: Request, error: BaseException | None, *, cancelled: bool = False
    ) -> None:
        """The caller has learnt how it ended: with an answer, unless there was an error."""
        now = monotonic()
        outcome = "cancelled" if cancelled else "ok" if error is None else type(error).__name__
        late = now - request.began - request.timeout
        with self._lock:
            request.ends += 1
            if request.ends > 1:
                self._find(f"{request} ended twice: {request.outcome}, then {outcome}")
                return
            request.outcome = outcome
            self._open.discard(request)
            self.outcomes[request.harm, outcome] += 1
            self.latest = max(self.latest, late)
            if outcome not in ALLOWED[request.harm]:
                self._find(f"{request} ended with {outcome}: {error}")
            if late > SLACK:
                self._find(f"{request} ended {late:.1f} s after its time-out, with {outcome}")
            if isinstance(error, PredictTimeoutError) and late < 0:
                self._find(f"{request} timed out {-late:.3f} s before its deadline")
            if isinstance(error, WorkerDiedError) and _DEATHS not in str(error):
                self._find(f"{request} failed though no three workers had died on it: {error}")
            if request.traces:
                self._compare(request)
            elif outcome not in _REFUSED and request.rows:
                self._untold.add(request)

    def settle(self, request: Request, future: "Future[Arrays]") -> None:
        """The callback of its future."""
        cancelled = future.cancelled()
        self.end(request, None if cancelled else future.exception(), cancelled=cancelled)

    def hear(self, trace: RequestTrace) -> None:
        """The pool's trace hook."""
        request = _current.get()
        with self._lock:
            if request is None:
                self._find(f"the pool told of request {trace.request}, which nobody made")
                return
            self.told[trace.outcome] += 1
            request.traces += 1
            request.told = trace.outcome
            if request.traces > 1:
                self._find(f"{request}: the pool told of it {request.traces} times")
            elif request.outcome:
                self._untold.discard(request)
                self._compare(request)

    def judge(self, request: Request, outputs: Arrays) -> None:
        """Compare an answer, now or again, with what is right."""
        fault = self._sample.fault(outputs["y"], request, self.updating)
        given = self._sample.rows(request.first, request.rows)
        if not fault and not np.array_equal(outputs.get("x", given), given):
            fault = "an answer whose output x is not its input"
        if fault:
            self.find(f"{request}: {fault}")

    def count(self, event: str) -> None:
        """Something happened that is only counted."""
        with self._lock:
            self.events[event] += 1

    def find(self, text: str) -> None:
        """Something is not as promised."""
        with self._lock:
            self._find(text)

    @property
    def findings(self) -> list[str]:
        """What was not as promised, the first of them; each with how often."""
        with self._lock:
            return [f"{text} ({n} times)" if n > 1 else text for text, n in self._findings.items()]

    @property
    def by_outcome(self) -> Counter[str]:
        """How many requests ended how, whatever was done to them."""
        with self._lock:
            totals: Counter[str] = Counter()
            for (_, outcome), number in self.outcomes.items():
                totals[outcome] += number
            return totals

    def balance(self) -> None:
        """Nothing is in flight any more: find what did not end, and what the pool did not tell of."""
        with self._lock:
            for request in self._open:
                self._find(f"{request} did not end")
            for request in self._untold:
                # A task may be cancelled while it waits for room: then nothing was ever accepted.
                if request.outcome != "cancelled":
                    self._find(f"{request} ended with {request.outcome}, and the pool did not tell")
            self._open.clear()
            self._untold.clear()

    def _compare(self, request: Request) -> None:
        """How it ended for its caller and for the pool; what the caller cancels may be answered already."""
        if request.outcome == "QueueFullError" and request.client.startswith("task"):
            # A task's time was over while a thread waited for room in its place, and just then got it.
            return
        if request.outcome in _REFUSED:
            self._find(f"{request} was refused with {request.outcome}, and accepted")
        elif request.outcome != "cancelled" and request.told != _TOLD_AS.get(
            request.outcome, "failed"
        ):
            self._find(f"{request} ended with {request.outcome}, and the pool says: {request.told}")

    def _find(self, text: str) -> None:
        if text in self._findings or len(self._findings) < _MAX_FINDINGS:
            self._findings[text] += 1
