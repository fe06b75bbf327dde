"""The cache of prepared models: folders that are made once and that every process may map.

::

    ROOT/KEY/            an entry, never changed again: prepared files of mode 0400, maybe in folders, and
                         manifest.json: format, facts, and of every other file name, size, SHA-256 and stamps
    ROOT/KEY.lock        empty; its flock says who uses or makes the entry, its mtime when it was last used
    ROOT/tmp-KEY-XXXX/   an entry that is being made or removed, or that a crash left behind
    ROOT/background/CLAIM
                         locked by the process that prepares a model beside its users (`keys.claim_key`);
                         the text in it says why that failed. One of these at a time has
                         ROOT/background/turn
    ROOT/sources/        digests of files that models were prepared from (`keys`)
    ROOT/splits/         how models' batches are split (`split_records`)
    ROOT/engines/KEY/    what a runtime builds while it runs (TensorRT, OpenVINO on GPUs); its mtime says
                         when it was last used

- A process that has an entry's files mapped holds LOCK_SH. One that makes or removes an entry holds LOCK_EX.
  So a mapped entry is never removed.
- A rename under LOCK_EX adds or removes an entry. A crash leaves a tmp folder, which never counts as an
  entry, and which the next holder of its key's LOCK_EX removes.
- A lock file is removed only under its own LOCK_EX. So after a process takes a lock, it checks that the path
  still leads to the locked file.
- Only this user may write to ROOT, and only this user and root may replace it. Each method checks that.

The key is a digest of the facts that the files were made from. No program can set a file's ctime back. So if
the stamps are those in the manifest, the gigabytes of the files need not be read again; if they differ (a
restored backup, the layer of a container image), the SHA-256 decides.

A lock belongs to the open file, not to the process: it lasts until the last copy of the descriptor is
closed, in any process (flock(2)). So this code closes descriptors, and never unlocks them.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.model_cache import file_states
from mcinfer.private import Descriptor, check_own, leads_to, take_lock

MANIFEST = "manifest.json"

MODEL_FILE = "model.onnx"
"""File of an entry: the optimised graph; its packed weights lie beside it."""

ABOUT_FILE = "about.json"
"""File of an entry: ``name`` of the model, ``bytes``, `keys.sketch` and states (``files``) of its files,
``seconds`` that preparing took."""

FAILURE_FILE = "failure.txt"
"""File in place of a model: the runtime's message why the model cannot be prepared."""

_FORMAT = 1
_KEY_CHARACTERS = 32


class UnsoundEntryError(McinferError):
    """An entry is not what its manifest says."""


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
        if path.is_dir():
            path.chmod(0o700)
            sync(path)
            continue
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


