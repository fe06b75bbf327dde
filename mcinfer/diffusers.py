"""Components of a diffusers pipeline on many devices, and their export.

::

    pipe(...) ── unet(sample, t, states) ──► UNet ── views of the tensors ──► Master ──► workers: one row of
                                                                                         the guidance batch each
                 UNet2DConditionOutput ◄── a tensor over the joined answer ◄── Master ◄──┘

    export(pipe, folder) ── a call of the pipeline shows the inputs ──► torch.onnx ──► folder/unet/model.onnx

A component takes the place of the PyTorch module of the same name in a pipeline of diffusers
(https://huggingface.co/docs/diffusers): as an attribute, ``pipe.unet = UNet(...)``, or as an argument of the
pipeline's class. Its ONNX model has inputs with the names of the module's arguments; `export` writes such
models, and so does Optimum.

A component owns the workers of a model that it gets as a path or as bytes, and ends them in `close`. A `Master`
that it gets stays its maker's. Tensors go through the host: they are small beside a step of these models.
"""

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import InvalidInputError, MissingDependencyError
from mcinfer.master import Master, SerializableModel
from mcinfer.specs import TensorSpec

try:
    import diffusers
    import torch
    from diffusers.configuration_utils import FrozenDict
    from diffusers.models.autoencoders.vae import DecoderOutput
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
except ImportError as exc:
    raise MissingDependencyError(
        f"mcinfer.diffusers needs the packages diffusers and torch: pip install 'mcinfer[diffusers]' ({exc})"
    ) from exc

__all__ = ["Component", "TextEncoder", "Transformer2D", "UNet", "VaeDecoder", "export"]

Model = str | os.PathLike[str] | bytes | SerializableModel | Master

Config = Mapping[str, Any] | str | os.PathLike[str] | object

_MODEL_FILE = "model.onnx"
_CONFIG_FILE = "config.json"

_ONE_FOR_ALL = ("timestep", "guidance")
"""Inputs that a pipeline gives once for the batch or once for each row, and a model takes in its own way."""

_IDS = ("img_ids", "txt_ids")
"""Inputs of Flux that say where tokens are, for all rows."""


