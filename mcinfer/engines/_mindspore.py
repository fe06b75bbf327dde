"""MindSpore (https://www.mindspore.cn): a ``.mindir`` model as a `GraphCell` on the CPU.

The MindIR (``mindspore/train/mind_ir_pb2.py``) describes the model's inputs and outputs. MindSpore checks
little of it, so this module does. MindIR keeps no names of outputs: here they are ``output_0``,
``output_1``, … in their order. It keeps no symbols: a dynamic dimension is ``None``, so a batch is cut only
where `batch_axes` says so.

Limits of MindSpore (2.10):

* All models of a process share one runtime, so they run one at a time, and no run can be stopped.
* The number of threads belongs to the process and is fixed when the runtime starts: a second model in the
  process must ask for as many as the first. The pool has at least two threads (an actor and a kernel
  thread, which both use a core during a run), and no more than there are cores.
* A failed run destroys the compiled model, which is compiled again before the next run. MindSpore takes
  three seconds to report a failed run.
* Some operators write to their inputs, so each run gets copies of them.
* It cannot exchange bfloat16, strings or quantized types with NumPy 2: `BuildError`.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import ArrayEngine, EngineRequest
from mcinfer.errors import (
    BuildError,
    McinferError,
    MissingDependencyError,
    PredictError,
)
from mcinfer.extras import install
from mcinfer.locks import Turn
from mcinfer.private import PrivateFolder
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype

DEVICES = ("cpu",)

_TYPES = {
    **{
        name.upper(): name
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float64", "complex64", "complex128"),
        )
    },
    "FLOAT": "float32",
    "DOUBLE": "float64",
}
"""Element types by their names in MindIR (``TensorProto.DataType``): those that NumPy has as well."""

_UNKNOWN_RANK = -2  # a shape of this one size may be any shape

_CALL_STACK = re.compile(r"\n*-{20,}\n- C\+\+ Call Stack.*", re.DOTALL)

_TURN = Turn()
"""Held to load, compile or run: all models of the process share one runtime."""

_PHASE = "graph_load_from_mindir"  # the phase in which `GraphCell.__call__` compiles and runs


def load(request: EngineRequest) -> "MindSporeEngine":
    try:
        with _TURN:
            return MindSporeEngine(request)
    except McinferError:
        raise
    except Exception as exc:  # MindSpore has no exceptions of its own, it raises any of Python's
        raise BuildError(f"mindspore: {request.model}: {_message(exc)}") from exc


class MindSporeEngine(ArrayEngine):
    name = "mindspore"

    def __init__(self, request: EngineRequest) -> None:
        super().__init__()
        self._runtime = _start_runtime(request.threads, request.options.inter_op_threads)
        with _mindir_file(request.model) as path:
            self._graph = self._runtime.load(path)
            # After MindSpore has loaded the file: protobuf takes an empty file for a model.
            model = _read(path)
        self.spec = ModelSpec(inputs=_inputs(model), outputs=_outputs(model))
        self.providers = ("CPU",)
        self._cell: Any = self._compiled()

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        with _TURN:
            return self._run(inputs)

    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self.check_armed()
        try:
            if self._cell is None:
                self._cell = self._compiled()
            # Operators may write to inputs (Assign), and an output may be an input as it came.
            arrays = [array.copy() for array in inputs]
            results = self._cell(*map(self._runtime.Tensor.from_numpy, arrays))
            if not isinstance(results, (tuple, list)):
                results = (results,)
            outputs: list[NDArray[Any]] = [result.asnumpy() for result in results]
        except Exception as exc:  # see `load`
            # After a run that failed, MindSpore (2.10) refuses all others of what it had compiled.
            self._cell = None
            raise PredictError(f"mindspore: {_message(exc)}") from exc
        return [
            output.copy() if any(np.may_share_memory(output, a) for a in arrays) else output
            for output in outputs
        ]

    def _compiled(self) -> Any:
        """The graph, compiled once for all shapes, which `set_inputs` does. Missing operators show here."""
        ms = self._runtime
        cell = ms.nn.GraphCell(self._graph)
        samples = [
            ms.Tensor(shape=[*spec.shape], dtype=getattr(ms, spec.dtype.name))
            if None in spec.shape
            else ms.Tensor.from_numpy(
                np.zeros([size for size in spec.shape if isinstance(size, int)], spec.dtype)
            )
            for spec in self.spec.inputs
        ]
        if samples:
            cell.set_inputs(*samples)
        # What `GraphCell.__call__` does before it runs (2.10); there is no public way.
        cell.phase = _PHASE
        cell._add_attr(_PHASE, self._graph)
        cell.compile(*samples)
        return cell


@cache
def _start_runtime(threads: int, inter_op_threads: int | None) -> Any:
    """Start MindSpore on the CPU; a second call with another number of threads raises `BuildError`."""
    if find_spec("mindspore") is None:
        raise MissingDependencyError(
            f"engine mindspore needs the package mindspore: {install('mindspore')}"
        )
    if "mindspore" not in sys.modules:
        # Its OpenMP reads this when it is loaded, and never again.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("GLOG_v", "3")  # errors; it warns of much that is not the user's
    else:
        fixed = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        if fixed != str(threads):
            raise BuildError(
                f"threads: got {threads}, but MindSpore was started in this process with "
                f"OMP_NUM_THREADS={fixed}, and cannot change its threads"
            )
    import mindspore as ms

    ms.set_device("CPU")
    ms.device_context.cpu.op_tuning.threads_num(threads)
    if inter_op_threads is not None:
        ms.runtime.dispatch_threads_num(inter_op_threads)
    return ms


@contextmanager
def _mindir_file(model: str) -> Iterator[str]:
    """A path that ends in ``.mindir``, as MindSpore requires: the model's own, or that of a copy."""
    if model.endswith(".mindir"):
        yield model
        return
    with PrivateFolder() as folder:
        yield shutil.copyfile(model, f"{folder.path}/model.mindir")


