"""The output of a large batch: never half-written under its name, not lost when the work is interrupted."""

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from mcinfer.large_batches.growing import GrowingOutput, Grown
from mcinfer.large_batches.partial_folder import PartialFolder, sync_folder
from mcinfer.large_batches.requests import Requests
from mcinfer.staging import Arrays

_SAVE_SECONDS = 1.0
"""How much work is lost when the process is killed: to save more often would be to wait for the disk."""


class BatchOutput:
    """An output file in the making."""

    def __init__(self, folder: PartialFolder, requests: Requests) -> None:
        """Begin, or go on where the folder's state says.

        Args:
            folder: Where it is made; it stays the caller's.
            requests: Whose answers it is of.

        Raises:
            McinferError: What was done is damaged.
            OSError: The folder cannot be written to.
        """
        self._folder = folder
        self._requests = requests
        self._files = [folder.open_rows(number) for number in range(len(requests.joins))]
        self._outputs = [
            GrowingOutput(name, join, file)
            for (name, join), file in zip(requests.joins.items(), self._files, strict=True)
        ]
        # How many requests are done, and what each file holds then: one value, since Ctrl-C may come between
        # any two.
        self._progress: tuple[int, list[Grown]] = (0, [])
        if folder.state is not None:
            self._progress = self._recalled(folder.state)
        self._saved = self.done
        self._due = 0.0

    @property
    def done(self) -> int:
        """How many requests' answers it has, those that an earlier run took included."""
        return self._progress[0]

    def add(self, outputs: Arrays) -> None:
        """Take the answer to the next request.

        Raises:
            PredictError: An output does not go together with those before it.
            OSError: It cannot be written.
        """
        done, before = self._progress
        start, stop = self._requests.span(done)
        with _named(self._folder.path):
            grown = [
                output.add(before[i] if before else None, outputs[output.name], stop - start)
                for i, output in enumerate(self._outputs)
            ]
            self._progress = (done + 1, grown)
            if self.done < self._requests.count and monotonic() >= self._due:
                self._save()
                self._due = monotonic() + _SAVE_SECONDS

    def finish(self, path: Path) -> list[str]:
        """Make the file of all that was taken.

        As numpy.savez does, which takes no array by the name of one of its own arguments ("file").

        Args:
            path: Where to.

        Returns:
            For each output a line with its name, element type and shape.

        Raises:
            OSError: It cannot be written.
        """
        with _named(self._folder.path):
            with open(self._folder.whole, "wb") as file:
                with zipfile.ZipFile(file, "w") as archive:
                    lines = [
                        self._write(archive, output, grown)
                        for output, grown in zip(self._outputs, self._progress[1], strict=True)
                    ]
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._folder.whole, path)
            sync_folder(path.parent)
        self._folder.forget()
        return lines

    def _write(self, archive: zipfile.ZipFile, output: GrowingOutput, grown: Grown) -> str:
        """Put an output into the file; what is said of it."""
        units = [stop - start for start, stop in map(self._requests.span, range(self.done))]
        shape = grown.whole_shape(self._requests.units)
        header = {
            "descr": np.lib.format.dtype_to_descr(grown.dtype()),
            "fortran_order": False,
            "shape": shape,
        }
        with archive.open(f"{output.name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            for block in output.blocks(grown, units):
                member.write(block.view(np.uint8).data)
        return f"{output.name}: {grown.element_type}{[*shape]}"

    def keep(self) -> int:
        """Save how far it is, now that it goes no further.

        Returns:
            How many requests' answers are kept: of fewer than there are, if the disk takes no more.
        """
        if not self.done:
            return 0
        with suppress(OSError):
            self._make_room()
            if self.done > self._saved:
                self._save()
        return self._saved

    def forget(self) -> None:
        """Nothing of it is to be gone on with."""
        self._folder.forget()

    def _recalled(self, state: dict[str, Any]) -> tuple[int, list[Grown]]:
        try:
            requests = (state["step"], state["units"])
            if requests != (self._requests.step, self._requests.units):
                raise ValueError(f"requests of {requests[0]} of {requests[1]}")
            grown = [Grown.of_json(state["outputs"][output.name]) for output in self._outputs]
            for output, file, last in zip(self._outputs, self._files, grown, strict=True):
                if os.fstat(file).st_size < last.bytes:
                    raise ValueError(f"less than {last.bytes} bytes of output {output.name!r}")
            return int(state["done"]), grown
        except (ValueError, LookupError, TypeError) as exc:
            raise self._folder.damage(str(exc)) from exc

    def _save(self) -> None:
        done, grown = self._progress
        outputs = {
            output.name: last.as_json() for output, last in zip(self._outputs, grown, strict=True)
        }
        step, units = self._requests.step, self._requests.units
        self._folder.save({"done": done, "step": step, "units": units, "outputs": outputs})
        self._saved = done

    def _make_room(self) -> None:
        """Cut off what was written of a request that is not done: the disk may be full."""
        self._folder.whole.unlink(missing_ok=True)
        for file, last in zip(self._files, self._progress[1], strict=True):
            os.ftruncate(file, last.bytes)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have the system's errors say where it was."""
    try:
        yield
    except OSError as exc:
        if exc.filename is not None or exc.errno is None:
            raise
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
