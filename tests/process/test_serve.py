"""`mcinfer serve` in a process of its own: its limits, its faults, its page, its end.

What clients are answered, `make test-serve` asks with clients of others (tests/serve).
"""

import gzip
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from mcinfer.cli import main
from mcinfer.serve.messages import message
from tests.command_line import COMMAND
from tests.process.models import FakeModel, OnnxModel, write_fake_model
from tests.process.scripts import Program
from tests.process.waiting import all_gone, is_alive, wait_until
from tests.serve.servers import Server, request_of

PATIENCE = 40.0
X = np.arange(8, dtype=np.float32).reshape(2, 4)
SLOW = 3.0
"""Rows that begin with this number take a second."""

INFER = "/v2/models/model/infer"
COMPILED = str(files("mcinfer.serve") / "inference.binpb")
EMPTY = str(files("mcinfer") / "py.typed")


@pytest.fixture(scope="module")
def server(checked_together: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server of y = 2x + 1 for all tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("served")
    model = write_fake_model(folder / "model.json", when={"-1": "fail", f"{SLOW:g}": "sleep:1"})
    limits = ("--max-request-bytes", 1 << 20, "--timeout", 20)
    return checked_together.enter_context(
        Server(model, "--engine", "fake", "--devices", 2, *limits)
    )


def binary_request(x: np.ndarray[Any, Any], **more: Any) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a request with its input as bytes."""
    size = {"binary_data_size": x.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": [*x.shape], "parameters": size}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + x.tobytes(), {"Inference-Header-Content-Length": f"{len(head)}"}


def test_http_and_grpc_answer(server: Server) -> None:
    answer = server.ask(INFER, {**request_of(X), "id": "seven"})
    np.testing.assert_array_equal(answer.values, 2 * X + 1)
    del (content := answer.json)["outputs"]
    assert content == {"model_name": "model", "model_version": "1", "id": "seven"}
    head = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
    kind = message("ModelInferRequest")
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=kind.SerializeToString,
            response_deserializer=message("ModelInferResponse").FromString,
        )
        asked = kind(model_name="model", inputs=[head], raw_input_contents=[X.tobytes()])
        (raw,) = ask(asked, timeout=PATIENCE).raw_output_contents
    assert raw == (2 * X + 1).tobytes()


def test_page_shows_figures_without_a_program_and_events_keep_them_new(server: Server) -> None:
    page = server.ask("/")
    assert "cpu:1" in page.body.decode()
    for rule in ("script-src 'sha256-", "frame-ancestors 'none'"):
        assert rule in page.headers["content-security-policy"]
    with server.connection() as connection:
        connection.request("GET", "/live")
        events = connection.getresponse()
        server.infer(X)
        seen = 0
        while not seen:  # within the connection's own time-out
            line = events.readline()
            if line.startswith(b"data: "):
                (model,) = json.loads(line[6:])
                seen = model["answered"] and len(model["workers"]) == 2


# What is refused.


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v2/nothing", None, 404, "Not Found"),
        (INFER, None, 405, "Method Not Allowed"),
        (INFER, b"[" * 5000, 400, "the request is no JSON"),
        (INFER, {"inputs": 3}, 400, "$.inputs"),
        (INFER, request_of(X, timeout=-1), 400, "$.parameters.timeout"),
        (
            INFER,
            request_of(np.full((1, 4), -1, np.float32)),
            500,
            "the run failed: the server's log",
        ),
    ],
)
def test_wrong_request_is_refused_and_the_next_is_answered(
    server: Server, path: str, body: Any, status: int, text: str
) -> None:
    answer = server.ask(path, body)
    assert (answer.status, text in answer.error) == (status, True), answer.body
    np.testing.assert_array_equal(server.infer(X).values, 2 * X + 1)


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (
            {"Inference-Header-Content-Length": "99999999999"},
            400,
            "Inference-Header-Content-Length",
        ),
        ({"Inference-Header-Content-Length": "-1"}, 400, "Inference-Header-Content-Length"),
        ({"Inference-Header-Content-Length": "9" * 5000}, 400, "Inference-Header-Content-Length"),
        ({"Inference-Header-Content-Length": "400"}, 400, "bytes before its tensors do"),
        ({"Content-Encoding": "br"}, 415, "expected gzip or deflate"),
        ({"Content-Encoding": "gzip"}, 400, "cannot be decompressed"),
    ],
)
def test_headers_that_do_not_fit_the_body_are_refused(
    server: Server, change: dict[str, str], status: int, text: str
) -> None:
    body, headers = binary_request(X)
    answer = server.ask(INFER, body, headers | change)
    assert (answer.status, text in answer.error) == (status, True), answer.body


def test_client_that_would_speak_http_2_is_answered_by_http_1_1_again_and_again(
    server: Server,
) -> None:
    """As Java's ask, with each request, and ``curl --http2``."""
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    asked = lines_of(X, parameters={"binary_data_output": True}).replace(b"Host:", wish + b"Host:")
    get = b"GET /v2 HTTP/1.1\r\n%sHost: localhost\r\n\r\n" % wish
    last = get.replace(b"Upgrade, ", b"close, Upgrade, ")
    for parts, number in (
        ([asked[:30], asked[30:] + 998 * get + last], 1000),
        ([asked[:-1], asked[-1:] + last], 2),
    ):
        answers = answers_to(server, *parts)
        assert answers.count(b"HTTP/1.1 200") == number
        assert (2 * X + 1).tobytes() in answers
    assert answers_to(server, b"CONNECT a:1 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")


def answers_to(server: Server, *parts: bytes) -> bytes:
    """All that comes back on a connection, until the server closes it."""
    with socket.create_connection(server.address, PATIENCE) as client:
        for part in parts:
            client.sendall(part)
        answers = bytearray()
        while part := client.recv(1 << 16):
            answers += part
    return bytes(answers)


def test_head_of_an_address_for_requests_is_refused_and_the_next_is_answered(
    server: Server,
) -> None:
    with server.connection() as client:
        client.request("HEAD", INFER)
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (405, b"")
        client.request("POST", INFER, *binary_request(X))
        assert client.getresponse().status == 200


def test_body_over_the_limit_is_refused_packed_or_not(server: Server) -> None:
    body, headers = binary_request(np.zeros((1 << 17, 4), np.float32))
    assert server.ask(INFER, body, headers).status == 413
    promise = {"name": "x", "datatype": "FP32", "shape": [1 << 26, 4]}
    head = json.dumps({"inputs": [{**promise, "parameters": {"binary_data_size": 1 << 30}}]})
    length = {"Inference-Header-Content-Length": f"{len(head)}"}
    assert server.ask(INFER, head.encode(), length).status == 413
    bomb = gzip.compress(b" " * (1 << 26))
    assert server.ask(INFER, bomb, {"Content-Encoding": "gzip"}).status == 413


def test_answer_has_no_text_of_a_runtime_that_refuses_the_inputs(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "refuse"})
    with Server(model, "--name", "model", "--engine", "fake", "--devices", 1) as server:
        answer = server.infer(np.full((1, 4), -1, np.float32))
        said = "input 'x': got FP32 [1, 4], expected FP32 [-1, 4]"
        assert answer.status == 400
        assert answer.error == f"the model refuses {said}: the server's log says why"
        wait_until(lambda: "/its/file" in server.text(), PATIENCE)


