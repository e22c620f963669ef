"""A backend written outside quant_core works like a built-in one, to the figures that its arithmetic implies."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_int9 import Int9Backend, Int9Config

from quant_core import (
    QUANT_BACKENDS,
    QUANT_METHODS,
    QuantizeConfig,
    check_backend_contract,
    check_differentiable,
    describe_quant_method,
    load_quantized_model,
    save_quantized_model,
)

METHOD = "toy_int9_w9a16"


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(256, 512)
        self.fc2 = torch.nn.Linear(512, 256, bias=False)

    def forward(self, x):
        return self.fc2(torch.nn.functional.silu(self.fc1(x)))


def footprint(model):
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def relative_error(reference, value):
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


@pytest.fixture
def float_model():
    torch.manual_seed(0)
    return ToyModel().to(torch.bfloat16)


def test_description(capsys):
    describe_quant_method(METHOD)
    out = capsys.readouterr().out
    assert "backend: toy_int9" in out
    assert "Int9Config" in out
    assert "backend_config_kwargs (user-tunable):\n  per_channel = True\n" in out
    assert "pinned by method (not overridable):\n  bits = 9\n" in out


def test_contract_checks_pass(capsys):
    spec = QUANT_METHODS[METHOD]
    assert check_backend_contract(QUANT_BACKENDS[spec.backend](spec.config_factory({})), compute_device="cpu")
    out = capsys.readouterr().out
    for line in (
        "quantized_linear_classes() is non-empty: ['Int9Linear']",
        "Int9Linear subclasses torch.nn.Linear",
        "a plain nn.Linear is not reported as quantized",
        "create_quantized_linear_shell() returns a declared class, got Int9Linear",
        "the shell is recognized before load_state_dict (disk offload routing)",
        "create_quantized_linear() returns a declared class, got Int9Linear",
        "every stored key lives under the layer name; uncovered: []",
    ):
        assert f"[PASS] {line}" in out


def test_size_error_and_casts(float_model):
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    reference = float_model(x)
    assert footprint(float_model) == 525312
    assert QuantizeConfig(method=METHOD).quantize_model(float_model, compute_device="cpu") == ["fc1", "fc2"]
    assert footprint(float_model) == 299008
    # 255 levels a side over +-amax of a uniform row: a step of amax/255 gives 0.0042 after bf16 matmuls.
    assert 0.0040 <= relative_error(reference, float_model(x)) <= 0.0044
    float_model.to(torch.float32)
    fc1 = float_model.fc1
    dtypes = [fc1.weight.dtype, fc1.weight_msb.dtype, fc1.weight_scale.dtype, fc1.bias.dtype]
    assert dtypes == [torch.uint8, torch.uint8, torch.float32, torch.float32]
    assert check_differentiable(fc1)


def test_ninth_bit_buys_accuracy():
    torch.manual_seed(0)
    linear = torch.nn.Linear(2048, 2048, bias=False).to(torch.bfloat16)
    weight = linear.weight.detach()
    int9 = Int9Backend(Int9Config()).create_quantized_linear(linear).dequantize_weight(torch.bfloat16)
    scale = (weight.abs().amax(dim=1).float() / 127).clamp(min=1e-8).unsqueeze(1)
    int8 = ((weight.float() / scale).round().clamp(-128, 127) * scale).to(torch.bfloat16)
    assert relative_error(weight, int8) == pytest.approx(0.004353, abs=1e-6)
    assert relative_error(weight, int9) == pytest.approx(0.001937, abs=1e-6)
    x = torch.randn(64, 2048, dtype=torch.bfloat16)
    outputs = [torch.nn.functional.linear(x, w) for w in (weight, int8, int9)]
    assert relative_error(outputs[0], outputs[1]) == pytest.approx(0.004937, abs=3e-5)
    assert relative_error(outputs[0], outputs[2]) == pytest.approx(0.002822, abs=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_round_trip_by_hand(float_model, tmp_path, dtype):
    QuantizeConfig(method=METHOD).quantize_model(float_model)
    float_model.to(torch.float32)
    config = QuantizeConfig(method=METHOD)
    tensors, metadata = config.flatten_state_dict(float_model.state_dict())
    assert sorted(tensors) == sorted(
        [
            "fc1.bias",
            "fc1.weight",
            "fc1.weight_msb",
            "fc1.weight_scale",
            "fc2.weight",
            "fc2.weight_msb",
            "fc2.weight_scale",
        ]
    )
    save_file(tensors, tmp_path / "toy.safetensors", metadata=metadata)

    loaded = ToyModel().to(torch.bfloat16)
    config = QuantizeConfig(method=METHOD, load_prequantized=True)
    config.prepare_for_prequantized_load(loaded, compute_dtype=torch.float32)
    state = config.unflatten_state_dict(load_file(tmp_path / "toy.safetensors"), metadata)
    loaded.load_state_dict(state, assign=True)
    x = torch.randn(4, 256, dtype=dtype)
    assert torch.equal(loaded(x), float_model(x))


def test_file_needs_no_options(float_model, tmp_path):
    config = QuantizeConfig(method=METHOD, backend_config_kwargs={"per_channel": False})
    config.quantize_model(float_model)
    save_quantized_model(float_model, config, tmp_path / "toy.safetensors")
    loaded = ToyModel().to(torch.bfloat16)
    recipe = load_quantized_model(loaded, tmp_path / "toy.safetensors")
    assert recipe.to_dict() == {"method": METHOD, "backend_config_kwargs": {"per_channel": False}}
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    assert torch.equal(loaded(x), float_model(x))
    assert torch.equal(copy.deepcopy(loaded)(x), float_model(x))
