"""Pipelines with random weights, as small as diffusers makes them; nothing is loaded from elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from numpy.typing import NDArray
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)
from transformers.models.clip.tokenization_clip import bytes_to_unicode

TOKENS = 16
PROMPT = "a cat"

_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def image(pipe: Any, images: int = 1, **arguments: Any) -> NDArray[np.float32]:
    """Pictures float32[n, h, w, 3] that the pipeline draws from the same noise in every call."""
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "np", **arguments}
    noise = torch.Generator().manual_seed(1)
    drawn: NDArray[np.float32] = pipe(**given, generator=noise, num_images_per_prompt=images).images
    assert drawn.std() > 0.01, "a picture of one color shows nothing"
    return drawn


def stable_diffusion(folder: Path) -> StableDiffusionPipeline:
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    unet = _unet(cross_attention_dim=32, attention_head_dim=8)
    scheduler = DDIMScheduler(**_NOISE, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl(folder: Path) -> StableDiffusionXLPipeline:
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    unet = _unet(
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(tokenizer),
        text_encoder_2=_clip(tokenizer, CLIPTextModelWithProjection),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        # Its steps are no whole numbers.
        scheduler=EulerDiscreteScheduler(**_NOISE, timestep_spacing="linspace"),
        add_watermarker=False,
    )


def stable_diffusion_3(folder: Path) -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(shift_factor=0.06),
        text_encoder=_clip(tokenizer, CLIPTextModelWithProjection, width=16),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer, CLIPTextModelWithProjection, width=16),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux(folder: Path) -> FluxPipeline:
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    transformer = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    t5 = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(1, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=tokenizer,
        transformer=transformer.eval(),
    )


PIPELINES: dict[str, Callable[[Path], Any]] = {
    "sd": stable_diffusion,
    "sdxl": stable_diffusion_xl,
    "sd3": stable_diffusion_3,
    "flux": flux,
}

SIZES: dict[str, dict[str, int]] = {
    "sd": {},
    "sdxl": {},
    "sd3": {"height": 32, "width": 32},
    "flux": {"height": 16, "width": 16, "max_sequence_length": TOKENS},
}
"""By pipeline, what its calls need so that they are small."""


def _tokenizer(folder: Path) -> CLIPTokenizer:
    """A tokenizer of single letters."""
    letters = [*bytes_to_unicode().values()]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps({word: number for number, word in enumerate(words)}))
    merges.write_text("#version: 0.2\n")
    return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=TOKENS)


def _clip(tokenizer: CLIPTokenizer, kind: Any = CLIPTextModel, width: int = 32) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        projection_dim=32,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(config).eval()


def _unet(**more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        # The middle has attention; the exporter takes long for each more.
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        **more,
    ).eval()


def _vae(channels: int = 4, **more: Any) -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64),
        latent_channels=channels,
        sample_size=16,
        **more,
    ).eval()
