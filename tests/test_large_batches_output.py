"""Tests of output.py, growing.py and partial_folder.py of mcinfer/large_batches: an output that grows."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
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
from mcinfer.sharding import JoinError

Array = NDArray[Any]

WORK = {"model": 1, "input": [2]}


def requests_of(units: int, step: int, **outputs: int | None) -> Requests:
    return Requests(
        axes={}, sizes={}, units=units, step=step, unit_rows=1, shards=1, outputs=outputs
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


def parts_of(whole: Array, axis: int, sizes: Sequence[int]) -> list[Array]:
    places = (slice(None),) * axis
    bounds = pairwise(accumulate(sizes, initial=0))
    return [whole[(*places, slice(start, stop))] for start, stop in bounds]


def loaded(target: Path) -> dict[str, Array]:
    with np.load(target, allow_pickle=False) as content:
        return dict(content)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    axis=st.integers(0, 2),
    dtype=st.sampled_from(["f4", "i8", "?", "U"]),
    interrupted=st.integers(0, 9),
)
def test_parts_of_any_size_come_together_also_after_an_interruption(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    axis: int,
    dtype: str,
    interrupted: int,
) -> None:
    shape = [2, 3, 2]
    shape[axis] = sum(sizes)
    numbers = np.arange(np.prod(shape)).reshape(shape) ** 3
    whole = numbers.astype(object if dtype == "U" else dtype)
    if dtype == "U":
        whole[...] = np.array([*map(str, numbers.flat)], object).reshape(shape)
    requests = requests_of(len(sizes), 1, y=axis, n=None)
    parts = parts_of(whole, axis, sizes)
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
    assert lines == [f"y: {kind}{shape}", "n: float64[2]"]
    got = loaded(target)
    np.testing.assert_array_equal(got["y"], whole.astype(np.str_) if dtype == "U" else whole)
    np.testing.assert_array_equal(got["n"], same)
    assert not target.with_name(f".{target.name}.partial").exists()


def test_state_does_not_grow_with_the_number_of_requests(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    sizes: list[int] = []
    for count in (2, 900):
        with output(target, requests_of(1000, 1, y=1), restart=True) as making:
            for _ in range(count):
                making.add({"y": np.zeros((2, 3), np.int8)})
            raise KeyboardInterrupt
        sizes.append((tmp_path / ".out.npz.partial" / "state.json").stat().st_size)
    assert sizes[1] < sizes[0] + 20


@pytest.mark.parametrize(
    ("axis", "parts", "text"),
    [
        (None, [[1.0, 2.0], [1.0, 3.0]], "'y' is to be the same in all .* up to 0.5 of the larg"),
        (None, [["a"], ["b"]], "'y' is to be the same in all .* one gave other values"),
        (None, [[1.0, 2.0], [1.0]], r"got float64\[1\] from one request, float64\[2\] from the f"),
        (None, [[1.0, 2.0], [1, 2]], r"got int64\[2\] from one request, float64\[2\] from"),
        (0, [[[1], [2]], [[1, 2], [3, 4]]], r"'y' is joined along axis 0: got int64\[2, 2\] from"),
        (0, [[1, 2], [[1], [2]]], r"'y' is joined along axis 0: got int64\[2, 1\] from one"),
        (0, [[1, 2], [1.0, 2.0]], r"'y' is joined along axis 0: got float64\[2\] from one"),
    ],
)
def test_parts_that_do_not_go_together_are_told_with_the_outputs_name(
    tmp_path: Path, axis: int | None, parts: Sequence[Any], text: str
) -> None:
    target = tmp_path / "out.npz"
    with output(target, requests_of(4, 2, y=axis)) as making:
        making.add({"y": np.array(parts[0])})
        with pytest.raises(JoinError, match=text):
            making.add({"y": np.array(parts[1])})
        assert making.done == 1
        raise KeyboardInterrupt
    assert files(tmp_path) == [".out.npz.partial"]


def test_axis_that_an_output_lacks_is_told(tmp_path: Path) -> None:
    with (
        output(tmp_path / "out.npz", requests_of(4, 2, y=1)) as making,
        pytest.raises(JoinError, match=r"'y' is joined along axis 1: got int64\[2\]"),
    ):
        making.add({"y": np.array([1, 2])})


def test_outputs_that_are_the_same_but_for_rounding_are_the_same(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    first = np.linspace(1, 2, 400_000, dtype=np.float32).reshape(2, -1)
    with output(target, requests_of(2, 1, y=None)) as making:
        making.add({"y": first})
        making.add({"y": first * np.float32(1 + 1e-6)})
        making.finish(target)
    np.testing.assert_array_equal(loaded(target)["y"], first)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_types_that_numpy_lacks_keep_their_names_and_can_be_loaded(
    tmp_path: Path, name: str
) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    target = tmp_path / "out.npz"
    part = np.array([1, 2], dtype)
    with output(target, requests_of(4, 2, y=0)) as making:
        making.add({"y": part})
        raise KeyboardInterrupt
    with output(target, requests_of(4, 2, y=0)) as making:
        making.add({"y": part})
        assert making.finish(target) == [f"y: {name}[4]"]
    got = loaded(target)["y"]
    assert got.dtype == np.dtype(f"V{dtype.itemsize}")
    assert got.view(dtype).tolist() == [1, 2, 1, 2]


def test_names_cannot_command_a_terminal(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with output(target, requests_of(1, 1, **{"y\x1b[2J\n": 0})) as making:
        making.add({"y\x1b[2J\n": np.array([1])})
        assert making.finish(target) == ["y?[2J?: int64[1]"]


@pytest.mark.parametrize(("axis", "count"), [(None, 1), (0, 0)])
def test_output_that_is_the_same_in_all_requests_is_remarked(
    tmp_path: Path, axis: int | None, count: int
) -> None:
    with output(tmp_path / "out.npz", requests_of(2, 1, y=axis)) as making:
        for _ in range(2):
            making.add({"y": np.array([2])})
        remark = (
            "output 'y' has no batch dimension: it was the same in all 2 requests, one is written"
        )
        assert making.remarks() == [remark] * count


def test_output_of_one_request_is_not_remarked(tmp_path: Path) -> None:
    with output(tmp_path / "out.npz", requests_of(3, 3, y=None)) as making:
        making.add({"y": np.array(7)})
        assert making.remarks() == []


def test_room_that_is_missing_is_known_from_the_first_part_on(tmp_path: Path) -> None:
    with output(tmp_path / "out.npz", requests_of(1 << 50, 2, y=0)) as making:
        assert making.missing_bytes() == 0
        making.add({"y": np.array([1, 2], np.int8)})
        disk = os.statvfs(tmp_path)
        missing = 2 * (1 << 50) - 2 - disk.f_bavail * disk.f_frsize
        assert making.missing_bytes() == pytest.approx(missing, rel=0.1)


def begun(target: Path) -> Path:
    """One request of three is done; its state."""
    with output(target, requests_of(3, 1, y=0)) as making:
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
    with output(target, requests_of(9, 1, y=0)) as making:
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
        BatchOutput(folder, requests_of(3, 1, y=0))


@pytest.mark.parametrize(("units", "step", "name"), [(4, 1, "y"), (3, 2, "y"), (3, 1, "z")])
def test_state_of_other_requests_is_told(tmp_path: Path, units: int, step: int, name: str) -> None:
    target = tmp_path / "out.npz"
    begun(target)
    with PartialFolder(target, WORK) as folder, pytest.raises(McinferError, match="is damaged"):
        BatchOutput(folder, requests_of(units, step, **{name: 0}))


def test_rows_beyond_what_the_state_says_are_written_over(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with begun(target).with_name("0.rows").open("ab") as file:
        file.write(b"of a request that was not saved")
    with output(target, requests_of(3, 1, y=0)) as making:
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
    with output(target, requests_of(3, 1, y=0)) as making:
        making.forget()
    assert files(tmp_path) == []
