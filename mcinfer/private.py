"""What no other user can change or redirect: folders that are held by descriptors, and files in memory.

::

    opened_folder(path)      a folder that is there, or is made; guarded: no other user can replace it
    check_own(path)          a folder of this user's alone, used by its path: no other user can change it
    opened_place(path)       where a file or a folder is to be written: no link of another user leads there
    PrivateFolder()          a new folder of this process's, where no other user can replace it
    take_lock(path)          a locked file, which is still the one at that path
    ModelInMemory(content)   no folder at all: a sealed memfd that children inherit (`model_file`)
    new_memory(name, size)   a memfd, which is never a standard stream (`fill_streams`)
    Descriptor(fd)           an open descriptor, which is closed with this object

Links are followed one by one, from the root on, and each folder is opened in one that was looked at. An
opened folder is used through its descriptor (``/proc/self/fd/N``), so that no other takes its place.

A private folder goes with its owner. If that is killed, the lock on the folder goes, and the next process
that makes one removes what is not locked. A lock also shows the owners in other containers, as pids do not.
"""

import errno
import fcntl
import grp
import os
import posix
import pwd
import re
import resource
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from mcinfer.errors import BuildError, InvalidInputError

IN_MEMORY = "the model given as bytes"
"""What messages call a model that has no path."""

_UNFOLLOWED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"mcinfer-[0-9a-f]{16}")
_MAX_LINKS = 40  # as many as the kernel follows in one path (path_resolution(7))

# Those of `os` may be replaced: eventlet's cannot open in a folder, and gevent's closes later.
_open, _close, _fstat = posix.open, posix.close, posix.fstat

_BY_DESCRIPTOR = re.compile(r"/proc/self/fd/(\d+)")


def fill_streams() -> None:
    """Open ``/dev/null`` where a standard stream is closed, so that no other file gets its number.

    A daemon, or ``program <&- >&- 2>&-``, has such streams. What C libraries print, here or in a worker that
    inherits the streams, would go into the file that has the number. Call it before this process gets
    descriptors that stay, or that it passes on; ZeroMQ and the runtimes open some themselves.

    Raises:
        OSError: No descriptor is left.
    """
    with suppress(OSError):
        for stream in range(3):
            os.fstat(stream)
        return
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest that is free
        os.set_inheritable(fd, True)
    os.close(fd)


