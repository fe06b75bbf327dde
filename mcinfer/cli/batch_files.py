"""The files of ``mcinfer run``: a mapped input, answers that are kept as they come, and the output.

::

    .NAME.partial/                this user's alone (mode 0700)
    .NAME.partial/lock            held (flock) by the one run that uses the folder
    .NAME.partial/progress.json   which work this is, and how far it is: replaced whole, after a sync
    .NAME.partial/0.parts, …      by output, the answers one after another, each in the format .npy
    .NAME.partial/whole           at the end all of them, which is then moved to NAME

All files are opened by the folder's descriptor, and no link is followed. What lies in a file beyond what the
progress says is written over, so a run can be resumed after a kill or a loss of power as well.
"""

import fcntl
import hashlib
import json
import mmap
import os
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.cli.progress import showing_work
from mcinfer.errors import BuildError, InvalidInputError, McinferError, printable
from mcinfer.model_cache.onnx_files import open_regular
from mcinfer.private import OthersError, open_private, opened_folder
from mcinfer.requests.tensors import as_input, difference
from mcinfer.sharding import Axes, JoinError
from mcinfer.specs import ModelSpec

_FORMAT = 5
"""Format of the folder; one more when it changes."""

_LOCK = "lock"
_PROGRESS = "progress.json"
_PROGRESS_ASIDE = "progress.json.new"
_WHOLE = "whole"

_BLOCK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 1024

_OF_ANOTHER_PACKAGE = 2
"""`numpy.dtype.isbuiltin` of such a type, as those of ml_dtypes are."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""APPNOTE.TXT of PKWARE, 4.3.7: the lengths of the name and of the extra field, which follow the header."""

_Array = NDArray[Any]


def stamp(descriptor: int) -> dict[str, Any]:
    """The size and a digest of a file; the digest of a file above 64 MiB is of samples.

    The end is among the samples: there an .npz file has the check sums of all its arrays.
    """
    size = os.fstat(descriptor).st_size
    digest = hashlib.sha256()
    for start in (*range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)), size - _SAMPLE_BYTES):
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, max(0, start)))
    return {"size": size, "sha256": digest.hexdigest()}


def _map(file: IO[bytes]) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_array(file: IO[bytes], mapped: mmap.mmap) -> tuple[_Array, mmap.mmap]:
    """The array in .npy format at the file's position, over the mapping; the position is then behind it."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"got version {version} of the format .npy, expected (1, 0) or (2, 0)")
    newer = version == (2, 0)
    read = np.lib.format.read_array_header_2_0 if newer else np.lib.format.read_array_header_1_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be read: to read one may run what is in it")
    array = np.ndarray(shape, dtype, mapped, file.tell(), order="F" if fortran else "C")
    file.seek(array.nbytes, os.SEEK_CUR)
    return array, mapped


def _read_as(array: _Array, dtype: "np.dtype[Any]") -> _Array:
    """An array as of that type, if NumPy lacks the type and has stored it as so many bytes each."""
    stored = dtype.isbuiltin == _OF_ANOTHER_PACKAGE and array.dtype == f"V{dtype.itemsize}"
    return array.view(dtype) if stored else array


# The input.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An .npz or .npy file, mapped: its arrays are read as their rows are used.

    `content` has the arrays and their mappings by name; an .npy file has one array, under no name.
    """

    path: Path
    descriptor: int
    stamp: dict[str, Any]
    content: dict[str, tuple[_Array, mmap.mmap]]

    def arrays(self, model: ModelSpec) -> dict[str, _Array]:
        """The arrays by input, in the model's order, or an `InvalidInputError`."""
        names = [spec.name for spec in model.inputs]
        found = {name: array for name, (array, _) in self.content.items()}
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
        return {
            spec.name: as_input(_read_as(found[spec.name], spec.dtype), spec, spec.element_type)
            for spec in model.inputs
        }

    def let_go(self) -> None:
        """Give back the memory of what was read, and check that the file is as long as it was.

        To read beyond the end of a mapped file would kill the process.
        """
        for _, mapped in self.content.values():
            mapped.madvise(mmap.MADV_DONTNEED)
        if os.fstat(self.descriptor).st_size < self.stamp["size"]:
            raise InvalidInputError(f"--input: {self.path} became shorter while it was read")


@contextmanager
def opened_input(path: Path, scratch: Path) -> Iterator[InputFile]:
    """Open an input file; an .npz file is read once, so that damage is found before any work.

    Compressed arrays are unpacked into files without a name in the folder `scratch`.
    """
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


