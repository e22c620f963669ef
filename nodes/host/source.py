"""Reads a model file for ComfyUI, whatever tool quantized it.

Layers in one of ComfyUI's own formats are left to ComfyUI. The layers of other tools, and formats that this ComfyUI
does not have, become weights in the adapter's layout where a method holds them exactly; what no method holds is
turned into float, to be quantized again.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy.utils
import safetensors
import torch
from comfy.quant_ops import QUANT_ALGOS

from quant_core import CheckpointError, recipe_from_dict
from quant_core.checkpoint import open_checkpoint
from quant_core.checkpoint.formats import StoredLayer, dequantize_layer, stored_layers
from quant_core.checkpoint.manifest import read_manifest
from quant_core.checkpoint.reader import Checkpoint
from quant_core.checkpoint.recognize import missing_markers
from quant_core.layout import PLACEHOLDER

from . import compat
from .adapter import FIELD_PREFIX, wrap
from .ops import MARKER
from .user_backends import register_user_backends

_SAFETENSORS = (".safetensors", ".sft")
# Metadata entries of a whole file, which say nothing about a single layer.
_FILE_ENTRIES = {"format", "quant_core", "tensor_names", "_quantization_metadata", "workflow", "prompt"}


@dataclass
class Source:
    """A model file that was read.

    Attributes:
        path: of the file.
        state_dict: plain tensors, and weights in the adapter's layout.
        metadata: of the file.
        formats: how many layers the file holds in which format; empty for a float file.
        methods: how many layers are held by which method.
        again: layers, by their names in the file, that became float since no method holds their format.
        file_names: of the tensors in the file.
        opened: which file it was, and its size and time of modification, before it was read.
    """

    path: str
    state_dict: dict[str, torch.Tensor]
    metadata: Mapping[str, str] | None
    formats: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    again: set[str] = field(default_factory=set)
    file_names: frozenset[str] = frozenset()
    opened: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def is_quantized(self) -> bool:
        return bool(self.formats)

    def describe(self) -> str:
        return ", ".join(f"{count} layers {form}" for form, count in self.formats.most_common())

    def check_unchanged(self) -> None:
        """Raise CheckpointError when the file has been rewritten since it was opened.

        Its tensors are mapped, so that some were of before and some of after. A file that was removed, or another put
        in its place, leaves them as they were.
        """
        now = _state(self.path)
        if self.opened is not None and now is not None and now[0] == self.opened[0] and now != self.opened:
            raise CheckpointError(
                f"{self.name} was rewritten while it was being read; wait until it is complete and start again"
            )


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_source(path: str) -> Source:
    """Read a model file.

    Raises:
        CheckpointError: it cannot be read; the message names it.
    """
    name = os.path.basename(path)
    if name.lower().endswith(".gguf"):
        raise CheckpointError(
            f"{name} is a GGUF file, which ComfyUI's models are not loaded from. Convert it first, with the node "
            "Convert Checkpoint or `python -m quant_core quantize`, and load the result"
        )
    opened = _state(path)
    try:
        state_dict, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    except pickle.UnpicklingError as error:  # torch's own text advises to load it unsafely
        raise CheckpointError(
            f"{name} cannot be read as a model file: it is no PyTorch file, or holds more than tensors, which could "
            "run code. Get the model as a safetensors file"
        ) from error
    except (safetensors.SafetensorError, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{name} cannot be read as a model file: {error}. It may be an unfinished download, or a file of another "
            "kind under this name; compare its size with the source's and fetch it again."
        ) from error
    if not isinstance(state_dict, dict):
        raise CheckpointError(f"{name} holds a {type(state_dict).__name__}, not named tensors: it is no model file")
    state_dict = {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
    if any(key.rpartition(".")[2].startswith(FIELD_PREFIX) for key in state_dict):
        raise CheckpointError(
            f"{name} was written by ComfyUI's ModelSave or CheckpointSave from a model in a bitsandbytes or torchao "
            "format, or another that is not ComfyUI's own. They leave out what its weights mean, so nothing can read "
            "it. Load the original again and save it with Save Quantized Checkpoint"
        )
    source = Source(path, state_dict, metadata, file_names=frozenset(state_dict), opened=opened)
    if name.lower().endswith(_SAFETENSORS):
        checkpoint = open_checkpoint(path)
        for layer in stored_layers(checkpoint).values():
            _take(source, checkpoint, layer)
        _take_registered(source, checkpoint)
        # The older scaled fp8 form marks the whole file by one tensor; its layers have markers of their own now.
        for key in [key for key in state_dict if key.rpartition(".")[2] == "scaled_fp8"]:
            del state_dict[key]
    else:
        _count_markers(source)
    return source


def _take_registered(source: Source, checkpoint: Checkpoint) -> None:
    """Take the layers of a registered backend, whose format only the file's own record describes."""
    manifest = read_manifest(checkpoint.path, checkpoint.metadata)
    if manifest is None or not manifest.weights:
        return
    register_user_backends()
    recipe = recipe_from_dict(manifest.recipe, load_prequantized=True)
    for part, layers in zip(recipe.parts(), manifest.layers, strict=True):
        for name in layers:
            if name not in manifest.weights:
                continue
            shape, dtype = manifest.weights[name]
            keys = [key for key in checkpoint.tensors if key.startswith(f"{name}.") and key != f"{name}.bias"]
            layer = StoredLayer(
                name, part.backend.name, part.method, part.method, shape, getattr(torch, dtype), tuple(keys)
            )
            source.formats[part.method] += 1
            source.methods[part.method] += 1
            _wrap(source, checkpoint, layer, part.to_dict().get("backend_config_kwargs", {}))


