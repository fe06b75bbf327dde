"""Tests of mcinfer/protocol.py, and that docs/protocol.md says the same."""

import dataclasses
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from mcinfer import protocol
from mcinfer.checks import as_map
from mcinfer.config import PROVIDERS, EngineOptions, PrepareKind
from mcinfer.errors import InvalidInputError, ProtocolError
from mcinfer.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_RUNS,
    MESSAGES,
    PREDICT,
    PREDICT_HEAD,
    REPLY,
    REPLY_HEAD,
    TRANSITIONS,
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Cancel,
    Detach,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    PredictJoined,
    Preparing,
    Reply,
    TensorRef,
    UpdateWeights,
    WorkerState,
    decode,
    decode_body,
    encode,
    encode_predict_joined,
    encode_references,
    part_of_joined,
    state_after,
)
from mcinfer.specs import ELEMENT_TYPES, STRING
from tests.conversations import Conversation

S = WorkerState
DOCS = Path(__file__).parents[1] / "docs" / "protocol.md"

COUNTS = st.integers(0, 2**63 - 1)
BLOCKS = st.integers(-(2**63) + 1, 2**63 - 1)
SHARDS = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
SHAPES = st.lists(COUNTS, max_size=4).map(tuple)
NUMERIC = st.sampled_from([name for name in ELEMENT_TYPES if name != STRING])
NUMERIC_REFERENCES = st.tuples(
    st.text(), NUMERIC, SHAPES, st.integers(-(2**63) + 1, 2**63 - 1), COUNTS
)
STRING_REFERENCES = st.lists(st.text() | st.binary(), max_size=4).map(
    lambda values: ("text", STRING, (len(values), 1), None, tuple(values))
)
REFERENCES = st.lists(NUMERIC_REFERENCES | STRING_REFERENCES, max_size=3).map(tuple)
SPECS = st.lists(
    st.tuples(
        st.text(),
        st.sampled_from([*ELEMENT_TYPES]),
        st.lists(COUNTS | st.text() | st.none(), max_size=4).map(tuple),
    ),
    max_size=3,
    unique_by=lambda spec: spec[0],
).map(tuple)
AXES = st.lists(st.none() | COUNTS, max_size=3).map(tuple)
OUTPUT_AXES = st.lists(COUNTS, max_size=3).map(tuple)
TENSORS = st.tuples(REFERENCES, REFERENCES)
# Sixteen and more take another header of MessagePack than fifteen.
MEMBERS = st.one_of(
    st.lists(TENSORS, min_size=2, max_size=4), TENSORS.map(lambda tensors: [tensors] * 20)
)
TEXTS = st.lists(st.text(), max_size=3).map(tuple)
TEXT_MAPS = st.dictionaries(st.text(), st.text(), max_size=3)

SIZE_MAPS = st.dictionaries(st.text(), COUNTS, max_size=2)
NAMES = st.lists(st.text(), max_size=3, unique=True)
OPTIONS = st.builds(
    EngineOptions,
    threads=st.none() | st.integers(1, 2**63 - 1),
    inter_op_threads=st.none() | st.integers(1, 2**63 - 1),
    concurrent_runs=st.integers(1, 16),
    streams=st.none() | st.integers(1, 16),
    cores=st.none() | st.lists(st.lists(COUNTS, min_size=1, unique=True), min_size=1, max_size=3),
    prepare=st.sampled_from(get_args(PrepareKind)),
    variable_weights=NAMES,
    allow_fallback=st.booleans(),
    session_config=TEXT_MAPS,
    provider_options=TEXT_MAPS,
    provider=st.none() | st.sampled_from(PROVIDERS),
    session_options=TEXT_MAPS,
    custom_operators=NAMES,
    free_dimensions=SIZE_MAPS,
    free_denotations=SIZE_MAPS,
    describe=st.booleans(),
)

