"""Tests of mcinfer/bench/report.py."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcinfer.bench.report import dump, json_schema, load
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
        (["model"], None, "model: "),
        (["ways", 0, "role"], "idle", r"ways\.0\.role: "),
        (["ways", 0, "name"], "other", r"measurements\.0\.way: got 'session'"),
        (["ways", 1, "name"], "session", "ways: got .* expected each once"),
        (["measurements", 1, "way"], "session", "session under batch 2, 4 clients came before"),
        (["measurements", 0, "turns", 0, "latencies"], [1.0], "got 1 latencies"),
        (["measurements", 0, "turns", 0, "seconds"], "long", r"turns\.0\.seconds: "),
        (["measurements", 0, "turns", 0, "kept_up"], False, "kept_up .* closed loop"),
        (["quantiles"], [0.5], "quantiles: "),
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
            assert re.search(rf"^\|[^|]*`{name}`", text, re.MULTILINE)
