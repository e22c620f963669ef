"""The torchao backend: options, the packed weights, and what a layer computes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

import quant_core
from quant_core import QuantizationError, QuantizeConfig
from quant_core.constraints import violations

METHODS = [
    f"torchao_{name}"
    for name in (
        "int8_w8a16",
        "int8_w8a8",
        "fp8_w8a16",
        "fp8_w8a8",
        "int4_w4a16",
        "int4_w4a8",
        "nvfp4_w4a16",
        "nvfp4_w4a4",
        "mxfp8_w8a8",
        "mxfp4_w4a4",
    )
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def make_backend(method, **options):
    return QuantizeConfig(method=method, backend_config_kwargs=options).backend


def make_linear(in_features=256, out_features=48, dtype=torch.bfloat16, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(out_features, in_features, generator=generator) * 0.05)
        if bias:
            linear.bias.copy_(torch.randn(out_features, generator=generator) * 0.05)
    return linear.to(dtype).requires_grad_(False)


def raw(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def packed_bytes(layer):
    return {key: raw(tensor).clone() for key, tensor in layer.packed_state().items()}


def assert_same_bytes(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


def relative_error(value, truth):
    return float((value.double() - truth.double()).norm() / truth.double().norm())


# ------------------------------------------------------------------ the formats, decoded by hand in float64


def unswizzle(scale, rows, columns):
    """Scales of cuBLAS's 128 x 4 tiles, element by element by the published offset formula."""
    tile_columns = -(-columns // 4)
    r = torch.arange(rows).unsqueeze(1)
    c = torch.arange(columns).unsqueeze(0)
    offset = ((r // 128) * tile_columns + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    return scale.reshape(-1).view(torch.uint8)[offset]


def e4m3(codes):
    codes = codes.view(torch.uint8).to(torch.int64)
    sign, exponent, mantissa = 1 - 2 * (codes >> 7), codes >> 3 & 15, codes & 7
    normal = (1 + mantissa.double() / 8) * 2.0 ** (exponent.double() - 7)
    return sign * torch.where(exponent == 0, mantissa.double() / 8 * 2.0**-6, normal)


def e2m1(qdata):
    codes = torch.stack((qdata & 15, qdata >> 4), dim=-1).flatten(1).to(torch.int64)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes & 7]
    return magnitude * (1 - 2 * (codes >> 3))


def decode(layer):
    rows, columns = layer.out_features, layer.in_features
    qdata, scale = layer.weight_qdata, layer.weight_scale
    if "int8" in layer.scheme.method:
        return qdata.double() * scale.double().repeat_interleave(columns // scale.shape[1], dim=1)
    if "mxfp" in layer.scheme.method:
        exponents = unswizzle(scale, rows, columns // 32).double() - 127
        elements = e4m3(qdata) if "mxfp8" in layer.scheme.method else e2m1(qdata)
        return elements * (2.0**exponents).repeat_interleave(32, dim=1)
    if "nvfp4" in layer.scheme.method:
        scales = e4m3(unswizzle(scale, rows, columns // 16)) * layer.weight_per_tensor_scale.double()
        return e2m1(qdata) * scales.repeat_interleave(16, dim=1)
    if "fp8" in layer.scheme.method:
        return e4m3(qdata) * scale.double()
    nibbles = torch.stack((qdata.view(torch.uint8) & 15, qdata.view(torch.uint8) >> 4), dim=-1).flatten(1)
    codes = ((nibbles.to(torch.int64) + 8) % 16 - 8).double()
    group = columns // scale.shape[0]
    return codes * scale.double().t().repeat_interleave(
        group, 1
    ) + layer.weight_zero_point.double().t().repeat_interleave(group, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_dequantized_weight_is_the_formula(method, dtype):
    linear = make_linear(dtype=dtype, out_features=160)  # more than one tile of 128 rows
    layer = make_backend(method).create_quantized_linear(linear)
    assert relative_error(layer.dequantize_weight(torch.float64), decode(layer)) < 1e-7
    # A uniform quantizer's step / sqrt(12) for a normal row of 256 (absmax about 3 sigma), some margin added.
    limit = {"int8_": 0.009, "fp8_w": 0.03, "mxfp8": 0.03, "nvfp4": 0.11, "mxfp4": 0.14, "int4_": 0.14}
    assert relative_error(decode(layer), linear.weight) < limit[method.removeprefix("torchao_")[:5]]
    assert layer.compute_dtype == dtype
    assert layer.bias.dtype == dtype


# ------------------------------------------------------------------ bit-equal with torchao's own transform


def assert_same_torchao_tensor(layer, reference):
    from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder as Encoder

    ours = layer.state_dict()["weight"]
    assert type(ours) is type(reference)
    assert json.dumps(ours, cls=Encoder) == json.dumps(reference, cls=Encoder)
    for name in reference.__tensor_flatten__()[0]:
        assert torch.equal(raw(getattr(ours, name)), raw(getattr(reference, name))), name


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("torchao_int8_w8a16", {}),
        ("torchao_int8_w8a16", {"granularity": "per_tensor"}),
        ("torchao_int8_w8a16", {"granularity": "per_group(32)"}),
        ("torchao_int8_w8a8", {}),
        ("torchao_int8_w8a8", {"act_mapping_type": "asymmetric", "reduce_range": True}),
        ("torchao_int8_w8a8", {"granularity": ["per_row", "per_tensor"]}),
        ("torchao_fp8_w8a16", {}),
        ("torchao_fp8_w8a16", {"weight_dtype": "float8_e5m2", "granularity": "per_tensor"}),
        ("torchao_fp8_w8a16", {"granularity": "per_group(64)"}),
        ("torchao_nvfp4_w4a16", {}),
        ("torchao_nvfp4_w4a16", {"use_dynamic_per_tensor_scale": False}),
        ("torchao_mxfp8_w8a8", {}),
        ("torchao_mxfp8_w8a8", {"scaling_mode": "floor", "kernel_preference": "emulated"}),
        ("torchao_mxfp4_w4a4", {}),
        ("torchao_mxfp4_w4a4", {"scaling_mode": "even"}),
    ],
)
def test_same_bytes_as_torchao(method, options):
    backend = make_backend(method, **options)
    reference = make_linear()
    quantize_(reference, backend.config)
    layer = backend.create_quantized_linear(make_linear())
    assert_same_torchao_tensor(layer, reference.weight)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    if backend.support("cpu").kind == "native":
        assert torch.equal(layer(x), reference(x))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("torchao_fp8_w8a8", {}),
        ("torchao_fp8_w8a8", {"granularity": "per_row", "activation_value_ub": 100.0}),
        ("torchao_nvfp4_w4a4", {}),
    ],
)
def test_same_bytes_as_torchao_without_its_hardware_check(method, options, monkeypatch):
    from torchao.prototype.mx_formats import inference_workflow
    from torchao.quantization import quant_api

    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularities: None)
    monkeypatch.setattr(inference_workflow, "is_sm_at_least_100", lambda: True)
    backend = make_backend(method, **options)
    reference = make_linear()
    quantize_(reference, backend.config)
    assert_same_torchao_tensor(backend.create_quantized_linear(make_linear()), reference.weight)


def test_w4a4_weight_is_that_of_its_weight_only_twin():
    twins = [make_backend(m).create_quantized_linear(make_linear()) for m in METHODS if "nvfp4" in m]
    assert_same_bytes(packed_bytes(twins[0]), packed_bytes(twins[1]))


def test_int4_is_the_arithmetic_of_torchaos_references():
    from torchao.prototype.gptq import api as gptq
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import Int4WeightFakeQuantizer

    linear = make_linear(dtype=torch.float32)
    layer = make_backend("torchao_int4_w4a16").create_quantized_linear(linear)
    scale, zero_point = layer.weight_scale, layer.weight_zero_point
    codes = gptq._int4_row_quantize_zp_precomputed_qparams(linear.weight, scale, zero_point, 128)
    nibbles = torch.stack((layer.weight_qdata << 4 >> 4, layer.weight_qdata >> 4), dim=-1).flatten(1)
    # Away from ties, where the reference's own rounding of (min + 8 s) - 8 s decides.
    assert (codes != nibbles).float().mean() < 1e-3
    reference = gptq._int4_row_dequantize_zp(nibbles, scale, zero_point, 128)
    torch.testing.assert_close(layer.dequantize_weight(torch.float32), reference, rtol=0, atol=1e-6)
    fake = Int4WeightFakeQuantizer(Int4WeightFakeQuantizeConfig(group_size=128, activation_dtype=torch.bfloat16))
    torch.testing.assert_close(layer.dequantize_weight(torch.float32), fake(linear.weight), rtol=0, atol=1e-6)
    symmetric = make_backend("torchao_int4_w4a8").create_quantized_linear(linear)
    groups = linear.weight.view(48, 2, 128)
    expected = (groups.abs().amax(-1) / 8).t()
    torch.testing.assert_close(symmetric.weight_scale, expected, rtol=1e-6, atol=0)
    assert not symmetric.weight_zero_point.any()


# ------------------------------------------------------------------ a layer


@pytest.mark.parametrize("method", METHODS)
def test_casts_copies_and_forward_leave_the_bytes(method):
    linear = make_linear()
    layer = make_backend(method).create_quantized_linear(linear)
    before = packed_bytes(layer)
    metadata = make_backend(method).flatten_state_dict({f"a.{k}": v for k, v in layer.state_dict().items()})[1]
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1))
    truth = nn.functional.linear(x.double(), decode(layer), linear.bias.double())
    for cast in (lambda m: m, copy.deepcopy, nn.Module.half, nn.Module.float, nn.Module.double, nn.Module.bfloat16):
        layer = cast(layer)
        assert layer.weight.dtype == layer.compute_dtype or "int4" in method
        out = layer(x.to(layer.compute_dtype))
        assert out.dtype == layer.compute_dtype
        assert out.shape == (2, 3, 48)
        assert relative_error(out, truth) < (0.012 if method.endswith("int8_w8a8") else 0.007)
        assert_same_bytes(packed_bytes(layer), before)
    after = make_backend(method).flatten_state_dict({f"a.{k}": v for k, v in layer.state_dict().items()})[1]
    assert after == metadata
    assert layer(x[:, :0]).shape == (2, 0, 48)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_that_of_the_dequantized_weight(method):
    layer = make_backend(method).create_quantized_linear(make_linear()).float()
    x = torch.randn(7, 256, requires_grad=True)
    grad = torch.randn(7, 48)
    layer(x).backward(grad)
    assert relative_error(x.grad, grad.double() @ decode(layer)) < 1e-6
    quant_core.check_differentiable(layer)