def test_page_of_another_site_may_not_ask(server: Server) -> None:
    own = f"http://127.0.0.1:{server.address[1]}"
    for origin, host, status in (
        (own, f"127.0.0.1:{server.address[1]}", 200),
        ("https://elsewhere.example", f"127.0.0.1:{server.address[1]}", 403),
        ("http://rebound.example", "rebound.example", 403),
        ("null", f"127.0.0.1:{server.address[1]}", 403),
    ):
        answer = server.ask(INFER, request_of(X), {"Origin": origin, "Host": host})
        assert answer.status == status, origin


def test_name_that_is_pointed_at_the_loopback_may_not_ask(server: Server) -> None:
    """A browser sends no Origin with what a page reads from the name that it came from."""
    hosts = {"rebound.example": 403, "localhost:1": 200, "LocalHost": 200, "": 200}
    for host, status in hosts.items():
        assert server.ask("/metrics", headers={"Host": host}).status == status, host
    with server.connection() as client:
        client.putrequest("GET", "/metrics", skip_host=True)
        client.putheader("Host", "rebound.example")
        client.putheader("Host", "localhost")
        client.endheaders()
        assert client.getresponse().status == 400


def test_endless_head_ends_the_connection(server: Server) -> None:
    with socket.create_connection(server.address, PATIENCE) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-Endless: ")
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 26:
                sent += client.send(b"x" * 1024)
    assert sent < 1 << 26
    assert server.ask("/v2").status == 200