STRATEGIES: dict[type[Message], st.SearchStrategy[Message]] = {
    Error: st.builds(
        Error,
        request=st.none() | COUNTS,
        shard=st.none() | SHARDS,
        kind=st.sampled_from(["build", "missing", "invalid", "refused", "predict", "cancelled"]),
        text=st.text(),
        traceback=st.text(),
    ),
    Predict: st.builds(
        Predict,
        request=COUNTS,
        shard=SHARDS,
        weights=COUNTS,
        wide=st.booleans(),
        returned=st.lists(BLOCKS, max_size=255).map(tuple),
        inputs=REFERENCES,
        outputs=REFERENCES,
    ),
    Reply: st.builds(Reply, request=COUNTS, shard=SHARDS, outputs=REFERENCES, seconds=SECONDS),
    BuildFinish: st.builds(
        BuildFinish,
        inputs=SPECS,
        outputs=SPECS,
        weights=SPECS,
        model=st.text(max_size=200),
        random=st.text(max_size=200),
        providers=st.lists(st.text(max_size=200), max_size=3).map(tuple),
        notes=TEXTS,
        seconds=SECONDS,
        concurrent=st.integers(1, MAX_RUNS),
        slab=st.none() | st.tuples(st.integers(-(2**63) + 1, -1), st.integers(1, 2**63 - 1)),
        reaches=TEXTS,
        about=TEXT_MAPS,
        properties=TEXT_MAPS,
        overridable=SPECS,
        provider_options=st.dictionaries(st.text(), TEXT_MAPS, max_size=2),
    ),
    Exit: st.builds(Exit),
    Hello: st.builds(Hello, version=COUNTS, pid=COUNTS, token=st.text()),
    Build: st.builds(
        Build,
        model=st.text(),
        engine=st.text(),
        device=st.text(),
        cores=st.lists(COUNTS, max_size=4).map(tuple),
        shared=st.booleans(),
        threads=st.none() | COUNTS,
        options=OPTIONS,
        card_workers=COUNTS,
        shares_weights=st.booleans(),
        slab=st.none() | BLOCKS,
    ),
    Cancel: st.builds(Cancel, request=COUNTS, shard=SHARDS),
    Attach: st.builds(Attach, block=BLOCKS, size=COUNTS, device=st.text()),
    Detach: st.builds(Detach, block=COUNTS),
    Preparing: st.builds(Preparing, seconds=SECONDS, written=COUNTS),
    UpdateWeights: st.builds(UpdateWeights, version=COUNTS, oldest=COUNTS, tensors=REFERENCES),
    PredictJoined: st.builds(
        PredictJoined,
        request=COUNTS,
        shard=SHARDS,
        weights=COUNTS,
        members=MEMBERS.map(
            lambda members: tuple({"inputs": one, "outputs": other} for one, other in members)
        ),
        input_axes=AXES,
        output_axes=OUTPUT_AXES,
    ),
}
MESSAGE = st.one_of(*STRATEGIES.values())

REQUEST, SHARD = 7, 2
MEMBER: dict[str, tuple[TensorRef, ...]] = {
    "inputs": (("x", "float32", (1, 2), 0, 0),),
    "outputs": (("y", "float32", (1, 2), 0, 64),),
}
SAMPLES: dict[type[Message], Message] = {
    Error: Error(request=REQUEST, shard=SHARD, kind="predict", text="no"),
    Predict: Predict(request=REQUEST, shard=SHARD, inputs=(), outputs=()),
    Reply: Reply(request=REQUEST, shard=SHARD, outputs=(), seconds=0.5),
    BuildFinish: BuildFinish(inputs=(), outputs=(), providers=("CPU",), seconds=1.0),
    Exit: Exit(),
    Hello: Hello(version=VERSION, pid=4242, token="secret"),  # noqa: S106
    Build: Build(model="/m.onnx", engine="onnxruntime", device="cpu:0", cores=(0, 1)),
    Cancel: Cancel(request=REQUEST, shard=SHARD),
    Attach: Attach(block=3, size=4096),
    Detach: Detach(block=3),
    Preparing: Preparing(seconds=1.0, written=10),
    UpdateWeights: UpdateWeights(version=2, oldest=1, tensors=(("w", "float32", (4,), 0, 128),)),
    PredictJoined: PredictJoined(
        request=REQUEST, shard=SHARD, members=(MEMBER, MEMBER), input_axes=(0,), output_axes=(0,)
    ),
}
BUILD_ERROR = Error(kind="build", text="no such file")


