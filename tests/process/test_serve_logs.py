"""What `mcinfer serve` says of a request: in its log, in the answer's name, in its figures."""

import fcntl
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import grpc
import numpy as np
import onnx
import pytest

from mcinfer.model_cache.cache import Cache
from mcinfer.serve.messages import message
from tests.command_line import COMMAND
from tests.process.models import write_fake_model
from tests.process.scripts import Program
from tests.process.waiting import wait_until
from tests.serve.servers import Server, request_of
from tests.text_models import text_model

PATIENCE = 60.0
INFER = "/v2/models/encoder/infer"
X = np.arange(8, dtype=np.float32).reshape(2, 4)
FAILS = np.full((1, 4), -1, np.float32)
SLOW = np.full((3, 4), -2, np.float32)
MADE_ID = "[0-9a-f]{12}-[0-9a-f]+"

Records = list[dict[str, Any]]


def repository(folder: Path, **content: Any) -> Path:
    """A repository with the model "encoder" in version 3, of which requests cannot be joined."""
    (folder / "encoder" / "3").mkdir(parents=True)
    outputs = [["y", "float32", ["other", 4], {"from": "x"}]]
    acts = {"-1": "fail", "-2": "sleep:1"}
    file = folder / "encoder" / "3" / "model.onnx"
    write_fake_model(file, outputs=outputs, **{"when": acts, **content})
    (folder / "encoder" / "config.pbtxt").write_text("dynamic_batching {}\nmax_batch_size: 8\n")
    return folder


def records(server: Server) -> Records:
    """Its log, of lines of JSON alone."""
    return [json.loads(line) for line in server.text().splitlines()]


def of_logger(server: Server, name: str) -> Records:
    return [record for record in records(server) if record["logger"] == name]


def said_of(found: Records, request: str) -> Records:
    return [record for record in found if record.get("request_id") == request]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(checked_together: ExitStack, folder: Path) -> Server:
    """One that logs all in JSON."""
    how = ("--engine", "fake", "--devices", 2, "--access-log", "--log-format", "json")
    limits = ("--queue", 2, "--max-request-bytes", 1 << 20)
    return checked_together.enter_context(Server("--repository", folder, *how, *limits))


