"""ComfyUI's native formats: a marker for each layer, in a tensor ``comfy_quant`` or in the metadata.

The marker is a JSON object with at least ``format``. It lies in a uint8 tensor beside the weight, or for all layers in
the metadata entry ``_quantization_metadata`` (``{"layers": {layer: marker}}``, the names with or without the prefix of
an all-in-one checkpoint). convert_to_quant writes further formats under the same marker, which ComfyUI refuses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from .arithmetic import e2m1, e8m0, lookup, nibbles, rotate, scale_blocks, signed4
from .base import FP8_DTYPES, Parts, StoredLayer, dtype_of, read_marker

if TYPE_CHECKING:
    from ..reader import Checkpoint

MARKER = ".comfy_quant"
METADATA_MARKERS = "_quantization_metadata"

COMFY_FORMATS: dict[str, str | None] = {
    "int8_tensorwise": "comfy_kitchen_int8_w8a8",
    "float8_e4m3fn": "comfy_kitchen_fp8_w8a8",
    "float8_e5m2": "comfy_kitchen_fp8_e5m2_w8a8",
    "mxfp8": "comfy_kitchen_mxfp8_w8a8",
    "nvfp4": "comfy_kitchen_nvfp4_w4a4",
    "convrot_w4a4": "comfy_kitchen_int4_convrot_w4a4",
    "asym_w4a8_int8": "comfy_kitchen_int4_w4a8",
    "awq_w4a16": None,
}
"""A marker's ``format`` and the method that loads it."""

CONVERT_TO_QUANT_FORMATS = ("float8_e4m3fn_rowwise", "float8_e4m3fn_blockwise", "int8_blockwise", "hybrid_mxfp8")

_PACKED = ("nvfp4", "convrot_w4a4", "awq_w4a16")
_PADDED = {"nvfp4": 16, "mxfp8": 32, "hybrid_mxfp8": 32}
_PARTS = (
    "weight",
    "weight_scale",
    "weight_scale_2",
    "weight_scalar",
    "weight_s_rel",
    "weight_s_channel",
    "weight_codebook",
    "weight_correction",
    "weight_zeros",
    "input_scale",
    "pre_quant_scale",
    "comfy_quant",
)