# The codec.


def test_strategies_and_samples_have_every_message() -> None:
    assert {*STRATEGIES} == {*SAMPLES} == {*MESSAGES.values()}


@given(MESSAGE)
@settings(max_examples=40)
def test_message_comes_back_as_it_was(message: Message) -> None:
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_file_name_that_is_not_utf8_comes_through() -> None:
    model = b"/models/caf\xe9.onnx".decode("utf-8", "surrogateescape")
    message = dataclasses.replace(SAMPLES[Build], model=model)  # type: ignore[call-arg]
    assert decode(encode(message)) == message


def _refused_or_sound(data: bytes) -> None:
    """Bytes from anyone: only a ProtocolError, or a message that is whole."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@given(MESSAGE)
@settings(max_examples=20)
def test_message_cut_anywhere_is_refused(message: Message) -> None:
    data = encode(message)
    for end in range(len(data)):
        if isinstance(message, Reply) and end == REPLY_HEAD.size:
            assert decode(data[:end]) == dataclasses.replace(message, outputs=())
            continue
        with pytest.raises(ProtocolError):
            decode(data[:end])


@given(MESSAGE, st.binary(min_size=1))
@settings(max_examples=20)
def test_message_with_more_behind_it_is_refused(message: Message, more: bytes) -> None:
    if isinstance(message, Reply) and not message.outputs:
        _refused_or_sound(encode(message) + more)  # these would be its outputs
        return
    with pytest.raises(ProtocolError):
        decode(encode(message) + more)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x91" * 100_000)
@example(b"\x82\xa2id\x04\xa2id\x04")
@example(b"\xdd\x00\x00@\x00" * 460)  # each promises as much as there is
@example(b"\x84\xa2id\x05\xa7version\x03\xa3pidd\xa5token\xa3\xed\xa0\x80")  # a surrogate
@example(b"\xd6\xff\x00\x00\x00\x01")
def test_bytes_from_anyone_are_refused_or_a_message(data: bytes) -> None:
    _refused_or_sound(data)


# Not as examples above: Hypothesis raises the recursion limit, and it is the limit that matters here.
@pytest.mark.parametrize(
    "start",
    [
        *(b"\x81\xa2id", b"\x82\xa2id\x07\xa7request", b"\x82\xa2id\x04\xa1x"),
        REPLY_HEAD.pack(REPLY, 1, 0, 0.5, False),
        PREDICT_HEAD.pack(PREDICT, 1, 0, 0, 0, False, 0),
    ],
    ids=repr,
)
def test_value_nested_deep_is_refused(start: bytes) -> None:
    for depth in (500, 1000, 1020, 5000):
        with pytest.raises(ProtocolError):
            decode(start + b"\x91" * depth + b"\xc0")


def test_message_of_more_bytes_than_one_may_have_is_refused() -> None:
    with pytest.raises(ProtocolError, match="bytes, expected at most"):
        decode(REPLY_HEAD.pack(REPLY, 1, 0, 0.5, False) + bytes(MAX_MESSAGE_BYTES + 1))


SPEC = ("x", "float32", ("batch", 4))
MANY_SPECS = tuple((str(i), "int8", ()) for i in range((1 << 16) + 1))


@pytest.mark.parametrize(
    ("kind", "field", "most", "more"),
    [
        (Error, "text", "e" * ((1 << 20) + 1024), "e" * ((1 << 20) + 1025)),
        (BuildFinish, "notes", ("n" * 5000,) * 16, ("n",) * 17),
        (BuildFinish, "providers", ("p" * 200,) * 64, ("p",) * 65),
        (BuildFinish, "concurrent", MAX_RUNS, MAX_RUNS + 1),
        (BuildFinish, "model", "m" * 200, "m" * 201),
        (BuildFinish, "inputs", (SPEC, ("y", *SPEC[1:])), (SPEC, SPEC)),
        (BuildFinish, "outputs", (("x", "int8", (1,) * 64),), (("x", "int8", (1,) * 65),)),
        (BuildFinish, "weights", MANY_SPECS[:-1], MANY_SPECS),
    ],
)
def test_what_a_worker_says_of_itself_has_bounds(
    kind: type[Message], field: str, most: object, more: object
) -> None:
    message = dataclasses.replace(SAMPLES[kind], **{field: most})
    assert decode(encode(message)) == message
    with pytest.raises(ProtocolError, match=rf"{kind.__name__}\.{field} does not fit"):
        dataclasses.replace(SAMPLES[kind], **{field: more})


def strings(count: int, length: int) -> tuple[TensorRef, ...]:
    return (("s", STRING, (count,), None, ("x" * length,) * count),)


@pytest.fixture
def _short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has at most 64 KiB."""
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 1 << 16)


