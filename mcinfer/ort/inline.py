"""Inline sessions: ONNX Runtime's own session in this process, opened on the prepared model.

::

    the model, its options, this machine ──► entry of the cache ◄── mapped by each process's session
                                               └─ none yet: a child prepares it, once

An entry is used only for options that are known to change nothing else than its key says, so that a session
on it computes what a plain one with these options would. Otherwise a plain session opens. An entry is held
while the native session lives.

The threads of a session are gone in a process that was forked. ONNX Runtime 1.32 then runs on one core, and
hangs in runs of the parallel mode or at the process's end. So a session with threads is left there as it is,
and opened again when it is first used.
"""

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.errors import ClosedError, McinferError
from mcinfer.model_cache import FOLDER_KEY, LEAST_PREPARED_BYTES, is_large
from mcinfer.ort import options as noted
from mcinfer.ort.errors import Unsupported
from mcinfer.ort.providers import CPU, NOTHING_HERE
from mcinfer.process import give_back_freed_memory

if TYPE_CHECKING:
    from mcinfer.model_cache.entries import Held
    from mcinfer.ort.session import InferenceSession

_LEAST_PATIENCE = 10.0
_PREPARED_BYTES_PER_SECOND = 25e6
"""How long another process is waited for that prepares the model. A plain session opens in less time, but
for good with a copy of its own."""

_SMALL = f"it has less than {LEAST_PREPARED_BYTES >> 20} MiB"

_UNPREPARED = ("ep.", "session.record_ep_graph_assignment_info", "session.save_model_format")
"""The beginnings of configuration entries that are about the graph as it was written."""

