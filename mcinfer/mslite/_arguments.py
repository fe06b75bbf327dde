"""What models and runners have in common at their edge: tensors in, tensors out."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._checks import check_type
from mcinfer.mslite._failures import failure
from mcinfer.mslite.context import Context
from mcinfer.mslite.datatypes import Format, known_data_type
from mcinfer.mslite.tensor import Tensor, TensorMeta
from mcinfer.specs import TensorSpec


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


def input_arrays(inputs: object, count: int) -> list[NDArray[Any]]:
    """The data of a run's inputs.

    Raises:
        TypeError: Not a list or tuple of Tensor or ndarray.
        RuntimeError: Another number than the model's, or a tensor of unknown size, which has no data.
    """
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be list, but got {type(inputs)}.")
    for i, value in enumerate(inputs):
        if not isinstance(value, (Tensor, np.ndarray)):
            raise TypeError(
                f"inputs element must be Tensor or numpy.ndarray, but got {type(value)} at index {i}."
            )
    if len(inputs) != count:
        raise RuntimeError(f"model input len:{count} not equal input len:{len(inputs)}!")
    for value in inputs:
        if isinstance(value, Tensor) and any(size < 0 for size in value.shape):
            exc = InvalidInputError(
                f"input {value.name!r} has no data, and no shape to be zeros of: {value.shape}"
            )
            raise failure("predict", exc)
    return [value.array if isinstance(value, Tensor) else value for value in inputs]


def check_outputs(outputs: object, count: int) -> list[Tensor] | None:
    """The tensors that a run is to fill, or None.

    Raises:
        TypeError: Not a list of Tensor.
        InvalidInputError: Another number than the model's.
    """
    if outputs is None:
        return None
    check_type("outputs", outputs, list)
    tensors: list[Tensor] = []
    for i, value in enumerate(outputs if isinstance(outputs, list) else []):
        if not isinstance(value, Tensor):
            raise TypeError(f"outputs element must be Tensor, but got {type(value)} at index {i}.")
        tensors.append(value)
    if len(tensors) != count:
        raise InvalidInputError(f"outputs: got {len(tensors)} tensors, expected {count}")
    return tensors


def fill(tensors: Sequence[Tensor], results: Mapping[str, NDArray[Any]]) -> None:
    """Write results into the tensors that a caller gave: into all of them, or none.

    Args:
        tensors: One for each result, in the same order. One of a size that is not known takes the result's.
        results: By the output's name.

    Raises:
        InvalidInputError: A tensor does not fit its result; nothing was written.
    """
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
    for tensor, array in zip(tensors, results.values(), strict=True):
        if all(size > 0 for size in tensor.shape):
            tensor.array[...] = array
        else:
            tensor.set_data_from_numpy(array)
