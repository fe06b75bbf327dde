"""The weights of a prepared model in one piece of a card's memory, a *slab*.

The layout follows from the model's graph alone, so each process that has the slab finds the weights in it.
The slab has the weights that lie in files beside the graph. Small ones, such as shapes, stay in the graph,
since a runtime reads them while it loads a model.

A worker makes the slab for the others of its card (`mcinfer.cards.staging`), and a `mcinfer.shm.WeightOwner`
for the processes that it allows: it sends the block's descriptor and token, and they open it.
`mcinfer.cards.cuda` has the rules of ownership.
"""

import errno
import mmap
import os
import weakref
from contextlib import ExitStack, closing
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcinfer.cards.cuda import ALIGNMENT, Card, DeviceBlock, DeviceMemory
from mcinfer.cards.dlpack import DlpackTensor
from mcinfer.config import CARD_KIND, Device, EngineOptions
from mcinfer.engines.providers import runtime_values
from mcinfer.errors import (
    BuildError,
    InvalidInputError,
    MissingDependencyError,
    WeightAccessError,
)
from mcinfer.extras import install, requires
from mcinfer.model_cache.onnx_files import external_files, open_regular, scan
from mcinfer.shm.arena import align
from mcinfer.specs import ELEMENT_TYPES

_STAGING_BYTES = 8 << 20
"""One of two buffers: while the card copies from one, the files are read into the other."""

_NEEDS_RUNTIME = "weights on a card need ONNX Runtime for cards"

