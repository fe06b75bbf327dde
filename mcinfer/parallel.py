"""`ParallelPredictUtils`: the class of MindSpore Lite's multi-card sample, with the same names."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from os import PathLike
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from mcinfer.checks import check_count
from mcinfer.config import EngineOptions, Timeouts
from mcinfer.errors import ClosedError, InvalidInputError, is_refusal
from mcinfer.master import Master
from mcinfer.requests.tensors import Arrays, Inputs
from mcinfer.sharding import Axes
from mcinfer.specs import TensorSpec
from mcinfer.statistics import Statistics

__tracebackhide__ = is_refusal

Tensors = list[NDArray[Any]]


class ParallelPredictUtils:
    """One model on several devices, in four calls.

        utils = ParallelPredictUtils("unet.onnx", 2)
        utils.build_model()
        outputs = utils.run_predict([[sample_0, t, h_0], [sample_1, t, h_1]])
        utils.finalize()

    Args:
        model_path: Path of the model.
        device_num: Number of devices; each gets a worker process.
        device_ids: Indices of the devices, ``device_num`` of them; None is 0 to ``device_num - 1``.
        device_type: Kind of the devices, ``"cpu"`` or ``"cuda"``.
        engine: See `Master`.
        options: Of the engine; see `Master`.
        timeouts: See `Master`.

    Raises:
        InvalidInputError: An argument does not fit.
    """

    def __init__(
        self,
        model_path: str | PathLike[str],
        device_num: int,
        *,
        device_ids: Sequence[int] | None = None,
        device_type: str = "cpu",
        engine: str = "onnxruntime",
        options: EngineOptions = EngineOptions(),
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        check_count("device_num", device_num, 1)
        ids = [*range(device_num)] if device_ids is None else [*device_ids]
        if len(ids) != device_num:
            raise InvalidInputError(
                f"device_ids: got {len(ids)} ids {ids}, expected device_num of them: {device_num}"
            )
        devices = [f"{device_type}:{device_id}" for device_id in ids]
        self._device_num = device_num
        self._master = Master(
            model_path, devices, engine=engine, options=options, timeouts=timeouts
        )
        self._built = False

    def build_model(self) -> None:
        """Start the workers and load the model in all of them at once; see `Master.start`."""
        self._master.start()
        self._built = True

    def run_predict(self, inputs: Sequence[Inputs]) -> list[Tensors]:
        """Run one set of inputs per device, all at the same time.

        Args:
            inputs: For each device, the arrays in the model's input order (or by name). A set runs on the
                next free worker; the answer does not depend on the worker. An array whose elements are as
                many as the model's input has, and whose shape differs in dimensions of size 1 alone, fits:
                ``sample[0]`` for a batch of 1, or a scalar for the shape ``[1]``.

        Returns:
            For each device, in the same order, the arrays in the model's output order.

        Raises:
            InvalidInputError: There is not one set per device, or a set does not fit the model.
            PredictError, WorkerDiedError, PredictTimeoutError, QueueFullError, ClosedError: As
                `Master.predict`. The other devices' answers are dropped, never kept for a later call.
        """
        self._check_built()
        if isinstance(inputs, Mapping) or len(inputs) != self._device_num:
            raise InvalidInputError(
                f"inputs: got {len(inputs)} sets, expected one per device: {self._device_num}"
            )
        futures: list[Future[Arrays]] = []
        try:
            futures.extend(self._master.submit(self._fitted(item)) for item in inputs)
            return [[*future.result().values()] for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    @overload
    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
    ) -> Arrays: ...
    @overload
    def predict(
        self,
        inputs: Sequence[Any],
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
    ) -> Tensors: ...
    def predict(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        batch_axes: Axes | None = None,
        output_axes: Axes | None = None,
    ) -> Tensors | Arrays:
        """Run a whole batch, split over the devices, and join the answers; see `Master.predict`.

        Inputs are a list in the model's order or a mapping by name, and fit as with `run_predict`; outputs
        come in the same form.
        """
        self._check_built()
        outputs = self._master.predict(
            self._fitted(inputs), timeout=timeout, batch_axes=batch_axes, output_axes=output_axes
        )
        return outputs if isinstance(inputs, Mapping) else [*outputs.values()]

    def finalize(self) -> None:
        """End the workers. Safe to call again, or before `build_model`."""
        self._master.close()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, after `build_model`; see `Master.inputs`."""
        return self._master.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, after `build_model`; see `Master.outputs`."""
        return self._master.outputs

    def statistics(self) -> Statistics:
        """The counts so far; see `Master.statistics`."""
        return self._master.statistics()

    def __enter__(self) -> Self:
        self.build_model()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._master.close(drain=kind is None)

    def _fitted(self, inputs: Inputs) -> Inputs:
        """The inputs in the shapes of the model, where they differ in dimensions of size 1 alone."""
        specs = self._master.inputs
        if isinstance(inputs, Mapping):
            named = {spec.name: spec for spec in specs}
            return {
                name: _fitted(value, named[name]) if name in named else value
                for name, value in inputs.items()
            }
        if not isinstance(inputs, Sequence) or len(inputs) != len(specs):
            return inputs  # the master says what is wrong
        return [*map(_fitted, inputs, specs)]

    def _check_built(self) -> None:
        if not self._built:
            raise ClosedError("call build_model() first")


def _fitted(value: Any, spec: TensorSpec) -> Any:
    """The value in the input's shape, if both have the same sizes but for those of 1; else as it is.

    Upstream compares bytes alone. Where the value has fewer dimensions than the model, the sizes that the
    model leaves free are the value's, or all 1.
    """
    try:
        shape = np.shape(value)
    except ValueError:  # rows of several lengths
        return value
    free = sum(not isinstance(size, int) for size in spec.shape)
    if not spec.shape or (free and len(shape) >= len(spec.shape)):
        return value
    sizes = [size for size in shape if size != 1]
    taken = len(sizes) - sum(isinstance(size, int) and size != 1 for size in spec.shape)
    if taken not in (0, free):
        return value
    left = iter(sizes)
    wanted = tuple(
        next(left) if size != 1 and (taken or isinstance(size, int)) else 1 for size in spec.shape
    )
    if shape == wanted or not spec.admits(wanted):
        return value
    if hasattr(value, "reshape"):
        return value.reshape(wanted)
    # Of Python's own numbers and texts, which take the input's type.
    return np.array(value, object).reshape(wanted).tolist()
