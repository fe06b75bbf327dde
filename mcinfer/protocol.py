"""The messages between a master and its workers, and the order in which they may come.

One MessagePack map per message (https://github.com/msgpack/msgpack/blob/master/spec.md), never pickle.
`TRANSITIONS` is the whole life of a worker, and both sides keep the state of each worker by it. A message
that is malformed, or that the table does not allow, raises `ProtocolError` and changes nothing.

PREDICT and REPLY have a head of fixed size instead, whose first byte is the message's id (no map of
MessagePack begins with it), and a body in MessagePack:

* PREDICT: `PREDICT_HEAD`, the numbers of returned blocks, then the inputs' and the outputs' references. The
  references are the same for all requests whose tensors lie in the same places, so a worker decodes and
  checks them once.
* REPLY: `REPLY_HEAD`, then the outputs' references, or nothing if all outputs are where PREDICT said.

Ids 0 to 4 are those of the multi-card sample of MindSpore Lite. A tensor reference ``(name, element type,
shape, block, offset)`` says where a tensor lies in shared memory. Only strings, which have no fixed size,
travel inline: then the block is None and the last place holds the values.
"""

import reprlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import Annotated, Any, ClassVar

import msgpack

from mcinfer.checks import (
    MAX_DIMENSIONS,
    Check,
    as_map,
    from_map,
    is_block,
    is_count,
    is_flag,
    is_map_to,
    is_ranks,
    is_seconds,
    is_shape,
    is_shard,
    is_text,
    is_text_to,
    is_tuple_of,
    or_none,
)
from mcinfer.config import MAX_CONCURRENT_RUNS, CoreShare, EngineOptions
from mcinfer.errors import InvalidInputError, ProtocolError, shortened
from mcinfer.specs import ELEMENT_TYPES, STRING, Dimension

VERSION = 14  # raised with each change that an older peer would misread; HELLO carries it

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message. Tensors lie in shared memory, so only strings make a message large."""

MAX_REMEMBERED = 4096
"""Bytes of a REPLY's body that both sides may remember, with what it says."""

MAX_RUNS = MAX_CONCURRENT_RUNS
"""Runs that a worker has at most: those that are going on, and those that wait for their end."""

_MAX_ERROR = (1 << 20) + (1 << 10)
"""Characters of what an engine said, which a worker cuts at 2²⁰, and of what is put before it."""

_MAX_NAME = 200
_MAX_PROVIDERS = 64
MAX_NOTE = 5000
MAX_NOTES = 16
_MAX_CARDS = 1024

MAX_HELLO_BYTES = 512  # largest HELLO: from an unknown peer, nothing larger is read

PREDICT_HEAD = struct.Struct("<BQIQI?B")
"""Id, request, shard, version of the weights, bytes of the inputs' references, whether it may be wide, and
how many blocks are returned, whose numbers follow."""

REPLY_HEAD = struct.Struct("<BQId?")  # id, request, shard, seconds, whether it was wide

ERROR, PREDICT, REPLY, BUILD_FINISH, EXIT, PREDICT_JOINED = 0, 1, 2, 3, 4, 12
"""Ids of messages; the first five are those of the sample that `mcinfer.parallel` replaces."""

TensorRef = tuple[str, str, tuple[int, ...], int | None, Any]
"""Name, element type, shape, block id, byte offset; a worker's own blocks have negative ids."""

TensorFields = tuple[str, str, tuple[Dimension, ...]]
"""A tensor specification on the wire: name, element type, shape with symbols."""

MAX_SPECS = 1 << 16


def is_slab(value: Any) -> bool:
    """The number of a block that a worker made, and its bytes."""
    if type(value) is not tuple or len(value) != 2:
        return False
    number, size = value
    return is_block(number) and number < 0 and is_count(size) and size > 0


are_strings = is_tuple_of(lambda item: type(item) in (str, bytes))


