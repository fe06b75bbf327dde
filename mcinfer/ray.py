"""Masters in Ray's actors: for Ray Data, as an actor of its own, and for Ray Serve.

::

    node 1                                            node 2
    ------                                            ------
    actor (Ray's process) ─ Master ═► workers         actor ─ Master ═► workers
    actor                 ─ Master ═► workers         actor ─ Master ═► workers
              │                  │
              │                  └ one copy of the weights on a node: the model cache's files
              └ what Ray assigned: its GPUs, or as many threads as CPUs

Ray counts CPUs, but ties no process to a core. Nor are workers pinned here: actors that do not know of each
other would choose the same cores. An actor that ends takes the workers of its master with it.
"""

import inspect
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcinfer.config import INLINE, Device, EngineOptions, Parallel, parse_devices
from mcinfer.errors import ClosedError, InvalidInputError, QueueFullError
from mcinfer.extras import requires
from mcinfer.locks import Lock
from mcinfer.machine import whole_cpus
from mcinfer.master import Master
from mcinfer.private import SerializableModel
from mcinfer.requests.tensors import Arrays, Inputs
from mcinfer.sharding import Axes
from mcinfer.statistics import Health, Statistics

with requires("mcinfer.ray needs the package ray", "ray", extra="ray"):
    import ray

_log = logging.getLogger("mcinfer.ray")

_PATIENCE = 10.0
"""Seconds without a batch, after which an actor of Ray Data looks whether one can come."""

ModelSource: TypeAlias = str | os.PathLike[str] | bytes | SerializableModel | ray.ObjectRef
"""What `Predictor` takes for a model."""


