"""fp8 weights without a marker: cast as they were, or with a scale beside them.

``scaled_fp8`` files, ComfyUI's older form, hold ``L.scale_weight`` (and ``L.scale_input``) beside ``L.weight``, and one
tensor ``scaled_fp8`` whose dtype names the format and whose two elements, if it has two, ask for matmuls in full
precision. Other tools write ``L.weight_scale`` and nothing else. A weight with no scale at all is a plain cast.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError
from .base import DEFAULT_DTYPE, FLOAT_DTYPES, FP8_DTYPES, Parts, StoredLayer

if TYPE_CHECKING:
    from ..reader import Checkpoint

_SCALES = ("scale_weight", "weight_scale")
_NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2", torch.int8: "scaled_int8"}


def find(checkpoint: Checkpoint, known: Container[str] = ()) -> dict[str, StoredLayer]:
    """Return every fp8 weight of two or more dimensions, and int8 weights with ``scale_weight`` (convert_to_quant).

    Args:
        checkpoint: the file.
        known: layers that carry a marker, which says more than their dtypes do.

    Raises:
        CheckpointError: a weight has a scale that is not a float tensor, and nothing says what it means.
    """
    flags = {name: info for name, info in checkpoint.tensors.items() if name.rpartition(".")[2] == "scaled_fp8"}
    found = {}
    for name, info in checkpoint.tensors.items():
        if not name.endswith(".weight") or info.dtype not in _NAMES or len(info.shape) < 2:
            continue
        layer = name.removesuffix(".weight")
        scale = next((s for s in _SCALES if f"{layer}.{s}" in checkpoint.tensors), None)
        if layer in known or (info.dtype == torch.int8 and scale != "scale_weight"):
            continue
        family, options = "fp8_cast", {}
        if scale is not None:
            found_dtype = checkpoint.tensors[f"{layer}.{scale}"].dtype
            if found_dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{checkpoint.path}: layer {layer!r} has {scale} in {found_dtype}, which is no scale of a plain "
                    f"fp8 weight, and no marker ({layer}.comfy_quant) says what it means"
                )
            family = "scaled_fp8" if info.dtype in FP8_DTYPES else "convert_to_quant"
            flag = next((i for n, i in flags.items() if layer.startswith(n.removesuffix("scaled_fp8"))), None)
            options = {"scale": scale, "full_precision_matrix_mult": flag is not None and flag.shape == (2,)}
        parts = ("weight", "scale_weight", "scale_input", "weight_scale", "input_scale")
        keys = tuple(key for part in parts if (key := f"{layer}.{part}") in checkpoint.tensors)
        found[layer] = StoredLayer(layer, family, _NAMES[info.dtype], None, info.shape, DEFAULT_DTYPE, keys, options)
    return found


def decode(checkpoint: Checkpoint, layer: StoredLayer, start: int, stop: int) -> torch.Tensor:
    """Return the rows ``start`` to ``stop`` of the weight in float32."""
    parts = Parts(checkpoint, layer)
    if "scale" in layer.options:
        return parts.scaled("weight", layer.options["scale"], start, stop)
    return parts.rows("weight", start, stop).float()
