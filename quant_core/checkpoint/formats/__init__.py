"""The format families that quantized layers are stored in: which layer is in which, and what it stands for.

Each family is one module with ``find(checkpoint)`` and ``decode(checkpoint, layer, start, stop)``. They call no
quantization library (GGUF's block formats excepted), so that what a library wrote can be checked against them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError
from . import bitsandbytes, comfy, fp8, gguf, torchao
from .base import StoredLayer, read_marker

if TYPE_CHECKING:
    from ..reader import Checkpoint

__all__ = ["StoredLayer", "dequantize_layer", "describe_cost", "read_marker", "stored_layers"]

_TILE_WEIGHTS = 1 << 20


def stored_layers(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """Return ``{layer name: StoredLayer}`` of every quantized layer of a file; empty for a float file.

    Only markers are read. Whether a layer's scales are there and fit is checked by :func:`dequantize_layer`.

    Raises:
        CheckpointError: a marker cannot be read, or names an unknown format; the message names file and layer.
    """
    found: dict[str, StoredLayer] = {}
    for family in (comfy, bitsandbytes, torchao, gguf):
        found.update(family.find(checkpoint))
    return found | fp8.find(checkpoint, known=found)


def dequantize_layer(checkpoint: Checkpoint, layer: StoredLayer, rows: slice | None = None) -> torch.Tensor:
    """Return the float32 weight that a quantized layer stands for.

    Args:
        checkpoint: the file that the layer is in.
        layer: as :func:`stored_layers` describes it.
        rows: which rows of the weight, in steps of 1; None means all. Only these rows are read.

    Returns:
        float32 ``[rows, in_features]``, or the layer's shape. Beyond the result, memory holds about a million weights.

    Raises:
        CheckpointError: a scale is missing or does not fit; the message names the file, the layer and the tensor.
        ValueError: ``rows`` has a step.
    """
    if not layer.shape:
        raise CheckpointError(f"{checkpoint.path}: layer {layer.name!r} ({layer.format}) has a weight without rows")
    start, stop, step = (rows or slice(None)).indices(layer.shape[0])
    if step != 1:
        raise ValueError(f"rows {rows} has a step; rows are read one after the other")
    stop = max(start, stop)
    decode = _decoder(layer)
    out = torch.empty((stop - start, *layer.shape[1:]), dtype=torch.float32)
    if not out.numel():
        return out
    height = max(1, _TILE_WEIGHTS // max(1, math.prod(layer.shape[1:])))
    height = max(128, height // 128 * 128) if height >= 128 else height
    for first in range(start, stop, height):
        last = min(first + height, stop)
        tile = decode(checkpoint, layer, first, last)
        if tile.shape != (last - first, *layer.shape[1:]):
            raise CheckpointError(
                f"{checkpoint.path}: layer {layer.name!r} ({layer.format}) decodes to rows of {list(tile.shape[1:])}, "
                f"expected {list(layer.shape[1:])}: its tensors belong to different layers"
            )
        out[first - start : last - start] = tile
    return out


def _decoder(layer: StoredLayer) -> Callable[[Checkpoint, StoredLayer, int, int], torch.Tensor]:
    if layer.family == "comfy" or layer.format in comfy.CONVERT_TO_QUANT_FORMATS:
        return comfy.decode
    return {"bitsandbytes": bitsandbytes.decode, "torchao": torchao.decode, "gguf": gguf.decode}.get(
        layer.family, fp8.decode
    )


# Typical errors of a weight in percent (Frobenius norm), measured on the Linear layers of a real sentence encoder.
_ERRORS = {
    "int8_tensorwise": 0.8,
    "int8": 0.9,
    "int8_blockwise": 1.9,
    "scaled_int8": 1.9,
    "mxfp8": 2.7,
    "hybrid_mxfp8": 2.7,
    "fp8": 2.7,
    "float8_e4m3fn": 2.7,
    "float8_e4m3fn_rowwise": 2.7,
    "float8_e4m3fn_blockwise": 2.7,
    "float8_e5m2": 5.3,
    "asym_w4a8_int8": 7.3,
    "nf4": 9.4,
    "nvfp4": 9.4,
    "int4": 11,
    "mxfp4": 12,
    "fp4": 12.7,
    "convrot_w4a4": 13.5,
    "Q8_0": 0.6,
    "Q6_K": 1.8,
    "Q5_K": 3.7,
    "Q5_1": 3.9,
    "Q5_0": 4.5,
    "Q4_K": 7.3,
    "IQ4_NL": 7.8,
    "IQ4_XS": 7.9,
    "Q4_1": 8.0,
    "Q4_0": 9.0,
    "Q3_K": 16,
    "Q2_K": 30,
}


def describe_cost(layers: Iterable[StoredLayer]) -> str:
    """Say in one sentence what quantizing these layers again costs; an empty string for no layers."""
    counts = Counter(layer.format for layer in layers)
    if not counts:
        return ""
    errors = []
    for name, count in counts.most_common():
        error = _ERRORS.get(name)
        size = "an error that is not known" if error is None else f"about {error:g} %"
        errors.append(f"{name} {size} ({count} {'layer' if count == 1 else 'layers'})")
    return f"quantizing again adds to the error that the weights already have: {', '.join(errors)}"
