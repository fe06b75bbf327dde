"""Inline sessions: ONNX Runtime's own session in this process, opened on the prepared model.

::

    the model, its options, this machine ──► entry of the cache ◄── mapped by each process's session
                                               └─ none yet: a plain session, and one process prepares it

An entry is used only for options that are known to change nothing else than its key says, so that a session
on it computes what a plain one with these options would. Otherwise a plain session opens. An entry is held
while the native session lives.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.errors import ClosedError
from mcinfer.model_cache import (
    FOLDER_KEY,
    LEAST_PREPARED_BYTES,
    FileState,
    file_states,
    has_external_data,
    is_large,
)
from mcinfer.ort import options as noted
from mcinfer.ort.errors import Unsupported
from mcinfer.ort.providers import CPU, NOTHING_HERE

if TYPE_CHECKING:
    from mcinfer.model_cache.cache import Held

PREPARE = ("background", "wait", "switch", "always", "never")
"""What the argument `prepare` of a session may be."""

COMING = "it is being prepared, for sessions that are opened later"
"""Why a session is plain for now."""

_SMALL = f"it has less than {LEAST_PREPARED_BYTES >> 20} MiB"

_UNPREPARED = (
    *("ep.", "session.record_ep_graph_assignment_info", "session.save_"),
    "session.optimized_model_external_initializers",
)
"""The beginnings of configuration entries that are about the graph as it was written."""


def prepared(
    model: str | bytes,
    folder: str,
    options: Any,
    providers: Sequence[Any] | None,
    prepare: str,
) -> "tuple[str, Held | None]":
    """The entry of the prepared model, for the caller to close.

    If there is none yet, it is made: here, or by another process, which is `COMING`.

    Args:
        model: An absolute path, or the model's bytes.
        folder: The folder of relative paths; empty if there is none.
        options: The program's ``SessionOptions``, if any.
        providers: As the program gave them.
        prepare: One of `PREPARE`.

    Returns:
        Why there is none, or the entry.

    Raises:
        McinferError, OSError, ValueError, TypeError: Something is wrong with the model or the cache.
    """
    if prepare == "never":
        return "prepare='never'", None
    if others := _other_providers(providers, options):
        return f"{others[0]}: sessions in several processes do not share a device's memory", None
    if options is not None and not noted.is_noted(options):
        return f"sess_options were {noted.NOT_NOTED}", None
    if isinstance(model, str) and model.endswith(".ort"):
        return "its name says that it has ONNX Runtime's own format", None
    data = noted.config_entries(options).get(FOLDER_KEY)
    data = os.path.join(folder, data) if data else None
    with ExitStack() as opened:
        if isinstance(model, str):
            return _prepared_file(model, data, folder, options, prepare)
        from mcinfer.private import ModelInMemory, in_words

        path = opened.enter_context(closing(ModelInMemory(model))).path
        why, held = _prepared_file(path, data or folder, folder, options, prepare)
        return in_words(why, path), held


def _prepared_file(
    path: str, data: str | None, folder: str, options: Any, prepare: str
) -> "tuple[str, Held | None]":
    if prepare != "always" and not is_large(path, data):
        return _SMALL, None
    # Small models need none of these modules.
    from mcinfer.config import Device, EngineOptions
    from mcinfer.model_cache.cache import Cache, CacheUnusableError, is_entry
    from mcinfer.model_cache.keys import claim_key, model_content

    try:
        passed = noted.passed(
            native.SessionOptions() if options is None else options,
            EngineOptions(),
            folder,
            1,
        )
    except Unsupported as exc:  # what it says after the name is about workers
        return f"{str(exc).partition(':')[0]} was set", None
    if passed.weights or passed.files:
        return "sess_options have initialisers", None
    if passed.optimised:
        return "SessionOptions.optimized_model_filepath was set", None
    engine = passed.engine
    for key in engine.session_config:
        if key.startswith(_UNPREPARED):
            return f"the configuration entry {key!r} was set", None
    is_awaited = prepare not in ("background", "switch")
    cache, known = Cache.default(), None
    if not is_awaited:
        with suppress(CacheUnusableError):
            known = cache.sketches()
    content = model_content(path, data, known=known)  # to read a new one would hold its session up
    if content.random:  # from a seed and the node's number in the graph
        return f"{content.random} draws random numbers, others where the graph is optimised", None
    claim = None
    try:
        if known is not None and content.sketch not in known and not is_entry(path):
            # Of the processes of a service, which start together, one loads what prepares the model.
            with suppress(CacheUnusableError):
                claim, failure = cache.claim(claim_key(content))
                if claim is None and not failure:
                    return COMING, None
        from mcinfer.engines import _onnxruntime as runtime
        from mcinfer.engines.base import EngineRequest
        from mcinfer.engines.preparation import OWN_COPY

        request = EngineRequest(
            model=path,
            device=Device.parse("cpu:0"),
            content=content,
            options=replace(
                engine,
                threads=1,
                inter_op_threads=None,
                # Its size was looked at, and the notes say why it cannot be.
                prepare="always" if is_awaited else "background",
                session_config={**engine.session_config, **({FOLDER_KEY: data} if data else {})},
            ),
        )
        found = runtime.prepared(request, claim=claim)
        if claim is not None and not found.is_coming:
            cache.settle(claim_key(content))
    finally:
        if claim is not None:
            os.close(claim)
    if found.is_coming:
        return COMING, None
    return "; ".join(note.removeprefix(f"{OWN_COPY}: ") for note in found.notes), found.held


def _other_providers(providers: Sequence[Any] | None, options: Any) -> list[str]:
    """The providers beside the CPU's that the session may have."""
    available = native.get_available_providers()
    named = [one[0] if isinstance(one, tuple) else one for one in providers or ()]
    named = named or [name for name, _ in noted.named_providers(options)] or available
    return [n for n in named if n in available and n not in (CPU, NOTHING_HERE)]


