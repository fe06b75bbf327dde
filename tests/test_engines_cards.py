"""Tests of ONNX Runtime on cards without one: the CPU provider over an emulated card's memory.

The weights lie in memory of the emulated card, which the host can read too. So all but CUDA's kernels is as
on a card: preparing, the layout, giving the weights to sessions.
"""

import ctypes
import gc
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from mcinfer.cards.cuda import Card, DeviceBlock, model_of
from mcinfer.cards.slabs import OpenSlab, filled, layout
from mcinfer.cli.cache import clear, list_entries
from mcinfer.config import Device, EngineOptions
from mcinfer.engines import _onnxruntime
from mcinfer.engines._onnxruntime import OnnxRuntimeEngine
from mcinfer.engines.adapters import open_engine, prepared_facts
from mcinfer.engines.base import EngineRequest, OutOfDeviceMemoryError, Strings
from mcinfer.engines.preparation import OWN_COPY, engine_folder, ensure_prepared
from mcinfer.engines.providers import keeps_engines
from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.model_cache.cache import Cache
from mcinfer.private import alone_in
from tests.emulated_cards import emulated_cards
from tests.engine_requests import engine_request
from tests.engine_tensors import buffer, content
from tests.test_engines import save
from tests.test_preparation import CONV, LOOP, MODELS, Model, numbers, results, write

