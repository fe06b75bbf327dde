"""Sessions whose runs go to the workers of a `mcinfer.Master`: `mcinfer.ort.InferenceSession` with devices.

::

    InferenceSession                 onnxruntime's Python class: checks, fallbacks, documentation stay its own
      └── _sess: WorkerSession       onnxruntime's native class, opened with a face (`mcinfer.ort.face`): says
            │                        what the model's own session would; runs go to
            └── Master               the workers, which have the model

`WorkerSession` overrides each native method that runs the model, so ONNX Runtime's own Python layer and
programs that reach for ``_sess`` run on the workers too. A session closes its workers when it is closed, when
it is garbage-collected, and at the interpreter's end.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Self

import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_inference_collection as collection
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.config import EngineOptions, parse_devices
from mcinfer.errors import BuildError, InvalidInputError, McinferError, is_refusal
from mcinfer.machine import whole_cpus
from mcinfer.master import Master
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.ort import options as noted
from mcinfer.ort import values
from mcinfer.ort.errors import (
    InvalidBinding,
    InvalidValue,
    Unsupported,
    invalid_argument,
    native_error,
    terminated,
    words,
)
from mcinfer.ort.face import face, tiny_session
from mcinfer.ort.providers import ProviderDevices, choose
from mcinfer.private import ModelInMemory, PrivateFolder
from mcinfer.requests.waiting_threads import WaitingThreads

__tracebackhide__ = is_refusal

Tensors = dict[str, values.Tensor]

MASTER_OPTIONS = frozenset(inspect.signature(Master).parameters) - {"model", "engine"}

_WIDE_COLON = ": "
"""Before an unknown output in the runtime's texts of `run_async` and bindings; elsewhere it has no space."""

_RECORDS_ASSIGNMENT = "session.record_ep_graph_assignment_info"


