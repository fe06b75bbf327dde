"""Tests of mcinfer/bench/compare.py and the command."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.bench.compare import (
    FELL_SHORT,
    ONE_REPEAT,
    WITHIN,
    Change,
    changes,
    differences,
    flaws,
    ratio_of,
    warnings,
)
from mcinfer.bench.figures import compared_loads, spread_of
from mcinfer.bench.report import Report, dump
from mcinfer.cli.bench import compare as command
from tests.bench_reports import large, small


def change_of(a: Report, b: Report, figure: str, way: str = "session") -> Change:
    (found,) = (c for c in changes(a, b) if (c.way, c.figure) == (way, figure))
    return found


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100.0, 110.0], [120.0, 130.0], "faster"),
        ([100.0, 110.0], [80.0, 90.0], "slower"),
        ([100.0, 110.0], [105.0, 130.0], WITHIN),
        ([100.0, 110.0], [110.0, 130.0], WITHIN),
        ([100.0], [200.0, 210.0], ONE_REPEAT),
    ],
)
def test_verdict_needs_repeats_that_do_not_overlap(
    before: list[float], after: list[float], verdict: str
) -> None:
    a, b = small(session=before), small(session=after)
    assert change_of(a, b, "rows/s").verdict == verdict
    assert change_of(a, b, "p99 ms").verdict == verdict


def test_more_memory_and_a_later_start_are_no_gain() -> None:
    a = small(session=[100.0, 101.0])
    ways = tuple(
        replace(
            way,
            start_seconds=tuple(2 * s for s in way.start_seconds),
            memory=tuple(replace(m, pss=2 * m.pss) for m in way.memory),
        )
        for way in a.ways
    )
    b = replace(a, ways=ways)
    assert change_of(a, b, "start s").verdict == "slower"
    assert change_of(a, b, "PSS MB").verdict == "more"
    assert change_of(b, a, "PSS MB").verdict == "less"
    assert change_of(a, b, "USS MB").verdict == WITHIN


@given(*[st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4)] * 2)
def test_ratios_of_repeats_are_within_the_interval(old: list[float], new: list[float]) -> None:
    ratio = ratio_of(spread_of(old), spread_of(new))
    assert ratio.low <= ratio.middle * (1 + 1e-9)
    for a in old:
        for b in new:
            assert ratio.low * (1 - 1e-9) <= b / a <= ratio.high * (1 + 1e-9)


def lossy(report: Report) -> Report:
    measurements = tuple(
        replace(m, turns=tuple(replace(turn, failed=1) for turn in m.turns))
        for m in report.measurements
    )
    return replace(report, measurements=measurements)


def test_what_drops_requests_is_never_called_faster() -> None:
    slow, quick = small(session=[50.0, 51.0]), small(session=[100.0, 101.0])
    assert change_of(slow, lossy(quick), "rows/s").verdict == FELL_SHORT
    assert change_of(quick, lossy(slow), "rows/s").verdict == "slower"
    assert change_of(lossy(slow), quick, "rows/s").verdict == "faster"
    assert change_of(lossy(quick), slow, "rows/s").verdict == FELL_SHORT
    assert change_of(quick, lossy(quick), "max ms").verdict == "slower"
    assert [*flaws(quick, lossy(quick))] == [
        "session under batch 2, 4 clients in B: 2 of 404 failed"
    ]


def test_what_differs_is_said() -> None:
    a = small(session=[100.0], threads=[100.0])
    b = small(session=[100.0], sharded=[100.0])
    b = replace(
        b,
        machine={**b.machine, "cores": 2, "load_average_before": 9.0},
        model=replace(b.model, bytes=1),
        settings=replace(b.settings, seconds=9.0),
        mcinfer="0.7.0",
        finished=False,
    )
    assert tuple(warnings(a, b)) == (
        "B was interrupted: some turns are missing.",
        "The machines differ: cores 8 and cores 2.",
        "The models differ: bytes 52428800 and 1.",
    )
    assert differences(a, b) == (
        "The settings differ: seconds 2.0 and 9.0.",
        "The versions of mcinfer differ: 0.6.0 and 0.7.0.",
        "Only in A: threads.",
        "Only in B: sharded.",
    )


def test_way_that_failed_under_some_loads_is_compared_under_the_others() -> None:
    a = large()
    ways = (replace(a.ways[0], error="too large a batch"), *a.ways[1:])
    b = replace(a, ways=ways, measurements=a.measurements[5:])
    assert differences(a, b)[0] == "Only in A: session under batch 1, 1 client."
    titles = dict.fromkeys(change.title for change in changes(a, b) if change.way == "session")
    assert [*titles] == [
        *(str(load) for load in compared_loads(b)),
        "start and memory",
    ]


def test_command_prints_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "a.json", tmp_path / "b.json"
    old.write_bytes(dump(small(session=[100.0, 101.0])))
    new.write_bytes(dump(small(session=[200.0, 202.0])))
    command(old, new)
    out = capsys.readouterr().out
    assert "batch 2, 4 clients" in out
    assert "2.00 (1.98\N{EN DASH}2.02)  faster" in out
