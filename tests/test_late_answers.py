"""Tests of requests of which a worker has a late run: another one was given that shard as well."""

import gc
import socket
from itertools import count

import numpy as np
import pytest

from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.protocol import Build, BuildFinish, Error, Hello, Message, Predict, Reply, decode
from mcinfer.requests.planner import Planner
from mcinfer.requests.request import Request
from mcinfer.runtime.cancels import Cancels
from mcinfer.scheduler.actions import Action, Release, SendPredict, Settle
from mcinfer.scheduler.scheduler import LONG_RUN, SHORT_RUN, Scheduler
from mcinfer.shm.arena import Arena
from mcinfer.shm.block import Block
from mcinfer.specs import ModelSpec, TensorSpec

ROWS = 4
INPUTS = (("x", "float32", ("batch",)),)
OUTPUTS = (("y", "float32", ("batch",)),)
MODEL = ModelSpec(
    inputs=(TensorSpec(name="x", dtype=np.dtype(np.float32), shape=("batch",)),),
    outputs=(TensorSpec(name="y", dtype=np.dtype(np.float32), shape=("batch",)),),
)
SHORT = SHORT_RUN / 10


class Pool:
    """A scheduler of workers whose runs are known to be short, at a time that the test says."""

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            [Build(model="", engine="fake", device=f"cpu:{i}") for i in range(workers)],
            timeouts=Timeouts(),
            restart=RestartPolicy(),
            limits=Limits(),
        )
        self.scheduler.handle_start(0.0)
        for index in range(workers):
            self.scheduler.handle_started(index, 100 + index)
            self.say(index, Hello(version=1, pid=100 + index, token=""))
        for index in range(workers):
            self.say(
                index,
                BuildFinish(inputs=INPUTS, outputs=OUTPUTS, providers=("fake",), seconds=0.0),
            )
        for index in range(workers):
            self.scheduler.handle_request(self.now, 900 + index, (1,), 60.0)
        for index in range(workers):
            self.say(index, Reply(request=900 + index, shard=0, outputs=(), seconds=SHORT))

    def say(self, worker: int, message: Message) -> list[Action]:
        return self.scheduler.handle_message(self.now, worker, message)

    def assign(self, number: int, shards: int) -> list[int]:
        given = self.scheduler.assign(self.now, number, (1,) * shards, self.now, 60.0, 0)
        assert given is not None
        return [worker.index for worker in given]


def test_request_is_held_for_a_late_run_when_its_other_shard_is_answered_last() -> None:
    pool = Pool(3)
    assert pool.assign(0, 1) == [0]
    assert pool.assign(1, 1) == [1]
    assert pool.assign(2, 1) == [2]
    assert pool.assign(3, 2) == [0, 1]  # behind two runs
    pool.say(1, Reply(request=1, shard=0, outputs=(), seconds=SHORT))
    pool.say(2, Reply(request=2, shard=0, outputs=(), seconds=SHORT))
    pool.now = LONG_RUN * 1.1
    sent = [a for a in pool.scheduler.handle_time(pool.now) if isinstance(a, SendPredict)]
    assert sent == [SendPredict(worker=2, members=((3, 0),), fresh=True)]
    pool.say(2, Reply(request=3, shard=0, outputs=(), seconds=SHORT))
    assert pool.scheduler.take_reply(1, 3, 1, SHORT, pool.now) is None  # worker 0 may write to it
    actions = pool.say(1, Reply(request=3, shard=1, outputs=(), seconds=SHORT))
    assert actions == [Settle(request=3)]
    pool.say(0, Reply(request=0, shard=0, outputs=(), seconds=LONG_RUN))
    skipped = Error(request=3, shard=0, kind="cancelled", text="")
    assert pool.say(0, skipped) == [Release(request=3)]
    assert len(pool.scheduler.table) == 0


def test_seconds_that_a_worker_says_are_no_more_than_there_were() -> None:
    pool = Pool(1)
    pool.assign(0, 1)
    pool.now = 0.5
    assert pool.scheduler.take_reply(0, 0, 0, 1e308, pool.now) is not None
    (worker,) = pool.scheduler.lives.statistics()
    assert worker.busy_seconds <= 0.5


# The request.


class Requests:
    """A planner, and the arena that it has memory of."""

    def __init__(self) -> None:
        self.arena = Arena(1 << 20, dropped=lambda _: None)
        self.planner = Planner(MODEL, self.arena, lambda sizes, _: self.arena.allocate_all(sizes))
        self.numbers = count()

    def request(self) -> Request:
        request = self.planner.request({"x": np.zeros(ROWS, np.float32)}, 1, None, 0.0)
        request.number = next(self.numbers)
        return request

    def place(self, request: Request, shard: int = 0) -> tuple[int | None, int]:
        """Where a shard's output is to go."""
        message = decode(request.message(shard))
        assert isinstance(message, Predict)
        return message.outputs[0][3:]

    def close(self) -> None:
        self.planner.close()
        self.arena.close()


def own_block(_: int) -> Block:
    block = Block.create(-1, ROWS * 4)
    memoryview(block.memory(0, ROWS * 4)).cast("B")[:] = np.arange(ROWS, dtype=np.float32).tobytes()
    return block


def test_memory_that_a_late_run_may_write_to_is_not_given_to_the_next_request() -> None:
    requests = Requests()
    request = requests.request()
    place = requests.place(request)  # one worker has it
    request.message(0, fresh=True)  # and another one
    answer = (("y", "float32", (ROWS,), -1, 0),)
    request.take(0, answer, own_block, 1, 1 << 20)
    request.settle()
    assert request.result()["y"].tolist() == [0, 1, 2, 3]
    gc.collect()
    assert requests.place(requests.request()) != place
    request.release()
    gc.collect()
    assert requests.place(requests.request()) == place
    requests.close()


def test_shard_that_is_sent_without_fresh_memory_again_is_answered_in_place() -> None:
    requests = Requests()
    request = requests.request()
    request.message(0, fresh=True)
    assert not request.is_laid_out(0)
    request.message(0)  # the late run has ended meanwhile, and the worker with fresh memory died
    assert request.is_laid_out(0)
    request.take(0, (), own_block, 2, 0)
    request.settle()
    assert request.result()["y"].shape == (ROWS,)
    requests.close()


def test_cancellation_of_a_worker_that_has_closed_raises_no_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = Cancels.pair()
    flags: list[int] = []

    class Watched(socket.socket):
        def send(self, data: bytes, flag: int = 0) -> int:  # type: ignore[override]
            flags.append(flag)
            return super().send(data, flag)

    watched = Watched(fileno=ours._end.detach())
    monkeypatch.setattr(ours, "_end", watched)
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send(1, 0)
    assert flags[0] & socket.MSG_NOSIGNAL
    ours.close()
