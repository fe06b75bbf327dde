"""How a large batch becomes requests: pure, shapes alone.

It is counted in *units*: rows of a batch of any size, or pieces of a fixed batch. A request has so many
units of each input that is cut, and the others whole. A `Split` says what is cut and joined, and
`mcinfer.sharding` cuts, here as in `Master.predict`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from mcinfer import sharding
from mcinfer.errors import InvalidInputError
from mcinfer.requests.tensors import as_input
from mcinfer.sharding import OutputJoin, Shape, Split
from mcinfer.specs import ModelSpec

_REQUEST_BYTES = 64 << 20
"""Of inputs and outputs of one request, where nobody says how many rows it is to have."""

_WORKER_ROWS = 64
"""Of one request, likewise: nobody knows what a row takes between the layers."""


class Described(Protocol):
    """What is known of an array before it is read."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Of its elements."""

    @property
    def shape(self) -> Shape:
        """Its sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a batch.

    Attributes:
        axes: By input, the axis that it is cut along, or None: each request takes it whole.
        sizes: By input that is cut, what one unit has along that axis.
        units: All of them.
        step: Units of one request; the last may have fewer.
        unit_rows: Rows of one unit, to count rows by.
        shards: Over how many workers a request is split.
        outputs: By output, in the model's order, the axis along which the requests' answers follow one
            another; None: it is the same in all, as it is where there is one request.
    """

    axes: dict[str, int | None]
    sizes: dict[str, int]
    units: int
    step: int
    unit_rows: int
    shards: int
    outputs: dict[str, int | None]

    @property
    def count(self) -> int:
        """How many requests; one for a batch of no rows."""
        return max(1, -(-self.units // self.step))

    def span(self, request: int) -> tuple[int, int]:
        """The first unit of a request, and the one after its last."""
        return request * self.step, min((request + 1) * self.step, self.units)


def check_inputs(model: ModelSpec, arrays: Mapping[str, Described]) -> None:
    """Raise `InvalidInputError` unless names and types are the model's, as `Master.predict` would."""
    names = [spec.name for spec in model.inputs]
    unknown = [name for name in arrays if name not in names]
    missing = [name for name in names if name not in arrays]
    if unknown or missing:
        said = [f"unknown {unknown}"] * bool(unknown) + [f"missing {missing}"] * bool(missing)
        raise InvalidInputError(f"inputs: {', '.join(said)}, expected {names}")
    for spec in model.inputs:
        as_input(np.empty(0, arrays[spec.name].dtype), spec, spec.element_type)


def plan_requests(
    model: ModelSpec,
    arrays: Mapping[str, Described],
    workers: int,
    rows: int | None,
    split: Split | None,
) -> Requests:
    """Cut a batch.

    Args:
        model: What the model takes and gives.
        arrays: What is known of each input.
        workers: Over how many a request is split: it has rows for each, where that is possible.
        rows: Of one request; None is 64 for each worker, or as many as have 64 MiB of inputs and outputs.
        split: How; with None, and with one that does not split, the whole batch is one request.

    Raises:
        InvalidInputError: The shapes do not fit the model, as `Master.predict` would say.
    """
    shapes = [arrays[spec.name].shape for spec in model.inputs]
    plan = sharding.plan(model, shapes, 1, split)
    axes = {spec.name: cut.axis for spec, cut in zip(model.inputs, plan.inputs, strict=True)}
    cut = [name for name, axis in axes.items() if axis is not None]
    fixed = _fixed_sizes(model, axes)
    units = (len(plan.rows) if fixed else sum(plan.rows)) if cut else 1
    unit_rows = next(iter(fixed.values()), 1) if cut else max(1, sum(plan.rows))
    unit_bytes = _unit_bytes(model, arrays, axes, plan.outputs, max(1, units))
    step = rows // unit_rows if rows else _step(unit_bytes, unit_rows, workers)
    step = max(1, min(step, units))
    outputs = zip(model.outputs, plan.outputs, strict=True)
    return Requests(
        axes=axes,
        sizes={name: fixed.get(name, 1) for name in cut},
        units=units,
        step=step,
        unit_rows=unit_rows,
        shards=workers,
        outputs={spec.name: join.axis if units > step else None for spec, join in outputs},
    )


def _fixed_sizes(model: ModelSpec, axes: Mapping[str, int | None]) -> dict[str, int]:
    """By input that is cut into pieces of a fixed batch, the rows of a piece."""
    sizes = {}
    for spec in model.inputs:
        axis = axes[spec.name]
        size = None if axis is None else spec.shape[axis]
        if isinstance(size, int):
            sizes[spec.name] = size
    return sizes


def _unit_bytes(
    model: ModelSpec,
    arrays: Mapping[str, Described],
    axes: Mapping[str, int | None],
    joins: tuple[OutputJoin, ...],
    units: int,
) -> int:
    """Bytes of one unit, inputs and outputs; an output of unknown shape is taken to be as the inputs."""
    inputs = sum(
        prod(arrays[name].shape) * arrays[name].dtype.itemsize
        for name, axis in axes.items()
        if axis is not None
    )
    outputs = sum(
        inputs if join.shape is None else prod(join.shape) * spec.dtype.itemsize
        for spec, join in zip(model.outputs, joins, strict=True)
        if join.axis is not None
    )
    return max(1, (inputs + outputs) // units)


def _step(unit_bytes: int, unit_rows: int, workers: int) -> int:
    """Units of a request: as many for each worker, at least one."""
    most = min(_REQUEST_BYTES // unit_bytes // workers, _WORKER_ROWS // unit_rows)
    return max(1, most) * workers
