"""The content of a model: a part of its key in the cache, and of its identity.

Reading gigabytes to learn that nothing changed would cost more time than the cache saves. So a folder
records the stamps of each model's files when they are read: while device, inode, size and both times stay
the same, so does the content. Only the kernel sets a file's ctime.

A write through a mapping may leave the times as they are (always on a tmpfs): a model must not be changed so.
"""

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mcinfer.errors import BuildError
from mcinfer.model_cache import FileState, file_states, is_large
from mcinfer.model_cache.cache import Cache, CacheUnusableError, entry_key, write_atomically
from mcinfer.model_cache.onnx_files import (
    OnnxFile,
    chunks,
    external_files,
    ir_weights,
    open_regular,
    scan,
)

_VERSION = 1  # version of the digest: increase it when the digest of the same files changes

_RECORD_VERSION = 4
"""Version of the records: increase it when their form, or what `scan` finds, changes."""

_FRESH_NS = 2_000_000_000
"""A file that changed since may change again within the same tick of its file system's clock (FAT: 2 s)."""


_SKETCH = "sketch "
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContent:
    """A model's content.

    Attributes:
        digest: SHA-256 of the model and of its external data, or an IR's weights, in hexadecimal digits; or
            the `sketch` of files that were not read whole.
        stamps: Of the files when they were read: the model, then its external data, in the order and as often
            as the model names it.
        random: A node that draws random numbers; empty if there is none, or the format is not ONNX.
        ragged: A node whose result's size depends on its data; empty if there is none.
    """

    digest: str
    stamps: tuple[FileState, ...]
    random: str = ""
    ragged: str = ""

    @property
    def sketch(self) -> str:
        """The `sketch` of the files, also if they were read whole."""
        return self.digest if self.digest.startswith(_SKETCH) else sketch(self.stamps)

    @property
    def size(self) -> int:
        return sum(stamp.size for stamp in self.stamps)

    def unchanged(self) -> bool:
        """Whether the files still are those that were read, by their stamps."""
        try:
            return self.stamps == file_states(stamp.path for stamp in self.stamps)
        except OSError:
            return False

    def is_still_there(self) -> bool:
        """Whether the files have this content, if they are those that were read or not.

        Raises as `read_content`, where they are beside the model.
        """
        path = self.stamps[0].path
        return self.unchanged() or read_content(path, any_format=True).digest == self.digest


def read_content(
    path: str | os.PathLike[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    memory: Path | None = None,
    any_format: bool = False,
    known: Collection[str] | None = None,
) -> ModelContent:
    """Read a model's files, or recall their digest if they have not changed.

    Args:
        path: An ONNX model.
        folder: Folder of its external data; None or empty: beside the model, as in ONNX Runtime.
        memory: Folder of mode 0700 with remembered digests, if any; its errors are ignored.
        any_format: Whether to take a file that is no ONNX model as it is, an IR with its weights.
        known: Sketches: files with another one are not read whole, nor remembered.

    Raises:
        BuildError: Not an ONNX model; external data is missing, not a file or outside of its folder; a file
            changed while it was read.
        OSError: The model cannot be opened.
    """
    model = Path(path).absolute()  # not os.path.abspath: it takes "link/.." for nothing
    place = Path(folder).absolute() if folder else None
    notes: Path | None = None
    if memory is not None and not model.is_relative_to("/proc"):
        places = os.fsencode(model) + b"\0" + os.fsencode(place or "") + b"\0" * any_format
        notes = memory / f"{hashlib.sha256(places).hexdigest()}.json"
        if remembered := _recall(notes):
            return remembered
    started_ns = time.time_ns()  # from here on a change of a file that is not fresh shows
    source = _read(model, place, any_format=any_format, known=known)
    last_ns = max(max(stamp.mtime_ns, stamp.ctime_ns) for stamp in source.stamps)
    fresh = last_ns >= started_ns - _FRESH_NS
    if notes is not None and not fresh and not source.digest.startswith(_SKETCH):
        with suppress(OSError):
            write_atomically(notes, json.dumps({"version": _RECORD_VERSION, **asdict(source)}))
    return source


def sketch(stamps: Iterable[FileState]) -> str:
    """A digest of a few bytes of these files: if it differs, so do the files."""
    total = hashlib.sha256()
    for stamp in dict.fromkeys(stamps):
        total.update(stamp.size.to_bytes(8, "little"))
        with open_regular(stamp.path) as (descriptor, _):
            for n in range(_SAMPLES):
                total.update(os.pread(descriptor, _SAMPLE_BYTES, n * stamp.size // _SAMPLES))
    return _SKETCH + total.hexdigest()


def _read(
    model: Path, folder: Path | None, *, any_format: bool, known: Collection[str] | None
) -> ModelContent:
    stamps = [*file_states([str(model)])]
    try:
        found = scan(model)
    except BuildError:
        if not any_format:
            raise
        found = OnnxFile(places={*ir_weights(model)})
    locations = found.external
    total = hashlib.sha256(b"mcinfer model %d" % _VERSION)
    try:
        stamps += file_states(map(str, external_files(model, folder, locations)))
        if known is not None and (digest := sketch(stamps)) not in known:
            return ModelContent(
                digest=digest, stamps=tuple(stamps), random=found.random, ragged=found.ragged
            )
        for name, stamp in zip(("", *locations), stamps, strict=True):
            content = hashlib.sha256()
            with open_regular(stamp.path) as (descriptor, _):
                # As many bytes as it had, should it grow without end.
                for part in chunks(descriptor, stamp.size):
                    content.update(part)
            for fact in (name.encode(), content.digest()):
                total.update(len(fact).to_bytes(8, "little"))
                total.update(fact)
    except OSError as exc:
        raise BuildError(f"{model}: {exc.filename} cannot be read: {exc}") from exc
    source = ModelContent(
        digest=total.hexdigest(),
        stamps=tuple(stamps),
        random=found.random,
        ragged=found.ragged,
    )
    if not source.unchanged():
        paths = [stamp.path for stamp in stamps]
        raise BuildError(f"{model} changed while it was read: expected its files to stay: {paths}")
    return source


def _recall(notes: Path) -> ModelContent | None:
    """What was remembered; None if that is missing, damaged, or of files that have changed."""
    try:
        found = json.loads(notes.read_bytes())
        if found.pop("version") != _RECORD_VERSION:
            return None
        stamps = tuple(FileState(*stamp) for stamp in found.pop("stamps"))
        source = ModelContent(stamps=stamps, **found)
        return source if stamps and source.unchanged() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def model_content(
    model: str,
    folder: str | None,
    *,
    any_format: bool = False,
    known: Collection[str] | None = None,
) -> ModelContent:
    """`read_content` with the memory of this user's cache; raises as it does, and as `Cache.default`."""
    memory = None
    if is_large(model, folder):  # small ones are read as fast
        with suppress(CacheUnusableError):
            memory = Cache.default().notes("sources")
    return read_content(model, folder=folder, memory=memory, any_format=any_format, known=known)


def claim_key(content: ModelContent) -> str:
    """The key of a claim to prepare a model: the same however it is to be prepared."""
    return entry_key({"sketch": content.sketch})
