"""Tests of mcinfer/bench/tuning without processes; real searches are in tests/process/test_tune.py."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.inputs import InputOptions
from mcinfer.bench.report import QUANTILES, Load, Turn
from mcinfer.bench.tuning import advice
from mcinfer.bench.tuning.candidates import (
    Aim,
    Candidate,
    Goal,
    Space,
    default_candidate,
    pieces_of,
)
from mcinfer.bench.tuning.found import Found, results
from mcinfer.bench.tuning.heats import Pools, Trial
from mcinfer.bench.tuning.search import Search
from mcinfer.bench.way import Setup
from mcinfer.config import EngineOptions
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import SaidAxes, Shape, Split, first_split
from mcinfer.specs import ModelSpec, TensorSpec

DEFAULT = Candidate(workers=2, threads=None, call="submit")
WIDE = Candidate(workers=1, threads=4, call="submit")
JOINED = Candidate(workers=4, threads=1, call="submit", max_batch_size=8, max_delay=0.001)


def aim(
    goal: Goal = "throughput", *, batch: int = 1, clients: int = 8, bound: float | None = None
) -> Aim:
    return Aim(goal=goal, load=Load(batch=batch, clients=clients), max_latency=bound)


def space(aim: Aim, *, cores: int = 8, joins: bool = True, run_seconds: float = 0.002) -> Space:
    pieces = aim.load.batch if joins else 1
    return Space(aim=aim, cores=cores, pieces=pieces, joins=joins, run_seconds=run_seconds)


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


def trial(
    candidate: Candidate,
    *throughputs: float,
    rung: int = 1,
    heat: int = 1,
    p99: float = 0.02,
    repeats: int = 0,
) -> Trial:
    return Trial(
        rung=rung,
        heat=heat,
        candidate=candidate,
        repeats=repeats or len(throughputs),
        turns=[turn(t, p99=p99) for t in throughputs],
    )


def found(trials: Sequence[Trial], *, of: Aim | None = None, **changes: Any) -> Found:
    """A search of which all rungs were finished."""
    given: dict[str, Any] = {
        "aim": of or aim(),
        "cores": 4,
        "default": DEFAULT,
        "arrays": {"x": ("float32", (1, 3))},
        "split": Split(inputs={"x": 0}, outputs={"y": 0}, known="declared", checked=True),
        "batch_axes": {},
        "output_axes": {},
        "trials": tuple(trials),
        "finished_rungs": max((trial.rung for trial in trials), default=0),
        "candidates": 9,
        "left_out": 0,
        "needed_seconds": 99.5,
        "ended": "one is left",
        "took_seconds": 12.0,
    }
    return Found(**{**given, **changes})


def lines(program: str) -> list[str]:
    compile(program, "program", "exec")
    return program.splitlines()


# What there is to choose from.


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
    first, *others = space(wanted, cores=cores, joins=joins).candidates()
    assert first == default_candidate(wanted, cores)
    assert len({first, *others}) == 1 + len(others)
    for candidate in others:
        assert candidate.threads is not None
        assert candidate.workers * candidate.threads <= cores
        rows = batch if joins and candidate.call == "predict" else 1
        assert candidate.workers <= clients * rows
        assert candidate.max_batch_size == 1 or batch < candidate.max_batch_size <= batch * clients
        assert joins or candidate.max_batch_size == 1
        assert candidate.max_delay == 0 or candidate.max_batch_size > 1
        assert candidate.call == "submit" or goal == "latency" or batch > 1


def test_pool_that_is_the_default_in_other_words_is_no_candidate() -> None:
    candidates = space(aim(), cores=8).candidates()
    assert candidates[0] == Candidate(workers=2, threads=None, call="submit")
    assert Candidate(workers=2, threads=4, call="submit") not in candidates
    assert Candidate(workers=2, threads=2, call="submit") in candidates


def test_one_row_of_one_client_is_for_one_worker() -> None:
    candidates = space(aim("latency", clients=1), cores=8).candidates()
    assert {(c.workers, c.call) for c in candidates[1:]} == {(1, "predict")}
    assert {c.threads for c in candidates[1:]} == {1, 2, 4, 8}


def test_all_cores_are_used_before_fewer_are() -> None:
    _, *others = space(aim(), cores=6).candidates()
    full = [c.threads == 6 // c.workers for c in others]
    assert any(full)
    assert full == sorted(full, reverse=True)


def test_first_of_many_candidates_are_of_all_kinds() -> None:
    _, *others = space(aim(clients=32), cores=16).candidates()
    first = others[:15]
    assert len(others) > 100
    assert {c.workers for c in first} == {1, 2, 4, 8, 16}
    assert len({c.max_batch_size for c in first}) >= 5
    assert len({c.max_delay for c in first}) == 3


@pytest.mark.parametrize(
    ("run_seconds", "bound", "delays"),
    [
        (0.0001, None, {0.0, 0.001, 0.005}),
        (0.004, None, {0.0, 0.001, 0.005}),
        (0.04, None, {0.0, 0.01, 0.05}),
        (9.0, None, {0.0, 0.02, 0.1}),
        (0.004, 0.003, {0.0, 0.001}),
    ],
)
def test_delays_are_of_the_order_of_a_run_and_below_the_bound(
    run_seconds: float, bound: float | None, delays: set[float]
) -> None:
    candidates = space(aim(bound=bound), run_seconds=run_seconds).candidates()
    assert {c.max_delay for c in candidates if c.max_batch_size > 1} == delays


def test_second_transport_is_tried_where_runs_are_short_and_all_cores_are_used() -> None:
    candidates = space(aim(clients=32), cores=8, run_seconds=0.0005).candidates()
    others = {c for c in candidates if c.transport == "socketpair"}
    default = Candidate(workers=2, threads=4, call="submit", transport="socketpair")
    assert default in others
    assert {replace(c, transport="zeromq") for c in others} == {
        c for c in candidates if c.workers * (c.threads or 0) == 8 and c not in others
    } | {replace(default, transport="zeromq")}
    long = space(aim(clients=32), cores=8, run_seconds=0.002).candidates()
    assert {c.transport for c in long} == {"zeromq"}


@pytest.mark.parametrize(
    ("shapes", "given", "pieces"),
    [
        ([("batch", 3)], [(6, 3)], 6),
        ([(1, 3)], [(6, 3)], 6),
        ([(2, 3)], [(2, 3)], 1),
        ([("batch", 3), ("other", 1)], [(6, 3), (6, 1)], 6),
        ([(None, 3)], [(6, 3)], 1),
        ([], [], 1),
    ],
    ids=str,
)
def test_request_is_cut_in_as_many_pieces_as_mcinfer_cuts_it(
    shapes: list[Shape], given: list[Shape], pieces: int
) -> None:
    dtype = np.dtype(np.float32)
    specs = [TensorSpec(name=f"x{i}", dtype=dtype, shape=s) for i, s in enumerate(shapes)]
    output = TensorSpec(name="y", dtype=dtype, shape=shapes[0] if shapes else ())
    model = ModelSpec(inputs=tuple(specs), outputs=(output,))
    split = first_split(model, SaidAxes())
    assert pieces_of(model, given, split) == pieces


# What is aimed at.


def test_throughput_at_a_rate_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--rate: got 5 with --goal throughput"):
        Aim(goal="throughput", load=Load(batch=1, clients=1, rate=5.0))


def test_result_is_what_the_goal_and_the_bound_are_about() -> None:
    result = aim(batch=2, bound=0.04).result(turn(100))
    assert result.cost == pytest.approx(1 / 200)
    assert result.strain == pytest.approx(0.5)
    result = aim("latency").result(turn(100, p50=0.003))
    assert (result.cost, result.strain) == (0.003, 0.0)


def test_pool_that_does_not_keep_up_keeps_no_bound() -> None:
    result = aim("latency").result(turn(100, unfinished=300))
    assert result.cost == result.strain == math.inf


# What was found.


def test_ratio_is_taken_within_each_repeat_of_the_same_round() -> None:
    trials = [
        trial(DEFAULT, 10, 10, rung=1),
        trial(WIDE, 50, 50, rung=1),
        trial(WIDE, 30, 20, 50, rung=2),
        trial(DEFAULT, 20, 10, 20, rung=2),
    ]
    result = found(trials)
    assert result.best == WIDE
    last = result.last(WIDE)
    assert last is not None
    over = last.over_default(result.aim)
    assert (over.middle, over.low, over.high) == pytest.approx((2.0, 1.5, 2.5))


def test_candidates_of_different_heats_are_compared_by_the_default_beside_each() -> None:
    # The machine is half as fast in the second heat, and the pool there is the better one.
    trials = [
        trial(DEFAULT, 100, 100),
        trial(WIDE, 110, 110),
        trial(DEFAULT, 50, 40, heat=2),
        trial(JOINED, 75, 60, heat=2),
    ]
    result = found(trials)
    assert result.best == JOINED
    costs = {c: [r.cost for r in given] for c, given in results(aim(), trials, DEFAULT).items()}
    assert costs[DEFAULT] == [1.0] * 4
    assert costs[WIDE] == pytest.approx([1 / 1.1] * 2)
    assert costs[JOINED] == pytest.approx([1 / 1.5] * 2)
    assert "1.50 × the default (1.50 … 1.50)" in advice.verdict(result)  # noqa: RUF001
    (grid,) = advice.grids(result)
    assert [row[0] for row in grid.rows] == ["submit", "submit", "submit, default"]
    assert grid.title.startswith("round 1: 3 pools")


def test_candidates_are_compared_as_they_are_where_the_default_is_no_measure() -> None:
    wanted = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))
    late = Trial(rung=1, candidate=DEFAULT, turns=[turn(90, p50=0.4, kept_up=False)])
    given = results(wanted, [late, trial(WIDE, 100)], DEFAULT)
    assert [r.cost for r in given[WIDE]] == [0.01]
    broken = Trial(rung=1, candidate=DEFAULT, turns=[turn(100)], error="broken")
    given = results(wanted, [broken, trial(WIDE, 100)], DEFAULT)
    assert {c: [r.cost for r in g] for c, g in given.items()} == {WIDE: [0.01]}


def test_default_that_failed_is_not_as_good() -> None:
    broken = Trial(rung=2, candidate=DEFAULT, turns=[turn(300)], error="broken")
    before = [trial(DEFAULT, 100), trial(WIDE, 120)]
    result = found([*before, broken, trial(WIDE, 90, 90, rung=2)])
    assert result.recommended == WIDE


# What was found before it was interrupted.


def test_interrupted_search_rests_on_the_last_round_that_was_finished() -> None:
    trials = [
        trial(DEFAULT, 100, 100, 100),
        trial(WIDE, 130, 130, 130),
        trial(DEFAULT, 100, rung=2, repeats=3),
        trial(WIDE, 80, rung=2, repeats=3),
        Trial(rung=2, heat=2, candidate=JOINED),
    ]
    result = found(trials, finished_rungs=1, ended="")
    assert result.recommended == WIDE
    assert "130 rows/s" in advice.verdict(result)
    titles = [grid.title.partition(" (")[0] for grid in advice.grids(result)]
    assert titles == ["round 1: 2 pools", "round 2, interrupted: 2 pools"]
    content = json.loads(advice.as_json("m.onnx", result, {}))
    assert content["recommended"]["over_default"]["middle"] == pytest.approx(1.3)
    assert [t["heat"] for t in content["trials"]] == [1, 1, 1, 1, 2]


def test_interrupted_first_round_rests_on_pools_that_had_all_their_turns() -> None:
    trials = [
        trial(DEFAULT, 100, 100, 100),
        trial(WIDE, 130, 130, 130),
        trial(DEFAULT, 100, heat=2, repeats=3),
        trial(JOINED, 900, heat=2, repeats=3),
    ]
    result = found(trials, finished_rungs=0, ended="")
    assert result.recommended == WIDE
    assert found(trials[2:], finished_rungs=0, ended="").best is None


def test_pools_that_are_still_starting_are_no_round() -> None:
    trials = [
        trial(DEFAULT, 100, 100),
        trial(WIDE, 130, 130),
        *(Trial(rung=2, candidate=candidate) for candidate in (DEFAULT, WIDE)),
    ]
    result = found(trials, finished_rungs=1, ended="")
    assert result.fits
    assert len(advice.grids(result)) == 1


# What is said of it.


@pytest.mark.parametrize(("worst", "as_good"), [(99, True), (100, True), (101, False)])
def test_default_is_as_good_unless_each_repeat_is_better(worst: float, as_good: bool) -> None:
    result = found([trial(DEFAULT, 100, 100, 100), trial(WIDE, 120, 130, worst)])
    assert result.default_is_as_good == as_good
    assert result.recommended == (DEFAULT if as_good else WIDE)


def test_default_that_breaks_the_bound_is_not_as_good() -> None:
    trials = [trial(DEFAULT, 200, p99=0.09), trial(WIDE, 100, p99=0.04)]
    result = found(trials, of=aim(bound=0.05))
    assert result.recommended == WIDE
    assert "The default does not keep the bound" in advice.verdict(result)


def test_verdict_says_how_much_better_the_best_is() -> None:
    result = found([trial(DEFAULT, 100, 100, 100), trial(JOINED, 127, 131, 136)])
    assert advice.verdict(result) == (
        "Best: 4 workers, 1 thread, submit, 8 rows within 1 ms: 131 (127–136) rows/s, p99 20.0 ms, "  # noqa: RUF001
        "1.31 × the default (1.27 … 1.36)."  # noqa: RUF001
    )


def test_verdict_says_that_the_default_is_as_good() -> None:
    trials = [trial(DEFAULT, 100, 100), trial(WIDE, 99, 102)]
    assert advice.verdict(found(trials)).startswith("The default is as good as any: 100 rows")
    assert advice.verdict(found(trials[:1])) == (
        "The default is as good as any: 100 rows/s, p99 20.0 ms."
    )


def test_verdict_says_what_came_nearest_to_a_bound_that_none_keeps() -> None:
    result = found([trial(DEFAULT, 100, p99=0.03), trial(WIDE, 50)], of=aim(bound=0.01))
    assert not result.fits
    assert advice.verdict(result) == (
        "no pool answers 99 % of the requests within 10.0 ms under batch 1, 8 clients; "
        "1 worker, 4 threads, submit came nearest with 20.0 ms"
    )


def test_verdict_says_that_no_pool_keeps_up() -> None:
    slow = Trial(rung=1, candidate=DEFAULT, turns=[turn(10, unfinished=90)])
    wanted = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))
    assert "no pool keeps up with batch 1, 100/s" in advice.verdict(found([slow], of=wanted))


def test_pool_that_falls_behind_the_rate_keeps_no_bound() -> None:
    wanted = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0), max_latency=9.0)
    behind = Trial(rung=1, candidate=DEFAULT, turns=[turn(100, kept_up=False)])
    result = found([behind], of=wanted)
    assert not result.fits
    assert advice.verdict(result).startswith("no pool keeps up with batch 1, 100/s; 2 workers")
    result = found([behind, trial(WIDE, 100)], of=wanted)
    assert result.recommended == WIDE
    assert "The default does not keep up with batch 1, 100/s" in advice.verdict(result)


@pytest.mark.parametrize(("requests", "said"), [(99, True), (100, False)])
def test_p99_of_few_requests_is_told_as_such(requests: int, said: bool) -> None:
    result = found([trial(DEFAULT, 500, requests)], of=aim(bound=1.0))
    told = [text for text in advice.remarks(result) if "p99" in text]
    assert [text.partition(":")[0] for text in told] == (
        [f"p99 rests on {requests} requests in each turn"] if said else []
    )


@pytest.mark.parametrize(("enough", "repeats"), [(0.0, 5), (3.0, 3), (60.0, 3)])
def test_turns_are_long_enough_for_p99_before_there_are_more_of_them(
    enough: float, repeats: int, tmp_path: Path
) -> None:
    setup = Setup(
        model="m.onnx",
        cores=1,
        devices=(),
        threads=None,
        split=Split(inputs={}, outputs={}, known="unknown"),
        max_batch_size=1,
        max_delay=0.0,
    )
    pools = Pools(setup, Load(batch=1, clients=1), tmp_path)
    pools.least_turn, pools.enough_turn = 0.5, enough
    assert pools.share_out(10.0) == (repeats, 10.0 / repeats)


@pytest.mark.parametrize(("rate", "budget"), [(0.01, 10.0), (2.9, 10.0)])
def test_rate_at_which_too_little_comes_in_the_budget_is_refused(
    rate: float, budget: float
) -> None:
    wanted = Aim(goal="latency", load=Load(batch=1, clients=1, rate=rate))
    inputs = InputOptions(files={}, archive=None, dims={})
    with pytest.raises(InvalidInputError) as caught:
        Search(Path("m.onnx"), wanted, inputs, budget=budget, progress=lambda *_: None)
    text = str(caught.value)
    assert text.startswith(f"--rate: got {rate:g} with --budget 10, expected at least 3.0")
    enough = float(text.rpartition("--budget ")[2].split()[0])
    Search(Path("m.onnx"), wanted, inputs, budget=enough, progress=lambda *_: None)
    least = float(text.partition("at least ")[2].partition(":")[0])
    wanted = Aim(goal="latency", load=Load(batch=1, clients=1, rate=least))
    Search(Path("m.onnx"), wanted, inputs, budget=budget, progress=lambda *_: None)


def test_verdict_of_nothing_is_that_nothing_could_be_measured() -> None:
    assert advice.verdict(found([])) == "no pool could be measured"


def test_remarks_tell_what_was_left_out_and_what_failed() -> None:
    broken = Trial(rung=1, candidate=JOINED, error="no memory\nleft")
    told = advice.remarks(found([broken], left_out=3))
    assert told == [
        "The search ended after 12.0 s: one is left.",
        "3 of 9 pools were left out: there was no time for them. --budget 100 is enough for all.",
        "4 workers, 1 thread, submit, 8 rows within 1 ms: no memory left",
    ]
    assert "interrupted" in advice.remarks(found([], ended=""))[0]


def test_tables_have_a_row_for_each_pool_the_best_first() -> None:
    trials = [
        trial(DEFAULT, 100, 100),
        trial(WIDE, 80, 90),
        trial(JOINED, 120, 130),
        Trial(rung=1, candidate=replace(JOINED, workers=1), turns=[turn(999)], error="broken"),
        trial(DEFAULT, 110, rung=2),
    ]
    first, second = advice.grids(found(trials))
    assert [row[:5] for row in first.rows] == [
        ("submit", "4", "1", "8", "1"),
        ("submit, default", "2", "auto", "no", ""),
        ("submit", "1", "4", "no", ""),
    ]
    assert len(second.rows) == 1
    assert {len(row) for row in first.rows} == {len(first.header)}


# A program.


def test_program_names_what_differs_from_the_default() -> None:
    result = found([])
    assert lines(advice.program("m.onnx", JOINED, result)) == [
        "import numpy as np",
        "",
        "import mcinfer",
        "",
        'inputs = {"x": np.zeros((1, 3), "float32")}  # your own arrays here',
        "with mcinfer.Master(",
        '    "m.onnx",',
        "    devices=4,",
        "    options=mcinfer.EngineOptions(threads=1),",
        "    max_batch_size=8,",
        "    max_delay=0.001,",
        ") as master:",
        "    futures = [master.submit(inputs) for _ in range(8)]",
        "    answers = [future.result() for future in futures]",
    ]
    program = lines(advice.program("m.onnx", DEFAULT, result))
    assert 'with mcinfer.Master("m.onnx") as master:' in program
    predicts = Candidate(workers=1, threads=3, call="predict")
    program = lines(advice.program("m.onnx", predicts, result))
    pool = "devices=1, options=mcinfer.EngineOptions(threads=3)"
    assert f'with mcinfer.Master("m.onnx", {pool}) as master:' in program
    assert program[-1] == "    answer = master.predict(inputs)"


def test_second_transport_is_an_argument_of_the_program_and_a_word_of_the_tables() -> None:
    other = Candidate(workers=2, threads=2, call="submit", transport="socketpair")
    result = found([trial(DEFAULT, 100, 100), trial(other, 120, 130)])
    assert str(other) == "2 workers, 2 threads, submit, socketpair"
    assert '    transport="socketpair",' in lines(advice.program("m.onnx", other, result))
    assert advice.arguments(other, result)["transport"] == "socketpair"
    assert "transport" not in advice.arguments(JOINED, result)
    (grid,) = advice.grids(result)
    assert [row[0] for row in grid.rows] == ["submit, pairs", "submit, default"]
    assert grid.title.endswith("; pairs: over socketpair)")
    (grid,) = advice.grids(found([trial(DEFAULT, 100)]))
    assert "pairs" not in grid.title


@pytest.mark.parametrize("name", ['a "b".onnx', "a\\b.onnx", "a\nb.onnx", "\udc80.onnx"], ids=ascii)
def test_program_can_name_any_file(name: str) -> None:
    program = advice.program(name, DEFAULT, found([]))
    lines(program)
    called: list[str] = []
    start = program.index("Master(") + len("Master(")
    called.append(eval(program[start : program.index(") as")]))  # noqa: S307 our own text
    assert called == [name]


def test_program_makes_inputs_of_any_type() -> None:
    arrays = {"s": ("string", (2,)), "b": ("bfloat16", (1, 2)), "n": ("int64", ())}
    program = advice.program("m.onnx", DEFAULT, found([], arrays=arrays))
    made: dict[str, Any] = {}
    exec(program.partition("with ")[0], made)  # noqa: S102 our own text
    inputs = made["inputs"]
    assert {name: (array.dtype.name, array.shape) for name, array in inputs.items()} == {
        "s": ("object", (2,)),
        "b": ("bfloat16", (1, 2)),
        "n": ("int64", ()),
    }
    assert inputs["s"][0] == ""


def test_arguments_are_those_of_a_master() -> None:
    assert advice.arguments(DEFAULT, found([])) == {
        "devices": None,
        "options": {},
        "max_batch_size": 1,
        "max_delay": 0.0,
    }
    given = advice.arguments(JOINED, found([]))
    assert given == {
        "devices": 4,
        "options": {"threads": 1},
        "max_batch_size": 8,
        "max_delay": 0.001,
    }
    EngineOptions(**given["options"])


def test_program_says_the_axes_that_the_user_says() -> None:
    result = found([], batch_axes={"x": 0, 'a "b"': None}, output_axes={"y": 1})
    program = advice.program("m.onnx", DEFAULT, result)
    start = program.index("mcinfer.Master(") + len("mcinfer.Master(")
    arguments = eval(f"dict(model={program[start : program.index(') as')]})")  # noqa: S307 our own text
    axes = {"batch_axes": {"x": 0, 'a "b"': None}, "output_axes": {"y": 1}}
    assert arguments == {"model": "m.onnx", **axes}
    given = advice.arguments(DEFAULT, result)
    assert {name: given[name] for name in axes} == axes
    lines(program)


def test_remarks_say_why_requests_run_whole() -> None:
    mixing = Split(
        inputs={"x": 0}, outputs={"y": "mixed"}, known="learned", reason="rows are mixed"
    )
    assert "Requests are not split, nor joined: rows are mixed." in advice.remarks(
        found([], split=mixing)
    )
    assert not any("split" in text for text in advice.remarks(found([])))
    assert not any("split" in text for text in advice.remarks(found([], split=None)))


# JSON.


def test_json_has_all_that_was_measured() -> None:
    never = Trial(rung=1, candidate=WIDE, turns=[turn(10, unfinished=90)])
    wanted = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))
    result = found([trial(DEFAULT, 100), never], of=wanted)
    content = json.loads(advice.as_json("m.onnx", result, {"cores": 2}))
    assert (content["schema"], content["version"]) == ("mcinfer.tune", 1)
    assert content["aim"]["load"] == {"batch": 1, "clients": 4, "rate": 100.0}
    assert content["recommended"]["arguments"] == advice.arguments(DEFAULT, result)
    assert content["recommended"]["over_default"] == {"middle": 1.0, "low": 1.0, "high": 1.0}
    assert content["recommended"]["program"] == advice.program("m.onnx", DEFAULT, result)
    assert [t["is_default"] for t in content["trials"]] == [True, False]
    assert content["trials"][1]["turns"][0]["unfinished"] == 90
    assert content["finished"]


def test_json_of_an_interrupted_search_says_so() -> None:
    content = json.loads(advice.as_json("m.onnx", found([], ended=""), {}))
    assert (content["finished"], content["recommended"]) == (False, None)