@pytest.mark.usefixtures("_short_messages")
def test_strings_up_to_the_limits_come_through() -> None:
    for inputs in (strings(8_000, 2), strings(1000, 30)):
        body, nothing = encode_references(inputs), encode_references(())
        message = decode(PREDICT_HEAD.pack(PREDICT, 1, 0, 0, len(body), False, 0) + body + nothing)
        assert isinstance(message, Predict)
        assert message.inputs == inputs


@pytest.mark.usefixtures("_short_messages")
@pytest.mark.parametrize(("count", "length"), [(12_000, 2), (1000, 34)])
def test_strings_past_a_limit_are_the_callers_mistake(count: int, length: int) -> None:
    with pytest.raises(InvalidInputError, match=r"^got \d+ strings in 1 tensors"):
        encode_references(strings(count, length))


def many_tensors(count: int) -> tuple[TensorRef, ...]:
    return tuple((str(i), "int8", (1,) * 8, 0, i) for i in range(count))


def many_texts(count: int) -> dict[str, str]:
    return {f"key {i}": "" for i in range(count)}


def many_settings(count: int) -> EngineOptions:
    return EngineOptions(session_config=many_texts(count))


thousand_strings = partial(strings, 1000)


@pytest.mark.usefixtures("_short_messages")
@pytest.mark.parametrize(
    ("kind", "field", "make", "most", "more"),
    [
        (Reply, "outputs", thousand_strings, 60, 67),
        (Predict, "inputs", thousand_strings, 60, 67),
        (UpdateWeights, "tensors", many_tensors, 1600, 3200),
        (Build, "options", many_settings, 1 << 10, 1 << 14),
        (BuildFinish, "properties", many_texts, 1 << 10, 1 << 14),
    ],
)
def test_sender_refuses_what_the_receiver_would(
    kind: type[Message], field: str, make: Callable[[int], Any], most: int, more: int
) -> None:
    message = dataclasses.replace(SAMPLES[kind], **{field: make(most)})
    assert decode(encode(message)) == message
    too_much = dataclasses.replace(SAMPLES[kind], **{field: make(more)})
    with pytest.raises(ProtocolError, match=rf"{kind.__name__}: got \d+ bytes, expected at most"):
        encode(too_much)


@pytest.mark.usefixtures("_short_messages")
@pytest.mark.parametrize(
    ("make", "count"), [(many_tensors, 2000), (lambda length: strings(1, length), 40_000)]
)
def test_references_that_no_message_can_carry_are_the_callers_mistake(
    make: Callable[[int], tuple[TensorRef, ...]], count: int
) -> None:
    with pytest.raises(InvalidInputError, match=r"tensors in \d+ bytes of a message"):
        encode_references(make(count))


