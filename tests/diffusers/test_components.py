"""What components make of arguments, configurations and models; the models here are written by hand."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest
import torch
from diffusers import UNet2DConditionModel
from onnx import parser

from mcinfer import InvalidInputError, Master
from mcinfer.diffusers import TextEncoder, Transformer2D, UNet, VaeDecoder

UNET = """
<ir_version: 9, opset_import: ["" : 18]>
unet (FLOAT[batch, 4, height, width] sample, STEP timestep,
      FLOAT[batch, tokens, 3] encoder_hidden_states MORE) => (FLOAT[batch, 4, height, width] out_sample)
{
    step = Cast <to = TYPE> (timestep)
    flat = Constant <value = int64[4] {-1, 1, 1, 1}> ()
    row = Reshape (step, flat)
    axes = Constant <value = int64[2] {1, 2}> ()
    text = ReduceMean <keepdims = 1> (encoder_hidden_states, axes)
    each = Reshape (text, flat)
    stepped = Add (sample, row)
    both = Add (stepped, each)
    out_sample = Identity (both)
}
"""
"""A UNet that adds the step and the mean of the text to the latents."""

TYPES = {"float": 1, "float16": 10}

SAMPLE, STATES = torch.zeros(2, 4, 8, 8), torch.zeros(2, 5, 3)


@pytest.fixture
def unet_model(tmp_path: Path) -> Callable[..., Path]:
    def write(
        step: str = "float", kind: str = "float", batch: str = "batch", more: str = ""
    ) -> Path:
        text = UNET.replace("STEP", step).replace("FLOAT", kind).replace("TYPE", str(TYPES[kind]))
        text = text.replace("MORE", more).replace("[batch", f"[{batch}")
        model = parser.parse_model(text)
        onnx.checker.check_model(model)
        path = tmp_path / "unet.onnx"
        onnx.save(model, path)
        return path

    return write


@pytest.mark.parametrize(
    "step", ["float", "float[1]", "float[batch]", "int64", "int64[1]", "float[steps]"]
)
def test_step_becomes_what_the_model_takes(unet_model: Callable[..., Path], step: str) -> None:
    with UNet(unet_model(step), {}, devices=2) as unet:
        for value in (7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor([7, 7])):
            answer = unet(SAMPLE, value, STATES).sample
            assert torch.equal(answer, torch.full_like(SAMPLE, 7.0)), value


def test_each_row_has_its_own_step_where_the_model_takes_them(
    unet_model: Callable[..., Path],
) -> None:
    steps = torch.tensor([3.0, 900.5])
    with UNet(unet_model("float[batch]"), {}, devices=2) as unet:
        (answer,) = unet(SAMPLE, steps, STATES, return_dict=False)
        assert torch.equal(answer[:, 0, 0, 0], steps)
    for step, given, text in (
        ("float", steps, "timestep: got 2 different values"),
        ("int64", 900.5, r"timestep: got values of torch\.float32"),
    ):
        with (
            UNet(unet_model(step), {}, devices=1) as unet,
            pytest.raises(InvalidInputError, match=text),
        ):
            unet(SAMPLE, given, STATES)


def test_model_of_one_row_runs_once_for_each(unet_model: Callable[..., Path]) -> None:
    states = torch.tensor([1.0, 2.0]).reshape(2, 1, 1).expand(2, 5, 3)
    with UNet(unet_model("float", batch="1"), {}, devices=2) as unet:
        answer = unet(SAMPLE, 0, states).sample
        assert [worker.runs for worker in unet.master.statistics().workers] == [1, 1]
    assert torch.equal(answer[:, 0, 0, 0], torch.tensor([1.0, 2.0]))


def test_tensors_of_other_types_and_layouts_are_converted(unet_model: Callable[..., Path]) -> None:
    sample = torch.randn(2, 8, 8, 4, dtype=torch.float64, requires_grad=True).permute(0, 3, 1, 2)
    with UNet(unet_model("float16", kind="float16"), {}, devices=2) as unet:
        assert unet.dtype == torch.float16
        answer = unet(sample, 0, STATES).sample
    assert answer.dtype == torch.float64
    assert torch.equal(answer, sample.detach().half().double())


def test_bfloat16_comes_and_goes_without_numpys_help() -> None:
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        decoder (bfloat16[batch, 4, h, w] latent_sample) => (bfloat16[batch, 4, h, w] sample)
        { wide = Cast <to = 1> (latent_sample) double = Add (wide, wide) sample = Cast <to = 16> (double) }
    """)
    with VaeDecoder(model.SerializeToString(), {"force_upcast": True}, devices=2) as vae:
        assert vae.dtype == torch.bfloat16
        assert vae.config.force_upcast is False  # it would have the pipeline convert it
        for kind in (torch.float32, torch.bfloat16):
            answer = vae.decode((SAMPLE + 1.5).to(kind)).sample
            assert torch.equal(answer, torch.full_like(SAMPLE, 3.0, dtype=kind))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"class_labels": torch.zeros(2)}, "class_labels: got Tensor"),
    ({"cross_attention_kwargs": {"scale": 0.5}}, r"cross_attention_kwargs\['scale'\]: got float"),
    ({"added_cond_kwargs": {"text_embeds": SAMPLE}}, r"added_cond_kwargs\['text_embeds'\]: got"),
    ({"mid_block_additional_residual": SAMPLE}, "mid_block_additional_residual: got Tensor"),
    ({"encoder_hidden_states": None}, "encoder_hidden_states: got None, expected a tensor"),
    ({"encoder_hidden_states": "text"}, "encoder_hidden_states: got str, expected a tensor"),
    ({"sample": torch.zeros(2, 3, 8, 8)}, "sample"),
    ({"sample": "text"}, "sample: got str, expected a tensor"),
    ({"sample": SAMPLE.to_sparse()}, r"sample: got a tensor that is torch\.sparse_coo"),
    ({"sample": SAMPLE.to("meta")}, "sample: got a tensor that is meta"),
]


