"""What `tritonclient` is answered, over HTTP and gRPC: models, values, errors, limits, and who may ask."""

import asyncio
import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.grpc.auth
import tritonclient.http
import tritonclient.http.aio
import tritonclient.http.aio.auth
import tritonclient.http.auth
import trustme
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.process.waiting import HeldPipe, wait_until
from tests.serve import models
from tests.serve.clients import PROTOCOLS, Client, Protocol, arrays_of, inputs
from tests.serve.conftest import Held, Serve
from tests.serve.servers import Server
from tests.text_models import text_model

X = models.rows(3)
Y = 2 * X + 1


@pytest.fixture(params=PROTOCOLS)
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    """A client of the shared server, of each protocol."""
    with Client(request.param, server) as opened:
        yield opened


def assert_same(got: Mapping[str, NDArray[Any]], sent: models.Arrays) -> None:
    """Fail unless the outputs of a model of identities are what was sent, in type and value."""
    assert {name.removeprefix("out_") for name in got} == {n.removeprefix("in_") for n in sent}
    for name, array in sent.items():
        back = got[name.replace("in_", "out_")]
        assert back.dtype == array.dtype, name
        np.testing.assert_array_equal(back, array, name)


# What the server says of itself and its models.


def test_server_and_its_models_are_live_and_ready(client: Client) -> None:
    assert client.own.is_server_live()
    assert client.own.is_server_ready()
    assert client.own.is_model_ready("affine")
    assert client.own.is_model_ready("affine", "1")
    assert not client.own.is_model_ready("affine", "2")
    assert not client.own.is_model_ready("no-such-model")


def test_metadata_has_names_types_and_shapes(client: Client) -> None:
    metadata = client.shown("get_server_metadata")
    assert metadata["name"] == "mcinfer"
    assert {"binary_tensor_data", "model_repository", "statistics"} <= {*metadata["extensions"]}
    metadata = client.shown("get_model_metadata", "numbers")
    assert (metadata["name"], metadata["versions"]) == ("numbers", ["1"])
    assert [tensor["name"] for tensor in metadata["inputs"]] == [*models.numbers()]
    for tensor in (*metadata["inputs"], *metadata["outputs"]):
        assert tensor["datatype"] == tensor["name"].partition("_")[2]
        assert [int(size) for size in tensor["shape"]] == [-1, -1]


def test_configuration_has_the_batch_and_the_devices(client: Client) -> None:
    config = client.shown("get_model_config", "affine")
    config = config.get("config", config)
    assert (config["name"], config["platform"]) == ("affine", "onnxruntime_onnx")
    assert int(config["max_batch_size"]) == 8
    (tensor,) = config["input"]
    assert (tensor["name"], tensor["data_type"]) == ("x", "TYPE_FP32")
    assert [int(size) for size in tensor["dims"]] == [4]
    (group,) = config["instance_group"]
    assert (group["kind"], int(group["count"])) == ("KIND_CPU", 1)


def test_statistics_count_requests_and_rows(client: Client) -> None:
    def counted() -> tuple[int, int]:
        (stats,) = client.shown("get_inference_statistics", "affine")["model_stats"]
        success = stats["inference_stats"]["success"]
        return int(stats.get("inference_count", 0)), int(success.get("count", 0))

    rows, requests = counted()
    for _ in range(3):
        client.infer("affine", {"x": X})
    assert counted() == (rows + 9, requests + 3)
    every = client.shown("get_inference_statistics")["model_stats"]
    assert [stats["name"] for stats in every] == ["affine", "numbers", "scalars", "texts"]


def test_log_settings_switch_the_log(serve: Serve, tmp_path: Path) -> None:
    served = serve(models.write(tmp_path)[0], "--devices", "inline")
    with Client("http", served) as client:
        before = client.own.get_log_settings()
        assert (before["log_warning"], before["log_verbose_level"]) == (True, 0)
        changed = client.own.update_log_settings({"log_verbose_level": 1, "log_info": True})
        assert (changed["log_verbose_level"], changed["log_info"]) == (1, True)
        assert client.own.get_log_settings() == changed
        with suppress(InferenceServerException):
            client.own.update_log_settings({"log_file": "other.log"})
        assert client.own.get_log_settings() == changed  # no client names a file to write


