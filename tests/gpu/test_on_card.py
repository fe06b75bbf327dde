"""Pools on a real card: what an emulated one cannot show."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from mcinfer import Master, PredictError
from mcinfer.cards.nvidia_smi import gpus
from mcinfer.examples import encoder
from tests.gpu.cards import IMAGES, Cards, check, why_no_card
from tests.text_models import text_model

if why := why_no_card():
    pytest.skip(f"no card: {why}", allow_module_level=True)


def test_session_runs_on_the_card(pool: Master) -> None:
    for worker in pool.statistics().workers:
        assert worker.providers[0] == "CUDAExecutionProvider"


def test_callers_stream_is_waited_for(pool: Master, expected: Any) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        ones = cupy.ones((8192, 8192), cupy.float32)
        for _ in range(20):
            ones = ones @ ones * np.float32(1 / 8192)
        images = cupy.asarray(IMAGES) * ones[0, 0]  # done long after the call has begun
        outputs = pool.predict({"image": images}, outputs_on="device")
        check({"embedding": outputs["embedding"] * ones[0, 0]}, expected)


def test_weights_lie_on_a_card_once(cards: Cards, tmp_path: Path) -> None:
    side, layers = 4096, 4  # 268 MB
    rng = np.random.default_rng(0)
    weights = {f"w{n}": rng.standard_normal((side, side), np.float32) / 64 for n in range(layers)}
    body = "  ".join(f"x{n + 1} = MatMul(x{n}, w{n})" for n in range(layers))
    text = f"(float[batch,{side}] x0) => (float[batch,{side}] x{layers}) {{ {body} }}"
    onnx.save(text_model(text, weights, opset=20), str(tmp_path / "model.onnx"))

    def taken(prepare: str) -> int:
        before = gpus()[0].free_bytes
        options = cards.options(prepare=prepare)
        with Master(tmp_path / "model.onnx", ["cuda:0"] * 4, options=options) as master:
            master.warm_up({"x0": np.ones((1, side), np.float32)})
            after = gpus()[0].free_bytes
        assert before is not None
        assert after is not None
        return before - after

    saved = taken("never") - taken("always")
    assert saved >= 2.5 * layers * side * side * 4  # three of four copies, but for what else varies


def test_worker_without_memory_for_a_request_lives_on(cards: Cards, expected: Any) -> None:
    limit = {"gpu_mem_limit": str(64 << 20)}
    with cards.pool(encoder(), "cuda:0", provider_options=limit) as master:
        before = master.statistics().workers[0].pid
        with pytest.raises(PredictError, match="memory"):
            master.predict({"image": np.zeros((20_000, 3, 32, 32), np.float32)}, shards=1)
        check(master.predict({"image": IMAGES}), expected)
        assert master.statistics().workers[0].pid == before


def test_tensorrt_serves_by_its_name(cards: Cards, expected: Any) -> None:
    if "TensorrtExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no TensorRT")
    options = cards.options(provider="tensorrt")
    with Master(encoder(), ["cuda:0"], options=options) as master:
        assert master.statistics().workers[0].providers[0] == "TensorrtExecutionProvider"
        check(master.predict({"image": IMAGES}), expected)
