"""Says how a file without a manifest is quantized, from its keys, its metadata and the small marker tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointError
from .reader import Checkpoint

MAX_MARKER_BYTES = 65536

# comfy_quant's "format" -> method.
COMFY_FORMATS = {
    "int8_tensorwise": "comfy_kitchen_int8_w8a8",
    "float8_e4m3fn": "comfy_kitchen_fp8_w8a8",
    "float8_e5m2": "comfy_kitchen_fp8_e5m2_w8a8",
    "mxfp8": "comfy_kitchen_mxfp8_w8a8",
    "nvfp4": "comfy_kitchen_nvfp4_w4a4",
    "convrot_w4a4": "comfy_kitchen_int4_convrot_w4a4",
    "asym_w4a8_int8": "comfy_kitchen_int4_w4a8",
}

# torchao's tensor class -> (activation-quantized, by element type) -> method.
_TORCHAO_METHODS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "Int8Tensor": lambda d: "torchao_int8_w8a8" if d.get("act_quant_kwargs") else "torchao_int8_w8a16",
    "Float8Tensor": lambda d: "torchao_fp8_w8a8" if d.get("act_quant_kwargs") else "torchao_fp8_w8a16",
    "NVFP4Tensor": lambda d: "torchao_nvfp4_w4a4" if d.get("act_quant_kwargs") else "torchao_nvfp4_w4a16",
    "MXTensor": lambda d: "torchao_mxfp4_w4a4" if "float4" in json.dumps(d.get("elem_dtype")) else "torchao_mxfp8_w8a8",
    "Int4Tensor": lambda d: (
        "torchao_int4_w4a8" if "float8" in json.dumps(d.get("activation_dtype")) else "torchao_int4_w4a16"
    ),
}


def recognize_layers(checkpoint: Checkpoint) -> dict[tuple[str, str], list[str]]:
    """Return ``{(method, options as JSON): [layer names]}``; empty for a file that holds no quantized layer.

    Raises:
        CheckpointError: a marker is not readable, or names a format that no method reads.
    """
    groups: dict[tuple[str, str], list[str]] = {}

    def add(layer: str, method: str, **options: Any) -> None:
        groups.setdefault((method, json.dumps(options, sort_keys=True)), []).append(layer)

    for name in checkpoint.tensors:
        if name.endswith(".comfy_quant"):
            layer = name.removesuffix(".comfy_quant")
            method = _comfy_method(checkpoint, layer, read_marker(checkpoint, name))
            # With convrot off the layer takes the rotation from its marker; on, an unrotated marker is refused.
            options = {"convrot": False} if method == COMFY_FORMATS["int8_tensorwise"] else {}
            add(layer, method, **options)
        elif ".weight.quant_state.bitsandbytes__" in name:
            layer, _, kind = name.partition(".weight.quant_state.bitsandbytes__")
            method = f"bitsandbytes_{kind}"
            if kind not in ("nf4", "fp4"):
                raise CheckpointError(f"{checkpoint.path}: layer {layer!r} is bitsandbytes {kind!r}; known: nf4, fp4")
            add(layer, method)
    _add_torchao(checkpoint, add)
    _add_metadata_markers(checkpoint, add)
    return groups


def read_marker(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Read a uint8 tensor that holds a JSON object.

    Raises:
        CheckpointError: it is not one.
    """
    size = checkpoint.tensors[name].nbytes
    if size > MAX_MARKER_BYTES:
        raise CheckpointError(f"{checkpoint.path}: marker {name!r} has {size} bytes, a marker is a short JSON text")
    try:
        marker = json.loads(bytes(checkpoint.read(name).reshape(-1).tolist()))
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: not bytes, not UTF-8, not JSON
        raise CheckpointError(f"{checkpoint.path}: marker {name!r} is not JSON ({error})") from error
    if not isinstance(marker, dict):
        raise CheckpointError(
            f"{checkpoint.path}: marker {name!r} is a JSON {type(marker).__name__}, expected an object"
        )
    return marker


def _comfy_method(checkpoint: Checkpoint, layer: str, marker: Mapping[str, Any]) -> str:
    kind = marker.get("format")
    if not isinstance(kind, str) or kind not in COMFY_FORMATS:
        known = ", ".join(COMFY_FORMATS)
        raise CheckpointError(f"{checkpoint.path}: layer {layer!r} is marked with format {kind!r}; known: {known}")
    return COMFY_FORMATS[kind]


def _add_torchao(checkpoint: Checkpoint, add: Callable[..., None]) -> None:
    for name in checkpoint.tensors:
        layer, found, _ = name.partition("._weight_qdata")
        if not found:
            continue
        try:
            entry = json.loads(checkpoint.metadata[layer + ".weight"])
            method = _TORCHAO_METHODS[entry["_type"]](entry["_data"])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{checkpoint.path}: layer {layer!r} holds torchao tensors, but the metadata does not describe them "
                f"({type(error).__name__}: {error}); the file's header was lost, save it again with its metadata"
            ) from error
        add(layer, method)


def _add_metadata_markers(checkpoint: Checkpoint, add: Callable[..., None]) -> None:
    """ComfyUI's other place for markers: one JSON for all layers in the metadata."""
    if "_quantization_metadata" in checkpoint.metadata:
        raise CheckpointError(
            f"{checkpoint.path}: the markers are in the metadata entry '_quantization_metadata', which this version "
            "does not read; open the file in ComfyUI and save it, which writes them as tensors"
        )
