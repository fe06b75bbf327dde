"""Tests of the verdict of mcinfer/bench/texts.py, and of where it is written."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mcinfer.bench.page import render
from mcinfer.bench.report import OTHERS, OTHERS_BEFORE, Report, dump
from mcinfer.bench.table import show
from mcinfer.bench.texts import BUSY_CORES, busy, judged, report_program
from tests.bench_reports import small

QUIET = {OTHERS: 0.02, OTHERS_BEFORE: 0.0}
FAST = small(session=[100.0, 101.0], sharded=[150.0, 151.0])


def everywhere(made: Report) -> tuple[str, ...]:
    """What the terminal, the page and the file say of a report."""
    console = Console(file=StringIO(), width=300)
    show(made, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue(), render(made), dump(made).decode()


cores = st.floats(0.0, 8.0)


@given(
    before=cores,
    during=cores,
    finished=st.booleans(),
    rates=st.lists(st.floats(50.0, 150.0), min_size=2, max_size=3),
)
def test_what_disturbed_a_benchmark_takes_the_place_of_its_verdict(
    before: float, during: float, finished: bool, rates: list[float]
) -> None:
    made = small(session=rates, sharded=[2 * rate for rate in rates])
    facts = {**made.machine, OTHERS: during, OTHERS_BEFORE: before}
    made = judged(replace(made, machine=facts, finished=finished))
    others = max(before, during) > BUSY_CORES
    differ = (max(rates) - min(rates)) / sorted(rates)[len(rates) // 2] > 0.5
    assert bool(made.disturbed) >= (others or differ or not finished)
    assert bool(made.disturbed) == made.verdict.startswith("No verdict. ")
    assert made.verdict.startswith("Use mcinfer: ") == (not made.disturbed)
    for text in made.disturbed:
        assert text in made.verdict
    for text in everywhere(made):
        assert ("No verdict. " in text) == bool(made.disturbed)
        assert ("Use mcinfer" in text) == (not made.disturbed)
        assert "import mcinfer" not in text or not made.disturbed
    assert bool(report_program(made)) == (not made.disturbed)
    assert json.loads(dump(made))["disturbed"] == [*made.disturbed]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, ()),
        (QUIET, ()),
        ({OTHERS: 0.5}, ("other programs used 0.500 cores while it measured.",)),
        (
            {OTHERS: 1.25, OTHERS_BEFORE: 0.2},
            ("used 0.200 cores before this began and 1.25 cores while it measured. End them",),
        ),
    ],
)
def test_busy_machine_is_told_from_a_quiet_one(facts: dict[str, float], said: list[str]) -> None:
    found = busy(facts)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_repeats_that_differ_have_no_verdict_and_those_of_a_quiet_machine_have() -> None:
    assert judged(replace(FAST, machine={**FAST.machine, **QUIET})).disturbed == ()
    (why,) = judged(small(session=[100.0, 150.0], sharded=[150.0, 300.0])).disturbed
    assert why.startswith("Repeats differ by ")


def test_benchmark_without_repeats_has_no_verdict() -> None:
    once = judged(replace(FAST, settings=replace(FAST.settings, repeats=1)))
    assert once.verdict.startswith("No verdict: everything was measured once")
    assert report_program(once) == ""
