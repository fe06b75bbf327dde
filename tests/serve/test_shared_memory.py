"""Tensors in memory that `tritonclient` shares with the server."""

import http.client
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.utils as triton
from numpy.typing import NDArray
from tritonclient.utils import shared_memory

from tests.serve import models
from tests.serve.clients import Client
from tests.serve.conftest import Serve
from tests.serve.servers import Server

X = models.rows(3)
Y = 2 * X + 1


class Region:
    """An object in shared memory, registered with a server.

    Attributes:
        name: Of the region.
        key: Of the object.
        size: In bytes.
    """

    def __init__(self, client: Client, name: str, size: int) -> None:
        self.name, self.key, self.size = name, f"/{models.OBJECTS}{name}", size
        self._client = client
        self.handle = shared_memory.create_shared_memory_region(name, self.key, size)
        try:
            client.own.register_system_shared_memory(name, self.key, size)
        except BaseException:
            shared_memory.destroy_shared_memory_region(self.handle)
            raise

    @property
    def file(self) -> Path:
        return models.SHARED_MEMORY / self.key.removeprefix("/")

    def write(self, array: NDArray[Any], offset: int = 0) -> None:
        shared_memory.set_shared_memory_region(self.handle, [array], offset)

    def read(self, kind: str, shape: Any, offset: int = 0) -> NDArray[Any]:
        dtype = triton.triton_to_np_dtype(kind)
        found = shared_memory.get_contents_as_numpy(self.handle, dtype, shape, offset)
        return np.array(found)  # a copy, so that the object can be closed

    def close(self) -> None:
        self._client.own.unregister_system_shared_memory(self.name)
        shared_memory.destroy_shared_memory_region(self.handle)


MakeRegion = Callable[[str, int], Region]


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client("http", server) as opened:
        yield opened


@pytest.fixture
def region(client: Client) -> Iterator[MakeRegion]:
    """Makes regions, which are gone after the test."""
    made: list[Region] = []

    def make(name: str, size: int) -> Region:
        made.append(Region(client, name, size))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert client.own.get_system_shared_memory_status() == []
    assert not {*shared_memory.mapped_shared_memory_regions()} & {one.key for one in made}


def at(region: Region, given: Any, size: int, offset: int = 0) -> Any:
    """The input or wished output, in this part of a region."""
    given.set_shared_memory(region.name, size, offset)
    return given


def test_regions_are_registered_listed_and_forgotten(client: Client, region: MakeRegion) -> None:
    one, two = region("one", 4096), region("two", 1000)
    listed = client.own.get_system_shared_memory_status()
    assert listed == [
        {"name": "one", "key": one.key, "offset": 0, "byte_size": 4096},
        {"name": "two", "key": two.key, "offset": 0, "byte_size": 1000},
    ]
    assert client.own.get_system_shared_memory_status("two") == listed[1:]
    with client.refused(400) as said:
        client.own.register_system_shared_memory("one", one.key, 4096)
    assert "already" in said[0]
    client.own.unregister_system_shared_memory("one")
    assert client.own.get_system_shared_memory_status() == listed[1:]
    with client.refused(400) as said:
        client.own.get_system_shared_memory_status("one")
    assert "'one'" in said[0]
    client.own.unregister_system_shared_memory()
    assert client.own.get_system_shared_memory_status() == []


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inputs_and_outputs_lie_in_parts_of_regions(
    server: Server, region: MakeRegion, protocol: Any
) -> None:
    size = X.nbytes
    into, out_of = region("into", 2 * size + 4), region("out-of", 3 * size)
    into.write(X, offset=size + 4)
    with Client(protocol, server) as asked:
        (given,) = asked.inputs({"x": X})
        at(into, given, size, offset=size + 4)
        wish = at(out_of, asked.output("y"), 2 * size, offset=size)
        result = asked.own.infer("affine", [given], outputs=[wish])
        output = result.get_output("y")
    shape = output["shape"] if protocol == "http" else [*output.shape]
    assert shape == [3, 4]
    np.testing.assert_array_equal(out_of.read("FP32", shape, offset=size), Y)
    assert not out_of.read("UINT8", [size]).any()
    assert not out_of.read("UINT8", [size], offset=2 * size).any()