def _read_archive(file: IO[bytes], scratch: Path) -> Iterator[tuple[str, tuple[_Array, mmap.mmap]]]:
    """The arrays of an archive, whose check sums are compared: mapped in their place, or unpacked."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        done, total = 0, max(1, sum(info.file_size for info in infos))
        with showing_work(sys.stderr, "checking the input", total) as work:
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
    """The answers so far, in a folder that no other run can take until `close`.

    Attributes:
        path: Path of the folder.
        plan: What `begin` was given by the run that is resumed; None if there is nothing to resume.
        done: How many requests are answered.
    """

    def __init__(self, output: Path, work: Mapping[str, Any], *, restart: bool = False) -> None:
        """Take the folder of an output's absolute path, and make it if there is none.

        `work` is what the result depends on, as JSON has it: a run is only resumed with the same.
        """
        self.path = output.with_name(f".{output.name}.partial")
        self.plan: Mapping[str, Any] | None = None
        self.done = 0
        self._output = output
        self._work = {"format": _FORMAT, **work}
        self._outputs: Axes = {}
        self._files: list[IO[bytes]] = []
        self._sizes: Sequence[int] = ()
        self._saved = 0
        with ExitStack() as stack:
            try:
                parent = stack.enter_context(opened_folder(output.parent, guarded=False))
                self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, self._parent)
                self._folder = self._take(parent / self.path.name, stack)
                stack.callback(self._tidy)
                if restart:
                    self._clear()
                with suppress(FileNotFoundError):
                    self._recall()
            except OSError as exc:
                raise McinferError(f"--output: {self.path}: {exc.strerror}") from exc
            self._stack = stack.pop_all()

    def _take(self, own: Path, stack: ExitStack) -> int:
        """The descriptor of the folder, which leads through its parent's; locked, and closed by the stack."""
        while True:
            with ExitStack() as tried, suppress(FileNotFoundError):  # another run has removed it
                with suppress(FileExistsError):
                    own.mkdir(0o700)
                try:
                    folder = open_private(own)
                except OthersError as exc:
                    text = f"--output: {exc}: remove it, or write to another folder"
                    raise McinferError(text) from exc
                tried.callback(os.close, folder)
                # A file, open for writing: NFS has no such lock of a folder.
                lock_flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                lock = os.open(_LOCK, lock_flags, 0o600, dir_fd=folder)
                tried.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = f"--output: another run is writing to {self.path}"
                    raise McinferError(text) from None
                if os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=folder)):
                    stack.push(tried.pop_all())
                    return folder

    def _recall(self) -> None:
        """Read the progress of the run that is resumed."""
        try:
            with self._open(_PROGRESS, "rb") as file:
                saved = json.load(file)
            work = saved["work"]
            differing = [name for name, what in self._work.items() if work.get(name) != what]
            plan, sizes, done = dict(saved["plan"]), [*map(int, saved["bytes"])], int(saved["done"])
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise self._damage(f"{_PROGRESS}: {exc}") from exc
        if differing:
            raise McinferError(
                f"--output: {self.path} holds the results of other work, with another "
                f"{', '.join(differing)}; --restart discards them"
            )
        self.plan, self._sizes, self.done, self._saved = plan, sizes, done, done

    def _damage(self, what: str) -> McinferError:
        return McinferError(f"--output: {self.path} is damaged ({what}); --restart discards it")

    def _open(self, name: str, mode: str, permissions: int = 0o600, buffering: int = -1) -> IO[Any]:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, permissions, dir_fd=self._folder)

        return open(name, mode, buffering, opener=opener)

    def begin(self, plan: Mapping[str, Any], outputs: Axes) -> None:
        """Open the files of the answers.

        `outputs` has, in the model's order, the axis along which the answers follow one another; None: they
        are all the same, and one is kept. `plan` is kept as it is for a run that resumes this one.
        """
        self.plan, self._outputs = plan, outputs
        self._sizes = self._sizes or [0] * len(outputs)
        for number in range(len(outputs)):
            file = self._open(f"{number}.parts", "a+b", buffering=0)
            self._files.append(self._stack.enter_context(file))
        held = self._lengths()
        if any(has < size for has, size in zip(held, self._sizes, strict=True)):
            raise self._damage(f"the parts have {held} bytes, expected {self._sizes}")
        self._cut_off()

    def _cut_off(self) -> None:
        """Remove what is not of a whole answer."""
        for file, size in zip(self._files, self._sizes, strict=True):
            os.ftruncate(file.fileno(), size)

    def add(self, answer: Mapping[str, _Array]) -> None:
        """Write the answer to the next request; a `JoinError` if it does not fit to the first one."""
        for (name, axis), file in zip(self._outputs.items(), self._files, strict=True):
            array = answer[name]
            if array.dtype.hasobject:
                array = array.astype(np.str_)
            first = _read_as(next(_records(file))[0], array.dtype) if self.done else array
            _check_part(name, axis, first, array)
            if axis is not None or not self.done:
                _write_record(file, array)
        # In one step: Ctrl-C may come between any two.
        self.done, self._sizes = self.done + 1, self._lengths()

    def _lengths(self) -> list[int]:
        return [os.fstat(file.fileno()).st_size for file in self._files]

    def save(self) -> None:
        """Bring the answers to the disk, then the progress, which counts them."""
        for file in self._files:
            os.fdatasync(file.fileno())
        progress = {"work": self._work, "plan": self.plan, "bytes": self._sizes, "done": self.done}
        with self._open(_PROGRESS_ASIDE, "w") as aside:
            json.dump(progress, aside)
            aside.flush()
            os.fsync(aside.fileno())
        os.replace(_PROGRESS_ASIDE, _PROGRESS, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)
        self._saved = self.done

    def keep(self) -> int:
        """Save the answers so far; returns how many are kept: not all, if the disk takes no more."""
        with suppress(OSError):
            self._remove(_WHOLE)  # and what is not whole: the disk may be full
            self._cut_off()
            if self.done > self._saved:
                self.save()
        return self._saved

    def missing_bytes(self, share: float) -> int:
        """How much room the disk lacks for the answers and the output, if this share of them is there."""
        axes = zip(self._sizes, self._outputs.values(), strict=True)
        whole = sum(size if axis is None else int(size / share) for size, axis in axes)
        disk = os.fstatvfs(self._folder)
        return max(0, 2 * whole - sum(self._sizes) - disk.f_bavail * disk.f_frsize)

    def finish(self, model: ModelSpec, *, as_npy: bool = False) -> list[str]:
        """Write the output file, as `numpy.savez` does, or the only output as `numpy.save` does.

        Returns:
            A line for each output with its type and shape.
        """
        shapes = []
        with (
            self._open(_WHOLE, "wb", 0o666) as file,
            showing_work(sys.stderr, "writing", max(1, sum(self._sizes))) as work,
        ):
            if as_npy:
                shapes.append(self._write(0, file))
            else:
                with zipfile.ZipFile(file, "w") as archive:
                    for i, name in enumerate(self._outputs):
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            shapes.append(self._write(i, member))
                        work.show(sum(self._sizes[: i + 1]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(_WHOLE, self._output.name, src_dir_fd=self._folder, dst_dir_fd=self._parent)
        os.fsync(self._parent)
        self.forget()
        return [
            f"{printable(spec.name)}: {spec.element_type}{[*shape]}"
            for spec, shape in zip(model.outputs, shapes, strict=True)
        ]

    def _write(self, number: int, member: IO[bytes]) -> tuple[int, ...]:
        """Write the answers of one output as one array; its shape."""
        axis = [*self._outputs.values()][number]
        return _write_joined(member, [*_records(self._files[number])], axis)

    def forget(self) -> None:
        """Leave nothing to resume."""
        self._remove(_PROGRESS)
        self._saved = 0

    def close(self) -> None:
        """Let go of the folder, which is removed unless it holds something to resume."""
        self._stack.close()

    def _tidy(self) -> None:
        if _PROGRESS not in os.listdir(self._folder):
            self._clear()
            self._remove(_LOCK)
            with suppress(OSError):  # something in it is not mcinfer's
                os.rmdir(self.path.name, dir_fd=self._parent)

    def _clear(self) -> None:
        """Remove what runs leave in the folder, the progress first: without it the rest does not count."""
        parts = [name for name in os.listdir(self._folder) if name.endswith(".parts")]
        self._remove(_PROGRESS, _PROGRESS_ASIDE, _WHOLE, *parts)

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)


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


def _header(dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> dict[str, Any]:
    return {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}


def _write_record(file: IO[bytes], array: _Array) -> None:
    """Append an array in .npy format; types that NumPy lacks have no name in it and become raw bytes."""
    if array.dtype.isbuiltin == _OF_ANOTHER_PACKAGE:
        array = array.view(f"V{array.dtype.itemsize}")
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, _header(array.dtype, array.shape))
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for data in (header.getbuffer(), elements.data):
        while data:
            data = data[file.write(data) :]


def _records(file: IO[bytes]) -> Iterator[tuple[_Array, mmap.mmap]]:
    """The arrays that were appended to a file, and the mapping that they are in."""
    mapped = _map(file)
    file.seek(0)
    while file.tell() < len(mapped):
        yield _read_array(file, mapped)


def _write_joined(
    member: IO[bytes], records: Sequence[tuple[_Array, mmap.mmap]], axis: int | None
) -> tuple[int, ...]:
    """Write arrays as one, in C order; its shape."""
    shape = records[0][0].shape
    if axis is not None:
        total = sum(part.shape[axis] for part, _ in records)
        shape = (*shape[:axis], total, *shape[axis + 1 :])
    dtype = max((part.dtype for part, _ in records), key=lambda dtype: dtype.itemsize)  # of strings
    np.lib.format.write_array_header_1_0(member, _header(dtype, shape))
    outer = prod(shape[: axis or 0])
    for i in range(outer):
        for part, mapped in records:
            row = part.reshape(outer, -1)[i].astype(dtype, copy=False)
            member.write(row.view(np.uint8).data)
            mapped.madvise(mmap.MADV_DONTNEED)
    return shape
