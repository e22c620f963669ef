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
