"""Writes a MODEL, and a CLIP and VAE if wanted, as a checkpoint: one layer at a time, wherever its weights are.

ComfyUI's own saver asks for a model that is fully loaded. Here every weight is taken where it is, or as it was before
a LoRA was baked into it; patches are then applied as ComfyUI applies them, and the result is written and forgotten.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from quant_core import CheckpointError, recipe_from_dict
from quant_core.backends.comfy_kitchen.formats import as_written
from quant_core.checkpoint import CheckpointWriter, FileHash
from quant_core.checkpoint.formats.comfy import COMFY_FORMATS
from quant_core.checkpoint.manifest import make_manifest
from quant_core.layout import join_metadata
from quant_core.output import check_space

from .adapter import is_adapted, stored_tensors
from .loaded import LoadedModel, known_metadata, recall
from .ops import MARKER
from .weights import WITH_WEIGHT, original, own_names, patched, refuse_bypass, refuse_hooks

logger = logging.getLogger("quant_core")

DIFFUSION_PREFIX = "model.diffusion_model."
Tensors = dict[str, torch.Tensor]


@dataclass
class Piece:
    """Tensors that are written together: one quantized layer, or one other tensor.

    Attributes:
        name: of the layer or tensor in the file.
        layout: ``{tensor name in the file: (dtype, shape)}``.
        make: returns the tensors, on any device.
        metadata: entries that the file needs for the layer.
        method: the layer's method; empty for what is not quantized.
        options: of the method, as JSON.
        shape, dtype: of the float weight of a quantized layer.
    """

    name: str
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    make: Callable[[], Tensors]
    metadata: dict[str, str] = field(default_factory=dict)
    method: str = ""
    options: str = "{}"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


def save_model(
    path: str | Path,
    model: ModelPatcher,
    clip: Any = None,
    vae: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> FileHash:
    """Write a checkpoint; the file appears under its name when it is complete.

    Args:
        path: the file.
        model: quantized or not, loaded or not, patched or not. Alone it is written as a diffusion model file.
        clip: text encoders to write too, which makes the file a full checkpoint.
        vae: an autoencoder to write too, likewise.
        metadata: further entries of the header.

    Raises:
        CheckpointError: the model has weights that a file cannot hold; the message names the layer.
        OSError: the file cannot be written, or the disk is too full for it.
    """
    refuse_hooks(model, "saved")
    refuse_bypass(model, "saved")
    loaded = recall(model)
    dtypes = {} if loaded is None else loaded.dtypes
    pieces, others = _named(model, clip, vae, dtypes)
    layout = {name: entry for piece in pieces for name, entry in piece.layout.items()}
    layout |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in others.items()}
    manifest = _manifest(pieces, loaded)
    entries = join_metadata(
        {"format": "pt", **known_metadata(model), **(metadata or {})},
        [(piece.method, piece.options, piece.metadata) for piece in pieces if piece.method],
        {n: entry for piece in pieces if not piece.method for n, entry in piece.layout.items()},
    )
    check_space(Path(path), sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values()))
    progress = comfy.utils.ProgressBar(len(pieces))
    with CheckpointWriter(path, layout, entries, manifest) as writer:
        for piece in pieces:
            comfy.model_management.throw_exception_if_processing_interrupted()
            for name, tensor in piece.make().items():
                writer.write(name, tensor)
            progress.update(1)
        for name, tensor in others.items():
            writer.write(name, tensor)
    assert writer.hash is not None
    return writer.hash


# ------------------------------------------------------------------ names


@dataclass(frozen=True)
class _Part:
    """A model of the checkpoint: its patcher, its module, the prefix of its names in the patcher, its file's dtypes."""

    patcher: ModelPatcher
    root: torch.nn.Module
    prefix: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def names(self) -> dict[str, torch.Tensor]:
        """Return a stand-in for every tensor of the module's own; a quantized weight's scales come with it."""
        return {name: torch.empty(0, device="meta") for name in own_names(self.root)}

    def piece(self, name: str, file_name: str) -> Piece:
        """Return what is written for a tensor of the module."""
        key = self.prefix + name
        weight = original(self.patcher, key)
        if not isinstance(weight, QuantizedTensor):
            return _plain_piece(self.patcher, key, file_name, weight, self.dtypes.get(name))
        module = self.root.get_submodule(name.rpartition(".")[0])
        return _quantized_piece(self.patcher, key, file_name.removesuffix(".weight"), module, weight)


