"""What ranks say to each other comes through whole, and nothing else does."""

import socket
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import ProtocolError
from mcinfer.protocol import Message
from mcinfer.ranks.messages import (
    Bind,
    Bound,
    Channel,
    Done,
    Ended,
    Exit,
    Found,
    Hello,
    Join,
    Load,
    Ready,
    Start,
)

MESSAGES: list[Message] = [
    Hello(rank=1, pid=7, device="cpu:0"),
    Load(cache="/\udcff", key="0" * 32, tensor=2, pipeline=1),
    Found(),
    Join(),
    Ready(takes=("x",), makes=()),
    Ended(kind="missing", text="no package"),
    Bind(layout=3, lane=0, inputs=((), (2, 0)), outputs=(None, (1,)), renewed=True),
    Bound(kind="", text=""),
    Start(layout=3, lane=1),
    Done(produced=(("y", (2, 3)),)),
    Ended(kind="died", text="rank 2 died"),
    Exit(),
]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_through(pair: tuple[Channel, Channel], message: Message) -> None:
    pair[0].send(message)
    assert pair[1].receive() == message


def test_the_end_of_the_other_side_is_none_after_what_it_said(
    pair: tuple[Channel, Channel],
) -> None:
    pair[1].send(Found())  # never read
    pair[0].send(Exit())
    pair[0].close()
    assert pair[1].receive() == Exit()
    assert pair[1].receive() is None
    with pytest.raises(ConnectionError):
        pair[1].send(Found())


@pytest.mark.parametrize("size", [1 << 20, 64 << 20])
def test_a_message_that_no_packet_holds_is_refused(
    pair: tuple[Channel, Channel], size: int
) -> None:
    with pytest.raises(ProtocolError, match=r"Ended: got \d+ bytes, more than"):
        pair[0].send(Ended(kind="build", text="x" * size))


@pytest.mark.parametrize(
    "content",
    [
        {"id": 99},
        {"id": Exit.ID, "more": 1},
        {"id": Start.ID, "layout": -1, "lane": 0},
        {"id": Start.ID, "layout": 1},
        {
            "id": Bind.ID,
            "layout": 1,
            "lane": 0,
            "inputs": [[None]],
            "outputs": [],
            "renewed": False,
        },
        {"id": Ended.ID, "kind": "other", "text": ""},
        [1, 2],
    ],
)
def test_what_is_no_message_is_refused(pair: tuple[Channel, Channel], content: object) -> None:
    pair[0].socket.send(msgpack.packb(content))
    with pytest.raises(ProtocolError):
        pair[1].receive()


@given(data=st.binary(min_size=1, max_size=200))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(data)
        try:
            assert isinstance(Channel(theirs).receive(), Message)
        except ProtocolError:
            return
