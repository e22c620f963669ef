"""The choice by structure, on the real layer names and shapes of 26 architectures (data/inventory.json).

``linears`` are ``[module name, out_features, in_features]`` of every nn.Linear of the architecture at its real size,
in ComfyUI's names; ``keep`` are patterns of what quantizers commonly keep: projections in and out, conditioning, head.
"""

import json
import re
from pathlib import Path

import pytest

from quant_core.selection import choose_layers, read_by_detection

INVENTORY = json.loads((Path(__file__).parent / "data" / "inventory.json").read_text())


def decisions(architecture, prefix=""):
    linears = INVENTORY[architecture]["linears"]
    return choose_layers({f"{prefix}{name}.weight": (out, width) for name, out, width in linears})


@pytest.mark.parametrize("architecture", INVENTORY)
def test_quantizes_the_bulk_and_keeps_what_is_sensitive(architecture):
    chosen = decisions(architecture)
    linears = INVENTORY[architecture]["linears"]
    total = sum(out * width for _, out, width in linears)
    quantized = sum(out * width for name, out, width in linears if chosen[name].quantize)
    assert quantized / total > 0.93
    wrong = [
        name
        for name, *_ in linears
        if chosen[name].quantize and any(re.fullmatch(pattern, name) for pattern in INVENTORY[architecture]["keep"])
    ]
    # Qwen-Image's first modulation is a matter for its preset: by structure it is like the other 119.
    assert wrong == (["transformer_blocks.0.img_mod.1"] if architecture == "qwen-image" else [])
    assert all(out >= 256 for name, out, _ in linears if chosen[name].quantize)
    assert all(decision.reason for decision in chosen.values())


@pytest.mark.parametrize("architecture", ["flux1-dev", "sdxl", "z-image"])
def test_all_in_one_checkpoint(architecture):
    prefix = "model.diffusion_model."
    shapes = {f"{prefix}{n}.weight": (o, i) for n, o, i in INVENTORY[architecture]["linears"]}
    shapes["text_encoders.t5.encoder.block.0.layer.0.SelfAttention.q.weight"] = (4096, 4096)
    shapes["first_stage_model.decoder.up.0.attn.q.weight"] = (512, 512)
    chosen = choose_layers(shapes)
    bare = decisions(architecture)
    assert {k.removeprefix(prefix): d.quantize for k, d in chosen.items() if k.startswith(prefix)} == {
        k: d.quantize for k, d in bare.items()
    }
    assert [d.reason for k, d in chosen.items() if not k.startswith(prefix)] == ["not part of the diffusion model"] * 2


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("blocks.0.attn.qkv.weight", (768, 256), None),
        ("blocks.0.norm1.weight", (256,), "not a Linear (1-D weight)"),
        ("blocks.0.conv.weight", (256, 256, 3, 3), "not a Linear (4-D weight)"),
        ("img_in.weight", (3072, 256), "outside the indexed blocks"),
        ("text_embedding.0.weight", (5120, 4096), "outside the indexed blocks"),
        ("0.weight", (256, 256), "outside the indexed blocks"),
        ("blocks.0.pos_embed.weight", (256, 256), "'pos_embed' names an embedding, conditioning or a head"),
        ("blocks.0.gate.weight", (8, 512), "narrower than 256"),
        ("blocks.0.small.weight", (512, 64), "narrower than 256"),
        ("blocks.0.mlp.bias", (512,), None),
    ],
)
def test_reasons(name, shape, reason):
    chosen = choose_layers({name: shape})
    if name.endswith(".bias"):
        assert chosen == {}
    else:
        decision = chosen[name.removesuffix(".weight")]
        assert decision.quantize == (reason is None)
        assert reason is None or decision.reason == reason


@pytest.mark.parametrize(
    "layer",
    [
        "img_in",
        "model.diffusion_model.txt_in",
        "vector_in",
        "cap_embedder.1",
        "condition_proj",
        "label_emb.0.0",
        "input_blocks.4.1.transformer_blocks.0.attn2.to_k",
    ],
)
def test_detection_keys(layer):
    assert read_by_detection(layer)


@pytest.mark.parametrize("layer", ["double_blocks.0.img_attn.qkv", "attn1.to_k", "attn2.to_v", "my_img_in"])
def test_not_detection_keys(layer):
    assert not read_by_detection(layer)