_log = logging.getLogger("mcinfer.ort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A session to open.

    Attributes:
        model: A path, or the model's bytes.
        folder: The folder of relative paths; empty if there is none.
        options: The program's ``SessionOptions``, if any.
        providers: As the program gave them.
        prepare: `EngineOptions.prepare`.
        changed: Whether the program asked for what no key has: other optimisers, options from the model.
    """

    model: str | bytes
    folder: str
    options: Any
    providers: Sequence[Any] | None
    prepare: str
    changed: bool

    @property
    def name(self) -> str:
        if isinstance(self.model, str):
            return os.path.basename(self.model)
        from mcinfer.private import IN_MEMORY

        return IN_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How to open it: `held`, for the native session, or plain.

    Attributes:
        held: The entry of the cache; None for a plain session.
        path: The prepared model.
        options: ``SessionOptions`` for it.
        why_plain: The reason, if there is no entry.
        has_threads: Whether the session has threads of its own.
    """

    held: "Held | None" = None
    path: str = ""
    options: Any = None
    why_plain: str = ""
    has_threads: bool = True

    @property
    def key(self) -> str:
        return "" if self.held is None else self.held.key

    def given_up(self, wanted: Wanted, exc: Exception) -> "Found":
        """After the prepared model could not be opened."""
        if self.held is not None:
            self.held.close()
        return _plain(wanted, f"the prepared model cannot be opened: {exc}", logging.WARNING)


def look_up(wanted: Wanted) -> Found:
    """The prepared model for a session, made if there is none yet; or why there is none. Raises nothing."""
    try:
        why, held = _prepared(wanted)
    except (
        McinferError,
        OSError,
        ValueError,
        TypeError,
    ) as exc:  # the plain class says it in its words
        why, held = str(exc), None
    if held is None:
        return _plain(wanted, why)
    _log.info("%s: its weights are those of the prepared model %s", wanted.name, held.folder)
    from mcinfer.model_cache.building import MODEL_FILE

    options = noted.copied(wanted.options, without=FOLDER_KEY)
    options.graph_optimization_level = native.GraphOptimizationLevel.ORT_DISABLE_ALL
    return Found(
        held=held,
        path=str(held.opened / MODEL_FILE),
        options=options,
        has_threads=_has_threads(wanted.options),
    )


def _plain(wanted: Wanted, why: str, level: int = logging.INFO) -> Found:
    _log.log(level, "%s: a session with its own copy of the weights: %s", wanted.name, why)
    return Found(why_plain=why, has_threads=_has_threads(wanted.options))


def _has_threads(options: Any) -> bool:
    return options is None or not (
        options.intra_op_num_threads == 1
        and options.execution_mode == native.ExecutionMode.ORT_SEQUENTIAL
    )


def _prepared(wanted: Wanted) -> "tuple[str, Held | None]":
    """Why there is no prepared model, or its entry."""
    options, model = wanted.options, wanted.model
    if wanted.prepare == "never":
        return "EngineOptions(prepare='never')", None
    if wanted.changed:
        return "disabled_optimizers or read_config_from_model was given", None
    if others := _other_providers(wanted):
        return f"{others[0]}: sessions in several processes do not share a device's memory", None
    if options is not None and not noted.is_noted(options):
        return "sess_options were not made by this program after mcinfer.ort was imported", None
    if wanted.prepare == "auto" and not _is_large(wanted):
        return _SMALL, None
    # From here on the model will be prepared, if it can be: small ones need none of these modules.
    from mcinfer.config import Device, EngineOptions
    from mcinfer.engines import _onnxruntime as runtime
    from mcinfer.engines.base import EngineRequest
    from mcinfer.engines.preparation import OWN_COPY
    from mcinfer.private import ModelInMemory

    try:
        passed = noted.passed(
            native.SessionOptions() if options is None else options,
            EngineOptions(prepare="auto"),
            wanted.folder,
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
    config = dict(engine.session_config)
    if isinstance(model, bytes):
        config.setdefault(FOLDER_KEY, wanted.folder)
    with ExitStack() as opened:
        if isinstance(model, bytes):
            path = opened.enter_context(closing(ModelInMemory(model))).path
        else:
            path = os.path.join(wanted.folder, model)
        request = EngineRequest(
            model=path,
            device=Device.parse("cpu:0"),
            threads=1,
            prepare="always",  # its size was looked at, and the notes say why it cannot be
            session_config=config,
            session_options=engine.session_options,
            custom_operators=tuple(engine.custom_operators),
            free_dimensions=engine.free_dimensions,
            free_denotations=engine.free_denotations,
        )
        found = runtime.prepared(request, patience=_patience)
    return "; ".join(note.removeprefix(f"{OWN_COPY}: ") for note in found.notes), found.held


def _patience(size: int) -> float:
    return _LEAST_PATIENCE + size / _PREPARED_BYTES_PER_SECOND


def _is_large(wanted: Wanted) -> bool:
    if isinstance(wanted.model, bytes):
        return len(wanted.model) >= LEAST_PREPARED_BYTES
    folder = noted.config_entries(wanted.options).get(FOLDER_KEY)
    return is_large(
        os.path.join(wanted.folder, wanted.model), folder and os.path.join(wanted.folder, folder)
    )


def _other_providers(wanted: Wanted) -> list[str]:
    """The providers beside the CPU's that the session may have."""
    available = native.get_available_providers()
    named = [one[0] if isinstance(one, tuple) else one for one in wanted.providers or ()]
    if not named and wanted.options is not None and noted.is_noted(wanted.options):
        named = [name for name, _ in noted.named_providers(wanted.options)]
    return [n for n in named or available if n in available and n not in (CPU, NOTHING_HERE)]


# While a session lives, and in processes that are forked.


def note(session: "InferenceSession", found: Found) -> None:
    """Hold the entry as long as the native session lives, and be ready for a fork."""
    if found.held is not None:
        weakref.finalize(session._sess, found.held.close).atexit = False
        give_back_freed_memory()
    session.__dict__.pop(_LEFT, None)
    if found.has_threads:
        _forks().add(session)


def forget(session: "InferenceSession") -> None:
    """Do not open the session again."""
    session.__dict__.pop(_LEFT, None)
    _forks().remove(session)


def is_left(session: "InferenceSession") -> bool:
    """Whether this process was forked from the one that opened the session."""
    return _LEFT in session.__dict__


def reopen(session: "InferenceSession") -> None:
    """Open a session again in a process that was forked.

    Raises:
        ClosedError: A session on a device, whose driver does not work in a forked process.
    """
    with _forks().reopening:
        if not is_left(session):
            return
        if any(name not in (CPU, NOTHING_HERE) for name in session.get_providers()):
            raise ClosedError(
                f"the session on {session.get_providers()[0]} belongs to process {session.__dict__[_LEFT]}; "
                f"process {os.getpid()} was forked from it, and has to open one of its own"
            )
        session._sess_options = session._sess_options_initial
        session._create_inference_session(*session._chosen)


_LEFT = "_left_by"
"""The attribute of a session whose native session is that of the process that this one was forked from."""


class _Forks:
    """The sessions of this process that have threads.

    A native session that is left is never destroyed: that would wait for threads that there are not.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, weakref.ref[InferenceSession]] = {}
        self.reopening = threading.Lock()
        os.register_at_fork(after_in_child=self._after_in_child)

    def add(self, session: "InferenceSession") -> None:
        number = id(session)
        self._sessions[number] = weakref.ref(session, lambda _: self._sessions.pop(number, None))

    def remove(self, session: "InferenceSession") -> None:
        self._sessions.pop(id(session), None)

    def _after_in_child(self) -> None:
        self.reopening = threading.Lock()  # another thread may have held it
        for known in self._sessions.copy().values():
            session = known()
            left = None if session is None else session.__dict__.pop("_sess", None)
            if left is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
                session.__dict__[_LEFT] = os.getppid()
        self._sessions = {}


@functools.cache
def _forks() -> _Forks:
    """The only one of this process: a registration for forks cannot be undone."""
    return _Forks()
