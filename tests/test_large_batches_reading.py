"""Tests of reading.py, contents.py and positioned.py of mcinfer/large_batches: arrays of files, by rows."""

import io
import os
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.large_batches import reading
from mcinfer.large_batches.reading import InputFile, StoredArray

Array = NDArray[Any]

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def write_npz(path: Path, compression: int, **arrays: Array) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)


def read_in_parts(array: StoredArray, axis: int, cuts: list[int]) -> Array:
    read = array.rows(axis)
    bounds = [0, *sorted(cut for cut in cuts if cut < array.shape[axis]), array.shape[axis]]
    parts = [read(start, stop) for start, stop in pairwise(bounds)]
    assert {part.dtype for part in parts} == {array.dtype}
    return np.concatenate(parts, axis).astype(array.dtype)  # it turns the byte order


@settings(max_examples=60, deadline=None)
@given(
    array=hnp.arrays(
        st.sampled_from(["<f4", ">i8", "?", "<c16", "<U3", "|S2", "<f2"]),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5),
    ),
    fortran=st.booleans(),
    kind=st.sampled_from(["npy", "stored", "deflated", "bzip2"]),
    cuts=st.lists(st.integers(0, 4)),
    data=st.data(),
)
def test_rows_are_those_of_the_array_however_it_is_stored(
    tmp_path_factory: pytest.TempPathFactory,
    array: Array,
    fortran: bool,
    kind: str,
    cuts: list[int],
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.getbasetemp() / "stored"
    axis = data.draw(st.integers(0, array.ndim - 1))
    ordered = np.asfortranarray(array) if fortran else array
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, ordered)
    else:
        kinds = {"stored": STORED, "deflated": DEFLATED, "bzip2": zipfile.ZIP_BZIP2}
        write_npz(path, kinds[kind], other=np.ones(3), x=ordered)
    with InputFile(path) as opened:
        stored = opened.arrays(["x"])["x"]
        assert (stored.dtype, stored.shape, stored.nbytes) == (
            array.dtype,
            array.shape,
            array.nbytes,
        )
        for got in (stored.whole(), read_in_parts(stored, axis, cuts)):
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert got.tobytes() == array.tobytes()
        opened.check_unchanged()


