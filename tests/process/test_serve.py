"""`mcinfer serve` in a process of its own, asked over HTTP and gRPC as clients do."""

import gzip
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx.parser
import psutil
import pytest

from mcinfer.serve.messages import message
from tests.command_line import COMMAND
from tests.process.models import AFFINE, FakeModel, OnnxModel
from tests.process.scripts import Program
from tests.process.waiting import is_alive, wait_until
from tests.serve.servers import Answer, Server, request_of

PATIENCE = 40.0
X = np.arange(8, dtype=np.float32).reshape(2, 4)
SLOW = 3.0
"""Rows that begin with this number take a second."""

INFER = "/v2/models/model/infer"


@pytest.fixture(scope="module")
def server(checked_together: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server of y = 2x + 1 for all tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("served")
    acts = {"when": {"-1": "fail", f"{SLOW:g}": "sleep:1"}}
    specs = {
        "inputs": [["x", "float32", ["batch", 4]]],
        "outputs": [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]],
    }
    (folder / "model.json").write_text(json.dumps({**specs, **acts}))
    limits = ("--max-request-bytes", 1 << 20, "--timeout", 20)
    model = folder / "model.json"
    return checked_together.enter_context(
        Server(model, "--engine", "fake", "--devices", 2, *limits)
    )


def binary_request(x: np.ndarray[Any, Any], **more: Any) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a request with its input as bytes."""
    size = {"binary_data_size": x.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": [*x.shape], "parameters": size}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + x.tobytes(), {"Inference-Header-Content-Length": f"{len(head)}"}


def binary_values(answer: Answer) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    assert answer.status == 200, answer.body
    length = int(answer.headers["inference-header-content-length"])
    head = json.loads(answer.body[:length])
    return head, np.frombuffer(answer.body[length:], np.float32).reshape(
        head["outputs"][0]["shape"]
    )


# What is answered.


def test_answer_in_json_has_the_request_s_id_and_the_model_s_version(server: Server) -> None:
    answer = server.ask(INFER, {**request_of(X), "id": "seven"})
    np.testing.assert_array_equal(answer.values, 2 * X + 1)
    del (content := answer.json)["outputs"]
    assert content == {"model_name": "model", "model_version": "1", "id": "seven"}


def test_binary_tensors_go_both_ways_and_split_over_both_workers(server: Server) -> None:
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    body, headers = binary_request(x, parameters={"binary_data_output": True})
    head, y = binary_values(server.ask(INFER, body, headers))
    np.testing.assert_array_equal(y, 2 * x + 1)
    assert head["outputs"] == [
        {
            "name": "y",
            "datatype": "FP32",
            "shape": [100, 4],
            "parameters": {"binary_data_size": 1600},
        }
    ]


def test_request_of_nothing_but_bytes_is_answered_in_bytes(server: Server) -> None:
    answer = server.ask(INFER, X.tobytes(), {"Inference-Header-Content-Length": "0"})
    np.testing.assert_array_equal(binary_values(answer)[1], 2 * X + 1)


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_go_both_ways(server: Server, coding: str, pack: Any) -> None:
    body, headers = binary_request(X, outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    headers |= {"Content-Encoding": coding, "Accept-Encoding": coding}
    answer = server.ask(INFER, pack(body), headers)
    assert answer.headers["content-encoding"] == coding
    unpacked = zlib.decompress(answer.body, 47)  # either header
    np.testing.assert_array_equal(
        binary_values(Answer(200, answer.headers, unpacked))[1], 2 * X + 1
    )


def test_codings_that_a_library_lists_by_itself_leave_tensors_as_they_are(server: Server) -> None:
    answer = server.ask(INFER, request_of(X), {"Accept-Encoding": "gzip, deflate, br"})
    assert "content-encoding" not in answer.headers
    np.testing.assert_array_equal(answer.values, 2 * X + 1)


def test_body_in_chunks_is_read(server: Server) -> None:
    body, headers = binary_request(X)
    parts = (body[i : i + 7] for i in range(0, len(body), 7))
    with server.connection() as connection:
        connection.request("POST", INFER, parts, headers, encode_chunked=True)
        assert connection.getresponse().status == 200


def test_many_clients_are_answered_each_with_its_own(server: Server) -> None:
    def ask(number: int) -> bool:
        x = np.full((1 + number % 3, 4), number, np.float32)
        return np.array_equal(server.infer(x).values, 2 * x + 1)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(100, 300)))


def test_metadata_config_statistics_index_and_metrics_say_what_is_served(server: Server) -> None:
    server.infer(X)
    assert server.ask("/v2").json["name"] == "mcinfer"
    metadata = server.ask("/v2/models/model/versions/1").json
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = server.ask("/v2/models/model/config").json
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert config["instance_group"][0]["count"] == 2
    (statistics,) = server.ask("/v2/models/stats").json["model_stats"]
    assert statistics["inference_count"] >= 2
    assert statistics["inference_stats"]["success"]["ns"] > 0
    index = server.ask("/v2/repository/index", {"ready": True}).json
    assert index == [{"name": "model", "version": "1", "state": "READY", "reason": ""}]
    metrics = server.ask("/metrics").body.decode()
    assert re.search(
        r'mcinfer_requests_total\{model="model",outcome="succeeded",version="1"\} \d', metrics
    )
    assert re.search(r'mcinfer_http_answers_total\{model="model",status="200"\} \d', metrics)
    for kind in ("live", "ready"):
        assert server.ask(f"/v2/health/{kind}").json == {kind: True}
    assert server.ask("/v2/models/model/ready").json == {"name": "model", "ready": True}


def test_log_level_is_shown_and_changed(server: Server) -> None:
    assert server.ask("/v2/logging").json["log_verbose_level"] == 0
    assert server.ask("/v2/logging", {"log_verbose_level": 1}).json["log_info"] is True
    assert server.ask("/v2/logging", {"log_info": False}).json["log_verbose_level"] == 0
    assert server.ask("/v2/trace/setting").json["trace_level"] == ["OFF"]


def test_page_shows_figures_without_a_program_and_events_keep_them_new(server: Server) -> None:
    page = server.ask("/")
    assert "cpu:1" in page.body.decode()
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
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


# What is refused, and how.


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (
            "/v2/models/other/infer",
            request_of(X),
            404,
            "Request for unknown model: 'other' is not found",
        ),
        (
            "/v2/models/model/versions/3/infer",
            request_of(X),
            404,
            "not served in version 3, but in 1",
        ),
        ("/v2/nothing", None, 404, "Not Found"),
        (INFER, None, 405, "Method Not Allowed"),
        ("/v2/models/model", {}, 405, "Method Not Allowed"),
        (INFER, b"{", 400, "the request is no JSON"),
        (INFER, b"[" * 5000, 400, "the request is no JSON"),
        (INFER, {"inputs": 3}, 400, "Expected `array`, got `int` - at `$.inputs`"),
        (INFER, {"inputs": []}, 400, "inputs: got [], expected ['x']"),
        (INFER, request_of(X, timeout=-1), 400, "Expected `int` >= 0 - at `$.parameters.timeout`"),
        (INFER, request_of(X, sequence_id=4), 400, "sequence_id"),
        (INFER, request_of(X.reshape(4, 2)), 400, "got shape [4, 2], expected [-1, 4]"),
        (
            INFER,
            {**request_of(X), "outputs": [{"name": "z"}]},
            400,
            "output 'z' is unknown, expected ['y']",
        ),
        (
            INFER,
            {**request_of(X), "outputs": [{"name": "y"}, {"name": "y"}]},
            400,
            "output 'y' already exists in request",
        ),
        (INFER, request_of(np.full((1, 4), -1, np.float32)), 500, "asked to fail"),
        ("/v2/systemsharedmemory/region/r/register", {"key": "/r", "byte_size": 4}, 403, "is off"),
        ("/v2/cudasharedmemory/region/r/register", {}, 501, "CUDA"),
        ("/v2/trace/setting", {"trace_level": ["TENSORS"]}, 501, "no traces are written"),
        ("/v2/repository/models/other/load", {}, 400, "failed to load 'other'"),
        (
            "/v2/repository/models/model/load",
            {"parameters": {"file:1/model.onnx": "AA=="}},
            400,
            "models come from files of the server alone",
        ),
        (
            "/v2/repository/models/model/load",
            {"parameters": {"config": '"parameters": {{'}},
            400,
            "failed to load 'model', config: it is no model configuration",
        ),
    ],
)
def test_wrong_request_is_refused_with_what_is_wrong(
    server: Server, path: str, body: Any, status: int, text: str
) -> None:
    answer = server.ask(path, body)
    assert (answer.status, text in answer.error) == (status, True), answer.body
    assert "/tmp" not in answer.error  # noqa: S108 no folder of the server's
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
        ({"Connection": "Upgrade", "Upgrade": "h2c"}, 400, "Upgrade: got 'h2c', expected none"),
        ({"Content-Encoding": "gzip"}, 400, "cannot be decompressed"),
    ],
)
def test_headers_that_do_not_fit_the_body_are_refused(
    server: Server, change: dict[str, str], status: int, text: str
) -> None:
    body, headers = binary_request(X)
    answer = server.ask(INFER, body, headers | change)
    assert (answer.status, text in answer.error) == (status, True), answer.body


def test_body_that_is_longer_or_shorter_than_its_tensors_is_refused(server: Server) -> None:
    body, headers = binary_request(X)
    assert "more bytes than its tensors" in server.ask(INFER, body + b"x", headers).error
    assert "the body ends 1 bytes before" in server.ask(INFER, body[:-1], headers).error


def test_body_over_the_limit_is_refused_packed_or_not(server: Server) -> None:
    body, headers = binary_request(np.zeros((1 << 17, 4), np.float32))
    assert server.ask(INFER, body, headers).status == 413
    promise = {"name": "x", "datatype": "FP32", "shape": [1 << 26, 4]}
    head = json.dumps({"inputs": [{**promise, "parameters": {"binary_data_size": 1 << 30}}]})
    length = {"Inference-Header-Content-Length": f"{len(head)}"}
    assert server.ask(INFER, head.encode(), length).status == 413
    bomb = gzip.compress(b" " * (1 << 26))
    assert server.ask(INFER, bomb, {"Content-Encoding": "gzip"}).status == 413


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
    for host, status in (("rebound.example", 403), ("localhost:1", 200), ("", 200)):
        assert server.ask("/metrics", headers={"Host": host}).status == status, host


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


def test_deadline_of_a_request_is_status_504(server: Server) -> None:
    slow = np.full((1, 4), SLOW, np.float32)
    answer = server.infer(slow, timeout=50_000)  # microseconds
    assert (answer.status, "0.05 s" in answer.error) == (504, True), answer.body


def test_client_that_hangs_up_cancels_its_request(server: Server) -> None:
    def cancelled() -> float:
        return server.figure("mcinfer_requests_total", outcome="cancelled")

    before = cancelled()
    with server.connection() as connection:
        connection.request("POST", INFER, json.dumps(request_of(np.full((1, 4), SLOW, np.float32))))
    wait_until(lambda: cancelled() == before + 1)


# gRPC.


def call(server: Server, name: str, asked: Any, metadata: Any = None) -> Any:
    """Ask by one call of gRPC, without code of a client's."""
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(
            f"/inference.GRPCInferenceService/{name}",
            request_serializer=message(f"{name}Request").SerializeToString,
            response_deserializer=message(f"{name}Response").FromString,
        )
        return ask(message(f"{name}Request")(**asked), metadata=metadata, timeout=PATIENCE)


