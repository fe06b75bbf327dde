"""The output of a large batch: never half-written under its name, not lost when the work is interrupted."""

import errno
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from mcinfer.errors import McinferError
from mcinfer.large_batches.growing import GrowingOutput, Grown
from mcinfer.large_batches.partial_folder import PartialFolder, sync_folder
from mcinfer.large_batches.reading import lacks
from mcinfer.large_batches.requests import Requests
from mcinfer.printable import printable
from mcinfer.progress import megabytes, showing_work
from mcinfer.requests.request import Arrays

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
        self._files = [folder.open_rows(number) for number in range(len(requests.outputs))]
        self._outputs = [
            GrowingOutput(name, axis, file)
            for (name, axis), file in zip(requests.outputs.items(), self._files, strict=True)
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
            JoinError: An output does not go together with those before it.
            McinferError: It cannot be written.
        """
        done, before = self._progress
        with self._told():
            grown = [
                output.add(before[i] if before else None, outputs[output.name])
                for i, output in enumerate(self._outputs)
            ]
            self._progress = (done + 1, grown)
            if self.done < self._requests.count and monotonic() >= self._due:
                self._save()
                self._due = monotonic() + _SAVE_SECONDS

    def finish(self, path: Path) -> list[str]:
        """Make the file of all that was taken.

        As numpy.savez does, which takes no array by the name of one of its own arguments ("file"). For as
        long as it is not whole, it and what was taken are both on the disk.

        Args:
            path: Where to.

        Returns:
            For each output a line with its name, element type and shape.

        Raises:
            McinferError: It cannot be written.
        """
        total = max(1, self._whole_bytes())
        with self._told(), showing_work(sys.stderr, "writing", total) as work:
            written = 0

            def tell(count: int) -> None:
                nonlocal written
                written += count
                work.show(written)

            with open(self._folder.whole, "wb") as file:
                with zipfile.ZipFile(file, "w") as archive:
                    lines = [
                        self._write(archive, output, grown, tell)
                        for output, grown in zip(self._outputs, self._progress[1], strict=True)
                    ]
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._folder.whole, path)
            sync_folder(path.parent)
        self._folder.forget()
        return lines

    def _write(
        self,
        archive: zipfile.ZipFile,
        output: GrowingOutput,
        grown: Grown,
        tell: Callable[[int], None],
    ) -> str:
        """Put an output into the file, telling of each part's bytes; what is said of it."""
        shape, dtype = grown.whole_shape, grown.dtype()
        header = {
            # Such as NumPy reads: of some types that it lacks it would write names that are none.
            "descr": f"|V{dtype.itemsize}" if lacks(dtype) else np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": shape,
        }
        with archive.open(f"{output.name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            for block in output.blocks(grown):
                member.write(block.view(np.uint8).data)
                tell(block.nbytes)
        return f"{printable(output.name)}: {grown.element_type}{[*shape]}"

    def remarks(self) -> list[str]:
        """What is to be known of outputs; see `GrowingOutput.remark`."""
        count = self._requests.count
        if count == 1:
            return []
        found = (
            output.remark(grown, count)
            for output, grown in zip(self._outputs, self._progress[1], strict=True)
        )
        return [remark for remark in found if remark is not None]

    def missing_bytes(self) -> int:
        """How much room the disk lacks for all that is to be written; known from the first answer on."""
        if not self.done:
            return 0
        disk = os.statvfs(self._folder.path)
        written = sum(grown.bytes for grown in self._progress[1])
        return max(0, 2 * self._whole_bytes() - written - disk.f_bavail * disk.f_frsize)

    def _whole_bytes(self) -> int:
        """Of all outputs at the end, if the rest is as what is done."""
        done, outputs = self._progress
        stop = max(1, self._requests.span(done - 1)[1])
        return sum(
            grown.whole_bytes * (1 if grown.axis is None else max(1, self._requests.units)) // stop
            for grown in outputs
        )

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
            expected = self._cut()
            if {name: state[name] for name in expected} != expected:
                raise ValueError(f"not of {expected}")
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
        self._folder.save({"done": done, **self._cut(), "outputs": outputs})
        self._saved = done

    def _cut(self) -> dict[str, Any]:
        """How the batch is cut, which stays as it is for as long as the work lasts."""
        requests = self._requests
        return {
            "step": requests.step,
            "units": requests.units,
            "shards": requests.shards,
            "inputs": requests.axes,
        }

    def _make_room(self) -> None:
        """Cut off what was written of a request that is not done: the disk may be full."""
        self._folder.whole.unlink(missing_ok=True)
        for file, last in zip(self._files, self._progress[1], strict=True):
            os.ftruncate(file, last.bytes)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Have the system's errors say where it was, and how much room is missing there."""
        try:
            yield
        except OSError as exc:
            text = f"--output: {exc.filename or self._folder.path}: {exc.strerror or exc}"
            if exc.errno == errno.ENOSPC:
                self._make_room()
                if missing := self.missing_bytes():
                    text += f", about {megabytes(missing)} more are needed"
            raise McinferError(text) from exc
