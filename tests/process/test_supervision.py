"""Health, draining, restarts and recycling of workers, and traces of requests."""

import asyncio
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcinfer import (
    ClosedError,
    Master,
    McinferError,
    PredictError,
    PredictTimeoutError,
    RestartPolicy,
    Timeouts,
    WorkerDiedError,
)
from mcinfer.errors import ReadyTimeoutError
from mcinfer.requests.tensors import Arrays
from mcinfer.statistics import Health, RequestTrace
from tests.process.models import FakeModel, act, assert_answers, fake_master, rows
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import (
    HeldPipe,
    all_gone,
    pids,
    running,
    settle,
    states,
    stop,
    wait_for_states,
    wait_until,
)

MODEL = "model1.json"
SLOW = -1.0
"""The first number of the request that a test is about."""

NO_BUDGET = RestartPolicy(budget=0, backoff_limit=3600.0)
"""A worker that dies is not started again while a test lasts, unless it is asked for."""

QUICK_PROBES = RestartPolicy(budget=2, backoff=0.01, backoff_limit=0.2)


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcinfer.master")


@contextmanager
def traffic(master: Master, threads: int = 2) -> Iterator[None]:
    """Requests without end from so many threads; none of them may fail."""
    over = threading.Event()
    failures: list[BaseException] = []
    answered = [0] * threads

    def ask(index: int) -> None:
        inputs = rows(index + 1, first=100.0 * index)
        try:
            while not over.is_set():
                assert_answers(master.predict(inputs, timeout=20.0), inputs)
                assert_answers(master.submit(inputs, timeout=20.0).result(), inputs)
                answered[index] += 1
                over.wait(0.005)  # the pace of the requests, and no wait for anything
        except BaseException as exc:
            failures.append(exc)

    asking = [threading.Thread(target=ask, args=(index,)) for index in range(threads)]
    for thread in asking:
        thread.start()
    try:
        wait_until(lambda: failures or all(answered))
        yield
        before = [*answered]
        wait_until(lambda: failures or all(n > b for n, b in zip(answered, before, strict=True)))
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert not failures


# Health.


def test_health_is_known_from_the_start_to_the_end(
    fake_model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master, pipe = fake_master(fake_model(build=f"told:{tmp_path}/"), 2), HeldPipe(tmp_path / "0")
    with pytest.raises(ClosedError):
        master.wait_ready(0.1)
    with running(master.start):
        pipe.wait()
        health = master.health()
        assert (health.state, health.workers) == ("starting", 2)
        assert "is starting (building)" in str(health)
        pipe.tell("")
        assert master.wait_ready().state == "ready"
    with closing(master):
        health = master.health()
        assert (health.state, health.reasons, health.serving) == ("ready", (), 2)
        assert master.statistics().health == health
        killed, said = pids(master)[0], list[Health]()
        os.kill(killed, signal.SIGKILL)

        def is_degraded() -> bool:
            said.append(master.health())
            return said[-1].state == "degraded"

        wait_until(is_degraded)
        health = said[-1]
        assert health.serving == 1
        [reason] = health.reasons
        assert reason.startswith("worker 0 (cpu:0")
        assert_answers(master.predict(rows(3)), rows(3))
        assert master.wait_ready(20.0) == master.health()
    health = master.health()
    assert (health.state, health.reasons, health.serving) == ("closed", (), 0)
    with pytest.raises(ClosedError):
        master.wait_ready()
    with pytest.raises(ClosedError):
        master.restart_workers()
    assert f"worker 0 (cpu:0, pid {killed}) killed by SIGKILL" in caplog.text
    said_of = [r for r in caplog.records if r.getMessage().startswith(f"{MODEL} on cpu:0, cpu:1: ")]
    [warning] = [r for r in said_of if "degraded: 1 of 2 workers serve" in r.getMessage()]
    [again] = [
        r for r in said_of if re.search(r"ready again, after \d+\.\d s: 2 of 2", r.getMessage())
    ]
    assert warning.levelno == again.levelno == logging.WARNING


def test_health_names_a_worker_that_is_stopped_while_idle(
    fake_model: FakeModel,
) -> None:
    with fake_master(fake_model(), 2) as master:
        stopped = pids(master)[1]
        stop(stopped)
        health = master.health()
        assert (health.state, health.serving) == ("degraded", 1)
        assert health.reasons == (f"worker 1 (cpu:1, pid {stopped}) is stopped by a signal",)
        with pytest.raises(ReadyTimeoutError, match=rf"within 0\.2 s: .*pid {stopped}\) is stop"):
            master.wait_ready(0.2)
        os.kill(stopped, signal.SIGCONT)
        assert master.wait_ready(20.0).serving == 2
        assert_answers(master.predict(rows(4)), rows(4))


def test_requests_fail_at_once_until_a_worker_can_load_the_model_again(
    fake_model: FakeModel,
) -> None:
    model = fake_model()
    content = model.read_text("utf-8")
    with fake_master(model, 1, restart=QUICK_PROBES) as master:
        model.unlink()
        for pid in pids(master):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: master.health().state == "failed")
        tried = sum(worker.restarts for worker in master.statistics().workers)
        with pytest.raises(WorkerDiedError, match=model.name):
            master.predict(rows(1), timeout=math.inf)
        error = master.submit(rows(1)).exception(20.0)
        assert isinstance(error, WorkerDiedError)
        assert error.__traceback__ is None  # which would hold the request
        assert master.statistics().refused["no_worker"] == 2
        with pytest.raises(ReadyTimeoutError, match=rf"failed: 0 of 1 .*{model.name}"):
            master.wait_ready(0.1)
        wait_until(
            lambda: sum(w.restarts for w in master.statistics().workers) > tried, timeout=60.0
        )
        assert master.health().state == "failed"
        model.write_text(content, "utf-8")
        assert master.wait_ready(60.0).serving == 1
        assert_answers(master.predict(rows(4)), rows(4))


