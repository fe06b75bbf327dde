"""`InferenceSession`: ONNX Runtime's Python class, inline on the prepared model, or on workers with devices.

::

    InferenceSession(model)              a native session in this process (`mcinfer.ort.inline`)
    InferenceSession(model, devices=2)   runs go to worker processes (`mcinfer.ort.workers`)

With ``prepare="switch"`` a thread waits for the prepared model, and puts a native session on it in the place
of the plain one. A run takes the native session that it finds, and keeps it until it ends.

The threads of a session are gone in a process that was forked. ONNX Runtime 1.32 then runs on one core, and
hangs in runs of the parallel mode or at the process's end. So an inline session with threads is left there as
it is, and opened again when it is first used: from the entry that this process holds as well, or, if it is
plain, from its files as long as they are unchanged.
"""

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import ref

from onnxruntime.capi import onnxruntime_inference_collection as collection
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.errors import ClosedError, InvalidInputError, McinferError
from mcinfer.locks import Lock
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.ort import inline
from mcinfer.ort import options as noted
from mcinfer.ort.arrays import readable_feed
from mcinfer.ort.errors import Unsupported
from mcinfer.ort.providers import CPU, NOTHING_HERE, UnknownProviderError
from mcinfer.process import give_back_freed_memory

if TYPE_CHECKING:  # an inline session needs no workers
    from mcinfer.master import Master

_FROM_MODEL = "ORT_LOAD_CONFIG_FROM_MODEL"
"""The runtime's variable for options that lie in a model's metadata."""

_FOLDER = "_folder"
"""A session's argument for one that is opened again: the folder of its relative paths."""

_SAID = (
    *("inputs_meta", "outputs_meta", "overridable_initializers", "model_meta"),
    *("input_meminfos", "output_meminfos", "input_epdevices"),
)
"""What the plain class takes from its native session."""

_OF_NATIVE = ("_sess", "_profiling_start_time_ns", *(f"_{name}" for name in _SAID))
"""The plain class's attributes that keep the native session, and with it the model."""

_LAST_SECONDS = 10.0
_LOOK_SECONDS, _LOOK_SHARE = 1.0, 0.05
"""Least time between two looks whether a model is prepared by now, and their greatest share of all time: a
model in memory is written to a file for each."""

_OF_PLAIN = ("disabled_optimizers", "read_config_from_model")
"""Arguments of the plain class that its signature does not name, beside ``enable_fallback``."""

_log = logging.getLogger("mcinfer.ort")

PlainSession = collection.InferenceSession
"""ONNX Runtime's own class, whatever `mcinfer.ort.install` puts in its place."""


