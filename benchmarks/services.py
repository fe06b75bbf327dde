"""Measure ways for n server processes to have one model: memory, and how long requests take.

    python benchmarks/services.py [--rounds N] [--only WAY] [--write docs/processes.md]

Each way is a service of Gunicorn's that listens at a Unix socket. Its memory is the PSS of all its processes,
Gunicorn's arbiter and mcinfer's workers included, once each of them has run the model. Then one client asks,
and after that `CLIENTS` at once. The ways have turns in each round. Sessions and pools are opened with their
default options, but where the way says so.
"""

import argparse
import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Self

# The models of the examples are among those that the imported modules measure with.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "sd_dual_core"))

from measuring import Series, table, write_page
from processes_memory import EACH, INLINE, LIMIT, Program, give_up, page_table, saved, setting_of
from rank_models import BERT_HEADS, BERT_LAYERS, BERT_WIDTH, encoder, encoder_inputs
from worker_memory import MEGABYTE, pss_with_children

from mcinfer.bench.figures import seconds_text
from mcinfer.bench.load import rotated

PROCESSES = 4
CLIENTS = 8
TOKENS = 64
SECONDS = 4.0
"""How long one client asks, and then all."""
PATIENCE = 120.0
"""Seconds for a service to be ready, for one answer, and for its end."""

_APPLICATION = """
import os
import numpy as np
{opening}

def application(environ, start_response):
    x = np.frombuffer(environ["wsgi.input"].read(), np.float32).reshape(1, -1, {width})
    (y,) = {run}
    answer = y[0, 0].tobytes()
    headers = [("Content-Length", str(len(answer))), ("Process", str(os.getpid()))]
    start_response("200 OK", headers)
    return [answer]
"""
_SESSION = "session.run(None, {'x': x})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a service has the model.

    Attributes:
        name: In the table.
        opening: What the application does when it is imported.
        run: Its expression for the outputs of `x`.
        arguments: Of Gunicorn.
        processes: Of Gunicorn that answer.
        needs: What the way asks for.
        lacks: What it has not.
    """

    name: str
    opening: str
    run: str = _SESSION
    arguments: tuple[str, ...] = ()
    processes: int = PROCESSES
    needs: str
    lacks: str


_PLAIN = "import onnxruntime as ort\nsession = ort.InferenceSession({model!r})"
_OF_ONE_THREAD = """
import onnxruntime as ort
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession({model!r}, options)
"""

_INLINE, _INLINE_OF_ONE_THREAD = (
    text.replace("onnxruntime", "mcinfer.ort") for text in (_PLAIN, _OF_ONE_THREAD)
)
_NEEDS_FORKS = "a server that forks after it has opened the model"
_NO_NEW_MODEL = "a new model needs a new start"
_NO_ISOLATION = "no isolation from crashes; no batches over processes"

WAYS = {
    "plain": Way(
        name="a plain session in each",
        opening=_PLAIN,
        needs="nothing",
        lacks=f"each has its own weights; {_NO_ISOLATION}",
    ),
    "preload": Way(
        name="`--preload`, a plain session of one thread",
        opening=_OF_ONE_THREAD,
        arguments=("--preload",),
        needs=f"one thread; `ORT_DISABLE_TELEMETRY=1`; {_NEEDS_FORKS}",
        lacks=f"a request has one core; {_NO_NEW_MODEL}; {_NO_ISOLATION}",
    ),
    "inline": Way(
        name="an inline session in each",
        opening=_INLINE,
        needs="one changed import",
        lacks=_NO_ISOLATION,
    ),
    "inline-1": Way(
        name="an inline session of one thread in each",
        opening=_INLINE_OF_ONE_THREAD,
        needs="one changed import",
        lacks=_NO_ISOLATION,
    ),
    "inline-preload": Way(
        name="`--preload`, an inline session",
        opening=_INLINE,
        arguments=("--preload",),
        needs=f"one changed import; {_NEEDS_FORKS}",
        lacks=f"{_NO_NEW_MODEL}; {_NO_ISOLATION}",
    ),
    "workers": Way(
        name="`mcinfer.ort` with `devices=1` in each",
        opening="import mcinfer.ort as ort\nsession = ort.InferenceSession({model!r}, devices=1)",
        needs="a worker process beside each",
        lacks="no batches over processes",
    ),
    "pool": Way(
        name=f"one process with threads, `Master(devices={PROCESSES})`",
        opening=f"import mcinfer\nmaster = mcinfer.Master({{model!r}}, devices={PROCESSES}).start()",
        run="master.submit({'x': x}).result().values()",
        arguments=("--threads", str(2 * CLIENTS)),
        processes=1,
        needs="one server process",
        lacks="all handlers share one interpreter",
    ),
}


class _Connection(http.client.HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(self._path))


class _Service:
    """A running service; a context manager that leaves no process behind."""

    def __init__(self, way: Way, model: Path, folder: Path, body: bytes) -> None:
        folder.mkdir()
        opening = way.opening.format(model=str(model))
        text = _APPLICATION.format(opening=opening, run=way.run, width=BERT_WIDTH)
        (folder / "service.py").write_text(text, encoding="utf-8")
        self._path, self._body, self._way = folder / "socket", body, way
        own = ("--bind", f"unix:{self._path}", "--workers", str(way.processes))
        quiet = ("--timeout", f"{PATIENCE:.0f}", "--log-level", "warning", "--chdir", str(folder))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *own, *quiet, *way.arguments, "service:application"],
            env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},  # else no preloaded session ends
            start_new_session=True,
        )

    def ask(self) -> tuple[float, str]:
        """Seconds of one request, and the process that answered."""
        begin = perf_counter()
        connection = _Connection(self._path)
        try:
            connection.request("POST", "/", self._body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK or len(content) != BERT_WIDTH * 4:
            raise RuntimeError(f"{self._way.name}: {answer.status}, {len(content)} bytes")
        return perf_counter() - begin, answer.headers["Process"]

    def wait_ready(self) -> None:
        """Return once every process has answered more than once."""
        stop = monotonic() + PATIENCE
        while True:
            try:
                self.ask()
                break
            except OSError as exc:  # it does not listen yet
                if monotonic() > stop or self._process.poll() is not None:
                    raise RuntimeError(f"{self._way.name}: the service did not start") from exc
                sleep(0.05)
        answered: Counter[str] = Counter()
        with ThreadPoolExecutor(CLIENTS) as clients:
            while len(answered) < self._way.processes or min(answered.values()) < 2:
                if monotonic() > stop:
                    raise RuntimeError(f"{self._way.name}: some process did not answer: {answered}")
                for future in [clients.submit(self.ask) for _ in range(2 * CLIENTS)]:
                    answered[future.result()[1]] += 1

    def memory(self) -> tuple[int, int]:
        """How many processes it has, and the bytes of PSS of all."""
        each = pss_with_children(self._process.pid)
        return len(each), sum(each)

    def one_client(self) -> float:
        """The median seconds of a request of one client."""
        return statistics.median(self._asked(1))

    def many_clients(self) -> float:
        """Requests a second of many clients at once."""
        begin = perf_counter()
        return len(self._asked(CLIENTS)) / (perf_counter() - begin)

    def _asked(self, clients: int) -> list[float]:
        times: list[float] = []
        stop = monotonic() + SECONDS

        def ask() -> None:
            while monotonic() < stop:
                times.append(self.ask()[0])

        with ThreadPoolExecutor(clients) as threads:
            for future in [threads.submit(ask) for _ in range(clients)]:
                future.result()
        return times

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Of one service in one round."""

    processes: int
    pss: int
    seconds: float
    rate: float


