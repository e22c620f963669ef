"""The comfy_kitchen backend against the formats' formulas, comfy-kitchen's own tensors and DiffSynth-Studio's files."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quant_core.backends.comfy_kitchen import FORMATS, ComfyKitchenLinear, quantize_weight
from quant_core.backends.comfy_kitchen.formats import FORMATS_BY_NAME
from quant_core.backends.comfy_kitchen.kernels import scaled_linear
from quant_core.constraints import violations
from quant_core.errors import QuantizationError
from quant_core.registry import describe_quant_method, make_backend

INT8, FP8, FP8_E5M2 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8", "comfy_kitchen_fp8_e5m2_w8a8"
MXFP8, NVFP4 = "comfy_kitchen_mxfp8_w8a8", "comfy_kitchen_nvfp4_w4a4"
W4A4, W4A8 = "comfy_kitchen_int4_convrot_w4a4", "comfy_kitchen_int4_w4a8"
VARIANTS = [
    pytest.param(INT8, {}, id="int8-rotated"),
    pytest.param(INT8, {"convrot": False}, id="int8-row"),
    pytest.param(INT8, {"convrot": False, "per_channel": False}, id="int8-tensor"),
    pytest.param(FP8, {}, id="fp8"),
    pytest.param(FP8_E5M2, {}, id="fp8-e5m2"),
    pytest.param(MXFP8, {}, id="mxfp8"),
    pytest.param(NVFP4, {}, id="nvfp4"),
    pytest.param(W4A4, {}, id="w4a4"),
    pytest.param(W4A8, {}, id="w4a8"),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make_linear(out_features=96, in_features=320, bias=True, dtype=torch.float32, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias=bias).to(dtype)


def quantize(linear: nn.Linear, method: str = INT8, **options) -> ComfyKitchenLinear:
    return make_backend(method, options).create_quantized_linear(linear)


def shell(linear: nn.Linear, method: str = INT8, **options) -> ComfyKitchenLinear:
    return make_backend(method, options).create_quantized_linear_shell(linear, linear.weight.dtype)


def marker_tensor(value: object) -> torch.Tensor:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def read_marker(state: dict[str, torch.Tensor]) -> dict:
    return json.loads(bytes(state["comfy_quant"].tolist()))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def packed_bytes(layer: ComfyKitchenLinear) -> dict[str, bytes]:
    return {key: raw(tensor) for key, tensor in layer.packed_state().items()}


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


# ------------------------------------------------------------------ the formats in float64


def hadamard(size: int) -> torch.Tensor:
    """The regular Hadamard matrix of 4^n: every row sums to the same, so a constant is not gathered in one column."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    matrix = four
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, four)
    return matrix / size**0.5