@pytest.mark.parametrize(("tensors", "length"), [(40, 4), (10, 400)])
def test_as_many_members_as_fit_make_a_joined_run_that_is_read(
    tensors: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 1 << 20)

    def references(block: int) -> tuple[TensorRef, ...]:
        return tuple((f"{i:0{length}}", "int8", (1, 4), block, block) for i in range(tensors))

    part = part_of_joined(references(0), references(0))
    body = encode_references(references(2**63 - 1))
    members = [(body, body)] * int(1 / part)
    axes = (0,) * tensors
    message = decode(encode_predict_joined(1, 0, 0, members, (axes, axes)))
    assert isinstance(message, PredictJoined)
    assert len(message.members) > 100


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=3))
    | st.sampled_from(["id", *ELEMENT_TYPES, "build", 2**63, -1]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.data(), MESSAGE.filter(lambda message: not isinstance(message, (Predict, Reply))))
def test_changed_fields_are_refused_or_a_message(data: st.DataObject, message: Message) -> None:
    content: dict[str, Any] = msgpack.unpackb(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        place, key = content, data.draw(st.sampled_from([*content]))
        # Also deep within: the dimension of a shape, the values of a string tensor.
        while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()):
            place[key] = data.draw(ANYTHING)
        else:
            del place[key]
        if not content:
            break
    _refused_or_sound(msgpack.packb(content))


# The heads.


@given(st.binary(max_size=60), st.sampled_from([PREDICT, REPLY]))
def test_any_head_is_refused_or_a_message(data: bytes, first: int) -> None:
    _refused_or_sound(bytes([first]) + data)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("request", (2**63, 0, 0.5)),
        ("seconds", (1, 0, float("nan"))),
        ("seconds", (1, 0, float("inf"))),
        ("seconds", (1, 0, -1e-9)),
    ],
)
def test_bad_head_is_refused_by_its_field(field: str, values: tuple[int, int, float]) -> None:
    with pytest.raises(ProtocolError, match=rf"^Reply\.{field} does not fit"):
        decode(REPLY_HEAD.pack(REPLY, *values, False))


@given(REFERENCES, REFERENCES, st.integers(0, 2**32 - 1))
def test_body_is_cut_where_the_head_says_or_refused(
    inputs: tuple[TensorRef, ...], outputs: tuple[TensorRef, ...], size: int
) -> None:
    first = encode_references(inputs)
    body = first + encode_references(outputs)
    assert decode_body(body, len(first)) == (inputs, outputs)
    for other in {size, *range(len(body) + 2)} - {len(first)}:
        with pytest.raises(ProtocolError):
            decode_body(body, other)


BAD_REFERENCES: list[Any] = [
    [],
    (("x", "float32", (1,), 0),),
    (("x", "float31", (1,), 0, 0),),
    (("x", {}, (1,), 0, 0),),
    (("x", "float32", (-1,), 0, 0),),
    (("x", "float32", (1,) * 65, 0, 0),),
    (("x", "float32", (1,), 2**63, 0),),
    (("x", "float32", (1,), None, 0),),
    (("x", STRING, (1,), 0, 0),),
    (("x", STRING, (2,), None, ("a",)),),
    (("x", STRING, (2**62, 2**62), None, ()),),
]
BAD_FIELDS: list[tuple[type[Message], str, Any]] = [
    *((Predict, "inputs", references) for references in BAD_REFERENCES),
    (Error, "request", -1),
    (Error, "shard", 2**32),
    (Error, "kind", "other"),
    (Error, "text", None),
    (Predict, "shard", True),
    (Reply, "request", 1.0),
    (Reply, "seconds", float("nan")),
    (BuildFinish, "inputs", (("x", "float32"),)),
    (BuildFinish, "outputs", (("x", "float32", (1.5,)),)),
    (BuildFinish, "providers", ("CPU", None)),
    (BuildFinish, "about", {"version": 1}),
    (BuildFinish, "concurrent", 0),
    (BuildFinish, "provider_options", {"CPU": {"a": 1}}),
    (Build, "cores", (0, -1)),
    (Build, "threads", -1),
    (Build, "options", {"threads": 1}),
    (Cancel, "request", 2**63),
    (PredictJoined, "members", (MEMBER,)),
    (PredictJoined, "members", (MEMBER, {"inputs": ()})),
    (PredictJoined, "members", (MEMBER, {**MEMBER, "more": ()})),
    (PredictJoined, "members", (MEMBER, {"inputs": (), "outputs": (("x", "float31", (), 0, 0),)})),
    (PredictJoined, "input_axes", (-1,)),
    (PredictJoined, "output_axes", (None,)),
]


