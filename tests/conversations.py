"""One side of the talk between a master and a worker, as a model: its place in the table, and its runs."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mcinfer.errors import ProtocolError
from mcinfer.protocol import (
    MAX_RUNS,
    BuildFinish,
    Error,
    Message,
    Predict,
    PredictJoined,
    Reply,
    WorkerState,
    state_after,
)


@dataclass(slots=True)
class Conversation:
    """One worker's place in `TRANSITIONS`, as one side sees it.

    `runs` has request and shard of each unanswered run, in the order in which they begin; the worker executes
    `concurrent` of them at once.
    """

    state: WorkerState = WorkerState.SPAWNED
    runs: deque[tuple[int, int]] = field(default_factory=deque)
    concurrent: int = 1

    def advance(self, message: Message) -> None:
        """Take a message that was sent or received.

        Raises:
            ProtocolError: It may not come now, or answers a run that has not begun.
        """
        after = state_after(self.state, type(message))
        if isinstance(message, (Predict, PredictJoined)):
            if len(self.runs) >= MAX_RUNS:
                raise ProtocolError(f"{MAX_RUNS} runs are to be answered already")
            self.runs.append((message.request, message.shard))
        elif isinstance(message, (Reply, Error)):
            answers: Any = (message.request, message.shard)
            begun = [*self.runs][: self.concurrent]
            if answers in begun:
                self.runs.remove(answers)
            elif begun or answers != (None, None):
                raise ProtocolError(f"an answer for {answers}, expected one of {begun}")
            after = self.state if self.runs else after
        elif isinstance(message, BuildFinish):
            self.concurrent = message.concurrent
        self.state = after