def check(folder: Path) -> dict[str, Any]:
    """Check an entry against its manifest and its folder's name; reads only files whose stamps have changed.

    New stamps are recorded, so that the files are not read each time; several processes may do it.

    Returns:
        The facts, as JSON gives them back.

    Raises:
        UnsoundEntryError: The entry is not what the manifest says.
    """
    facts, records = _read_manifest(folder)
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {path.relative_to(folder).as_posix(): path.lstat() for path in files}
    expected = {MANIFEST, *records}
    if found.keys() != expected:
        raise UnsoundEntryError(
            f"missing files: {sorted(expected - found.keys())}, "
            f"unknown files: {sorted(found.keys() - expected)}"
        )
    current = [_check_file(folder, found[name], record) for name, record in records.items()]
    if current != [*records.values()]:
        with suppress(OSError):  # it is sound all the same
            draft = _new_draft(folder)
            try:
                _write_manifest(draft, facts, current)
                (draft / MANIFEST).replace(folder / MANIFEST)
            finally:
                _remove(draft)
    return facts


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
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise UnsoundEntryError(f"{MANIFEST} is missing") from exc
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
    if info.st_size != record["size_bytes"]:
        raise UnsoundEntryError(f"{name} has {info.st_size} bytes, expected {record['size_bytes']}")
    current = _record(name, info, record["sha256"])
    if current != record:
        with (folder / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != record["sha256"]:
            raise UnsoundEntryError(f"{name} has the SHA-256 {sha256}, expected {record['sha256']}")
    return current


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


def _new_draft(entry: Path) -> Path:
    import tempfile  # not at every worker's start

    return Path(tempfile.mkdtemp(prefix=f"tmp-{entry.name}-", dir=entry.parent))


def _remove(folder: Path) -> None:
    """Remove a tmp folder; if that fails, the next sweep tries again."""
    import shutil  # not at every worker's start

    try:
        shutil.rmtree(folder)
    except OSError as exc:
        _log.warning("%s cannot be removed: %s", os.path.realpath(folder), exc)


# Holding an entry.


def write_atomically(path: Path, text: str) -> None:
    """Put a file in its place by a rename; an OSError leaves nothing of it."""
    import tempfile  # not at every worker's start

    descriptor, draft = tempfile.mkstemp(prefix="tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


@contextmanager
def unusable(place: Path) -> Iterator[None]:
    """Turn an OSError, and an entry that is not sound, into a `CacheUnusableError`."""
    try:
        yield
    except (OSError, UnsoundEntryError) as exc:
        reason = str(exc)
        if isinstance(exc, OSError) and exc.errno in (errno.EACCES, errno.EROFS):
            reason += "; MCINFER_CACHE can name another cache"
        raise CacheUnusableError(f"the cache at {place} cannot be used: {reason}") from exc


class Held:
    """An entry that stays while this object lives, or any process with a copy of its lock descriptor.

    Attributes:
        folder: Where its files are, read-only.
        key: The name of that folder.
        facts: The facts that the entry was made from, as JSON gives them back.
    """

    def __init__(self, folder: Path, lock: int, facts: Mapping[str, Any]) -> None:
        """The lock is owned by this object from now on."""
        self.folder = folder
        self.key = folder.name
        self.facts = facts
        self._lock: Descriptor | None = Descriptor(lock)

    @property
    def lock(self) -> int:
        """A descriptor that holds LOCK_SH, closed by `execve`; -1 after `close`."""
        return -1 if self._lock is None else self._lock.number

    @classmethod
    def adopt(cls, folder: Path, lock: int) -> "Held":
        """Hold an entry by the lock that another process has sent, which is closed if it fails.

        Raises:
            CacheUnusableError: The folder is not at the same path here (another mount namespace), the entry
                is not sound, or the lock is not its own.
        """
        with ExitStack() as unless_held:
            unless_held.callback(os.close, lock)
            if not (folder.exists() and leads_to(lock_path(folder), lock)):
                raise CacheUnusableError(
                    f"the folder {folder} of the shared model is not visible here, or is another one: mount "
                    "it at the same path"
                )
            with unusable(folder.parent):
                check_own(folder.parent)
                # Changes nothing where the sender holds LOCK_SH, as it should.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.set_inheritable(lock, False)
                held = cls(folder, lock, check(folder))
            unless_held.pop_all()
            return held

    def keep_for(self, user: object) -> None:
        """Hold the entry as long as an object lives, also after `close`."""
        weakref.finalize(user, _let_go, self._lock).atexit = False

    def close(self) -> None:
        """Release the entry; nothing that is still mapped from it may be used afterwards."""
        self._lock = None


def _let_go(_: Descriptor | None) -> None:
    """Nothing: the descriptor is closed with its last user."""


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
_SHARE_OF_DISK = 4
_STALE_SECONDS = 7 * 86400.0
"""After so long without a use, an entry whose model is not there any more goes before others."""
_AGAIN_SECONDS = 3600.0
"""Until a model that could not be prepared beside its users is tried again."""

_MAX_BUSY_SECONDS = 1.0

_ENGINES = "engines"
_BACKGROUND, _TURN = "background", "turn"

_PAUSE = 0.02
"""Seconds between two tries to lock: flock knows no deadline, and an alarm would be the user's."""

_Identity = tuple[int, int]
"""Distinguishes an entry from a later one with the same key: inode and ctime of its folder."""


def is_key(text: str) -> bool:
    """Whether a text can be the key of an entry."""
    return _KEY.fullmatch(text) is not None


def is_entry(model: str) -> bool:
    """Whether the path of a model is that of a prepared one."""
    folder, name = os.path.split(os.path.realpath(model))
    files = [os.path.join(folder, file) for file in (MANIFEST, ABOUT_FILE)]
    # A user's folder may have such a name, too.
    return (
        name == MODEL_FILE and is_key(os.path.basename(folder)) and all(map(os.path.exists, files))
    )


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


class Cache:
    """A folder of entries, which any number of threads and processes may use at once.

    Methods raise `CacheUnusableError` if the cache cannot be read or written, or others could change it.

    Attributes:
        folder: ROOT, absolute; may be missing until an entry is made.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder = folder.absolute()
        self._limit_bytes = limit_bytes

    @property
    def limit_bytes(self) -> int:
        """Disk space above which unused entries are removed.

        Unless it was given, `_DEFAULT_LIMIT_BYTES`, or less: a share of what its file system has free or the
        cache takes.
        """
        if self._limit_bytes is not None:
            return self._limit_bytes
        with unusable(self.folder):
            place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            disk = os.statvfs(place)
            room = disk.f_bavail * disk.f_frsize + disk_bytes(self.folder)
        return min(_DEFAULT_LIMIT_BYTES, room // _SHARE_OF_DISK)

    @classmethod
    def default(cls) -> "Cache":
        """The cache of this user.

        Its folder is ``$MCINFER_CACHE``, else ``$XDG_CACHE_HOME/mcinfer``, else ``~/.cache/mcinfer``. Its
        limit is ``$MCINFER_CACHE_LIMIT`` (bytes, or ``500M``, ``20G``: powers of 1024), if it is set.

        Raises:
            InvalidInputError: MCINFER_CACHE_LIMIT is of another form.
            CacheUnusableError: The user has no home folder.
        """
        limit_bytes = None
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

    def notes(self, name: str) -> Path:
        """The folder ``sources``, ``splits`` or ``background``, which is made if it is missing."""
        with unusable(self.folder):
            check_own(self.folder, make=0o700)
            check_own(self.folder / name, make=0o700)
        return self.folder / name

    def engine_folder(self, key: str) -> Path:
        """A folder of mode 0700 for a runtime that keeps there what it builds, by names of its own.

        Its files count towards the limit. They are removed in use, too: the runtime builds them again.

        Args:
            key: `entry_key` of what the files depend on, beside what their names say.
        """
        folder = self.notes(f"{_ENGINES}/{key}")
        with unusable(self.folder):
            os.utime(folder)
        return folder

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
        with unusable(self.folder), suppress(FileNotFoundError):
            check_own(self.folder)
            end = time.monotonic() + _MAX_BUSY_SECONDS
            damaged: set[_Identity] = set()
            # Another process may be checking whether it is in use, which takes the lock for a moment.
            while (held := self._take(key, damaged)) is None and not damaged:
                if not self._identity(key) or time.monotonic() > end:
                    break
                time.sleep(_PAUSE)
            return held
        return None

    def make(
        self,
        facts: Mapping[str, Any],
        fill: Callable[[Path, int], None],
        *,
        wait: float,
        progress: Callable[[int], None] | None = None,
    ) -> Held:
        """Hold an entry; make it if it is missing or damaged. Of many processes, one makes it.

        Args:
            facts: What the entry is made from: what JSON can say. Its key is the `entry_key` of them.
            fill: Called with a new folder, to put regular files into it, and with the descriptor of the lock:
                a process that inherits the descriptor keeps others from making this entry while it lives.
                Its exceptions pass through, except errors of the system.
            wait: Seconds to wait for another process that makes the entry and makes no progress, or that uses
                a damaged one.
            progress: Called with the bytes that another process has written, when these change.

        Raises:
            CacheUnusableError: The folder cannot be written to, the disk is full, others could change the
                folder, or the time is over.
        """
        key = entry_key(facts)
        with unusable(self.folder):
            check_own(self.folder, make=0o700)
            damaged: set[_Identity] = set()
            seen: object = None
            since = time.monotonic()
            while True:
                # First as a user: LOCK_EX alone would wait for all users of a finished entry.
                if (held := self._take(key, damaged)) is not None:
                    return held
                if (held := self._prepare(key, facts, fill, damaged)) is not None:
                    break
                there, written = self._identity(key), sum(map(disk_bytes, self._drafts(key)))
                now = time.monotonic()
                if seen is None:
                    _log.info("waiting for another process that prepares %s", self.folder / key)
                if (there, written) != seen:
                    seen, since = (there, written), now
                    if progress is not None:
                        progress(written)
                if now - since >= wait:  # the same text for all who wait
                    raise CacheUnusableError(
                        f"{self.folder / key}: another process has been preparing it, or using a damaged "
                        f"one, without any progress for {wait:.3g} s"
                    )
                time.sleep(_PAUSE)
        try:
            self.evict()
        except CacheUnusableError as exc:  # the entry is made all the same
            _log.warning("no entries were evicted: %s", exc)
        return held

    def claim(self, key: str) -> tuple[int | None, str]:
        """Claim a model, to prepare it beside its users: one process of all has the claim.

        Args:
            key: `keys.claim_key`.

        Returns:
            The claim, a descriptor for the caller to close or to hand on, which `settle` ends; or None if
            another process has it, or if preparing it has failed lately; and why.
        """
        with unusable(self.folder):
            place, failure = self.notes(_BACKGROUND) / key, ""
            with suppress(FileNotFoundError):
                # A clock may have been set back.
                if abs(place.stat().st_mtime - time.time()) < _AGAIN_SECONDS:
                    failure = place.read_text(encoding="utf-8", errors="replace")
            # A process that was forked meanwhile may have the lock of one that has failed.
            return None if failure else take_lock(place), failure

    def settle(self, key: str, failure: str = "") -> None:
        """Say of a claimed model that it is prepared, or why it could not be."""
        place = self.folder / _BACKGROUND / key
        with suppress(OSError):  # no room even for that
            if failure:  # as another file: a process that was forked may have the lock of this one
                write_atomically(place, failure)
            else:
                place.unlink()

    def await_turn(self) -> int:
        """Wait until no other process makes an entry beside its users; a descriptor that holds the turn."""
        with unusable(self.folder):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            turn = os.open(self.notes(_BACKGROUND) / _TURN, flags, 0o600)
            fcntl.flock(turn, fcntl.LOCK_EX)
        return turn

    def entries(self) -> list[EntryInfo]:
        """All entries, damaged ones too, the most recently used last."""
        with unusable(self.folder), suppress(FileNotFoundError):
            check_own(self.folder)
            return [self._about(*stored) for stored in self._stored()]
        return []

    def sketches(self) -> set[str] | None:
        """The `keys.sketch` of all models that were prepared; None if that is not known of one."""
        with unusable(self.folder), suppress(FileNotFoundError):
            found = [about(self.folder / match[0]).get("sketch") for match in self._names(_KEY)]
            return {*map(str, found)} if all(found) else None
        return set()

    def users(self) -> dict[str, list[int]]:
        """By key, the processes that map an entry's files, of those into which this user may look."""
        found: dict[str, list[int]] = {}
        inside = re.compile(rf"{re.escape(os.path.realpath(self.folder))}/([0-9a-f]{{32}})/")
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
                for key in {*inside.findall(maps)}:
                    found.setdefault(key, []).append(pid)
        return found

    def _about(self, used_at: float, key: str, size_bytes: int) -> EntryInfo:
        folder = self.folder / key
        facts: Mapping[str, Any] = {}
        with suppress(OSError, UnsoundEntryError):
            facts, _ = _read_manifest(folder)
        return EntryInfo(
            key=key, facts=facts, bytes=size_bytes, used_at=used_at, in_use=is_locked(folder)
        )

    def engine_bytes(self) -> int:
        """Disk space of what runtimes keep in `engine_folder`."""
        with unusable(self.folder):
            return sum(size for _, _, size in self._engines())

    def clear(self) -> tuple[int, int]:
        """Remove all unused entries, engines, notes on models, and what crashes left.

        Returns:
            Bytes freed, and how many entries were left because they are in use.
        """
        with unusable(self.folder), suppress(FileNotFoundError):
            check_own(self.folder)
            for name in ("sources", "splits", _BACKGROUND):
                for note in self.folder.glob(f"{name}/*"):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        lock = take_lock(note, flags=os.O_RDONLY)
                        if lock is not None:  # else a process prepares a model beside its users
                            os.close(lock)
                            note.unlink()
        return self._shrink(0)

    def evict(self) -> int:
        """Remove entries beyond the limit, and what crashes left.

        Those go first whose model is gone or has changed and that were unused for `_STALE_SECONDS`, then the
        least recently used. Entries in use stay, and count towards the limit. Returns the bytes freed.
        """
        return self._shrink(self.limit_bytes)[0]

    def _take(self, key: str, damaged: set[_Identity]) -> Held | None:
        """Hold an entry, or note that it is damaged.

        A damaged one is not checked again: that would read all of its files, under a lock that keeps others
        from making it again.
        """
        there = self._identity(key)
        if there is None or there in damaged:
            return None
        try:
            return self._hold(key)
        except UnsoundEntryError as exc:
            # As text: a record that is kept would hold the frames of the error, and what they hold.
            _log.warning("the prepared model %s is not used: %s", self.folder / key, str(exc))
            damaged.add(there)
            return None

    def _prepare(
        self,
        key: str,
        facts: Mapping[str, Any],
        fill: Callable[[Path, int], None],
        damaged: set[_Identity],
    ) -> Held | None:
        """Make an entry and hold it; None if another process has the lock, or has made it."""
        import shutil  # not at every worker's start

        lock = take_lock(lock_path(self.folder / key))
        if lock is None:
            return None
        try:
            if self._identity(key) not in {None, *damaged}:
                return None
            self._clean(key, entry=True)
            draft = _new_draft(self.folder / key)
            try:
                fill(draft, lock)
                seal(draft, facts)
                draft.rename(self.folder / key)
                sync(self.folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                # A child that the user has forked meanwhile has the descriptor as well.
                fcntl.flock(lock, fcntl.LOCK_UN)
                raise
            with suppress(BlockingIOError):
                # For those who inherited it too. Not atomic: in between, another may remove the entry.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return self._hold(key)
        finally:
            os.close(lock)
        return None

    def _shrink(self, limit_bytes: int) -> tuple[int, int]:
        """Remove entries until so many bytes are left; bytes freed, and entries that are in use."""
        freed = in_use = 0
        with unusable(self.folder), suppress(FileNotFoundError):
            check_own(self.folder)
            self._sweep()
            stored = sorted([*self._stored(), *self._engines()], key=self._worth)
            excess = sum(size_bytes for _, _, size_bytes in stored) - limit_bytes
            for _, name, size_bytes in stored:
                # At a limit of 0 an entry is removed even if its files take no space.
                if limit_bytes and freed >= excess:
                    break
                if not is_key(name):
                    _remove(self.folder / name)
                elif not self._empty(name, entry=True):
                    in_use += 1
                    continue
                freed += size_bytes
        return freed, in_use

    def _worth(self, stored: tuple[float, str, int]) -> tuple[bool, tuple[float, str, int]]:
        """Sorts what goes first to the front."""
        used_at, name, _ = stored
        states = about(self.folder / name).get("files", [])
        stale = bool(states) and time.time() - used_at > _STALE_SECONDS
        with suppress(
            OSError, ValueError, LookupError, TypeError
        ):  # it is gone, or this is damaged
            stale = stale and [*map(list, file_states(path for path, *_ in states))] != states
        return not stale, stored

    def _identity(self, key: str) -> _Identity | None:
        try:
            info = (self.folder / key).lstat()
        except FileNotFoundError:
            return None
        return info.st_ino, info.st_ctime_ns

    def _stored(self) -> list[tuple[float, str, int]]:
        """For each entry: time of last use, key and bytes; the most recently used last."""
        return self._sizes(match[0] for match in self._names(_KEY))

    def _engines(self) -> list[tuple[float, str, int]]:
        """For each folder of engines: time of last use, its name below ROOT, and bytes."""
        return self._sizes(f"{_ENGINES}/{f.name}" for f in self.folder.glob(f"{_ENGINES}/*"))

    def _sizes(self, names: Iterable[str]) -> list[tuple[float, str, int]]:
        found = []
        for name in names:
            folder = self.folder / name
            with suppress(FileNotFoundError):  # removed meanwhile
                lock = lock_path(folder)
                used_at = (lock if lock.exists() else folder).lstat().st_mtime
                found.append((used_at, name, disk_bytes(folder)))
        return sorted(found)

    def _hold(self, key: str) -> Held | None:
        """Hold an entry; None if it is gone, or another process has its lock.

        Raises:
            UnsoundEntryError: It is damaged.
        """
        folder = self.folder / key
        # Not for writing: the folder may be read-only, as in the image of a container.
        lock = take_lock(lock_path(folder), fcntl.LOCK_SH, os.O_RDONLY | os.O_CREAT)
        if lock is None:
            return None
        with ExitStack() as unless_held:
            unless_held.callback(os.close, lock)
            if self._identity(key) is None:
                return None
            facts = check(folder)
            with suppress(OSError):  # likewise
                os.utime(lock)
            held = Held(folder, lock, facts)
            unless_held.pop_all()
            return held

    def _drafts(self, key: str) -> list[Path]:
        """The tmp folders of a key. Under its LOCK_EX they are what a crash left."""
        return [self.folder / match[0] for match in self._names(_DRAFT) if match[1] == key]

    def _clean(self, key: str, *, entry: bool) -> None:
        """Remove all tmp folders of a key, and its entry or what is in its place; under its LOCK_EX."""
        for left in self._drafts(key):
            _remove(left)
        if entry and self._identity(key):
            draft = _new_draft(self.folder / key)
            (self.folder / key).rename(draft / "removed")
            _remove(draft)

    def _empty(self, key: str, *, entry: bool) -> bool:
        """`_clean`, and remove a lock without entry; False, and nothing is done, if the lock is taken."""
        lock = take_lock(lock_path(self.folder / key))
        if lock is None:
            return False
        try:
            self._clean(key, entry=entry)
            if self._identity(key) is None:
                lock_path(self.folder / key).unlink()
        finally:
            os.close(lock)
        return True

    def _sweep(self) -> None:
        """Remove what crashes left: tmp folders of keys that are not locked, and locks without entries."""
        left = {match[1] for match in self._names(_DRAFT)}
        left |= {match[1] for match in self._names(_LOCK)} - {m[0] for m in self._names(_KEY)}
        for key in sorted(left):
            self._empty(key, entry=False)

    def _names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for name in os.listdir(self.folder) if (match := pattern.fullmatch(name))]
