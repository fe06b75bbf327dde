"""What a real pool exports to Prometheus and OpenTelemetry, and the documentation's programs."""

import re
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from mcinfer import PredictError, RequestTrace
from mcinfer.exporters.opentelemetry import request_spans
from mcinfer.exporters.prometheus import MasterCollector
from tests.process.models import AFFINE, FakeModel, OnnxModel, act, fake_master, rows
from tests.process.scripts import PREAMBLE, ROOT, Program, run_documented
from tests.process.waiting import wait_until

DOCS = ROOT / "docs" / "observability.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)

FAILS = -1.0
"""Rows that begin with this number fail."""


def test_prometheus_gets_the_work_of_a_pool(fake_model: FakeModel) -> None:
    registry = CollectorRegistry(auto_describe=True)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"mcinfer_{name}", {"model": "m", **labels})

    model = fake_model(when={f"{FAILS:g}": "fail"}, run="sleep:0.01")
    with fake_master(model, 2) as master:
        registry.register(MasterCollector(master, {"model": "m"}))
        assert value("health", state="ready") == 1
        assert value("workers") == value("workers_serving") == 2
        master.predict(rows(6))
        master.submit(rows(1)).result(20)
        with pytest.raises(PredictError):
            master.submit(act(FAILS)).result(20)
        assert value("requests_total", outcome="succeeded") == 2
        assert value("requests_total", outcome="failed") == 1
        assert value("request_latency_seconds_count") == 2
        assert value("run_batch_rows_sum") == 7
        each = [{"worker": str(index), "device": f"cpu:{index}"} for index in range(2)]
        assert [value("worker_up", **labels) for labels in each] == [1, 1]
        busy = [value("worker_busy_seconds_total", **labels) for labels in each]
        assert sum(seconds or 0 for seconds in busy) > 0.03
        assert (value("memory_bytes") or 0) > 0
    assert value("health", state="closed") == 1
    assert value("requests_total", outcome="succeeded") == 2
    assert [value("worker_up", **labels) for labels in each] == [0, 0]


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
    with Program(PREAMBLE + text, fake_model()) as program:
        assert program.line() == "True"
        assert program.line() == "[]"
        ended = program.wait()
        assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_spans_of_a_pool_are_below_their_callers(fake_model: FakeModel) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("caller")
    model = fake_model(when={f"{FAILS:g}": "fail"}, run="sleep:0.01")
    with fake_master(model, 2, trace=request_spans(provider)) as master:
        with tracer.start_as_current_span("predicts") as predicts:
            master.predict(rows(6))
        with tracer.start_as_current_span("submits") as submits:
            future = master.submit(act(FAILS))
        with pytest.raises(PredictError):
            future.result(20)

        def requests() -> int:
            return sum(span.name == "mcinfer.request" for span in memory.get_finished_spans())

        wait_until(lambda: requests() == 2)
        pids = {worker.pid for worker in master.statistics().workers}
    spans = memory.get_finished_spans()
    whole, failed = (span for span in spans if span.name == "mcinfer.request")
    assert whole.parent == predicts.get_span_context()
    assert failed.parent == submits.get_span_context()
    assert failed.status.status_code is StatusCode.ERROR
    stages = [span for span in spans if span.parent == whole.context]
    runs = [span.attributes or {} for span in stages if span.name == "mcinfer.run"]
    assert {run["process.pid"] for run in runs} == pids
    for span in stages:
        times = [whole.start_time, span.start_time, span.end_time, whole.end_time]
        assert times == sorted(times, key=lambda at: at or 0)


PRINTED = [
    r"102 requests, 99 % within \S+ ms\ncpu:0: ready, .* in \d+ runs\ncpu:1: ready, .*",
    r"request 0 succeeded: .*(\n  cpu:[01]: \d rows, waited .*){1,2}",
    r'(?s).*mcinfer_requests_total\{model="model",outcome="succeeded"\} 1\.0.*',
    r'(?s)(?=.*"name": "example").*"name": "mcinfer\.run".*"name": "mcinfer\.request".*',
]


def test_programs_of_the_documentation_run(
    onnx_model: OnnxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first one counts the requests by which the split is learned: another test may have learned it.
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("MCINFER_CACHE", str(cache))
    onnx_model(AFFINE).rename(tmp_path / "model.onnx")
    scrape = (
        "    import urllib.request\n"
        "    url = f'http://127.0.0.1:{server.server_port}/metrics'\n"
        "    print(urllib.request.urlopen(url).read().decode())\n"
    )
    for program, printed in zip(PROGRAMS, PRINTED, strict=True):
        text = program.replace("start_http_server(9400", "server, _ = start_http_server(0")
        text = text.replace("    # While", f"{scrape}    # While")
        assert re.fullmatch(printed, run_documented(text, tmp_path).strip())


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