# Values.


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (7, 1), (0, 3), (2, 0)])
def test_numbers_of_all_types_come_back_as_bytes(client: Client, rows: int, columns: int) -> None:
    sent = models.numbers(rows, columns)
    assert_same(client.infer("numbers", sent), sent)


CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""The protocol has FP16 and BF16 as raw bytes alone."""


def test_contents_of_grpc_have_each_type(serve: Serve, tmp_path: Path) -> None:
    onnx.save(models.identities(*CONTENTS), tmp_path / "numbers.onnx")
    served = serve(tmp_path / "numbers.onnx", "--devices", "inline")
    sent = {f"in_{kind}": models.numbers()[f"in_{kind}"] for kind in CONTENTS}
    asked = service_pb2.ModelInferRequest(model_name="numbers")
    for name, array in sent.items():
        tensor = asked.inputs.add(name=name, datatype=name[3:], shape=array.shape)
        getattr(tensor.contents, CONTENTS[name[3:]]).extend(array.ravel().tolist())
    assert_same(arrays_of(_answer_of(asked, served)), sent)


def test_contents_of_grpc_may_be_strings(server: Server) -> None:
    asked = service_pb2.ModelInferRequest(model_name="texts")
    tensor = asked.inputs.add(name="in_BYTES", datatype="BYTES", shape=models.TEXTS.shape)
    tensor.contents.bytes_contents.extend(models.TEXTS.ravel().tolist())
    answer = _answer_of(asked, server)
    assert answer.as_numpy("out_BYTES").tolist() == models.TEXTS.tolist()


def _answer_of(asked: Any, served: Server) -> Any:
    with grpc.insecure_channel(served.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return tritonclient.grpc.InferResult(stub.ModelInfer(asked, timeout=60))


def test_scalars_have_no_sizes(client: Client) -> None:
    got = client.infer("scalars", {"a": np.array(2.5, np.float32), "n": np.array(1 << 60)})
    assert {name: (array.shape, array.item()) for name, array in got.items()} == {
        "b": ((), -2.5),
        "m": ((), -(1 << 60)),
    }


def test_strings_keep_their_zeros_and_may_be_long(client: Client) -> None:
    sent = {"in_BYTES": models.TEXTS}
    assert_same(client.infer("texts", sent), sent)
    none = {"in_BYTES": models.TEXTS[:0]}
    assert_same(client.infer("texts", none), none)


def test_string_that_is_not_utf_8_is_refused_by_its_name(client: Client) -> None:
    """ONNX Runtime's Python package takes and gives text."""
    with client.refused(400) as said:
        client.infer("texts", {"in_BYTES": np.array([[b"\xff\xfe"]], object)})
    assert "in_BYTES" in said[0]
    assert "UTF-8" in said[0]


