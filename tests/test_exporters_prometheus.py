"""Histograms; Prometheus gets the values of the statistics, under the names in the documentation."""

import dataclasses
import gc
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition, parser

from mcinfer import Master
from mcinfer.errors import InvalidInputError
from mcinfer.exporters.prometheus import MasterCollector, families
from mcinfer.protocol import WorkerState
from mcinfer.scheduler.dispatch import Tally
from mcinfer.statistics import (
    LATENCY_BOUNDS,
    CardStatistics,
    Health,
    HealthState,
    Histogram,
    Statistics,
    WorkerStatistics,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "observability.md"


def worker(index: int, state: str = "ready") -> WorkerStatistics:
    first = 1000 * (index + 1)
    return WorkerStatistics(
        index=index,
        device=f"cpu:{index}",
        pid=None,
        state=state,
        restarts=first,
        runs=first + 1,
        completed=first + 2,
        failed=first + 3,
        busy_seconds=first + 0.25,
        providers=(),
        last_error="",
    )


def tally(bounds: Sequence[float], values: Sequence[float]) -> Histogram:
    counted = Tally(bounds)
    for value in values:
        counted.add(value)
    return counted.snapshot()


SNAPSHOT = Statistics(
    accepted=50,
    succeeded=11,
    failed=12,
    cancelled=13,
    in_flight=14,
    in_flight_bytes=15,
    queued=16,
    queued_shards=17,
    latency=tally((0.1, 0.25), [0.05, 0.1, 0.2, 7.0]),
    batch_sizes=tally((1.0, 2.0), [1, 1, 2]),
    memory_bytes=19,
    memory_used_bytes=18,
    weights_version=20,
    join_gain=1.5,
    health=Health(state="degraded", reasons=("one is gone",), serving=21, workers=22),
    workers=(worker(0, "busy"), worker(1, "gone")),
    cards=(
        CardStatistics(
            device="cuda:0",
            memory_bytes=31,
            memory_used_bytes=32,
            inputs={"in_place": 33, "copied": 34, "through_host": 35},
            input_bytes={"in_place": 36, "copied": 37, "through_host": 38},
        ),
    ),
)
"""No two numbers of it are alike."""

Value = Callable[..., float]


def values(statistics: Statistics) -> Value:
    """Finds a value of one master by its name and labels."""
    samples = [s for family in families((), [((), statistics)]) for s in family.samples]
    found = {(s.name, frozenset(s.labels.items())): float(s.value) for s in samples}
    assert len(found) == len(samples)
    return lambda name, **labels: found[f"mcinfer_{name}", frozenset(labels.items())]


def test_every_number_of_the_statistics_is_exported() -> None:
    numbers = {s.value for family in families((), [((), SNAPSHOT)]) for s in family.samples}
    for snapshot in (SNAPSHOT, *SNAPSHOT.workers, *SNAPSHOT.cards):
        for name, value in dataclasses.asdict(snapshot).items():  # type: ignore[call-overload]
            # "accepted" is the sum of others.
            if isinstance(value, int | float) and name not in {"accepted", "index"}:
                assert value in numbers, name
    assert {SNAPSHOT.health.serving, SNAPSHOT.health.workers} <= numbers
    value = values(SNAPSHOT)
    assert value("worker_shards_total", worker="1", device="cpu:1", outcome="failed") == 2003
    assert value("card_memory_used_bytes", device="cuda:0") == 32
    assert value("card_inputs_total", device="cuda:0", way="copied") == 34
    assert value("card_input_bytes_total", device="cuda:0", way="through_host") == 38


def test_worker_and_pool_have_one_state_each_and_a_worker_that_can_answer_is_up() -> None:
    labels = {"worker": "0", "device": "cpu:0"}
    for state in WorkerState:
        value = values(dataclasses.replace(SNAPSHOT, workers=(worker(0, state),)))
        assert value("worker_up", **labels) == (state in {"ready", "busy"})
        for other in WorkerState:
            assert value("worker_state", **labels, state=other) == (other is state)
    for health in get_args(HealthState):
        now = Health(state=health, reasons=(), serving=0, workers=2)
        value = values(dataclasses.replace(SNAPSHOT, health=now))
        for one in get_args(HealthState):
            assert value("health", state=one) == (one == health)


def test_metrics_are_those_that_the_documentation_lists() -> None:
    row = re.compile(r"^\| `(mcinfer_\w+)` \| (\w+) \|([^|]*)\|[^|]+\|$", re.MULTILINE)
    listed = {
        name: (kind, re.findall(r"`(\w+)`", labels))
        for name, kind, labels in row.findall(DOCS.read_text(encoding="utf-8"))
    }
    given = {}
    for family in families((), [((), SNAPSHOT)]):
        name = family.name + ("_total" if family.type == "counter" else "")
        given[name] = (family.type, [n for n in family.samples[0].labels if n != "le"])
    assert listed == given


# Histograms.

BOUNDS = st.lists(st.floats(-1e6, 1e6), unique=True, max_size=8).map(sorted)
VALUES = st.lists(st.floats(-2e6, 2e6), max_size=30)


@given(BOUNDS, VALUES)
def test_every_value_is_counted_once_in_its_class(bounds: list[float], values: list[float]) -> None:
    histogram = tally(bounds, values)
    edges = (-math.inf, *bounds, math.inf)
    for (low, high), count in zip(pairwise(edges), histogram.counts, strict=True):
        assert count == sum(low < value <= high for value in values)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(math.fsum(values), abs=1e-3)


@given(BOUNDS, VALUES, st.floats(0.0, 1.0))
def test_as_many_values_as_a_quantile_says_are_below_its_bound(
    bounds: list[float], values: list[float], fraction: float
) -> None:
    bound = tally(bounds, values).quantile(fraction)
    if not values:
        assert math.isnan(bound)
        return
    assert sum(value <= bound for value in values) >= fraction * len(values)
    lower = [edge for edge in bounds if edge < bound]
    if lower:
        below = sum(value <= lower[-1] for value in values)
        assert below == 0 or below < fraction * len(values)


@given(
    st.lists(st.floats(1e-4, 900.0), min_size=1, max_size=50),
    st.floats(0.0, 1.0).filter(bool),
)
def test_quantile_of_latencies_is_the_true_one_or_a_seventh_more(
    latencies: list[float], fraction: float
) -> None:
    true = sorted(latencies)[math.ceil(fraction * len(latencies)) - 1]
    assert true <= tally(LATENCY_BOUNDS, latencies).quantile(fraction) <= true * 1.143


@given(st.lists(st.floats(0.0, 2000.0), max_size=50))
def test_few_of_the_buckets_of_latencies_are_exported_and_count_all_below(
    latencies: list[float],
) -> None:
    now = dataclasses.replace(SNAPSHOT, latency=tally(LATENCY_BOUNDS, latencies))
    name = "mcinfer_request_latency_seconds_bucket"
    samples = [s for family in families((), [((), now)]) for s in family.samples if s.name == name]
    assert len(samples) == 22
    for sample in samples:
        assert sample.value == sum(each <= float(sample.labels["le"]) for each in latencies)


# The collector. These masters were never started: they have no process.


def master(workers: int = 1) -> Master:
    return Master("model.json", workers, engine="fake", verify="never")


def labels_of(collector: MasterCollector, name: str) -> list[Mapping[str, str]]:
    """The labels of all samples of this name."""
    return [s.labels for family in collector.collect() for s in family.samples if s.name == name]


def test_exported_text_follows_the_strict_format() -> None:
    first, second = master(2), master(2)
    registry = CollectorRegistry(auto_describe=True)
    collector = MasterCollector(first, {"model": "unet", "stage": 'a"b\\c\nd'})
    collector.add(second, {"stage": "b", "model": "unet"})
    registry.register(collector)
    text = exposition.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    read = {f.name: f for f in parser.text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert {*read} == {family.name for family in families((), ())}
    workers = read["mcinfer_worker_up"].samples
    assert [s.labels for s in workers] == [
        {"model": "unet", "stage": stage, "worker": str(index), "device": f"cpu:{index}"}
        for stage in ('a"b\\c\nd', "b")
        for index in range(2)
    ]
    assert b"mcinfer_requests_total" in generate_latest(registry)


def test_collector_keeps_no_master_alive() -> None:
    masters = [master(), master()]
    collector = MasterCollector(masters[0], {"model": "a"})
    collector.add(masters[1], {"model": "b"})
    assert labels_of(collector, "mcinfer_workers") == [{"model": "a"}, {"model": "b"}]
    del masters[0]
    gc.collect()
    assert labels_of(collector, "mcinfer_workers") == [{"model": "b"}]
    del masters[0]
    gc.collect()
    assert [*collector.collect()] == []


def test_closed_master_is_exported_until_another_takes_its_labels() -> None:
    first, second = master(1), master(2)
    collector = MasterCollector(first, {"model": "a"})
    with pytest.raises(InvalidInputError, match=r"\{'model': 'a'\} for two masters"):
        collector.add(second, {"model": "a"})
    first.close()
    samples = [s for family in collector.collect() for s in family.samples]
    assert [s.value for s in samples if s.labels.get("state") == "closed"] == [1]
    collector.add(second, {"model": "a"})
    assert len(labels_of(collector, "mcinfer_worker_up")) == 2


@pytest.mark.parametrize(
    "labels",
    [{"a-b": "x"}, {"": "x"}, {"1a": "x"}, {"__a": "x"}, {"le": "x"}, {"device": "x"}, {"a": 1}],
)
def test_invalid_label_is_refused(labels: dict[str, str]) -> None:
    ((name, value),) = labels.items()
    with pytest.raises(InvalidInputError, match=re.escape(f"labels: got {name!r}: {value!r}")):
        MasterCollector(master(), labels)
