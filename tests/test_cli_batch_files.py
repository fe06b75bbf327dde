"""Tests of mcinfer/cli/batch_files.py: mapped inputs, and results that are kept and joined."""

import csv
import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from mcinfer.cli.batch_files import PartialResults, opened_input
from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.sharding import JoinError
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype
from tests.command_line import files, loaded

Array = NDArray[Any]

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
WORK = {"model": 1, "input": [2]}


def model(*outputs: str, dtype: Any = np.float64) -> ModelSpec:
    """A model with an input ``x`` and these outputs."""
    specs = [TensorSpec(name=name, dtype=np.dtype(dtype), shape=()) for name in ("x", *outputs)]
    return ModelSpec(inputs=tuple(specs[:1]), outputs=tuple(specs[1:]))


# The input.


def write_npz(target: Path | io.BytesIO, compression: int, **arrays: Array) -> None:
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)


def empty(dtype: Any) -> Callable[[Mapping[str, tuple[int, ...]]], dict[str, Array]]:
    """As `Master.allocate` of a model with inputs of this type."""
    return lambda shapes: {name: np.empty(shape, dtype) for name, shape in shapes.items()}


@settings(max_examples=60, deadline=None)
@given(
    array=hnp.arrays(
        st.sampled_from(["<f4", ">i8", "?", "<c16", "<U3", "|S2", "<f2"]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    fortran=st.booleans(),
    kind=st.sampled_from(["npy", "stored", "deflated", "bzip2"]),
)
def test_array_is_the_same_however_it_is_stored(
    tmp_path_factory: pytest.TempPathFactory, array: Array, fortran: bool, kind: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "stored"
    ordered = array.copy("F" if fortran else "C")
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, ordered)
    else:
        kinds = {"stored": STORED, "deflated": DEFLATED, "bzip2": zipfile.ZIP_BZIP2}
        write_npz(path, kinds[kind], other=np.ones(3), x=ordered)
    dtype = object if array.dtype.kind in "US" else array.dtype.newbyteorder("=")
    with opened_input(path, path.parent) as opened:
        opened.content.pop("other", None)
        got = opened.arrays(model(dtype=dtype), {}, empty(dtype))["x"][...]
        opened.let_go()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()


@settings(max_examples=100, deadline=None)
@given(
    stored=st.sampled_from(["u1", "<i2", ">f8", "<f2", "?"]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "int32"]),
    axes=st.permutations("nhwc"),
    scale=st.sampled_from([None, 1 / 255, -3.0]),
    place=st.sampled_from([..., (slice(None), slice(1, 3)), slice(2, 2)]),
    seed=st.integers(0, 9),
)
def test_part_is_transposed_cast_and_then_multiplied_in_the_models_type(
    tmp_path_factory: pytest.TempPathFactory,
    stored: str,
    dtype: str,
    axes: list[str],
    scale: float | None,
    place: Any,
    seed: int,
) -> None:
    assume(dtype != "int32" or "f" not in stored)
    path = tmp_path_factory.getbasetemp() / "converted.npy"
    np.save(path, np.random.default_rng(seed).integers(0, 99, (5, 4, 3, 2)).astype(stored))
    target = numpy_dtype(dtype)
    expected = np.load(path).transpose(["nhwc".index(axis) for axis in axes]).astype(target)
    said: dict[str, dict[str, Any]] = {
        "--layout": {"x": f"nhwc:{''.join(axes)}"},
        "--cast": {"": dtype},
    }
    if scale is not None and dtype != "int32":
        said["--scale"] = {"": scale}
        expected = expected * target.type(scale)
    with opened_input(path, path.parent) as opened:
        x = opened.arrays(model(dtype=target), said, empty(target))["x"]
        assert (x.shape, x.nbytes) == (expected.shape, expected.nbytes)
        assert x[place].tobytes() == expected[place].tobytes()


def damaged(compression: int) -> bytes:
    file = io.BytesIO()
    write_npz(file, compression, x=np.random.default_rng(1).integers(0, 9, (2000, 2)))
    data = bytearray(file.getvalue())
    data[len(data) // 3] ^= 0xFF
    return bytes(data)


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


def pickled() -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, x=np.array([None]))
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: b"", "empty"),
        (lambda: b"hello", "magic string"),
        (lambda: archive(b"read me", "README"), "magic string"),
        (pickled, "Object arrays"),
        (lambda: archive(header((-2, -2)) + bytes(16)), "negative dimensions"),
        (lambda: archive(header((3,)) + bytes(16)), "has 144 bytes, expected 140"),
        (lambda: archive(header((1 << 50,))), "too small"),
        (lambda: header((3,))[:40], "EOF"),
        (lambda: archive(b"\x93NUMPY\x03\x00" + header(())[8:] + bytes(4)), "version"),
        (lambda: archive(header((3,)) + bytes(12))[:-30], "magic string"),
        (lambda: damaged(STORED), ".npz file"),
        (lambda: damaged(DEFLATED), ".npz file"),
    ],
)
def test_invalid_array_is_refused(tmp_path: Path, make: Callable[[], bytes], text: str) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(make())
    with (
        pytest.raises(InvalidInputError, match=rf"--input: .*in\.npz is not an .*{text}"),
        opened_input(path, tmp_path),
    ):
        pass
    assert files(tmp_path) == ["in.npz"]


