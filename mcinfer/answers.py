"""Settled jobs on their way to their futures.

Callbacks of futures are users' code, which may wait for locks of theirs: they run in one thread alone, one
after another, and there futures are answered. Those without, which somebody waits for, in any thread: that
saves a change of it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from mcinfer.errors import McinferError, PredictError
from mcinfer.staging import Arrays, Job
from mcinfer.tracing import RequestTrace, TraceHook

_log = logging.getLogger("mcinfer.master")

_Settlement = tuple[Job, McinferError | None, RequestTrace | None]


class Answers:
    """What was settled and is not answered yet. No method waits."""

    def __init__(
        self,
        *,
        wake: Callable[[], None],
        answered: Callable[[], None],
        trace: TraceHook | None = None,
    ) -> None:
        """Begin with none.

        Args:
            wake: Has the thread for the users' futures call `give_public` soon.
            answered: Called after each answer, in whichever thread gave it.
            trace: Called after each answer that has a trace.
        """
        self._trace = trace
        self._telling: set[int] = set()
        self._wake = wake
        self._answered = answered
        self._settled: deque[_Settlement] = deque()
        self._public: deque[_Settlement] = deque()
        self._ended = False

    def is_telling(self) -> bool:
        """Whether the calling thread is in a trace hook: others may wait behind it."""
        return threading.get_ident() in self._telling

    def add(
        self, job: Job, failure: McinferError | None, trace: RequestTrace | None = None
    ) -> None:
        """A job is settled: with what its shards gave, or with an error."""
        self._settled.append((job, failure, trace))

    def give(self) -> None:
        """Answer what was settled; no lock may be held."""
        while self._settled:
            try:
                job, failure, trace = self._settled.popleft()
            except IndexError:
                return  # another thread was faster
            if not self._answer(job, failure, trace, here=False):
                self._public.append((job, failure, trace))
                if self._ended:
                    self.give_public()
                else:
                    self._wake()

    def give_public(self) -> None:
        """Answer the futures that users hold. A callback that submits only adds to the queue."""
        while self._public:
            try:
                job, failure, trace = self._public.popleft()
            except IndexError:
                return
            self._answer(job, failure, trace, here=True)

    def end(self) -> None:
        """There is no thread of its own for the users' futures any more: from now on any thread will do."""
        self._ended = True
        self.give_public()

    def fail_all(self, jobs: list[Job], failure: McinferError) -> None:
        """Last resort: these jobs, and all that are settled, fail."""
        waiting = {id(job): job for job in jobs}
        for queue in (self._settled, self._public):
            waiting.update({id(job): job for job, _, _ in queue})
            queue.clear()
        for job in waiting.values():
            if not job.future.done():
                self._answer(job, failure, None, here=True)

    def _answer(
        self, job: Job, failure: Exception | None, trace: RequestTrace | None, *, here: bool
    ) -> bool:
        """Answer a job; False if its future has callbacks and this thread is not `here` for them."""
        if job.future.bound and not here:
            return False
        result: Arrays = {}
        if failure is None:
            try:
                result = job.result()
            except Exception as exc:  # shards that do not join, or no memory for a copy
                failure = exc
        joined = monotonic() if trace is not None else 0.0
        try:
            if not job.future.answer(result, failure, here=here):
                return False
        except BaseException:
            # A future logs what a callback raises, but for SystemExit and its like; others wait behind it.
            _log.exception("a callback of %r wants to end this thread, which it cannot", job.future)
        job.answered()
        self._answered()
        if trace is not None and self._trace is not None:
            self._tell(self._trace, job, failure, replace(trace, joined=joined))
        return True

    def _tell(
        self, hook: TraceHook, job: Job, failure: Exception | None, trace: RequestTrace
    ) -> None:
        """Call the trace hook."""
        if failure is not None and trace.error is None:
            if not isinstance(failure, McinferError):
                failure = PredictError(f"the answers could not be joined: {failure!r}")
            trace = replace(trace, outcome="failed", error=failure)
        here = threading.get_ident()
        within = here in self._telling  # a hook that submits, which may answer another request
        self._telling.add(here)
        try:
            if job.context is not None:
                job.context.run(hook, trace)
        except BaseException:
            # Also SystemExit and its like: others wait behind it.
            _log.exception("the trace hook failed")
        finally:
            if not within:
                self._telling.discard(here)
