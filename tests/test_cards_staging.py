"""Tests of mcinfer/cards/staging.py over the emulated driver: the way of tensors to an engine and back.

The engine here reads and writes at the addresses that it is given, after its stream, as a session on a card
does; it refuses a tensor that lies on another side than it said.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_void_p, cast
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from mcinfer.cards.cuda import Card
from mcinfer.cards.staging import CardEngine, _SharedWeights, memory_limit, open_on_card
from mcinfer.config import Device, EngineOptions
from mcinfer.engines.base import BoundRun, Buffer, Engine, Produced, Strings, array_over
from mcinfer.errors import BuildError, CardLostError, PredictError
from mcinfer.examples import encoder
from mcinfer.protocol import Build
from mcinfer.shm.arena import AttachedBlocks, OfferedBlock, SharedBlock
from mcinfer.shm.block import Block
from mcinfer.specs import ModelSpec, TensorSpec
from tests.emulated_cards import emulated_cards
from tests.engine_requests import engine_request
from tests.process.scripts import printed
from tests.sliced_models import save

CARD_BYTES = 32 << 20
FIRST, SECOND = Device("cuda", 0), Device("cuda", 1)
Cards = tuple[Card, Card]
_SLEEP = CFUNCTYPE(None, c_void_p)(lambda _: time.sleep(0.05))


@pytest.fixture(scope="module")
def cards() -> Iterator[Cards]:
    # A process cannot open an event of its own, and here it is both sides.
    with emulated_cards(BYTES=str(CARD_BYTES), WITHOUT="events"):
        yield Card.open(FIRST), Card.open(SECOND)


def spec(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=np.dtype("float32"), shape=shape)


class Scaling(Engine):
    """y = w · x, with a w of one element, 2 unless it is replaced."""

    def __init__(self, card: Card, on_host: frozenset[str] | None) -> None:
        self.spec = ModelSpec(inputs=(spec("x", "n"),), outputs=(spec("y", "n"),))
        self.providers = ("Scaling",)
        self.weights = (spec("w", 1),)
        self.on_card = on_host is not None
        self.on_host = on_host
        self.card = card
        self.alignment = 16
        self.failure: Exception | None = None
        self.late: Buffer | None = None  # what a run's work writes to y, after the run has returned

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        return _Scaling(self, inputs, outputs)

    def arm(self) -> None: ...

    def cancel(self) -> None: ...


class _Scaling(BoundRun):
    def __init__(
        self, engine: Scaling, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]
    ) -> None:
        self.engine = engine
        self.tensors = {item.name: item for item in (*inputs, *outputs) if isinstance(item, Buffer)}
        by_value = any(isinstance(item, Strings) for item in inputs)
        for name, item in self.tensors.items():
            on_host = by_value or engine.on_host is None or name in engine.on_host
            assert item.device == (None if on_host else engine.card.device)
            assert on_host or item.address % engine.alignment == 0

    def execute(self) -> Sequence[Produced | Strings]:
        if self.engine.failure is not None:
            raise self.engine.failure
        if self.engine.on_card:
            self.engine.card.synchronize()  # what a session queues comes after what is queued already
        arrays = {name: array_over(item) for name, item in self.tensors.items()}
        if self.engine.late is not None:
            queue_slow_work(self.engine.card)
            target = self.tensors["y"]
            self.engine.card.copy(target.address, self.engine.late.address, target.size)
            return ()
        arrays["y"][...] = arrays["x"] * (arrays["w"][0] if "w" in arrays else 2)
        return ()


def queue_slow_work(card: Card) -> None:
    function = import_module("cuda.bindings.driver").CUhostFn(cast(_SLEEP, c_void_p).value)
    with card.current():
        card._ask("cuLaunchHostFunc", card.stream, function, 0)


def offered(block: SharedBlock) -> OfferedBlock:
    return OfferedBlock(
        number=block.number,
        size=block.size,
        fd=os.dup(block.fd),
        token=block.token,
        device=block.device,
    )


class Tensors:
    """Tensors in blocks of the host and of both cards, as a master gives them to a worker."""

    def __init__(self, engine: CardEngine) -> None:
        self.engine = engine
        self.number = 0
        self.blocks: list[SharedBlock] = []

    def make(self, name: str, place: Device | None, count: int, offset: int = 0) -> Buffer:
        self.number += 1
        size = 4 * count + offset
        if place is None:
            owned: SharedBlock = Block.create(self.number, size)
        else:
            owned = Card.open(place).create(self.number, size)
        self.blocks.append(owned)
        self.engine.blocks.add(offered(owned))
        block = self.engine.blocks.find(self.number)
        assert block is not None
        return Buffer(
            name=name,
            element_type="float32",
            shape=(count,),
            address=block.address + offset,
            size=4 * count,
            device=place,
        )

    def pair(
        self, x: Device | None, y: Device | None, count: int, offset: int = 0
    ) -> tuple[Buffer, Buffer]:
        return self.make("x", x, count, offset), self.make("y", y, count, offset)

    def run(
        self, x: Device | None, y: Device | None, count: int
    ) -> tuple[BoundRun, Buffer, Buffer]:
        source, target = self.pair(x, y, count)
        return self.engine.bind([source], [target]), source, target

    def close(self) -> None:
        for block in self.blocks:
            self.engine.blocks.drop(block.number)
            block.close()
        self.engine.close()


def write(buffer: Buffer, values: Sequence[float]) -> None:
    """What the master does: the emulated memory of a card can be reached by the host."""
    array_over(buffer)[...] = values


def read(buffer: Buffer) -> list[float]:
    return [float(value) for value in array_over(buffer)]


@contextmanager
def loaded(
    card: Card, on_host: frozenset[str] | None = frozenset()
) -> Iterator[tuple[CardEngine, Scaling, Tensors]]:
    """An engine on a card; at its end, all memory of the cards is free again."""
    inner = Scaling(card, on_host)
    engine = CardEngine(inner, card, None)
    tensors = Tensors(engine)
    try:
        yield engine, inner, tensors
    finally:
        tensors.close()
    for place in (FIRST, SECOND):
        Card.open(place).reclaim()
        free, total = Card.open(place).memory()
        assert free == total


@pytest.mark.parametrize(
    ("x", "y"), [(None, FIRST), (FIRST, SECOND), (SECOND, None), (FIRST, FIRST)], ids=str
)
@pytest.mark.parametrize(
    "on_host", [None, frozenset("xy"), frozenset("x"), frozenset("y"), frozenset()]
)
def test_engine_gets_each_tensor_where_it_wants_it(
    x: Device | None, y: Device | None, on_host: frozenset[str] | None, cards: Cards
) -> None:
    with loaded(cards[0], on_host) as (_engine, _, tensors):
        run, source, target = tensors.run(x, y, 3)
        for values in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):  # the second is not the first one's copy
            write(source, values)
            assert run.execute() == ()
            assert read(target) == [2 * value for value in values]


@pytest.mark.parametrize(
    ("provider", "alignment", "offset"),
    [("Scaling", 16, 4), ("TensorrtExecutionProvider", 256, 64)],
)
def test_rows_that_begin_where_kernels_cannot_load_them_are_moved(
    provider: str, alignment: int, offset: int, cards: Cards
) -> None:
    inner = Scaling(cards[0], frozenset())
    inner.providers, inner.alignment = (provider,), alignment
    tensors = Tensors(engine := CardEngine(inner, cards[0], None))
    try:
        free, _ = cards[0].memory()
        for at in (alignment, offset):  # the first lies well, and is used in place
            source, target = (tensors.make(name, FIRST, 3, at) for name in "xy")
            write(source, [1.0, 2.0, 3.0])
            engine.bind([source], [target]).execute()
            assert read(target) == [2.0, 4.0, 6.0]
            free -= 4 << 20  # these two blocks
            assert cards[0].memory()[0] == free - ((2 << 20) if at == offset else 0)
    finally:
        tensors.close()


def test_failed_run_leaves_no_work_behind(cards: Cards) -> None:
    card = cards[0]
    with loaded(card) as (_engine, inner, tensors):
        run, _source, _target = tensors.run(None, FIRST, 1 << 20)
        inner.failure = PredictError("no")
        for _ in range(8):
            with pytest.raises(PredictError, match="no"):
                run.execute()
            card.synchronize(timeout=0.0)  # at once


def test_outputs_are_there_when_a_run_has_ended(cards: Cards) -> None:
    with loaded(cards[0]) as (engine, inner, tensors):
        source, target, late = (tensors.make(name, FIRST, 2) for name in ("x", "y", "late"))
        write(late, [2.0, 4.0])
        inner.late = late
        engine.bind([source], [target]).execute()
        assert read(target) == [2.0, 4.0]


def test_block_that_cannot_be_mapped_fails_the_runs_that_need_it(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = import_module("cuda.bindings.driver")
    with loaded(cards[0]) as (engine, *_):
        block = cards[0].create(5, 1)
        with monkeypatch.context() as full:
            refused = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            full.setattr(driver, "cuMemAddressReserve", lambda *_: refused)
            engine.blocks.add(offered(block))
            for _ in range(2):
                with pytest.raises(PredictError, match=r"no memory for block 5 of cuda:0: .* free"):
                    engine.blocks.find(5)
        assert engine.blocks.find(5) is not None  # its descriptor is there still
        engine.blocks.drop(5)
        block.close()


def test_larger_layout_moves_the_staging_memory_and_earlier_runs_follow(cards: Cards) -> None:
    with loaded(cards[0]) as (_engine, _, tensors):
        runs = [tensors.run(None, None, count) for count in (2, 1 << 20, 3)]
        for value, (run, source, target) in enumerate(2 * runs):
            write(source, [float(value)] * source.shape[0])
            run.execute()
            assert set(read(target)) == {2.0 * value}
        free, total = cards[0].memory()
        assert total - free == 8 << 20  # of the largest layout alone


def test_replaced_weights_lie_on_the_card_once_and_go_with_their_version(cards: Cards) -> None:
    card = cards[0]
    with loaded(card) as (engine, _, tensors):
        source, target = tensors.pair(FIRST, FIRST, 2)
        write(source, [1.0, 2.0])
        before, _ = card.memory()
        for version in (1, 2, 3):
            weight = tensors.make("w", None, 1)
            write(weight, [10.0 * version])
            [placed] = engine.placed(version, (weight,))
            write(weight, [0.0])  # the master uses this memory for others
            assert engine.placed(version, (weight,)) == (placed,)
            assert placed.device == FIRST
            engine.bind([source, placed], [target]).execute()
            assert read(target) == [10.0 * version, 20.0 * version]
            engine.forget(version)
            card.reclaim()
            assert card.memory()[0] == before - (2 << 20)
        engine.forget(4)


def test_weights_stay_where_an_engine_on_the_host_reads_them(cards: Cards) -> None:
    with loaded(cards[0], None) as (engine, _, tensors):
        weights = (tensors.make("w", None, 1),)
        assert engine.placed(1, weights) is weights


def test_card_without_room_fails_the_run_with_numbers_and_the_next_one_succeeds(
    cards: Cards,
) -> None:
    card = cards[0]
    with loaded(card) as (engine, _, tensors):
        source, target = tensors.pair(None, None, 1 << 20)
        weights = (tensors.make("w", None, 1),)
        others = card.create(0, CARD_BYTES - (4 << 20))
        with pytest.raises(
            PredictError, match=r"tensors of a run: .* 8388608 bytes wanted, 4194304 of"
        ):
            engine.bind([source], [target])
        rest = card.create(0, 4 << 20)
        with pytest.raises(
            PredictError, match=r"version 7 of the weights: .* 2097152 bytes wanted, 0 of"
        ):
            engine.placed(7, weights)
        others.close()
        rest.close()
        write(weights[0], [3.0])
        run = engine.bind([source, *engine.placed(7, weights)], [target])
        write(source, [1.0] * source.shape[0])
        run.execute()
        assert set(read(target)) == {3.0}


def test_error_of_a_library_on_a_dead_card_is_the_cards() -> None:
    with emulated_cards(WITHOUT="events"):
        card = Card.open(FIRST)
        inner = Scaling(card, frozenset())
        engine, x = CardEngine(inner, card, None), card.create(1, 4)
        tensor = Buffer(
            name="x", element_type="float32", shape=(1,), address=x.address, size=4, device=FIRST
        )
        run = engine.bind([tensor], [])
        inner.failure = PredictError("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED")
        with pytest.raises(PredictError, match="CUBLAS failure 13"):
            run.execute()
        gone = card.create(2, 4)
        address = gone.address
        gone.close()
        card.copy(x.address, address, 4)  # an illegal address
        with pytest.raises(CardLostError, match="only a new process"):
            run.execute()


def test_worker_of_a_cpu_imports_nothing_of_cards() -> None:
    program = "import sys, mcinfer.worker.server, mcinfer.engines._onnxruntime; print(*sys.modules)"
    modules = {f"mcinfer.cards.{name}" for name in ("dlpack", "cuda", "slabs", "staging")}
    assert not modules & {*printed(program).split()}


def test_weights_that_cannot_be_read_leave_the_card_as_it_was(
    cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "first.onnx", "() => () {}", {"w": (1024,)}, external=True)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(BuildError, match="ends within the weight 'w'"):
        _SharedWeights(None).give(cards[0], model)  # the error holds its frames
    free, total = cards[0].memory()
    assert free == total


def test_weights_of_another_model_are_not_opened(cards: Cards, tmp_path: Path) -> None:
    first, second = (
        save(tmp_path / f"{n}.onnx", "() => () {}", {"w": (n,)}, external=True)
        for n in (1024, 2048)
    )
    made = _SharedWeights(None)
    made.give(cards[0], first)
    assert made.block is not None
    shared = _SharedWeights(offered(made.block))
    with pytest.raises(
        BuildError, match=r"got 4096 bytes of weights on cuda:0, 2048.onnx has 8192"
    ):
        shared.give(cards[0], second)
    shared.close()
    made.block.close()


def build(workers: int = 2, **options: str) -> Build:
    return Build(
        model="/m.onnx",
        engine="onnxruntime",
        device="cuda:0",
        card_workers=workers,
        options=EngineOptions(provider_options=options),
    )


def test_workers_of_a_card_share_its_memory_out(cards: Cards) -> None:
    for message, limit in (
        (build(1), None),
        (build(2), int(0.9 * CARD_BYTES) // 2),
        (build(1, gpu_mem_limit="1000"), 1000),
        (build(4, gpu_mem_limit="1000"), 250),
    ):
        assert memory_limit(cards[0], message) == limit
    for text in ("", "-1", "1.5", "2 GB", "0", "3"):
        with pytest.raises(
            BuildError, match=r"provider_options: got gpu_mem_limit '.*', expected b"
        ):
            memory_limit(cards[0], build(4, gpu_mem_limit=text))
    request = engine_request(encoder(), str(FIRST), allow_fallback=True)
    message = replace(build(gpu_mem_limit="much"), model=request.model)
    with pytest.raises(BuildError, match="got gpu_mem_limit 'much'"):  # so no worker starts
        open_on_card(message, request, None, AttachedBlocks(), lambda _: None)


def test_card_that_is_not_there_is_an_engine_of_the_host_if_that_may_be() -> None:
    with emulated_cards(CARDS="0"):
        request = engine_request(encoder(), str(FIRST), allow_fallback=True)
        message = replace(build(), model=request.model, shares_weights=True)
        blocks = AttachedBlocks()
        engine = open_on_card(message, request, None, blocks, lambda _: None)
        assert blocks.card is None
        assert not isinstance(engine, CardEngine)
        assert any("a copy of the weights of its own: " in note for note in engine.notes)
