"""The cache of prepared models: folders that are made once and that every process may map.

::

    ROOT/KEY/            an entry, never changed again: prepared files of mode 0400, maybe in folders, and
                         manifest.json: format, facts, and of every other file name, size, SHA-256 and stamps
    ROOT/KEY.lock        empty; its flock says who uses or makes the entry, its mtime when it was last used
    ROOT/tmp-KEY-XXXX/   an entry that is being made or removed, or that a crash left behind
    ROOT/sources/        digests of files that models were prepared from (`keys`)
    ROOT/splits/         how models' batches are split (`split_records`)
    ROOT/engines/KEY/    what a runtime builds while it runs (TensorRT); its mtime says when it was last used

- A process that has an entry's files mapped holds LOCK_SH. One that makes or removes an entry holds LOCK_EX.
  So a mapped entry is never removed.
- A rename under LOCK_EX adds or removes an entry. A crash leaves a tmp folder, which never counts as an
  entry, and which the next holder of its key's LOCK_EX removes.
- A lock file is removed only under its own LOCK_EX. So after a process takes a lock, it checks that the path
  still leads to the locked file.
- Only this user may write to ROOT. Each method opens ROOT, checks it and works below that descriptor, so it
  never touches a folder that replaces ROOT meanwhile.

The key is a digest of the facts that the files were made from. No program can set a file's ctime back. So if
the stamps are those in the manifest, the gigabytes of the files need not be read again; if they differ (a
restored backup, the layer of a container image), the SHA-256 decides. Runtimes open the files by name; once
they have, `Held.is_unchanged` shows whether these are the files that were checked.

A lock belongs to the open file, not to the process: it lasts until the last copy of the descriptor is
closed, in any process (flock(2)). So this code closes descriptors, and never unlocks them. Folders are held
by descriptors as well (``/proc/self/fd/N``), so a folder that replaces one after its check is never used.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.private import (
    BY_DESCRIPTOR,
    Descriptors,
    access_fault,
    at_end,
    leads_to,
    opened_folder,
    path_of,
    take_lock,
)

MANIFEST = "manifest.json"

MODEL_FILE = "model.onnx"
"""File of an entry: the optimised graph; its packed weights lie beside it."""

ABOUT_FILE = "about.json"
"""File of an entry: ``name`` of the model, ``bytes`` of its files, ``seconds`` that preparing took."""

FAILURE_FILE = "failure.txt"
"""File in place of a model: the runtime's message why the model cannot be prepared."""

_FORMAT = 1
_KEY_CHARACTERS = 32


class UnsoundEntryError(McinferError):
    """An entry is not what its manifest says, or others could change it."""


class CacheUnusableError(McinferError):
    """The cache cannot be used, so the model is loaded without it."""


_Record = dict[str, Any]  # of one file: ``name``, ``size_bytes``, ``sha256`` and its stamps


def _record(name: str, info: os.stat_result, sha256: str) -> _Record:
    return {
        "name": name,
        "size_bytes": info.st_size,
        "sha256": sha256,
        "inode": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "ctime_ns": info.st_ctime_ns,
    }


