"""Tests of mcinfer/logs.py: what a record says it is about, in text and in JSON."""

import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest

from mcinfer.logs import JsonFormatter, PoolLog, TextFormatter, about

LOG = logging.getLogger("mcinfer.model_cache")


@pytest.fixture
def written() -> Iterator[tuple[StringIO, logging.StreamHandler[StringIO]]]:
    """What a handler of the logger ``mcinfer`` writes."""
    handler = logging.StreamHandler(StringIO())
    logger = logging.getLogger("mcinfer")
    logger.addHandler(handler)
    yield handler.stream, handler
    logger.removeHandler(handler)


Written = tuple[StringIO, logging.StreamHandler[StringIO]]


def test_record_of_a_pool_begins_with_its_name_and_keeps_its_place(
    written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    stream, handler = written
    handler.setFormatter(TextFormatter("[100 %] "))
    devices = [f"cpu:{n}" for n in range(9)]
    with about("another/1"):  # the pool's own word counts
        PoolLog("50 %s/3", devices).warning("%d of %s", 3, "9")
    line = stream.getvalue()
    assert line.endswith(" WARNING mcinfer.master: 50 %s/3 on cpu:0, cpu:1, …, cpu:8: 3 of 9\n")
    assert line.startswith("[100 %] ")
    assert [record.module for record in caplog.records] == [__name__.rpartition(".")[2]]


def test_what_is_logged_meanwhile_is_about_the_model(written: Written) -> None:
    stream, handler = written
    handler.setFormatter(TextFormatter())
    with about("encoder/3"):
        LOG.warning("%s is gone", "it")
    LOG.warning("it is there")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("mcinfer.model_cache: encoder/3: it is gone")
    assert second.endswith("mcinfer.model_cache: it is there")


def test_text_in_a_record_passes_for_no_record_and_has_no_escapes(written: Written) -> None:
    stream, handler = written
    handler.setFormatter(TextFormatter("[mark] "))
    forged = "2026-01-01 00:00:00,000 ERROR mcinfer: forged"
    for end in "\n", "\r", "\x85", "\u2028":
        LOG.warning("got %s", f"x{end}{forged}\x1b[31m\n")
    PoolLog("m.onnx", ["cpu:0"]).log(logging.ERROR, "failed", failure=ValueError(f"why\n{forged}"))
    lines = stream.getvalue().split("\n")
    assert [line for line in lines if not line.startswith(("[mark] ", "    "))] == [""]
    assert lines[1] == f"    {forged}?[31m"
    assert len(lines) == 4 * 2 + 4


def test_line_of_json_has_time_message_fields_and_exception(written: Written) -> None:
    stream, handler = written
    handler.setFormatter(JsonFormatter({"worker": 1}))
    with about("encoder/3"):
        LOG.warning('%s\n"quoted"', "é")
    PoolLog("m.onnx", ["cpu:0"]).log(logging.ERROR, "failed", failure=ValueError("why"))
    LOG.warning("plain", extra={"fields": {"ms": 1.5, "model": "own", "other": b"bytes"}})
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    time = first.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(time)) < timedelta(minutes=5)
    assert first == {
        "level": "WARNING",
        "logger": "mcinfer.model_cache",
        "message": 'é\n"quoted"',
        "model": "encoder",
        "version": "3",
        "worker": 1,
    }
    assert (second["model"], second["message"]) == ("m.onnx", "m.onnx on cpu:0: failed")
    assert "version" not in second
    assert second["exception"].endswith("ValueError: why")
    assert (third["model"], third["ms"], third["other"]) == ("own", 1.5, "b'bytes'")