class Predictor:
    """A model for ``Dataset.map_batches``: dictionaries of arrays in, dictionaries of arrays out.

    ::

        dataset.map_batches(
            mcinfer.ray.Predictor,
            fn_constructor_args=("model.onnx",),
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=4,
        )

    In an actor of Ray, the master starts with the object. Elsewhere it starts with the first call, so a
    program can try its predictor before it uses Ray. Pickling takes the arguments alone, without the master:
    an object that is given in place of the class starts its workers again in each task.

    Args:
        model: Path of the model on each node, the model as bytes or `onnx.ModelProto`, or what ``ray.put``
            returned for its bytes: then no node needs the file. A relative path is taken from the working
            folder of the process that starts the workers, which Ray may set (``working_dir``).
        devices: As in `Master`. None is what Ray assigned to the actor or task: ``cuda:i`` for its GPUs;
            else its CPUs, in as many shares as `Master` would make of so many. Without either, all CPUs as
            in `Master`. CPU devices have as many threads together as Ray assigned CPUs, on any core;
            ``"inline"``, a session in the actor's own process, too.
        batch_axes: As in `Master`.
        keep: Columns to pass on beside the outputs. None: those that are no inputs of the model.
        outputs: Names of the outputs to return; None is all.
        master_options: Further options of `Master`, by name. With ``options=EngineOptions(cores=...)``, None
            for `devices` is a CPU worker for each list of cores.

    Raises:
        InvalidInputError: An argument is invalid.
        BuildError: The model cannot be loaded; ModelNotFoundError: There is no such file on this node.
    """

    def __init__(
        self,
        model: ModelSource,
        devices: int | str | Sequence[int | str] | None = None,
        *,
        batch_axes: Axes | None = None,
        keep: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        **master_options: Any,
    ) -> None:
        self._keep = _names("keep", keep)
        self._outputs = _names("outputs", outputs)
        self._model = model
        self._devices = devices
        self._options = {"batch_axes": batch_axes, **master_options}
        _check_options(self._options)
        self._prepare()
        if _place() == "actor":
            self._start()
            self._watch_for_stall()

    def _prepare(self) -> None:
        """Set up what is not pickled."""
        self._lock = Lock()
        self._master: Master | None = None
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        names = ("_keep", "_outputs", "_model", "_devices", "_options")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    # Life.

    @property
    def master(self) -> Master:
        """The master, which this starts if it was not. `ClosedError` after `close`."""
        return self._master or self._start()

    def _start(self) -> Master:
        with self._lock:
            if self._closed:
                raise ClosedError("the predictor is closed")
            if self._master is None:
                if _place() == "task":
                    _log.warning(
                        "this task of Ray's starts workers for itself alone: an actor keeps them for all "
                        "batches. Give map_batches the class (Predictor, fn_constructor_args=...)"
                    )
                self._master = self._new_master().start()
                if self._closed:  # by a signal's handler
                    self.close()
                    raise ClosedError("the predictor was closed while it was starting")
            return self._master

    def _new_master(self) -> Master:
        model = ray.get(self._model) if isinstance(self._model, ray.ObjectRef) else self._model
        options, devices = dict(self._options), self._devices
        engine = options.get("options", EngineOptions())
        cards, cpus = _assigned()
        if devices is None and cards:
            devices = cards
        elif devices is None and isinstance(options.get("parallel"), Parallel):
            devices = options["parallel"].devices
        elif devices is None and engine.cores is not None:
            devices = len(engine.cores)
        if cpus and engine.cores is None:
            chosen = parse_devices(devices, min(max(1, int(cpus)), whole_cpus()))
            if all(device.kind in ("cpu", INLINE) for device in chosen):
                devices = [str(device) for device in chosen]
                options["options"] = self._of_so_many(chosen, cpus, engine)
        if devices in (INLINE, [INLINE]):
            options.setdefault("inline_threads", 1)  # an actor is called once at a time
        return Master(model, devices, **options)

    def _of_so_many(
        self, devices: Sequence[Device], cpus: float, engine: EngineOptions
    ) -> EngineOptions:
        """The options of the engine for devices that have so many CPUs together, on any core."""
        usable = sorted(os.sched_getaffinity(0))
        share = min(int(cpus), len(usable), whole_cpus()) // len(devices)
        config = dict(engine.session_config)
        if self._options.get("engine", "onnxruntime") == "onnxruntime":
            # Threads that spin would take cores of others.
            config.setdefault("session.intra_op.allow_spinning", "0")
        return replace(
            engine,
            cores=None if devices[0].kind == INLINE else [usable] * len(devices),
            threads=engine.threads or max(1, share + 1 - engine.runs_at_once),
            session_config=config,
        )

    def _watch_for_stall(self) -> None:
        """Warn if no batch can come, since actors hold all the CPUs that read tasks need."""
        stall = threading.Timer(_PATIENCE, _check_for_stall, [self.statistics])
        stall.daemon = True
        stall.start()

    def close(self) -> None:
        """End the workers. Safe to call again.

        Nothing must call it: what ends the actor, or collects this object, ends the workers.
        """
        with self._lock:
            self._closed = True
            if self._master is not None:
                self._master.close()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests.

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run a batch of Ray Data, split over all workers.

        Args:
            batch: By column, an array with a row for each row of the batch, as ``batch_format="numpy"``
                gives. Columns named as the model's inputs are its inputs. They are read where Ray has them
                (in its object store, read-only), and copied once, into shared memory. A column of arrays
                (dtype object), as Ray makes of images of several sizes, is stacked before.

        Returns:
            The outputs, and the columns to keep: arrays by name, which the caller owns.

        Raises:
            InvalidInputError: A column is missing, does not fit the model, or has the name of an output; an
                output has no row for each row of the batch.
            McinferError: As `Master.predict`.
        """
        master = self.master
        if not isinstance(batch, Mapping):
            raise InvalidInputError(
                f"batch: got {type(batch).__name__}, expected arrays by column, as "
                "map_batches(..., batch_format='numpy') gives"
            )
        if missing := [spec.name for spec in master.inputs if spec.name not in batch]:
            raise InvalidInputError(
                f"batch: missing columns {missing} of the model's inputs, got {[*batch]}"
            )
        inputs = {spec.name: _stacked(spec.name, batch[spec.name]) for spec in master.inputs}
        kept = [name for name in batch if name not in inputs] if self._keep is None else self._keep
        names = [spec.name for spec in master.outputs]
        for name in kept:
            if name not in batch:
                raise InvalidInputError(f"keep: got {name!r}, expected some of {[*batch]}")
            if name in (names if self._outputs is None else self._outputs):
                raise InvalidInputError(
                    f"column {name!r} has the name of an output: rename it, or leave it out with keep="
                )
        rows = len(next(iter(batch.values()), ()))
        answer = master.predict(inputs, outputs=self._outputs)
        for name, array in answer.items():
            if array.shape[:1] != (rows,):
                raise InvalidInputError(
                    f"output {name!r} has the shape {array.shape}, expected a row for each of the {rows} "
                    "of the batch: leave it out with outputs="
                )
        return {**{name: batch[name] for name in kept}, **answer}

    def predict(self, inputs: Inputs, **arguments: Any) -> Arrays:
        """`Master.predict`. Nothing but inputs is accepted, and nothing but outputs comes back."""
        return self.master.predict(inputs, **{"outputs": self._outputs, **arguments})

    def update_weights(
        self, weights: Mapping[str, ArrayLike], *, timeout: float | None = None
    ) -> int:
        """`Master.update_weights`, for this actor. Other actors keep their weights."""
        return self.master.update_weights(weights, timeout=timeout)

    def health(self) -> Health:
        """`Master.health`; it asks no worker."""
        return self.master.health()

    def statistics(self) -> Statistics:
        """`Master.statistics`."""
        return self.master.statistics()


class ModelActor(Predictor):
    """What `Actor` makes remote. It may wait for calls as long as it likes."""

    def _watch_for_stall(self) -> None: ...


Actor: Any = ray.remote(num_cpus=1, max_concurrency=16)(ModelActor)
"""`Predictor` as an actor: `predict`, `health`, `statistics`, `update_weights`, `close`, all ``.remote``.

