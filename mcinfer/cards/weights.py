"""Weights that a process shares on a card: what `mcinfer.shm.weights` does not do for weights in host memory.

The owner makes the slab (`mcinfer.cards.slabs`), a block of the card's memory, and sends its descriptor and
token; other processes open it. `mcinfer.cards.cuda` has the rules of ownership.
"""

import logging
import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from mcinfer.cards.cuda import Card, DeviceBlock
from mcinfer.cards.dlpack import DlpackTensor
from mcinfer.cards.slabs import OpenSlab, SlabLayout, filled, layout
from mcinfer.config import Device, EngineOptions
from mcinfer.engines.providers import runtime_values
from mcinfer.errors import InvalidInputError, MissingDependencyError, WeightAccessError, requires
from mcinfer.model_cache.cache import MODEL_FILE, Held
from mcinfer.shm.weights import SharedWeights

_NEEDS_RUNTIME = "weights on a card need ONNX Runtime for cards: pip install 'mcinfer[gpu]'"


_log = logging.getLogger("mcinfer.shm")


def card_to_share_on(device: str, options: EngineOptions) -> Card:
    """The card for the arguments of a `WeightOwner`, which checks them."""
    found = Device.parse(device)
    if found.kind != "cuda":
        raise InvalidInputError(f"device: got {device!r}, expected a card such as 'cuda:0'")
    if options.provider not in (None, "cuda"):
        raise InvalidInputError(
            f"options: got the provider {options.provider!r}, expected 'cuda': no other one takes weights "
            "that are on a card"
        )
    return Card.open(found)


def put(card: Card, held: Held) -> "tuple[DeviceBlock, CardWeights]":
    """A block with the weights of a prepared model, and these weights for this process, which hold `held`."""
    with ExitStack() as failed:
        failed.callback(held.close)
        placed = layout(held.opened / MODEL_FILE)
        block = filled(card, 0, placed)
        failed.callback(block.close)
        weights = CardWeights(held, card, placed, block)
        failed.pop_all()
    return block, weights


def open_slab(handle: int, held: Held, token: bytes, fd: int) -> "CardWeights":
    """Open the slab of an owner's weights; the descriptor is this function's, even if it fails."""
    with ExitStack() as failed:
        failed.callback(os.close, fd)
        placed = layout(held.opened / MODEL_FILE)
        card = Card.find(token)
        if card is None:
            raise WeightAccessError(
                f"weights {handle} are on a card that this process does not see (CUDA_VISIBLE_DEVICES)"
            )
        failed.pop_all()
    with closing(card.attach(0, max(placed.size, 1), fd, token, card.device)) as block:
        return CardWeights(held, card, placed, block)


def end(weights: "CardWeights", handle: int, timeout: float) -> None:
    """Close an owner's own weights; a warning says if other processes have them open after these seconds."""
    if weights.slab is not None and weights.slab.memory.is_lent(timeout):
        _log.warning(
            "weights %d: another process still has them open on %s, so their memory is not free yet",
            handle,
            weights.device,
        )
    weights.close()


class CardWeights(SharedWeights):
    """Shared weights that lie on a card; each tensor, and each session with them, keeps the memory open."""

    def __init__(self, held: Held, card: Card, placed: SlabLayout, block: DeviceBlock) -> None:
        super().__init__(held)
        self.device = card.device
        self.slab: OpenSlab | None = OpenSlab.within(card, block, placed)
        self.tensors: Mapping[str, DlpackTensor] = self.slab.tensors() or {}
        self._card = card

    def add_to(self, session_options: Any) -> None:
        super().add_to(session_options)
        with requires(_NEEDS_RUNTIME, "onnxruntime"):
            import onnxruntime as ort
        on_card = "CUDAExecutionProvider" in ort.get_available_providers()
        tensors = self.tensors if on_card else self.tensors_on_host()
        if tensors is None:
            raise MissingDependencyError(_NEEDS_RUNTIME)
        values = runtime_values(tensors, ort.OrtValue.from_dlpack)
        for name, value in values.items():
            session_options.add_initializer(name, value)
        session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session_options.add_session_config_entry("session.disable_prepacking", "1")
        # The options have only pointers to the values.
        weakref.finalize(session_options, values.clear).atexit = False

    def tensors_on_host(self) -> Mapping[str, DlpackTensor] | None:
        """The same weights at the host's addresses; None if the host cannot read them."""
        return {} if self.slab is None else self.slab.tensors(on_host=True)

    def close(self) -> None:
        super().close()
        self.slab, self.tensors = None, {}
        self._card.reclaim()
