"""What a name in a LoRA file means, for every name that ComfyUI's own loader knows for an architecture.

The models are made on the meta device: names and shapes are all that matters.
"""

from __future__ import annotations

import math

import pytest

FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "hidden_size": 128,
    "num_heads": 1,
    "axes_dim": [16, 56, 56],
    "mlp_ratio": 4.0,
    "theta": 10000,
    "qkv_bias": True,
    "txt_ids_dims": [],
    "context_in_dim": 64,
    "vec_in_dim": 32,
    "depth": 2,
    "depth_single_blocks": 12,
    "guidance_embed": True,
    "yak_mlp": False,
    "txt_norm": False,
}
UNET = {
    "use_checkpoint": False,
    "image_size": 32,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
# {name: (class of comfy.supported_models, its unet_config, the least number of names)}
ARCHITECTURES = {
    "flux": ("Flux", FLUX, 700),
    "flux2": (
        "Flux2",
        {
            **FLUX,
            "image_model": "flux2",
            "axes_dim": [32, 32, 32, 32],
            "mlp_ratio": 3.0,
            "qkv_bias": False,
            "ops_bias": False,
            "global_modulation": True,
            "mlp_silu_act": True,
            "vec_in_dim": None,
            "txt_ids_dims": [3],
        },
        400,
    ),
    "hunyuan_video": (
        "HunyuanVideo",
        {
            "image_model": "hunyuan_video",
            "in_channels": 16,
            "patch_size": [1, 2, 2],
            "out_channels": 16,
            "vec_in_dim": 768,
            "axes_dim": [16, 56, 56],
            "meanflow": False,
            "context_in_dim": 64,
            "hidden_size": 128,
            "mlp_ratio": 4.0,
            "num_heads": 1,
            "depth": 1,
            "depth_single_blocks": 1,
            "theta": 256,
            "qkv_bias": True,
            "byt5": False,
            "guidance_embed": True,
            "use_cond_type_embedding": False,
            "vision_in_dim": None,
            "meanflow_sum": False,
        },
        200,
    ),
    "sd3": (
        "SD3",
        {
            "in_channels": 16,
            "patch_size": 2,
            "out_channels": 16,
            "depth": 4,
            "input_size": None,
            "adm_in_channels": 64,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 48, "out_features": 256},
            },
            "num_patches": 64,
            "pos_embed_max_size": 8,
            "pos_embed_scaling_factor": None,
            "qk_norm": "rms",
            "x_block_self_attn_layers": [0],
        },
        300,
    ),
    "aura_flow": (
        "AuraFlow",
        {
            "max_seq": 64,
            "cond_seq_dim": 48,
            "n_double_layers": 2,
            "n_layers": 4,
            "dim": 64,
            "n_heads": 4,
            "in_channels": 4,
        },
        100,
    ),
    "pixart": (
        "PixArtAlpha",
        {
            "image_model": "pixart_alpha",
            "in_channels": 4,
            "hidden_size": 128,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 2,
            "input_size": 32,
            "caption_channels": 48,
            "model_max_length": 8,
            "micro_condition": True,
        },
        150,
    ),
    "z_image": (
        "ZImage",
        {
            "image_model": "lumina2",
            "patch_size": 2,
            "in_channels": 16,
            "dim": 192,
            "cap_feat_dim": 48,
            "n_layers": 2,
            "qk_norm": True,
            "n_heads": 6,
            "n_kv_heads": 6,
            "axes_dims": [8, 12, 12],
            "axes_lens": [64, 64, 64],
            "z_image_modulation": True,
            "ffn_dim_multiplier": 8 / 3,
        },
        400,
    ),
    "krea2": ("Krea2", {"image_model": "krea2", "layers": 2}, 300),
    "qwen_image": ("QwenImage", {"image_model": "qwen_image", "in_channels": 64, "num_layers": 1}, 100),
    "hidream": (
        "HiDream",
        {
            "image_model": "hidream",
            "attention_head_dim": 128,
            "axes_dims_rope": [64, 32, 32],
            "caption_channels": [64, 64],
            "max_resolution": [128, 128],
            "in_channels": 16,
            "llama_layers": [0, 1],
            "num_attention_heads": 2,
            "num_routed_experts": 2,
            "num_activated_experts": 1,
            "num_layers": 1,
            "num_single_layers": 1,
            "out_channels": 16,
            "patch_size": 2,
            "text_emb_dim": 64,
        },
        100,
    ),
    "wan": (
        "WAN21_T2V",
        {
            "image_model": "wan2.1",
            "model_type": "t2v",
            "dim": 256,
            "out_dim": 16,
            "num_heads": 2,
            "ffn_dim": 512,
            "num_layers": 2,
            "patch_size": (1, 2, 2),
            "freq_dim": 256,
            "window_size": (-1, -1),
            "qk_norm": True,
            "cross_attn_norm": True,
            "eps": 1e-6,
            "in_dim": 16,
        },
        100,
    ),
    "ltxv": (
        "LTXV",
        {
            "image_model": "ltxv",
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "cross_attention_dim": 64,
            "caption_channels": 48,
            "in_channels": 128,
            "use_keyframes_abs_pos_embedding": False,
        },
        100,
    ),
    "sd15": (
        "SD15",
        {
            **UNET,
            "adm_in_channels": None,
            "model_channels": 32,
            "num_res_blocks": [2, 2, 2, 2],
            "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth_middle": 1,
            "use_linear_in_transformer": False,
            "context_dim": 768,
            "num_heads": 8,
            "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        },
        2500,
    ),
    "sdxl": (
        "SDXL",
        {
            **UNET,
            "num_classes": "sequential",
            "adm_in_channels": 2816,
            "model_channels": 64,
            "num_res_blocks": [2, 2, 2],
            "transformer_depth": [0, 0, 2, 2, 3, 3],
            "channel_mult": [1, 2, 4],
            "transformer_depth_middle": 3,
            "use_linear_in_transformer": True,
            "context_dim": 2048,
            "num_head_channels": 64,
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 3, 3, 3],
        },
        2500,
    ),
}


