"""Tests of mcinfer/serve/figures.py: sums over processes of which some have ended."""

from dataclasses import fields, replace

from mcinfer.errors import REFUSALS
from mcinfer.serve.figures import ModelFigures, Snapshot, ended, summed
from mcinfer.statistics import Health, Histogram, Statistics, WorkerStatistics

WORKER = WorkerStatistics(
    index=0,
    device="inline",
    pid=7,
    state="ready",
    restarts=0,
    runs=3,
    completed=5,
    failed=1,
    busy_seconds=0.25,
    providers=(),
    last_error="",
)

ONE = Statistics(
    accepted=8,
    succeeded=5,
    failed=1,
    cancelled=1,
    in_flight=1,
    in_flight_bytes=64,
    queued=1,
    queued_shards=1,
    latency=Histogram(bounds=(0.1, 1.0), counts=(4, 1, 0), total=0.5),
    batch_sizes=Histogram(bounds=(1.0,), counts=(2, 1), total=5.0),
    memory_bytes=4096,
    memory_used_bytes=128,
    weights_version=0,
    health=Health(state="ready", reasons=(), serving=1, workers=1),
    workers=(WORKER,),
    refused={**dict.fromkeys(REFUSALS, 0), "queue_full": 2, "invalid": 1},
)


def snapshot(statistics: Statistics, last: float = 1.0) -> Snapshot:
    return Snapshot((ModelFigures("m", "1", last, statistics),), (("m", 200, 5), ("m", 500, 1)))


def test_processes_side_by_side_are_added() -> None:
    other = replace(ONE, workers=(replace(WORKER, index=1, pid=8),))
    both = summed([snapshot(ONE), snapshot(other, last=2.0)])
    assert both.answers == (("m", 200, 10), ("m", 500, 2))
    (model,) = both.models
    assert model.last == 2.0
    now = model.statistics
    for field in fields(Statistics):
        if isinstance(value := getattr(ONE, field.name), int):
            assert getattr(now, field.name) == 2 * value, field.name
    assert now.latency == Histogram(bounds=(0.1, 1.0), counts=(8, 2, 0), total=1.0)
    assert now.refused == {reason: 2 * number for reason, number in ONE.refused.items()}
    assert (now.health.state, now.health.serving, now.health.workers) == ("ready", 2, 2)
    assert [worker.pid for worker in now.workers] == [7, 8]
    assert now.accepted == now.succeeded + now.failed + now.cancelled + now.in_flight


def test_what_takes_the_place_of_a_process_goes_on_counting() -> None:
    left = ended(snapshot(ONE))
    (model,) = left.models
    assert (model.statistics.in_flight, model.statistics.memory_bytes) == (0, 0)
    assert model.statistics.accepted == 7  # the one in flight has gone with it
    (model,) = summed([left, snapshot(replace(ONE, workers=(replace(WORKER, pid=9),)))]).models
    assert model.statistics.refused["queue_full"] == 4
    (worker,) = model.statistics.workers
    assert (worker.pid, worker.state, worker.restarts, worker.runs) == (9, "ready", 1, 6)
    assert (model.statistics.succeeded, model.statistics.health.workers) == (10, 1)


def test_sum_with_one_that_loads_is_degraded() -> None:
    starting = Health(state="starting", reasons=("it loads",), serving=0, workers=1)
    (model,) = summed([snapshot(ONE), snapshot(replace(ONE, health=starting))]).models
    assert str(model.statistics.health) == "degraded: 1 of 2 workers serve; it loads"
