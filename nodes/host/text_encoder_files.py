"""The files of text encoders: what they hold, how their layers are quantized, and what of that is kept on disk."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import comfy.utils
import torch

from quant_core import CheckpointError, MixedQuantizeConfig, QuantizeConfig, Recipe
from quant_core.checkpoint import open_checkpoint
from quant_core.checkpoint.formats import dequantize_layer, stored_layers
from quant_core.checkpoint.header import TensorInfo
from quant_core.convert import convert
from quant_core.plan import plan
from quant_core.selection import choose_layers

from .cache import cache_key, disk_cache
from .files import report_progress
from .ops import MARKER
from .quantizer import Target, select
from .source import Source, read_source

logger = logging.getLogger("quant_core")

_CLIP_LAYER = re.compile(r"(^|\.)(text_model\.(encoder|embeddings)|transformer\.resblocks)\.")
"""Layers of CLIP text models, by ComfyUI's names and by those of their first authors."""


@dataclass
class TextEncoderFile:
    """A file on its way.

    Attributes:
        source: what was read, each quantized layer with its marker.
        is_clip: it holds a CLIP text model.
        targets: how its layers are quantized, by their names in the file.
        note: what became of the layers that the recipe does not reach.
        kept: ``{method: how many}`` of the layers that an earlier load quantized, read from the disk cache.
    """

    source: Source
    is_clip: bool
    targets: dict[str, Target] = field(default_factory=dict)
    note: str = ""
    kept: Counter[str] = field(default_factory=Counter)


def read_file(path: str) -> TextEncoderFile:
    """Read a text encoder file, each quantized layer with its marker; a quantized CLIP text model becomes float.

    Raises:
        CheckpointError: it cannot be read; the message names it.
    """
    source = read_source(path)
    is_clip = any(_CLIP_LAYER.search(key) for key in source.state_dict)
    note = ""
    if is_clip and source.is_quantized:
        note = _in_float(source)
    state, metadata = comfy.utils.convert_old_quants(source.state_dict, "", metadata=source.metadata)
    ending = "." + MARKER
    source.state_dict = {
        key: tensor
        for key, tensor in state.items()
        if not key.endswith(ending) or (not is_clip and key.removesuffix(MARKER) + "weight" in state)
    }
    source.metadata = metadata
    return TextEncoderFile(source, is_clip, note=note)


def _in_float(source: Source) -> str:
    """Turn the layers of a quantized CLIP text model into float; return what to say of it."""
    if not source.path.lower().endswith((".safetensors", ".sft")):
        raise CheckpointError(
            f"{source.name} is a quantized CLIP text model ({source.describe()}) in a pickle file; these are read from "
            "safetensors files only. Use the float file."
        )
    checkpoint = open_checkpoint(source.path)
    for layer in stored_layers(checkpoint).values():
        for key in [key for key in source.state_dict if key.startswith(f"{layer.name}.") and not key.endswith(".bias")]:
            del source.state_dict[key]
        source.state_dict[f"{layer.name}.weight"] = dequantize_layer(checkpoint, layer).to(layer.dtype)
    logger.warning(
        "%s is a quantized CLIP text model (%s); ComfyUI runs these in float only, so it was turned back into float. "
        "The float file is no larger in memory, and exact.",
        source.name,
        source.describe(),
    )
    return f"was quantized ({source.describe()}), turned back into float"


def choose(files: Sequence[TextEncoderFile], recipe: Recipe) -> None:
    """Decide how the layers of each file are quantized.

    Raises:
        ValueError: an entry of the recipe matches no layer, two of its parts claim one, or nothing is left to quantize.
    """
    for file in files:
        if not file.is_clip and file.source.is_quantized:
            _choose_again(file, recipe)
    candidates = [file for file in files if not file.is_clip and not file.source.is_quantized]
    if not candidates:
        return
    # Two files may use the same names. An entry of the recipe matches the end of a name after a dot, too.
    prefixes = [f"encoder_{index}." if len(candidates) > 1 else "" for index in range(len(candidates))]
    infos = {
        prefix + key: info
        for prefix, file in zip(prefixes, candidates, strict=True)
        for key, info in _infos(file.source).items()
    }
    by_structure = choose_layers({key: info.shape for key, info in infos.items()})
    if not any(decision.quantize for decision in by_structure.values()):
        for file in candidates:  # a projection beside a large encoder, say
            file.note = "has no layers to quantize, kept in float"
        return
    selection = select(recipe, infos)
    for prefix, file in zip(prefixes, candidates, strict=True):
        for layer, target in selection.targets.items():
            if layer.startswith(prefix):
                file.targets[layer.removeprefix(prefix)] = target
        kept = sum(layer.startswith(prefix) for layer in selection.kept)
        file.note = f"{kept} weights kept in float (embeddings, norms, heads)"


