"""Saving a model of the graph as a file that ComfyUI's own loader opens, where the format is its own."""

from __future__ import annotations

import importlib

import pytest

NATIVE = [
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_mxfp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "comfy_kitchen_int4_convrot_w4a4",
    "comfy_kitchen_int4_w4a8",
]
ADAPTED = ["bitsandbytes_nf4", "torchao_int8_w8a8", "torchao_nvfp4_w4a16"]
TARGET = "diffusion_model.single_blocks.0.linear2.weight"


@pytest.fixture
def save(pack):
    return importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".saving").save_model


def contents(path) -> dict:
    """``{name: (dtype, shape, bytes)}``, read by safetensors."""
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- a file, not a dict
    return {n: (t.dtype, tuple(t.shape), bytes(t.reshape(-1).view(torch.uint8).tolist())) for n, t in tensors.items()}


@pytest.mark.parametrize("method", [*NATIVE, *ADAPTED])
def test_the_file_is_the_one_that_the_command_line_writes(method, online, save, tiny_flux, tmp_path, comfy_idle):
    """Tensor for tensor; with the model not loaded, fully loaded, and unloaded again."""
    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    convert_file(tiny_flux, tmp_path / "cli.safetensors", QuantizeConfig(method=method))
    expected = contents(tmp_path / "cli.safetensors")
    patcher = online(method)
    save(tmp_path / "fresh.safetensors", patcher)
    assert contents(tmp_path / "fresh.safetensors") == expected
    comfy_idle.load_models_gpu([patcher])
    save(tmp_path / "loaded.safetensors", patcher)
    assert contents(tmp_path / "loaded.safetensors") == expected
    comfy_idle.unload_all_models()
    save(tmp_path / "unloaded.safetensors", patcher)
    assert (tmp_path / "unloaded.safetensors").read_bytes() == (tmp_path / "fresh.safetensors").read_bytes()


@pytest.mark.parametrize("method", NATIVE)
def test_comfyuis_own_loader_opens_it(method, online, save, stock_load, tmp_path, flux_output, assert_same):
    import torch

    patcher = online(method)
    save(tmp_path / "saved.safetensors", patcher)
    stock = stock_load(tmp_path / "saved.safetensors")
    assert_same(stock, patcher)
    assert torch.equal(flux_output(stock), flux_output(patcher))


@pytest.mark.parametrize("method", ["comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4", "bitsandbytes_nf4"])
def test_a_lora_is_saved_as_sampled(method, online, save, tmp_path, flux_output, comfy_idle, weights, assert_same):
    """From a model that is not loaded, and from one whose LoRA is baked in: the same file; the model is unchanged."""
    import torch

    patcher = online(method)
    before = weights(patcher)
    patched = patcher.clone()
    generator = torch.Generator().manual_seed(5)
    patched.add_patches({TARGET: ("diff", (torch.randn(256, 1280, generator=generator) * 0.1,))}, 1.0)
    with torch.inference_mode():
        save(tmp_path / "before.safetensors", patched)
        comfy_idle.load_models_gpu([patched], force_full_load=True)
        expected = flux_output(patched)
        save(tmp_path / "loaded.safetensors", patched)
        save(tmp_path / "base.safetensors", patcher)
    assert (tmp_path / "before.safetensors").read_bytes() == (tmp_path / "loaded.safetensors").read_bytes()
    comfy_idle.unload_all_models()
    assert_same(before, patcher)
    with torch.inference_mode():
        assert torch.equal(flux_output(online(path=tmp_path / "before.safetensors")), expected)
    assert contents(tmp_path / "base.safetensors") != contents(tmp_path / "before.safetensors")


def test_a_float_model_is_saved_too(stock_load, save, tiny_flux, tmp_path):
    save(tmp_path / "float.safetensors", stock_load(tiny_flux))
    saved, source = contents(tmp_path / "float.safetensors"), contents(tiny_flux)
    assert set(saved) == set(source)


def test_the_recipe_and_the_layers_are_in_the_file(online, save, tmp_path):
    import json

    from safetensors import safe_open

    save(tmp_path / "a.safetensors", online("bitsandbytes_nf4", exclude_modules=["img_mlp.0"]))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        manifest = json.loads(file.metadata()["quant_core"])
    assert manifest["recipe"] == {"method": "bitsandbytes_nf4", "exclude_modules": ["img_mlp.0"]}
    assert "single_blocks.0.linear1" in manifest["layers"][0]
    assert not [name for name in manifest["layers"][0] if name.endswith("img_mlp.0")]


def test_an_interrupt_leaves_nothing(online, save, tmp_path, comfy_idle):
    patcher = online()
    comfy_idle.interrupt_current_processing(True)
    with pytest.raises(comfy_idle.InterruptProcessingException):
        save(tmp_path / "cancelled.safetensors", patcher)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["float", "quantized", "dequantized"])
def test_what_the_file_says_of_the_model_is_kept(way, save, pack, make_tiny, stock_load, tmp_path, comfy_idle):
    """ComfyUI builds LTXV by an entry of the metadata; without it the same weights are another model."""
    import comfy.sd
    import torch

    from quant_core import QuantizeConfig

    rebuilding = importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".rebuilding")
    path = make_tiny.write("ltxv", tmp_path / "ltxv.safetensors")
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(path))
        if way != "float":
            model = rebuilding.quantize_model(model, QuantizeConfig(method="comfy_kitchen_fp8_w8a8"))
        if way == "dequantized":
            model = rebuilding.dequantize_model(model)
        expected = make_tiny.sample(model, "ltxv")
        save(tmp_path / "saved.safetensors", model, metadata={"workflow": "{}"})
        assert torch.equal(make_tiny.sample(stock_load(tmp_path / "saved.safetensors"), "ltxv"), expected)


@pytest.mark.parametrize(
    "marks",
    [set(), {"v_pred"}, {"v_pred", "ztsnr"}, {"edm_vpred.sigma_max", "edm_vpred.sigma_min"}, {"edm_mean", "edm_std"}],
)
def test_how_an_sdxl_model_predicts_is_kept(marks, save, pack, tmp_path):
    """ComfyUI knows by these tensors, and would sample noise without them."""
    import comfy.model_patcher
    import comfy.supported_models
    import safetensors.torch
    import torch

    config = comfy.supported_models.SDXL
    unet = {**config.unet_config, "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32}
    unet |= {"num_res_blocks": [1, 1, 1], "channel_mult": [1, 1, 1], "num_head_channels": 32, "context_dim": 16}
    unet |= {"transformer_depth": [0, 1, 0], "transformer_depth_output": [0, 0, 1, 1, 0, 0], "adm_in_channels": 8}
    unet |= {
        "transformer_depth_middle": 1,
        "num_classes": "sequential",
        "use_spatial_transformer": True,
        "legacy": False,
    }
    given = {name: torch.tensor(7.5) for name in marks}
    cpu = torch.device("cpu")
    model = config(unet).get_model(given, "", device=cpu)
    patcher = comfy.model_patcher.ModelPatcher(model, cpu, cpu)
    save(tmp_path / "model.safetensors", patcher)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    again = config(unet)
    assert again.model_type(saved) == model.model_type
    assert again.sampling_settings == pytest.approx(model.model_config.sampling_settings)
    assert marks <= set(saved)
    # In a full checkpoint they lie beside the diffusion model, whose names have a prefix.
    whole = {key if key in marks else f"model.diffusion_model.{key}": tensor for key, tensor in saved.items()}
    assert set(pack.detection.unwrap(whole, None)) == set(saved)
