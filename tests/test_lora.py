"""Baking LoRAs, against the formula in float64, in every spelling of the keys."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from quant_core import CheckpointError, QuantizeConfig
from quant_core.checkpoint import open_checkpoint
from quant_core.cli import main
from quant_core.convert import convert, convert_file
from quant_core.lora import LoraMerge, merge_lora, merged_weight
from quant_core.plan import plan

RANK, ALPHA = 4, 2.0

# How the layer blocks.0.up is called, and its two matrices.
SPELLINGS = {
    "kohya": ("lora_unet_blocks_0_up", "lora_up.weight", "lora_down.weight"),
    "PEFT": ("base_model.model.blocks.0.up", "lora_B.weight", "lora_A.weight"),
    "PEFT with an adapter's name": ("base_model.model.blocks.0.up", "lora_B.default.weight", "lora_A.default.weight"),
    "diffusers": ("transformer.blocks.0.up", "lora_B.weight", "lora_A.weight"),
    "older diffusers": ("unet.blocks.0.up", "lora.up.weight", "lora.down.weight"),
    "ComfyUI": ("diffusion_model.blocks.0.up", "lora_up.weight", "lora_down.weight"),
    "full names": ("model.diffusion_model.blocks.0.up", "lora_B.weight", "lora_A.weight"),
    "bare": ("blocks.0.up", "lora_B.weight", "lora_A.weight"),
    "LyCORIS": ("lycoris_blocks_0_up", "lora_up.weight", "lora_down.weight"),
}


@pytest.fixture(params=["", "model.diffusion_model."])
def model(tmp_path, request):
    path = tmp_path / "model.safetensors"
    save_file({request.param + name: tensor for name, tensor in tiny_model().state_dict().items()}, path)
    return path


def write_lora(path, name="blocks.0.up", up="lora_B.weight", down="lora_A.weight", shape=(512, 256), seed=1, **more):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.{up}": torch.randn(shape[0], RANK, generator=generator),
        f"{name}.{down}": torch.randn(RANK, shape[1], generator=generator),
    }
    tensors.update({f"{name}.{key}": tensor for key, tensor in more.items()})
    save_file(tensors, path)
    return path


def expected(weight, lora, strength, scale):
    matrices = [tensor.double() for key, tensor in load_file(lora).items() if not key.endswith(".alpha")]
    up, down = sorted(matrices, key=lambda matrix: matrix.shape[1])  # [N, rank] and [rank, K]
    return weight.double() + strength * scale * (up @ down)


@pytest.mark.parametrize("alpha", [None, ALPHA])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(model, tmp_path, spelling, alpha):
    name, up, down = SPELLINGS[spelling]
    more = {} if alpha is None else {"alpha": torch.tensor(alpha)}
    lora = write_lora(tmp_path / "lora.safetensors", name, up, down, **more)
    checkpoint = open_checkpoint(model)
    merge = LoraMerge(checkpoint, [(lora, 0.5)])
    (layer,) = merge.layers
    assert layer.endswith("blocks.0.up") and merge.unmatched == []
    weight = checkpoint.read(layer + ".weight").float()
    before = weight.clone()
    truth = expected(weight, lora, 0.5, 1.0 if alpha is None else ALPHA / RANK)
    torch.testing.assert_close(merge(layer, weight).double(), truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight, before)
    assert merge("blocks.9.up", weight) is weight


def test_two_loras_add_up(model, tmp_path):
    first = write_lora(tmp_path / "a.safetensors", seed=1)
    second = write_lora(tmp_path / "b.safetensors", seed=2)
    checkpoint = open_checkpoint(model)
    merge = LoraMerge(checkpoint, [(first, 1.0), (second, -0.25)])
    weight = checkpoint.read(merge.layers[0] + ".weight").float()
    truth = expected(expected(weight, first, 1.0, 1.0), second, -0.25, 1.0)
    torch.testing.assert_close(merge(merge.layers[0], weight).double(), truth, rtol=1e-5, atol=1e-5)


def test_in_runs_of_rows(model, tmp_path):
    checkpoint = open_checkpoint(model)
    merge = LoraMerge(checkpoint, [(write_lora(tmp_path / "lora.safetensors"), 1.0)])
    (layer,) = merge.layers
    assert merge.applies_to(layer) and not merge.applies_to("head")
    weight = checkpoint.read(layer + ".weight").float()
    parts = [merge(layer, weight[start : start + 100], start) for start in range(0, len(weight), 100)]
    torch.testing.assert_close(torch.cat(parts), merge(layer, weight), rtol=1e-6, atol=1e-6)


def test_quantized_while_baking(model, tmp_path):
    """The quantized file is the one that quantizing the baked file gives; a kept layer is baked in its own dtype."""
    names = ["blocks.0.up", "blocks.1.down", "head"]
    shapes = [(512, 256), (256, 512), (32, 256)]
    tensors = {}
    for name, shape in zip(names, shapes, strict=True):
        tensors |= load_file(write_lora(tmp_path / "one.safetensors", name, shape=shape))
    save_file(tensors, tmp_path / "lora.safetensors")
    loras = [(tmp_path / "lora.safetensors", 0.7)]
    config = QuantizeConfig(method="comfy_kitchen_int8_w8a8")
    merge_lora(model, tmp_path / "merged.safetensors", loras)
    convert_file(tmp_path / "merged.safetensors", tmp_path / "two-steps.safetensors", config)
    merge = LoraMerge(open_checkpoint(model), loras)
    convert(plan(model, config), tmp_path / "one-step.safetensors", transform=merge)
    one, two = load_file(tmp_path / "one-step.safetensors"), load_file(tmp_path / "two-steps.safetensors")
    assert one.keys() == two.keys() and len(merge.layers) == 3
    assert all(torch.equal(one[key], two[key]) for key in one)
    kept = next(key for key in one if key.endswith("head.weight"))
    assert one[kept].dtype == torch.bfloat16 and not torch.equal(one[kept], load_file(model)[kept])


def test_a_convolution(tmp_path):
    weight = torch.randn(8, 4, 3, 3)
    save_file({"input_blocks.0.0.weight": weight}, tmp_path / "model.safetensors")
    lora = {"lora_unet_input_blocks_0_0.lora_up.weight": torch.randn(8, 2, 1, 1)}
    lora["lora_unet_input_blocks_0_0.lora_down.weight"] = torch.randn(2, 4, 3, 3)
    save_file(lora, tmp_path / "lora.safetensors")
    merge = LoraMerge(open_checkpoint(tmp_path / "model.safetensors"), [(tmp_path / "lora.safetensors", 1.0)])
    up, down = lora.values()
    # What the two convolutions, one after the other, do to an image.
    image = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    conv = torch.nn.functional.conv2d
    truth = conv(image, weight.double()) + conv(conv(image, down.double()), up.double())
    found = conv(image, merge("input_blocks.0.0", weight).double())
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_a_file_with_loras(model, tmp_path):
    """The changed weight is rounded once, to its own dtype; all else is the same bytes."""
    lora = write_lora(tmp_path / "lora.safetensors")
    merge, digest = merge_lora(model, tmp_path / "merged.safetensors", [(lora, 1.0)])
    before, after = load_file(model), load_file(tmp_path / "merged.safetensors")
    assert list(before) == list(after) or before.keys() == after.keys()
    (layer,) = merge.layers
    key = layer + ".weight"
    truth = expected(before[key].float(), lora, 1.0, 1.0).to(torch.bfloat16)
    assert after[key].dtype == torch.bfloat16
    assert (after[key] != truth).float().mean() < 1e-3  # ties of the rounding
    assert torch.equal(after[key], merged_weight(open_checkpoint(model), layer, merge))
    assert all(torch.equal(before[name], after[name]) for name in before if name != key)
    assert digest.content


# ---------------------------------------------------------------- what does not fit


def test_the_nearest_name(model, tmp_path):
    tensors = load_file(write_lora(tmp_path / "a.safetensors"))
    tensors |= load_file(write_lora(tmp_path / "b.safetensors", "lora_unet_blocks_0_upp"))
    tensors |= load_file(write_lora(tmp_path / "c.safetensors", "lora_te_text_model_encoder_layers_0_mlp_fc1"))
    save_file(tensors, tmp_path / "lora.safetensors")
    merge = LoraMerge(open_checkpoint(model), [(tmp_path / "lora.safetensors", 1.0)])
    encoder, near = sorted(map(str, merge.unmatched))
    assert "'lora_unet_blocks_0_upp' matches no weight" in near and "blocks.0.up'" in near
    assert "is for a text encoder" in encoder
    assert len(merge.layers) == 1


def test_nothing_fits(model, tmp_path):
    lora = write_lora(tmp_path / "lora.safetensors", "transformer.single_blocks.0.linear1")
    with pytest.raises(CheckpointError, match="none of its 1 layers fits .*model.safetensors.*single_blocks.0.linear1"):
        LoraMerge(open_checkpoint(model), [(lora, 1.0)])


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("dora_scale", "DoRA"),
        ("lora_magnitude_vector", "DoRA"),
        ("hada_w1_a", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("lokr_w2_a", "LoKr"),
        ("oft_blocks", "OFT"),
        ("a1.weight", "GLoRA"),
        ("lora_mid.weight", "LoCon"),
        ("diff", "difference"),
        ("diff_b", "difference"),
    ],
)
def test_other_adapters_are_named_and_refused(model, tmp_path, key, kind):
    lora = write_lora(tmp_path / "lora.safetensors", **{key: torch.ones(512)})
    with pytest.raises(CheckpointError, match=rf"lora.safetensors: 'blocks.0.up.{key}' belongs to .*{kind}"):
        LoraMerge(open_checkpoint(model), [(lora, 1.0)])


def test_another_models_shapes(model, tmp_path):
    lora = write_lora(tmp_path / "lora.safetensors", shape=(512, 128))
    with pytest.raises(CheckpointError, match=r"\[512, 4\] x \[4, 128\].*is \[512, 256\]: the LoRA is for another"):
        LoraMerge(open_checkpoint(model), [(lora, 1.0)])


def test_half_a_pair(model, tmp_path):
    save_file({"blocks.0.up.lora_A.weight": torch.ones(4, 256)}, tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError, match="has no up matrix beside it"):
        LoraMerge(open_checkpoint(model), [(tmp_path / "lora.safetensors", 1.0)])


def test_no_lora_at_all(model):
    with pytest.raises(CheckpointError, match="holds no LoRA"):
        LoraMerge(open_checkpoint(model), [(model, 1.0)])


def test_a_quantized_model_is_refused(tmp_path):
    save_file({"blocks.0.up.weight": torch.zeros(512, 256, dtype=torch.int8)}, tmp_path / "model.safetensors")
    lora = write_lora(tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError, match="stored as int8: a LoRA is baked into float weights"):
        LoraMerge(open_checkpoint(tmp_path / "model.safetensors"), [(lora, 1.0)])


def test_not_onto_itself(model, tmp_path):
    lora = write_lora(tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match="is the source itself"):
        merge_lora(model, model, [(lora, 1.0)])
    with pytest.raises(ValueError, match="strength"):
        LoraMerge(open_checkpoint(model), [(lora, float("nan"))])


# ---------------------------------------------------------------- the command


def test_command(model, tmp_path, capsys):
    tensors = load_file(write_lora(tmp_path / "a.safetensors"))
    tensors |= load_file(write_lora(tmp_path / "b.safetensors", "lora_unet_blocks_0_upp"))
    lora = tmp_path / "lora.safetensors"
    save_file(tensors, lora)
    assert main(["merge-lora", str(model), str(tmp_path / "m.safetensors"), "--lora", str(lora), "0.5"]) == 0
    captured = capsys.readouterr()
    assert "1 layers baked" in captured.out and "the nearest name is" in captured.err
    merged, _ = merge_lora(model, tmp_path / "again.safetensors", [(lora, 0.5)])
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()
    command = ["merge-lora", str(model), str(tmp_path / "q.safetensors"), "--lora", str(lora), "--json"]
    assert main([*command, "--method", "comfy_kitchen_fp8_w8a8"]) == 0
    assert json.loads(capsys.readouterr().out)["baked"] == merged.layers
    assert load_file(tmp_path / "q.safetensors")[merged.layers[0] + ".weight"].dtype == torch.float8_e4m3fn
    assert main([*command[:4], str(lora), "much"]) == 1
    assert "the strength is a number" in capsys.readouterr().err
