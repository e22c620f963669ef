"""Says with which method each quantized layer of a file without a manifest is loaded."""

from __future__ import annotations

import json

from ..errors import CheckpointError
from .formats import StoredLayer, read_marker, stored_layers
from .formats.comfy import COMFY_FORMATS, MARKER, METADATA_MARKERS, markers
from .reader import Checkpoint

__all__ = ["COMFY_FORMATS", "missing_markers", "read_marker", "recognize_layers"]


def recognize_layers(checkpoint: Checkpoint) -> dict[tuple[str, str], list[str]]:
    """Return ``{(method, options as JSON): [layer names]}``; empty for a file that holds no quantized layer.

    Plain fp8 casts are not listed: they load as float weights.

    Raises:
        CheckpointError: a marker is not readable, or a layer is in a format that no method loads.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for layer in stored_layers(checkpoint).values():
        if layer.family == "fp8_cast":
            continue
        if layer.method is None:
            raise CheckpointError(_unloadable(checkpoint, layer))
        # With convrot off the layer takes the rotation from its marker; on, an unrotated marker is refused.
        options = {"convrot": False} if layer.format == "int8_tensorwise" else {}
        groups.setdefault((layer.method, json.dumps(options)), []).append(layer.name)
    return groups


def _unloadable(checkpoint: Checkpoint, layer: StoredLayer) -> str:
    return (
        f"{checkpoint.path}: layer {layer.name!r} is stored as {layer.family} {layer.format}, which no method loads; "
        "convert the file to a method's format first (`python -m quant_core quantize`)"
    )


def missing_markers(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return ``{tensor name: its bytes}`` of the markers that the metadata holds and no tensor does."""
    if METADATA_MARKERS not in checkpoint.metadata:
        return {}
    return {
        name + MARKER: json.dumps(marker).encode("utf-8")
        for name, marker in markers(checkpoint).items()
        if name + MARKER not in checkpoint.tensors
    }
