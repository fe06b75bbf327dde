"""Pools on emulated cards: one slab of weights for two workers, deaths of its maker, replaced weights."""

import gc
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from mcinfer import BuildError, EngineOptions, Master, PredictError, RestartPolicy
from mcinfer.cards.cuda import Card
from mcinfer.config import Device
from tests.emulated_cards import emulated_cards
from tests.process.waiting import pids, wait_until
from tests.text_models import text_model

SIDE = 256
SLAB_BYTES = 2 << 20
"""What the card gives for the 256 KiB of weights: its memory comes in pieces of that size."""

X = np.arange(4 * SIDE, dtype=np.float32).reshape(4, SIDE) / SIDE


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    """The first card, as this process sees it."""
    with emulated_cards() as cupy:
        card = Card.open(Device("cuda", 0))
        # The emulated driver keeps a thread for each stream, and the card the events of its blocks.
        card.follow(1)
        cupy.asarray(X)
        for block in [card.create(0, 1) for _ in range(3)]:
            block.close()

        def free() -> bool:  # once the stream has written the array
            cupy.get_default_memory_pool().free_all_blocks()
            return not taken(card)

        wait_until(free)
        yield card


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = x · W + b."""
    path = tmp_path_factory.mktemp("cards") / "model.onnx"
    side = f"float[batch,{SIDE}]"
    text = f"({side} x) => ({side} y) {{ xW = MatMul(x, W)  y = Add(xW, b) }}"
    weights = {"W": np.eye(SIDE, dtype=np.float32), "b": np.zeros(SIDE, np.float32)}
    onnx.save(text_model(text, weights), path)
    return path


@pytest.fixture(scope="module")
def pool(card: Card, model: Path, checked_together: ExitStack) -> Master:
    """Two workers of the first card; after them its memory is free."""

    def check() -> None:
        assert taken(card) == 0

    checked_together.callback(check)
    options = EngineOptions(allow_fallback=True, prepare="always", variable_weights=("b",))
    restart = RestartPolicy(budget=1000, backoff=0.0)
    master = Master(model, ["cuda:0"] * 2, options=options, restart=restart)
    return checked_together.enter_context(master)


def taken(card: Card) -> int:
    free, total = card.memory()
    return total - free


def slab_descriptors() -> list[int]:
    """This process's descriptors of memory of the slab's size: while one is open, its memory is not free."""
    mark = f"memfd:card-{os.environ['MCINFER_EMULATED_LEDGER']}-"
    with os.scandir("/proc/self/fd") as entries:
        descriptors = [int(entry.name) for entry in entries if mark in os.readlink(entry.path)]
    return [fd for fd in descriptors if os.fstat(fd).st_size == SLAB_BYTES]


def y(outputs: dict[str, Any]) -> NDArray[np.float32]:
    array: NDArray[np.float32] = outputs["y"]
    return array


def all_restarted(pool: Master, before: list[int]) -> Callable[[], bool]:
    """Whether other processes serve than those."""

    def condition() -> bool:
        return pool.health().state == "ready" and not {*pids(pool)} & {*before}

    return condition


def test_workers_of_a_card_hold_its_weights_once(pool: Master, card: Card) -> None:
    for _ in range(2):  # the second is cut
        np.testing.assert_array_equal(y(pool.predict({"x": X}, shards=2)), X)
    assert all(worker.runs for worker in pool.statistics().workers)
    assert taken(card) == SLAB_BYTES


def test_weights_are_replaced_while_requests_run(pool: Master) -> None:
    def ask(_: int) -> float:
        added = y(pool.predict({"x": X})) - X
        assert np.ptp(added) < 1e-3, "an answer of two versions"
        return round(float(added[0, 0]))

    with ThreadPoolExecutor(4) as callers:
        answers = callers.map(ask, range(60))
        for version in (1.0, 2.0, 3.0):
            pool.update_weights({"b": np.full(SIDE, version, np.float32)})
        assert {*answers} <= {0, 1, 2, 3}
    assert ask(0) == 3
    pool.update_weights({"b": np.zeros(SIDE, np.float32)})


def test_worker_without_room_for_tensors_of_the_card_fails_the_request_and_lives_on(
    pool: Master,
) -> None:
    before, cupy = pids(pool), import_module("cupy")
    x = cupy.asarray(X)
    # The host's memory is mapped before the limit, whatever ran before this test.
    pool.warm_up({"x": X})
    with ExitStack() as limited:
        for pid in before:  # the emulated card's memory is mapped like other memory
            _, most = resource.prlimit(pid, resource.RLIMIT_AS)
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (size + (32 << 20), most))
            limited.callback(resource.prlimit, pid, resource.RLIMIT_AS, (most, most))
        for _ in range(2):
            with pytest.raises(PredictError, match=r"no memory for block \d+ of cuda:0: .* free"):
                pool.predict({"x": x}, shards=1)
        np.testing.assert_array_equal(y(pool.predict({"x": X})), X)
    np.testing.assert_array_equal(y(pool.predict({"x": x}, shards=1)), X)
    assert pids(pool) == before
    del x

    def only_the_slab_is_left() -> bool:
        gc.collect()  # what `pytest.raises` leaves holds the errors, and these hold memory of the card
        cupy.get_default_memory_pool().free_all_blocks()
        return len(slab_descriptors()) == 1

    wait_until(only_the_slab_is_left)  # the master's thread lets go of a request after its answer


def test_maker_of_the_slab_that_is_killed_busy_and_in_its_next_build_costs_no_request(
    pool: Master, card: Card
) -> None:
    before, in_use = pids(pool), taken(card)
    futures = [pool.submit({"x": X}) for _ in range(40)]
    os.kill(before[0], signal.SIGKILL)

    def rebuilding() -> int | None:
        maker = pool.statistics().workers[0]
        return maker.pid if maker.pid != before[0] and maker.state == "building" else None

    wait_until(rebuilding)
    again = rebuilding()
    if again is not None:  # else it was quick
        os.kill(again, signal.SIGKILL)
    futures += [pool.submit({"x": X}) for _ in range(4)]
    for future in futures:
        np.testing.assert_array_equal(y(future.result(60)), X)
    wait_until(all_restarted(pool, before))
    assert taken(card) == in_use


def test_workers_of_a_card_are_replaced_and_it_holds_the_weights_once_again(
    pool: Master, card: Card
) -> None:
    before, in_use = pids(pool), taken(card)
    futures = [pool.submit({"x": X}) for _ in range(20)]
    pool.restart_workers()
    for future in futures:
        np.testing.assert_array_equal(y(future.result(60)), X)
    wait_until(all_restarted(pool, before))
    assert taken(card) == in_use


@pytest.mark.usefixtures("card")
def test_model_that_no_worker_of_a_card_can_load_fails_the_start_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(BuildError, match=r"^worker 0 \(cuda:0"):
        Master(path, ["cuda:0"] * 2, options=EngineOptions(allow_fallback=True)).__enter__()


@pytest.mark.thorough
def test_card_that_is_full_for_a_while_holds_the_weights_once_again_later(
    pool: Master, card: Card
) -> None:
    before, in_use = pids(pool), taken(card)
    others = card.create(0, card.memory()[0])
    [of_the_slab] = slab_descriptors()
    kept = os.dup(of_the_slab)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    refused = re.compile("not shared any more: each process .* of its own: cuda:0: cuMemCreate")
    try:
        wait_until(lambda: refused.search(pool.statistics().workers[0].last_error))
        futures = [pool.submit({"x": X}) for _ in range(8)]
    finally:
        os.close(kept)
        others.close()
        card.reclaim()
    for future in futures:
        np.testing.assert_array_equal(y(future.result(60)), X)
    wait_until(all_restarted(pool, before))
    assert taken(card) == in_use