def entry_key(facts: Mapping[str, Any]) -> str:
    """The key of what is made from these facts: the start of the SHA-256 of their JSON, 32 characters."""
    try:
        # Read back first: keys that are numbers become text, which is sorted otherwise.
        plain = json.loads(_to_json(dict(facts)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(f"facts: got {facts!r}, expected what JSON can say: {exc}") from exc
    return hashlib.sha256(_to_json(plain)).hexdigest()[:_KEY_CHARACTERS]


def _to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make a folder an entry: its files read-only and on disk, then its manifest."""
    records = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            path.chmod(0o700)
            sync(path)
            continue
        if not stat.S_ISREG(mode):
            raise UnsoundEntryError(f"{name} is not a regular file")
        path.chmod(0o400)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            # The stamps before the digest: a write in between then shows in them.
            info = os.fstat(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            records.append(_record(name, info, sha256))
    _write_manifest(folder, facts, records)
    sync(folder)


def _write_manifest(folder: Path, facts: Mapping[str, Any], records: Sequence[_Record]) -> None:
    """Write the manifest, which must not be there yet, to the disk."""
    manifest = {"format": _FORMAT, "facts": dict(facts), "files": [*records]}
    with (folder / MANIFEST).open("xb") as file:
        file.write(json.dumps(manifest, indent=1, allow_nan=False).encode())
        file.flush()
        os.fchmod(file.fileno(), 0o400)
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check(folder: Path) -> tuple[dict[str, Any], list[_Record] | None]:
    """Check an entry against its manifest and its folder's name; reads only files whose stamps have changed.

    Returns:
        The facts, as JSON gives them back; and, if stamps differ from the manifest's, new records.

    Raises:
        UnsoundEntryError: The entry is not what the manifest says, or others could change it.
    """
    own = folder.lstat()
    if not stat.S_ISDIR(own.st_mode):
        raise UnsoundEntryError("it is not a folder")
    found = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*")}
    folders = {name for name, info in found.items() if stat.S_ISDIR(info.st_mode)}
    for label, info in [("", own), *((f" {name}", found.pop(name)) for name in folders)]:
        if fault := access_fault(info):
            raise UnsoundEntryError(f"the folder{label} {fault}")
    if MANIFEST not in found:
        raise UnsoundEntryError(f"{MANIFEST} is missing")
    _check_regular(MANIFEST, found[MANIFEST])
    facts, records = _read_manifest(folder)
    expected = {MANIFEST, *records}
    empty = folders - {parent.as_posix() for name in records for parent in Path(name).parents}
    if empty or found.keys() != expected:
        raise UnsoundEntryError(
            f"missing files: {sorted(expected - found.keys())}, "
            f"unknown files: {sorted((found.keys() | empty) - expected)}"
        )
    current = [_check_file(folder, found[name], record) for name, record in records.items()]
    return facts, current if current != [*records.values()] else None


def _check_regular(name: str, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise UnsoundEntryError(f"{name} is not a regular file")
    if fault := access_fault(info):
        raise UnsoundEntryError(f"{name} {fault}")


def _read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, _Record]]:
    """The facts, which fit the folder's name, and the records by the files' names."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, facts, files = manifest["format"], manifest["facts"], manifest["files"]
        key = entry_key(facts)
        records: dict[str, _Record] = {}
        for one in files:
            name, size, sha256 = str(one["name"]), one["size_bytes"], one["sha256"]
            records[name] = {**one, "name": name, "size_bytes": size, "sha256": sha256}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise UnsoundEntryError(f"{MANIFEST} is not a manifest: {exc}") from exc
    if version != _FORMAT:
        raise UnsoundEntryError(f"its format is {version!r}, expected {_FORMAT}")
    if key != folder.name:
        raise UnsoundEntryError(f"its facts have the key {key}, expected {folder.name}")
    return facts, records


def _check_file(folder: Path, info: os.stat_result, record: _Record) -> _Record:
    """The record of a file as it is now."""
    name = record["name"]
    _check_regular(name, info)
    if info.st_size != record["size_bytes"]:
        raise UnsoundEntryError(f"{name} has {info.st_size} bytes, expected {record['size_bytes']}")
    current = _record(name, info, record["sha256"])
    if current != record:
        with (folder / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != record["sha256"]:
            raise UnsoundEntryError(f"{name} has the SHA-256 {sha256}, expected {record['sha256']}")
    return current


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of an entry, whose files are not checked; empty if its manifest cannot be read."""
    try:
        return _read_manifest(folder)[0]
    except (OSError, UnsoundEntryError):
        return {}


def about(entry: Path) -> Mapping[str, Any]:
    """The content of an entry's `ABOUT_FILE`; empty if it is damaged or missing."""
    try:
        content = json.loads((entry / ABOUT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def disk_bytes(folder: Path) -> int:
    """Bytes of the disk that the files of an entry take."""
    total = 0
    # A folder that is gone, or is none, has no files.
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                # st_blocks counts 512 bytes, whatever the file system's blocks are (stat(2)).
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


# Holding an entry.


@contextmanager
def unusable(place: Path) -> Iterator[None]:
    """Turn an OSError, and an entry that is not sound, into a `CacheUnusableError`."""
    try:
        yield
    except (OSError, UnsoundEntryError) as exc:
        reason = BY_DESCRIPTOR.sub(lambda _: str(place), str(exc))
        if isinstance(exc, OSError) and exc.errno in (errno.EACCES, errno.EROFS):
            reason += "; MCINFER_CACHE can name another cache"
        raise CacheUnusableError(f"the cache at {place} cannot be used: {reason}") from exc


_Stamps = dict[str, tuple[int, ...]]  # of each file and folder within an entry, by its name


def _stamps(folder: Path) -> _Stamps:
    """The state of all that is in an entry, but its manifest: that may be written again (`Root.take`)."""
    found: _Stamps = {}
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            info = os.lstat(path)
            found[os.path.relpath(path, folder)] = (
                *(info.st_dev, info.st_ino, info.st_size),
                *(info.st_mtime_ns, info.st_ctime_ns),
            )
    found.pop(MANIFEST, None)
    return found


class Held:
    """An entry that stays while this object lives, or any process with a copy of its lock descriptor.

    All that hold one entry in a process share two descriptors.

    Attributes:
        folder: Where its files are, read-only.
        opened: The same folder by a descriptor, for this process while this object is open.
        key: The name of that folder.
        facts: The facts that the entry was made from, as JSON gives them back.
    """

    def __init__(
        self, folder: Path, descriptors: Descriptors, facts: Mapping[str, Any], stamps: _Stamps
    ) -> None:
        self.folder = folder
        self.opened = path_of(descriptors.numbers[0])
        self.key = folder.name
        self.facts = facts
        self._descriptors: Descriptors | None = descriptors
        self._stamps = stamps

    @property
    def lock(self) -> int:
        """A descriptor that holds LOCK_SH, closed by `execve`; -1 after `close`."""
        return -1 if self._descriptors is None else self._descriptors.numbers[1]

    @classmethod
    def adopt(cls, folder_fd: int, lock_fd: int) -> "Held":
        """Hold an entry through descriptors that another process has sent; closes both if it fails.

        Raises:
            CacheUnusableError: The folder is not at the same path here (another mount namespace), the entry
                is not sound, or the lock is not its own.
        """
        with ExitStack() as unless_held:
            unless_held.callback(_close, folder_fd, lock_fd)
            link = path_of(folder_fd)
            with unusable(link):
                folder = link.readlink()
            if not leads_to(folder, folder_fd):
                text = f"the folder {folder} of the shared model is not visible here"
                raise CacheUnusableError(f"{text}: mount it at the same path")
            with unusable(folder.parent), opened_folder(folder.parent, own=True) as root:
                place = root / folder.name
                if not (leads_to(place, folder_fd) and leads_to(lock_path(place), lock_fd)):
                    raise CacheUnusableError(
                        f"the descriptor that was sent is not of {lock_path(folder)}"
                    )
                # Changes nothing where the sender holds LOCK_SH, as it should.
                fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.set_inheritable(folder_fd, False)
                os.set_inheritable(lock_fd, False)
                stamps = _stamps(link)
                facts, _ = check(place)
            led_to = _place(folder_fd, lock_fd)
            unless_held.pop_all()
            return cls(folder, _shared(led_to, folder_fd, lock_fd), facts, stamps)

    def is_unchanged(self) -> bool:
        """Whether its files still are those that were checked.

        If they are, whatever was loaded from `opened` before this call was of those files: a file that is
        replaced, or put back, has another ctime.
        """
        try:
            return (
                self._descriptors is not None
                and self._descriptors.are_ours()
                and _stamps(self.opened) == self._stamps
            )
        except OSError:
            return False

    def keep_for(self, user: object) -> None:
        """Hold the entry as long as an object lives, also after `close`; its end runs no Python code."""
        at_end(user, [self._descriptors])

    def close(self) -> None:
        """Release the entry; nothing that is still mapped from it may be used afterwards."""
        self._descriptors = None


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_OPEN: "dict[tuple[int, ...], weakref.ref[Descriptors]]" = {}
"""The descriptors of this process by what they lead to."""


def _place(folder_fd: int, lock_fd: int) -> tuple[int, ...]:
    """What the descriptors of an entry lead to."""
    infos = os.fstat(folder_fd), os.fstat(lock_fd)
    return tuple(number for info in infos for number in (info.st_dev, info.st_ino))


def _shared(place: tuple[int, ...], folder_fd: int, lock_fd: int) -> Descriptors:
    """The descriptors by which this process holds what is at this `_place`: those that it has, else these."""
    known = _OPEN.get(place)
    there = None if known is None else known()
    if there is not None and there.are_ours():
        _close(folder_fd, lock_fd)
        return there
    for key, one in [*_OPEN.items()]:
        if one() is None:
            _OPEN.pop(key, None)
    made = Descriptors(folder_fd, lock_fd)
    _OPEN[place] = weakref.ref(made)
    return made


def lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def is_locked(folder: Path) -> bool:
    """Whether a process uses, makes or removes an entry; writes nothing."""
    try:
        lock = take_lock(lock_path(folder), flags=os.O_RDONLY)
    except FileNotFoundError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is None


# The folder of all entries.

_log = logging.getLogger("mcinfer.model_cache")

_KEY = re.compile(r"[0-9a-f]{32}")
_LOCK = re.compile(r"([0-9a-f]{32})\.lock")
_DRAFT = re.compile(r"tmp-([0-9a-f]{32})-.*")

_LIMIT = re.compile(r"([0-9]{1,15}) ?([KMGT]?)(?:i?B)?")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEFAULT_LIMIT_BYTES = 50 * 2**30

_MAX_BUSY_SECONDS = 1.0
_MAX_DAMAGED_SECONDS = 30.0
"""Longest wait for users of a damaged entry: a mere check is shorter, and users may need it for days."""

_ENGINES = "engines"

_PAUSE = 0.02
"""Seconds between two tries to lock: flock knows no deadline, and an alarm would be the user's."""

_Identity = tuple[int, int]
"""Distinguishes an entry from a later one with the same key: inode and ctime of its folder."""


def is_key(text: str) -> bool:
    """Whether a text can be the key of an entry."""
    return _KEY.fullmatch(text) is not None


def _remove(folder: Path) -> None:
    """Remove a tmp folder; if that fails, the next sweep tries again."""
    import shutil  # not at every worker's start

    try:
        shutil.rmtree(folder)
    except OSError as exc:
        _log.warning("%s cannot be removed: %s", os.path.realpath(folder), exc)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryInfo:
    """One entry, as `Cache.entries` found it.

    Attributes:
        key: The name of its folder.
        facts: What it was made from; empty if its manifest cannot be read.
        bytes: Disk space of its files.
        used_at: When it was last made or opened, seconds as in `time.time`.
        in_use: Whether a process held it, or was making it.
    """

    key: str
    facts: Mapping[str, Any]
    bytes: int
    used_at: float
    in_use: bool


class Root:
    """The cache's folder, held open: `path` leads through its descriptor, `visible` is for people.

    Methods raise OSError, and `UnsoundEntryError` for a damaged entry.
    """

    def __init__(self, path: Path, visible: Path) -> None:
        self.path = path
        self.visible = visible

    def identity(self, key: str) -> _Identity | None:
        """The identity of the present entry, if there is one."""
        try:
            info = (self.path / key).lstat()
        except FileNotFoundError:
            return None
        return info.st_ino, info.st_ctime_ns

    def stored(self) -> list[tuple[float, str, int]]:
        """For each entry: time of last use, key and bytes; the most recently used last."""
        return self._sizes(match[0] for match in self._names(_KEY))

    def engines(self) -> list[tuple[float, str, int]]:
        """For each folder of engines: time of last use, its name below ROOT, and bytes."""
        return self._sizes(f"{_ENGINES}/{f.name}" for f in self.path.glob(f"{_ENGINES}/*"))

    def _sizes(self, names: Iterable[str]) -> list[tuple[float, str, int]]:
        found = []
        for name in names:
            folder = self.path / name
            with suppress(FileNotFoundError):  # removed meanwhile
                lock = lock_path(folder)
                used_at = (lock if lock.exists() else folder).lstat().st_mtime
                found.append((used_at, name, disk_bytes(folder)))
        return sorted(found)

    def take(self, key: str) -> Held | None:
        """Hold an entry; None if it is gone, or another process has its lock."""
        folder = self.path / key
        lock = take_lock(lock_path(folder), fcntl.LOCK_SH)
        if lock is None:
            return None
        with ExitStack() as unless_held:
            unless_held.callback(os.close, lock)
            if self.identity(key) is None:
                return None
            try:
                opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except NotADirectoryError as exc:
                raise UnsoundEntryError("it is not a folder") from exc
            unless_held.callback(os.close, opened)
            stamps = _stamps(path_of(opened))  # before the check: a later change shows in them
            facts, moved = check(folder)
            if moved is not None:
                self._record_again(folder, facts, moved)
            os.utime(lock)
            led_to = _place(opened, lock)
            unless_held.pop_all()
            return Held(self.visible / key, _shared(led_to, opened, lock), facts, stamps)

    def _record_again(
        self, folder: Path, facts: Mapping[str, Any], records: Sequence[_Record]
    ) -> None:
        """Record new stamps, so that the files are not read each time; several processes may do it."""
        with suppress(OSError):  # it is sound all the same
            draft = self.new_draft(folder.name)
            try:
                _write_manifest(draft, facts, records)
                (draft / MANIFEST).replace(folder / MANIFEST)
            finally:
                _remove(draft)

    def remove(self, name: str) -> bool:
        """Remove an entry that no process uses, or a folder of engines; whether that was done."""
        if is_key(name):
            return self.empty(name, entry=True)
        _remove(self.path / name)
        return True

    def new_draft(self, key: str) -> Path:
        """Make a tmp folder for an entry."""
        import tempfile  # not at every worker's start

        return Path(tempfile.mkdtemp(prefix=f"tmp-{key}-", dir=self.path))

    def drafts(self, key: str) -> list[Path]:
        """The tmp folders of a key. Under its LOCK_EX they are what a crash left."""
        return [self.path / match[0] for match in self._names(_DRAFT) if match[1] == key]

    def clean(self, key: str, *, entry: bool) -> None:
        """Remove all tmp folders of a key, and its entry or what is in its place; under its LOCK_EX."""
        for left in self.drafts(key):
            _remove(left)
        if entry and self.identity(key):
            draft = self.new_draft(key)
            (self.path / key).rename(draft / "removed")
            _remove(draft)

    def empty(self, key: str, *, entry: bool) -> bool:
        """`clean`, and remove a lock without entry; False, and nothing is done, if the lock is taken."""
        lock = take_lock(lock_path(self.path / key))
        if lock is None:
            return False
        try:
            self.clean(key, entry=entry)
            if self.identity(key) is None:
                lock_path(self.path / key).unlink()
        finally:
            os.close(lock)
        return True

    def sweep(self) -> None:
        """Remove what crashes left: tmp folders of keys that are not locked, and locks without entries."""
        left = {match[1] for match in self._names(_DRAFT)}
        left |= {match[1] for match in self._names(_LOCK)} - {m[0] for m in self._names(_KEY)}
        for key in sorted(left):
            self.empty(key, entry=False)

    def _names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for name in os.listdir(self.path) if (match := pattern.fullmatch(name))]


class Cache:
    """A folder of entries, which any number of threads and processes may use at once.

    Methods raise `CacheUnusableError` if the cache cannot be read or written, or others could change it.

    Attributes:
        folder: ROOT, absolute; may be missing until an entry is made.
        limit_bytes: Disk space above which unused entries are removed.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder.absolute()
        self.limit_bytes = limit_bytes

    @classmethod
    def default(cls) -> "Cache":
        """The cache of this user.

        Its folder is ``$MCINFER_CACHE``, else ``$XDG_CACHE_HOME/mcinfer``, else ``~/.cache/mcinfer``. Its
        limit is ``$MCINFER_CACHE_LIMIT`` (bytes, or ``500M``, ``20G``: powers of 1024), else 50 GiB.

        Raises:
            InvalidInputError: MCINFER_CACHE_LIMIT is of another form.
            CacheUnusableError: The user has no home folder.
        """
        limit_bytes = _DEFAULT_LIMIT_BYTES
        if text := os.environ.get("MCINFER_CACHE_LIMIT"):
            match = _LIMIT.fullmatch(text)
            if match is None:
                raise InvalidInputError(
                    f"MCINFER_CACHE_LIMIT: got {text!r}, expected bytes, such as '20G' or '500M'"
                )
            limit_bytes = int(match[1]) * _UNITS[match[2]]
        if own := os.environ.get("MCINFER_CACHE"):
            return cls(Path(own), limit_bytes)
        # Relative paths there are to be ignored (XDG Base Directory Specification 0.8).
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not home.is_absolute():
            try:
                home = Path.home() / ".cache"
            except RuntimeError as exc:
                raise CacheUnusableError(f"no place for the cache: {exc}") from exc
        return cls(home / "mcinfer", limit_bytes)

    @contextmanager
    def notes(self, name: str) -> Iterator[Path]:
        """The folder ``sources`` or ``splits``, by its descriptor while the context lasts."""
        with ExitStack() as opened:
            with unusable(self.folder):
                opened.enter_context(opened_folder(self.folder, own=True, make=0o700))
                path = opened.enter_context(opened_folder(self.folder / name, own=True, make=0o700))
            yield path

    def engine_folder(self, key: str) -> Path:
        """A folder of mode 0700 for a runtime that keeps there what it builds, by names of its own.

        Its files count towards the limit. They are removed in use, too: the runtime builds them again.

        Args:
            key: `entry_key` of what the files depend on, beside what their names say.
        """
        with self.notes(f"{_ENGINES}/{key}") as folder:
            with unusable(self.folder):
                os.utime(folder)
            return self.folder / _ENGINES / key

    @contextmanager
    def _existing(self) -> Iterator[Root | None]:
        """ROOT, if it exists; errors of the system inside become a `CacheUnusableError`."""
        with unusable(self.folder), ExitStack() as opened:
            root: Root | None = None
            with suppress(FileNotFoundError):
                root = Root(opened.enter_context(opened_folder(self.folder, own=True)), self.folder)
            yield root

    def open(self, key: str) -> Held | None:
        """Hold an entry that is there and sound.

        Returns:
            None if there is no such entry, if it is damaged (a warning says how), or if another process makes
            or removes it for longer than a second.

        Raises:
            InvalidInputError: The key is not of the form of one.
        """
        if not is_key(key):
            raise InvalidInputError(f"key: got {key!r}, expected 32 hexadecimal digits")
        with self._existing() as root:
            if root is None:
                return None
            end = time.monotonic() + _MAX_BUSY_SECONDS
            damaged: set[_Identity] = set()
            while True:
                held = self._take(root, key, damaged)
                # Another process may be checking whether it is in use, which takes the lock for a moment.
                if held or damaged or not root.identity(key) or time.monotonic() > end:
                    return held
                time.sleep(_PAUSE)

    def make(
        self,
        key: str,
        facts: Mapping[str, Any],
        fill: Callable[[Path, int], None],
        *,
        wait: float,
        patience: float = math.inf,
        progress: Callable[[int], None] | None = None,
    ) -> Held:
        """Hold an entry; make it if it is missing or damaged. Of many processes, one makes it.

        Args:
            key: `entry_key` of the facts.
            facts: What the entry is made from: what JSON can say.
            fill: Called with a new folder, to put regular files into it, and with the descriptor of the lock:
                a process that inherits the descriptor keeps others from making this entry while it lives.
                Its exceptions pass through, except errors of the system.
            wait: Seconds to wait for another process that makes the entry and makes no progress, or that uses
                a damaged one (then 30 at most).
            patience: Seconds to wait for another process in any case.
            progress: Called with the bytes that another process has written, when these change.

        Raises:
            CacheUnusableError: The folder cannot be written to, the disk is full, others could change the
                folder, or the time is over.
        """
        with unusable(self.folder), opened_folder(self.folder, own=True, make=0o700) as path:
            root = Root(path, self.folder)
            damaged: set[_Identity] = set()
            seen: object = None
            began = since = time.monotonic()
            while True:
                # First as a user: LOCK_EX alone would wait for all users of a finished entry.
                held = self._take(root, key, damaged)
                held = held or self._prepare(root, key, facts, fill, damaged)
                if held is not None:
                    break
                there, written = root.identity(key), sum(map(disk_bytes, root.drafts(key)))
                now = time.monotonic()
                if seen is None:
                    _log.info("waiting for another process that prepares %s", self.folder / key)
                if (there, written) != seen:
                    seen, since = (there, written), now
                    if progress is not None:
                        progress(written)
                limit = min(wait, _MAX_DAMAGED_SECONDS) if there in damaged else wait
                if now - since >= limit:  # the same text for all who wait
                    fault = (
                        "has been preparing it, or using a damaged one, without any progress for "
                        f"{limit:.3g} s"
                    )
                elif now - began >= patience:
                    fault = f"is preparing it, which takes more than {patience:.3g} s"
                else:
                    time.sleep(_PAUSE)
                    continue
                raise CacheUnusableError(f"{self.folder / key}: another process {fault}")
        try:
            self.evict()
        except CacheUnusableError as exc:  # the entry is made all the same
            _log.warning("no entries were evicted: %s", exc)
        return held

    def entries(self) -> list[EntryInfo]:
        """All entries, damaged ones too, the most recently used last."""
        with self._existing() as root:
            if root is None:
                return []
            return [
                EntryInfo(
                    key=key,
                    facts=facts_of(root.path / key),
                    bytes=size_bytes,
                    used_at=used_at,
                    in_use=is_locked(root.path / key),
                )
                for used_at, key, size_bytes in root.stored()
            ]

    def engine_bytes(self) -> int:
        """Disk space of what runtimes keep in `engine_folder`."""
        with self._existing() as root:
            return sum(size for _, _, size in root.engines()) if root is not None else 0

    def clear(self) -> tuple[int, int]:
        """Remove all unused entries, engines, notes on models, and what crashes left.

        Returns:
            Bytes freed, and how many entries were left because they are in use.
        """
        with self._existing() as root:
            if root is not None:
                for note in (*root.path.glob("sources/*"), *root.path.glob("splits/*")):
                    note.unlink(missing_ok=True)
        return self._shrink(0)

    def evict(self) -> int:
        """Remove the least recently used entries beyond the limit, and what crashes left.

        Entries in use stay, and count towards the limit. Returns the bytes freed.
        """
        return self._shrink(self.limit_bytes)[0]

    def _take(self, root: Root, key: str, damaged: set[_Identity]) -> Held | None:
        """Hold an entry, or note that it is damaged.

        A damaged one is not checked again: that would read all of its files, under a lock that keeps others
        from making it again.
        """
        there = root.identity(key)
        if there is None or there in damaged:
            return None
        try:
            return root.take(key)
        except UnsoundEntryError as exc:
            # As text: a record that is kept would hold the frames of the error, and what they hold.
            _log.warning("the prepared model %s is not used: %s", self.folder / key, str(exc))
            damaged.add(there)
            return None

    def _prepare(
        self,
        root: Root,
        key: str,
        facts: Mapping[str, Any],
        fill: Callable[[Path, int], None],
        damaged: set[_Identity],
    ) -> Held | None:
        """Make an entry and hold it; None if another process has the lock, or has made it."""
        import shutil  # not at every worker's start

        lock = take_lock(lock_path(root.path / key))
        if lock is None:
            return None
        try:
            if root.identity(key) not in {None, *damaged}:
                return None
            root.clean(key, entry=True)
            draft = root.new_draft(key)
            try:
                fill(draft, lock)
                seal(draft, facts)
                draft.rename(root.path / key)
                sync(root.path)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                # A child that the user has forked meanwhile has the descriptor as well.
                fcntl.flock(lock, fcntl.LOCK_UN)
                raise
            with suppress(BlockingIOError):
                # For those who inherited it too. Not atomic: in between, another may remove the entry.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return root.take(key)
        finally:
            os.close(lock)
        return None

    def _shrink(self, limit_bytes: int) -> tuple[int, int]:
        """Remove entries until so many bytes are left; bytes freed, and entries that are in use."""
        freed = in_use = 0
        with self._existing() as root:
            if root is None:
                return 0, 0
            root.sweep()
            stored = sorted([*root.stored(), *root.engines()])
            excess = sum(size_bytes for _, _, size_bytes in stored) - limit_bytes
            for _, name, size_bytes in stored:
                # At a limit of 0 an entry is removed even if its files take no space.
                if limit_bytes and freed >= excess:
                    break
                if root.remove(name):
                    freed += size_bytes
                else:
                    in_use += 1
        return freed, in_use
