"""Metrics of masters for Prometheus, by its own client. Nothing is done between two scrapes.

Names follow https://prometheus.io/docs/practices/naming/; docs/observability.md lists them. A state is one
gauge for each that is possible, told apart by the label ``state``; one of them is 1. (OpenMetrics' own state
sets call that label as the metric is called, so no query could be written for several of them.)
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from mcinfer.errors import ClosedError, InvalidInputError, MissingDependencyError
from mcinfer.master import Master
from mcinfer.protocol import WorkerState
from mcinfer.statistics import HealthState, Histogram, Statistics, WorkerStatistics

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise MissingDependencyError(
        "mcinfer.exporters.prometheus needs the package prometheus_client: "
        "pip install 'mcinfer[prometheus]'"
    ) from exc

Values = tuple[str, ...]
"""Values of labels, in the order of their names."""

Snapshot = tuple[Values, Statistics]
"""The values of a master's labels, and its statistics."""

_Read = Callable[[Statistics], Iterable[tuple[Values, float]]]
"""Reads a family's values from statistics, by the values of the family's own labels."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
"""https://prometheus.io/docs/concepts/data_model/: two underscores are Prometheus' own."""

_PER_WORKER = ("worker", "device")
_OWN = frozenset({*_PER_WORKER, "state", "outcome", "le"})

