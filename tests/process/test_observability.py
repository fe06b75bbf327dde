"""What a real pool exports to Prometheus and OpenTelemetry, and the documentation's programs."""

import json
import re
import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket
from urllib.request import urlopen

import psutil
import pytest

from mcinfer import RequestTrace
from tests.process.models import FakeModel, fake_master, rows
from tests.process.scripts import ROOT, Program, blocks, run, run_documented
from tests.process.waiting import all_gone, wait_until

DOCS = ROOT / "docs" / "observability.md"


def test_forked_child_exports_nothing(fake_model: FakeModel) -> None:
    text = """
from mcinfer.exporters.prometheus import MasterCollector

with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    collector = MasterCollector(master)
    say(len([*collector.collect()]) > 0)
    child = os.fork()
    if not child:
        say([*collector.collect()])
        os._exit(0)
    os.waitpid(child, 0)
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.out, ended.err) == (0, "True\n[]\n", "")


PRINTED = (
    r"103 requests, 99 % within \S+ ms\ncpu:0: ready, .* in \d+ runs\ncpu:1: ready, .*",
    "",
    r"request 0 succeeded: .*(\n  cpu:[01]: \d rows, waited .*){1,2}",
    r'(?s)(?=.*"name": "example").*"name": "mcinfer\.run".*"name": "mcinfer\.request".*',
)
STATISTICS, LOGGING, TRACES, ONE_PROCESS, GUNICORN, SPANS = blocks(DOCS, "python")


@pytest.mark.thorough
@pytest.mark.usefixtures("cache")  # requests by which a split is learned count as well
@pytest.mark.parametrize(
    ("text", "printed"), [*zip((STATISTICS, LOGGING, TRACES, SPANS), PRINTED, strict=True)]
)
def test_program_of_the_documentation_prints_what_a_pool_did(
    text: str, printed: str, tmp_path: Path
) -> None:
    assert re.fullmatch(printed, run_documented(text, tmp_path).strip())


def answered(port: int) -> float:
    """How many requests the metrics at a port say have succeeded; 0 while none can be had."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        counts = re.findall(rb'^mcinfer_requests_total{.*"succeeded"} (.+)$', page.read(), re.M)
        return float(sum(map(float, counts)))
    return 0.0


def free_ports(count: int) -> list[int]:
    """Ports that follow no rule, but are free."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket(AF_INET, SOCK_STREAM)) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.mark.thorough
def test_program_of_the_documentation_has_metrics_until_ctrl_c(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with Program(ONE_PROCESS.replace("9400", str(port)), cwd=tmp_path) as program:
        wait_until(lambda: answered(port) > 0)
        workers = [child.pid for child in psutil.Process(program.pid).children()]
        program.interrupt()
        assert program.wait().err.splitlines()[-1] == "KeyboardInterrupt"
    assert len(workers) == 2
    assert all_gone(workers)


@pytest.mark.thorough
def test_each_worker_of_gunicorn_has_metrics_that_its_successor_continues(tmp_path: Path) -> None:
    pytest.importorskip("gunicorn")
    web, *ports = free_ports(3)
    text = GUNICORN.replace("9400 +", f"{ports}[").replace("number, addr", "number], addr")
    (tmp_path / "service.py").write_text(text.replace(":8000", f":{web}"), encoding="utf-8")
    run = "from gunicorn.app.wsgiapp import run; sys.path.insert(0, ''); run()"
    arguments = ("--config", "python:service", "service:application")

    def ask() -> bool:
        """The answer of a worker that is up; requests go to any of them."""
        with suppress(OSError), urlopen(f"http://127.0.0.1:{web}", bytes(4 * 3 * 32 * 32)) as page:
            return len(json.load(page)) == 1
        return False

    def both() -> bool:
        return ask() and all(answered(port) > 0 for port in ports)

    with Program(f"import sys; {run}", *arguments, cwd=tmp_path) as program:
        wait_until(both)
        server = psutil.Process(program.pid)
        victim = server.children()[0]
        victim.kill()
        wait_until(lambda: not victim.is_running())
        wait_until(both)
        left = [child.pid for child in server.children(recursive=True)]
        program.send_signal(signal.SIGTERM)
        assert program.wait().status == 0
    assert all_gone(left)


def test_traces_that_wait_hold_no_results(fake_model: FakeModel) -> None:
    """Each of 64 traces in the queue would otherwise keep a result of 1 MiB."""
    traces: list[RequestTrace] = []
    over = threading.Event()
    with fake_master(fake_model(), 2, trace=traces.append) as master:
        large = rows(1 << 16)
        [array] = large.values()
        master.predict(large)
        blocked = master.submit(rows(1))
        blocked.add_done_callback(lambda _: over.wait(60.0))
        before = master.statistics().memory_bytes
        for _ in range(64):
            master.predict(large)
        after = master.statistics().memory_bytes
        over.set()
        assert after <= before + 4 * array.nbytes
        wait_until(lambda: len(traces) == 66)