def test_grpc_answers_raw_and_typed_contents(server: Server) -> None:
    head = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
    asked = {
        "model_name": "model",
        "id": "9",
        "inputs": [head],
        "raw_input_contents": [X.tobytes()],
    }
    answer = call(server, "ModelInfer", asked)
    raw = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_array_equal(raw.reshape(2, 4), 2 * X + 1)
    assert (answer.id, answer.model_version, [*answer.outputs[0].shape]) == ("9", "1", [2, 4])
    typed = {**head, "contents": {"fp32_contents": X.ravel()}}
    answer = call(server, "ModelInfer", {"model_name": "model", "inputs": [typed]})
    assert answer.raw_output_contents[0] == (2 * X + 1).tobytes()


def test_grpc_says_what_is_wrong(server: Server) -> None:
    size = {"binary_data_size": {"int64_param": 16}}
    head = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": size}
    empty = {"model_name": "model", "inputs": [head]}
    for name, asked, code, text in (
        ("ModelMetadata", {"name": "other"}, grpc.StatusCode.NOT_FOUND, "unknown model: 'other'"),
        ("ModelInfer", {"model_name": "model"}, grpc.StatusCode.INVALID_ARGUMENT, "inputs: got []"),
        ("ModelInfer", empty, grpc.StatusCode.INVALID_ARGUMENT, "expected one of data"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(server, name, asked)
        assert caught.value.code() == code
        assert text in (caught.value.details() or "")
    assert call(server, "ServerReady", {}).ready
    assert call(server, "ModelConfig", {"name": "model"}).config.max_batch_size == 8
    assert call(server, "RepositoryIndex", {}).models[0].state == "READY"


def test_stream_of_grpc_is_answered_in_order_past_what_fails(server: Server) -> None:
    kind, answer = message("ModelInferRequest"), message("ModelStreamInferResponse")
    head = {"name": "x", "datatype": "FP32", "shape": [1, 4]}

    def requests() -> Iterator[Any]:
        for number in range(40):
            raw = [np.full((1, 4), number, np.float32).tobytes()]
            name = "model" if number % 7 else "other"
            yield kind(model_name=name, id=f"{number}", inputs=[head], raw_input_contents=raw)

    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=kind.SerializeToString,
            response_deserializer=answer.FromString,
        )
        answers = [*ask(requests(), timeout=PATIENCE)]
    assert [bool(answer.error_message) for answer in answers] == [not n % 7 for n in range(40)]
    for number, answer in enumerate(answers):
        if number % 7:
            raw = np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32)
            assert (answer.infer_response.id, raw[0]) == (f"{number}", 2 * number + 1)


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


