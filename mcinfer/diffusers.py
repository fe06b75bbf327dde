"""Components of a diffusers pipeline on many devices, and their export.

::

    pipe(...) ── unet(sample, t, states) ──► UNet ── views of the tensors ──► Master ──► workers, a row of
                                                                                │        the batch each
                 UNet2DConditionOutput ◄── a tensor over the joined answer ◄────┘

    export(pipe, folder) ── a call of the pipeline shows the inputs ──► torch.onnx ──► folder/unet/model.onnx

A component takes the place of the PyTorch module of the same name in a pipeline of diffusers
(https://huggingface.co/docs/diffusers): as an attribute, ``pipe.unet = UNet(...)``, or as an argument of the
pipeline's class. Its ONNX model has inputs with the names of the module's arguments; `export` writes such
models, and so does Optimum.

A component owns the workers of a model that it gets as a path or as bytes, and ends them in `close`. A
`Master` that it gets stays its maker's. Tensors go through the host: they are small beside a step of these
models.
"""

import inspect
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, NoReturn, Self

from numpy.typing import NDArray

from mcinfer.errors import (
    EngineError,
    InvalidInputError,
    MissingDependencyError,
    quotable,
    shortened,
)
from mcinfer.extras import requires
from mcinfer.locks import Turn
from mcinfer.master import Master
from mcinfer.private import SerializableModel, alone_in, opened_folder
from mcinfer.specs import TensorSpec

with requires(
    "mcinfer.diffusers needs the packages diffusers and torch",
    "diffusers",
    "torch",
    extra="diffusers",
):
    import diffusers
    import torch
    from diffusers.configuration_utils import ConfigMixin, FrozenDict
    from diffusers.models.autoencoders.vae import DecoderOutput
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

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
        given = {**master_options, **({} if devices is None else {"devices": devices})}
        if not isinstance(model, Master):
            self.master = Master(model, **{"verify": "never", **given}).start()
        elif given:
            name, value = next(iter(given.items()))
            raise InvalidInputError(
                f"{name}: got {value!r}, but model is a Master, which was made with its own"
            )
        else:
            self.master = model
        try:
            self._inputs = {spec.name: spec for spec in self.master.inputs}
            self._outputs = {spec.name: spec for spec in self.master.outputs}
            first = self._first = self._batched or self.master.inputs[0].name
            if first not in self._inputs or not self._inputs[first].shape:
                raise InvalidInputError(
                    f"model: it has the inputs {[*map(str, self.master.inputs)]}, "
                    f"expected one with rows named {first!r}"
                )
            rows = self._inputs[first].shape[0]
            self._axes = {
                name: 0 if spec.shape[:1] == (rows,) and name not in _IDS else None
                for name, spec in self._inputs.items()
            }
        except BaseException:
            self.close()
            raise
        self._split: dict[str, Any] = {}
        # A given Master splits by its own options.
        if self._owns_master and not {"batch_axes", "output_axes"} & given.keys():
            self._split = {
                "batch_axes": self._axes,
                "output_axes": dict.fromkeys(self._outputs, 0),
            }

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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has worker processes, so it cannot be copied or pickled: "
            f"make another one from the model"
        )

    # What pipelines ask a module.

    @property
    def config(self) -> Any:
        return self._internal_dict

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes; inputs of other types are converted, and so is the answer, back."""
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
        values = {}
        for name, place, value in _flat(arguments):
            values[name] = value
            if name not in self._inputs:
                raise InvalidInputError(
                    f"{place}: got {_kind(value)}, but the model has no such input (it has {[*self._inputs]})"
                )
        missing = [name for name in self._inputs if name not in values]
        if missing:
            raise InvalidInputError(
                f"{missing[0]}: got None, expected a tensor: the model has this input"
            )
        first = _tensor(self._first, values[self._first])
        rows = first.shape[0] if first.ndim else 1
        arrays = {}
        for name, spec in self._inputs.items():
            tensor = _converted(name, _tensor(name, values[name]), spec)
            if name in _ONE_FOR_ALL:
                tensor = _fitted(name, tensor, spec, 1 if self._axes[name] is None else rows)
            arrays[name] = _as_array(tensor, spec)
        answers = self.master.predict(arrays, outputs=outputs, **self._split)
        # What follows in a pipeline of 16 bits, its VAE for one, takes no other type.
        dtype = first.dtype if first.is_floating_point() else None
        return {
            name: _as_tensor(array, self._outputs[name]).to(first.device, dtype)
            for name, array in answers.items()
        }

    def _first_output(self, arguments: Mapping[str, Any], kind: Any, return_dict: bool) -> Any:
        """The model's first output for these arguments, in a class of diffusers or in a tuple."""
        answer = self._run(arguments)[next(iter(self._outputs))]
        return kind(sample=answer) if return_dict else (answer,)

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
        *others: Any,
        **conditions: Any,
    ) -> Any:
        """The prediction for noisy latents; the arguments are those of `UNet2DConditionModel.forward`.

        Args:
            sample: Latents [batch, channels, height, width].
            timestep: One for the whole batch, or one for each row.
            encoder_hidden_states: States of the text [batch, tokens, channels].
            *others: Further arguments by their places.
            **conditions: The other arguments, only if the model has such an input. Those in a mapping, as
                ``added_cond_kwargs``, are inputs by their own names; those in a sequence, as
                ``down_block_additional_residuals``, by its name and a number, from ``.0`` on.
                Without ``return_dict`` the answer is a tuple of the tensor.

        Returns:
            A `UNet2DConditionOutput` with the prediction, of the shape and type of `sample`, on its device.

        Raises:
            InvalidInputError: The model has no such input, lacks one, or a value does not fit its type.
            McinferError: As `Master.predict`.
        """
        call = _UNET_CALL.bind(self, sample, timestep, encoder_hidden_states, *others, **conditions)
        given = dict(call.arguments)
        del given["self"]
        return_dict = given.pop("return_dict", True)
        return self._first_output(given, UNet2DConditionOutput, return_dict)


