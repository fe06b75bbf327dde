"""`ModelParallelRunner`: many clients, one model, several worker processes.

A face of `mcinfer.Master` with MindSpore Lite's names. A request runs whole on one worker, whichever is free.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from mcinfer.config import Limits, Timeouts, check_count, check_seconds
from mcinfer.errors import BuildError, ClosedError, McinferError, PredictError
from mcinfer.master import Master
from mcinfer.mslite._arguments import (
    check_context,
    check_outputs,
    check_path,
    describe,
    fill,
    input_arrays,
    known_dims,
)
from mcinfer.mslite._checks import check_type
from mcinfer.mslite._configuration import (
    Sections,
    load_sections,
    warn_of_unused,
    weights_folder,
)
from mcinfer.mslite._failures import failure
from mcinfer.mslite._sources import FOLDER_KEY, ModelBuffer
from mcinfer.mslite._targets import (
    Attempt,
    ModelType,
    attempts,
    count_workers,
    model_type_of,
    model_type_of_bytes,
    open_first,
    pinned_cores,
)
from mcinfer.mslite.context import Context, Option, ParallelOptions
from mcinfer.mslite.datatypes import known_data_type
from mcinfer.mslite.tensor import Tensor, TensorMeta
from mcinfer.staging import Arrays
from mcinfer.statistics import Statistics

TensorLike = Tensor | NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBackParam:
    """What a callback is told of the run that it is called for.

    Attributes:
        node_name: The model's path, or ``buffer``: callbacks are for the run as a whole, not for each
            operator, which run in other processes.
        node_type: ``"Model"``.
    """

    node_name: str
    node_type: str = "Model"


CallBack = Callable[[list[TensorLike], list[Tensor], CallBackParam], bool | None]
"""Called with a run's inputs, its outputs and what it is for; False makes the call fail."""


class RunnerConfig(ParallelOptions):
    """How a runner is to be made: the parallel part of a context, and what MindSpore Lite has not.

    What is not given here is taken from ``context.parallel``.

    Args:
        context: Where the workers run; None is the CPU.
        workers_num: How many; 0 is MindSpore Lite's own rule (2 up to 16 cores, then one for each 8).
        config_info: Sections of entries, ``dict[str, dict[str, str]]``.
        config_path: A configuration file, whose entries `config_info` overrides.
        device_ids: The workers' devices in turn: worker i runs on ``device_ids[i % n]``.
        max_batch_size: Rows of one run that requests may be joined to (dynamic batching); 1 is off.
        max_delay: Seconds that a request may wait for others to join it while a worker is free.
        queue_size: Requests that may wait for a worker; one more is refused with `QueueFullError`.
        timeout: Seconds for one request, where `predict` says nothing else.

    Raises:
        TypeError, ValueError: An argument does not fit.
    """

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
        self._context = check_context(context)
        parallel = self._context.parallel
        self.workers_num = parallel.workers_num if workers_num is None else workers_num
        self.config_info = parallel.sections
        if config_info is not None:
            self.config_info = config_info
        self.config_path = parallel.config_path if config_path is None else config_path
        self.device_ids = parallel.device_ids if device_ids is None else device_ids
        self.max_batch_size = max_batch_size
        self.max_delay = max_delay
        self.queue_size = queue_size
        self.timeout = timeout

    @property
    def context(self) -> Context:
        """Where the workers run.

        Raises:
            TypeError: Set to something other than a Context.
        """
        return self._context

    @context.setter
    def context(self, value: Context) -> None:
        check_type("context", value, Context)
        self._context = value