@pytest.mark.parametrize(("kind", "name", "value"), BAD_FIELDS)
def test_bad_field_is_refused_by_its_name(kind: type[Message], name: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=rf"^{kind.__name__}\.{name} does not fit"):
        dataclasses.replace(SAMPLES[kind], **{name: value})


BAD_OPTIONS: list[tuple[str, Any]] = [
    ("threads", 0),
    ("variable_weights", ("w", b"v")),
    ("provider_options", {b"a": "b"}),
    ("describe", None),
]


def build_with(options: object) -> bytes:
    """A BUILD with this in the place of its options' map."""
    content = msgpack.unpackb(encode(SAMPLES[Build]))
    return bytes(msgpack.packb({**content, "options": options}))


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS)
def test_options_on_the_wire_are_checked_as_a_users_are(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}: got"):
        EngineOptions(**{name: value})
    with pytest.raises(ProtocolError, match=rf"^Build\.options does not fit: {name}: got"):
        decode(build_with({**as_map(EngineOptions()), name: value}))


@pytest.mark.parametrize(
    "options",
    [
        None,
        (),
        {},
        {**as_map(EngineOptions()), "more": 1},
    ],
)
def test_options_that_are_no_map_of_these_fields_are_refused(options: object) -> None:
    with pytest.raises(ProtocolError, match=r"^Build\.options does not fit: "):
        decode(build_with(options))


@pytest.mark.parametrize("references", BAD_REFERENCES)
def test_references_that_do_not_fit_are_not_encoded(references: Any) -> None:
    with pytest.raises(ProtocolError, match="references do not fit"):
        encode_references(references)


@pytest.mark.parametrize("number", [-1, 1, 2, 13, 255, None, "0", 0.0, True, [0]])
def test_unknown_id_is_refused(number: Any) -> None:
    with pytest.raises(ProtocolError, match="unknown message id"):
        decode(msgpack.packb({"id": number}))


def test_missing_and_further_fields_are_refused() -> None:
    with pytest.raises(
        ProtocolError, match=r"Cancel: got fields \[\], expected \['request', 'shard'\]"
    ):
        decode(msgpack.packb({"id": Cancel.ID}))
    with pytest.raises(ProtocolError, match="Exit: got fields"):
        decode(msgpack.packb({"id": Exit.ID, "status": 0}))


# The state table.


def test_message_that_the_table_does_not_allow_is_refused() -> None:
    for state in WorkerState:
        for kind in {*SAMPLES} - {*TRANSITIONS[state]}:
            with pytest.raises(ProtocolError, match=f"{kind.__name__} may not come in state"):
                state_after(state, kind)


# Two sides, joined by a link on which messages take their time.

TO_WORKER = (Build, Predict, PredictJoined, Cancel, Attach, Detach, UpdateWeights, Exit)
TO_MASTER = (Hello, Preparing, BuildFinish, Reply, Error)


