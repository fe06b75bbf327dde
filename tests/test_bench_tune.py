"""Tests of mcinfer/bench/tune.py; searches with processes: tests/process/test_tune.py."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.figures import TO
from mcinfer.bench.report import QUANTILES, Load, Turn
from mcinfer.bench.texts import SESSIONS
from mcinfer.bench.tune import (
    Aim,
    Candidate,
    Found,
    Goal,
    Trial,
    arguments,
    as_json,
    default_candidate,
    grid,
    grids,
    needs,
    program,
    rounds,
    verdict,
)
from mcinfer.config import EngineOptions
from mcinfer.sharding import Split
from tests import bench_reports

DEFAULT = Candidate(workers=2, threads=None, call="submit")
WIDE = Candidate(workers=1, threads=4, call="submit")
JOINED = Candidate(workers=4, threads=1, call="submit", max_batch_size=8, max_delay=0.001)
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
    *pools: tuple[Candidate, Sequence[float]], p99: float = 0.02, rung: int = 1, group: int = 1
) -> list[Trial]:
    """The trials of one group, the default's first: each of so many requests a second in each turn."""
    made = [
        Trial(rung=rung, group=group, candidate=pool, turns=[turn(rate, p99=p99) for rate in rates])
        for pool, rates in pools
    ]
    for trial in made:
        trial.beside = made[0].turns
    return made


def strained(*pools: tuple[Candidate, float, float]) -> list[Trial]:
    """A trial of one turn each: requests a second, and their 99th percentile."""
    return [trial for pool, rate, p99 in pools for trial in trials((pool, [rate]), p99=p99)]


def found(made: Sequence[Trial], *, of: Aim | None = None, **changes: Any) -> Found:
    """A search that has finished all its rounds."""
    given: dict[str, Any] = {
        "aim": of or aim(),
        "cores": 4,
        "default": DEFAULT,
        "arrays": {"x": ("float32", (1, 3))},
        "split": Split(inputs={"x": 0}, outputs={"y": 0}, known="declared", checked=True),
        "batch_axes": {},
        "output_axes": {},
        "trials": [*made],
        "finished_rungs": max((trial.rung for trial in made), default=0),
        "candidates": 9,
        "needed_seconds": 99.5,
        "ended": "one is left",
        "took_seconds": 12.0,
    }
    return Found(**{**given, **changes})


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
    first, *others = grid(wanted, cores=cores, pieces=pieces, joins=joins, run_seconds=0.002)
    assert first == default_candidate(wanted, cores)
    assert len({first, *others}) == 1 + len(others)
    sessions = [candidate for candidate in others if candidate.call in SESSIONS]
    assert others[: len(sessions)] == sessions  # whatever there is time for, they are measured
    assert {candidate.way for candidate in sessions} == {"session", "threads-1", "inline"}
    assert {candidate.threads for candidate in sessions} == {1, cores}
    others = others[len(sessions) :]
    full = [candidate.threads is None for candidate in others]
    assert full == sorted(full, reverse=True)
    for candidate in others:
        assert candidate.workers <= cores
        assert candidate.threads in (None, 1)
        rows = batch if joins and candidate.call == "predict" else 1
        assert candidate.workers <= clients * rows
        assert candidate.max_batch_size == 1 or batch < candidate.max_batch_size <= batch * clients
        assert joins or candidate.max_batch_size == 1
        assert candidate.max_delay == 0 or candidate.max_batch_size > 1
        assert candidate.call == "submit" or goal == "latency" or batch > 1


def test_rounds_halve_the_pools_and_double_their_turns() -> None:
    # The default is in each group, with three others.
    assert rounds(12) == [(12 + 4, 1), (6 + 2, 2), (3 + 1, 4), (2 + 1, 8)]
    assert rounds(1) == [(2, 1)]
    assert rounds(0) == [(1, 1)]
    assert needs(2, overhead=1.0, turn=0.5) == 3 * (1.0 + 3 * 0.5)


def test_pools_of_the_worse_half_or_behind_in_every_repeat_are_dropped() -> None:
    pools = [replace(WIDE, threads=n) for n in range(1, 6)]
    rates = [(100, 101), (99, 103), (98, 99), (50, 60), (97, 99)]
    made = trials((DEFAULT, [80, 80]), *zip(pools, rates, strict=True))
    assert found(made).better_half(pools) == [pools[1], pools[0], pools[2]]
    best = trials((DEFAULT, [200, 200]), *zip(pools, rates, strict=True))
    assert found(best).better_half(pools) == []
    made[1].error = "broken"
    assert pools[0] not in found(made).better_half(pools)
    made = strained((DEFAULT, 50, 0.04), (WIDE, 200, 0.09), (JOINED, 300, 0.2))
    assert found(made, of=aim(bound=0.05)).ranked() == [DEFAULT, WIDE, JOINED]


