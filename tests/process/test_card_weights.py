"""Weights on a card, shared between real processes: over an emulated driver, whose cards are host memory."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from mcinfer.model_cache.cache import Cache
from tests.emulated_cards import EMULATED
from tests.process.scripts import ROOT, Program
from tests.process.waiting import running
from tests.text_models import text_model

FACTS = {"device": "cuda"}

GRAPH = """(float[batch, 64] x) => (float[batch, 32] y)
    { a = MatMul(x, w1)  b = Relu(a)  y = MatMul(b, w2) }"""
WEIGHTS: dict[str, NDArray[np.float32]] = {
    "w1": np.random.default_rng(1).standard_normal((64, 64), np.float32),
    "w2": np.random.default_rng(2).standard_normal((64, 32), np.float32),
}
X = np.random.default_rng(3).standard_normal((2, 64), np.float32)

PEER = """
import ctypes, json, logging, os, signal, sys
from pathlib import Path
import numpy as np
from mcinfer.config import Device
from mcinfer.model_cache.cache import Cache, entry_key
from mcinfer.cards.cuda import Card
from mcinfer.cards import slabs
from mcinfer.weight_sharing import WeightOwner, open_weights

slabs._STAGING_BYTES = 5000  # so that weights are copied in pieces
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("mcinfer").addHandler(handler)

def fork():
    child = os.fork()
    while not child:
        signal.pause()
    return child

def close_in_child():
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it
        files = [open(os.devnull) for _ in range(50)]  # by the numbers of descriptors that it closed
        owner.close(60)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def prepared():
    return Cache(Path(os.environ["MCINFER_CACHE"]), 1 << 30).open(entry_key({"device": "cuda"}))

def own(*pids, device="cuda:0"):
    global owner
    owner = WeightOwner(prepared(), pids, device=device)
    return owner.handle

def opened(handle):
    global weights
    weights = open_weights(handle)
    return str(weights.device)

def values(weights):
    return {name: np.from_dlpack(t).tolist() for name, t in weights.slab.tensors(on_host=True).items()}

def clear(weights, name):
    tensor = weights.slab.tensors(on_host=True)[name]
    ctypes.memset(tensor.address, 0, tensor.size)

def used(index=0):
    card = Card.open(Device("cuda", index))
    card.reclaim()
    free, total = card.memory()
    return total - free

def session(weights=None):
    import onnxruntime as ort
    global ran
    options = ort.SessionOptions()
    model = prepared().folder / "model.onnx"
    if weights is not None:
        weights.add_to(options)
        model = weights.model
    ran = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

def run(x):
    return ran.run(None, {"x": np.array(x, np.float32)})[0].tolist()

for line in sys.stdin:
    try:
        answer = [eval(json.loads(line)), ""]
    except Exception as exc:
        answer = [None, f"{type(exc).__name__}: {exc}"]
    print(json.dumps(answer), flush=True)
