"""The elements of a model's weights: where they are, and writing parts of them into other files.

A model is parsed without its large weights. A *stub* replaces each of them: a `TensorProto` with external
data whose location is a number. `Weights` knows where the elements of each number are: in a file, or in
memory if the model's file has them in another form than as raw data. Writing reads the ranges that are
needed, in pieces, so no weight is in memory as a whole.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
from google.protobuf.message import DecodeError  # comes with onnx
from onnx import GraphProto, ModelProto, TensorProto, inliner, numpy_helper

from mcinfer.errors import BuildError
from mcinfer.model_cache.onnx_files import external_files, open_regular, without_weights
from mcinfer.ranks.slicing.graphs import BITS, MAIN_DOMAINS, subgraphs, tensor_bytes, with_inner

SMALL_BYTES = 16 << 10
"""Tensors up to this size stay in a parsed model: they may be shapes."""

_LEAST_OUTSIDE_BYTES = 1 << 10
"""Larger tensors are written as external data."""

_PIECE_BYTES = 8 << 20
_ALIGNMENT = 64
_PAGE = 4096
"""External data from `_PIECE_BYTES` on begin at a page, so that they can be mapped."""

_ELEMENTS = (
    *("raw_data", "float_data", "double_data"),
    *("int32_data", "int64_data", "uint64_data"),
)
"""The fields of a `TensorProto` that elements can be in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one rank gets one initialiser of its graph.

    Attributes:
        name: In the rank's graph.
        source: A tensor of the whole model, or one that slicing adds.
        axis: The axis that is cut.
        ranges: Of positions along it, first and past the last, joined in this order; None for all of them.
    """

    name: str
    source: TensorProto
    axis: int = 0
    ranges: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where elements are: in an open file from an offset on, or in `content`."""

    size: int
    descriptor: int = -1
    offset: int = 0
    content: bytes = b""

    def read(self, first: int, count: int) -> bytes:
        """Some of the bytes, fewer at the file's end."""
        if self.descriptor < 0:
            return self.content[first : first + count]
        return os.pread(self.descriptor, count, self.offset + first)


class Weights:
    """A model without its large weights, and these.

    Attributes:
        model: With stubs; functions of the model are inlined, so that their weights can be cut, and large
            `Constant` nodes of the main graph are initialisers.
    """

    def __init__(self, path: Path) -> None:
        """Parse a model.

        Raises:
            BuildError: The file is no ONNX model, or external data are missing or too short.
            OSError: A file cannot be opened.
        """
        self._path = path.absolute()
        self._places: list[_Place] = []
        self._descriptors: dict[str, int] = {}
        self._opened = ExitStack()
        with self._opened:
            content = without_weights(path, SMALL_BYTES + 1)
            try:
                self.model = ModelProto.FromString(content)
            except DecodeError as exc:
                raise BuildError(f"{path}: expected an ONNX model: {exc}") from exc
            del content
            if self.model.functions:
                self.model = inliner.inline_local_functions(self.model)
            _constants_as_initializers(self.model.graph)
            for tensor in _tensors(self.model):
                if tensor.data_location == TensorProto.EXTERNAL:
                    self._take_external(tensor)
            for tensor in self.model.graph.initializer:
                is_inside = tensor.data_location != TensorProto.EXTERNAL
                if is_inside and tensor_bytes(tensor) > SMALL_BYTES:
                    content = _raw(tensor)
                    for field in _ELEMENTS:
                        tensor.ClearField(field)
                    self._make_stub(tensor, _Place(len(content), content=content))
            self._opened = self._opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _take_external(self, tensor: TensorProto) -> None:
        """Replace a tensor by a stub if it is large; else read its elements."""
        place = self._external(tensor)
        if place.size > SMALL_BYTES:
            self._make_stub(tensor, place)
        else:
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
            tensor.raw_data = place.read(0, place.size)

    def _make_stub(self, tensor: TensorProto, place: _Place) -> None:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.ClearField("external_data")  # there may be some without the location, too
        tensor.external_data.add(key="location", value=str(len(self._places)))
        self._places.append(place)

    def _external(self, tensor: TensorProto) -> _Place:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in self._descriptors:
            path = self._path
            if location != path.name:
                (path,) = external_files(path, None, [location])
            self._descriptors[location], _ = self._opened.enter_context(open_regular(path))
        descriptor = self._descriptors[location]
        try:
            offset, length = (int(entries.get(key) or 0) for key in ("offset", "length"))
        except ValueError as exc:
            raise BuildError(
                f"{self._path}: external data of initialiser {tensor.name!r}: {exc}"
            ) from exc
        size = tensor_bytes(tensor) if BITS.get(tensor.data_type) else length
        end = os.fstat(descriptor).st_size
        if min(offset, size) < 0 or offset + size > end:
            raise BuildError(
                f"{self._path}: initialiser {tensor.name!r} needs bytes {offset} to {offset + size} of "
                f"{location!r}, which has {end}"
            )
        return _Place(size, descriptor, offset)

    # Writing.

    def write(self, recipe: Recipe, file: "DataFile") -> TensorProto:
        """Write a tensor of the model, or a part of it; returns the new `TensorProto`.

        Elements that are few stay in the tensor.
        """
        tensor = recipe.source
        new = TensorProto(name=recipe.name, data_type=tensor.data_type, dims=tensor.dims)
        if recipe.ranges is not None:
            new.dims[recipe.axis] = sum(stop - start for start, stop in recipe.ranges)
        is_known = bool(BITS.get(tensor.data_type))
        if tensor.data_location == TensorProto.EXTERNAL:
            place = self._places[int(tensor.external_data[0].value)]
        elif is_known:
            raw = _raw(tensor)
            place = _Place(len(raw), content=raw)
        else:  # strings, or a type that is not known here
            new.CopyFrom(tensor)
            new.name = recipe.name
            return new
        size = tensor_bytes(new) if is_known else place.size
        pieces = _pieces(place, recipe)
        if size <= _LEAST_OUTSIDE_BYTES:
            new.raw_data = b"".join(pieces)
        else:
            file.add(new, pieces, size)
        return new

    def write_rest(self, model: ModelProto, file: "DataFile") -> None:
        """Replace the stubs that are not initialisers of the main graph: attributes, subgraphs, functions."""
        for tensor in _tensors(model):
            if [entry.key for entry in tensor.external_data] == ["location"]:
                tensor.CopyFrom(self.write(Recipe(name=tensor.name, source=tensor), file))


