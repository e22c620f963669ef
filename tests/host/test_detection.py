"""What is found out about a file before ComfyUI loads it."""

from __future__ import annotations

import pytest

SD15 = {
    "use_checkpoint": False,
    "image_size": 32,
    "out_channels": 4,
    "use_spatial_transformer": True,
    "legacy": False,
    "adm_in_channels": None,
    "in_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2, 2],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth_middle": 1,
    "use_linear_in_transformer": False,
    "context_dim": 768,
    "num_heads": 8,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}


def shapes(detected) -> dict:
    return {key: info.shape for key, info in detected.tensors.items()}


def sd15_tensors() -> dict:
    import comfy.supported_models
    import torch

    config = comfy.supported_models.SD15(dict(SD15))
    config.set_inference_dtype(torch.float16, None)
    return config.get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()


def test_a_diffusers_unet_gets_comfyui_names(pack):
    import comfy.utils

    native = sd15_tensors()
    diffusers = {
        name: native[target] for name, target in comfy.utils.unet_to_diffusers(SD15).items() if target in native
    }
    assert "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight" in diffusers
    detected = pack.detection.detect(diffusers, None)
    assert detected.architecture == "SD15"
    assert shapes(detected) == {key: tuple(tensor.shape) for key, tensor in native.items()}


def test_a_packed_format_leaves_the_keys_that_detection_reads(pack):
    """attn2.to_k is a Linear of a block, but its stored width tells ComfyUI the architecture."""
    from quant_core import QuantizeConfig

    tensors = pack.detection.detect(sd15_tensors(), None).tensors
    choices = {
        method: set(pack.quantizer.select(QuantizeConfig(method=method), tensors).targets)
        for method in ("comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4")
    }
    only_int8 = choices["comfy_kitchen_int8_w8a8"] - choices["comfy_kitchen_nvfp4_w4a4"]
    assert only_int8 and all(name.endswith("attn2.to_k") for name in only_int8)


def test_names_are_those_that_comfyui_loads(pack, tiny_flux):
    import comfy.sd
    import comfy.utils

    tensors, metadata = comfy.utils.load_torch_file(str(tiny_flux), return_metadata=True)
    detected = pack.detection.detect(pack.detection.unwrap(tensors, metadata), metadata)
    model = comfy.sd.load_diffusion_model(str(tiny_flux)).model.diffusion_model
    assert shapes(detected) == {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def test_a_header_that_lists_layers_with_the_prefix(pack):
    """Its markers go to the layers; none is left behind under the long name."""
    import json

    import torch

    prefix = "model.diffusion_model."
    names = [f"{prefix}blocks.{i}.linear" for i in range(6)]
    metadata = {"_quantization_metadata": json.dumps({"layers": {name: {"format": "float8_e4m3fn"} for name in names}})}
    file = {name + ".weight": torch.zeros(2, 2) for name in names}
    unwrapped = pack.detection.unwrap(file, metadata)
    stems = [name.removeprefix(prefix) for name in names]
    assert set(unwrapped) == {stem + end for stem in stems for end in (".weight", ".comfy_quant")}


def test_the_classes_of_the_presets_are_comfyuis(make_tiny):
    import comfy.supported_models

    from quant_core.presets import architectures

    for one in architectures().values():
        assert all(hasattr(comfy.supported_models, name) for name in one.classes), one.name


@pytest.mark.parametrize("name", ["flux", "flux2", "wan", "ltxv", "minimax_h3"])
def test_a_preset_knows_what_comfyui_knows(name, pack, make_tiny, tmp_path, comfy_idle):
    """The tiny models have the names of the real ones; ComfyUI's detection is asked for its class."""
    import torch

    from quant_core.presets import architectures, detect, preset

    path = make_tiny.write(name, tmp_path / f"{name}.safetensors")
    with torch.inference_mode():
        patcher = pack.load(str(path), preset("balanced", "any"))
    found = detect({key.removesuffix(".weight"): tuple(t.shape) for key, t in make_tiny.state_dict(name).items()})
    assert type(patcher.model.model_config).__name__ in found.classes
    methods = {}
    for key, module in patcher.model.diffusion_model.named_modules():
        if getattr(module, "quant_format", None) or getattr(module, "layout_type", None):
            methods[key] = module
    tiers = {layer: architectures()[found.name].tier(layer)[0].value for layer in methods}
    assert methods and "keep" not in tiers.values()