def test_candidates_of_different_groups_are_compared_by_the_default_beside_each() -> None:
    # The machine is half as fast in the second group, and the pool there is the better one.
    made = [
        *trials((DEFAULT, [100, 100]), (WIDE, [110, 110])),
        *trials((DEFAULT, [50, 40]), (JOINED, [75, 60]), group=2),
    ]
    result = found(made)
    assert result.best == JOINED
    given = result.costs()
    assert given[DEFAULT] == [1.0] * 4
    assert given[WIDE] == pytest.approx([1 / 1.1] * 2)
    assert result.over_default(JOINED).values == pytest.approx((1.5, 1.5))
    (table,) = grids(result)
    assert [row[0] for row in table.rows] == ["submit", "submit", "submit, default"]


@pytest.mark.parametrize(("worst", "as_good"), [(100, True), (101, False)])
def test_default_is_recommended_unless_each_repeat_is_better(worst: float, as_good: bool) -> None:
    result = found(trials((DEFAULT, [100, 100, 100]), (WIDE, [120, 130, worst])))
    assert result.recommended == (DEFAULT if as_good else WIDE)
    assert verdict(result).startswith("Use the default" if as_good else "Use 1 worker")


def test_interrupted_search_uses_the_last_finished_round() -> None:
    made = [
        *trials((DEFAULT, [100] * 3), (WIDE, [130] * 3)),
        *trials((DEFAULT, [100]), (WIDE, [80]), rung=2),
        Trial(rung=3, candidate=JOINED),  # it is still starting
    ]
    result = found(made, finished_rungs=1, ended="")
    assert result.recommended == WIDE
    titles = [table.title.partition(" (")[0] for table in grids(result)]
    assert titles == ["round 1: 2 ways", "round 2, interrupted: 2 ways"]
    # Without a finished round: the pools that had all their turns.
    second = trials((DEFAULT, [100]), (JOINED, [900]), group=2)
    made = [*trials((DEFAULT, [100] * 3), (WIDE, [130] * 3)), *second]
    assert found(made, finished_rungs=0, ended="").recommended == WIDE
    assert found(second, finished_rungs=0, ended="").best is None


def test_program_has_the_axes() -> None:
    axes: dict[str, Any] = {"batch_axes": {"x": 0, 'a "b"': None}, "output_axes": {"y": 1}}
    text = program("m.onnx", JOINED, found([], **axes)).replace("mcinfer.EngineOptions", "dict")
    text = text.partition("mcinfer.Master(")[2].partition(") as")[0]
    given = eval(f"dict(model={text})")  # noqa: S307 our own text
    assert given == {"model": "m.onnx", **arguments(JOINED, found([], **axes))}
    EngineOptions(**given["options"])


def test_json_has_all_measurements() -> None:
    never = Trial(rung=1, candidate=WIDE, turns=[turn(10, late=True)])
    result = found([*trials((DEFAULT, [100])), never], of=RATE)
    content = json.loads(as_json("m.onnx", result, {"cores": 2}))
    assert (content["schema"], content["version"]) == ("mcinfer.tune", 1)
    assert content["aim"]["load"] == {"batch": 1, "clients": 4, "rate": 100.0}
    recommended = content["recommended"]
    assert recommended["arguments"] == arguments(DEFAULT, result)
    assert recommended["arguments"]["max_batch_size"] == 1
    assert recommended["over_default"] == {"middle": 1.0, "low": 1.0, "high": 1.0}
    assert recommended["program"] == program("m.onnx", DEFAULT, result)
    assert [t["is_default"] for t in content["trials"]] == [True, False]
    assert content["trials"][1]["turns"][0]["unfinished"] == 10
    assert content["finished"]
    content = json.loads(as_json("m.onnx", found([], ended=""), {}))
    assert (content["finished"], content["recommended"]) == (False, None)


def test_pools_with_all_cores_are_tried_with_each_engine() -> None:
    engines = ("onnxruntime", "openvino", "openvino:bf16")
    tried = grid(aim(), cores=4, pieces=1, joins=False, run_seconds=0.01, engines=engines)
    pools = [one for one in tried if one.call not in SESSIONS]
    by_engine = [{one.workers for one in pools if one.engine == e} for e in engines]
    assert by_engine == [{1, 2, 4}] * 3
    assert all(one.threads is None for one in pools if one.engine != "onnxruntime")
    assert tried[0].engine == "onnxruntime"
    assert len({*tried}) == len(tried)


def test_engine_and_its_difference_are_in_the_table_the_verdict_and_the_program() -> None:
    quick = replace(DEFAULT, engine="openvino:bf16")
    made = trials((DEFAULT, [100, 100]), (quick, [200, 200]))
    made[1].difference = 0.0123
    search = found(made, engines=("onnxruntime", "openvino:bf16"))
    (table,) = grids(search)
    assert [row[1:3] for row in table.rows] == [("openvino:bf16", "1.2e-2"), ("onnxruntime", TO)]
    assert "Use 2 workers, openvino:bf16, submit" in verdict(search)
    assert "difference 1.2e-2" in verdict(search)
    text = " ".join(program("model.onnx", quick, search).split())
    assert 'engine="openvino"' in text
    assert "EngineOptions(precision=" in text
    alone = found(made[:1], engines=("onnxruntime",))
    assert "engine" not in grids(alone)[0].header
    content = json.loads(as_json("model.onnx", search, {}))
    assert [trial["difference"] for trial in content["trials"]] == [None, 0.0123]