GATHER = (
    """(float[n, 2] table, int64[m] index) => (float[m, 2] row) { row = Gather(table, index) }"""
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_that_the_runtime_refuses_are_answered_in_words_of_the_server_s(
    serve: Serve, tmp_path: Path, protocol: Protocol
) -> None:
    """The runtime's own text, which may name files, is in the log alone."""
    path = tmp_path / "gather.onnx"
    onnx.save(text_model(GATHER), path)
    served = serve(path, "--devices", "inline")
    table, index = np.zeros((3, 2), np.float32), np.array([9])
    with Client(protocol, served) as client, client.refused(400) as said:
        client.infer("gather", {"table": table, "index": index})
    assert said == [
        "the model refuses input 'table': got FP32 [3, 2], expected FP32 [-1, 2]; "
        "input 'index': got INT64 [1], expected INT64 [-1]: the server's log says why"
    ]
    wait_until(lambda: "indices element out of data bounds" in served.text())


@pytest.mark.parametrize("answer", [None, "gzip", "deflate"])
@pytest.mark.parametrize("question", [None, "gzip", "deflate"])
def test_bodies_may_be_compressed_both_ways(
    server: Server, question: str | None, answer: str | None
) -> None:
    x = np.zeros((2000, 4), np.float32)
    with Client("http", server) as client:
        result = client.own.infer(
            "affine",
            client.inputs({"x": x}),
            request_compression_algorithm=question,
            response_compression_algorithm=answer,
        )
        assert result.as_numpy("y").tolist() == (2 * x + 1).tolist()


def test_large_bodies_come_back_whole(client: Client) -> None:
    x = models.rows(1_000_000)  # 16 MB
    np.testing.assert_array_equal(client.infer("affine", {"x": x})["y"], 2 * x + 1)


# Ways to ask.


def test_many_requests_of_one_loop_over_http_are_answered(server: Server) -> None:
    async def ask() -> None:
        async with tritonclient.http.aio.InferenceServerClient(server.url) as client:
            assert await client.is_server_ready()

            async def one(i: int) -> None:
                x = models.rows(1 + i % 3, first=i)
                given = inputs(tritonclient.http, {"x": x}, binary_data=i % 2 == 0)
                coding = ("gzip", "deflate", None)[i % 3]
                result = await client.infer(
                    "affine",
                    given,
                    request_compression_algorithm=coding,
                    response_compression_algorithm=coding,
                )
                np.testing.assert_array_equal(result.as_numpy("y"), 2 * x + 1)

            await asyncio.gather(*map(one, range(200)))

    asyncio.run(ask())


def test_stream_is_answered_in_order_and_goes_on_after_an_error(server: Server) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with Client("grpc", server) as client:
        client.own.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(40):
            model = "no-such-model" if i == 20 else "affine"
            given = client.inputs({"x": models.rows(1 + i % 5, first=i)})
            client.own.async_stream_infer(model, given, request_id=str(i))
        for i in range(40):
            result, error = answers.get(timeout=60)
            if i == 20:
                assert "Request for unknown model" in error.message()
                continue
            assert (error, result.get_response().id) == (None, str(i))
            expected = 2 * models.rows(1 + i % 5, first=i) + 1
            np.testing.assert_array_equal(result.as_numpy("y"), expected)
        client.own.stop_stream()


# Errors.


def test_unknown_model_or_version_is_not_found(client: Client) -> None:
    for model, version in (("no-such-model", ""), ("affine", "2")):
        with client.refused(404) as said:
            client.infer(model, {"x": X}, model_version=version)
        assert said[0].startswith("Request for unknown model")
        for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
            with client.refused(404) as said:
                client.shown(method, model, version)
            assert said[0].startswith("Request for unknown model")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": X}, ["'z'", "'x'"]),
        ({}, ["[]", "'x'"]),
        ({"x": X.astype(np.float64)}, ["input x", "FP64", "FP32"]),
        ({"x": X[:, :3]}, ["input x", "[3, 3]", "[-1, 4]"]),
        ({"x": X[0]}, ["input x", "[4]", "[-1, 4]"]),
    ],
)
def test_wrong_input_is_refused_by_what_came_and_what_was_expected(
    client: Client, arrays: models.Arrays, words: Sequence[str]
) -> None:
    with client.refused(400) as said:
        client.infer("affine", arrays)
    assert [word for word in words if word not in said[0]] == [], said


def test_raw_contents_of_grpc_go_with_no_others_and_are_as_many_as_inputs(server: Server) -> None:
    x = X.tobytes()
    for contents, raw in ((True, [x]), (False, [x, x]), (False, [x, b""]), (False, [])):
        asked = service_pb2.ModelInferRequest(model_name="affine", raw_input_contents=raw)
        tensor = asked.inputs.add(name="x", datatype="FP32", shape=X.shape)
        if contents:
            tensor.contents.fp32_contents.extend(X.ravel())
        with pytest.raises(grpc.RpcError) as caught:
            _answer_of(asked, server)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, raw


