"""Many callers at once: threads, asyncio, and futures' callbacks."""

import asyncio
import inspect
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from mcinfer import ClosedError, EngineOptions, Limits, Master, Timeouts
from mcinfer.config import INLINE
from mcinfer.requests.tensors import Arrays
from tests.process.models import (
    FakeModel,
    SharedMaster,
    act,
    assert_answers,
    fake_master,
    rows,
)
from tests.process.waiting import pids, settle, states, wait_for_states, wait_until


@pytest.fixture(scope="module", params=[2, INLINE])
def pool_of_two(request: pytest.FixtureRequest, shared_master: SharedMaster) -> Master:
    """Also with time-outs as long as a float can say."""
    timeouts = Timeouts(start=1e9, predict=1e9, close=1e9)
    when = {"-1": "sleep:60", "-2": "sleep:0.1"}
    options: dict[str, Any] = {"acts": {"when": when}, "timeouts": timeouts}
    if (
        request.param == INLINE
    ):  # also of two threads, and with runs that no event loop makes by itself
        options["acts"]["run"] = "sleep:0.0005"
        options["options"] = EngineOptions(concurrent_runs=2)
    return shared_master(request.param, **options)


def test_sixty_four_threads_get_each_its_own_answers(pool_of_two: Master) -> None:
    threads, master = 64, pool_of_two
    together, before = threading.Barrier(threads), pool_of_two.statistics()

    def ask(thread: int) -> None:
        chance = random.Random(thread)  # noqa: S311 no secret
        together.wait()
        for call in range(6):
            inputs = rows(chance.randint(1, 20), first=1000.0 * thread + call)
            if chance.random() < 0.5:
                assert_answers(master.predict(inputs), inputs)
            else:
                assert_answers(master.submit(inputs).result(timeout=40.0), inputs)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(ask, thread) for thread in range(threads)]:
            done.result(timeout=40.0)
    statistics = master.statistics()
    assert statistics.accepted - before.accepted == threads * 6
    assert statistics.succeeded - before.succeeded == threads * 6
    assert (statistics.in_flight, statistics.queued_shards) == (0, 0)


def test_task_that_is_cancelled_stops_its_run_and_no_other(pool_of_two: Master) -> None:
    master = pool_of_two

    async def ask() -> Arrays:
        slow = asyncio.create_task(master.predict_async(act(-1.0)))
        beside = asyncio.create_task(master.predict_async(rows(1)))
        await asyncio.sleep(0)
        await beside
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return await master.predict_async(rows(2))

    before, cancelled = pids(master), master.statistics().cancelled
    assert_answers(asyncio.run(ask()), rows(2))
    wait_until(lambda: {*states(master)} == {"ready"})
    assert pids(master) == before
    assert master.statistics().cancelled == cancelled + 1


def test_task_that_waits_for_memory_leaves_the_loop_free_and_has_its_inputs_already(
    fake_model: FakeModel,
) -> None:
    limits = Limits(memory_bytes=4096)

    async def ask() -> Arrays:
        inputs = rows(100)
        waiting = asyncio.create_task(master.predict_async(inputs))
        for _ in range(20):  # the loop goes on
            await asyncio.sleep(0.01)
        assert not waiting.done()
        inputs["x"][:] = -1
        held.clear()
        return await waiting

    with fake_master(fake_model(), 1, limits=limits) as master:
        held = master.allocate({"x": (200, 4)})
        assert_answers(asyncio.run(ask()), rows(100))


@pytest.mark.parametrize("devices", [1, INLINE])
def test_close_in_a_callback_ends_the_pool(fake_model: FakeModel, devices: Any) -> None:
    master = fake_master(fake_model(when={"-1": "sleep:0.1"}), devices).start()
    outcome: Future[object] = Future()
    master.submit(act(-1.0)).add_done_callback(lambda _: settle(outcome, master.close))
    outcome.result(timeout=20.0)
    wait_for_states(master, "gone")
    with pytest.raises(ClosedError):
        master.predict(rows(1))


def test_callbacks_that_submit_again_and_again_do_not_nest(pool_of_two: Master) -> None:
    limit = 400
    depths: list[int] = []
    over = threading.Event()

    def next_one(_: "Future[Arrays]") -> None:
        # Takes longer than a worker does, so that the next answer is always there already.
        depths.append(len(inspect.stack(0)))
        if len(depths) >= limit:
            over.set()
        if not over.is_set():
            pool_of_two.submit(rows(1)).add_done_callback(next_one)

    for _ in range(20):
        pool_of_two.submit(rows(1)).add_done_callback(next_one)
    assert over.wait(20.0)
    assert max(depths) < 100
