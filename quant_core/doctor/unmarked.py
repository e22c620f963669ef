"""Rules for layers without a marker: lost ones, the older fp8 form, and plain fp8."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..backends.comfy_kitchen.formats import FORMATS_BY_NAME, Marker, tensor_specs
from .comfy import describe, dtype_name
from .findings import AddMarker, Edit, Finding, Rename
from .rules import found
from .scan import Layer, Scan

_FP8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
_CODES = (torch.int8, torch.uint8)
_SCALES = ("weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook")


def check_unmarked(scan: Scan) -> list[Finding]:
    """Apply the rules for layers without a marker."""
    findings: list[Finding] = []
    if any(finding.code == "metadata-unreadable" for finding in scan.findings):
        return findings  # the markers may be there
    plain: list[str] = []
    legacy: list[str] = []
    for layer in scan.layers.values():
        weight = layer.parts.get("weight")
        foreign = any(key.startswith("weight.") for key in layer.parts)
        if layer.marked or weight is None or foreign or len(weight.shape) != 2:
            continue
        scales = [key for key in _SCALES if key in layer.parts]
        if "scale_weight" in layer.parts and weight.dtype in _FP8:
            findings.extend(_legacy(scan, layer))
            legacy.append(layer.name)
        elif scales and weight.dtype in (*_FP8, *_CODES):
            findings.append(_lost_marker(scan, layer, scales))
        elif weight.dtype in _FP8:
            plain.append(layer.name)
        elif weight.dtype in _CODES:
            findings.append(found("codes-without-scales", layer.name, found=describe(weight)))
    if plain:
        findings.append(found("fp8-cast", count=len(plain), first=plain[0]))
    if legacy and scan.flags:
        findings.append(found("legacy", count=len(legacy)))
    return findings


def _legacy(scan: Scan, layer: Layer) -> Iterable[Finding]:
    weight, scale = layer.parts["weight"], layer.parts["scale_weight"]
    flagged = any(layer.name.startswith(flag) for flag in scan.flags)
    edits: list[Edit] = []
    if math.prod(scale.shape) == 1:
        conf = {"format": _FP8[weight.dtype]}
        edits = [
            Rename(layer.tensor(old), layer.tensor(new))
            for old, new in (("scale_weight", "weight_scale"), ("scale_input", "input_scale"))
            if old in layer.parts
        ]
        edits.append(AddMarker(layer.name, tuple(conf.items())))
    if not flagged:
        yield found("legacy-flag-missing", layer.name, tuple(edits))
    elif weight.dtype == torch.float8_e5m2:
        yield found("legacy-e5m2", layer.name, tuple(edits))


def _lost_marker(scan: Scan, layer: Layer, scales: list[str]) -> Finding:
    weight = layer.parts["weight"]
    expected = scan.expected.get(layer.name)
    conf = expected or implied_marker(layer)
    edits = (AddMarker(layer.name, tuple(conf.items())),) if conf and _fits(layer, conf) else ()
    packed = FORMATS_BY_NAME[conf["format"]].packed if conf else "weight_s_rel" in scales or _half(layer)
    shown = conf or "that the file was written with (the tensors allow several)"
    return found(
        "marker-missing-packed" if packed else "marker-missing",
        layer.name,
        edits,
        found=f"{dtype_name(weight.dtype)} {list(weight.shape)}",
        scales=" and ".join(scales),
        conf=shown,
    )


def _half(layer: Layer) -> bool:
    """Whether the layer can only be ``convrot_w4a4``: int8 codes whose row scales are a plain row."""
    weight, scale = layer.parts["weight"], layer.parts.get("weight_scale")
    return weight.dtype == torch.int8 and scale is not None and scale.shape == weight.shape[:1] and scale.shape != (1,)


def implied_marker(layer: Layer) -> dict[str, Any] | None:
    """Return the marker that the tensors allow, None where they allow none or several.

    fp8 with one scale, mxfp8 and nvfp4 can be told by their tensors. int8 may be rotated or not, w4a4 and w4a8 may be
    rotated in several group sizes: their tensors look alike, and a wrong guess is a wrong weight.
    """
    weight = layer.parts["weight"]
    scale, second = layer.parts.get("weight_scale"), layer.parts.get("weight_scale_2")
    if scale is None:
        return None
    candidates = []
    if weight.dtype in _FP8 and second is None:
        candidates = [_FP8[weight.dtype], "mxfp8"]
    elif weight.dtype == torch.uint8 and second is not None:
        candidates = ["nvfp4"]
    fitting = [name for name in candidates if _fits(layer, {"format": name})]
    return {"format": fitting[0]} if len(fitting) == 1 else None


def _fits(layer: Layer, conf: dict[str, Any]) -> bool:
    """Whether every tensor has the dtype and shape that the marker's format has."""
    fmt = FORMATS_BY_NAME[conf["format"]]
    weight = layer.parts["weight"]
    width = weight.shape[1] * (2 if fmt.packed else 1)
    if any(size % fmt.alignment for size in (weight.shape[0], width)):
        return False
    marker = Marker(fmt.name, conf.get("convrot_groupsize", 0), conf.get("group_size", 0))
    scale = layer.parts.get("weight_scale")
    per_channel = fmt.name == "int8_tensorwise" and scale is not None and math.prod(scale.shape) > 1
    specs = tensor_specs(marker, weight.shape[0], width, per_channel)
    return all(
        key in layer.parts and layer.parts[key].dtype in spec.dtypes and layer.parts[key].shape in spec.shapes
        for key, spec in specs.items()
        if key == "weight" or key in fmt.scale_keys
    )
