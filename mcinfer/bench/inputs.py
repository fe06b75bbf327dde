"""The arrays of one request: from files, or random ones that fit the model; and the model's split.

The size of a symbolic dimension in a file holds for all inputs; ``--dim`` gives the sizes of others. The
model's `mcinfer.sharding.Split` says where a request's rows lie.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.bench.way import why_whole
from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.requests.tensors import as_input
from mcinfer.sharding import Axes, SaidAxes, Split, cut_batch, first_split
from mcinfer.specs import ELEMENT_TYPES, STRING, Dimension, ModelSpec, TensorSpec

_WORDS = ("red", "green", "blue", "one", "two", "three", "north", "south")
_EXAMPLE_SIZE = 128
_LIKELY_SIZE = 32
"""Which networks of images and texts take."""

_EXAMPLE_ROWS = 3
"""An odd number: pieces of different sizes show more than pieces of the same."""

_MAX_DRAWS = 32
"""For random rows that differ."""

Array = NDArray[Any]
_Saved = Mapping[str, tuple[Path, Array]]
"""Arrays of files by input name, each with its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where inputs come from; those that are in no file are random.

    Attributes:
        files: By input name, an ``.npy`` file.
        archive: An ``.npz`` file with arrays by input name.
        dims: Sizes of dimensions other than the batch: by symbol, or as ``"input:axis"`` without one.
        integers: Least random integer, and the first that is too large, as far as a type holds them.
        seed: Seed of the random values; each input has its own values, which do not depend on other inputs.
    """

    files: Mapping[str, Path]
    archive: Path | None
    dims: Mapping[str, int]
    integers: tuple[int, int] = (0, 10)
    seed: int = 0


def parse_input_options(
    texts: Sequence[str],
    dims: Mapping[str, int],
    integers: tuple[int, int] = (0, 10),
    seed: int = 0,
) -> InputOptions:
    """Options of the command line; texts are ``x.npz``, or ``x=x.npy`` by an input's name.

    Raises:
        InvalidInputError: A text is none of these, two are for the same, or there are no such integers.
    """
    files: dict[str, Path] = {}
    archive: Path | None = None
    for text in texts:
        name, equals, path = text.partition("=")
        if text.endswith(".npz") and (not equals or Path(text).exists()):
            if archive is not None:
                raise InvalidInputError(f"--input: got {archive} and {text}, expected one archive")
            archive = Path(text)
            continue
        if not name or not path.endswith(".npy"):
            raise InvalidInputError(
                f"--input: got {text!r}, expected an archive (x.npz), or an input's name and its "
                f"file (x=x.npy)"
            )
        if name in files:
            raise InvalidInputError(f"--input: got {name!r} twice: {files[name]} and {path}")
        files[name] = Path(path)
    low, high = integers
    if low >= high:
        raise InvalidInputError(
            f"--integers: got {low}:{high}, expected the least integer and a greater one"
        )
    return InputOptions(files=files, archive=archive, dims=dims, integers=integers, seed=seed)


# Rows and sizes.


def fixed_batch(model: ModelSpec, split: Split) -> int | None:
    """The only number of rows that a run takes (of the first input with one); None where it takes any."""
    sizes = (_cut_size(spec, split) for spec in model.inputs)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _cut_size(spec: TensorSpec, split: Split) -> Dimension:
    """The model's size of the dimension that an input is cut along; None where it has none."""
    axis = split.inputs[spec.name]
    return None if axis is None or not spec.shape else spec.shape[axis]


def _key(spec: TensorSpec, axis: int) -> str:
    size = spec.shape[axis] if spec.shape else None
    return size if isinstance(size, str) else f"{spec.name}:{axis}"


def likely_sizes(model: ModelSpec, split: Split) -> dict[str, int]:
    """A size for each dimension without one that is no batch: where nothing is cut, not an input's first."""
    free = [
        (axis, _key(spec, axis))
        for spec in model.inputs
        for axis, size in enumerate(spec.shape)
        if not isinstance(size, int)
    ]
    rows = _batch_keys(model, split) or {key for axis, key in free if axis == 0}
    return {key: _LIKELY_SIZE for _, key in free if key not in rows}


def _batch_keys(model: ModelSpec, split: Split) -> set[str]:
    """What ``--dim`` would call the dimensions that are the batch."""
    axes = ((spec, split.inputs[spec.name]) for spec in model.inputs)
    return {
        _key(spec, axis)
        for spec, axis in axes
        if axis is not None and not isinstance(_cut_size(spec, split), int)
    }