DEVICE = Device("cuda", 0)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Card]:
    """An emulated card, and a model cache that the tests of this module share."""
    with emulated_cards(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        card = Card.open(DEVICE)
        yield card
        gc.collect()
        card.reclaim()
        free, total = card.memory()
        assert free == total  # no session that is gone keeps weights


class Leader:
    """Makes the slab at the first call, and gives it to whoever loads the model later."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.block: DeviceBlock | None = None
        self.models: list[Path] = []

    def __call__(self, model: Path) -> OpenSlab:
        self.models.append(model)
        placed = layout(model)
        if self.block is None:
            self.block = filled(self.card, -1, placed)
        return OpenSlab.within(self.card, self.block, placed)


def request(model: str, **options: Any) -> EngineRequest:
    given = {"device": DEVICE, "prepare": "always", "allow_fallback": True, **options}
    found = engine_request(model, **given)
    if found.device.kind == "cpu":
        return found
    return replace(found, device_model=partial(model_of, found.device))


def open_on_card(model: str, **options: Any) -> OnnxRuntimeEngine:
    engine = open_engine("onnxruntime", request(model, **options))
    assert isinstance(engine, OnnxRuntimeEngine)
    return engine


@pytest.mark.parametrize("model", [CONV, MODELS[LOOP]], ids=["layers", LOOP])
def test_weights_of_a_card_are_used_where_they_lie_by_every_session(
    card: Card, tmp_path: Path, model: Model
) -> None:
    path = write(tmp_path / "model.onnx", model)
    leader = Leader(card)
    engines = [open_on_card(path, slab=leader) for _ in range(2)]
    assert leader.block is not None
    assert len(leader.models) == 2
    plain = open_on_card(path, prepare="never")
    for engine in engines:
        assert engine.prepared
        assert (engine.providers, engine.on_card) == (("CPUExecutionProvider",), False)
        for ours, expected in zip(results(engine), results(plain), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    # Whoever changes the memory changes what all of them compute: so none has a copy.
    address = card.host_address(leader.block.address)
    assert address is not None
    ctypes.memset(address, 0, leader.block.size)
    for engine in engines:
        assert not np.allclose(results(engine)[0], results(plain)[0])


def test_weights_on_a_card_can_be_replaced_for_a_run(card: Card, tmp_path: Path) -> None:
    weights = {"w": numbers(64, 64), "v": numbers(64, 64, seed=2)}
    graph = "g (float[batch, 64] x) => (float[batch, 64] y) { a = MatMul(x, w)  y = MatMul(a, v) }"
    path = write(tmp_path / "model.onnx", (graph, weights))
    engine = open_on_card(path, slab=Leader(card), variable_weights=("w",))
    assert [spec.name for spec in engine.weights] == ["w"]
    [doubled], [once] = results(engine, w=2 * weights["w"]), results(engine)
    np.testing.assert_allclose(doubled, 2 * once, rtol=1e-5)


def test_model_for_a_card_has_an_entry_of_its_own_by_the_card(card: Card, tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", CONV)
    here = prepared_facts("onnxruntime", request(path))
    on_cpu = prepared_facts("onnxruntime", request(path, device=Device("cpu", 0)))
    # The keys of what users have prepared for the CPU must stay.
    assert {*on_cpu} == {
        *("engine", "build", "device", "cpu", "model"),
        *("options", "provider_options", "variable_weights"),
    }
    own = {name: value for name, value in here.items() if on_cpu.get(name) != value}
    assert own == {"device": "cuda", "provider": "cuda", "falls_back": True, "card": card.model()}
    assert card.model() == "Emulated card 0, compute capability 9.0"
    of_runs = request(path, provider_options={"gpu_mem_limit": "1", "enable_cuda_graph": "0"})
    assert prepared_facts("onnxruntime", of_runs) == here
    of_graphs = request(path, provider_options={"prefer_nhwc": "1"})
    assert prepared_facts("onnxruntime", of_graphs) != here
    options = EngineOptions(allow_fallback=True)
    held = ensure_prepared(path, options, device="cuda:0", device_model=card.model())
    assert held.facts["card"] == card.model()
    assert open_on_card(path, slab=Leader(card)).prepared == held.key
    prepared = str(held.folder / "model.onnx")
    assert open_on_card(prepared, slab=Leader(card)).prepared == held.key
    with pytest.raises(BuildError, match="was prepared for device cuda, here is cpu"):
        open_on_card(prepared, device=Device("cpu", 0))
    # Weights for a card are as the model has them, not as the CPU's kernels pack them.
    shapes = {one.name: one.shape for one in layout(held.folder / "model.onnx").tensors}
    assert sum(np.prod(shape) for shape in shapes.values()) == sum(
        array.size for array in CONV[1].values() if array.nbytes >= 1024
    )
    held.close()


def test_model_is_prepared_for_a_card_only_if_its_weights_are_shared_there(
    card: Card, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.onnx", CONV)
    leader = Leader(card)
    for options in (
        {"prepare": "auto", "slab": leader},  # too small
        {"prepare": "auto"},
        {"prepare": "never", "slab": leader},
        {"prepare": "always", "slab": leader, "device": Device("ascend", 0)},
    ):
        engine = open_on_card(path, **options)
        assert engine.prepared == ""
    assert leader.models == []


def test_weights_that_a_session_cannot_use_are_its_own(card: Card, tmp_path: Path) -> None:
    path, leader = write(tmp_path / "model.onnx", CONV), Leader(card)
    expected = results(open_on_card(path, slab=leader))
    hidden = open_on_card(path, slab=lambda model: replace(leader(model), host_address=None))
    assert hidden.notes == (
        f"{OWN_COPY}: onnxruntime {ort.__version__} with the CPUExecutionProvider cannot use those on the "
        "card",
    )
    np.testing.assert_array_equal(results(hidden)[0], expected[0])
    leader.block, block = card.create(-2, 100), leader.block
    with pytest.raises(BuildError, match="slab: got 100 bytes, expected "):
        open_on_card(path, slab=leader)
    leader.block = block


def test_weight_of_a_subgraph_is_not_mistaken_for_one_of_the_same_name_outside(
    card: Card, tmp_path: Path
) -> None:
    graph = MODELS[LOOP][0].replace("three, , x", "three, , first")
    text = graph.replace("y = Loop", "first = MatMul(x, outside)\n            y = Loop")
    weights = {**MODELS[LOOP][1], "outside": numbers(32, 32, seed=3)}
    path = write(tmp_path / "model.onnx", (text, weights))
    made = onnx.load(path)
    body = made.graph.node[1].attribute[0].g
    body.initializer[0].name = body.node[1].input[1] = "outside"
    onnx.save(made, path)
    leader = Leader(card)
    shared, plain = open_on_card(path, slab=leader), open_on_card(path, prepare="never")
    assert [one.name for one in layout(leader.models[0]).tensors] == ["w"]
    np.testing.assert_allclose(results(shared)[0], results(plain)[0], rtol=1e-3, atol=1e-4)


# What TensorRT builds.


@pytest.mark.usefixtures("card")
def test_tensorrt_builds_into_a_folder_of_the_cache_for_each_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.onnx", CONV)
    wanted = request(path, provider="tensorrt")
    folder = engine_folder(wanted, _onnxruntime.RUNTIME)
    assert folder is not None
    assert folder == engine_folder(wanted, _onnxruntime.RUNTIME)
    assert Path(folder).parent == Cache.default().folder / "engines"
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    write(tmp_path / "model.onnx", (CONV[0], {**CONV[1], "b": numbers(32, seed=9)}))
    other = engine_folder(wanted, _onnxruntime.RUNTIME)
    assert other not in (None, folder)
    assert keeps_engines(wanted)
    assert not keeps_engines(wanted.with_options(prepare="never"))
    (Path(folder) / "TensorrtExecutionProvider_TRTKernel_0_sm90.engine").write_bytes(
        b"x" * 3_000_000
    )
    list_entries()
    assert "built by TensorRT and OpenVINO: 3.0 MB" in capsys.readouterr().out
    # The oldest of all goes first, an engine as well as an entry.
    os.utime(folder, (1, 1))
    cache = Cache(Cache.default().folder, 1 << 40)
    total = cache.engine_bytes() + sum(info.bytes for info in cache.entries())
    assert Cache(cache.folder, total - 1).evict() >= 3_000_000
    assert not os.path.exists(folder)
    assert os.path.exists(str(other))
    clear()
    assert not os.path.exists(str(other))
    assert "freed" in capsys.readouterr().out


def waits_in(function: str) -> bool:
    """Whether another thread is in this function."""
    for thread, frame in sys._current_frames().items():
        at: FrameType | None = frame if thread != threading.get_ident() else None
        while at is not None and at.f_code.co_name != function:
            at = at.f_back
        if at is not None:
            return True
    return False


@pytest.mark.usefixtures("card")
def test_workers_that_start_together_build_with_tensorrt_in_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", CONV)
    folder = engine_folder(request(path, provider="tensorrt"), _onnxruntime.RUNTIME)
    assert folder is not None
    with ThreadPoolExecutor() as threads:
        with alone_in(folder):
            second = threads.submit(open_on_card, path, provider="tensorrt")
            while not (second.done() or waits_in(alone_in.__name__)):
                time.sleep(0.01)
            assert not second.done()
        assert second.result(60).providers == ("CPUExecutionProvider",)


@pytest.mark.usefixtures("card")
def test_cache_that_cannot_be_used_leaves_tensorrt_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", "/proc/none")
    path = write(tmp_path / "model.onnx", CONV)
    assert engine_folder(request(path, provider="tensorrt"), _onnxruntime.RUNTIME) is None


# What a run on a card cannot do, as far as it shows before the card does.


def test_run_with_strings_touches_no_memory_of_a_card(tmp_path: Path) -> None:
    graph = "(string[n] t, float[m] x) => (int64[1] s, float[m] y) { s = Shape(t) y = Neg(x) }"
    engine = open_on_card(save(tmp_path / "model.onnx", graph), prepare="never")
    texts = Strings(name="t", shape=(2,), values=("a", "b"))
    x, s = np.ones(3, np.float32), np.zeros(1, np.int64)
    place = replace(buffer("s", s), device=DEVICE)
    produced = engine.bind([texts, buffer("x", x)], [place]).execute()
    assert [item.name for item in produced] == ["s", "y"]
    assert content(produced[0]).tolist() == [2]
    assert s.tolist() == [0]
    with pytest.raises(
        InvalidInputError, match="input 'x' lies on cuda:0: beside inputs of strings"
    ):
        engine.bind([texts, replace(buffer("x", x), device=DEVICE)], [])


def test_run_that_gets_no_memory_says_how_much_it_asked_for(tmp_path: Path) -> None:
    graph = "(int64[rank] x) => (float[n] y) <float one = {1}> { y = Expand(one, x) }"
    engine = open_on_card(save(tmp_path / "model.onnx", graph), prepare="never")
    engine.on_card = True  # the same arena, over other memory
    wanted = 1 << 60
    x = np.array([wanted // 4], np.int64)
    with pytest.raises(OutOfDeviceMemoryError, match=f"asked for {wanted} bytes") as caught:
        engine.bind([buffer("x", x)], []).execute()
    assert caught.value.asked == wanted
    x[0] = 3
    [y] = engine.bind([buffer("x", x)], []).execute()
    assert content(y).tolist() == [1, 1, 1]
