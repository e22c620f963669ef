"""Verification tools for backends: does a quantized Linear keep the contract?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .backend import QuantBackend
from .measure import relative_error

_LAYER = "block.0.layer"


def check_differentiable(module: nn.Module, example_input: torch.Tensor | None = None, verbose: bool = True) -> bool:
    """Run a real backward from ``module``'s output to its input and see whether a finite gradient arrives.

    This is what training a LoRA on a frozen quantized base needs. ``module`` is cast to bfloat16 in place.

    Args:
        module: a quantized Linear, or any module that takes one tensor.
        example_input: bfloat16; random ``[4, in_features]`` when None and the module has ``in_features``.
        verbose: print the verdict.
    """
    name = type(module).__name__
    module.to(torch.bfloat16)
    if example_input is None:
        if not hasattr(module, "in_features"):
            raise ValueError(f"check_differentiable: {name} has no in_features; pass example_input")
        device = next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
        example_input = torch.randn(4, module.in_features, dtype=torch.bfloat16, device=device)
    x = example_input.detach().clone().requires_grad_(True)
    verdict = "gradients pass through the module to its input"
    ok = True
    try:
        with torch.enable_grad():
            out = module(x)
            (gradient,) = torch.autograd.grad(out.float().square().sum(), x, allow_unused=True)
        if gradient is None:
            ok, verdict = False, "no gradient reaches the input"
        elif not bool(torch.isfinite(gradient).all()):
            ok, verdict = False, "the gradient at the input is not finite"
        elif not bool(gradient.any()):
            ok, verdict = False, "the gradient at the input is zero everywhere"
    except Exception as error:  # whatever a backend's kernel raises is the finding
        ok, verdict = False, f"{type(error).__name__}: {error}"
    if verbose:
        print(f"check_differentiable ({name}): {'OK' if ok else 'FAIL'} -- {verdict}")
    return ok


class _Report:
    """Collects the outcome of each check; a check that raises is a failed one, with what it raised."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.ok = True

    def add(self, passed: bool, text: str) -> bool:
        self.ok &= passed
        if self.verbose:
            print(f"  [{'PASS' if passed else 'FAIL'}] {text}")
        return passed

    def attempt(self, text: str, check: Callable[[], str | None]) -> None:
        """Run ``check``; it returns None when all is well, else what is wrong."""
        try:
            problem = check()
        except Exception as error:  # a backend may raise anything: that is what is being looked for
            problem = f"{type(error).__name__}: {error}"
        self.add(problem is None, text if problem is None else f"{text}: {problem}")


def check_backend_contract(
    backend: QuantBackend,
    in_features: int = 512,
    out_features: int = 512,
    compute_dtype: torch.dtype = torch.bfloat16,
    compute_device: torch.device | str | None = None,
    verbose: bool = True,
) -> bool:
    """Check a backend against the contract, with a real layer.

    Structure: it declares its Linear classes, all subclasses of ``nn.Linear``; both factory methods return one of
    them; every key it stores lives under the layer's name. Behaviour: the forward runs and agrees with the
    dequantized weight, dtype casts and ``deepcopy`` change no stored byte, a forward changes none either, a saved
    state loads into a shell and computes the same, and gradients flow where ``is_differentiable`` is declared.
    Factory methods that the backend does not implement are skipped.

    Args:
        backend: configured, e.g. ``QUANT_BACKENDS[spec.backend](spec.config_factory({}))``.
        in_features, out_features, compute_dtype: of the probe layer.
        compute_device: None means the accelerator if there is one, else the CPU.
        verbose: print one line a check.

    Returns:
        Whether every check passed.
    """
    if compute_device is None:
        compute_device = "cuda" if torch.cuda.is_available() else "cpu"
    report = _Report(verbose)
    if verbose:
        print(f"check_backend_contract ({backend.name}):")
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(in_features, out_features, dtype=compute_dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(out_features, in_features, generator=generator) / in_features**0.5)

    classes = tuple(backend.quantized_linear_classes())
    report.add(bool(classes), f"quantized_linear_classes() is non-empty: {[c.__name__ for c in classes]}")
    for cls in classes:
        report.add(issubclass(cls, nn.Linear), f"{cls.__name__} subclasses torch.nn.Linear")
    report.add(not backend.is_quantized_linear(linear), "a plain nn.Linear is not reported as quantized")

    shell = _make(
        report,
        "create_quantized_linear_shell()",
        classes,
        lambda: backend.create_quantized_linear_shell(linear, compute_dtype),
    )
    if shell is not None:
        recognized = backend.is_quantized_linear(shell)
        report.add(recognized, "the shell is recognized before load_state_dict (disk offload routing)")
    layer = _make(
        report,
        "create_quantized_linear()",
        classes,
        lambda: backend.create_quantized_linear(linear, compute_device, compute_device),
    )
    if layer is not None:
        _check_behaviour(report, backend, layer, linear, compute_dtype, compute_device)
    if verbose:
        print(f"  => {'OK' if report.ok else 'FAIL'}")
    return report.ok