def test_argument_that_the_model_cannot_take_is_refused_by_name(
    unet_model: Callable[..., Path],
) -> None:
    with UNet(unet_model(), {}, devices=1) as unet:
        for arguments, text in REFUSED:
            given = {"sample": SAMPLE, "timestep": 1, "encoder_hidden_states": STATES, **arguments}
            with pytest.raises(InvalidInputError, match=text):
                unet(**given)
        nothing: dict[str, Any] = {"cross_attention_kwargs": {}, "class_labels": None}
        assert unet(SAMPLE, 1, STATES, **nothing).sample.shape == SAMPLE.shape
        (answer,) = unet(SAMPLE, 1, STATES, *[None] * 9, False)  # as its places are in diffusers
        assert answer.shape == SAMPLE.shape
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            unet(SAMPLE, 1, STATES, other=1)


def test_conditions_have_the_names_of_inputs(unet_model: Callable[..., Path]) -> None:
    more = ", float[batch, 6] time_ids, float[batch, 2] residuals.0"
    path = unet_model(more=more.replace("residuals.0", "down_block_additional_residuals_0"))
    model = onnx.load(path)
    model.graph.input[-1].name = "down_block_additional_residuals.0"
    with UNet(model, {}, devices=2) as unet:
        given: dict[str, Any] = {
            "added_cond_kwargs": {"time_ids": torch.zeros(2, 6)},
            "down_block_additional_residuals": [torch.zeros(2, 2)],
        }
        assert unet(SAMPLE, 1, STATES, **given).sample.shape == SAMPLE.shape


