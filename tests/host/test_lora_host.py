"""Baked LoRAs against ComfyUI's own: the weight that its LoRA loader gives a model that computes in float32."""

from __future__ import annotations

import pytest

LAYER = "double_blocks.0.img_attn.qkv"
SPELLINGS = {
    "kohya": ("lora_unet_" + LAYER.replace(".", "_"), "lora_up.weight", "lora_down.weight"),
    "ComfyUI": ("diffusion_model." + LAYER, "lora_B.weight", "lora_A.weight"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_weight_is_comfyuis(spelling, tiny_flux, tmp_path, comfy_idle):
    import comfy.sd
    import comfy.utils
    import torch
    from safetensors.torch import save_file

    from quant_core.checkpoint import open_checkpoint
    from quant_core.lora import LoraMerge

    name, up, down = SPELLINGS[spelling]
    path = tmp_path / "lora.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.{up}": torch.randn(768, 4, generator=generator) / 10,
        f"{name}.{down}": torch.randn(4, 256, generator=generator) / 10,
        f"{name}.alpha": torch.tensor(2.0),
    }
    save_file(tensors, path)
    model = comfy.sd.load_diffusion_model(str(tiny_flux), model_options={"dtype": torch.float32})
    patched, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(path)), 0.7, 0)
    comfy_idle.load_models_gpu([patched])
    expected = patched.model.diffusion_model.get_submodule(LAYER).weight

    checkpoint = open_checkpoint(tiny_flux)
    merge = LoraMerge(checkpoint, [(path, 0.7)])
    assert merge.layers == [LAYER] and merge.unmatched == []
    weight = checkpoint.read(LAYER + ".weight").float()
    assert (expected - weight).abs().max() > 0.01
    torch.testing.assert_close(merge(LAYER, weight), expected, rtol=0, atol=1e-6)
