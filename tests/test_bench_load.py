"""Tests of mcinfer/bench/load.py."""

import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.bench.load import (
    arrivals,
    kept_up,
    largest_difference,
    nearest_rank,
    offer,
    read_request,
    write_request,
)
from mcinfer.bench.report import QUANTILES, Load


def test_closed_loop_makes_so_many_requests_or_lasts_so_long() -> None:
    seen: Counter[int] = Counter()
    together = threading.Barrier(3)

    def request() -> None:
        seen[threading.get_ident()] += 1
        together.wait(timeout=10)  # no thread passes this alone

    outcome = offer(request, Load(batch=1, clients=3), seconds=0.0, count=30, seed=0)
    assert len(seen) == 3
    assert seen.total() == len(outcome.latencies) == 30
    assert (outcome.errors, outcome.unfinished) == ([], 0)
    outcome = offer(lambda: sleep(0.001), Load(batch=1, clients=2), seconds=0.1, count=0, seed=0)
    assert outcome.seconds >= 0.1
    assert min(outcome.latencies) >= 0.001
    outcome = offer(lambda: None, Load(batch=1, clients=2), seconds=0.0, count=0, seed=0)
    assert len(outcome.latencies) == 2  # each client makes one at least


def test_requests_that_raise_are_counted_and_the_others_go_on() -> None:
    calls: list[int] = []

    def request() -> None:
        calls.append(1)
        if len(calls) % 5 == 0:
            raise SystemExit(len(calls))  # it ends neither the client nor the process

    outcome = offer(request, Load(batch=1, clients=1), seconds=0.0, count=25, seed=0)
    assert len(outcome.latencies) == 20
    assert outcome.errors == [f"SystemExit: {n}" for n in (5, 10, 15, 20, 25)]


def test_open_loop_counts_the_wait_for_a_client_as_latency() -> None:
    """A client that is held up for 50 ms each time, and requests that come every 5 ms."""
    load = Load(batch=1, clients=1, rate=200.0)
    outcome = offer(lambda: sleep(0.05), load, seconds=0.0, count=8, seed=3)
    assert len(outcome.latencies) == 8
    last = arrivals(200.0, 0.0, 8, seed=3)[-1]
    # The last one was answered after eight runs, whenever it came; a closed loop would have said 50 ms.
    assert max(outcome.latencies) >= 8 * 0.05 - last
    in_order = [end - begin for begin, end in sorted(outcome.answers)]
    assert in_order == outcome.latencies


def test_open_loop_that_cannot_be_kept_up_with_ends_and_says_what_was_not_begun() -> None:
    load = Load(batch=1, clients=1, rate=100.0)
    outcome = offer(lambda: sleep(0.5), load, seconds=0.5, count=0, seed=0)
    made = len(arrivals(100.0, 0.5, 0, seed=0))
    assert len(outcome.latencies) + outcome.unfinished == made
    assert outcome.unfinished > made / 2


def test_gaps_between_arrivals_are_those_of_a_poisson_process() -> None:
    moments = arrivals(50.0, 200.0, 0, seed=1)
    assert 0 < moments[0] < moments[-1] < 200
    assert moments == arrivals(50.0, 0.0, len(moments), seed=1)
    gaps = [b - a for a, b in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # Of an exponential distribution the mean is exceeded by 1/e of all, and the spread is the mean.
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)


def queue(rate: float, service: float, count: int, servers: int = 1) -> list[tuple[float, float]]:
    """Requests that come at a rate and take so long each, first come first served."""
    free = [0.0] * servers
    answers = []
    for moment in arrivals(rate, 0.0, count, seed=5):
        server = min(range(servers), key=free.__getitem__)
        free[server] = max(free[server], moment) + service
        answers.append((moment, free[server]))
    return answers


@pytest.mark.parametrize(
    ("rate", "service", "servers", "expected"),
    [
        (90.0, 0.02, 1, False),  # 1.8 times what can be done
        (40.0, 0.02, 1, True),
        (5.0, 1.0, 32, True),  # many are under way, as they should be
        (50.0, 1.0, 32, False),
    ],
)
def test_growing_queue_is_noticed(
    rate: float, service: float, servers: int, expected: bool
) -> None:
    assert kept_up(queue(rate, service, 800, servers)) is expected


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=400))
def test_quantiles_are_values_that_occurred_as_numpy_finds_them(values: list[float]) -> None:
    ordered = sorted(values)
    for fraction in QUANTILES:
        found = nearest_rank(ordered, fraction)
        assert found in values
        # A fraction such as 0.56 is no binary number: 25 times it is a hair above 14 for NumPy.
        near = [max(0.0, fraction - 1e-9), fraction]
        assert found in np.quantile(values, near, method="inverted_cdf")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.array(7, np.int64),
        np.zeros((0, 3), np.float16),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.array(["ü", "", "long" * 50], object),
    ],
    ids=["matrix", "scalar", "none", "foreign", "text"],
)
def test_request_comes_out_of_its_file_as_it_went_in(tmp_path: Path, array: NDArray[Any]) -> None:
    write_request(tmp_path / "x", {"first": np.ones(2), "x": array})
    first, found = read_request(tmp_path / "x").values()
    assert first.tolist() == [1.0, 1.0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tolist() == array.tolist()
    assert found.flags.writeable


@pytest.mark.parametrize(
    ("answer", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # over the largest value, whichever differs
        ([1.5, 2.0], [1.0, -2.0], 2.0),
        ([0.5], [0.0], 1.0),
        ([np.nan, np.inf, 1.0], [np.nan, np.inf, 1.0], 0.0),
        ([np.nan, 1.0], [3.0, 1.0], 1.0),
        ([np.inf], [-np.inf], 1.0),
        ([1j, 3.0], [0j, 4.0], 0.25),
        ([3], [4], 0.25),
        ([False], [True], 1.0),
        (["a", "b"], ["a", "b"], 0.0),
        (["a", "b"], ["a", "c"], 1.0),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], None),
    ],
)
def test_answers_differ_by_a_part_of_the_largest_value(
    answer: list[Any], expected: list[Any], difference: float | None
) -> None:
    same = np.ones(2, ml_dtypes.bfloat16)
    found = largest_difference(
        {"other": same, "y": np.array(answer)}, {"y": np.array(expected), "other": same}
    )
    assert found == (None if difference is None else pytest.approx(difference))