def test_callback_may_not_wait(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 1) as master:
        calls = master.wait_ready, master.restart_workers, lambda: master.predict(rows(1))
        for call in calls:
            outcome: Future[object] = Future()
            [worker] = pids(master)
            stop(worker)  # so that the answer does not come before the callback
            master.submit(rows(1)).add_done_callback(lambda _: settle(outcome, call))  # noqa: B023
            os.kill(worker, signal.SIGCONT)
            with pytest.raises(McinferError, match="callback"):
                outcome.result(20.0)


def test_log_has_the_stacks_of_runs_that_hang_and_crash(
    fake_model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fake_model(when={"-1": "hang:60", "-2": f"once:{tmp_path / 'crashed'}:segfault"})
    with fake_master(model, 1, timeouts=Timeouts(cancel_grace=2.0)) as master:
        [hung] = pids(master)
        with pytest.raises(PredictTimeoutError):
            master.predict(act(SLOW), timeout=0.2)
        wait_until(lambda: "has not stopped a run" in str(master.health()))
        wait_until(lambda: all_gone([hung]))
        master.wait_ready(20.0)
        [crashed] = pids(master)
        assert_answers(master.predict(act(-2.0)), act(-2.0))
    said = [record.getMessage() for record in caplog.records]
    ended = f"{MODEL} on cpu:0: worker 0 (cpu:0, pid {hung}): did not stop in time; it is ended"
    [killed] = [text for text in said if f"pid {hung}) killed by SIGKILL" in text]
    assert caplog.records[said.index(ended)].levelno == logging.ERROR
    assert said.index(ended) < said.index(killed)
    assert "where it was:" in killed
    died = f"{MODEL} on cpu:0: worker 0 (cpu:0, pid {crashed}) killed by SIGSEGV; where it was:"
    [crash] = [text for text in said if text.startswith(died)]
    assert "Fatal Python error: Segmentation fault" in crash
    assert "in _act" in killed
    assert "in _act" in crash


# Requests of workers that die or stop.


_GARBAGE = """
import os, sys
folder = os.path.dirname(__file__)
sys.path.remove(folder)
del sys.modules[__name__]
import msgpack

class Packer(msgpack.Packer):
    def pack(self, value):
        if type(value) is dict and "providers" in value:  # BUILD_FINISH
            os.mkdir(os.path.join(folder, "sent"))
            return b"\\xc1" * 300
        return super().pack(value)

if not os.path.exists(os.path.join(folder, "sent")):
    msgpack.Packer = Packer
"""
"""In the place of msgpack, in a worker: the first of them sends bytes that are no message."""


def test_worker_that_breaks_the_protocol_is_replaced_and_its_request_answered(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "msgpack.py").write_text(_GARBAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "shim"))
    with fake_master(fake_model(), 1, restart=QUICK_PROBES) as master:
        assert_answers(master.predict(rows(2), timeout=20.0), rows(2))
        assert master.statistics().workers[0].restarts == 1
    assert "breaks the protocol: not a MessagePack message" in caplog.text


def test_request_that_kills_three_workers_is_given_up_and_names_them(fake_model: FakeModel) -> None:
    with fake_master(fake_model(when={"-1": "segfault"}), 2) as master:
        first, second = pids(master)
        with pytest.raises(WorkerDiedError) as caught:
            master.submit(act(SLOW)).result(timeout=20.0)
        text = str(caught.value)
        assert "given up after 3 workers died on it" in text
        assert f"worker 0 (cpu:0, pid {first}) killed by SIGSEGV" in text
        assert f"worker 1 (cpu:1, pid {second}) killed by SIGSEGV" in text
        # The pool still serves, at first without a worker, then with those that were started again.
        assert_answers(master.predict(rows(4)), rows(4))
        wait_for_states(master, "ready", "ready")
        assert_answers(master.predict(rows(4)), rows(4))


