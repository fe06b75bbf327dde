"""Tests of mcinfer/bench/report.py."""

import json
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mcinfer.bench import report as report_module
from mcinfer.bench.report import dump, load
from mcinfer.errors import InvalidInputError
from tests import bench_reports


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = bench_reports.large()
    ways = (replace(report.ways[0], text="模型 <b>\n", error="\x00"), *report.ways[1:])
    report = replace(report, ways=ways, finished=False)
    (tmp_path / "report.json").write_bytes(dump(report))
    assert load(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["schema"], None, "schema: got None, expected 'mcinfer.bench'"),
        (["version"], 1, "version: got 1, expected 2"),
        (["model"], None, ""),
        (["settings"], {}, "missing .* required"),
    ],
)
def test_file_that_is_no_report_is_refused_with_the_place(
    tmp_path: Path, path: list[Any], value: Any, says: str
) -> None:
    content = json.loads(dump(bench_reports.small(session=[100.0], sharded=[100.0])))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "report.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidInputError, match=f"report.json is no benchmark report.*{says}"):
        load(file)


@pytest.mark.parametrize("data", [b"\xff", b"[]", b"{}", b"[" * 100_000])
def test_file_that_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="no benchmark report"):
        load(path)


def test_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[1] / "docs/bench_report.md").read_text(encoding="utf-8")
    kinds = [each for each in vars(report_module).values() if is_dataclass(each)]
    assert len(kinds) == 8
    for field in (field for kind in kinds for field in fields(kind)):
        assert re.search(rf"^\|[^|]*`{field.name}`", text, re.MULTILINE), field.name


def test_fields_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    report = bench_reports.small(session=[100.0])
    content = json.loads(dump(report))
    content["later"] = content["model"]["later"] = 1
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert load(tmp_path / "report.json") == report
