"""Tests of the ways: their names, and how requests are cut and joined by hand."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcinfer.bench import check_engines, check_names, way_class
from mcinfer.bench.baselines import cut, join
from mcinfer.bench.way import Setup
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import Split


@pytest.mark.parametrize("name", ["sessions", "", "ways.py:", "ways.txt:A"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"expected one of \['session', .*FILE.py:Class"):
        check_names([name])


def test_ways_that_a_report_could_not_tell_apart_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.touch()
    other.touch()
    check_names(["session", f"{one}:Mine", f"{other}:Yours"])
    for names in ([f"{one}:Mine", f"{other}:Mine"], [f"{one}:threads"]):
        with pytest.raises(InvalidInputError, match="expected different class names"):
            check_names(names)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ways_of_mine.py", "expected a subclass of .*RunningWay, got <class 'int'>"),
        ("json.py", "rename the file"),
        ("my-ways.py", "rename the file"),
    ],
)
def test_file_without_a_usable_way_is_refused(tmp_path: Path, name: str, error: str) -> None:
    path = tmp_path / name
    for look in (way_class, lambda name: check_names([name])):
        with pytest.raises(InvalidInputError, match=f"there is no file {path}"):
            look(f"{path}:Mine")
    path.write_text("Mine = int\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=error):
        way_class(f"{path}:Mine")


SETUP = Setup(
    model="m.onnx",
    cores=2,
    devices=("cpu:0", "cpu:1"),
    split=Split(inputs={"x": 0, "t": None}, outputs={"y": 0}, known="declared", checked=True),
)


@pytest.mark.parametrize(
    ("rows", "fixed", "most", "sizes"),
    [
        (5, None, 2, [3, 2]),
        (1, None, 4, [1]),
        (6, 2, 1, [2, 2, 2]),
        (5, 2, 4, [5]),  # the model refuses it
        (0, None, 2, [0]),
    ],
)
def test_requests_are_cut_by_hand(
    rows: int, fixed: int | None, most: int, sizes: list[int]
) -> None:
    x, t = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3), np.array(7)
    pieces = cut({"x": x, "t": t}, replace(SETUP, fixed_batch=fixed), most)
    assert [len(piece["x"]) for piece in pieces] == sizes
    assert all(piece["t"] is t for piece in pieces)
    (joined,) = join([[piece["x"]] for piece in pieces], SETUP)
    np.testing.assert_array_equal(joined, x)


MIXING = Split(
    inputs={"x": 0},
    outputs={"y": "mixed"},
    known="learned",
    checked=True,
    reason="the rows of a batch depend on each other",
)
UNJOINED = Split(inputs={"x": 0}, outputs={"y": "its axis is not known"}, known="declared")


@pytest.mark.parametrize(
    ("split", "changes", "why"),
    [
        (SETUP.split, {}, ""),
        (SETUP.split, {"batches": (1, 4)}, ""),
        (MIXING, {"batches": (4,)}, "the rows of a batch depend on each other"),
        (UNJOINED, {}, "output 'y': its axis is not known"),
        (SETUP.split, {"devices": ("cpu:0",)}, "there is one worker"),
        (SETUP.split, {"batches": (1,)}, "each request has one row"),
        (SETUP.split, {"batches": (2,), "fixed_batch": 2}, "each request is one run of 2"),
        (SETUP.split, {"batches": (2,), "fixed_batch": 1}, ""),
    ],
)
def test_why_nothing_is_cut(split: Split, changes: Mapping[str, Any], why: str) -> None:
    setup = replace(SETUP, **changes)
    assert setup.why_uncut(split) == why
    if split is not SETUP.split:
        assert cut({"x": np.arange(4)}, replace(setup, split=split), 2)[0]["x"].shape == (4,)


@pytest.mark.parametrize(
    "engines",
    [
        ["onnxruntim"],
        ["openvino:f8"],
        ["openvino:"],
        ["onnxruntime:bf16"],
        ["openvino", "openvino"],
    ],
)
def test_engines_that_are_wrong_or_named_twice_are_refused(engines: list[str]) -> None:
    with pytest.raises(InvalidInputError, match=r"^--engine: got .*, expected "):
        check_engines(engines)
    check_engines(["onnxruntime", "openvino", "openvino:bf16"])