def expected_target(to, shapes):
    """What an entry of ComfyUI's key map means, as a Target; None where the model has no such tensor."""
    from quant_core.lora.names import Target

    tensor, offset, function = (to, None, None) if isinstance(to, str) else (*to, None)[:3]
    shape = shapes.get(tensor.removeprefix("diffusion_model."))
    if not shape:
        return None
    start, count = (0, shape[0]) if offset is None else offset[1:]
    layer = tensor.removeprefix("diffusion_model.").removesuffix(".weight")
    return Target(layer, start, start + count, function is not None)


@pytest.fixture
def meta_model(make_tiny):
    """A function that makes a model of an architecture without weights."""
    import comfy.supported_models
    import torch

    def make(architecture):
        class_name, unet_config, _ = ARCHITECTURES[architecture]
        config = getattr(comfy.supported_models, class_name)(dict(unet_config))
        config.set_inference_dtype(torch.bfloat16, None)
        return config.get_model({}, "", device=torch.device("meta"))

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_name_that_comfyui_knows(architecture, meta_model):
    import comfy.lora

    from quant_core.lora.names import NameIndex

    model = meta_model(architecture)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.diffusion_model.state_dict().items()}
    index = NameIndex(shapes)
    names = comfy.lora.model_lora_keys_unet(model, {})
    expected = {name: expected_target(to, shapes) for name, to in names.items()}
    # ComfyUI takes four widths for this part of any model; Flux 2 has six, and no LoRA that names it.
    expected = {
        name: to for name, to in expected.items() if to and not (architecture == "flux2" and "proj_mlp" in name)
    }
    assert len(expected) > ARCHITECTURES[architecture][2]
    wrong = {name: (to, index.find(name)) for name, to in expected.items() if index.find(name) != to}
    assert wrong == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_weights_are_comfyuis(architecture, meta_model, tmp_path):
    """Every renamed layer of one spelling, baked by ComfyUI in float32 and by us."""
    import comfy.lora
    import torch
    from safetensors.torch import save_file

    from quant_core.lora import LoraMerge

    model = meta_model(architecture)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.diffusion_model.state_dict().items()}
    names = comfy.lora.model_lora_keys_unet(model, {})
    generator = torch.Generator().manual_seed(0)
    lora = {}
    taken = set()
    for name, to in names.items():
        target = expected_target(to, shapes)
        if target is None or "proj_mlp" in name and architecture == "flux2":
            continue
        shape = shapes.get(target.layer + ".weight", ())
        if len(shape) < 2 or math.prod(shape) > 1 << 24 or str(to) in taken or len(taken) > 60:
            continue
        if isinstance(to, str) and name.removeprefix("diffusion_model.") == target.layer:
            continue  # not renamed
        taken.add(str(to))
        kernel = (1,) * (len(shape) - 2)
        lora[f"{name}.lora_up.weight"] = torch.randn(target.stop - target.start, 2, *kernel, generator=generator)
        lora[f"{name}.lora_down.weight"] = torch.randn(2, *shape[1:], generator=generator)
        lora[f"{name}.alpha"] = torch.tensor(1.5)
    path = tmp_path / "lora.safetensors"
    save_file(lora, path)
    patches = {}
    for to, adapter in comfy.lora.load_lora(dict(lora), names).items():
        tensor, offset, function = (to, None, None) if isinstance(to, str) else (*to, None)[:3]
        patches.setdefault(tensor, []).append((0.7, adapter, 1.0, offset, function))
    merge = LoraMerge(shapes, [(path, 0.7)])
    assert merge.unmatched == [] and len(merge.layers) == len(patches) > 2
    for tensor, patch in patches.items():
        layer = tensor.removeprefix("diffusion_model.").removesuffix(".weight")
        weight = torch.randn(shapes[layer + ".weight"], generator=generator)
        expected = comfy.lora.calculate_weight(patch, weight.clone(), tensor)
        assert not torch.equal(expected, weight)
        torch.testing.assert_close(merge(layer, weight), expected, rtol=1e-5, atol=1e-5)
