"""Tests of mcinfer/cli/options.py: the values of options."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.cli.options import (
    engine_for,
    parse_counts,
    parse_devices_option,
    parse_dims,
    parse_pause,
    parse_rates,
)

Parse = Callable[[str], object]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_devices_option, "2", 2),
        (parse_devices_option, "cpu:0,cuda:1", ["cpu:0", "cuda:1"]),
        (parse_devices_option, "inline", ["inline"]),
        (parse_pause, "2.5", 2.5),
        (parse_counts, "8,1,2", (8, 1, 2)),
        (parse_rates, "20,0.5", (20.0, 0.5)),
        (parse_dims, "a=b:1=7", ("a=b:1", 7)),
    ],
)
def test_value_is_parsed(parse: Parse, text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_devices_option, text) for text in ["", "0", "cpu", "1025", "cpu:0,,cpu:1"]),
        *((parse_pause, text) for text in ["", "-1", "nan", "soon"]),
        *((parse_counts, text) for text in ["", "0", "-1", "1,,2", "1.5", "2,2", "a"]),
        *((parse_rates, text) for text in ["", "0", "-1", "inf", "nan", "2,2.0", "a"]),
        *((parse_dims, text) for text in ["", "seq", "seq=", "=1", "seq=0", "seq=-1", "seq=1.5"]),
    ],
)
def test_value_of_another_form_is_wrong_usage(parse: Parse, text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"got .*, expected "):
        parse(text)


@pytest.mark.parametrize(
    "parse", [parse_devices_option, parse_pause, parse_counts, parse_rates, parse_dims]
)
@given(text=st.text("0123456789.,=-eE:cpuinfa ²٣"))
def test_any_text_is_parsed_or_refused(parse: Parse, text: str) -> None:
    with suppress(typer.BadParameter):
        parse(text)


@pytest.mark.parametrize(
    ("name", "engines"),
    [("model", {"onnxruntime"}), ("m.mindir", {"mindspore", "mindspore_lite"})],
)
def test_engine_follows_from_the_files_ending(name: str, engines: set[str]) -> None:
    assert engine_for(Path(name)) in engines