# In processes that are forked.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a session was opened from, for a process that is forked, or to go over to the prepared model.

    Attributes:
        held: The entry, which the session closes; None if it is plain.
        files: A plain session's, before it was opened; None if they could not be looked at.
    """

    held: "Held | None" = None
    files: tuple[FileState, ...] | None = None

    def again(self, left_by: int) -> "Held | None":
        """The entry to open again; None for a plain session whose files are unchanged.

        Raises:
            ClosedError: There is no such entry any more, or the files have changed.
        """
        if self.held is None:
            self.check_files(left_by)
            return None
        from mcinfer.errors import McinferError
        from mcinfer.model_cache.cache import Cache

        with suppress(McinferError):
            # By a lock of its own: this process may have closed the descriptors of the other one.
            held = Cache(self.held.folder.parent, 0).open(self.held.key)
            if held is not None:
                return held
        raise ClosedError(_changed(left_by, str(self.held.folder)))

    def is_unchanged(self) -> bool:
        """Whether a plain session's files are those that it was opened from."""
        with suppress(OSError):
            return self.files is not None and self.files == file_states(f.path for f in self.files)
        return False

    def check_files(self, left_by: int) -> None:
        """Raise ClosedError if a plain session's files are not those that it was opened from."""
        if self.is_unchanged():
            return
        paths = [file.path for file in self.files or ()]
        raise ClosedError(_changed(left_by, ", ".join(paths) or "the model"))


def _changed(left_by: int, what: str) -> str:
    return (
        f"the session was opened by process {left_by}, and {what} was changed or removed since: process "
        f"{os.getpid()}, which was forked from it, has to open a session of its own"
    )


def files_of(model: str | bytes, folder: str, options: Any) -> tuple[FileState, ...] | None:
    """The state of the files that a plain session reads; the arguments are those of `prepared`."""
    own = [model] if isinstance(model, str) else []
    if not all(map(os.path.isfile, own)):
        return None
    with suppress(OSError), ExitStack() as opened:
        if not has_external_data(model):
            return file_states(own)
        from pathlib import Path

        from mcinfer.errors import BuildError
        from mcinfer.model_cache.onnx_files import model_files
        from mcinfer.private import ModelInMemory

        data = noted.config_entries(options).get(FOLDER_KEY)
        place = Path(folder, data or "") if data or not own else None
        if isinstance(model, bytes):
            model = opened.enter_context(closing(ModelInMemory(model))).path
        others: list[Path] = []
        with suppress(BuildError):  # a format of the runtime's own
            _, *others = model_files(Path(model), place)
        return file_states([*own, *map(str, others)])
    return None


def has_threads(options: Any) -> bool:
    return options is None or not (
        options.intra_op_num_threads == 1
        and options.execution_mode == native.ExecutionMode.ORT_SEQUENTIAL
    )
