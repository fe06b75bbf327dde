"""Requests as spans of OpenTelemetry, by its API; the SDK that the program sets up decides where they go.

Attributes are named as https://opentelemetry.io/docs/specs/semconv/general/naming/ asks: ``process.pid`` and
``error.type`` are OpenTelemetry's own, the others begin with ``mcinfer``. docs/observability.md lists them.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from mcinfer import __version__
from mcinfer.errors import InvalidInputError, MissingDependencyError
from mcinfer.extras import requires
from mcinfer.statistics import RequestTrace, ShardTrace, TraceHook

with requires(
    "mcinfer.exporters.opentelemetry needs the package opentelemetry-api",
    "opentelemetry",
    extra="opentelemetry",
):
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.types import AttributeValue

_PROPAGATOR = TraceContextTextMapPropagator()

_Attributes = dict[str, AttributeValue]


def request_spans(tracer_provider: trace.TracerProvider | None = None) -> TraceHook:
    """A trace hook that makes a span of each request, and child spans of its stages.

    ``mcinfer.request`` lasts from the call to the answer; its parent is the span that was current in the
    call. Its children are ``mcinfer.stage`` (check and copy inputs), ``mcinfer.queue`` (until the first run
    was sent), ``mcinfer.run`` (one for each answered piece, from sent to answered) and ``mcinfer.join``
    (prepare outputs). A failed request has the status ERROR and its exception.

    Args:
        tracer_provider: From OpenTelemetry's SDK; None is the program's own, even if it is set later.

    Raises:
        InvalidInputError: The argument is not a tracer provider.

    Returns:
        The hook, for ``Master(..., trace=)``. Several masters may share it.
    """
    if not isinstance(tracer_provider, trace.TracerProvider | None):
        raise InvalidInputError(
            f"tracer_provider: got {type(tracer_provider).__name__}, expected OpenTelemetry's "
            "TracerProvider"
        )
    tracer = trace.get_tracer("mcinfer", __version__, tracer_provider)

    def export(request: RequestTrace) -> None:
        # From `time.monotonic` to nanoseconds since 1970. The distance is taken anew for each request, since
        # the system's time may have been set, and once for all spans of a request, so that they fit together.
        offset = time.time_ns() - time.monotonic_ns()

        def date(seconds: float) -> int:
            return round(seconds * 1e9) + offset

        whole = tracer.start_span(
            "mcinfer.request",
            start_time=date(request.called),
            attributes={
                "mcinfer.model": request.label,
                "mcinfer.request.number": request.request,
                "mcinfer.request.rows": request.rows,
                "mcinfer.request.outcome": request.outcome,
            },
        )
        if whole.is_recording():  # else the sampler does not want it
            below = trace.set_span_in_context(whole)
            for name, start, end, attributes in _stages(request):
                stage = tracer.start_span(
                    name, below, attributes=attributes, start_time=date(start)
                )
                stage.end(date(end))
            if request.outcome == "failed" and request.error is not None:
                kind = type(request.error)
                whole.set_attribute("error.type", f"{kind.__module__}.{kind.__qualname__}")
                whole.record_exception(request.error, timestamp=date(request.settled))
                whole.set_status(trace.Status(trace.StatusCode.ERROR, str(request.error)))
        whole.end(date(request.joined))

    return export


# A program that gets requests from others, and has set up nothing.


def join_trace(headers: Iterable[tuple[str, Any]]) -> None:
    """Make the span that a caller names in its headers the current one of this context.

    By https://www.w3.org/TR/trace-context/: ``traceparent`` and ``tracestate``. What is malformed is ignored,
    and so are several of the first.
    """
    given: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in headers:
        if name in given:
            given[name].append(str(value))
    if len(given["traceparent"]) == 1:
        context.attach(_PROPAGATOR.extract(given))


def span_exporter() -> Callable[[], Any] | None:
    """What makes the exporter that ``OTEL_TRACES_EXPORTER`` names, such as ``console``; else that of OTLP.

    None if that is ``none``, or the program has set up a tracer provider, which decides where spans go.

    Raises:
        MissingDependencyError: It is not installed.
    """
    get = os.environ.get
    name = get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "none" or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    if name == "otlp":  # https://opentelemetry.io/docs/specs/otel/protocol/exporter/
        protocol = get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = [*entry_points(group="opentelemetry_traces_exporter", name=name)]
    if not found or find_spec("opentelemetry.sdk") is None:
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        text = f"spans: OTEL_TRACES_EXPORTER names {name!r}, which is not installed"
        raise MissingDependencyError(f"{text}: pip install opentelemetry-sdk {package}")
    exporter: Callable[[], Any] = found[0].load()
    return exporter


@contextmanager
def exporting() -> Iterator[None]:
    """Export spans meanwhile, and those that are left at the end; raises as `span_exporter`.

    Where the program has set up nothing, the SDK decides by its own environment variables: the sampler, the
    name of the service, the address.
    """
    if (exporter := span_exporter()) is None:
        yield
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def _stages(request: RequestTrace) -> Iterator[tuple[str, float, float, _Attributes]]:
    yield "mcinfer.stage", request.called, request.queued, {}
    if request.shards:  # else nothing says when the request left the queue
        yield "mcinfer.queue", request.queued, min(shard.sent for shard in request.shards), {}
    for shard in request.shards:
        yield "mcinfer.run", shard.sent, shard.answered, _attributes(shard)
    if request.outcome == "succeeded":
        yield "mcinfer.join", request.settled, request.joined, {}


def _attributes(shard: ShardTrace) -> _Attributes:
    attributes: _Attributes = {
        "mcinfer.shard.index": shard.shard,
        "mcinfer.shard.rows": shard.rows,
        "mcinfer.shard.attempts": shard.attempts,
        "mcinfer.worker.index": shard.worker,
        "mcinfer.worker.device": shard.device,
        "mcinfer.run.seconds": shard.run_seconds,
    }
    if shard.pid is not None:
        attributes["process.pid"] = shard.pid
    return attributes