::

    actor = mcinfer.ray.Actor.options(num_cpus=4).remote("model.onnx")
    answer = ray.get(actor.predict.remote({"image": images}))

It has one CPU and answers 16 calls at once, unless ``options`` says otherwise. Calls that are under way at
once may be answered in any order: wait for `update_weights` before calls that need the new weights.
"""


# What Ray assigned.


def _place() -> Literal["actor", "task", "program"]:
    """What of Ray's this process runs, or a program of the user's; it does not connect to Ray."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.worker.mode != ray.WORKER_MODE:
        return "program"
    return "actor" if context.get_actor_id() is not None else "task"


def _assigned() -> tuple[list[str], float]:
    """The cards that Ray assigned to this process, and the number of CPUs; no card and 0 in a program."""
    if _place() == "program":
        return [], 0.0
    cards = assigned_cards(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    resources = ray.get_runtime_context().get_assigned_resources()
    return cards, float(resources.get("CPU", 0.0))


def assigned_cards(ids: Sequence[int | str], visible: str | None) -> list[str]:
    """The devices that GPU ids of Ray's mean in this process.

    ``cuda:i`` counts what ``CUDA_VISIBLE_DEVICES`` leaves. Ray sets that to the ids that it assigned, unless
    ``RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`` forbids it.

    Args:
        ids: As `ray.get_gpu_ids` returns them: numbers of GPUs, or words of the variable; in any order.
        visible: The variable; None if it is not set.

    Raises:
        InvalidInputError: An id is none of the variable's words.
    """
    words = None if visible is None else [word.strip() for word in visible.split(",")]
    indices = []
    for given in map(str, ids):
        if words is None and given.isdecimal():
            indices.append(int(given))
        elif words is not None and given in words:
            indices.append(words.index(given))
        else:
            raise InvalidInputError(
                f"devices: Ray assigned GPU {given}, which CUDA_VISIBLE_DEVICES={visible!r} hides"
            )
    return [f"cuda:{index}" for index in sorted(indices)]


def _check_for_stall(counts: Callable[[], Statistics]) -> None:
    """Warn if no batch has come, and there is no CPU left for tasks that read data."""
    with suppress(Exception):  # Ray may be shutting down
        if not counts().accepted and ray.available_resources().get("CPU", 0.0) < 1:
            _log.warning(
                "no batch came in %g s, and the cluster has no CPU free. Ray Data's tasks, which read the "
                "data, wait for a CPU for ever if actors have them all: give the actors fewer (num_cpus=), "
                "or make fewer actors",
                _PATIENCE,
            )


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise if these are no options of `Master`'s, before an actor is made for them."""
    inspect.signature(Master).bind("model", **options)
    engine = options.get("options", EngineOptions())
    if not isinstance(engine, EngineOptions):
        raise InvalidInputError(f"options: got {type(engine).__name__}, expected EngineOptions")


def _stacked(name: str, column: Any) -> Any:
    """A column whose rows are arrays of their own (dtype object) as one array; any other as it is."""
    rows = isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1
    if not rows or not len(column) or not all(isinstance(row, np.ndarray) for row in column):
        return column
    try:
        return np.stack(column)
    except ValueError as exc:
        shapes = sorted({row.shape for row in column})
        raise InvalidInputError(
            f"column {name!r}: got rows of the shapes {shapes}, expected one shape: {exc}"
        ) from exc


def _names(argument: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """A list of names, checked."""
    if names is None:
        return None
    listed = isinstance(names, Sequence) and not isinstance(names, (str, bytes))
    if not listed or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"{argument}: got {names!r}, expected a list of names")
    return tuple(names)


# Ray Serve.


class _Replica:
    """A replica of a deployment; arguments as of `Predictor`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._actor = ModelActor(*arguments, **options)
        self._outputs = options.get("outputs")

    async def __call__(self, request: Any) -> Any:
        """A request of HTTP, or a mapping of arrays by a handle."""
        from starlette.requests import Request

        if isinstance(request, Request):  # which is a mapping, too
            return await self._answer_http(request)
        return await self.predict(request)

    async def predict(self, inputs: Inputs, **arguments: Any) -> Arrays:
        """`Master.predict_async`, on one worker unless `shards` says otherwise: many requests run at once."""
        chosen = {"shards": 1, "outputs": self._outputs, **arguments}
        return await self._actor.master.predict_async(inputs, **chosen)

    def check_health(self) -> None:
        """Serve calls it now and then, and replaces a replica that raises."""
        health = self._actor.health()
        if health.state in ("failed", "closed"):
            raise ClosedError(str(health))

    def __del__(self) -> None:
        """Serve calls it before it ends a replica."""
        if hasattr(self, "_actor"):
            self._actor.close()

    async def _answer_http(self, request: Any) -> Any:
        from starlette.responses import Response

        def answer(content: object, status: int = 200) -> Any:
            text = json.dumps(content, allow_nan=False)
            return Response(text, status_code=status, media_type="application/json")

        try:
            outputs = await self.predict(_inputs(await request.body()))
        except InvalidInputError as exc:
            return answer({"error": str(exc)}, 400)
        except QueueFullError as exc:
            return answer({"error": str(exc)}, 503)
        try:
            return answer({"outputs": {name: _to_json(array) for name, array in outputs.items()}})
        except (TypeError, ValueError) as exc:
            return answer({"error": f"an output has a value that JSON has not: {exc}"}, 500)


def _inputs(body: bytes) -> dict[str, Any]:
    """Nested lists by input's name, which the master takes as it takes lists of Python's."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidInputError(f"body: got {len(body)} bytes that are no JSON: {exc}") from exc
    given = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(given, dict):
        raise InvalidInputError('body: expected JSON such as {"inputs": {"x": [[1.0, 2.0]]}}')
    return given


def _to_json(array: NDArray[Any]) -> Any:
    plain = array.dtype.kind in "biufOU"
    return (array if plain else array.astype(np.float64)).tolist()


def deployment(
    model: ModelSource,
    devices: int | str | Sequence[int | str] | None = None,
    *,
    batch_axes: Axes | None = None,
    outputs: Sequence[str] | None = None,
    serve_options: Mapping[str, Any] | None = None,
    **master_options: Any,
) -> Any:
    """A model as an application of Ray Serve: ``serve.run(mcinfer.ray.deployment("model.onnx"))``.

    Each replica is an actor with a master. It runs a request whole on one worker, many requests at once;
    with ``max_batch_size=`` it joins them. A request is either a mapping of arrays, by a handle
    (``handle.remote({"x": x})``), or HTTP with a body such as ``{"inputs": {"x": [[1.0, 2.0]]}}``, which is
    answered by ``{"outputs": {"y": [[…]]}}``, or by status 400 and ``{"error": …}``.

    Args:
        model: As in `Predictor`.
        devices: As in `Predictor`: None is what Ray assigned to the replica.
        batch_axes: As in `Master`.
        outputs: Names of the outputs to return; None is all.
        serve_options: Options of the deployment by name, such as ``num_replicas``, ``autoscaling_config``,
            or ``ray_actor_options={"num_cpus": 4}``.
        master_options: As in `Predictor`.

    Raises:
        MissingDependencyError: Ray Serve is not installed.
        InvalidInputError, TypeError: An option is invalid.
    """
    packages = ("ray", "fastapi", "starlette", "uvicorn")
    with requires("mcinfer.ray.deployment needs Ray Serve", *packages, extra="ray"):
        from ray import serve
    _names("outputs", outputs)
    _check_options({"batch_axes": batch_axes, **master_options})
    chosen = {"name": "mcinfer", **(serve_options or {})}
    return serve.deployment(**chosen)(_Replica).bind(
        model, devices, batch_axes=batch_axes, outputs=outputs, **master_options
    )
