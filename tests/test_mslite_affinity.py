"""Tests of mcinfer/mslite/_affinity.py: which cores threads are bound to."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._affinity import (
    BIG_FIRST,
    MIDDLE_FIRST,
    check_core_list,
    core_capacities,
    deal_cores,
    order_cores,
)

THREE_KINDS = {0: 400, 1: 400, 2: 1024, 3: 700, 4: 1024, 5: 700}
TWO_KINDS = {0: 400, 1: 1024, 2: 400, 3: 1024}


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The cores that this process may use, as far as it is told."""
    cores = {0, 1, 3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    return cores


def write(folder: Path, core: int, name: str, text: str) -> None:
    path = folder / f"cpu{core}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


@pytest.mark.usefixtures("usable")
def test_capacity_is_the_kernels_own_else_the_highest_frequency(tmp_path: Path) -> None:
    write(tmp_path, 0, "cpu_capacity", "446\n")
    write(tmp_path, 0, "cpufreq/cpuinfo_max_freq", "1800000\n")
    write(tmp_path, 1, "cpufreq/cpuinfo_max_freq", "2400000\n")
    write(tmp_path, 2, "cpu_capacity", "1024\n")  # not ours to use
    assert core_capacities(tmp_path) == {0: 446, 1: 2_400_000, 3: 0}


@pytest.mark.usefixtures("usable")
def test_capacity_that_is_no_number_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0, "cpu_capacity", "<unknown>\n")
    assert core_capacities(tmp_path) == {0: 0, 1: 0, 3: 0}


def test_capacities_of_this_machine_are_those_of_its_cores() -> None:
    assert core_capacities().keys() == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("capacities", "mode", "order"),
    [
        (THREE_KINDS, BIG_FIRST, [2, 4, 3, 5, 0, 1]),
        (THREE_KINDS, MIDDLE_FIRST, [3, 5, 0, 1, 2, 4]),
        (TWO_KINDS, BIG_FIRST, [1, 3, 0, 2]),
        (TWO_KINDS, MIDDLE_FIRST, [0, 2, 1, 3]),
    ],
)
def test_cores_come_in_the_order_of_the_mode(
    capacities: Mapping[int, int], mode: int, order: list[int]
) -> None:
    assert order_cores(capacities, mode) == order


@pytest.mark.parametrize("mode", [0, BIG_FIRST, MIDDLE_FIRST])
@pytest.mark.parametrize("capacities", [{0: 5, 1: 5}, {0: 0}, {}])
def test_cores_that_are_alike_have_no_order(capacities: Mapping[int, int], mode: int) -> None:
    assert order_cores(capacities, mode) is None


def test_mode_0_has_no_order() -> None:
    assert order_cores(THREE_KINDS, 0) is None


@given(
    capacities=st.dictionaries(st.integers(0, 63), st.integers(0, 3)),
    mode=st.sampled_from([BIG_FIRST, MIDDLE_FIRST]),
)
def test_every_core_is_in_the_order_once(capacities: dict[int, int], mode: int) -> None:
    order = order_cores(capacities, mode)
    assert (order is None) == (len({*capacities.values()}) < 2)
    assert order is None or sorted(order) == sorted(capacities)


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "dealt"),
    [
        ([0, 1, 2, 3], 2, 2, ((0, 1), (2, 3))),
        ([3, 1], 1, 2, ((3,), (1,))),
        ([0, 1, 2], 2, 3, ((0, 1), (2, 0), (1, 2))),  # from the start again
        ([5], 2, 2, ((5,), (5,))),  # each core once
        ([0, 0, 1, 1], 2, 2, ((0,), (1,))),
    ],
)
def test_cores_are_dealt_to_one_worker_after_another(
    cores: list[int], threads: int, workers: int, dealt: tuple[tuple[int, ...], ...]
) -> None:
    assert deal_cores(cores, threads, workers) == dealt


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(("cores", "threads", "workers"), [([0, 1, 3, 3], 2, 2), ([1], 1, 1)])
def test_list_that_fits_is_taken(cores: list[int], threads: int, workers: int) -> None:
    check_core_list(cores, threads, workers)


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("cores", "threads", "workers", "text"),
    [
        ([0, 1], 1, 1, "got 2 cores, expected threads x workers = 1 x 1"),
        ([0], 2, 3, "got 1 cores, expected threads x workers = 2 x 3"),
        ([0, 2], 1, 2, "got [2], expected some of [0, 1, 3]"),
        ([-1, 9], 2, 1, "got [-1, 9], expected some of [0, 1, 3]"),
    ],
)
def test_list_that_does_not_fit_is_refused(
    cores: list[int], threads: int, workers: int, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"core_list: {text}")):
        check_core_list(cores, threads, workers)
