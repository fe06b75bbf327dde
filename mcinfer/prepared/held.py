"""Holding an entry of the cache: its lock, and the checks before it is trusted.

A lock is a flock on ``ROOT/KEY.lock``. It belongs to the open file, not to the process: it lasts until the
last copy of the descriptor is closed, in whichever process that is (flock(2)). So descriptors are closed,
and never unlocked.
"""

import fcntl
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcinfer.errors import McinferError
from mcinfer.prepared.entries import UnsoundEntryError, access_fault, check
from mcinfer.process_identity import is_own_user_known


class CacheUnusableError(McinferError):
    """The cache cannot be used, so the model is to be loaded the plain way; says why."""


@contextmanager
def unusable(place: Path) -> Iterator[None]:
    """What the system refuses, and an entry that is not sound, as a `CacheUnusableError`."""
    try:
        yield
    except (OSError, UnsoundEntryError) as exc:
        raise CacheUnusableError(f"the cache at {place} cannot be used: {exc}") from exc


class Held:
    """An entry that stays while this object lives, or any process with a copy of its lock descriptor.

    Attributes:
        folder: Where its files are, read-only.
        key: The name of that folder.
        facts: What it was made from, as JSON gives it back.
        lock: A descriptor that holds LOCK_SH, closed by `execve`; -1 after `close`.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], lock: int) -> None:
        """Take a locked descriptor, which is this object's from now on."""
        self.folder = folder
        self.key = folder.name
        self.facts = facts
        self.lock = lock
        self._let_go = weakref.finalize(self, os.close, lock)
        # At the interpreter's end the kernel closes it, after whatever is still mapped by then.
        self._let_go.atexit = False

    @classmethod
    def adopt(cls, folder_fd: int, lock_fd: int) -> "Held":
        """Hold an entry through descriptors that another process has sent.

        Args:
            folder_fd: Of the entry's folder. It is closed.
            lock_fd: A copy of the sender's `lock`. It is this object's, and closed if there is none.

        Raises:
            CacheUnusableError: The folder is not at the same path here (another mount namespace), the entry
                is not sound, or the lock is not its own.
        """
        adopted = False
        try:
            folder = _visible_path(folder_fd)
            with unusable(folder):
                check_root(folder.parent)
                if not _leads_to(lock_path(folder), lock_fd):
                    raise CacheUnusableError(
                        f"the descriptor that was sent is not of {lock_path(folder)}"
                    )
                # Changes nothing where the sender holds LOCK_SH, as it should.
                fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.set_inheritable(lock_fd, False)
                held = cls(folder, check(folder).facts, lock_fd)
            adopted = True
            return held
        finally:
            os.close(folder_fd)
            if not adopted:
                os.close(lock_fd)

    def close(self) -> None:
        """Let the entry go; what is still mapped must not be used any more."""
        self._let_go()
        self.lock = -1


def _visible_path(folder_fd: int) -> Path:
    """Where a folder is, if that path leads to it in this process too."""
    link = Path(f"/proc/self/fd/{folder_fd}")
    with unusable(link):
        path = link.readlink()
    if not _leads_to(path, folder_fd):
        raise CacheUnusableError(
            f"the folder {path} of the shared model is not visible here: mount it at the same path"
        )
    return path


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:
        return False


def lock_path(folder: Path) -> Path:
    """Where the lock of an entry is."""
    return folder.with_name(f"{folder.name}.lock")


def check_root(root: Path) -> None:
    """Raise unless only this user can change what is in the cache's folder, or put another in its place."""
    if not is_own_user_known():
        raise CacheUnusableError(
            "this user has no number in its user namespace, as others have none"
        )
    if fault := access_fault(root.stat()):
        raise CacheUnusableError(f"the cache {root} {fault}")
    for folder in Path(os.path.realpath(root)).parents:
        info = folder.stat()
        shared = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        if shared or info.st_uid not in (0, os.geteuid()):
            raise CacheUnusableError(
                f"the cache {root} lies in {folder}, which others can change (user {info.st_uid}, mode "
                f"{stat.S_IMODE(info.st_mode):04o})"
            )


def is_locked(folder: Path) -> bool:
    """Whether somebody uses, makes or removes an entry; nothing is written to find out."""
    try:
        lock = os.open(lock_path(folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def take_lock(folder: Path, kind: int) -> int | None:
    """Lock an entry, without waiting.

    Args:
        folder: Of the entry, which need not be there.
        kind: `fcntl.LOCK_SH` to use it, `fcntl.LOCK_EX` to make or remove it.

    Returns:
        A descriptor that holds the lock, which is the caller's; ``None`` if it is not to be had just now.
    """
    path = lock_path(folder)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        # Who held it before may have removed it with its entry; then it is the lock of nothing.
        if _leads_to(path, lock):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
