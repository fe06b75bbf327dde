"""Requests as spans of OpenTelemetry, by its API; where they go is for the SDK that the program sets up.

Attributes are named as https://opentelemetry.io/docs/specs/semconv/general/naming/ asks: ``process.pid`` and
``error.type`` are OpenTelemetry's own, the others begin with ``mcinfer``. docs/observability.md lists them.
"""

import time

from mcinfer import __version__
from mcinfer.errors import InvalidInputError, MissingDependencyError
from mcinfer.statistics import RequestTrace, ShardTrace, TraceHook

try:
    from opentelemetry import trace
    from opentelemetry.util.types import AttributeValue
except ImportError as exc:
    raise MissingDependencyError(
        "mcinfer.exporters.opentelemetry needs the package opentelemetry-api: "
        "pip install 'mcinfer[opentelemetry]'"
    ) from exc


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
        # The times are of a clock that nobody sets, spans are dated by one that is. Their distance is taken
        # anew for each request, since the other may have been set, and once for all of its spans, so that
        # stages that follow each other do so in the trace.
        spans = _Spans(tracer, time.time_ns() - time.monotonic_ns())
        spans.add_request(request)

    return export


class _Spans:
    """Makes the spans of one request."""

    __slots__ = ("_offset", "_tracer")

    def __init__(self, tracer: trace.Tracer, offset_ns: int) -> None:
        self._tracer = tracer
        self._offset = offset_ns

    def add_request(self, request: RequestTrace) -> None:
        span = self._tracer.start_span(
            "mcinfer.request",
            start_time=self._date(request.called),
            attributes={
                "mcinfer.request.number": request.request,
                "mcinfer.request.rows": request.rows,
                "mcinfer.request.outcome": request.outcome,
            },
        )
        if span.is_recording():  # or the sampler does not want it
            self._add_stages(span, request)
            if request.outcome == "failed" and request.error is not None:
                kind = type(request.error)
                span.set_attribute("error.type", f"{kind.__module__}.{kind.__qualname__}")
                span.record_exception(request.error, timestamp=self._date(request.settled))
                span.set_status(trace.Status(trace.StatusCode.ERROR, str(request.error)))
        span.end(self._date(request.joined))

    def _add_stages(self, span: trace.Span, request: RequestTrace) -> None:
        below = trace.set_span_in_context(span)

        def add(
            name: str,
            start: float,
            end: float,
            attributes: dict[str, AttributeValue] | None = None,
        ) -> None:
            stage = self._tracer.start_span(
                name, below, attributes=attributes, start_time=self._date(start)
            )
            stage.end(self._date(end))

        add("mcinfer.stage", request.called, request.queued)
        if request.shards:  # else nothing says when it left the queue
            add("mcinfer.queue", request.queued, min(shard.sent for shard in request.shards))
        for shard in request.shards:
            add("mcinfer.run", shard.sent, shard.answered, _attributes(shard))
        if request.outcome == "succeeded":
            add("mcinfer.join", request.settled, request.joined)

    def _date(self, seconds: float) -> int:
        """A time of `time.monotonic` as nanoseconds since 1970."""
        return round(seconds * 1e9) + self._offset


def _attributes(shard: ShardTrace) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "mcinfer.shard.index": shard.shard,
        "mcinfer.shard.attempts": shard.attempts,
        "mcinfer.worker.index": shard.worker,
        "mcinfer.worker.device": shard.device,
        "mcinfer.run.seconds": shard.run_seconds,
    }
    if shard.pid is not None:
        attributes["process.pid"] = shard.pid
    return attributes
