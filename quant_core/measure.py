"""How wrong a quantized layer is: its weight against the float weight, and its output against the float output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .replace import check_shapes

if TYPE_CHECKING:
    from .config import Recipe

logger = logging.getLogger("quant_core")


def relative_error(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Return ``||value - reference|| / ||reference||`` (Frobenius norms, summed in float64).

    A reference of zeros gives 0.0 when ``value`` is zero too, and infinity otherwise.
    """
    difference = torch.linalg.vector_norm(value.double() - reference.double()).item()
    norm = torch.linalg.vector_norm(reference.double()).item()
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def measure_quantization_error(
    model: nn.Module,
    config: Recipe,
    *,
    run: Callable[[nn.Module], Any] | None = None,
    compute_device: torch.device | str | None = None,
    verbose: bool = True,
) -> list[dict[str, Any]]:
    """Quantize each layer that ``config`` selects, one at a time, and compare it with the float layer.

    The model is not changed, and one quantized layer exists at a time.

    Args:
        model: with float weights.
        config: a QuantizeConfig or MixedQuantizeConfig.
        run: ``run(model)`` performs a forward on data of yours; each layer's inputs are taken from it and its output
            error is measured as well. Without it only weights are compared.
        compute_device: where to quantize; None means where each weight is.
        verbose: log the table.

    Returns:
        One dict a layer, worst first: ``name``, ``method``, ``shape`` (out, in), ``relative_error`` (of the weight,
        Frobenius), ``max_abs`` (worst absolute error of one weight), ``bytes_before``, ``bytes_after``, and with
        ``run`` also ``output_relative_error`` and ``output_max_abs``.
    """
    assignment = config.assign_layers(model)
    check_shapes(assignment)
    inputs = _capture_inputs(assignment, model, run) if run is not None else {}
    rows = []
    for site, part in assignment:
        linear = site.module
        layer = part.backend.create_quantized_linear(linear, compute_device, compute_device)
        restored = part.backend.dequantize_to_linear(layer, torch.float32).weight.detach()
        weight = linear.weight.detach().to(restored.device)
        row: dict[str, Any] = {
            "name": site.name,
            "method": part.method,
            "shape": tuple(weight.shape),
            "relative_error": relative_error(weight, restored),
            "max_abs": (restored.double() - weight.double()).abs().max().item(),
            "bytes_before": weight.numel() * weight.element_size(),
            "bytes_after": _stored_bytes(
                part.backend.flatten_state_dict({f"l.{k}": v for k, v in layer.state_dict().items()})[0]
            ),
        }
        if site.name in inputs:
            row.update(_output_error(linear, layer, inputs[site.name]))
        rows.append(row)
    rows.sort(key=lambda r: -r["relative_error"])
    if verbose:
        logger.info("%s", _table(rows))
    return rows


def _stored_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for key, t in tensors.items() if key != "l.bias")


def _capture_inputs(
    assignment: Any, model: nn.Module, run: Callable[[nn.Module], Any]
) -> dict[str, list[torch.Tensor]]:
    captured: dict[str, list[torch.Tensor]] = {}
    handles = []
    for site, _ in assignment:

        def keep(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = site.name) -> None:
            captured.setdefault(name, []).append(args[0].detach())

        handles.append(site.module.register_forward_pre_hook(keep))
    try:
        with torch.no_grad():
            run(model)
    finally:
        for handle in handles:
            handle.remove()
    return captured


def _output_error(linear: nn.Module, layer: nn.Module, inputs: list[torch.Tensor]) -> dict[str, float]:
    with torch.no_grad():
        device = next(iter(layer.state_dict().values())).device
        x = torch.cat([t.reshape(-1, t.shape[-1]) for t in inputs])
        reference = linear(x).to(device)
        value = layer(x.to(device))
    return {
        "output_relative_error": relative_error(reference, value),
        "output_max_abs": (value.double() - reference.double()).abs().max().item(),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"Quantization error of {len(rows)} layers, worst first:", "  relative     worst abs   layer"]
    lines += [f"  {r['relative_error']:8.3%}  {r['max_abs']:12.4e}   {r['name']} ({r['method']})" for r in rows]
    return "\n".join(lines)