class Component:
    """A model of a pipeline, run by the workers of a `Master`.

    The rows of a batch go to different devices: one row each for classifier-free guidance over two. Any
    number of threads may call a component at once.

    Args:
        model: The path of the ONNX model, its bytes or `onnx.ModelProto`, or a started `Master`, which is not
            closed with the component. The batch is the first dimension of the model's first tensor, and of
            every input whose first dimension has the same symbol or size; other inputs go to every worker.
        config: The configuration of the module that the model was made from: a mapping, a module or its
            `config`, or the path of a ``config.json`` or of its folder. None: ``config.json`` beside the
            model. Entries that it lacks have the defaults of the module's class.
        devices: As in `Master`.
        **master_options: Further arguments of `Master`. Without `verify`, the split is not checked by a
            second run: it is known for these models.

    Raises:
        InvalidInputError: An argument is invalid, or the model has no such input.
        BuildError: A worker could not load the model.

    Attributes:
        config: As diffusers has it: entries are attributes and items.
        master: The `Master`: `statistics`, `health`, `update_weights`, and what else it can.
    """

    _batched: str | None = None
    """The input whose rows are the batch; None is the model's first."""
    _class_name: str | None = None
    """The class of diffusers whose defaults complete a configuration that names no class."""

    def __init__(
        self,
        model: Model,
        config: Config | None = None,
        *,
        devices: int | str | Sequence[int | str] | None = None,
        **master_options: Any,
    ) -> None:
        # Pipelines replace this attribute for configurations of old versions.
        self._internal_dict = self._read_config(config, model)
        self._owns_master = not isinstance(model, Master)
        given = [*master_options, *(["devices"] if devices is not None else [])]
        if not isinstance(model, Master):
            master_options.setdefault("verify", "never")
            self.master = Master(model, devices, **master_options).start()
        elif given:
            raise InvalidInputError(
                f"{given[0]}: got {master_options.get(given[0], devices)!r}, but model is a Master, which has its own"
            )
        else:
            self.master = model
        try:
            self._inputs = {spec.name: spec for spec in self.master.inputs}
            self._outputs = {spec.name: spec for spec in self.master.outputs}
            first = self._first = self._batched or self.master.inputs[0].name
            if first not in self._inputs or not self._inputs[first].shape:
                raise InvalidInputError(
                    f"model: it has the inputs {[*map(str, self.master.inputs)]}, expected a batch as {first!r}"
                )
            rows = self._inputs[first].shape[0]
            self._axes = {
                name: 0 if spec.shape[:1] == (rows,) and name not in _IDS else None
                for name, spec in self._inputs.items()
            }
        except BaseException:
            self.close()
            raise
        # A master that somebody else made splits as that somebody said.
        said = not self._owns_master or "batch_axes" in given or "output_axes" in given
        self._split: dict[str, Any] = (
            {} if said else {"batch_axes": self._axes, "output_axes": dict.fromkeys(self._outputs, 0)}
        )

    # Life.

    def close(self) -> None:
        """End the workers, unless the model was given as a `Master`. Safe to call again."""
        if self._owns_master:
            self.master.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} by {self.master!r}>"

    # What pipelines ask a module.

    @property
    def config(self) -> Any:
        return self._internal_dict

    @property
    def dtype(self) -> torch.dtype:
        """The type of the answers; inputs of other types are converted to what the model takes."""
        return _torch_dtype(next(iter(self._outputs.values())))

    @property
    def device(self) -> torch.device:
        """The CPU, where tensors pass; answers are on the device of the first input."""
        return torch.device("cpu")

    # A run.

    def _run(
        self, arguments: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The outputs for arguments of the module's call; those that are None or empty are not given."""
        values = dict(_flat(arguments))
        for name, value in values.items():
            if name not in self._inputs:
                raise InvalidInputError(
                    f"{name}: got {_kind(value)}, but the model has no such input (it has {[*self._inputs]})"
                )
        missing = [name for name in self._inputs if name not in values]
        if missing:
            raise InvalidInputError(f"{missing[0]}: got None, expected a tensor: the model has this input")
        first = torch.as_tensor(values[self._first])
        rows = first.shape[0] if first.ndim else 1
        arrays = {}
        for name, spec in self._inputs.items():
            tensor = _converted(name, values[name], spec)
            if name in _ONE_FOR_ALL:
                tensor = _fitted(name, tensor, spec, 1 if self._axes[name] is None else rows)
            arrays[name] = _as_array(tensor, spec)
        answers = self.master.predict(arrays, outputs=outputs, **self._split)
        return {
            name: _as_tensor(array, self._outputs[name]).to(first.device)
            for name, array in answers.items()
        }

    # The configuration.

    def _read_config(self, config: Config | None, model: Model) -> Any:
        if config is None:
            if not isinstance(model, (str, os.PathLike)):
                raise InvalidInputError(
                    f"config: got None with a model as {_kind(model)}, expected a mapping, a module or a path"
                )
            config = Path(model).absolute().parent
        if isinstance(config, (str, os.PathLike)):
            path = Path(config)
            path = path / _CONFIG_FILE if path.is_dir() else path
            try:
                config = json.loads(path.read_bytes())
            except (OSError, ValueError) as exc:
                raise InvalidInputError(
                    f"config: got {os.fspath(path)!r}, expected a configuration as JSON: {exc}"
                ) from exc
        elif isinstance(config, torch.nn.Module):
            config = getattr(config, "config", None)
        if isinstance(config, Mapping):
            return self._completed(dict(config))
        if hasattr(config, "to_dict"):  # of transformers, which is complete
            return config
        raise InvalidInputError(
            f"config: got {_kind(config)}, expected a mapping, a module with a config, or a path"
        )

    def _completed(self, config: dict[str, Any]) -> Any:
        """The configuration with its class's defaults, since a file lacks what is newer than itself."""
        name = config.get("_class_name", self._class_name)
        module = getattr(diffusers, name, None) if isinstance(name, str) else None
        defaults = {}
        if module is not None:
            parameters = inspect.signature(module.__init__).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return FrozenDict({**defaults, **config})


class UNet(Component):
    """The UNet of a pipeline such as `StableDiffusionPipeline`, in the place of a `UNet2DConditionModel`.

    The model has the inputs ``sample``, ``timestep`` and ``encoder_hidden_states``, and whatever else its
    pipeline gives: ``text_embeds`` and ``time_ids`` for SDXL, ``down_block_additional_residuals.0`` and so
    on for a ControlNet.
    """

    _batched = "sample"
    _class_name = "UNet2DConditionModel"

    @property
    def add_embedding(self) -> Any:
        """Of SDXL, whose pipeline reads ``add_embedding.linear_1.in_features``."""
        features = getattr(self.config, "projection_class_embeddings_input_dim", None)
        if features is None:
            raise AttributeError("this UNet has no added embedding")
        return SimpleNamespace(linear_1=SimpleNamespace(in_features=features))

    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, torch.Tensor] | None = None,
        down_block_additional_residuals: Sequence[torch.Tensor] | None = None,
        mid_block_additional_residual: torch.Tensor | None = None,
        down_intrablock_additional_residuals: Sequence[torch.Tensor] | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """The prediction for noisy latents; the arguments are those of `UNet2DConditionModel.forward`.

        Args:
            sample: Latents [batch, channels, height, width].
            timestep: One for the whole batch, or one for each row.
            encoder_hidden_states: States of the text [batch, tokens, channels].
            class_labels: This and what follows: only if the model has such an input.
            timestep_cond: As `class_labels`.
            attention_mask: As `class_labels`.
            cross_attention_kwargs: As `class_labels`.
            added_cond_kwargs: The model's inputs have the names in this mapping.
            down_block_additional_residuals: The model's inputs have a number after this name, from ``.0`` on.
            mid_block_additional_residual: As `class_labels`.
            down_intrablock_additional_residuals: As `down_block_additional_residuals`.
            encoder_attention_mask: As `class_labels`.
            return_dict: Whether to return a `UNet2DConditionOutput`; else a tuple of the tensor.

        Returns:
            The prediction, with the shape of `sample`, on its device.

        Raises:
            InvalidInputError: The model has no such input, lacks one, or a value does not fit its type.
            McinferError: As `Master.predict`.
        """
        arguments = {name: value for name, value in locals().items() if name not in _NO_INPUTS}
        answer = self._run(arguments)[next(iter(self._outputs))]
        return UNet2DConditionOutput(sample=answer) if return_dict else (answer,)


