"""What a server over HTTP takes: `mcinfer serve` against a plain session behind it, and other servers.

    python benchmarks/serve.py [--quick] [--only PART] [--write docs/serving.md]

Clients send requests of one row, each as soon as its last one is answered, from a process of their own on
the same machine (`serve_load.c`, built with `cc`). The servers have turns in each round: mcinfer with a
worker for each core; with a process for each core (*processes*); mcinfer's server over one session of ONNX
Runtime that as many threads run (`serve_threads.py`); KServe's and mosec's, and granian with nothing but a
session behind it, with a process for each core (`serve_kserve.py`, `serve_mosec.py`, `serve_granian.py`).
mosec and granian have no protocol: requests and answers are the values of one tensor. Then what clients see
while a worker is killed each second. The memory is the PSS of all processes of a server after its load.
"""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import psutil
from measuring import (
    MEGABYTE,
    Lines,
    Ratio,
    Series,
    Setting,
    main,
    pss_with_children,
    table,
)
from models import Model, mlp, normal, usual_models
from serve_threads import CORES, session_of_one_thread

from mcinfer.bench.load import rotated
from mcinfer.examples import encoder

HERE = Path(__file__).resolve().parent
CLIENTS = (1, 8, 64)
SECONDS = 3
PATIENCE = 120.0
"""Seconds for a server to be ready, and for its end."""

_MCINFER = ("-m", "mcinfer", "serve", "--name", "model", "{model}", "--port", "{port}")
WAYS = {
    "mcinfer": (*_MCINFER, "--devices", f"{CORES}"),
    "processes": (*_MCINFER, "--processes", f"{CORES}"),
    "threads": (f"{HERE / 'serve_threads.py'}", "{model}", "{port}"),
    "KServe": (f"{HERE / 'serve_kserve.py'}", "{model}", "{port}"),
    "mosec": (f"{HERE / 'serve_mosec.py'}", "{model}", "{port}", "1"),
    "mosec, 8 rows": (f"{HERE / 'serve_mosec.py'}", "{model}", "{port}", "8"),
    "granian": (f"{HERE / 'serve_granian.py'}", "{model}", "{port}"),
}
RAW = {"mosec": "/inference", "mosec, 8 rows": "/inference", "granian": "/"}
"""Where those without a protocol take requests."""

TINY = "tiny, 0.02 ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients saw.

    Attributes:
        rate: Answers with a result, a second.
        half_ms: Within so many milliseconds half of them came.
        most_ms: And 99 of 100.
        refused: Answers with another status than 200.
        lost: Connections that ended before the answer.
        busy_ms: Processor time of the server for an answer.
    """

    rate: float
    half_ms: float
    most_ms: float
    refused: int
    lost: int
    busy_ms: float


class Asked:
    """A request of one row to a server, and its right answer."""

    def __init__(self, way: str, model: Model) -> None:
        ((name, row),) = model.inputs.items()
        self._right = session_of_one_thread(str(model.path)).run(None, {name: row})[0]
        self._path, self._body, headers = RAW.get(way, ""), row.tobytes(), {}
        if not self._path:
            about = {"name": name, "datatype": "FP32", "shape": [*row.shape]}
            inputs = [{**about, "parameters": {"binary_data_size": row.nbytes}}]
            asked = {"inputs": inputs, "parameters": {"binary_data_output": True}}
            head = json.dumps(asked).encode()
            headers = {"Inference-Header-Content-Length": f"{len(head)}"}
            self._path, self._body = "/v2/models/model/infer", head + self._body
        self._headers = {"Host": "localhost", "Content-Length": f"{len(self._body)}", **headers}

    def as_sent(self) -> bytes:
        lines = [f"POST {self._path} HTTP/1.1", *map(": ".join, self._headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + self._body

    def is_answered(self, port: int) -> bool:
        """Whether a server gives the right answer; `SystemExit` if it gives another one."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.request("POST", self._path, self._body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if response.status != 200:
            return False
        values = np.frombuffer(answer[-self._right.nbytes :], np.float32)
        if not np.allclose(values, self._right.ravel(), rtol=1e-4, atol=1e-5):
            raise SystemExit("a server gives a wrong answer")
        return True


@contextmanager
def server(way: str, model: Model) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that is ready, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    asked = Asked(way, model)
    words = [word.format(model=model.path, port=port) for word in WAYS[way]]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = monotonic() + PATIENCE
        while not all(asked.is_answered(port) for _ in range(4 * CORES)):  # by each process
            if process.poll() is not None or monotonic() > end:
                raise SystemExit(f"{way}: the server does not get ready")
            sleep(0.1)
        yield process, port
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()
        process.wait()


def load(
    folder: Path, way: str, model: Model, served: tuple[int, int], clients: int, seconds: float
) -> Load:
    """Let clients ask a server, of which the process id and the port are given, for so many seconds."""
    pid, port = served
    (folder / "request").write_bytes(Asked(way, model).as_sent())
    program, before = build_load(folder), busy_seconds(pid)
    words = [str(program), f"{port}", f"{clients}", f"{seconds}", str(folder / "request")]
    ended = subprocess.run(words, capture_output=True, timeout=seconds + PATIENCE, check=True)
    came = json.loads(ended.stdout)
    busy = busy_seconds(pid) - before
    return Load(
        rate=came["answers"] / came["seconds"],
        half_ms=came["half_ms"],
        most_ms=came["most_ms"],
        refused=came["refused"],
        lost=came["lost"],
        busy_ms=busy * 1e3 / max(1, came["answers"]),
    )