def test_body_in_chunks_is_read(server: Server) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [3, 4], "data": X.tolist()}
    text = json.dumps({"inputs": [tensor]}).encode()
    with server.connection() as connection:
        parts = [text[i : i + 10] for i in range(0, len(text), 10)]
        path, headers = "/v2/models/affine/infer", {"Transfer-Encoding": "chunked"}
        connection.request("POST", path, iter(parts), headers, encode_chunked=True)
        answer = json.load(connection.getresponse())
    assert answer["outputs"][0]["data"] == Y.ravel().tolist()


def test_body_of_only_bytes_is_the_models_only_input(serve: Serve, tmp_path: Path) -> None:
    """Triton's *raw binary request*."""
    for name, sizes in (("one", "1"), ("many", "n")):
        text = f"(string[batch, {sizes}] x) => (string[batch, {sizes}] y) {{ y = Identity(x) }}"
        onnx.save(text_model(text), tmp_path / f"{name}.onnx")
    files = [*models.write(tmp_path)[:1], tmp_path / "one.onnx", tmp_path / "many.onnx"]
    served, header = serve(*files, "--devices", "inline"), {"Inference-Header-Content-Length": "0"}
    answer = served.ask("/v2/models/affine/infer", X.tobytes(), header)
    start = int(answer.headers["inference-header-content-length"])
    assert (answer.status, answer.body[start:]) == (200, Y.tobytes())
    answer = served.ask("/v2/models/one/infer", "\u20ac".encode(), header)
    assert answer.status == 200
    assert answer.body.endswith(b"\3\0\0\0\xe2\x82\xac")
    for model, body, expected in (
        ("affine", bytes(15), "15 bytes"),
        ("many", b"a", "the model must have input shape [1]"),
    ):
        answer = served.ask(f"/v2/models/{model}/infer", body, header)
        assert answer.status == 400, answer.body
        assert expected in answer.error


def test_what_models_do_not_have_here_is_refused(client: Client) -> None:
    with client.refused(400) as said:
        client.infer("affine", {"x": X}, sequence_id=7, sequence_start=True)
    assert "sequence_id" in said[0]
    with client.refused(400) as said:
        client.infer("affine", {"x": X}, outputs=[client.output("y", class_count=2)])
    assert "classification" in said[0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_beyond_the_limit_is_refused(
    protocol: Protocol, serve: Serve, tmp_path: Path
) -> None:
    served = serve(models.write(tmp_path)[0], "--max-request-bytes", 100_000)
    with Client(protocol, served) as client:
        with client.refused(413):
            client.infer("affine", {"x": models.rows(10_000)})
        np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)
    if protocol == "http":
        with Client(protocol, served) as client, client.refused(413):
            given = client.inputs({"x": np.zeros((10_000, 4), np.float32)})
            client.own.infer("affine", given, request_compression_algorithm="gzip")


# Time-outs, priorities and a full queue: with a model that runs until the test lets it.


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[HeldPipe]:
    """What the worker of `held` reads."""
    opened = HeldPipe(tmp_path / "pipe0")
    yield opened
    opened.close()


