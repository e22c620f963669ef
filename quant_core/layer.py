"""Quantizes one weight in memory to the tensors that a file holds for it, with any backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .backend import RowQuantizer, finite_range
from .errors import QuantizationError
from .layout import PLACEHOLDER, Formats, StoredForm
from .runs import run_rows


def quantize_layer(
    formats: Formats,
    method: str,
    options: Mapping[str, Any],
    weight: torch.Tensor,
    device: torch.device | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Quantize a float weight; where the backend can, in runs of rows, so that temporaries stay small.

    Args:
        formats: where backends and forms are made once.
        method, options: of the backend.
        weight: float ``[out_features, in_features]``; not changed.
        device: where to quantize; None is where the weight is.

    Returns:
        ``({key below the layer: tensor on the weight's device}, metadata entries)``, without a bias. The entries are
        those of a layer of the name ``PLACEHOLDER``. The bytes are those of a converted file.

    Raises:
        QuantizationError: the weight holds NaN or infinity.
    """
    device = device or weight.device
    backend = formats.backend(method, options)
    quantizer = backend.row_quantizer(weight.shape[0], weight.shape[1], weight.dtype)
    if quantizer is not None:
        form = formats.form(method, options, tuple(weight.shape), weight.dtype)
        return _by_rows(quantizer, form, weight.detach(), device), form.metadata
    moved = weight.detach().to(device)
    finite_range(moved)
    linear = nn.Linear(moved.shape[1], moved.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(moved, requires_grad=False)
    state = backend.create_quantized_linear(linear).state_dict()
    flat, metadata = backend.flatten_state_dict({f"{PLACEHOLDER}.{key}": value for key, value in state.items()})
    return {key.removeprefix(f"{PLACEHOLDER}."): t.to(weight.device) for key, t in flat.items()}, metadata


def _by_rows(
    quantizer: RowQuantizer, form: StoredForm, weight: torch.Tensor, device: torch.device
) -> dict[str, torch.Tensor]:
    step = max(1, run_rows(quantizer, weight.shape[1], device.type == "cpu"))
    runs = [partial(_run, weight, start, start + step, device) for start in range(0, weight.shape[0], step)]
    if quantizer.needs_range:
        quantizer.set_range(*finite_range(torch.stack([end for run in runs for end in torch.aminmax(run())])))
    tensors = {
        key: torch.empty(shape, dtype=dtype, device=weight.device) for key, (dtype, shape) in form.tensors.items()
    }
    written = dict.fromkeys(tensors, 0)

    def write(parts: Mapping[str, torch.Tensor]) -> None:
        for key, part in parts.items():
            data = part.contiguous().reshape(-1).view(torch.uint8)
            buffer = tensors[key].reshape(-1).view(torch.uint8)
            buffer[written[key] : written[key] + data.numel()] = data.to(weight.device)
            written[key] += data.numel()

    kept = []
    for run in runs:
        parts, keep = quantizer.quantize(run())
        write(parts)
        kept.append(keep)
    write(quantizer.finish(kept))
    short = [key for key, tensor in tensors.items() if written[key] != tensor.nbytes]
    if short:
        raise QuantizationError(f"{', '.join(short)} has fewer bytes than its format takes")
    return tensors


def _run(weight: torch.Tensor, start: int, stop: int, device: torch.device) -> torch.Tensor:
    return weight[start:stop].to(device).contiguous()
