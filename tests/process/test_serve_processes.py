"""`mcinfer serve --processes`: several processes at one address, their figures, deaths and ends."""

import os
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
import pytest

from mcinfer.runtime.transport import runtime_folder
from tests.command_line import COMMAND
from tests.process.models import FakeModel
from tests.process.scripts import Program
from tests.process.waiting import HeldPipe, all_gone, wait_until
from tests.serve.servers import Server

PATIENCE = 60.0
X = np.arange(8, dtype=np.float32).reshape(2, 4)
SLOW = 3.0
"""Rows that begin with this number take a while."""

OPTIONS = ("--name", "model", "--engine", "fake")
TWO = (*OPTIONS, "--processes", 2)


def succeeded(server: Server) -> float:
    return server.figure("mcinfer_requests_total", outcome="succeeded")


def test_processes_count_together_and_change_together_alone(fake_model: FakeModel) -> None:
    with Server(fake_model(), *TWO) as server:
        before = succeeded(server)
        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(server.infer, [X] * 40):
                np.testing.assert_array_equal(answer.values, 2 * X + 1)
        wait_until(lambda: succeeded(server) == before + 40)
        assert server.figure("mcinfer_http_answers_total", status="200") == 40
        page = server.ask("/").body.decode()
        assert "answered by process" in page
        assert all(str(pid) in page for pid in server.workers())
        for path in ("v2/repository/models/model/load", "v2/repository/models/model/unload"):
            answer = server.ask(f"/{path}", b"{}")
            assert (answer.status, f"SIGHUP to process {server.pid}" in answer.error) == (501, True)
        assert server.ask("/v2/logging", {"log_verbose_level": 1}).status == 501
        first = server.workers()
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: len({*server.workers()} - {*first}) == 2 and all_gone(first), PATIENCE)
        wait_until(lambda: server.figure("mcinfer_workers_serving") == 2)
        assert succeeded(server) >= before + 40
        assert server.end() == 143


def test_process_that_is_killed_is_replaced_and_no_sum_falls(fake_model: FakeModel) -> None:
    with Server(fake_model(), *TWO) as server, ThreadPoolExecutor(6) as pool:
        killed, _ = server.workers()
        stopping, answered, broken = threading.Event(), [0] * 6, [0] * 6

        def ask(number: int) -> None:
            while not stopping.is_set():
                x = np.full((1, 4), answered[number], np.float32)
                try:
                    np.testing.assert_array_equal(server.infer(x).values, 2 * x + 1)
                    answered[number] += 1
                except (OSError, HTTPException):
                    broken[number] += 1

        def each_goes_on() -> None:
            before = [*answered]
            wait_until(lambda: all(a > b for a, b in zip(answered, before, strict=True)), PATIENCE)

        asked = [pool.submit(ask, number) for number in range(6)]
        try:
            each_goes_on()
            sums = [succeeded(server)]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: all_gone([killed]))
            while server.figure("mcinfer_workers_serving") < 2:
                sums.append(succeeded(server))
            each_goes_on()
            sums.append(succeeded(server))
        finally:
            stopping.set()
        for one in asked:
            one.result(PATIENCE)
        assert sums == sorted(sums)
        assert sum(broken) <= 6  # each had one request there, at most
        assert server.figure("mcinfer_worker_restarts_total") == 1
        assert f"process {killed} has ended: SIGKILL" in server.text()
        assert server.end() == 143


def test_no_process_is_ready_before_all_that_were_asked_for_serve(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    model = fake_model(build=f"told:{tmp_path / 'pipe'}")
    place = tmp_path / "s"

    def status(path: str) -> int:
        connection = HTTPConnection("localhost", timeout=PATIENCE)
        with closing(connection):
            connection.sock = socket.socket(socket.AF_UNIX)
            try:
                connection.sock.connect(str(place))
                connection.request("GET", path)
                return connection.getresponse().status
            except OSError:
                return 0

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        starting = pool.submit(Server, model, *TWO, "--uds", place)
        first = stack.enter_context(closing(HeldPipe(tmp_path / "pipe0")))
        first.wait()
        second = stack.enter_context(closing(HeldPipe(tmp_path / "pipe0")))
        first.tell("")
        second.wait()
        wait_until(lambda: status("/v2/health/live") == 200, PATIENCE)
        assert (status("/v2/health/ready"), status("/v2/models/model/ready")) == (503, 200)
        second.tell("")
        with starting.result(PATIENCE) as server:
            assert status("/v2/health/ready") == 200
            assert server.end() == 143


def test_sigterm_answers_what_all_processes_have_accepted(fake_model: FakeModel) -> None:
    model = fake_model(when={f"{SLOW:g}": "sleep:0.4"})
    with Server(model, *TWO) as server, ThreadPoolExecutor(8) as pool:
        slow = np.full((1, 4), SLOW, np.float32)
        asked = [pool.submit(server.infer, slow) for _ in range(8)]
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 8)
        assert server.end() == 143
        assert [each.result(PATIENCE).status for each in asked] == [200] * 8