def test_strings_lie_in_regions(client: Client, region: MakeRegion) -> None:
    packed = triton.serialize_byte_tensor(models.TEXTS)
    size = triton.serialized_byte_size(packed)
    into, out_of = region("into", size), region("out-of", size)
    into.write(packed)
    (given,) = client.inputs({"in_BYTES": models.TEXTS})
    client.own.infer(
        "texts",
        [at(into, given, size)],
        outputs=[at(out_of, client.output("out_BYTES"), size)],
    )
    got = out_of.read("BYTES", models.TEXTS.shape)
    assert got.tolist() == models.TEXTS.tolist()


@pytest.mark.parametrize(
    ("size", "offset", "expected"),
    [
        (48, 1, "has 48 bytes"),
        (49, 0, "has 48 bytes"),
        (1 << 61, 1 << 61, "has 48 bytes"),
        (44, 0, "44 bytes for shape [3, 4], expected 48"),
    ],
)
def test_input_that_is_no_part_of_its_region_is_refused(
    client: Client, region: MakeRegion, size: int, offset: int, expected: str
) -> None:
    into = region("into", X.nbytes)
    (given,) = client.inputs({"x": X})
    with client.refused(400) as said:
        client.own.infer("affine", [at(into, given, size, offset)])
    assert expected in said[0]


def test_output_that_has_no_room_in_its_region_is_refused(
    server: Server, client: Client, region: MakeRegion
) -> None:
    counted = "mcinfer_requests_refused_total"
    before = server.figure(counted, model="affine")
    out_of = region("out-of", X.nbytes)
    wish = at(out_of, client.output("y"), X.nbytes - 1)
    with client.refused(400) as said:
        client.own.infer("affine", client.inputs({"x": X}), outputs=[wish])
    assert "should be at least 48 bytes" in said[0]
    assert not out_of.read("UINT8", [X.nbytes]).any()
    assert server.figure(counted, model="affine") == before  # it was accepted, and has run


def test_region_that_is_unknown_is_refused_by_its_name(client: Client, region: MakeRegion) -> None:
    (given,) = client.inputs({"x": X})
    given.set_shared_memory("no-such-region", X.nbytes)
    with client.refused(400) as said:
        client.own.infer("affine", [given])
    assert "'no-such-region'" in said[0]
    gone = region("gone", X.nbytes)
    client.own.unregister_system_shared_memory("gone")
    with client.refused(400):
        client.own.infer("affine", [at(gone, given, X.nbytes)])


def test_object_that_is_missing_or_too_short_is_refused(client: Client, region: MakeRegion) -> None:
    short = region("short", 100)
    size = short.file.stat().st_size
    for key, byte_size, offset in (
        (f"/{models.OBJECTS}missing", 10, 0),
        (short.key, size + 1, 0),
        (short.key, size, 1),
        ("/../../etc/passwd", 10, 0),
        ("", 10, 0),
        (short.key, -1, 0),
    ):
        with client.refused(400):
            client.own.register_system_shared_memory("other", key, byte_size, offset)
    listed = client.own.get_system_shared_memory_status()
    assert [each["name"] for each in listed] == ["short"]


def test_object_that_is_no_file_of_shared_memory_is_refused(client: Client, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(100))
    link = models.SHARED_MEMORY / f"{models.OBJECTS}link"
    link.symlink_to(tmp_path / "secret")
    try:
        with client.refused(400):
            client.own.register_system_shared_memory("link", f"/{link.name}", 100)
    finally:
        link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_object_of_another_user_is_refused(client: Client, region: MakeRegion) -> None:
    given = region("given", 100)
    os.chown(given.file, 65534, -1)
    with client.refused(400) as said:
        client.own.register_system_shared_memory("other", given.key, 100)
    assert "server's user" in said[0]


@pytest.mark.parametrize("kind", ["input", "output", "strings"])
def test_region_that_its_owner_cuts_short_is_an_error_and_the_server_lives(
    client: Client, server: Server, region: MakeRegion, kind: str
) -> None:
    cut = region("cut", 1 << 16)
    os.truncate(cut.file, 16)
    model = "texts" if kind == "strings" else "affine"
    (given,) = client.inputs({"in_BYTES": models.TEXTS} if kind == "strings" else {"x": X})
    wishes = None
    if kind == "output":
        wishes = [at(cut, client.output("y"), X.nbytes)]
    else:
        at(cut, given, X.nbytes)
    with client.refused(400) as said:
        client.own.infer(model, [given], outputs=wishes)
    assert ("has become shorter" in said[0]) == (kind != "output")
    assert cut.file.stat().st_size == 16
    np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)
    assert server.ask("/v2/health/ready").json == {"ready": True}
    os.truncate(cut.file, 1 << 16)


