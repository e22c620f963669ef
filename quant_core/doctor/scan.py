"""Groups a file's tensors by layer and reads their markers, without refusing anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..backends.comfy_kitchen.formats import FORMATS, MARKER_KEY, MAX_MARKER_BYTES, layer_marker
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import Manifest, read_manifest
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from ..registry import find_method
from .findings import Cast, Finding
from .rules import found

_U8 = torch.uint8
METADATA_MARKERS = "_quantization_metadata"

# comfy/model_detection.py unet_prefix_from_state_dict: what is taken off, "model." last and only if nothing else is.
STRIPPED_PREFIXES = ("model.diffusion_model.", "model.model.", "net.", "model.")


@dataclass
class Layer:
    """One layer as it is stored, right or wrong.

    Attributes:
        name: the dotted name.
        parts: ``{key below the layer: TensorInfo}``.
        conf: what its marker says; None for a layer without a readable marker.
        marked: whether it has a marker at all.
        names: ``{key: full name}`` as in the file, where a scale may carry another prefix than its weight.
    """

    name: str
    parts: dict[str, TensorInfo] = field(default_factory=dict)
    conf: dict[str, Any] | None = None
    marked: bool = False
    names: dict[str, str] = field(default_factory=dict)

    def tensor(self, key: str) -> str:
        """Return the full name of one of its tensors: the one in the file, or the one that it should have there."""
        return self.names.get(key) or (f"{self.name}.{key}" if self.name else key)


@dataclass
class Scan:
    """Everything that the rules look at.

    Attributes:
        checkpoint: the file.
        layers: ``{name: Layer}`` in the order of the file.
        flags: prefixes of the parts that a ``scaled_fp8`` tensor declares to be in the older fp8 form.
        manifest: what quant_core wrote into the file.
        expected: ``{layer: marker}`` that the manifest's recipe gives its ComfyUI layers.
        findings: of the scan itself: markers and metadata that cannot be read.
    """

    checkpoint: Checkpoint
    layers: dict[str, Layer] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def scan(checkpoint: Checkpoint) -> Scan:
    """Group the tensors of a file; small tensors (markers) are read, weights are not."""
    result = Scan(checkpoint)
    for name, info in checkpoint.tensors.items():
        layer_name, key = split_name(name)
        if key == "scaled_fp8":
            result.flags.append(name.removesuffix("scaled_fp8"))
            continue
        layer = result.layers.setdefault(layer_name, Layer(layer_name))
        layer.parts[key], layer.names[key] = info, name
    for layer in result.layers.values():
        if MARKER_KEY in layer.parts:
            _read_marker(result, layer)
    _read_metadata(result)
    _read_manifest(result)
    return result


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name into layer and key: ``blocks.0.up`` and ``weight.absmax``, or ``weight_scale``."""
    layer, found_it, key = name.partition(".weight.")
    if found_it:
        return layer, "weight." + key
    layer, _, key = name.rpartition(".")
    return layer, key


def _read_marker(result: Scan, layer: Layer) -> None:
    layer.marked = True
    info = layer.parts[MARKER_KEY]
    tensor = layer.tensor(MARKER_KEY)
    if info.nbytes > MAX_MARKER_BYTES:
        error = f"{tensor} has {info.nbytes} bytes, a marker is a short JSON text"
        result.findings.append(found("marker-unreadable", layer.name, error=error))
        return
    data = bytes(result.checkpoint.read(tensor).reshape(-1).view(_U8).tolist()) if info.nbytes else b""
    try:
        conf = json.loads(data)  # like ComfyUI's: UTF-8, UTF-16 or UTF-32, which an int32 tensor of characters is
    except (ValueError, RecursionError) as error:
        result.findings.append(found("marker-unreadable", layer.name, error=f"{tensor} is not JSON ({error})"))
        return
    if not isinstance(conf, dict):
        error_text = f"{tensor} is a JSON {type(conf).__name__}, expected an object"
        result.findings.append(found("marker-unreadable", layer.name, error=error_text))
        return
    layer.conf = conf
    if info.dtype != _U8 or len(info.shape) != 1:
        edits = (Cast(tensor, _U8),) if len(info.shape) == 1 and not info.dtype.is_floating_point else ()
        text = f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
        result.findings.append(found("marker-container", layer.name, edits, found=text))


def _read_metadata(result: Scan) -> None:
    """ComfyUI's other place for markers, which wins over the tensors."""
    text = result.checkpoint.metadata.get(METADATA_MARKERS)
    if text is None:
        return
    try:
        layers = json.loads(text)["layers"]
        confs = dict(layers.items())
    except (ValueError, RecursionError) as error:
        result.findings.append(found("metadata-unreadable", error=f"is not JSON ({error})"))
        return
    except (KeyError, TypeError, AttributeError):
        result.findings.append(found("metadata-unreadable", error="has no object 'layers'"))
        return
    missing = []
    for name, conf in confs.items():
        layer = result.layers.get(name) or _with_prefix(result.layers, name)
        if layer is None:
            missing.append(name)
        elif not isinstance(conf, dict):
            layer.marked = True
            error_text = f"the metadata's entry is a JSON {type(conf).__name__}, expected an object"
            result.findings.append(found("marker-unreadable", layer.name, error=error_text))
        else:
            if layer.conf is not None and layer.conf != conf:
                result.findings.append(found("marker-contradicted", layer.name, own=layer.conf, other=conf))
            layer.conf, layer.marked = conf, True
    if missing:
        result.findings.append(found("marker-dangling", count=len(missing), first=missing[0]))


def _with_prefix(layers: Mapping[str, Layer], name: str) -> Layer | None:
    return next((layers[prefix + name] for prefix in STRIPPED_PREFIXES if prefix + name in layers), None)


def _read_manifest(result: Scan) -> None:
    checkpoint = result.checkpoint
    try:
        result.manifest = read_manifest(checkpoint.path, checkpoint.metadata)
    except CheckpointError as error:
        result.findings.append(found("manifest-unreadable", error=str(error)))
        return
    if result.manifest is None:
        return
    recipe = result.manifest.recipe
    parts = recipe.get("configs", [recipe])
    lost = [name for names in result.manifest.layers for name in names if name not in result.layers]
    if lost:
        result.findings.append(found("manifest-layer-missing", count=len(lost), first=lost[0]))
    try:
        for part, names in zip(parts, result.manifest.layers, strict=True):
            fmt = FORMATS.get(part["method"])
            if fmt is None:
                continue
            config = find_method(part["method"]).config_factory(part.get("backend_config_kwargs") or {})
            for name in names:
                width = _width(result.layers.get(name), fmt.packed)
                if width:
                    result.expected[name] = layer_marker(config, width).to_json()
    except (ValueError, KeyError, TypeError) as error:
        result.findings.append(found("manifest-unreadable", error=f"the recipe in the file is not usable: {error}"))


def _width(layer: Layer | None, packed: bool) -> int:
    weight = layer.parts.get("weight") if layer is not None else None
    return weight.shape[1] * (2 if packed else 1) if weight is not None and len(weight.shape) == 2 else 0
