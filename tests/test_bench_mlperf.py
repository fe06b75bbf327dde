"""Tests of mcinfer/bench/mlperf.py; most need LoadGen (the extra mlperf)."""

import re
from pathlib import Path
from time import sleep

import pytest

from mcinfer.bench.report import Load, Scenario
from tests.command_line import COMMAND
from tests.process.scripts import Program

SCENARIOS: tuple[tuple[Scenario, float | None], ...] = (
    ("SingleStream", None),
    ("Offline", None),
    ("Server", 100.0),
)


@pytest.mark.parametrize(("scenario", "rate"), SCENARIOS)
def test_every_query_of_loadgen_is_answered_and_its_latencies_are_taken(
    scenario: Scenario, rate: float | None
) -> None:
    mlperf = pytest.importorskip("mcinfer.bench.mlperf", exc_type=ImportError)
    load = Load(
        batch=1, clients=1 if scenario == "SingleStream" else 4, rate=rate, scenario=scenario
    )
    outcome = mlperf.offer(lambda: sleep(0.002), load, seconds=0.2, count=0, seed=1)
    assert outcome.answers
    assert not outcome.errors
    found = outcome.latencies_at((0.0, 0.5, 0.9, 0.99, 1.0))
    assert found == tuple(outcome.measured.values()) == tuple(sorted(found))
    assert found[0] >= 0.002
    counted = mlperf.offer(lambda: None, load, seconds=0.0, count=7, seed=1)
    assert len(counted.answers) == 7


@pytest.mark.parametrize(("scenario", "rate"), SCENARIOS)
def test_request_that_fails_is_reported_and_loadgen_ends(
    scenario: Scenario, rate: float | None
) -> None:
    mlperf = pytest.importorskip("mcinfer.bench.mlperf", exc_type=ImportError)

    def fail() -> None:
        raise OSError("no such thing")

    load = Load(batch=1, clients=2, rate=rate, scenario=scenario)
    outcome = mlperf.offer(fail, load, seconds=0.0, count=3, seed=0)
    assert outcome.errors == ["OSError: no such thing"] * 3
    assert outcome.latencies_at((0.5,)) == ()
    tried = mlperf.offer(fail, load, seconds=0.01, count=0, seed=0)
    assert {*tried.errors} == {"OSError: no such thing"}


def test_missing_loadgen_is_an_error_before_the_work(tmp_path: Path) -> None:
    without = "import sys; sys.modules['mlperf_loadgen'] = None\n"
    with Program(without + COMMAND, "bench", "m.onnx", "--load", "mlperf", cwd=tmp_path) as program:
        done = program.wait()
    assert done.status == 1
    assert re.fullmatch(
        r"mcinfer: LoadGen is in the package mlcommons-loadgen: .*(pip install|mlperf).*\n",
        done.err,
    )
