"""Where a model comes from: a file, or a buffer that engines read as if it were one."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcinfer.errors import BuildError, MissingDependencyError

FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for models that do not lie beside their weights."""


class ModelBuffer:
    """A model's content as a file without a name, for engines in this process and in its workers.

    It lies in memory (a memfd), so nothing is left of it however this process ends. It has to be closed by
    whoever made it, after the last engine has loaded it.

    Attributes:
        path: What engines open, as long as it is not closed and this process lives.
    """

    def __init__(self, content: bytes) -> None:
        """Copy the content.

        Raises:
            OSError: No memory or no descriptor is left.
        """
        self._fd = os.memfd_create("mcinfer-model", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            with os.fdopen(os.dup(self._fd), "wb") as file:
                file.write(content)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory up. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def put_weights(content: bytes, weights: bytes, opened: ExitStack) -> str:
    """Put the weights of an ONNX model where the engine finds them; the folder.

    Args:
        content: The model, whose external data is one file.
        weights: That file's content.
        opened: Removes the folder when it is closed, after the model was loaded.

    Raises:
        BuildError: The model does not have exactly one file of weights.
        MissingDependencyError: The package onnx is not installed.
    """
    onnx = _onnx()
    names = {
        entry.value
        for tensor in _initializers(onnx.load_model_from_string(content).graph)
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
    """An ONNX model with other sizes of its inputs; weights that lie outside stay there.

    Sizes that the graph itself fixes (the constant of a Reshape, say) stay as they are: then the
    engine refuses it, or a run does.

    Args:
        source: Path or content.
        dims: By input, its new shape, of the rank that it has.

    Raises:
        MissingDependencyError: The package onnx is not installed.
        BuildError: It cannot be read, or is too large to be written.
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
                    size.dim_value = wanted
        # What follows from the old sizes: the engine finds out anew.
        del model.graph.value_info[:]
        for value in model.graph.output:
            for i, size in enumerate(value.type.tensor_type.shape.dim):
                size.dim_param = f"{value.name}_{i}"
        return bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())
    except Exception as exc:  # protobuf and onnx raise many kinds
        raise BuildError(f"onnx: {type(exc).__name__}: {exc}") from exc


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
