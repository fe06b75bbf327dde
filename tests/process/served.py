"""Servers for tests: `mcinfer serve` in a process of its own, and what it answers."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.command_line import COMMAND
from tests.process.scripts import ROOT
from tests.process.waiting import wait_until

PATIENCE = 40.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        text: str = self.json["error"]
        return text


class Server:
    """A running server, and where it listens."""

    def __init__(self, process: "subprocess.Popen[str]", host: str, port: int, grpc: str) -> None:
        self.process, self.host, self.port, self.grpc = process, host, port, grpc

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def ask(
        self,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> Answer:
        """Ask on a connection of its own; a body that is not bytes goes as JSON."""
        connection = self.connection()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(
                method or ("GET" if body is None else "POST"), path, data, headers or {}
            )
            came = connection.getresponse()
            return Answer(came.status, {k.lower(): v for k, v in came.getheaders()}, came.read())
        finally:
            connection.close()

    def infer(self, x: NDArray[Any], model: str = "model", **parameters: object) -> Answer:
        """Ask a model whose input is x for its outputs, in JSON."""
        return self.ask(f"/v2/models/{model}/infer", request_of(x, **parameters))

    def workers(self) -> list[int]:
        """The processes of its workers."""
        return children_of(self.process.pid)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Have it end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, whichever of its threads did."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            found += [int(child) for child in (task / "children").read_text("ascii").split()]
    return sorted(found)


def request_of(x: NDArray[Any], **parameters: object) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [*x.shape], "data": x.ravel().tolist()}
    return {"inputs": [tensor], "parameters": parameters}


def values_of(answer: Answer) -> NDArray[Any]:
    """The first output of an answer in JSON."""
    assert answer.status == 200, answer.body
    output = answer.json["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@contextmanager
def serving(*arguments: object, before: str = "") -> Iterator[Server]:
    """A server of these arguments, on a free port unless they say another place; `before` runs first."""
    words = [*map(str, arguments)]
    if "--uds" not in words and "--port" not in words:
        words += ["--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", f"{before}\n{COMMAND}", "serve", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "serving" in line:
                    break
            else:
                raise AssertionError(f"the server ended: {lines}")
            place = re.search(r"://([^:,\s]+):(\d+)", line)
            host, port = (place[1], int(place[2])) if place else ("", 0)
            called = re.search(r"gRPC at (\S+)", line)
            yield Server(process, host, port, called[1] if called else "")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGINT)
                wait_until(lambda: process.poll() is not None, PATIENCE)
