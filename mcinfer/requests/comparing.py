"""Comparing an output of a whole batch with those of its pieces, and rows that can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcinfer.requests.tensors import difference, split_rows
from mcinfer.sharding import Shape

MADE_ROWS = 4
_MAX_SHOWN = 4  # pieces whose shapes a message shows

Batch = Sequence[NDArray[Any]]
"""The inputs of a request, in the model's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What a comparison shows about one output.

    Attributes:
        kind: ``"axis"``, ``"same"``, ``"unclear"`` (this request does not show it), or ``"mixed"``: the
            pieces do not join to the whole.
        rank: How many dimensions the whole has.
        size: Its size along that axis for each row, if all pieces have the same; else 0.
        difference: The largest between whole and pieces, relative to the largest element of the whole.
        decides: Whether its values show it: finite ones that differ from row to row.
        joins: Whether it would join, but in another way than the user says.
        text: Why it does not join.
    """

    kind: Literal["axis", "same", "unclear", "mixed"]
    axis: int | None = None
    rank: int = 0
    size: int = 0
    difference: float = 0.0
    decides: bool = False
    joins: bool = False
    text: str = ""


def judge(whole: NDArray[Any], parts: Sequence[NDArray[Any]], rows: Sequence[int]) -> Joint:
    """How an output of the whole batch comes together from its parts, which are of so many rows each."""
    joined = [axis for axis in range(whole.ndim) if _adds_up(whole.shape, parts, axis)]
    same = all(part.shape == whole.shape for part in parts)
    if not joined and not same:
        shapes = ", ".join(str(list(part.shape)) for part in parts[:_MAX_SHOWN])
        more = ", …" if len(parts) > _MAX_SHOWN else ""
        text = f"is {list(whole.shape)} for the whole batch and {shapes}{more} in its pieces"
        return Joint(kind="mixed", text=text)
    if whole.size == 0 or any(part.size == 0 for part in parts):
        return Joint(kind="unclear", text="is empty")
    apart: list[tuple[int | None, bool, float]] = [
        (axis, *difference(np.concatenate(parts, axis), whole)) for axis in joined
    ]
    if same:
        fit, far = zip(*(difference(part, whole) for part in parts), strict=True)
        apart.append((None, all(fit), max(far)))
    # With parts that have elements, at most one of these fits: the sizes differ.
    axis, fits, least = max(apart, key=lambda item: (item[1], -item[2]))
    if not fits:
        text = (
            f"differs by {least:.2g} of its largest element between the whole batch and its pieces"
        )
        return Joint(kind="mixed", difference=least, text=text)
    if not _is_finite(whole).any():
        return Joint(kind="unclear", text="has no number")
    if axis is None:
        return Joint(kind="same", rank=whole.ndim, difference=least)
    size, rest = divmod(parts[0].shape[axis], rows[0])
    even = all(part.shape[axis] == size * n for part, n in zip(parts, rows, strict=True))
    size = size if even and not rest else 0
    decides = _rows_differ(whole, axis, max(size, 1))
    return Joint(
        kind="axis", axis=axis, rank=whole.ndim, size=size, difference=least, decides=decides
    )


def _is_finite(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Which elements are neither NaN nor infinite; of all that are no floats, each."""
    if array.dtype.kind in "biuOSUT":
        return np.ones(array.shape, np.bool_)
    if array.dtype.isbuiltin != 1:  # of ml_dtypes, not all of which know infinity
        array = array.astype(np.float32)
    finite: NDArray[np.bool_] = np.isfinite(array)
    return finite


def _rows_differ(array: NDArray[Any], axis: int, size: int) -> bool:
    """Whether a row, of that size along the axis, has finite elements that differ from the next row's."""
    along = np.moveaxis(array, axis, 0)
    here, there = along[:-size], along[size:]
    return bool(np.any((here != there) & _is_finite(here) & _is_finite(there)))


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays are alike, with NaN equal to NaN; of any types, also those of text."""
    if one.shape != other.shape:
        return False
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _adds_up(whole: Shape, parts: Sequence[NDArray[Any]], axis: int) -> bool:
    rest = _other_sizes(whole, axis)
    fits = all(part.ndim == len(whole) and _other_sizes(part.shape, axis) == rest for part in parts)
    return fits and sum(part.shape[axis] for part in parts) == whole[axis]


def in_words(refuted: Mapping[str, Joint]) -> str:
    """Why a batch is not split: the output that differs most, and how many others do."""
    name, worst = max(refuted.items(), key=lambda item: item[1].difference)
    others = len(refuted) - 1
    if all(joint.joins for joint in refuted.values()):
        return f"output {name!r} {worst.text}"
    more = f", and so do{'es' * (others == 1)} {others} other{'s' * (others > 1)}" if others else ""
    return f"the rows of a batch depend on each other: output {name!r} {worst.text}{more}"


def cut_rows(
    arrays: Batch, axes: Sequence[int | None], rows: Sequence[int]
) -> list[list[NDArray[Any]]]:
    """The inputs of each piece: views, of so many rows each."""
    inputs = [split_rows(array, axis, rows) for array, axis in zip(arrays, axes, strict=True)]
    return [[*piece] for piece in zip(*inputs, strict=True)]


def tells(parts: Sequence[NDArray[Any]], axis: int) -> bool:
    """Whether an input's pieces differ, so that it matters which of them a run gets."""
    first = parts[0]
    row = first[(slice(None),) * axis + (slice(0, 1),)]
    rest = _other_sizes(row.shape, axis)
    if any(_other_sizes(part.shape, axis) != rest for part in parts):
        return True
    if all(_equal(part, np.broadcast_to(row, part.shape)) for part in parts):
        return False
    return not all(_equal(part, first) for part in parts[1:])


def made_rows(arrays: Batch, axes: Sequence[int | None], count: int) -> list[NDArray[Any]]:
    """So many rows made out of a request's: floats with noise of their own scale, others moved.

    Integers, booleans and texts are values of the same input, each of them in turn from row to row, so that
    rows differ wherever there are two values. Inputs that are not cut stay.
    """
    random = np.random.default_rng(0)
    made = []
    for array, axis in zip(arrays, axes, strict=True):
        if axis is None:
            made.append(array)
            continue
        # Not in the order that was seen, which may be that of the model's results.
        rows = np.take(array, np.arange(1, count + 1) % array.shape[axis], axis)
        if "float" in array.dtype.name and array.size:  # ml_dtypes' too
            values = rows.astype(np.float64)
            values = np.where(np.isfinite(values), values, 0.0)
            with np.errstate(all="ignore"):
                scale = values.std() or np.abs(values).max() or 1.0
                rows = (values + scale * random.normal(size=rows.shape)).astype(array.dtype)
        else:
            texts = array.dtype.kind == "O"  # which have no order among bytes
            values = np.array([*dict.fromkeys(array.flat)], object) if texts else np.unique(array)
            turns = np.arange(count).reshape(-1, *[1] * (array.ndim - axis - 1))
            begin = random.integers(0, values.size, np.take(rows, [0], axis).shape)
            rows = values[(begin + turns) % values.size]
        made.append(rows)
    return made


def _other_sizes(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