def test_configuration_comes_from_what_there_is(
    unet_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = unet_model()
    module = UNet2DConditionModel(
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        sample_size=24,
    )
    module.save_config(tmp_path)
    with Master(path, 1) as master:
        for config in (module, module.config, tmp_path, tmp_path / "config.json"):
            assert UNet(master, config).config.sample_size == 24
        # An old file lacks what pipelines of today ask.
        old = UNet(master, {"sample_size": 24}).config
        assert (old.sample_size, old["in_channels"], old.time_cond_proj_dim) == (24, 4, None)
    with UNet(path, devices=1) as unet:  # config.json is beside the model
        assert unet.config.sample_size == 24


def test_master_that_is_given_stays_open_and_has_its_own_options(
    unet_model: Callable[..., Path],
) -> None:
    with Master(unet_model(), 2) as master:
        with UNet(master, {}) as unet:
            assert unet(SAMPLE, 2, STATES).sample.mean() == 2
        assert master.health().state == "ready"
        with pytest.raises(InvalidInputError, match="devices: got 2, but model is a Master"):
            UNet(master, {}, devices=2)
        with pytest.raises(InvalidInputError, match="max_batch_size: got 4, but model is a Master"):
            UNet(master, {}, max_batch_size=4)


def test_component_that_is_garbage_ends_its_workers_and_cannot_be_copied(
    unet_model: Callable[..., Path],
) -> None:
    unet = UNet(unet_model(), {}, devices=1)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a UNet has worker processes"):
            copied(unet)
    assert unet(SAMPLE, 2, STATES).sample.mean() == 2
    pid = unet.master.statistics().workers[0].pid
    assert pid is not None
    worker = psutil.Process(pid)
    del unet
    gc.collect()
    worker.wait(timeout=60)


def test_model_of_another_kind_is_refused_and_leaves_no_worker(
    unet_model: Callable[..., Path],
) -> None:
    with pytest.raises(InvalidInputError, match="expected one with rows named 'hidden_states'"):
        Transformer2D(unet_model(), {}, devices=1)


def test_whole_inputs_of_a_transformer_go_to_every_worker() -> None:
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        flux (float[b, n, 3] hidden_states, float[b] timestep, float[b] guidance, float[n, 3] img_ids)
            => (float[b, n, 3] out)
        {
            flat = Constant <value = int64[3] {-1, 1, 1}> ()
            step = Reshape (timestep, flat)
            scale = Reshape (guidance, flat)
            placed = Add (hidden_states, img_ids)
            stepped = Add (placed, step)
            out = Add (stepped, scale)
        }
    """)
    ids = torch.arange(12.0).reshape(4, 3)
    with Transformer2D(model, {"guidance_embeds": True}, devices=2) as transformer:
        with transformer.cache_context("cond"):
            answer = transformer(
                torch.zeros(2, 4, 3),
                timestep=torch.tensor([1.0, 2.0]),
                guidance=torch.tensor([10.0]),
                img_ids=ids,
                joint_attention_kwargs={},
                controlnet_blocks_repeat=False,
            ).sample
        assert [worker.runs for worker in transformer.master.statistics().workers] == [1, 1]
    assert torch.equal(answer, torch.stack([ids + 11, ids + 12]))


def test_text_encoder_gives_the_states_that_its_model_has() -> None:
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        clip (int64[batch, tokens] input_ids) => (float[batch, tokens] last_hidden_state)
        { last_hidden_state = Cast <to = 1> (input_ids) }
    """)
    ids = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    with TextEncoder(model, {"model_type": "clip_text_model"}, devices=2) as encoder:
        assert encoder.config.projection_dim == 512  # of transformers' class
        assert torch.equal(encoder(ids)[0], ids.float())
        assert torch.equal(encoder(ids, return_dict=False)[0], ids.float())
        with pytest.raises(InvalidInputError, match="output_hidden_states: got True"):
            encoder(ids, output_hidden_states=True)
        with pytest.raises(InvalidInputError, match="attention_mask: got Tensor"):
            encoder(ids, torch.ones(2, 2))
    for config in ({}, {"model_type": "no such"}):
        with pytest.raises(InvalidInputError, match="model_type"):
            TextEncoder(model, config, devices=1)
