"""What clients see while a server changes: its end, the death of a worker, another version of a model."""

import json
import os
import queue
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.process.waiting import HeldPipe, wait_until
from tests.serve import models
from tests.serve.clients import PROTOCOLS, Client, Protocol
from tests.serve.conftest import Held, Serve
from tests.serve.servers import Server

X = models.rows(1)
Y = 2 * X + 1

FAKE = ["--name", "held", "--engine", "fake", "--max-batch-size", 1]


class Traffic:
    """Clients that ask one after the other request until they are to stop."""

    def __init__(self, served: Server, allowed: Sequence[float], clients: int) -> None:
        """Begin.

        Args:
            served: What is asked for the model *affine*.
            allowed: Factors of which one is the model's.
            clients: Every other one asks over gRPC.
        """
        self._served, self._allowed = served, allowed
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._counts = [0] * clients
        self._running = [self._pool.submit(self._ask, number) for number in range(clients)]

    def _ask(self, number: int) -> None:
        with Client(PROTOCOLS[number % 2], self._served) as client:
            while not self._stopping.is_set():
                x = models.rows(1 + number % 3, first=self._counts[number])
                y = client.infer("affine", {"x": x}, timeout=60_000_000)["y"]
                factors = [f for f in self._allowed if np.array_equal(y, np.float32(f) * x + 1)]
                assert factors, (x, y)
                self._counts[number] += 1

    def goes_on(self) -> None:
        """Return once each client has got another answer; raise the error that a client has got."""
        before = [*self._counts]

        def each_has_more() -> bool:
            for one in self._running:
                if one.done():
                    one.result()
            return all(now > then for now, then in zip(self._counts, before, strict=True))

        wait_until(each_has_more, 60.0)

    def end(self) -> int:
        """Stop it, and return how many answers there were; raise the error that a client has got."""
        self._stopping.set()
        for one in self._running:
            one.result(60)
        self._pool.shutdown()
        return sum(self._counts)


@contextmanager
def traffic(served: Server, *factors: float, clients: int = 6) -> Iterator[Traffic]:
    """Clients that ask a model, whose answers must be those of one of these factors."""
    running = Traffic(served, factors, clients)
    try:
        yield running
    finally:
        assert running.end()


def ask(protocol: Protocol, served: Server, x: NDArray[Any]) -> NDArray[Any]:
    with Client(protocol, served) as client:
        return client.infer("held", {"x": x})["y"]


def wait_for_requests(served: Server, count: int) -> None:
    wait_until(lambda: served.figure("mcinfer_requests_in_flight", model="held") == count)


def refuses_connections(served: Server) -> bool:
    host, _, port = served.url.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_server_that_ends_answers_what_a_stream_has_sent(
    serve: Serve, fake_model: Held, tmp_path: Path
) -> None:
    model = fake_model(run=f"told:{tmp_path / 'pipe'}")
    served, pipe = serve(model, *FAKE, "--devices", 1), HeldPipe(tmp_path / "pipe0")
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with Client("grpc", served) as client:
        try:
            client.own.start_stream(lambda result, error: answers.put((result, error)))
            for i in range(3):
                client.own.async_stream_infer("held", client.inputs({"x": models.rows(1, first=i)}))
            pipe.wait()
            wait_for_requests(served, 3)
            served.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses_connections(served))
        finally:
            pipe.close()
        for i in range(3):
            result, error = answers.get(timeout=60)
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("y"), 2 * models.rows(1, first=i) + 1)
        client.own.stop_stream()
        assert served.wait() == 143


