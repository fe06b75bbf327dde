"""The arrays of one request: from files, or random ones that fit what a model takes.

What a file says of a symbolic dimension holds for all inputs; ``--dim`` says the sizes of others. The batch
is found as `mcinfer.sharding` finds it, so what is made here is what mcinfer would cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError
from mcinfer.sharding import batch_symbol, plan
from mcinfer.specs import ELEMENT_TYPES, STRING, Dimension, ModelSpec, TensorSpec
from mcinfer.tensors import as_input

_WORDS = ("red", "green", "blue", "one", "two", "three", "north", "south")
_EXAMPLE_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where inputs come from.

    Attributes:
        files: By input name: an ``.npy`` file, or else one of nothing but the elements, in C order and in
            the machine's byte order, as NumPy (or ml_dtypes) holds them.
        archive: An ``.npz`` file with arrays by input name. Inputs that are in no file are random.
        dims: Sizes of dimensions other than the batch: by symbol, or as ``"input:axis"`` where a
            dimension has no name.
        integers: Least random integer, and the first that is too large; where an input's type cannot
            hold so much, the part that it can.
        seed: Of the random values: each input's are its own, whatever other inputs there are.
    """

    files: Mapping[str, Path]
    archive: Path | None
    dims: Mapping[str, int]
    integers: tuple[int, int] = (0, 10)
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.integers
        if low >= high:
            raise InvalidInputError(
                f"--integers: got {low}:{high}, expected the least integer and a greater one"
            )
        if self.seed < 0:
            raise InvalidInputError(f"--seed: got {self.seed}, expected 0 or more")
        for key, size in self.dims.items():
            if size < 0:
                raise InvalidInputError(f"--dim {key}: got size {size}, expected 0 or more")