class Link(RuleBasedStateMachine):
    """What one side may send by its own state, the other must take, however long it was on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.master, self.worker = Conversation(), Conversation()
        self.to_worker: deque[Message] = deque()
        self.to_master: deque[Message] = deque()
        self.requests = 0

    @rule(kind=st.sampled_from(TO_WORKER))
    def master_sends(self, kind: type[Message]) -> None:
        message = SAMPLES[kind]
        if isinstance(message, (Predict, PredictJoined)):
            if len(self.master.runs) == MAX_RUNS:
                return
            self.requests += 1
            message = dataclasses.replace(message, request=self.requests)
        elif isinstance(message, Cancel):
            message = Cancel(request=self.requests, shard=SHARD)
        if kind in TRANSITIONS[self.master.state]:
            self.master.advance(message)
            self.to_worker.append(message)

    @rule(kind=st.sampled_from(TO_MASTER), concurrent=st.integers(1, 3), which=st.integers(0, 2))
    def worker_sends(self, kind: type[Message], concurrent: int, which: int) -> None:
        message = SAMPLES[kind]
        if isinstance(message, BuildFinish):
            message = dataclasses.replace(message, concurrent=concurrent)
        elif self.worker.runs and isinstance(message, (Reply, Error)):
            begun = [*self.worker.runs][: self.worker.concurrent]
            request, shard = begun[which % len(begun)]
            message = dataclasses.replace(message, request=request, shard=shard)
        elif isinstance(message, Error):
            message = BUILD_ERROR
        elif isinstance(message, Reply):
            return  # there is nothing to answer
        if kind in TRANSITIONS[self.worker.state]:
            self.worker.advance(message)
            self.to_master.append(message)

    @precondition(lambda self: self.to_worker)
    @rule()
    def message_reaches_worker(self) -> None:
        self.worker.advance(self.to_worker.popleft())

    @precondition(lambda self: self.to_master)
    @rule()
    def message_reaches_master(self) -> None:
        self.master.advance(self.to_master.popleft())

    def teardown(self) -> None:
        while self.to_worker:
            self.message_reaches_worker()
        while self.to_master:
            self.message_reaches_master()
        assert self.master == self.worker


Link.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_two_sides_never_disagree = Link.TestCase


# The document.


def state_diagram() -> str:
    """The Mermaid state diagram of `TRANSITIONS`, in the table's order."""
    lines = ["stateDiagram-v2", f"    [*] --> {Conversation().state.name}"]
    for state, messages in TRANSITIONS.items():
        for after in WorkerState:
            names = [kind.__name__ for kind, target in messages.items() if target is after]
            if names:
                lines.append(f"    {state.name} --> {after.name}: {', '.join(names)}")
        if state is not S.GONE:
            lines.append(f"    {state.name} --> {S.GONE.name}: (process ends)")
    return "\n".join([*lines, f"    {S.GONE.name} --> [*]"])


def test_document_has_the_state_diagram_of_the_table() -> None:
    assert re.findall(r"```mermaid\n(.*?)\n```", DOCS.read_text(), re.DOTALL) == [state_diagram()]


def _rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the document, without its head."""
    section = DOCS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [
        [cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines[2:]
    ]


def _constant(kind: type[Message]) -> str:
    """BuildFinish is BUILD_FINISH."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


def test_document_has_every_message_with_its_id_and_way() -> None:
    ways = {True: "master → worker", False: "worker → master"}
    names = {number: _constant(kind) for number, kind in MESSAGES.items()}
    assert [row[:4] for row in _rows("Messages")] == [
        [str(number), names[number], kind.__name__, ways[kind in TO_WORKER]]
        for number, kind in MESSAGES.items()
    ]


def test_document_has_every_field_of_every_message() -> None:
    fields = [
        [kind.__name__, field.name]
        for kind in MESSAGES.values()
        for field in dataclasses.fields(kind)
    ]
    assert [row[:2] for row in _rows("Fields")] == fields


@settings(max_examples=25)
@given(
    request=COUNTS, shard=SHARDS, weights=COUNTS, members=MEMBERS, axes=st.tuples(AXES, OUTPUT_AXES)
)
def test_joined_predict_from_tensors_encoded_before_is_the_same_message(
    request: int,
    shard: int,
    weights: int,
    members: list[tuple[tuple[TensorRef, ...], tuple[TensorRef, ...]]],
    axes: tuple[tuple[int | None, ...], tuple[int, ...]],
) -> None:
    message = PredictJoined(
        request=request,
        shard=shard,
        weights=weights,
        members=tuple({"inputs": inputs, "outputs": outputs} for inputs, outputs in members),
        input_axes=axes[0],
        output_axes=axes[1],
    )
    tensors = [
        (encode_references(inputs), encode_references(outputs)) for inputs, outputs in members
    ]
    data = encode_predict_joined(request, shard, weights, tensors, axes)
    assert data == encode(message)
    assert decode(data) == message
