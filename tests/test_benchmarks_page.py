"""Tests of benchmarks/page.py, which puts measured figures into docs/benchmarks.md."""

from importlib import import_module
from pathlib import Path

import pytest

from mcinfer.bench.report import Load, dump
from tests.bench_reports import report, turn, way

ROOT = Path(__file__).parents[1]


def test_partial_run_replaces_its_own_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("benchmarks", "examples/sd_dual_core"):
        monkeypatch.syspath_prepend(ROOT / folder)
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
