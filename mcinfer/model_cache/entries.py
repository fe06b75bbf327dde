"""One entry of the cache: a folder of read-only files with a manifest, and the lock that holds it.

::

    KEY/manifest.json   format, facts, and of every other file: name, size, SHA-256, stamps
    KEY/...             the prepared files, mode 0400, maybe in folders of mode 0700
    KEY.lock            empty; a flock on it holds the entry

The key is a digest of the facts that the files were made from. No program can set a file's ctime back. So if
the stamps are those in the manifest, the gigabytes of the files need not be read again; if they differ (a
restored backup, the layer of a container image), the SHA-256 decides.

A lock belongs to the open file, not to the process: it lasts until the last copy of the descriptor is
closed, in any process (flock(2)). So this code closes descriptors, and never unlocks them. Folders are held
by descriptors as well (``/proc/self/fd/N``), so a folder that replaces one after its check is never used.
"""

import fcntl
import hashlib
import json
import os
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.private import BY_DESCRIPTOR, OthersError, access_fault, opened_folder

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


_Record = dict[str, Any]
"""Of one file: ``name``, ``size_bytes``, ``sha256`` and its stamps."""


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
    for path in _below(folder):
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
    write_manifest(folder, facts, records)
    sync(folder)


def _below(folder: Path) -> list[Path]:
    """All files and folders in a folder and in those within, each folder before what is in it."""
    found = []
    for path in sorted(folder.iterdir()):
        found.append(path)
        if stat.S_ISDIR(path.lstat().st_mode):
            found += _below(path)
    return found


def write_manifest(folder: Path, facts: Mapping[str, Any], records: Sequence[_Record]) -> None:
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
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise UnsoundEntryError("it is not a folder")
    if fault := access_fault(info):
        raise UnsoundEntryError(f"the folder {fault}")
    names, folders = set(), set()
    for path in _below(folder):
        name = path.relative_to(folder).as_posix()
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode):
            names.add(name)
        elif fault := access_fault(info):
            raise UnsoundEntryError(f"the folder {name} {fault}")
        else:
            folders.add(name)
    if MANIFEST not in names:
        raise UnsoundEntryError(f"{MANIFEST} is missing")
    _check_regular(folder, MANIFEST)
    facts, records = _read_manifest(folder)
    expected = {MANIFEST, *records}
    names |= folders - {parent.as_posix() for name in records for parent in Path(name).parents}
    if names != expected:
        raise UnsoundEntryError(
            f"missing files: {sorted(expected - names)}, unknown files: {sorted(names - expected)}"
        )
    current = [_check_file(folder, name, record) for name, record in records.items()]
    return facts, current if current != [*records.values()] else None


def _check_regular(folder: Path, name: str) -> os.stat_result:
    info = (folder / name).lstat()
    if not stat.S_ISREG(info.st_mode):
        raise UnsoundEntryError(f"{name} is not a regular file")
    if fault := access_fault(info):
        raise UnsoundEntryError(f"{name} {fault}")
    return info


def _read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, _Record]]:
    """The facts, which fit the folder's name, and the records by the files' names."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, facts, files = manifest["format"], manifest["facts"], manifest["files"]
        key = entry_key(facts)
        records = {str(one["name"]): _record_of(one) for one in files}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise UnsoundEntryError(f"{MANIFEST} is not a manifest: {exc}") from exc
    if version != _FORMAT:
        raise UnsoundEntryError(f"its format is {version!r}, expected {_FORMAT}")
    if key != folder.name:
        raise UnsoundEntryError(f"its facts have the key {key}, expected {folder.name}")
    return facts, records


def _record_of(found: Mapping[str, Any]) -> _Record:
    if not {"size_bytes", "sha256"} <= found.keys():
        raise ValueError(f"got {found!r}, expected the record of a file")
    return dict(found)


def _check_file(folder: Path, name: str, record: _Record) -> _Record:
    """The record of a file as it is now."""
    info = _check_regular(folder, name)
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
        if isinstance(exc, OthersError):
            reason += ", or name another cache in MCINFER_CACHE"
        raise CacheUnusableError(f"the cache at {place} cannot be used: {reason}") from exc


class Held:
    """An entry that stays while this object lives, or any process with a copy of its lock descriptor.

    It owns the two descriptors that it is made from.

    Attributes:
        folder: Where its files are, read-only.
        opened: The same folder by a descriptor, for this process while this object is open: files loaded from
            here are those that were checked.
        key: The name of that folder.
        facts: The facts that the entry was made from, as JSON gives them back.
        lock: A descriptor that holds LOCK_SH, closed by `execve`; -1 after `close`.
    """

    def __init__(self, folder: Path, folder_fd: int, facts: Mapping[str, Any], lock: int) -> None:
        self.folder = folder
        self.opened = _path_of(folder_fd)
        self.key = folder.name
        self.facts = facts
        self.lock = lock
        self._let_go = weakref.finalize(self, _close, folder_fd, lock)
        # At the interpreter's end the kernel closes them, after all that is still mapped by then.
        self._let_go.atexit = False

    @classmethod
    def adopt(cls, folder_fd: int, lock_fd: int) -> "Held":
        """Hold an entry through descriptors that another process has sent; closes both if it fails.

        Raises:
            CacheUnusableError: The folder is not at the same path here (another mount namespace), the entry
                is not sound, or the lock is not its own.
        """
        adopted = False
        try:
            link = _path_of(folder_fd)
            with unusable(link):
                folder = link.readlink()
            if not _leads_to(folder, folder_fd):
                raise CacheUnusableError(
                    f"the folder {folder} of the shared model is not visible here: mount it at the same "
                    "path"
                )
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
        """Release the entry; nothing that is still mapped from it may be used afterwards."""
        self._let_go()
        self.lock = -1


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _path_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:
        return False


def lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


@contextmanager
def opened_root(root: Path, *, make: bool = False) -> Iterator[Path]:
    """The path of a folder of this user's by its descriptor, for as long as the context lasts.

    Args:
        root: The folder.
        make: Whether to make it, and those above it that are missing, for this user alone.

    Raises:
        OthersError: It is not this user's, or others can change or replace it.
        OSError: It cannot be reached.
    """
    with opened_folder(root, make=0o700 if make else None) as path:
        if fault := access_fault(path.stat()):
            raise OthersError(f"it {fault}")
        yield path


def is_locked(folder: Path) -> bool:
    """Whether a process uses, makes or removes an entry; writes nothing."""
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
    """Lock an entry, which need not exist, without waiting.

    Args:
        folder: The entry's folder.
        kind: `fcntl.LOCK_SH` to use it, `fcntl.LOCK_EX` to make or remove it.

    Returns:
        A descriptor that holds the lock, for the caller to close; None if another process has the lock.
    """
    path = lock_path(folder)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        # Its last holder may have removed it with its entry.
        if _leads_to(path, lock):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