def _choose_again(file: TextEncoderFile, recipe: Recipe) -> None:
    source = file.source
    logger.warning(
        "%s is quantized already (%s) and is loaded as it is; the method %s is not applied",
        source.name,
        source.describe(),
        recipe.recipe_method,
    )
    file.note = f"quantized already ({source.describe()}), loaded as it is"
    if not source.again:
        return
    # A format that no method holds became float.
    method = source.methods.most_common(1)[0][0] if source.methods else recipe.parts()[0].method
    chosen = select(QuantizeConfig(method=method), _infos(source)).targets
    file.targets = {layer: target for layer, target in chosen.items() if layer in source.again}


def _infos(source: Source) -> dict[str, TensorInfo]:
    return {key: TensorInfo(t.dtype, tuple(t.shape), 0, 0) for key, t in source.state_dict.items()}


def describe(file: TextEncoderFile, done: Iterable[str]) -> str:
    """Return a line that says what became of a file whose layers ``done`` were quantized."""
    methods = Counter(file.targets[layer].method for layer in done)
    parts = [f"{count} layers quantized with {method}" for method, count in methods.items()]
    parts += [f"{count} layers quantized with {method}, from the disk cache" for method, count in file.kept.items()]
    if file.is_clip:
        parts.append("a CLIP text model, kept in float")
    return f"{file.source.name}: {'; '.join([*parts, file.note] if file.note else parts)}"


# ------------------------------------------------------------------ the disk cache


def through_cache(file: TextEncoderFile, device: torch.device) -> TextEncoderFile:
    """Return a float file with its layers quantized as chosen, from the disk cache; it is put there first if need be.

    The file is converted to a file, with the bytes that quantizing while loading gives. Where that is not possible
    (a pickle file, no room on the disk) it comes back as it is.

    Args:
        file: whose layers were chosen.
        device: where to quantize.

    Raises:
        CheckpointError, QuantizationError: as :func:`quant_core.convert.convert`.
    """
    if not file.targets or not file.source.path.lower().endswith((".safetensors", ".sft")):
        return file
    recipe = _recipe_of(file.targets)
    key = cache_key([file.source.path], recipe, torch.float32)
    kept = _kept(file, key)
    if kept is None:
        planned = plan(file.source.path, recipe)
        with disk_cache().entry(key, planned.file_bytes) as target:
            if target is not None:
                convert(planned, target, device=device, progress=report_progress(None))
        kept = _kept(file, key)
    return kept or file


def _recipe_of(targets: Mapping[str, Target]) -> Recipe:
    groups: dict[str, tuple[Target, list[str]]] = {}
    for layer, target in targets.items():
        groups.setdefault(repr((target.method, sorted(target.options.items()))), (target, []))[1].append(layer)
    parts = [
        QuantizeConfig(method=target.method, backend_config_kwargs=dict(target.options), target_modules=layers)
        for target, layers in groups.values()
    ]
    return parts[0] if len(parts) == 1 else MixedQuantizeConfig(configs=parts)


def _kept(file: TextEncoderFile, key: str) -> TextEncoderFile | None:
    entry = disk_cache().get(key)
    if entry is None:
        return None
    try:
        kept = read_file(str(entry))
    except CheckpointError:
        if Path(entry).exists():
            raise
        return None  # another process made room for an entry of its own
    kept.source.path, kept.source.opened = file.source.path, file.source.opened  # messages name the user's file
    kept.note = file.note
    kept.kept = Counter(target.method for target in file.targets.values())
    return kept
