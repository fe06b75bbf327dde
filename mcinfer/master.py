"""The public face: one model on many devices, as an object in the user's process."""

import asyncio
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

import psutil
from numpy.typing import ArrayLike

from mcinfer.config import (
    CoreShare,
    EngineOptions,
    Limits,
    RestartPolicy,
    Timeouts,
    check_count,
    check_seconds,
    parse_devices,
    share_cores,
)
from mcinfer.errors import (
    BuildError,
    ClosedError,
    InvalidInputError,
    McinferError,
    QueueFullError,
)
from mcinfer.fields import TensorFields
from mcinfer.protocol import Build
from mcinfer.sharding import BatchAxes, batch_symbol
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype
from mcinfer.staging import Arrays, Inputs, Job, Stager
from mcinfer.statistics import Statistics
from mcinfer.supervisor import Supervisor

_log = logging.getLogger("mcinfer.master")


class Master:
    """One model on several devices: a worker process for each, one batch split over them.

    Use it in a ``with`` statement, or call `start` and `close`. Any number of threads may call its methods
    at once. What is not closed is closed at interpreter exit, and when the master is garbage.

    Args:
        model: Path of the model.
        devices: How many, or which: ``2``, ``["cpu:0", "cpu:1"]``, ``["cuda:0"]``. ``"cpu:i"`` of n is
            the i-th equal share of the cores that this process may use; its worker is pinned to them.
            None: all of the CPU, in as many shares as `mcinfer.config.automatic_workers` says.
        engine: ``"onnxruntime"``; ``"mindspore"`` and ``"mindspore_lite"`` for MindIR models, where these
            packages are installed; ``"fake"`` is for tests.
        options: What the engine is asked for.
        timeouts: How long to wait for what.
        restart: When a worker that died is started again.
        limits: How much is taken on.
        max_batch_size: Rows of one run of the engine that requests of `submit` may be joined to (dynamic
            batching); 1 is off. Joined are requests that agree in all but the batch's size, where the
            model's batch is symbolic and every output has it; one that fails never spoils the others.
        max_delay: Seconds that a request may wait for others to join it while a worker is free.

    Raises:
        InvalidInputError: An argument does not fit.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        devices: int | Sequence[str] | None = None,
        *,
        engine: str = "onnxruntime",
        options: EngineOptions = EngineOptions(),
        timeouts: Timeouts = Timeouts(),
        restart: RestartPolicy = RestartPolicy(),
        limits: Limits = Limits(),
        max_batch_size: int = 1,
        max_delay: float = 0.0,
    ) -> None:
        self._timeouts = timeouts
        self._limits = limits
        if not isinstance(model, (str, os.PathLike)):
            raise InvalidInputError(f"model: got {type(model).__name__}, expected a path")
        for name, value, kind in (
            ("engine", engine, str),
            ("options", options, EngineOptions),
            ("timeouts", timeouts, Timeouts),
            ("restart", restart, RestartPolicy),
            ("limits", limits, Limits),
        ):
            if not isinstance(value, kind):
                raise InvalidInputError(
                    f"{name}: got {type(value).__name__}, expected {kind.__name__}"
                )
        check_count("max_batch_size", max_batch_size, 1)
        check_seconds("max_delay", max_delay)
        self._max_batch_size = max_batch_size
        cores = sorted(os.sched_getaffinity(0))
        chosen = parse_devices(devices, len(cores))
        shares = share_cores(chosen, cores, options.cores)
        self._absent = {i: why for i, why in shares.items() if not isinstance(why, CoreShare)}
        builds = []
        for index, device in enumerate(chosen):
            pinned = shares.get(index)
            share = pinned if isinstance(pinned, CoreShare) else CoreShare(cores=(), shared=False)
            builds.append(
                Build(
                    model=str(Path(model).absolute()),
                    engine=engine,
                    device=str(device),
                    cores=share.cores,
                    shared=share.shared,
                    threads=options.threads,
                    inter_op_threads=options.inter_op_threads,
                    allow_fallback=options.allow_fallback,
                    prepare=options.prepare,
                    variable_weights=tuple(options.variable_weights),
                    session_config=dict(options.session_config),
                    provider_options=dict(options.provider_options),
                )
            )
        memory = self._limits.memory_bytes or psutil.virtual_memory().total // 2
        self._supervisor = Supervisor(
            builds,
            timeouts=self._timeouts,
            restart=restart,
            limits=self._limits,
            memory_bytes=memory,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
        )
        self._model: ModelSpec | None = None
        self._stager: Stager | None = None
        # At interpreter exit the supervisor closes itself; this is for a master that becomes garbage.
        self._finalizer = weakref.finalize(self, self._supervisor.abandon)
        self._finalizer.atexit = False

    # Life.

    def start(self) -> Self:
        """Start every worker and load the model in all of them at once; returns when all are ready.

        Raises:
            BuildError: One or more workers could not; says which, with the engine's own words. No
                process is left behind.
            MissingDependencyError: The model has an element type that NumPy lacks; says what to install.
            ClosedError: It was closed, or was started before.
        """
        self._supervisor.claim_start()
        if self._absent:
            raise BuildError(
                "; ".join(f"worker {i}: {reason}" for i, reason in self._absent.items())
            )
        try:
            built = self._supervisor.start()
            model = ModelSpec(inputs=_specs(built.inputs), outputs=_specs(built.outputs))
            weights = _specs(built.weights)
        except BaseException:
            self.close()
            raise
        self._model = model
        self._stager = Stager(model, self._supervisor.arena, self._max_batch_size, weights)
        if batch_symbol(model) is None and not all(
            not spec.shape or isinstance(spec.shape[0], int) for spec in model.inputs
        ):
            _log.warning(
                "no dimension of %s is known to be the batch: requests run whole, on one worker, "
                "unless batch_axes says what to split",
                [str(spec) for spec in model.inputs],
            )
        return self

    def close(self, timeout: float | None = None) -> None:
        """End all workers. Requests in flight fail with `ClosedError`. May be called again.

        Arrays that were answered or allocated stay valid.

        Args:
            timeout: Seconds for the workers to end by themselves before they are killed; None is
                `Timeouts.close`.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._supervisor.close(timeout)
        if self._stager is not None:
            self._stager.close()
        # It holds the supervisor, which holds the error of a failed start, whose traceback holds this.
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # What the model is like.

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, in its order: name, dtype, shape with symbols.

        Raises:
            ClosedError: It was not started.
        """
        return self._spec().inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, likewise."""
        return self._spec().outputs

    def _spec(self) -> ModelSpec:
        if self._model is None:
            raise ClosedError("the model is known once the master is started")
        return self._model

    # Requests.

    def predict(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: BatchAxes | None = None,
        shards: int | None = None,
        priority: int = 0,
    ) -> Arrays:
        """Run a whole batch, split over all workers, and wait for the joined answer.

        Args:
            inputs: Arrays by input name, or in the model's input order. Any layout and byte order;
                arrays from `allocate` are not copied, and are borrowed until the call returns.
            timeout: Seconds until `PredictTimeoutError`; None is `Timeouts.predict`.
            batch_axes: By input name, the axis to split along, or None for an input that goes to every
                worker whole; in the place of what the model's symbols say.
            shards: Into how many pieces to cut it at most; None is one for each worker that serves, and 1
                is as `submit`: whole, on one worker.
            priority: Of requests that wait for a worker, those of a higher one go first; one that waits
                is passed over by seven runs in a row at most.

        Returns:
            Arrays by output name, in the model's order. They are the caller's, for as long as wanted.

        Raises:
            InvalidInputError: The inputs do not fit the model; names input, what came and what was
                expected. Nothing was sent.
            PredictError: A run raised, or the shards' answers do not join.
            WorkerDiedError: Two workers died on one shard, or none is left.
            PredictTimeoutError: The time is over.
            QueueFullError: A limit was reached.
            ClosedError: The master is not started, or closed.
        """
        if not self._supervisor.may_wait():
            raise McinferError(
                "predict() was called in a future's callback, which runs in the thread that the "
                "answer needs: use submit() there"
            )
        _check_priority(priority)
        job, start, seconds = self._stage(inputs, shards, timeout, batch_axes)
        job.private = True
        try:
            self._enter(job, start, seconds, priority)
            return self._supervisor.wait(job)
        except BaseException:
            # Ctrl-C while waiting: the workers are not to go on for nobody.
            job.future.cancel()
            raise

    def submit(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: BatchAxes | None = None,
        priority: int = 0,
    ) -> "Future[Arrays]":
        """Queue a request for one worker; returns at once unless memory has to be waited for.

        For many small requests: each runs whole on the next free worker. (A model with a fixed batch
        that is given a multiple of it runs as so many pieces.) With `max_batch_size`, several may go as
        one run. The arguments are those of `predict`.

        Returns:
            A future of what `predict` returns and raises. ``cancel()`` works until it is done and stops
            a run that is going on. Callbacks run in a thread of mcinfer's, one after another: they may
            `submit`, not wait. Arrays from `allocate` are borrowed until the future is done.

        Raises:
            InvalidInputError, QueueFullError, ClosedError: As `predict`, before anything is queued.
        """
        return self._enqueue(inputs, 1, timeout, batch_axes, priority).future

    async def predict_async(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: BatchAxes | None = None,
        shards: int | None = None,
        priority: int = 0,
    ) -> Arrays:
        """`predict` for asyncio; cancelling the task cancels the request.

        Inputs are checked and copied in the event loop's thread before the first wait.
        """
        try:
            job = self._enqueue(inputs, shards, timeout, batch_axes, priority, wait=False)
        except QueueFullError:
            if self._limits.when_full == "raise":
                raise
            # Waiting for memory would stop the event loop. A thread cannot be cancelled: if this task
            # is, what the thread still queues is to be cancelled then.
            waiting = asyncio.ensure_future(
                asyncio.to_thread(self._enqueue, inputs, shards, timeout, batch_axes, priority)
            )
            try:
                job = await asyncio.shield(waiting)
            except asyncio.CancelledError:
                waiting.add_done_callback(_cancel_late)
                raise
        return await asyncio.wrap_future(job.future)

    def allocate(self, shapes: Mapping[str, Sequence[int]]) -> Arrays:
        """Writable arrays in shared memory, for inputs that are to be sent without a copy.

        Args:
            shapes: By input name, the shape wanted: any batch, all rows C-contiguous.

        Returns:
            Arrays of the inputs' dtypes. Their content is undefined, as with `numpy.empty`. They are the
            caller's; their memory is free again when the last view of them is gone.

        Raises:
            InvalidInputError: An unknown name, another number of dimensions, or more than the limit.
            QueueFullError: The memory is in use.
        """
        return self._ready().allocate(shapes)

    @property
    def weights(self) -> tuple[TensorSpec, ...]:
        """The weights that `update_weights` may replace, as `EngineOptions.variable_weights` named them.

        Raises:
            ClosedError: It was not started.
        """
        self._spec()
        return () if self._stager is None else self._stager.weights.specs

    def update_weights(
        self, weights: Mapping[str, ArrayLike], *, timeout: float | None = None
    ) -> int:
        """Replace weights on all workers at once, between two requests.

        Requests that were made before finish with the weights that they began with, all of their shards;
        those made after the return have the new ones, and so have workers that are started again. Nothing
        is loaded anew: the new weights are copied to shared memory once, whatever the number of workers.

        Args:
            weights: New values by name, each of the dtype and shape that `weights` says. Those that are not
                named stay as they are. They are copied before the call returns.
            timeout: Seconds to wait for shared memory, if that is all in use (`Limits`); None is
                `Timeouts.predict`.

        Returns:
            The number of this version, as in `statistics().weights_version`: 1 for the first update.

        Raises:
            InvalidInputError: A name, dtype or shape does not fit; names it, and nothing was changed.
            QueueFullError: No shared memory was free; likewise.
            OSError: The system has no memory left; likewise.
            ClosedError: The master is not started, or closed.
        """
        store = self._ready().weights
        if timeout is not None:
            check_seconds("timeout", timeout)
        waits = self._limits.when_full == "wait" and self._supervisor.may_wait()
        seconds = self._timeouts.predict if timeout is None else timeout
        return store.update(weights, seconds if waits else 0.0)

    def statistics(self) -> Statistics:
        """A snapshot of what was done so far; also after `close`.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        version = 0 if self._stager is None else self._stager.weights.current.number
        return self._supervisor.statistics(version)

    def _ready(self) -> Stager:
        self._supervisor.check_open()
        if self._stager is None:
            raise ClosedError("the master is still starting")
        return self._stager

    def _enqueue(
        self,
        inputs: Inputs,
        pieces: int | None,
        timeout: float | None,
        batch_axes: BatchAxes | None,
        priority: int,
        *,
        wait: bool = True,
    ) -> Job:
        _check_priority(priority)
        job, start, seconds = self._stage(inputs, pieces, timeout, batch_axes, wait=wait)
        self._enter(job, start, seconds, priority)
        return job

    def _stage(
        self,
        inputs: Inputs,
        pieces: int | None,
        timeout: float | None,
        batch_axes: BatchAxes | None,
        *,
        wait: bool = True,
    ) -> tuple[Job, float, float]:
        """The request as a job, when it began, and the seconds that it has from then on."""
        stager = self._ready()
        if timeout is None:
            timeout = self._timeouts.predict
        else:
            check_seconds("timeout", timeout)
        start = monotonic()
        joinable = pieces == 1
        if pieces is None:
            pieces = max(1, self._supervisor.serving)
        else:
            check_count("shards", pieces, 1)
        waits = wait and self._limits.when_full == "wait" and self._supervisor.may_wait()
        memory_wait = timeout if waits else 0.0
        job = stager.stage(inputs, pieces, batch_axes, memory_wait, joinable=joinable)
        return job, start, timeout

    def _enter(self, job: Job, start: float, timeout: float, priority: int) -> None:
        if job.shards:  # a batch of no rows is answered already
            self._supervisor.submit(job, start, timeout, priority)


def _check_priority(priority: int) -> None:
    if type(priority) is not int:
        raise InvalidInputError(f"priority: got {priority!r}, expected an int")


def _cancel_late(waiting: "asyncio.Future[Job]") -> None:
    if not waiting.cancelled() and waiting.exception() is None:
        waiting.result().future.cancel()


def _specs(fields: Sequence[TensorFields]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=shape)
        for name, element_type, shape in fields
    )
