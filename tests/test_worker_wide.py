"""The second engine of a worker: what may go wrong when it is to be opened."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcinfer.config import CoreShare
from mcinfer.engines import open_engine
from mcinfer.engines.base import Engine
from mcinfer.model_cache.keys import read_content
from mcinfer.worker.wide import WideEngine
from tests.engine_requests import engine_request
from tests.text_models import text_model

CORES = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def no_more_threads() -> Iterator[None]:
    before = threading.stack_size(1 << 46)  # no address space has room for it
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_more_threads")
def test_worker_that_gets_no_thread_keeps_to_its_share(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model("(float[n] x) => (float[n] y) {y = Relu(x)}").SerializeToString())
    request = engine_request(path)
    opened: list[CoreShare] = []

    def open_wide(share: CoreShare) -> Engine:
        opened.append(share)
        return open_engine("onnxruntime", request)

    share = CoreShare(cores=CORES[:1], pool=CORES)
    wide = WideEngine(
        share, open_engine("onnxruntime", request), open_wide, read_content(str(path))
    )
    assert [wide.engine(), wide.engine()] == [None, None]
    assert [opened, wide.is_open, wide.is_opening, wide.on_pool] == [[], False, False, False]
