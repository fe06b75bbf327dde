"""What requests say in JSON, and in messages of gRPC in the same form. They may have further fields.

Those below ask for outputs. Others have what a function takes by keyword (`document_of`). At the end is what
answers say.

Sources: inference_rest.md of https://github.com/kserve/open-inference-protocol, and docs/protocol of
https://github.com/triton-inference-server/server for the extensions.
"""

from collections.abc import Callable
from inspect import signature
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
import orjson

from mcinfer.errors import InvalidInputError

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
MAX_TENSORS = 1024
MAX_JSON_BYTES = 8 << 20
"""Of a request, as JSON takes many times its size in memory. Bytes of tensors are not counted."""

_MAX_ARRAYS = 1 << 20
"""Of a request in JSON, with objects: each takes as much memory as many numbers."""

_T = TypeVar("_T")


class TensorParameters(msgspec.Struct, frozen=True):
    """Of an input or an output: where its bytes are, or are to be."""

    binary_data_size: Size | None = None
    binary_data: bool | None = None
    classification: int = 0
    shared_memory_region: str | None = None
    shared_memory_offset: Size = 0
    shared_memory_byte_size: Size = 0


class InputDocument(msgspec.Struct, frozen=True):
    """An input. `data` has its values, nested or flat."""

    name: str
    datatype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)]
    parameters: TensorParameters = TensorParameters()
    data: Any = None


class OutputDocument(msgspec.Struct, frozen=True):
    """An output that is asked for."""

    name: str
    parameters: TensorParameters = TensorParameters()


class InferParameters(msgspec.Struct, frozen=True):
    """`timeout` is in microseconds. Of priorities 1 is the highest, and 0 the model's usual one."""

    timeout: Size = 0
    priority: Size = 0
    binary_data_output: bool | None = None
    sequence_id: int | str = 0


class InferDocument(msgspec.Struct, frozen=True):
    """A request for a model's outputs; for all of them if it names none."""

    inputs: Annotated[tuple[InputDocument, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[tuple[OutputDocument, ...], msgspec.Meta(max_length=MAX_TENSORS)] = ()
    id: str = ""
    parameters: InferParameters = InferParameters()


def document_of(function: Callable[..., object]) -> type[msgspec.Struct] | None:
    """The type of the documents that have what a function takes by keyword alone; None if that is nothing."""
    own = (p for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
    fields = [(p.name, p.annotation, *([] if p.default is p.empty else [p.default])) for p in own]
    name = getattr(function, "__name__", "").title().replace("_", "")
    return msgspec.defstruct(f"{name}Document", fields) if fields else None


def read_document(kind: type[_T], given: Any) -> _T:
    """A document of this kind from what stands for it; `InvalidInputError` says what is wrong, and where."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as exc:
        raise InvalidInputError(f"the request: {exc}") from exc


def read_json(kind: type[_T], text: bytes) -> _T:
    """A document of this kind from JSON, of which there may be none."""
    if len(text) > _MAX_ARRAYS and text.count(b"[") + text.count(b"{") > _MAX_ARRAYS:
        raise InvalidInputError(f"the request has more than {_MAX_ARRAYS} arrays in JSON")
    try:
        given = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError as exc:
        raise InvalidInputError(f"the request is no JSON: {exc}") from exc
    return read_document(kind, given)


# Answers.


class Error(TypedDict):
    """What is wrong."""

    error: str


class Nothing(TypedDict):
    """It is done."""


class Live(TypedDict):
    """Whether the server runs."""

    live: bool


class Ready(TypedDict):
    """Whether requests should come; `name` is of a model."""

    ready: bool
    name: NotRequired[str]


class ServerMetadata(TypedDict):
    """The server, and the protocol's extensions that it has."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """A tensor of a model; -1 is a free size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model, and its versions that are served."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Times(TypedDict):
    """How often something happened, and how long it took in all."""

    count: int
    ns: int


class ModelStatistics(TypedDict):
    """What a version of a model has done; `last_inference` is in milliseconds since 1970."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: dict[str, Times]


class AllStatistics(TypedDict):
    """Of one version, or of several."""

    model_stats: list[ModelStatistics]


class IndexEntry(TypedDict):
    """A version that is served, or a model of which there is none, and why."""

    name: str
    state: str
    reason: str
    version: NotRequired[str]


class RegionStatus(TypedDict):
    """A registered part of an object in shared memory."""

    name: str
    key: str
    offset: int
    byte_size: int


class Output(TypedDict):
    """An output; without `data` its bytes come after the JSON, or lie in shared memory."""

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, int]]


class InferAnswer(TypedDict):
    """The outputs of a model."""

    model_name: str
    model_version: str
    outputs: list[Output]
    id: NotRequired[str]
