"""Measure for how long a service that takes a new model gives no answer, and its memory afterwards.

    python benchmarks/deploys.py [--rounds N] [--quick] [--only gunicorn] [--write docs/processes.md]

A prepared model of 235 MB is replaced by another one that this machine has not seen, in three ways: Gunicorn
with 8 processes gets SIGHUP, `mcinfer serve` loads a new version, and Celery with 8 processes is stopped and
started again. One client asks all the time. Each has plain sessions, inline ones and a pool of two workers:

- the time is the longest between two answers, from the change until the new model alone has answered for a
  while;
- the memory is the PSS of all processes, a minute after the change.

It needs Gunicorn and Celery, which `make bench-deploys` installs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from time import monotonic

import onnx
from measuring import (
    MEGABYTE,
    Lines,
    Ratio,
    Series,
    Setting,
    main,
    markdown,
    pss_with_children,
    rates_in_turns,
)
from models import mlp
from onnx import numpy_helper

from mcinfer.engines.preparation import ensure_prepared
from mcinfer.model_cache.cache import Cache

LAYERS, WIDTH = 14, 2048
PROCESSES = 8
SILENCE_TARGET = 1.1
"""How many times as long as with plain sessions clients may get no answer."""
MEMORY_TARGET = 0.30
"""What part of the memory of as many plain sessions inline ones may take a minute later."""

_PLAIN, _INLINE, _SWITCH, _POOL = "plain", "inline", "inline, switch", "pool"
_CALM_SECONDS = 5.0
"""For which the new model alone answers at the end of a measurement."""
_PATIENCE = 240.0

_SESSION = """
import {package} as ort
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"]{more})
def run():
    return session.run(None, X)[0]
"""
_MASTER = """
import mcinfer
master = mcinfer.Master("model.onnx", devices=2).start()
def run():
    return master.predict(X)["y"]
"""
_OPENINGS = {
    _PLAIN: _SESSION.format(package="onnxruntime", more=""),
    _INLINE: _SESSION.format(package="mcinfer.ort", more=""),
    _SWITCH: _SESSION.format(package="mcinfer.ort", more=", prepare='switch'"),
    _POOL: _MASTER,
}
_X = f'X = {{"x": np.ones((1, {WIDTH}), np.float32)}}'
_APPLICATION = """
import numpy as np
{x}
{opening}
def application(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(run().sum()).encode()]
"""
_TASKS = """
import os
from celery import Celery
from celery.signals import worker_process_init
here = os.path.dirname(os.path.abspath(__file__))
app = Celery("tasks", broker="filesystem://", backend=f"file://{{here}}/results")
places = dict.fromkeys(("data_folder_in", "data_folder_out"), f"{{here}}/queue")
app.conf.update(
    broker_transport_options={{**places, "control_folder": f"{{here}}/control"}},
    worker_proc_alive_timeout=120,
    result_backend_always_retry=False,
)
found = {{}}
@worker_process_init.connect
def start(**_):
    os.chdir(here)
    exec(OPENING, found)
@app.task
def look():
    return str(found["run"]().sum())
