"""The public face: one model on many devices, as an object in the user's process.

asyncio is imported by the coroutines alone: it is a sixth of the package's import, and most programs have
none.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from contextvars import copy_context
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, get_args
from weakref import finalize, ref

from numpy.typing import ArrayLike

from mcinfer.checks import FLAG, SECONDS, check_count, check_seconds, choice
from mcinfer.config import (
    Device,
    EngineOptions,
    Limits,
    Parallel,
    PoolPlan,
    RestartPolicy,
    Timeouts,
    plan_pool,
)
from mcinfer.errors import (
    BuildError,
    ClosedError,
    InvalidInputError,
    McinferError,
    ModelNotFoundError,
    PredictError,
    PredictTimeoutError,
    ProtocolError,
    QueueFullError,
    ReadyTimeoutError,
    is_refusal,
)
from mcinfer.logs import PoolLog
from mcinfer.machine import usable_memory, whole_cpus
from mcinfer.model_cache import FOLDER_KEY, is_waited_for
from mcinfer.private import SerializableModel, fill_streams, model_file, model_name
from mcinfer.protocol import Build, encode
from mcinfer.requests.learning import Learner
from mcinfer.requests.planner import Place, Planner
from mcinfer.requests.request import NO_WEIGHTS, Call, Outcome, OutcomeFuture
from mcinfer.requests.splitting import Verify
from mcinfer.requests.tensors import Arrays, Inputs
from mcinfer.requests.waiting_threads import LATE_SECONDS, WaitingThreads
from mcinfer.runtime.inbox import NOT_STARTED
from mcinfer.runtime.loop import Loop
from mcinfer.scheduler.workers import PoolRules
from mcinfer.sharding import Axes, SaidAxes, Split
from mcinfer.specs import ModelDescription, ModelSpec, TensorSpec, specs_of
from mcinfer.statistics import Health, Statistics, TraceHook

if TYPE_CHECKING:
    from mcinfer.inline import InlineAnswers, InlinePool

__tracebackhide__ = is_refusal

_NO_AXES = (None, None)

_HEALTH_INTERVAL = 0.2  # seconds between two checks of `wait_ready`

_T = TypeVar("_T")


class Master:
    """One model on several devices: a worker process for each, one batch split over them.

    Use it in a ``with`` statement, or call `start` and `close`. A ``with`` statement that ends without an
    exception answers what was accepted, each request within its own time-out; Ctrl-C ends that, and with an
    exception the master is closed at once. Any number of threads may call its methods at once. An open master
    closes at interpreter exit, and when it is garbage-collected.

    Args:
        model: Path of the model; or the ONNX model itself, as bytes or `onnx.ModelProto`. The master keeps
            such a model in memory until it is closed, and writes it to no disk.
        devices: How many, or which: ``2``, ``["cpu:0", "cpu:1"]``, ``[0, 1]``, ``"cuda:0"``. ``"cpu:i"`` of
            n is the i-th equal share of the usable cores; its worker is pinned to these cores. Under a CPU
            quota, as in containers, each worker gets its part of the quota as threads. ``"cpu"`` or None:
            the whole CPU, in as many shares as `mcinfer.config.automatic_workers` says. More workers than
            cores are warned of, eight or more for each core are refused. ``"inline"``: no worker and no
            message; a session runs in this process, for `predict` in the caller's thread. It is for small
            models, tests, notebooks and debuggers: a crash in the model ends the program, Ctrl-C acts after a
            run, and one that cannot be cancelled goes on. `EngineOptions.cores`, `parallel` and the limits on
            memory do not go with it.
        engine: ``"onnxruntime"``; ``"openvino"`` for ONNX models and OpenVINO's own; ``"mindspore"`` for
            MindIR models, if these packages are installed; or one of a package's.
        options: Options of the engine.
        timeouts: Time limits of starts, requests and `close`.
        restart: When a worker that died is started again.
        limits: Limits on requests and memory.
        max_batch_size: Most rows of one run that joins requests of `submit` (dynamic batching); 1 is off.
            Requests can be joined if they differ only in the batch's size, the split is known, every output
            declares the batch's symbol, and no size depends on data. One that fails never spoils others.
            Where they are not answered faster so, requests go apart (`Statistics.join_gain`).
        max_delay: Seconds that a request may wait for others to join while a worker is free. With 0 a run
            waits by itself, a tenth of a usual run at most, where requests of several callers come.
        trace: Called with a `RequestTrace` after each queued request, in a thread of mcinfer's own, one
            call at a time. It should be quick. It does not keep the master alive, whatever it holds.
        batch_axes: By input name, the axis along which to split a batch, or None for an input that goes to
            every worker whole. The model's symbols and `verify` decide about inputs that are not named.
        output_axes: By output name, the axis along which to join its parts, or None for an output that is
            the same from every worker.
        verify: ``"first"``: unless the arguments say all axes, or the cache knows them, the first request
            runs whole on one worker, which gives its answer, and also in pieces; the cache records the result
            (see `split`). ``"never"``: nothing is checked or learned; the arguments and the model's symbols
            decide.
        parallel: Over how many devices to cut the model itself, for one that does not fit a device: each
            device gets a slice of its weights, and a group of devices answers a request together. It needs
            the package onnx (``pip install onnx``). None: every device has the whole model.
        inline_threads: With ``devices="inline"``: how many runs there are at once, at most, and threads for
            `submit`, `map` and `predict_async`. None: with ONNX Runtime one for each usable core, or
            `EngineOptions.concurrent_runs`; with others `EngineOptions.streams`. Where it is more than one, a
            run has one thread of the runtime's, unless `EngineOptions.threads` says more.
        label: The model's name in records of the log, such as ``"encoder/3"``; empty for that of its file.

    Raises:
        InvalidInputError: An argument is invalid.
        BuildError: The system has no descriptor left.
    """

    # From `start` on; `_model` is set after both.
    _planner: "Planner | InlineAnswers"
    _learner: Learner

    def __init__(
        self,
        model: "str | os.PathLike[str] | bytes | SerializableModel",
        devices: int | str | Sequence[int | str] | None = None,
        *,
        engine: str = "onnxruntime",
        options: EngineOptions = EngineOptions(),
        timeouts: Timeouts = Timeouts(),
        restart: RestartPolicy = RestartPolicy(),
        limits: Limits = Limits(),
        max_batch_size: int = 1,
        max_delay: float = 0.0,
        trace: TraceHook | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
        verify: Verify = "first",
        parallel: Parallel | None = None,
        inline_threads: int | None = None,
        label: str = "",
    ) -> None:
        for name, value, kind in (
            ("engine", engine, str),
            ("label", label, str),
            ("options", options, EngineOptions),
            ("timeouts", timeouts, Timeouts),
            ("restart", restart, RestartPolicy),
            ("limits", limits, Limits),
            ("parallel", Parallel() if parallel is None else parallel, Parallel),
        ):
            if not isinstance(value, kind):
                raise InvalidInputError(
                    f"{name}: got {type(value).__name__}, expected {kind.__name__}"
                )
        if trace is not None and not callable(trace):
            raise InvalidInputError(f"trace: got {type(trace).__name__}, expected a function")
        choice(*get_args(Verify)).kept("verify", verify)
        check_count("max_batch_size", max_batch_size, 1)
        check_seconds("max_delay", max_delay)
        self._said = SaidAxes.of(batch_axes, output_axes)
        self._plan = plan_pool(
            devices,
            engine=engine,
            options=options,
            restart=restart,
            limits=limits,
            parallel=parallel,
            inline_threads=inline_threads,
            cores=sorted(os.sched_getaffinity(0)),
            cpus=whole_cpus(),
        )
        self._engine = engine
        self._timeouts = timeouts
        self._limits = limits
        self._verify: Verify = verify
        self._max_rows = max_batch_size
        # The loop holds this weakly: what the hook holds may hold the master.
        self._trace = None if trace is None else partial(trace)
        rules = PoolRules(
            timeouts=timeouts,
            restart=restart,
            limits=limits,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            tracing=trace is not None,
        )
        try:
            fill_streams()
            self._path, self._in_memory = model_file(model)
            on = [str(process.device) for process in self._plan.processes]
            self._log = PoolLog(label or model_name(self._path), on)
            if self._plan.warning:
                self._log.warning("%s", self._plan.warning)
            self._loop = self._open_pool(rules, options)
            self._inbox, self._supervision = self._loop.inbox, self._loop.supervision
        except OSError as exc:  # no descriptor is left
            raise BuildError(f"no pool can be opened: {exc}") from exc
        self._loop.model = self._in_memory  # for as long as workers may be started
        self._model: ModelSpec | None = None
        self._description = ModelDescription()
        self._waiting = WaitingThreads()
        # At interpreter exit the loop closes itself; this is for a master that becomes garbage.
        self._finalizer = finalize(self, _abandon, self._loop, self._waiting)
        self._finalizer.atexit = False

    def _open_pool(self, rules: PoolRules, options: EngineOptions) -> "Loop | InlinePool":
        trace: ref[TraceHook] | None = None if self._trace is None else ref(self._trace)
        if self._plan.inline:
            # An engine comes into this process in this way alone.
            from mcinfer.inline import InlinePool

            return InlinePool(
                self._path, self._engine, options, self._plan, rules, self._log, trace
            )
        if options.prepare == "auto":
            given = self._path, options.session_config.get(FOLDER_KEY), len(self._plan.groups)
            with suppress(OSError, BuildError):  # a worker says what is wrong with the model
                if is_waited_for(*given):
                    options = replace(options, prepare="wait")
        return Loop(
            _builds(self._plan, self._path, self._engine, options),
            rules,
            self._limits.memory_bytes or usable_memory() // 2,
            self._log,
            trace=trace,
            open_place=_open_place,
            share=_share,
        )

    def __repr__(self) -> str:
        model = "given as bytes" if self._in_memory else os.path.basename(self._path)
        devices = ", ".join(str(process.device) for process in self._plan.processes)
        return f"<Master {model} on {devices}: {self._loop.state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Master has worker processes, so it cannot be copied or pickled: make one in each process, or "
            "use mcinfer.ort.InferenceSession, which is pickled as what it was made from"
        )

    # Life.

    def start(self) -> Self:
        """Start every worker, and return when all have loaded the model.

        Raises:
            BuildError: A worker failed; names each, with the engine's message. No process is left behind.
            ModelNotFoundError: The file does not exist.
            MissingDependencyError: A package is not installed; says which.
            ClosedError: The master is closed, or was started before.
        """
        self._inbox.claim_start()
        try:
            if self._in_memory is None and not os.path.lexists(self._path):
                text = f"model: there is no file {self._path!r}"
                self._inbox.refuse_start(ModelNotFoundError(text))
            built = self._loop.start()
            model = ModelSpec(inputs=specs_of(built.inputs), outputs=specs_of(built.outputs))
            self._description = ModelDescription(
                about=built.about,
                properties=built.properties,
                overridable=specs_of(built.overridable),
                provider_options=built.provider_options,
            )
            on_one = len(self._plan.groups) == 1
            whole = f"{built.random} draws random numbers" if built.random else ""
            if whole and not on_one:
                whole += ", and each worker draws for itself"
            self._planner = self._loop.planner(model, built)
            self._learner = Learner(
                model=model,
                planner=self._planner,
                threads=self._waiting,
                said=self._said,
                verify=self._verify,
                log=self._log,
                engine=self._engine,
                identity=built.model,
                whole=whole,
                ragged=built.ragged,
                joins=self._max_rows > 1,
            )
            if whole and not (on_one or self._said.inputs):
                self._learner.splitter.warn(whole)
            self._model = model
        except BaseException:
            self.close()
            raise
        return self

    def close(self, timeout: float | None = None, *, drain: bool = False) -> None:
        """End all workers. Requests in flight fail with `ClosedError`. Safe to call again.

        Arrays from answers and from `allocate` stay valid.

        Args:
            timeout: Seconds for the workers to end by themselves before they are killed; None is
                `Timeouts.close`. With `drain`, seconds for the requests to be answered; None waits as long
                as their own time-outs.
            drain: Whether to answer accepted requests first. New requests fail with `ClosedError`, and so do
                those that are not answered in time. Ctrl-C or another `close` ends the wait.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        FLAG.kept("drain", drain)
        if self._inbox.is_forked:
            return  # what there is to close is another process's, and so are the threads that hold locks
        try:
            self._loop.close(timeout, drain=drain)
            self._waiting.close(wait=self._inbox.may_wait())
        finally:  # also when Ctrl-C ends the waiting: the rest then goes on by itself
            self._waiting.close(wait=False)
            if hasattr(self, "_planner"):
                self._planner.close()
            # It holds the loop, which holds the error of a failed start, whose traceback holds this.
            self._finalizer.detach()
            if self._in_memory is not None and self._inbox.finished:
                self._in_memory.close()  # else the loop does, when it has no worker to start any more

    # Health.

    def health(self) -> Health:
        """The present state of the pool, and the reasons. The answer comes at once: it asks no worker.

        Only a request's time-out shows that a run takes too long, so give requests a time-out.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        return self._supervision.health()

    def wait_ready(self, timeout: float | None = None) -> Health:
        """Wait until every worker serves. Workers that died restart by themselves.

        Args:
            timeout: Seconds; None is `Timeouts.start`.

        Returns:
            The health, which is ``"ready"``.

        Raises:
            ReadyTimeoutError: Not all workers were ready in time; names the others' states and the reasons.
            ClosedError: The master is closed, or was not started.
        """
        seconds = self._patience("wait_ready", timeout, 1)
        end = monotonic() + seconds
        pause = Outcome[None]()
        while True:
            health = self.health()
            if health.state == "ready":
                return health
            if self._inbox.start_claims:
                raise ClosedError(NOT_STARTED)
            if self._inbox.finished or health.state in ("closing", "closed"):
                raise ClosedError(f"the master does not become ready any more: {health}")
            left = end - monotonic()
            if left <= 0:
                raise ReadyTimeoutError(f"not ready within {seconds:g} s: {health}")
            pause.wait(min(left, _HEALTH_INTERVAL))

    def restart_workers(self, timeout: float | None = None) -> None:
        """Replace every worker's process by a new one, one after another. No request fails because of this.

        A worker gets no new requests, answers those that it has, ends, and is started again; then the next
        one. The other workers serve meanwhile; with only one worker, requests wait for it. A worker past
        its restart budget is the first, gets a new budget, and its start does not wait.

        Args:
            timeout: Seconds for all workers together; None is `Timeouts.start` for each worker.

        Raises:
            ReadyTimeoutError: Not all were replaced in time; the replacements go on.
            WorkerDiedError: A new process could not load the model within its budget of starts. It is
                started again at the longest back-off; the others stay as they are.
            InvalidInputError: The model runs in this process.
            ClosedError: The master is closed, or was not started.
        """
        self._ready()
        if not isinstance(self._loop, Loop):
            raise InvalidInputError("devices: got 'inline', expected workers to restart")
        self._loop.supervision.restart_workers(
            self._patience("restart_workers", timeout, len(self._plan.groups))
        )

    def _patience(self, call: str, timeout: float | None, workers: int) -> float:
        """The time limit, in seconds, of a call that waits for workers to be ready."""
        if not self._inbox.may_wait():
            raise _in_callback(call)
        usual = self._timeouts.start * workers
        return usual if timeout is None else SECONDS.kept("timeout", timeout)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Self:
        import asyncio

        try:
            return await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.close)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import asyncio

        try:
            await asyncio.to_thread(self.close, drain=kind is None)
        except BaseException:  # cancelled, as Ctrl-C does: its thread would wait on
            await asyncio.to_thread(self.close)
            raise

    # What the model is like.

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, in its order: name, dtype, shape with symbols; `ClosedError` before `start`."""
        return self._spec().inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, in its order; `ClosedError` before `start`."""
        return self._spec().outputs

    @property
    def description(self) -> ModelDescription:
        """What ONNX Runtime says of the model; empty without `EngineOptions.describe`.

        `ClosedError` before `start`.
        """
        self._spec()
        return self._description

    def _spec(self) -> ModelSpec:
        if self._model is None:
            raise ClosedError(
                "the model is known once the master is started: call start(), or use it in a with statement"
            )
        return self._model

    # Requests.

    def predict(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
        shards: int | None = None,
        priority: int = 0,
        outputs: Sequence[str] | None = None,
        outputs_on: str = "host",
    ) -> Arrays:
        """Run a whole batch, split over all workers, and wait for the joined answer.

        The first request runs whole on one worker, and again in pieces, unless the split is known; both
        answers are compared (see `split`). Later requests are split.

        Args:
            inputs: Arrays by input name, or in the model's input order: NumPy's, PyTorch's and others with
                ``__array__`` or DLPack, or lists of numbers (a session of `mcinfer.ort` takes neither
                tensors of PyTorch nor inputs by position). Any layout and byte order; arrays from
                `allocate` are not copied, and are borrowed until the call returns. Tensors on NVIDIA
                cards (of CuPy, PyTorch and others, by DLPack), which are C-contiguous, are borrowed as well:
                those in memory from `allocate` or of a result are not copied, others once, on the card.
                Workers wait for what your stream has queued. Some go through the host: while a split is
                learned, where an input is cut along an inner axis, and where workers do not reach the card.
            timeout: Seconds until `PredictTimeoutError`; None is `Timeouts.predict`.
            batch_axes: As in `Master`, for this call. It overrides the master's, name by name.
            output_axes: As in `Master`, for this call. It overrides the master's, name by name.
            shards: Most pieces to cut the batch into, evenly; None is one for each run that the workers that
                serve execute at once; 1 runs it whole on one worker, as `submit` does.
            priority: Among requests that wait for a worker, higher priorities go first. The one that
                waits for longest has its turn after some such runs (docs/architecture.md).
            outputs: Names of the outputs to return; None is all. The model computes all of them in any case.
            outputs_on: ``"host"`` for NumPy arrays; ``"cuda:0"`` for CuPy arrays on that card, and
                ``"device"`` on the pool's first card. Their memory is used again once the last view of
                it is gone and your default stream has read it; wait first for a stream that is made as
                non-blocking. A process that is forked cannot use them.

        Returns:
            Arrays by output name, in the model's order, or that of `outputs`. The caller owns them without
            a time limit. A process that is forked meanwhile gets a copy, made at the fork, which takes time
            and memory.

        Raises:
            InvalidInputError: The inputs do not fit the model, or nothing says how to join an output although
                the call says how to cut inputs. Nothing was sent.
            PredictError: A run raised, or the shards' answers contradict the split.
            WorkerDiedError: Several workers died on one shard, or no worker is left.
            PredictTimeoutError: The time-out passed.
            QueueFullError: A limit was reached.
            MissingDependencyError: The package cuda-bindings or CuPy is needed, and not installed.
            ClosedError: The master is not started, or closed.
        """
        axes = (batch_axes, output_axes)
        try:
            call = self._call(
                inputs, timeout, axes, shards, priority, outputs, outputs_on, "predict"
            )
            return self._answer(call)
        except McinferError as exc:
            self._inbox.note_refusal(exc)
            raise

    def _predict_cancellable(
        self,
        inputs: Inputs,
        outputs: Sequence[str] | None,
        outputs_on: str,
        offer: Callable[[Callable[[], object]], object],
    ) -> Arrays:
        """`predict`, for `mcinfer.ort`, which `CancelledError` ends; `offer` is that of a `Call`."""
        try:
            call = self._call(inputs, None, _NO_AXES, None, 0, outputs, outputs_on)
            call.offer = offer
            return self._answer(call)
        except McinferError as exc:
            self._inbox.note_refusal(exc)
            raise

    def submit(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
        priority: int = 0,
        outputs: Sequence[str] | None = None,
        outputs_on: str = "host",
    ) -> "Future[Arrays]":
        """Queue a request for one worker; return at once unless it must wait for memory.

        For many small requests: each runs whole on the next free worker. (With a model of a fixed batch, a
        multiple of the batch runs as that many pieces.) With `max_batch_size`, several requests may go as
        one run, once the split is known; one with tensors on a card runs by itself. The arguments are those
        of `predict`.

        Returns:
            A future of what `predict` returns and raises. ``cancel()`` works until the future is done, and
            stops a run in progress. Callbacks run in a thread of mcinfer's own, one after another: they may
            call `submit`, but not wait. Arrays from `allocate`, and tensors on cards, are borrowed until the
            future is done.

        Raises:
            McinferError: InvalidInputError, QueueFullError, MissingDependencyError or ClosedError as
                `predict`, before the request is queued.
        """
        call: Call | None = None
        try:
            axes = (batch_axes, output_axes)
            call = self._call(inputs, timeout, axes, 1, priority, outputs, outputs_on)
            return self._learner.submit(call)
        except McinferError as exc:
            self._inbox.note_refusal(exc)
            raise
        finally:
            if call is not None:
                call.weights = NO_WEIGHTS

    def map(
        self,
        requests: Iterable[Inputs],
        *,
        ahead: int | None = None,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Sequence[str] | None = None,
        outputs_on: str = "host",
    ) -> Iterator[Arrays]:
        """Answer many requests, in their order; each runs whole on one worker, as with `submit`.

        The iterator takes the inputs of each request when it needs them, and has at most `ahead` requests in
        flight; None is four for each worker. The time-out, in seconds, is for each request, and the other
        arguments are those of `submit`.

        Returns:
            An iterator of answers. If a request fails, the iterator raises its error and ends. It then
            cancels the requests in flight, as it does when it is closed.

        Raises:
            InvalidInputError: As `predict`; for a request, when the iterator takes it.
        """
        if ahead is None:
            ahead = max(len(self._plan.groups), self._supervision.at_once, self._plan.threads)
            ahead *= 4 * self._plan.pieces
        check_count("ahead", ahead, 1)
        self._ready()
        submit = partial(
            self.submit, timeout=timeout, priority=priority, outputs=outputs, outputs_on=outputs_on
        )
        return _in_order(map(submit, requests), ahead)

    async def predict_async(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
        shards: int | None = None,
        priority: int = 0,
        outputs: Sequence[str] | None = None,
        outputs_on: str = "host",
    ) -> Arrays:
        """`predict` for asyncio; cancelling the task cancels the request.

        The event loop's thread checks and copies the inputs before the first wait, to ordinary memory if no
        shared memory is free. Arrays from `allocate`, and tensors on cards, are borrowed until it is done.
        """
        call: Call | None = None
        future: OutcomeFuture[Arrays] | None = None
        try:
            axes = (batch_axes, output_axes)
            call = self._call(inputs, timeout, axes, shards, priority, outputs, outputs_on)
            call.keeps = True
            if not call.split_state.splits and self._learner.may_look(call):
                return await self._answer_in_thread(call, partial(self._answer, call))
            try:
                future = self._learner.submit(call, wait=False)
            except QueueFullError:
                if "wait" not in (self._limits.when_full, self._limits.when_queue_full):
                    raise
                # Waiting for room would stop the event loop; and not with memory in hand.
                call.inputs = self._planner.copies(inputs)
                future = await self._waiting.answer(
                    partial(self._learner.submit, call),
                    call.start + call.timeout,
                    QueueFullError("the queue or the memory was full until the time was over"),
                )
            return await future.answer()
        except PredictError as exc:
            if call is None or not call.may_be_rescued:
                raise
            answer = await self._answer_in_thread(call, partial(self._learner.rescue, call, exc))
            if answer is None:
                raise
            return answer
        except McinferError as exc:
            self._inbox.note_refusal(exc)
            raise
        finally:
            if call is not None:
                call.weights = NO_WEIGHTS
            future = None  # as in `predict`

    async def _answer_in_thread(self, call: Call, answer: Callable[[], _T]) -> _T:
        """Answer a call in a thread, by copies of its inputs; cancelling the task cancels the call."""
        if not call.rows:  # else it has run in pieces, and has copies
            call.inputs = self._planner.host_copies(call)
        ends: list[Callable[[], object]] = []
        is_over = False

        def offer(end: Callable[[], object]) -> None:
            ends.append(end)
            if is_over:  # read after the append, and set before `ends` is read: one of both ends it
                end()

        call.offer = offer
        try:
            return await self._waiting.answer(
                answer,
                call.start + call.timeout + LATE_SECONDS,
                PredictTimeoutError(
                    "no answer in time: the thread that compares answers is held up"
                ),
            )
        except BaseException:
            is_over = True
            for end in ends:
                end()
            raise
        finally:
            ends.clear()  # they hold requests, and the tracebacks of the errors of these hold them

    # How a batch is split.

    @property
    def split(self) -> Split:
        """How a batch is split and its outputs are joined, as far as it is known; print it for a table.

        Axes that a single call gives do not count here. `ClosedError` before `start`.
        """
        self._spec()
        updated = self._planner.weights.current.number > 0
        return self._learner.splitter_for(*_NO_AXES, updated).state.split

    def learn(
        self,
        example: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
    ) -> Split:
        """Learn from an example how a batch is split, replace what was known, and record the result.

        The example, inputs as for `predict`, runs whole on one worker, and in pieces. Where its rows show
        nothing (a single one, equal ones), rows that are made out of them do the same. The time-out, in
        seconds, is for all runs, and the other arguments are those of `predict`.

        Returns:
            The split afterwards; `Split.checked` says whether the example has shown it.

        Raises:
            McinferError: As `predict`, if the whole run fails.
        """
        call = self._call(example, timeout, (batch_axes, output_axes), None, waiting="learn")
        try:
            return self._learner.relearn(call)
        finally:
            call.weights = NO_WEIGHTS

    def warm_up(self, example: Inputs, *, timeout: float | None = None) -> None:
        """Run an example on every worker, so that the first real request of its shapes is not slower.

        A runtime allocates and tunes in its first runs, and the first request that shows how its batch is
        split runs twice (see `split`). Workers that do not serve now are left out.

        Args:
            example: Inputs as for `predict`.
            timeout: Seconds for all runs together; None is `Timeouts.predict`.

        Raises:
            PredictTimeoutError: The time-out passed before every worker had run the example.
            McinferError: As `predict`.
        """
        timeout = self._timeouts.predict if timeout is None else SECONDS.kept("timeout", timeout)
        end = monotonic() + timeout
        before = {w.index: w.runs for w in self.statistics().workers}
        while True:
            self.predict(example, timeout=max(0.0, end - monotonic()))
            left = max(0.0, end - monotonic())
            call = self._call(example, left, _NO_AXES, 1)
            call.limited = call.joins = False  # or only one at a time might have a place, or run
            for future in [self._learner.submit(call) for _ in before]:
                future.result()
            workers = self.statistics().workers
            serving = [w for w in workers if w.state in ("ready", "busy")]
            cold = [w.index for w in serving if w.runs == before[w.index]]
            if not cold:
                return
            if monotonic() >= end:
                raise PredictTimeoutError(f"workers {cold} did not run within {timeout:g} s")

    def allocate(self, shapes: Mapping[str, Sequence[int]], *, device: str | None = None) -> Arrays:
        """Writable arrays in shared memory, for inputs that are sent without a copy.

        Args:
            shapes: By input name, the shape: any batch, all rows C-contiguous.
            device: None for NumPy arrays; ``"cuda:0"`` for CuPy arrays on that card, ``"device"`` on the
                pool's first card. This process then uses the card, too.

        Returns:
            Arrays of the inputs' dtypes with undefined content. The caller owns them; their memory is free
            again when the last view of it is gone, on a card as that of results (`predict`). A forked child
            has a copy, as of answers, but not of arrays on cards.

        Raises:
            InvalidInputError: An unknown name, another number of dimensions, more bytes than the limit, no
                such card, or a type that CuPy lacks.
            MemoryFullError: The memory is in use.
            MissingDependencyError: The package cuda-bindings or CuPy is not installed.
            ClosedError: The master is not started, or closed.
        """
        self._ready()
        place = None if device is None else self._place(device, "device")
        return self._planner.allocate(shapes, 0.0, place)

    @property
    def weights(self) -> tuple[TensorSpec, ...]:
        """The weights that `update_weights` may replace; `ClosedError` before `start`."""
        self._spec()
        return self._planner.weights.specs

    def update_weights(
        self, weights: Mapping[str, ArrayLike], *, timeout: float | None = None
    ) -> int:
        """Replace weights on all workers at once, between two requests.

        Earlier requests finish with the weights that they began with. Requests made after the return use the
        new weights, and so do restarted workers. The new weights are copied to shared memory once, for any
        number of workers.

        Args:
            weights: New values by name, each with the dtype and shape in `weights`; other weights stay as
                they are. The call copies the values before it returns.
            timeout: Seconds to wait for shared memory, if all of it is in use (`Limits`); None is
                `Timeouts.predict`.

        Returns:
            The number of this version, as in `statistics().weights_version`: 1 for the first update.

        Raises:
            InvalidInputError: A name, dtype or shape does not fit; names it. After any of these errors, no
                weight was changed.
            MemoryFullError: No shared memory was free.
            PredictError: The system has no shared memory left.
            ClosedError: The master is not started, or closed.
        """
        self._ready()
        seconds = self._timeouts.predict if timeout is None else SECONDS.kept("timeout", timeout)
        waits = self._limits.when_full == "wait" and self._inbox.may_wait()
        return self._planner.weights.update(weights, seconds if waits else 0.0)

    def statistics(self) -> Statistics:
        """A snapshot of the counts so far; also after `close`.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        version = 0 if self._model is None else self._planner.weights.current.number
        return self._loop.statistics(version)

    def _ready(self, *, for_request: bool = False) -> None:
        self._inbox.check_open(for_request=for_request)
        if self._model is None:
            raise ClosedError("the master is still starting")

    # A call on its way.

    def _call(
        self,
        inputs: Inputs,
        timeout: float | None,
        axes: tuple[Axes | None, Axes | None],
        pieces: int | None,
        priority: int = 0,
        outputs: Sequence[str] | None = None,
        outputs_on: str = "host",
        waiting: str = "",
    ) -> Call:
        """The arguments of a request, all checked except the inputs.

        `waiting` names a method that waits for the answer, which a callback must not do.
        """
        place = None
        if outputs is not None:
            self._check_outputs(outputs)
        if outputs_on != "host":
            specs = self._spec().outputs
            wanted = [spec for spec in specs if outputs is None or spec.name in outputs]
            place = self._place(outputs_on, "outputs_on", wanted)
        if type(priority) is not int:
            raise InvalidInputError(f"priority: got {priority!r}, expected an int")
        self._ready(for_request=True)
        if waiting and not self._inbox.may_wait():
            raise _in_callback(waiting)
        timeout = self._timeouts.predict if timeout is None else SECONDS.kept("timeout", timeout)
        start = monotonic()
        joins = pieces == 1 and self._max_rows > 1
        if pieces is None:
            pieces = self._plan.pieces * max(1, self._supervision.at_once)
        else:
            check_count("shards", pieces, 1)
        weights, splitter = self._planner.weights.current, self._learner.splitter
        updated = weights.number > 0
        if axes != _NO_AXES or splitter.updated != updated:
            splitter = self._learner.splitter_for(*axes, updated)
        return Call(
            inputs,
            splitter,
            splitter.state,
            weights,
            pieces,
            joins,
            start,
            timeout,
            priority,
            outputs,
            place,
            None if self._trace is None else copy_context(),
        )

    def _answer(self, call: Call) -> Arrays:
        """Answer a call: learn from it, or hand it on."""
        try:
            answer = None if call.split_state.splits else self._learner.try_answer(call)
            return self._planner.answer_call(call) if answer is None else answer
        except PredictError as exc:
            answer = self._learner.rescue(call, exc)
            if answer is None:
                raise
            return answer
        finally:
            call.weights = NO_WEIGHTS

    def _place(self, text: str, name: str, specs: Sequence[TensorSpec] = ()) -> Place:
        """The place that an argument of this name says, for tensors like these."""
        from mcinfer.cards.tensors import place_of  # no other argument needs it

        self._ready()
        if not isinstance(self._loop, Loop):
            raise InvalidInputError(
                f"{name}: got {text!r} with devices='inline', expected the host's memory"
            )
        pool = [process.device for process in self._plan.processes]
        return place_of(text, name, specs, pool, self._loop.inbox)

    def _check_outputs(self, outputs: Sequence[str]) -> None:
        names = [spec.name for spec in self._spec().outputs]
        if isinstance(outputs, str) or not isinstance(outputs, Sequence):
            raise InvalidInputError(f"outputs: got {outputs!r}, expected a list of some of {names}")
        for name in outputs:
            if name not in names:
                raise InvalidInputError(f"outputs: got {name!r}, expected some of {names}")