_UNET_CALL = inspect.signature(diffusers.UNet2DConditionModel.forward)


class Transformer2D(Component):
    """The transformer of a pipeline such as `StableDiffusion3Pipeline` or `FluxPipeline`.

    The model has the inputs that the pipeline gives to its transformer, by these names: ``hidden_states``,
    ``timestep``, ``encoder_hidden_states``, ``pooled_projections``, ``guidance``, ``img_ids``, ``txt_ids``.
    """

    _batched = "hidden_states"

    def __call__(
        self, hidden_states: torch.Tensor, *, return_dict: bool = True, **conditions: Any
    ) -> Any:
        """The prediction for noisy latents; answers and raises as a `UNet` does.

        Args:
            hidden_states: Latents [batch, channels, height, width], or packed [batch, tokens, channels].
            return_dict: Whether to return a `Transformer2DModelOutput`; else a tuple of the tensor.
            **conditions: The other arguments of the transformer's `forward`, as those of a `UNet`.
        """
        arguments = {"hidden_states": hidden_states, **conditions}
        return self._first_output(arguments, Transformer2DModelOutput, return_dict)

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
            Images [batch, 3, height, width] from -1 to 1, with the type of `z`, on its device.

        Raises:
            McinferError: As `Master.predict`.
        """
        return self._first_output({self._first: z}, DecoderOutput, return_dict)


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
        wanted = [name for name in self._outputs if output_hidden_states or name not in layers]
        fields: dict[str, Any] = self._run(
            {"input_ids": input_ids, "attention_mask": attention_mask, **others}, wanted
        )
        if output_hidden_states:
            fields["hidden_states"] = tuple(fields.pop(name) for name in layers)
        kind: Any = BaseModelOutput
        if "text_embeds" in fields:
            kind = CLIPTextModelOutput
        elif "pooler_output" in fields:
            kind = BaseModelOutputWithPooling
        answer = kind(**fields)
        return answer if return_dict else answer.to_tuple()


# Export.


class _Reached(Exception):  # noqa: N818 it is no error
    """A pipeline called its denoiser, which is all that was wanted of the call."""


def export(
    pipe: Any,
    folder: str | os.PathLike[str],
    parts: Sequence[str] | None = None,
    **call: Any,
) -> dict[str, Path]:
    """Write the models of a pipeline as ONNX, with a symbolic batch, for `UNet` and its like.

    The pipeline is called, up to the first call of its denoiser, which shows the inputs. PyTorch's exporter
    then writes ``folder/<part>/model.onnx``, with the weights beside it from 2 GB on, and ``config.json``.
    It needs onnx, onnxscript, and memory for some copies of the weights.

    The sides of the latents and the number of the text's tokens are symbolic as well. The sides are those of
    the call where the denoiser also gets the residuals of a ControlNet.

    Args:
        pipe: A pipeline of diffusers, with PyTorch's modules.
        folder: Where to write; made if it is missing. Files of these names are replaced, others stay.
        parts: Names of components: ``"unet"``, ``"transformer"``, ``"text_encoder"``, ``"text_encoder_2"``,
            and ``"vae_decoder"``. None is the UNet or the transformer, which takes nearly all of the time.
        **call: Arguments for the call of the pipeline. An empty prompt, unless they say another; pipelines
            from image to image also need an image.

    Returns:
        By part, the path of its model.

    Raises:
        InvalidInputError: The pipeline has no such part, or its call did not come to it.
        EngineError: The exporter failed.
        OSError: The folder cannot be written to.
        MissingDependencyError: The exporter needs a package that is not installed.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InvalidInputError(f"folder: got {_kind(folder)}, expected a path")
    found = {part: getattr(pipe, name, None) for part, name in _PARTS.items()}
    modules: dict[str, Any] = {k: v for k, v in found.items() if isinstance(v, torch.nn.Module)}
    denoiser = next((part for part in _DENOISERS if part in modules), None)
    if denoiser is None:
        raise InvalidInputError(
            f"pipe: got {_kind(pipe)}, expected a pipeline with a unet or a transformer of PyTorch"
        )
    if isinstance(parts, str) or not isinstance(parts, (Sequence, NoneType)):
        raise InvalidInputError(f"parts: got {parts!r}, expected a list of names")
    wanted = [denoiser] if parts is None else [*parts]
    for part in wanted:
        if part not in [*modules]:
            raise InvalidInputError(f"parts: got {part!r}, expected some of {[*modules]}")
    paths = {}
    with _EXPORTER, torch.no_grad():
        called = {part: modules[part] for part in (denoiser, *wanted) if part != "vae_decoder"}
        calls = _seen_calls(pipe, called, denoiser, call)
        for part in wanted:
            module = modules[part]
            if part == "vae_decoder":
                traced = _decoder(module, calls[denoiser])
            elif part in _DENOISERS:
                run = partial(module, return_dict=False)
                traced = _Traced(module, run, calls[part], ["out_sample"])
            else:
                traced = _encoder(module, calls[part])
            paths[part] = _write(traced, module, Path(folder) / part)
    return paths


