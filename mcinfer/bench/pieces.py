"""Cutting a request by hand, as anyone who runs a model without mcinfer has to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.bench.way import Arrays, Setup
from mcinfer.sharding import split_evenly


def cut(inputs: Arrays, setup: Setup, most: int) -> list[dict[str, NDArray[Any]]]:
    """A request's pieces: as even as can be, or of the model's fixed batch each.

    Args:
        inputs: The request's.
        setup: Says along which axes they are cut, if they may be, and the fixed batch if there is one.
        most: How many pieces at most, where the batch is not fixed.
    """
    axes = {name: axis for name, axis in setup.split.inputs.items() if axis is not None}
    if not setup.split.splits:
        return [dict(inputs)]
    rows = next(inputs[name].shape[axis] for name, axis in axes.items())
    fixed = setup.fixed_batch
    sizes = [fixed] * (rows // fixed) if fixed else split_evenly(rows, most)
    if len(sizes) < 2 or sum(sizes) < rows:  # nothing to cut, or nothing that the model takes
        return [dict(inputs)]
    # Inputs of a fixed batch may have other numbers of rows than each other, but as many pieces.
    places: Any = len(sizes) if fixed else np.cumsum(sizes)[:-1]
    parts = {name: np.split(inputs[name], places, axis) for name, axis in axes.items()}
    return [
        {name: parts[name][i] if name in parts else array for name, array in inputs.items()}
        for i in range(len(sizes))
    ]


def join(answers: Sequence[Sequence[NDArray[Any]]], setup: Setup) -> list[NDArray[Any]]:
    """The pieces' outputs, one after another along the axes that the setup says."""
    if len(answers) == 1:
        return [*answers[0]]
    axes = setup.split.outputs.values()
    return [
        np.concatenate(parts, axis) if isinstance(axis, int) else parts[0]
        for parts, axis in zip(zip(*answers, strict=True), axes, strict=True)
    ]
