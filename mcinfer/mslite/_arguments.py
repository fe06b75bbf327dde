"""What models and runners have in common at their edge: tensors in, tensors out."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._checks import check_type
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
        RuntimeError: Another number than the model's.
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


def place_of(tensor: Tensor) -> NDArray[Any] | None:
    """Where a run may write into the tensor; None for one whose shape is not known yet."""
    return None if any(size <= 0 for size in tensor.shape) else tensor.array


def fill(tensors: Sequence[Tensor], arrays: Sequence[NDArray[Any]]) -> None:
    """Write results into the tensors that a caller gave: into all of them, or none.

    Raises:
        InvalidInputError: One does not fit; nothing was written.
    """
    places = [place_of(tensor) for tensor in tensors]
    for tensor, place, array in zip(tensors, places, arrays, strict=True):
        kind = known_data_type(array.dtype)
        known = [size > 0 for size in tensor.shape]
        fits = len(known) == array.ndim and all(
            not sure or size == wanted
            for sure, size, wanted in zip(known, tensor.shape, array.shape, strict=True)
        )
        if (
            tensor.dtype is not kind
            or not fits
            or (place is not None and not place.flags.writeable)
        ):
            raise InvalidInputError(
                f"outputs: got a tensor of {tensor.dtype}{tensor.shape} for a result of "
                f"{kind}{[*array.shape]}"
            )
    for tensor, place, array in zip(tensors, places, arrays, strict=True):
        if place is None:
            tensor.set_data_from_numpy(array)
        elif place is not array:
            place[...] = array
