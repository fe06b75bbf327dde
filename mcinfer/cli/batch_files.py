"""The files of ``mcinfer run``: a mapped input, answers that are kept as they come, and the output.

::

    .NAME.partial/lock            held (flock) by the one run that may touch the rest
    .NAME.partial/progress.json   which work this is, and how far it is: replaced whole, after a sync
    .NAME.partial/0.parts, …      by output, the answers one after another, each in the format .npy
    .NAME.partial/whole.npz       at the end all of them, which is then moved to NAME

The folder is this user's alone: mcinfer makes it with mode 0700 and uses no other. It is held by a
descriptor, by which all files in it are opened, and no link is followed. What lies in a file beyond what the
progress says is written over, so a run can be resumed after a kill or a loss of power as well.
"""

import fcntl
import hashlib
import json
import mmap
import os
import stat
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from operator import ge
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.cli.progress import showing_work
from mcinfer.errors import BuildError, InvalidInputError, McinferError, printable
from mcinfer.model_cache.onnx_files import open_regular
from mcinfer.requests.tensors import as_input, difference
from mcinfer.sharding import Axes, JoinError
from mcinfer.specs import ModelSpec

_FORMAT = 4
"""Of the folder; one more when it changes."""

_LOCK = "lock"
_PROGRESS = "progress.json"
_PROGRESS_ASIDE = "progress.json.new"
_WHOLE = "whole.npz"

_BLOCK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 1024

_OF_ANOTHER_PACKAGE = 2
"""What `numpy.dtype.isbuiltin` is then."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""APPNOTE.TXT of PKWARE, 4.3.7: the lengths of the name and of the extra field, which follow the header."""

_Array = NDArray[Any]


def stamp(descriptor: int) -> dict[str, Any]:
    """The size and a digest of a file, which differ after a change.

    Of a file above 64 MiB the digest is of samples. Its end is among them, where an .npz file has the check
    sums of all its arrays.
    """
    size = os.fstat(descriptor).st_size
    digest = hashlib.sha256()
    for start in (*range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)), size - _SAMPLE_BYTES):
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, max(0, start)))
    return {"size": size, "sha256": digest.hexdigest()}


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def _read_array(file: IO[bytes], mapped: mmap.mmap) -> _Array:
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
    return array


def _read_as(array: _Array, dtype: "np.dtype[Any]") -> _Array:
    """An array as of that type, if NumPy lacks the type and has stored it as so many bytes each."""
    stored = dtype.isbuiltin == _OF_ANOTHER_PACKAGE and array.dtype == f"V{dtype.itemsize}"
    return array.view(dtype) if stored else array