def test_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    np.save(path, np.ones(1000))
    with opened_input(path, tmp_path) as file:
        os.truncate(path, 500)
        with pytest.raises(InvalidInputError, match=r"in\.npy became shorter"):
            file.let_go()


@pytest.mark.parametrize("place", [0, 2**20, 2**27 - 1], ids=["start", "within", "end"])
def test_stamp_differs_after_a_change_and_not_after_a_touch(tmp_path: Path, place: int) -> None:
    path = tmp_path / "in.npy"
    np.save(path, np.ones(200_000))
    if place == 2**27 - 1:  # a large one, of which samples are read
        os.truncate(path, 2**27)

    def stamp() -> dict[str, Any]:
        with opened_input(path, tmp_path) as file:
            return file.stamp

    before = stamp()
    path.touch()
    assert stamp() == before
    with path.open("r+b") as other:
        other.seek(place)
        other.write(b"\x93")  # as at the start
        other.flush()
        os.utime(path)
    assert (stamp() == before) == (place == 0)


# The results.


@contextmanager
def results(
    target: Path, work: dict[str, Any] = WORK, restart: bool = False, **outputs: int | None
) -> Iterator[PartialResults]:
    """One run, which saves its results at its end."""
    making = PartialResults(target, work, ending=target.suffix, restart=restart)
    with closing(making):
        making.begin({"outputs": outputs})
        yield making
        if not target.exists() and making.done:
            making.save()


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
    places = (slice(None),) * axis
    parts = [whole[(*places, slice(*at))] for at in pairwise(accumulate(sizes, initial=0))]
    target = tmp_path_factory.getbasetemp() / f"{os.getpid()}.npz"
    target.unlink(missing_ok=True)
    same = np.array([np.nan, -1.0])
    stop = min(interrupted, len(parts))
    with results(target, y=axis, n=None) as making:
        for part in parts[:stop]:
            making.add({"y": part, "n": same})
    with results(target, y=axis, n=None) as making:
        assert making.done == stop
        for part in parts[stop:]:
            making.add({"y": part, "n": same})
        lines = making.finish(model("y", "n", dtype=whole.dtype))
    kind = "string" if dtype == "U" else whole.dtype.name
    assert lines[0] == f"y: {kind}{shape}"
    got = loaded(target)
    np.testing.assert_array_equal(got["y"], whole.astype(np.str_) if dtype == "U" else whole)
    np.testing.assert_array_equal(got["n"], same)
    assert not target.with_name(f".{target.name}.partial").exists()


@settings(max_examples=60, deadline=None)
@given(
    column=st.sampled_from(["float32", "float16", "bfloat16", "float64", "int64"]).flatmap(
        lambda dtype: st.tuples(
            st.just(numpy_dtype(dtype)),
            hnp.arrays(f"u{numpy_dtype(dtype).itemsize}", st.integers(0, 20)),
        )
    ),
    name=st.sampled_from(["y", 'a,"b"']),
    stop=st.integers(0, 20),
)
def test_numbers_of_a_csv_file_are_the_same_again(
    tmp_path_factory: pytest.TempPathFactory, column: Any, name: str, stop: int
) -> None:
    dtype, bits = column
    numbers = bits.view(dtype)
    target = tmp_path_factory.getbasetemp() / f"{os.getpid()}.csv"
    target.unlink(missing_ok=True)
    for part in (
        numbers[:stop, None],
        numbers[stop:, None],
    ):  # as one run and the one that resumes it
        with results(target, WORK, False, **{name: 0}) as making:
            making.add({name: part})
            if making.done == 2:
                [line] = making.finish(model(name, dtype=dtype))
    assert line == f"{name}: {dtype.name}[{len(numbers)}, 1]"
    with target.open(newline="") as file:
        [head], *rows = csv.reader(file)
    read = np.array([dtype.type(row) for [row] in rows], dtype)
    assert head == name
    same = (read.view(bits.dtype) == bits) | (np.isnan(read) & np.isnan(numbers))
    assert (len(read), same.all()) == (len(numbers), True)


