"""The ``quant_core`` metadata entry: what makes a file load with no options given.

JSON: ``version`` (of quant_core), ``manifest`` (of this entry's form), ``recipe`` (see ``Recipe.to_dict``), ``layers``
(for each part of the recipe, in order, the names of its layers), ``checksums`` (the first hex digits of every
tensor's BLAKE3) and, for a converted file, ``source``. ``weights`` has shape and dtype of the layers whose format only
their own backend knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..registry import find_method
from ..version import __version__
from .writer import METADATA_KEY

MANIFEST_VERSION = 1
RECOGNIZED = ("bitsandbytes", "torchao", "comfy_kitchen")
"""The backends whose layers are recognized from their tensors alone."""

FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; ``recipe`` is data, not yet a Recipe."""

    version: str
    recipe: dict[str, Any]
    layers: list[list[str]]
    checksums: dict[str, str]
    weights: dict[str, tuple[tuple[int, ...], str]]
    """``{layer: (shape of the float weight, its dtype)}`` of formats that are not recognized from their tensors."""


def is_recognized(method: str) -> bool:
    """Whether the layers of a method are recognized from their tensors, without a manifest."""
    return find_method(method).backend in RECOGNIZED


def make_manifest(
    recipe: Mapping[str, Any],
    layers: list[list[str]],
    source: Mapping[str, Any] | None = None,
    weights: Mapping[str, tuple[str, Sequence[int], torch.dtype]] | None = None,
) -> dict:
    """Return the manifest as :class:`CheckpointWriter` takes it, which adds the checksums.

    Args:
        recipe: as ``Recipe.to_dict`` gives it.
        layers: for each part of the recipe, the names of its layers.
        source: of a converted file.
        weights: ``{layer: (method, shape, dtype)}`` of the quantized layers.
    """
    manifest: dict[str, Any] = {
        "version": __version__,
        "manifest": MANIFEST_VERSION,
        "recipe": dict(recipe),
        "layers": layers,
    }
    if source is not None:
        manifest["source"] = dict(source)
    unknown = {
        layer: [list(shape), str(dtype).removeprefix("torch.")]
        for layer, (method, shape, dtype) in (weights or {}).items()
        if not is_recognized(method)
    }
    if unknown:
        manifest["weights"] = unknown
    return manifest


def read_manifest(path: Path, metadata: Mapping[str, str]) -> Manifest | None:
    """Return the manifest of a file's metadata, None when it has none.

    Raises:
        CheckpointError: the entry is there and is not a manifest, or one of a newer form.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the metadata entry {METADATA_KEY!r} is not JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("manifest"), int):
        raise CheckpointError(f"{path}: the metadata entry {METADATA_KEY!r} is not a manifest of quant_core")
    if data["manifest"] > MANIFEST_VERSION:
        raise CheckpointError(
            f"{path} was written by quant_core {data.get('version')!r} in a newer form than this {__version__} reads; "
            "update quant_core"
        )
    recipe, layers, checksums = data.get("recipe"), data.get("layers"), data.get("checksums", {})
    if not (
        isinstance(recipe, dict)
        and isinstance(layers, list)
        and all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in layers)
        and isinstance(checksums, dict)
        and all(isinstance(v, str) for v in checksums.values())
    ):
        raise CheckpointError(f"{path}: the manifest's recipe, layers or checksums have the wrong form")
    parts = recipe.get("configs", [recipe])
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("method"), str) for p in parts):
        raise CheckpointError(f"{path}: the manifest's recipe names no method")
    if len(parts) != len(layers):
        raise CheckpointError(f"{path}: the manifest lists {len(layers)} groups of layers for {len(parts)} configs")
    return Manifest(str(data.get("version")), recipe, layers, checksums, _read_weights(path, data.get("weights", {})))


def _read_weights(path: Path, data: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    weights = {}
    for layer, entry in data.items() if isinstance(data, dict) else [("", data)]:
        shape, dtype = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        sizes = shape if isinstance(shape, list) and len(shape) == 2 else [None]
        if dtype not in FLOAT_NAMES or not all(type(n) is int and 0 < n < 1 << 31 for n in sizes):
            raise CheckpointError(f"{path}: the manifest's weights have the wrong form, at {layer!r}")
        weights[layer] = (tuple(sizes), dtype)
    return weights
