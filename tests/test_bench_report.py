"""Tests of mcinfer/bench/report.py."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcinfer.bench.report import (
    QUANTILES,
    Load,
    Memory,
    Report,
    Turn,
    dump,
    json_schema,
    load,
)
from mcinfer.errors import InvalidInputError
from tests import bench_reports

SECONDS = st.floats(0, 1e9, allow_nan=False)
COUNTS = st.integers(0, 2**53)
TEXTS = st.text(max_size=20)
LOADS = st.builds(Load, batch=COUNTS, clients=COUNTS, rate=st.none() | SECONDS)
LATENCIES = st.tuples(*[SECONDS] * len(QUANTILES)) | st.just(())


@st.composite
def turns(draw: st.DrawFn, load: Load) -> Turn:
    latencies = draw(LATENCIES)
    return Turn(
        requests=draw(st.integers(1, 2**53)) if latencies else 0,
        failed=draw(COUNTS),
        unfinished=draw(COUNTS),
        seconds=draw(SECONDS),
        latencies=latencies,
        mean_latency=draw(SECONDS),
        run_seconds=draw(st.none() | SECONDS),
        cpu_seconds=draw(SECONDS),
        kept_up=load.rate is None or draw(st.booleans()),
        error=draw(TEXTS),
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    names = draw(st.lists(TEXTS, min_size=1, max_size=3, unique=True))
    memories = st.builds(Memory, pss=COUNTS, uss=COUNTS, processes=COUNTS)
    ways = [
        replace(
            bench_reports.way(name, role=draw(st.sampled_from(["baseline", "mcinfer", "scaling"]))),
            text=draw(TEXTS),
            start_seconds=tuple(draw(st.lists(SECONDS, max_size=2))),
            memory=tuple(draw(st.lists(memories, max_size=2))),
            error=draw(TEXTS),
        )
        for name in names
    ]
    keys = draw(st.lists(st.tuples(st.sampled_from(names), LOADS), max_size=3, unique=True))
    taken = {key: draw(st.lists(turns(key[1]), max_size=2)) for key in keys}
    facts = draw(st.dictionaries(TEXTS, TEXTS | COUNTS | SECONDS, max_size=4))
    made = bench_reports.report(ways, taken, name=draw(TEXTS))
    return replace(made, machine=facts, finished=draw(st.booleans()))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(report=reports())
def test_report_is_read_as_it_was_written(tmp_path: Path, report: Report) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(dump(report))
    assert load(path) == report


def test_turn_of_an_earlier_mcinfer_kept_up_and_tells_no_error(tmp_path: Path) -> None:
    report = bench_reports.small(session=[100.0])
    content = json.loads(dump(report))
    del content["measurements"][0]["turns"][0]["kept_up"]
    del content["measurements"][0]["turns"][0]["error"]
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert load(tmp_path / "report.json") == report


def test_field_that_is_not_known_is_passed_over(tmp_path: Path) -> None:
    report = bench_reports.small(session=[1.0])
    content = json.loads(dump(report))
    content["of_a_later_mcinfer"] = content["model"]["too"] = 1
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
