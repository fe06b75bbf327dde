"""Tests of mcinfer/bench/tune.py and advice.py; searches with processes: tests/process/test_tune.py."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench import advice
from mcinfer.bench.inputs import InputOptions
from mcinfer.bench.report import QUANTILES, Load, Turn
from mcinfer.bench.tune import (
    Aim,
    Candidate,
    Found,
    Goal,
    Search,
    Trial,
    contenders_after,
    costs,
    default_candidate,
    grid,
    needs,
    pieces_of,
    ranked,
    rounds,
)
from mcinfer.config import EngineOptions
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import SaidAxes, Split, first_split
from mcinfer.specs import ModelSpec, TensorSpec

DEFAULT = Candidate(workers=2, threads=None, call="submit")
WIDE = Candidate(workers=1, threads=4, call="submit")
JOINED = Candidate(workers=4, threads=1, call="submit", max_batch_size=8, max_delay=0.001)
RATE = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))


def aim(
    goal: Goal = "throughput", *, batch: int = 1, clients: int = 8, bound: float | None = None
) -> Aim:
    return Aim(goal=goal, load=Load(batch=batch, clients=clients), max_latency=bound)


def tried(
    aim: Aim, *, cores: int = 8, joins: bool = True, run_seconds: float = 0.002
) -> list[Candidate]:
    pieces = aim.load.batch if joins else 1
    return grid(aim, cores=cores, pieces=pieces, joins=joins, run_seconds=run_seconds)


def turn(
    throughput: float,
    p50: float = 0.01,
    p99: float = 0.02,
    *,
    unfinished: int = 0,
    kept_up: bool = True,
) -> Turn:
    """One second of so many requests."""
    latencies = tuple(p50 if q <= 0.5 else p99 for q in QUANTILES)
    return Turn(
        requests=round(throughput),
        failed=0,
        unfinished=unfinished,
        seconds=1.0,
        latencies=latencies,
        mean_latency=p50,
        run_seconds=None,
        cpu_seconds=1.0,
        kept_up=kept_up and not unfinished,
    )


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


LATE = [turn(100, kept_up=False)]


def found(made: Sequence[Trial], *, of: Aim | None = None, **changes: Any) -> Found:
    """A search of which all rounds were finished."""
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
        "left_out": 0,
        "needed_seconds": 99.5,
        "ended": "one is left",
        "took_seconds": 12.0,
    }
    return Found(**{**given, **changes})


# The grid.


@given(
    cores=st.integers(1, 130),
    goal=st.sampled_from(["throughput", "latency"]),
    batch=st.integers(1, 40),
    clients=st.integers(1, 64),
    joins=st.booleans(),
)
def test_candidates_fit_the_cores_and_leave_no_worker_idle(
    cores: int, goal: Goal, batch: int, clients: int, joins: bool
) -> None:
    wanted = aim(goal, batch=batch, clients=clients)
    first, *others = tried(wanted, cores=cores, joins=joins)
    assert first == default_candidate(wanted, cores)
    assert len({first, *others}) == 1 + len(others)
    full = [candidate.threads == cores // candidate.workers for candidate in others]
    assert full == sorted(full, reverse=True)
    for candidate in others:
        assert candidate.threads is not None
        assert candidate.workers * candidate.threads <= cores
        rows = batch if joins and candidate.call == "predict" else 1
        assert candidate.workers <= clients * rows
        assert candidate.max_batch_size == 1 or batch < candidate.max_batch_size <= batch * clients
        assert joins or candidate.max_batch_size == 1
        assert candidate.max_delay == 0 or candidate.max_batch_size > 1
        assert candidate.call == "submit" or goal == "latency" or batch > 1


def test_second_transport_is_tried_where_runs_are_short_and_all_cores_are_used() -> None:
    others = [c for c in tried(aim(), run_seconds=0.0005) if c.transport == "socketpair"]
    assert {c.workers * (c.threads or 0) for c in others} == {8}
    assert replace(DEFAULT, threads=4, transport="socketpair") in others
    assert {c.transport for c in tried(aim(), run_seconds=0.002)} == {"zeromq"}


@pytest.mark.parametrize(("bound", "delays"), [(None, {0.0, 0.01}), (0.003, {0.0})])
def test_delays_are_about_a_quarter_of_a_run_and_below_the_bound(
    bound: float | None, delays: set[float]
) -> None:
    candidates = tried(aim(bound=bound), run_seconds=0.04)
    assert {c.max_delay for c in candidates if c.max_batch_size > 1} == delays


@pytest.mark.parametrize(("rows", "pieces"), [("batch", 6), (1, 6), (None, 1)])
def test_request_is_cut_in_as_many_pieces_as_mcinfer_cuts_it(
    rows: str | int | None, pieces: int
) -> None:
    x, y = (TensorSpec(name=n, dtype=np.dtype(np.float32), shape=(rows, 3)) for n in "xy")
    model = ModelSpec(inputs=(x,), outputs=(y,))
    assert pieces_of(model, [(6, 3)], first_split(model, SaidAxes())) == pieces


def test_throughput_at_a_rate_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--rate: got 5 with --goal throughput"):
        Aim(goal="throughput", load=Load(batch=1, clients=1, rate=5.0))


@pytest.mark.parametrize(("rate", "budget"), [(0.01, 10.0), (2.9, 10.0)])
def test_rate_at_which_too_little_comes_in_the_budget_is_refused(
    rate: float, budget: float
) -> None:
    inputs = InputOptions(files={}, archive=None, dims={})

    def search(rate: float, budget: float) -> None:
        wanted = replace(RATE, load=replace(RATE.load, rate=rate))
        Search(Path("m.onnx"), wanted, inputs, budget=budget, progress=lambda *_: None)

    with pytest.raises(InvalidInputError, match=f"--rate: got {rate:g} .*least 3.0") as caught:
        search(rate, budget)
    search(rate, float(str(caught.value).rpartition("--budget ")[2].split(":")[0]))
    search(3.02, budget)


# Rounds.


def test_rounds_halve_the_pools_and_double_their_turns() -> None:
    # The default is in each group, with three others.
    assert rounds(12) == [(12 + 4, 1), (6 + 2, 2), (3 + 1, 4), (2 + 1, 8)]
    assert rounds(1) == [(2, 1)]
    assert rounds(0) == [(1, 1)]
    assert needs(2, overhead=1.0, turn=0.5) == 3 * (1.0 + 3 * 0.5)


def test_worse_half_and_those_that_are_behind_in_every_repeat_are_dropped() -> None:
    pools = [replace(WIDE, threads=n) for n in range(1, 6)]
    rates = [(100, 101), (99, 103), (98, 99), (50, 60), (97, 99)]
    made = trials((DEFAULT, [80, 80]), *zip(pools, rates, strict=True))
    assert contenders_after(aim(), made, DEFAULT, pools) == [pools[1], pools[0], pools[2]]
    best = trials((DEFAULT, [200, 200]), *zip(pools, rates, strict=True))
    assert contenders_after(aim(), best, DEFAULT, pools) == []
    made[1].error = "broken"
    assert pools[0] not in contenders_after(aim(), made, DEFAULT, pools)


def test_those_that_break_the_bound_are_behind_all_that_keep_it() -> None:
    other = replace(WIDE, threads=2)
    made = strained((DEFAULT, 50, 0.04), (WIDE, 200, 0.09), (other, 300, 0.2))
    assert ranked(aim(bound=0.05), made, DEFAULT) == [DEFAULT, WIDE, other]


# The results.


def test_candidates_of_different_groups_are_compared_by_the_default_beside_each() -> None:
    # The machine is half as fast in the second group, and the pool there is the better one.
    made = [
        *trials((DEFAULT, [100, 100]), (WIDE, [110, 110])),
        *trials((DEFAULT, [50, 40]), (JOINED, [75, 60]), group=2),
    ]
    result = found(made)
    assert result.best == JOINED
    given = costs(aim(), made, DEFAULT)
    assert given[DEFAULT] == [1.0] * 4
    assert given[WIDE] == pytest.approx([1 / 1.1] * 2)
    assert result.over_default(JOINED).values == pytest.approx((1.5, 1.5))
    (table,) = advice.grids(result)
    assert [row[0] for row in table.rows] == ["submit", "submit", "submit, default"]


def test_candidates_are_compared_as_they_are_where_the_default_is_no_measure() -> None:
    late = Trial(rung=1, candidate=DEFAULT, turns=LATE)
    assert costs(RATE, [late, *trials((WIDE, [100]))], DEFAULT)[WIDE] == [0.01]
    broken = Trial(rung=1, candidate=DEFAULT, turns=[turn(100)], error="broken")
    result = found([broken, *trials((WIDE, [90, 90]))], of=RATE)
    assert costs(RATE, result.trials, DEFAULT) == {WIDE: [0.01, 0.01]}
    assert result.recommended == WIDE


@pytest.mark.parametrize(("worst", "as_good"), [(100, True), (101, False)])
def test_default_is_recommended_unless_each_repeat_is_better(worst: float, as_good: bool) -> None:
    result = found(trials((DEFAULT, [100, 100, 100]), (WIDE, [120, 130, worst])))
    assert result.recommended == (DEFAULT if as_good else WIDE)
    assert advice.verdict(result).startswith("Use the default" if as_good else "Use 1 worker")


def test_interrupted_search_rests_on_the_last_round_that_was_finished() -> None:
    made = [
        *trials((DEFAULT, [100] * 3), (WIDE, [130] * 3)),
        *trials((DEFAULT, [100]), (WIDE, [80]), rung=2),
        Trial(rung=3, candidate=JOINED),  # it is still starting
    ]
    result = found(made, finished_rungs=1, ended="")
    assert result.recommended == WIDE
    titles = [table.title.partition(" (")[0] for table in advice.grids(result)]
    assert titles == ["round 1: 2 pools", "round 2, interrupted: 2 pools"]
    content = json.loads(advice.as_json("m.onnx", result, {}))
    assert content["recommended"]["over_default"]["middle"] == pytest.approx(1.3)
    assert not content["finished"]


def test_interrupted_first_round_rests_on_pools_that_had_all_their_turns() -> None:
    second = trials((DEFAULT, [100]), (JOINED, [900]), group=2)
    made = [*trials((DEFAULT, [100] * 3), (WIDE, [130] * 3)), *second]
    assert found(made, finished_rungs=0, ended="").recommended == WIDE
    assert found(second, finished_rungs=0, ended="").best is None


# In words.


def test_verdict_names_a_default_that_breaks_the_bound_or_falls_behind() -> None:
    result = found(strained((DEFAULT, 200, 0.09), (WIDE, 100, 0.04)), of=aim(bound=0.05))
    assert result.recommended == WIDE
    assert "The default does not keep the bound" in advice.verdict(result)
    behind = Trial(rung=1, candidate=DEFAULT, turns=LATE)
    result = found([behind, *trials((WIDE, [100]))], of=RATE)
    assert "The default does not keep up with batch 1, 100/s" in advice.verdict(result)


def test_verdict_names_the_nearest_where_none_is_good_enough() -> None:
    result = found(strained((DEFAULT, 100, 0.03), (WIDE, 50, 0.02)), of=aim(bound=0.01))
    assert not result.fits
    assert advice.verdict(result) == (
        "no pool answers 99 % of the requests within 10.0 ms under batch 1, 8 clients; "
        "1 worker, 4 threads, submit came nearest with 20.0 ms"
    )
    result = found([Trial(rung=1, candidate=DEFAULT, turns=LATE)], of=RATE)
    assert not result.fits
    assert advice.verdict(result).startswith("no pool keeps up with batch 1, 100/s; 2 workers")
    assert advice.verdict(found([])) == "no pool could be measured"


@pytest.mark.parametrize(("requests", "said"), [(99, True), (100, False)])
def test_bound_that_rests_on_few_requests_is_said_to(requests: int, said: bool) -> None:
    result = found(trials((DEFAULT, [500, requests])), of=aim(bound=1.0))
    assert any(f"with {requests} requests" in text for text in advice.remarks(result)) == said


def test_remarks_say_what_was_left_out_what_failed_and_why_requests_run_whole() -> None:
    broken = Trial(rung=1, candidate=JOINED, error="no memory\nleft")
    mixing = Split(inputs={"x": 0}, outputs={"y": "mixed"}, known="learned", reason="mixed rows")
    assert advice.remarks(found([broken], left_out=3, split=mixing)) == [
        "The search ended after 12.0 s: one is left.",
        "3 of 9 pools were left out for lack of time: --budget 100 is enough for all.",
        "Requests are not split, nor joined: mixed rows.",
        "4 workers, 1 thread, submit, 8 rows within 1 ms: no memory left",
    ]
    assert "interrupted" in advice.remarks(found([], ended="", split=None))[0]


# A program, and JSON.


def test_program_has_the_axes_and_the_transport() -> None:
    axes: dict[str, Any] = {"batch_axes": {"x": 0, 'a "b"': None}, "output_axes": {"y": 1}}
    other = replace(JOINED, transport="socketpair")
    text = advice.program("m.onnx", other, found([], **axes))
    start = text.index("mcinfer.Master(") + len("mcinfer.Master(")
    text = text[start : text.index(") as")].replace("mcinfer.EngineOptions", "dict")
    given = eval(f"dict(model={text})")  # noqa: S307 our own text
    assert given == {"model": "m.onnx", **advice.arguments(other, found([], **axes))}
    assert given["transport"] == "socketpair"
    EngineOptions(**given["options"])


def test_json_has_all_that_was_measured() -> None:
    never = Trial(rung=1, candidate=WIDE, turns=[turn(10, unfinished=90)])
    result = found([*trials((DEFAULT, [100])), never], of=RATE)
    content = json.loads(advice.as_json("m.onnx", result, {"cores": 2}))
    assert (content["schema"], content["version"]) == ("mcinfer.tune", 1)
    assert content["aim"]["load"] == {"batch": 1, "clients": 4, "rate": 100.0}
    recommended = content["recommended"]
    assert recommended["arguments"] == {
        "devices": None,
        "options": {},
        "max_batch_size": 1,
        "max_delay": 0.0,
    }
    assert recommended["over_default"] == {"middle": 1.0, "low": 1.0, "high": 1.0}
    assert recommended["program"] == advice.program("m.onnx", DEFAULT, result)
    assert [t["is_default"] for t in content["trials"]] == [True, False]
    assert content["trials"][1]["turns"][0]["unfinished"] == 90
    assert content["finished"]
    content = json.loads(advice.as_json("m.onnx", found([], ended=""), {}))
    assert (content["finished"], content["recommended"]) == (False, None)
