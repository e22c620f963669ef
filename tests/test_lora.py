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
from quant_core.lora import LoraMerge, merge_lora
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
    assert torch.equal(after[key], merge(layer, before[key].float()).to(torch.bfloat16))
    assert all(torch.equal(before[name], after[name]) for name in before if name != key)
    assert digest.content


def other_adapter(kind, weight):
    """Tensors of an adapter for ``weight [512, 256]``, and the weight that it makes at strength 0.5, in float64."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / 10

    w = weight.double()
    if kind == "LoHa":
        parts = {"hada_w1_a": random(512, 4), "hada_w1_b": random(4, 256)}
        parts |= {"hada_w2_a": random(512, 4), "hada_w2_b": random(4, 256), "alpha": torch.tensor(2.0)}
        a, b, c, d = (tensor.double() for tensor in list(parts.values())[:4])
        return parts, w + 0.5 * (2.0 / 4) * (a @ b) * (c @ d)
    if kind == "LoKr":
        parts = {"lokr_w1": random(8, 4), "lokr_w2_a": random(64, 2), "lokr_w2_b": random(2, 64)}
        parts["alpha"] = torch.tensor(3.0)
        first, a, b = (tensor.double() for tensor in list(parts.values())[:3])
        return parts, w + 0.5 * (3.0 / 2) * torch.kron(first, a @ b)
    if kind == "difference":
        parts = {"diff": random(512, 256)}
        return parts, w + 0.5 * parts["diff"].double()
    parts = {"lora_up.weight": random(512, 4), "lora_down.weight": random(4, 256), "dora_scale": random(512, 1) + 1}
    up, down, scale = (tensor.double() for tensor in parts.values())
    return parts, w + 0.5 * ((w + up @ down) * scale / w.norm(dim=1, keepdim=True) - w)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "difference", "DoRA"])
def test_other_adapters(model, tmp_path, kind):
    checkpoint = open_checkpoint(model)
    name = next(name for name in checkpoint.tensors if name.endswith("blocks.0.up.weight"))
    weight = checkpoint.read(name).float()
    parts, truth = other_adapter(kind, weight)
    save_file({f"diffusion_model.blocks.0.up.{key}": part for key, part in parts.items()}, tmp_path / "l.safetensors")
    merge = LoraMerge(checkpoint, [(tmp_path / "l.safetensors", 0.5)])
    (layer,) = merge.layers
    runs = [merge(layer, weight[start : start + 100], start) for start in range(0, 512, 100)]
    torch.testing.assert_close(torch.cat(runs).double(), truth, rtol=1e-4, atol=1e-5)


def test_shards_and_resume_give_the_same_weights(model, tmp_path):
    loras = [(write_lora(tmp_path / "lora.safetensors"), 1.0)]
    merge_lora(model, tmp_path / "one.safetensors", loras)
    merge_lora(model, tmp_path / "many.safetensors", loras, shard_size=300_000, resume=True)
    shards = sorted(tmp_path.glob("many-0*.safetensors"))
    one, many = load_file(tmp_path / "one.safetensors"), {k: t for s in shards for k, t in load_file(s).items()}
    assert len(shards) > 1 and one.keys() == many.keys()
    assert all(torch.equal(one[key], many[key]) for key in one)


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
        ("lora_magnitude_vector", "DoRA"),
        ("oft_blocks", "OFT"),
        ("a1.weight", "GLoRA"),
        ("set_weight", "replaces or reshapes"),
        ("reshape_weight", "replaces or reshapes"),
    ],
)
def test_other_adapters_are_named_and_refused(model, tmp_path, key, kind):
    lora = write_lora(tmp_path / "lora.safetensors", **{key: torch.ones(512)})
    with pytest.raises(CheckpointError, match=rf"lora.safetensors: 'blocks.0.up.{key}' belongs to .*{kind}"):
        LoraMerge(open_checkpoint(model), [(lora, 1.0)])


def test_another_models_shapes(model, tmp_path):
    lora = write_lora(tmp_path / "lora.safetensors", shape=(512, 128))
    with pytest.raises(CheckpointError, match=r"LoRA of 512 x 128.*is \[512, 256\]: the LoRA is for another"):
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


def test_biases_are_written_too(model, tmp_path):
    before = load_file(model)
    layer = next(name[:-5] for name in before if name.endswith("blocks.0.up.bias"))
    change = torch.randn(512, generator=torch.Generator().manual_seed(3))
    lora = write_lora(tmp_path / "lora.safetensors", diff_b=change)
    merge_lora(model, tmp_path / "float.safetensors", [(lora, 0.5)])
    merge = LoraMerge(open_checkpoint(model), [(lora, 0.5)])
    assert merge.others == [f"{layer}.bias"]
    convert(
        plan(model, QuantizeConfig(method="comfy_kitchen_int8_w8a8")), tmp_path / "int8.safetensors", transform=merge
    )
    bias = before[f"{layer}.bias"]
    truth = (bias.double() + 0.5 * change.double()).to(bias.dtype)
    for name in ("float", "int8"):
        after = load_file(tmp_path / f"{name}.safetensors")
        torch.testing.assert_close(after[f"{layer}.bias"], truth)
        assert not torch.equal(after[f"{layer}.bias"], bias)


def test_resumed_is_the_same_as_uninterrupted(model, tmp_path):
    lora = write_lora(tmp_path / "lora.safetensors")
    merge_lora(model, tmp_path / "whole.safetensors", [(lora, 1.0)])

    def stop(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "out" / "m.safetensors"
    with pytest.raises(KeyboardInterrupt):
        merge_lora(model, out, [(lora, 1.0)], progress=stop, resume=True)
    assert not out.exists()
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        merge_lora(model, out, [(lora, 0.5)], resume=True)
    arguments = ["merge-lora", str(model), str(out), "--lora", str(lora), "1.0", "--resume", "--threads", "1"]
    assert main(arguments) == 0
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["m.safetensors"]


CONVOLUTION = {
    "lora_mid": (
        {"lora_up.weight": (16, 4, 1, 1), "lora_mid.weight": (4, 4, 3, 3), "lora_down.weight": (4, 8, 1, 1)},
        lambda up, mid, down: torch.einsum("oc,cakl,ai->oikl", up[:, :, 0, 0], mid, down[:, :, 0, 0]),
    ),
    "LoHa with cores": (
        {
            f"hada_{n}": s
            for i in "12"
            for n, s in {f"t{i}": (4, 4, 3, 3), f"w{i}_a": (4, 16), f"w{i}_b": (4, 8)}.items()
        },
        lambda t1, a1, b1, t2, a2, b2: (
            torch.einsum("ijkl,ip,jr->prkl", t1, a1, b1) * torch.einsum("ijkl,ip,jr->prkl", t2, a2, b2)
        ),
    ),
    "LoKr with a core": (
        {"lokr_w1": (4, 2), "lokr_t2": (4, 4, 3, 3), "lokr_w2_a": (4, 4), "lokr_w2_b": (4, 4)},
        lambda w1, core, a, b: torch.kron(
            w1[:, :, None, None], torch.einsum("ijkl,ip,jr->prkl", core, a, b).contiguous()
        ),
    ),
}


@pytest.mark.parametrize("kind", CONVOLUTION)
def test_adapters_of_convolutions_with_a_core(kind, tmp_path):
    shapes, formula = CONVOLUTION[kind]
    generator = torch.Generator().manual_seed(7)
    parts = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    named = {f"conv.{key}": tensor for key, tensor in parts.items()}
    save_file({**named, "conv.alpha": torch.tensor(ALPHA)}, tmp_path / "lora.safetensors")
    weight = torch.randn(16, 8, 3, 3, generator=generator)
    merge = LoraMerge({"conv.weight": weight.shape}, [(tmp_path / "lora.safetensors", 0.5)])
    change = formula(*(tensor.double() for tensor in parts.values()))
    truth = weight.double() + 0.5 * ALPHA / 4 * change
    torch.testing.assert_close(merge("conv", weight).double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge("conv", weight[5:11], 5).double(), truth[5:11], rtol=1e-5, atol=1e-5)


def test_command_writes_shards(model, tmp_path, capsys):
    lora = write_lora(tmp_path / "lora.safetensors")
    merge_lora(model, tmp_path / "whole.safetensors", [(lora, 1.0)])
    out = tmp_path / "out" / "m.safetensors"
    assert main(["merge-lora", str(model), str(out), "--lora", str(lora), "--shard-size", "500KB"]) == 0
    assert "m.safetensors.index.json and its shards" in capsys.readouterr().out
    shards = sorted(out.parent.glob("m-*.safetensors"))
    assert len(shards) > 1 and (out.parent / "m.safetensors.index.json").exists()
    together = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    whole = load_file(tmp_path / "whole.safetensors")
    assert together.keys() == whole.keys() and all(torch.equal(together[name], whole[name]) for name in whole)


# ---------------------------------------------------------------- the command


def test_command(model, tmp_path, capsys):
    tensors = load_file(write_lora(tmp_path / "a.safetensors"))
    tensors |= load_file(write_lora(tmp_path / "b.safetensors", "lora_unet_blocks_0_upp"))
    lora = tmp_path / "lora.safetensors"
    save_file(tensors, lora)
    assert main(["merge-lora", str(model), str(tmp_path / "m.safetensors"), "--lora", str(lora), "0.5"]) == 0
    captured = capsys.readouterr()
    assert "layers changed: 1" in captured.out and "the nearest name is" in captured.err
    merged, _ = merge_lora(model, tmp_path / "again.safetensors", [(lora, 0.5)])
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()
    command = ["merge-lora", str(model), str(tmp_path / "q.safetensors"), "--lora", str(lora), "--json"]
    assert main([*command, "--method", "comfy_kitchen_fp8_w8a8"]) == 0
    assert json.loads(capsys.readouterr().out)["baked"] == merged.layers
    assert load_file(tmp_path / "q.safetensors")[merged.layers[0] + ".weight"].dtype == torch.float8_e4m3fn
    assert main([*command[:4], str(lora), "much"]) == 1
    assert "the strength is a number" in capsys.readouterr().err