@pytest.mark.parametrize(
    "how", [("--devices", 2), ("--devices", "inline"), ("--processes", 2)], ids=str
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_records_of_a_pool_name_the_model_as_it_is_served(
    how: tuple[object, ...], form: str, folder: Path
) -> None:
    options = ("--repository", folder, "--engine", "fake", "--log-format", form)
    with Server(*options, *how) as server:
        if how == ("--devices", 2):
            os.kill(server.workers()[0], signal.SIGKILL)
            wait_until(lambda: "ready again" in server.text(), PATIENCE)
        np.testing.assert_array_equal(server.infer(X, "encoder").values, X)
        assert server.infer(FAILS, "encoder").status == 500
        wait_until(lambda: "asked to fail" in server.text())
        if form == "json":
            said = [each for each in records(server) if each["logger"] != "mcinfer"]
            assert {(each["model"], each["version"]) for each in said} == {("encoder", "3")}
            texts = [each["message"] for each in said]
        else:
            lines = [line.partition(" WARNING mcinfer.") for line in server.text().splitlines()]
            texts = [text.partition(": ")[2] for _, _, text in lines if text]
        server.end()
    assert any(text.endswith("not declare the batch of the inputs along axis 0") for text in texts)
    assert all(re.match(r"encoder/3 on |encoder/3, request ", text) for text in texts), texts


def test_records_about_a_model_while_it_is_loaded_name_it(tmp_path: Path) -> None:
    body = "(float[batch,4] x) => (float[batch,4] y) { a = MatMul(x, w) y = MatMul(a, v) }"
    model = text_model(body, {"w": (4, 1 << 20), "v": (1 << 20, 4)})
    (tmp_path / "encoder" / "3").mkdir(parents=True)
    onnx.save(model, tmp_path / "encoder" / "3" / "model.onnx")
    options = ("--repository", tmp_path, "--log-format", "json")
    env = {"MCINFER_CACHE": str(tmp_path / "cache")}
    verbose = "import logging; logging.getLogger('mcinfer.worker').setLevel('INFO')"
    with Server(*options, "--devices", 1, env=env, before=verbose) as server:
        (record,) = of_logger(server, "mcinfer.model_cache")  # of a worker
    about = {name: record[name] for name in ("model", "version", "worker", "device")}
    assert about == {"model": "encoder", "version": "3", "worker": 0, "device": "cpu:0"}
    assert record["message"].startswith("preparing ")
    wait_until(Cache(tmp_path / "cache").entries, PATIENCE)
    for file in tmp_path.glob("cache/*/*.onnx"):
        file.write_bytes(file.read_bytes()[:-1])
    with Server(*options, "--devices", "inline", env=env) as server:
        found = of_logger(server, "mcinfer.model_cache")
    assert {(each["model"], each["version"]) for each in found} == {("encoder", "3")}
    assert "is not used" in found[0]["message"]


# Requests.


def test_access_log_has_the_time_the_model_the_rows_and_the_name_of_a_request(
    server: Server, folder: Path
) -> None:
    sent = {"X-Request-Id": "mine"}
    assert server.ask(INFER, request_of(SLOW), sent).status == 200
    assert server.ask(INFER, request_of(FAILS), {"X-Request-Id": "bad"}).status == 500
    assert server.ask("/v2/nothing?a=b%20c", headers={"X-Request-Id": "none"}).status == 404
    wait_until(lambda: "b%20c" in server.text())
    lines = of_logger(server, "mcinfer.access")
    ((slow,), (bad,), (none,)) = (said_of(lines, name) for name in ("mine", "bad", "none"))
    assert slow["ms"] > 900
    names = ("level", "model", "version", "rows", "method", "path", "status")
    assert [slow[name] for name in names] == ["INFO", "encoder", "3", 3, "POST", INFER, 200]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", slow["client"])
    assert (bad["status"], bad["rows"]) == (500, 1)
    assert (none["status"], none["path"], "model" in none) == (404, "/v2/nothing?a=b%20c", False)
    (why,) = said_of(of_logger(server, "mcinfer.serve"), "bad")
    assert why["message"].startswith("encoder/3, request bad: worker ")
    options = ("--repository", folder, "--engine", "fake", "--devices", "inline", "--access-log")
    with Server(*options) as text:
        text.ask(INFER, request_of(X), sent)
        text.ask('/v2"%20200', headers=sent)
        text.end()  # what is gathered is written
        line, other = (line for line in text.text().splitlines() if "HTTP/1.1" in line)
    form = r'127\.0\.0\.1:\d+ - "POST /v2/models/encoder/infer HTTP/1\.1" 200 \d+\.\d ms '
    assert re.fullmatch(form + "encoder/3 2 rows mine", line)
    assert other.count('"') == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a-name_of.mine/1:2", True),
        ("!" * 128, True),
        ("x" * 129, False),
        ("two words", False),
        ("caf\xe9", False),
        ("", False),
        (None, False),
    ],
)
def test_request_has_the_client_s_name_or_one_of_the_server_s(
    given: str | None, kept: bool, server: Server
) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    for path, body, status in (
        (INFER, request_of(X), 200),
        (INFER, b"{", 400),
        ("/v2/models/none/infer", request_of(X), 404),
        ("/v2", None, 200),
        ("/v2/nothing", None, 404),
    ):
        answer = server.ask(path, body, headers)
        assert answer.status == status
        name = answer.headers["x-request-id"]
        assert name == given if kept else re.fullmatch(MADE_ID, name)
        wait_until(lambda n=name: said_of(of_logger(server, "mcinfer.access"), n))  # type: ignore[misc]
    foreign = {**headers, "Origin": "http://elsewhere"}
    refused = server.ask(INFER, request_of(X), foreign)
    assert (refused.status, "x-request-id" in refused.headers) == (403, True)


def test_names_that_the_server_makes_are_never_the_same(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: server.ask("/v2/health/live"), range(40))
    assert len({answer.headers["x-request-id"] for answer in answers}) == 40