class Transformer2D(Component):
    """The transformer of a pipeline such as `StableDiffusion3Pipeline` or `FluxPipeline`.

    The model has the inputs that the pipeline gives to its transformer, by these names: ``hidden_states``,
    ``timestep``, ``encoder_hidden_states``, ``pooled_projections``, ``guidance``, ``img_ids``, ``txt_ids``.
    """

    _batched = "hidden_states"

    def __call__(
        self, hidden_states: torch.Tensor, *, return_dict: bool = True, **conditions: Any
    ) -> Any:
        """The prediction for noisy latents.

        Args:
            hidden_states: Latents [batch, channels, height, width], or packed [batch, tokens, channels].
            return_dict: Whether to return a `Transformer2DModelOutput`; else a tuple of the tensor.
            **conditions: The other arguments of the transformer's `forward`. Those in a mapping are inputs
                by their own names, those in a sequence by its name and a number, as in ``name.0``.

        Returns:
            The prediction, on the device of `hidden_states`.

        Raises:
            InvalidInputError: The model has no such input, lacks one, or a value does not fit its type.
            McinferError: As `Master.predict`.
        """
        answer = self._run({"hidden_states": hidden_states, **conditions})[next(iter(self._outputs))]
        return Transformer2DModelOutput(sample=answer) if return_dict else (answer,)

    def cache_context(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Does nothing: pipelines mark calls that may share intermediate results, and no worker keeps any."""
        return nullcontext()


class VaeDecoder(Component):
    """The decoder of a pipeline's VAE: `decode` for the images of a batch on different devices.

    It takes the place of ``pipe.vae`` in pipelines that only decode. Those that also encode, from image to
    image, need the VAE of PyTorch.
    """

    _class_name = "AutoencoderKL"

    def _completed(self, config: dict[str, Any]) -> Any:
        # A pipeline would convert a VAE of 16 bits to 32; the model's file decides how it computes.
        return super()._completed({**config, "force_upcast": False})

    def decode(
        self,
        z: torch.Tensor,
        return_dict: bool = True,
        generator: object = None,  # noqa: ARG002 as of a VAE with a decoder that draws numbers
    ) -> Any:
        """Images from latents.

        Args:
            z: Latents [batch, channels, height, width], divided by the scaling factor.
            return_dict: Whether to return a `DecoderOutput`; else a tuple of the tensor.
            generator: Pipelines give it; decoding is not random.

        Returns:
            Images [batch, 3, height, width] from -1 to 1, on the device of `z`.

        Raises:
            McinferError: As `Master.predict`.
        """
        answer = self._run({self._first: z})[next(iter(self._outputs))]
        return DecoderOutput(sample=answer) if return_dict else (answer,)


class TextEncoder(Component):
    """A text encoder of a pipeline: CLIP's, with or without projection, or T5's.

    The model has the input ``input_ids``, and the outputs that transformers' class has under these names:
    ``last_hidden_state``, ``pooler_output`` or ``text_embeds``, and ``hidden_states.0`` and so on where the
    pipeline needs them. What skips CLIP's last layers (``clip_skip``) needs the encoder of PyTorch.
    """

    _batched = "input_ids"

    def _completed(self, config: dict[str, Any]) -> Any:
        kind = config.get("model_type")
        if not isinstance(kind, str):
            raise InvalidInputError(
                "config: got no entry 'model_type', expected a text encoder's of transformers"
            )
        from transformers import AutoConfig

        try:
            return AutoConfig.for_model(**config)
        except ValueError as exc:
            raise InvalidInputError(f"config: model_type: got {kind!r}: {exc}") from exc

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        """States of tokens.

        Args:
            input_ids: int[batch, tokens].
            attention_mask: Only if the model has this input.
            output_hidden_states: Whether to return the states of all layers, too.
            return_dict: Whether to return transformers' output class; else a tuple.
            **others: Only if the model has such an input.

        Returns:
            The outputs of the model, on the device of `input_ids`.

        Raises:
            InvalidInputError: The model has no such input, or no outputs for the states of all layers.
            McinferError: As `Master.predict`.
        """
        from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
        from transformers.models.clip.modeling_clip import CLIPTextModelOutput

        layers = [name for name in self._outputs if name.startswith("hidden_states.")]
        if output_hidden_states and not layers:
            raise InvalidInputError(
                f"output_hidden_states: got True, but the model has no outputs 'hidden_states.0' and so on "
                f"(it has {[*self._outputs]})"
            )
        single = [name for name in self._outputs if name not in layers]
        wanted = single + layers if output_hidden_states else single
        answers = self._run(
            {"input_ids": input_ids, "attention_mask": attention_mask, **others}, wanted
        )
        fields: dict[str, Any] = {name: answers[name] for name in single}
        if output_hidden_states:
            fields["hidden_states"] = tuple(answers[name] for name in layers)
        kind: Any = BaseModelOutput
        if "text_embeds" in fields:
            kind = CLIPTextModelOutput
        elif "pooler_output" in fields:
            kind = BaseModelOutputWithPooling
        answer = kind(**fields)
        return answer if return_dict else answer.to_tuple()


_NO_INPUTS = ("self", "return_dict")


# Tensors.


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments of a module's call as inputs of a model; those that say nothing are left out."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif isinstance(value, (list, tuple)):
            yield from _flat({f"{name}.{i}": item for i, item in enumerate(value)})
        elif value is not None and value is not False:
            yield name, value


def _converted(name: str, value: Any, spec: TensorSpec) -> torch.Tensor:
    """The value as a tensor on the CPU, of the input's type; the caller's own memory where that fits."""
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as exc:
        raise InvalidInputError(f"{name}: got {_kind(value)}, expected a tensor: {exc}") from exc
    dtype = _torch_dtype(spec)
    converted = tensor.to("cpu", dtype).contiguous()
    if not dtype.is_floating_point and tensor.dtype != dtype:
        if not torch.equal(converted.to(tensor.dtype), tensor.cpu()):
            raise InvalidInputError(
                f"{name}: got values of {tensor.dtype} that the model's type cannot hold ({spec})"
            )
    return converted


def _fitted(name: str, tensor: torch.Tensor, spec: TensorSpec, rows: int) -> torch.Tensor:
    """A tensor of one value or of one for each row, with as many as the model takes: `rows`, or a scalar."""
    if tensor.ndim > 1 or len(spec.shape) > 1 or not tensor.numel():
        return tensor  # the master says what is wrong
    values = tensor.reshape(-1)
    if len(values) != rows:
        if not bool((values == values[0]).all()):
            raise InvalidInputError(
                f"{name}: got {len(values)} different values, but the model takes {rows} ({spec})"
            )
        values = values[:1].expand(rows).contiguous()
    return values if spec.shape else values[0]


def _as_array(tensor: torch.Tensor, spec: TensorSpec) -> NDArray[Any]:
    """The tensor's memory as an array of the input's type, which NumPy may know only by ml_dtypes."""
    if spec.dtype.isbuiltin == 1:
        array: NDArray[Any] = tensor.numpy()
        return array
    raw: NDArray[Any] = tensor.view(_RAW[spec.dtype.itemsize]).numpy()
    return raw.view(spec.dtype)


def _as_tensor(array: NDArray[Any], spec: TensorSpec) -> torch.Tensor:
    """A tensor over the array's memory, which it keeps."""
    if spec.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    raw = torch.from_numpy(array.view(f"i{spec.dtype.itemsize}"))
    return raw.view(_torch_dtype(spec))


_RAW = {1: torch.int8, 2: torch.int16}
"""By their bytes, types that stand in for those of ml_dtypes."""


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.element_type, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError(f"model: PyTorch has no type for {spec}")
    return dtype


def _kind(value: object) -> str:
    return type(value).__name__
