"""The second engine of a worker: what may go wrong when it is to be opened."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcinfer.config import CoreShare
from mcinfer.engines import open_engine
from mcinfer.model_cache.keys import read_content
from mcinfer.worker.wide import WideEngine
from tests.engine_requests import engine_request
from tests.process.waiting import wait_until
from tests.text_models import text_model

CORES = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def no_more_threads() -> Iterator[None]:
    before = threading.stack_size(1 << 46)  # no address space has room for it
    yield
    threading.stack_size(before)


def wide_engine(folder: Path) -> WideEngine:
    """One that is not open yet."""
    path = folder / "model.onnx"
    path.write_bytes(text_model("(float[n] x) => (float[n] y) {y = Relu(x)}").SerializeToString())
    request = engine_request(path)
    narrow = open_engine("onnxruntime", request)
    share = CoreShare(cores=CORES, pool=CORES)
    return WideEngine(
        share, narrow, lambda _: open_engine("onnxruntime", request), read_content(str(path))
    )


@pytest.mark.usefixtures("no_more_threads")
def test_worker_that_gets_no_thread_keeps_to_its_share(tmp_path: Path) -> None:
    wide = wide_engine(tmp_path)
    assert [wide.engine(b""), wide.engine(b"")] == [None, None]
    assert [wide.is_open, wide.is_opening, wide.on_pool] == [False, False, False]


def test_layout_whose_wide_runs_take_longer_runs_narrow_and_is_tried_again(tmp_path: Path) -> None:
    wide = wide_engine(tmp_path)
    strings = bytes(1 << 13)  # are not kept
    for layout in (b"many operators", b"large", strings):
        wide.learn(layout, 0.002, wide=False)
    assert wide.engine(b"many operators") is None
    wait_until(lambda: wide.is_open)
    for layout, seconds in (
        (b"many operators", 0.003),
        (b"large", 0.001),
        (b"many operators, new", 0.003),
        (b"large, new", 0.001),
        (strings, 0.003),
    ):
        for _ in range(8):
            assert wide.engine(layout) is not None
            wide.learn(layout, seconds, wide=True)
    for layout in (b"many operators, new", b"large, new"):
        assert wide.engine(layout) is None  # what it takes narrow is not known
        wide.learn(layout, 0.002, wide=False)
    assert [wide.engine(b"many operators"), wide.engine(b"many operators, new")] == [None, None]
    assert None not in map(wide.engine, (b"large", b"large, new", strings))
    runs = 8
    while wide.engine(b"many operators") is None:
        wide.learn(b"many operators", 0.002, wide=False)
        runs += 1
    assert runs == 1024
    wide.close()
