"""Tests of mcinfer/bench/views/terminal.py, tables.py and texts.py."""

import math
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mcinfer.bench.report import Load, Report
from mcinfer.bench.views.figures import UNKNOWN, Spread
from mcinfer.bench.views.terminal import show
from mcinfer.bench.views.texts import (
    Unit,
    notes,
    number,
    plus_minus,
    remarks,
    seconds_text,
    spread_text,
    summary,
)
from tests.bench_reports import large, report, small, turn, way


def shown(made: Report, width: int = 80, *, terminal: bool = False) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=terminal)
    show(made, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0614, "0.061"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1234.5, "1234"),
        (math.inf, "∞"),
        (math.nan, "\N{EN DASH}"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-2, 1e9))
def test_number_is_written_to_half_a_percent(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=0.006, abs=0.0005)


def test_spread_is_written_with_the_digits_of_its_middle() -> None:
    spread = Spread(0.0984, 0.09, 0.1234, 3)
    assert spread_text(spread, Unit(1e-3, "ms")) == "98.4 (90.0\N{EN DASH}123.4)"
    assert plus_minus(spread, Unit(1e-3, "ms")) == "±25.0"
    assert plus_minus(Spread(1.0, 1.0, math.inf, 2)) == "±∞"
    assert spread_text(Spread(2.0, 2.0, 2.0, 3)) == "2.00"
    assert plus_minus(UNKNOWN) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.50 s"), (0.05, "50.0 ms"), (2e-5, "20.0 µs"), (0.0, "0 ms")]
)
def test_seconds_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_eighty_columns_hold_every_table_whole() -> None:
    lines = shown(large()).splitlines()
    tables = [line for line in lines if "  " in line and ":" not in line]
    assert max(map(len, tables)) <= 80
    assert "…" not in "".join(lines)
    header = ["way", "n", "rows/s", "speed-up", "p50", "p90", "p99", "max", "overhead", "cores"]
    assert [line.split() for line in lines].count(header) == 11
    assert any(line.split()[:4] == ["session", "124", "62.0", "1.00"] for line in lines)


def test_narrow_terminal_still_gets_every_figure() -> None:
    def figures(width: int) -> list[str]:
        return [w for line in shown(large(), width).splitlines() for w in line.split()]

    assert figures(30) == figures(80)


def test_wide_terminal_has_the_spread_beside_the_figure() -> None:
    text = shown(small(session=[100.0, 110.0, 95.0]), 200)
    assert "200 (190\N{EN DASH}220)" in text
    assert "±" not in text


def test_without_a_terminal_there_is_no_escape_code() -> None:
    assert "\x1b" not in shown(large())


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(large(), terminal=True)
    assert "\x1b[31m" not in text
    assert "\x1b[33m" not in text


def test_way_that_failed_is_told_with_its_error_and_its_markup() -> None:
    text = shown(large())
    assert "! ours.py:Broken could not be measured: ValueError: this way cannot run [batch]" in text


def test_way_that_failed_under_some_loads_keeps_what_it_has() -> None:
    made = small(session=[100.0], sharded=[100.0])
    made = replace(made, ways=(replace(made.ways[0], error="too large"), made.ways[1]))
    assert remarks(made) == ("session could not be measured under all loads: too large",)
    rows = [line.split() for line in shown(made).splitlines() if line.startswith("session ")]
    assert [len(row) for row in rows if row[1] != "could"] == [10, 6]


def test_way_that_did_not_answer_everything_is_marked_and_told() -> None:
    load = Load(batch=1, clients=9, rate=50.0)
    made = report([way("sharded")], {("sharded", load): [turn(40.0, unfinished=20)]})
    lines = shown(made).splitlines()
    assert any(line.startswith("sharded !") and "∞" in line for line in lines)
    assert lines[-1] == (
        "! Fell short under batch 1, 50/s: sharded (did not keep up: 40.0 of 50 requests/s answered,"
        " 20 of 100 never begun)."
    )
    assert summary(made) == ()