_EXPORTER = Turn()
"""Held by an export: PyTorch's exporter fails in two threads at once."""

_DENOISERS = ("unet", "transformer")
_PARTS = {
    **{name: name for name in _DENOISERS},
    "vae_decoder": "vae",
    **{name: name for name in ("text_encoder", "text_encoder_2", "text_encoder_3")},
}
"""The pipeline's component that a part is of."""

_SYMBOLS: dict[tuple[str, int], dict[int, str]] = {
    ("sample", 4): {2: "height", 3: "width"},
    ("latent_sample", 4): {2: "height", 3: "width"},
    ("hidden_states", 4): {2: "height", 3: "width"},
    ("hidden_states", 3): {1: "image_tokens"},
    ("img_ids", 2): {0: "image_tokens"},
    ("txt_ids", 2): {0: "tokens"},
    ("encoder_hidden_states", 3): {1: "tokens"},
    ("encoder_attention_mask", 2): {1: "tokens"},
    ("input_ids", 2): {1: "tokens"},
    ("attention_mask", 2): {1: "tokens"},
}
"""By an input's name and number of dimensions, those that are symbolic beside the batch."""


def _seen_calls(
    pipe: Any, modules: Mapping[str, Any], denoiser: str, call: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """By component, the arguments by name with which the pipeline calls it first."""
    calls: dict[str, dict[str, Any]] = {}

    def see(part: str, module: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        named = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
        named.pop("return_dict", None)
        calls.setdefault(part, named)
        if part == denoiser:
            raise _Reached

    parameters = inspect.signature(pipe.__call__).parameters
    given = {"num_inference_steps": 2, **call}
    if "prompt" in parameters and "prompt_embeds" not in call:
        given.setdefault("prompt", "")
    handles = []
    bar = getattr(pipe, "_progress_bar_config", None)
    try:
        for part, module in modules.items():
            hook = partial(see, part)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        pipe.set_progress_bar_config(disable=True)
        pipe(**given)
    except _Reached:
        pass
    except Exception as exc:
        raise InvalidInputError(
            f"call: the pipeline needs other arguments than {[*given]}: {exc}"
        ) from exc
    finally:
        pipe.set_progress_bar_config(**(bar or {}))
        for handle in handles:
            handle.remove()
    for part in modules:
        if part not in calls:
            raise InvalidInputError(f"parts: got {part!r}, which the pipeline does not call")
    return calls


class _Traced(torch.nn.Module):  # type: ignore[misc] # PyTorch has types, but need not be here
    """A module as a function of tensors alone, as the exporter wants it.

    Args:
        module: Whose weights it has.
        call: What it calls; the answer is a sequence of tensors.
        arguments: Of a call, by name; their tensors become the inputs, all with the rows of the first.
        names: Of the outputs.
    """

    def __init__(
        self,
        module: Any,
        call: Callable[..., Sequence[torch.Tensor]],
        arguments: Mapping[str, Any],
        names: list[str],
    ) -> None:
        super().__init__()
        self.module, self._call, self._arguments, self.names = module, call, arguments, names
        found = _flat(arguments)
        given = {name: value for name, _, value in found if isinstance(value, torch.Tensor)}
        first = next(iter(given.values()))
        if arguments.get("timestep") is not None:
            step = torch.as_tensor(arguments["timestep"], device=first.device)
            # Other schedulers give fractions of steps; models compute with float32.
            given["timestep"] = step if step.is_floating_point() else step.float()
        self.tensors, self.symbols = {}, {}
        # What has sizes of its own at each level binds the sides.
        bound = any(name.startswith("down_") for name in given)
        for name, tensor in given.items():
            symbols = {} if bound and tensor.ndim == 4 else _SYMBOLS.get((name, tensor.ndim), {})
            if tensor.shape[:1] == first.shape[:1] and name not in _IDS:
                symbols = {0: "batch", **symbols}
                if len(first) == 1:  # a size of one would be a constant to the exporter
                    tensor = tensor.repeat(2, *[1] * (tensor.ndim - 1))
            self.tensors[name], self.symbols[name] = tensor.clone(), symbols

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(self.tensors, tensors, strict=True))
        answer = self._call(**{k: _with(k, v, given) for k, v in self._arguments.items()})
        return tuple(answer[: len(self.names)])


def _with(name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """An argument with these tensors in the place of those that it has; the names are those of `_flat`."""
    if isinstance(value, Mapping):
        return {key: _with(key, item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(f"{name}.{i}", item, tensors) for i, item in enumerate(value))
    return tensors.get(name, value)


def _decoder(vae: Any, call: Mapping[str, Any]) -> _Traced:
    """A VAE's decoder, for latents with as large sides as the denoiser has, or those of its configuration."""
    latents = next(iter(call.values()))
    sides = latents.shape[2:] if latents.ndim == 4 else (8, 8)
    sample = torch.zeros(2, vae.config.latent_channels, *sides, dtype=vae.dtype, device=vae.device)

    def decode(latent_sample: torch.Tensor) -> Any:
        return vae.decode(latent_sample, return_dict=False)

    return _Traced(vae, decode, {"latent_sample": sample}, ["sample"])


def _encoder(module: Any, call: Mapping[str, Any]) -> _Traced:
    """A text encoder with the outputs that its class has by name."""
    layers = bool(call.get("output_hidden_states"))
    arguments = {name: value for name, value in call.items() if name != "output_hidden_states"}
    run = partial(module, output_hidden_states=layers, return_dict=True)
    shown = run(**arguments)
    candidates = ("text_embeds", "last_hidden_state", "pooler_output")
    single = [name for name in candidates if shown.get(name) is not None]
    names = [f"hidden_states.{i}" for i in range(len(shown.hidden_states))] if layers else []

    def encode(**arguments: Any) -> list[torch.Tensor]:
        answer = run(**arguments)
        return [*(answer[name] for name in single), *(answer.hidden_states if layers else ())]

    return _Traced(module, encode, arguments, single + names)


def _write(traced: _Traced, module: Any, folder: Path) -> Path:
    """Export to the folder, in which there is never half of a model."""
    training = module.training
    with (
        opened_folder(folder, guarded=False, make=0o777) as place,
        tempfile.TemporaryDirectory(prefix=".mcinfer-", dir=place) as name,
    ):
        new = Path(name)
        needs = requires(
            "export needs the packages onnx and onnxscript",
            "onnx",
            "onnx_ir",
            "onnxscript",
            extra="diffusers",
        )
        try:
            with warnings.catch_warnings(), needs:
                # Inputs share names of dimensions, as they should; and a warning within PyTorch itself.
                warnings.filterwarnings("ignore", ".*axis name: .* will not be used", UserWarning)
                warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
                program = torch.onnx.export(
                    traced.eval(),
                    tuple(traced.tensors.values()),
                    input_names=[*traced.tensors],
                    output_names=traced.names,
                    dynamic_shapes=(tuple(traced.symbols.values()),),
                    dynamo=True,
                    verbose=False,
                )
                program.save(new / _MODEL_FILE)
        except MissingDependencyError:
            raise
        except Exception as exc:
            raise EngineError(
                f"PyTorch cannot export {folder.name}: {shortened(str(exc))}"
            ) from quotable(exc)
        finally:
            module.train(training)
        if isinstance(module, ConfigMixin):
            module.save_config(new)
        else:  # of transformers, whose own files lack what has its default
            text = module.config.to_json_string(use_diff=False)
            (new / _CONFIG_FILE).write_text(text)
        with alone_in(place):  # so that a model has the weights of its own export
            # Without the old model, an interruption leaves none rather than one with another's weights.
            (place / _MODEL_FILE).unlink(missing_ok=True)
            for file in sorted(new.iterdir(), key=lambda file: file.name == _MODEL_FILE):
                file.replace(place / file.name)
    return folder / _MODEL_FILE


# Tensors.


def _flat(arguments: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str, Any]]:
    """Arguments of a module's call as inputs of a model; those that say nothing are left out.

    Yields:
        The input's name, the same with the argument that it is in, and the value.
    """
    for name, value in arguments.items():
        place = f"{within}[{name!r}]" if within else name
        if isinstance(value, Mapping):
            yield from _flat(value, place)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from _flat({f"{name}.{i}": item})
        elif value is not None and value is not False:
            yield name, place, value


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as exc:
        raise InvalidInputError(f"{name}: got {_kind(value)}, expected a tensor: {exc}") from exc
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else tensor.layout
        raise InvalidInputError(f"{name}: got a tensor that is {kind}, expected a dense one")
    return tensor


def _converted(name: str, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor on the CPU, of the input's type; the caller's own memory where that fits."""
    dtype = _torch_dtype(spec)
    converted = tensor.to("cpu", dtype).contiguous()
    narrow = not dtype.is_floating_point and tensor.dtype != dtype
    if narrow and not torch.equal(converted.to(tensor.dtype), tensor.cpu()):
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
    if spec.dtype.isbuiltin != 1:
        tensor = tensor.view(getattr(torch, f"int{8 * spec.dtype.itemsize}"))
    array: NDArray[Any] = tensor.numpy()
    return array.view(spec.dtype)


def _as_tensor(array: NDArray[Any], spec: TensorSpec) -> torch.Tensor:
    """A tensor over the array's memory, which it keeps."""
    if spec.dtype.isbuiltin != 1:
        array = array.view(f"i{spec.dtype.itemsize}")
    return torch.from_numpy(array).view(_torch_dtype(spec))


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.element_type, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError(f"model: PyTorch has no type for {spec}")
    return dtype


def _kind(value: object) -> str:
    return type(value).__name__
