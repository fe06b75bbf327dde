"""Tests of mcinfer/bench/tuning/halving.py: what is measured next, and what wins. Time is a number."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.tuning.halving import Halving, Result, Rung, ranked

PLENTY = 1000.0

COSTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40)
STRAINS = st.floats(0.0, 4.0)


def same(cost: float, repeats: int = 3, *, strain: float = 0.0) -> list[Result]:
    """Repeats that do not differ."""
    return [Result(cost=cost, strain=strain)] * repeats


def repeats(*costs: float) -> list[Result]:
    return [Result(cost=cost) for cost in costs]


def search(count: int, *, kept: int = 0, heat: int = 100, enough: float = 0.0) -> Halving:
    return Halving(count, kept=kept, heat=heat, least=0.5, enough=enough)


def spent(rung: Rung, overhead: float = 1.0) -> float:
    return sum(map(len, rung.heats)) * (overhead + rung.seconds)


def next_rung(halving: Halving, left: float = PLENTY) -> Rung:
    rung = halving.plan(left, 1.0)
    assert rung is not None
    return rung


def run(halving: Halving, results: Sequence[Sequence[Result]], left: float = PLENTY) -> list[Rung]:
    """Search to the end, by results that are the same in each rung; the rungs."""
    rungs = []
    while rung := halving.plan(left, 1.0):
        rungs.append(rung)
        left -= spent(rung)
        halving.finish({c: results[c] for c in rung.candidates})
        assert len(rungs) < 100
    return rungs


# Rungs.


def test_worse_half_is_dropped_and_the_others_are_measured_for_twice_as_long() -> None:
    results = [repeats(1 + i / 8, 3) for i in range(8)]
    rungs = run(halving := search(8), results, left=200.0)
    assert [rung.candidates for rung in rungs] == [(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), (0, 1)]
    assert [rung.number for rung in rungs] == [1, 2, 3]
    assert [rung.of for rung in rungs] == [3, 3, 3]
    for before, after in pairwise(rungs):
        assert after.seconds >= 2 * before.seconds
    assert (halving.ranking, halving.ended) == ((0, 1), "one is left")


def test_kept_one_is_measured_first_in_every_rung_and_does_not_prolong_the_search() -> None:
    results = [repeats(2 - i / 8, 3) for i in range(8)]
    rungs = run(halving := search(8), results)
    assert [rung.candidates[0] for rung in rungs] == [0, 0, 0]
    assert [len(rung.candidates) for rung in rungs] == [8, 5, 3]
    assert halving.ranking == (7, 6, 0)


@pytest.mark.parametrize(("kept", "sizes"), [(0, [4, 4, 2]), (6, [4, 4, 2])])
def test_kept_one_is_in_every_heat_and_the_others_in_one(kept: int, sizes: list[int]) -> None:
    rung = next_rung(search(8, kept=kept, heat=4), left=60.0)
    assert [len(heat) for heat in rung.heats] == sizes
    assert {heat[0] for heat in rung.heats} == {kept}
    others = [c for heat in rung.heats for c in heat[1:]]
    assert others == [c for c in range(8) if c != kept]
    assert spent(rung) < 60.0


def test_heats_are_of_others_alone_when_the_kept_one_has_failed() -> None:
    halving = search(12, heat=4)
    halving.finish({c: repeats(1 + c / 16, 3) for c in next_rung(halving).candidates[1:]})
    assert next_rung(halving).heats == ((1, 2, 3, 4), (5, 6))


def test_kept_one_may_win() -> None:
    run(halving := search(5, kept=3), [same(2), same(2), same(2), same(1), same(2)])
    assert halving.ranking[0] == 3


def test_one_candidate_is_measured_once_and_for_no_longer_than_need_be() -> None:
    rungs = run(halving := search(1), [same(1)])
    assert [(rung.candidates, rung.seconds) for rung in rungs] == [((0,), 0.5)]
    assert (halving.ranking, halving.ended) == ((0,), "one is left")


def test_no_candidates_are_no_search() -> None:
    halving = search(0)
    assert halving.plan(PLENTY, 1.0) is None
    assert halving.ended == "none is left"


def test_those_for_whom_there_is_no_time_are_left_out() -> None:
    halving = search(50)
    rung = next_rung(halving, left=30.0)
    assert rung.candidates == tuple(range(len(rung.candidates)))
    assert halving.left_out == 50 - len(rung.candidates) > 0
    assert halving.needs(len(rung.candidates), 1.0) <= 30.0 < halving.needs(50, 1.0)


def test_too_little_time_for_two_is_no_search() -> None:
    halving = search(4)
    assert halving.plan(2.9, 1.0) is None
    assert (halving.ended, halving.ranking) == ("the time is over", ())


def test_search_ends_with_what_is_known_when_rungs_took_longer_than_planned() -> None:
    halving = search(8)
    rung = next_rung(halving)
    halving.finish({c: repeats(1 + c / 8, 3) for c in rung.candidates})
    assert halving.plan(0.0, 1.0) is None
    assert (halving.ended, halving.ranking[0]) == ("the time is over", 0)


def test_fewer_go_on_when_there_is_less_time_than_planned() -> None:
    halving = search(16)
    halving.finish({c: repeats(1 + c / 16, 3) for c in next_rung(halving).candidates})
    assert next_rung(halving, left=6.0).candidates == (0, 1)  # the kept one is one of the two
    assert halving.left_out == 0


# What can be trusted.


def test_winner_and_the_kept_one_are_measured_for_long_enough_at_the_end() -> None:
    results = [repeats(2 - i / 8, 3) for i in range(8)]
    rungs = run(halving := search(8, enough=30.0), results, left=200.0)
    assert rungs[-1].heats == ((0, 7),)
    assert rungs[-1].seconds == 30.0
    assert rungs[-1].number == len(rungs)
    assert (halving.ranking, halving.ended) == ((7, 0), "one is left")
    assert sum(map(spent, rungs)) <= 200.0


def test_winner_is_measured_once_more_only_if_that_can_be_for_longer() -> None:
    results = [same(3), same(1), same(2)]
    (rung,) = run(search(3, enough=30.0), results, left=7.0)
    assert rung.seconds < 30.0
    (rung,) = run(search(3, enough=30.0), results, left=500.0)
    assert rung.seconds > 30.0
    (rung,) = run(search(1, enough=30.0), results, left=500.0)
    assert rung.seconds == 30.0


def test_time_to_trust_the_winner_displaces_no_second_pool() -> None:
    assert next_rung(search(9, enough=30.0), left=3.5).candidates == (0, 1)
    assert next_rung(search(9, enough=30.0), left=40.0).candidates == (0, 1, 2, 3)
    assert next_rung(search(9), left=40.0).candidates == (*range(8),)


# Who is dropped.


def test_candidate_that_is_far_off_is_dropped_at_once() -> None:
    halving = search(4)
    next_rung(halving)
    found = {0: same(3.0), 1: same(1.0), 2: repeats(2.1, 2.2), 3: repeats(5.0, 1.9)}
    assert halving.hopeless(found) == {2}  # one good repeat is hope; the kept one always stays


def test_half_is_no_limit_to_those_that_are_far_off() -> None:
    halving = search(8)
    halving.finish({c: same(1.0 if c < 1 else 9.0) for c in next_rung(halving).candidates})
    assert (halving.contenders, halving.ended) == ((0,), "one is left")


@pytest.mark.parametrize(("best", "behind"), [(1.4, True), (1.5, False)])
def test_candidate_that_is_behind_by_more_than_the_repeats_differ_is_dropped(
    best: float, behind: bool
) -> None:
    halving = search(4)
    next_rung(halving)
    found = {0: repeats(1.0, best), 1: repeats(1.55, 1.56), 2: same(1.9), 3: same(1.9)}
    assert halving.hopeless(found) == frozenset()
    halving.finish(found)
    assert halving.contenders == ((0,) if behind else (0, 1))


def test_one_repeat_does_not_tell_who_is_behind() -> None:
    halving = search(4)
    next_rung(halving)
    halving.finish({c: repeats(1 + c / 4) for c in range(4)})
    assert halving.contenders == (0, 1)


def test_candidate_that_failed_is_out() -> None:
    halving = search(4)
    next_rung(halving)
    halving.finish({1: [], 2: same(1.5), 3: same(1.2)})
    assert halving.ranking == (3, 2)
    assert halving.plan(PLENTY, 1.0) is None  # of two the better half is one


def test_kept_one_that_failed_is_measured_no_more() -> None:
    halving = search(6)
    next_rung(halving)
    halving.finish({c: repeats(1 + c / 8, 3) for c in range(1, 6)})
    assert next_rung(halving).candidates == (1, 2, 3)


def test_none_is_left_where_all_failed() -> None:
    halving = search(3)
    next_rung(halving)
    halving.finish({0: [], 1: []})
    assert (halving.ended, halving.ranking) == ("none is left", ())


# The bound.


def test_those_that_break_the_bound_are_behind_all_that_keep_it() -> None:
    found = {
        0: same(1.0, strain=1.5),
        1: same(9.0, strain=1.0),
        2: same(2.0, strain=1.1),
        3: same(8.0, strain=0.1),
    }
    assert ranked(found) == (3, 1, 2, 0)


def test_bound_is_kept_by_the_middle_of_the_repeats() -> None:
    found = {0: [Result(cost=1.0, strain=s) for s in (0.5, 9.0, 0.9)], 1: same(2.0)}
    assert ranked(found) == (0, 1)


def test_far_from_the_bound_is_hopeless_only_where_others_are_nearer() -> None:
    halving = search(3, kept=2)
    next_rung(halving)
    assert halving.hopeless({0: same(1, strain=2.5), 1: same(2, strain=0.9)}) == {0}
    assert halving.hopeless({0: same(1, strain=2.5), 1: same(2, strain=2.0)}) == frozenset()
    assert halving.hopeless({0: same(1, strain=5.0), 1: same(2, strain=2.0)}) == {0}


def test_what_never_answers_comes_last() -> None:
    found = {0: same(math.inf, strain=math.inf), 1: same(9.0, strain=7.0), 2: same(1.0)}
    assert ranked(found) == (2, 1, 0)
    halving = search(3, kept=2)
    assert halving.hopeless(found) == {0, 1}


# Ending early.


def test_leaders_that_are_alike_end_the_search() -> None:
    halving = search(4)
    next_rung(halving)
    leaders: Mapping[int, Sequence[Result]] = {0: repeats(1.0, 1.02), 1: repeats(1.01, 1.03)}
    halving.finish({**leaders, 2: same(1.5), 3: same(1.5)})
    assert (halving.ended, halving.ranking[0]) == ("the leaders are alike", 0)


@pytest.mark.parametrize(
    ("other", "why"),
    [(repeats(1.03, 1.04), "spreads do not meet"), (repeats(1.0, 1.2), "much is to be gained yet")],
    ids=str,
)
def test_leaders_that_may_differ_are_measured_on(other: list[Result], why: str) -> None:
    halving = search(4)
    next_rung(halving)
    halving.finish({0: repeats(1.0, 1.02), 1: other, 2: same(1.5), 3: same(1.5)})
    assert halving.ended is None, why


# Always.


@given(costs=COSTS, strains=st.data(), kept=st.integers(0, 100), left=st.floats(0, 1e4))
def test_best_is_never_lost_where_there_is_no_noise(
    costs: list[float], strains: st.DataObject, kept: int, left: float
) -> None:
    breaks = strains.draw(st.lists(STRAINS, min_size=len(costs), max_size=len(costs)))
    results = [same(c, strain=s) for c, s in zip(costs, breaks, strict=True)]
    halving = search(len(costs), kept=kept % len(costs), heat=4)
    rungs = run(halving, results, left)
    assert halving.ended
    if not rungs:
        assert not halving.ranking
        return
    admitted = rungs[0].candidates
    best = ranked({c: results[c] for c in admitted})[0]
    same_as_best = {c for c in admitted if results[c] == results[best]}
    assert halving.ranking[0] in same_as_best


@given(
    count=st.integers(1, 60),
    left=st.floats(0, 1e4),
    overhead=st.floats(0, 20),
    least=st.floats(0.01, 20),
    heat=st.integers(2, 5),
    enough=st.floats(0, 40),
    data=st.data(),
)
def test_search_ends_and_keeps_within_its_time_whatever_is_measured(
    count: int,
    left: float,
    overhead: float,
    least: float,
    heat: int,
    enough: float,
    data: st.DataObject,
) -> None:
    halving = Halving(count, kept=0, heat=heat, least=least, enough=enough)
    took, rungs = 0.0, 0
    result = st.builds(Result, cost=st.floats(0.5, 2.0), strain=st.floats(0, 2.0))
    while rung := halving.plan(left - took, overhead):
        rungs += 1
        assert rung.seconds >= least
        assert len(set(rung.candidates)) == len(rung.candidates)
        assert max(map(len, rung.heats)) <= heat
        took += spent(rung, overhead)
        before = len(halving.contenders)
        halving.finish({c: data.draw(st.lists(result, max_size=3)) for c in rung.candidates})
        assert len(halving.contenders) < before or halving.ended
    assert halving.ended
    assert took <= left * (1 + 1e-9)
    assert rungs <= 2 + math.ceil(math.log2(count))
    assert set(halving.contenders) <= set(range(count))