class ModelParallelRunner:
    """Serves one model with several worker processes; any number of threads may call it.

    A context manager; what is not closed is closed at interpreter exit, and when it is garbage. A worker that
    dies costs no request, and is started again.
    """

    def __init__(self) -> None:
        self._master: Master | None = None
        self._name = ""
        self._buffer: ModelBuffer | None = None
        self._building = threading.Lock()
        self._closed = False

    def __str__(self) -> str:
        return f"model_path: {self._name}."

    # Life.

    def build_from_file(self, model_path: str, context: Context | None = None) -> None:
        """Start the workers and load a model in each.

        Args:
            model_path: Of an ONNX file (ending in ``.onnx``) or a MindIR file.
            context: Where, and with ``context.parallel`` how many workers; None is the CPU.

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
        """Start the workers and load a model in each.

        Args:
            model_path: Path, or content of a model; weights that lie outside of an ONNX model in a buffer are
                found through ``{"model_file": {"mindir_path": …}}`` in the configuration, the path of a file
                beside them.
            runner_config: How; None is all defaults.

        Raises:
            TypeError, RuntimeError: As `build_from_file`.
        """
        what = "ModelParallelRunner's init"
        if not isinstance(model_path, (str, bytes)):
            raise TypeError(f"model_path must be str or bytes, but got {type(model_path)}.")
        if runner_config is None:
            runner_config = RunnerConfig()
        check_type("runner_config", runner_config, RunnerConfig)
        if isinstance(model_path, str):
            check_path(what, "model_path", model_path)
        self._build(what, model_path, runner_config)

    def close(self, timeout: float | None = None) -> None:
        """End the workers; requests in flight fail. Tensors stay valid. May be called again.

        Args:
            timeout: Seconds for the workers to end by themselves before they are killed.
        """
        with self._building:
            self._closed = True
            if self._master is not None:
                self._master.close(timeout)
            if self._buffer is not None:
                self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _build(self, what: str, model: str | bytes, config: RunnerConfig) -> None:
        with self._building:
            if self._closed:
                raise failure(what, ClosedError("the runner is closed; make a new one"))
            if self._master is not None:
                raise failure(
                    what, BuildError("the model was built already; make a new ModelParallelRunner")
                )
            try:
                sections = load_sections(config.config_path, config.sections)
                master = self._start(model, config, sections)
            except (McinferError, OSError, ValueError) as exc:
                if self._buffer is not None:
                    self._buffer.close()
                    self._buffer = None
                raise failure(what, exc) from exc
            warn_of_unused(sections, stacklevel=3)
            self._name = model if isinstance(model, str) else "buffer"
            self._names = [spec.name for spec in master.outputs]
            self._master = master

    def _start(self, model: str | bytes, config: RunnerConfig, sections: Sections) -> Master:
        workers = count_workers(config.context, config.workers_num, config.device_ids)
        settings: dict[str, str] = {}
        if isinstance(model, bytes):
            model_type = model_type_of_bytes(model)
            folder = weights_folder(sections)
            if folder is not None and model_type is ModelType.ONNX:
                settings[FOLDER_KEY] = folder
            self._buffer = ModelBuffer(model)
            path = self._buffer.path
        else:
            path, model_type = model, model_type_of(model, ModelType.MINDIR)

        def build(attempt: Attempt) -> Master:
            options = replace(attempt.options, session_config=settings)
            if attempt.kind == "cpu":
                # Without the device that the context asks for, its ids mean nothing.
                ids = config.device_ids if config.context.device_infos[0] == "cpu" else []
                ids = ids or [*range(workers)]
                options = replace(options, cores=pinned_cores(config.context, workers))
            else:
                ids = config.device_ids or [attempt.index]
            return Master(
                path,
                [f"{attempt.kind}:{ids[i % len(ids)]}" for i in range(workers)],
                engine=attempt.engine,
                options=options,
                timeouts=Timeouts(predict=config.timeout),
                limits=Limits(queue=config.queue_size + workers),
                max_batch_size=config.max_batch_size,
                max_delay=config.max_delay,
            ).start()

        # The caller is five calls up: _start, _build, build_from_file, the user.
        return open_first(attempts(config.context, model_type, sections), build, stacklevel=4)

    def _ready(self, what: str) -> Master:
        if self._master is None:
            raise failure(what, ClosedError("the model is not built"))
        return self._master

    # What it is like.

    def get_inputs(self) -> list[Tensor]:
        """Fresh input tensors, which lie in shared memory: what is put in there is not copied again.

        A size that is not known is -1; set the shape, or data of the right rank.

        Raises:
            RuntimeError: The model is not built.
        """
        master = self._ready("get_inputs")
        return [
            Tensor._of_model(
                spec.name,
                known_data_type(spec.dtype),
                known_dims(spec),
                allocate=partial(_allocate, master, spec.name),
            )
            for spec in master.inputs
        ]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        """The outputs' names, dtypes and shapes, -1 for a size that is not known.

        Raises:
            RuntimeError: The model is not built.
        """
        return tuple(map(describe, self._ready("get_outputs").outputs))

    def statistics(self) -> Statistics:
        """What was done so far, and how the workers are; see `mcinfer.Statistics`."""
        return self._ready("statistics").statistics()

    # Requests.

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
        """Run the model on whichever worker is free, and wait for the answer.

        Args:
            inputs: A list or tuple of tensors or arrays, in the model's order; any shapes that the model
                takes. Those of `get_inputs` are not copied, and are not to be changed until the call returns.
            outputs: Tensors to write to, of the outputs' dtypes and shapes (or of sizes not known yet).
            before: Called in this thread before the request is queued.
            after: Called in this thread with the answer.
            timeout: Seconds until `PredictTimeoutError`; None is the configuration's.
            priority: Requests of a higher one go first, but none waits for ever.

        Returns:
            The outputs: those that were given, or new ones.

        Raises:
            TypeError: An argument is of another type.
            RuntimeError: ``predict failed! …``, of a class of `mcinfer.errors` as well: the inputs do not
                fit (`InvalidInputError`), the run failed (`PredictError`), took too long
                (`PredictTimeoutError`) or cannot be taken on (`QueueFullError`, `ClosedError`). Nothing was
                written to `outputs`.
        """
        master = self._ready("predict")
        arrays = input_arrays(inputs, len(master.inputs))
        what = CallBackParam(node_name=self._name)
        try:
            wanted = check_outputs(outputs, len(self._names))
            _call("before", before, [*inputs], wanted or [], what)
            answer = master.predict(arrays, timeout=timeout, shards=1, priority=priority)
            if wanted is None:
                results = self._tensors(answer)
            else:
                fill(wanted, answer)
                results = wanted
            _call("after", after, [*inputs], results, what)
        except McinferError as exc:
            raise failure("predict", exc) from exc
        return results

    def submit(
        self, inputs: Sequence[TensorLike], *, timeout: float | None = None, priority: int = 0
    ) -> "Future[list[Tensor]]":
        """Queue a request, and return at once.

        Args:
            inputs: As for `predict`; not to be changed until the future is done.
            timeout: Likewise.
            priority: Likewise.

        Returns:
            A future of the outputs, or of what `predict` raises. Its ``cancel()`` works until it is done:
            what waits is forgotten, a run that is for nobody else is stopped.

        Raises:
            TypeError, RuntimeError: As `predict`, for what is wrong before it is queued.
        """
        master = self._ready("predict")
        arrays = input_arrays(inputs, len(master.inputs))
        try:
            return _Answer(master.submit(arrays, timeout=timeout, priority=priority), self._tensors)
        except McinferError as exc:
            raise failure("predict", exc) from exc

    async def predict_async(
        self, inputs: Sequence[TensorLike], *, timeout: float | None = None, priority: int = 0
    ) -> list[Tensor]:
        """`predict` for asyncio; cancelling the task cancels the request."""
        master = self._ready("predict")
        arrays = input_arrays(inputs, len(master.inputs))
        try:
            return self._tensors(
                await master.predict_async(arrays, timeout=timeout, shards=1, priority=priority)
            )
        except McinferError as exc:
            raise failure("predict", exc) from exc

    def _tensors(self, answer: Arrays) -> list[Tensor]:
        return [Tensor._of_result(name, array) for name, array in answer.items()]


class _Answer(Future[list[Tensor]]):
    """The future of a request, with its outputs as tensors."""

    def __init__(self, arrays: "Future[Arrays]", convert: Callable[[Arrays], list[Tensor]]) -> None:
        super().__init__()
        self._arrays = arrays
        self._convert = convert
        arrays.add_done_callback(self._take)

    def cancel(self) -> bool:
        """Cancel the request; False once it is answered."""
        return self._arrays.cancel()

    def _take(self, arrays: "Future[Arrays]") -> None:
        if arrays.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
            return
        exc = arrays.exception()
        if exc is None:
            self.set_result(self._convert(arrays.result()))
            return
        error = failure("predict", exc)
        error.__cause__ = exc
        self.set_exception(error)


def _allocate(master: Master, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        return master.allocate({name: shape})[name]
    except McinferError as exc:
        raise failure("allocate", exc) from exc


def _call(
    name: str,
    callback: CallBack | None,
    inputs: list[TensorLike],
    outputs: list[Tensor],
    what: CallBackParam,
) -> None:
    """Call what the user gave; whatever it raises fails this call alone."""
    if callback is None:
        return
    try:
        wants = callback(inputs, outputs, what)
    except Exception as exc:
        raise PredictError(f"the callback {name!r} raised {type(exc).__name__}: {exc}") from exc
    if wants is False:
        raise PredictError(f"the callback {name!r} returned False")
