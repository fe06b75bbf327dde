"""`Model`: one model in this process; and, under upstream's module name, the runner of many workers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from numpy.typing import NDArray

from mcinfer.errors import BuildError, ClosedError, InvalidInputError, is_refusal
from mcinfer.locks import Turn
from mcinfer.mslite._checks import (
    Sections,
    check_elements,
    check_list,
    check_path,
    check_type,
    failure,
    failures,
)
from mcinfer.mslite._configuration import read_configuration, weight_sharing
from mcinfer.mslite._loaded import LoadedModel, load, membership
from mcinfer.mslite._runner import (
    ModelParallelRunner,
    RunnerConfig,
    given_tensors,
    named_weights,
)
from mcinfer.mslite._targets import ModelType, Source, open_first
from mcinfer.mslite.context import Context, check_context
from mcinfer.mslite.tensor import (
    Format,
    Tensor,
    TensorMeta,
    answered,
    check_inputs,
    check_outputs,
    input_arrays,
    known_data_type,
    known_dims,
)
from mcinfer.weight_sharing import WeightOwner

__tracebackhide__ = is_refusal

__all__ = [
    "Model",
    "ModelGroup",
    "ModelGroupFlag",
    "ModelParallelRunner",
    "ModelType",
    "RunnerConfig",
]


class ModelGroupFlag(IntFlag):
    """What the models of a `ModelGroup` share."""

    SHARE_WEIGHT = 1
    SHARE_WORKSPACE = 2
    SHARE_WEIGHT_WORKSPACE = 3


@dataclass(slots=True, kw_only=True)
class _Built:
    source: Source
    session: LoadedModel
    inputs: list[Tensor]
    dims: list[list[int]]
    owner: WeightOwner | None
    fixed: str  # why its fixed sizes cannot be changed; empty if they can
    lock: Turn = field(default_factory=Turn)


class Model:
    """A model that runs in this process. Threads may call it at once; the GIL is free during runs.

    For many clients, or several devices, there is `ModelParallelRunner`.
    """

    def __init__(self) -> None:
        self._built: _Built | None = None
        self._building = Turn()
        self._group: ModelGroup | None = None

    def __str__(self) -> str:
        return f"model_path: {'' if self._built is None else self._built.source.name}."

    def build_from_file(
        self,
        model_path: str,
        model_type: ModelType,
        context: Context | None = None,
        config_path: str = "",
        config_dict: Sections | None = None,
        dec_key: bytes | None = None,
        dec_mode: str = "AES-GCM",
        dec_num_parallel: int = 0,
    ) -> None:
        """Load a model: an ONNX file, by its ending ``.onnx`` or by `model_type`, or a MindIR file.

        It runs on the CPU without a context. The CPU replaces a target that this host lacks, with a warning;
        with ``MCINFER_STRICT_DEVICE=1`` that is an error. The entries in `config_dict` override those of the
        file `config_path`. Encrypted models are refused: MindSpore Lite dropped them.

        Raises:
            TypeError: An argument is of another type.
            RuntimeError: A path does not exist, or the model cannot be built; also of a class of
                `mcinfer.errors`, if there is one.
        """
        what = "build_from_file"
        check_type("model_path", model_path, str)
        check_type("model_type", model_type, ModelType)
        context = check_context(context)
        check_type("config_path", config_path, str)
        check_path(what, "model_path", model_path)
        sections = read_configuration(what, config_path, config_dict)
        check_type("dec_mode", dec_mode, str)
        check_type("dec_num_parallel", dec_num_parallel, int)
        if dec_key is not None:
            check_type("dec_key", dec_key, bytes)
            unsupported = "dec_key: encrypted models are not supported, decrypt it first"
            raise failure(what, BuildError(unsupported))
        self._build(what, Source(model_path, model_type, context, sections))

    def build_from_buffer(
        self,
        model_bytes: bytes,
        weight_bytes: bytes | None = None,
        model_type: ModelType | None = None,
        context: Context | None = None,
        config_path: str = "",
        config_dict: Sections | None = None,
    ) -> None:
        """Load a model from memory; the other arguments and errors are those of `build_from_file`.

        The bytes are kept only if `resize` may have to build the model again: it is ONNX, and has an input of
        which a size is fixed.

        Args:
            model_bytes: The content of a model file.
            weight_bytes: The content of the one file of an ONNX model's external data. For weights on disk
                name a file of their folder in the configuration instead, as ``mindir_path`` of section
                ``model_file``.
            model_type: None: the content shows whether it is ONNX or MindIR.
            context: As in `build_from_file`.
            config_path: Likewise.
            config_dict: Likewise.
        """
        what = "build_from_buffer"
        check_type("model_bytes", model_bytes, bytes)
        if weight_bytes is not None:
            check_type("weight_bytes", weight_bytes, bytes)
        if model_type is not None:
            check_type("model_type", model_type, ModelType)
        context = check_context(context)
        check_type("config_path", config_path, str)
        sections = read_configuration(what, config_path, config_dict)
        self._build(what, Source(model_bytes, model_type, context, sections, weight_bytes))

    def _build(self, what: str, source: Source) -> None:
        # Warnings are at the line of the user's call, one above `build_from_…`.
        with self._building, failures(what):
            if self._built is not None:
                raise BuildError("the model was built already; make a new Model")
            pids, _ = weight_sharing(source.sections)
            ranks = membership(source)
            if (group := self._group or ModelGroup._of_path(source.model)) is not None:
                source.workspace = ModelGroupFlag.SHARE_WORKSPACE in group.flags
                source.prepare = "wait" if ModelGroupFlag.SHARE_WEIGHT in group.flags else "auto"
            build = partial(load, source, ranks=ranks)
            try:
                session = open_first(source, build, alone=True, stacklevel=3)
            except BaseException:
                if ranks is not None:
                    ranks.close()
                raise
            owner = None if pids is None else session.share(pids, stacklevel=3)
            fixed = ""
            if ranks is not None:
                fixed = "its sizes are fixed: it is a slice; slice the model with other sizes"
            elif not source.is_onnx:
                fixed = "its sizes are fixed, and can be changed in ONNX models only"
            specs = session.spec.inputs
            if fixed or not any(isinstance(size, int) for spec in specs for size in spec.shape):
                source.model, source.weights = "", None  # nothing reads them again
            self._built = _Built(
                source=source,
                session=session,
                inputs=[Tensor._of_model(spec) for spec in specs],
                dims=[known_dims(spec) for spec in specs],
                owner=owner,
                fixed=fixed,
            )

    def _ready(self, what: str) -> _Built:
        if self._built is None:
            raise failure(what, ClosedError("Session is null, please build model first!"))
        return self._built

    def get_inputs(self) -> list[Tensor]:
        """The model's input tensors, the same at every call: fill them, and pass them to `predict`.

        A size that is not known before `resize` is -1, and is taken from the data that is set.
        """
        return [*self._ready("get_inputs").inputs]

    def get_outputs(self) -> tuple[TensorMeta, ...]:
        """The outputs' names, dtypes and shapes, for the inputs' sizes as they are now."""
        built = self._ready("get_outputs")
        with built.lock:
            session, dims = built.session, built.dims
        specs = session.spec.outputs
        shapes: Sequence[tuple[int, ...] | None] = [None] * len(specs)
        if all(size > 0 for shape in dims for size in shape):
            shapes = session.output_shapes(tuple(map(tuple, dims)))
        return tuple(
            TensorMeta(
                name=spec.name,
                dtype=known_data_type(spec.dtype),
                shape=known_dims(spec) if shape is None else [*shape],
                format=Format.NCHW,
            )
            for spec, shape in zip(specs, shapes, strict=True)
        )

    def get_model_info(self, key: str | None = None) -> str:
        """A fact about the model, as text; ``""`` if it is unknown or unset.

        Args:
            key: ``input_shape`` (``name:1,224,224,3;…``, -1 for a size that is not known),
                ``dynamic_dims`` (the same of the inputs that have such sizes), ``current_pid`` (also before
                the build), ``shareable_weight_mem_handle`` (if the configuration has
                ``shareable_weight_pid_list``). Something other than a str is a TypeError.
        """
        check_type("key", key, str)
        if key == "current_pid":
            return str(_current_pid())
        if self._built is None:
            return ""
        if key == "shareable_weight_mem_handle" and self._built.owner is not None:
            return str(self._built.owner.handle)
        if key not in ("input_shape", "dynamic_dims"):
            return ""
        named = zip(self._built.session.spec.inputs, self._built.dims, strict=True)
        return ";".join(
            f"{spec.name}:{','.join(map(str, dims))}"
            for spec, dims in named
            if key == "input_shape" or any(size < 0 for size in dims)
        )

    def predict(
        self,
        inputs: Sequence[Tensor | NDArray[Any]],
        outputs: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Run the model, and return the outputs: `outputs`, or new tensors.

        Args:
            inputs: A list or tuple of tensors or arrays, in the model's order, of its dtypes and shapes. The
                run reads them in place, so they must not change meanwhile. A tensor must have data: those of
                `get_inputs` have none until it is set or read.
            outputs: Tensors to write to, of the outputs' dtypes and shapes (or of sizes not known yet), whose
                memory may be that of inputs, but not of each other; or an empty list to put new ones into.

        Raises:
            TypeError: An argument is of another type.
            RuntimeError: Another number of inputs, a tensor without data, or the run failed: nothing was
                written to `outputs` then.
        """
        built = self._ready("predict")
        session = built.session  # `resize` may replace it meanwhile
        given = check_inputs(inputs, len(built.inputs))
        with failures("predict"):
            check_outputs(outputs, len(session.spec.outputs))
            return answered(outputs, session.run(input_arrays(given)))

    def resize(self, inputs: list[Tensor], dims: list[list[int]]) -> None:
        """Set the shapes of inputs: `inputs` are some of `get_inputs`, or tensors of those names.

        Sizes that the model leaves open are only noted: `predict` takes any. A model with fixed sizes is
        built again with the new ones, if its graph allows that; this takes the package onnx.

        Raises:
            TypeError: An argument is of another type.
            ValueError: Not as many shapes as inputs.
            RuntimeError: A size is 0 or less, or the model does not take it; the model stays as it was.
        """
        check_list("inputs", inputs, Tensor)
        check_list("dims", dims, list)
        for shape in dims:
            check_elements("dims element's", shape, int)
        if len(inputs) != len(dims):
            raise ValueError(
                f"inputs' size does not match dims' size: got {len(inputs)} and {len(dims)}"
            )
        built = self._ready("resize")
        with built.lock, failures("resize"):
            self._resize(built, inputs, dims)

    def _resize(self, built: _Built, inputs: list[Tensor], dims: list[list[int]]) -> None:
        names = [spec.name for spec in built.session.spec.inputs]
        wanted = [[*shape] for shape in built.dims]
        for tensor, shape in zip(inputs, dims, strict=True):
            if tensor.name not in names:
                raise InvalidInputError(
                    f"inputs: unknown {tensor.name!r}, expected some of {names}"
                )
            i = names.index(tensor.name)
            if any(size <= 0 for size in shape) or len(shape) != len(wanted[i]):
                raise InvalidInputError(
                    f"dims of {tensor.name!r}: got {shape}, expected {len(wanted[i])} sizes above 0"
                )
            wanted[i] = [*shape]
        session = built.session
        fits = all(
            not isinstance(fixed, int) or fixed == size
            for spec, shape in zip(session.spec.inputs, wanted, strict=True)
            for fixed, size in zip(spec.shape, shape, strict=True)
        )
        if not fits:
            if built.fixed:
                raise BuildError(built.fixed)
            dims_of = dict(zip(names, wanted, strict=True))
            session = load(built.source, session.attempt, dims=dims_of)
            session.weights = built.session.weights
        if all(size > 0 for shape in wanted for size in shape):
            session.output_shapes(tuple(map(tuple, wanted)))
        built.session, built.dims = session, wanted
        for tensor, shape in zip(inputs, dims, strict=True):
            tensor.shape = shape
            built.inputs[names.index(tensor.name)].shape = shape

    def update_weights(self, weights: list[list[Tensor]]) -> None:
        """Replace weights; runs that have begun keep the old ones.

        Args:
            weights: A new tensor, which is copied, for each weight in the file that
                ``variable_weights_file`` in section ``[ascend_context]`` of the configuration names: by the
                tensors' names, or by position if they have none. The division into lists does not matter.

        Raises:
            TypeError: Not a list of lists of Tensor.
            RuntimeError: A name, the count, a dtype or a shape does not fit, or no weight can be replaced;
                nothing was changed.
        """
        given = given_tensors(weights)
        built = self._ready("update weight")
        with built.lock, failures("update weight"):
            built.session.update_weights(named_weights(given, built.session.engine.weights))


