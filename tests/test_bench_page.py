"""Tests of mcinfer/bench/page.py, and of benchmarks/page.py: figures in docs/benchmarks.md."""

import base64
import re
from dataclasses import replace
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest

from mcinfer.bench.page import charts, render
from mcinfer.bench.report import Load, Report, dump
from mcinfer.bench.texts import judged
from tests.bench_reports import report, small, turn, way

ROOT = Path(__file__).parents[1]
HOSTILE = "</script><script>alert('1')</script>\"><img src=x onerror=y>$x_$ 模型"
CLOSED, OPEN = Load(batch=1, clients=2), Load(batch=1, clients=8, rate=50.0)


def text_of(page: str) -> str:
    """The page's text, without its tags."""
    return unescape(re.sub("<[^>]*>", "", page))


def hostile() -> Report:
    """Ways that failed or did not keep up, with hostile names."""
    ways = [way("session"), way(HOSTILE), replace(way("pipe"), error=HOSTILE)]
    made = report(
        ways,
        {
            ("session", CLOSED): [turn(), turn(120.0)],
            (HOSTILE, CLOSED): [turn(failed=3, error=HOSTILE), turn()],
            ("session", OPEN): [turn(50.0)],
            (HOSTILE, OPEN): [turn(0.0, unfinished=100)],
        },
        name=HOSTILE,
    )
    return replace(made, machine={"cpu": HOSTILE}, made_at=HOSTILE, mcinfer=HOSTILE)


def test_page_has_hostile_names_as_text_and_loads_nothing() -> None:
    page = render(judged(hostile()))
    assert not re.search(r"<(script|img|iframe|object|link|base)\b|@import|url\(", page)
    tags = re.findall(r"<\w[^>]*>", page)
    attributes = {name for tag in tags for name in re.findall(r'([\w:-]+)="[^"]*"', tag)}
    assert attributes <= {"lang", "charset", "name", "content", "http-equiv"} | {
        *("class", "scope", "style", "href", "download")
    }
    text = text_of(page)
    assert text.count("<script>alert('1')</script>") >= 8
    (download,) = re.findall(r'href="([^"]*)"', page)
    start, _, data = download.partition(",")
    assert start == "data:application/json;base64"
    assert base64.b64decode(data) == dump(judged(hostile()))
    # What was not answered is shown.
    assert "session, batch" not in text
    assert "(3 of 403 failed)" in text
    assert "did not keep up: 0 of 50 requests/s answered, 100 of 100 never begun" in text
    assert f" failed: {HOSTILE}" in text
    assert "pipe could not be measured: " in text
    assert "∞" in text


def test_first_line_is_the_verdict_then_plots_then_figures_and_versions_last() -> None:
    made = small(session=[100.0, 101.0], sharded=[150.0, 151.0])
    text = render(judged(made))
    body = text[text.index("<body>") :]
    parts = (
        *("<h1>Use mcinfer: 1.50", "speed-up over the best", "memory of all processes"),
        *("import mcinfer", "<thead>", "Model, machine and versions"),
    )
    places = [body.index(part) for part in parts]
    assert places == sorted(places)


def test_report_of_nothing_is_still_a_page() -> None:
    nothing = report([], {})
    assert charts(nothing) == []
    assert "<h1>No verdict: " in render(judged(nothing))


@pytest.mark.thorough
def test_partial_run_replaces_its_own_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = import_module("page")
    path = tmp_path / "benchmarks.md"
    path.write_text((ROOT / "docs" / "benchmarks.md").read_text("utf-8"), "utf-8")
    before = path.read_text("utf-8").splitlines()
    turns = {
        (name, Load(batch=2, clients=1)): [turn(slowest=slowest)] * 2
        for name, slowest in (("sharded", 0.05), ("session", 0.1))
    }
    measured = report([way("sharded"), way("session")], turns)
    (tmp_path / "unet.json").write_bytes(dump(measured))
    page.write_page(path, tmp_path, [page.RUNS[0]])
    after = path.read_text("utf-8").splitlines()
    gone, new = set(before) - set(after), set(after) - set(before)
    begin, end = before.index("<!-- unet -->"), before.index("<!-- mobilenet -->")
    own = {*before[begin:end], *(line for line in before if line.startswith("| UNet, "))}
    assert gone <= own
    [line] = [line for line in new if line.startswith("| UNet, batch 2")]
    assert "| ≤ 1 | 0.5 [0.5 … 0.5] |" in line
