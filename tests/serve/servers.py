"""Servers as users start them: processes of ``mcinfer serve``."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from tests.command_line import COMMAND
from tests.process.waiting import all_gone, is_alive, wait_until

ROOT = Path(__file__).resolve().parents[2]

_SERVING = re.compile(r'serving .*? at (?:https?://)?([^\s"]+?)(?:, gRPC at ([^\s"]+))?["\n]')

_SECONDS = 60.0
"""For a server to begin, or to end."""


def request_of(x: NDArray[Any], **parameters: object) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [*x.shape], "data": x.ravel().tolist()}
    return {"inputs": [tensor], "parameters": parameters}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back over HTTP."""

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

    @property
    def values(self) -> NDArray[Any]:
        """The first output, in JSON."""
        assert self.status == 200, self.body
        output = self.json["outputs"][0]
        return np.array(output["data"], np.float32).reshape(output["shape"])


class Server:
    """A running server, at free ports; a context manager that leaves no process behind.

    Attributes:
        url: Its address and port for HTTP, or the path of its socket.
        grpc: Its address and port for gRPC.
        pid: Of its process.
    """

    def __init__(
        self, *arguments: object, env: Mapping[str, str] | None = None, before: str = ""
    ) -> None:
        """Start it, and return once it serves; its process runs the program `before` first."""
        ports = [] if {"--uds", "--port"} & {*arguments} else ["--port", "0"]
        ports += [] if "--processes" in arguments else ["--grpc-port", "0"]
        ports += [] if "--drain-delay" in arguments else ["--drain-delay", "0"]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{before}\n{COMMAND}", "serve", *ports]
            + [str(argument) for argument in arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self.pid = self._process.pid
        try:
            wait_until(lambda: self._process.poll() is not None or self._found(), _SECONDS)
            if (found := self._found()) is None:
                raise AssertionError(f"ended with {self._process.returncode}: {self.text()}")
            self.url, self.grpc = found
        except BaseException:
            self.__exit__()
            raise

    def _found(self) -> tuple[str, str] | None:
        found = _SERVING.search(self.text())
        return None if found is None else (found[1], found[2])

    def text(self) -> str:
        """What it has written."""
        return os.pread(self._output.fileno(), 1 << 20, 0).decode()

    def workers(self) -> list[int]:
        """The processes of its workers, or those of several that answer."""
        children = psutil.Process(self.pid).children()
        found = [child for child in children if is_alive(child.pid)]
        return [c.pid for c in found if "resource_tracker" not in " ".join(c.cmdline())]

    @property
    def address(self) -> tuple[str, int]:
        """Its address and port for HTTP."""
        host, _, port = self.url.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status as a shell has it: 128 and the number of the signal that ended it."""
        status = self._process.wait(_SECONDS)
        return status if status >= 0 else 128 - status

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Have it end, and return its exit status."""
        workers = self.workers()
        self.send_signal(number)
        status = self.wait()
        wait_until(lambda: all_gone(workers), _SECONDS)
        return status

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        """A plain connection, for what the clients do not do."""
        is_path = self.url.startswith("/")
        connection = http.client.HTTPConnection(
            "localhost" if is_path else self.url, timeout=_SECONDS
        )
        if is_path:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.url)
        try:
            yield connection
        finally:
            connection.close()

    def ask(
        self,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        method: str = "",
    ) -> Answer:
        """Ask over HTTP, by POST where there is a body: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        with self.connection() as connection:
            verb = method or ("GET" if data is None else "POST")
            connection.request(verb, path, data, dict(headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())

    def infer(self, x: NDArray[Any], model: str = "model", **parameters: object) -> Answer:
        """Ask a model with an input x, float32, for its outputs, in JSON."""
        return self.ask(f"/v2/models/{model}/infer", request_of(x, **parameters))

    def figure(self, name: str, **labels: str) -> float:
        """The sum of a figure of ``/metrics``, over what has these labels."""
        text = self.ask("/metrics").body.decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        chosen = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert chosen, [sample for sample in samples if sample.name == name]
        return sum(sample.value for sample in chosen)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        workers = [] if self._process.poll() is not None else self.workers()
        self._process.kill()
        self._process.wait()
        self._output.close()
        wait_until(lambda: all_gone(workers), _SECONDS)
