"""One entry of the cache: a folder of read-only files, and a manifest that says what they have to be.

::

    KEY/manifest.json   format, facts, and of every other file: name, size, SHA-256, stamps
    KEY/...             the prepared files, mode 0400

The key is a digest of the facts that the files were made from. The stamps are what changes when a file
does: inode, mtime and ctime. No program can set a ctime back, so as long as the stamps are those in the
manifest, gigabytes need not be read again; where they differ (a restored backup, the layer of a container
image), the SHA-256 decides.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError, McinferError

MANIFEST = "manifest.json"
"""The name of the manifest within its folder."""

_FORMAT = 1
_KEY_CHARACTERS = 32


class UnsoundEntryError(McinferError):
    """An entry is not what its manifest says, or others could change it; says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What the manifest says of one file.

    Attributes:
        name: Within the folder.
        size_bytes: Its length.
        sha256: Of its content, hexadecimal.
        inode: With the times below, its stamps.
        mtime_ns: Nanoseconds since 1970.
        ctime_ns: Nanoseconds since 1970.
    """

    name: str
    size_bytes: int
    sha256: str
    inode: int
    mtime_ns: int
    ctime_ns: int


_RECORD_TYPES = {field.name: field.type for field in fields(FileRecord)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundEntry:
    """What a check of an entry found.

    Attributes:
        facts: What the entry was made from, as JSON gives it back.
        records: Of its files, with their stamps as they are now.
        moved: Whether stamps differed from those in the manifest, and the content was compared.
    """

    facts: dict[str, Any]
    records: tuple[FileRecord, ...]
    moved: bool


def entry_key(facts: Mapping[str, Any]) -> str:
    """The key of what is made from these facts: the start of the SHA-256 of their JSON, 32 characters.

    Raises:
        InvalidInputError: The facts are not JSON.
    """
    try:
        # Read back first: keys that are numbers become text, which is sorted otherwise.
        plain = json.loads(_to_json(dict(facts)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(f"facts: got {facts!r}, expected what JSON can say: {exc}") from exc
    return hashlib.sha256(_to_json(plain)).hexdigest()[:_KEY_CHARACTERS]


def _to_json(value: object) -> bytes:
    """The one way to write a value: keys sorted, ASCII, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def access_fault(info: os.stat_result) -> str | None:
    """Why others could change a file or folder, or nothing."""
    if info.st_uid != os.geteuid():
        return f"belongs to user {info.st_uid}, expected {os.geteuid()}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make a folder an entry: its files read-only and on disk, then its manifest.

    Raises:
        UnsoundEntryError: Something in it is not a regular file.
        OSError: It cannot be read or written, or the disk is full.
    """
    records = [_seal_file(path) for path in sorted(folder.iterdir())]
    write_manifest(folder, facts, records)
    sync(folder)


def _seal_file(path: Path) -> FileRecord:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UnsoundEntryError(f"{path.name} is not a regular file")
    path.chmod(0o400)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        # The stamps before the digest: what somebody writes meanwhile then shows in them.
        info = os.fstat(file.fileno())
        return _record(path.name, info, hashlib.file_digest(file, "sha256").hexdigest())


def _record(name: str, info: os.stat_result, sha256: str) -> FileRecord:
    return FileRecord(
        name=name,
        size_bytes=info.st_size,
        sha256=sha256,
        inode=info.st_ino,
        mtime_ns=info.st_mtime_ns,
        ctime_ns=info.st_ctime_ns,
    )


def write_manifest(folder: Path, facts: Mapping[str, Any], records: Sequence[FileRecord]) -> None:
    """Write the manifest, which must not be there yet, to the disk.

    Raises:
        OSError: It cannot be written.
    """
    manifest = {"format": _FORMAT, "facts": dict(facts), "files": [asdict(r) for r in records]}
    with (folder / MANIFEST).open("xb") as file:
        file.write(json.dumps(manifest, indent=1, allow_nan=False).encode())
        file.flush()
        os.fchmod(file.fileno(), 0o400)
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check(folder: Path) -> SoundEntry:
    """Check an entry against its manifest; reads the files only where their stamps have changed.

    Args:
        folder: Its name is the key.

    Raises:
        UnsoundEntryError: It does not fit, or others could change it.
        OSError: It cannot be read.
    """
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise UnsoundEntryError("it is not a folder")
    if fault := access_fault(info):
        raise UnsoundEntryError(f"the folder {fault}")
    names = {*os.listdir(folder)}
    if MANIFEST not in names:
        raise UnsoundEntryError(f"{MANIFEST} is missing")
    _check_regular(folder / MANIFEST)
    facts, records = _read_manifest(folder)
    expected = {MANIFEST, *(record.name for record in records)}
    if names != expected:
        raise UnsoundEntryError(
            f"missing files: {sorted(expected - names)}, unknown files: {sorted(names - expected)}"
        )
    current = tuple(_check_file(folder, record) for record in records)
    return SoundEntry(facts=facts, records=current, moved=current != records)


def _check_regular(path: Path) -> os.stat_result:
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise UnsoundEntryError(f"{path.name} is not a regular file")
    if fault := access_fault(info):
        raise UnsoundEntryError(f"{path.name} {fault}")
    return info


def _read_manifest(folder: Path) -> tuple[dict[str, Any], tuple[FileRecord, ...]]:
    """The facts and the records, all of the right types, with facts that fit the folder's name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (ValueError, RecursionError) as exc:
        raise UnsoundEntryError(f"{MANIFEST} is not JSON: {exc}") from exc
    if not isinstance(manifest, dict):
        raise UnsoundEntryError(f"{MANIFEST} holds a {type(manifest).__name__}, expected a map")
    if manifest.get("format") != _FORMAT:
        raise UnsoundEntryError(f"its format is {manifest.get('format')!r}, expected {_FORMAT}")
    facts, files = manifest.get("facts"), manifest.get("files")
    if not isinstance(facts, dict) or not isinstance(files, list):
        raise UnsoundEntryError(f"{MANIFEST} lacks facts or files")
    try:
        key = entry_key(facts)
    except InvalidInputError as exc:
        raise UnsoundEntryError(str(exc)) from exc
    if key != folder.name:
        raise UnsoundEntryError(f"its facts have the key {key}, expected {folder.name}")
    return facts, tuple(_read_record(item) for item in files)


def _read_record(item: Any) -> FileRecord:
    types = {name: type(value) for name, value in item.items()} if isinstance(item, dict) else {}
    if types != _RECORD_TYPES:
        raise UnsoundEntryError(f"{MANIFEST}: got {item!r}, expected the record of a file")
    return FileRecord(**item)


def _check_file(folder: Path, record: FileRecord) -> FileRecord:
    """The record of a file as it is now."""
    path = folder / record.name
    info = _check_regular(path)
    if info.st_size != record.size_bytes:
        raise UnsoundEntryError(
            f"{record.name} has {info.st_size} bytes, expected {record.size_bytes}"
        )
    current = _record(record.name, info, record.sha256)
    if current != record:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != record.sha256:
            raise UnsoundEntryError(
                f"{record.name} has the SHA-256 {sha256}, expected {record.sha256}"
            )
    return current


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of an entry, whose files are not looked at; empty if its manifest cannot be read."""
    try:
        return _read_manifest(folder)[0]
    except (OSError, UnsoundEntryError):
        return {}


def disk_bytes(folder: Path) -> int:
    """How much of the disk the files of an entry take."""
    try:
        with os.scandir(folder) as files:
            # st_blocks counts 512 bytes, whatever the file system's blocks are (stat(2)).
            return sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
    except (FileNotFoundError, NotADirectoryError):
        return 0