_NAMES = {
    element.onnx: name for name, element in ELEMENT_TYPES.items() if not name.startswith("complex")
}
"""Element types by their ONNX numbers. `OrtValue.from_dlpack` takes no complex numbers (1.32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabTensor:
    """One weight: where it lies in the slab, and in the file that it is filled from."""

    name: str
    element_type: str
    shape: tuple[int, ...]
    offset: int  # bytes from the slab's start, a multiple of `ALIGNMENT`
    size: int  # bytes
    file: Path
    file_offset: int  # bytes from that file's start


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """A slab of `size` bytes, and its weights by their offsets; without any, the size is 0."""

    size: int
    tensors: tuple[SlabTensor, ...]


def layout(model: Path) -> SlabLayout:
    """The layout of a model's weights, in the order of their names.

    Args:
        model: Absolute path of a prepared model's graph.

    Raises:
        BuildError: The file is not an ONNX model, or its files of weights are not as it says.
        OSError: The file cannot be opened.
    """
    found = scan(model)
    # The runtime gives a session's weights by name to its subgraphs as well (1.32), also where these have
    # others of the same name.
    outside = [
        one
        for name, one in sorted(found.initializers.items())
        if one.location and name not in found.inner
    ]
    files = external_files(model, None, found.external)
    paths = dict(zip(found.external, files, strict=True))
    tensors, end = [], 0
    for one in outside:
        element_type = _NAMES.get(one.onnx_type)
        if element_type is None or not one.bytes:
            continue  # each session loads it from the file
        file, wanted = paths[one.location], one.offset + one.bytes
        if one.length not in (None, one.bytes) or file.stat().st_size < wanted:
            raise BuildError(
                f"{model}: weight {one.name!r} of {one.bytes} bytes does not lie at byte {one.offset} "
                f"of {file}"
            )
        offset = align(end, ALIGNMENT)
        end = offset + one.bytes
        tensors.append(
            SlabTensor(
                name=one.name,
                element_type=element_type,
                shape=one.shape,
                offset=offset,
                size=one.bytes,
                file=file,
                file_offset=one.offset,
            )
        )
    return SlabLayout(size=end, tensors=tuple(tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlab:
    """A slab that is open in this process: as long as this is there, or one of its tensors.

    Attributes:
        placed: Where the weights lie in it.
        card: Whose memory it is.
        address: Address of the first byte on the card, in this process; a multiple of 256.
        host_address: Address at which the host reads the same memory; None if it cannot.
        memory: What keeps it open.
    """

    placed: SlabLayout
    card: Card
    address: int
    host_address: int | None
    memory: DeviceMemory

    @classmethod
    def within(cls, card: Card, block: DeviceBlock, placed: SlabLayout) -> "OpenSlab":
        """The slab in a block, which stays open when the block is closed.

        Raises:
            BuildError: The block is too small.
        """
        if block.size < placed.size:
            raise BuildError(f"slab: got {block.size} bytes, expected {placed.size}")
        return cls(
            placed=placed,
            card=card,
            address=block.address,
            host_address=card.host_address(block.address),
            memory=block.memory(0, block.size),
        )

    @property
    def device(self) -> Device:
        """The card, by its index in this process."""
        return self.card.device

    def add_to(self, session_options: Any) -> None:
        """Have the sessions with these options of ONNX Runtime use the weights where they lie.

        Raises:
            MissingDependencyError: ONNX Runtime is not installed, or not the one for cards.
        """
        with requires(_NEEDS_RUNTIME, "onnxruntime", extra="gpu"):
            import onnxruntime as ort
        on_card = "CUDAExecutionProvider" in ort.get_available_providers()
        tensors = self.tensors(on_host=not on_card)
        if tensors is None:
            raise MissingDependencyError(f"{_NEEDS_RUNTIME}: {install('gpu')}")
        values = runtime_values(tensors, ort.OrtValue.from_dlpack)
        for name, value in values.items():
            session_options.add_initializer(name, value)
        session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session_options.add_session_config_entry("session.disable_prepacking", "1")
        # The options have only pointers to the values.
        weakref.finalize(session_options, values.clear).atexit = False

    def tensors(self, *, on_host: bool = False) -> dict[str, DlpackTensor] | None:
        """The weights by name, on the card, or where the host reads them; None if it cannot.

        Each keeps the slab's memory open, and so does each consumer of its DLPack capsule.
        """
        address = self.host_address if on_host else self.address
        if address is None:
            return None
        return {
            tensor.name: DlpackTensor(
                address=address + tensor.offset,
                shape=tensor.shape,
                element_type=tensor.element_type,
                device=None if on_host else self.device,
                owner=self.memory,
            )
            for tensor in self.placed.tensors
        }


def filled(card: Card, number: int, placed: SlabLayout) -> DeviceBlock:
    """A new block of the card's memory with the weights in it; it has at least one byte.

    Raises:
        OSError: A file cannot be read, or has become shorter.
        CardMemoryError: The card has no room for it; another `CardError` if the driver refused.
    """
    block = card.create(number, max(placed.size, 1))
    staging = mmap.mmap(-1, 2 * _STAGING_BYTES)
    pinned = c_char.from_buffer(staging)
    address = addressof(pinned)
    with ExitStack() as failed, ExitStack() as opened:
        failed.callback(block.close)  # a copy of the weights may need the room
        if card.register(address, len(staging)):
            opened.callback(card.unregister, address)
        opened.callback(card.synchronize)  # before the memory that the card reads is let go
        files = {
            file: opened.enter_context(open_regular(file))[0]
            for file in {tensor.file for tensor in placed.tensors}
        }
        for step, start in enumerate(range(0, placed.size, _STAGING_BYTES)):
            half = step % 2 * _STAGING_BYTES
            size = min(_STAGING_BYTES, placed.size - start)
            memory = memoryview(staging)[half : half + size]
            for tensor in placed.tensors:
                first = max(tensor.offset, start)
                last = min(tensor.offset + tensor.size, start + size)
                if first < last:
                    at = tensor.file_offset + first - tensor.offset
                    _read(files[tensor.file], at, memory[first - start : last - start], tensor)
            card.synchronize()  # the other half has been copied, while this one was read
            card.copy(block.address + start, address + half, size)
        opened.close()
        failed.pop_all()
    return block


def _read(file: int, at: int, memory: memoryview, tensor: SlabTensor) -> None:
    while memory:
        count = os.preadv(file, [memory], at)
        if not count:
            raise OSError(errno.EIO, f"{tensor.file} ends within the weight {tensor.name!r}")
        memory, at = memory[count:], at + count


# For processes of the user's own.


def card_to_share_on(device: str, options: EngineOptions) -> Card:
    """The card for the arguments of a `WeightOwner`, which it checks."""
    found = Device.parse(device)
    if found.kind != CARD_KIND:
        raise InvalidInputError(f"device: got {device!r}, expected a card such as 'cuda:0'")
    if options.provider not in (None, "cuda"):
        raise InvalidInputError(
            f"options: got the provider {options.provider!r}, expected 'cuda': no other one takes weights "
            "that are on a card"
        )
    return Card.open(found)


def put(card: Card, model: Path) -> tuple[DeviceBlock, OpenSlab]:
    """A block with the weights of a prepared model, and the slab in it for this process."""
    placed = layout(model)
    block = filled(card, 0, placed)
    return block, OpenSlab.within(card, block, placed)


def open_slab(handle: int, model: Path, token: bytes, fd: int) -> OpenSlab:
    """Open the slab of an owner's weights; the descriptor is this function's, even if it fails."""
    with ExitStack() as failed:
        failed.callback(os.close, fd)
        placed = layout(model)
        card = Card.find(token)
        if card is None:
            raise WeightAccessError(
                f"weights {handle} are on a card that this process does not see (CUDA_VISIBLE_DEVICES)"
            )
        failed.pop_all()
    with closing(card.attach(0, max(placed.size, 1), fd, token, card.device)) as block:
        return OpenSlab.within(card, block, placed)
