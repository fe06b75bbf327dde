"""Tests of mcinfer/engines/wide.py, with engines whose runs take the time that a test says."""

import os
import resource
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcinfer.config import CoreShare
from mcinfer.engines import wide
from mcinfer.engines.base import BoundRun, Buffer, Engine, OutOfMemoryError, Produced, Strings
from mcinfer.engines.wide import WideEngine
from mcinfer.errors import PredictError
from mcinfer.model_cache.keys import read_content
from tests.process.waiting import wait_until
from tests.text_models import text_model

CORES = tuple(sorted(os.sched_getaffinity(0)))


class Timed(Engine):
    """Its runs take seconds of a clock that they alone move, or fail.

    Attributes:
        ran: How many runs were begun.
        error: What runs raise.
    """

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.ran = 0
        self.error: Exception | None = None
        self.is_closed = False

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        del inputs, outputs
        return TimedRun(self)

    def arm(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class TimedRun(BoundRun):
    def __init__(self, engine: Timed) -> None:
        self.engine = engine

    def execute(self) -> Sequence[Produced | Strings]:
        self.engine.ran += 1
        self.engine.clock[0] += self.engine.seconds
        if self.engine.error is not None:
            raise self.engine.error
        return ()


class Pair:
    """A worker's engine, the wide one beside it, and what is around both."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder / "model.onnx"
        model = text_model("(float[n] x) => (float[n] y) {y = Relu(x)}")
        path.write_bytes(model.SerializeToString())
        clock = [0.0]
        clocked = SimpleNamespace(perf_counter=lambda: clock[0])
        monkeypatch.setattr("mcinfer.engines.wide.time", clocked)
        self.narrow, self.wide = Timed(clock, 0.002), Timed(clock, 0.001)
        share = CoreShare(cores=CORES, wide_cores=CORES)
        self.engine = WideEngine(self.narrow, share, lambda _: self.wide, read_content(str(path)))

    def open(self) -> BoundRun:
        """A run of a new layout, which has run alone once; then the wide engine is open."""
        run = self.engine.bind((), ())
        run.execute_alone()
        wait_until(self._arm)
        return run

    def _arm(self) -> bool:
        self.engine.arm()
        return self.engine.is_open


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(tmp_path, monkeypatch)


@pytest.fixture
def no_more_threads() -> Iterator[None]:
    before = threading.stack_size(1 << 46)  # no address space has room for it
    yield
    threading.stack_size(before)


def alone(run: BoundRun, times: int = 1) -> list[bool]:
    """Whether runs that come alone were wide."""
    were = []
    for _ in range(times):
        run.execute_alone()
        were.append(run.wide)
    return were


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A limit that does not hold twice what this process has."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(1.5 * wide._memory_bytes()), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("lack", ["no_more_threads", "little_memory"])
def test_worker_that_lacks_a_thread_or_memory_keeps_to_its_share(
    pair: Pair, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, lack: str
) -> None:
    request.getfixturevalue(lack)
    caplog.set_level("DEBUG", "mcinfer")
    run = pair.engine.bind((), ())
    assert alone(run, 2) == [False, False]
    assert ("memory limit may not hold" in caplog.text) == (lack == "little_memory")
    assert not pair.engine.is_open
    assert not pair.engine.on_pool


def test_run_is_wide_if_it_comes_alone(pair: Pair) -> None:
    run = pair.open()
    assert (pair.narrow.ran, pair.wide.ran) == (1, 0)
    assert alone(run, 20) == [True] * 20
    run.execute()
    assert not run.wide
    assert (pair.narrow.ran, pair.wide.ran) == (2, 20)
    pair.engine.close()
    assert pair.narrow.is_closed
    assert pair.wide.is_closed


def test_layout_whose_wide_runs_take_longer_runs_narrow_and_is_tried_again(pair: Pair) -> None:
    pair.wide.seconds = 0.003
    run = pair.open()
    assert alone(run, 8 + 1016) == [True] * 8 + [False] * 1016
    assert alone(run) == [True]


def test_layout_that_was_wide_from_the_first_is_compared_with_one_narrow_run(pair: Pair) -> None:
    pair.open()
    fast, slow = pair.engine.bind((), ()), pair.engine.bind((), ())
    assert alone(fast, 12) == [True] * 8 + [False] + [True] * 3
    pair.wide.seconds = 0.003
    assert alone(slow, 12) == [True] * 8 + [False] * 4


def test_wide_run_that_fails_runs_narrow_and_so_do_all_others(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    run = pair.open()
    pair.wide.error = PredictError("no more threads")
    assert alone(run, 2) == [False, False]
    assert (pair.wide.ran, pair.wide.is_closed) == (1, True)
    assert "cores alone from now on: no more threads" in caplog.text


def test_run_that_fails_either_way_is_not_the_wide_engine_s_fault(pair: Pair) -> None:
    run = pair.open()
    pair.wide.error, pair.narrow.error = PredictError("wide"), PredictError("narrow")
    with pytest.raises(PredictError, match="narrow"):
        run.execute_alone()
    pair.wide.error = pair.narrow.error = None
    assert alone(run) == [True]


@pytest.mark.parametrize("error", [OutOfMemoryError("none left"), MemoryError("none left")])
@pytest.mark.parametrize("is_alone", [False, True])
def test_memory_of_the_wide_engine_is_given_back_to_a_run_that_lacks_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception, is_alone: bool
) -> None:
    run = pair.open()
    short = pair.wide if is_alone else pair.narrow
    short.error = error

    def close() -> None:
        pair.narrow.error = None

    monkeypatch.setattr(pair.wide, "close", close)
    assert (run.execute_alone() if is_alone else run.execute()) == ()
    assert not run.wide
    assert not pair.engine.is_open