@pytest.mark.parametrize("method", METHODS)
def test_backend_contract(method):
    assert make_backend(method).capabilities() == {
        "is_serializable": True,
        "is_differentiable": True,
        "is_compileable": method.endswith("a16"),
        "requires_calibration": False,
    }
    quant_core.check_backend_contract(make_backend(method), compute_device="cpu")


@pytest.mark.parametrize("method", METHODS)
def test_compiles(method):
    fullgraph = make_backend(method).capabilities()["is_compileable"]
    layer = make_backend(method).create_quantized_linear(make_linear())
    x = torch.randn(3, 256).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=fullgraph)
        assert torch.equal(compiled(x), layer(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_zeros(method, dtype):
    linear = make_linear(dtype=dtype)
    linear.weight[3] = 0
    layer = make_backend(method).create_quantized_linear(linear)
    assert not layer.dequantize_weight()[3].any()
    assert layer.dequantize_weight(torch.float32).isfinite().all()
    torch.testing.assert_close(layer(torch.zeros(2, 256, dtype=dtype)), linear.bias.expand(2, -1))
    linear.weight.zero_()
    layer = make_backend(method).create_quantized_linear(linear)
    assert not layer.dequantize_weight().any()
    torch.testing.assert_close(layer(torch.ones(2, 256, dtype=dtype)), linear.bias.expand(2, -1))


@pytest.mark.parametrize("method", METHODS)
def test_tiny_and_broken_weights(method):
    linear = make_linear(dtype=torch.float32)
    linear.weight *= 1e-36
    assert make_backend(method).create_quantized_linear(linear).dequantize_weight().isfinite().all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        linear.weight[5, 7] = bad
        with pytest.raises(QuantizationError, match="NaN or infinite"):
            make_backend(method).create_quantized_linear(linear)


@pytest.mark.parametrize(
    ("method", "options", "fits", "refused"),
    [
        ("int8_w8a16", {}, [(2, 1), (3, 5)], [(1, 4)]),
        ("int8_w8a16", {"group_size": 8}, [(8, 1), (24, 3)], [(20, 4)]),
        ("int8_w8a8", {}, [(2, 1), (5, 3)], [(1, 4)]),
        ("fp8_w8a16", {}, [(2, 1), (3, 5)], [(1, 4)]),
        ("fp8_w8a8", {}, [(16, 16)], [(16, 8), (8, 16)]),
        ("int4_w4a16", {"group_size": 32}, [(32, 1), (96, 3)], [(48, 16)]),
        ("int4_w4a8", {}, [(128, 1)], [(64, 16)]),
        ("nvfp4_w4a16", {}, [(16, 16), (48, 144)], [(24, 16), (16, 24)]),
        ("nvfp4_w4a4", {}, [(16, 16)], [(24, 16), (16, 24)]),
        ("mxfp8_w8a8", {}, [(32, 1), (96, 3)], [(48, 16)]),
        ("mxfp4_w4a4", {}, [(32, 1), (96, 3)], [(48, 16)]),
    ],
)
def test_shapes(method, options, fits, refused):
    backend = make_backend(f"torchao_{method}", **options)
    for in_features, out_features in fits:
        assert violations(backend.constraints(), in_features, out_features) == []
        linear = make_linear(in_features, out_features)
        layer = backend.create_quantized_linear(linear)
        assert relative_error(layer.dequantize_weight(), linear.weight) < 0.2
        for rows in (1, 2, 17):
            assert layer(torch.randn(rows, in_features).bfloat16()).isfinite().all()
        shell = backend.create_quantized_linear_shell(nn.Linear(in_features, out_features), torch.bfloat16)
        shell.load_state_dict(layer.state_dict())
        assert_same_bytes(packed_bytes(shell), packed_bytes(layer))
    for in_features, out_features in refused:
        (reason,) = violations(backend.constraints(), in_features, out_features)
        assert "features" in reason
        assert all(c.describe() for c in backend.constraints())
        with pytest.raises(ValueError, match="features"):
            backend.create_quantized_linear(make_linear(in_features, out_features))
