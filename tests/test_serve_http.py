"""Tests of mcinfer/serve/http.py that need no socket: bodies as they come, and clients that hang up."""

import asyncio
import json
import os
import tracemalloc
import zlib
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from mcinfer.errors import McinferError
from mcinfer.serve.http import _Body, make_app
from mcinfer.serve.models import Models
from mcinfer.serve.service import ServeOptions, Service

Message = MutableMapping[str, Any]

MIB = 1 << 20


class Client:
    """Sends a body in these parts, and hangs up after them unless the body ends there."""

    def __init__(self, parts: Iterable[bytes], *, ends: bool = True) -> None:
        self._parts, self._ends = [*parts], ends
        self.read = 0
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self._parts:
            return {"type": "http.disconnect"}
        self.read += 1
        body = self._parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": not self._ends or self._parts}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


async def body_of(client: Client, coding: str = "identity") -> bytes:
    headers = {b"content-encoding": coding.encode()}
    return await _Body(client.receive, headers, ServeOptions(max_request_bytes=MIB)).rest(2 * MIB)


def test_promised_bytes_take_no_memory_before_they_come() -> None:
    held: list[int] = []

    async def receive() -> Message:
        held.append(tracemalloc.get_traced_memory()[0])
        return {"type": "http.request", "body": b"x", "more_body": len(held) < 2}

    async def read() -> None:
        with pytest.raises(McinferError, match="the body ends"):
            await _Body(receive, {}, ServeOptions()).read(32 * MIB)

    tracemalloc.start()
    try:
        asyncio.run(read())
    finally:
        tracemalloc.stop()
    assert max(held) < MIB


EMPTY_BLOCKS = b"\x78\x01" + bytes.fromhex("000000ffff") * (MIB // 4)
"""A compressed body of more than a MiB that never ends, and has nothing in it."""


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (zlib.compress(b"{}")[:-1], "is cut short"),
        (b"", "is cut short"),
        (zlib.compress(b"{}") + bytes(9), "longer than its compressed data"),
        (zlib.compress(bytes(2 * MIB)), f"has more than {MIB} bytes, the limit"),
        (EMPTY_BLOCKS, f"has more than {MIB} bytes, the limit"),
    ],
    ids=["cut", "none", "more", "large", "empty"],
)
def test_compressed_body_is_whole_and_within_the_limit_in_both_forms(
    packed: bytes, text: str
) -> None:
    parts = [packed[i : i + 65536] for i in range(0, len(packed) or 1, 65536)]
    client = Client(parts)
    with pytest.raises(McinferError, match=text):
        asyncio.run(body_of(client, "deflate"))
    assert client.read < 18  # no more than the limit


def test_compressed_body_comes_whole_through_pieces_of_any_size() -> None:
    for size in (0, 1, 1 << 18, MIB):
        packed = zlib.compress(bytes(size))
        parts = [packed[i : i + 3] for i in range(0, len(packed), 3)]
        assert asyncio.run(body_of(Client(parts), "deflate")) == bytes(size)


def test_routes_are_those_that_the_server_describes() -> None:
    async def ask() -> None:
        app: Any = make_app(Service(Models({}, None, lambda _: {}), ServeOptions()))
        scope = {"type": "http", "method": "GET", "path": "/openapi.json", "headers": []}
        await app({**scope, "query_string": b""}, client.receive, client.send)
        for route in app._app.routes:
            for method in (route.methods or {"POST"}) - {"HEAD"}:
                routed.add((method.lower(), route.path))

    client, routed = Client([b""]), set[tuple[str, str]]()
    asyncio.run(ask())
    paths = json.loads(client.sent[1]["body"])["paths"]
    assert routed == {(method, path) for path, each in paths.items() for method in each}


def test_client_that_hangs_up_in_its_body_is_no_fault_of_the_server_s() -> None:
    async def ask(client: Client) -> None:
        service = Service(Models({}, None, lambda _: {}), ServeOptions())
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v2/repository/index",
            "headers": [],
            "query_string": b"",
        }
        await make_app(service)(scope, client.receive, client.send)

    client = Client([b"{"], ends=False)
    asyncio.run(ask(client))
    assert client.sent[0]["status"] == 499


def asked_of(path: str, body: bytes, models: Models, **options: Any) -> tuple[Message, bytes, int]:
    """The answer's start and body, and how often the event loop went round meanwhile."""

    async def ask() -> tuple[Message, bytes, int]:
        async with models:
            service = Service(models, ServeOptions(**options))
            app, client, rounds = make_app(service), Client([body]), 0
            scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
            ends = {"client": ("here", 1), "server": ("socket", None), "headers": []}
            if options.get("client_shared_memory"):
                user, size = os.geteuid(), REGION.stat().st_size
                service.regions.register(user, "region", key=REGION.name, byte_size=size)
                os.truncate(REGION, size - 1)
            asking = asyncio.ensure_future(app({**scope, **ends}, client.receive, client.send))
            while not asking.done():
                rounds += 1
                await asyncio.sleep(0)
            await asking
            return client.sent[0], b"".join(each["body"] for each in client.sent[1:]), rounds

    return asyncio.run(ask())


REGION = Path(f"/dev/shm/mcinfer-test-{os.getpid()}")  # noqa: S108 where regions are


@pytest.fixture
def model(tmp_path: Path) -> Models:
    tensors = [["x", "float32", ["rows", "columns"]]]
    content = {"inputs": tensors, "outputs": [["y", *tensors[0][1:], {"from": "x"}]]}
    (tmp_path / "m.json").write_text(json.dumps(content))
    options = {"engine": "fake", "devices": "inline"}
    return Models({"m": tmp_path / "m.json"}, None, lambda _: options)


def json_request(rows: int, data: bytes) -> bytes:
    text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [%d, 1], "data": [%s]}]}'
    return text % (rows, data)


def test_much_json_is_read_and_written_while_others_are_answered(model: Models) -> None:
    rows = 1 << 18
    asked = json_request(rows, b",".join([b"[1]"] * rows))
    started, body, rounds = asked_of("/v2/models/m/infer", asked, model)
    assert started["status"] == 200
    assert json.loads(body)["outputs"][0]["data"] == [1.0] * rows
    assert rounds > 100


@pytest.mark.parametrize(
    ("rows", "each", "status", "text"),
    [
        (1 << 21, b"[]", 400, "arrays in JSON"),
        (1 << 20, b"[1.000000]", 413, "8388608 bytes of JSON"),
    ],
)
def test_more_json_than_is_read_in_a_moment_is_refused(
    model: Models, rows: int, each: bytes, status: int, text: str
) -> None:
    asked = json_request(rows, b",".join([each] * rows))
    started, body, _ = asked_of("/v2/models/m/infer", asked, model)
    assert (started["status"], text in json.loads(body)["error"]) == (status, True), body


def test_much_shared_memory_is_read_while_others_are_answered(model: Models) -> None:
    """Its owner cuts off the end, so that nothing comes after the reading."""
    rows = 1 << 24
    given = {"shared_memory_region": "region", "shared_memory_byte_size": 4 * rows}
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 1], "parameters": given}
    asked = json.dumps({"inputs": [tensor]}).encode()
    REGION.touch()
    os.truncate(REGION, 4 * rows)
    try:
        started, body, rounds = asked_of(
            "/v2/models/m/infer", asked, model, client_shared_memory=True
        )
    finally:
        REGION.unlink()
    assert (started["status"], "has become shorter" in json.loads(body)["error"]) == (400, True)
    assert rounds > 100
