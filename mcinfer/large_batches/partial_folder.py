"""A folder beside an output file, for what is done of it so far: what an interrupted run leaves to the next.

::

    .NAME.partial/lock         held (flock) by the one run that may touch the rest
    .NAME.partial/state.json   what work this is, and how far: put in place whole, after what it speaks of
    .NAME.partial/0.rows, …    the elements of each output, in the model's order
    .NAME.partial/whole.npz    at the end all of them, which is then moved to NAME

What lies in a file beyond what the state says is written over. The state says no more than is on the disk, so
that holds after a loss of power as well. A folder without a state is as good as none.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mcinfer.errors import McinferError

_FORMAT = 3
"""Of the folder; one more when it changes."""

_LOCK = "lock"
_STATE = "state.json"
_ROWS = ".rows"
_WHOLE = "whole.npz"

_LOCK_TRIES = 100


class PartialFolder:
    """The folder, which no other run can take until this one lets go of it; a context manager.

    It is removed at the end unless there is something in it to go on with.

    Attributes:
        path: Of the folder.
        whole: Of the file in it that is to become the output.
        state: What `save` was given last; None if it never was.
    """

    def __init__(self, output: Path, work: Mapping[str, Any], *, restart: bool = False) -> None:
        """Take it; it is made if there is none.

        Args:
            output: Absolute path of the output file.
            work: What the work is: model, input, and whatever else its result depends on, as JSON has it.
            restart: Whether to begin anew, whatever was done.

        Raises:
            McinferError: It cannot be made, another run has it, or it holds other work, or is damaged.
        """
        self.path = output.with_name(f".{output.name}.partial")
        self.whole = self.path / _WHOLE
        self._work = {"format": _FORMAT, **work}
        try:
            self._descriptors = [_take(self.path)]
        except OSError as exc:
            raise McinferError(f"--output: {exc.filename}: {exc.strerror}") from exc
        try:
            if restart:
                self._clear()
            self.state = self._recall()
        except BaseException:
            self._close()
            raise

    def _recall(self) -> dict[str, Any] | None:
        try:
            saved = json.loads((self.path / _STATE).read_bytes())
            work, state = saved["work"], dict(saved["state"])
            differing = [name for name in self._work if work.get(name) != self._work[name]]
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise self.damage(f"{_STATE}: {exc}") from exc
        if differing:
            raise McinferError(
                f"--output: {self.path} holds what was done of other work, with another "
                f"{', '.join(differing)}; --restart discards it"
            )
        return state

    def damage(self, what: str) -> McinferError:
        """The error for a folder whose content cannot be what a run left."""
        return McinferError(f"--output: {self.path} is damaged ({what}); --restart discards it")

    def open_rows(self, number: int) -> int:
        """A descriptor of the file of that output, which stays this one's."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path / f"{number}{_ROWS}", flags, 0o666)
        self._descriptors.append(descriptor)
        return descriptor

    def save(self, state: dict[str, Any]) -> None:
        """Bring to the disk what was written, then the state that speaks of it."""
        for descriptor in self._descriptors[1:]:
            os.fdatasync(descriptor)
        aside = self.path / f"{_STATE}.new"
        with open(aside, "w", encoding="ascii") as file:
            json.dump({"work": self._work, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / _STATE)
        self.state = state
        sync_folder(self.path)

    def forget(self) -> None:
        """What was done does not count any more: nothing is left when this is."""
        self._remove([_STATE])
        self.state = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.state is None:
                self._clear()
                self._remove([_LOCK])
                with suppress(OSError):  # something in it is not ours
                    self.path.rmdir()
        finally:
            self._close()

    def _clear(self) -> None:
        """Remove what is in it, the state first: without it nothing else counts."""
        names = os.listdir(self.path)
        ours = [name for name in names if name.endswith(_ROWS) or name == _WHOLE]
        self._remove([_STATE, f"{_STATE}.new", *ours])

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Bring to the disk what files a folder has."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take(folder: Path) -> int:
    """The lock of the folder: a descriptor that holds it until it is closed."""
    lock = folder / _LOCK
    for _ in range(_LOCK_TRIES):
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # a run that has ended has just removed the folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(
            descriptor
        )  # of a file that was removed meanwhile: somebody else may have the next
    raise McinferError(f"--output: another run is writing to {folder}")
