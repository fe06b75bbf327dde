"""`InferenceSession`: ONNX Runtime's Python class, inline on the prepared model, or on workers with devices.

::

    InferenceSession(model)              a native session in this process (`mcinfer.ort.inline`)
    InferenceSession(model, devices=2)   runs go to worker processes (`mcinfer.ort.workers`)
"""

import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from onnxruntime.capi import onnxruntime_inference_collection as collection
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.errors import ClosedError, InvalidInputError
from mcinfer.ort import inline
from mcinfer.ort import options as noted
from mcinfer.ort.errors import Unsupported
from mcinfer.ort.providers import UnknownProviderError

if TYPE_CHECKING:  # an inline session needs no workers
    from mcinfer.master import Master

_FROM_MODEL = "ORT_LOAD_CONFIG_FROM_MODEL"
"""The runtime's variable for options that lie in a model's metadata."""

_FOLDER = "_folder"
"""A session's argument for one that is opened again: the folder of its relative paths."""

_OF_PLAIN = ("enable_fallback", "disabled_optimizers", "read_config_from_model")
"""Arguments of the plain class that its signature does not name."""

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
        given = {**self._defaults, **more}
        if devices is not None:
            given["devices"] = devices
        self._inline = _is_inline(given.get("devices"))
        self._folder = given.pop(_FOLDER, None) or noted.working_folder()
        self._given = given
        self._chosen = (providers, provider_options)
        self._wants_fallback = int(given.pop("enable_fallback", 1)) == 1
        self.prepared = ""
        self.why_plain = ""
        if self._inline:
            self._prepare = _inline_option(given)
            kept = {name: given[name] for name in _OF_PLAIN if name in given}
            kept["enable_fallback"] = int(self._wants_fallback)
            super().__init__(path_or_bytes, sess_options, providers, provider_options, **kept)
        else:
            self._open_on_workers(path_or_bytes, sess_options)

    prepared: str
    """The key of the prepared model that an inline session maps; empty if it has its own copy."""

    why_plain: str
    """Why an inline session has its own copy of the weights; empty if it has not."""

    def _open_on_workers(
        self, path_or_bytes: "str | bytes | os.PathLike[str]", options: Any
    ) -> None:
        for name in _OF_PLAIN[1:]:
            if self._given.pop(name, None):
                raise Unsupported(f"{name}: workers take no such argument")
        if os.environ.get(_FROM_MODEL) == "1":
            raise Unsupported(f"{_FROM_MODEL}: workers read no options from a model")
        if options is not None and not isinstance(options, native.SessionOptions):
            raise TypeError(
                f"sess_options: got {type(options).__name__}, expected onnxruntime.SessionOptions"
            )
        if isinstance(path_or_bytes, str | os.PathLike):
            path_or_bytes = os.path.join(self._folder, path_or_bytes)
        providers, provider_options = self._chosen
        try:
            super().__init__(path_or_bytes, options, providers, provider_options, enable_fallback=0)
        except UnknownProviderError as exc:
            if not self._wants_fallback:
                raise
            # As the plain class, which has lost the constructor's other cases of it to McinferErrors.
            print("*************** EP Error ***************")
            print(f"EP Error {exc} when using {providers}")
            print(f"Falling back to {self._fallback_providers} and retrying.")
            print("****************************************")
            self._chosen = (self._fallback_providers, None)
            self._create_inference_session(self._fallback_providers, None)
        self._enable_fallback = self._wants_fallback

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
        inline.forget(self)
        self._sess = _Closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A session is opened again from its path or bytes, with the same options and relative paths."""
        options = self._sess_options_initial
        set_options = None if options is None else noted.packed(options)
        model = self._model_bytes
        if self._model_path is not None:
            model = os.path.join(self._folder, self._model_path)
        more = {"enable_fallback": int(self._wants_fallback), _FOLDER: self._folder}
        return _reopened, (model, set_options, *self._chosen, {**self._given, **more})

    # As the plain class calls them.

    def _create_inference_session(
        self,
        providers: Sequence[Any] | None,
        provider_options: Sequence[dict[Any, Any]] | None,
        disabled_optimizers: Any = None,
    ) -> None:
        if self._inline:
            self._open_inline(providers, provider_options, disabled_optimizers)
            return
        from mcinfer.ort.workers import Opening

        self._fallback_providers = ["CPUExecutionProvider"]
        model = self._model_bytes if self._model_path is None else self._model_path
        opening = Opening(
            model=model,
            folder=self._folder,
            options=self._sess_options_initial,
            given=self._given,
        )
        self._take(opening.open(providers, provider_options))

    def _open_inline(
        self,
        providers: Sequence[Any] | None,
        provider_options: Sequence[dict[Any, Any]] | None,
        disabled_optimizers: Any,
    ) -> None:
        """Open the prepared model where that is the same, or the model itself."""
        path, options = self._model_path, self._sess_options_initial
        wanted = inline.Wanted(
            model=self._model_bytes if path is None else path,
            folder=self._folder,
            options=options,
            providers=providers,
            prepare=self._prepare,
            changed=bool(disabled_optimizers) or self._read_config_from_model,
        )
        found = inline.look_up(wanted)
        if found.held is not None:
            self._model_path, self._sess_options = found.path, found.options
            try:
                super()._create_inference_session(providers, provider_options)
            except Exception as exc:  # of any class: it is the runtime's
                found = found.given_up(wanted, exc)
                self._sess_options = options
            else:
                self._sess_options = noted.copied(options)
            finally:
                self._model_path = path
        if found.held is None:
            super()._create_inference_session(providers, provider_options, disabled_optimizers)
        self.prepared, self.why_plain = found.key, found.why_plain
        inline.note(self, found)

    def __getattr__(self, name: str) -> Any:
        """A process that was forked opens the session again when it is first used there."""
        if name == "_sess" and inline.is_left(self):
            inline.reopen(self)
            return self._sess
        if name == "master":
            raise AttributeError("master: this session is inline, expected one with devices=")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _take(self, session: Any) -> None:
        """Take from the session of workers what the plain class takes from one."""
        self._sess = session
        self._sess_options = session.session_options
        self._overridable_initializers = session.overridable_initializers
        for name in (
            *("inputs_meta", "outputs_meta", "input_meminfos", "output_meminfos"),
            *("input_epdevices", "model_meta"),
        ):
            setattr(self, f"_{name}", getattr(session, name, None))
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
        self._chosen = (providers, provider_options)

    @classmethod
    def _from_initialized_c_session(cls, sess: Any) -> Any:
        return PlainSession._from_initialized_c_session(sess)


class _Closed:
    """In the place of a native session that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("the session is closed")


def _is_inline(devices: int | str | Sequence[int | str] | None) -> bool:
    if devices is None:
        return True
    from mcinfer.config import INLINE

    return devices in (INLINE, [INLINE])


def _inline_option(given: dict[str, Any]) -> str:
    """`EngineOptions.prepare` of an inline session; refuses what only workers have."""
    for name in given:
        if name not in ("devices", "options", *_OF_PLAIN):
            raise InvalidInputError(
                f"{name}: got such an argument, which is for workers alone: expected devices= beside it"
            )
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


def _reopened(
    model: str | bytes,
    set_options: tuple[Any, Any] | None,
    providers: Any,
    provider_options: Any,
    given: dict[str, Any],
) -> InferenceSession:
    options = None if set_options is None else noted.rebuilt(*set_options)
    return InferenceSession(model, options, providers, provider_options, **given)


# In the place of ONNX Runtime's session, for programs that cannot be edited.

_NAME = "InferenceSession"
_CHANGING = threading.Lock()


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
