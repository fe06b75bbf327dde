"""The cache of prepared models: folders that are made once and that every process may map.

::

    ROOT/KEY/            an entry: a manifest and the prepared files, never changed again
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
"""

import fcntl
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError
from mcinfer.model_cache.entries import (
    MANIFEST,
    CacheUnusableError,
    Held,
    UnsoundEntryError,
    check,
    disk_bytes,
    entry_key,
    facts_of,
    is_locked,
    lock_path,
    opened_root,
    seal,
    sync,
    take_lock,
    unusable,
    write_manifest,
)

__all__ = ["Cache", "CacheUnusableError", "EntryInfo", "Held", "entry_key", "is_key"]

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
        stored = []
        for match in self._names(_KEY):
            folder = self.path / match[0]
            with suppress(FileNotFoundError):  # removed meanwhile
                lock = lock_path(folder)
                used_at = (lock if lock.exists() else folder).lstat().st_mtime
                stored.append((used_at, folder.name, disk_bytes(folder)))
        return sorted(stored)

    def take(self, key: str) -> Held | None:
        """Hold an entry; None if it is gone, or another process has its lock."""
        folder = self.path / key
        lock = take_lock(folder, fcntl.LOCK_SH)
        if lock is None:
            return None
        held = None
        try:
            if self.identity(key) is not None:
                facts, moved = check(folder)
                if moved is not None:
                    self._record_again(folder, facts, moved)
                os.utime(lock)
                opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                held = Held(self.visible / key, opened, facts, lock)
        finally:
            if held is None:
                os.close(lock)
        return held

    def _record_again(
        self, folder: Path, facts: Mapping[str, Any], records: list[dict[str, Any]]
    ) -> None:
        """Record new stamps, so that the files are not read each time; several processes may do it."""
        with suppress(OSError):  # it is sound all the same
            draft = self.new_draft(folder.name)
            try:
                write_manifest(draft, facts, records)
                (draft / MANIFEST).replace(folder / MANIFEST)
            finally:
                _remove(draft)

    def engines(self) -> list[tuple[float, str, int]]:
        """For each folder of engines: time of last use, its name below ROOT, and bytes."""
        found = []
        for folder in self.path.glob(f"{_ENGINES}/*"):
            with suppress(FileNotFoundError):
                name = f"{_ENGINES}/{folder.name}"
                found.append((folder.lstat().st_mtime, name, disk_bytes(folder)))
        return found

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
        lock = take_lock(self.path / key, fcntl.LOCK_EX)
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
                opened.enter_context(opened_root(self.folder, make=True))
                path = opened.enter_context(opened_root(self.folder / name, make=True))
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
                root = Root(opened.enter_context(opened_root(self.folder)), self.folder)
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
            while True:
                held, damaged = self._take(root, key, None)
                # Another process may be checking whether it is in use, which takes the lock for a moment.
                busy = held is None and damaged is None and root.identity(key) is not None
                if not busy or time.monotonic() > end:
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
                An exception of `fill` passes through.
            wait: Seconds to wait for another process that makes the entry and makes no progress, or that uses
                a damaged one (then 30 at most).
            patience: Seconds to wait for another process in any case.
            progress: Called with the bytes that another process has written, when these change.

        Raises:
            CacheUnusableError: The folder cannot be written to, the disk is full, others could change the
                folder, or the time is over.
        """
        with ExitStack() as opened:
            with unusable(self.folder):
                root = Root(opened.enter_context(opened_root(self.folder, make=True)), self.folder)
            damaged: _Identity | None = None
            seen: object = None
            began = since = time.monotonic()
            waited = False
            while True:
                # First as a user: LOCK_EX alone would wait for all users of a finished entry.
                with unusable(self.folder):
                    held, damaged = self._take(root, key, damaged)
                held = held or self._prepare(root, key, facts, fill, damaged)
                if held is not None:
                    break
                with unusable(self.folder):
                    there = root.identity(key)
                    written = sum(map(disk_bytes, root.drafts(key)))
                now = time.monotonic()
                if (there, written) != seen:
                    seen, since = (there, written), now
                    if progress is not None:
                        progress(written)
                limit = min(wait, _MAX_DAMAGED_SECONDS) if damaged and there == damaged else wait
                if now - since >= limit:
                    raise CacheUnusableError(
                        f"{self.folder / key}: another process has been preparing it, or using a damaged "
                        f"one, without any progress for {limit:.3g} s"  # the same text for all who wait
                    )
                if now - began >= patience:
                    raise CacheUnusableError(
                        f"{self.folder / key}: another process is preparing it, which takes more than "
                        f"{patience:.3g} s"
                    )
                if not waited:
                    waited = True
                    _log.info("waiting for another process that prepares %s", self.folder / key)
                time.sleep(_PAUSE)
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

    def _take(
        self, root: Root, key: str, damaged: _Identity | None
    ) -> tuple[Held | None, _Identity | None]:
        """Hold an entry, and say which one is known to be damaged.

        A damaged one is not checked again: that would read all of its files, under a lock that keeps others
        from making it again.
        """
        there = root.identity(key)
        if there in (None, damaged):
            return None, damaged
        try:
            return root.take(key), damaged
        except UnsoundEntryError as exc:
            # As text: a record that is kept would hold the frames of the error, and what they hold.
            _log.warning("the prepared model %s is not used: %s", self.folder / key, str(exc))
            return None, there

    def _prepare(
        self,
        root: Root,
        key: str,
        facts: Mapping[str, Any],
        fill: Callable[[Path, int], None],
        damaged: _Identity | None,
    ) -> Held | None:
        """Make an entry and hold it; None if another process has the lock, or has made it."""
        import shutil  # not at every worker's start

        with unusable(self.folder):
            lock = take_lock(root.path / key, fcntl.LOCK_EX)
        if lock is None:
            return None
        try:
            with unusable(self.folder):
                if root.identity(key) not in (None, damaged):
                    return None
                root.clean(key, entry=True)
                draft = root.new_draft(key)
            try:
                fill(draft, lock)
                with unusable(self.folder):
                    seal(draft, facts)
                    draft.rename(root.path / key)
                    sync(root.path)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                # A child that the user has forked meanwhile has the descriptor as well.
                fcntl.flock(lock, fcntl.LOCK_UN)
                raise
            with unusable(self.folder), suppress(BlockingIOError):
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
            stored: list[tuple[float, str, int]] = sorted([*root.stored(), *root.engines()])
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