def test_client_that_neither_asks_nor_reads_is_let_go(fake_model: FakeModel) -> None:
    limits = "from mcinfer.cli import server; server._HEAD_SECONDS = server._UNREAD_SECONDS = 0.5"
    options = ("--name", "model", "--engine", "fake", "--devices", 1)
    with Server(fake_model(), *options, before=limits) as server:
        with socket.create_connection(server.address, PATIENCE) as silent:
            silent.sendall(b"GET /v2 HTTP/1.1\r\n")
            with suppress(ConnectionResetError):
                assert silent.recv(1) == b""
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
        assert server.infer(X).status == 200


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


def test_index_says_why_a_load_failed_without_a_folder_of_the_server_s(
    fake_model: FakeModel,
) -> None:
    model = fake_model()
    options = ("--name", "model", "--engine", "fake", "--devices", 1)
    with Server(model, *options) as server:
        model.unlink()
        assert server.ask("/v2/repository/models/model/load", b"").status == 400
        (entry,) = server.ask("/v2/repository/index", b"").json
        assert (entry["state"], model.name in entry["reason"]) == ("READY", True)
        assert str(model.parent) not in entry["reason"]


def test_events_begin_anew_when_a_model_is_loaded_again(fake_model: FakeModel) -> None:
    # What learns no split has no runs of its own.
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--max-batch-size", 1)
    with Server(fake_model(), *options) as server, server.connection() as connection:
        server.infer(X)
        connection.request("GET", "/live")
        lines = iter(connection.getresponse().readline, b"")
        events = (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
        assert next(event for event in events if event)[0]["answered"] == 1
        assert server.ask("/v2/repository/models/model/load", b"").status == 200
        again = next(event for event in events if event and not event[0]["answered"])
        assert again[0]["rate"] == 0


def test_client_that_reads_slowly_gets_all_of_its_answer(fake_model: FakeModel) -> None:
    limits = "from mcinfer.cli import server; server._UNREAD_SECONDS = 0.5"
    options = ("--name", "model", "--engine", "fake", "--devices", 1)
    body, headers = binary_request(
        np.zeros((1 << 20, 4), np.float32), parameters={"binary_data_output": True}
    )
    with Server(fake_model(), *options, before=limits) as server, server.connection() as connection:
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sock.connect(server.address)
        connection.request("POST", INFER, body, headers)
        answer, got = connection.getresponse(), 0
        while part := answer.read1(1 << 17):
            got += len(part)
            time.sleep(0.01)
    assert got > 1 << 24


def test_full_queue_is_status_503_with_when_to_try_again(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:1"})
    options = (
        "--name",
        "model",
        "--engine",
        "fake",
        "--devices",
        1,
        "--queue",
        1,
        "--max-batch-size",
        1,
    )
    slow = np.full((1, 4), SLOW, np.float32)
    with Server(model, *options) as server, ThreadPoolExecutor(2) as pool:
        answers: list[Answer] = []

        def meet() -> bool:
            answers[:] = sorted(pool.map(server.infer, (slow, slow)), key=lambda a: a.status)
            return answers[-1].status == 503

        wait_until(meet)
        assert answers[0].status == 200
        assert answers[1].headers["retry-after"] == "1"
        assert "Limits.queue" in answers[1].error


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


def test_killed_workers_cost_no_request(onnx_model: OnnxModel) -> None:
    with Server(onnx_model(AFFINE), "--name", "model", "--devices", 2) as server:
        wrong: list[Answer] = []
        right: list[Answer] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                answer = server.infer(X)
                is_right = answer.status == 200 and np.array_equal(answer.values, 2 * X + 1)
                (right if is_right else wrong).append(answer)

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            for _ in range(4):
                # The requests that the last kill hit are answered: one that two hit would be to blame.
                enough = len(right) + 20
                wait_until(lambda: len(right) >= enough or wrong)  # noqa: B023 called at once
                victim = server.workers()[0]
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda: not is_alive(victim))  # noqa: B023
            ended.set()
            for each in asking:
                each.result(PATIENCE)
        assert not wrong


def test_sigterm_answers_what_was_accepted_and_leaves_no_worker(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:1"})
    with Server(model, "--name", "model", "--engine", "fake", "--devices", 2) as server:
        workers = server.workers()
        with ThreadPoolExecutor(6) as pool:
            slow = np.full((1, 4), SLOW, np.float32)
            asked = [pool.submit(server.infer, slow) for _ in range(6)]

            wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 6)
            server.send_signal(signal.SIGTERM)
            statuses = [each.result(PATIENCE).status for each in asked]
        assert server.wait() == 143
        assert statuses == [200] * 6
        wait_until(lambda: not any(map(is_alive, workers)))


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


def test_request_that_comes_as_the_server_ends_is_answered(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:1"})
    with Server(model, "--name", "model", "--engine", "fake", "--devices", 2) as server:
        with server.connection() as idle, ThreadPoolExecutor(1) as pool:
            idle.request("GET", "/v2")
            assert idle.getresponse().read()
            asked = pool.submit(server.infer, np.full((1, 4), SLOW, np.float32))
            wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_listening(server))
            idle.request("GET", "/v2/health/ready")
            last = idle.getresponse()
            assert (last.status, last.getheader("connection")) == (503, "close")
            assert asked.result(PATIENCE).status == 200
        assert server.wait() == 143


def is_listening(server: Server) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(server.address) == 0


def test_request_that_the_end_leaves_no_time_for_is_status_503(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:600"})
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--drain", 1)
    with Server(model, *options) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.infer, np.full((1, 4), SLOW, np.float32))
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1)
        assert server.end() == 143
        assert (asked.result(PATIENCE).status, asked.result().headers["retry-after"]) == (503, "1")
        assert "Traceback" not in server.text()


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