def is_reference(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 5:
        return False
    name, element_type, shape, block, where = value
    if type(name) is not str or type(element_type) is not str or not is_shape(shape):
        return False
    if element_type == STRING:
        return block is None and are_strings(where) and len(where) == prod(shape)
    return is_block(block) and is_count(where) and element_type in ELEMENT_TYPES


is_references = is_tuple_of(is_reference)


def is_member(value: Any) -> bool:
    """A map of a run's inputs and outputs."""
    return (
        type(value) is dict
        and value.keys() == {"inputs", "outputs"}
        and all(map(is_references, value.values()))
    )


def is_spec(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 3
        and type(value[0]) is str
        and type(value[1]) is str
        and value[1] in ELEMENT_TYPES
        and is_dimensions(value[2])
    )


is_dimensions = is_tuple_of(
    lambda size: size is None or type(size) is str or is_count(size), MAX_DIMENSIONS
)
are_specs = is_tuple_of(is_spec)


def is_specs(value: Any) -> bool:
    """Tensor specifications with different names."""
    return are_specs(value) and len({name for name, *_ in value}) == len(value) <= MAX_SPECS


_Count = Annotated[int, is_count]
_Shard = Annotated[int, is_shard]
_Seconds = Annotated[float, is_seconds]
_Text = Annotated[str, is_text]
_TextMap = Annotated[dict[str, str], is_map_to(is_text)]
_Flag = Annotated[bool, is_flag]
_References = Annotated[tuple[TensorRef, ...], is_references]
_Specs = Annotated[tuple[TensorFields, ...], is_specs]


MESSAGES: dict[int, "type[Message]"] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of the messages: each field is annotated with its check, which a new message runs.

    docs/protocol.md describes every field.
    """

    ID: ClassVar[int]
    CHECKS: ClassVar[dict[str, Check]]

    def __init_subclass__(cls) -> None:
        cls.CHECKS = {name: hint.__metadata__[0] for name, hint in cls.__annotations__.items()}
        MESSAGES[cls.ID] = cls  # called again for the class with slots, which takes the place

    def __post_init__(self) -> None:
        for name, check in self.CHECKS.items():
            value = getattr(self, name)
            if not check(value):
                count = f"{len(value)} items, " if isinstance(value, (tuple, dict)) else ""
                # Not repr: it fails on what is nested too deep, as an intruder's value may be.
                raise ProtocolError(
                    f"{type(self).__name__}.{name} does not fit: got {count}{reprlib.repr(value)}"
                )


_KINDS = ("build", "missing", "invalid", "refused", "predict", "cancelled", "broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """Worker to master: a build (request None) or a run failed, or a run was cancelled.

    `kind` is ``"build"``, ``"missing"`` (a package, for a build), ``"invalid"``, ``"refused"`` (the inputs,
    by the runtime), ``"predict"``, ``"cancelled"``, or ``"broken"``: a rank whose group cannot go on, of
    which the master hears no more.
    """

    ID = ERROR
    request: Annotated[int | None, or_none(is_count)] = None
    shard: Annotated[int | None, or_none(is_shard)] = None
    kind: Annotated[
        str,
        lambda value: value in _KINDS,
    ]
    text: Annotated[str, is_text_to(_MAX_ERROR)]
    traceback: Annotated[str, is_text_to(_MAX_ERROR)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Message):
    """Master to worker: run this shard; if it may be `wide`, with the cores of all workers on the CPU.

    Outputs without a place, or that have another shape than it, come back in a block of the worker's own.
    `returned` are the numbers of such blocks that it may fill again.
    """

    ID = PREDICT
    request: _Count
    shard: _Shard
    weights: _Count = 0
    wide: _Flag = False
    returned: Annotated[tuple[int, ...], is_tuple_of(is_block)] = ()
    inputs: _References
    outputs: _References


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Message):
    """Worker to master: the run succeeded; `seconds` is the time of the engine's run alone.

    `outputs` has every output, in the model's order, or none if all lie where PREDICT said.
    """

    ID = REPLY
    request: _Count
    shard: _Shard
    outputs: _References
    seconds: _Seconds
    wide: _Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFinish(Message):
    """Worker to master: the model is loaded.

    `model` names what the model computes, by its content and options, and is the same for all workers; empty
    if it cannot be read. `random` is a node that draws random numbers, `ragged` one whose result's size
    depends on its data. `notes` are remarks for the user. `concurrent` is how many runs it executes at once,
    and answers in any order.
    `slab` is the block with the weights on its card, which it made for the card's other workers and has
    handed over: number and bytes. `reaches` are the cards whose memory it reads and writes in place.

    If BUILD asked for it, the last four say what the runtime says of the model: see `ModelDescription`.
    """

    ID = BUILD_FINISH
    inputs: _Specs
    outputs: _Specs
    weights: _Specs = ()
    model: Annotated[str, is_text_to(_MAX_NAME)] = ""
    random: Annotated[str, is_text_to(_MAX_NAME)] = ""
    ragged: Annotated[str, is_text_to(_MAX_NAME)] = ""
    providers: Annotated[tuple[str, ...], is_tuple_of(is_text_to(_MAX_NAME), _MAX_PROVIDERS)]
    notes: Annotated[tuple[str, ...], is_tuple_of(is_text_to(MAX_NOTE), MAX_NOTES)] = ()
    seconds: _Seconds
    concurrent: Annotated[int, lambda value: is_count(value) and 1 <= value <= MAX_RUNS] = 1
    slab: Annotated[tuple[int, int] | None, or_none(is_slab)] = None
    reaches: Annotated[tuple[str, ...], is_tuple_of(is_text_to(_MAX_NAME), _MAX_CARDS)] = ()
    about: _TextMap = field(default_factory=dict)
    properties: _TextMap = field(default_factory=dict)
    overridable: _Specs = ()
    provider_options: Annotated[dict[str, dict[str, str]], is_map_to(is_map_to(is_text))] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(Message):
    """Master to worker: finish and end with status 0."""

    ID = EXIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Worker to master, the first message: the token proves that the master started this worker."""

    ID = 5
    version: _Count
    pid: _Count
    token: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Build(Message):
    """Master to worker: load this model.

    `cores`, `shared` and `threads` are the worker's share of the cores. `options` travels as a map of its
    fields. With `tensor` times `pipeline` above 1, the worker is this `rank` of a group of so many, and loads
    its slice of the model.

    `card_workers`: how many workers of the pool its card has. With `shares_weights` these hold the weights
    once: this worker opens the block `slab`, which was attached before, or makes it if there is none yet.
    """

    ID = 6
    model: _Text
    engine: _Text
    device: _Text
    cores: Annotated[tuple[int, ...], is_tuple_of(is_count)] = ()
    shared: _Flag = False
    threads: Annotated[int | None, or_none(is_count)] = None
    wide_cores: Annotated[tuple[int, ...], is_tuple_of(is_count)] = ()
    options: Annotated[EngineOptions, lambda value: isinstance(value, EngineOptions)] = (
        EngineOptions()
    )
    card_workers: _Count = 1
    shares_weights: _Flag = False
    slab: Annotated[int | None, or_none(is_block)] = None
    tensor: Annotated[int, is_ranks] = 1
    pipeline: Annotated[int, is_ranks] = 1
    rank: _Count = 0

    @property
    def share(self) -> CoreShare:
        return CoreShare(
            cores=self.cores,
            shared=self.shared,
            threads=self.threads,
            wide_cores=self.wide_cores,
        )

    @property
    def ranks(self) -> int:
        """Over how many processes the model is cut."""
        return self.tensor * self.pipeline

    @property
    def depth(self) -> int:
        """How many runs its worker works on at a time: one in each stage of a pipeline, and the next."""
        return 1 if self.pipeline == 1 else min(self.pipeline + 1, MAX_RUNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """Master to worker: stop this run, or skip it if it has not begun; ignored after its answer.

    It comes over a socket of its own, so that a worker hears it during a run.
    """

    ID = 7
    request: _Count
    shard: _Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Message):
    """Master to worker: map this block, whose descriptor or token is already on the lifeline.

    `device` is the card whose memory it is, or empty for the host's.
    """

    ID = 8
    block: Annotated[int, is_block]
    size: _Count
    device: _Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(Message):
    """Master to worker: unmap this block, which is the master's or, below 0, the worker's own."""

    ID = 9
    block: Annotated[int, is_block]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights(Message):
    """Master to worker: the places of all replaced weights, before the first run with that version.

    No later run names a version below `oldest`.
    """

    ID = 10
    version: _Count
    oldest: _Count
    tensors: _References


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing(Message):
    """Worker to master: the preparation of the model makes progress, here or in another process."""

    ID = 11
    seconds: _Seconds
    written: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictJoined(Message):
    """Master to worker: run one shard of each of several requests as one batch.

    The first member's request and shard stand for the run in REPLY, ERROR and CANCEL. All members have the
    same tensors in the same order, whose shapes differ in the batch's axis alone; every output has its place.
    An input axis of None is for an input that all members share.
    """

    ID = PREDICT_JOINED
    request: _Count
    shard: _Shard
    weights: _Count = 0
    members: Annotated[
        tuple[dict[str, tuple[TensorRef, ...]], ...],
        lambda value: is_tuple_of(is_member)(value) and len(value) > 1,
    ]
    input_axes: Annotated[tuple[int | None, ...], is_tuple_of(or_none(is_count))]
    output_axes: Annotated[tuple[int, ...], is_tuple_of(is_count)]


def encode(message: Message) -> bytes:
    """The bytes of a message, which `decode` takes.

    Raises:
        ProtocolError: The message holds more than `decode` takes.
    """
    if isinstance(message, Predict):
        inputs, outputs = _pack(message.inputs), _pack(message.outputs)
        run, returned = (message.request, message.shard, message.weights), message.returned
        head = PREDICT_HEAD.pack(PREDICT, *run, len(inputs), message.wide, len(returned))
        data = head + encode_numbers(returned) + inputs + outputs
    elif isinstance(message, Reply):
        answer = (message.request, message.shard, message.seconds, message.wide)
        data = REPLY_HEAD.pack(REPLY, *answer)
        data += _pack(message.outputs) if message.outputs else b""
    else:
        content = {"id": message.ID, **{name: getattr(message, name) for name in message.CHECKS}}
        if isinstance(message, Build):
            content["options"] = as_map(message.options)
        data = _pack(content)
    if len(data) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise ProtocolError(f"{name}: got {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return data


def _pack(value: object) -> bytes:
    return bytes(_packer().pack(value))


def _packer() -> msgpack.Packer:
    # File names that are not UTF-8 are text with surrogates in Python, and must come through.
    # A packer is made for each call: its usual buffer of 256 KiB would be most of the cost.
    return msgpack.Packer(unicode_errors="surrogatepass", buf_size=1024)  # type: ignore[call-arg] # stubs of 1.0


def encode_references(references: tuple[TensorRef, ...]) -> bytes:
    """The inputs' or outputs' part of a PREDICT's body, the same for all requests with these tensors.

    Raises:
        ProtocolError: A reference does not fit.
        InvalidInputError: They are more than one message may carry, such as the strings of a large batch.
    """
    if not is_references(references):
        raise ProtocolError(f"references do not fit: got {reprlib.repr(references)}")
    data = _pack(references)
    most = (MAX_MESSAGE_BYTES - PREDICT_HEAD.size) // 2
    if len(data) > most:
        strings = sum(len(reference[4]) for reference in references if reference[1] == STRING)
        raise InvalidInputError(
            f"got {strings} strings in {len(references)} tensors in {len(data)} bytes of a message "
            f"for a worker, expected at most {most} bytes; a batch of fewer rows has fewer"
        )
    return data


def part_of_joined(inputs: tuple[TensorRef, ...], outputs: tuple[TensorRef, ...]) -> float:
    """How much of a PREDICT_JOINED a member with such references takes, wherever they lie; 1 is all of it."""
    far = [
        tuple((name, kind, shape, _FARTHEST, _FARTHEST) for name, kind, shape, _, _ in references)
        for references in (inputs, outputs)
    ]
    member = {"inputs": far[0], "outputs": far[1]}
    rest = len(inputs) + len(outputs) + _HEAD  # the axes, and the head
    return len(_pack(member)) / (MAX_MESSAGE_BYTES - rest)


_FARTHEST = 2**63 - 1  # the number of a block, or the offset, with the most bytes
_HEAD = 256
"""Bytes of a PREDICT_JOINED beside its members and axes, at most."""


def decode_body(body: bytes, inputs: int) -> tuple[tuple[TensorRef, ...], tuple[TensorRef, ...]]:
    """The inputs' and the outputs' references of a PREDICT's body.

    Raises:
        ProtocolError: The body holds no such references.
    """
    if inputs > len(body):
        raise ProtocolError(
            f"got {len(body)} bytes of references, of which {inputs} are the inputs'"
        )
    return _references(body[:inputs]), _references(body[inputs:])


def _references(data: bytes) -> tuple[TensorRef, ...]:
    found = _unpack(data)
    if not is_references(found):
        raise ProtocolError(f"references do not fit: got {reprlib.repr(found)}")
    return tuple(found)


_remembered_references = lru_cache(maxsize=256)(_references)


def decode_reply_body(body: bytes) -> tuple[TensorRef, ...]:
    """The outputs' references of a REPLY's body, of which workers say the same ones again and again.

    Raises:
        ProtocolError: The body holds no such references.
    """
    if not body:
        return ()
    return _remembered_references(body) if len(body) <= MAX_REMEMBERED else _references(body)


def encode_numbers(blocks: Sequence[int]) -> bytes:
    """The numbers of returned blocks, at most 255, as they follow the head of a PREDICT."""
    return struct.pack(f"<{len(blocks)}q", *blocks)


def cut_predict(data: bytes) -> tuple[tuple[int, int, int, int, bool], tuple[int, ...], bytes]:
    """The parts of a PREDICT.

    Returns:
        Request, shard, version of the weights, bytes of the inputs' references, and whether it may be wide;
        the numbers of returned blocks; and the body, with the references.

    Raises:
        ProtocolError: It ends before its body.
    """
    head, body = _head(Predict, PREDICT_HEAD, data)
    run, count = head[:5], head[5]
    if not count:
        return run, (), body
    end = 8 * count
    if len(body) < end:
        raise ProtocolError(f"Predict: got {len(body)} bytes, expected {count} numbers of blocks")
    return run, struct.unpack_from(f"<{count}q", body), body[end:]


def encode_predict_joined(
    request: int,
    shard: int,
    weights: int,
    members: Sequence[tuple[bytes, bytes]],
    axes: tuple[tuple[int | None, ...], tuple[int, ...]],
) -> bytes:
    """A PREDICT_JOINED, from the members' inputs and outputs as `encode_references` gave them.

    They fit one message if no more of them are joined than `part_of_joined` allows.
    """
    head = {"id": PREDICT_JOINED, "request": request, "shard": shard, "weights": weights}
    parts = [b"\x87", *(_pack(item) for pair in head.items() for item in pair)]
    parts += (_pack("members"), _packer().pack_array_header(len(members)))
    for inputs, outputs in members:
        parts += (b"\x82", _pack("inputs"), inputs, _pack("outputs"), outputs)
    parts += map(_pack, ("input_axes", axes[0], "output_axes", axes[1]))
    return b"".join(parts)


def decode(data: bytes) -> Message:
    """Read a message. Nothing in it is trusted: sizes, nesting and every field are checked.

    Raises:
        ProtocolError: It is not a message of this protocol.
    """
    if data[:1] == _PREDICT_ID:
        (request, shard, weights, size, wide), returned, body = cut_predict(data)
        inputs, outputs = decode_body(body, size)
        return Predict(
            request=request,
            shard=shard,
            weights=weights,
            wide=wide,
            returned=returned,
            inputs=inputs,
            outputs=outputs,
        )
    if data[:1] == _REPLY_ID:
        (request, shard, seconds, wide), body = _head(Reply, REPLY_HEAD, data)
        outputs = decode_reply_body(body)
        return Reply(request=request, shard=shard, outputs=outputs, seconds=seconds, wide=wide)
    content = _unpack(data)
    if type(content) is not dict:
        raise ProtocolError(f"a message is a map, got {type(content).__name__}")
    kind = content.pop("id", None)
    message = MESSAGES.get(kind) if type(kind) is int else None
    if message is None or message in (Predict, Reply):  # these are no maps
        raise ProtocolError(f"unknown message id {reprlib.repr(kind)}")
    if content.keys() != message.CHECKS.keys():
        raise ProtocolError(
            f"{message.__name__}: got fields {repr([*content])[:200]}, expected {[*message.CHECKS]}"
        )
    if message is Build:
        try:
            content["options"] = from_map(EngineOptions, content["options"])
        except InvalidInputError as exc:
            raise ProtocolError(shortened(f"Build.options does not fit: {exc}")) from None
    return message(**content)


_PREDICT_ID, _REPLY_ID = bytes([PREDICT]), bytes([REPLY])


def _head(kind: type[Message], head: struct.Struct, data: bytes) -> tuple[tuple[Any, ...], bytes]:
    """The values in the head of a message of this kind, behind its id, and the body."""
    if len(data) < head.size:
        raise ProtocolError(f"{kind.__name__}: got {len(data)} bytes, expected {head.size} or more")
    return head.unpack_from(data)[1:], data[head.size :]


def _unpack(data: bytes) -> Any:
    try:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"got {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}")
        return msgpack.unpackb(
            data, use_list=False, strict_map_key=True, unicode_errors="surrogatepass"
        )
    except Exception as exc:  # msgpack raises ValueError, TypeError, its own, and more on bad data
        raise ProtocolError(f"not a MessagePack message: {type(exc).__name__}: {exc}") from exc


class WorkerState(StrEnum):
    SPAWNED = "spawned"
    CONNECTED = "connected"
    BUILDING = "building"
    READY = "ready"
    BUSY = "busy"
    EXITING = "exiting"
    GONE = "gone"


_S = WorkerState

_TABLE: dict[WorkerState, dict[WorkerState, tuple[type[Message], ...]]] = {
    _S.SPAWNED: {_S.CONNECTED: (Hello,)},
    _S.CONNECTED: {_S.CONNECTED: (Attach,), _S.BUILDING: (Build,), _S.EXITING: (Exit,)},
    _S.BUILDING: {_S.BUILDING: (Preparing,), _S.READY: (BuildFinish,), _S.EXITING: (Error, Exit)},
    _S.READY: {
        _S.READY: (Attach, Detach, UpdateWeights, Cancel),
        _S.BUSY: (Predict, PredictJoined),
        _S.EXITING: (Exit,),
    },
    _S.BUSY: {
        _S.READY: (Reply, Error),
        _S.BUSY: (Predict, PredictJoined, Cancel, Attach, Detach, UpdateWeights),
        _S.EXITING: (Exit,),
    },
    _S.EXITING: {_S.EXITING: (Preparing, BuildFinish, Reply, Error, Cancel, Exit)},
    _S.GONE: {},
}

TRANSITIONS: dict[WorkerState, dict[type[Message], WorkerState]] = {
    state: {kind: after for after, kinds in row.items() for kind in kinds}
    for state, row in _TABLE.items()
}
"""What may come in which state, and the state after it. A process's end leads to GONE from any.

A worker that is BUSY may be given more runs, which it begins in their order: it stays BUSY until it has
answered all of them.
CANCEL is allowed in READY: it may cross the reply on its way. EXITING takes the answers of a
build or of runs that were going on when EXIT was sent, and the other side's EXIT after a build error.
"""


def state_after(state: WorkerState, kind: type[Message]) -> WorkerState:
    """The state after such a message, but for the runs that are left.

    Raises:
        ProtocolError: It may not come now.
    """
    after = TRANSITIONS[state].get(kind)
    if after is None:
        raise ProtocolError(f"{kind.__name__} may not come in state {state}")
    return after