def test_process_that_does_not_end_holds_up_no_change(fake_model: FakeModel) -> None:
    before = "import mcinfer.cli.processes as processes; processes._MORE_SECONDS = 1.0"
    with Server(fake_model(), *TWO, "--drain", 0, before=before) as server:
        first = server.workers()
        os.kill(first[0], signal.SIGSTOP)
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: all_gone(first), PATIENCE)
        assert server.end() == 143


def test_processes_say_which_models_they_serve(fake_model: FakeModel, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "1").mkdir(parents=True)
        fake_model().rename(tmp_path / name / "1" / "model.onnx")
    options = ("--repository", tmp_path, "--engine", "fake", "--model-control-mode", "explicit")
    with Server(*options, "--load-model", "b", "--processes", 2) as server:
        assert "serving b by 2 processes" in server.text()
        assert server.end() == 143


def test_sighup_takes_the_repository_as_it_is_and_gives_up_no_model_that_fails(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    def put(name: str, version: int, **content: str) -> None:
        (folder := tmp_path / "models" / name / str(version)).mkdir(parents=True)
        fake_model(**content).rename(folder / "model.onnx")

    put("a", 1)
    put("gone", 1)
    options = ("--repository", tmp_path / "models", "--engine", "fake", "--processes", 2)
    with Server(*options) as server:
        shutil.rmtree(tmp_path / "models" / "gone")
        put("new", 1)
        first = server.workers()
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: all_gone(first), PATIENCE)
        assert server.ask("/v2/health/ready").status == 200
        assert server.infer(X, "new").status == 200
        put("a", 2, build="fail")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: "does not start" in server.text(), PATIENCE)
        assert {server.infer(X, "a").status for _ in range(8)} == {200}
        assert server.end() == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_their_supervisor(number: signal.Signals, fake_model: FakeModel) -> None:
    """A second SIGINT drops what they have accepted, and they do not outlive a supervisor that is killed."""
    model = fake_model(when={f"{SLOW:g}": "sleep:600"})
    with Server(model, *TWO, "--drain", 2) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.infer, np.full((1, 4), SLOW, np.float32))
        wait_until(lambda: server.figure("mcinfer_requests_in_flight") == 1)
        workers = server.workers()
        server.send_signal(number)
        while server.is_running:
            with suppress(OSError):
                server.send_signal(signal.SIGINT)
            threading.Event().wait(0.2)
        assert server.wait() == 128 + number
        wait_until(lambda: all_gone(workers), PATIENCE)
        with suppress(OSError, HTTPException):
            assert asked.result(PATIENCE).status >= 500
    with runtime_folder():  # it removes what a killed process has left
        pass


@pytest.mark.parametrize(
    ("act", "more", "text"),
    [
        ("fail", (), "mcinfer: failed to load 'model'"),
        ("kill", (), "has ended: SIGKILL"),
        ("", ("--ssl-certfile", __file__, "--ssl-keyfile", __file__), "mcinfer: --ssl-certfile"),
    ],
    ids=["fails", "dies", "certificate"],
)
def test_process_that_cannot_start_ends_the_start_with_one_error(
    act: str, more: tuple[str, ...], text: str, fake_model: FakeModel
) -> None:
    with Program(COMMAND, "serve", fake_model(build=act), *TWO, *more, "--port", 0) as program:
        ended = program.wait()
    assert ended.status == 1
    assert ended.err.count(text) == ended.err.count("\n") == 1, ended.err


def test_servers_share_a_port_and_change_nothing_by_address(fake_model: FakeModel) -> None:
    options = (*OPTIONS, "--devices", "inline", "--reuse-port")
    with ExitStack() as stack:
        one = stack.enter_context(Server(fake_model(), *TWO, "--reuse-port"))
        other = stack.enter_context(Server(fake_model(), *options, "--port", one.address[1]))
        with ThreadPoolExecutor(16) as pool:
            assert {each.status for each in pool.map(other.infer, [X] * 32)} == {200}
        assert one.end() == 143
        np.testing.assert_array_equal(other.infer(X).values, 2 * X + 1)
        answer = other.ask("/v2/repository/models/model/unload", b"{}")
        assert (answer.status, "restart them" in answer.error) == (501, True)