# The input.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An .npz or .npy file, mapped: its arrays are read as their rows are used.

    Attributes:
        path: Of the file.
        descriptor: Likewise.
        stamp: See `stamp`.
        content: By name; an .npy file has one array, under no name.
        maps: Of the file, and of what was unpacked.
    """

    path: Path
    descriptor: int
    stamp: dict[str, Any]
    content: dict[str, _Array]
    maps: list[mmap.mmap]

    def arrays(self, model: ModelSpec) -> dict[str, _Array]:
        """The arrays by input, in the model's order.

        Raises:
            InvalidInputError: They are not what the model takes.
        """
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
        return {
            spec.name: as_input(_read_as(found[spec.name], spec.dtype), spec, spec.element_type)
            for spec in model.inputs
        }

    def let_go(self) -> None:
        """Give back the memory of what was read.

        Raises:
            InvalidInputError: The file became shorter: to read what it had would end the process.
        """
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)
        if os.fstat(self.descriptor).st_size < self.stamp["size"]:
            raise InvalidInputError(f"--input: {self.path} became shorter while it was read")


@contextmanager
def opened_input(path: Path, scratch: Path) -> Iterator[InputFile]:
    """Open an input file.

    An .npz file is read once for its check sums, so that damage is found before any work. Compressed arrays
    are unpacked into files without a name.

    Args:
        path: Of the file.
        scratch: A folder with room for what is unpacked.

    Raises:
        InvalidInputError: It is neither .npz nor .npy, or it is damaged or cannot be opened.
        McinferError: It cannot be read or unpacked.
    """
    with ExitStack() as stack:
        try:
            descriptor, _ = stack.enter_context(open_regular(path))
        except (BuildError, OSError) as exc:
            raise InvalidInputError(f"--input: {exc}") from exc
        file = stack.enter_context(open(descriptor, "rb", closefd=False))
        content: dict[str, _Array] = {}
        maps: list[mmap.mmap] = []
        with _naming(path, scratch):
            if not zipfile.is_zipfile(file):
                file.seek(0)
                maps.append(_map(descriptor))
                content[""] = _read_array(file, maps[0])
            else:
                for name, array, mapped in _read_archive(file, scratch):
                    content[name] = array
                    maps.append(mapped)
        yield InputFile(
            path=path, descriptor=descriptor, stamp=stamp(descriptor), content=content, maps=maps
        )


def _read_archive(file: IO[bytes], scratch: Path) -> Iterator[tuple[str, _Array, mmap.mmap]]:
    """The arrays of an archive, whose check sums are right: mapped in their place, or unpacked."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        done, total = 0, max(1, sum(info.file_size for info in infos))
        with showing_work(sys.stderr, "checking the input", total) as work:
            for info in infos:
                packed = info.compress_type != zipfile.ZIP_STORED
                with archive.open(info) as member, TemporaryFile(dir=scratch) as unpacked:
                    for block in iter(partial(member.read, _BLOCK_BYTES), b""):
                        if packed:
                            unpacked.write(block)
                        work.show(done := done + len(block))
                    unpacked.flush()
                    place: IO[bytes] = unpacked
                    start = 0
                    if not packed:
                        place, start = file, info.header_offset + _LOCAL_HEADER.size
                        header = os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset)
                        start += sum(_LOCAL_HEADER.unpack(header))
                    mapped = _map(place.fileno())
                    place.seek(start)
                    array = _read_array(place, mapped)
                    if (size := place.tell() - start) != info.file_size:
                        text = f"{info.filename} has {info.file_size} bytes, expected {size}"
                        raise ValueError(text)
                yield info.filename.removesuffix(".npy"), array, mapped


@contextmanager
def _naming(path: Path, scratch: Path) -> Iterator[None]:
    """Have errors of NumPy, zipfile, zlib and the system name the file."""
    try:
        yield
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            text = f"--input: {path} cannot be read, or unpacked in {scratch}: {exc.strerror}"
            raise McinferError(text) from exc
        kind = "an .npy file" if path.suffix == ".npy" else "an .npz file"
        raise InvalidInputError(f"--input: {path} is not {kind}: {exc}") from exc


# The answers, and the output.


