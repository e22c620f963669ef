"""How much a model's output suffers from an error in the weights of each of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .config import QuantizeConfig
from .errors import QuantizationError
from .measure import relative_error
from .sites import find_sites

Progress = Callable[[int, int, str], None]


@torch.no_grad()
def measure_sensitivity(
    model: nn.Module,
    run: Callable[[nn.Module], torch.Tensor],
    layers: Iterable[str],
    method: str = "comfy_kitchen_int4_w4a8",
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, float]:
    """Quantize one layer after the other, each alone, and look at the output.

    With the errors of small perturbations adding up in squares, a layer quantized with another method contributes its
    sensitivity times the square of that method's relative weight error to the squared relative error of the output.

    Args:
        model: in float; every layer has its own weight again when this returns or fails.
        run: returns the model's output on inputs of yours, a tensor of any shape; called once for each layer, and once
            before. It must not depend on anything random.
        layers: dotted names of Linears.
        method: what to quantize with: about as coarse as what the layers may get later.
        progress: called as ``progress(done, total, layer name)``.
        options: of the method.

    Returns:
        ``{layer: squared relative output error over squared relative weight error}``.

    Raises:
        ValueError: the model has no Linear of a name.
        QuantizationError: the output or a weight holds NaN or infinity, or is zero.
    """
    layers = list(layers)
    sites = {site.name: site.module for site in find_sites(model)}
    unknown = [layer for layer in layers if layer not in sites]
    if unknown:
        raise ValueError(f"the model has no Linear {unknown[0]!r}; it has {', '.join(list(sites)[:5])}, ...")
    reference = run(model).detach().clone()
    if not torch.isfinite(reference).all() or not reference.any():
        raise QuantizationError("the model's output is zero, or holds NaN or infinity; nothing can be measured by it")
    backend = QuantizeConfig(method=method, backend_config_kwargs=options).backend
    found = {}
    for index, layer in enumerate(layers):
        linear = sites[layer]
        weight = linear.weight
        restored = backend.dequantize_to_linear(backend.create_quantized_linear(linear), torch.float32).weight
        in_weight = relative_error(weight, restored)
        linear.weight = nn.Parameter(restored.to(weight.dtype), requires_grad=False)
        try:
            in_output = relative_error(reference, run(model))
        finally:
            linear.weight = weight
        found[layer] = (in_output / in_weight) ** 2 if in_weight else 0.0
        if progress is not None:
            progress(index + 1, len(layers), layer)
    return found