def _named(model: ModelPatcher, clip: Any, vae: Any, dtypes: Mapping[str, torch.dtype]) -> tuple[list[Piece], Tensors]:
    """Return the pieces under the names of the file, and further tensors that ComfyUI writes for some models."""
    parts = {"model": _Part(model, model.model.diffusion_model, "diffusion_model.", dtypes)}
    if clip is not None:
        parts["clip"] = _Part(clip.patcher, clip.cond_stage_model)
    if vae is not None:
        parts["vae"] = _Part(vae.patcher, vae.first_stage_model)
    # ComfyUI names the parts of a checkpoint; it is given a stand-in for each tensor.
    stand_ins = {title: part.names() for title, part in parts.items()}
    origin = {id(t): (title, name) for title, tensors in stand_ins.items() for name, t in tensors.items()}
    clip_names = None if clip is None else {**stand_ins["clip"], **clip.tokenizer.state_dict()}
    vae_names = None if vae is None else dict(stand_ins["vae"])
    final = model.model.state_dict_for_saving(dict(stand_ins["model"]), clip_names, vae_names)
    final |= _sampling_marks(model)
    pieces: list[Piece] = []
    others: Tensors = {}
    for name, tensor in final.items():
        if clip is None and vae is None:
            name = name.removeprefix(DIFFUSION_PREFIX)
        if id(tensor) in origin:
            title, own = origin.pop(id(tensor))
            pieces.append(parts[title].piece(own, name))
        elif tensor.is_meta:
            raise CheckpointError(f"{name}: ComfyUI reshapes this tensor when it saves, which is not supported here")
        else:
            others[name] = tensor
    if origin:
        raise CheckpointError(f"ComfyUI has no name for {next(iter(origin.values()))[1]} in a checkpoint")
    return pieces, others


def _sampling_marks(model: ModelPatcher) -> Tensors:
    """Return the tensors by which ComfyUI's loaders know how a model of the SDXL kind was trained to predict.

    Those that ComfyUI's saver adds, and those of Playground 2.5, which it leaves out.
    """
    if not isinstance(model.model, comfy.model_base.SDXL):
        return {}
    kind, sampling = model.model.model_type, model.get_model_object("model_sampling")
    kinds = comfy.model_base.ModelType
    if kind == kinds.V_PREDICTION and getattr(sampling, "zsnr", False):
        return {"ztsnr": torch.tensor([])}
    if kind == kinds.V_PREDICTION_EDM:
        return {f"edm_vpred.{end}": torch.tensor(float(getattr(sampling, end))) for end in ("sigma_max", "sigma_min")}
    if kind == kinds.EDM:
        return {"edm_mean": torch.tensor([]), "edm_std": torch.tensor([])}
    return {}


# ------------------------------------------------------------------ pieces


def _plain_piece(
    patcher: ModelPatcher, key: str, file_name: str, tensor: torch.Tensor, dtype: torch.dtype | None
) -> Piece:
    # A model that computes in another dtype than its file had goes back to the file's.
    kept = tensor.dtype if dtype is None or not dtype.is_floating_point else dtype

    def make() -> Tensors:
        return {file_name: patched(patcher, key).detach().to(kept)}

    return Piece(file_name, {file_name: (kept, tuple(tensor.shape))}, make)


def _quantized_piece(
    patcher: ModelPatcher, key: str, layer: str, module: torch.nn.Module, weight: QuantizedTensor
) -> Piece:
    def make() -> Tensors:
        return _tensors_of(module, patched(patcher, key), layer)

    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _tensors_of(module, weight, layer).items()}
    if is_adapted(weight):
        spec = weight._params.spec
        metadata = stored_tensors(weight, layer)[1]
        return Piece(layer, layout, make, metadata, spec.method, spec.options, tuple(weight.shape), spec.dtype)
    # With convrot off an int8 layer takes the rotation from its marker.
    options = '{"convrot": false}' if module.quant_format == "int8_tensorwise" else "{}"
    return Piece(layer, layout, make, {}, COMFY_FORMATS.get(module.quant_format) or "", options)


def _tensors_of(module: torch.nn.Module, weight: QuantizedTensor, layer: str) -> Tensors:
    """Return a layer's tensors as its format has them in a file, without the bias."""
    if is_adapted(weight):
        return stored_tensors(weight, layer)[0]
    tensors = {"weight" + suffix: tensor for suffix, tensor in weight.state_dict().items()}
    tensors[MARKER] = module.state_dict()[MARKER]
    for name in WITH_WEIGHT:
        if module._parameters.get(name) is not None:
            tensors[name] = module._parameters[name].detach()
    return {f"{layer}.{name}": as_written(module.quant_format, name, tensor) for name, tensor in tensors.items()}


# ------------------------------------------------------------------ the recipe in the file


def _manifest(pieces: list[Piece], loaded: LoadedModel | None) -> dict[str, Any] | None:
    """Return the recipe that the file records, with the layers of each of its parts."""
    quantized = [piece for piece in pieces if piece.method]
    if not quantized:
        return None
    source = None if loaded is None else {"name": loaded.source}
    weights = {piece.name: (piece.method, piece.shape, piece.dtype) for piece in quantized}
    recipe = None if loaded is None or loaded.recipe is None else recipe_from_dict(loaded.recipe)
    if recipe is not None and not recipe.depends_on_model:
        layers = [
            [p.name for p in quantized if p.method == part.method and part.matches(p.name)] for part in recipe.parts()
        ]
        if sorted(name for names in layers for name in names) == sorted(piece.name for piece in quantized):
            return make_manifest(recipe.to_dict(), layers, source, weights)
    groups: dict[tuple[str, str], list[str]] = {}
    for piece in quantized:
        groups.setdefault((piece.method, piece.options), []).append(piece.name)
    configs = [
        {"method": method, "backend_config_kwargs": json.loads(options), "target_modules": names}
        for (method, options), names in groups.items()
    ]
    recorded = {"configs": configs} if len(configs) > 1 else configs[0]
    return make_manifest(recorded, list(groups.values()), source, weights)