class PartialResults:
    """The answers so far, in a folder that no other run can take until `close`.

    Attributes:
        path: Of the folder.
        plan: What `begin` was given by the run that is resumed; None if there is nothing to resume.
        done: How many requests are answered.
    """

    def __init__(self, output: Path, work: Mapping[str, Any], *, restart: bool = False) -> None:
        """Take the folder; it is made if there is none.

        Args:
            output: Absolute path of the output file.
            work: What its result depends on, as JSON has it: model, input, options.
            restart: Whether to discard what an interrupted run has done.

        Raises:
            McinferError: It cannot be made, another run or another user has it, it is of other work, or it is
                damaged.
        """
        self.path = output.with_name(f".{output.name}.partial")
        self.plan: Mapping[str, Any] | None = None
        self.done = 0
        self._output = output
        self._work = {"format": _FORMAT, **work}
        self._outputs: Axes = {}
        self._files: list[int] = []
        self._sizes: Sequence[int] = ()
        self._saved = 0
        with ExitStack() as stack:
            try:
                self._parent = os.open(output.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, self._parent)
                self._folder = self._take(stack)
                if restart:
                    _clear(self._folder)
                self._recall()
            except OSError as exc:
                raise McinferError(f"--output: {self.path}: {exc.strerror}") from exc
            self._stack = stack.pop_all()

    def _take(self, stack: ExitStack) -> int:
        """The folder's descriptor; the stack closes it, and lets go of its lock."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            with ExitStack() as tried, suppress(FileNotFoundError):  # another run has removed it
                with suppress(FileExistsError):
                    os.mkdir(self.path.name, 0o700, dir_fd=self._parent)
                folder = os.open(self.path.name, flags, dir_fd=self._parent)
                tried.callback(os.close, folder)
                info = os.fstat(folder)
                if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise McinferError(
                        f"--output: {self.path} is of user {info.st_uid} and has mode "
                        f"{stat.S_IMODE(info.st_mode):04o}, expected user {os.geteuid()} and 0700: "
                        "remove it, or write to another folder"
                    )
                lock = _open(folder, _LOCK, os.O_RDWR | os.O_CREAT)
                tried.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = f"--output: another run is writing to {self.path}"
                    raise McinferError(text) from None
                if os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=folder)):
                    tried.callback(self._tidy, folder)
                    stack.push(tried.pop_all())
                    return folder

    def _recall(self) -> None:
        try:
            with open(_open(self._folder, _PROGRESS, os.O_RDONLY), "rb") as file:
                saved = json.load(file)
            differing = [
                name for name, what in self._work.items() if saved["work"].get(name) != what
            ]
            if differing:
                raise McinferError(
                    f"--output: {self.path} holds the results of other work, with another "
                    f"{', '.join(differing)}; --restart discards them"
                )
            self.plan, self._sizes = dict(saved["plan"]), [*map(int, saved["bytes"])]
            self.done = self._saved = int(saved["done"])
        except FileNotFoundError:
            pass
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise self.damage(f"{_PROGRESS}: {exc}") from exc

    def damage(self, what: str) -> McinferError:
        """The error for a folder whose content cannot be what a run left."""
        return McinferError(f"--output: {self.path} is damaged ({what}); --restart discards it")

    def begin(self, plan: Mapping[str, Any], outputs: Axes) -> None:
        """Say how the answers come, or that they come as those that are there.

        Args:
            plan: How the input is cut, as JSON has it.
            outputs: By output, in the model's order, the axis along which the answers follow one another;
                None: they are all the same, and one is kept.

        Raises:
            McinferError: The folder is damaged.
        """
        self.plan, self._outputs = plan, outputs
        self._sizes = self._sizes or [0] * len(outputs)
        for number in range(len(outputs)):
            file = _open(self._folder, f"{number}.parts", os.O_RDWR | os.O_CREAT)
            self._stack.callback(os.close, file)
            self._files.append(file)
        held = [os.fstat(file).st_size for file in self._files]
        if len(held) != len(self._sizes) or not all(map(ge, held, self._sizes)):
            raise self.damage(f"the parts have {held} bytes, expected {self._sizes}")

    def add(self, answer: Mapping[str, _Array]) -> None:
        """Write the answer to the next request.

        Raises:
            JoinError: An output does not go together with the first one.
            OSError: It cannot be written.
        """
        sizes = [*self._sizes]
        for i, (name, axis) in enumerate(self._outputs.items()):
            array = answer[name]
            if array.dtype.hasobject:
                array = array.astype(np.str_)
            first = array
            if self.done:
                first = _read_as(next(_records(self._files[i], sizes[i]))[0], array.dtype)
            _check_part(name, axis, first, array)
            if axis is not None or not self.done:
                sizes[i] = _write_record(self._files[i], sizes[i], array)
        # In one step: Ctrl-C may come between any two.
        self.done, self._sizes = self.done + 1, sizes

    def save(self) -> None:
        """Bring the answers to the disk, then the progress that speaks of them."""
        for file in self._files:
            os.fdatasync(file)
        progress = {"work": self._work, "plan": self.plan, "bytes": self._sizes, "done": self.done}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(_open(self._folder, _PROGRESS_ASIDE, flags), "w", encoding="ascii") as aside:
            json.dump(progress, aside)
            aside.flush()
            os.fsync(aside.fileno())
        os.replace(_PROGRESS_ASIDE, _PROGRESS, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)
        self._saved = self.done

    def keep(self) -> int:
        """Save what is done, now that the work goes no further.

        Returns:
            How many answers are kept: fewer than there are, if the disk takes no more.
        """
        with suppress(OSError):
            _remove(self._folder, _WHOLE)  # and what is not whole: the disk may be full
            for file, size in zip(self._files, self._sizes, strict=True):
                os.ftruncate(file, size)
            if self.done > self._saved:
                self.save()
        return self._saved

    def missing_bytes(self, share: float) -> int:
        """How much room the disk lacks for all that is to be written, of which so much is done."""
        axes = zip(self._sizes, self._outputs.values(), strict=True)
        whole = sum(size if axis is None else int(size / share) for size, axis in axes)
        disk = os.fstatvfs(self._folder)
        return max(0, 2 * whole - sum(self._sizes) - disk.f_bavail * disk.f_frsize)

    def finish(self, model: ModelSpec) -> list[str]:
        """Write the output file, as `numpy.savez` does.

        Returns:
            For each output a line with its name, element type and shape.

        Raises:
            OSError: It cannot be written.
        """
        lines = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with (
            open(_open(self._folder, _WHOLE, flags, 0o666), "wb") as file,
            showing_work(sys.stderr, "writing", max(1, sum(self._sizes))) as work,
        ):
            with zipfile.ZipFile(file, "w") as archive:
                for i, (spec, axis) in enumerate(
                    zip(model.outputs, self._outputs.values(), strict=True)
                ):
                    records = [*_records(self._files[i], self._sizes[i])]
                    with archive.open(f"{spec.name}.npy", "w", force_zip64=True) as member:
                        shape = _write_joined(member, records, axis)
                    lines.append(f"{printable(spec.name)}: {spec.element_type}{[*shape]}")
                    work.show(sum(self._sizes[: i + 1]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(_WHOLE, self._output.name, src_dir_fd=self._folder, dst_dir_fd=self._parent)
        os.fsync(self._parent)
        self.forget()
        return lines

    def forget(self) -> None:
        """Leave nothing to resume."""
        _remove(self._folder, _PROGRESS)
        self._saved = 0

    def close(self) -> None:
        """Let go of the folder, which is removed unless there is something in it to resume."""
        self._stack.close()

    def _tidy(self, folder: int) -> None:
        with suppress(FileNotFoundError):
            os.stat(_PROGRESS, dir_fd=folder, follow_symlinks=False)
            return
        _clear(folder)
        _remove(folder, _LOCK)
        with suppress(OSError):  # something in it is not mcinfer's
            os.rmdir(self.path.name, dir_fd=self._parent)


def _clear(folder: int) -> None:
    """Remove what runs leave in a folder, the progress first: without it nothing else counts."""
    parts = [name for name in os.listdir(folder) if name.endswith(".parts")]
    _remove(folder, _PROGRESS, _PROGRESS_ASIDE, _WHOLE, *parts)


def _remove(folder: int, *names: str) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _open(folder: int, name: str, flags: int, mode: int = 0o600) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


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
    """What a .npy file says; NumPy reads no names of types that it lacks, so these are bytes."""
    lacking = dtype.isbuiltin == _OF_ANOTHER_PACKAGE
    descr = f"|V{dtype.itemsize}" if lacking else np.lib.format.dtype_to_descr(dtype)
    return {"descr": descr, "fortran_order": False, "shape": shape}


def _write_record(file: int, at: int, array: _Array) -> int:
    """Write an array in .npy format to a place in a file; the place behind it."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, _header(array.dtype, array.shape))
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for data in (header.getbuffer(), elements.data):
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done:], at + done)
        at += done
    return at


def _records(file: int, size: int) -> Iterator[tuple[_Array, mmap.mmap]]:
    """The arrays that were written to a file one after another, and the mapping that they are in."""
    mapped = _map(file)
    with open(file, "rb", closefd=False) as opened:
        opened.seek(0)
        while opened.tell() < size:
            yield _read_array(opened, mapped), mapped


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
