"""check_backend_contract and check_differentiable catch what a backend can get wrong."""

import pytest
import torch
from toy_int9 import Int9Backend, Int9Config, Int9Linear

from quant_core import check_backend_contract, check_differentiable


def linear_with(**overrides):
    return type("BrokenLinear", (Int9Linear,), overrides)


def backend_with(cls, **overrides):
    """INT9, making ``cls`` instead of its own Linear."""

    def shell(self, linear, compute_dtype):
        return cls(linear.in_features, linear.out_features, linear.bias is not None, compute_dtype)

    members = {"create_quantized_linear_shell": shell, "quantized_linear_classes": lambda self: (cls,), **overrides}
    return type("BrokenBackend", (Int9Backend,), members)(Int9Config())


def raising_forward(self, x, bias):
    raise RuntimeError("no kernel")


def wrong_forward(self, x, bias):
    return torch.nn.functional.linear(x, self.dequantize_weight(x.dtype).flip(0), bias)


def nan_forward(self, x, bias):
    return torch.nn.functional.linear(x, self.dequantize_weight(x.dtype), bias) * float("nan")


def repacking_forward(self, x, bias):
    out = torch.nn.functional.linear(x, self.dequantize_weight(x.dtype), bias)
    self.weight = self.weight.flip(0)
    return out


def retyping_apply(self, fn, recurse=True):
    return torch.nn.Module._apply(self, fn, recurse)


def detached_forward(self, x):
    return torch.nn.functional.linear(x.detach(), self.dequantize_weight(x.dtype), None)


def forgetful_save(self, destination, prefix, keep_vars):
    Int9Linear._save_to_state_dict(self, destination, prefix, keep_vars)
    del destination[prefix + "weight_scale"]


def misplaced_save(self, destination, prefix, keep_vars):
    Int9Linear._save_to_state_dict(self, destination, prefix, keep_vars)
    destination["scales." + prefix + "x"] = self.weight_scale


def scrambling_load(self, tensors, prefix, strict, missing_keys, unexpected_keys):
    problems = Int9Linear._load_packed(self, tensors, prefix, strict, missing_keys, unexpected_keys)
    self.weight_scale = self.weight_scale.flip(0)
    return problems


@pytest.mark.parametrize(
    ("overrides", "finding"),
    [
        (
            {"quantized_forward": raising_forward},
            "the forward agrees with the dequantized weight: RuntimeError: no kernel",
        ),
        ({"quantized_forward": wrong_forward}, "the forward agrees with the dequantized weight: relative difference"),
        ({"quantized_forward": nan_forward}, "it returns values that are not finite"),
        (
            {"quantized_forward": repacking_forward},
            "a forward changes no stored byte: ['block.0.layer.weight'] changed",
        ),
        (
            {"_apply": retyping_apply},
            "dtype casts change no stored byte: .to(float16): ['block.0.layer.weight_scale'] changed",
        ),
        ({"forward": detached_forward}, "gradients pass to the input (is_differentiable): they do not"),
        (
            {"_save_to_state_dict": forgetful_save},
            "a saved state loads into a shell and computes the same: RuntimeError",
        ),
        ({"_save_to_state_dict": misplaced_save}, "uncovered: ['scales.block.0.layer.x']"),
        ({"_load_packed": scrambling_load}, "computes the same: the loaded layer computes something else"),
    ],
)
def test_broken_linear_is_caught(overrides, finding, capsys):
    assert not check_backend_contract(backend_with(linear_with(**overrides)), compute_device="cpu")
    out = capsys.readouterr().out
    failed = [line for line in out.splitlines() if "[FAIL]" in line]
    assert any(finding in line for line in failed), out
    assert out.rstrip().endswith("=> FAIL")


class NotALinear(torch.nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.in_features = args[0]


def test_class_that_is_no_linear(capsys):
    backend = backend_with(NotALinear, create_quantized_linear=lambda self, linear, a=None, b=None: NotALinear(4))
    assert not check_backend_contract(backend, compute_device="cpu")
    assert "[FAIL] NotALinear subclasses torch.nn.Linear" in capsys.readouterr().out


def test_undeclared_class(capsys):
    backend = backend_with(Int9Linear, quantized_linear_classes=lambda self: ())
    assert not check_backend_contract(backend, compute_device="cpu")
    assert "[FAIL] quantized_linear_classes() is non-empty: []" in capsys.readouterr().out


def test_unimplemented_methods_are_skipped(capsys):
    def missing(self, *args, **kwargs):
        raise NotImplementedError

    backend = backend_with(Int9Linear, create_quantized_linear=missing)
    assert check_backend_contract(backend, compute_device="cpu")
    out = capsys.readouterr().out
    assert "create_quantized_linear_shell() returns a declared class" in out
    assert "create_quantized_linear() returns" not in out


def test_failing_factory_is_a_finding_and_not_a_crash(capsys):
    def broken(self, *args, **kwargs):
        raise KeyError("absmax")

    assert not check_backend_contract(backend_with(Int9Linear, create_quantized_linear=broken), compute_device="cpu")
    assert "[FAIL] create_quantized_linear() raised KeyError: 'absmax'" in capsys.readouterr().out


def test_quiet(capsys):
    assert check_backend_contract(Int9Backend(Int9Config()), compute_device="cpu", verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("module", "verdict"),
    [
        (torch.nn.Linear(8, 4), "OK -- gradients pass through the module to its input"),
        (
            linear_with(forward=lambda self, x: x.detach() @ torch.ones(8, 4).to(x.dtype))(8, 4, False, torch.float32),
            "FAIL",
        ),
    ],
)
def test_check_differentiable(module, verdict, capsys):
    assert check_differentiable(module) == verdict.startswith("OK")
    assert verdict in capsys.readouterr().out


def test_check_differentiable_finds_what_is_not_finite(capsys):
    class Root(torch.nn.Module):
        def forward(self, x):
            return x.sqrt()

    assert not check_differentiable(Root(), torch.zeros(2, dtype=torch.bfloat16))
    assert "not finite" in capsys.readouterr().out
    with pytest.raises(ValueError, match="pass example_input"):
        check_differentiable(Root())