def held(fake_model: Held, tmp_path: Path) -> list[object]:
    """Arguments for a server whose one worker is held by the test."""
    model = fake_model(run=f"told:{tmp_path / 'pipe'}", when={"-1": "sleep:60"})
    return [model, "--name", "held", "--engine", "fake", "--devices", 1, "--max-batch-size", 1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answer_that_comes_too_late_is_a_timeout(
    protocol: Protocol, serve: Serve, fake_model: Held
) -> None:
    model = fake_model(when={"-1": "sleep:60"})
    served = serve(model, "--name", "slow", "--engine", "fake", "--devices", 1)
    with Client(protocol, served) as client:
        with client.refused(504):
            client.infer("slow", {"x": np.full((1, 4), -1, np.float32)}, timeout=100_000)
        np.testing.assert_array_equal(client.infer("slow", {"x": X}, timeout=60_000_000)["y"], Y)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_full_queue_refuses_at_once_and_says_when_to_come_again(
    protocol: Protocol, serve: Serve, fake_model: Held, tmp_path: Path, pipe: HeldPipe
) -> None:
    served = serve(*held(fake_model, tmp_path), "--queue", 1)
    with ThreadPoolExecutor(1) as pool, Client(protocol, served) as client:
        first = pool.submit(_ask, protocol, served)
        try:
            pipe.wait()
            with client.refused(503):
                client.infer("held", {"x": X})
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0] * 4}
            answer = served.ask("/v2/models/held/infer", {"inputs": [tensor]})
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        finally:
            pipe.tell("")
        np.testing.assert_array_equal(first.result(60), Y)


def _ask(protocol: Protocol, served: Server, **options: Any) -> NDArray[Any]:
    with Client(protocol, served) as client:
        return client.infer("held", {"x": X}, **options)["y"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_of_a_client_that_is_gone_is_cancelled(
    protocol: Protocol, serve: Serve, fake_model: Held
) -> None:
    model = fake_model(when={"-1": "sleep:3600"})
    served = serve(model, "--name", "held", "--engine", "fake", "--devices", 1, "--timeout", 3600)

    def wait_for_requests(count: int) -> None:
        wait_until(lambda: served.figure("mcinfer_requests_in_flight", model="held") == count)

    x = np.full((1, 4), -1, np.float32)
    with Client(protocol, served) as client:
        if protocol == "http":
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": x.tolist()}
            with served.connection() as connection:
                body = json.dumps({"inputs": [tensor]})
                connection.request("POST", "/v2/models/held/infer", body)
                wait_for_requests(1)
        else:
            ended = threading.Event()
            given = client.inputs({"x": x})
            call = client.own.async_infer("held", given, callback=lambda **_: ended.set())
            wait_for_requests(1)
            call.cancel()
            assert ended.wait(60)
        wait_for_requests(0)
        np.testing.assert_array_equal(client.infer("held", {"x": X})["y"], Y)


# Models come and go.


def configured(folder: Path, text: str) -> Path:
    """A repository of one model, *affine*, with a configuration."""
    place = models.repository(folder, affine={1: models.affine(2.0)})
    (place / "affine" / "config.pbtxt").write_text(text, encoding="utf-8")
    return place


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_model_is_unloaded_and_loaded_again(
    protocol: Protocol, serve: Serve, tmp_path: Path
) -> None:
    place = models.repository(tmp_path / "repo", affine={1: models.affine(2.0)})
    served = serve("--repository", place, "--devices", 1)
    with Client(protocol, served) as client:
        client.own.unload_model("affine")
        assert not client.own.is_model_ready("affine")
        with client.refused(404) as said:
            client.infer("affine", {"x": X})
        assert "unloaded" in said[0]
        index = client.shown("get_model_repository_index")
        (found,) = index if isinstance(index, list) else index["models"]
        assert (found["state"], found["reason"]) == ("UNAVAILABLE", "unloaded")
        client.own.load_model("affine")
        assert client.own.is_model_ready("affine")
        np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_model_is_loaded_with_a_configuration_in_place_of_its_own(
    protocol: Protocol, serve: Serve, tmp_path: Path
) -> None:
    served = serve("--repository", configured(tmp_path / "repo", "max_batch_size: 8"))

    with Client(protocol, served) as asking:
        _check_loads(asking)


def _check_loads(client: Client) -> None:
    def batch() -> int:
        config = client.shown("get_model_config", "affine")
        return int(config.get("config", config)["max_batch_size"])

    assert batch() == 8
    for text in ("{", '{"max_batch_size": "many"}', '{"backend": "python"}'):
        with client.refused(400) as said:
            client.own.load_model("affine", config=text)
        assert said[0].startswith("failed to load 'affine'")
    assert batch() == 8
    client.own.load_model("affine", config='{"max_batch_size": "16"}')
    assert batch() == 16
    np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)
    client.own.load_model("affine")
    assert batch() == 8


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_load_of_an_unknown_model_or_of_a_clients_files_is_refused(
    protocol: Protocol, serve: Serve, tmp_path: Path
) -> None:
    place = models.repository(tmp_path / "repo", affine={1: models.affine(2.0)})
    with Client(protocol, serve("--repository", place)) as client:
        with client.refused(400) as said:
            client.own.load_model("no-such-model")
        assert said[0].startswith("failed to load 'no-such-model'")
        content = models.affine(3.0).SerializeToString()
        with client.refused(400) as said:
            client.own.load_model("affine", config="{}", files={"file:1/model.onnx": content})
        assert said[0].startswith("failed to load 'affine'")
        np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)


