"""`ModelParallelRunner`: many clients, one model, several worker processes; `RunnerConfig`: its options.

It is `mcinfer.Master` with MindSpore Lite's names. A request runs whole on one worker, whichever is free. The
runner owns its master, and with it the workers; tensors and futures that it gave out keep neither alive.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from numpy.typing import NDArray

from mcinfer.checks import check_count, check_seconds
from mcinfer.config import Limits, Timeouts
from mcinfer.errors import BuildError, ClosedError, InvalidInputError, PredictError, is_refusal
from mcinfer.master import Master
from mcinfer.mslite._checks import (
    Option,
    Sections,
    check_elements,
    check_list,
    check_path,
    check_type,
    failure,
    failures,
    typed,
)
from mcinfer.mslite._configuration import load_sections, override
from mcinfer.mslite._targets import (
    Attempt,
    Source,
    count_workers,
    open_first,
    pinned_cores,
)
from mcinfer.mslite.context import Context, ParallelOptions, check_context
from mcinfer.mslite.tensor import (
    Tensor,
    TensorLike,
    answered,
    check_inputs,
    check_outputs,
    input_arrays,
)
from mcinfer.requests.request import OutcomeFuture
from mcinfer.specs import TensorSpec
from mcinfer.statistics import Statistics

__tracebackhide__ = is_refusal


class RunnerConfig(ParallelOptions):
    """Options of a runner. Those that are not given are taken from ``context.parallel``.

    Another type or value is a TypeError or ValueError.

    Args:
        context: Where the workers run; None is the CPU.
        workers_num: Number of workers; 0 is MindSpore Lite's own rule (`mcinfer.config.automatic_workers`),
            cores / threads if the context names threads, and one for each of `device_ids` on an accelerator.
        config_info: Sections of entries, ``dict[str, dict[str, str]]``.
        config_path: A configuration file, whose entries `config_info` overrides.
        device_ids: The workers' devices in turn: worker i runs on ``device_ids[i % n]``.
        max_batch_size: Rows of one run that requests may be joined to (dynamic batching); 1 is off.
        max_delay: Seconds that a request may wait for others to join it while a worker is free.
        queue_size: Requests that may wait for a worker; one more is refused with `QueueFullError`.
        timeout: Seconds for one request, unless `predict` names others.
    """

    context = typed("context", Context(), Context)
    max_batch_size = Option("max_batch_size", 1, lambda name, value: check_count(name, value, 1))
    max_delay = Option("max_delay", 0.0, check_seconds)
    queue_size = Option("queue_size", 1000, lambda name, value: check_count(name, value, 1))
    timeout = Option("timeout", Timeouts().predict, check_seconds)

    def __init__(
        self,
        context: Context | None = None,
        workers_num: int | None = None,
        config_info: Sections | None = None,
        config_path: str | None = None,
        *,
        device_ids: list[int] | None = None,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
        queue_size: int = 1000,
        timeout: float = Timeouts().predict,
    ) -> None:
        super().__init__()
        self.context = check_context(context)
        parallel = self.context.parallel
        self._sections = parallel.sections
        self.config_info = {} if config_info is None else config_info
        self.workers_num = parallel.workers_num if workers_num is None else workers_num
        self.config_path = parallel.config_path if config_path is None else config_path
        self.device_ids = parallel.device_ids if device_ids is None else device_ids
        self.max_batch_size, self.max_delay = max_batch_size, max_delay
        self.queue_size, self.timeout = queue_size, timeout


def _new_master(model: str | bytes, config: RunnerConfig, attempt: Attempt) -> Master:
    """The master of one way to run a model, not started."""
    context, options = config.context, attempt.options
    workers = count_workers(context, attempt.kind, config.workers_num, config.device_ids)
    ids = config.device_ids or [attempt.index]
    if attempt.kind == "cpu":
        # The ids are of the device that the context asks for, not of its backup.
        ids = (config.device_ids if context.device_infos[0] == "cpu" else []) or [*range(workers)]
        options = replace(options, cores=pinned_cores(context, workers))
    return Master(
        model,
        [f"{attempt.kind}:{ids[i % len(ids)]}" for i in range(workers)],
        engine=attempt.engine,
        options=options,
        timeouts=Timeouts(predict=config.timeout),
        limits=Limits(queue=config.queue_size + workers),
        max_batch_size=config.max_batch_size,
        max_delay=config.max_delay,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBackParam:
    """The run that a callback is called for: of a model, as operators run in other processes."""

    node_name: str  # the model's path, or ``buffer``
    node_type: str = "Model"


CallBack = Callable[[list[TensorLike], list[Tensor], CallBackParam], bool | None]
"""Called with a run's inputs, outputs and `CallBackParam`; False makes the call fail."""


