"""Every method, every promise: one test, parametrized over both.

What differs from method to method, or by hardware, is the table METHODS; nothing is skipped.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from tiny_models import BLOCK_LINEARS, TinyModel, relative_error, tensor_bytes, tiny_model

from quant_core import (
    QUANT_BACKENDS,
    QUANT_METHODS,
    MixedQuantizeConfig,
    QuantizeConfig,
    backends,
    check_backend_contract,
    check_differentiable,
    load_quantized_model,
    save_quantized_model,
)

# The surroundings of the blocks stay in float, as they do in a diffusion model.
EXCLUDE = ["proj_in", "head"]


@dataclass(frozen=True)
class Expected:
    """What holds for a method.

    cpu: how it runs on a CPU. bits: stored bits per weight, at most. error: relative weight error on Gaussian
    weights, at most: the format's figure (docs/methods.md) with 10 % for the random draw.
    activation: relative difference between the forward and the dequantized weight's, at most (quantized activations).
    """

    cpu: str
    bits: float
    error: float
    activation: float = 0.004  # rounding of bfloat16


METHODS = {
    "bitsandbytes_nf4": Expected("emulated", 4.3, 0.105),
    "bitsandbytes_fp4": Expected("emulated", 4.3, 0.140),
    "torchao_int8_w8a16": Expected("native", 8.2, 0.0075, activation=0.006),
    "torchao_fp8_w8a16": Expected("emulated", 8.2, 0.030),
    "torchao_int4_w4a16": Expected("emulated", 4.6, 0.125),
    "torchao_nvfp4_w4a16": Expected("emulated", 4.6, 0.105),
    "torchao_int8_w8a8": Expected("native", 8.2, 0.0075, activation=0.02),
    "torchao_fp8_w8a8": Expected("emulated", 8.2, 0.030),
    "torchao_int4_w4a8": Expected("emulated", 4.6, 0.140),
    "torchao_mxfp8_w8a8": Expected("emulated", 8.6, 0.035),
    "torchao_mxfp4_w4a4": Expected("emulated", 4.6, 0.135),
    "torchao_nvfp4_w4a4": Expected("emulated", 4.6, 0.105),
    "comfy_kitchen_int8_w8a8": Expected("native", 8.4, 0.0085, activation=0.02),
    "comfy_kitchen_fp8_w8a8": Expected("emulated", 8.1, 0.030),
    "comfy_kitchen_fp8_e5m2_w8a8": Expected("emulated", 8.1, 0.060),
    "comfy_kitchen_mxfp8_w8a8": Expected("emulated", 8.6, 0.035),
    "comfy_kitchen_nvfp4_w4a4": Expected("emulated", 4.6, 0.105),
    "comfy_kitchen_int4_convrot_w4a4": Expected("emulated", 4.3, 0.150),
    "comfy_kitchen_int4_w4a8": Expected("emulated", 4.8, 0.085),
}


def test_table_covers_every_built_in_method():
    backends.load_all_backends()
    built_in = {n for n, spec in QUANT_METHODS.items() if spec.backend in ("bitsandbytes", "torchao", "comfy_kitchen")}
    assert set(METHODS) == built_in


def recipe(method, **kwargs):
    return QuantizeConfig(method=method, exclude_modules=EXCLUDE, **kwargs)


def quantized(method, dtype=torch.bfloat16):
    model = tiny_model(dtype)
    assert recipe(method).quantize_model(model) == BLOCK_LINEARS
    return model


def packed_bytes(method, model):
    """The stored bytes of the quantized layers, without biases (which follow the model's dtype)."""
    tensors, _ = recipe(method).flatten_state_dict(model.state_dict())
    return {
        key: tensor_bytes(value)
        for key, value in tensors.items()
        if any(key.startswith(name + ".") for name in BLOCK_LINEARS) and not key.endswith(".bias")
    }


def x_of(model, rows=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 64, generator=generator).to(model.head.bias.dtype)


# ---------------------------------------------------------------- the promises


def runs_as_expected(method, tmp_path):
    support = recipe(method).backend.support("cpu")
    assert support.kind == METHODS[method].cpu
    assert (support.kind == "native") or support.reason


def weight_error_is_the_formats(method, tmp_path):
    rows = recipe(method).measure_quantization_error(tiny_model(), verbose=False)
    assert [r["name"] for r in rows] and len(rows) == len(BLOCK_LINEARS)
    float_model = tiny_model()
    for row in rows:
        assert row["relative_error"] <= METHODS[method].error
        assert row["bytes_after"] * 8 <= METHODS[method].bits * row["shape"][0] * row["shape"][1]
        # The same figures, from float64 arithmetic on the dequantized weight.
        layer = recipe(method).backend.create_quantized_linear(float_model.get_submodule(row["name"]))
        weight = float_model.get_submodule(row["name"]).weight
        restored = recipe(method).backend.dequantize_to_linear(layer, torch.float32).weight
        assert row["relative_error"] == pytest.approx(relative_error(weight, restored), rel=1e-9)
        assert row["max_abs"] == pytest.approx((restored.double() - weight.double()).abs().max().item(), rel=1e-9)


def forward_agrees_with_dequantized_weight(method, tmp_path):
    model = quantized(method)
    for name in BLOCK_LINEARS:
        layer = model.get_submodule(name).eval()
        x = torch.randn(7, layer.in_features, dtype=torch.bfloat16)
        weight = recipe(method).backend.dequantize_to_linear(copy.deepcopy(layer), torch.float32).weight
        bias = None if layer.bias is None else layer.bias.float()
        expected = torch.nn.functional.linear(x.float(), weight, bias)
        with torch.no_grad():
            out = layer(x)
        assert out.dtype == torch.bfloat16
        assert relative_error(expected, out) <= METHODS[method].activation
        with torch.inference_mode():
            assert torch.equal(layer(x), out)
        assert torch.equal(layer(x.requires_grad_(True)).detach(), out)


def forward_changes_no_stored_byte(method, tmp_path):
    model = quantized(method).eval()
    before = packed_bytes(method, model)
    with torch.inference_mode():
        model(x_of(model))
    with torch.no_grad():
        model(x_of(model))
    model.train()(x_of(model)).sum().backward()
    assert packed_bytes(method, model) == before


def reload_is_bit_equal(method, tmp_path):
    model = quantized(method)
    path = tmp_path / "m.safetensors"
    file_hash = save_quantized_model(model, recipe(method), path)
    loaded = tiny_model(seed=5)
    load_quantized_model(loaded, path)
    assert packed_bytes(method, loaded) == packed_bytes(method, model)
    with torch.no_grad():
        assert torch.equal(loaded(x_of(model)), model(x_of(model)))
    again = save_quantized_model(loaded, recipe(method), tmp_path / "again.safetensors")
    assert (again, again.content) == (file_hash, file_hash.content)


def documented_load_flow(method, tmp_path):
    """prepare, unflatten, load_state_dict(assign=True), and one layer's tensors alone."""
    model = quantized(method)
    tensors, metadata = recipe(method).flatten_state_dict(model.state_dict())
    tensors = {key: value.clone() for key, value in tensors.items()}
    config = recipe(method, load_prequantized=True)
    loaded = tiny_model(seed=5)
    config.prepare_for_prequantized_load(loaded, compute_dtype=torch.bfloat16)
    loaded.load_state_dict(config.unflatten_state_dict(tensors, metadata), assign=True)
    assert packed_bytes(method, loaded) == packed_bytes(method, model)

    name = "blocks.1.down"
    own = {key: value for key, value in tensors.items() if key.startswith(name + ".")}
    shell = config.build_quantized_shell(model.get_submodule(name), torch.bfloat16, layer_name=name)
    state = config.unflatten_state_dict(own, metadata)
    shell.load_state_dict({key.removeprefix(name + "."): value for key, value in state.items()}, assign=True)
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(shell(x), model.get_submodule(name)(x))


def load_without_assign(method, tmp_path):
    model, loaded = quantized(method), quantized(method)
    with torch.no_grad():
        for layer in (m for n, m in model.named_modules() if n in BLOCK_LINEARS):
            if layer.bias is not None:
                layer.bias.add_(1)
    loaded.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(x_of(model)), model(x_of(model)))