class InferenceSession(PlainSession):  # type: ignore[misc,valid-type] # no types
    """``onnxruntime.InferenceSession`` with one copy of the weights for all processes, or on several devices.

    Without `devices` the session is *inline*: the runtime's own, in this process, with everything of its API
    and at its speed. It is opened on the prepared model, whose weights are mapped, so that all processes of
    the machine hold them once. What the program sees (names, shapes, metadata, options) is the original
    model. Where that cannot be had, a plain session opens, and `why_plain` says why. So it is for a model
    that is not prepared yet: another process of low priority prepares it meanwhile.

    With `devices` each run is split over the workers of a `mcinfer.Master`; docs/ort.md lists what differs.

    It is also a context manager, and has `close`.

    Attributes:
        prepared: The key of the prepared model that an inline session maps; empty if it has its own copy.
        why_plain: Why an inline session has its own copy of the weights; empty if it has not.
        left_by: In a process that was forked, the one that opened the session.

    Args:
        path_or_bytes: The model: a path, or its bytes.
        sess_options: ``onnxruntime.SessionOptions``. What cannot act in workers raises, with `devices`.
        providers: Names of execution providers, first choice first, or pairs of a name and options. For
            workers, a card's provider means all cards, or that of its ``device_id``; the CPU's means the
            whole CPU.
        provider_options: Their options, if `providers` has names alone.
        devices: As in `mcinfer.Master`; None and ``"inline"`` are inline.
        prepare: For an inline session on a model that is not prepared yet, nor small (docs/weights.md).
            ``"background"``, the default: the session opens plain, and stays so; those that are opened later
            map the prepared model. ``"switch"``: it opens plain, and goes over to the prepared model between
            two runs; a run that has begun ends on the plain one. What the program has taken from the native
            session (an `IOBinding`, results, what `get_inputs` gave) stays valid, and keeps its memory.
            ``"wait"``: it opens once the model is prepared. Of any size: ``"always"`` waits, ``"never"`` is
            plain. With `devices` it is said by ``options``.
        more: With `devices`, further arguments of `mcinfer.Master`, by name; ``options`` are those of the
            engine, which `sess_options` override. The plain class's own ``enable_fallback`` and its like are
            taken too.

    Raises:
        Unsupported: Something that cannot act in workers; the text begins with its name.
        NoSuchFile: There is no such file; and other errors of ONNX Runtime as a plain session raises them.
        InvalidInputError: An argument is not known, or needs `devices`.
        McinferError: With `devices`, as `mcinfer.Master` and its ``start``.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    """Arguments that `mcinfer.ort.install` gives to all sessions."""

    prepared: str
    why_plain: str
    left_by: int
    _sess: Any
    _model_path: Any

    def __init__(
        self,
        path_or_bytes: "str | bytes | os.PathLike[str]",
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        devices: int | str | Sequence[int | str] | None = None,
        prepare: str | None = None,
        **more: Any,
    ) -> None:
        theirs = {*self._own_attributes()}
        given = noted.as_now({**self._defaults, **more})
        if devices is not None:
            given["devices"] = noted.as_now(devices)
        if prepare is not None:
            given["prepare"] = prepare
        self._inline = _is_inline(given.get("devices"))
        self._folder = given.pop(_FOLDER, None) or noted.working_folder()
        self._given = given
        self._wants_fallback = int(given.pop("enable_fallback", 1)) == 1
        self._was_open = self._is_closed = False
        self._opened: inline.Opened | None = None
        self._switches = self._stays = False
        self._before: ref[Any] | None = None  # the native session that was switched from
        self.prepared = self.why_plain = ""
        kept: dict[str, Any] = {}
        if self._inline:
            self._prepare = _inline_option(given)
            kept = {name: given[name] for name in _OF_PLAIN if name in given}
        else:
            self._check_for_workers(sess_options)
            if isinstance(path_or_bytes, str | os.PathLike):
                path_or_bytes = os.path.join(self._folder, path_or_bytes)
        kept["enable_fallback"] = 0
        try:
            super().__init__(path_or_bytes, sess_options, providers, provider_options, **kept)
            self._enable_fallback = self._wants_fallback
        except (ValueError, RuntimeError) as exc:
            falls_back = self._inline or isinstance(exc, UnknownProviderError)
            if not (self._wants_fallback and falls_back):
                raise
            print("*************** EP Error ***************")
            print(f"EP Error {exc} when using {providers}")
            print(f"Falling back to {self._fallback_providers} and retrying.")
            print("****************************************")
            try:
                self._create_inference_session(self._fallback_providers, None)
            except Exception as second:
                raise second from exc
        self._made = {*vars(self)} - theirs

    def _check_for_workers(self, options: Any) -> None:
        for name in _OF_PLAIN:
            if self._given.pop(name, None):
                raise Unsupported(f"{name}: workers take no such argument")
        if os.environ.get(_FROM_MODEL) == "1":
            raise Unsupported(f"{_FROM_MODEL}: workers read no options from a model")
        if options is not None and not isinstance(options, native.SessionOptions):
            raise TypeError(
                f"sess_options: got {type(options).__name__}, expected onnxruntime.SessionOptions"
            )

    def _own_attributes(self) -> dict[str, Any]:
        """The attributes that a subclass or the program has set."""
        made = {*vars(self).get("_made", ()), "_made", "left_by"}
        return {name: value for name, value in vars(self).items() if name not in made}

    @property
    def master(self) -> "Master":
        """The master whose workers run the model; this session closes it. An inline session has none."""
        master: Master = self._sess.master
        return master

    def close(self) -> None:
        """Let the model go, or end the workers. Safe to call again.

        Runs raise `mcinfer.ClosedError` from then on.
        """
        if not self._inline:
            if getattr(self, "_sess", None) is not None:
                self._sess.close()
            return
        _WITH_THREADS.discard(self)
        with _swapping:
            self._is_closed, self._opened = True, None
            for name in _OF_NATIVE:
                self.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A session is opened again as it was: by its path or bytes, options, providers and relative paths.

        With it go the attributes that a subclass or the program has set.
        """
        model = self._model_bytes
        if self._model_path is not None:
            model = os.path.join(self._folder, self._model_path)
        *chosen, disabled_optimizers = self._chosen
        given = {"enable_fallback": int(self._wants_fallback), _FOLDER: self._folder}
        if self._inline:
            given["disabled_optimizers"] = disabled_optimizers
        found: Any = super().__getstate__()
        slots = found[1] if isinstance(found, tuple) else {}
        return {
            "first": (model, self._options_of_opening(), *chosen),
            "given": {**self._given, **given},
            "own": (self._own_attributes(), slots),
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        attributes, slots = state["own"]
        self.__dict__.update(attributes)
        for name, value in slots.items():
            object.__setattr__(self, name, value)
        InferenceSession.__init__(self, *state["first"], **state["given"])

    # The plain class's runs, whose own arguments they are.

    def run(
        self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Run the model once, as ``onnxruntime.InferenceSession.run`` does.

        Args:
            output_names: Which outputs, in this order; None is all.
            input_feed: NumPy arrays, lists of numbers or ``OrtValue``, by the input's name. As with ONNX
                Runtime there are no inputs by position, nor tensors of PyTorch (``tensor.numpy()`` is an
                array); `mcinfer.Master.predict` takes both.
            run_options: ``onnxruntime.RunOptions``.

        Raises:
            InvalidArgument: An input is missing, unknown, or has another type or shape; and other errors
                of ONNX Runtime.
            ClosedError: The session is closed.
            McinferError: With `devices`, as `mcinfer.Master.predict`.
        """
        __tracebackhide__ = True  # the runtime's errors are no class of mcinfer's
        results: list[Any] = super().run(output_names, readable_feed(input_feed), run_options)
        return results

    def run_async(
        self,
        output_names: Any,
        input_feed: Mapping[str, Any],
        callback: Any,
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """`run` in another thread, which then calls ``callback(results, user_data, error)``.

        The text `error` is empty if the run has succeeded.
        """
        __tracebackhide__ = True
        feed = readable_feed(input_feed)
        super().run_async(output_names, feed, callback, user_data, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Run the model on what is bound, as ``onnxruntime.InferenceSession`` does."""
        __tracebackhide__ = True
        own: Any = iobinding._session
        # In this order: it may be switched in between.
        if self._switches and (own is self._sess or own is (self._before and self._before())):
            iobinding._session.run_with_iobinding(iobinding._iobinding, run_options)
        else:
            super().run_with_iobinding(iobinding, run_options)

    def create_ortvalue_from_shape_and_type(self, *arguments: Any, **named: Any) -> Any:
        """Make an ``OrtValue`` of this session's, which goes with its native session of now alone."""
        self._stays = True
        return super().create_ortvalue_from_shape_and_type(*arguments, **named)

    # As the plain class calls them.

    def _create_inference_session(
        self,
        providers: Sequence[Any] | None,
        provider_options: Sequence[dict[Any, Any]] | None,
        disabled_optimizers: Any = None,
    ) -> None:
        if disabled_optimizers is not None:
            disabled_optimizers = {*disabled_optimizers}
        asked = noted.as_now((providers, provider_options, disabled_optimizers))
        # As the plain class takes them, which has default options for what is false.
        self._open(asked, self._sess_options_initial or None)

    def _open_again(self) -> None:
        """Open what is left of a session in a process that was forked, as it was opened.

        Raises:
            ClosedError: A session on a device, whose driver does not work in a forked process; or what it was
                opened from is not there any more.
        """
        with _reopening:
            if "_sess" in self.__dict__:  # another thread was first
                return
            first = self.get_providers()[0]
            if first not in (CPU, NOTHING_HERE):
                raise ClosedError(
                    f"the session on {first} belongs to process {self.left_by}; process {os.getpid()} was "
                    "forked from it, and has to open one of its own"
                )
            try:
                self._open(self._chosen, self._options_of_opening())
            except BaseException:
                self.__dict__.pop("_sess", None)  # opened, and found to be of other files
                raise

    def _open(self, asked: tuple[Any, Any, Any], options: Any) -> None:
        state = noted.state(options)
        if self._inline:
            self._open_inline(asked, options)
        else:
            from mcinfer.ort.workers import open_session

            self._fallback_providers = ["CPUExecutionProvider"]
            model = self._model_bytes if self._model_path is None else self._model_path
            self._take(open_session(model, self._folder, options, self._given, asked[:2]))
        self._chosen = asked
        # What is not known of the program's object, the native session's copy of it has.
        self._opened_with = self._sess_options if options is not None and state is None else state

    def _options_of_opening(self) -> Any:
        """The options as the runtime took them: the program's object may have changed since."""
        found = self._opened_with
        return noted.rebuilt(*found) if isinstance(found, tuple) else found

    def _open_inline(self, asked: tuple[Any, Any, Any], options: Any) -> None:
        """Open the prepared model where that is the same, or the model itself."""
        path, (providers, _, disabled_optimizers) = self._model_path, asked
        absolute = None if path is None else os.path.join(self._folder, os.fsdecode(path))
        if options is not None and not isinstance(options, native.SessionOptions):
            super()._create_inference_session(*asked)  # whose error it is
        held, failure, left = None, False, self._left()
        # What was plain for the time being need not be plain here.
        leaves = left is not None and (left.held is not None or self.why_plain != inline.COMING)
        model = self._model_bytes if absolute is None else absolute
        why = "disabled_optimizers or read_config_from_model was given"
        if left is not None and leaves:
            why, held = self.why_plain, left.again(self.left_by)
        elif not (disabled_optimizers or self._read_config_from_model):
            try:
                why, held = inline.prepared(model, self._folder, options, providers, self._prepare)
            except (McinferError, OSError, ValueError, TypeError) as exc:
                why = str(exc)  # what is wrong with the model, the plain class says in its words
        if held is not None:
            from mcinfer.engines._onnxruntime import FAILED
            from mcinfer.model_cache.cache import MODEL_FILE

            failed: tuple[type[Exception], ...] = (*FAILED, McinferError)
            try:
                # It is optimised and lies beside its weights.
                changed = noted.copied(options, without=FOLDER_KEY)
                changed.graph_optimization_level = native.GraphOptimizationLevel.ORT_DISABLE_ALL
                self._open_native(str(held.folder / MODEL_FILE), changed, asked)
            except failed as exc:
                if leaves:
                    raise
                held.close()
                held, failure, why = None, True, f"the prepared model cannot be opened: {exc}"
        opened = left
        if not leaves and (inline.has_threads(options) or self._prepare == "switch"):
            files = None if held else inline.files_of(model, self._folder, options)
            opened = inline.Opened(held=held, files=files)
        if held is None:
            # Later on, the program's working folder may be another one.
            self._open_native(absolute if self._was_open else path, options, asked)
            level = logging.WARNING if failure else logging.INFO
            _log.log(level, "%s: its weights are its own: %s", _name(absolute), why)
            self.prepared, self.why_plain = "", why
        else:
            self._sess_options = noted.copied(options)
            held.keep_for(self._sess)  # bindings have the native session too
            give_back_freed_memory()
            _log.info("%s: its weights are those of the entry %s", _name(absolute), held.folder)
            self.prepared, self.why_plain = held.key, ""
        if left is not None and left.held is None:
            left.check_files(self.left_by)
        self._was_open, self._opened = True, opened
        if why == inline.COMING and self._prepare == "switch":
            self._switches = True
            given = (ref(self), ref(self._sess))
            threading.Thread(
                target=_await_prepared, args=given, name="mcinfer-switch", daemon=True
            ).start()
        if inline.has_threads(options):
            _WITH_THREADS.setdefault(self, None)

    def _switch(self, before: Any) -> bool:
        """Go over from a native session to the prepared model, if that is there.

        The runtime keeps the old one for runs that have begun, also those of `run_async`.

        Returns:
            Whether there is nothing to wait for any more.
        """
        path, opened = self._model_path, self._opened
        providers, provider_options, _ = self._chosen
        model = self._model_bytes if path is None else os.path.join(self._folder, os.fsdecode(path))
        options, changed = self._options_of_opening(), "its files have changed since it was opened"
        if opened is None:  # it was closed
            return True
        why, held, found = changed, None, {}
        if opened.is_unchanged():
            why, held = inline.prepared(model, self._folder, options, providers, "switch")
        if held is not None:
            with closing(held), _switching:
                given: dict[str, Any] = {"enable_fallback": 0, _FOLDER: self._folder}
                given |= {"devices": "inline", "prepare": "wait"}
                fresh = InferenceSession(model, options, providers, provider_options, **given)
            names = (*_OF_NATIVE, "_sess_options", "_opened", "prepared", "why_plain")
            found = {name: vars(fresh)[name] for name in names}
            why = fresh.why_plain if opened.is_unchanged() else changed
        if why:
            if why != inline.COMING:
                _log.warning("%s: it stays plain: %s", _name(path), why)
                self.why_plain = why
            return why != inline.COMING
        with _swapping:
            if not self._stays and vars(self).get("_sess") is before:  # else closed, or opened anew
                self.__dict__.update(found, _before=ref(before))  # one step for other threads
        return True

    def _left(self) -> "inline.Opened | None":
        """What is to be opened again, in a process that was forked."""
        return self._opened if "left_by" in self.__dict__ and "_sess" not in self.__dict__ else None

    def _open_native(self, path: str | None, options: Any, asked: tuple[Any, Any, Any]) -> None:
        """Have the plain class open a file, or the bytes; `_model_path` stays what the program gave."""
        given, self._model_path, self._sess_options = self._model_path, path, options
        try:
            super()._create_inference_session(*asked)
        finally:
            self._model_path = given

    def __getattr__(self, name: str) -> Any:
        """What is not there: after `close`, or in a process that was forked, where it is opened again."""
        if name in _OF_NATIVE and self.__dict__.get("_is_closed"):
            raise ClosedError("the session is closed")
        if name == "_sess" and "left_by" in self.__dict__:
            self._open_again()
            return self._sess
        if name == "master":
            raise AttributeError("master: this session is inline, expected one with devices=")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _take(self, session: Any) -> None:
        """Take from the session of workers what the plain class takes from one."""
        self._sess, self._sess_options = session, session.session_options
        for name in _SAID:
            setattr(self, f"_{name}", getattr(session, name))
        self._providers = session.get_providers()
        self._provider_options = session.get_provider_options()
        self._profiling_start_time_ns = session.get_profiling_start_time_ns

    def _reset_session(self, providers: Any, provider_options: Any) -> None:
        """Open new workers, for `set_providers`, and close the others once these are ready."""
        if self._inline:
            if self._switches:
                with _swapping:
                    self._sess = None
            super()._reset_session(providers, provider_options)
        else:
            before = self._sess
            self._create_inference_session(providers, provider_options)
            before.close()

    @classmethod
    def _from_initialized_c_session(cls, sess: Any) -> Any:
        return PlainSession._from_initialized_c_session(sess)


def _name(path: str | None) -> str:
    """How messages call a model."""
    if path is not None:
        return os.path.basename(path)
    from mcinfer.private import IN_MEMORY

    return IN_MEMORY


def _is_inline(devices: int | str | Sequence[int | str] | None) -> bool:
    if devices is None:
        return True
    from mcinfer.config import INLINE

    return devices in (INLINE, [INLINE])


def _inline_option(given: Mapping[str, Any]) -> str:
    """The argument `prepare` of an inline session; refuses what only workers have."""
    for name in given.keys() - {"devices", "prepare", *_OF_PLAIN}:
        from mcinfer.ort.workers import MASTER_OPTIONS

        if name in MASTER_OPTIONS:
            raise InvalidInputError(
                f"{name}: got such an argument, which is for workers alone: expected devices= beside it"
            )
        # A program runs on that passes it to ONNX Runtime's class, which says nothing of it.
        warnings.warn(f"{name}: an unknown argument of InferenceSession, not used", stacklevel=3)
    prepare: str = given.get("prepare", inline.PREPARE[0])
    if prepare not in inline.PREPARE:
        raise InvalidInputError(f"prepare: got {prepare!r}, expected one of {[*inline.PREPARE]}")
    return prepare


# Going over to the prepared model.


_swapping = Lock()
"""Held for a moment, by who replaces or closes the native session of a session."""

_switching = threading.Lock()
"""Held while a prepared model is opened to go over to it: what ends the interpreter waits for that."""

atexit.register(lambda: _switching.acquire(timeout=_LAST_SECONDS))


def _await_prepared(found: "ref[InferenceSession]", plain: "ref[Any]") -> None:
    """A thread's work: have a session go over to the prepared model once that is there."""
    is_over, seconds = False, 0.0
    while not is_over:
        time.sleep(max(_LOOK_SECONDS, seconds / _LOOK_SHARE))
        begin = time.monotonic()
        session, before = found(), plain()
        if session is None or before is None:
            return
        try:
            is_over = session._switch(before)
        except Exception as exc:  # of the model, the runtime or the machine: the session serves on
            # As text: a record that is kept would hold the session, by the error's frames.
            _log.warning("a session stays plain: %s", str(exc))
            return
        del session, before  # the one may be garbage now, and the other is
        seconds = time.monotonic() - begin
    give_back_freed_memory()


# In processes that are forked.

_WITH_THREADS: noted.ByIdentity[None] = noted.ByIdentity()
"""The sessions of this process that have threads, which a process that is forked opens again."""

# Reentrant: a signal's handler may run another session meanwhile.
_reopening = Lock()


def _leave_sessions() -> None:
    global _reopening, _swapping, _switching
    # Another thread may have held them.
    _reopening, _swapping, _switching = Lock(), Lock(), threading.Lock()
    for session in _WITH_THREADS.objects():
        _WITH_THREADS.discard(session)
        left = session.__dict__.pop("_sess", None)
        if left is not None:
            # It is never destroyed: that would wait for threads that there are not.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
            session.left_by = os.getppid()


os.register_at_fork(after_in_child=_leave_sessions)


# In the place of ONNX Runtime's session, for programs that cannot be edited.

_NAME = "InferenceSession"
_CHANGING = Lock()  # of a signal's handler, too


def install(**defaults: Any) -> None:
    """Put `InferenceSession` in the place of ``onnxruntime.InferenceSession``, until `uninstall`.

    Modules that import the name from now on get mcinfer's class, and so do ONNX Runtime's own modules that
    have it already. Call it before the program's modules are imported: a module of another package that has
    taken the name keeps the plain class. mcinfer's own plain sessions stay plain.

    Args:
        defaults: Arguments of every session that does not give its own: ``devices``, and further arguments
            of `mcinfer.Master`. Without ``devices`` the sessions are inline. A second call replaces those of
            the first.
    """
    with _CHANGING:
        InferenceSession._defaults = defaults
        _replace(PlainSession, InferenceSession)


def uninstall() -> None:
    """Undo `install`; sessions that are open stay as they are. Safe to call again."""
    with _CHANGING:
        InferenceSession._defaults = {}
        _replace(InferenceSession, PlainSession)


def _replace(old: type, new: type) -> None:
    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package == "onnxruntime" and vars(module).get(_NAME) is old:
            setattr(module, _NAME, new)