OPENING = '''
import numpy as np
{x}
{opening}
'''
"""

Renew = Callable[[Path], None]
"""Writes the next model to a path."""

Ask = Callable[[], object]
"""Asks once; the answer, by which one knows the model, or an error of the connection."""


def _other(model: Path, target: Path, number: int, *, is_first: bool) -> None:
    """Save a model with all other weights, which this machine does not know unless it `is_first`."""
    found = onnx.load(model)
    for weights in found.graph.initializer:
        values = numpy_helper.to_array(weights)
        moved = number if values.ndim == 1 else 0  # so that the answers are clearly other ones
        values = (values * (1 + number / 4096) + moved).astype(values.dtype)
        weights.CopyFrom(numpy_helper.from_array(values, weights.name))
    draft = target.with_name("draft")
    onnx.save(found, draft)
    draft.replace(target)
    if is_first:  # a service that runs for long has it so
        ensure_prepared(target).close()


def _with_next(folder: Path, renew: Renew) -> Path:
    """The model of a service; the next one lies beside it: to write it would disturb the client."""
    model = folder / "model.onnx"
    renew(model)
    renew(model.with_name("next.onnx"))
    return model


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def _running(command: list[str], folder: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _http(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise OSError(f"{answer.status}: {content[:200]!r}")
        return content
    finally:
        connection.close()


class Client:
    """One that asks all the time, in a thread; a context manager.

    Attributes:
        answers: When each came, and what it was, from the start on.
    """

    def __init__(self, ask: Ask) -> None:
        self.answers: list[tuple[float, object]] = []
        self._ask, self._over = ask, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append((monotonic(), self._ask()))
            except (OSError, HTTPException):
                time.sleep(0.01)

    def __enter__(self) -> "Client":
        self._thread.start()
        self.wait(lambda: len(self.answers) > 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def wait(self, condition: Callable[[], object]) -> None:
        end = monotonic() + _PATIENCE
        while not condition():
            if monotonic() > end:
                raise RuntimeError(f"no new answer within {_PATIENCE:g} s")
            time.sleep(0.05)

    def longest(self, change: Callable[[], object]) -> float:
        """Seconds of the longest time between two answers, while and after something is changed."""
        begin, before = monotonic(), {answer for _, answer in self.answers}
        change()
        after = monotonic()
        self.wait(lambda: self._new_alone(before, after))
        times = [at for at, _ in self.answers if at > begin - 1.0]
        return max(b - a for a, b in pairwise(times))

    def _new_alone(self, before: set[object], since: float) -> bool:
        """Whether the new model alone has answered for a while."""
        recent = [
            answer in before
            for at, answer in [*self.answers]
            if at > max(since, monotonic() - _CALM_SECONDS)
        ]
        return monotonic() - since > _CALM_SECONDS and len(recent) > 1 and not any(recent)


def _measured(
    setting: Setting, ask: Ask, change: Callable[[], object], pid: Callable[[], int]
) -> tuple[float, float]:
    """Seconds without an answer, and bytes of PSS."""
    with Client(ask) as client:
        begin = monotonic()
        seconds = client.longest(change)
    time.sleep(max(0.0, (15.0 if setting.quick else 60.0) - (monotonic() - begin)))
    return seconds, float(pss_with_children(pid()))


def gunicorn(setting: Setting, way: str, folder: Path, renew: Renew) -> tuple[float, float]:
    port, one = _free_port(), way == _POOL
    text = _APPLICATION.format(x=_X, opening=_OPENINGS[way])
    (folder / "service.py").write_text(text, encoding="utf-8")
    model = _with_next(folder, renew)
    workers = ["--workers", "1", "--threads", "16"] if one else ["--workers", str(PROCESSES)]
    command = [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "--timeout", "240"]
    with _running([*command, *workers, "service:application"], folder) as process:

        def change() -> None:
            model.with_name("next.onnx").replace(model)
            process.send_signal(signal.SIGHUP)

        return _measured(setting, lambda: _http(port, "GET", "/"), change, lambda: process.pid)


def server(setting: Setting, way: str, folder: Path, renew: Renew) -> tuple[float, float]:
    port = _free_port()
    for version in ("1", "2"):
        (folder / "models" / "m" / version).mkdir(parents=True)
    renew(folder / "models" / "m" / "1" / "model.onnx")
    (folder / "models" / "m" / "2").rename(folder / "2")
    renew(folder / "2" / "model.onnx")
    tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH}
    body = json.dumps({"inputs": [tensor]}).encode()

    def ask() -> object:
        return json.loads(_http(port, "POST", "/v2/models/m/infer", body))["model_version"]

    def change() -> None:
        (folder / "2").rename(folder / "models" / "m" / "2")
        _http(port, "POST", "/v2/repository/models/m/load")

    command = [sys.executable, "-m", "mcinfer", "serve", "--repository", "models"]
    command += ["--port", str(port), "--devices", "2" if way == _POOL else "inline"]
    env = (
        {"MCINFER_CACHE": "/dev/null/none"} if way == _PLAIN else {}
    )  # a cache that cannot be used
    with _running(command, folder, **env) as process:
        return _measured(setting, ask, change, lambda: process.pid)


def celery(setting: Setting, way: str, folder: Path, renew: Renew) -> tuple[float, float]:
    for name in ("queue", "results", "control"):
        (folder / name).mkdir()
    module = f"tasks_{folder.name}"
    text = _TASKS.format(x=_X, opening=_OPENINGS[way])
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    model = _with_next(folder, renew)
    sys.path.insert(0, str(folder))
    tasks = __import__(module)
    count = 1 if way == _POOL else PROCESSES
    command = [sys.executable, "-m", "celery", "-A", module, "worker", "--concurrency", str(count)]

    def ask() -> object:
        return tasks.look.delay().get(timeout=_PATIENCE, interval=0.02)

    with _running(command, folder) as first:
        running = [first]

        def change() -> None:
            model.with_name("next.onnx").replace(model)
            first.terminate()
            first.wait()
            running.append(again.enter_context(_running(command, folder)))

        with ExitStack() as again:
            return _measured(setting, ask, change, lambda: running[-1].pid)


_SERVICES = {
    "gunicorn": (gunicorn, f"Gunicorn, {PROCESSES} processes, SIGHUP"),
    "serve": (server, "`mcinfer serve`, a load"),
    "celery": (celery, f"Celery, {PROCESSES} processes, stopped and started"),
}


def part(name: str) -> Callable[[Setting], Lines]:
    def measure(setting: Setting) -> Lines:
        service, title = _SERVICES[name]
        original = mlp(setting.folder / "original.onnx", LAYERS, WIDTH, external_data=False)
        count = iter(range(1, 1_000_000))
        ways = [_PLAIN, _INLINE, _SWITCH, _POOL]
        if name == "serve":
            ways.remove(_SWITCH)
        memory: dict[str, list[float]] = {way: [] for way in ways}

        def once(way: str) -> float:
            number = next(count)
            folder = setting.folder / f"{name}{number}"
            folder.mkdir()
            begun: list[Path] = []

            def renew(target: Path) -> None:
                _other(original, target, next(count), is_first=not begun)
                begun.append(target)

            seconds, size = service(setting, way, folder, renew)
            memory[way].append(size)
            shutil.rmtree(folder)
            Cache.default().clear()
            return seconds

        turns: dict[str, Callable[[], float]] = {way: partial(once, way) for way in ways}
        silent = rates_in_turns(turns, setting.rounds)
        found = {way: Series(tuple(memory[way])) for way in ways}
        rows = []
        for way in ways:
            ratios = (one[way].over(one[_PLAIN]).middle for one in (silent, found))
            seconds, size = silent[way].middle, found[way].middle / MEGABYTE
            first, second = (f"{ratio:.2f}" for ratio in ratios)
            rows.append([way, f"{seconds:.2f} s", first, f"{size:,.0f}", second])
        head = [title, "longest without an answer", "ratio", "MB a minute later", "ratio"]
        yield markdown(head, rows)
        for way in ways[1:]:
            text = f"{title}: {way} / plain, without an answer"
            series = silent[way].over(silent[_PLAIN])
            print(
                Ratio(text=text, series=series, bound=SILENCE_TARGET, at_least=False),
                file=sys.stderr,
            )
        if name != "serve":
            best = found[_SWITCH].over(found[_PLAIN])
            text = f"{title}: switch / plain, memory"
            print(
                Ratio(text=text, series=best, bound=MEMORY_TARGET, at_least=False), file=sys.stderr
            )

    return measure


if __name__ == "__main__":
    parts = {name: part(name) for name in _SERVICES}
    sys.exit(main(__doc__, parts, rounds=3, cores=None))
