"""GGUF's block formats, as quantized layers of a :class:`GGUFCheckpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..gguf_file import GGUFCheckpoint, GGUFTensorInfo
from .base import StoredLayer

if TYPE_CHECKING:
    from ..reader import Checkpoint


def find(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """Return every quantized tensor; a layer is named without ``.weight``, any other tensor by its whole name."""
    found = {}
    for name, info in checkpoint.tensors.items():
        if isinstance(info, GGUFTensorInfo) and info.quantized:
            layer = name.removesuffix(".weight")
            found[layer] = StoredLayer(layer, "gguf", info.kind, None, info.shape, info.dtype, (name,))
    return found


def decode(checkpoint: Checkpoint, layer: StoredLayer, start: int, stop: int) -> torch.Tensor:
    """Return the rows ``start`` to ``stop`` of the weight in float32."""
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint.decode_rows(layer.keys[0], start, stop)