def dequantize_once(method, tmp_path):
    model = quantized(method)
    config = recipe(method, mode="dequant_once")
    weights = {
        n: recipe(method).backend.dequantize_to_linear(copy.deepcopy(model.get_submodule(n)), torch.float32).weight
        for n in BLOCK_LINEARS
    }
    assert config.dequantize_model(model, compute_dtype=torch.float32) == BLOCK_LINEARS
    for name, weight in weights.items():
        assert type(model.get_submodule(name)) is torch.nn.Linear
        assert torch.equal(model.get_submodule(name).weight, weight)


def gradients_reach_the_input(method, tmp_path):
    model = quantized(method, torch.float32)
    for name in BLOCK_LINEARS:
        layer = model.get_submodule(name)
        x = torch.randn(5, layer.in_features, requires_grad=True)
        upstream = torch.randn(5, layer.out_features)
        layer(x).backward(upstream)
        weight = recipe(method).backend.dequantize_to_linear(copy.deepcopy(layer), torch.float64).weight
        assert relative_error(upstream.double() @ weight, x.grad) < 2e-3
        assert all(p.grad is None for p in layer.parameters())
        assert check_differentiable(copy.deepcopy(layer), verbose=False)


def casts_and_copies_change_no_stored_byte(method, tmp_path):
    model = quantized(method)
    before = packed_bytes(method, model)
    casts = {
        "to(float32)": lambda m: m.to(torch.float32),
        "half": lambda m: m.half(),
        "float": lambda m: m.float(),
        "double": lambda m: m.double(),
        "bfloat16": lambda m: m.bfloat16(),
        "_apply": lambda m: m._apply(lambda t: t.to(torch.float16) if t.is_floating_point() else t),
        "deepcopy": copy.deepcopy,
    }
    for cast, apply in casts.items():
        changed = apply(copy.deepcopy(model))
        assert packed_bytes(method, changed) == before, cast
        out = changed(x_of(changed))
        assert bool(torch.isfinite(out).all()), cast
        assert out.dtype == changed.head.bias.dtype


