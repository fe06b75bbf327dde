"""`InferenceSession`: ONNX Runtime's Python class, inline on the prepared model, or on workers with devices.

::

    InferenceSession(model)              a native session in this process (`mcinfer.ort.inline`)
    InferenceSession(model, devices=2)   runs go to worker processes (`mcinfer.ort.workers`)

The threads of a session are gone in a process that was forked. ONNX Runtime 1.32 then runs on one core, and
hangs in runs of the parallel mode or at the process's end. So an inline session with threads is left there as
it is, and opened again when it is first used: from the entry that this process holds as well, or, if it is
plain, from its files as long as they are unchanged.
"""

import ctypes
import logging
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from onnxruntime.capi import onnxruntime_inference_collection as collection
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.errors import ClosedError, InvalidInputError, McinferError
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

_OF_PLAIN = ("disabled_optimizers", "read_config_from_model")
"""Arguments of the plain class that its signature does not name, beside ``enable_fallback``."""

_log = logging.getLogger("mcinfer.ort")

PlainSession = collection.InferenceSession
"""ONNX Runtime's own class, whatever `mcinfer.ort.install` puts in its place."""


class InferenceSession(PlainSession):  # type: ignore[misc,valid-type] # no types
    """``onnxruntime.InferenceSession`` with one copy of the weights for all processes, or on several devices.

    Without `devices` the session is *inline*: the runtime's own, in this process, with everything of its API
    and at its speed. It is opened on the prepared model, whose weights are mapped, so that all processes of
    the machine hold them once; the first one prepares the model in a child process. What the program sees
    (names, shapes, metadata, options) is the original model. Where that cannot be had, a plain session
    opens, and `why_plain` says why.

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
        more: With `devices`, further arguments of `mcinfer.Master`, by name; ``options`` are those of the
            engine, which `sess_options` override. Inline, ``options`` may say ``prepare`` alone. The plain
            class's own ``enable_fallback`` and its like are taken too.

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
        **more: Any,
    ) -> None:
        theirs = {*self._own_attributes()}
        given = noted.as_now({**self._defaults, **more})
        if devices is not None:
            given["devices"] = noted.as_now(devices)
        self._inline = _is_inline(given.get("devices"))
        self._folder = given.pop(_FOLDER, None) or noted.working_folder()
        self._given = given
        self._wants_fallback = int(given.pop("enable_fallback", 1)) == 1
        self._was_open = self._is_closed = False
        self._opened: inline.Opened | None = None
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
        model = self._model_bytes if absolute is None else absolute
        why = "disabled_optimizers or read_config_from_model was given"
        if left is not None:
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
                if left is not None:
                    raise
                held.close()
                held, failure, why = None, True, f"the prepared model cannot be opened: {exc}"
        opened = left
        if left is None and inline.has_threads(options):
            files = None if held else inline.files_of(model, self._folder, options)
            opened = inline.Opened(held=held, files=files)
        if held is None:
            # Later on, the program's working folder may be another one.
            self._open_native(absolute if self._was_open else path, options, asked)
            if left is not None:
                left.check_files(self.left_by)
            level = logging.WARNING if failure else logging.INFO
            _log.log(level, "%s: its weights are its own: %s", _name(absolute), why)
            self.prepared, self.why_plain = "", why
        else:
            self._sess_options = noted.copied(options)
            held.keep_for(self._sess)  # bindings have the native session too
            give_back_freed_memory()
            _log.info("%s: its weights are those of the entry %s", _name(absolute), held.folder)
            self.prepared, self.why_plain = held.key, ""
        self._was_open, self._opened = True, opened
        if inline.has_threads(options):
            _WITH_THREADS.setdefault(self, None)

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


def _inline_option(given: dict[str, Any]) -> str:
    """`EngineOptions.prepare` of an inline session; refuses what only workers have."""
    for name in given.keys() - {"devices", "options", *_OF_PLAIN}:
        from mcinfer.ort.workers import MASTER_OPTIONS

        if name in MASTER_OPTIONS:
            raise InvalidInputError(
                f"{name}: got such an argument, which is for workers alone: expected devices= beside it"
            )
        # A program runs on that passes it to ONNX Runtime's class, which says nothing of it.
        warnings.warn(f"{name}: an unknown argument of InferenceSession, not used", stacklevel=3)
    if "options" not in given:
        return "auto"
    from mcinfer.config import EngineOptions

    options = given["options"]
    if not isinstance(options, EngineOptions) or options != EngineOptions(prepare=options.prepare):
        raise InvalidInputError(
            f"options: got {options!r}, expected EngineOptions(prepare=…) alone: sess_options say the rest "
            "without devices="
        )
    return options.prepare


# In processes that are forked.

_WITH_THREADS: noted.ByIdentity[None] = noted.ByIdentity()
"""The sessions of this process that have threads, which a process that is forked opens again."""

# Reentrant: a signal's handler may run another session meanwhile.
_reopening = threading.RLock()


def _leave_sessions() -> None:
    global _reopening
    _reopening = threading.RLock()  # another thread may have held it
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
_CHANGING = threading.RLock()  # of a signal's handler, too


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
