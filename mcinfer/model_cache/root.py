"""What lies in the cache's folder, and how entries appear there and go.

An entry appears and goes by a rename from or to a tmp folder. Unlike the methods of `Cache`, these raise
OSError as it comes.
"""

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mcinfer.model_cache.entries import (
    MANIFEST,
    SoundEntry,
    check,
    disk_bytes,
    seal,
    sync,
    write_manifest,
)
from mcinfer.model_cache.held import Held, is_locked, lock_path, opened_root, take_lock

_log = logging.getLogger("mcinfer.model_cache")

_KEY = re.compile(r"[0-9a-f]{32}")
_LOCK = re.compile(r"([0-9a-f]{32})\.lock")
_DRAFT = re.compile(r"tmp-([0-9a-f]{32})-.*")

Identity = tuple[int, int]
"""What tells an entry from one made later under the same key: inode and ctime of its folder."""


def is_key(text: str) -> bool:
    """Whether a text can be the key of an entry."""
    return _KEY.fullmatch(text) is not None


def remove(folder: Path) -> None:
    """Remove a tmp folder; one that cannot be removed stays, and is tried again at the next sweep."""
    try:
        shutil.rmtree(folder)
    except OSError as exc:
        _log.warning("%s cannot be removed: %s", os.path.realpath(folder), exc)


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, and those above it that are missing."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():  # one by one: `parents` would make those of the umask's mode
            folder.mkdir(mode=0o700, exist_ok=True)


class Root:
    """The cache's folder, while it is held open.

    Attributes:
        path: By its descriptor (`opened_root`).
        visible: Where it is; for messages and for `Held.folder`.
    """

    def __init__(self, path: Path, visible: Path) -> None:
        """Name the folder; nothing is read or written."""
        self.path = path
        self.visible = visible

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator["Root"]:
        """Check a folder and hold it open; raises as `opened_root`."""
        with opened_root(folder) as path:
            yield cls(path, folder)

    def identity(self, key: str) -> Identity | None:
        """Of the entry that is there; ``None`` if there is none."""
        try:
            info = (self.path / key).lstat()
        except FileNotFoundError:
            return None
        return info.st_ino, info.st_ctime_ns

    def stored(self) -> list[tuple[float, str, int]]:
        """Of each entry: when it was last used, key and bytes; the most recently used last."""
        stored = []
        for match in self._names(_KEY):
            folder = self.path / match[0]
            with suppress(FileNotFoundError):  # removed meanwhile
                lock = lock_path(folder)
                used_at = (lock if lock.exists() else folder).lstat().st_mtime
                stored.append((used_at, folder.name, disk_bytes(folder)))
        return sorted(stored)

    def is_in_use(self, key: str) -> bool:
        """Whether somebody holds an entry, or makes it."""
        return is_locked(self.path / key)

    def take(self, key: str) -> Held | None:
        """Hold an entry; ``None`` if it is gone, or its lock is not to be had just now.

        Raises:
            UnsoundEntryError: It is damaged.
        """
        folder = self.path / key
        lock = take_lock(folder, fcntl.LOCK_SH)
        if lock is None:
            return None
        held = None
        try:
            if self.identity(key) is not None:
                entry = check(folder)
                if entry.moved:
                    self._record_anew(folder, entry)
                os.utime(lock)
                opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                held = Held(self.visible / key, opened, entry.facts, lock)
        finally:
            if held is None:
                os.close(lock)
        return held

    def _record_anew(self, folder: Path, entry: SoundEntry) -> None:
        """Record new stamps, so that the files are not read each time; under LOCK_SH.

        Others may do the same at once: each one's manifest is right, and takes its place by a rename.
        """
        with suppress(OSError):  # it is sound all the same
            draft = self.new_draft(folder.name)
            try:
                write_manifest(draft, entry.facts, entry.records)
                (draft / MANIFEST).replace(folder / MANIFEST)
            finally:
                remove(draft)

    def new_draft(self, key: str) -> Path:
        """Make a tmp folder for an entry."""
        return Path(tempfile.mkdtemp(prefix=f"tmp-{key}-", dir=self.path))

    def draft_bytes(self, key: str) -> int:
        """What the tmp folders of a key take of the disk: it grows while an entry is made."""
        drafts = [self.path / match[0] for match in self._names(_DRAFT) if match[1] == key]
        return sum(map(disk_bytes, drafts))

    def publish(self, draft: Path, key: str, facts: Mapping[str, Any]) -> None:
        """Make a tmp folder the entry of a key that has none; under its LOCK_EX.

        Raises:
            UnsoundEntryError: Something in it is not a regular file.
        """
        seal(draft, facts)
        draft.rename(self.path / key)
        sync(self.path)

    def drop_drafts(self, key: str) -> None:
        """Remove the tmp folders that a crash left under a key; under its LOCK_EX."""
        for match in self._names(_DRAFT):
            if match[1] == key:
                remove(self.path / match[0])

    def set_aside(self, key: str) -> None:
        """Remove an entry, or whatever is in its place; under its LOCK_EX."""
        draft = self.new_draft(key)
        (self.path / key).rename(draft / "removed")
        remove(draft)

    def empty(self, key: str, *, entry: bool) -> bool:
        """Remove all tmp folders of a key, and the entry itself where told.

        Returns:
            Whether that was done: not where somebody else has the lock.
        """
        lock = take_lock(self.path / key, fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            self.drop_drafts(key)
            if entry and self.identity(key):
                self.set_aside(key)
            if self.identity(key) is None:
                lock_path(self.path / key).unlink()
        finally:
            os.close(lock)
        return True

    def forget_notes(self) -> None:
        """Remove what is remembered of models: what entries were made from, how batches are split."""
        for folder in ("sources", "splits"):
            with suppress(FileNotFoundError):
                for note in (self.path / folder).iterdir():
                    note.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what crashes left: tmp folders that nobody works on, and locks of nothing."""
        left = {match[1] for match in self._names(_DRAFT)}
        left |= {match[1] for match in self._names(_LOCK)} - {m[0] for m in self._names(_KEY)}
        for key in sorted(left):
            self.empty(key, entry=False)

    def _names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for name in os.listdir(self.path) if (match := pattern.fullmatch(name))]