def test_open_loop_that_fell_behind_tells_the_rate_asked_for_and_the_rate_answered() -> None:
    load = Load(batch=4, clients=9, rate=50.0)
    late = [turn(50.0), turn(30.0, kept_up=False), turn(25.0, kept_up=False)]
    made = report(
        [way("session"), way("sharded")],
        {("session", load): [turn(50.0)] * 3, ("sharded", load): late},
    )
    text = shown(made)
    assert "batch 4, 50/s (200 rows/s asked for; latency and overhead in ms)" in text
    assert remarks(made) == (
        "Fell short under batch 4, 50/s: sharded (did not keep up in 2 of 3 repeats:"
        " 30.0 (25.0\N{EN DASH}50.0) of 50 requests/s answered).",
    )
    (row,) = (line.split() for line in text.splitlines() if line.startswith("sharded !"))
    assert row[2:6] == ["60", "120", "(100\N{EN DASH}200)", "\N{EN DASH}"]
    assert "Most rows a second: session" in text


def test_reason_of_failed_requests_is_told_once() -> None:
    one, other = Load(batch=1, clients=1), Load(batch=1, clients=2)
    dead, slow = turn(failed=2, error="WorkerDiedError: \x1b[2J\nkilled"), turn(error="", failed=1)
    made = report(
        [way("session"), way("sharded")],
        {
            ("session", one): [dead, slow],
            ("session", other): [dead],
            ("sharded", other): [dead, turn(failed=1, error="ValueError: x")],
        },
    )
    reasons = [text for text in remarks(made) if text.startswith("Requests of")]
    assert reasons == [
        "Requests of session, sharded failed: WorkerDiedError: ?[2J killed",
        "Requests of sharded failed: ValueError: x",
    ]


def test_many_reasons_are_counted_and_not_all_told() -> None:
    turns = [turn(failed=1, error=f"TimeoutError: request {n}") for n in range(8)]
    told = remarks(report([way("session")], {("session", Load(batch=1, clients=1)): turns}))
    assert sum("TimeoutError" in text for text in told) == 5
    assert told[-1] == "Requests failed for 3 more reasons."


def test_percentiles_of_too_few_requests_and_cores_of_short_turns_are_a_dash_with_a_note() -> None:
    load = Load(batch=1, clients=1)
    made = report([way("session")], {("session", load): [turn(99.0, seconds=0.4)]})
    lines = shown(made).splitlines()
    (row,) = (line.split() for line in lines if line.split()[:2] == ["session", "40"])
    assert row[6] == row[-1] == "\N{EN DASH}" != row[5]
    assert notes(made) == (
        "\N{EN DASH}: p90 and p99 need at least 10 and 100 requests in each turn (n).",
        "\N{EN DASH}: cores need turns of at least 0.5 s.",
    )
    assert [lines.count(note) for note in notes(made)] == [1, 1]
    assert notes(small(session=[100.0])) == ()


def test_hostile_names_print_as_one_line() -> None:
    hostile = "a\x1b[31m[bold]\nb" + "x" * 60
    made = report([way(hostile)], {(hostile, Load(batch=1, clients=1)): [turn()]}, name=hostile)
    text = shown(made)
    assert "\x1b" not in text
    assert "a?[31m[bold] bxx" in text


def test_summary_tells_the_best_way_and_the_range_against_one_session() -> None:
    best, against = summary(
        small(session=[100.0, 100.0], sharded=[90.0, 95.0], batched=[220.0, 200.0])
    )
    assert best.startswith("Most rows a second: batched with 420 (400\N{EN DASH}440)")
    assert "2.10 (2.00\N{EN DASH}2.20) times (batched, batch 2, 4 clients)" in against


def test_summary_does_not_hide_that_mcinfer_is_slower() -> None:
    _, against = summary(small(session=[100.0], sharded=[50.0]))
    assert "0.500 times (sharded" in against


def test_interrupted_benchmark_says_so() -> None:
    made = replace(small(session=[100.0]), finished=False)
    assert remarks(made) == ("The benchmark was interrupted: some turns are missing.",)


def test_single_repeat_says_that_its_spread_is_not_known() -> None:
    made = small(session=[100.0])
    made = replace(made, settings=replace(made.settings, repeats=1))
    assert remarks(made) == ("Everything was measured once: how far figures spread is not known.",)


def test_report_of_nothing_is_shown() -> None:
    assert "unet.onnx" in shown(report([], {}))
