"""Tests of mcinfer/bench/tune.py; searches with processes: tests/process/test_tune.py."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.figures import TO
from mcinfer.bench.report import OTHERS, OTHERS_BEFORE, QUANTILES, Load, Turn
from mcinfer.bench.texts import BUSY_CORES
from mcinfer.bench.tune import (
    Aim,
    Candidate,
    Found,
    Goal,
    Trial,
    arguments,
    as_json,
    best_of,
    grids,
    pools,
    program,
    sessions,
    verdict,
)
from mcinfer.config import automatic_workers
from mcinfer.sharding import Split
from tests import bench_reports

PLAIN = Candidate(workers=1, threads=4, call="session")
INLINE = replace(PLAIN, call="inline")
DEFAULT = Candidate(workers=2, threads=None, call="submit")
WIDE = Candidate(workers=1, threads=None, call="submit")
JOINED = Candidate(workers=4, threads=None, call="submit", max_batch_size=8)
RATE = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))


def aim(
    goal: Goal = "throughput", *, batch: int = 1, clients: int = 8, bound: float | None = None
) -> Aim:
    return Aim(goal=goal, load=Load(batch=batch, clients=clients), max_latency=bound)


def turn(throughput: float, p99: float = 0.02, *, late: bool = False) -> Turn:
    """One second of so many requests; if late, as many more were not begun."""
    unfinished = round(throughput) if late else 0
    made = bench_reports.turn(throughput, seconds=1.0, unfinished=unfinished, kept_up=not late)
    return replace(made, latencies=tuple(0.01 if q <= 0.5 else p99 for q in QUANTILES))


def trials(
    *ways: tuple[Candidate, Sequence[float]], p99: float = 0.02, group: int = 1
) -> list[Trial]:
    """The trials of one group, the best before it first: of so many requests a second in each turn."""
    return [
        Trial(group=group, candidate=way, turns=[turn(rate, p99=p99) for rate in rates])
        for way, rates in ways
    ]


def strained(*ways: tuple[Candidate, float, float]) -> list[Trial]:
    """A trial of one turn each: requests a second, and their 99th percentile."""
    return [trial for way, rate, p99 in ways for trial in trials((way, [rate]), p99=p99)]


def found(*groups: Sequence[Trial], of: Aim | None = None, **changes: Any) -> Found:
    """A search on a quiet machine that has measured these groups to their end."""
    given: dict[str, Any] = {
        "aim": of or aim(),
        "cores": 4,
        "arrays": {"x": ("float32", (1, 3))},
        "split": Split(inputs={"x": 0}, outputs={"y": 0}, known="declared", checked=True),
        "batch_axes": {},
        "output_axes": {},
        "machine": {OTHERS: 0.01, OTHERS_BEFORE: 0.0},
        "finished": True,
        "needed_seconds": 99.5,
        "took_seconds": 12.0,
    }
    made = Found(**{**given, **changes})
    for group in groups:
        made.trials += group
        made.settle(group)
    return made


@given(
    cores=st.integers(1, 130),
    goal=st.sampled_from(["throughput", "latency"]),
    batch=st.integers(1, 40),
    clients=st.integers(1, 64),
    joins=st.booleans(),
)
def test_candidates_fit_the_cores_and_have_no_idle_worker(
    cores: int, goal: Goal, batch: int, clients: int, joins: bool
) -> None:
    wanted = aim(goal, batch=batch, clients=clients)
    pieces = batch if joins else 1
    plain = sessions(cores)
    assert {candidate.way for candidate in plain} == {"session", "threads-1", "inline"}
    assert {candidate.threads for candidate in plain} == {1, cores}
    tried = pools(wanted, cores=cores, pieces=pieces, joins=joins)
    assert tried
    assert len({*tried}) == len(tried)
    assert tried[0].workers == automatic_workers(cores) or clients * pieces < automatic_workers(
        cores
    )
    for candidate in tried:
        assert candidate.workers <= cores
        assert candidate.threads is None
        rows = batch if joins and candidate.call == "predict" else 1
        assert candidate.workers <= clients * rows
        assert candidate.max_batch_size == 1 or batch < candidate.max_batch_size <= batch * clients
        assert joins or candidate.max_batch_size == 1
        assert candidate.call == "submit" or goal == "latency" or batch > 1


def test_best_is_kept_unless_another_is_better_in_every_repeat() -> None:
    first = trials((PLAIN, [100, 100, 100]), (INLINE, [103, 104, 99]))
    assert best_of(first, aim()) is first[0]
    better = trials(
        (PLAIN, [100, 100]), (INLINE, [120, 110]), (WIDE, [130, 105]), (DEFAULT, [9, 9])
    )
    assert best_of(better, aim()).candidate == WIDE  # in the median, of two that are better
    little = trials((PLAIN, [100, 100]), (INLINE, [101, 101]))
    assert best_of(little, aim()) is little[0]
    better[0].error = "broken"
    assert best_of(better, aim()).candidate == WIDE


def test_way_that_keeps_the_bound_is_better_than_one_that_does_not() -> None:
    group = strained((JOINED, 300, 0.2), (WIDE, 200, 0.04), (PLAIN, 100, 0.03))
    assert best_of(group, aim(bound=0.05)).candidate == WIDE
    none = strained((JOINED, 300, 0.2), (WIDE, 200, 0.09))
    said = verdict(found(none, of=aim(bound=0.05)))
    assert said.startswith("No verdict. None of the 2 ways that were measured answers 99 % of ")
    assert "1 worker, submit came nearest with 90.0 ms" in said
    late = trials((PLAIN, []), (WIDE, []))
    for trial, rate in zip(late, (40, 90), strict=True):
        trial.turns = [turn(rate, late=True)]
    said = verdict(found(late, of=RATE))  # how near they came was not compared
    assert said == "No verdict. None of the 2 ways that were measured keeps up with batch 1, 100/s."


def test_ways_are_compared_within_their_group() -> None:
    # The machine is half as fast in the second group, and the pool there is the better one.
    made = found(
        trials((PLAIN, [100, 100]), (WIDE, [110, 110])),
        trials((WIDE, [50, 40]), (JOINED, [75, 60]), group=2),
    )
    assert made.best is not None
    assert (made.best.candidate, made.before) == (JOINED, WIDE)
    assert made.over.values == pytest.approx((1.5, 1.5))
    assert verdict(made).startswith("Use 4 workers, submit, 8 rows: ")
    assert "; 1.50 \N{MULTIPLICATION SIGN} 1 worker, submit. No other of the 3 ways" in verdict(
        made
    )
    first, second = grids(made)
    assert [row[0] for row in first.rows] == ["session", "submit"]
    assert [row[1] for row in second.rows] == ["1", "4"]


@given(left=st.integers(0, 30), others=st.floats(0.0, 4.0), finished=st.booleans())
def test_verdict_is_of_what_was_measured_and_of_nothing_where_it_was_disturbed(
    left: int, others: float, finished: bool
) -> None:
    group = trials((PLAIN, [100, 100]), (INLINE, [150, 150]))
    made = found(group, left_out=left, machine={OTHERS: others}, finished=finished)
    said, content = verdict(made), json.loads(as_json("m.onnx", made))
    assert content["verdict"] == said
    assert (others > BUSY_CORES or not finished) == bool(made.disturbed)
    assert (
        bool(made.disturbed) == said.startswith("No verdict. ") == (content["recommended"] is None)
    )
    if made.disturbed:
        assert "Use " not in said
        assert content["disturbed"] == [*made.disturbed]
        return
    assert said.startswith("Use an inline session, 4 threads a run: 150 rows/s")
    assert "No other of the 2 ways that were measured is clearly better." in said
    missing = f" Not measured, for lack of time: {left} of {2 + left} ways; --budget 100 is enough"
    assert (missing in said) == bool(left)
    assert ("Not measured" in said) == bool(left)


def test_program_has_the_axes() -> None:
    axes: dict[str, Any] = {"batch_axes": {"x": 0, 'a "b"': None}, "output_axes": {"y": 1}}
    made = found(trials((JOINED, [100, 100])), **axes)
    assert made.best is not None
    text = program("m.onnx", made.best, made).replace("mcinfer.EngineOptions", "dict")
    text = text.partition("mcinfer.Master(")[2].partition(") as")[0]
    given = eval(f"dict(model={text})")  # noqa: S307 our own text
    assert given == {"model": "m.onnx", **arguments(JOINED, made)}


def test_json_has_all_measurements() -> None:
    late = Trial(group=1, candidate=WIDE, turns=[turn(10, late=True)])
    result = found([*trials((DEFAULT, [100])), late], of=RATE)
    content = json.loads(as_json("m.onnx", result))
    assert (content["schema"], content["version"]) == ("mcinfer.tune", 2)
    assert content["aim"]["load"] == {"batch": 1, "clients": 4, "rate": 100.0, "scenario": ""}
    assert result.best is not None
    recommended = content["recommended"]
    assert recommended["arguments"] == arguments(DEFAULT, result)
    assert recommended["program"] == program("m.onnx", result.best, result)
    assert content["trials"][1]["turns"][0]["unfinished"] == 10
    assert content["finished"]
    content = json.loads(as_json("m.onnx", found(finished=False)))
    assert (content["finished"], content["recommended"]) == (False, None)


def test_pools_with_all_cores_are_tried_with_each_engine() -> None:
    engines = ("onnxruntime", "openvino", "openvino:bf16")
    tried = pools(aim(), cores=4, pieces=1, joins=False, engines=engines)
    by_engine = [{one.workers for one in tried if one.engine == e} for e in engines]
    assert by_engine == [{1, 2, 4}] * 3
    assert tried[0].engine == "onnxruntime"
    assert len({*tried}) == len(tried)


def test_engine_and_its_difference_are_in_the_table_the_verdict_and_the_program() -> None:
    quick = replace(DEFAULT, engine="openvino:bf16")
    made = trials((DEFAULT, [100, 100]), (quick, [200, 200]))
    made[1].difference = 0.0123
    search = found(made, engines=("onnxruntime", "openvino:bf16"))
    (table,) = grids(search)
    assert [row[1:3] for row in table.rows] == [("onnxruntime", TO), ("openvino:bf16", "1.2e-2")]
    assert "Use 2 workers, openvino:bf16, submit" in verdict(search)
    assert "difference 1.2e-2" in verdict(search)
    text = " ".join(program("model.onnx", made[1], search).split())
    assert 'engine="openvino"' in text
    assert "EngineOptions(precision=" in text
    alone = found(made[:1], engines=("onnxruntime",))
    assert "engine" not in grids(alone)[0].header
    content = json.loads(as_json("model.onnx", search))
    assert [trial["difference"] for trial in content["trials"]] == [None, 0.0123]