def test_configuration_decides_devices_and_batches(serve: Serve, tmp_path: Path) -> None:
    """Four requests of a row fill a batch, and run at once; none waits for the delay.

    A larger request comes first, and shows that rows may run together.
    """
    text = """
name: "affine"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3600000000 }
version_policy: { latest { num_versions: 1 } }
"""
    served = serve("--repository", configured(tmp_path / "repo", text), "--timeout", 3600)
    with Client("http", served, concurrency=4) as client:
        config = client.own.get_model_config("affine")
        assert config["max_batch_size"] == 4
        assert config["dynamic_batching"] == {"max_queue_delay_microseconds": 3_600_000_000}
        assert [(g["kind"], g["count"]) for g in config["instance_group"]] == [("KIND_CPU", 2)]
        assert len(served.workers()) == 2
        client.infer("affine", {"x": models.rows(16)})
        (before,) = client.own.get_inference_statistics("affine")["model_stats"]
        asked = [
            client.own.async_infer("affine", client.inputs({"x": models.rows(1, first=i)}))
            for i in range(4)
        ]
        for i, each in enumerate(asked):
            got = each.get_result(timeout=60).as_numpy("y")
            np.testing.assert_array_equal(got, 2 * models.rows(1, first=i) + 1)
        (stats,) = client.own.get_inference_statistics("affine")["model_stats"]
        counts = [stats[what] - before[what] for what in ("execution_count", "inference_count")]
        assert counts == [1, 4]


def test_devices_are_dealt_out_over_models(serve: Serve, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.onnx" for name in ("one", "two", "three")]
    for file in files:
        onnx.save(models.affine(2.0), file)
    served = serve(*files, "--devices", "cpu:0,cpu:1", "--devices", "three=inline")
    with Client("http", served) as client:
        for name in ("one", "two", "three"):
            np.testing.assert_array_equal(client.infer(name, {"x": X})["y"], Y)
    for name, device in (("one", "cpu:0"), ("two", "cpu:0"), ("three", "inline")):
        assert served.figure("mcinfer_workers", model=name) == 1
        assert served.figure("mcinfer_worker_runs_total", model=name, device=device) == 1
    first, second = ({*psutil.Process(pid).cpu_affinity()} for pid in served.workers())
    assert len(os.sched_getaffinity(0)) == 1 or not first & second


# Who may ask, and how.


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_that_trust_the_certificate_are_answered_by_tls(
    protocol: Protocol, serve: Serve, tmp_path: Path, authority: trustme.CA
) -> None:
    own = authority.issue_cert("127.0.0.1", "localhost")
    own.cert_chain_pems[0].write_to_path(str(tmp_path / "certificate.pem"))
    own.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    tls = ["--ssl-certfile", tmp_path / "certificate.pem", "--ssl-keyfile", tmp_path / "key.pem"]
    served = serve(models.write(tmp_path)[0], "--devices", "inline", *tls)
    assert f"https://{served.url}" in served.text()
    trusted = str(tmp_path / "authority.pem")
    options: dict[str, Any] = {"ssl": True, "root_certificates": trusted}
    if protocol == "http":
        options = {"ssl": True, "ssl_options": {"ca_certs": trusted}}
    with Client(protocol, served, **options) as client:
        assert client.own.is_server_ready()
        np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)
    with Client(protocol, served, ssl=True) as client, pytest.raises(Exception):  # noqa: B017, PT011
        client.infer("affine", {"x": X})
    with Client(protocol, served) as client, pytest.raises(Exception):  # noqa: B017, PT011
        client.infer("affine", {"x": X})