def _make(report: _Report, what: str, classes: tuple, make: Callable[[], nn.Module]) -> nn.Module | None:
    """Call a factory method; None when the backend does not implement it, or when it fails."""
    try:
        module = make()
    except NotImplementedError:
        return None
    except Exception as error:  # see _Report.attempt
        report.add(False, f"{what} raised {type(error).__name__}: {error}")
        return None
    declared = isinstance(module, classes)
    report.add(declared, f"{what} returns a declared class, got {type(module).__name__}")
    return module if declared else None


def _check_behaviour(
    report: _Report,
    backend: QuantBackend,
    layer: nn.Module,
    linear: nn.Linear,
    compute_dtype: torch.dtype,
    device: Any,
) -> None:
    capabilities = backend.capabilities()
    x = torch.randn(4, linear.in_features, generator=torch.Generator().manual_seed(1)).to(device, compute_dtype)
    stored = _stored(backend, layer) if capabilities["is_serializable"] else None
    if stored is not None:
        uncovered = [key for key in stored if not key.startswith(_LAYER + ".")]
        report.add(not uncovered, f"every stored key lives under the layer name; uncovered: {uncovered}")

    report.attempt(
        "the forward agrees with the dequantized weight", lambda: _forward_problem(backend, layer, linear, x)
    )
    if stored is not None:
        report.attempt("a forward changes no stored byte", lambda: _changed(stored, _stored(backend, layer)))
        report.attempt("dtype casts change no stored byte", lambda: _cast_problem(backend, layer, stored))
        report.attempt(
            "deepcopy changes no stored byte", lambda: _changed(stored, _stored(backend, copy.deepcopy(layer)))
        )
        report.attempt(
            "a saved state loads into a shell and computes the same",
            lambda: _round_trip_problem(backend, layer, linear, compute_dtype, x),
        )
    if capabilities["is_differentiable"]:
        report.attempt(
            "gradients pass to the input (is_differentiable)",
            lambda: None if check_differentiable(copy.deepcopy(layer), verbose=False) else "they do not",
        )


def _stored(backend: QuantBackend, layer: nn.Module) -> dict[str, torch.Tensor]:
    holder = nn.Module()
    parent = holder
    *path, last = _LAYER.split(".")
    for name in path:
        child = nn.Module()
        parent.add_module(name, child)
        parent = child
    parent.add_module(last, layer)
    tensors, _ = backend.flatten_state_dict(holder.state_dict())
    return {key: value.detach().clone() for key, value in tensors.items()}


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], ignore: str = "") -> str | None:
    """Return which stored tensors differ, byte for byte."""
    if before.keys() != after.keys():
        return f"the keys became {sorted(after)}"
    bad = [k for k in before if k != ignore and not same_bytes(before[k], after[k])]
    return f"{bad} changed" if bad else None


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes (NaN equals NaN)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat_a, flat_b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(flat_a, flat_b))


def _forward_problem(backend: QuantBackend, layer: nn.Module, linear: nn.Linear, x: torch.Tensor) -> str | None:
    with torch.no_grad():
        out = layer(x)
        reference = linear.to(x.device)(x)
        try:
            expected = backend.dequantize_to_linear(copy.deepcopy(layer), x.dtype)(x)
        except NotImplementedError:
            expected = reference
    if out.shape != reference.shape or out.dtype != x.dtype:
        return f"it returns {out.dtype} {list(out.shape)}, nn.Linear returns {x.dtype} {list(reference.shape)}"
    if not bool(torch.isfinite(out).all()):
        return "it returns values that are not finite"
    # A method that quantizes its activations differs by their rounding; 4-bit activations by about 15 %.
    error = relative_error(expected, out)
    return None if error < 0.25 else f"relative difference {error:.3f}"


def _cast_problem(backend: QuantBackend, layer: nn.Module, stored: dict[str, torch.Tensor]) -> str | None:
    casts = ("to(float32)", "to(float16)", "half()", "float()", "double()", "bfloat16()")
    for cast in casts:
        module = copy.deepcopy(layer)
        method, _, argument = cast.rstrip(")").partition("(")
        module = getattr(module, method)(*([getattr(torch, argument)] if argument else []))
        problem = _changed(stored, _stored(backend, module), ignore=f"{_LAYER}.bias")
        if problem:
            return f".{cast}: {problem}"
    return None


def _round_trip_problem(
    backend: QuantBackend, layer: nn.Module, linear: nn.Linear, compute_dtype: torch.dtype, x: torch.Tensor
) -> str | None:
    try:
        shell = backend.create_quantized_linear_shell(linear, compute_dtype)
    except NotImplementedError:
        return None
    holder = nn.Sequential(layer)
    tensors, metadata = backend.flatten_state_dict(holder.state_dict())
    tensors = {key: value.detach().clone() for key, value in tensors.items()}
    loaded = nn.Sequential(shell)
    loaded.load_state_dict(backend.unflatten_state_dict(tensors, metadata), assign=True)
    loaded.train(layer.training)
    with torch.no_grad():
        same = torch.equal(loaded(x), holder(x))
    return None if same else "the loaded layer computes something else"
