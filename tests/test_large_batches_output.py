"""Tests of output.py, growing.py and partial_folder.py of mcinfer/large_batches: an output that grows."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcinfer.errors import McinferError
from mcinfer.large_batches import output as batch_output
from mcinfer.large_batches.output import BatchOutput
from mcinfer.large_batches.partial_folder import PartialFolder
from mcinfer.large_batches.requests import Requests
from mcinfer.sharding import JoinError, OutputJoin

Array = NDArray[Any]

WORK = {"model": 1, "input": [2]}

BATCH = OutputJoin(axis=0, shapes=None, shape=None)
SECOND = OutputJoin(axis=1, shapes=None, shape=None)
GUESSED = OutputJoin(axis=None, shapes=None, shape=None, guessed=True)
NO_BATCH = OutputJoin(axis=None, shapes=None, shape=None)


def requests_of(units: int, step: int, **joins: OutputJoin) -> Requests:
    return Requests(
        axes={},
        sizes={},
        units=units,
        step=step,
        unit_rows=1,
        shards=1,
        pieces=1,
        joins=joins,
    )


@contextmanager
def output(target: Path, requests: Requests, **options: bool) -> Iterator[BatchOutput]:
    """One run, which keeps what it has when it is interrupted."""
    with PartialFolder(target, WORK, **options) as folder:
        making = BatchOutput(folder, requests)
        try:
            yield making
        except KeyboardInterrupt:
            making.keep()


def parts_of(whole: Array, axis: int, requests: Requests) -> list[Array]:
    ratio = whole.shape[axis] // requests.units
    bounds = [requests.span(i) for i in range(requests.count)]
    places = (slice(None),) * axis
    return [whole[(*places, slice(a * ratio, b * ratio))] for a, b in bounds]


def loaded(target: Path) -> dict[str, Array]:
    with np.load(target, allow_pickle=False) as content:
        return dict(content)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=60, deadline=None)
@given(
    units=st.integers(1, 9),
    step=st.integers(1, 9),
    ratio=st.integers(0, 3),
    join=st.sampled_from([BATCH, SECOND, GUESSED]),
    dtype=st.sampled_from(["f4", "i8", "?", "U"]),
    interrupted=st.integers(0, 9),
)
def test_parts_come_together_also_after_an_interruption(
    tmp_path_factory: pytest.TempPathFactory,
    units: int,
    step: int,
    ratio: int,
    join: OutputJoin,
    dtype: str,
    interrupted: int,
) -> None:
    axis = join.axis or 0
    ratio = max(ratio, int(join.guessed))
    shape = (ratio * units, 3, 2) if axis == 0 else (3, ratio * units, 2)
    numbers = np.arange(np.prod(shape)).reshape(shape) ** 3
    whole = numbers.astype(object if dtype == "U" else dtype)
    if dtype == "U":
        whole[...] = np.vectorize(str, otypes=[object])(numbers)
    requests = requests_of(units, min(step, units), y=join, n=NO_BATCH)
    parts = parts_of(whole, axis, requests)
    target = tmp_path_factory.getbasetemp() / f"{os.getpid()}.npz"
    target.unlink(missing_ok=True)
    same = np.array([np.nan, -1.0])
    stop = min(interrupted, len(parts))
    with output(target, requests) as making:
        for part in parts[:stop]:
            making.add({"y": part, "n": same})
        raise KeyboardInterrupt
    with output(target, requests) as making:
        assert making.done == stop
        for part in parts[stop:]:
            making.add({"y": part, "n": same})
        lines = making.finish(target)
    kind = "string" if dtype == "U" else whole.dtype.name
    assert lines == [f"y: {kind}{[*shape]}", "n: float64[2]"]
    got = loaded(target)
    np.testing.assert_array_equal(got["y"], whole.astype(np.str_) if dtype == "U" else whole)
    np.testing.assert_array_equal(got["n"], same)
    assert not target.with_name(f".{target.name}.partial").exists()


@pytest.mark.parametrize(
    ("join", "parts", "units", "text"),
    [
        (
            NO_BATCH,
            [[1.0, 2.0], [1.0, 3.0]],
            4,
            r"'y' has no batch .* other values of float64\[2\]",
        ),
        (NO_BATCH, [[1.0, 2.0], [1.0]], 4, r"'y' has no batch .* float64\[1\] after float64\[2\]"),
        (NO_BATCH, [[1.0, 2.0], [1, 2]], 4, r"'y' has no batch .* int64\[2\] after float64\[2\]"),
        (BATCH, [[[1], [2]], [[1, 2], [3, 4]]], 4, r"'y' is int64\[2, 2\] .* int64\[2, 1\] in"),
        (BATCH, [[1, 2], [1, 2, 3]], 4, r"'y' is int64\[3\] .* do not join along axis 0"),
        (GUESSED, [[1, 2], [1, 2]], 3, r"'y' is|'y' has no batch"),
        (GUESSED, [[1, 2, 3], [1, 2, 4]], 4, r"'y' has no batch dimension and differs"),
    ],
)
def test_parts_that_do_not_go_together_are_told_with_the_outputs_name(
    tmp_path: Path, join: OutputJoin, parts: Sequence[Any], units: int, text: str
) -> None:
    target = tmp_path / "out.npz"
    with output(target, requests_of(units, 2, y=join)) as making:
        making.add({"y": np.array(parts[0])})
        if units == 3:  # what was taken for the batch is found to be none, and equal
            making.add({"y": np.array(parts[1])})
            assert making.finish(target) == ["y: int64[2]"]
            return
        with pytest.raises(JoinError, match=text):
            making.add({"y": np.array(parts[1])})
        assert making.done == 1
        raise KeyboardInterrupt
    assert files(tmp_path) == [".out.npz.partial"]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_types_that_numpy_lacks_keep_their_names_and_can_be_loaded(
    tmp_path: Path, name: str
) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    target = tmp_path / "out.npz"
    part = np.array([1, 2], dtype)
    with output(target, requests_of(4, 2, y=BATCH)) as making:
        making.add({"y": part})
        raise KeyboardInterrupt
    with output(target, requests_of(4, 2, y=BATCH)) as making:
        making.add({"y": part})
        assert making.finish(target) == [f"y: {name}[4]"]
    got = loaded(target)["y"]
    assert got.dtype == np.dtype(f"V{dtype.itemsize}")
    assert got.view(dtype).tolist() == [1, 2, 1, 2]


def test_names_cannot_command_a_terminal(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with output(target, requests_of(1, 1, **{"y\x1b[2J\n": BATCH})) as making:
        making.add({"y\x1b[2J\n": np.array([1])})
        assert making.finish(target) == ["y?[2J?: int64[1]"]


@pytest.mark.parametrize(
    ("join", "parts", "remarks"),
    [
        (NO_BATCH, [[2], [2]], ["'y' has no batch dimension: it was the same in all 2 requests"]),
        (
            GUESSED,
            [[1, 2], [3, 4]],
            ["'y' is taken to have 2 rows for each row of the batch: those"],
        ),
        (GUESSED, [[1], [2]], []),
        (BATCH, [[1, 2], [3, 4]], []),
    ],
)
def test_what_rests_on_how_the_batch_was_cut_is_remarked(
    tmp_path: Path, join: OutputJoin, parts: list[list[int]], remarks: list[str]
) -> None:
    with output(tmp_path / "out.npz", requests_of(len(parts), 1, y=join)) as making:
        for part in parts:
            making.add({"y": np.array(part)})
        found = making.remarks()
    assert len(found) == len(remarks)
    assert all(text in remark for text, remark in zip(remarks, found, strict=True))


@pytest.mark.parametrize(("pieces", "count"), [(1, 0), (3, 1)])
def test_pieces_of_one_request_are_parts_as_well(tmp_path: Path, pieces: int, count: int) -> None:
    requests = replace(requests_of(3, 3, y=NO_BATCH), pieces=pieces)
    with output(tmp_path / "out.npz", requests) as making:
        making.add({"y": np.array(7)})
        assert [text for text in making.remarks() if "in all 3 parts" in text] == making.remarks()
        assert len(making.remarks()) == count


def test_room_that_is_missing_is_known_from_the_first_part_on(tmp_path: Path) -> None:
    with output(tmp_path / "out.npz", requests_of(1 << 50, 2, y=BATCH)) as making:
        assert making.missing_bytes() == 0
        making.add({"y": np.array([1, 2], np.int8)})
        disk = os.statvfs(tmp_path)
        missing = 2 * (1 << 50) - 2 - disk.f_bavail * disk.f_frsize
        assert making.missing_bytes() == pytest.approx(missing, rel=0.1)


def begun(target: Path) -> Path:
    """One request of three is done; its state."""
    with output(target, requests_of(3, 1, y=BATCH)) as making:
        making.add({"y": np.array([1])})
        raise KeyboardInterrupt
    return target.with_name(f".{target.name}.partial") / "state.json"


def test_state_is_saved_with_the_first_request_and_then_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(batch_output, "monotonic", lambda: now)
    target = tmp_path / "out.npz"
    state = tmp_path / ".out.npz.partial" / "state.json"
    saved = []
    with output(target, requests_of(9, 1, y=BATCH)) as making:
        for _ in range(8):
            making.add({"y": np.array([1])})
            saved.append(json.loads(state.read_text("ascii"))["state"]["done"])
            now += 0.4
    assert saved == [1, 1, 1, 4, 4, 4, 7, 7]


def test_other_work_is_refused_with_what_differs_and_stays(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    state = begun(target)
    content = state.read_bytes()
    with pytest.raises(
        McinferError, match=r"\.out\.npz\.partial holds .* another input; --restart"
    ):
        PartialFolder(target, {**WORK, "input": [3]})
    assert state.read_bytes() == content
    with PartialFolder(target, {**WORK, "input": [3]}, restart=True) as folder:
        assert folder.state is None
        assert files(folder.path) == ["lock"]
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"work": {}}', '{"work": 1, "state": {}}', "[" * 100_000]
)
def test_state_that_says_nothing_is_told(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "out.npz"
    begun(target).write_text(damage)
    with pytest.raises(McinferError, match=r"is damaged \(state.json: .*--restart discards it"):
        PartialFolder(target, WORK)


def test_rows_that_are_missing_are_told(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    os.truncate(begun(target).with_name("0.rows"), 7)
    with (
        PartialFolder(target, WORK) as folder,
        pytest.raises(McinferError, match="less than 8 bytes of output 'y'"),
    ):
        BatchOutput(folder, requests_of(3, 1, y=BATCH))


@pytest.mark.parametrize(("units", "step", "name"), [(4, 1, "y"), (3, 2, "y"), (3, 1, "z")])
def test_state_of_other_requests_is_told(tmp_path: Path, units: int, step: int, name: str) -> None:
    target = tmp_path / "out.npz"
    begun(target)
    with PartialFolder(target, WORK) as folder, pytest.raises(McinferError, match="is damaged"):
        BatchOutput(folder, requests_of(units, step, **{name: BATCH}))


def test_rows_beyond_what_the_state_says_are_written_over(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with begun(target).with_name("0.rows").open("ab") as file:
        file.write(b"of a request that was not saved")
    with output(target, requests_of(3, 1, y=BATCH)) as making:
        making.add({"y": np.array([2])})
        making.add({"y": np.array([3])})
        making.finish(target)
    assert loaded(target)["y"].tolist() == [1, 2, 3]


def test_folder_is_for_one_at_a_time_and_for_the_next_when_it_is_left(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with PartialFolder(target, WORK):
        for restart in (False, True):
            with pytest.raises(McinferError, match=r"another run is writing to .*\.out\.npz\."):
                PartialFolder(target, WORK, restart=restart)
    with PartialFolder(target, WORK):
        pass
    assert files(tmp_path) == []


def test_folder_that_cannot_be_made_is_told_with_the_option(tmp_path: Path) -> None:
    (tmp_path / ".out.npz.partial").touch()
    with pytest.raises(McinferError, match=r"^--output: .*\.out\.npz\.partial: File exists$"):
        PartialFolder(tmp_path / "out.npz", WORK)


def test_what_is_not_ours_in_the_folder_stays(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    begun(target).with_name("notes.txt").write_text("mine")
    with PartialFolder(target, WORK, restart=True):
        pass
    assert files(tmp_path / ".out.npz.partial") == ["notes.txt"]


def test_nothing_is_left_when_it_is_to_be_forgotten(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    begun(target)
    with output(target, requests_of(3, 1, y=BATCH)) as making:
        making.forget()
    assert files(tmp_path) == []