"""


class Peer(Program):
    """A process that evaluates expressions."""

    def __init__(self, cache: Path, ledger: str, **env: str) -> None:
        of_cards = {"MCINFER_EMULATED_CARDS": "2", "MCINFER_EMULATED_LEDGER": ledger}
        place = {"PYTHONPATH": f"{EMULATED}:{ROOT}", "MCINFER_CACHE": str(cache)}
        super().__init__(PEER, env={**place, **of_cards, **env}, talks=True)

    def __call__(self, expression: str) -> Any:
        value, error = json.loads(self.ask(json.dumps(expression)))
        assert not error, error
        return value

    def fails(self, expression: str) -> str:
        """The error of an expression."""
        value, error = json.loads(self.ask(json.dumps(expression)))
        assert error, value
        return str(error)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


def save(folder: Path, _: int) -> None:
    model, path = text_model(GRAPH, WEIGHTS), folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)


Start = Callable[..., Peer]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, checked_together: ExitStack) -> Start:
    """Starts processes that share cards, and a cache with one prepared model."""
    folder = tmp_path_factory.mktemp("cards") / "cache"
    Cache(folder, 1 << 30).make(FACTS, save, wait=10).close()
    ledger = f"test{os.getpid()}"

    def peer(**env: str) -> Peer:
        return checked_together.enter_context(Peer(folder, env.pop("ledger", ledger), **env))

    return peer


EXPECTED = {name: array.tolist() for name, array in WEIGHTS.items()}


RUN = f"run({X.tolist()})"


def test_weights_lie_on_the_card_once_for_listed_processes_alone(start: Start) -> None:
    owner, first, second, other = start(), start(), start(), start(MCINFER_EMULATED_CARDS="1")
    handle = owner(f"own({first.pid}, {second.pid})")
    slab = owner("used()")
    assert slab > 0
    assert owner("values(owner.weights)") == EXPECTED
    for peer in (first, second):
        assert peer(f"opened({handle})") == "cuda:0"
        assert peer("values(weights)") == EXPECTED
    refused = other.fails(f"opened({handle})")
    assert refused.startswith("WeightAccessError: ")
    assert f"allow({other.pid})" in refused
    assert "no process shares any by this number" in first.fails("opened(1)")

    first("session()")
    plain = first(RUN)
    first("session(weights)")
    assert first(RUN) == plain
    owner("clear(owner.weights, 'w2')")
    assert not np.any(first(RUN))  # the session has no copy of its own
    assert owner("used()") == slab

    second.kill()
    owner(f"owner.revoke({first.pid})")
    assert "WeightOwner.allow" in first.fails(f"opened({handle})")
    first("weights.close()")
    assert not np.any(first(RUN))  # the session keeps the memory
    assert "ClosedError" in first.fails("weights.add_to(None)")
    owner.kill()
    assert not np.any(first(RUN))
    assert first("used()") == slab
    assert "no process shares any by this number" in first.fails(f"opened({handle})")
    first("globals().pop('ran') and None")
    assert first("used()") == 0

    handle = first(f"own({other.pid}, device='cuda:1')")
    unseen = other.fails(f"opened({handle})")
    assert unseen.startswith("WeightAccessError: ")
    assert "does not see" in unseen
    assert first("owner.close()") is None
    assert first("used(1)") == 0


def test_owner_of_memory_by_handles_waits_for_those_who_have_it_open(start: Start) -> None:
    handles = {"MCINFER_CARD_MEMORY": "handles", "ledger": f"handles{os.getpid()}"}
    owner, importer = start(**handles), start(**handles)
    handle = owner(f"own({importer.pid})")
    assert owner("used()") > 0

    importer(f"opened({handle})")
    assert owner("owner.close(0)") is None
    assert owner("used()") > 0
    assert owner("warned.pop()") == (
        f"weights {handle}: another process still has them open on cuda:0, so their memory is not free yet"
    )
    assert importer("values(weights)") == EXPECTED
    importer("weights.close()")
    assert owner("used()") == 0

    handle = owner(f"own({importer.pid})")
    importer(f"opened({handle})")
    with running(lambda: owner("owner.close(40)")) as closed:
        importer("weights.close()")
    assert closed.result() is None
    assert owner("used()") == 0

    handle = owner(f"own({importer.pid})")
    importer(f"opened({handle})")
    importer.kill()
    assert owner("owner.close(40)") is None
    assert owner("used()") == 0
    assert owner("warned") == []


def test_forked_children_hold_no_owner_up(start: Start) -> None:
    handles = {"MCINFER_CARD_MEMORY": "handles", "ledger": f"forks{os.getpid()}"}
    owner, importer = start(**handles), start(**handles)
    importer(f"opened({owner(f'own({importer.pid})')})")
    children = [peer("fork()") for peer in (owner, importer)]
    try:
        assert owner("close_in_child()") == 0  # it waits for no process
        assert importer("values(weights)") == EXPECTED
        importer("weights.close()")
        assert owner("owner.close(20)") is None
        assert owner("warned") == []  # in time
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_card_without_memory_is_an_error_and_leaves_nothing(start: Start) -> None:
    owner = start(MCINFER_EMULATED_BYTES=str(1 << 20), ledger=f"small{os.getpid()}")
    owner("used()")
    before = owner("len(os.listdir('/proc/self/fd'))")
    error = owner.fails("own()")
    assert error.startswith("CardMemoryError: ")
    assert f"{2 << 20} bytes wanted" in error
    assert owner("used()") == 0
    assert owner("len(os.listdir('/proc/self/fd'))") == before