def adapt_native(source: Source) -> None:
    """Turn layers in ComfyUI's own formats into the adapter's layout too.

    For files whose layers ComfyUI renames and fuses: it moves weights alone, and their scales would be lost.
    """
    if not source.path.lower().endswith(_SAFETENSORS):
        return
    checkpoint = open_checkpoint(source.path)
    for layer in stored_layers(checkpoint).values():
        if layer.family == "comfy" and f"{layer.name}.{MARKER}" in source.state_dict and layer.method is not None:
            _wrap(source, checkpoint, layer)


def _take(source: Source, checkpoint: Checkpoint, layer: StoredLayer) -> None:
    """Bring one quantized layer of the file into the form that it is loaded in."""
    source.formats[f"{layer.family} {layer.format}" if layer.family != "comfy" else layer.format] += 1
    if layer.method is not None:
        source.methods[layer.method] += 1
    if layer.family == "comfy" and compat.reads(layer.format, [key.rpartition(".")[2] for key in layer.keys]):
        return
    if layer.family in ("fp8_cast", "scaled_fp8") and len(layer.shape) == 2:
        if _mark_fp8(source, checkpoint, layer):
            return
    elif layer.family == "fp8_cast":
        return  # a convolution or a norm; ComfyUI casts it to the dtype that the model computes in
    if layer.method is not None and len(layer.shape) == 2:
        _wrap(source, checkpoint, layer)
        return
    for key in layer.keys:
        source.state_dict.pop(key, None)
    source.state_dict[f"{layer.name}.weight"] = dequantize_layer(checkpoint, layer).to(layer.dtype)
    source.again.add(layer.name)


def _wrap(source: Source, checkpoint: Checkpoint, layer: StoredLayer, options: Mapping[str, Any] | None = None) -> None:
    prefix = f"{layer.name}."
    tensors = {key.removeprefix(prefix): source.state_dict.pop(key) for key in layer.keys}
    if layer.family == "comfy" and MARKER not in tensors:
        marker = missing_markers(checkpoint).get(prefix + MARKER, b"")
        tensors[MARKER] = torch.tensor(list(marker), dtype=torch.uint8)
    metadata = {
        key.replace(layer.name, PLACEHOLDER, 1): value
        for key, value in (source.metadata or {}).items()
        if key.startswith(prefix) or ("." not in key and key not in _FILE_ENTRIES)
    }
    if layer.family == "torchao":
        metadata["tensor_names"] = json.dumps([f"{PLACEHOLDER}.weight"])
    if options is None:
        # With convrot off the layer takes the rotation from its marker; on, an unrotated marker is refused.
        options = {"convrot": False} if layer.format == "int8_tensorwise" else {}
    assert layer.method is not None
    wrapped = wrap(layer.method, options, tensors, metadata, layer.shape, layer.dtype)
    try:
        wrapped._params.module(wrapped._qdata)  # every tensor is checked here, by the backend
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source.name}: layer {layer.name} ({layer.family} {layer.format}): {error}") from error
    source.state_dict[prefix + "weight"] = wrapped


def _mark_fp8(source: Source, checkpoint: Checkpoint, layer: StoredLayer) -> bool:
    """Give an fp8 weight without a marker ComfyUI's marker and one scale; False where it has a scale for each row."""
    state = source.state_dict
    scale = torch.ones((), dtype=torch.float32)
    if "scale" in layer.options:
        stored = layer.key(layer.options["scale"])
        if math.prod(checkpoint.tensors[stored].shape) != 1:
            return False
        scale = state.pop(stored).float().reshape(())
    state[layer.key("weight_scale")] = scale
    input_scale = state.pop(layer.key("scale_input"), None)
    if input_scale is not None and input_scale.item() != 1.0:
        state[layer.key("input_scale")] = input_scale
    # A cast file computes in 16 bit in ComfyUI, and goes on doing so.
    marker: dict[str, Any] = {"format": layer.format}
    if layer.family == "fp8_cast" or layer.options.get("full_precision_matrix_mult"):
        marker["full_precision_matrix_mult"] = True
    state[layer.key(MARKER)] = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
    return True


def _count_markers(source: Source) -> None:
    """Count the layers of a file that is no safetensors file, whose markers are all that is known of them."""
    for key in [key for key in source.state_dict if key.endswith("." + MARKER)]:
        try:
            content = json.loads(source.state_dict[key].cpu().numpy().tobytes())
            form = content["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{source.name}: {key} is not a JSON object that names a format: {error}") from error
        if form not in QUANT_ALGOS:
            raise CheckpointError(f"{source.name}: {key} names the format {form!r}, {compat.missing_format(form)}.")
        source.formats[form] += 1
