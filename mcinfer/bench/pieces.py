"""Cutting a request by hand, as whoever runs a model without mcinfer has to."""

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
        setup: Says which of them are cut, and the fixed batch if there is one.
        most: How many pieces at most, where the batch is not fixed.
    """
    rows = max((len(inputs[name]) for name in setup.split), default=0)
    fixed = setup.fixed_batch
    sizes = [fixed] * (rows // fixed) if fixed else split_evenly(rows, min(most, rows))
    if len(sizes) < 2 or sum(sizes) < rows:  # nothing to cut, or nothing that the model takes
        return [dict(inputs)]
    ends = np.cumsum(sizes)
    return [
        {n: a[end - size : end] if n in setup.split else a for n, a in inputs.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]


def join(answers: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
    """The pieces' outputs, one after another."""
    if len(answers) == 1:
        return [*answers[0]]
    return [np.concatenate(parts) for parts in zip(*answers, strict=True)]
