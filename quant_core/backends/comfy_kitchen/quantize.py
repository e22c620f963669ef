"""Quantizing a weight to ComfyUI's formats, done by comfy-kitchen.

Weights are quantized as float32, whatever their dtype: comfy-kitchen computes in the dtype it is given, and rotating
and dividing in bfloat16 costs up to a tenth more weight error for the same file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...constraints import violations
from ...errors import QuantizationError
from .formats import (
    FORMATS_BY_NAME,
    MARKER_KEY,
    ComfyFormat,
    Marker,
    as_written,
    encode_marker,
    layer_marker,
)
from .kernels import FLOAT_DTYPES, NVFP4_MAX, fp8_scale, kitchen, layout_of

# Rows are quantized in tiles: fresh whole-layer temporaries cost more in page faults than the arithmetic does. A
# multiple of 128 rows, so that the tiled layout of block scales is made of whole tiles.
_TILE_ELEMENTS_CPU = 1 << 20
_TILE_ELEMENTS_DEVICE = 1 << 26
_MXFP8_SMALLEST = 2.0**-117  # the largest code, 448, times the smallest normal power of two


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
    low, high = torch.aminmax(weight)
    amax = torch.maximum(-low, high).float()
    if not torch.isfinite(amax):
        raise QuantizationError("the weight holds NaN or infinity (as float32)")
    marker = layer_marker(config, columns)
    fmt = FORMATS_BY_NAME[marker.format]
    tensors = _QUANTIZERS[fmt.name](weight, amax, fmt, marker, config)
    tensors = {key: as_written(fmt.name, key, t) for key, t in tensors.items()}
    return {**tensors, MARKER_KEY: encode_marker(marker).to(weight.device)}


_Parts = tuple[torch.Tensor, ...]


def _by_rows(weight: torch.Tensor, quantize: Callable[[torch.Tensor], _Parts]) -> list[torch.Tensor]:
    """Apply ``quantize`` to float32 tiles of rows and join each of its results along the rows."""
    elements = _TILE_ELEMENTS_CPU if weight.device.type == "cpu" else _TILE_ELEMENTS_DEVICE
    step = max(128, elements // max(weight.shape[1], 1) // 128 * 128)
    parts = [quantize(tile.float()) for tile in weight.split(step)]
    return list(parts[0]) if len(parts) == 1 else [torch.cat(columns) for columns in zip(*parts, strict=True)]


def _quantize_fp8(weight: torch.Tensor, amax: torch.Tensor, fmt: ComfyFormat, *_: Any) -> dict[str, torch.Tensor]:
    scale = fp8_scale(amax, weight.dtype, fmt.storage_dtype)
    to_fp8 = kitchen().quantize_per_tensor_fp8
    (codes,) = _by_rows(weight, lambda tile: (to_fp8(tile, scale, fmt.storage_dtype),))
    return {"weight": codes, "weight_scale": scale}


def _quantize_int8(
    weight: torch.Tensor, amax: torch.Tensor, fmt: ComfyFormat, marker: Marker, config: Any
) -> dict[str, torch.Tensor]:
    layout = layout_of(fmt)
    if not config.per_channel:
        scale = (amax / 127.0).clamp(min=1e-30)
        (codes,) = _by_rows(weight, lambda tile: (layout.quantize(tile, scale=scale)[0],))
        return {"weight": codes, "weight_scale": scale}

    def by_channel(tile: torch.Tensor) -> _Parts:
        rotation = {"convrot": True, "convrot_groupsize": marker.rotation} if marker.rotation else {}
        codes, params = layout.quantize(tile, per_channel=True, **rotation)
        return codes, params.scale

    codes, scale = _by_rows(weight, by_channel)
    return {"weight": codes, "weight_scale": scale}


def _quantize_nvfp4(weight: torch.Tensor, amax: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
    scale = amax / NVFP4_MAX
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes, blocks = _by_rows(weight, lambda tile: kitchen().quantize_nvfp4(tile, scale))
    return {"weight": codes, "weight_scale": blocks, "weight_scale_2": scale}


def _quantize_mxfp8(weight: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
    def tile_bytes(tile: torch.Tensor) -> _Parts:
        # A block below the smallest exponent would be divided by a scale that underflows to 0, giving NaN codes.
        codes, blocks = kitchen().quantize_mxfp8(torch.nn.functional.hardshrink(tile, _MXFP8_SMALLEST))
        return codes, blocks.view(torch.uint8)

    codes, blocks = _by_rows(weight, tile_bytes)
    return {"weight": codes, "weight_scale": blocks}


def _quantize_convrot_w4a4(
    weight: torch.Tensor, amax: torch.Tensor, fmt: ComfyFormat, marker: Marker, config: Any
) -> dict[str, torch.Tensor]:
    def rotated(tile: torch.Tensor) -> _Parts:
        codes, params = layout_of(fmt).quantize(tile, convrot_groupsize=marker.rotation)
        return codes, params.scale

    codes, scale = _by_rows(weight, rotated)
    return {"weight": codes, "weight_scale": scale}


def _quantize_asym_w4a8(
    weight: torch.Tensor, amax: torch.Tensor, fmt: ComfyFormat, marker: Marker, config: Any
) -> dict[str, torch.Tensor]:
    # One codebook is chosen from the whole layer, so the rows go together; comfy-kitchen tiles them itself.
    codes, params = layout_of(fmt).quantize(
        weight.float(), group_size=marker.group_size, convrot_groupsize=marker.rotation
    )
    return {
        "weight": codes,
        "weight_s_rel": params.scale,
        "weight_s_channel": params.s_channel,
        "weight_codebook": params.codebook,
    }


_QUANTIZERS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "int8_tensorwise": _quantize_int8,
    "float8_e4m3fn": _quantize_fp8,
    "float8_e5m2": _quantize_fp8,
    "mxfp8": _quantize_mxfp8,
    "nvfp4": _quantize_nvfp4,
    "convrot_w4a4": _quantize_convrot_w4a4,
    "asym_w4a8_int8": _quantize_asym_w4a8,
}
