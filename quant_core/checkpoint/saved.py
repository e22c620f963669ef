"""Saves a quantized model and loads it again, with no options to remember."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..packed_linear import PackedLinear
from .hashing import FileHash, digest, structure_hash
from .manifest import Manifest, make_manifest, read_manifest
from .reader import Checkpoint, open_checkpoint
from .recognize import missing_markers, recognize_layers
from .writer import CHECKSUM_LENGTH, CheckpointWriter, tensor_bytes

if TYPE_CHECKING:
    from ..config import QuantizeConfig, Recipe
    from ..sites import LinearSite

logger = logging.getLogger("quant_core")

MODEL_CONFIGS: list[dict[str, Any]] = []
"""Entries for files made elsewhere: ``model_hash`` and ``quant_config``, as :func:`register_model_config` adds them."""


def register_model_config(entry: Mapping[str, Any] | None = None, **fields: Any) -> None:
    """Say how files of one structure hash are quantized, for files that carry no manifest.

    Args:
        entry: ``{"model_hash": ..., "quant_config": {"method": ..., "exclude_modules": [...], ...}}``; further keys
            (``model_name``, ``model_class``) are kept for the caller's own use. Keywords do the same.

    Raises:
        ValueError: no hash, or ``quant_config`` is not a recipe.
    """
    from ..config import recipe_from_dict

    data = {**(entry or {}), **fields}
    if not isinstance(data.get("model_hash"), str) or not data["model_hash"]:
        raise ValueError("register_model_config needs 'model_hash', the string that save_quantized_model returned")
    recipe_from_dict(data.get("quant_config", {}))
    data["model_hash"] = str(data["model_hash"])
    MODEL_CONFIGS[:] = [e for e in MODEL_CONFIGS if e["model_hash"] != data["model_hash"]] + [data]


# ---------------------------------------------------------------------- saving


def save_quantized_model(
    model: nn.Module, config: Recipe, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> FileHash:
    """Write a model that ``config`` quantized as a safetensors file.

    The layers are in the format of their method (ComfyUI's native one for ``comfy_kitchen``, the diffusers layout for
    ``bitsandbytes``, torchao's flattened one), everything else as it is. The file appears under its name only when
    it is complete, with mode 0644.

    Args:
        model: quantized by ``config`` (``config.quantize_model(model)``).
        config: the recipe; it is stored in the file.
        path: the file to write; an existing one is replaced at the end.
        metadata: further string entries for the header.

    Returns:
        The structure hash, whose ``content`` attribute is the hash of the weights.

    Raises:
        ValueError: the model holds no layer of this recipe, or one of another.
        NotImplementedError: a backend does not declare ``is_serializable``.
    """
    layers = _quantized_layers(model, config)
    tensors, extra = config.flatten_state_dict(model.state_dict())
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            found = "on the meta device: load its values first" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"{name!r} cannot be saved, it is {found}")
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    manifest = make_manifest(config.to_dict(), layers)
    with CheckpointWriter(path, layout, {**(metadata or {}), **extra}, manifest) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert writer.hash is not None
    return writer.hash


def _quantized_layers(model: nn.Module, config: Recipe) -> list[list[str]]:
    parts = config.parts()
    layers: list[list[str]] = [[] for _ in parts]
    for name, module in model.named_modules(remove_duplicate=False):
        if config.is_quantized_linear(module):
            part = config._part_of(module, name)
            layers[[p is part for p in parts].index(True)].append(name)
        elif isinstance(module, PackedLinear):
            raise ValueError(
                f"layer {name!r} is a {type(module).__name__}, which {config.recipe_method} did not make; "
                "save with the config that quantized the model"
            )
    if not any(layers):
        raise ValueError(
            f"the model holds no layer quantized by {config.recipe_method}: call config.quantize_model(model) first "
            "(and not dequantize_model before saving)"
        )
    return layers


# ---------------------------------------------------------------------- loading


def load_quantized_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    compute_dtype: torch.dtype | None = None,
    verify: bool = True,
) -> Recipe:
    """Load a quantized file into ``model``; which layers and how is read from the file.

    A file of :func:`save_quantized_model` or of the command line carries it in its metadata. For others it comes from
    :func:`register_model_config`, or is recognized from ComfyUI's markers, bitsandbytes' quant states or torchao's
    metadata.

    Args:
        model: the float model; its values are not used, it may be on the meta device.
        path: a safetensors file, an index, or a folder.
        compute_dtype: what the quantized layers dequantize to; None means each layer's dtype in ``model``.
        verify: check every tensor against the file's checksums, where it has them.

    Returns:
        The recipe, with ``load_prequantized`` set.

    Raises:
        CheckpointError: the file is not quantized, does not fit the model, or was changed. The model is as before.
    """
    from .. import replace

    checkpoint = open_checkpoint(path)
    manifest = read_manifest(checkpoint.path, checkpoint.metadata)
    recipe, layers = _recipe_of(checkpoint, manifest, model)
    assignment = _assign(checkpoint, model, recipe, layers)
    originals = [(site, site.module) for site, _ in assignment]
    try:
        state = _read_state(checkpoint, recipe, manifest if verify else None)
        replace.install_shells(model, assignment, compute_dtype)
        _load(model, state, checkpoint.path)
    except BaseException:
        for site, module in originals:
            site.replace(model, module)
        raise
    return recipe


def _recipe_of(checkpoint: Checkpoint, manifest: Manifest | None, model: nn.Module) -> tuple[Recipe, list[list[str]]]:
    """Return the recipe and, for each of its parts, the layer names that the file holds quantized."""
    from ..config import MixedQuantizeConfig, QuantizeConfig, recipe_from_dict

    if manifest is not None:
        try:
            recipe = recipe_from_dict(manifest.recipe, load_prequantized=True)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path}: the recipe in the file cannot be used: {error}") from error
        return recipe, manifest.layers
    key = structure_hash({name: info.shape for name, info in checkpoint.tensors.items()})
    entry = next((e for e in MODEL_CONFIGS if e["model_hash"] == key), None)
    if entry is not None:
        recipe = recipe_from_dict(entry["quant_config"], load_prequantized=True)
        parts = recipe.parts()
        layers: list[list[str]] = [[] for _ in parts]
        for site, part in recipe.assign_layers(model):
            layers[[p is part for p in parts].index(True)].append(site.name)
        return recipe, layers
    groups = recognize_layers(checkpoint)
    if not groups:
        raise CheckpointError(
            f"{checkpoint.path} holds no quantized layer: it is a float checkpoint. Load it with load_state_dict and "
            f"quantize it, or name its recipe with register_model_config (structure hash {key})"
        )
    parts = [
        QuantizeConfig(method=method, backend_config_kwargs=json.loads(options), target_modules=names)
        for (method, options), names in groups.items()
    ]
    return MixedQuantizeConfig(configs=parts, load_prequantized=True), list(groups.values())


def _assign(
    checkpoint: Checkpoint, model: nn.Module, recipe: Recipe, layers: list[list[str]]
) -> list[tuple[LinearSite, QuantizeConfig]]:
    from ..sites import find_sites

    by_name = {name: site for site in find_sites(model) for name in site.names}
    assignment: dict[int, tuple[LinearSite, QuantizeConfig]] = {}
    for part, names in zip(recipe.parts(), layers, strict=True):
        for name in names:
            site = by_name.get(name)
            if site is None:
                raise CheckpointError(
                    f"{checkpoint.path}: layer {name!r} is quantized in the file, but the model has no Linear of that "
                    "name: the file belongs to another architecture, or its keys carry a prefix that the model lacks"
                )
            assignment[id(site.module)] = (site, part)
    return list(assignment.values())


def _read_state(checkpoint: Checkpoint, recipe: Recipe, manifest: Manifest | None) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    for name in checkpoint.tensors:
        tensors[name] = checkpoint.read(name)
        expected = manifest.checksums.get(name) if manifest is not None else None
        if expected is not None:
            found = digest(tensor_bytes(tensors[name]))[:CHECKSUM_LENGTH]
            if found != expected:
                raise CheckpointError(
                    f"{checkpoint.path}: the bytes of {name!r} are not the ones that were saved (checksum {found}, "
                    f"expected {expected}): the file was changed or damaged. Copy it again, or pass verify=False "
                    "if you changed it on purpose"
                )
    for name, marker in missing_markers(checkpoint).items():
        tensors[name] = torch.tensor(list(marker), dtype=torch.uint8)
    try:
        return recipe.unflatten_state_dict(tensors, checkpoint.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def _load(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Strictly load ``state``; on an error the model's own tensors are put back."""
    before = [(m, copy.copy(m._parameters), copy.copy(m._buffers)) for m in model.modules()]
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        for module, parameters, buffers in before:
            module._parameters, module._buffers = parameters, buffers
        problems = str(error).partition("\n")[2].strip() or str(error)
        raise CheckpointError(f"{path} does not fit the model:\n\t{problems}") from error