def _shapes(
    model: ModelSpec, split: Split, batch: int, options: InputOptions, saved: _Saved
) -> dict[str, tuple[int, ...]]:
    """The shapes of a request's arrays, by input name.

    Raises:
        InvalidInputError: An array of a file does not fit, or the options do not; or a size is missing.
    """
    # What ``--dim`` calls each dimension that is neither fixed nor the input's rows.
    free = [
        (spec, axis, _key(spec, axis))
        for spec in model.inputs
        for axis, size in enumerate(spec.shape)
        if not isinstance(size, int) and axis != split.inputs[spec.name]
    ]
    # Each size with its source.
    known = dict.fromkeys(_batch_keys(model, split), (batch, f"--batch {batch}"))
    keys = [*dict.fromkeys(key for _, _, key in free)]
    for key, size in options.dims.items():
        # Its size may be given: the same command has found out that it is the batch.
        if key in known and size != batch:
            raise InvalidInputError(f"--dim {key}: it is the batch, which --batch gives")
        if key not in known and key not in keys:
            others = f"expected one of {keys}"
            if not keys:
                others = "but the model has no symbolic dimension other than the batch"
            raise InvalidInputError(f"--dim: got {key!r}, {others}")
    known |= {key: (size, f"--dim {key}={size}") for key, size in options.dims.items()}
    shapes: dict[str, list[Any]] = {}
    for spec in model.inputs:
        axis, shapes[spec.name] = split.inputs[spec.name], [*spec.shape]
        if spec.name in saved:
            path, array = saved[spec.name]
            _check_fits(array, spec, axis, path)
            shapes[spec.name] = [*array.shape]
        elif axis is not None and not spec.shape:
            raise InvalidInputError(
                f"input {spec.name!r} has rows along axis {axis}, but the model does not "
                f"say its shape: give it in a file (--input {spec.name}=FILE.npy)"
            )
    for spec, axis, key in free:
        if spec.name in saved:
            path, array = saved[spec.name]
            said, source = known.setdefault(key, (array.shape[axis], f"--input {path}"))
            if said != array.shape[axis]:
                raise InvalidInputError(
                    f"--input {path}: {key!r} is {array.shape[axis]} in input {spec.name!r} ({spec}), "
                    f"expected {said} as {source} says"
                )
    missing: dict[str, str] = {}
    for spec, axis, key in free:
        if key in known:
            shapes[spec.name][axis], _ = known[key]
        else:
            missing.setdefault(key, f"dimension {axis} of input {spec.name!r} ({spec})")
    if missing:
        examples = " ".join(f"--dim {key}={_EXAMPLE_SIZE}" for key in missing)
        raise InvalidInputError(
            f"no size is known for {', '.join(missing.values())}: give it, as in {examples}"
        )
    fixed = fixed_batch(model, split)
    for spec in model.inputs:
        if (axis := split.inputs[spec.name]) is not None:
            one = _cut_size(spec, split)
            rows = batch // (fixed or 1)
            shapes[spec.name][axis] = rows * one if fixed and isinstance(one, int) else rows
    return {name: tuple(sizes) for name, sizes in shapes.items()}


def _check_fits(array: Array, spec: TensorSpec, axis: int | None, path: Path) -> None:
    """Raise `InvalidInputError` unless an array of a file has the input's shape, with any number of rows."""
    fits = axis is None or (axis < array.ndim and array.shape[axis] > 0)
    if spec.shape:  # else the model may not say how many dimensions there are
        free = tuple(None if i == axis else size for i, size in enumerate(spec.shape))
        fits &= TensorSpec(name="", dtype=spec.dtype, shape=free).admits(array.shape)
    if not fits:
        rows = "" if axis is None else ", with at least one row"
        raise InvalidInputError(
            f"--input {path}: input {spec.name!r} has shape {[*array.shape]}, expected {spec}{rows}"
        )


# Files.


def _load(path: Path) -> Any:
    """What NumPy makes of a file: an array, or arrays by name."""
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"--input {path}: it is no regular file")
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InvalidInputError(f"--input {path}: {exc.strerror}") from exc
    try:
        content = np.load(BytesIO(data), allow_pickle=False)
        return dict(content) if isinstance(content, np.lib.npyio.NpzFile) else content
    except Exception as exc:  # NumPy, zipfile and zlib raise many kinds on what is not theirs
        raise InvalidInputError(
            f"--input {path}: not an .npy or .npz file of numbers or text: {exc}"
        ) from exc


