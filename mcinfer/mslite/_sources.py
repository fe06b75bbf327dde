"""Where a model comes from: a file, or a buffer that engines read as if it were one."""

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcinfer.errors import BuildError, MissingDependencyError


class ModelBuffer:
    """A model's content as a file without a name, for engines in this process and in its workers.

    It lies in memory (a memfd), so nothing is left of it however this process ends. It is to be closed by
    whoever made it, after the last engine has loaded it; one that is garbage closes itself.

    Attributes:
        path: What engines open, as long as it is not closed and this process lives.
    """

    def __init__(self, content: bytes) -> None:
        """Copy the content.

        Raises:
            OSError: No memory or no descriptor is left.
        """
        fd = os.memfd_create("mcinfer-model", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(content)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory up. May be called again."""
        self._close()


def put_weights(content: bytes, weights: bytes, opened: ExitStack) -> str:
    """Put the weights of an ONNX model where the engine finds them; the folder.

    Args:
        content: The model, whose external data is one file.
        weights: That file's content.
        opened: Removes the folder when it is closed, after the model was loaded.

    Raises:
        BuildError: It is no model, or does not have exactly one file of weights.
        MissingDependencyError: The package onnx is not installed.
    """
    onnx = _onnx()
    try:
        graph = onnx.load_model_from_string(content).graph
    except Exception as exc:  # protobuf's own kinds
        raise BuildError(f"onnx: {type(exc).__name__}: {exc}") from exc
    names = {
        entry.value
        for tensor in _initializers(graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    if len(names) != 1:
        raise BuildError(
            f"weight_bytes: the model's weights lie in {sorted(names)}, expected one file"
        )
    [name] = names
    folder = Path(opened.enter_context(TemporaryDirectory(prefix="mcinfer-weights-")))
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BuildError(
            f"weight_bytes: the model's weights lie in {name!r}, outside of its folder"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(weights)
    return str(folder)


def with_dims(source: str | bytes, dims: Mapping[str, Sequence[int]]) -> bytes:
    """An ONNX model with other sizes in the place of fixed ones; weights that lie outside stay there.

    Sizes that are open stay open, and sizes that the graph itself fixes stay as they are: where they do not
    go with the new ones the engine refuses the model, but for a Reshape to a constant, refused here.

    Args:
        source: Path or content.
        dims: By input, its new shape, of the rank that it has.

    Raises:
        MissingDependencyError: The package onnx is not installed.
        BuildError: It cannot be read, is too large to be written, or does not take the sizes.
    """
    onnx = _onnx()
    try:
        if isinstance(source, bytes):
            model = onnx.load_model_from_string(source)
        else:
            model = onnx.load(source, load_external_data=False)
        for value in model.graph.input:
            if value.name in dims:
                sizes = value.type.tensor_type.shape.dim
                for size, wanted in zip(sizes, dims[value.name], strict=True):
                    if size.HasField("dim_value"):
                        size.dim_value = wanted
        # What follows from the old sizes: the engine finds out anew.
        del model.graph.value_info[:]
        for value in model.graph.output:
            for i, size in enumerate(value.type.tensor_type.shape.dim):
                if size.HasField("dim_value"):
                    size.dim_param = f"{value.name}_{i}"
        model = onnx.shape_inference.infer_shapes(model)
        content = bytes(model.SerializeToString())
    except Exception as exc:  # protobuf and onnx raise many kinds
        raise BuildError(f"onnx: {type(exc).__name__}: {exc}") from exc
    _check_reshapes(model.graph)
    return content


def _check_reshapes(graph: Any) -> None:
    """Refuse a Reshape that cannot be: ONNX Runtime (1.31) notices it in the run, not when it loads."""
    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
        and all(size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)
    }
    for node in graph.node:
        if node.op_type != "Reshape":
            continue
        before, after = shapes.get(node.input[0]), shapes.get(node.output[0])
        if before is not None and after is not None and prod(before) != prod(after):
            raise BuildError(
                f"the Reshape that makes {node.output[0]!r} cannot make {after} of {before}"
            )


def _initializers(graph: Any) -> list[Any]:
    """Of a graph and those within it, as `onnx.TensorProto`."""
    tensors = [*graph.initializer]
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t, *attribute.tensors]
            for inner in [attribute.g, *attribute.graphs]:
                if inner.node or inner.initializer:
                    tensors += _initializers(inner)
    return tensors


def _onnx() -> Any:
    try:
        import onnx
        import onnx.shape_inference
    except ImportError as exc:
        raise MissingDependencyError(
            "changing a model takes the package onnx: pip install 'mcinfer[onnx]'"
        ) from exc
    return onnx
