"""Replaces the layers of a model: all of them, or, on a failure, none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .backend import range_problem
from .constraints import violations
from .errors import QuantizationError
from .sites import FLOAT_WEIGHTS, LinearSite

if TYPE_CHECKING:
    from .backend import QuantBackend
    from .config import QuantizeConfig

logger = logging.getLogger("quant_core")

Assignment = Sequence[tuple[LinearSite, "QuantizeConfig"]]

# Dictionaries of hooks that a replaced layer hands on. The same dict objects move over, so that handles which the
# user holds still remove their hooks.
_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_announced_support: set[str] = set()


def quantize_layers(
    model: nn.Module,
    assignment: Assignment,
    compute_device: torch.device | str | None,
    model_device: torch.device | str | None,
    keep_originals: bool,
    progress: Callable[[int, int, str], None] | None,
) -> list[str]:
    """Quantize the assigned layers in place; see ``Recipe.quantize_model``."""
    check_device("compute_device", compute_device)
    check_device("model_device", model_device)
    _check_weights_present(assignment)
    check_shapes(assignment)
    _announce(assignment, compute_device if model_device is None else model_device)

    done: list[tuple[LinearSite, nn.Module | None]] = []
    try:
        for index, (site, part) in enumerate(assignment):
            original = site.module
            quantized = _quantize_one(site, part, compute_device, model_device)
            adopt_state(original, quantized)
            site.replace(model, quantized)
            done.append((site, original if keep_originals else None))
            if not keep_originals:
                site.module = quantized  # drops the last reference to the float layer
            if progress is not None:
                progress(index + 1, len(assignment), site.name)
    except BaseException:
        # Also for an interrupt: a half-converted model is worse than either.
        for site, float_layer in done:
            if float_layer is not None:
                site.replace(model, float_layer)
        if done and not keep_originals:
            logger.error("%d layers stay quantized (keep_originals=False); load the model again", len(done))
        raise
    _log_summary("quantized", assignment)
    return [site.name for site, _ in assignment]


def _quantize_one(site: LinearSite, part: QuantizeConfig, compute_device: Any, model_device: Any) -> nn.Module:
    problem = range_problem(*torch.aminmax(site.module.weight.detach()))
    if problem:
        raise QuantizationError(
            f"layer {site.name!r}: the weight {problem}, nothing can be quantized from it. "
            "Check the source file, or leave the layer in float with exclude_modules"
        )
    try:
        quantized = part.backend.create_quantized_linear(site.module, compute_device, model_device)
        if not isinstance(quantized, nn.Module):
            raise TypeError(f"backend {part.backend.name!r} made {quantized!r} of it, not a module")
        return quantized
    except Exception as error:
        shape = list(site.module.weight.shape)
        raise QuantizationError(
            f"layer {site.name!r} {shape} {site.module.weight.dtype}: {part.method} failed: {error}. "
            "The model is unchanged unless keep_originals=False was passed; "
            "exclude the layer with exclude_modules, or use another method for it"
        ) from error


def install_shells(model: nn.Module, assignment: Assignment, compute_dtype: torch.dtype | None) -> list[str]:
    """Put empty quantized Linears at the assigned places; see ``Recipe.prepare_for_prequantized_load``.

    ``compute_dtype`` None takes each layer's own float dtype.
    """
    check_shapes(assignment)
    shells = []
    for site, part in assignment:
        dtype = compute_dtype or float_dtype(site.module)
        shells.append(part.backend.create_quantized_linear_shell(site.module, dtype))
    for (site, _), shell in zip(assignment, shells, strict=True):
        adopt_state(site.module, shell)
        site.replace(model, shell)
    _log_summary("replaced for loading a quantized checkpoint", assignment)
    return [site.name for site, _ in assignment]


def dequantize_layers(
    model: nn.Module,
    backend_of: Callable[[str, nn.Module], QuantBackend | None],
    compute_dtype: torch.dtype,
    compute_device: torch.device | str | None,
    model_device: torch.device | str | None,
) -> list[str]:
    """Replace quantized Linears by plain ones; see ``Recipe.dequantize_model``."""
    sites: dict[int, LinearSite] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in sites:
            sites[id(module)].names += (name,)
        elif name and backend_of(name, module) is not None:
            sites[id(module)] = LinearSite((name,), module)
    for site in sites.values():
        backend = backend_of(site.name, site.module)
        assert backend is not None
        linear = backend.dequantize_to_linear(site.module, compute_dtype, compute_device, model_device)
        adopt_state(site.module, linear)
        site.replace(model, linear)
    logger.info("%d quantized layers restored to nn.Linear.", len(sites))
    return [site.name for site in sites.values()]


def float_dtype(module: nn.Module) -> torch.dtype:
    """The float dtype that a Linear computes in, bfloat16 where it has none of its own (a plain fp8 weight)."""
    dtype = getattr(module, "compute_dtype", None) or module.weight.dtype
    return dtype if dtype in FLOAT_WEIGHTS else torch.bfloat16


def adopt_state(old: nn.Module, new: nn.Module) -> None:
    """Hand the training flag and the hooks of a replaced layer to its replacement."""
    new.train(old.training)
    for name in _HOOK_DICTS:
        hooks = getattr(old, name)
        if hooks:
            setattr(new, name, hooks)


def check_shapes(assignment: Assignment) -> None:
    """Raise ValueError naming every layer whose shape its format cannot take, with the exclusions that help."""
    misfits: list[tuple[LinearSite, QuantizeConfig, str]] = []
    for site, part in assignment:
        module = site.module
        reasons = violations(part.backend.constraints(), module.in_features, module.out_features)
        if reasons:
            misfits.append((site, part, "; ".join(reasons)))
    if not misfits:
        return
    lines = [
        f"  {site.name} [{site.module.out_features}, {site.module.in_features}]: {why}" for site, _, why in misfits
    ]
    shown = "\n".join(lines[:10]) + (f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else "")
    names = [site.name for site, _, _ in misfits]
    raise ValueError(
        f"{len(misfits)} layer(s) do not fit {misfits[0][1].method}; nothing was changed:\n{shown}\n"
        f"Leave them in float with exclude_modules={names!r}, or give them another method with MixedQuantizeConfig"
    )


def _check_weights_present(assignment: Assignment) -> None:
    empty = [site.name for site, _ in assignment if site.module.weight.is_meta]
    if empty:
        raise ValueError(
            f"{len(empty)} layer(s) have no weights yet (meta device), first {empty[0]!r}: call load_state_dict first, "
            "or load_prequantized=True with prepare_for_prequantized_load for a quantized checkpoint"
        )


def check_device(title: str, device: torch.device | str | None) -> None:
    """Raise ValueError when nothing can be allocated on ``device``; None is always there."""
    if device is None:
        return
    try:
        found = torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # NotImplementedError is a RuntimeError
        reason = str(error).strip().partition("\n")[0][:120]
        raise ValueError(f"{title} {str(device)!r} is not available here: {reason}") from error
    if found.is_meta:
        raise ValueError(f"{title} 'meta' holds no values; name a device that computes")


def _announce(assignment: Assignment, device: torch.device | str | None) -> None:
    """Say once a process, for each method, how it runs here."""
    for part in {id(part): part for _, part in assignment}.values():
        part.backend.announce_environment()
        where = torch.device(device) if device is not None else assignment[0][0].module.weight.device
        support = part.backend.support(where)
        key = f"{part.method}:{where.type}"
        if support.kind != "native" and key not in _announced_support:
            _announced_support.add(key)
            logger.warning("%s runs %s on %s: %s", part.method, support.kind, where.type, support.reason)


def _log_summary(what: str, assignment: Assignment) -> None:
    counts: dict[str, int] = {}
    for _, part in assignment:
        counts[part.method] = counts.get(part.method, 0) + 1
    for method, count in counts.items():
        logger.info("%d nn.Linear layers %s (method: %s).", count, what, method)