def every_source_dtype(method, tmp_path):
    for dtype in (torch.float16, torch.float32, torch.float64):
        model = quantized(method, dtype)
        reference = tiny_model(dtype)
        out = model(x_of(model))
        assert out.dtype == dtype
        assert relative_error(reference(x_of(model)), out) < max(4 * METHODS[method].error, 0.03)


def shell_is_the_formats_shape(method, tmp_path):
    model = quantized(method)
    for name in BLOCK_LINEARS:
        layer = model.get_submodule(name)
        shell = recipe(method).backend.create_quantized_linear_shell(tiny_model().get_submodule(name), torch.bfloat16)
        assert all(t.is_meta for t in [*shell.parameters(), *shell.buffers()])
        flat = [
            recipe(method).backend.flatten_state_dict({f"l.{k}": v for k, v in m.state_dict().items()})
            for m in (shell, layer)
        ]
        shapes = [{k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()} for tensors, _ in flat]
        assert shapes[0] == shapes[1]
        assert flat[0][1] == flat[1][1]


def zeros_and_empty_batches_are_finite(method, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()
        model.blocks[0].up.bias.zero_()
        model.blocks[1].up.weight[:128].zero_()
        model.blocks[1].down.weight[:, :64].zero_()
    recipe(method).quantize_model(model)
    restored = recipe(method).backend.dequantize_to_linear(copy.deepcopy(model.blocks[0].up), torch.float32)
    assert not bool(restored.weight.any())
    half = recipe(method).backend.dequantize_to_linear(copy.deepcopy(model.blocks[1].up), torch.float32)
    assert not bool(half.weight[:128].any())
    with torch.no_grad():
        assert not bool(model.blocks[0].up(torch.randn(3, 256, dtype=torch.bfloat16)).any())
        zero = model.blocks[1].up(torch.zeros(3, 256, dtype=torch.bfloat16))
        assert torch.equal(zero, model.blocks[1].up.bias.to(torch.bfloat16).expand(3, -1))
        assert bool(torch.isfinite(model(x_of(model))).all())
        assert model(x_of(model, rows=0)).shape == (0, 32)
        assert model.blocks[0].up(torch.zeros(2, 0, 256, dtype=torch.bfloat16)).shape == (2, 0, 512)
    x = torch.zeros(0, 256, dtype=torch.bfloat16, requires_grad=True)
    model.blocks[0].up(x).sum().backward()
    assert x.grad.shape == (0, 256)


def leading_dimensions_and_wrong_widths(method, tmp_path):
    layer = quantized(method).blocks[0].up
    x = torch.randn(2, 3, 5, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.reshape(30, 256)).reshape(2, 3, 5, 512))
        assert layer(x[0, 0, 0]).shape == (512,)
    with pytest.raises(ValueError, match=r"expects inputs \[..., 256\], got \[4, 255\]"):
        layer(torch.randn(4, 255, dtype=torch.bfloat16))


