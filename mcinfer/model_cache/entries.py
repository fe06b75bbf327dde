"""One entry of the cache: a folder of read-only files with a manifest, and the lock that holds it.

::

    KEY/manifest.json   format, facts, and of every other file: name, size, SHA-256, stamps
    KEY/...             the prepared files, mode 0400
    KEY.lock            empty; a flock on it holds the entry

The key is a digest of the facts that the files were made from. The stamps change when a file does: inode,
mtime and ctime. No program can set a ctime back, so if the stamps are those in the manifest, the gigabytes
of the files need not be read again. If they differ (a restored backup, the layer of a container image), the
SHA-256 decides.

A lock belongs to the open file, not to the process: it lasts until the last copy of the descriptor is
closed, in any process (flock(2)). So this code closes descriptors, and never unlocks them.

Folders are held by descriptors as well: after the check, all access goes through ``/proc/self/fd/N``, the
path of the descriptor. So a folder that replaces it after the check is never read or written.
"""

import fcntl
import grp
import hashlib
import json
import os
import pwd
import re
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.process import is_own_user_known

MANIFEST = "manifest.json"
"""The name of the manifest within its folder."""

_FORMAT = 1
_KEY_CHARACTERS = 32


class UnsoundEntryError(McinferError):
    """An entry is not what its manifest says, or others could change it; says what is wrong."""


class CacheUnusableError(McinferError):
    """The cache cannot be used, so the model is loaded without it; says why."""


_Record = dict[str, Any]
"""Of one file: ``name``, ``size_bytes``, ``sha256`` and its stamps: ``inode``, ``mtime_ns``, ``ctime_ns``."""


def _record(name: str, info: os.stat_result, sha256: str) -> _Record:
    return {
        "name": name,
        "size_bytes": info.st_size,
        "sha256": sha256,
        "inode": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "ctime_ns": info.st_ctime_ns,
    }


_NUMBERS = ("size_bytes", "inode", "mtime_ns", "ctime_ns")
_RECORD_TYPES = {"name": str, "sha256": str, **dict.fromkeys(_NUMBERS, int)}


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


def _seal_file(path: Path) -> _Record:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UnsoundEntryError(f"{path.name} is not a regular file")
    path.chmod(0o400)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        # The stamps before the digest: what is written meanwhile then shows in them.
        info = os.fstat(file.fileno())
        return _record(path.name, info, hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(folder: Path, facts: Mapping[str, Any], records: Sequence[_Record]) -> None:
    """Write the manifest, which must not be there yet, to the disk.

    Raises:
        OSError: It cannot be written.
    """
    manifest = {"format": _FORMAT, "facts": dict(facts), "files": [*records]}
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


def check(folder: Path) -> tuple[dict[str, Any], list[_Record] | None]:
    """Check an entry against its manifest; reads the files only where their stamps have changed.

    Args:
        folder: Its name is the key.

    Returns:
        The facts that it was made from, as JSON gives them back; and, where stamps differed from those in the
        manifest, the records with the stamps of now.

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
    expected = {MANIFEST, *(record["name"] for record in records)}
    if names != expected:
        raise UnsoundEntryError(
            f"missing files: {sorted(expected - names)}, unknown files: {sorted(names - expected)}"
        )
    current = [_check_file(folder, record) for record in records]
    return facts, current if current != records else None


def _check_regular(path: Path) -> os.stat_result:
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise UnsoundEntryError(f"{path.name} is not a regular file")
    if fault := access_fault(info):
        raise UnsoundEntryError(f"{path.name} {fault}")
    return info


def _read_manifest(folder: Path) -> tuple[dict[str, Any], list[_Record]]:
    """The facts and the records, all of the right types, with facts that fit the folder's name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, facts, files = manifest["format"], manifest["facts"], manifest["files"]
        key = entry_key(facts)
        types = [{name: type(value) for name, value in item.items()} for item in files]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise UnsoundEntryError(f"{MANIFEST} is none: {exc}") from exc
    if version != _FORMAT:
        raise UnsoundEntryError(f"its format is {version!r}, expected {_FORMAT}")
    if key != folder.name:
        raise UnsoundEntryError(f"its facts have the key {key}, expected {folder.name}")
    if any(found != _RECORD_TYPES for found in types):
        raise UnsoundEntryError(f"{MANIFEST}: got {files!r}, expected records of files")
    return facts, files


def _check_file(folder: Path, record: _Record) -> _Record:
    """The record of a file as it is now."""
    path = folder / record["name"]
    info = _check_regular(path)
    if info.st_size != record["size_bytes"]:
        raise UnsoundEntryError(
            f"{record['name']} has {info.st_size} bytes, expected {record['size_bytes']}"
        )
    current = _record(record["name"], info, record["sha256"])
    if current != record:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != record["sha256"]:
            raise UnsoundEntryError(
                f"{record['name']} has the SHA-256 {sha256}, expected {record['sha256']}"
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


# Holding an entry.

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BY_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


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
        # At the interpreter's end the kernel closes it, after all that is still mapped by then.
        self._let_go.atexit = False

    @classmethod
    def adopt(cls, folder_fd: int, lock_fd: int) -> "Held":
        """Hold an entry through descriptors that another process has sent.

        Args:
            folder_fd: Descriptor of the entry's folder.
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
                held = cls(folder, folder_fd, check(place)[0], lock_fd)
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
    """Whether a process uses, makes or removes an entry; nothing is written to find out."""
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
        folder: The entry's folder, which need not exist.
        kind: `fcntl.LOCK_SH` to use it, `fcntl.LOCK_EX` to make or remove it.

    Returns:
        A descriptor that holds the lock, which is the caller's; ``None`` if it is not to be had just now.
    """
    path = lock_path(folder)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        # Its last holder may have removed it with its entry; then it is the lock of nothing.
        if _leads_to(path, lock):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