def test_call_of_grpc_has_its_name_in_the_trailing_metadata(server: Server) -> None:
    kind = message("ModelInferRequest")
    head = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=kind.SerializeToString,
        )

        def name_of(x: np.ndarray[Any, Any], *metadata: tuple[str, str]) -> tuple[str, Any]:
            asked = kind(model_name="encoder", inputs=[head], raw_input_contents=[x.tobytes()])
            call = ask.future(asked, timeout=PATIENCE, metadata=metadata)
            return dict(call.trailing_metadata())["x-request-id"], call.code()

        assert name_of(X[:1], ("x-request-id", "mine")) == ("mine", grpc.StatusCode.OK)
        assert name_of(FAILS, ("x-request-id", "g-1")) == ("g-1", grpc.StatusCode.INTERNAL)
        assert re.fullmatch(MADE_ID, name_of(X[:1], ("x-request-id", "a b"))[0])
        for wrong in (
            {"model_name": "é" * 5000},
            {"model_name": "encoder", "model_version": "é" * 5000},
        ):
            call = ask.future(kind(**wrong), timeout=PATIENCE)
            assert call.code() == grpc.StatusCode.NOT_FOUND, call.details()
    (why,) = said_of(of_logger(server, "mcinfer.serve"), "g-1")
    assert (why["model"], why["version"]) == ("encoder", "3")


# A pipe that is full.


class Piped:
    """A server whose log goes to a pipe of 4096 bytes, which only a test reads."""

    def __init__(self, program: Popen[bytes]) -> None:
        assert program.stderr is not None
        self.log = program.stderr
        fcntl.fcntl(self.log, fcntl.F_SETPIPE_SZ, 4096)
        found = re.search(rb"127\.0\.0\.1:(\d+)", self.log.readline())
        assert found is not None
        self._address = ("127.0.0.1", int(found[1]))

    def ask_at_once(self, count: int) -> int:
        """Send so many requests over one connection, and return how many were answered."""
        one, answers = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", b""
        with socket.create_connection(self._address, PATIENCE) as connection:
            connection.sendall(one * count)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answers += part
        return answers.count(b"200 OK")


@contextmanager
def piped(*options: object) -> Iterator[Piped]:
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0", "--engine", "fake"]
    more = ["--access-log", *map(str, options)]
    with Popen([*command, *more], stderr=PIPE) as program:
        try:
            yield Piped(program)
        finally:
            program.terminate()
            program.communicate(timeout=PATIENCE)


def test_lines_of_several_processes_stay_whole_in_a_pipe_that_is_full(folder: Path) -> None:
    with piped("--repository", folder, "--processes", 2) as server, ThreadPoolExecutor(4) as pool:
        assert [*pool.map(server.ask_at_once, [150] * 16)] == [150] * 16
        lines = [server.log.readline() for _ in range(16 * 150)]
    form = rb'127\.0\.0\.1:\d+ - "GET /v2/health/live HTTP/1\.1" 200 \d+\.\d ms - 0 rows [^ ]+\n'
    assert [line for line in lines if not re.fullmatch(form, line)] == []


def test_log_of_json_says_in_json_what_was_dropped_while_nothing_read_it(folder: Path) -> None:
    options = ("--repository", folder, "--devices", "inline", "--log-format", "json")
    with piped(*options) as server:
        assert [server.ask_at_once(1500) for _ in range(8)] == [1500] * 8
        said = next(line for line in server.log if b"access" not in line)
        assert json.loads(said)["message"].endswith("records were dropped, since nothing read this")


# Refused requests.


def refused(server: Server) -> dict[str, float]:
    name, reasons = "mcinfer_requests_refused_total", ("queue_full", "memory", "no_worker")
    counts = {
        reason: server.figure(name, model="encoder", version="3", reason=reason)
        for reason in (*reasons, "too_large", "invalid")
    }
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize(
    "how", [("--devices", 1), ("--devices", "inline"), ("--processes", 2)], ids=str
)
def test_refused_requests_are_counted_by_reason_whoever_refuses_them(
    how: tuple[object, ...], folder: Path
) -> None:
    limits = ("--max-request-bytes", 1 << 16, "--queue", 2)
    with Server("--repository", folder, "--engine", "fake", *how, *limits) as server:
        wide = request_of(np.zeros((2, 5), np.float32))
        for body, status in (
            (b"{", 400),
            ({"inputs": 3}, 400),
            (wide, 400),
            (request_of(X, sequence_id=1), 400),
            (bytes(1 << 17), 413),
        ):
            assert server.ask(INFER, body).status == status
        assert server.ask(INFER, b"", {"Content-Encoding": "br"}).status == 415
        assert server.ask("/v2/models/none/infer", b"{").status == 404
        server.infer(FAILS, "encoder")  # was accepted
        expected = {"invalid": 5.0, "too_large": 1.0}
        wait_until(lambda: refused(server) == expected)
        if how[0] == "--processes":
            server.end()
            return  # of which each has a queue of its own
        with ThreadPoolExecutor(4) as pool:
            statuses = [each.status for each in pool.map(server.infer, [SLOW] * 4, ["encoder"] * 4)]
        assert (statuses.count(200), statuses.count(503)) == (2, 2)
        assert refused(server) == {**expected, "queue_full": 2.0}
        asked = message("ModelInferRequest")(model_name="encoder")
        with grpc.insecure_channel(server.grpc) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError, match="expected \\['x'\\]"):
                ask(asked.SerializeToString(), timeout=PATIENCE)
        assert refused(server) == {"invalid": 6.0, "too_large": 1.0, "queue_full": 2.0}


