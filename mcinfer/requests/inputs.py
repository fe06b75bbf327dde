"""What a caller gives: values become arrays of the model's types, and requests that fit go together.

It is the same whether workers run the model (`mcinfer.requests.planner`) or this process does
(`mcinfer.inline`), which both build on `InputReader`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.config import Device
from mcinfer.errors import BuildError, InvalidInputError, is_refusal
from mcinfer.logs import PoolLog
from mcinfer.requests.frames import ShapePlan, is_leased
from mcinfer.requests.request import Call, OutcomeFuture
from mcinfer.requests.splitting import SplitState
from mcinfer.requests.tensors import Arrays, Inputs, as_input, device_of
from mcinfer.requests.weights import WeightVersion
from mcinfer.specs import STRING, ModelSpec, TensorSpec

__tracebackhide__ = is_refusal

_MAX_COMMON_BYTES = 4096  # of inputs that all rows share; with larger ones, requests are not joined


class Answers(Protocol):
    """What answers calls: workers, or this process."""

    def arrays(self, inputs: Inputs) -> list[Any]: ...
    def host_arrays(self, call: Call) -> list[NDArray[Any]]: ...
    def host_copies(self, call: Call) -> list[NDArray[Any]]: ...
    def answer_call(self, call: Call) -> Arrays: ...
    def submit(self, call: Call, *, wait: bool = True) -> OutcomeFuture[Arrays]: ...


class InputReader:
    """Reads the inputs of one model's requests, and says which requests may be joined. Any thread calls it.

    Args:
        model: Whose inputs they are.
        log: Has the records about the pool.
        max_rows: Most rows of a run that requests are joined to.
        ragged: A node whose result's size depends on its data; empty without one.

    Attributes:
        apart: Why a request could not join one run with others; empty until there is such a request.
    """

    def __init__(self, model: ModelSpec, log: PoolLog, max_rows: int = 1, ragged: str = "") -> None:
        self._log = log
        self._model = model
        self._max_rows = max_rows
        self._names = tuple(spec.name for spec in model.inputs)
        self._types = tuple((spec, spec.element_type) for spec in model.inputs)
        self._dtypes = tuple(None if kind == STRING else spec.dtype for spec, kind in self._types)
        self._ragged = f"the size of the result of {ragged} depends on its data" if ragged else ""
        self.apart = ""
        if ragged and max_rows > 1:
            self._note_apart(self._ragged)

    # Values.

    def arrays(self, inputs: Inputs) -> list[Any]:
        """The inputs of a request as arrays of the model's types, in its order; shapes are not checked.

        One that lies on a device is what `read_on` gives.

        Raises:
            InvalidInputError: One is missing, unknown or of another type; names it.
        """
        if type(inputs) is dict and len(inputs) == len(self._names):
            arrays = [*map(inputs.get, self._names)]
            for array, dtype in zip(arrays, self._dtypes, strict=True):
                if type(array) is not np.ndarray or array.dtype is not dtype:
                    break
            else:
                return arrays
        return self._converted(inputs)

    def _converted(self, inputs: Inputs) -> list[Any]:
        names = [*self._names]
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
            if len(inputs) != len(names):
                raise InvalidInputError(
                    f"inputs: got {len(inputs)}, expected {len(names)}: {names}"
                )
            inputs = dict(zip(names, inputs, strict=True))
        if not isinstance(inputs, Mapping):
            raise InvalidInputError(
                f"inputs: got {type(inputs).__name__}, expected a mapping by name or a sequence of {names}"
            )
        if inputs.keys() != set(names):
            unknown = [name for name in inputs if name not in names]
            missing = [name for name in names if name not in inputs]
            raise InvalidInputError(
                f"inputs: {f'unknown {unknown}, ' if unknown else ''}"
                f"{f'missing {missing}, ' if missing else ''}expected {names}"
            )
        return [self._input(inputs[spec.name], spec, kind) for spec, kind in self._types]

    def _input(self, value: Any, spec: TensorSpec, element_type: str) -> Any:
        device = device_of(value, spec)
        if device is None:
            return as_input(value, spec, element_type)
        try:
            return self.read_on(device, value, spec)
        except BuildError as exc:
            raise InvalidInputError(
                f"input {spec.name!r} lies on {device}, which cannot be used: {exc}"
            ) from exc

    def read_on(self, device: Device, value: Any, spec: TensorSpec) -> Any:
        """The value for an input that lies on a device; `BuildError` if that cannot be used."""
        del device, value, spec
        raise BuildError("the model runs in this process, expected the host's memory")

    def host_arrays(self, call: Call) -> list[NDArray[Any]]:
        """The inputs of a call as `arrays`; what lies on a device is copied to the host."""
        found = self.arrays(call.inputs)
        return [a if type(a) is np.ndarray else a.on_host(call.timeout) for a in found]

    def host_copies(self, call: Call) -> list[NDArray[Any]]:
        return [*map(np.array, self.host_arrays(call))]

    def copies(
        self, inputs: Inputs, taken: Callable[[int], NDArray[Any] | None] = lambda _: None
    ) -> list[Any]:
        """The inputs as they are now, whatever becomes of the caller's arrays; what is borrowed stays so.

        What a new request has taken, by its index, is not copied again.
        """
        found = self.arrays(inputs)
        for i, array in enumerate(found):
            if not is_leased(array):
                mine = taken(i)
                found[i] = np.array(array) if mine is None else mine
        return found

    def empty_inputs(
        self,
        shapes: Mapping[str, Sequence[int]],
        empty: Callable[[TensorSpec, tuple[int, ...]], NDArray[Any]],
    ) -> Arrays:
        """Arrays for inputs, by name, that `empty` makes; raises `InvalidInputError` as `Master.allocate`."""
        specs = {spec.name: spec for spec in self._model.inputs}
        arrays: Arrays = {}
        if not isinstance(shapes, Mapping):
            raise InvalidInputError(
                f"shapes: got {type(shapes).__name__}, expected a mapping of input names to shapes"
            )
        for name, given in shapes.items():
            if name not in specs:
                known = [*specs]
                raise InvalidInputError(f"shapes: unknown input {name!r}, expected some of {known}")
            spec = specs[name]
            try:
                shape = tuple(index(size) for size in given)
            except TypeError as exc:
                raise InvalidInputError(
                    f"shapes: got {given!r} for {name!r}, expected {spec}"
                ) from exc
            if spec.element_type == STRING:
                raise InvalidInputError(
                    f"shapes: input {spec} cannot lie in shared memory as an array"
                )
            if (spec.shape and len(shape) != len(spec.shape)) or min(shape, default=0) < 0:
                raise InvalidInputError(f"shapes: got {list(shape)} for {name!r}, expected {spec}")
            arrays[name] = empty(spec, shape)
        return arrays

    # Dynamic batching.

    def _cut(
        self, shapes: Sequence[sharding.Shape], pieces: int, state: SplitState | None
    ) -> tuple[sharding.Cut, str, tuple[object, ...]]:
        """How a request of these shapes is cut, and `apart` and `alike` of its plan."""
        split = None if state is None else state.split
        cut = sharding.cut_batch(self._model, shapes, pieces, split)
        if self._max_rows == 1:
            return cut, "", ()
        apart = self._why_apart(cut, is_checked=split is not None and split.checked)
        alike = tuple(
            (axis, shape if axis is None else sharding.resized(shape, axis, -1))
            for shape, axis in zip(shapes, cut.input_axes, strict=True)
        )
        return cut, apart, alike

    def _why_apart(self, cut: sharding.Cut, *, is_checked: bool) -> str:
        return self._ragged or sharding.why_apart(self._model, cut, checked=is_checked)

    def _note_apart(self, why: str) -> None:
        if not self.apart:
            self.apart = why
            self._log.warning("requests are not joined to one run: %s", why)

    def _join(
        self, arrays: Sequence[NDArray[Any]], plan: ShapePlan, weights: WeightVersion
    ) -> tuple[Hashable, int] | None:
        """The key of requests that one run can answer together, and this one's rows; None: it goes apart.

        They agree in all sizes but the batch's, in the values of inputs that all rows share, and in the
        version of the weights.
        """
        cut = plan.cut
        if plan.apart:
            self._note_apart(plan.apart)
        if plan.apart or cut.rows[0] >= self._max_rows:
            return None
        common = [a for a, part in zip(arrays, cut.inputs, strict=True) if part.axis is None]
        if sum(array.nbytes for array in common) > _MAX_COMMON_BYTES:
            return None
        values = tuple(array.astype(array.dtype.newbyteorder("=")).tobytes() for array in common)
        return (plan.alike, values, weights.number), cut.rows[0]