def test_endless_lines_after_a_body_end_the_connection(server: Server) -> None:
    """Each line would take memory, also after the answer, of a client that shows no key."""
    for asked in (b"GET /v2/health/live", f"POST {INFER}".encode()):
        with socket.create_connection(server.address, timeout=PATIENCE) as client:
            client.sendall(
                asked + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            client.sendall(b"1\r\n{\r\n0\r\n")
            with pytest.raises(ConnectionError):
                client.sendall(b"a: b\r\n" * 1_600_000)


def test_client_s_configuration_takes_neither_memory_nor_time(server: Server) -> None:
    load = "/v2/repository/models/model/load"
    asked: list[list[dict[str, Any]]] = [
        [{}] * 20_000,
        [{"gpus": [0] * 200, "count": 200}],
        [{"count": 20_000}],
    ]
    for groups in asked:
        config = json.dumps({"instance_group": groups})
        answer = server.ask(load, {"parameters": {"config": config}})
        assert (answer.status, "at most 1024 instances" in answer.error) == (400, True)
    answer = server.ask(load, {"parameters": {"config": "{" + " " * (1 << 19)}})
    assert (answer.status, "the limit" in answer.error) == (400, True)


def test_grpc_refuses_what_is_no_message_and_more_tensors_than_any_model_has(
    server: Server,
) -> None:
    many = b"\x0a\x05model" + b"\x2a\x00" * 20_000 + b"\x3a\x00" * 20_000
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for asked, text in ((b"\xff", "rror parsing message"), (many, "at most 1024 inputs")):
            with pytest.raises(grpc.RpcError, match=text) as caught:
                ask(asked, timeout=PATIENCE)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = [*stream(iter([b"\xff", many]), timeout=PATIENCE)]
    assert [b"rror parsing" in answers[0], b"at most 1024" in answers[1]] == [True, True]


# Limits, faults and ends, each with a server of its own.


def test_client_that_neither_asks_nor_reads_is_let_go_and_a_slow_one_gets_its_answer(
    fake_model: FakeModel,
) -> None:
    limits = (
        "from mcinfer.cli import endpoint; endpoint._HEAD_SECONDS = endpoint._UNREAD_SECONDS = 2.0"
    )
    options = ("--name", "model", "--engine", "fake", "--devices", 1)
    with Server(fake_model(), *options, before=limits) as server:
        with socket.create_connection(server.address, PATIENCE) as silent:
            silent.sendall(b"GET /v2 HTTP/1.1\r\n")
            with suppress(ConnectionResetError):
                assert silent.recv(1) == b""
        with ExitStack() as held:
            late = [
                held.enter_context(socket.create_connection(server.address, PATIENCE))
                for _ in "123"
            ]
            for unfinished, asked in zip(
                late,
                (
                    b"POST /v2/nothing HTTP/1.1\r\nContent-Length: 99",
                    b"POST /v2/repository/index HTTP/1.1\r\nContent-Length: 99999999",
                    b"GET /v2 HTTP/1.1\r\nTransfer-Encoding: chunked",
                ),
                strict=True,
            ):
                unfinished.sendall(asked + b"\r\nHost: localhost\r\n\r\n")
                assert unfinished.recv(1 << 16)
                unfinished.sendall(b"1")  # of its body
            for unfinished in late:
                with suppress(ConnectionResetError):
                    while unfinished.recv(1 << 16):
                        pass
        with ExitStack() as held:
            full, size = held.enter_context(deaf_to(server, 400)), len(server.ask("/").body)
            # Of some, little more waits than the system has room for, which does not hold up the server.
            pages, peers = unread(full) // size, {full.getsockname()}
            for more in range(-2, 8, 2):
                peers.add(held.enter_context(deaf_to(server, pages + more)).getsockname())
            wait_until(lambda: not peers & peers_of(server), PATIENCE)
        body, headers = binary_request(
            np.zeros((1 << 20, 4), np.float32), parameters={"binary_data_output": True}
        )
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(PATIENCE)
            deaf.connect(server.address)
            lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            deaf.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            wait_until(lambda: server.figure("mcinfer_memory_used_bytes") > 1e7)
            wait_until(lambda: server.figure("mcinfer_memory_used_bytes") == 0)
        with server.connection() as slow:
            slow.sock = socket.socket()
            slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            slow.sock.connect(server.address)
            slow.request("POST", INFER, body, headers)
            answer, got = slow.getresponse(), 0
            while part := answer.read1(1 << 17):
                got += len(part)
                time.sleep(0.01)
        assert got > 1 << 24


def peers_of(server: Server) -> set[Any]:
    """The addresses of those that it has connections with."""
    return {each.raddr for each in psutil.Process(server.pid).net_connections("tcp4")}


def deaf_to(server: Server, pages: int) -> socket.socket:
    """A connection that asks for so many pages, and reads none."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.address)
    client.sendall(pages * b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client


def unread(client: socket.socket) -> int:
    """What its connection holds in the system once that is no more, by the two ends in proc(5)."""
    ports, before, now = {client.getsockname()[1], client.getpeername()[1]}, -1, 0
    while now != before or not now:
        time.sleep(0.2)
        before, now = now, 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            own, other, _, queues = line.split()[1:5]
            if {int(end.partition(":")[2], 16) for end in (own, other)} == ports:
                now += sum(int(size, 16) for size in queues.split(":"))
    return now


def test_connections_past_the_limit_are_refused_until_another_ends(fake_model: FakeModel) -> None:
    options = ("--engine", "fake", "--devices", "inline", "--max-connections", 3)
    with Server(fake_model(), *options) as server, ExitStack() as held:
        idle = [socket.create_connection(server.address, PATIENCE) for _ in range(3)]
        for each in idle:
            held.enter_context(each)
        answer = server.ask("/v2")
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert answer.error == "there are 3 connections, the limit"
        idle[0].close()
        wait_until(lambda: server.ask("/v2").status == 200)


@pytest.mark.parametrize("rows", [1, 1 << 16], ids=["small", "large"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_client_that_hangs_up_ends_its_request_and_the_next_is_answered(
    fake_model: FakeModel, rows: int, is_first: bool
) -> None:
    """What reads a large body may have stopped reading, and must notice all the same."""
    model = fake_model(when={"-1": "sleep:3600"})
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--timeout", 3600)
    with Server(model, *options) as server:
        body, headers = binary_request(np.full((rows, 4), -1, np.float32))
        with server.connection() as client:
            if not is_first:
                client.request("POST", INFER, *binary_request(X))
                assert client.getresponse().read()
            client.request("POST", INFER, body, headers)
            wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1, PATIENCE)
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 0, PATIENCE)
        assert server.figure("mcinfer_http_answers_total", status="499") == 1
        np.testing.assert_array_equal(server.infer(X).values, 2 * X + 1)
        assert "Traceback" not in server.text()


def lines_of(x: np.ndarray[Any, Any], **more: Any) -> bytes:
    """A whole request as it is sent, with its input as bytes."""
    body, headers = binary_request(x, **more)
    lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_client_that_hangs_up_after_several_requests_ends_the_one_that_runs(
    fake_model: FakeModel,
) -> None:
    model = fake_model(when={"-1": "sleep:3600"})
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--timeout", 3600)
    with Server(model, *options) as server:
        with socket.create_connection(server.address, PATIENCE) as client:
            client.sendall(2 * lines_of(np.full((1, 4), -1, np.float32)))
            wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1, PATIENCE)
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 0, PATIENCE)
        assert server.figure("mcinfer_http_answers_total", status="499") == 1
        assert server.end() == 143
        assert "Traceback" not in server.text()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("place", ["port", "socket"])
def test_client_that_has_ended_its_side_gets_its_answers_however_long_they_take(
    fake_model: FakeModel, version: bytes, place: str, tmp_path: Path
) -> None:
    """As that of ``printf … | nc -N``."""
    model = fake_model(when={"-1": "sleep:2"})
    options = ["--name", "model", "--engine", "fake", "--devices", 1]
    options += ["--uds", tmp_path / "s"] if place == "socket" else []
    with Server(model, *options) as server, server.connection() as opened:
        opened.connect() if place == "port" else None
        asked = lines_of(np.full((1, 4), -1, np.float32)).replace(b"HTTP/1.1", b"HTTP/" + version)
        opened.sock.sendall(asked if version == b"1.0" else 2 * asked)
        opened.sock.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: opened.sock.recv(1 << 16), b""))
        assert answers.count(b" 200 OK") == (1 if version == b"1.0" else 2)
        assert (b" 100 Continue\r\n\r\n" in answers) == (version == b"1.1")


def test_requests_that_are_sent_at_once_are_answered_in_turn(server: Server) -> None:
    asked = b""
    for first in range(5):
        x = np.full((1, 4), first, np.float32)
        asked += lines_of(x, parameters={"binary_data_output": True})
    last = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = answers_to(server, asked + last)
    assert answers.count(b"HTTP/1.1 200") == 6
    values = [np.full((1, 4), 2 * first + 1, np.float32).tobytes() for first in range(5)]
    places = [answers.index(each) for each in values]
    assert places == sorted(places)


def test_many_requests_that_are_sent_at_once_are_no_endless_head(server: Server) -> None:
    asked = 1500 * b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = answers_to(server, asked + last)
    assert answers.count(b"HTTP/1.1 200") == 1501


def test_stream_of_grpc_that_is_cancelled_leaves_no_request(fake_model: FakeModel) -> None:
    model = fake_model(when={"-1": "sleep:3600"})
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--timeout", 3600)
    head = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    raw = [np.full((1, 4), -1, np.float32).tobytes()]
    asked = message("ModelInferRequest")(model_name="model", inputs=[head], raw_input_contents=raw)
    with Server(model, *options) as server, grpc.insecure_channel(server.grpc) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = stream(iter([asked.SerializeToString()] * 40))
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") > 16, PATIENCE)
        answers.cancel()
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 0, PATIENCE)


def test_rows_of_one_client_do_not_decide_how_those_of_others_are_joined(
    onnx_model: OnnxModel,
) -> None:
    """The rows of this batch seem to be independent, as their largest elements are equal."""
    model = onnx_model(
        """<ir_version: 8, opset_import: ["": 17]>
        scaled (float[batch, length] x) => (float[batch, length] y) {
            most = ReduceMax <keepdims = 0> (x)
            y = Div(x, most)
        }"""
    )
    poison = np.full((32, 4), 40, np.float32)
    poison[:, 1] = np.arange(32)
    limits = ("--devices", 2, "--max-delay", 0.02)
    with Server(model, "--name", "model", *limits) as server:
        np.testing.assert_allclose(server.infer(poison).values, poison / 40)

        def differs(largest: int) -> bool:
            x = np.array([[1, 1, 1, largest]], np.float32)
            return not np.allclose(server.infer(x).values, x / largest)

        with ThreadPoolExecutor(8) as threads:
            assert not any(threads.map(differs, range(2, 66)))


@pytest.mark.parametrize("how", ["--devices", "--processes"])
def test_sigterm_answers_what_was_accepted_and_what_comes_while_probes_are_told(
    how: str, fake_model: FakeModel
) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:1"})
    options = ("--name", "model", "--engine", "fake", how, 2, "--drain-delay", 3)
    with Server(model, *options) as server:
        workers = server.workers()
        with server.connection() as idle, ThreadPoolExecutor(4) as pool:
            idle.request("GET", "/v2")
            assert idle.getresponse().read()
            slow = np.full((1, 4), SLOW, np.float32)
            asked = [pool.submit(server.infer, slow) for _ in range(4)]
            wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 4)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: server.ask("/v2/health/ready").status == 503)
            np.testing.assert_array_equal(server.infer(X).values, 2 * X + 1)
            idle.request("GET", "/v2/health/ready")
            assert idle.getresponse().status == 503
            assert [each.result(PATIENCE).status for each in asked] == [200] * 4
        assert server.wait() == 143
        assert not is_listening(server.address)
        wait_until(lambda: not any(map(is_alive, workers)))


@pytest.mark.parametrize("how", [("--devices", "inline"), ("--processes", 2)])
def test_sigterm_resets_no_connection_of_many_that_begin_and_of_some_that_stay(
    how: tuple[object, ...], fake_model: FakeModel
) -> None:
    """Half a second of them: what comes at the end is refused before it has asked."""
    options = ("--name", "model", "--engine", "fake", *how)

    def ask(server: Server, headers: dict[str, str]) -> int:
        answered = 0
        while True:
            try:
                made = socket.create_connection(server.address, PATIENCE)
            except ConnectionRefusedError:
                return answered
            with made, server.connection() as client:
                client.sock = made
                while client.sock is not None:  # until the server closes it
                    client.request("GET", "/v2", headers=headers)
                    assert client.getresponse().read()
                    answered += 1

    with Server(fake_model(), *options) as server, ThreadPoolExecutor(8) as pool:
        asking = [
            pool.submit(ask, server, {"Connection": "close"} if n % 4 else {}) for n in range(8)
        ]
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        assert min(each.result(PATIENCE) for each in asking) > 0
        assert server.wait() == 143


def test_end_of_a_server_leaves_the_socket_of_the_next_one(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    model = fake_model(when={f"{SLOW:g}": "sleep:2"})
    options = ("--uds", path, "--name", "model", "--engine", "fake", "--devices", "inline")
    with Server(model, *options) as old, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(old.infer, np.full((1, 4), SLOW, np.float32))
        wait_until(lambda: old.figure("mcinfer_requests_in_flight") == 1)
        old.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_listening(str(path)))
        with Server(model, *options) as new:
            assert asked.result(PATIENCE).status == 200
            assert old.wait() == 143
            assert new.infer(X).status == 200
            path.unlink()
            with Server(model, *options) as third:
                new.end()
                assert third.infer(X).status == 200
                third.end()
    assert not path.exists()


def is_listening(place: tuple[str, int] | str) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as probe:
        return probe.connect_ex(place) == 0


def test_log_that_nothing_reads_holds_up_neither_answers_nor_the_end(fake_model: FakeModel) -> None:
    fill = """
import os, signal
def fill(*_):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    os.dup2(writing, 2)
signal.signal(signal.SIGUSR1, fill)
"""
    model = fake_model(when={"-1": "fail"})
    log = ("--access-log", "--drain", 5)
    with Server(
        model, "--name", "model", "--engine", "fake", "--devices", 1, *log, before=fill
    ) as server:
        server.send_signal(signal.SIGUSR1)
        wait_until(lambda: os.readlink(f"/proc/{server.pid}/fd/2").startswith("pipe"))
        for _ in range(2):
            assert server.infer(np.full((1, 4), -1, np.float32)).status == 500
            np.testing.assert_array_equal(server.infer(X).values, 2 * X + 1)
        assert server.end() == 143


def test_request_that_the_end_leaves_no_time_for_is_status_503(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:600"})
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--drain", 1)
    with Server(model, *options) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.infer, np.full((1, 4), SLOW, np.float32))
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1)
        assert server.end() == 143
        assert (asked.result(PATIENCE).status, asked.result().headers["retry-after"]) == (503, "1")
        assert "Traceback" not in server.text()


def test_worker_that_is_stopped_under_load_costs_no_request(fake_model: FakeModel) -> None:
    """What it has goes to the other one, long before the time-out of 60 s."""
    options = ("--name", "model", "--engine", "fake", "--devices", 2)
    with Server(fake_model(), *options) as server, ThreadPoolExecutor(4) as pool:
        stopped, *_ = server.workers()
        ending, longest = threading.Event(), 0.0

        def ask() -> set[int]:
            nonlocal longest
            statuses = set()
            while not ending.is_set():
                begin = time.monotonic()
                statuses.add(server.infer(X).status)
                longest = max(longest, time.monotonic() - begin)
            return statuses

        asking = [pool.submit(ask) for _ in range(4)]
        try:
            wait_until(lambda: server.figure("mcinfer_worker_runs_total", worker="0") > 10)
            os.kill(stopped, signal.SIGSTOP)
            wait_until(lambda: all_gone([stopped]), PATIENCE)
        finally:
            ending.set()
        assert {status for each in asking for status in each.result(PATIENCE)} == {200}
        assert 1 < longest < 40
        assert "stopped by a signal" in server.text()


def test_second_ctrl_c_drops_what_the_first_would_wait_for(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:600"})
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--access-log")
    with Server(model, *options) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.infer, np.full((1, 4), SLOW, np.float32))
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1)
        server.send_signal(signal.SIGINT)
        refused = 0
        while not refused:  # it has the signal once it takes no more connections
            try:
                server.ask("/v2")
            except ConnectionError:
                refused = 1
        assert server.is_running
        assert server.end(signal.SIGINT) == 130
        with suppress(OSError, HTTPException):
            assert asked.result(PATIENCE).status >= 500
        assert '"GET /metrics HTTP/1.1" 200' in server.text()


def test_model_of_a_repository_that_cannot_be_loaded_leaves_the_server_not_ready(
    tmp_path: Path,
) -> None:
    for name in ("good", "bad"):
        (tmp_path / name / "1").mkdir(parents=True)
        write_fake_model(tmp_path / name / "1" / "model.onnx")
    (tmp_path / "bad" / "config.pbtxt").write_text("ensemble_scheduling { step [ { } ] }")
    options = ("--repository", tmp_path, "--engine", "fake", "--devices", "inline")
    with Server(*options) as server:
        np.testing.assert_array_equal(server.infer(X, "good").values, 2 * X + 1)
        assert server.ask("/v2/health/ready").status == 503
        states = {each["name"]: each for each in server.ask("/v2/repository/index", {}).json}
        assert states["bad"]["reason"].startswith("ensemble_scheduling: ")
        assert "failed to load 'bad', ensemble_scheduling: " in server.text()
    with Server(*options, "--strict-readiness=false") as server:
        assert server.ask("/v2/health/ready").status == 200
    with Program(COMMAND, "serve", *options, "--port", 0, "--exit-on-error=true") as program:
        ended = program.wait()
    assert (ended.status, "failed to load 'bad'" in ended.err) == (1, True), ended.err


def test_keys_of_a_file_of_any_editor_are_shown_in_their_own_letters(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    keys = ["first", "cl\u00e9-\u9375"]
    (tmp_path / "keys").write_text("\r\n".join(keys), "utf-8-sig")
    options = ("--engine", "fake", "--devices", "inline", "--api-key-file", tmp_path / "keys")
    with Server(fake_model(), *options) as server:
        for key in keys:
            shown = f"Bearer {key}".encode().decode("latin-1")  # its bytes as they are
            assert server.ask("/v2", headers={"Authorization": shown}).status == 200, key
        other = {"Authorization": "Bearer other"}
        assert server.ask("/v2", headers=other).status == 401
        (tmp_path / "keys").write_text("other")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: server.ask("/v2", headers=other).status == 200)
        assert server.ask("/v2", headers={"Authorization": "Bearer first"}).status == 401
        (tmp_path / "keys").write_text("")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: "has no key" in server.text())
        assert server.ask("/v2", headers=other).status == 200


# Starts that fail.


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ((), 2, "expected a MODEL or more, or --repository FOLDER"),
        ((__file__, "--ssl-certfile", "x"), 2, "expected both or none"),
        (("--repository", "/nowhere"), 2, "repository: '/nowhere' is no folder"),
        (
            (__file__, "--model-control-mode", "all"),
            2,
            "got 'all', expected none, explicit or poll",
        ),
        (
            (__file__, "--load-model", "x"),
            2,
            "--load-model: expected --model-control-mode explicit",
        ),
        (
            ("--repository", ".", "--repository-poll-secs", "5"),
            2,
            "--repository-poll-secs: expected --model-control-mode poll",
        ),
        ((__file__, "--model-control-mode", "poll"), 2, "poll: expected --repository FOLDER"),
        ((__file__, "--exit-on-error=no"), 2, "got 'no', expected true or false"),
        ((__file__, "--processes", "2", "--grpc-port", "0"), 2, "--grpc-port: gRPC's own threads"),
        ((__file__, "--processes", "2", "--client-shared-memory-tcp"), 2, "know a region"),
        ((__file__, "--client-shared-memory"), 2, "--client-shared-memory-tcp"),
        ((__file__, "--processes", "2", "--devices", "2"), 2, "each has inline sessions"),
        ((__file__, "--reuse-port", "--uds", "x"), 2, "--reuse-port: got a Unix socket"),
        ((__file__, "--api-key-file", "/dev/null"), 1, "/dev/null is no regular file"),
        ((__file__, "--api-key-file", COMPILED), 1, "is no text in UTF-8"),
        ((__file__, "--api-key-file", EMPTY), 1, "has no key"),
    ],
)
def test_wrong_option_is_refused(
    arguments: tuple[str, ...], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == status
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--port", "{port}"), "cannot listen at 127.0.0.1:"),
        (("--engine", "fake", "--grpc-port", "{port}", "--port", "0"), "--grpc-port: cannot"),
        (("--port", "0"), "failed to load 'model1'"),  # it is of the engine "fake"
    ],
)
def test_server_that_cannot_start_says_why(
    fake_model: FakeModel, arguments: tuple[str, ...], text: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.format(port=taken.getsockname()[1]) for word in arguments]
        with Program(COMMAND, "serve", fake_model(), *words) as program:
            ended = program.wait()
    assert (ended.status, text in ended.err) == (1, True), ended.err


@pytest.mark.parametrize("stage", ["build", pytest.param("run", marks=pytest.mark.thorough)])
def test_ctrl_c_while_a_model_loads_ends_the_server(
    stage: str, fake_model: FakeModel, tmp_path: Path
) -> None:
    """Also while random rows show how its batch splits."""
    model = fake_model(**{stage: f"once:{tmp_path}/reached:sleep:600"})
    with Program(
        COMMAND, "serve", model, "--engine", "fake", "--devices", 2, "--port", 0
    ) as program:
        wait_until((tmp_path / "reached").exists)
        workers = [c.pid for c in psutil.Process(program.pid).children()]
        program.send_signal(signal.SIGINT)
        assert program.wait().status == 130
    wait_until(lambda: not any(map(is_alive, workers)))
