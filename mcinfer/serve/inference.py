"""A request for a model's answer, whatever protocol brings it: checked, run, and its errors.

A *document* is the request's JSON object, or what a message of gRPC says in the same form.
"""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictTimeoutError,
    QueueFullError,
    WorkerDiedError,
    shortened,
)
from mcinfer.serve.models import Instance, RefusedError
from mcinfer.serve.regions import Region, Regions
from mcinfer.serve.tensors import TensorHead, bytes_of, from_bytes, from_json
from mcinfer.specs import TensorSpec

MAX_TENSORS = 1024
"""Most inputs, or outputs, that a request may name."""

_MOST = 1 << 62

_log = logging.getLogger("mcinfer.serve")


@dataclass(frozen=True, slots=True)
class OutputWish:
    """An output that a request asks for, and how it is to come."""

    spec: TensorSpec
    binary: bool
    region: Region | None = None


class Inference:
    """A request of a document that was checked; its tensors' values may still be to come.

    Args:
        document: What the client says.
        instance: Of the model.
        regions: Of clients' shared memory.
        binary: Whether outputs come as bytes unless the document says so.

    Attributes:
        id: The client's own name for it.
        heads: Its inputs, in the request's order.
        wishes: Its outputs, likewise; all of the model if it names none.
        arrays: The values of inputs that are read, by name.

    Raises:
        InvalidInputError: Something is missing, of another type, or not of this model.
    """

    def __init__(
        self, document: Any, instance: Instance, regions: Regions, *, binary: bool = False
    ) -> None:
        self._instance, self._regions = instance, regions
        self.arrays: dict[str, NDArray[Any]] = {}
        document = checked("the request", document, dict)
        parameters = _parameters(document)
        if parameters.get("sequence_id"):
            raise InvalidInputError("sequence_id: models keep no state here between requests")
        self.id: str = checked("id", document.get("id", ""), str)
        micro, level = (_count(parameters, name) for name in ("timeout", "priority"))
        self._timeout = micro / 1e6 or None
        self._priority = -level or instance.usual_priority
        self.heads: list[TensorHead] = []
        for spec, own, given in _tensors(document, "inputs", instance.master.inputs):
            if given.get("datatype") != (expected := instance.datatypes[spec.name]):
                got = str(given.get("datatype"))[:100]
                raise InvalidInputError(f"input {spec}: got datatype {got}, expected {expected}")
            shape = tuple(checked(f"shape of input '{spec.name}'", given.get("shape"), list))
            self.heads.append(TensorHead(spec, shape, own, given.get("data")))
        if len(self.heads) < len(instance.master.inputs):
            got, expected = [h.spec.name for h in self.heads], [*instance.datatypes]
            raise InvalidInputError(f"inputs: got {got}, expected {expected}")
        binary = checked("binary_data_output", parameters.get("binary_data_output", binary), bool)
        self.wishes: list[OutputWish] = []
        for spec, own, _ in _tensors(document, "outputs", instance.master.outputs):
            if own.get("classification"):
                raise InvalidInputError(f"classification: output '{spec.name}' comes as it is")
            as_bytes = checked("binary_data", own.get("binary_data", binary), bool)
            self.wishes.append(OutputWish(spec, as_bytes, regions.part(own)))
        if not self.wishes:
            self.wishes = [OutputWish(spec, binary) for spec in instance.master.outputs]

    def read(self) -> list[tuple[TensorHead, int]]:
        """Read the inputs that are in the document or in shared memory; the others, with their bytes.

        Raises:
            InvalidInputError: An input has no value, several, or one that does not fit.
        """
        others = []
        for head in self.heads:
            region, size = (
                self._regions.part(head.parameters),
                head.parameters.get("binary_data_size"),
            )
            if [head.data, region, size].count(None) != 2:
                raise head.wrong("expected one of data, shared_memory_region and binary_data_size")
            if size is not None:
                head.check_bytes(checked("binary_data_size", size, int))
                others.append((head, size))
            elif region is None:
                self.arrays[head.spec.name] = from_json(head)
            elif head.shareable:
                head.check_bytes(region.size)
                self.allocate([head])
                region.read_into(bytes_of(self.arrays[head.spec.name]))
            else:
                self.arrays[head.spec.name] = from_bytes(head, region.read())
        return others

    def allocate(self, heads: Sequence[TensorHead]) -> None:
        """Give inputs that can lie in shared memory their place there; the content is still to come."""
        shapes = {head.spec.name: head.shape for head in heads if head.shareable}
        self.arrays.update(self._instance.master.allocate(shapes))

    async def run(self) -> list[NDArray[Any]]:
        """The outputs, in order; what clients want in their shared memory is written there.

        A small request may be joined with others in one run; a larger one is split over all workers.
        """
        self._instance.last = time.time()
        rows = max((head.shape[0] for head in self.heads if head.shape), default=1)
        names = [wish.spec.name for wish in self.wishes]
        answer = await self._instance.master.predict_async(
            self.arrays,
            timeout=self._timeout,
            priority=self._priority,
            outputs=names,
            shards=1 if rows <= self._instance.joins else None,
        )
        for wish in self.wishes:
            if wish.region is not None:
                wish.region.write(bytes_of(answer[wish.spec.name]))
        return [answer[name] for name in names]


