"""Which files a model is made of, and what is in them, as one digest that the cache is keyed by.

Reading gigabytes to learn that nothing changed would cost more than the start that the cache saves. So
a folder remembers what each model's files looked like when they were last read: while device, inode,
size and both times are the same, so is the content. The kernel sets a file's ctime and nobody else can.

Writing through a mapping sets the times at the first write to a page that is clean, so files are brought to
the disk before they are looked at: then all their pages are. File systems in memory do not set them at all,
and what lies there is not remembered.
"""

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from mcinfer.errors import BuildError
from mcinfer.model_cache.files import chunks, external_files, open_regular
from mcinfer.model_cache.onnx_files import scan

FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for models that do not lie beside their external data."""

_VERSION = 1
"""Of the digest and of what is remembered: one more when either, or what `scan` finds, changes."""

_FRESH_NS = 2_000_000_000
"""A file that changed less than this ago may change again within the same tick of its file system's clock.

The coarsest are FAT's two seconds.
"""

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""Types of file systems on which writing through a mapping leaves a file's times as they are."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file looked like: while all of it is the same, the content is.

    Attributes:
        path: Absolute; links are not resolved.
        device: As in stat(2), like those that follow.
        inode: Another file put in the place of the old one has another.
        size: In bytes.
        mtime_ns: When the content changed, unless somebody set it.
        ctime_ns: When the content or anything else of the file changed.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model's content.

    Attributes:
        digest: SHA-256 of the model and of its external data, in hexadecimal digits.
        stamps: Of the files when they were read: the model, then its external data, each file once
            for each way the model writes its place.
    """

    digest: str
    stamps: tuple[Stamp, ...]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(stamp.size for stamp in self.stamps)

    def unchanged(self) -> bool:
        """Whether the files still are those that were read, as far as their stamps tell."""
        try:
            return self.stamps == tuple(_stamp(stamp.path) for stamp in self.stamps)
        except OSError:
            return False


def read_source(
    path: str | os.PathLike[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    memory: Path | None = None,
) -> Source:
    """Read a model's files, or recall what they held if they have not changed.

    Args:
        path: An ONNX model.
        folder: Where its external data lies; None or empty, as ONNX Runtime has it: beside the model.
        memory: Folder of mode 0700 in which digests are remembered; None remembers nothing. What
            cannot be read or written there is as good as not remembered.

    Raises:
        BuildError: It is no ONNX model; external data is missing, is no file or lies outside of its
            folder; a file changed while it was read.
        OSError: The model cannot be opened.
    """
    model = Path(path).absolute()  # not os.path.abspath: it takes "link/.." for nothing
    place = Path(folder).absolute() if folder else None
    notes = (
        None if memory is None or model.is_relative_to("/proc") else _notes(memory, model, place)
    )
    if notes is not None:
        remembered = _recall(notes, model)
        if remembered is not None:
            return remembered
    started_ns = time.time_ns()  # from here on a change of a file that is not fresh shows
    source = _read(model, place)
    last_ns = max(max(stamp.mtime_ns, stamp.ctime_ns) for stamp in source.stamps)
    fresh = last_ns >= started_ns - _FRESH_NS
    if notes is not None and not fresh and not _lies_in_memory(source.stamps):
        _remember(notes, source)
    return source


# Reading.


def _stamp(path: str) -> Stamp:
    info = os.stat(path)
    return Stamp(path, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _settled_stamp(path: str) -> Stamp:
    """The stamp of a file that a later write changes in any case."""
    with suppress(OSError), open_regular(path) as (descriptor, _):
        os.fsync(descriptor)
    return _stamp(path)


def _lies_in_memory(stamps: Sequence[Stamp]) -> bool:
    """Whether any of the files does, as far as the kernel tells (proc_pid_mountinfo(5))."""
    devices = {f"{os.major(stamp.device)}:{os.minor(stamp.device)}" for stamp in stamps}
    with (
        suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] in devices and rest.split()[0] in _IN_MEMORY:
                return True
    return False


def _read(model: Path, folder: Path | None) -> Source:
    before = _settled_stamp(str(model))
    locations = scan(model).external
    stamps = (before, *_stamps_of_external(model, folder, locations))
    total = hashlib.sha256(b"mcinfer model %d" % _VERSION)
    for name, stamp in zip(("", *locations), stamps, strict=True):
        try:
            content = _content(stamp)
        except OSError as exc:
            raise BuildError(f"{model}: {stamp.path} cannot be read: {exc}") from exc
        for part in (name.encode(), content):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    source = Source(digest=total.hexdigest(), stamps=stamps)
    if not source.unchanged():
        paths = [stamp.path for stamp in stamps]
        raise BuildError(f"{model} changed while it was read: expected its files to stay: {paths}")
    return source


def _content(stamp: Stamp) -> bytes:
    """The digest of a file's content: of as many bytes as it had, should it grow without end."""
    digest = hashlib.sha256()
    with open_regular(stamp.path) as (descriptor, _):
        for part in chunks(descriptor, stamp.size):
            digest.update(part)
    return digest.digest()


def _stamps_of_external(
    model: Path, folder: Path | None, locations: tuple[str, ...]
) -> list[Stamp]:
    stamps = []
    for path in external_files(model, folder, locations):
        try:
            stamps.append(_settled_stamp(str(path)))
        except OSError as exc:
            raise BuildError(f"{model}: external data {path} cannot be read: {exc}") from exc
    return stamps


# Remembering.


def _notes(memory: Path, model: Path, folder: Path | None) -> Path:
    """The file that remembers a model."""
    parts = [os.fsencode(model), b"" if folder is None else os.fsencode(folder)]
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return memory / f"{name}.json"


def _recall(notes: Path, model: Path) -> Source | None:
    """What was remembered; None if that is nothing, damaged, or of files that have changed."""
    try:
        found = json.loads(notes.read_bytes())
        version, digest = found["version"], found["digest"]
        source = Source(digest=digest, stamps=tuple(Stamp(*stamp) for stamp in found["stamps"]))
        usable = (
            version == _VERSION
            and _DIGEST.fullmatch(digest)
            and source.stamps[0].path == str(model)
            and source.unchanged()
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return source if usable else None


def _remember(notes: Path, source: Source) -> None:
    text = json.dumps(
        {
            "version": _VERSION,
            "digest": source.digest,
            "stamps": [astuple(stamp) for stamp in source.stamps],
        }
    )
    with suppress(OSError):
        descriptor, aside = tempfile.mkstemp(dir=notes.parent, prefix=f"{notes.stem}-")
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(text)
            os.replace(aside, notes)
        except OSError:
            os.unlink(aside)
            raise