def test_new_version_takes_over_under_load_without_a_lost_request(tmp_path: Path) -> None:
    def write(version: int, add: int) -> None:
        folder = tmp_path / "model" / f"{version}"
        folder.mkdir(parents=True)
        rule = {"from": "x", "scale": 2, "add": add}
        content = {
            "inputs": [["x", "float32", ["batch", 4]]],
            "outputs": [["y", "float32", ["batch", 4], rule]],
        }
        (folder / "model.onnx").write_text(json.dumps(content))

    write(1, 1)
    with Server("--repository", tmp_path, "--engine", "fake", "--devices", 1) as server:
        ended, seen, wrong = threading.Event(), set(), []

        def ask() -> None:
            while not ended.is_set():
                answer = server.infer(X)
                if answer.status != 200:
                    wrong.append(answer)
                    continue
                version = answer.json["model_version"]
                seen.add(version)
                if not np.array_equal(answer.values, 2 * X + int(version)):
                    wrong.append(answer)

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            for version in (2, 10):
                write(version, version)
                assert server.ask("/v2/repository/models/model/load", {}).status == 200
                wait_until(lambda: f"{version}" in seen)  # noqa: B023 called at once
            ended.set()
            for each in asking:
                each.result(PATIENCE)
        assert (wrong, seen) == ([], {"1", "2", "10"})
        wait_until(lambda: len(server.workers()) == 1)
        assert server.ask("/v2/repository/models/model/unload", {}).status == 200
        assert server.infer(X).status == 404
        wait_until(lambda: not server.workers())


