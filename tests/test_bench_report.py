"""Tests of mcinfer/bench/report.py."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcinfer.bench.report import (
    dump,
    json_schema,
    load,
)
from mcinfer.errors import InvalidInputError
from tests import bench_reports


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = bench_reports.large()
    ways = (replace(report.ways[0], text="模型 <b>\n", error="\x00"), *report.ways[1:])
    report = replace(report, ways=ways, finished=False)
    (tmp_path / "report.json").write_bytes(dump(report))
    assert load(tmp_path / "report.json") == report


def test_fields_of_later_versions_are_passed_over_and_those_with_a_default_may_be_missing(
    tmp_path: Path,
) -> None:
    report = bench_reports.small(session=[100.0])
    content = json.loads(dump(report))
    content["of_a_later_mcinfer"] = content["model"]["too"] = 1
    del content["measurements"][0]["turns"][0]["kept_up"]
    del content["measurements"][0]["turns"][0]["error"]
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert load(tmp_path / "report.json") == report


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def _repeat(content: dict[str, Any]) -> None:
    content["measurements"].append(content["measurements"][0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.pop("schema"), "schema: got None, expected 'mcinfer.bench'"),
        (_set("version", value=2), "version: got 2, expected 1"),
        (lambda content: content.pop("model"), "model: "),
        (_set("ways", 0, "role", value="idle"), r"ways\.0\.role: "),
        (_set("ways", 0, "name", value="other"), r"measurements\.0\.way: got 'session'"),
        (_set("ways", 1, "name", value="session"), "ways: got .* expected each once"),
        (_set("measurements", 0, "turns", 0, "latencies", value=[1.0]), r"got 1 latencies"),
        (_set("measurements", 0, "turns", 0, "seconds", value="long"), r"turns\.0\.seconds: "),
        (_set("measurements", 0, "turns", 0, "kept_up", value=False), "kept_up .* closed loop"),
        (_set("quantiles", value=[0.5]), "quantiles: "),
        (_repeat, "session under batch 2, 4 clients came before"),
    ],
)
def test_file_that_is_no_report_is_refused_with_where(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    content = json.loads(dump(bench_reports.small(session=[100.0], sharded=[100.0])))
    change(content)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInputError, match=f"report.json is no benchmark report.*{says}"):
        load(path)


@pytest.mark.parametrize("data", [b"\xff", b"[]", b'{"a": NaN}', b"[" * 100_000])
def test_file_that_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="no benchmark report"):
        load(path)


def test_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[1] / "docs/bench_report.md").read_text(encoding="utf-8")
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name in part["properties"]:
            assert f"| `{name}` |" in text