def test_server_does_not_register_regions_unless_it_is_started_so(
    serve: Serve, tmp_path: Path
) -> None:
    served = serve(models.write(tmp_path)[0], "--devices", "inline")
    with Client("http", served) as client:
        assert "system_shared_memory" not in client.own.get_server_metadata()["extensions"]
        with client.refused(403) as said:
            Region(client, "one", 100)
        assert "--client-shared-memory" in said[0]
        assert client.own.get_system_shared_memory_status() == []
        client.own.unregister_system_shared_memory()


def test_memory_of_a_card_is_not_registered_and_its_status_is_empty(client: Client) -> None:
    assert client.own.get_cuda_shared_memory_status() == []
    client.own.unregister_cuda_shared_memory()
    client.own.unregister_cuda_shared_memory("one")
    with client.refused(501):
        client.own.register_cuda_shared_memory("one", b"handle", 0, 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_other_user_at_the_port_of_one_of_the_server_s_user_is_refused(
    server: Server, client: Client
) -> None:
    """The server's user has connections to others there, which the system may list first."""

    def connected(port: int, address: tuple[str, int]) -> socket.socket:
        made = held.enter_context(socket.socket())
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.connect(address)
        return made

    own = models.SHARED_MEMORY / f"{models.OBJECTS}own"
    own.write_bytes(bytes(100))
    with ExitStack() as held:
        held.callback(own.unlink)
        others = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(9)]
        port = connected(0, others[0].getsockname()).getsockname()[1]
        for other in others[1:]:
            connected(port, other.getsockname())
        os.seteuid(65534)
        try:
            stranger = connected(port, server.address)
        finally:
            os.seteuid(0)
        asked = http.client.HTTPConnection(*server.address)
        asked.sock = stranger
        body = json.dumps({"key": f"/{own.name}", "byte_size": 100})
        asked.request("POST", "/v2/systemsharedmemory/region/own/register", body)
        assert asked.getresponse().status == 403
    assert client.own.get_system_shared_memory_status() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_unix_socket_lets_its_own_user_register_alone_even_where_others_can_open_it(
    serve: Serve, folders: Path, tmp_path: Path
) -> None:
    place = folders / "regions"
    served = serve(
        models.write(tmp_path)[0], "--devices", "inline", "--uds", place, "--client-shared-memory"
    )
    own = models.SHARED_MEMORY / f"{models.OBJECTS}own"
    own.write_bytes(bytes(100))
    folders.chmod(0o711)
    place.chmod(0o666)

    def registered(user: int) -> int:
        os.seteuid(user)
        try:
            with served.connection() as connection:
                os.seteuid(0)
                asked = json.dumps({"key": f"/{own.name}", "byte_size": 100})
                connection.request("POST", "/v2/systemsharedmemory/region/own/register", asked)
                return connection.getresponse().status
        finally:
            os.seteuid(0)

    try:
        assert (registered(65534), registered(0)) == (403, 200)
    finally:
        own.unlink()
        folders.chmod(0o700)


def test_client_that_is_gone_when_it_is_accepted_registers_nothing(
    server: Server, client: Client
) -> None:
    """The system has no address for it any more, as for one by a Unix socket."""
    own = models.SHARED_MEMORY / f"{models.OBJECTS}own"
    own.write_bytes(bytes(100))
    body = json.dumps({"key": f"/{own.name}", "byte_size": 100})
    head = f"POST /v2/systemsharedmemory/region/own/register HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        server.send_signal(signal.SIGSTOP)
        with socket.create_connection(server.address) as gone:
            gone.sendall((head + body).encode())
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.send_signal(signal.SIGCONT)
        assert client.own.get_system_shared_memory_status() == []
    finally:
        own.unlink()
        client.own.unregister_system_shared_memory()
