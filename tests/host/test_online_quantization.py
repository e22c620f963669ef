"""Quantizing while loading gives what ComfyUI's own loader makes of the file that quant_core writes."""

from __future__ import annotations

import pytest

# Method: the largest acceptable error of the tiny flux's output against the float model (measured: about half).
METHODS = {
    "comfy_kitchen_int8_w8a8": 0.02,
    "comfy_kitchen_fp8_w8a8": 0.05,
    "comfy_kitchen_fp8_e5m2_w8a8": 0.10,
    "comfy_kitchen_mxfp8_w8a8": 0.05,
    "comfy_kitchen_nvfp4_w4a4": 0.16,
    "comfy_kitchen_int4_convrot_w4a4": 0.30,
    "comfy_kitchen_int4_w4a8": 0.13,
}


def relative_error(reference, value) -> float:
    return ((value - reference).norm() / reference.norm()).item()


@pytest.fixture(scope="module")
def float_output(stock_load, tiny_flux, flux_output):
    return flux_output(stock_load(tiny_flux))


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_native_load_of_a_converted_file(
    method, online, stock_load, tiny_flux, tmp_path, flux_output, float_output, assert_same
):
    import torch

    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    converted = tmp_path / "converted.safetensors"
    convert_file(tiny_flux, converted, QuantizeConfig(method=method))
    native, quantized = stock_load(converted), online(method)

    assert_same(native, quantized)
    assert native.model_size() == quantized.model_size()
    output = flux_output(quantized)
    assert torch.equal(flux_output(native), output)
    assert 0 < relative_error(float_output, output) < METHODS[method]


def test_every_method_of_this_comfyui_is_tested(pack):
    assert {method for method in pack.quantizer.usable_methods() if pack.quantizer.is_native(method)} <= set(METHODS)


def test_the_blocks_are_quantized_and_the_rest_is_float(online):
    from comfy.quant_ops import QuantizedTensor

    linears = {name: m for name, m in online().model.diffusion_model.named_modules() if hasattr(m, "in_features")}
    quantized = {name for name, module in linears.items() if isinstance(module.weight, QuantizedTensor)}
    assert quantized == {name for name in linears if "_blocks." in name}


def test_a_full_checkpoint_gives_the_same_model(online, make_tiny, tmp_path, assert_same):
    prefixed = make_tiny.write("flux", tmp_path / "full.safetensors", prefix="model.diffusion_model.")
    assert_same(online(path=prefixed), online())


def test_diffusers_names_give_the_same_model(online, make_tiny, tmp_path, weights):
    """Its separate q, k and v are fused by ComfyUI while loading; quantizing comes after that."""
    import comfy.utils
    import safetensors.torch
    import torch

    tensors = make_tiny.state_dict("flux")
    renamed = {}
    for name, target in comfy.utils.flux_to_diffusers(make_tiny.CONFIGS["flux"][1], output_prefix="").items():
        if any(
            alias in name for alias in ("to_qkv_mlp_proj", "linear_in", "linear_out", "transformer_blocks.attn.to_out")
        ):
            continue  # A second name of a tensor, used by a later architecture.
        key, part, transform = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        if key in tensors:
            value = tensors[key] if part is None else tensors[key].narrow(*part)
            # The only transform swaps shift and scale, so it is its own inverse.
            renamed[name] = (value if transform is None else transform(value)).clone()
    assert "double_blocks.0.img_attn.qkv.weight" not in renamed
    path = tmp_path / "diffusers.safetensors"
    safetensors.torch.save_file(renamed, path)

    from_diffusers, native = weights(online(path=path)), weights(online())
    assert {k for k in native if k.endswith("comfy_quant")} == {k for k in from_diffusers if k.endswith("comfy_quant")}
    assert all(torch.equal(native[key], from_diffusers[key]) for key in native)


def test_another_architecture(online, stock_load, make_tiny, tmp_path, assert_same):
    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    source = make_tiny.write("wan", tmp_path / "tiny_wan.safetensors")
    convert_file(source, tmp_path / "wan_nvfp4.safetensors", QuantizeConfig(method="comfy_kitchen_nvfp4_w4a4"))
    assert_same(online("comfy_kitchen_nvfp4_w4a4", path=source), stock_load(tmp_path / "wan_nvfp4.safetensors"))


def test_excluded_layers_stay_float(online):
    import torch

    model = online(exclude_modules=["img_mlp.0", "single_blocks.1.linear1"]).model.diffusion_model
    assert type(model.double_blocks[0].img_mlp[0].weight.data) is torch.Tensor
    assert type(model.single_blocks[1].linear1.weight.data) is torch.Tensor
    assert type(model.single_blocks[0].linear1.weight.data) is not torch.Tensor


def test_a_quantized_file_is_loaded_as_it_is(online, stock_load, tiny_flux, tmp_path, caplog, assert_same):
    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    path = tmp_path / "fp8.safetensors"
    convert_file(tiny_flux, path, QuantizeConfig(method="comfy_kitchen_fp8_w8a8"))
    assert_same(online("comfy_kitchen_nvfp4_w4a4", path=path), stock_load(path))
    assert "fp8.safetensors is quantized already" in caplog.text


def test_an_old_scaled_fp8_file_is_loaded_as_comfyui_does(
    online, stock_load, make_tiny, tmp_path, flux_output, weights, assert_same
):
    """Such a file marks itself by one tensor, which ComfyUI translates only for loaders without own operations."""
    import safetensors.torch
    import torch

    tensors = make_tiny.state_dict("flux")
    for key in [key for key in tensors if "_blocks." in key and key.endswith(".weight") and tensors[key].ndim == 2]:
        scale = tensors[key].abs().max().float() / 448
        tensors[key] = (tensors[key].float() / scale).to(torch.float8_e4m3fn)
        tensors[key.removesuffix("weight") + "scale_weight"] = scale
    tensors["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    for prefix in ("", "model.diffusion_model."):
        path = tmp_path / f"scaled{len(prefix)}.safetensors"
        safetensors.torch.save_file({prefix + key: tensor for key, tensor in tensors.items()}, path)
        ours, native = online(path=path), stock_load(path)
        assert sum(key.endswith("comfy_quant") for key in weights(ours)) > 10
        assert_same(ours, native)
        assert torch.equal(flux_output(ours), flux_output(native))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_compute_dtype_can_be_chosen(dtype, online, flux_output):
    import torch

    patcher = online(dtype=getattr(torch, dtype))
    weight = patcher.model.diffusion_model.single_blocks[0].linear1.weight
    assert patcher.model.get_dtype_inference() == weight.dtype == getattr(torch, dtype)
    assert torch.isfinite(flux_output(patcher)).all()


def test_progress_counts_the_layers(online, weights):
    import comfy.utils

    seen = []
    comfy.utils.set_progress_bar_global_hook(lambda value, total, preview, node_id=None: seen.append((value, total)))
    try:
        patcher = online()
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    count = sum(key.endswith("comfy_quant") for key in weights(patcher))
    assert seen[0] == (1, count)
    assert seen[-1] == (count, count)


def test_cancelling_stops_the_load(online, comfy_idle):
    comfy_idle.interrupt_current_processing(True)
    with pytest.raises(comfy_idle.InterruptProcessingException):
        online()
