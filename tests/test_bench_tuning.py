"""Tests of mcinfer/bench/tuning without processes; real searches are in tests/process/test_tune.py."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from mcinfer.bench.tuning.heats import Trial
from mcinfer.bench.tuning.search import Found
from mcinfer.config import EngineOptions
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import Shape
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


def turn(throughput: float, p50: float = 0.01, p99: float = 0.02, *, unfinished: int = 0) -> Turn:
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
    )


def trial(candidate: Candidate, *throughputs: float, rung: int = 1, p99: float = 0.02) -> Trial:
    return Trial(rung=rung, candidate=candidate, turns=[turn(t, p99=p99) for t in throughputs])


def found(
    trials: Sequence[Trial], best: Candidate | None, *, of: Aim | None = None, **changes: Any
) -> Found:
    given: dict[str, Any] = {
        "aim": of or aim(),
        "cores": 4,
        "default": DEFAULT,
        "arrays": {"x": ("float32", (1, 3))},
        "trials": tuple(trials),
        "best": best,
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


@pytest.mark.parametrize(
    ("shapes", "given", "pieces"),
    [
        ([("batch", 3)], [(6, 3)], 6),
        ([(2, 3)], [(6, 3)], 3),
        ([(2, 3)], [(2, 3)], 1),
        ([("batch", 3), ("other", 1)], [(6, 3), (6, 1)], 1),  # other: rows of the batch or not?
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
    assert pieces_of(ModelSpec(inputs=tuple(specs), outputs=(output,)), given) == pieces


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
    over = found(trials, WIDE).over_default(trials[2])
    assert (over.middle, over.low, over.high) == pytest.approx((2.0, 1.5, 2.5))


@pytest.mark.parametrize(("worst", "as_good"), [(99, True), (100, True), (101, False)])
def test_default_is_as_good_unless_each_repeat_is_better(worst: float, as_good: bool) -> None:
    result = found([trial(DEFAULT, 100, 100, 100), trial(WIDE, 120, 130, worst)], WIDE)
    assert result.default_is_as_good == as_good
    assert result.recommended == (DEFAULT if as_good else WIDE)


def test_default_that_breaks_the_bound_is_not_as_good() -> None:
    trials = [trial(DEFAULT, 200, p99=0.09), trial(WIDE, 100, p99=0.04)]
    result = found(trials, WIDE, of=aim(bound=0.05))
    assert result.recommended == WIDE
    assert "The default does not keep the bound" in advice.verdict(result)


def test_verdict_says_how_much_better_the_best_is() -> None:
    result = found([trial(DEFAULT, 100, 100, 100), trial(JOINED, 127, 131, 136)], JOINED)
    assert advice.verdict(result) == (
        "Best: 4 workers, 1 thread, submit, 8 rows within 1 ms: 131 (127–136) rows/s, p99 20.0 ms, "  # noqa: RUF001
        "1.31 × the default (1.27 … 1.36)."  # noqa: RUF001
    )


def test_verdict_says_that_the_default_is_as_good() -> None:
    trials = [trial(DEFAULT, 100, 100), trial(WIDE, 99, 102)]
    assert advice.verdict(found(trials, WIDE)).startswith("The default is as good as any: 100 rows")
    assert advice.verdict(found(trials, DEFAULT)) == (
        "The default is as good as any: 100 rows/s, p99 20.0 ms."
    )


def test_verdict_says_what_came_nearest_to_a_bound_that_none_keeps() -> None:
    result = found([trial(DEFAULT, 100), trial(WIDE, 50)], WIDE, of=aim(bound=0.01))
    assert not result.fits
    assert advice.verdict(result) == (
        "no pool answers 99 % of the requests within 10.0 ms under batch 1, 8 clients; "
        "1 worker, 4 threads, submit came nearest with 20.0 ms"
    )


def test_verdict_says_that_no_pool_keeps_up() -> None:
    slow = Trial(rung=1, candidate=DEFAULT, turns=[turn(10, unfinished=90)])
    wanted = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))
    assert "no pool keeps up with batch 1, 100/s" in advice.verdict(
        found([slow], DEFAULT, of=wanted)
    )


def test_verdict_of_nothing_is_that_nothing_could_be_measured() -> None:
    assert advice.verdict(found([], None)) == "no pool could be measured"


def test_remarks_tell_what_was_left_out_and_what_failed() -> None:
    broken = Trial(rung=1, candidate=JOINED, error="no memory\nleft")
    told = advice.remarks(found([broken], None, left_out=3))
    assert told == [
        "The search ended after 12.0 s: one is left.",
        "3 of 9 pools were left out: there was no time for them. --budget 100 is enough for all.",
        "4 workers, 1 thread, submit, 8 rows within 1 ms: no memory left",
    ]
    assert "interrupted" in advice.remarks(found([], None, ended=""))[0]


def test_tables_have_a_row_for_each_pool_the_best_first() -> None:
    trials = [
        trial(DEFAULT, 100, 100),
        trial(WIDE, 80, 90),
        trial(JOINED, 120, 130),
        Trial(rung=1, candidate=JOINED, error="broken"),
        trial(DEFAULT, 110, rung=2),
    ]
    first, second = advice.grids(found(trials, DEFAULT))
    assert [row[:5] for row in first.rows] == [
        ("submit", "4", "1", "8", "1"),
        ("submit, default", "2", "auto", "no", ""),
        ("submit", "1", "4", "no", ""),
    ]
    assert len(second.rows) == 1
    assert {len(row) for row in first.rows} == {len(first.header)}


# A program.


def test_program_names_what_differs_from_the_default() -> None:
    result = found([], JOINED)
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


@pytest.mark.parametrize("name", ['a "b".onnx', "a\\b.onnx", "a\nb.onnx", "\udc80.onnx"], ids=ascii)
def test_program_can_name_any_file(name: str) -> None:
    program = advice.program(name, DEFAULT, found([], DEFAULT))
    lines(program)
    called: list[str] = []
    start = program.index("Master(") + len("Master(")
    called.append(eval(program[start : program.index(") as")]))  # noqa: S307 our own text
    assert called == [name]


def test_program_makes_inputs_of_any_type() -> None:
    arrays = {"s": ("string", (2,)), "b": ("bfloat16", (1, 2)), "n": ("int64", ())}
    program = advice.program("m.onnx", DEFAULT, found([], DEFAULT, arrays=arrays))
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
    assert advice.arguments(DEFAULT, DEFAULT) == {
        "devices": None,
        "options": {},
        "max_batch_size": 1,
        "max_delay": 0.0,
    }
    given = advice.arguments(JOINED, DEFAULT)
    assert given == {
        "devices": 4,
        "options": {"threads": 1},
        "max_batch_size": 8,
        "max_delay": 0.001,
    }
    EngineOptions(**given["options"])


# JSON.


def test_json_has_all_that_was_measured() -> None:
    never = Trial(rung=1, candidate=WIDE, turns=[turn(10, unfinished=90)])
    wanted = Aim(goal="latency", load=Load(batch=1, clients=4, rate=100.0))
    result = found([trial(DEFAULT, 100), never], DEFAULT, of=wanted)
    content = json.loads(advice.as_json("m.onnx", result, {"cores": 2}))
    assert (content["schema"], content["version"]) == ("mcinfer.tune", 1)
    assert content["aim"]["load"] == {"batch": 1, "clients": 4, "rate": 100.0}
    assert content["recommended"]["arguments"] == advice.arguments(DEFAULT, DEFAULT)
    assert content["recommended"]["over_default"] == {"middle": 1.0, "low": 1.0, "high": 1.0}
    assert content["recommended"]["program"] == advice.program("m.onnx", DEFAULT, result)
    assert [t["is_default"] for t in content["trials"]] == [True, False]
    assert content["trials"][1]["turns"][0]["unfinished"] == 90
    assert content["finished"]


def test_json_of_an_interrupted_search_says_so() -> None:
    content = json.loads(advice.as_json("m.onnx", found([], None, ended=""), {}))
    assert (content["finished"], content["recommended"]) == (False, None)
