"""The files of a run: what its result depends on, and what it may not write over."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.large_batches.positioned import stamp
from mcinfer.large_batches.reading import InputFile
from mcinfer.model_cache.onnx_files import check_regular, external_files, open_regular, scan

_SUFFIX = ".npz"


def resolve_target(path: Path) -> Path:
    """The file that is to be written, where a link leads.

    Raises:
        InvalidInputError: There is something else, or it could not be there.
    """
    target = Path(os.path.realpath(path))
    try:
        check_regular(target)
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise InvalidInputError(f"--output: there is no folder {target.parent}") from None
    except OSError as exc:
        raise InvalidInputError(f"--output: {target}: {exc.strerror}") from exc
    except BuildError as exc:
        raise InvalidInputError(f"--output: {exc}") from exc
    if path.suffix.lower() != _SUFFIX:
        raise InvalidInputError(f"--output: got {path}, expected a name that ends in {_SUFFIX}")
    return target


class Sources:
    """The model, with its external data, and the input.

    Attributes:
        stamps: What tells them from others, by "model" and "input"; see `stamp`.
    """

    def __init__(self, model: Path, file: InputFile) -> None:
        """Look at them.

        Raises:
            InvalidInputError: The model cannot be read.
            BuildError: It is no regular file.
        """
        self._model = [model.absolute()]
        self._input = file.path
        with suppress(BuildError, OSError):  # workers will tell what is wrong with it
            self._model += external_files(self._model[0], None, scan(self._model[0]).external)
        try:
            self.stamps: dict[str, Any] = {"model": _stamps(self._model), "input": [file.stamp]}
        except OSError as exc:
            raise InvalidInputError(f"MODEL: {exc.filename}: {exc.strerror}") from exc

    def refuse(self, target: Path) -> None:
        """Fail if one of them would be written over.

        Raises:
            InvalidInputError: It would be.
        """
        for path in (*self._model, self._input):
            with suppress(FileNotFoundError):  # there is no target yet
                if os.path.samefile(target, path):
                    name = "--input" if path is self._input else "MODEL"
                    raise InvalidInputError(
                        f"--output: {target} is the file of {name} ({path}), expected another one"
                    )

    def changed(self) -> list[str]:
        """Which of "model" and "input" are not any more what they were."""
        now = {"model": self._model, "input": [self._input]}
        return [name for name, paths in now.items() if _stamps_now(paths) != self.stamps[name]]


def _stamps(paths: list[Path]) -> list[dict[str, Any]]:
    stamps = []
    for path in paths:
        with open_regular(path) as (descriptor, _):
            stamps.append(stamp(descriptor, str(path)))
    return stamps


def _stamps_now(paths: list[Path]) -> list[dict[str, Any]] | None:
    try:
        return _stamps(paths)
    except (OSError, BuildError):
        return None
