"""Pools over each transport: the life of workers, what they send, and who may not be served."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mcinfer import InvalidInputError, Master, PredictError, RestartPolicy
from mcinfer.config import TRANSPORTS, TransportKind
from mcinfer.process import command, environment
from mcinfer.protocol import VERSION, Build, Hello, decode, encode
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.folder import RuntimeFolder
from mcinfer.runtime.transport import MasterTransport, SocketPairMaster, ZeroMQMaster
from mcinfer.shm.lifeline import Lifeline
from mcinfer.worker.server import STRANGER
from tests.process.hostile_worker import become
from tests.process.models import FakeModel, OnnxModel, assert_answers, rows
from tests.process.waiting import wait_until

PATIENCE = 20.0
FIRST = "shown in HELLO"
SAME_TEXT = """
<ir_version: 8, opset_import: ["": 17]>
texts (string[batch, 4] x) => (string[batch, 4] y) { y = Identity(x) }
"""

both = pytest.mark.parametrize("transport", TRANSPORTS)


@both
def test_pool_starts_answers_survives_a_death_and_closes(
    fake_model: FakeModel, transport: TransportKind
) -> None:
    policy = RestartPolicy(backoff=0.0)
    with Master(
        fake_model(), 2, engine="fake", verify="never", restart=policy, transport=transport
    ) as master:
        for _ in range(3):
            assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
            pid = master.statistics().workers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
            wait_until(lambda: master.statistics().workers[0].pid != pid)  # noqa: B023 at once
            master.wait_ready(PATIENCE)
        futures = [master.submit(rows(2), timeout=PATIENCE) for _ in range(200)]
        for future in futures:
            assert_answers(future.result(), rows(2))
        master.restart_workers(PATIENCE)
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))


@both
def test_worker_killed_in_a_run_is_replaced_and_its_request_answered(
    fake_model: FakeModel, transport: TransportKind
) -> None:
    with Master(
        fake_model(run="sleep:0.5"), 2, engine="fake", verify="never", transport=transport
    ) as master:
        future = master.submit(rows(4), timeout=PATIENCE)
        wait_until(lambda: any(worker.state == "busy" for worker in master.statistics().workers))
        (busy,) = [worker for worker in master.statistics().workers if worker.state == "busy"]
        assert busy.pid is not None
        os.kill(busy.pid, signal.SIGKILL)
        assert_answers(future.result(), rows(4))


@both
@pytest.mark.parametrize("size", [10, 70_000, 3_000_000])
def test_strings_of_any_size_come_back(
    onnx_model: OnnxModel, transport: TransportKind, size: int
) -> None:
    """They travel in messages, there and back."""
    texts = np.array([["é" * (size // 8)] * 4], dtype=object)
    with Master(onnx_model(SAME_TEXT), 1, verify="never", transport=transport) as master:
        for _ in range(3):
            (answer,) = master.predict({"x": texts}, timeout=PATIENCE).values()
            assert (answer == texts).all()


@both
@pytest.mark.parametrize("kind", ["flood", "garbage", "wide", "big_error"])
def test_worker_that_breaks_the_protocol_is_replaced_and_its_request_answered(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportKind,
    kind: str,
) -> None:
    become(tmp_path, monkeypatch, kind)
    with Master(fake_model(), 1, engine="fake", verify="never", transport=transport) as master:
        for count in (4, 3):
            assert_answers(master.predict(rows(count), timeout=PATIENCE), rows(count))
        wait_until(lambda: master.statistics().workers[0].restarts == 1)


@both
def test_worker_that_says_what_it_may_without_an_end_is_served(
    fake_model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportKind,
) -> None:
    become(tmp_path, monkeypatch, "flood_preparing")
    with Master(fake_model(), 1, engine="fake", verify="never", transport=transport) as master:
        assert_answers(master.predict(rows(4), timeout=PATIENCE), rows(4))
        assert master.statistics().workers[0].restarts == 0


@both
def test_request_that_fails_fails_alone(fake_model: FakeModel, transport: TransportKind) -> None:
    model = fake_model(when={"-1": "fail"})
    with Master(model, 1, engine="fake", verify="never", transport=transport) as master:
        with pytest.raises(PredictError):
            master.predict({"x": np.full((2, 4), -1.0, np.float32)}, timeout=PATIENCE)
        assert_answers(master.predict(rows(3), timeout=PATIENCE), rows(3))


@pytest.mark.parametrize("value", ["", "tcp", "ZeroMQ", None, 1, ["zeromq"]])
def test_transport_that_there_is_none_of_is_refused(fake_model: FakeModel, value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^transport: got .* 'zeromq' or 'socketpair'$"):
        Master(fake_model(), 1, engine="fake", transport=value)  # type: ignore[arg-type]


# A worker whose master is not its own.


@both
@pytest.mark.parametrize("token", ["", FIRST])
def test_worker_does_nothing_for_a_master_that_does_not_show_its_token(
    fake_model: FakeModel, transport: TransportKind, token: str
) -> None:
    lifeline, theirs = Lifeline.pair()
    cancels, listening = Cancels.pair()
    master: MasterTransport = SocketPairMaster()
    if transport == "zeromq":
        with RuntimeFolder() as folder:
            master = ZeroMQMaster(*folder.listen())
    connection = master.add(0)
    with tempfile.TemporaryFile() as stacks:
        greeting = {
            "master": os.getpid(),
            "transport": transport,
            "connection": connection,
            "hello_token": FIRST,
            "build_token": "shown in BUILD",
            "cancels": listening.fd,
            "stacks": stacks.fileno(),
            "most_memory": None,
            "path": sys.path,
            "pythonpath": None,
            "log_level": 30,
        }
        lifeline.greet(json.dumps(greeting).encode())
        with (
            theirs,
            subprocess.Popen(
                command("mcinfer.worker", str(theirs.fileno()), "0", "cpu:0"),
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno(), connection, listening.fd, stacks.fileno()],
            ) as process,
        ):
            master.started(0)
            peer, data = next_message(master)
            hello = decode(data)
            assert isinstance(hello, Hello)
            assert (hello.version, hello.pid, hello.token) == (VERSION, process.pid, FIRST)
            build = Build(
                model=str(fake_model(build="print:loaded")),
                engine="fake",
                device="cpu:0",
                cores=(),
                shared=False,
                threads=1,
                inter_op_threads=None,
                allow_fallback=False,
                session_config={},
                provider_options={},
                token=token,
            )
            master.send(peer, encode(build))
            out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == STRANGER
    assert err.count("\n") == 1
    assert "BUILD does not show the token of the master that started this" in err
    assert out == ""  # it has not loaded the model
    master.close()
    lifeline.close()
    cancels.close()
    listening.close()


def next_message(master: MasterTransport) -> tuple[bytes, bytes]:
    fds = master.fds or [master.worker_fd(0) or -1]
    while (received := master.receive()) is None:
        ready = select.select(fds, [], [], PATIENCE)[0]
        assert ready
        master.note_ready(ready)
    return received