def contract_check_passes(method, tmp_path):
    spec = QUANT_METHODS[method]
    backend = QUANT_BACKENDS[spec.backend](spec.config_factory({}))
    assert check_backend_contract(backend, compute_device="cpu", verbose=False)


def mixes_with_every_other_backend(method, tmp_path):
    for partner in ("bitsandbytes_nf4", "torchao_int8_w8a16", "torchao_nvfp4_w4a16", "comfy_kitchen_int8_w8a8"):
        if partner == method:
            continue
        mixed = MixedQuantizeConfig(
            configs=[
                QuantizeConfig(method=method, target_modules=["up"]),
                QuantizeConfig(method=partner, target_modules=["down"]),
            ]
        )
        model = tiny_model()
        mixed.quantize_model(model)
        path = tmp_path / f"{partner}.safetensors"
        save_quantized_model(model, mixed, path)
        with torch.device("meta"):
            loaded = TinyModel().to(torch.bfloat16)
        assert load_quantized_model(loaded, path).to_dict() == mixed.to_dict()
        with torch.no_grad():
            assert torch.equal(loaded(x_of(model)), model(x_of(model)))


def a_float_file_is_refused(method, tmp_path):
    config = recipe(method, load_prequantized=True)
    loaded = tiny_model()
    config.prepare_for_prequantized_load(loaded)
    with pytest.raises((ValueError, RuntimeError), match=r"blocks.0.(up|down)"):
        loaded.load_state_dict(config.unflatten_state_dict(tiny_model().state_dict(), {}), assign=True)


def large_values_stay_finite(method, tmp_path):
    """The largest float16 weights, small ones, and activations whose sums pass the largest float16 halfway."""
    for scale in (65504.0, 1e-3, 1e-5):
        model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False)).half()
        with torch.no_grad():
            model[0].weight.copy_((torch.rand(256, 256) * 2 - 1) * scale)
            model[0].weight[0, 0] = scale
        weight = model[0].weight.detach().double()
        config = QuantizeConfig(method=method)
        config.quantize_model(model)
        restored = model[0].dequantize_weight(torch.float16)
        assert bool(torch.isfinite(restored).all()), scale
        assert relative_error(weight, restored) < 2 * METHODS[method].error, scale
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 256)).half()
    x = (torch.randn(8, 1024) * 50).half()
    reference = model(x).double()
    QuantizeConfig(method=method).quantize_model(model)
    with torch.no_grad():
        assert relative_error(reference, model(x)) < 3 * METHODS[method].error


def another_exclude_list_is_refused(method, tmp_path):
    tensors, metadata = recipe(method).flatten_state_dict(quantized(method).state_dict())
    config = QuantizeConfig(method=method, exclude_modules=[*EXCLUDE, "1.down"], load_prequantized=True)
    loaded = tiny_model()
    config.prepare_for_prequantized_load(loaded)
    with pytest.raises((ValueError, RuntimeError), match="blocks.1.down"):
        loaded.load_state_dict(config.unflatten_state_dict(tensors, metadata), assign=True)


PROMISES = [
    runs_as_expected,
    weight_error_is_the_formats,
    forward_agrees_with_dequantized_weight,
    forward_changes_no_stored_byte,
    reload_is_bit_equal,
    documented_load_flow,
    load_without_assign,
    dequantize_once,
    gradients_reach_the_input,
    casts_and_copies_change_no_stored_byte,
    every_source_dtype,
    shell_is_the_formats_shape,
    zeros_and_empty_batches_are_finite,
    leading_dimensions_and_wrong_widths,
    contract_check_passes,
    mixes_with_every_other_backend,
    a_float_file_is_refused,
    large_values_stay_finite,
    another_exclude_list_is_refused,
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_method_keeps(method, promise, tmp_path):
    promise(method, tmp_path)