def checked(what: str, value: Any, kind: type) -> Any:
    """The value, if it is of this type."""
    if type(value) is not kind:
        expected = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
        got = str(value)[:100]
        raise InvalidInputError(f"{what}: got {got!r}, expected {expected.get(kind, 'an integer')}")
    return value


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = checked("parameters", given.get("parameters", {}), dict)
    return found


def _tensors(
    document: Mapping[str, Any], what: str, specs: Sequence[TensorSpec]
) -> list[tuple[TensorSpec, dict[str, Any], dict[str, Any]]]:
    """What a document says of each tensor: the model's tensor, its parameters, and all."""
    known, found = {spec.name: spec for spec in specs}, {}
    items = checked(what, document.get(what, []), list)
    if len(items) > MAX_TENSORS:
        raise InvalidInputError(f"{what}: got {len(items)}, expected {MAX_TENSORS} at most")
    for given in items:
        name = checked("name", checked(f"one of {what}", given, dict).get("name"), str)
        if name in found:
            raise InvalidInputError(f"{what[:-1]} '{name}' already exists in request")
        if name not in known:
            raise InvalidInputError(f"{what}: got '{name[:200]}', expected some of {[*known]}")
        found[name] = known[name], _parameters(given), given
    return [*found.values()]


def _count(parameters: Mapping[str, Any], name: str) -> int:
    value: int = checked(name, parameters.get(name, 0), int)
    if not 0 <= value < _MOST:
        raise InvalidInputError(f"{name}: got {value}, expected 0 or more")
    return value


# Errors.

_STATUSES: dict[type[McinferError], int] = {
    InvalidInputError: 400,
    QueueFullError: 503,
    ClosedError: 503,
    PredictTimeoutError: 504,
}


def status_of(exc: BaseException, instance: Instance | None = None) -> tuple[int, str]:
    """HTTP's status for an error, and its text for clients. What is the server's fault is logged whole."""
    if not isinstance(exc, McinferError):
        _log.error("a request failed by a fault of the server's", exc_info=exc)
        return 500, "internal error"
    status = next((s for kind, s in _STATUSES.items() if isinstance(exc, kind)), 500)
    if isinstance(exc, RefusedError):
        status = exc.status
    elif isinstance(exc, WorkerDiedError) and instance and not instance.master.health().serving:
        status = 503
    if status == 500:
        _log.warning("%s", exc)
    return status, public(str(exc))


_FOLDERS = re.compile(r"/(?:[^\s/'\":,;()]+/)+")


def public(text: str) -> str:
    """The text without the folders of this machine. Names in a model may look like paths, and stay."""

    def cut(match: re.Match[str]) -> str:
        return "" if os.path.exists("/" + match[0].split("/")[1]) else match[0]

    return shortened(_FOLDERS.sub(cut, text))
