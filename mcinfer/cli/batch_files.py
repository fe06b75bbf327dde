"""The files of ``mcinfer run``: a mapped input, answers that are kept as they come, and the output.

::

    .NAME.partial        this user's alone (mode 0600), locked (flock) by the one run that uses it
        16 bytes         how many requests are answered, and up to where the file counts
        a line of JSON   which work this is, and how it is cut
        the answers      one after another, each output in the format .npy
    .NAME.partial.new    at the end all of them, which is then moved to NAME

Both are opened in the folder's descriptor, and no link is followed. What lies beyond the part that counts is
written over, so a run can be resumed after a kill or a loss of power as well.
"""

import csv
import fcntl
import hashlib
import io
import json
import mmap
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.cli.progress import showing_work
from mcinfer.errors import BuildError, InvalidInputError, McinferError, printable
from mcinfer.model_cache.onnx_files import open_regular
from mcinfer.private import opened_folder, path_of
from mcinfer.requests.tensors import as_input, check_range, difference
from mcinfer.sharding import Axes, JoinError, Shape
from mcinfer.specs import STRING, Dimension, ModelSpec, TensorSpec

_FORMAT = 7
"""Format of the partial results; one more when it changes."""

_HEAD = struct.Struct("<QQ")
"""Requests that are answered, and bytes that count. It lies in one sector, so it is written whole."""

_DAMAGES = (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a file with other content than a run's raises when it is read."""

_READ_BY_PROGRAMS = (".jpg", ".jpeg", ".png", ".parquet", ".csv")
"""Endings of files that programs of docs/howto/files.md read."""

_BLOCK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 1024

_OF_ANOTHER_PACKAGE = 2
"""`numpy.dtype.isbuiltin` of such a type, as those of ml_dtypes are."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""APPNOTE.TXT of PKWARE, 4.3.7: the lengths of the name and of the extra field, which follow the header."""

_Array = NDArray[Any]


def stamp(descriptor: int) -> dict[str, Any]:
    """The size and a digest of a file; the digest of a large file is of `_SAMPLES` pieces.

    The end is among the samples: there an .npz file has the check sums of all its arrays.
    """
    size = os.fstat(descriptor).st_size
    digest = hashlib.sha256()
    for start in (*range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)), size - _SAMPLE_BYTES):
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, max(0, start)))
    return {"size": size, "sha256": digest.hexdigest()}