def build_load(folder: Path) -> Path:
    program = folder / "load"
    if not program.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            raise SystemExit("cc: there is no C compiler to build serve_load.c with")
        source = HERE / "serve_load.c"
        subprocess.run([compiler, "-O2", "-o", program, source], check=True)
    return program


def busy_seconds(pid: int) -> float:
    """Processor time of a process and all below it, so far."""
    own = psutil.Process(pid)
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def models_of(setting: Setting) -> list[Model]:
    """A tiny model, a small encoder, an MLP, and convolutions."""
    image = np.random.default_rng(0).random((1, 3, 32, 32), np.float32)
    tiny = Model(name=TINY, path=encoder(), inputs={"image": image})
    if setting.quick:
        return [tiny]
    layers = mlp(setting.folder / "mlp.onnx", layers=4, external_data=False)
    known = {model.name: model for model in usual_models(setting.folder)}
    return [
        tiny,
        known["encoder, 1 ms"],
        Model(name="MLP, 67 MB", path=layers, inputs=normal(1, 2048)),
        known["MobileNetV2's structure"],
    ]


def measure(setting: Setting) -> Lines:
    """Each model."""
    for model in models_of(setting):
        yield from measure_model(setting, model)


def measure_model(setting: Setting, model: Model) -> Lines:
    folder, seconds = setting.folder, setting.seconds(SECONDS)
    seen: dict[tuple[str, int], list[Load]] = {}
    memory: dict[str, list[int]] = {way: [] for way in WAYS}
    for number in range(setting.rounds):
        for way in rotated([*WAYS], number):
            with server(way, model) as (process, port):
                served = (process.pid, port)
                load(folder, way, model, served, 16, 1.5)  # warm
                for clients in CLIENTS:
                    came = load(folder, way, model, served, clients, seconds)
                    seen.setdefault((way, clients), []).append(came)
                memory[way].append(pss_with_children(process.pid))
    rows = [
        (
            f"{way}, {clients} client{'s' if clients > 1 else ''}",
            f"{middle([each.rate for each in loads]):.0f}",
            f"{middle([each.half_ms for each in loads]):.2f} ms",
            f"{middle([each.most_ms for each in loads]):.2f} ms",
            f"{middle([each.busy_ms for each in loads]):.3f} ms",
            f"{sum(each.refused + each.lost for each in loads)}",
            f"{middle(memory[way]) / MEGABYTE:.0f} MB",
        )
        for (way, clients), loads in sorted(seen.items(), key=lambda item: item[0][1])
    ]
    head = ("answers/s", "half within", "99 % within", "busy for one", "failed", "memory")
    yield table((model.name, *head), rows)

    def rates(way: str, clients: int) -> list[float]:
        return [each.rate for each in seen[way, clients]]

    for clients in CLIENTS:
        mosec = [*map(max, rates("mosec", clients), rates("mosec, 8 rows", clients))]
        for way, other, theirs, bound in (
            ("mcinfer", "threads", rates("threads", clients), 0.9),
            ("mcinfer", "KServe", rates("KServe", clients), 1.0),
            ("processes", "granian", rates("granian", clients), 0.9),
            ("processes", "mosec's best", mosec, 0.6 if model.name == TINY else 1.0),
        ):
            series = Series(tuple(a / b for a, b in zip(rates(way, clients), theirs, strict=True)))
            text = f"answers/s, {clients} clients, {way} / {other}"
            yield str(Ratio(text=text, series=series, bound=bound))
    parts = Series(tuple(a / b for a, b in zip(memory["processes"], memory["mosec"], strict=True)))
    yield str(Ratio(text="memory, processes / mosec", series=parts, bound=0.5, at_least=False))


def middle(values: Sequence[float]) -> float:
    return Series(tuple(values)).middle


class Killer(threading.Thread):
    """Kills a process that another one has started, each second, until `ended` is set."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid, self.ended, self.killed = pid, threading.Event(), 0

    def run(self) -> None:
        while not self.ended.wait(1.0):
            workers = []
            for child in psutil.Process(self._pid).children():
                with suppress(psutil.Error):  # it has ended
                    if "resource_tracker" not in " ".join(child.cmdline()):
                        workers.append(child)
            if workers:
                workers[self.killed % len(workers)].kill()
                self.killed += 1


def measure_kills(setting: Setting) -> Lines:
    """What clients see while a worker is killed each second."""
    folder, model = setting.folder, models_of(setting)[0]
    yield f"A worker is killed each second ({model.name}):"
    for way in ("mcinfer", "processes", "KServe"):
        with server(way, model) as (process, port):
            served = (process.pid, port)
            load(folder, way, model, served, 4, 1.5)
            killer = Killer(process.pid)
            killer.start()
            try:
                came = load(folder, way, model, served, 8, 4 * SECONDS)
            finally:
                killer.ended.set()
                killer.join()
        yield (
            f"  {way}: {killer.killed} killed, {came.rate:.0f} answers/s, 99 % within {came.most_ms:.0f} ms, "
            f"{came.lost} connections lost, {came.refused} requests refused"
        )


PARTS = {"load": measure, "kills": measure_kills}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, rounds=3, mark="serve", cores=None))
