"""A request for a model's outputs, whatever protocol brings it: checked, run, and its errors."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import force_setattr
from numpy.typing import NDArray

from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    MemoryFullError,
    PredictTimeoutError,
    QueueFullError,
    WorkerDiedError,
    shortened,
)
from mcinfer.serve.documents import InferDocument, read_json
from mcinfer.serve.models import LOG_SAYS, Instance, RefusedError
from mcinfer.serve.regions import Region, Regions
from mcinfer.serve.tensors import TensorHead, bytes_of, from_bytes, from_json
from mcinfer.specs import TensorSpec

_SMALL_BYTES = 1 << 20
"""Inputs below are copied to shared memory with their request: to ask for a place there takes longer."""

_MOST_KNOWN, _LONGEST_KNOWN = 64, 4096
"""Of a model, requests that are checked once, and bytes of JSON of each."""

_log = logging.getLogger("mcinfer.serve")


@dataclass(frozen=True, slots=True)
class OutputWish:
    """An output that a request asks for, and how it is to come."""

    spec: TensorSpec
    binary: bool
    region: Region | None = None


class Inference:
    """A request that was checked; its tensors' values may still be to come.

    Args:
        asked: What the client says.
        instance: Of the model.
        regions: Of clients' shared memory.
        binary: Whether outputs come as bytes unless the client says so.

    Attributes:
        asked: As given.
        wishes: The outputs, in the request's order.
        arrays: The values of inputs that are read, by name.
        rows: How many there are, once it runs.

    Raises:
        InvalidInputError: An input or output is not of this model, missing, or of another type or shape.
    """

    def __init__(
        self, asked: InferDocument, instance: Instance, regions: Regions, *, binary: bool = False
    ) -> None:
        self._instance, self._regions, self.asked = instance, regions, asked
        self.arrays: dict[str, NDArray[Any]] = {}
        self.rows = 0
        if asked.parameters.sequence_id:
            raise InvalidInputError("sequence_id: models keep no state here between requests")
        inputs = _by_name("input", asked.inputs, instance.inputs)
        if len(inputs) < len(instance.inputs):
            got, expected = [spec.name for spec, _ in inputs], [s.name for s in instance.inputs]
            raise InvalidInputError(f"inputs: got {got}, expected {expected}")
        self._heads = [TensorHead(spec, given) for spec, given in inputs]
        self._shared = [
            h for h in self._heads if h.given.parameters.shared_memory_region is not None
        ]
        if asked.parameters.binary_data_output is not None:
            binary = asked.parameters.binary_data_output
        self.wishes: list[OutputWish] = []
        for spec, given in _by_name("output", asked.outputs, instance.outputs):
            own = given.parameters
            if own.classification:
                raise InvalidInputError(f"classification: output '{spec.name}' comes as it is")
            as_bytes = binary if own.binary_data is None else own.binary_data
            self.wishes.append(OutputWish(spec, as_bytes, regions.part(own)))
        if not self.wishes:
            self.wishes = [OutputWish(spec, binary) for spec in instance.outputs]

    def read(self) -> list[tuple[TensorHead, int]]:
        """Read the inputs that are in the document; those that come as bytes, with how many.

        Raises:
            InvalidInputError: An input has no value, several, or one that does not fit.
        """
        others = []
        for head in self._heads:
            name, given = head.spec.name, head.given
            region, size = self._regions.part(given.parameters), given.parameters.binary_data_size
            if [given.data, region, size].count(None) != 2:
                raise head.wrong("expected one of data, shared_memory_region and binary_data_size")
            if size is not None:
                head.check_bytes(size)
                others.append((head, size))
            elif region is None:
                self.arrays[name] = from_json(head)
                force_setattr(given, "data", None)  # it may take much memory
            else:
                head.check_bytes(region.size)
        return others

    def again(self) -> "Inference":
        """The same request once more, without the values."""
        other = object.__new__(Inference)
        other.__dict__ |= {**self.__dict__, "arrays": {}}
        return other

    def allocate(self, others: Sequence[tuple[TensorHead, int]]) -> None:
        """Give inputs of many bytes, which workers read in place, an array each; the content is to come."""
        for head, size in others:
            if head.shareable and size >= _SMALL_BYTES:
                name, shape = head.spec.name, head.given.shape
                reshape = self._instance.input_reshapes.get(name)
                models = reshape.to_model(shape) if reshape else shape
                array = self._instance.master.allocate({name: models})[name]
                self.arrays[name] = array.reshape(shape) if reshape else array

    async def _read_shared(self, head: TensorHead) -> None:
        """Read an input that is in a client's shared memory; a large one in a thread."""
        if region := self._regions.part(head.given.parameters):
            if region.size < _SMALL_BYTES:
                self._take(head, region)
            else:
                await asyncio.to_thread(self._take, head, region)

    def _take(self, head: TensorHead, region: Region) -> None:
        head.check_bytes(region.size)  # it may be another one now
        self.allocate([(head, region.size)])
        if (name := head.spec.name) in self.arrays:
            region.read_into(bytes_of(self.arrays[name]))
        else:
            self.arrays[name] = from_bytes(head, region.read())

    async def run(self) -> list[NDArray[Any]]:
        """The outputs, in order; what clients have, or want, in their shared memory is read or written.

        A small request may be joined with others in one run; a larger one is split over all workers.
        """
        self._instance.last = time.time()
        for head in self._shared:
            await self._read_shared(head)
        inputs, reshapes = self.arrays, self._instance.output_reshapes
        if self._instance.input_reshapes:
            inputs = self._instance.to_model(inputs)
        self.rows = max((len(array) for array in inputs.values() if array.ndim), default=1)
        names = [wish.spec.name for wish in self.wishes]
        try:
            answer = await self._instance.master.predict_async(
                inputs,
                timeout=self.asked.parameters.timeout / 1e6 or None,
                priority=-self.asked.parameters.priority or self._instance.usual_priority,
                outputs=names,
                shards=1 if self.rows <= self._instance.joins else None,
            )
        except InvalidInputError as exc:
            if not exc.by_runtime:
                raise
            given = "; ".join(head.said() for head in self._heads)
            refused = RefusedError(400, str(exc), f"the model refuses {given}: {LOG_SAYS}")
            raise refused.refusing(exc.refusal) from exc  # its master has counted it
        for name in reshapes.keys() & answer if reshapes else ():
            answer[name] = reshapes[name].to_clients(name, answer[name])
        for wish in self.wishes:
            if wish.region is not None:
                data = bytes_of(answer[wish.spec.name])
                if len(data) < _SMALL_BYTES:
                    wish.region.write(data)
                else:
                    await asyncio.to_thread(wish.region.write, data)
        return [answer[name] for name in names]


