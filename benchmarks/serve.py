"""What a server over HTTP takes: `mcinfer serve` against the same server over a plain session, and KServe's.

    python benchmarks/serve.py [--quick] [--only PART] [--write docs/serving.md]

locust's clients send binary requests of one row, each as soon as its last one is answered, from a process of
its own on the same machine. The servers have turns in each round: mcinfer with a worker for each core; the
same without joining requests (*apart*); mcinfer's server over one session of ONNX Runtime that as many
threads run (`serve_threads.py`); KServe's with a process for each core (`serve_kserve.py`). Then what clients
see while a worker is killed each second. The memory is the PSS of all processes of a server after its load.
"""

import csv
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic, sleep

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
from models import Model, usual_models

from mcinfer.bench.load import rotated

HERE = Path(__file__).resolve().parent
CLIENTS = (1, 16)
SECONDS = 6
PATIENCE = 120.0
"""Seconds for a server to be ready, and for its end."""

CORES = len(os.sched_getaffinity(0))
_MCINFER = (
    *f"-m mcinfer serve --name model --devices {CORES}".split(),
    *("{model}", "--port", "{port}"),
)
WAYS = {
    "mcinfer": _MCINFER,
    "mcinfer apart": (*_MCINFER, "--max-batch-size", "1"),
    "threads": (f"{HERE / 'serve_threads.py'}", "{model}", "{port}"),
    "KServe": (f"{HERE / 'serve_kserve.py'}", "{model}", "{port}"),
}
TARGETS = {"threads": 0.9, "KServe": 1.0, "mcinfer apart": None}
"""What mcinfer's rate over theirs is wanted to be, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients saw.

    Attributes:
        rate: Answers with a result, a second.
        half_ms: Within so many milliseconds half of them came.
        most_ms: And 99 of 100.
        failures: What else came, in words, and how often.
    """

    rate: float
    half_ms: float
    most_ms: float
    failures: Mapping[str, int]


@contextmanager
def server(way: str, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that is ready, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [word.format(model=model, port=port) for word in WAYS[way]]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = monotonic() + PATIENCE
        while not is_ready(port):
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


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with suppress(OSError):
        connection.request("GET", "/v2/models/model/ready")
        return connection.getresponse().status == 200
    return False


def load(folder: Path, model: Model, port: int, clients: int, seconds: int) -> Load:
    """Let clients ask for so many seconds."""
    ((name, row),) = model.inputs.items()
    tensor = {"name": name, "datatype": "FP32", "shape": [*row.shape]}
    about = {**tensor, "parameters": {"binary_data_size": row.nbytes}}
    head = json.dumps({"inputs": [about], "parameters": {"binary_data_output": True}}).encode()
    (folder / "body").write_bytes(head + row.tobytes())
    environment = {"SERVE_BODY": str(folder / "body"), "SERVE_HEAD_BYTES": f"{len(head)}"}
    words = ["-m", "locust", "-f", str(HERE / "serve_load.py"), "--headless", "--only-summary"]
    words += ["--users", f"{clients}", "--spawn-rate", f"{clients}", "--run-time", f"{seconds}s"]
    words += ["--host", f"http://127.0.0.1:{port}", "--csv", str(folder / "load")]
    subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=seconds + PATIENCE,
        check=False,  # it is 1 if a request failed
    )
    total = rows_of(folder / "load_stats.csv")[-1]
    failures = {
        row["Error"].split(" for url")[0]: int(row["Occurrences"])
        for row in rows_of(folder / "load_failures.csv")
    }
    failed = float(total["Failure Count"]) / max(1.0, float(total["Request Count"]))
    return Load(
        rate=float(total["Requests/s"]) * (1 - failed),
        half_ms=milliseconds(total["50%"]),
        most_ms=milliseconds(total["99%"]),
        failures=failures,
    )


def milliseconds(text: str) -> float:
    """Where nothing was answered there is no number."""
    return inf if text == "N/A" else float(text)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return [*csv.DictReader(text)]


def models_of(setting: Setting) -> list[Model]:
    found = [model for model in usual_models(setting.folder) if len(model.inputs) == 1]
    return found[:1] if setting.quick else found


def measure(setting: Setting) -> Lines:
    """Each model."""
    for model in models_of(setting):
        yield from measure_model(setting, model)


def measure_model(setting: Setting, model: Model) -> Lines:
    folder, seconds = setting.folder, max(2, round(setting.seconds(SECONDS)))
    seen: dict[tuple[str, int], list[Load]] = {}
    memory: dict[str, list[int]] = {way: [] for way in WAYS}
    for number in range(setting.rounds):
        for way in rotated([*WAYS], number):
            with server(way, model.path) as (process, port):
                load(folder, model, port, 4, 2)  # warm
                for clients in CLIENTS:
                    seen.setdefault((way, clients), []).append(
                        load(folder, model, port, clients, seconds)
                    )
                memory[way].append(pss_with_children(process.pid))
    rows = [
        (
            f"{way}, {clients} client{'s' if clients > 1 else ''}",
            f"{middle([each.rate for each in loads]):.0f}",
            f"{middle([each.half_ms for each in loads]):.0f} ms",
            f"{middle([each.most_ms for each in loads]):.0f} ms",
            f"{sum(sum(each.failures.values()) for each in loads)}",
            f"{middle(memory[way]) / MEGABYTE:.0f} MB",
        )
        for (way, clients), loads in sorted(seen.items(), key=lambda item: item[0][1])
    ]
    head = (model.name, "answers/s", "half within", "99 % within", "failed", "memory")
    yield table(head, rows)
    for clients in CLIENTS:
        for other, bound in TARGETS.items():
            ours, theirs = seen["mcinfer", clients], seen[other, clients]
            series = Series(tuple(a.rate / b.rate for a, b in zip(ours, theirs, strict=True)))
            text = f"answers/s, {clients} clients, mcinfer / {other}"
            yield str(Ratio(text=text, series=series, bound=bound))


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
    for way in ("mcinfer", "KServe"):
        with server(way, model.path) as (process, port):
            load(folder, model, port, 4, 2)
            killer = Killer(process.pid)
            killer.start()
            try:
                came = load(folder, model, port, CLIENTS[-1], 2 * SECONDS)
            finally:
                killer.ended.set()
                killer.join()
        bad = ", ".join(f"{number} of {text}" for text, number in came.failures.items())
        yield (
            f"  {way}: {killer.killed} workers killed, {came.rate:.0f} answers/s, 99 % within "
            f"{came.most_ms:.0f} ms, failed: {bad or 'none'}"
        )


PARTS = {"load": measure, "kills": measure_kills}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, rounds=3, mark="serve", cores=None))