def find(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """Return every layer with a marker.

    Raises:
        CheckpointError: a marker cannot be read, contradicts another one, names an unknown format or no weight.
    """
    return {name: _describe(checkpoint, name, marker) for name, marker in markers(checkpoint).items()}


def markers(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return ``{layer: marker}`` from the tensors and from the metadata, in the order of the file."""
    found = {
        name.removesuffix(MARKER): read_marker(checkpoint, name) for name in checkpoint.tensors if name.endswith(MARKER)
    }
    for name, marker in _metadata_markers(checkpoint).items():
        other = found.setdefault(name, marker)
        differing = [key for key in other.keys() & marker.keys() if other[key] != marker[key]]
        if differing:
            key = sorted(differing)[0]
            raise CheckpointError(
                f"{checkpoint.path}: layer {name!r} has two markers that disagree: {key!r} is {other[key]!r} in "
                f"{name + MARKER!r} and {marker[key]!r} in the metadata; the file was edited by halves"
            )
    return found


def _metadata_markers(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    text = checkpoint.metadata.get(METADATA_MARKERS)
    if text is None:
        return {}
    try:
        layers = json.loads(text)["layers"]
        entries = dict(layers.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: the metadata entry {METADATA_MARKERS!r} is not a JSON object with 'layers' ({error})"
        ) from error
    from ..reader import diffusion_prefix

    prefix = diffusion_prefix(checkpoint)
    result = {}
    for name, marker in entries.items():
        if not isinstance(marker, dict):
            raise CheckpointError(
                f"{checkpoint.path}: the marker of layer {name!r} in the metadata is a JSON "
                f"{type(marker).__name__}, expected an object"
            )
        result[name if f"{name}.weight" in checkpoint.tensors else prefix + name] = marker
    return result


def _describe(checkpoint: Checkpoint, name: str, marker: Mapping[str, Any]) -> StoredLayer:
    kind = marker.get("format")
    if not isinstance(kind, str) or (kind not in COMFY_FORMATS and kind not in CONVERT_TO_QUANT_FORMATS):
        known = ", ".join([*COMFY_FORMATS, *CONVERT_TO_QUANT_FORMATS])
        raise CheckpointError(f"{checkpoint.path}: layer {name!r} is marked with format {kind!r}; known: {known}")
    weight = checkpoint.tensors.get(f"{name}.weight")
    if weight is None:
        raise CheckpointError(f"{checkpoint.path}: layer {name!r} is marked as {kind}, but has no {name + '.weight'!r}")
    nested = marker.get("params")
    options = {**(nested if isinstance(nested, dict) else {}), **marker}
    method = COMFY_FORMATS.get(kind)
    shape = weight.shape
    if kind in _PACKED and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    elif kind == "asym_w4a8_int8" and len(shape) == 2:
        # A row has 4 or 6 bits a weight; how many weights, the group scales tell.
        scales = checkpoint.tensors.get(f"{name}.weight_s_rel")
        size = options.get("group_size", 16)
        width = scales.shape[1] * size if scales and len(scales.shape) == 2 and type(size) is int else 0
        six_bits = width > 0 and shape[1] * 8 == width * 6
        shape = (shape[0], width if six_bits else shape[1] * 2)
        method = None if six_bits else method
    shape = _without_padding(checkpoint, name, kind, shape)
    family = "comfy" if kind in COMFY_FORMATS else "convert_to_quant"
    keys = tuple(key for part in _PARTS if (key := f"{name}.{part}") in checkpoint.tensors)
    return StoredLayer(name, family, kind, method, shape, dtype_of(options.get("orig_dtype")), keys, options)


def _without_padding(checkpoint: Checkpoint, name: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """ComfyUI pads the rows of its block formats; the bias still has as many as the layer."""
    bias = checkpoint.tensors.get(f"{name}.bias")
    multiple = _PADDED.get(kind)
    if multiple is None or bias is None or len(bias.shape) != 1 or len(shape) != 2:
        return shape
    padded = -(-bias.shape[0] // multiple) * multiple
    return (bias.shape[0], shape[1]) if padded == shape[0] else shape


# ------------------------------------------------------------------ decoding


def decode(checkpoint: Checkpoint, layer: StoredLayer, start: int, stop: int) -> torch.Tensor:
    """Return the rows ``start`` to ``stop`` of the weight in float32."""
    parts = Parts(checkpoint, layer)
    if layer.format not in ("int8_tensorwise", *_FP8) and len(layer.shape) != 2:
        raise parts.fail(f"the weight has the shape {list(layer.shape)}, expected two dimensions")
    return _DECODERS[layer.format](parts, start, stop)


def _fp8(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("weight", *FP8_DTYPES)
    return parts.scaled("weight", "weight_scale", start, stop)


def _int8(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("weight", torch.int8)
    values = parts.scaled("weight", "weight_scale", start, stop)
    convrot = parts.layer.options.get("convrot", False)
    if not isinstance(convrot, bool):
        raise parts.fail(f"the marker says convrot {convrot!r}, expected true or false")
    return rotate(values, _rotation(parts)) if convrot else values


def _mxfp8(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("weight", *FP8_DTYPES)
    width = _divided(parts, 32)
    scales = parts.tiled("weight_scale", start, stop, width, torch.uint8, torch.float8_e8m0fnu)
    return scale_blocks(parts.rows("weight", start, stop).float(), e8m0(scales))


def _nvfp4(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("weight", torch.uint8)
    width = _divided(parts, 16)
    scales = parts.tiled("weight_scale", start, stop, width, torch.uint8, torch.float8_e4m3fn)
    scales = scales.view(torch.float8_e4m3fn).float() * parts.scalar("weight_scale_2")
    values = scale_blocks(e2m1(nibbles(parts.rows("weight", start, stop), low_first=False)), scales)
    if parts.has("pre_quant_scale"):
        # The layer multiplies its input by this vector; in the weight it has the same effect.
        parts.info("pre_quant_scale", shape=(parts.layer.shape[1],))
        values.mul_(parts.read("pre_quant_scale").float())
    return values


def _convrot_w4a4(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("weight", torch.int8, torch.uint8)
    parts.info("weight_scale", torch.float32, shape=(parts.layer.shape[0],))
    values = signed4(nibbles(parts.rows("weight", start, stop), low_first=True))
    return rotate(values.mul_(parts.rows("weight_scale", start, stop).unsqueeze(1)), _rotation(parts))


def _asym_w4a8(parts: Parts, start: int, stop: int) -> torch.Tensor:
    """The codes stand for levels that are rounded to int8 before the row's scale, as the matmul uses them."""
    parts.info("weight", torch.int8, torch.uint8)
    rows, width = parts.layer.shape
    group = _integer(parts, "group_size", 16)
    if group < 1 or width % group:
        raise parts.fail(f"the marker has group_size {group}, which does not divide the width {width}")
    parts.info("weight_s_rel", torch.float8_e4m3fn, torch.uint8, torch.float32, shape=(rows, width // group))
    parts.info("weight_s_channel", torch.float32, shape=(rows,))
    packed = parts.rows("weight", start, stop).view(torch.uint8)
    codes = nibbles(packed[:, : width // 2], low_first=True)
    bits = 6 if packed.shape[1] > width // 2 else 4
    if bits == 6:
        # Behind the low nibbles of a row come the upper two bits of every code, four codes a byte.
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
        upper = (packed[:, width // 2 :].unsqueeze(-1) >> shifts) & 3
        codes = codes | (upper.flatten(1) << 4)
    if parts.has("weight_codebook"):
        parts.info("weight_codebook", torch.float32, shape=(16,))
        values = lookup(codes, parts.read("weight_codebook"))
    else:
        values = codes.float() - 2 ** (bits - 1)
    relative = parts.rows("weight_s_rel", start, stop)
    relative = relative.view(torch.float8_e4m3fn) if relative.element_size() == 1 else relative
    levels = scale_blocks(values, relative.float()).round_().clamp_(-127, 127)
    levels.mul_(parts.rows("weight_s_channel", start, stop).unsqueeze(1))
    if parts.has("weight_correction"):
        parts.info("weight_correction", shape=(width // group, rows))
        correction = parts.read("weight_correction").float().t()[start:stop]
        levels.view(stop - start, -1, group).add_(correction.unsqueeze(-1))
    return rotate(levels, _rotation(parts))


def _awq_w4a16(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("weight", torch.int8, torch.uint8)
    rows, width = parts.layer.shape
    group = _integer(parts, "group_size", 64)
    if group < 1 or width % group:
        raise parts.fail(f"the marker has group_size {group}, which does not divide the width {width}")
    for part in ("weight_scale", "weight_zeros"):
        parts.info(part, shape=(width // group, rows))
    values = nibbles(parts.rows("weight", start, stop), low_first=True).float() - 8
    scale_blocks(values, parts.read("weight_scale").float().t()[start:stop])
    zeros = parts.read("weight_zeros").float().t()[start:stop]
    values.view(stop - start, -1, group).add_(zeros.unsqueeze(-1))
    return values


def _divided(parts: Parts, block: int) -> int:
    width = parts.layer.shape[1]
    if width % block:
        raise parts.fail(f"the width {width} is no multiple of {block}, the format's block")
    return width // block


def _integer(parts: Parts, key: str, default: int) -> int:
    value = parts.layer.options.get(key, default)
    if type(value) is not int:
        raise parts.fail(f"the marker has {key} {value!r}, expected an integer")
    return value


def _rotation(parts: Parts) -> int:
    group, width = _integer(parts, "convrot_groupsize", 256), parts.layer.shape[-1]
    if group < 4 or group & (group - 1) or math.log2(group) % 2:
        raise parts.fail(f"the marker has convrot_groupsize {group}, which is not 4, 16, 64, 256, ...")
    if width % group:
        raise parts.fail(f"the marker has convrot_groupsize {group}, which does not divide the width {width}")
    return group


_FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn_rowwise", "float8_e4m3fn_blockwise")
_DECODERS: dict[str, Callable[[Parts, int, int], torch.Tensor]] = {
    **dict.fromkeys(_FP8, _fp8),
    "int8_tensorwise": _int8,
    "int8_blockwise": _int8,
    "mxfp8": _mxfp8,
    "hybrid_mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
    "convrot_w4a4": _convrot_w4a4,
    "asym_w4a8_int8": _asym_w4a8,
    "awq_w4a16": _awq_w4a16,
}