def checked(
    text: bytes, instance: Instance, regions: Regions
) -> tuple[Inference, list[tuple[TensorHead, int]]]:
    """A request in JSON, and what `Inference.read` gives; the same errors.

    Clients send the same again and again, with other values as bytes after it: that is checked once.
    """
    found = instance.asked.get(text) if len(text) <= _LONGEST_KNOWN else None
    if found is None:
        request = Inference(read_json(InferDocument, text), instance, regions)
        found = request, request.read()
        has_regions = any(wish.region for wish in request.wishes)
        if request.arrays or has_regions or len(text) > _LONGEST_KNOWN:
            return found
        if len(instance.asked) == _MOST_KNOWN:
            instance.asked.clear()
        instance.asked[text] = found
    return found[0].again(), found[1]


def _by_name(
    role: str, given: Sequence[Any], specs: Sequence[TensorSpec]
) -> list[tuple[TensorSpec, Any]]:
    """What is said of tensors, each beside the model's tensor of that name."""
    known, found = {spec.name: spec for spec in specs}, {}
    for one in given:
        if one.name in found:
            raise InvalidInputError(f"{role} '{one.name}' already exists in request")
        if one.name not in known:
            raise InvalidInputError(f"{role} '{one.name[:200]}' is unknown, expected {[*known]}")
        found[one.name] = known[one.name], one
    return [*found.values()]


# Errors.

_ANSWERS: dict[type[McinferError], tuple[int, str]] = {
    MemoryFullError: (503, "the memory for tensors is full"),
    QueueFullError: (503, "the queue is full"),
    ClosedError: (503, "the model is not served any more"),
    PredictTimeoutError: (504, "no answer came in time"),
    WorkerDiedError: (500, "the request has ended its workers"),
    McinferError: (500, "the run failed"),
}
"""Status and text for clients, but for `InvalidInputError` and `RefusedError`: their own texts are of the
request. Those of others are of the system and of models, and may name folders."""


def status_of(
    exc: BaseException, about: Mapping[str, Any], instance: Instance | None = None
) -> tuple[int, str]:
    """HTTP's status for an error, and its text for clients. What is the server's fault is logged whole.

    `about` is what is known of the request, for the log.
    """
    served = f"{about['model']}/{about['version']}, " if "model" in about else ""
    subject, extra = f"{served}request {about['request_id']}", {"fields": about}
    if not isinstance(exc, McinferError):
        text = "%s failed by a fault of the server's"
        _log.error(text, subject, exc_info=exc, extra=extra)
        return 500, "internal error"
    if isinstance(exc, InvalidInputError):
        return 400, shortened(str(exc))
    if isinstance(exc, RefusedError):
        if exc.public != str(exc):
            _log.warning("%s: %s", subject, exc, extra=extra)
        return exc.status, shortened(exc.public)
    status, text = next(answer for kind, answer in _ANSWERS.items() if isinstance(exc, kind))
    if isinstance(exc, WorkerDiedError) and instance and not instance.master.health().serving:
        return 503, "no worker serves now"
    if status == 500:
        _log.warning("%s: %s", subject, exc, extra=extra)
        text = f"{text}: {LOG_SAYS}"
    return status, text