def parse_input_options(
    texts: Sequence[str],
    dims: Mapping[str, int],
    integers: tuple[int, int] = (0, 10),
    seed: int = 0,
) -> InputOptions:
    """Options of the command line.

    Args:
        texts: Each is ``x.npz``, ``x=x.npy`` or ``x=x.raw``, where ``x=`` is an input's name.
        dims: See `InputOptions`.
        integers: Likewise.
        seed: Likewise.

    Raises:
        InvalidInputError: A text is none of these, or two speak of the same.
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
        if not name or not path or path.endswith(".npz"):
            raise InvalidInputError(
                f"--input: got {text!r}, expected an archive (x.npz), or an input's name and its "
                f"file (x=x.npy or x=x.raw)"
            )
        if name in files:
            raise InvalidInputError(f"--input: got {name!r} twice: {files[name]} and {path}")
        files[name] = Path(path)
    return InputOptions(files=files, archive=archive, dims=dims, integers=integers, seed=seed)


# The batch.


def fixed_batch(model: ModelSpec) -> int | None:
    """The rows that a run takes, no more and no less; None where the batch is a symbol, or not known.

    It is the first dimension of inputs that is the first of outputs too.
    """
    if batch_symbol(model) is not None:
        return None
    answered = {spec.shape[0] for spec in model.outputs if spec.shape}
    sizes = [spec.shape[0] for spec in model.inputs if spec.shape and spec.shape[0] in answered]
    candidates = [size for size in sizes if isinstance(size, int) and size > 0]
    return max(candidates, key=candidates.count, default=None)


def _batch_axes(model: ModelSpec) -> dict[str, int]:
    """By input name, the axis that is as long as the batch; other inputs belong to every row."""
    symbol, fixed = batch_symbol(model), fixed_batch(model)
    if symbol is not None:
        return {s.name: s.shape.index(symbol) for s in model.inputs if symbol in s.shape}
    return {s.name: 0 for s in model.inputs if fixed and s.shape and s.shape[0] == fixed}


def split_inputs(model: ModelSpec, batch: int) -> tuple[str, ...]:
    """The inputs of a request that mcinfer would cut along their first dimension, in the model's order.

    None, where the batch is all that a run of the model takes.
    """
    if batch == fixed_batch(model):
        return ()
    return tuple(name for name, axis in _batch_axes(model).items() if axis == 0)


def _check_batch(model: ModelSpec, batch: int) -> None:
    fixed = fixed_batch(model)
    if batch < 1:
        raise InvalidInputError(f"--batch: got {batch}, expected 1 or more")
    if fixed is not None and batch % fixed:
        raise InvalidInputError(
            f"--batch: got {batch}, expected a multiple of the model's fixed batch of {fixed}"
        )
    if batch > 1 and not _batch_axes(model):
        raise InvalidInputError(
            f"--batch: got {batch}, expected 1: the model has no batch that is known "
            f"(inputs: {'; '.join(map(str, model.inputs))})"
        )


# Sizes.


def _keys(spec: TensorSpec, batch_axis: int | None) -> dict[int, str]:
    """By axis, what ``--dim`` calls each dimension that is neither fixed nor the batch."""
    return {
        axis: f"{spec.name}:{axis}" if size is None else size
        for axis, size in enumerate(spec.shape)
        if not isinstance(size, int) and axis != batch_axis
    }


class _Sizes:
    """The sizes of a model's dimensions, as far as they are known."""

    def __init__(self, model: ModelSpec, batch: int, dims: Mapping[str, int]) -> None:
        self._batch = batch
        self.axes = _batch_axes(model)
        self._known = {key: (size, f"--dim {key}={size}") for key, size in dims.items()}
        keys = [key for spec in model.inputs for key in self._of(spec).values()]
        expected = f"expected one of {[*dict.fromkeys(keys)]}"
        if not keys:
            expected = "but the model has no symbolic dimension other than the batch"
        for key in dims:
            if key == batch_symbol(model):
                raise InvalidInputError(f"--dim {key}: it is the batch, which --batch gives")
            if key not in keys:
                raise InvalidInputError(f"--dim: got {key!r}, {expected}")

    def _of(self, spec: TensorSpec) -> dict[int, str]:
        return _keys(spec, self.axes.get(spec.name))

    def bind(self, spec: TensorSpec, shape: Sequence[int], path: Path) -> None:
        """Take the shape of a file's array for what it says of other inputs.

        Raises:
            InvalidInputError: It does not fit the input, or what is known already.
        """
        axis = self.axes.get(spec.name)
        free: list[Dimension] = [*spec.shape]
        if axis is not None:
            free[axis] = None  # rows are repeated or cut
        fits = TensorSpec(name="", dtype=spec.dtype, shape=tuple(free)).admits(shape)
        if not fits or (axis is not None and not shape[axis]):
            rows = "" if axis is None else ", with at least one row"
            raise InvalidInputError(
                f"--input {path}: input {spec.name!r} has shape {[*shape]}, expected {spec}{rows}"
            )
        for place, key in self._of(spec).items():
            said, source = self._known.setdefault(key, (shape[place], f"--input {path}"))
            if said != shape[place]:
                raise InvalidInputError(
                    f"--input {path}: {key!r} is {shape[place]} in input {spec.name!r} ({spec}), "
                    f"expected {said} as {source} says"
                )

    def check_known(self, specs: Sequence[TensorSpec]) -> None:
        """Check that these inputs' sizes are all known.

        Raises:
            InvalidInputError: One is not; says which, and how to give them all.
        """
        missing: dict[str, str] = {}
        for spec in specs:
            for axis, key in self._of(spec).items():
                if key not in self._known:
                    missing.setdefault(key, f"dimension {axis} of input {spec.name!r} ({spec})")
        if missing:
            options = " ".join(f"--dim {key}={_EXAMPLE_SIZE}" for key in missing)
            raise InvalidInputError(
                f"no size is known for {', '.join(missing.values())}: give it, as in {options}"
            )

    def shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of an input of which all is known."""
        keys, axis = self._of(spec), self.axes.get(spec.name)
        return tuple(
            self._batch if i == axis else size if isinstance(size, int) else self._known[keys[i]][0]
            for i, size in enumerate(spec.shape)
        )


# Files.


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"--input {path}: it is no regular file")
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidInputError(f"--input {path}: {exc.strerror}") from exc


def _load(path: Path) -> Any:
    """What NumPy makes of a file: an array, or arrays by name."""
    data = BytesIO(_read(path))
    try:
        content = np.load(data, allow_pickle=False)
        return dict(content) if isinstance(content, np.lib.npyio.NpzFile) else content
    except Exception as exc:  # NumPy, zipfile and zlib raise many kinds on what is not theirs
        raise InvalidInputError(
            f"--input {path}: not an .npy or .npz file of numbers or text: {exc}"
        ) from exc


def _saved(model: ModelSpec, options: InputOptions) -> dict[str, tuple[Path, NDArray[Any]]]:
    """What ``.npz`` and ``.npy`` files hold, by input name, each in its input's type."""
    specs = {spec.name: spec for spec in model.inputs}
    _check_names(options.files, specs)
    found: dict[str, tuple[Path, Any]] = {}
    if options.archive is not None:
        arrays = _load(options.archive)
        if not isinstance(arrays, dict):
            raise InvalidInputError(
                f"--input {options.archive}: it holds one array, expected an .npz file, or "
                f"NAME={options.archive}"
            )
        found = {name: (options.archive, array) for name, array in arrays.items()}
        _check_names(dict.fromkeys(found, options.archive), specs)
    for name, path in options.files.items():
        if name in found:
            raise InvalidInputError(f"--input {path}: input {name!r} is in {found[name][0]} too")
        if path.suffix == ".npy":
            found[name] = path, _load(path)
    return {name: (path, _typed(array, specs[name], path)) for name, (path, array) in found.items()}


def _check_names(files: Mapping[str, Path], specs: Mapping[str, TensorSpec]) -> None:
    for name, path in files.items():
        if name not in specs:
            raise InvalidInputError(
                f"--input {path}: got an array for {name!r}, expected one of {[*specs]}"
            )


