"""What models and runners have in common at their edge: tensors in, tensors out."""

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._checks import check_type
from mcinfer.mslite._failures import InvalidRunError
from mcinfer.mslite.context import Context
from mcinfer.mslite.datatypes import DataType, Format, known_data_type
from mcinfer.mslite.tensor import Tensor, TensorMeta
from mcinfer.specs import TensorSpec

TensorLike = Tensor | NDArray[Any]
"""What a run takes."""


def known_dims(spec: TensorSpec) -> list[int]:
    """The shape as MindSpore Lite writes it: -1 for a size that is not known."""
    return [size if isinstance(size, int) else -1 for size in spec.shape]


def describe(spec: TensorSpec, shape: Sequence[int] | None = None) -> TensorMeta:
    """What there is to say of an output before a run."""
    return TensorMeta(
        name=spec.name,
        dtype=known_data_type(spec.dtype),
        shape=known_dims(spec) if shape is None else [*shape],
        format=Format.NCHW,
    )


def check_context(context: Context | None) -> Context:
    """The context, or that of the CPU for None; TypeError for anything else."""
    if context is None:
        return Context()
    check_type("context", context, Context)
    return context


def check_path(what: str, name: str, path: object) -> str:
    """An existing path.

    Raises:
        TypeError: No text.
        RuntimeError: There is nothing.
    """
    check_type(name, path, str)
    if not os.path.exists(str(path)):
        raise RuntimeError(f"{what} failed, {name} does not exist!")
    return str(path)


def check_inputs(inputs: object, count: int) -> list[TensorLike]:
    """A run's inputs, checked but for their data.

    Raises:
        TypeError: Not a list or tuple of Tensor or ndarray.
        InvalidRunError: Another number than the model's.
    """
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be list, but got {type(inputs)}.")
    for i, value in enumerate(inputs):
        if not isinstance(value, (Tensor, np.ndarray)):
            raise TypeError(
                f"inputs element must be Tensor or numpy.ndarray, but got {type(value)} at index {i}."
            )
    if len(inputs) != count:
        raise InvalidRunError(f"model input len:{count} not equal input len:{len(inputs)}!")
    return [*inputs]


def input_arrays(inputs: Sequence[TensorLike]) -> list[NDArray[Any]]:
    """The data of a run's inputs.

    Raises:
        InvalidInputError: A tensor has no data: it was neither set nor looked at.
    """
    for value in inputs:
        if isinstance(value, Tensor) and not value.has_data:
            raise InvalidInputError(f"input {value.name!r} has no data, set it first")
    return [value.array if isinstance(value, Tensor) else value for value in inputs]


def check_outputs(outputs: object, count: int) -> None:
    """Check what a caller gives a run to write to, as far as that can be known before it.

    Args:
        outputs: A tensor for each output; or an empty list, for them to be put into; or None.
        count: How many outputs the model has.

    Raises:
        TypeError: Not a list of Tensor.
        InvalidInputError: Another number than the model's, or a tensor of a type that has no memory.
    """
    if outputs is None:
        return
    check_type("outputs", outputs, list)
    if not isinstance(outputs, list) or not outputs:
        return
    for i, value in enumerate(outputs):
        if not isinstance(value, Tensor):
            raise TypeError(f"outputs element must be Tensor, but got {type(value)} at index {i}.")
    if len(outputs) != count:
        raise InvalidInputError(f"outputs: got {len(outputs)} tensors, expected {count} or none")
    for value in outputs:
        if value.dtype in (DataType.UNKNOWN, DataType.INVALID) and not value.has_data:
            raise InvalidInputError(
                f"output {value.name!r} is a tensor of {value.dtype}, which has no memory to write to; "
                "give an empty list, or none"
            )


def fill(tensors: list[Tensor], results: Mapping[str, NDArray[Any]]) -> list[Tensor]:
    """Write results into the tensors that a caller gave: into all of them, or none.

    Args:
        tensors: One for each result, in the same order. One of a size that is not known takes the result's.
            An empty list gets a new tensor for each instead.
        results: By the output's name; their memory is not that of the tensors.

    Returns:
        The list that was given.

    Raises:
        InvalidInputError: A tensor does not fit its result, or two have the same memory; nothing was
            written.
    """
    if not tensors:
        tensors += result_tensors(results)
        return tensors
    for tensor, (name, array) in zip(tensors, results.items(), strict=True):
        shape = tensor.shape
        known = all(size > 0 for size in shape)
        fits = len(shape) == array.ndim and all(
            size <= 0 or size == wanted for size, wanted in zip(shape, array.shape, strict=True)
        )
        writeable = not known or tensor.array.flags.writeable
        if tensor.dtype is not known_data_type(array.dtype) or not fits or not writeable:
            raise InvalidInputError(
                f"output {name!r} is {known_data_type(array.dtype)}{[*array.shape]}, got a tensor of "
                f"{tensor.dtype}{shape}{'' if writeable else ' that is read-only'}"
            )
    _check_apart(tensors)
    for tensor, array in zip(tensors, results.values(), strict=True):
        if any(size <= 0 for size in tensor.shape):
            tensor.shape = array.shape
    # All memory is gotten before the first is written: there may be none left for one.
    places = [tensor.array for tensor in tensors]
    for place, array in zip(places, results.values(), strict=True):
        place[...] = array
    return tensors


def result_tensors(results: Mapping[str, NDArray[Any]]) -> list[Tensor]:
    """New tensors that hold the results as they are."""
    return [Tensor._of_result(name, array) for name, array in results.items()]


def _check_apart(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of which one would be written over another."""
    for (i, one), (j, other) in combinations(enumerate(tensors), 2):
        shares = one.has_data and other.has_data and np.may_share_memory(one.array, other.array)
        if one is other or shares:
            raise InvalidInputError(f"outputs: the tensors {i} and {j} have the same memory")