def unrotate(weight: torch.Tensor, group: int) -> torch.Tensor:
    if not group:
        return weight
    rows, columns = weight.shape
    return (weight.view(rows, columns // group, group) @ hadamard(group)).view(rows, columns)


def untile(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales are stored in tiles of 128 x 4, inside a tile as 32 rows of 4 x 4."""
    flat = scales.reshape(-1)
    r, c = torch.arange(rows).view(-1, 1), torch.arange(columns).view(1, -1)
    tile = (r // 128) * (-(-columns // 4)) + c // 4
    return flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]


def nibbles(packed: torch.Tensor, high_first: bool) -> torch.Tensor:
    data = packed.contiguous().view(torch.uint8)
    pair = (data >> 4, data & 15) if high_first else (data & 15, data >> 4)
    return torch.stack(pair, dim=-1).reshape(data.shape[0], -1).long()


def decode(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The stored weight in float64, from the tensors alone."""
    conf = read_marker(state)
    weight, kind = state["weight"], conf["format"]
    if kind == "int8_tensorwise":
        rotation = conf["convrot_groupsize"] if conf.get("convrot") else 0
        return unrotate(weight.double() * state["weight_scale"].double(), rotation)
    if kind.startswith("float8"):
        return weight.double() * state["weight_scale"].double()
    if kind == "mxfp8":
        exponents = untile(state["weight_scale"], weight.shape[0], weight.shape[1] // 32).double() - 127
        return weight.double() * torch.exp2(exponents).repeat_interleave(32, dim=1)
    if kind == "nvfp4":
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        codes = nibbles(weight, high_first=True)
        values = torch.cat([e2m1, -e2m1])[codes]
        blocks = untile(state["weight_scale"].double(), codes.shape[0], codes.shape[1] // 16)
        return values * blocks.repeat_interleave(16, dim=1) * state["weight_scale_2"].double()
    codes = nibbles(weight, high_first=False)
    if kind == "convrot_w4a4":
        signed = torch.where(codes > 7, codes - 16, codes).double()
        return unrotate(signed * state["weight_scale"].double()[:, None], conf["convrot_groupsize"])
    # asym_w4a8_int8 goes through an int8 grid, whose rounding is that of a float32 product.
    levels = state["weight_codebook"][codes] if "weight_codebook" in state else codes.float() - 8
    relative_scale = state["weight_s_rel"].float().repeat_interleave(conf["group_size"], dim=1)
    grid = (levels * relative_scale).round().clamp(-127, 127).double()
    return unrotate(grid * state["weight_s_channel"].double()[:, None], conf["convrot_groupsize"])


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_dequantized_weight_is_the_formula(method, options) -> None:
    layer = quantize(make_linear(), method, **options)
    assert relative(layer.dequantize_weight(torch.float64), decode(layer.state_dict())) < 1e-6


ERROR_LIMITS = {INT8: 0.011, FP8: 0.027, FP8_E5M2: 0.054, MXFP8: 0.027, NVFP4: 0.11, W4A4: 0.15, W4A8: 0.08}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_error_against_the_float_weight(method, options, dtype) -> None:
    linear = make_linear(dtype=dtype)
    assert relative(decode(quantize(linear, method, **options).state_dict()), linear.weight) < ERROR_LIMITS[method]


# ------------------------------------------------------------------ comfy-kitchen itself

LIBRARY = {
    "int8-rotated": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True, "convrot_groupsize": 64}),
    "int8-row": ("TensorWiseINT8Layout", {"per_channel": True}),
    "int8-tensor": ("TensorWiseINT8Layout", {}),
    "fp8": ("TensorCoreFP8Layout", {}),
    "fp8-e5m2": ("TensorCoreFP8Layout", {"dtype": torch.float8_e5m2}),
    "mxfp8": ("TensorCoreMXFP8Layout", {}),
    "nvfp4": ("TensorCoreNVFP4Layout", {}),
    "w4a4": ("TensorCoreConvRotW4A4Layout", {"convrot_groupsize": 64}),
    "w4a8": ("AsymW4A8Int8Layout", {"convrot_groupsize": 64}),
}


def library_tensor(weight: torch.Tensor, variant: str):
    from comfy_kitchen.tensor import QuantizedTensor

    layout, options = LIBRARY[variant]
    return QuantizedTensor.from_float(weight, layout, **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_bytes_and_values_are_comfy_kitchens(method, options, dtype, request) -> None:
    variant = next(name for name in LIBRARY if request.node.callspec.id.startswith(f"{name}-torch"))
    layer = quantize(make_linear(dtype=dtype), method, **options)
    reference = library_tensor(make_linear(dtype=dtype).weight.detach().float(), variant)
    expected = reference.state_dict("weight")
    mine = layer.packed_state()
    assert set(mine) == {*expected, "comfy_quant"}
    for key, tensor in expected.items():
        assert raw(mine[key]) == raw(tensor) and mine[key].shape == tensor.shape, key
    assert torch.equal(layer.dequantize_weight(dtype), reference.to(dtype=dtype).dequantize())


@pytest.mark.parametrize("method", [INT8, FP8, NVFP4, MXFP8, W4A4])
def test_quantizing_in_tiles_changes_no_byte(method) -> None:
    weight = make_linear(1120, 1024, bias=False).weight.detach()
    tensors = quantize_weight(weight, make_backend(method).config)
    variant = {INT8: "int8-rotated", FP8: "fp8", NVFP4: "nvfp4", MXFP8: "mxfp8", W4A4: "w4a4"}[method]
    layout, options = LIBRARY[variant]
    if "convrot_groupsize" in options:
        options = {**options, "convrot_groupsize": 256}
    from comfy_kitchen.tensor import QuantizedTensor

    for key, tensor in QuantizedTensor.from_float(weight, layout, **options).state_dict("weight").items():
        assert raw(tensors[key]) == raw(tensor), key


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("convrot", (True, False))
def test_int8_forward_is_comfy_kitchens_kernel(dtype, convrot) -> None:
    from comfy_kitchen.tensor import QuantizedTensor

    linear = make_linear(dtype=dtype)
    layer = quantize(linear, convrot=convrot)
    options = LIBRARY["int8-rotated" if convrot else "int8-row"][1]
    weight = QuantizedTensor.from_float(linear.weight.detach().float(), "TensorWiseINT8Layout", **options)
    x = torch.randn(2, 5, 320, dtype=dtype)
    with torch.inference_mode():
        assert torch.equal(layer(x), nn.functional.linear(x, weight.to(dtype=dtype), linear.bias))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_forward_is_near_the_dequantized_weight(method, options, dtype) -> None:
    linear = make_linear(dtype=dtype)
    layer = quantize(linear, method, **options)
    x = torch.randn(7, 320, dtype=dtype)
    expected = x.double() @ decode(layer.state_dict()).T + linear.bias.double()
    with torch.no_grad():
        out = layer(x)
    assert out.dtype == dtype and out.shape == (7, 96)
    assert relative(out, expected) < (0.02 if method == INT8 else 0.006)


@pytest.mark.parametrize("scale", (None, 0.01))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_fp8_kernel_quantizes_the_activation(dtype, scale) -> None:
    linear = make_linear(dtype=dtype)
    state = quantize(linear, FP8).state_dict()
    x = torch.randn(5, 320, dtype=dtype)
    given = None if scale is None else torch.tensor(scale)
    s = x.abs().max().double() / 448 if scale is None else scale
    codes = (x.double() / s).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    expected = codes * s @ decode(state).T + linear.bias.double()
    out = scaled_linear(
        x, state["weight"], [state["weight_scale"]], FORMATS_BY_NAME["float8_e4m3fn"], given, linear.bias.detach()
    )
    # In bfloat16 the library multiplies by a reciprocal scale that is rounded to bfloat16, which moves codes.
    assert relative(out, expected) < (0.03 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_forward_on_a_gpu(method, options) -> None:
    linear = make_linear(dtype=torch.bfloat16)
    layer = quantize(linear, method, **options)
    x = torch.randn(33, 320, dtype=torch.bfloat16)
    expected = x.double() @ linear.weight.double().T + linear.bias.double()
    with torch.no_grad():
        out = layer.to("cuda")(x.to("cuda")).cpu()
    assert relative(out, expected) < 3 * ERROR_LIMITS[method]


# ------------------------------------------------------------------ the peer's files


def peer_files(peer_quant, tmp_path, method, options, dtype):
    model = nn.Sequential(make_linear(dtype=dtype), make_linear(64, 96, bias=False, dtype=dtype))
    peer_model = copy.deepcopy(model)
    config = peer_quant.QuantizeConfig(method=method, backend_config_kwargs=options)
    config.quantize_model(peer_model)
    tensors, metadata = config.flatten_state_dict(peer_model.state_dict())
    save_file(tensors, tmp_path / "peer.safetensors", metadata=metadata)
    return model, peer_model


PEER_VARIANTS = [
    pytest.param(INT8, {}, id="int8-rotated"),
    pytest.param(INT8, {"convrot": False}, id="int8-row"),
    pytest.param(INT8, {"convrot": False, "per_channel": False}, id="int8-tensor"),
    pytest.param(FP8, {}, id="fp8"),
]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("method", "options"), PEER_VARIANTS)
def test_peers_file_loads_here(peer_quant, tmp_path, method, options, dtype) -> None:
    model, peer_model = peer_files(peer_quant, tmp_path, method, options, dtype)
    mine = nn.Sequential(*(shell(layer, method, **options) for layer in model))
    mine.load_state_dict(load_file(tmp_path / "peer.safetensors"), assign=True)
    for a, b in zip(mine, peer_model, strict=True):
        assert torch.equal(a.dequantize_weight(dtype), b.weight.dequantize())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("method", "options"), PEER_VARIANTS)
def test_peer_loads_the_file_written_here(peer_quant, tmp_path, method, options, dtype) -> None:
    model = nn.Sequential(make_linear(dtype=dtype), make_linear(64, 96, bias=False, dtype=dtype))
    mine = nn.Sequential(*(quantize(layer, method, **options) for layer in model))
    save_file(mine.state_dict(), tmp_path / "mine.safetensors", metadata={"format": "pt"})
    options = {**options, "orig_dtype": dtype}
    config = peer_quant.QuantizeConfig(method=method, backend_config_kwargs=options, load_prequantized=True)
    config.prepare_for_prequantized_load(model, compute_dtype=dtype)
    state = config.unflatten_state_dict(load_file(tmp_path / "mine.safetensors"), {})
    model.load_state_dict(state, assign=True)
    for a, b in zip(mine, model, strict=True):
        assert torch.equal(a.dequantize_weight(dtype), b.weight.dequantize())


# ------------------------------------------------------------------ the contract


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_casts_copies_and_forwards_keep_the_packed_bytes(method, options) -> None:
    layer = quantize(make_linear(dtype=torch.bfloat16), method, **options).eval()
    before = packed_bytes(layer)
    x = torch.randn(3, 320)
    for cast in (
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: copy.deepcopy(m),
    ):
        layer = cast(layer)
        with torch.no_grad():
            layer(x.to(layer.compute_dtype))
            layer(torch.zeros(0, 320, dtype=layer.compute_dtype))
        xg = x.to(layer.compute_dtype).requires_grad_()
        layer(xg).sum().backward()
        assert packed_bytes(layer) == before
        assert layer.bias.dtype == layer.compute_dtype


@pytest.mark.parametrize("assign", (True, False))
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_state_dict_round_trip(method, options, assign) -> None:
    linear = make_linear(dtype=torch.bfloat16)
    layer = quantize(linear, method, **options)
    empty = shell(linear, method, **options)
    assert empty.packed_bytes() == layer.packed_bytes()
    assert {k: (v.shape, v.dtype) for k, v in empty.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in layer.state_dict().items()
    }
    empty.load_state_dict(layer.state_dict(), assign=assign)
    x = torch.randn(4, 320, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(empty(x), layer(x))
    assert packed_bytes(empty) == packed_bytes(layer)


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_gradient_is_that_of_the_dequantized_weight(method, options) -> None:
    layer = quantize(make_linear(), method, **options)
    x = torch.randn(2, 3, 320, requires_grad=True)
    grad = torch.randn(2, 3, 96)
    layer(x).backward(grad)
    assert relative(x.grad, grad.double() @ decode(layer.state_dict())) < 1e-5


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_compiles(method, options, grad) -> None:
    layer = quantize(make_linear(dtype=torch.bfloat16), method, **options)
    x = torch.randn(3, 320, dtype=torch.bfloat16, requires_grad=grad)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=not grad)
    context = contextlib.nullcontext() if grad else torch.no_grad()
    with context:
        assert torch.equal(compiled(x), layer(x))
    if grad:
        compiled(x).sum().backward()
        mine = x.grad.clone()
        x.grad = None
        layer(x).sum().backward()
        assert torch.equal(mine, x.grad)


def test_fake_tensors_leave_nothing_in_the_librarys_caches() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = quantize(make_linear(64, 1024), W4A4)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        out = layer(torch.empty(2, 1024))
        layer.dequantize_weight()
    assert out.shape == (2, 64)
    assert layer.dequantize_weight().isfinite().all()
    assert relative(layer(torch.eye(1024)).T - layer.bias.detach()[:, None], decode(layer.state_dict())) < 1e-5


def test_a_meta_device_context_does_not_reach_the_library() -> None:
    code = (
        "import torch\n"
        "from quant_core.registry import make_backend\n"
        "b = make_backend('comfy_kitchen_nvfp4_w4a4')\n"
        "w = torch.nn.Linear(32, 16)\n"
        "with torch.device('meta'):\n"
        "    q = b.create_quantized_linear(w)\n"
        "assert q.dequantize_weight(torch.float32).device.type == 'cpu'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_library_is_imported_before_the_first_layer() -> None:
    code = (
        "import sys\n"
        "from quant_core.registry import describe_quant_method, make_backend\n"
        "make_backend('comfy_kitchen_int8_w8a8')\n"
        "assert not {'comfy_kitchen', 'torchao', 'bitsandbytes'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_zeros(method, options, dtype) -> None:
    linear = make_linear(dtype=dtype)
    x = torch.randn(3, 320, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(quantize(linear, method, **options)(torch.zeros_like(x)), linear.bias.expand(3, -1))
        linear.weight[5] = 0
        layer = quantize(linear, method, **options)
        assert layer.dequantize_weight()[5].eq(0).all() and layer(x).isfinite().all()
        linear.weight.zero_()
        layer = quantize(linear, method, **options)
        state = layer.state_dict()
        assert decode(state).eq(0).all() and layer.dequantize_weight().eq(0).all()
        assert torch.equal(layer(x), linear.bias.expand(3, -1))
        if "weight_scale_2" in state or method in (FP8, FP8_E5M2):
            assert state.get("weight_scale_2", state["weight_scale"]) == 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("method", FORMATS)
def test_tiny_weights_stay_finite(method, dtype) -> None:
    linear = make_linear(dtype=dtype)
    with torch.no_grad():
        linear.weight.mul_(torch.finfo(dtype).tiny)
    layer = quantize(linear, method)
    assert layer.dequantize_weight(torch.float32).isfinite().all() and decode(layer.state_dict()).isfinite().all()


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_a_weight_that_is_not_finite_is_refused(value) -> None:
    linear = make_linear()
    with torch.no_grad():
        linear.weight[3, 4] = value
    with pytest.raises(QuantizationError, match="NaN or infinity"):
        quantize(linear)


def test_a_plain_fp8_weight_takes_orig_dtype() -> None:
    linear = make_linear()
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    layer = quantize(linear, FP8, orig_dtype="float16")
    assert layer.compute_dtype == torch.float16
    assert relative(decode(layer.state_dict()), linear.weight.double()) < 0.027


# ------------------------------------------------------------------ shapes

SHAPES = [(1, 64), (17, 33), (40, 48), (3, 64), (130, 68), (160, 64), (96, 1024)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_every_shape_works_or_is_refused_with_the_reason(method, options, shape) -> None:
    linear = make_linear(*shape)
    backend = make_backend(method, options)
    if reasons := violations(backend.constraints(), shape[1], shape[0]):
        with pytest.raises(QuantizationError, match="is not a multiple of") as error:
            backend.create_quantized_linear(linear)
        assert reasons[0] in str(error.value)
        return
    layer = backend.create_quantized_linear(linear)
    weight = decode(layer.state_dict())
    assert relative(layer.dequantize_weight(torch.float64), weight) < 1e-6
    assert relative(weight, linear.weight) < 0.2
    x = torch.randn(1, shape[1])
    with torch.no_grad():
        assert relative(layer(x), x.double() @ weight.T + linear.bias.double()) < 0.05


@pytest.mark.parametrize(
    ("width", "requested", "group"),
    [(512, 256, 256), (320, 256, 64), (48, 256, 16), (68, 256, 0), (68, 4, 4), (512, 64, 64), (512, 1024, 256)],
)
def test_rotation_falls_back_to_a_group_that_divides(width, requested, group) -> None:
    linear = make_linear(32, width)
    layer = quantize(linear, convrot_groupsize=requested)
    expected = {"format": "int8_tensorwise"}
    if group:
        expected |= {"convrot": True, "convrot_groupsize": group}
    assert read_marker(layer.state_dict()) == expected
    assert shell(linear, convrot_groupsize=requested).marker == layer.marker
    assert relative(decode(layer.state_dict()), linear.weight) < 0.011


def test_the_files_group_is_adopted() -> None:
    linear = make_linear()
    written = quantize(linear, convrot_groupsize=16)
    for options in ({}, {"convrot_groupsize": 4}, {"convrot": False}, {"convrot": False, "per_channel": False}):
        layer = shell(linear, **options)
        layer.load_state_dict(written.state_dict())
        assert torch.equal(layer.dequantize_weight(), written.dequantize_weight())
        assert packed_bytes(layer) == packed_bytes(written)
        x = torch.randn(2, 320)
        assert torch.equal(layer(x), written(x))
    written = quantize(linear, W4A8, group_size=4, convrot_groupsize=16)
    layer = shell(linear, W4A8)
    layer.load_state_dict(written.state_dict())
    assert torch.equal(layer.dequantize_weight(), written.dequantize_weight())


# ------------------------------------------------------------------ what a file may bring


def test_markers_are_as_comfyui_writes_them() -> None:
    linear = make_linear()
    assert read_marker(quantize(linear, FP8).state_dict()) == {"format": "float8_e4m3fn"}
    assert read_marker(quantize(linear, W4A4).state_dict()) == {"format": "convrot_w4a4", "convrot_groupsize": 64}
    expected = {"format": "convrot_w4a4", "convrot_groupsize": 64, "linear_dtype": "int8"}
    assert read_marker(quantize(linear, W4A4, linear_dtype="int8").state_dict()) == expected
    expected = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 64}
    assert read_marker(quantize(linear, W4A8).state_dict()) == expected


def test_options_nested_under_params_are_read() -> None:
    linear = make_linear()
    state = quantize(linear).state_dict()
    nested = {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}
    layer = shell(linear)
    layer.load_state_dict({**state, "comfy_quant": marker_tensor(nested)})
    assert relative(layer.dequantize_weight(), decode(state)) < 1e-6
    assert read_marker(layer.state_dict()) == nested


def test_block_scales_are_accepted_as_bytes_and_as_fp8() -> None:
    linear = make_linear()
    for method, written, other in (
        (MXFP8, torch.uint8, torch.float8_e8m0fnu),
        (NVFP4, torch.float8_e4m3fn, torch.uint8),
    ):
        state = quantize(linear, method).state_dict()
        assert state["weight_scale"].dtype == written
        layer = shell(linear, method)
        layer.load_state_dict({**state, "weight_scale": state["weight_scale"].view(other)})
        assert layer.state_dict()["weight_scale"].dtype == written
        assert relative(layer.dequantize_weight(), decode(state)) < 1e-6


def test_full_precision_marker_dequantizes_and_is_kept() -> None:
    linear = make_linear()
    state = quantize(linear).state_dict()
    conf = {**read_marker(state), "full_precision_matrix_mult": True}
    layer = shell(linear)
    layer.load_state_dict({**state, "comfy_quant": marker_tensor(conf)})
    x = torch.randn(3, 320)
    with torch.no_grad():
        assert relative(layer(x), x.double() @ decode(state).T + linear.bias.double()) < 1e-5
    assert read_marker(layer.state_dict()) == conf


def test_activation_scales_are_kept_and_smoothing_is_applied() -> None:
    linear = make_linear()
    state = quantize(linear, NVFP4).state_dict()
    smoothing = torch.rand(320) + 0.5
    layer = shell(linear, NVFP4)
    layer.load_state_dict({**state, "input_scale": torch.tensor(0.5), "pre_quant_scale": smoothing})
    x = torch.randn(3, 320, requires_grad=True)
    weight = decode(state) * smoothing.double()
    out = layer(x)
    assert relative(out, x.detach().double() @ weight.T + linear.bias.double()) < 1e-5
    out.sum().backward()
    assert relative(x.grad, weight.sum(dim=0).expand(3, -1)) < 1e-5
    assert relative(layer.dequantize_weight(), weight) < 1e-6
    assert layer.state_dict()["input_scale"] == 0.5 and torch.equal(layer.state_dict()["pre_quant_scale"], smoothing)


def test_codes_without_a_codebook_are_evenly_spaced() -> None:
    linear = make_linear()
    state = quantize(linear, W4A8).state_dict()
    del state["weight_codebook"]
    layer = shell(linear, W4A8)
    layer.load_state_dict(state)
    assert relative(layer.dequantize_weight(), decode(state)) < 1e-6


# ------------------------------------------------------------------ refusals

ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
BAD_MARKERS = [
    pytest.param(b"{", "not UTF-8 JSON", id="truncated"),
    pytest.param(b"\xff\xfe", "not UTF-8 JSON", id="not-utf8"),
    pytest.param(b"[" * 4000, "not UTF-8 JSON", id="deep"),
    pytest.param(b" " * 5000, "more than", id="oversized"),
    pytest.param(b"", "not UTF-8 JSON", id="empty"),
    pytest.param(["int8_tensorwise"], "JSON list", id="list"),
    pytest.param("int8_tensorwise", "JSON str", id="string"),
    pytest.param({"convrot": True}, "no 'format' key", id="no-format"),
    pytest.param({"format": 8}, "no 'format' key", id="format-number"),
    pytest.param({"format": "nvfp4"}, "comfy_kitchen_nvfp4_w4a4", id="other-format"),
    pytest.param({"format": "int3_magic"}, "no method here reads", id="unknown-format"),
    pytest.param({**ROTATED, "convrot_groupsize": 256}, "does not divide in_features 320", id="group-divides"),
    pytest.param({**ROTATED, "convrot_groupsize": 32}, "not 4, 16, 64", id="group-power"),
    pytest.param({**ROTATED, "convrot_groupsize": 0}, "not 4, 16, 64", id="group-zero"),
    pytest.param({**ROTATED, "convrot_groupsize": "64"}, "expected an integer", id="group-text"),
    pytest.param({**ROTATED, "convrot": "yes"}, "expected true or false", id="flag-text"),
    pytest.param({"format": "int8_tensorwise"}, "not rotated.*'convrot': False", id="flag-stripped"),
]


@pytest.mark.parametrize(("marker", "message"), BAD_MARKERS)
def test_bad_markers_are_refused(marker, message) -> None:
    linear = make_linear()
    layer = shell(linear)
    state = {**quantize(linear).state_dict(), "comfy_quant": marker_tensor(marker)}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert layer.weight.is_meta, "nothing may have been taken"


@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.parametrize("method", FORMATS)
def test_missing_tensors_are_refused(method, strict) -> None:
    linear = make_linear()
    state = quantize(linear, method).state_dict()
    for key in ("weight", "comfy_quant", *FORMATS[method].scale_keys):
        layer = shell(linear, method)
        with pytest.raises(RuntimeError, match=f"{key} is missing"):
            layer.load_state_dict({k: v for k, v in state.items() if k != key}, strict=strict)
        assert layer.comfy_quant.is_meta


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        (INT8, "weight_scale", torch.ones(96)),
        (INT8, "weight_scale", torch.ones(1, 320)),
        (INT8, "weight_scale", torch.ones(96, 1, dtype=torch.bfloat16)),
        (FP8, "weight_scale", torch.ones(96, 1)),
        (FP8, "input_scale", torch.ones(320)),
        (MXFP8, "weight_scale", torch.zeros(96, 10, dtype=torch.uint8)),
        (NVFP4, "weight_scale", torch.ones(128, 20)),
        (NVFP4, "weight_scale_2", torch.ones(96)),
        (NVFP4, "pre_quant_scale", torch.ones(96)),
        (W4A4, "weight_scale", torch.ones(96, 1)),
        (W4A8, "weight_s_rel", torch.ones(96, 10)),
        (W4A8, "weight_s_channel", torch.ones(96, 1)),
        (W4A8, "weight_codebook", torch.ones(8)),
        (FP8, "weight", torch.zeros(96, 320, dtype=torch.uint8)),
        (FP8, "weight", torch.zeros(96, 320)),
    ],
)
def test_tensors_of_another_shape_or_dtype_are_refused(method, key, value) -> None:
    linear = make_linear()
    state = {**quantize(linear, method).state_dict(), key: value}
    with pytest.raises(RuntimeError, match=f"{key} is {value.dtype}"):
        shell(linear, method).load_state_dict(state)


def test_rotated_marker_with_one_scale_is_refused() -> None:
    linear = make_linear()
    state = quantize(linear, convrot=False, per_channel=False).state_dict()
    layer = shell(linear)
    layer.load_state_dict(state)  # one scale for the whole weight cannot have been rotated: nothing was stripped
    assert relative(layer.dequantize_weight(), decode(state)) < 1e-6
    with pytest.raises(RuntimeError, match="one scale for the whole weight"):
        shell(linear).load_state_dict({**state, "comfy_quant": marker_tensor(ROTATED)})


def test_float_file_is_refused_in_words() -> None:
    linear = make_linear()
    with pytest.raises(RuntimeError, match="the file does not hold this layer quantized"):
        shell(linear).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("size", (0, -4, 1, 2, 3, 100, True, 64.0, "64", None))
def test_bad_rotation_sizes_are_refused(size) -> None:
    for method in (INT8, W4A4, W4A8):
        with pytest.raises(ValueError, match="power of 4"):
            make_backend(method, {"convrot_groupsize": size})


def test_a_power_of_two_is_rounded_down_with_a_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="quant_core"):
        config = make_backend(INT8, {"convrot_groupsize": 128}).config
    assert config.convrot_groupsize == 64 and "128" in caplog.text and "64" in caplog.text


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (INT8, {"per_channel": False}, "convrot=False"),
        (INT8, {"per_channel": 1}, "True or False"),
        (INT8, {"convrot": None}, "True or False"),
        (INT8, {"format": "nvfp4"}, "Accepted: per_channel, convrot, convrot_groupsize, orig_dtype"),
        (INT8, {"orig_dtype": "int8"}, "orig_dtype"),
        (FP8, {"orig_dtype": "no_such"}, "orig_dtype"),
        (FP8, {"convrot": True}, "does not accept"),
        (W4A4, {"linear_dtype": "int2"}, "linear_dtype"),
        (W4A8, {"group_size": 0}, "group_size"),
        (W4A8, {"group_size": 5}, "group_size"),
        (W4A8, {"group_size": 24}, "group_size"),
        (W4A8, {"group_size": True}, "group_size"),
    ],
)
def test_bad_options_are_refused(method, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_backend(method, options)


# ------------------------------------------------------------------ what the backend says


def test_description() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        describe_quant_method(INT8)
    tail = out.getvalue().split("(user-tunable):\n")[1]
    assert tail == (
        "  per_channel       = True\n"
        "  convrot           = True\n"
        "  convrot_groupsize = 256\n"
        "  orig_dtype        = torch.bfloat16\n"
        "pinned by method (not overridable):\n"
        "  format = 'int8_tensorwise'\n"
    )


def test_support_on_a_cpu() -> None:
    for method in FORMATS:
        support = make_backend(method).support("cpu")
        assert support.kind == ("native" if method == INT8 else "emulated")
        assert bool(support.reason) == (method != INT8)
    assert make_backend(INT8).support("mps").kind == "emulated"


def test_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    with pytest.raises(ImportError, match="pip install .comfy-kitchen>=0"):
        make_backend(FP8)