def _current_pid() -> int:
    """This process's id in the outermost pid namespace that ``/proc`` shows (proc_pid_status(5)).

    In a container with its own ``/proc`` that is the container's id, which the owner may not see.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[1])
    return os.getpid()


class ModelGroup:
    """Models of this process that share what they can.

    ``SHARE_WEIGHT``: a model is prepared before it is loaded, and all models of its file map one copy of its
    weights, as workers do: ONNX models on the CPU, but for small ones (docs/weights.md).
    ``SHARE_WORKSPACE``: the models of this process use one arena of ONNX Runtime for memory between
    operators, in place of one each. As in MindSpore Lite, such a group names its models by path.
    ``SHARE_WEIGHT_WORKSPACE``: both. Something other than these flags is a RuntimeError.
    """

    # Only a path leads from a model to its group; a group that is gone is not found.
    _by_path: "ClassVar[WeakValueDictionary[str, ModelGroup]]" = WeakValueDictionary()

    def __init__(self, flags: ModelGroupFlag = ModelGroupFlag.SHARE_WORKSPACE) -> None:
        if not isinstance(flags, ModelGroupFlag) or not flags:
            raise RuntimeError(
                "Parameter flags should be ModelGroupFlag.SHARE_WORKSPACE or ModelGroupFlag.SHARE_WEIGHT "
                f"or ModelGroupFlag.SHARE_WEIGHT_WORKSPACE, but got {flags!r}."
            )
        self.flags = flags
        self._has_models = False

    @classmethod
    def _of_path(cls, model: str | bytes) -> "ModelGroup | None":
        return cls._by_path.get(os.path.realpath(model)) if isinstance(model, str) else None

    def add_model(self, models: "list[Model] | list[str] | tuple[Model | str, ...]") -> None:
        """Put models into the group, before they are built.

        Args:
            models: All `Model` objects (if weights are shared), or all paths (with SHARE_WORKSPACE only) of
                models that `Model.build_from_file` is to build while this group exists.

        Raises:
            TypeError: Not a list or tuple, or not all of one kind.
            RuntimeError: Empty, a kind that the flags do not take, or a model is built already or is in
                another group.
        """
        if not isinstance(models, (list, tuple)):
            raise TypeError(f"models must be list/tuple, but got {type(models)}.")
        if not models:
            raise RuntimeError("models cannot be empty")
        kind = str if isinstance(models[0], str) else Model
        for i, model in enumerate(models):
            if not isinstance(model, kind):
                raise TypeError(
                    f"models element must be all str or Model, but got {type(model)} at index {i}."
                )
        failed = "ModelGroup's add model failed. Error is"
        if (kind is Model) is not (ModelGroupFlag.SHARE_WEIGHT in self.flags):
            raise RuntimeError(
                f"{failed} SHARE_WORKSPACE takes paths; SHARE_WEIGHT and SHARE_WEIGHT_WORKSPACE take "
                "Model objects"
            )
        added = [model for model in models if isinstance(model, Model)]
        if any(m._built is not None or m._group not in (None, self) for m in added):
            raise RuntimeError(f"{failed} the model was built already, or is in another group")
        for model in models:
            if isinstance(model, Model):
                model._group = self
            else:
                self._by_path[os.path.realpath(model)] = self
        self._has_models = True

    def cal_max_size_of_workspace(
        self, model_type: ModelType, context: Context | None = None
    ) -> None:
        """Check the arguments only: the shared arena grows to the need of the largest model.

        A RuntimeError if the group does not share its workspace, or has no models.
        """
        check_type("model_type", model_type, ModelType)
        check_context(context)
        if ModelGroupFlag.SHARE_WORKSPACE not in self.flags or not self._has_models:
            raise RuntimeError(
                "cal_max_size_of_workspace failed! Error is the group has no models that share a workspace"
            )