@pytest.mark.parametrize("compression", [STORED, DEFLATED])
def test_array_without_dimensions_is_read(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "in.npz"
    write_npz(path, compression, x=np.array(7, np.int32))
    with InputFile(path) as file:
        got = file.arrays(["x"])["x"].whole()
        assert (got.shape, got.dtype.name, got.item()) == ((), "int32", 7)


@pytest.mark.parametrize("compression", [STORED, DEFLATED])
def test_rows_may_be_read_from_any_place_on(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "in.npz"
    array = np.arange(600_000, dtype=np.int64).reshape(-1, 2)
    write_npz(path, compression, x=array)
    with InputFile(path) as file:
        read = file.arrays(["x"])["x"].rows(0)
        for start in (250_000, 299_999, 5):
            np.testing.assert_array_equal(read(start, start + 1), array[start : start + 1])


def test_single_array_is_the_only_input_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    np.save(path, np.ones(3))
    with InputFile(path) as file:
        assert [*file.arrays(["any"])] == ["any"]
        with pytest.raises(InvalidInputError, match=r"holds one array, .*'a', 'b'"):
            file.arrays(["a", "b"])


def damaged(compression: int, rows: int = 200_000) -> bytes:
    """An archive with a byte of its data turned over, in its first half."""
    file = io.BytesIO()
    array = np.random.default_rng(1).integers(0, 9, (rows, 2), np.int64)
    with zipfile.ZipFile(file, "w", compression) as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array(member, array)
    data = bytearray(file.getvalue())
    data[len(data) // 3] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize("compression", [STORED, DEFLATED])
def test_small_file_that_is_damaged_is_refused_before_any_work(
    tmp_path: Path, compression: int
) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(damaged(compression))
    with pytest.raises(InvalidInputError, match=r"is not an \.npz file"):
        InputFile(path)


@pytest.mark.parametrize("first", [0, 150_000])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("compression", [STORED, DEFLATED])
def test_damage_of_a_large_file_is_found_when_it_is_read_also_where_reading_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: int, axis: int, first: int
) -> None:
    monkeypatch.setattr(reading, "_CHECKED_BYTES", 0)
    path = tmp_path / "in.npz"
    path.write_bytes(damaged(compression))

    def read() -> None:
        with InputFile(path) as file:
            rows = file.arrays(["x"])["x"].rows(axis)
            for start in (range(first, 200_000, 50_000)) if axis == 0 else (0, 1):
                rows(start, start + (50_000 if axis == 0 else 1))

    with pytest.raises(
        InvalidInputError, match=r"is not an \.npz file: .*(CRC|decompressing|data)"
    ):
        read()


def test_file_that_becomes_shorter_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    np.save(path, np.ones(1000))
    with InputFile(path) as file:
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(InvalidInputError, match=r"in.npy .*the file ends at byte 500"):
            file.arrays(["x"])["x"].whole()


@pytest.mark.parametrize("place", [0, 2**20, 2**27 - 1], ids=["start", "within", "end"])
def test_file_that_changes_is_told_and_one_that_was_only_touched_is_not(
    tmp_path: Path, place: int
) -> None:
    path = tmp_path / "in.npy"
    np.save(path, np.ones(200_000))
    if place == 2**27 - 1:  # a large one, of which samples are read
        os.truncate(path, 2**27)
    with InputFile(path) as file:
        path.touch()
        file.check_unchanged()
        with path.open("r+b") as other:
            other.seek(place)
            other.write(b"x")
        with pytest.raises(InvalidInputError, match=r"in.npy changed while it was read"):
            file.check_unchanged()


@pytest.mark.parametrize("compression", [STORED, DEFLATED])
@pytest.mark.parametrize("axis", [0, 1])
def test_reading_tells_how_far_it_is_to_the_first_row(
    tmp_path: Path, compression: int, axis: int
) -> None:
    path = tmp_path / "in.npz"
    array = np.arange(400_000, dtype=np.int64).reshape(-1, 2)
    write_npz(path, compression, x=array)
    told: list[int] = []
    with InputFile(path) as file:
        stored = file.arrays(["x"])["x"]
        stored.rows(axis, 150_000 if axis == 0 else 1, told.append)
    before = stored.bytes_before(axis, 150_000 if axis == 0 else 1)
    assert before == (150_000 * 16 if axis == 0 else array.nbytes)
    if compression == DEFLATED and axis == 1:  # which is read whole, at once
        assert told == []
    else:
        header_bytes = 128 if compression == DEFLATED else 0
        assert (len(told) > 1, sum(told)) == (True, before + header_bytes)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "int4"])
def test_types_that_numpy_lacks_are_read_as_what_they_are(tmp_path: Path, name: str) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    array = np.arange(6).reshape(3, 2).astype(dtype)
    path = tmp_path / "in.npy"
    np.save(path, array.view(f"V{dtype.itemsize}"))
    with InputFile(path) as file:
        stored = file.arrays(["x"])["x"]
        got = stored.read_as(dtype).whole()
        assert (got.dtype, got.tolist()) == (dtype, array.tolist())
        # Whatever is not lacking is to be stored as what it is.
        for other in (np.dtype("f4"), np.dtype("f2"), np.dtype("u1"), None):
            assert stored.read_as(other) is stored


def header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    said = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, said)
    return file.getvalue()


def archive(content: bytes, name: str = "x.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(name, content)
    return file.getvalue()


def version_3() -> bytes:
    return archive(b"\x93NUMPY\x03\x00" + header(())[8:] + bytes(4))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: archive(header((-2, -2)) + bytes(16)), "sizes of 0 or more"),
        (lambda: archive(header((3,)) + bytes(16)), "has 144 bytes, expected 140"),
        (lambda: archive(b"read me", "README"), "magic string"),
        (lambda: header((1 << 40,)), "the file has 128 bytes, expected "),
        (lambda: header((3,))[:40], "EOF"),
        (version_3, "version"),
        (lambda: archive(header((3,)) + bytes(12))[:-30], "zip file"),
    ],
    ids=["negative", "longer", "text", "npy cut off", "header cut off", "version 3", "zip cut off"],
)
def test_what_cannot_be_an_array_is_refused(
    tmp_path: Path, make: Callable[[], bytes], text: str
) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(make())
    with pytest.raises(InvalidInputError, match=r"--input: .*in.npz is not an .npz file: ") as told:
        InputFile(path)
    assert text in str(told.value)