# Traces.


def spans(server: Server) -> list[dict[str, Any]]:
    """The spans of requests that it has printed."""
    text, read = server.text(), json.JSONDecoder().raw_decode
    starts = re.finditer(r"^\{$", text, re.MULTILINE)
    found = [read(text, start.start())[0] for start in starts]
    return [span for span in found if span["name"] == "mcinfer.request"]


@pytest.mark.parametrize("how", [("--devices", 1), ("--processes", 2)], ids=str)
def test_span_of_a_request_is_below_that_of_its_caller(
    how: tuple[object, ...], folder: Path
) -> None:
    options = ("--repository", folder, "--engine", "fake", "--trace", *how)
    traces = [f"{n:032x}" for n in range(1, 5)]
    parents = [f"00-{trace}-00000000000000aa-01" for trace in traces]
    env = {"OTEL_TRACES_EXPORTER": "console"}
    with Server(*options, env=env) as server:
        assert server.ask(INFER, request_of(X), {"traceparent": parents[0]}).status == 200
        assert server.ask(INFER, request_of(FAILS), {"traceparent": parents[1]}).status == 500
        bad = {"traceparent": parents[2] + "-more"}
        assert server.ask(INFER, request_of(X), bad).status == 200
        if server.grpc:
            head = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
            asked = message("ModelInferRequest")(
                model_name="encoder", inputs=[head], raw_input_contents=[X.tobytes()]
            ).SerializeToString()
            with grpc.insecure_channel(server.grpc) as channel:
                ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                ask(asked, timeout=PATIENCE, metadata=[("traceparent", parents[3])])
        server.end()
        found = {span["context"]["trace_id"]: span for span in spans(server)}
    called = traces[:2] + traces[3:] * bool(server.grpc)
    for trace in called:
        span = found[f"0x{trace}"]
        assert span["parent_id"] == "0x00000000000000aa"
        assert span["attributes"]["mcinfer.model"] == "encoder/3"
    assert f"0x{traces[2]}" not in found
    alone = [span for span in found.values() if span["parent_id"] is None]
    assert len(alone) == len(found) - len(called) >= 1


def test_span_of_a_request_is_not_below_that_of_the_request_before_it(folder: Path) -> None:
    options = ("--repository", folder, "--engine", "fake", "--devices", 1, "--trace")
    body = json.dumps(request_of(X))
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    named = f"traceparent: 00-{7:032x}-00000000000000aa-01\r\n"
    with Server(*options, env={"OTEL_TRACES_EXPORTER": "console"}) as server:
        with socket.create_connection(server.address, PATIENCE) as connection:
            connection.sendall(f"{head}{named}\r\n{body}{head}\r\n{body}".encode())
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        server.end()
        parents = [span["parent_id"] for span in spans(server)]
    assert (
        len(parents) >= 2
    )  # and those of the look at how the first one splits, which has no caller
    assert [parent for parent in parents if parent] == ["0x00000000000000aa"]


def test_server_whose_exporter_is_missing_says_what_to_install(folder: Path) -> None:
    options = ("--repository", folder, "--engine", "fake", "--trace", "--port", 0)
    env = {"OTEL_TRACES_EXPORTER": "none_such"}
    with Program(COMMAND, "serve", *options, env=env) as program:
        ended = program.wait()
    assert (ended.status, "pip install opentelemetry-sdk" in ended.err) == (1, True), ended.err