def _typed(array: Any, spec: TensorSpec, path: Path) -> NDArray[Any]:
    if isinstance(array, dict):
        raise InvalidInputError(f"--input {path}: it holds {len(array)} arrays, expected one")
    # NumPy's files do not know the types of ml_dtypes, and say only how long an element is.
    if spec.dtype.isbuiltin != 1 and array.dtype == np.dtype((np.void, spec.dtype.itemsize)):
        array = array.view(spec.dtype)
    return as_input(array, spec, spec.element_type, f"--input {path}: input")


def _raw(path: Path, spec: TensorSpec, shape: tuple[int, ...], axis: int | None) -> NDArray[Any]:
    """A file of elements alone, with as many rows as it has."""
    if spec.element_type == STRING:
        raise InvalidInputError(
            f"--input {path}: input {spec} takes strings, expected an .npy file"
        )
    content = np.frombuffer(_read(path), np.uint8)
    rest = shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
    row_bytes = prod(rest) * spec.dtype.itemsize
    rows = content.size // row_bytes if row_bytes else 1
    if content.size != rows * row_bytes or rows < 1 or (axis is None and rows > 1):
        of = "" if axis is None else ", or a multiple of it,"
        raise InvalidInputError(
            f"--input {path}: got {content.size} bytes, expected {row_bytes}{of} for {spec}"
        )
    if axis is not None:
        shape = (*shape[:axis], rows, *shape[axis + 1 :])
    array: NDArray[Any] = content.view(spec.dtype).reshape(shape)
    return array


def _rows(array: NDArray[Any], axis: int | None, batch: int) -> NDArray[Any]:
    """As many rows as the batch has: from the start again where there are fewer."""
    if axis is None or array.shape[axis] == batch:
        return array
    repeated: NDArray[Any] = array.take(np.arange(batch) % array.shape[axis], axis)
    return repeated


# Random values.


def _random(
    spec: TensorSpec, shape: tuple[int, ...], integers: tuple[int, int], seed: int
) -> NDArray[Any]:
    generator = np.random.default_rng([seed, *spec.name.encode()])
    kind = spec.element_type
    if kind == STRING:
        words = np.array(_WORDS, object)
        return np.asarray(words[generator.integers(len(words), size=shape)], object)
    if kind == "bool":
        return np.asarray(generator.integers(2, size=shape, dtype=np.uint8)).astype(np.bool_)
    if "int" in kind:
        low, high = _held(kind, integers)
        drawn = spec.dtype if spec.dtype.isbuiltin == 1 else np.dtype(np.int64)
        return np.asarray(generator.integers(low, high, shape, drawn.type)).astype(spec.dtype)
    wide = spec.dtype.itemsize > np.dtype(np.float32).itemsize
    if kind.startswith("complex"):
        pairs = generator.standard_normal((*shape, 2))
        return (pairs[..., 0] + 1j * pairs[..., 1]).astype(spec.dtype)
    values = generator.standard_normal(shape, np.float64 if wide else np.float32)
    return np.asarray(values).astype(spec.dtype)


def _held(kind: str, integers: tuple[int, int]) -> tuple[int, int]:
    """The part of the bounds that a type of integers can hold: at least one value."""
    values = 1 << ELEMENT_TYPES[kind].bits
    least = 0 if kind.startswith("u") else -values // 2
    low = min(max(integers[0], least), least + values - 1)
    return low, min(max(integers[1], low + 1), least + values)


def make_inputs(model: ModelSpec, batch: int, options: InputOptions) -> dict[str, NDArray[Any]]:
    """The arrays of one request.

    Args:
        model: What they are for.
        batch: Rows of the request. Rows of files are cut to it, or come again from the first.
        options: Where they come from.

    Returns:
        By input name, in the model's order: C-contiguous, of the input's own type; the same each time.

    Raises:
        InvalidInputError: A file cannot be read, or does not fit the model; a dimension's size is not known;
            the model takes no such batch.
    """
    _check_batch(model, batch)
    sizes = _Sizes(model, batch, options.dims)
    found = _saved(model, options)
    for spec in model.inputs:
        if spec.name in found:
            path, array = found[spec.name]
            sizes.bind(spec, array.shape, path)
    sizes.check_known([spec for spec in model.inputs if spec.name not in found])
    inputs = {}
    for spec in model.inputs:
        shape, axis = sizes.shape(spec), sizes.axes.get(spec.name)
        if spec.name in found:
            array = _rows(found[spec.name][1], axis, batch)
        elif spec.name in options.files:
            array = _rows(_raw(options.files[spec.name], spec, shape, axis), axis, batch)
        else:
            array = _random_fitting(spec, shape, options)
        inputs[spec.name] = np.asarray(array, spec.dtype, order="C")
    plan(model, [array.shape for array in inputs.values()], 1)
    return inputs


def _random_fitting(
    spec: TensorSpec, shape: tuple[int, ...], options: InputOptions
) -> NDArray[Any]:
    try:
        return _random(spec, shape, options.integers, options.seed)
    except (MemoryError, ValueError) as exc:  # NumPy's own word for sizes beyond all memory
        raise InvalidInputError(f"input {spec} of shape {[*shape]} cannot be had: {exc}") from exc
