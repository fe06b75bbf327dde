"""One side of the talk between a master and a worker, as a model: its place in the table, and its runs."""

from collections import deque
from dataclasses import dataclass, field

from mcinfer.errors import ProtocolError
from mcinfer.protocol import (
    MAX_RUNS,
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

    `runs` has request and shard of each unanswered run, the current run first.
    """

    state: WorkerState = WorkerState.SPAWNED
    runs: deque[tuple[int, int]] = field(default_factory=deque)

    def advance(self, message: Message) -> None:
        """Take a message that was sent or received.

        Raises:
            ProtocolError: It may not come now, or answers another run than the current one.
        """
        after = state_after(self.state, type(message))
        if isinstance(message, (Predict, PredictJoined)):
            if len(self.runs) >= MAX_RUNS:
                raise ProtocolError(f"{MAX_RUNS} runs are to be answered already")
            self.runs.append((message.request, message.shard))
        elif isinstance(message, (Reply, Error)):
            answers = (message.request, message.shard)
            expected = self.runs.popleft() if self.runs else (None, None)
            if answers != expected:
                raise ProtocolError(f"an answer for {answers}, expected {expected}")
            after = self.state if self.runs else after
        self.state = after