def saved_inputs(model: ModelSpec, options: InputOptions) -> dict[str, tuple[Path, Array]]:
    found: dict[str, tuple[Path, Any]] = {}
    if options.archive is not None:
        arrays = _load(options.archive)
        if not isinstance(arrays, dict):
            raise InvalidInputError(
                f"--input {options.archive}: it holds one array, expected an .npz file, or "
                f"NAME={options.archive}"
            )
        found = {name: (options.archive, array) for name, array in arrays.items()}
    specs = {spec.name: spec for spec in model.inputs}
    for name, path in options.files.items():
        if name in found:
            raise InvalidInputError(f"--input {path}: input {name!r} is in {found[name][0]} too")
        found[name] = path, None
    for name, (path, array) in found.items():
        if name not in specs:
            raise InvalidInputError(
                f"--input {path}: got an array for {name!r}, expected one of {[*specs]}"
            )
        found[name] = path, _load(path) if array is None else array
    return {name: (path, _typed(array, specs[name], path)) for name, (path, array) in found.items()}


def _typed(array: Any, spec: TensorSpec, path: Path) -> Array:
    if isinstance(array, dict):
        raise InvalidInputError(f"--input {path}: it holds {len(array)} arrays, expected one")
    # NumPy's files do not know the types of ml_dtypes, and say only how long an element is.
    if spec.dtype.isbuiltin != 1 and array.dtype == np.dtype((np.void, spec.dtype.itemsize)):
        array = array.view(spec.dtype)
    return as_input(array, spec, spec.element_type, f"--input {path}: input")


# The arrays of a request.


def _random(spec: TensorSpec, shape: tuple[int, ...], options: InputOptions, seed: int) -> Array:
    generator = np.random.default_rng([seed, *spec.name.encode()])
    kind = spec.element_type
    drawn: Array
    try:
        if kind == STRING:
            drawn = np.array(_WORDS, object)[generator.integers(len(_WORDS), size=shape)]
        elif kind == "bool":
            drawn = generator.integers(2, size=shape, dtype=np.uint8)
        elif "int" in kind:
            wide = spec.dtype if spec.dtype.isbuiltin == 1 else np.dtype(np.int64)
            drawn = generator.integers(*_held(kind, options.integers), shape, wide.type)
        elif kind.startswith("complex"):
            pairs = generator.standard_normal((*shape, 2))
            drawn = pairs[..., 0] + 1j * pairs[..., 1]
        else:
            size = spec.dtype.itemsize
            drawn = generator.standard_normal(shape, np.float64 if size > 4 else np.float32)
        return np.asarray(drawn).astype(spec.dtype)
    except (MemoryError, ValueError) as exc:  # NumPy's own word for sizes beyond all memory
        raise InvalidInputError(f"input {spec} of shape {[*shape]} cannot be had: {exc}") from exc


def _held(kind: str, integers: tuple[int, int]) -> tuple[int, int]:
    """The part of the bounds that a type of integers can hold: at least one value."""
    values = 1 << ELEMENT_TYPES[kind].bits
    least = 0 if kind.startswith("u") else -values // 2
    low = min(max(integers[0], least), least + values - 1)
    return low, min(max(integers[1], low + 1), least + values)


def make_inputs(
    model: ModelSpec, split: Split, batch: int, options: InputOptions
) -> dict[str, Array]:
    """The arrays of one request, by input name: C-contiguous, of the input's type; the same each time.

    Rows of files are cut to the batch, or repeated from the first.

    Raises:
        InvalidInputError: A file cannot be read, or does not fit the model; a dimension's size is not known;
            the model takes no such batch.
    """
    fixed = fixed_batch(model, split)
    if fixed is not None and batch % fixed:
        raise InvalidInputError(
            f"--batch: got {batch}, expected a multiple of the model's fixed batch of {fixed}"
        )
    if batch > 1 and all(axis is None for axis in split.inputs.values()):
        raise InvalidInputError(
            f"--batch: got {batch}, expected 1: the model's batch is not known: {why_whole(split)} "
            f"(inputs: {'; '.join(map(str, model.inputs))}); --batch-axis INPUT=AXIS says where it is"
        )
    found = saved_inputs(model, options)
    shapes = _shapes(model, split, batch, options, found)
    inputs = {}
    for spec in model.inputs:
        axis, shape = split.inputs[spec.name], shapes[spec.name]
        _, array = found.get(spec.name) or (None, _random(spec, shape, options, options.seed))
        if axis is not None and array.shape[axis] != shape[axis]:
            array = array.take(np.arange(shape[axis]) % array.shape[axis], axis)
        inputs[spec.name] = np.asarray(array, spec.dtype, order="C")
    cut_batch(model, [array.shape for array in inputs.values()], 1, split)
    return inputs