class _Key(tritonclient.http.InferenceServerClientPlugin):  # type: ignore[misc] # without types
    """Shows a key as most clients do."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: Any) -> None:
        request.headers["authorization"] = f"Bearer {self._key}"


@pytest.fixture
def keyed(serve: Serve, tmp_path: Path) -> Server:
    """A server that wants the key *secret* or *other*."""
    (tmp_path / "keys").write_text("# of the tests\nsecret\nother\n", encoding="utf-8")
    keys = ["--api-key-file", tmp_path / "keys"]
    return serve(models.write(tmp_path)[0], "--devices", "inline", *keys)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_client_with_a_key_is_admitted_and_one_without_is_not(
    protocol: Protocol, keyed: Server
) -> None:
    auth = tritonclient.http.auth if protocol == "http" else tritonclient.grpc.auth
    plugins = [auth.BasicAuth("anyone", "secret"), _Key("secret"), _Key("other")]
    with Client(protocol, keyed) as client:
        for plugin in plugins:
            client.own.register_plugin(plugin)
            np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], Y)
            assert client.shown("get_server_metadata")["name"] == "mcinfer"
            client.own.unregister_plugin()
        header = {"authorization": "Bearer secret"}
        np.testing.assert_array_equal(client.infer("affine", {"x": X}, headers=header)["y"], Y)
        for wrong in (auth.BasicAuth("secret", "anyone"), _Key("wrong"), _Key("")):
            client.own.register_plugin(wrong)
            with client.refused(401):
                client.infer("affine", {"x": X})
            client.own.unregister_plugin()
        for ask in ("get_server_metadata", "get_model_repository_index"):
            with client.refused(401):
                client.shown(ask)
        assert client.own.is_server_live()
        assert client.own.is_server_ready()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_stream_and_figures_want_a_key(protocol: Protocol, keyed: Server) -> None:
    if protocol == "http":
        for path in ("/metrics", "/", "/live", "/v2/models/affine"):
            answer = keyed.ask(path)
            assert (answer.status, "www-authenticate" in answer.headers) == (401, True)
        return
    answers: queue.Queue[Any] = queue.Queue()
    with Client(protocol, keyed) as client:
        client.own.start_stream(lambda result, error: answers.put(error))  # noqa: ARG005 the client's
        with suppress(InferenceServerException):  # it may have ended already
            client.own.async_stream_infer("affine", client.inputs({"x": X}))
        assert "UNAUTHENTICATED" in str(answers.get(timeout=60))
        client.own.stop_stream()


def test_unix_socket_is_for_this_user_alone_and_is_gone_afterwards(
    serve: Serve, folders: Path, tmp_path: Path
) -> None:
    place = folders / "socket"
    served = serve(models.write(tmp_path)[0], "--devices", "inline", "--uds", place)
    assert served.url == str(place)
    assert place.stat().st_mode & 0o777 == 0o600
    tensor = {"name": "x", "datatype": "FP32", "shape": [3, 4], "data": X.ravel().tolist()}
    answer = served.ask("/v2/models/affine/infer", {"id": "u", "inputs": [tensor]})
    assert (answer.status, answer.json["id"]) == (200, "u")
    assert answer.json["outputs"][0]["data"] == Y.ravel().tolist()
    assert served.ask("/v2/health/ready").json == {"ready": True}
    assert served.end() == 143
    assert not place.exists()