def _read(path: str) -> Any:
    from mindspore.train.mind_ir_pb2 import ModelProto

    model = ModelProto()
    model.ParseFromString(Path(path).read_bytes())
    return model


def _inputs(model: Any) -> tuple[TensorSpec, ...]:
    prefix = f"{model.graph.name}:"
    return tuple(
        _spec(info.name.removeprefix(prefix), info.tensor, "input") for info in model.graph.input
    )


def _outputs(model: Any) -> tuple[TensorSpec, ...]:
    """The outputs: one tensor, or the tensors of one tuple or list."""
    parts = []
    for info in model.graph.output:
        kinds = (info.attr_info.TUPLE, info.attr_info.LIST)
        if info.tensor:
            parts.append(info.tensor)
        elif info.attr_info.type in kinds and not info.attr_info.seq_info.is_dyn_len:
            parts += [
                value.tensors if value.type == value.TENSORS else ()
                for value in info.attr_info.values
            ]
        else:
            parts.append(())
    return tuple(_spec(f"output_{i}", tensors, "output") for i, tensors in enumerate(parts))


def _spec(name: str, tensors: Sequence[Any], role: str) -> TensorSpec:
    if len(tensors) != 1:
        raise BuildError(f"mindspore: {role} {name!r} is not a tensor")
    tensor = tensors[0]
    type_name = tensor.DataType.Name(tensor.data_type)
    if type_name not in _TYPES:
        raise BuildError(
            f"mindspore: {role} {name!r} is of type {type_name}, expected one of {[*_TYPES]}"
        )
    if _UNKNOWN_RANK in tensor.dims:
        raise BuildError(
            f"mindspore: {role} {name!r} has no fixed number of dimensions; export the model with one"
        )
    shape = tuple(size if size >= 0 else None for size in tensor.dims)
    return TensorSpec(name=name, dtype=numpy_dtype(_TYPES[type_name]), shape=shape)


def _message(exc: Exception) -> str:
    """MindSpore's message, without the names of its source files."""
    return _CALL_STACK.sub("", str(exc)).strip() or type(exc).__name__