# The model's split.


def examples(
    model: ModelSpec, first: Split, batches: Sequence[int], options: InputOptions
) -> Iterator[dict[str, Array]]:
    """Inputs that may show how a batch is split, for `mcinfer.Master.learn`: two different rows or more.

    First files as they are, where their rows differ; then random values in the place of rows that do not;
    then those of another number of rows, without which inputs may be cut together by chance. Where nothing
    says which inputs have rows, those are taken to have them whose first dimension is free.

    Raises:
        InvalidInputError: As `make_inputs`.
    """
    saved = {name: array.shape for name, (_, array) in saved_inputs(model, options).items()}
    axes = first.inputs
    if all(axis is None for axis in axes.values()):
        axes = _likely_axes(model, saved, options)
    cut = {name: axis for name, axis in axes.items() if axis is not None}
    if not cut:
        return
    split = replace(first, inputs=axes)
    keys = _batch_keys(model, split)
    options = replace(options, dims={k: n for k, n in options.dims.items() if k not in keys})
    given = max(
        (saved[n][axis] for n, axis in cut.items() if axis < len(saved.get(n, ()))), default=1
    )
    rows = given if given > 1 else min((b for b in batches if b > 1), default=_EXAMPLE_ROWS)
    arrays = make_inputs(model, split, rows, options)
    if any(_rows_differ(arrays[name], axis) for name, axis in cut.items()):
        yield arrays
    for count in (rows, _EXAMPLE_ROWS + (rows == _EXAMPLE_ROWS)):
        options = replace(options, seed=options.seed + 1)
        arrays = make_inputs(model, split, count, options)
        for spec in (spec for spec in model.inputs if spec.name in cut):
            # Rows stay alike only where the type, or ``--integers``, has but one value.
            for seed in range(options.seed, options.seed + _MAX_DRAWS):
                if _rows_differ(arrays[spec.name], cut[spec.name]):
                    break
                arrays[spec.name] = _random(spec, arrays[spec.name].shape, options, seed)
        yield arrays


def _likely_axes(
    model: ModelSpec, saved: Mapping[str, Sequence[int]], options: InputOptions
) -> dict[str, int | None]:
    """The first axis of each input where its size is free, said by no option, and that of other files."""
    free = [
        spec.name
        for spec in model.inputs
        if not (spec.shape and isinstance(spec.shape[0], int))
        and (spec.shape or saved.get(spec.name))
        and _key(spec, 0) not in options.dims
    ]
    rows = max((saved[name][0] for name in free if saved.get(name)), default=0)
    return {
        spec.name: 0 if spec.name in free and saved.get(spec.name, (rows,))[0] == rows else None
        for spec in model.inputs
    }


def _rows_differ(array: Array, axis: int) -> bool:
    first = np.broadcast_to(array.take([0], axis), array.shape)
    return not np.array_equal(array, first, equal_nan=array.dtype.kind in "fc")


def look_at(
    master: Any, batches: Sequence[int], inputs: InputOptions, batch_axes: Axes, output_axes: Axes
) -> tuple[ModelSpec, Split]:
    """The model's inputs and outputs, and how its batch is split: learned, if that is not known.

    A benchmark sends the same request again and again, and its rows may be equal, which shows nothing. What
    is learned here is recorded where the masters that are measured find it. The split
    is that of the first request and all later ones. Where they run whole, it says why, and its `inputs` still
    say where their rows lie, as far as that is given or declared.

    Raises:
        InvalidInputError: The options do not fit the model.
    """
    model = ModelSpec(inputs=master.inputs, outputs=master.outputs)
    first = first_split(model, SaidAxes(inputs=batch_axes, outputs=output_axes))
    split, why = master.split, ""
    if not split.settled:
        for example in examples(model, first, batches, inputs):
            try:
                split = master.learn(example)
            except McinferError as exc:
                why = why or f"an example to learn it from failed: {exc}"
            else:
                why = why or "no example has shown whether the rows of a batch are independent"
            if split.settled:
                break
    if why and not split.settled:
        split = replace(split, reason=why)
    if all(axis is None for axis in split.inputs.values()):
        split = replace(split, inputs=first.inputs)
    return model, split
