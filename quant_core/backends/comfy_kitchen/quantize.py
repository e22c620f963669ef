"""Quantizing one whole weight to a ComfyUI format."""

from __future__ import annotations

from typing import Any

import torch

from ...backend import finite_range
from ...constraints import violations
from ...errors import QuantizationError
from .formats import tensor_specs
from .kernels import FLOAT_DTYPES
from .rows import row_quantizer, takes_runs

# Elements of a run. Small runs stay in a CPU's cache, and fresh whole-layer temporaries cost page faults.
_RUN_CPU = 1 << 18
_RUN_DEVICE = 1 << 26


def quantize_weight(weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Quantize one float weight.

    Args:
        weight: ``[out_features, in_features]``, any float dtype, on any device.
        config: the config object of a comfy_kitchen method.

    Returns:
        ``{key below the layer: tensor}`` exactly as ComfyUI stores the layer, with the marker ``comfy_quant``; without
        a bias. The tensors are on the weight's device.

    Raises:
        QuantizationError: the weight holds NaN or infinity, or its shape does not fit the format.
    """
    if weight.dim() != 2:
        raise QuantizationError(f"a weight [out_features, in_features] is expected, got {list(weight.shape)}")
    rows, columns = weight.shape
    if reasons := violations(config.constraints(), columns, rows):
        raise QuantizationError("; ".join(reasons))
    weight = weight.detach()
    if weight.dtype not in FLOAT_DTYPES:
        weight = weight.to(config.orig_dtype)
    quantizer = row_quantizer(config, columns, weight.dtype)
    if quantizer.needs_range:
        quantizer.set_range(*finite_range(weight))
    step = max(rows, 1)
    if takes_runs(config):
        elements = _RUN_CPU if weight.device.type == "cpu" else _RUN_DEVICE
        step = max(1, elements // max(columns, 1) // quantizer.multiple) * quantizer.multiple
    parts = [quantizer.quantize(run)[0] for run in weight.contiguous().split(step)]
    tensors = {key: parts[0][key] if len(parts) == 1 else _joined([p[key] for p in parts]) for key in parts[0]}
    tensors.update(quantizer.finish([None] * len(parts)))
    specs = tensor_specs(quantizer.marker, rows, columns, getattr(config, "per_channel", True))
    shaped = {key: t.reshape(specs[key].shapes[0]) if key in specs else t for key, t in tensors.items()}
    return {key: tensor.to(weight.device) for key, tensor in shaped.items()}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join along the rows; torch concatenates no fp8 scales of their own dtypes on every device, but bytes."""
    if parts[0].element_size() > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