_SERVING = (WorkerState.READY, WorkerState.BUSY)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A family of gauges, or of counters, whose names end in ``_total``: its values, by label."""

    name: str
    text: str
    read: _Read
    labels: Values = ()


def _one(of: Callable[[Statistics], float]) -> _Read:
    return lambda s: (((), of(s)),)


def _each_worker(of: Callable[[WorkerStatistics], Iterable[tuple[Values, float]]]) -> _Read:
    return lambda s: (
        ((str(w.index), w.device, *values), value) for w in s.workers for values, value in of(w)
    )


def _one_each(of: Callable[[WorkerStatistics], float]) -> _Read:
    return _each_worker(lambda w: (((), of(w)),))


def _states(known: Iterable[str], current: str) -> Iterator[tuple[Values, float]]:
    """Whether each known state is the current one."""
    return (((state,), state == current) for state in known)


_NUMBERS = (
    _Numbers(
        "mcinfer_requests_total",
        "Requests that were answered, or cancelled.",
        lambda s: (
            (("succeeded",), s.succeeded),
            (("failed",), s.failed),
            (("cancelled",), s.cancelled),
        ),
        ("outcome",),
    ),
    _Numbers(
        "mcinfer_requests_in_flight",
        "Requests that were taken and are not answered yet.",
        _one(lambda s: s.in_flight),
    ),
    _Numbers(
        "mcinfer_requests_queued",
        "Requests in flight of which no piece was given to a worker yet.",
        _one(lambda s: s.queued),
    ),
    _Numbers(
        "mcinfer_shards_queued",
        "Pieces of requests that wait for a worker.",
        _one(lambda s: s.queued_shards),
    ),
    _Numbers(
        "mcinfer_in_flight_bytes",
        "Tensors of the requests in flight: inputs, and outputs of known shapes.",
        _one(lambda s: s.in_flight_bytes),
    ),
    _Numbers(
        "mcinfer_memory_bytes",
        "Shared memory reserved for tensors.",
        _one(lambda s: s.memory_bytes),
    ),
    _Numbers(
        "mcinfer_memory_used_bytes",
        "Shared memory in use by requests, replaced weights, or arrays that callers hold.",
        _one(lambda s: s.memory_used_bytes),
    ),
    _Numbers(
        "mcinfer_weights_version",
        "How often the replaceable weights were updated.",
        _one(lambda s: s.weights_version),
    ),
    _Numbers(
        "mcinfer_health",
        "1 for the state that the master is in, 0 for the others.",
        lambda s: _states(get_args(HealthState), s.health.state),
        ("state",),
    ),
    _Numbers("mcinfer_workers", "Workers in all.", _one(lambda s: s.health.workers)),
    _Numbers(
        "mcinfer_workers_serving", "Workers that take requests.", _one(lambda s: s.health.serving)
    ),
    _Numbers(
        "mcinfer_worker_up",
        "1 if the worker has the model loaded: it is ready, or busy.",
        _one_each(lambda w: w.state in _SERVING),
        _PER_WORKER,
    ),
    _Numbers(
        "mcinfer_worker_state",
        "1 for the state that the worker is in, 0 for the others.",
        _each_worker(lambda w: _states(WorkerState, w.state)),
        (*_PER_WORKER, "state"),
    ),
    _Numbers(
        "mcinfer_worker_restarts_total",
        "How often the worker was started again.",
        _one_each(lambda w: w.restarts),
        _PER_WORKER,
    ),
    _Numbers(
        "mcinfer_worker_runs_total",
        "Runs of the engine that gave a result.",
        _one_each(lambda w: w.runs),
        _PER_WORKER,
    ),
    _Numbers(
        "mcinfer_worker_shards_total",
        "Pieces of requests that the worker answered, with a result or an error, or died on.",
        _each_worker(lambda w: ((("succeeded",), w.completed), (("failed",), w.failed))),
        (*_PER_WORKER, "outcome"),
    ),
    _Numbers(
        "mcinfer_worker_busy_seconds_total",
        "Time spent in the engine's own runs.",
        _one_each(lambda w: w.busy_seconds),
        _PER_WORKER,
    ),
)

_HISTOGRAMS: tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...] = (
    (
        "mcinfer_request_latency_seconds",
        "Time from a call to its answer, of the requests that succeeded.",
        lambda s: s.latency,
    ),
    (
        "mcinfer_run_batch_rows",
        "Rows of each run of the engine that succeeded.",
        lambda s: s.batch_sizes,
    ),
)


def families(labels: Sequence[str], snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """All metric families, each with its values from every snapshot.

    Args:
        labels: Names of the labels that distinguish the masters.
        snapshots: Each with the values of the labels.
    """
    for family in _NUMBERS:
        counts = family.name.endswith("_total")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        numbers = kind(family.name, family.text, labels=(*labels, *family.labels))
        for values, statistics in snapshots:
            for own, value in family.read(statistics):
                numbers.add_metric((*values, *own), value)
        yield numbers
    for name, text, read in _HISTOGRAMS:
        histograms = HistogramMetricFamily(name, text, labels=labels)
        for values, statistics in snapshots:
            counted = read(statistics)
            histograms.add_metric(values, _buckets(counted), counted.total)
        yield histograms


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """As Prometheus wants them: each with all smaller values, the last one with all there are."""
    bounds = (*map(str, counted.bounds), "+Inf")
    return [*zip(bounds, accumulate(counted.counts), strict=True)]


class MasterCollector(Collector):
    """Metrics of one or more masters for Prometheus' client, from their statistics at each scrape.

    Register it once, with ``prometheus_client.REGISTRY.register``. A registry refuses a second collector,
    whose metrics would have the same names: add further masters to the first (`add`). The collector keeps
    no master alive. It reports a closed master as closed until that is garbage-collected. In a process that
    was forked from the master's it reports nothing: only the parent reports the numbers.

    Args:
        master: Started or not.
        labels: By name, labels for all its metrics.

    Raises:
        InvalidInputError: As `add`.
    """

    def __init__(self, master: Master, labels: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()
        self._names = tuple(labels) if isinstance(labels, Mapping) else ()
        self._masters: dict[Values, weakref.ref[Master]] = {}
        self.add(master, labels)

    def add(self, master: Master, labels: Mapping[str, str] | None = None) -> None:
        """Report another master too. It replaces a closed one with the same labels.

        Args:
            master: Started or not.
            labels: Same names as the first master's, and other values.

        Raises:
            InvalidInputError: A label is invalid, or is one of the metrics' own; the names are not the
                first master's; an open master has the same values.
        """
        if not isinstance(master, Master):
            raise InvalidInputError(f"master: got {type(master).__name__}, expected a Master")
        if not isinstance(labels, Mapping | None):
            raise InvalidInputError(
                f"labels: got {type(labels).__name__}, expected a mapping, text to text"
            )
        labels = labels or {}
        for name, value in labels.items():
            if not _LABEL.fullmatch(str(name)) or name in _OWN or not isinstance(value, str):
                raise InvalidInputError(
                    f"labels: got {name!r}: {value!r}, expected letters, digits and _ as the name, "
                    f"none of {sorted(_OWN)}, and a string as the value"
                )
        if {*labels} != {*self._names}:
            raise InvalidInputError(
                f"labels: got {[*labels]}, expected {[*self._names]} as the first master has"
            )
        values = tuple(labels[name] for name in self._names)
        with self._lock:
            earlier = _statistics(self._masters.get(values))
            if earlier is not None and earlier.health.state != "closed":
                raise InvalidInputError(
                    f"labels: got {dict(labels)} for two masters, expected others for each"
                )
            # Replaced, not changed: a scrape reads it without the lock, which a fork may have left locked.
            self._masters = {**self._masters, values: weakref.ref(master)}

    def collect(self) -> Iterator[Metric]:
        """The metrics, from one snapshot of each master; none if no master is left."""
        taken = [(values, _statistics(master)) for values, master in self._masters.items()]
        snapshots = [(values, statistics) for values, statistics in taken if statistics is not None]
        if snapshots:
            yield from families(self._names, snapshots)

    def describe(self) -> Iterator[Metric]:
        """The metrics without values: a registry asks for their names at registration."""
        return families(self._names, ())


def _statistics(reference: "weakref.ref[Master] | None") -> Statistics | None:
    """A snapshot, unless the master is garbage, or in the process that this one was forked from."""
    master = None if reference is None else reference()
    try:
        return None if master is None else master.statistics()
    except ClosedError:
        return None
