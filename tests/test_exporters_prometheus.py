"""What Prometheus is told is what the statistics say, under the names that the documentation gives."""

import dataclasses
import gc
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition, parser

from mcinfer import Master
from mcinfer.errors import InvalidInputError
from mcinfer.exporters.prometheus import MasterCollector, families
from mcinfer.protocol import WorkerState
from mcinfer.scheduler.scheduler import Tally
from mcinfer.statistics import (
    ROW_BOUNDS,
    Health,
    HealthState,
    Histogram,
    Statistics,
    WorkerStatistics,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "observability.md"
DERIVED = {"accepted"}
"""The sum of others that are told."""


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
    health=Health(state="degraded", reasons=("one is gone",), serving=21, workers=22),
    workers=(worker(0, "busy"), worker(1, "gone")),
)
"""No two numbers of it are alike."""

Key = tuple[str, frozenset[tuple[str, str]]]


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def told(statistics: Statistics) -> dict[Key, float]:
    """All samples of one master without labels of its own, by name and labels."""
    samples = [s for family in families((), [((), statistics)]) for s in family.samples]
    found = {key(s.name, **s.labels): float(s.value) for s in samples}
    assert len(found) == len(samples)
    return found


# The values.


def test_every_number_of_the_statistics_is_told() -> None:
    numbers = {*told(SNAPSHOT).values()}
    for snapshot in (SNAPSHOT, *SNAPSHOT.workers):
        for name, value in dataclasses.asdict(snapshot).items():  # type: ignore[call-overload]
            if isinstance(value, int | float) and name not in {*DERIVED, "index"}:
                assert value in numbers, name
    assert {SNAPSHOT.health.serving, SNAPSHOT.health.workers} <= numbers


def test_worker_is_told_by_its_index_and_device() -> None:
    samples = told(SNAPSHOT)
    labels = {"worker": "1", "device": "cpu:1"}
    assert samples[key("mcinfer_worker_restarts_total", **labels)] == 2000
    assert samples[key("mcinfer_worker_shards_total", **labels, outcome="failed")] == 2003
    assert samples[key("mcinfer_worker_busy_seconds_total", **labels)] == 2000.25


@pytest.mark.parametrize("state", WorkerState)
def test_worker_is_up_where_it_can_answer_and_in_one_state(state: WorkerState) -> None:
    samples = told(dataclasses.replace(SNAPSHOT, workers=(worker(0, state),)))
    labels = {"worker": "0", "device": "cpu:0"}
    assert samples[key("mcinfer_worker_up", **labels)] == (state in {"ready", "busy"})
    for other in WorkerState:
        one = samples[key("mcinfer_worker_state", **labels, state=other)]
        assert one == (other is state)


@pytest.mark.parametrize("state", get_args(HealthState))
def test_health_is_one_state_of_all(state: HealthState) -> None:
    health = Health(state=state, reasons=(), serving=0, workers=2)
    samples = told(dataclasses.replace(SNAPSHOT, health=health))
    for other in get_args(HealthState):
        assert samples[key("mcinfer_health", state=other)] == (other == state)


@given(st.lists(st.integers(0, 10_000)))
def test_buckets_are_true_of_any_values(values: list[int]) -> None:
    samples = told(dataclasses.replace(SNAPSHOT, batch_sizes=tally(ROW_BOUNDS, values)))
    for bound in ROW_BOUNDS:
        counted = samples[key("mcinfer_run_batch_rows_bucket", le=str(bound))]
        assert counted == sum(value <= bound for value in values)
    assert samples[key("mcinfer_run_batch_rows_bucket", le="+Inf")] == len(values)
    assert samples[key("mcinfer_run_batch_rows_count")] == len(values)
    assert samples[key("mcinfer_run_batch_rows_sum")] == sum(values)


# The names.


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


# The collector. These masters were never started: they have no process.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model.json"


def told_by(collector: MasterCollector, name: str) -> list[Mapping[str, str]]:
    """The labels of all samples of this name."""
    return [s.labels for family in collector.collect() for s in family.samples if s.name == name]


def test_what_is_scraped_is_what_the_strict_format_allows(model: Path) -> None:
    first, second = (Master(model, 2, engine="fake", verify="never") for _ in range(2))
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


def test_second_collector_is_refused_by_the_registry(model: Path) -> None:
    master = Master(model, 1, engine="fake", verify="never")
    registry = CollectorRegistry(auto_describe=True)
    registry.register(MasterCollector(master))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(MasterCollector(master))


def test_master_that_is_garbage_is_told_no_more(model: Path) -> None:
    masters = [Master(model, 1, engine="fake", verify="never") for _ in range(2)]
    collector = MasterCollector(masters[0], {"model": "a"})
    collector.add(masters[1], {"model": "b"})
    assert told_by(collector, "mcinfer_workers") == [{"model": "a"}, {"model": "b"}]
    del masters[0]
    gc.collect()
    assert told_by(collector, "mcinfer_workers") == [{"model": "b"}]
    del masters[0]
    gc.collect()
    assert [*collector.collect()] == []


def test_closed_master_is_told_as_closed_until_another_takes_its_labels(model: Path) -> None:
    first, second = (Master(model, count, engine="fake", verify="never") for count in (1, 2))
    collector = MasterCollector(first, {"model": "a"})
    with pytest.raises(InvalidInputError, match=r"\{'model': 'a'\} for two masters"):
        collector.add(second, {"model": "a"})
    first.close()
    samples = [s for family in collector.collect() for s in family.samples]
    assert [s.value for s in samples if s.labels.get("state") == "closed"] == [1]
    collector.add(second, {"model": "a"})
    assert len(told_by(collector, "mcinfer_worker_up")) == 2


@pytest.mark.parametrize(
    "labels",
    [{"a-b": "x"}, {"": "x"}, {"1a": "x"}, {"__a": "x"}, {"le": "x"}, {"device": "x"}, {"a": 1}],
)
def test_label_that_cannot_be_is_refused(model: Path, labels: dict[str, str]) -> None:
    ((name, value),) = labels.items()
    with pytest.raises(InvalidInputError, match=re.escape(f"labels: got {name!r}: {value!r}")):
        MasterCollector(Master(model, 1, engine="fake", verify="never"), labels)


@pytest.mark.parametrize(
    ("module", "package"),
    [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")],
)
def test_missing_package_says_what_to_install(module: str, package: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from mcinfer import MissingDependencyError\n"
        "try:\n"
        f"    import mcinfer.exporters.{module}\n"
        "except MissingDependencyError as exc:\n"
        "    print(exc)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert f"pip install 'mcinfer[{module}]'" in run.stdout


@pytest.mark.parametrize(
    ("master", "labels", "named"),
    [("x", None, "master"), (None, "model", "labels"), (None, [("a", "1")], "labels")],
)
def test_what_is_no_master_or_no_labels_is_refused_by_name(
    tmp_path: Path, master: Any, labels: Any, named: str
) -> None:
    made = Master(tmp_path / "m", 1) if master is None else master
    with pytest.raises(InvalidInputError, match=f"^{named}: got"):
        MasterCollector(made, labels)
