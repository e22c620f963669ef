"""Rules for layers that carry a marker: ComfyUI's native formats, format by format, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch

from ..backends.comfy_kitchen.formats import (
    FORMATS_BY_NAME,
    MARKER_KEY,
    ComfyFormat,
    Marker,
    TensorSpec,
    decode_marker,
    encode_marker,
    marker_problems,
    tensor_specs,
)
from ..checkpoint.header import TensorInfo
from .findings import Cast, Edit, Finding, Reshape, View
from .rules import found
from .scan import Layer, Scan

_BYTES = (torch.uint8, torch.int8)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Tensors that change what the codes mean; a loader that does not read them computes something else.
_MEANINGFUL = ("pre_quant_scale", "weight_zero_point", "weight_zeros", "weight_scale_2", "weight_s_rel")
_KNOWN = ("weight", "bias", MARKER_KEY)

# Kernels of these take their scales in one shape only; the others flatten them.
_STRICT_SHAPES = ("convrot_w4a4", "asym_w4a8_int8")


def check_comfy(scan: Scan) -> list[Finding]:
    """Apply the rules for marked layers."""
    findings: list[Finding] = []
    for layer in scan.layers.values():
        if layer.conf is not None and not (len(layer.parts) == 1 and MARKER_KEY in layer.parts):
            findings.extend(_check_layer(layer, scan))
    return findings


def _check_layer(layer: Layer, scan: Scan) -> Iterable[Finding]:
    conf = layer.conf or {}
    name = conf.get("format")
    if not isinstance(name, str) or not name:
        yield found("marker-no-format", layer.name, conf=json.dumps(conf)[:200])
        return
    if name not in FORMATS_BY_NAME:
        yield found("marker-unknown-format", layer.name, format=name, known=", ".join(FORMATS_BY_NAME))
        return
    weight = layer.parts.get("weight")
    if weight is None:
        yield found("weight-missing", layer.name, keys=", ".join(layer.parts))
        return
    if len(weight.shape) == 3:
        return  # a bank of experts, which has other shapes; the report says that it was not looked at
    if len(weight.shape) != 2:
        yield found("marker-not-linear", layer.name, dims=len(weight.shape))
        return
    fmt = FORMATS_BY_NAME[name]
    yield from _check_weight(layer, fmt, weight)
    marker = _marker(conf)
    if isinstance(marker, str):
        yield found("marker-unusable", layer.name, error=marker)
        return
    width = weight.shape[1] * (2 if fmt.packed else 1)
    problems = marker_problems(marker, width)
    for problem in problems:
        yield found("marker-unusable", layer.name, error=problem)
    if problems or weight.dtype not in (fmt.storage_dtype, *_BYTES):
        return
    expected = scan.expected.get(layer.name)
    if expected is not None and expected != marker.to_json():
        yield found("rotation-disagrees", layer.name, marked=marker.to_json(), recipe=expected)
    yield from _check_scales(layer, fmt, marker, weight.shape[0], width)
    yield from _check_others(layer, fmt)


def _marker(conf: dict) -> Marker | str:
    """Return the marker, or the sentence that says why it cannot be used."""
    try:
        return decode_marker(torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8))
    except ValueError as error:
        return str(error)


def _check_weight(layer: Layer, fmt: ComfyFormat, weight: TensorInfo) -> Iterable[Finding]:
    tensor, stored = layer.tensor("weight"), fmt.storage_dtype
    if weight.dtype != stored:
        texts: dict[str, Any] = {"format": fmt.name, "found": dtype_name(weight.dtype), "expected": dtype_name(stored)}
        if weight.dtype in _BYTES and stored in _FP8:
            yield found("fp8-in-bytes", layer.name, (View(tensor, stored),), **texts)
        elif weight.dtype in _BYTES and stored in _BYTES:
            yield found("container-sign", layer.name, (View(tensor, stored),), **texts)
        else:
            yield found("weight-dtype", layer.name, **texts)
    width = weight.shape[1] * (2 if fmt.packed else 1)
    if weight.shape[0] % fmt.alignment or width % fmt.alignment:
        yield found("weight-unaligned", layer.name, found=describe(weight), format=fmt.name, factor=fmt.alignment)
    bias = layer.parts.get("bias")
    if bias is not None and bias.shape != weight.shape[:1]:
        yield found("bias-shape", layer.name, found=describe(bias), rows=weight.shape[0])


def _check_scales(layer: Layer, fmt: ComfyFormat, marker: Marker, rows: int, width: int) -> Iterable[Finding]:
    scale = layer.parts.get("weight_scale")
    per_channel = fmt.name == "int8_tensorwise" and scale is not None and math.prod(scale.shape) > 1
    specs = tensor_specs(marker, rows, width, per_channel)
    for key in fmt.scale_keys:
        if key not in layer.parts:
            yield found("scale-missing", layer.name, tensor=key, format=fmt.name)
    for key, spec in specs.items():
        info = layer.parts.get(key)
        if key != "weight" and info is not None and not (info.dtype in spec.dtypes and info.shape in spec.shapes):
            yield from _check_scale(layer, key, fmt, spec, info)
    one_scale = scale is not None and math.prod(scale.shape) == 1
    if fmt.name == "int8_tensorwise" and marker.rotation and one_scale and rows > 1:
        error = "the marker says rotated (convrot), but weight_scale is one scale for the whole weight"
        yield found("marker-unusable", layer.name, error=error)


def _check_scale(layer: Layer, key: str, fmt: ComfyFormat, spec: TensorSpec, info: TensorInfo) -> Iterable[Finding]:
    tensor, wanted = layer.tensor(key), spec.dtypes[0]
    texts: dict[str, Any] = {"tensor": key, "found": describe(info), "expected": spec.describe().replace("torch.", "")}
    counts = {math.prod(shape) for shape in spec.shapes}
    size = math.prod(info.shape)
    if size not in counts:
        yield found("scale-wrong-shape", layer.name, **texts)
        return
    if info.dtype not in spec.dtypes:
        edits: tuple[Edit, ...] = (Cast(tensor, wanted),)
        if torch.float32 not in spec.dtypes:  # one byte a block
            if fmt.name == "mxfp8":
                edits = (Cast(tensor, torch.float8_e8m0fnu), View(tensor, torch.uint8))
            edits = edits if info.dtype in _FLOATS else ()
            to = "float8_e8m0, as uint8" if fmt.name == "mxfp8" else dtype_name(wanted)
            yield found("block-scale-dtype", layer.name, edits, to=to, **texts)
        elif info.dtype in _FLOATS:
            yield found("scale-dtype", layer.name, edits, to=dtype_name(wanted), **texts)
        else:
            yield found("scale-wrong-dtype", layer.name, **texts)
    if info.shape not in spec.shapes:
        shape = next(shape for shape in spec.shapes if math.prod(shape) == size)
        code = "scale-shape-refused" if fmt.name in _STRICT_SHAPES else "scale-shape"
        yield found(code, layer.name, (Reshape(tensor, shape),), **texts)


def _check_others(layer: Layer, fmt: ComfyFormat) -> Iterable[Finding]:
    read = (*_KNOWN, *fmt.scale_keys, *fmt.optional_keys)
    for key in layer.parts:
        if key not in read:
            code = "tensor-ignored" if key in _MEANINGFUL else "tensor-useless"
            yield found(code, layer.name, tensor=key, format=fmt.name)


def marker_text(conf: dict) -> torch.Tensor:
    """Return the stored form of a marker, as ComfyUI itself would write it."""
    marker = _marker(conf)
    if isinstance(marker, str):
        raise ValueError(marker)
    return encode_marker(marker)


def describe(info: TensorInfo) -> str:
    """Return a tensor's dtype and shape for people: ``float32 [512, 1]``."""
    return f"{dtype_name(info.dtype)} {list(info.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