def test_configuration_of_a_repository_decides_devices_batches_and_limits(tmp_path: Path) -> None:
    folder = tmp_path / "affine" / "1"
    folder.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(AFFINE), folder / "model.onnx")
    (tmp_path / "affine" / "config.pbtxt").write_text(
        'name: "affine" platform: "onnxruntime_onnx" max_batch_size: 16\n'
        "instance_group [ { count: 2 kind: KIND_CPU } ]\n"
        "dynamic_batching { max_queue_delay_microseconds: 500 preferred_batch_size: [ 4, 8 ] }\n"
        "optimization { graph { level: 1 } }\n"
    )
    with Server("--repository", tmp_path) as server:
        config = server.ask("/v2/models/affine/config").json
        assert config["max_batch_size"] == 16
        assert config["dynamic_batching"] == {"max_queue_delay_microseconds": 500}
        assert len(server.workers()) == 2
        override = {"parameters": {"config": '{"max_batch_size": "4"}'}}
        assert server.ask("/v2/repository/models/affine/load", override).status == 200
        config = server.ask("/v2/models/affine/config").json
        assert (config["max_batch_size"], "dynamic_batching" in config) == (4, False)


def test_devices_are_dealt_out_over_models(fake_model: FakeModel) -> None:
    models = (fake_model(), fake_model(), fake_model())
    names = ("--name", "a", "--name", "b", "--name", "c")
    devices = ("--devices", "cpu:0,cpu:1", "--devices", "c=1")
    with Server(*models, *names, "--engine", "fake", *devices) as server:
        counts = []
        for name in "abc":
            config = server.ask(f"/v2/models/{name}/config").json
            counts.append(config["instance_group"][0]["count"])
            assert server.infer(X, name).status == 200
        assert counts == [1, 1, 1]
        cores = [os.sched_getaffinity(pid) for pid in server.workers()]
        assert sum(len(core) < len(os.sched_getaffinity(0)) for core in cores) in (0, 2)