def _in_callback(call: str) -> McinferError:
    return McinferError(
        f"{call}() was called in a future's callback, which runs in the thread that it waits for; submit() "
        "may be called there"
    )


def _in_order(futures: "Iterator[Future[Arrays]]", ahead: int) -> Iterator[Arrays]:
    """The results of futures in order, with at most `ahead` of them in flight."""
    taken: deque[Future[Arrays]] = deque()
    try:
        while True:
            taken.extend(islice(futures, ahead - len(taken)))
            if not taken:
                return
            yield taken.popleft().result()
    finally:
        for future in taken:
            future.cancel()


def _builds(plan: PoolPlan, model: str, engine: str, options: EngineOptions) -> list[list[Build]]:
    """By worker, the messages that have its processes load the model.

    Raises:
        InvalidInputError: The options do not fit a message.
    """
    builds = [
        [
            Build(
                model=model,
                engine=engine,
                options=options,
                device=str(process.device),
                **asdict(process.share),
                card_workers=process.card_workers,
                shares_weights=process.shares_weights,
                tensor=plan.parallel.tensor,
                pipeline=plan.parallel.pipeline,
                rank=process.rank,
            )
            for process in group
        ]
        for group in plan.groups
    ]
    try:
        encode(builds[0][0])
    except ProtocolError as exc:
        raise InvalidInputError(f"options: they do not fit a message to a worker: {exc}") from exc
    return builds


def _open_place(device: Device, *given: Any) -> Place:
    """As `OpenPlace`; the module is loaded when a tensor lies on a device, or is to."""
    from mcinfer.cards.tensors import open_memory

    return open_memory(device, *given)


def _share(ranks: int, until: ExitStack) -> list[list[int]]:
    """Descriptors of what the ranks of a group share, by rank; the stack closes them."""
    from mcinfer.ranks.collectives.shm import Shared  # a master without ranks does not need it

    shared = until.enter_context(closing(Shared(ranks)))
    return [shared.fds(rank) for rank in range(ranks)]


def _abandon(loop: "Loop | InlinePool", waiting: WaitingThreads) -> None:
    """Close what a garbage-collected master leaves, without a wait."""
    loop.abandon()
    waiting.close(wait=False)
