"""What ComfyUI does with a loaded model: unload and load again, LoRA, merging, copies, torch.compile."""

from __future__ import annotations

import pytest

METHODS = [
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_mxfp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "comfy_kitchen_int4_convrot_w4a4",
    "comfy_kitchen_int4_w4a8",
]
TARGET = "diffusion_model.single_blocks.0.linear2.weight"


def lora_patch(scale: float) -> dict:
    """A full-rank difference for one layer, as a LoRA node adds it."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return {TARGET: ("diff", (torch.randn(256, 1280, generator=generator) * scale,))}


@pytest.mark.parametrize("method", METHODS)
def test_unloading_between_two_runs(method, online, flux_output, comfy_idle, weights, assert_same):
    """ComfyUI runs under inference mode and unloads outside it."""
    import torch

    patcher = online(method)
    with torch.inference_mode():
        first = flux_output(patcher)
    before = weights(patcher)
    comfy_idle.unload_all_models()
    with torch.inference_mode():
        second = flux_output(patcher)
    assert torch.equal(first, second)
    assert_same(before, patcher)


def test_a_model_loaded_outside_inference_mode_runs_inside_and_trains(pack, tiny_flux, flux_output, comfy_idle):
    """ComfyUI's LoRA training loads the model again, with inference mode switched off."""
    import torch

    from quant_core import QuantizeConfig

    patcher = pack.load(str(tiny_flux), QuantizeConfig(method="comfy_kitchen_int8_w8a8"))
    outside = flux_output(patcher)
    comfy_idle.unload_all_models()
    with torch.inference_mode():
        assert torch.equal(outside, flux_output(patcher))
    comfy_idle.unload_all_models()
    comfy_idle.load_models_gpu([patcher])
    layer = patcher.model.diffusion_model.single_blocks[0].linear1
    x = torch.randn(4, 256, requires_grad=True)
    layer(x).sum().backward()
    dense = layer.weight.dequantize().double()
    assert torch.allclose(x.grad.double(), dense.sum(0).expand(4, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_lora_is_applied_and_taken_off(
    method, online, flux_output, comfy_idle, tiny_flux, stock_load, weights, assert_same
):
    import torch

    patcher = online(method)
    plain, before = flux_output(patcher), weights(patcher)

    def patched(model):
        clone = model.clone()
        clone.add_patches(lora_patch(0.1), 1.0)
        return clone

    target = flux_output(patched(stock_load(tiny_flux)))
    with torch.inference_mode():
        with_lora = patched(patcher)
        output = flux_output(with_lora)
        assert (output - target).norm() < 0.5 * (plain - target).norm()
        assert with_lora.model_size() == patcher.model_size()
    comfy_idle.unload_all_models()
    with torch.inference_mode():
        assert torch.equal(plain, flux_output(patcher))
    assert_same(before, patcher)


def test_merging_two_quantized_models(online, flux_output, make_tiny, tmp_path, comfy_idle, stock_load):
    """As ComfyUI's merge nodes do it; int8 of the mean of two models against the float mean."""
    import safetensors.torch
    import torch

    first, second = make_tiny.state_dict("flux", seed=0), make_tiny.state_dict("flux", seed=1)
    mean = {key: ((first[key].float() + second[key].float()) / 2).contiguous() for key in first}
    safetensors.torch.save_file(mean, tmp_path / "mean.safetensors")
    target = flux_output(stock_load(tmp_path / "mean.safetensors"))

    with torch.inference_mode():
        merged = online().clone()
        other = online(path=make_tiny.write("flux", tmp_path / "second.safetensors", seed=1))
        for key, patch in other.get_key_patches("diffusion_model.").items():
            merged.add_patches({key: patch}, 0.5, 0.5)
        output = flux_output(merged)
    assert ((output - target).norm() / target.norm()).item() < 0.05


def test_a_second_copy_is_loaded_from_the_file(online, comfy_idle, assert_same):
    """For torch.compile without dynamic memory, for hooks and for several graphics cards."""
    patcher = online("comfy_kitchen_nvfp4_w4a4")
    copy = patcher.clone(force_deepcopy=True)
    assert copy.model is not patcher.model
    assert_same(patcher, copy)


@pytest.mark.parametrize("method", ["comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8", "comfy_kitchen_nvfp4_w4a4"])
def test_a_layer_compiles_into_one_graph(method, online):
    import torch

    layer = online(method).model.diffusion_model.single_blocks[0].linear1
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layer(x)
        torch.compiler.reset()
        actual = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert torch.equal(expected, actual)


def test_attributes_that_do_not_exist_are_missing(online):
    layer = online().model.diffusion_model.single_blocks[0].linear1
    assert not hasattr(layer, "weight_scale_2")
    assert not hasattr(layer, "weight_lowvram_function")
    assert not hasattr(layer, "input_scale")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = layer.no_such_name