class ModelParallelRunner:
    """Serves one model with several worker processes; any number of threads may call it.

    A context manager, whose end answers what was accepted; also closed at interpreter exit, and when it is
    garbage. If a worker dies, its request runs on another one, and the worker is started again.
    """

    def __init__(self) -> None:
        self._master: Master | None = None  # of the build, also of one that is not over
        self._name = ""  # once it is built
        self._building = threading.Lock()  # held during a build, and after one that succeeded
        self._closed = False

    def __str__(self) -> str:
        return f"model_path: {self._name}."

    def build_from_file(self, model_path: str, context: Context | None = None) -> None:
        """Start the workers and load a model in each: an ONNX file (ending in ``.onnx``) or a MindIR file.

        ``context.parallel`` says how many workers; without a context they run on the CPU.

        Raises:
            TypeError: An argument is of another type.
            RuntimeError: The path does not exist, or the model cannot be built; no process is left.
        """
        what = "ModelParallelRunner's build from file"
        check_type("model_path", model_path, str)
        config = RunnerConfig(context)
        check_path(what, "model_path", model_path)
        self._build(what, model_path, config)

    def init(self, model_path: str | bytes, runner_config: RunnerConfig | None = None) -> None:
        """Start the workers and load a model in each, from a path or from its content.

        For an ONNX model in a buffer, ``{"model_file": {"mindir_path": …}}`` in the configuration names a
        file beside its external weights. Raises the same errors as `build_from_file`.
        """
        what = "ModelParallelRunner's init"
        if not isinstance(model_path, (str, bytes)):
            raise TypeError(f"model_path must be str or bytes, but got {type(model_path)}.")
        config = RunnerConfig() if runner_config is None else runner_config
        check_type("runner_config", config, RunnerConfig)
        if isinstance(model_path, str):
            check_path(what, "model_path", model_path)
        self._build(what, model_path, config)

    def close(self, timeout: float | None = None) -> None:
        """End the workers; requests in flight fail. Tensors stay valid. May be called again.

        Any thread may call it, also in a future's callback, and during a build in another thread, which fails
        then. Workers that have not ended within `timeout` seconds are killed.
        """
        self._closed = True
        if (master := self._master) is not None:
            # A worker that loads a model reads no messages.
            master.close(timeout if self._name else 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._master is not None:
                self._master.close(drain=True)
        finally:
            self.close()

    def _build(self, what: str, model: str | bytes, config: RunnerConfig) -> None:
        with failures(what):
            if self._closed:
                raise ClosedError("the runner is closed; make a new one")
            if not self._building.acquire(blocking=False):
                raise BuildError(
                    "the model was built already, or is being built; make a new ModelParallelRunner"
                )
            try:
                sections = override(load_sections(config.config_path), config.sections)
                source = Source(model, None, config.context, sections)
                # The caller is three calls up: _build, build_from_file, the user.
                open_first(source, partial(self._start, source, config), alone=False, stacklevel=3)
            except BaseException as exc:
                self._master, self._name = None, ""
                self._building.release()
                if self._closed and isinstance(exc, Exception):
                    raise ClosedError("the runner was closed meanwhile") from exc
                raise

    def _start(self, source: Source, config: RunnerConfig, attempt: Attempt) -> None:
        self._master = master = _new_master(source.model, config, attempt)
        try:
            if not self._closed:  # `close` may have come before there was a master to close
                master.start()
                self._name = source.name
            if self._closed:
                raise ClosedError("the runner is closed")
        except BaseException:
            master.close(0.0)
            raise

    def _ready(self, what: str) -> Master:
        if self._master is None or not self._name:
            raise failure(what, ClosedError("the model is not built"))
        return self._master

    def get_inputs(self) -> list[Tensor]:
        """Fresh input tensors in shared memory: data that is put there is not copied again.

        A size that is not known is -1; set the shape, or data of the right rank. Memory is allocated as long
        as the runner is open and not garbage, and stays valid.
        """
        master = self._ready("get_inputs")
        owner = weakref.ref(master)
        return [
            Tensor._of_model(spec, partial(_allocate, owner, spec.name)) for spec in master.inputs
        ]

    def get_outputs(self) -> list[Tensor]:
        """Fresh output tensors without data, for the `outputs` of one `predict`.

        A size that is not known is -1, and becomes the result's. A tensor whose dtype is UNKNOWN cannot be
        passed.
        """
        return [Tensor._of_model(spec) for spec in self._ready("get_outputs").outputs]

    def update_weights(self, weights: list[list[Tensor]]) -> None:
        """Replace weights on all workers at once, between two requests; see `Model.update_weights`."""
        given = given_tensors(weights)
        master = self._ready("update weight")
        with failures("update weight"):
            master.update_weights(named_weights(given, master.weights))

    def statistics(self) -> Statistics:
        """Counts so far, and the workers' states; see `mcinfer.Statistics`."""
        return self._ready("statistics").statistics()

    def predict(
        self,
        inputs: Sequence[TensorLike],
        outputs: list[Tensor] | None = None,
        before: CallBack | None = None,
        after: CallBack | None = None,
        *,
        timeout: float | None = None,
        priority: int = 0,
    ) -> list[Tensor]:
        """Run the model on any free worker, and wait for the answer.

        Args:
            inputs: As for `Model.predict`, of any shapes that the model takes; those of `get_inputs` are not
                copied.
            outputs: As for `Model.predict`.
            before: Called in this thread before the request is queued: it may still set the inputs' data.
            after: Called in this thread with the answer.
            timeout: Seconds until `PredictTimeoutError`; None is the configuration's.
            priority: Requests of a higher one go first, but none waits for ever.

        Raises:
            TypeError: An argument is of another type.
            RuntimeError: ``predict failed! …``, of a class of `mcinfer.errors` as well: the inputs do not
                fit (`InvalidInputError`), the run failed (`PredictError`), took too long
                (`PredictTimeoutError`) or was refused (`QueueFullError`, `ClosedError`). Nothing was written
                to `outputs` then, except if `after` failed.
        """
        master = self._ready("predict")
        what = CallBackParam(node_name=self._name)
        with failures("predict"):
            given = check_inputs(inputs, len(master.inputs))
            check_outputs(outputs, len(master.outputs))
            _call("before", before, [*given], [*(outputs or [])], what)
            arrays = input_arrays(given)
            answer = master.predict(arrays, timeout=timeout, shards=1, priority=priority)
            results = answered(outputs, answer)
            _call("after", after, [*given], [*results], what)
            return results

    def submit(
        self, inputs: Sequence[TensorLike], *, timeout: float | None = None, priority: int = 0
    ) -> "Future[list[Tensor]]":
        """Queue a request, and return at once; the arguments are those of `predict`.

        Returns:
            A future of the outputs, or of the errors of `predict`; bad arguments are raised at once. Its
            ``cancel()`` works until it is done: a waiting request is dropped, a run that is for this request
            only is stopped. The inputs must not change until it is done.
        """
        master = self._ready("predict")
        with failures("predict"):
            arrays = input_arrays(check_inputs(inputs, len(master.inputs)))
            return _Answer(master.submit(arrays, timeout=timeout, priority=priority))

    async def predict_async(
        self, inputs: Sequence[TensorLike], *, timeout: float | None = None, priority: int = 0
    ) -> list[Tensor]:
        """`predict` for asyncio; cancelling the task cancels the request."""
        master = self._ready("predict")
        with failures("predict"):
            arrays = input_arrays(check_inputs(inputs, len(master.inputs)))
            answer = master.predict_async(arrays, timeout=timeout, shards=1, priority=priority)
            return answered(None, await answer)


class _Answer(OutcomeFuture[Any]):
    """The future of a request, with its outputs as tensors, and its errors as those of `predict`."""

    def __init__(self, arrays: Any) -> None:
        super().__init__(arrays.outcome, arrays.owner)
        self._tensors: list[Tensor] | None = None
        if self.outcome.settled:  # meanwhile: the two must not hold each other
            self.outcome.future = None

    def result(self, timeout: float | None = None) -> list[Tensor]:
        try:
            if (error := self.exception(timeout)) is not None:
                raise error
            if self._tensors is None:
                self._tensors = answered(None, self.outcome.result())
            return self._tensors
        finally:
            # The error that this may raise must not hold what holds it.
            self = error = None  # type: ignore[assignment]

    def prepare(self) -> BaseException | None:
        exc = super().prepare()
        if exc is None or self.cancelled():
            return exc
        error = failure("predict", exc)
        error.__cause__ = exc
        return error


def _allocate(owner: "weakref.ref[Master]", name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Shared memory for an input; its tensor must not keep the workers alive."""
    master = owner()
    with failures("allocate"):
        if master is None:
            raise ClosedError("the runner is gone")
        return master.allocate({name: shape})[name]


def _call(name: str, callback: CallBack | None, *arguments: Any) -> None:
    """Call a user's function; its error fails this request only."""
    if callback is None:
        return
    try:
        answer = callback(*arguments)
    except Exception as exc:
        raise PredictError(f"the callback {name!r} raised {type(exc).__name__}: {exc}") from exc
    if answer is False:
        raise PredictError(f"the callback {name!r} returned False")


def given_tensors(weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """A user's lists of new weights as one list."""
    for tensors in check_list("weights", weights, list):
        check_elements("weights element", tensors, Tensor)
    return [tensor for tensors in weights for tensor in tensors]


def named_weights(given: Sequence[Tensor], specs: Sequence[TensorSpec]) -> dict[str, NDArray[Any]]:
    """New weights by the tensors' names, or by position if they have none."""
    names = [spec.name for spec in specs]
    if not names:
        raise InvalidInputError(
            "no weight of this model was made replaceable when it was built (variable_weights_file)"
        )
    if len(given) != len(names):
        raise InvalidInputError(
            f"weights: got {len(given)} tensors, expected {len(names)}: {names}"
        )
    chosen = [tensor.name or name for tensor, name in zip(given, names, strict=True)]
    if sorted(chosen) != sorted(names):
        raise InvalidInputError(f"weights: got the names {chosen}, expected each of {names} once")
    return dict(zip(chosen, input_arrays(given), strict=True))
