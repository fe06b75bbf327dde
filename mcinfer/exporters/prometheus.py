"""Metrics of masters for Prometheus, by its own client. Nothing is done between two scrapes.

Names follow https://prometheus.io/docs/practices/naming/; docs/observability.md lists them. A state is one
gauge for each possible value of the label ``state``; one of them is 1. (OpenMetrics' own state
sets call that label as the metric is called, so no query could be written for several of them.)
"""

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, get_args

from mcinfer.errors import ClosedError, InvalidInputError
from mcinfer.extras import requires
from mcinfer.locks import Turn
from mcinfer.master import Master
from mcinfer.protocol import WorkerState
from mcinfer.statistics import HealthState, Histogram, Statistics

with requires(
    "mcinfer.exporters.prometheus needs the package prometheus_client",
    "prometheus_client",
    extra="prometheus",
):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

Values = tuple[str, ...]
"""Values of labels, in the order of their names."""

Snapshot = tuple[Values, Statistics]
"""The values of a master's labels, and its statistics."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
"""https://prometheus.io/docs/concepts/data_model/: two underscores are Prometheus' own."""

_OWN = frozenset({"worker", "device", "state", "outcome", "reason", "way", "le"})
_SERVING = (WorkerState.READY, WorkerState.BUSY)

_OF_MASTER = (
    ("requests_in_flight", "Requests that were taken and are not answered yet.", "in_flight"),
    ("requests_queued", "Requests in flight of which no worker has a piece yet.", "queued"),
    ("shards_queued", "Pieces of requests that wait for a worker.", "queued_shards"),
    ("in_flight_bytes", "Inputs, and outputs of known shapes, in flight.", "in_flight_bytes"),
    ("memory_bytes", "Shared memory reserved for tensors.", "memory_bytes"),
    (
        "memory_used_bytes",
        "Shared memory in use by requests, replaced weights, or arrays that callers hold.",
        "memory_used_bytes",
    ),
    ("join_gain", "How many times as fast as apart joined requests were answered.", "join_gain"),
    ("weights_version", "Number of updates of the replaceable weights.", "weights_version"),
    ("workers", "Workers in all.", "health.workers"),
    ("workers_serving", "Workers that take requests.", "health.serving"),
)
"""Numbers of a master: name, text, attribute of `Statistics`; of the others, of what they are of."""

_OF_WORKER = (
    ("worker_restarts_total", "Number of restarts of the worker.", "restarts"),
    ("worker_runs_total", "Runs of the engine that gave a result.", "runs"),
    ("worker_wide_runs_total", "Runs of these with the cores of all workers.", "wide"),
    ("worker_busy_seconds_total", "Time spent in the engine's own runs.", "busy_seconds"),
    ("worker_concurrent_runs", "Runs that the worker executes at once.", "concurrent"),
)

_OF_CARD = (
    ("card_memory_bytes", "The card's memory reserved for tensors.", "memory_bytes"),
    (
        "card_memory_used_bytes",
        "The card's memory in use by requests, or arrays that callers hold.",
        "memory_used_bytes",
    ),
)

_OF_WAY = (
    ("card_inputs_total", "Inputs on the card, by their way to the workers.", "inputs"),
    ("card_input_bytes_total", "Bytes of these inputs.", "input_bytes"),
)

_HISTOGRAMS = (
    ("request_latency_seconds", "Time from a call to its answer, if it succeeded.", "latency"),
    ("run_batch_rows", "Rows of each run of the engine that succeeded.", "batch_sizes"),
)

_LATENCIES = frozenset(m * 10.0**e for e in range(-4, 3) for m in (1.0, 2.5, 5.0))
"""Of the bounds of latencies in seconds, those that are exported: each is a time series for each model."""


def families(labels: Sequence[str], snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """All metric families, each with its values from every snapshot.

    Args:
        labels: Names of the labels that distinguish the masters.
        snapshots: Each with the values of the labels.
    """
    workers = [((*v, str(w.index), w.device), w) for v, s in snapshots for w in s.workers]
    cards = [((*values, card.device), card) for values, s in snapshots for card in s.cards]

    def family(name: str, text: str, own: str, samples: Iterable[tuple[Values, float]]) -> Metric:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        made = kind(f"mcinfer_{name}", text, labels=(*labels, *own.split()))
        for values, value in samples:
            made.add_metric(values, value)
        return made

    kinds: tuple[tuple[Any, str, Any], ...] = (
        (_OF_MASTER, "", snapshots),
        (_OF_WORKER, "worker device", workers),
        (_OF_CARD, "device", cards),
    )
    for table, own, things in kinds:
        for name, text, attribute in table:
            read = attrgetter(attribute)
            yield family(name, text, own, ((values, read(thing)) for values, thing in things))
    for name, text, attribute in _OF_WAY:
        read = attrgetter(attribute)
        counts = [((*values, way), n) for values, c in cards for way, n in read(c).items()]
        yield family(name, text, "device way", counts)

    ends = ("succeeded", "failed", "cancelled")
    counts = [((*values, end), getattr(s, end)) for values, s in snapshots for end in ends]
    yield family("requests_total", "Requests that were answered, or cancelled.", "outcome", counts)
    text = "Requests that were not accepted, by reason."
    counts = [((*values, why), n) for values, s in snapshots for why, n in s.refused.items()]
    yield family("requests_refused_total", text, "reason", counts)
    text = "Pieces of requests that the worker answered, with a result or an error, or died on."
    counts = [((*values, "succeeded"), worker.completed) for values, worker in workers]
    counts += [((*values, "failed"), worker.failed) for values, worker in workers]
    yield family("worker_shards_total", text, "worker device outcome", counts)
    text = "1 for the state that the master is in, 0 for the others."
    states = _states(get_args(HealthState), [(values, s.health.state) for values, s in snapshots])
    yield family("health", text, "state", states)
    text = "1 for the state that the worker is in, 0 for the others."
    states = _states(WorkerState, [(values, worker.state) for values, worker in workers])
    yield family("worker_state", text, "worker device state", states)
    text = "1 if the worker has the model loaded: it is ready, or busy."
    ups = [(values, worker.state in _SERVING) for values, worker in workers]
    yield family("worker_up", text, "worker device", ups)

    for name, text, attribute in _HISTOGRAMS:
        histograms = HistogramMetricFamily(f"mcinfer_{name}", text, labels=labels)
        for values, statistics in snapshots:
            counted: Histogram = getattr(statistics, attribute)
            exported = _LATENCIES if attribute == "latency" else counted.bounds
            # Each bucket also counts all smaller values, the last one all values.
            sums = zip(counted.bounds, accumulate(counted.counts), strict=False)
            buckets = [(str(bound), number) for bound, number in sums if bound in exported]
            histograms.add_metric(values, [*buckets, ("+Inf", counted.count)], counted.total)
        yield histograms


def _states(
    known: Iterable[str], states: Sequence[tuple[Values, str]]
) -> Iterator[tuple[Values, bool]]:
    """For each known state, whether it is the current one."""
    return (((*values, name), name == state) for name in known for values, state in states)


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
        self._lock = Turn()
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
