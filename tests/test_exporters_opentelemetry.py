"""Spans of a request are its stages: in order, below the caller's span, at the time of day."""

import contextvars
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from mcinfer import PredictTimeoutError, RequestTrace, ShardTrace, __version__
from mcinfer.errors import McinferError, MissingDependencyError
from mcinfer.exporters.opentelemetry import join_trace, request_spans, span_exporter


def shard(index: int, called: float, pid: int | None = 77) -> ShardTrace:
    return ShardTrace(
        shard=index,
        worker=index + 1,
        device=f"cpu:{index + 1}",
        pid=pid,
        attempts=index + 1,
        sent=called + 0.2 + index * 0.01,
        answered=called + 0.6 + index * 0.01,
        run_seconds=0.375,
        rows=4,
    )


def request(called: float, **changes: object) -> RequestTrace:
    """A request of this time of `time.monotonic` that took 0.8 s and had two shards."""
    values: dict[str, object] = {
        "request": 5,
        "outcome": "succeeded",
        "error": None,
        "rows": 8,
        "called": called,
        "queued": called + 0.1,
        "settled": called + 0.7,
        "joined": called + 0.8,
        "shards": (shard(0, called), shard(1, called, None)),
        "label": "encoder/3",
        **changes,
    }
    return RequestTrace(**values)  # type: ignore[arg-type]


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(memory))
    return made


