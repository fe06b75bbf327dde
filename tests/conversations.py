"""One side of the talk between a master and a worker, as a model: its place in the table, and its runs."""

from collections import deque
from dataclasses import dataclass, field

from mcinfer.errors import ProtocolError
from mcinfer.protocol import (
    MAX_RUNS,
    TRANSITIONS,
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
            self.begin_run(message.request, message.shard)
        elif isinstance(message, (Reply, Error)):
            answers = (message.request, message.shard)
            expected = self.runs[0] if self.runs else (None, None)
            if answers != expected:
                raise ProtocolError(
                    f"{type(message).__name__} for request and shard {answers}, "
                    f"expected {expected} in state {self.state}"
                )
            if self.runs:
                self.runs.popleft()
            if not self.runs:
                self.state = after
        else:
            self.state = after

    def begin_run(self, request: int, shard: int) -> None:
        """Begin a run, as PREDICT does: for the side that has not decoded the tensors.

        Raises:
            ProtocolError: No run may begin now.
        """
        after = TRANSITIONS[self.state].get(Predict)
        if after is None or len(self.runs) >= MAX_RUNS:
            raise ProtocolError(
                f"Predict may not come in state {self.state} with {len(self.runs)} runs"
            )
        self.runs.append((request, shard))
        self.state = after