@pytest.mark.parametrize(
    ("axis", "part"),
    [(0, np.ones((2, 2))), (1, np.ones((2, 1))), (0, np.array(["a"])), (None, np.ones(()))],
)
def test_what_is_no_column_of_numbers_is_refused_for_a_csv_file(
    tmp_path: Path, axis: int | None, part: Array
) -> None:
    with (
        pytest.raises(InvalidInputError, match=r"--output: a \.csv file has one number a row, got"),
        results(tmp_path / "out.csv", y=axis) as making,
    ):
        making.add({"y": part})
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("axis", "parts", "text"),
    [
        (None, [[1.0, 2.0], [1.0, 3.0]], "'y' is to be the same in all .* up to 0.5 of the larg"),
        (None, [["a"], ["b"]], "'y' is to be the same in all"),
        (None, [[1.0, 2.0], [1]], r"got int64\[1\] from one request, float64\[2\] from the first"),
        (0, [[[1], [2]], [[1, 2], [3, 4]]], r"'y' is joined along axis 0: got int64\[2, 2\] from"),
        (0, [[1, 2], [1.0, 2.0]], r"'y' is joined along axis 0: got float64\[2\] from one"),
        (1, [[1, 2]], r"'y' is joined along axis 1: got int64\[2\]"),
    ],
)
def test_parts_that_do_not_go_together_are_an_error_that_names_the_output(
    tmp_path: Path, axis: int | None, parts: Sequence[Any], text: str
) -> None:
    with results(tmp_path / "out.npz", y=axis) as making:
        for part in parts[:-1]:
            making.add({"y": np.array(part)})
        with pytest.raises(JoinError, match=text):
            making.add({"y": np.array(parts[-1])})
        assert making.done == len(parts) - 1


# The folder.


def begun(target: Path) -> Path:
    """Make a run that has saved one request; the path of its file."""
    with results(target, y=0) as making:
        making.add({"y": np.array([1])})
    return target.with_name(f".{target.name}.partial")


DAMAGES: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
    "no line": lambda head, _, answers: head + b"\n" + answers,
    "no map": lambda head, _, answers: head + b"[]\n" + answers,
    "nested": lambda head, _, answers: head + b"[" * 100_000 + b"\n" + answers,
    "no plan": lambda head, _, answers: head + b'{"work": {}}\n' + answers,
    "no work": lambda head, _, answers: head + b'{"work": 1, "plan": {}}\n' + answers,
    "half a head": lambda head, *_: head[:7],
    "cut": lambda head, line, answers: head + line + answers[:-1],
    "one less": lambda head, line, answers: b"\x01" + head[1:] + line + answers,
    "one more": lambda head, line, answers: b"\x03" + head[1:] + line + answers,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_progress_is_an_error_until_it_is_discarded(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "out.npz"
    with results(target, y=0) as making:
        for number in (1, 2):
            making.add({"y": np.array([number])})
    path = target.with_name(f".{target.name}.partial")
    head, (line, end, answers) = path.read_bytes()[:16], path.read_bytes()[16:].partition(b"\n")
    damaged = DAMAGES[damage](head, line + end, answers)
    path.write_bytes(damaged)
    with (
        pytest.raises(McinferError, match=r"(is damaged|other work).*--restart discards"),
        results(target, y=0),
    ):
        pass
    assert path.read_bytes() == damaged
    with results(target, restart=True, y=0) as making:
        assert making.done == 0
        assert files(tmp_path) == [making.path.name]
    assert files(tmp_path) == []


def test_what_lies_behind_the_answers_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with begun(target).open("ab") as file:
        file.write(b"of a request that was not saved")
    with results(target, y=0) as making:
        making.add({"y": np.array([2])})
        making.finish(model("y", dtype=int))
    assert loaded(target)["y"].tolist() == [1, 2]


def test_file_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with closing(PartialResults(target, WORK)):
        for restart in (False, True):
            with pytest.raises(McinferError, match=r"another run is writing to .*\.out\.npz\."):
                PartialResults(target, WORK, restart=restart)
    assert files(tmp_path) == []


UNTRUSTED: dict[str, Callable[[Path, Path], object]] = {
    "open to all": lambda file, _: file.touch(0o644),
    "of another user": lambda file, _: file.touch(0o600),
    "link": lambda file, mine: file.symlink_to(mine),
    "hard link": lambda file, mine: file.hardlink_to(mine),
    "folder": lambda file, _: file.mkdir(),
    "pipe": lambda file, _: os.mkfifo(file, 0o600),
}


@pytest.mark.parametrize("kind", UNTRUSTED)
def test_untrusted_file_is_refused_and_no_link_followed(tmp_path: Path, kind: str) -> None:
    # Another user's links in /tmp to the caller's files had them overwritten.
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    mine, file = tmp_path / "mine", tmp_path / ".out.npz.partial"
    mine.write_bytes(b"precious")
    mine.chmod(0o600)
    UNTRUSTED[kind](file, mine)
    if kind == "of another user":
        os.chown(file, 12345, -1)
    with pytest.raises(McinferError, match=r"--output: .*\.out\.npz\.partial"):
        PartialResults(tmp_path / "out.npz", WORK, restart=True)
    assert mine.read_bytes() == b"precious"
    file.unlink() if kind != "folder" else file.rmdir()
    new = tmp_path / ".out.npz.partial.new"  # the name of the output until it is whole
    new.symlink_to(mine)
    with results(tmp_path / "out.npz", y=0) as making:
        making.add({"y": np.array([1])})
        making.finish(model("y", dtype=int))
    assert mine.read_bytes() == b"precious"
    assert files(tmp_path) == ["mine", "out.npz"]