def test_traffic_while_the_server_ends_is_answered_or_not_accepted(
    serve: Serve, tmp_path: Path
) -> None:
    """A request that was sent gets its answer, or its connection is closed before any of it is read."""
    served = serve(models.write(tmp_path)[0], "--devices", 2)
    lost: list[str] = []
    begun = threading.Barrier(9)

    def client(number: int) -> int:
        count = 0
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [number] * 4}
        body = json.dumps({"inputs": [tensor]})
        with served.connection() as connection:
            while True:
                try:
                    connection.request("POST", "/v2/models/affine/infer", body)
                    response = connection.getresponse()
                    content = json.loads(response.read())
                except OSError:
                    return count
                if response.status != 200:
                    lost.append(f"{response.status} {content}")
                    return count
                assert content["outputs"][0]["data"] == [2.0 * number + 1] * 4
                count += 1
                if count == 20:
                    begun.wait(60)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client, number) for number in range(8)]
        begun.wait(60)
        assert served.end() == 143
        assert all(one.result(60) >= 20 for one in asked)
    assert lost == []


def test_no_request_is_lost_while_workers_are_killed(serve: Serve, tmp_path: Path) -> None:
    served = serve(models.write(tmp_path)[0], "--devices", 2)
    with traffic(served, 2.0) as running:
        for kills in range(1, 6):
            running.goes_on()
            os.kill(served.workers()[kills % 2], signal.SIGKILL)
            wait_until(lambda: served.figure("mcinfer_worker_restarts_total") >= kills, 60.0)  # noqa: B023 it is called at once
            wait_until(lambda: served.figure("mcinfer_workers_serving") == 2, 60.0)
        running.goes_on()
    assert served.figure("mcinfer_requests_total", outcome="failed") == 0
    assert served.ask("/v2/health/ready").json == {"ready": True}


def test_no_request_is_lost_while_another_version_is_loaded(serve: Serve, tmp_path: Path) -> None:
    place = models.repository(tmp_path / "repo", affine={1: models.affine(2.0)})
    served = serve("--repository", place, "--devices", 1)
    with traffic(served, 2.0, 3.0) as running, Client("http", served) as client:
        for version in range(2, 6):
            running.goes_on()
            factor = 2.0 + version % 2
            models.add_version(place, "affine", version, models.affine(factor))
            client.own.load_model("affine")
            assert client.shown("get_model_metadata", "affine")["versions"] == [str(version)]
            np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], factor * X + 1)
        running.goes_on()
    wait_until(lambda: len(served.workers()) == 1)  # those of versions before have ended


def test_no_request_is_lost_while_the_repository_changes(serve: Serve, tmp_path: Path) -> None:
    place = models.repository(tmp_path / "repo", affine={1: models.affine(2.0)})
    mode = ("--model-control-mode", "poll", "--repository-poll-secs", 0.1)
    served = serve("--repository", place, "--devices", "inline", *mode)
    with traffic(served, 2.0, 3.0, clients=4) as running, Client("http", served) as client:

        def serves(version: int) -> bool:
            return bool(client.shown("get_model_metadata", "affine")["versions"] == [str(version)])

        for version in range(2, 22):
            factor = 2.0 + version % 2
            models.add_version(place, "affine", version, models.affine(factor))
            shutil.rmtree(place / "affine" / str(version - 1))
            wait_until(partial(serves, version), 60.0)
            np.testing.assert_array_equal(client.infer("affine", {"x": X})["y"], factor * X + 1)
        running.goes_on()
        with client.refused(400):
            client.own.load_model("affine")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_that_runs_while_its_model_is_unloaded_is_answered(
    protocol: Protocol, serve: Serve, fake_model: Held, tmp_path: Path
) -> None:
    model = fake_model(run=f"told:{tmp_path / 'pipe'}")
    served, pipe = serve(model, *FAKE, "--devices", 1), HeldPipe(tmp_path / "pipe0")
    with ThreadPoolExecutor(1) as pool, Client(protocol, served) as client:
        try:
            asked = pool.submit(ask, protocol, served, X)
            pipe.wait()
            client.own.unload_model("held")
            with client.refused(404):
                client.infer("held", {"x": X})
            assert not asked.done()
        finally:
            pipe.close()
        np.testing.assert_array_equal(asked.result(60), Y)
        wait_until(lambda: not served.workers())
        client.own.load_model("held")
        np.testing.assert_array_equal(client.infer("held", {"x": X})["y"], Y)