def test_keys_are_asked_for_but_of_probes(fake_model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of clients\nfirst\nsecond\n")
    options = (
        "--name",
        "model",
        "--engine",
        "fake",
        "--devices",
        1,
        "--api-key-file",
        tmp_path / "keys",
    )
    with Server(fake_model(), *options) as server:
        assert server.ask("/v2/health/ready").status == 200
        assert server.ask("/v2").status == 401
        assert server.ask("/").headers["www-authenticate"].startswith("Basic")
        password = b64encode(b"any:first").decode()
        for shown, status in (
            ("Bearer second", 200),
            (f"Basic {password}", 200),
            ("Bearer third", 401),
            ("Bearer # of clients", 401),
            ("Bearer ", 401),
            ("Basic !", 401),
        ):
            assert server.ask("/v2", headers={"Authorization": shown}).status == status, shown


def test_unix_socket_is_for_its_user_alone(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("s")
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--uds", place)
    with Server(fake_model(), *options) as server:
        assert place.stat().st_mode & 0o777 == 0o600
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE)
        connection.sock.connect(str(place))
        connection.request("POST", INFER, json.dumps(request_of(X)))
        assert connection.getresponse().status == 200
        connection.close()
        assert server.end(signal.SIGINT) == 130
    assert not place.exists()


def test_shared_memory_of_this_user_s_client_has_tensors(fake_model: FakeModel) -> None:
    options = ("--name", "model", "--engine", "fake", "--devices", 1, "--client-shared-memory")
    region = f"mcinfer-test-{os.getpid()}"
    place = Path("/dev/shm") / region  # noqa: S108
    with Server(fake_model(), *options) as server:
        try:
            place.write_bytes(X.tobytes() + bytes(X.nbytes))
            memory = "/v2/systemsharedmemory"
            asked = {"key": f"/{region}", "byte_size": 2 * X.nbytes}
            assert server.ask(f"{memory}/region/r/register", asked).status == 200
            assert server.ask(f"{memory}/status").json == [{"name": "r", "offset": 0, **asked}]
            assert "already" in server.ask(f"{memory}/region/r/register", asked).error
            own: dict[str, object] = {
                "shared_memory_region": "r",
                "shared_memory_byte_size": X.nbytes,
            }
            head = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
            tensor: dict[str, object] = {**head, "parameters": own}
            output = {"name": "y", "parameters": {**own, "shared_memory_offset": X.nbytes}}
            request = {"inputs": [tensor], "outputs": [output]}
            answer = server.ask(INFER, request)
            assert (answer.status, "data" in answer.json["outputs"][0]) == (200, False)
            written = np.frombuffer(place.read_bytes()[X.nbytes :], np.float32)
            np.testing.assert_array_equal(written.reshape(2, 4), 2 * X + 1)
            wrongs: tuple[tuple[dict[str, object], str], ...] = (
                ({"shared_memory_region": "other"}, "Unable to find"),
                ({"shared_memory_offset": X.nbytes + 1}, "has 64 bytes, got offset 33"),
                ({"shared_memory_byte_size": 4}, "got 4 bytes for shape [2, 4], expected 32"),
            )
            for wrong, text in wrongs:
                given = tensor | {"parameters": own | wrong}
                assert text in server.ask(INFER, {"inputs": [given]}).error
            os.truncate(place, 8)
            assert "has become shorter" in server.ask(INFER, {"inputs": [tensor]}).error
            for key in ("/..", "/a/b", "/no-such-object", ""):
                other = {"key": key, "byte_size": 1}
                assert server.ask(f"{memory}/region/q/register", other).status == 400
            os.chown(place, 65534, -1)
            other = {"key": f"/{region}", "byte_size": 1}
            assert "server's user" in server.ask(f"{memory}/region/q/register", other).error
            assert server.ask(f"{memory}/unregister", {}).status == 200
            assert server.ask(f"{memory}/status").json == []
        finally:
            place.unlink()


def test_tls_serves_https(fake_model: FakeModel, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    words += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*words, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    options = ("--name", "model", "--engine", "fake", "--devices", 1)
    tls = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    with Server(fake_model(), *options, *tls) as server:
        trusted = ssl.create_default_context(cafile=str(certificate))
        connection = HTTPSConnection(
            "127.0.0.1", server.address[1], context=trusted, timeout=PATIENCE
        )
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().status == 200
        connection.close()


# Starts that fail.


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ((), 2, "expected a MODEL or more, or --repository FOLDER"),
        (("{model}", "{model}"), 2, "--name: got 'model1' for two models"),
        (("{model}", "--name", "a/b"), 2, "name: got 'a/b'"),
        (("{model}", "--devices", "z=1"), 2, "--devices: got ['z'], expected some of ['model1']"),
        (("{model}", "--ssl-certfile", "x"), 2, "expected both or none"),
        (("--repository", "/nowhere"), 2, "repository: '/nowhere' is no folder"),
        (("/nowhere/model.onnx",), 1, "MODEL: "),
        (("{model}", "--api-key-file", "/dev/null"), 1, "has no key"),
        (("{model}", "--port", "{port}"), 1, "cannot listen at 127.0.0.1:"),
        (
            ("{model}", "--engine", "fake", "--grpc-port", "{port}", "--port", "0"),
            1,
            "--grpc-port: cannot",
        ),
        (("{model}", "--port", "0"), 1, "failed to load 'model1'"),  # it is of the engine "fake"
    ],
)
def test_server_that_cannot_start_says_why(
    fake_model: FakeModel, arguments: tuple[str, ...], status: int, text: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"model": fake_model(), "port": taken.getsockname()[1]}
        words = ["serve", *(word.format(**values) for word in arguments)]
        with Program(COMMAND, *words) as program:
            ended = program.wait()
    assert (ended.status, text in ended.err) == (status, True), ended.err


@pytest.mark.parametrize("stage", ["build", "run"])
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
