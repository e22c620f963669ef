"""Quantizing a model that is in the graph already, and turning a quantized one back into float."""

from __future__ import annotations

import importlib

import pytest

TARGET = "diffusion_model.single_blocks.0.linear2.weight"


@pytest.fixture
def rebuilding(pack):
    return importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".rebuilding")


@pytest.fixture
def float_model(tiny_flux, make_tiny):
    """A function that loads the tiny flux with ComfyUI's own loader, in the dtype of its file."""
    import comfy.sd
    import torch

    def load():
        with torch.inference_mode():
            patcher = comfy.sd.load_diffusion_model(str(tiny_flux), model_options={"dtype": torch.bfloat16})
        patcher.model.manual_cast_dtype = torch.bfloat16
        return patcher

    return load


def recipe(method, **options):
    from quant_core import QuantizeConfig

    return QuantizeConfig(method=method, **options)


def lora(scale=0.1) -> dict:
    import torch

    generator = torch.Generator().manual_seed(5)
    return {TARGET: ("diff", (torch.randn(256, 1280, generator=generator) * scale,))}


@pytest.mark.parametrize("method", ["comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4", "bitsandbytes_nf4"])
def test_it_is_the_model_that_loading_quantized_gives(method, rebuilding, float_model, online, assert_same, comfy_idle):
    import torch

    source = float_model()
    with torch.inference_mode():
        made = rebuilding.quantize_model(source, recipe(method))
    assert_same(made, online(method, dtype=torch.bfloat16))
    assert made.model is not source.model
    assert type(source.model.diffusion_model.single_blocks[0].linear1.weight.data) is torch.Tensor


def test_patches_upstream_are_added_in_float(rebuilding, float_model, make_tiny, tmp_path, online, assert_same):
    """The same bytes as a file that holds the patched weights; loaded or not."""
    import comfy.model_management
    import safetensors.torch
    import torch

    tensors = make_tiny.state_dict("flux")
    name = TARGET.removeprefix("diffusion_model.")
    tensors[name] = (tensors[name].float() + 0.5 * lora()[TARGET][1][0]).to(torch.bfloat16)
    safetensors.torch.save_file(tensors, tmp_path / "patched.safetensors")
    expected = online("comfy_kitchen_nvfp4_w4a4", path=tmp_path / "patched.safetensors", dtype=torch.bfloat16)
    patched = float_model().clone()
    patched.add_patches(lora(), 0.5)
    with torch.inference_mode():
        assert_same(rebuilding.quantize_model(patched, recipe("comfy_kitchen_nvfp4_w4a4")), expected)
        comfy.model_management.load_models_gpu([patched], force_full_load=True)
        made = rebuilding.quantize_model(patched, recipe("comfy_kitchen_nvfp4_w4a4"))
        assert_same(made, expected)
        assert not made.patches


def test_what_is_no_weight_is_carried_over(rebuilding, float_model, flux_output, comfy_idle):
    import torch
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    source = ModelSamplingFlux().patch(float_model(), 1.15, 0.5, 512, 512)[0]
    source.model_options["transformer_options"]["marker"] = 7
    with torch.inference_mode():
        flux_output(source)  # the object patch is applied now
        made = rebuilding.quantize_model(source, recipe("comfy_kitchen_int8_w8a8"))
        assert made.get_model_object("model_sampling") is source.get_model_object("model_sampling")
        assert made.model_options["transformer_options"]["marker"] == 7
        comfy_idle.unload_all_models()
        assert made.model.model_sampling is source.model.model_sampling
        assert torch.isfinite(flux_output(made)).all()


def test_a_copy_of_it_can_be_made(rebuilding, float_model, assert_same):
    """For torch.compile without dynamic memory, and for several graphics cards."""
    import torch

    patched = float_model().clone()
    patched.add_patches(lora(), 1.0)
    with torch.inference_mode():
        made = rebuilding.quantize_model(patched, recipe("comfy_kitchen_int8_w8a8"))
        copy = made.clone(force_deepcopy=True)
    assert copy.model is not made.model
    assert_same(made, copy)


def test_quantizing_a_quantized_model_again(rebuilding, online, caplog):
    import torch
    from comfy.quant_ops import QuantizedTensor

    with torch.inference_mode():
        made = rebuilding.quantize_model(online("comfy_kitchen_fp8_w8a8"), recipe("bitsandbytes_nf4"))
    weight = made.model.diffusion_model.single_blocks[0].linear1.weight
    assert isinstance(weight, QuantizedTensor) and weight._params.spec.method == "bitsandbytes_nf4"
    assert "quantized already and are quantized again" in caplog.text


def test_a_bypass_lora_upstream_is_not_lost_silently(rebuilding, float_model):
    from comfy.patcher_extension import PatcherInjection

    from quant_core import CheckpointError

    source = float_model()
    source.set_injections("bypass_lora", [PatcherInjection(inject=lambda _: None, eject=lambda _: None)])
    with pytest.raises(CheckpointError, match="bypass LoRA"):
        rebuilding.quantize_model(source, recipe("comfy_kitchen_int8_w8a8"))


@pytest.mark.parametrize("method", ["comfy_kitchen_nvfp4_w4a4", "bitsandbytes_nf4"])
def test_dequantizing_gives_the_same_outputs(method, rebuilding, online, flux_output, comfy_idle):
    """A float model with the weights that the quantized one stands for; formats that quantize activations differ."""
    import torch
    from comfy.quant_ops import QuantizedTensor

    quantized = online(method)
    with torch.inference_mode():
        made = rebuilding.dequantize_model(quantized)
        for name, module in quantized.model.diffusion_model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, QuantizedTensor):
                other = made.model.diffusion_model.get_submodule(name).weight
                assert torch.equal(weight.dequantize(), other) and not isinstance(other.data, QuantizedTensor)
        expected, actual = flux_output(quantized), flux_output(made)
    assert ((actual - expected).norm() / expected.norm()).item() < 1e-5