def by_name(memory: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in memory.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def times(span: ReadableSpan, origin_ns: int) -> tuple[float, float]:
    """Start and end of a span, in seconds from the origin, rounded to milliseconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    start, end = ((at - origin_ns) / 1e9 for at in (span.start_time, span.end_time))
    return round(start, 3), round(end, 3)


def test_stages_follow_each_other_within_the_request_and_say_what_ran_where(
    provider: TracerProvider, memory: InMemorySpanExporter
) -> None:
    request_spans(provider)(request(time.monotonic() - 3600.0))
    spans = by_name(memory)
    (whole,) = spans["mcinfer.request"]
    assert whole.start_time is not None
    origin = whole.start_time
    hour_ns = 3600 * 10**9
    assert abs(origin - (time.time_ns() - hour_ns)) < hour_ns  # dated by the time of day
    assert {name: [times(s, origin) for s in found] for name, found in spans.items()} == {
        "mcinfer.request": [(0.0, 0.8)],
        "mcinfer.stage": [(0.0, 0.1)],
        "mcinfer.queue": [(0.1, 0.2)],
        "mcinfer.run": [(0.2, 0.6), (0.21, 0.61)],
        "mcinfer.join": [(0.7, 0.8)],
    }
    parents = [span.parent for span in memory.get_finished_spans() if span is not whole]
    assert parents == [whole.context] * 5
    assert whole.instrumentation_scope is not None
    assert whole.instrumentation_scope.name == "mcinfer"
    assert whole.instrumentation_scope.version == __version__
    assert whole.attributes == {
        "mcinfer.model": "encoder/3",
        "mcinfer.request.number": 5,
        "mcinfer.request.rows": 8,
        "mcinfer.request.outcome": "succeeded",
    }
    first, second = (span.attributes or {} for span in spans["mcinfer.run"])
    assert first == {
        "mcinfer.shard.index": 0,
        "mcinfer.shard.rows": 4,
        "mcinfer.shard.attempts": 1,
        "mcinfer.worker.index": 1,
        "mcinfer.worker.device": "cpu:1",
        "mcinfer.run.seconds": 0.375,
        "process.pid": 77,
    }
    assert second["mcinfer.shard.attempts"] == 2
    assert "process.pid" not in second


def test_failed_request_has_its_exception_and_its_answered_shards(
    provider: TracerProvider, memory: InMemorySpanExporter
) -> None:
    called = time.monotonic()
    error = PredictTimeoutError("not within 0.7 s")
    changes = {"outcome": "failed", "error": error, "shards": (shard(0, called),)}
    request_spans(provider)(request(called, **changes))
    spans = by_name(memory)
    assert {*spans} == {"mcinfer.request", "mcinfer.stage", "mcinfer.queue", "mcinfer.run"}
    (whole,) = spans["mcinfer.request"]
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.status.description == "not within 0.7 s"
    assert (whole.attributes or {})["error.type"] == "mcinfer.errors.PredictTimeoutError"
    (event,) = whole.events
    assert event.name == "exception"
    assert whole.start_time is not None
    assert event.timestamp - whole.start_time == pytest.approx(0.7e9, abs=1000)
    assert (event.attributes or {})["exception.message"] == "not within 0.7 s"


def test_cancelled_request_is_no_error(
    provider: TracerProvider, memory: InMemorySpanExporter
) -> None:
    error = McinferError("cancelled")
    request_spans(provider)(request(time.monotonic(), outcome="cancelled", error=error, shards=()))
    spans = by_name(memory)
    assert {*spans} == {"mcinfer.request", "mcinfer.stage"}
    (whole,) = spans["mcinfer.request"]
    assert whole.status.status_code is StatusCode.UNSET
    assert not whole.events
    assert (whole.attributes or {})["mcinfer.request.outcome"] == "cancelled"


def test_callers_span_is_the_parent(provider: TracerProvider, memory: InMemorySpanExporter) -> None:
    with provider.get_tracer("caller").start_as_current_span("caller") as caller:
        context = contextvars.copy_context()  # as the master does in the call
    context.run(request_spans(provider), request(time.monotonic()))
    (whole,) = by_name(memory)["mcinfer.request"]
    assert whole.parent == caller.get_span_context()
    assert trace.get_current_span() is trace.INVALID_SPAN


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def span_below(
    headers: list[tuple[str, str]], provider: TracerProvider, memory: InMemorySpanExporter
) -> ReadableSpan:
    context = contextvars.copy_context()  # a request's own
    context.run(join_trace, headers)
    context.run(request_spans(provider), request(time.monotonic()))
    (whole,) = by_name(memory)["mcinfer.request"]
    memory.clear()
    return whole


@pytest.mark.parametrize("parent", [PARENT, f" {PARENT}\t", f"cc-{TRACE}-{SPAN}-01-what-will-be"])
def test_span_that_headers_name_is_the_parent(
    parent: str, provider: TracerProvider, memory: InMemorySpanExporter
) -> None:
    state = [("tracestate", "a=1"), ("tracestate", "b=2")]
    whole = span_below([("host", "x"), ("traceparent", parent), *state], provider, memory)
    assert whole.parent is not None
    found = trace.format_trace_id(whole.parent.trace_id), trace.format_span_id(whole.parent.span_id)
    assert found == (TRACE, SPAN)
    assert whole.parent.is_remote
    assert whole.context.trace_state.to_header() == "a=1,b=2"


def test_request_that_its_caller_does_not_sample_makes_no_span(
    provider: TracerProvider, memory: InMemorySpanExporter
) -> None:
    context = contextvars.copy_context()
    context.run(join_trace, [("traceparent", PARENT[:-1] + "0")])
    context.run(request_spans(provider), request(time.monotonic()))
    assert not by_name(memory)


# https://www.w3.org/TR/trace-context/#traceparent-header-field-values
@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        ["nonsense"],
        [PARENT.upper()],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN}-01-more"],
        [PARENT[:-1]],
        [f"00-{TRACE[:-1]}g-{SPAN}-01"],
        [PARENT, PARENT],
    ],
)
def test_malformed_parents_are_ignored(
    parents: list[str], provider: TracerProvider, memory: InMemorySpanExporter
) -> None:
    headers = [("traceparent", parent) for parent in parents] + [("tracestate", "a=1")]
    whole = span_below(headers, provider, memory)
    assert whole.parent is None
    assert not whole.context.trace_state


@pytest.mark.parametrize(
    ("said", "package"),
    [
        ({"OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_TRACES_EXPORTER": ""}, "otlp-proto-http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp-proto-grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "otlp-proto-grpc"),
    ],
    ids=str,
)
def test_environment_names_the_exporter(
    said: dict[str, str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mcinfer.exporters.opentelemetry.entry_points", lambda **_: [])
    if not package:
        assert span_exporter() is None
        return
    with pytest.raises(MissingDependencyError, match=f"opentelemetry-exporter-{package}$"):
        span_exporter()