class DataFile:
    """A file of external data that grows.

    Attributes:
        name: Of the file, which is in the folder of the model.
        size: Bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.size = 0
        self._file = path.open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, tensor: TensorProto, pieces: Iterator[bytes], size: int) -> None:
        """Append a tensor's elements, and have it name their place."""
        step = _PAGE if size >= _PIECE_BYTES else _ALIGNMENT
        start = -(-self.size // step) * step
        self._file.seek(start)
        for piece in pieces:
            self._file.write(piece)
        self.size = self._file.tell()
        if self.size != start + size:
            raise BuildError(
                f"initialiser {tensor.name!r} has {self.size - start} bytes, expected {size}: was its "
                "file changed meanwhile?"
            )
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": self.name, "offset": str(start), "length": str(size)}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)


def _raw(tensor: TensorProto) -> bytes:
    """The elements in the form of raw data."""
    content: bytes = tensor.raw_data
    if not content:
        content = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    return content


def _pieces(place: _Place, recipe: Recipe) -> Iterator[bytes]:
    """The bytes of a part of a tensor, in its own order."""
    tensor, axis, ranges = recipe.source, recipe.axis, recipe.ranges
    if ranges is None:
        yield from _runs(place, 0, place.size)
        return
    shape = tuple(tensor.dims)
    inner_bits = prod(shape[axis + 1 :]) * BITS.get(tensor.data_type, 0)
    if not inner_bits or inner_bits % 8:
        raise BuildError(
            f"initialiser {tensor.name!r} {[*shape]} cannot be cut along axis {axis}: its elements "
            f"there are not whole bytes"
        )
    inner, row = inner_bits // 8, shape[axis] * inner_bits // 8
    rows = prod(shape[:axis])
    if rows == 1 or row > _PIECE_BYTES:
        for number in range(rows):
            for start, stop in ranges:
                yield from _runs(place, number * row + start * inner, (stop - start) * inner)
        return
    step = max(1, _PIECE_BYTES // max(row, 1))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        block = np.frombuffer(place.read(first * row, count * row), np.uint8)
        if block.size < count * row:
            return  # the writer notices
        columns = block.reshape(count, shape[axis], inner)
        parts = [columns[:, start:stop] for start, stop in ranges]
        yield np.concatenate(parts, axis=1).tobytes()


def _runs(place: _Place, first: int, count: int) -> Iterator[bytes]:
    while count > 0 and (piece := place.read(first, min(count, _PIECE_BYTES))):
        yield piece
        first += len(piece)
        count -= len(piece)


def _constants_as_initializers(graph: GraphProto) -> None:
    """Replace `Constant` nodes of large tensors."""
    large = [
        node
        for node in graph.node
        if node.op_type == "Constant"
        and node.domain in MAIN_DOMAINS
        and any(a.name == "value" and tensor_bytes(a.t) > SMALL_BYTES for a in node.attribute)
    ]
    for node in large:
        tensor = graph.initializer.add()
        tensor.CopyFrom(node.attribute[0].t)
        tensor.name = node.output[0]
        graph.node.remove(node)


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All tensors of a model, in subgraphs, attributes and functions too."""
    graphs, lists = [model.graph], [function.node for function in model.functions]
    for node in with_inner(node for nodes in (model.graph.node, *lists) for node in nodes):
        graphs += subgraphs(node)
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
    for graph in graphs:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