def stamps(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The stamp of each file; an empty dictionary for one that cannot be read."""
    found: list[dict[str, Any]] = []
    for file in files:
        found.append({})
        with suppress(OSError, BuildError), open_regular(file) as (descriptor, _):
            found[-1] = stamp(descriptor)
    return found


def _map(file: IO[bytes]) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_array(file: IO[bytes], mapped: mmap.mmap) -> _Array:
    """The array in .npy format at the file's position, whose base is the mapping; it is then behind it."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"got version {version} of the format .npy, expected (1, 0) or (2, 0)")
    newer = version == (2, 0)
    read = np.lib.format.read_array_header_2_0 if newer else np.lib.format.read_array_header_1_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be read: to read one may run what is in it")
    array: _Array = np.ndarray(shape, dtype, mapped, file.tell(), order="F" if fortran else "C")
    file.seek(array.nbytes, os.SEEK_CUR)
    return array


def _let_go(array: _Array) -> None:
    """Give back the memory of what was read of a file's array."""
    mapped: Any = array.base
    mapped.madvise(mmap.MADV_DONTNEED)


def _read_as(array: _Array, dtype: "np.dtype[Any]") -> _Array:
    """An array as of that type, if NumPy lacks the type and has stored it as so many bytes each."""
    stored = dtype.isbuiltin == _OF_ANOTHER_PACKAGE and array.dtype == f"V{dtype.itemsize}"
    return array.view(dtype) if stored else array


# The input.


Allocate = Callable[[Mapping[str, Shape]], Mapping[str, _Array]]


@dataclass(frozen=True, slots=True)
class Converted:
    """An array in a file; a part that is taken of it is cast and scaled, in memory of `Master.allocate`."""

    stored: _Array
    spec: TensorSpec
    scale: float
    allocate: Allocate

    @property
    def shape(self) -> Shape:
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        return self.stored.size * self.spec.dtype.itemsize

    def __getitem__(self, place: Any) -> _Array:
        part, name = self.stored[place], self.spec.name
        check_range(part, self.spec)
        made = self.allocate({name: part.shape})[name]
        try:
            with np.errstate(over="raise", invalid="raise"):
                np.copyto(made, part, casting="unsafe")
                if self.scale != 1:
                    factor = made.dtype.type(self.scale)
                    if not (factor and np.isfinite(factor)):
                        raise FloatingPointError(f"{self.scale:g} is {factor} in that type")
                    made *= factor
        except FloatingPointError as exc:
            raise InvalidInputError(f"--cast, --scale: {exc}, for {self.spec}") from exc
        return made


InputArray = _Array | Converted

Said = Mapping[str, Mapping[str, Any]]
"""By option that converts: its values by input; by ``""`` for each input that the value fits."""

_FITS: Mapping[str, tuple[Callable[[Any, TensorSpec, _Array], bool], str]] = {
    "--layout": (
        lambda said, _, array: array.ndim == said.index(":"),
        "an array with so many axes",
    ),
    "--cast": (
        lambda said, spec, array: (
            said == spec.element_type != STRING
            and array.dtype.kind in ("biu" if "int" in said else "biuf")
        ),
        "an input of this type, and numbers for it (for integers, integers)",
    ),
    "--scale": (lambda _, spec, _array: "float" in spec.element_type, "an input of floats"),
}
"""By option, in the order in which they apply: whether a value fits, and what is expected."""


def _by_input(
    option: str, said: Mapping[str, Any], model: ModelSpec, found: Mapping[str, _Array]
) -> dict[str, Any]:
    """The values of an option that converts, by input; `InvalidInputError` if one fits none."""
    fits, expected = _FITS[option]
    chosen: dict[str, Any] = {}
    for name, value in sorted(said.items()):  # what names an input comes later
        inputs = [spec for spec in model.inputs if name in ("", spec.name)]
        taken = [spec.name for spec in inputs if fits(value, spec, found[spec.name])]
        if not taken:
            text = f"got {name}={value}" if name else f"got {value}"
            there = ", ".join(map(str, model.inputs))
            raise InvalidInputError(f"{option}: {text}, expected {expected}: there is {there}")
        chosen |= dict.fromkeys(taken, value)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An .npz or .npy file, mapped: its arrays are read as their rows are used.

    `content` has the arrays by name; an .npy file has one array, under no name.
    """

    path: Path
    descriptor: int
    stamp: dict[str, Any]
    content: dict[str, _Array]

    def arrays(self, model: ModelSpec, said: Said, allocate: Allocate) -> dict[str, InputArray]:
        """The arrays by input, in the model's order, converted as is said, or an `InvalidInputError`."""
        names = [spec.name for spec in model.inputs]
        found = self.content
        if "" in found:
            if len(names) != 1:
                raise InvalidInputError(
                    f"--input: {self.path} holds one array, expected an .npz file with {names}"
                )
            found = {names[0]: found[""]}
        if {*found} != {*names}:
            raise InvalidInputError(
                f"--input: {self.path}: got arrays {[*found]}, expected {names}"
            )
        found = {spec.name: _read_as(found[spec.name], spec.dtype) for spec in model.inputs}
        layouts, casts, scales = (_by_input(o, said.get(o, {}), model, found) for o in _FITS)
        arrays: dict[str, InputArray] = {}
        for spec in model.inputs:
            name, array = spec.name, found[spec.name]
            if name in layouts:
                stored, _, wanted = layouts[name].partition(":")
                array = array.transpose([stored.index(axis) for axis in wanted])
            if name not in casts:
                try:
                    array = as_input(array, spec, spec.element_type)
                except InvalidInputError as exc:
                    fits, _ = _FITS["--cast"]
                    if not fits(spec.element_type, spec, array):
                        raise
                    text = f"{exc}; --cast {spec.element_type} converts numbers"
                    raise InvalidInputError(text) from exc
            arrays[name] = array
            if name in casts or name in scales:
                arrays[name] = Converted(array, spec, scales.get(name, 1), allocate)
        return arrays

    def let_go(self) -> None:
        """Give back the memory of what was read, and check that the file is as long as it was.

        To read beyond the end of a mapped file would kill the process.
        """
        for array in self.content.values():
            _let_go(array)
        if os.fstat(self.descriptor).st_size < self.stamp["size"]:
            raise InvalidInputError(f"--input: {self.path} became shorter while it was read")


@contextmanager
def opened_input(path: Path, scratch: Path) -> Iterator[InputFile]:
    """Open an input file; an .npz file is read once, so that damage is found before any work.

    Compressed arrays are unpacked into files without a name in the folder `scratch`.
    """
    if path.is_dir() or path.suffix.lower() in _READ_BY_PROGRAMS:
        raise InvalidInputError(
            f"--input: got {path}, expected an .npz or .npy file; docs/howto/files.md has short programs "
            "that make one of a folder of images, of Parquet and of CSV"
        )
    with ExitStack() as stack:
        try:
            descriptor, _ = stack.enter_context(open_regular(path))
        except (BuildError, OSError) as exc:
            raise InvalidInputError(f"--input: {exc}") from exc
        file = stack.enter_context(open(descriptor, "rb", closefd=False))
        try:
            if zipfile.is_zipfile(file):
                content = dict(_read_archive(file, scratch))
            else:
                file.seek(0)
                content = {"": _read_array(file, _map(file))}
        except Exception as exc:  # of NumPy, zipfile, zlib or the system
            if isinstance(exc, OSError) and exc.errno is not None:
                text = f"--input: {path} cannot be read, or unpacked in {scratch}: {exc.strerror}"
                raise McinferError(text) from exc
            kind = "an .npy file" if path.suffix == ".npy" else "an .npz file"
            raise InvalidInputError(f"--input: {path} is not {kind}: {exc}") from exc
        now = stamp(descriptor)
        yield InputFile(path=path, descriptor=descriptor, stamp=now, content=content)


def _read_archive(file: IO[bytes], scratch: Path) -> Iterator[tuple[str, _Array]]:
    """The arrays of an archive, whose check sums are compared: mapped in their place, or unpacked."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        done, total = 0, max(1, sum(info.file_size for info in infos))
        with showing_work("checking the input", total) as work:
            for info in infos:
                with archive.open(info) as member, TemporaryFile(dir=scratch) as unpacked:
                    place: IO[bytes] = unpacked
                    start = 0
                    for block in iter(partial(member.read, _BLOCK_BYTES), b""):
                        if info.compress_type != zipfile.ZIP_STORED:
                            unpacked.write(block)
                        work.show(done := done + len(block))
                    unpacked.flush()
                    if info.compress_type == zipfile.ZIP_STORED:
                        header = os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset)
                        lengths = _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
                        place, start = file, info.header_offset + lengths
                    place.seek(start)
                    found = _read_array(place, _map(place))
                    if (size := place.tell() - start) != info.file_size:
                        text = f"{info.filename} has {info.file_size} bytes, expected {size}"
                        raise ValueError(text)
                yield info.filename.removesuffix(".npy"), found


# The answers, and the output.


class PartialResults:
    """The answers so far, in a file that no other run can take until `close`.

    Attributes:
        path: Path of the file.
        plan: What `begin` was given by the run that is resumed; None if there is nothing to resume.
        done: How many requests are answered.
    """

    def __init__(
        self, output: Path, work: Mapping[str, Any], *, ending: str = ".npz", restart: bool = False
    ) -> None:
        """Take the file for an output's absolute path, and make it if there is none.

        `work` is what the result depends on, as JSON has it: a run is only resumed with the same. `ending`
        is the kind of file to write: ``.npz``, or ``.npy`` or ``.csv`` for the only output.
        """
        self.path = output.with_name(f".{output.name}.partial")
        self.plan: Mapping[str, Any] | None = None
        self.done = self._start = self._end = 0
        self._saved = 1  # until it is known what the file holds, it stays
        self._output = output.name
        self._ending = ending
        self._work = {"format": _FORMAT, **work}
        self._outputs: Axes = {}
        self._first: list[_Array] = []
        with ExitStack() as stack, self._system():
            with opened_folder(output.parent, guarded=False) as folder:
                self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._folder)
            self._own = path_of(self._folder) / self.path.name
            self._new = self._own.with_name(f"{self.path.name}.new")
            self._file = self._take(stack)
            stack.callback(self._tidy)
            if restart:
                self._file.truncate(0)
            self._recall()
            # That of a run that was killed. What cannot be removed is an error now, not after the work.
            self._new.unlink(missing_ok=True)
            self._stack = stack.pop_all()

    @contextmanager
    def _system(self) -> Iterator[None]:
        """Turn an error of the system into one that names the file."""
        try:
            yield
        except OSError as exc:
            raise McinferError(f"--output: {self.path}: {exc.strerror}") from exc

    def _take(self, stack: ExitStack) -> IO[bytes]:
        """The file, locked; the stack closes it."""

        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)

        while True:
            with ExitStack() as tried, suppress(FileNotFoundError):  # another run has removed it
                file = tried.enter_context(open(self._own, "r+b", buffering=0, opener=opener))
                info = os.fstat(file.fileno())
                alone = stat.S_ISREG(info.st_mode) and info.st_nlink < 2
                if not alone or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                    raise McinferError(
                        f"--output: {self.path} is of user {info.st_uid} and has mode "
                        f"{stat.filemode(info.st_mode)}, expected a file of user {os.geteuid()} "
                        f"alone: remove it, or write to another folder"
                    )
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = f"--output: another run is writing to {self.path}"
                    raise McinferError(text) from None
                tried.callback(fcntl.flock, file, fcntl.LOCK_UN)  # mappings hold the file, too
                if os.path.samestat(info, os.lstat(self._own)):
                    stack.push(tried.pop_all())
                    return file

    def _recall(self) -> None:
        """Read what the run that is resumed has left."""
        head = self._file.read(_HEAD.size)
        if not head.strip(b"\0"):
            self._saved = 0
            return
        try:
            done, end = _HEAD.unpack(head)
            saved = json.loads(self._file.readline())
            work, plan = saved["work"], dict(saved["plan"])
            differing = [name for name, what in self._work.items() if work.get(name) != what]
            if (held := os.fstat(self._file.fileno()).st_size) < end:
                raise ValueError(f"it has {held} bytes, expected {end}")
        except _DAMAGES as exc:
            raise self._damage(exc) from exc
        self._saved = done
        if differing:
            raise McinferError(
                f"--output: {self.path} holds the results of other work, with another "
                f"{', '.join(differing)}; --restart discards them"
            )
        self.plan, self.done, self._start, self._end = plan, done, self._file.tell(), end

    def _damage(self, what: Exception) -> McinferError:
        return McinferError(f"--output: {self.path} is damaged ({what}); --restart discards it")

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Begin, or go on where the last run ended; the `plan` is kept for a run that resumes this one.

        Its ``"outputs"`` have, in the model's order, the axis along which the answers follow one another;
        None: they are all the same, and one is kept.
        """
        self._outputs = plan["outputs"]
        if self.plan is None:
            self.plan = plan
            content = json.dumps({"work": self._work, "plan": plan}).encode()
            with self._system():
                self._file.truncate(0)
                self._file.seek(0)
                self.write(bytes(_HEAD.size) + content + b"\n")
            self._start = self._end = self._file.tell()
        elif self.done:
            try:
                self._first = [parts[0] for parts in self._parts(self.done)]
                if (end := self._file.tell()) != self._end:
                    raise ValueError(f"its answers end at byte {end}, expected {self._end}")
            except _DAMAGES as exc:
                raise self._damage(exc) from exc

    def add(self, answer: Mapping[str, _Array]) -> None:
        """Write the answer to the next request.

        A `JoinError` if it does not fit to the first one, an `InvalidInputError` if not into a .csv file.
        """
        arrays = [answer[name] for name in self._outputs]
        arrays = [array.astype(np.str_) if array.dtype.hasobject else array for array in arrays]
        firsts = self._first or arrays
        for (name, axis), first, array in zip(self._outputs.items(), firsts, arrays, strict=True):
            _check_part(name, axis, _read_as(first, array.dtype), array)
            if self._ending == ".csv":
                check_column(name, array.dtype, array.shape, axis)
        self._file.seek(self._end)
        for axis, array in zip(self._outputs.values(), arrays, strict=True):
            if axis is not None or not self.done:
                if array.dtype.isbuiltin == _OF_ANOTHER_PACKAGE:  # it has no name in the format
                    array = array.view(f"V{array.dtype.itemsize}")
                np.lib.format.write_array(self, array, (1, 0), allow_pickle=False)
        # In one step: Ctrl-C may come between any two.
        self.done, self._end = self.done + 1, self._file.tell()
        if not self._first:  # not the answer itself, whose memory is the master's
            self._first = [parts[0] for parts in self._parts(1)]

    def write(self, content: bytes) -> None:
        """Write all of it, for NumPy; a file without a buffer may take a part."""
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def save(self) -> None:
        """Bring the answers to the disk, then the number that counts them."""
        os.fdatasync(self._file.fileno())
        os.pwrite(self._file.fileno(), _HEAD.pack(self.done, self._end), 0)
        os.fsync(self._file.fileno())
        os.fsync(self._folder)
        self._saved = self.done

    def keep(self) -> int:
        """Save the answers so far; returns how many are kept: not all, if the disk takes no more."""
        with suppress(OSError):
            self._new.unlink(missing_ok=True)  # and what is not whole: the disk may be full
            self._file.truncate(self._end)
            if self.done > self._saved:
                self.save()
        return self._saved

    def missing_bytes(self, share: float) -> int:
        """How much room the disk lacks for the answers and the output, if this share of them is there."""
        axes = zip(self._outputs.values(), self._first, strict=True)
        once = sum(first.nbytes for axis, first in axes if axis is None)
        held = self._end - self._start
        whole = once + int((held - once) / share)
        disk = os.fstatvfs(self._file.fileno())
        return max(0, 2 * whole - held - disk.f_bavail * disk.f_frsize)

    def finish(self, model: ModelSpec) -> list[str]:
        """Write the output file: as `numpy.savez` does, as `numpy.save` does, or as a column of numbers.

        Returns:
            A line for each output with its type and shape.
        """
        lines = []
        outputs = [*zip(model.outputs, self._parts(self.done), self._outputs.values(), strict=True)]
        with self._new.open("xb") as file:
            with ExitStack() as ended:
                work = ended.enter_context(showing_work("writing", len(outputs)))
                archive = None
                if self._ending == ".npz":
                    archive = ended.enter_context(zipfile.ZipFile(file, "w"))
                for number, (spec, parts, axis) in enumerate(outputs, 1):
                    place: Any = nullcontext(file)
                    if archive is not None:
                        place = archive.open(f"{spec.name}.npy", "w", force_zip64=True)
                    with place as member:
                        if self._ending == ".csv":
                            shape = _write_column(member, spec, parts)
                        else:
                            shape = _write_joined(member, parts, axis)
                    lines.append(f"{printable(spec.name)}: {spec.element_type}{[*shape]}")
                    work.show(number)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._new, self._own.with_name(self._output))
        os.fsync(self._folder)
        self.forget()
        return lines

    def _parts(self, requests: int) -> list[list[_Array]]:
        """By output, the answers to the first so many requests; to one, where all are the same."""
        mapped = _map(self._file)
        self._file.seek(self._start)
        parts: list[list[_Array]] = [[] for _ in self._outputs]
        for number in range(requests):
            for mine, axis in zip(parts, self._outputs.values(), strict=True):
                if axis is not None or not number:
                    mine.append(_read_array(self._file, mapped))
        return parts

    def forget(self) -> None:
        """Leave nothing to resume."""
        os.pwrite(self._file.fileno(), bytes(_HEAD.size), 0)
        self._saved = 0

    def close(self) -> None:
        """Let go of the file, which is removed unless it holds something to resume."""
        self._stack.close()

    def _tidy(self) -> None:
        if not self._saved:
            self._own.unlink(missing_ok=True)