def _figures(way: Way, model: Path, folder: Path, body: bytes) -> _Figures:
    with _Service(way, model, folder, body) as service:
        service.wait_ready()
        processes, pss = service.memory()
        return _Figures(
            processes=processes,
            pss=pss,
            seconds=service.one_client(),
            rate=service.many_clients(),
        )


def _measure(names: Sequence[str], folder: Path, rounds: int) -> str:
    """The table of a page."""
    sizes = {"layers": BERT_LAYERS, "width": BERT_WIDTH, "heads": BERT_HEADS}
    model = encoder(folder / "bert.onnx", **sizes, external_data=True)
    inputs = encoder_inputs(1, TOKENS, width=BERT_WIDTH)
    for way in (INLINE, EACH):
        with Program(way, model, saved(folder / "inputs.npz", inputs)) as first:
            first.wait_ready()  # prepares it
    found: dict[str, list[_Figures]] = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            place = folder / f"{name}-{number}"
            one = _figures(WAYS[name], model, place, inputs["x"].tobytes())
            found[name].append(one)
            print(f"{WAYS[name].name}: {one}", flush=True)
    rows, shown = [], []
    for name, figures in found.items():
        pss, seconds, rate = (
            Series(tuple(getattr(one, field) for one in figures)).middle
            for field in ("pss", "seconds", "rate")
        )
        row = (
            WAYS[name].name,
            str(figures[0].processes),
            f"{pss / MEGABYTE:,.0f} MB",
            seconds_text(seconds),
            f"{rate:.1f}",
        )
        rows.append(row)
        shown.append((*row, WAYS[name].needs, WAYS[name].lacks))
    header = ("", "processes", "PSS in all", "one request", f"a second, {CLIENTS} clients")
    print(f"\n{table(header, rows)}")
    return page_table((*header, "needs", "limits"), shown, texts=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each way has its turn")
    parser.add_argument("--only", choices=[*WAYS], action="append", help="this way, and no other")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    # A Unix socket's path ends at 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mcinfer-", dir="/tmp") as name:
        os.environ["MCINFER_CACHE"] = str(Path(name) / "cache")  # not the user's
        lines = _measure(options.only or [*WAYS], Path(name), options.rounds)
    signal.alarm(0)
    setting = (
        f"The middle request of one client, {TOKENS} tokens each; {setting_of(options.rounds)}"
    )
    print(f"\n{setting}")
    if options.write is not None:
        write_page(options.write, {"services": f"{lines}\n\n{setting}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
