"""Holding an entry of the cache: its lock, and the checks before it is trusted.

A lock is a flock on ``ROOT/KEY.lock``. It belongs to the open file, not to the process: it lasts until the
last copy of the descriptor is closed, in whichever process that is (flock(2)). So descriptors are closed,
and never unlocked.

Folders are held as well: what was checked is reached by ``/proc/self/fd/N``, the path of its descriptor. So
another folder that is put in its place after the check is never read or written.
"""

import fcntl
import grp
import os
import pwd
import re
import stat
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcinfer.errors import McinferError
from mcinfer.model_cache.entries import UnsoundEntryError, access_fault, check
from mcinfer.process import is_own_user_known

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BY_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


class CacheUnusableError(McinferError):
    """The cache cannot be used, so the model is to be loaded the plain way; says why."""


@contextmanager
def unusable(place: Path) -> Iterator[None]:
    """What the system refuses, and an entry that is not sound, as a `CacheUnusableError`."""
    try:
        yield
    except (OSError, UnsoundEntryError) as exc:
        reason = _BY_DESCRIPTOR.sub(lambda _: str(place), str(exc))
        raise CacheUnusableError(f"the cache at {place} cannot be used: {reason}") from exc


class Held:
    """An entry that stays while this object lives, or any process with a copy of its lock descriptor.

    Attributes:
        folder: Where its files are, read-only.
        opened: The same folder by a descriptor, for this process while this object is open. What is loaded
            from here is what was checked.
        key: The name of that folder.
        facts: What it was made from, as JSON gives it back.
        lock: A descriptor that holds LOCK_SH, closed by `execve`; -1 after `close`.
    """

    def __init__(self, folder: Path, folder_fd: int, facts: Mapping[str, Any], lock: int) -> None:
        """Take descriptors of the folder and of its lock, which are this object's from now on."""
        self.folder = folder
        self.opened = _path_of(folder_fd)
        self.key = folder.name
        self.facts = facts
        self.lock = lock
        self._let_go = weakref.finalize(self, _close, folder_fd, lock)
        # At the interpreter's end the kernel closes it, after whatever is still mapped by then.
        self._let_go.atexit = False

    @classmethod
    def adopt(cls, folder_fd: int, lock_fd: int) -> "Held":
        """Hold an entry through descriptors that another process has sent.

        Args:
            folder_fd: Of the entry's folder.
            lock_fd: A copy of the sender's `lock`. Both are this object's, and closed if there is none.

        Raises:
            CacheUnusableError: The folder is not at the same path here (another mount namespace), the entry
                is not sound, or the lock is not its own.
        """
        adopted = False
        try:
            folder = _visible_path(folder_fd)
            with unusable(folder.parent), opened_root(folder.parent) as root:
                place = root / folder.name
                if not (_leads_to(place, folder_fd) and _leads_to(lock_path(place), lock_fd)):
                    raise CacheUnusableError(
                        f"the descriptor that was sent is not of {lock_path(folder)}"
                    )
                # Changes nothing where the sender holds LOCK_SH, as it should.
                fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.set_inheritable(folder_fd, False)
                os.set_inheritable(lock_fd, False)
                held = cls(folder, folder_fd, check(place).facts, lock_fd)
            adopted = True
            return held
        finally:
            if not adopted:
                _close(folder_fd, lock_fd)

    def close(self) -> None:
        """Let the entry go; what is still mapped must not be used any more."""
        self._let_go()
        self.lock = -1


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _path_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _visible_path(folder_fd: int) -> Path:
    """Where a folder is, if that path leads to it in this process too."""
    link = _path_of(folder_fd)
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


@contextmanager
def opened_root(root: Path) -> Iterator[Path]:
    """The path of a folder by its descriptor, for as long as the context lasts.

    Only this user may change what is in the folder, or put another in its place. So neither a group nor
    others may write to a folder above it, as with OpenSSH's StrictModes, unless that folder is sticky: there
    only owners rename. A group that is the user's own counts as the user, as in Debian's OpenSSH: under a
    umask of 002, which goes with such groups, ``~/.cache`` often has the mode 0775. Where it is not certain
    that the group is the user's own, the cache is refused.

    Raises:
        CacheUnusableError: Others could change it.
        OSError: There is none, or it cannot be reached.
    """
    if not is_own_user_known():
        raise CacheUnusableError(
            "this user has no number in its user namespace, as others have none"
        )
    real = Path(os.path.realpath(root))
    fd = os.open("/", _FOLDER)
    try:
        # Downwards: each is opened in one that was checked, so it cannot have been swapped.
        for folder, name in zip(reversed(real.parents), real.parts[1:], strict=True):
            _check_above(fd, folder, root)
            below = os.open(name, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
        if fault := access_fault(os.fstat(fd)):
            raise CacheUnusableError(f"the cache {root} {fault}")
        yield _path_of(fd)
    finally:
        os.close(fd)


def _check_above(fd: int, folder: Path, root: Path) -> None:
    info = os.fstat(fd)
    writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    shared = (
        writable
        and not info.st_mode & stat.S_ISVTX
        and (writable & stat.S_IWOTH or not _is_private(fd, info.st_gid))
    )
    if shared or info.st_uid not in (0, os.geteuid()):
        raise CacheUnusableError(
            f"the cache {root} lies in {folder}, which others can change (user {info.st_uid}, group "
            f"{info.st_gid}, mode {stat.S_IMODE(info.st_mode):04o}): run `chmod go-w` on that folder "
            "if it is yours, or name another cache in MCINFER_CACHE"
        )


def _is_private(fd: int, gid: int) -> bool:
    """Whether a folder's group has this user as its only member, and an access list admits no others.

    The group has the user's name and is the user's first one, as distributions make it. The name is what
    counts for users that are not listed (LDAP): their common group has another one.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        lists = [name for name in os.listxattr(_path_of(fd)) if "acl" in name]
    except (KeyError, OSError):
        return False
    return (
        not lists
        and user.pw_gid == gid
        and group.gr_name == user.pw_name
        and {*group.gr_mem} <= {user.pw_name}
        and all(one.pw_uid == user.pw_uid for one in pwd.getpwall() if one.pw_gid == gid)
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