class WorkerSession(native.InferenceSession):  # type: ignore[misc] # no types
    """A native session that describes a model and runs it on a master's workers.

    Args:
        master: A started master; this session closes it.
        options: The program's ``SessionOptions``, if any.
        folder: Has files of the model, and goes with this session; None if there is none.
    """

    def __init__(
        self, master: Master, options: Any = None, folder: PrivateFolder | None = None
    ) -> None:
        described = master.description
        own = native.SessionOptions()
        own.graph_optimization_level = native.GraphOptimizationLevel.ORT_DISABLE_ALL
        own.intra_op_num_threads = own.inter_op_num_threads = 1
        if options is not None:
            own.log_severity_level = options.log_severity_level
        super().__init__(own, face(master.inputs, master.outputs, described), False, False)
        self.initialize_session([], [], set())
        self.master = master
        self._folder = folder
        self._options = options or native.SessionOptions()
        entries = noted.config_entries(options)
        self._records_assignment = entries.get(_RECORDS_ASSIGNMENT) == "1"
        self.inputs = {spec.name: spec for spec in master.inputs}
        self.outputs = {spec.name: spec for spec in master.outputs}
        self._overridable: list[Any] = []
        if (
            spare := described.overridable
        ):  # the runtime describes them as inputs of a face of their own
            self._overridable = tiny_session(face(spare, spare)).inputs_meta
        self._all = [*self.outputs]
        self._threads = WaitingThreads()

    def close(self) -> None:
        """End the workers; runs in flight fail with `mcinfer.ClosedError`. Safe to call again."""
        try:
            self.master.close()
        finally:
            self._threads.close(wait=False)
            if self._folder is not None:
                self._folder.close()

    # What the model's own session would say beside its face.

    @property
    def session_options(self) -> Any:
        return self._options

    @property
    def overridable_initializers(self) -> list[Any]:
        return self._overridable

    def get_providers(self) -> list[str]:
        return list(self.master.statistics().workers[0].providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {k: dict(v) for k, v in self.master.description.provider_options.items()}

    # Runs, as the native class has them.

    def run(
        self, output_names: Iterable[str], input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[NDArray[Any]]:
        names, feed = self._wanted(output_names), self._fed(input_feed)
        answer = self._answer(feed, names, _begun(run_options))
        return [answer[name] for name in names]

    def run_async(
        self,
        output_names: Iterable[str],
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], object],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Run in another thread, which reads the arrays then.

        As in the runtime, what is no tensor at all raises here, and the callback hears of all else.
        """
        names: list[str] = []
        feed: Tensors = {}
        unfit = ""
        try:
            names, feed = self._wanted(output_names, _WIDE_COLON), self._fed(input_feed)
        except InvalidValue:
            raise
        except McinferError as exc:
            unfit = words(exc)
        begun = None if unfit else _begun(run_options)

        def run() -> None:
            results: list[Any] = []
            failure = unfit
            try:
                if not unfit:
                    answer = self._answer(feed, names, begun)
                    results = [answer[name] for name in names]
            except Exception as exc:  # the callback gets it
                failure = words(exc)
            callback(results, user_data, failure)

        self._threads.submit(run).add_done_callback(_report)

    def run_with_ort_values(
        self, input_feed: Mapping[str, Any], output_names: Iterable[str], run_options: Any = None
    ) -> Any:
        names, feed = self._wanted(output_names), self._fed(input_feed)
        answer = self._answer(feed, names, _begun(run_options))
        return self._vector(answer, names, native.OrtValueVector())

    def run_with_ortvaluevector(
        self,
        run_options: Any,
        feed_names: Sequence[str],
        feeds: Any,
        fetch_names: Iterable[str],
        fetches: Any,
        fetch_devices: Sequence[Any],
    ) -> None:
        names = self._wanted(fetch_names)
        if len(feeds) != len(feed_names):
            raise InvalidBinding(f"feeds: got {len(feeds)}, expected {len(feed_names)}")
        if len(fetches):
            raise Unsupported(
                f"run_with_ortvaluevector: got {len(fetches)} fetches, expected an empty vector"
            )
        cards = [values.card_of(device, "fetch_devices") for device in fetch_devices]
        place = values.outputs_on(cards, [self.outputs[name] for name in names])
        if any(place != str(card or "host") for card in cards):
            raise Unsupported("fetch_devices: got several devices, expected one for all outputs")
        feed = self._fed({name: feeds[i] for i, name in enumerate(feed_names)})
        self._vector(self._answer(feed, names, _begun(run_options), place), names, fetches)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        if not isinstance(iobinding, values.Binding) or not iobinding.is_noted:
            raise InvalidBinding(
                "the binding was made for another session, or before mcinfer.ort was imported"
            )
        outputs = iobinding.bound_outputs
        if not outputs:
            raise InvalidBinding("At least one output should be requested.")
        try:
            names = self._wanted(outputs, _WIDE_COLON)
            cards = values.output_cards(outputs, self.outputs)
            place = values.outputs_on(cards, [self.outputs[name] for name in names])
            feed = {
                name: values.bound_tensor(what, self._input(name))
                for name, what in iobinding.bound_inputs.items()
            }
            answer = self._answer(feed, names, _begun(run_options), place)
        except InvalidInputError as exc:
            raise InvalidBinding(f"Error in execution: {words(exc)}") from exc
        iobinding.deliver(answer, self.outputs)

    # What a session of workers cannot say or do.

    def get_provider_graph_assignment_info(self) -> Any:
        if not self._records_assignment:
            return super().get_provider_graph_assignment_info()  # the runtime's error
        raise Unsupported(
            "get_provider_graph_assignment_info: workers do not report it; open a plain session for it"
        )

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        if options:
            raise Unsupported(f"set_ep_dynamic_options: got {[*options]}, which no worker takes")

    def set_tuning_results(self, results: Sequence[Any], _error_on_invalid: bool = False) -> None:
        if results:
            raise Unsupported("set_tuning_results: got some, which no worker takes")

    # A run.

    def _wanted(self, output_names: Iterable[str], colon: str = ":") -> list[str]:
        if output_names is self._all:
            return self._all
        if isinstance(output_names, str | bytes) or not isinstance(output_names, Iterable):
            raise TypeError(f"output_names: got {output_names!r}, expected a list of names")
        names = [*output_names]
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"output_names: got {name!r}, expected a list of names")
            if name not in self.outputs:
                raise invalid_argument(f"Invalid output name{colon}{name}")
        return names

    def _input(self, name: str) -> Any:
        spec = self.inputs.get(name)
        if spec is not None:
            return spec
        if any(name == argument.name for argument in self._overridable):
            raise Unsupported(
                f"{name}: an initialiser that is an input too, which a run cannot override here; see "
                "EngineOptions(variable_weights=…) and Master.update_weights"
            )
        raise invalid_argument(f"Invalid input name: {name}")

    def _fed(self, feed: Mapping[str, Any]) -> Tensors:
        return {name: values.fed(value, self._input(name)) for name, value in feed.items()}

    def _vector(self, answer: Mapping[str, Any], names: Sequence[str], vector: Any) -> Any:
        for name in names:
            vector.push_back(values.value_of(answer[name], self.outputs[name]))
        return vector

    def _answer(
        self, feed: Tensors, names: list[str], begun: "_Run | None", outputs_on: str = "host"
    ) -> dict[str, Any]:
        outputs = None if names == self._all else [*dict.fromkeys(names)]
        try:
            if begun is None:
                return self.master.predict(feed, outputs=outputs, outputs_on=outputs_on)
            with begun as run:
                return self.master._predict_cancellable(feed, outputs, outputs_on, run.offer)
        except CancelledError:
            raise terminated() from None
        except McinferError as exc:
            raised = native_error(exc)
            if raised is exc:
                raise
            raise raised from exc


def _report(done: "Future[None]") -> None:
    """Show what a callback raised, as a thread shows what it raised: no caller waits for it."""
    exc = done.exception()
    if exc is not None:
        kind = (type(exc), exc, exc.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(kind))


# Runs that their options end. The runtime's runs look at ``RunOptions.terminate`` from time to time; here,
# the assignment itself ends them.

_RUNNING: "noted.ByIdentity[set[_Run]]" = noted.ByIdentity()
"""The runs that are not over, by the options that they were given."""


def note_terminations() -> None:
    """Have an assignment to ``RunOptions.terminate`` end the runs that were given these options."""
    terminate = native.RunOptions.terminate

    def assign(options: Any, value: bool) -> None:
        terminate.fset(options, value)
        if value:
            # Other threads add and take away runs. The interpreter copies a set in one step.
            for run in (_RUNNING.get(options) or set()).copy():
                run.end()

    native.RunOptions.terminate = property(terminate.fget, assign, None, terminate.__doc__)


def _begun(options: Any) -> "_Run | None":
    """A run that these options end; None without options."""
    if options is None:
        return None
    if not isinstance(options, native.RunOptions):
        raise TypeError(f"run_options: got {options!r}, expected onnxruntime.RunOptions")
    noted.check_run_options(options)
    return _Run(options)


class _Run:
    """A run that its options end at any moment from its making, which may be in another thread, to its end.

    Each of two threads first writes what the other one reads then, so that one of them cancels.
    """

    def __init__(self, options: Any) -> None:
        self._cancels: list[Callable[[], object]] = []
        self._ended = False
        self._others = _RUNNING.setdefault(options, set())
        self._others.add(self)
        if options.terminate:
            self._ended = True

    def __enter__(self) -> Self:
        if self._ended:
            self._others.discard(self)
            raise CancelledError
        return self

    def __exit__(self, *_: object) -> None:
        self._others.discard(self)

    def offer(self, cancel: Callable[[], object]) -> None:
        """Take what cancels the run from now on."""
        self._cancels.append(cancel)
        if self._ended:
            cancel()

    def end(self) -> None:
        self._ended = True
        for cancel in self._cancels:
            cancel()


# Opening.


def open_session(
    model: str | bytes, folder: str, options: Any, given: Mapping[str, Any], chosen: tuple[Any, Any]
) -> WorkerSession:
    """Start the workers.

    Args:
        model: A path, or the model's bytes.
        folder: The folder of relative paths; empty if there is none.
        options: The program's ``SessionOptions``, if any.
        given: Arguments of `Master`, by name.
        chosen: The providers and their options, as the program gave them.

    Raises:
        Unsupported: Something that cannot act in workers; the text begins with its name.
        McinferError: As `Master` and its ``start``, by ONNX Runtime's classes where these fit.
    """
    providers, provider_options = chosen
    choice = choose(providers or noted.named_providers(options) or providers, provider_options)
    weights: dict[str, NDArray[Any]] = {}
    with ExitStack() as opened:
        try:
            passed = _passed(options, given, choice, folder)
            weights = passed.weights
            files: PrivateFolder | None = None
            if passed.files:
                files = opened.enter_context(PrivateFolder())
                _write(passed.files, str(files.opened))
            place = folder if isinstance(model, bytes) else ""
            place = files.path if files is not None else place
            if place:  # of the files of a model that is given as bytes
                entries = {FOLDER_KEY: place, **passed.engine.session_config}
                passed = replace(passed, engine=replace(passed.engine, session_config=entries))
            others = {name: value for name, value in given.items() if name != "options"}
            others["devices"] = choice.places(given["devices"])
            master = Master(model, options=passed.engine, **others)
            opened.enter_context(closing(master.start()))
            if weights:
                master.update_weights(weights)
            if passed.optimised:
                _save_optimised(model, (choice.devices or ["cpu:0"])[0], passed)
            session = WorkerSession(master, options, files)
        except McinferError as exc:
            raised = native_error(exc)
            if weights and isinstance(exc, BuildError):
                raised = Unsupported(
                    "SessionOptions.add_initializer(), SessionOptions.add_external_initializers(): got "
                    f"values for {[*weights]}, which workers take only for weights that the model has and "
                    f"allows to replace: {exc}"
                )
            if raised is exc:
                raise
            raise raised from exc
        opened.pop_all()
    return session


def _passed(
    options: Any, given: Mapping[str, Any], choice: ProviderDevices, folder: str
) -> noted.Passed:
    """What the workers get of the options."""
    if unknown := given.keys() - MASTER_OPTIONS:
        raise InvalidInputError(
            f"{min(unknown)}: got such an argument, expected some of {sorted(MASTER_OPTIONS)}"
        )
    engine = given.get("options", EngineOptions())
    if not isinstance(engine, EngineOptions):
        raise InvalidInputError(f"options: got {type(engine).__name__}, expected EngineOptions")
    if choice.options or choice.provider is not None:
        engine = replace(
            engine,
            provider=choice.provider,
            provider_options={**engine.provider_options, **choice.options},
            allow_fallback=engine.allow_fallback or choice.may_fall_back,
        )
    cpus = whole_cpus()
    cores = max(1, cpus // len(parse_devices(given["devices"], cpus)))  # of a worker, about
    return noted.passed(options or native.SessionOptions(), engine, folder, cores)


def _save_optimised(model: str | bytes, device: str, passed: noted.Passed) -> None:
    """Write the file that the program wants: another process loads the model for it, and ends."""
    from mcinfer.engines.preparation import save_optimised  # few programs want it

    with ExitStack() as opened:
        if isinstance(model, bytes):
            model = opened.enter_context(closing(ModelInMemory(model))).path
        save_optimised(model, passed.optimised, passed.engine, device)


def _write(files: Mapping[str, bytes], folder: str) -> None:
    """Write the model's external data to a new folder."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        if os.path.isabs(name) or not os.path.normpath(path).startswith(f"{folder}/"):
            raise InvalidInputError(
                f"add_external_initializers_from_files_in_memory: got the file {name!r}, expected a "
                "relative path that stays within the model's folder"
            )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)


note_terminations()
for module in (onnxruntime, collection.C, native):
    module.SessionIOBinding = values.Binding
