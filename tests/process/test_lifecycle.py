"""Start and close in every order, the output of workers, and intruders at the socket."""

import copy
import gc
import logging
import os
import pickle
import random
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from mcinfer import ClosedError
from mcinfer.config import INLINE
from mcinfer.protocol import VERSION, BuildFinish, Error, Hello, Reply, encode
from mcinfer.requests.tensors import Arrays
from mcinfer.statistics import RequestTrace
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.waiting import all_gone, loop_of, pids, wait_until


@pytest.mark.parametrize("devices", [2, INLINE])
def test_every_call_before_start_and_after_close_says_so_and_close_is_for_many(
    fake_model: FakeModel, devices: Any
) -> None:
    master = fake_master(fake_model(), devices)
    calls = (
        lambda: master.predict(rows(1)),
        lambda: master.submit(rows(1)),
        lambda: master.allocate({"x": (1, 4)}),
    )
    for use in (*calls, lambda: master.inputs, lambda: master.outputs):
        with pytest.raises(ClosedError, match="start"):
            use()
    assert {worker.state for worker in master.statistics().workers} == {"gone"}
    with master:
        with pytest.raises(ClosedError, match="once"):
            master.start()
        assert_answers(master.predict(rows(1)), rows(1))
        workers = pids(master)
        threads = [threading.Thread(target=master.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        master.close()
        for thread in threads:
            thread.join()
    assert devices == INLINE or all_gone(workers)
    for use in calls:
        with pytest.raises(ClosedError, match="closed"):
            use()
    with pytest.raises(ClosedError, match="once"):
        master.start()
    assert {worker.state for worker in master.statistics().workers} == {"gone"}
    assert master.statistics().succeeded == 1
    assert master.inputs[0].name == "x"


def test_close_that_overtakes_a_start_ends_it_and_leaves_nothing(fake_model: FakeModel) -> None:
    chance = random.Random(0)  # noqa: S311 no secret
    model = fake_model(build="sleep:30")
    for attempt in range(5):
        master = fake_master(model, 1)
        # From before its first step until its workers load the model.
        delay = chance.random() * (0.005 if attempt % 4 else 0.3)
        closer = threading.Timer(delay, master.close, (0.0,))
        closer.start()
        with pytest.raises(ClosedError):
            master.start()
        closer.join(20.0)
        assert not closer.is_alive()
        assert not [w for w in master.statistics().workers if w.pid is not None]


def test_master_that_is_garbage_ends_its_workers_and_its_requests(fake_model: FakeModel) -> None:
    master = fake_master(fake_model(when={"-1": "sleep:60"}), 1).start()
    workers = pids(master)
    outputs = master.predict(rows(2))
    future: Future[Arrays] = master.submit(act(-1.0))
    del master
    gc.collect()
    assert isinstance(future.exception(timeout=20.0), ClosedError)
    wait_until(lambda: all_gone(workers))
    assert_answers(outputs, rows(2))


class Owner:
    """Owns a pool, and hears of its requests by a method of its own."""

    def __init__(self, model: Path) -> None:
        self.traces: list[RequestTrace] = []
        self.answered: list[object] = []
        self.master = fake_master(model, 1, trace=self.hear).start()

    def hear(self, trace: RequestTrace) -> None:
        self.traces.append(trace)

    def ask(self) -> None:
        self.master.submit(rows(1)).add_done_callback(self.answered.append)
        wait_until(lambda: self.answered and self.traces)


def test_pool_whose_owner_is_garbage_ends_though_it_hears_of_requests(
    fake_model: FakeModel,
) -> None:
    owner = Owner(fake_model())
    workers = pids(owner.master)
    owner.ask()
    del owner
    gc.collect()
    wait_until(lambda: all_gone(workers))


@pytest.mark.parametrize("devices", [1, INLINE])
def test_hook_that_only_the_master_holds_is_called_as_long_as_that_lives(
    fake_model: FakeModel, devices: Any
) -> None:
    traces: list[RequestTrace] = []
    with fake_master(fake_model(), devices, trace=lambda trace: traces.append(trace)) as master:
        for count in range(1, 4):
            master.predict(rows(1))
            gc.collect()
            wait_until(lambda count=count: len(traces) == count)  # type: ignore[misc]
        master.predict(rows(1))
    assert len(traces) == 4


def test_master_that_is_to_be_pickled_says_what_to_do_instead(fake_model: FakeModel) -> None:
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"make one in each process, or use mcinfer\.ort"):
            copied(fake_master(fake_model(), 1))


def test_what_workers_print_comes_out_as_it_is(
    fake_model: FakeModel, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the last words of one that crashes: its run is tried three times."""
    model = fake_model(build="print:hello", run="print:a run", when={"-1": "segfault"})
    with fake_master(model, 1) as master:
        assert master.submit(act(-1.0)).exception(timeout=20.0) is not None
        master.wait_ready(20.0)
    assert capfd.readouterr() == ("hello\na run\n" * 3 + "hello\n", "")


def test_pool_speaks_through_logging_alone(
    fake_model: FakeModel, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with fake_master(fake_model(when={"-1": "fail"}), 1) as master:
        (worker,) = pids(master)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: master.statistics().workers[0].restarts == 1)
        assert master.submit(act(-1.0)).exception(timeout=20.0) is not None
    assert capfd.readouterr() == ("", "")
    assert f"worker 0 (cpu:0, pid {worker}) killed by SIGKILL" in caplog.text
    assert "asked to fail" in caplog.text
    assert {record.name for record in caplog.records} <= {"mcinfer.master", "asyncio"}


def test_intruder_at_the_socket_changes_nothing(fake_model: FakeModel) -> None:
    with (
        fake_master(fake_model(when={"-1": "sleep:0.5"}), 1) as master,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        workers = pids(master)
        socket.setsockopt(zmq.LINGER, 1000)
        # As a process of the same user that traces this one could.
        socket.connect(f"ipc:///proc/self/fd/{loop_of(master)._connections.transport.handle}")
        future = master.submit(act(-1.0))
        for data in (b"", b"\xc1", os.urandom(1000), msgpack.packb({"id": 2, "request": 0})):
            socket.send(data)
        socket.send_multipart([b"one", b"two", b"three"])
        for token in ("", "0" * 32, "é"):
            socket.send(encode(Hello(version=VERSION, pid=workers[0], token=token)))
        socket.send(encode(Reply(request=0, shard=0, outputs=(), seconds=0.0)))
        socket.send(encode(Error(request=0, shard=0, kind="predict", text="boo")))
        socket.send(encode(Error(kind="build", text="boo")))
        socket.send(encode(BuildFinish(inputs=(), outputs=(), providers=(), seconds=0.0)))
        assert_answers(future.result(timeout=20.0), act(-1.0))
        assert_answers(master.predict(rows(3)), rows(3))
        assert pids(master) == workers
        assert socket.poll(0) == 0
        statistics = master.statistics()
        assert (statistics.accepted, statistics.failed) == (2, 0)