def new_memory(name: str, size: int = 0) -> int:
    """The descriptor of a new memfd, which the caller closes.

    One with a size is of zeros, and sealed: it has this size for good. One without can be sealed later.

    Raises:
        OSError: No descriptor is left, or the size is more than this process's files may have.
    """
    fill_streams()
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if size:
            with naming_limit():
                os.ftruncate(fd, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def naming_limit() -> Iterator[None]:
    """Have an error about a file's size name the limit of this process, which counts for memfds, too."""
    try:
        yield
    except OSError as exc:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if exc.errno != errno.EFBIG or most == resource.RLIM_INFINITY:
            raise
        limit = f"the limit of a file is {most} bytes (ulimit -f, RLIMIT_FSIZE)"
        raise OSError(exc.errno, f"{exc.strerror}: {limit}", exc.filename) from exc


class OthersError(PermissionError):
    """Another user could change a folder, or made the link to it; the text says which."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EACCES, text)

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def opened_folder(
    path: str | os.PathLike[str],
    *,
    guarded: bool = True,
    make: int | None = None,
) -> Iterator[Path]:
    """The path of a folder by its descriptor, for as long as the context lasts.

    Args:
        path: The folder. Links on the way must be this user's or root's.
        guarded: Whether only this user, and root, may be able to change or replace the folder. So neither a
            group nor others may write to it, or to a folder above it, as with OpenSSH's StrictModes, unless
            that folder is sticky: there only owners rename. A group that is certainly the user's own counts
            as the user, as in Debian's OpenSSH: under a umask of 002, which goes with such groups,
            ``~/.cache`` often has the mode 0775.
        make: The mode of what is missing, which is made; None: it is not made.

    Raises:
        OthersError: Others could change it, or made a link that leads there.
        OSError: It does not exist, or cannot be reached.
    """
    fd, _ = _walk(Path(path).absolute(), guarded=guarded, make=make)
    try:
        yield path_of(fd)
    finally:
        _close(fd)


def check_own(path: Path, make: int | None = None) -> None:
    """Raise as `opened_folder` does, and `OthersError` unless a folder is this user's alone.

    No other user can change or replace it afterwards. `make` is the mode of what is missing, which is made.
    """
    with opened_folder(path, make=make) as folder:
        info = folder.stat()
        if info.st_uid != os.geteuid():
            raise OthersError(f"it belongs to user {info.st_uid}, expected {os.geteuid()}")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OthersError(f"it is writable by others (mode {stat.S_IMODE(info.st_mode):04o})")


@contextmanager
def opened_place(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a file or a folder to write, by the descriptor of the folder that it is in.

    The last part of `path` may be a link, and need not exist. Raises as `opened_folder` does.
    """
    fd, name = _walk(Path(path).absolute(), entry=True)
    try:
        yield path_of(fd) / name
    finally:
        _close(fd)


def _walk(
    path: Path, *, guarded: bool = False, make: int | None = None, entry: bool = False
) -> tuple[int, str]:
    """The descriptor of a folder; or, of an `entry`, that of the folder which has it, and its name."""
    fill_streams()
    rest, links = [*reversed(path.parts)], 0
    fd = found = _open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while rest:
            name = rest.pop()
            try:
                try:  # as a folder, or autofs does not mount it
                    found = _open(name, _UNFOLLOWED | os.O_DIRECTORY, dir_fd=fd)
                except NotADirectoryError:
                    found = _open(name, _UNFOLLOWED, dir_fd=fd)
            except FileNotFoundError:
                if entry and not rest:
                    break
                if make is None:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(name, make, dir_fd=fd)
                rest.append(name)
                continue
            info = os.fstat(found)
            if stat.S_ISLNK(info.st_mode):
                target = os.readlink("", dir_fd=found)
                # Before it is closed: a signal's handler may raise anywhere.
                found, link = fd, found
                _close(link)
                if info.st_uid not in (0, os.geteuid()):
                    raise OthersError(f"{_real(fd) / name} is a link of another user")
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                rest += reversed(Path(target).parts)
            elif entry and not rest:
                found, last = fd, found
                _close(last)
                break
            else:
                fd, above = found, fd
                _close(above)
                if not stat.S_ISDIR(info.st_mode):
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
                if guarded:
                    _check_guarded(fd, info)
    except BaseException:
        for one in {fd, found}:
            _close(one)
        raise
    return fd, name


def path_of(fd: int) -> Path:
    """The path of an open file or folder, for this process."""
    return Path(f"/proc/self/fd/{fd}")


def _real(fd: int) -> Path:
    return Path(os.readlink(path_of(fd)))


def _check_guarded(fd: int, info: os.stat_result) -> None:
    """Raise `OthersError` unless only this user, and root, can rename what this user has in a folder."""
    shared = not info.st_mode & stat.S_ISVTX and (
        info.st_mode & stat.S_IWOTH
        or (info.st_mode & stat.S_IWGRP and not _is_private(fd, info.st_gid))
    )
    if shared or info.st_uid not in (0, os.geteuid()):
        raise OthersError(
            f"others can change {_real(fd)} (user {info.st_uid}, group {info.st_gid}, mode "
            f"{stat.S_IMODE(info.st_mode):04o}): run `chmod go-w` on that folder if it is yours"
        )


def _is_private(fd: int, gid: int) -> bool:
    """Whether a folder's group has this user as its only member, and an access list admits no others.

    The group has the user's name and is the user's first one, as distributions make it. The name is what
    counts for users that are not listed (LDAP): their common group has another one.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        lists = [name for name in os.listxattr(path_of(fd)) if "acl" in name]
    except (KeyError, OSError):
        return False
    return (
        not lists
        and user.pw_gid == gid
        and group.gr_name == user.pw_name
        and {*group.gr_mem} <= {user.pw_name}
        and all(one.pw_uid == user.pw_uid for one in pwd.getpwall() if one.pw_gid == gid)
    )


def temporary_places(*first: str | None) -> list[str]:
    """Where processes may have their folders, the first choice first; not looked at (see `opened_folder`)."""
    import tempfile  # not at every worker's start

    places = [*first]
    with suppress(FileNotFoundError):  # it finds no folder to write to
        places.append(tempfile.gettempdir())
    places.append("/tmp")  # noqa: S108 the last resort; its owner and mode are checked
    return [*dict.fromkeys(filter(None, places))]


class Descriptor:
    """An open descriptor, which is closed with this object, or by `close`.

    A program may have closed it itself (`os.closerange`), and have opened another file by the same number. So
    it is closed only where it still leads to the file that was given.

    Attributes:
        number: The descriptor, owned by this object.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._end = weakref.finalize(self, _close_same, number, _file(number))
        self._end.atexit = False

    def close(self) -> None:
        """Close it now. Safe to call again."""
        self._end()


def _file(fd: int) -> tuple[int, int]:
    """The file that a descriptor leads to."""
    info = _fstat(fd)
    return info.st_dev, info.st_ino


def _close_same(fd: int, file: tuple[int, int]) -> None:
    with suppress(OSError):  # the program has closed it
        if _file(fd) == file:
            _close(fd)


class PrivateFolder:
    """A new folder of mode 0700 in the temporary folder, or elsewhere if others can change that.

    A context manager; at its end, and at that of the interpreter, the folder goes with all that is in it.

    Args:
        first: A place to try before the temporary folders.
        named_by: The variables that can name a place, for the error.

    Attributes:
        place: The folder that it is in.
        path: Its own path, for processes that cannot have it by its descriptor.
        opened: Its path by its descriptor, for this process.

    Raises:
        OSError: No place can be used; the text says for each place why.
    """

    def __init__(self, first: str | None = None, *, named_by: str = "TMPDIR") -> None:
        faults: list[str] = []
        failure = OSError()
        for place in temporary_places(first):
            with ExitStack() as made:
                try:
                    fd = _claim(Path(place), made)
                except OSError as exc:
                    failure = exc
                    faults.append(f"{place}: {exc.strerror}")
                    continue
                self.place = Path(place)
                self.path = str(_real(fd))
                self.opened = path_of(fd)
                self._end = weakref.finalize(self, _end, os.getpid(), made.pop_all())
                return
        raise OSError(
            failure.errno,
            f"no place for a private folder: {'; '.join(faults)}; {named_by} can name one",
        )

    def close(self) -> None:
        """Remove the folder with all that is in it, unless this process was forked from its owner."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _claim(place: Path, made: ExitStack) -> int:
    """The descriptor of a new folder, which holds its lock; `made` removes the folder."""
    import shutil  # not at every worker's start

    above, _ = _walk(place.absolute(), guarded=True)
    made.callback(Descriptor(above).close)
    _sweep(above)
    while True:
        name = f"mcinfer-{os.urandom(8).hex()}"
        os.mkdir(name, 0o700, dir_fd=above)
        # It may be swept before it is locked.
        with ExitStack() as tried, suppress(FileNotFoundError):
            tried.callback(shutil.rmtree, name, ignore_errors=True, dir_fd=above)
            fd = open_private(path_of(above) / name)
            tried.callback(Descriptor(fd).close)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.stat(name, dir_fd=above)
            made.push(tried.pop_all())
            return fd


def open_private(path: Path) -> int:
    """The descriptor of a folder, which the caller closes; `OthersError` if it is not this user's alone.

    `path` leads through the descriptor of the folder that it is in, as `opened_folder` gives it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        text = f"{_real(fd)} is of user {info.st_uid} and has mode {stat.S_IMODE(info.st_mode):04o}"
        os.close(fd)
        raise OthersError(f"{text}, expected user {os.geteuid()} and 0700")
    return fd


def _sweep(place: int) -> None:
    """Remove the private folders in a place whose owners are gone."""
    import shutil

    with suppress(OSError):  # it cannot be listed
        for name in filter(_NAME.fullmatch, os.listdir(path_of(place))):
            with suppress(OSError), ExitStack() as opened:  # its owner lives, or is another user
                fd = open_private(path_of(place) / name)
                opened.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(name, dir_fd=place)


@contextmanager
def alone_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """No other process is in this block with this folder meanwhile; one that ends lets the next one in."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def take_lock(
    path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT
) -> int | None:
    """Lock a file without waiting; a link is not followed.

    Args:
        path: The file, which is made unless the `flags` say otherwise.
        kind: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`.
        flags: How the file is opened.

    Returns:
        A descriptor that holds the lock, for the caller to close; None if another process has the lock.
    """
    lock = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with ExitStack() as unless_taken, suppress(BlockingIOError):
        unless_taken.callback(os.close, lock)
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        if leads_to(path, lock):  # its last holder may have removed it
            unless_taken.pop_all()
            return lock
    return None


def leads_to(path: Path, fd: int) -> bool:
    """Whether a path leads to an open file or folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:
        return False


def _end(pid: int, made: ExitStack) -> None:
    if os.getpid() == pid:
        made.close()


@runtime_checkable
class SerializableModel(Protocol):
    """A model with a method `SerializeToString`, such as `onnx.ModelProto`."""

    def SerializeToString(self) -> bytes:  # noqa: N802 as protocol buffers name it
        """The bytes of the model's file."""


class ModelInMemory:
    """A model's file in no folder: a memfd, sealed when it is written, which ends with its last user.

    Attributes:
        path: Leads there in this process, and in children that inherit the descriptor (`inherited`).
    """

    def __init__(self, content: bytes | None = None) -> None:
        """Without `content`, `write` is to follow."""
        self._fd = new_memory("mcinfer-model")
        self.path = str(path_of(self._fd))
        self.close = Descriptor(self._fd).close
        if content is not None:
            self.write([content])

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Write what the file is to hold; nothing can change it from then on."""
        with naming_limit(), open(self._fd, "wb", closefd=False) as file:
            file.writelines(parts)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)


def model_file(
    model: "str | os.PathLike[str] | bytes | SerializableModel",
) -> tuple[str, ModelInMemory | None]:
    """The path of a model, and the file in memory of one that is given as it is."""
    if isinstance(model, (str, os.PathLike)):
        try:
            return str(Path(model).absolute()), None
        except OSError as exc:
            raise InvalidInputError(
                f"model: got {os.fspath(model)!r}, expected an absolute path: the working folder is gone"
            ) from exc
    if isinstance(model, (bytes, bytearray, memoryview)):
        content = bytes(model)
    elif isinstance(model, SerializableModel):
        content = model.SerializeToString()
    else:
        raise InvalidInputError(
            f"model: got {type(model).__name__}, expected a path, bytes or an onnx.ModelProto"
        )
    try:
        file = ModelInMemory(content)
    except OSError as exc:  # no descriptor, or no memory, is left
        raise BuildError(f"{IN_MEMORY} cannot be kept: {exc}") from exc
    return file.path, file


def inherited(path: str) -> tuple[int, ...]:
    """The descriptors that a child must inherit, by the same numbers, to open a path of this process."""
    found = _BY_DESCRIPTOR.fullmatch(path)
    return (int(found[1]),) if found else ()


def model_name(path: str) -> str:
    """The name of a model for people."""
    return os.path.basename(in_words(path, path))


def in_words(text: str, path: str) -> str:
    """A text for people, in which a model in memory has no path."""
    return re.sub(rf"{path}(?!\d)", IN_MEMORY, text) if inherited(path) else text