def test_requests_behind_a_worker_that_is_stopped_are_answered_after_its_end(
    fake_model: FakeModel,
) -> None:
    model = fake_model(when={"-1": "stop"})
    with fake_master(model, 2, timeouts=Timeouts(cancel_grace=0.1, close=0.2)) as master:
        # So that it is known that runs are short, and a busy worker has some ahead.
        while min(worker.completed for worker in master.statistics().workers) < 1:
            wait_for_futures([master.submit(rows(1)) for _ in range(8)], timeout=20.0)
        stopped = master.submit(act(-1.0), timeout=1.0)
        beside = [master.submit(rows(1, first=float(i))) for i in range(20)]
        for i, future in enumerate(beside):
            assert_answers(future.result(timeout=20.0), rows(1, first=float(i)))
        with pytest.raises(PredictTimeoutError):
            stopped.result(timeout=20.0)
        wait_for_states(master, "ready", "ready")


# Draining.


def test_draining_answers_all_that_was_accepted_and_takes_nothing_more(
    fake_model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_master(fake_model(run="sleep:0.02"), 2) as master:
        workers = pids(master)
        futures = [master.submit(rows(2, first=float(n))) for n in range(20)]
        with running(lambda: master.close(drain=True)) as drained:
            wait_until(lambda: master.health().state in ("closing", "closed"))
            for call in (master.predict, master.submit):
                with pytest.raises(ClosedError, match=r"closing|closed"):
                    call(rows(1))
            with pytest.raises(ClosedError):
                master.restart_workers()
            drained.result(20.0)
        for number, future in enumerate(futures):
            assert_answers(future.result(0.0), rows(2, first=float(number)))
        assert master.health().state == "closed"
    for pid in workers:
        assert f"pid {pid}) exited with status 0" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_leaving_the_with_statement_waits_for_each_request_as_long_as_it_has(
    fake_model: FakeModel, is_async: bool
) -> None:
    master = fake_master(fake_model(when={"-1": "sleep:60"}), 1)

    def ask() -> tuple["Future[Arrays]", "Future[Arrays]"]:
        return master.submit(act(SLOW), timeout=0.2), master.submit(rows(1))

    async def ask_within() -> tuple["Future[Arrays]", "Future[Arrays]"]:
        async with master:
            return ask()

    if is_async:
        hung, waiting = asyncio.run(ask_within())
    else:
        with master:
            hung, waiting = ask()
    assert isinstance(hung.exception(0.0), PredictTimeoutError)
    assert_answers(waiting.result(0.0), rows(1))
    assert master.health().state == "closed"


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_leaving_the_with_statement_by_an_exception_ends_it_at_once(
    fake_model: FakeModel, is_async: bool
) -> None:
    master = fake_master(fake_model(run="sleep:60"), 1)
    futures = []

    async def leave() -> None:
        async with master:
            futures.append(master.submit(rows(1)))
            raise KeyError

    with pytest.raises(KeyError):  # noqa: PT012 it comes out of the with statement
        if is_async:
            asyncio.run(leave())
        with master:
            futures.append(master.submit(rows(1)))
            raise KeyError
    assert isinstance(futures[0].exception(0.0), ClosedError)


@pytest.mark.parametrize("way", ["with", pytest.param("async with", marks=pytest.mark.thorough)])
def test_ctrl_c_ends_the_draining(fake_model: FakeModel, way: str) -> None:
    text = """
import asyncio, threading
master = mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never")
def begin():
    global futures
    say_pids(master)
    futures = [master.submit(X) for _ in range(5)]
    threading.Thread(target=tell).start()
def tell():
    while master.health().state != "closing":
        time.sleep(0.005)
    say("draining")
async def in_loop():
    async with master:
        begin()
try:
    if sys.argv[2] == "with":
        with master:
            begin()
    else:
        asyncio.run(in_loop())
except KeyboardInterrupt:
    say(*{type(future.exception(0)).__name__ for future in futures}, master.health().state)
"""
    with Program(PREAMBLE + text, fake_model(run="sleep:60"), way) as program:
        workers = program.pids()
        assert program.line() == "draining"
        program.interrupt()
        ended = program.wait()
        assert (ended.status, ended.out, ended.err) == (0, "ClosedError closed\n", "")
        assert all_gone(workers)


# Replacing all workers.


def test_workers_are_replaced_under_traffic_and_no_request_fails(fake_model: FakeModel) -> None:
    with fake_master(fake_model(), 2, restart=NO_BUDGET) as master, traffic(master):
        seen = {*pids(master)}
        master.restart_workers(20.0)
        assert not seen & {*pids(master)}
        assert [w.restarts for w in master.statistics().workers] == [1, 1]
        assert [w.last_error for w in master.statistics().workers] == ["", ""]
        assert master.health().state == "ready"


def test_replacing_that_takes_too_long_goes_on_and_who_comes_meanwhile_waits_for_it(
    fake_model: FakeModel,
) -> None:
    with fake_master(fake_model(), 2, timeouts=Timeouts(close=30.0)) as master:
        first, second = pids(master)
        stop(first)
        with pytest.raises(ReadyTimeoutError, match=r"not all .* within 0\.2 s"):
            master.restart_workers(0.2)
        assert_answers(master.predict(rows(4), timeout=20.0), rows(4))
        with running(lambda: master.restart_workers(20.0)) as restarted:
            os.kill(first, signal.SIGCONT)
            restarted.result(20.0)
        assert not {first, second} & {*pids(master)}


@pytest.mark.parametrize(
    "limit",
    [pytest.param({"max_requests": 5}, marks=pytest.mark.thorough), {"max_memory_bytes": 1}],
)
def test_workers_that_are_worn_are_recycled_and_never_together(
    fake_model: FakeModel, limit: dict[str, Any]
) -> None:
    """Every process has more than a byte of its own."""
    with fake_master(fake_model(), 2, restart=replace(NO_BUDGET, **limit)) as master:
        before = {*pids(master)}
        fewest = 2
        with traffic(master):

            def both_were_replaced() -> bool:
                nonlocal fewest
                statistics = master.statistics()
                fewest = min(fewest, statistics.health.serving)
                return all(worker.restarts >= 1 for worker in statistics.workers)

            wait_until(both_were_replaced)
        assert fewest == 1
        assert not before & {*pids(master)}


# Traces.

CALLER: ContextVar[str] = ContextVar("CALLER", default="main")


def called(name: str, function: Callable[[], object]) -> None:
    """Call it as this caller, whatever comes of it."""
    token = CALLER.set(name)
    with suppress(McinferError, CancelledError):
        outcome = function()
        if isinstance(outcome, Future):
            outcome.exception(20.0)
    CALLER.reset(token)


def test_every_request_is_traced_once_in_the_context_of_its_call(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    traces: list[tuple[str, RequestTrace]] = []

    def hook(trace: RequestTrace) -> None:
        traces.append((CALLER.get(), trace))

    dies = tmp_path / "dies"
    model = fake_model(when={"-1": "fail", "-2": "sleep:60", "-3": f"once:{dies}:kill"})
    with fake_master(model, 2, trace=hook) as master:

        def cancelled() -> "Future[Arrays]":
            future = master.submit(act(-2.0))
            wait_until(lambda: "busy" in states(master))
            future.cancel()
            return future

        called("predict", lambda: master.predict(rows(5)))
        called("submit", lambda: master.submit(rows(2)))
        called("nothing", lambda: master.predict(rows(0)))
        called("fails", lambda: master.predict(act(-1.0)))
        called("cancelled", cancelled)
        called("late", lambda: master.predict(act(-2.0), timeout=0.1))
        called("dies", lambda: master.submit(act(-3.0)))
        called("invalid", lambda: master.predict({"z": rows(1)["x"]}))
        workers = {worker.pid for worker in master.statistics().workers}

        wait_until(lambda: len(traces) == 6)
        of = dict(traces)
        assert len({trace.request for trace in of.values()}) == 6
        for trace in of.values():
            assert trace.called <= trace.queued <= trace.settled <= trace.joined <= time.monotonic()
            for run in trace.shards:
                assert trace.queued <= run.sent <= run.answered <= trace.settled
                assert 0.0 <= run.run_seconds <= run.answered - run.sent
        whole = of["predict"]
        assert (whole.outcome, whole.error, whole.rows) == ("succeeded", None, 5)
        assert [(run.shard, run.attempts) for run in whole.shards] == [(0, 1), (1, 1)]
        assert sorted(run.device for run in whole.shards) == ["cpu:0", "cpu:1"]
        single = of["submit"]
        assert (single.outcome, single.rows, len(single.shards)) == ("succeeded", 2, 1)
        failed = of["fails"]
        assert (failed.outcome, failed.shards) == ("failed", ())
        assert isinstance(failed.error, PredictError)
        assert of["cancelled"].outcome == "cancelled"
        late = of["late"]
        assert isinstance(late.error, PredictTimeoutError)
        assert late.settled - late.called >= 0.1
        again = of["dies"]
        assert (again.outcome, again.shards[0].attempts) == ("succeeded", 2)
        assert again.shards[0].pid in workers