def _check_part(name: str, axis: int | None, first: _Array, part: _Array) -> None:
    """Raise `JoinError` unless an answer goes together with the first one."""
    text = f"{part.dtype}{[*part.shape]} from one request, {first.dtype}{[*first.shape]} from the first"
    shape, other = [*part.shape], [*first.shape]
    fits = part.dtype.kind == "U" == first.dtype.kind or part.dtype == first.dtype
    if axis is None and fits and shape == other:
        fits, far = difference(part, first)
        text = f"values that are up to {far:.2g} of the largest element apart"
    elif axis is not None and (fits := fits and axis < len(shape) == len(other)):
        shape[axis] = other[axis]
    if not fits or shape != other:
        how = (
            "is to be the same in all requests" if axis is None else f"is joined along axis {axis}"
        )
        raise JoinError(f"output {name!r} {how}: got {text}")


def _write_joined(member: IO[bytes], parts: Sequence[_Array], axis: int | None) -> tuple[int, ...]:
    """Write arrays as one, in C order; its shape."""
    shape = parts[0].shape
    if axis is not None:
        total = sum(part.shape[axis] for part in parts)
        shape = (*shape[:axis], total, *shape[axis + 1 :])
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)  # of strings
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(member, header)
    outer = prod(shape[: axis or 0])
    for i in range(outer):
        for part in parts:
            row = part.reshape(outer, -1)[i].astype(dtype, copy=False)
            member.write(row.view(np.uint8).data)
            _let_go(part)
    return shape


def check_column(
    name: str, dtype: "np.dtype[Any]", shape: Sequence[Dimension], axis: int | None = 0
) -> None:
    """Raise `InvalidInputError` if an output is not one number a row, as a .csv file has it.

    A `shape` of a model may have sizes that are not known.
    """
    one = len(shape) == 1 or (len(shape) == 2 and not (isinstance(shape[1], int) and shape[1] != 1))
    if axis or not one or dtype.kind in "OUc":
        raise InvalidInputError(
            f"--output: a .csv file has one number a row, got output {name!r} of {dtype}, "
            f"({', '.join(map(str, shape))}): expected an .npz or .npy file for it"
        )


def _write_column(member: IO[bytes], spec: TensorSpec, parts: Sequence[_Array]) -> Shape:
    """Write an output's name, then a number a line, in digits that give the same number; the shape."""
    text = io.TextIOWrapper(member, "utf-8", newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([spec.name])
    for part in parts:
        lines.writerows([str(number)] for number in _read_as(part, spec.dtype).flat)
        _let_go(part)
    text.detach()
    return sum(map(len, parts)), *parts[0].shape[1:]
