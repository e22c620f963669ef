"""Makes a quantized MODEL of a float one that is in the graph already, and a float one of a quantized one."""

from __future__ import annotations

import copy
import logging
import uuid
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from quant_core import CheckpointError, Recipe
from quant_core.checkpoint.header import TensorInfo

from .loaded import LoadedModel, known_metadata, recall, remember
from .lora import watch_patches
from .ops import quantizing_operations
from .quantizer import LayerQuantizer, select
from .weights import original, own_names, patched_float, refuse_bypass, refuse_hooks

logger = logging.getLogger("quant_core")

_PREFIX = "diffusion_model."
# What a patcher notes in its model; a new model starts without.
_LOAD_STATE = (
    "model_loaded_weight_memory",
    "lowvram_patch_counter",
    "model_lowvram",
    "current_weight_patches_uuid",
    "model_offload_buffer_memory",
    "dynamic_vbars",
    "dynamic_pins",
    "dynamic_patchers",
)


def quantize_model(
    patcher: ModelPatcher,
    recipe: Recipe,
    device: torch.device | None = None,
    compute_dtype: torch.dtype | None = None,
) -> ModelPatcher:
    """Return a quantized copy of a model; weight patches (LoRAs, merges) are added in float first.

    The model that is given stays as it is. Everything that is no weight is carried over: sampling settings, attention
    patches, wrappers, options.

    Args:
        patcher: the model; layers that are quantized already are quantized again, from what they dequantize to.
        recipe: methods, options, and which layers.
        device: where to quantize; None is where ComfyUI runs the model.
        compute_dtype: what the quantized model computes in; None is what the given one computes in.

    Raises:
        CheckpointError: the recipe does not fit the model, or the model has patches that are no weights.
        QuantizationError: a layer cannot be quantized; the message names it.
    """
    refuse_hooks(patcher, "quantized")
    refuse_bypass(patcher, "quantized")
    tensors = _infos(patcher)
    try:
        selection = select(recipe, tensors)
    except ValueError as error:
        raise CheckpointError(f"{type(patcher.model).__name__}: {error}") from error
    device = device or patcher.load_device
    again = [name for name in selection.targets if isinstance(original(patcher, _weight(name)), QuantizedTensor)]
    if again:
        logger.warning(
            "%d layers of the model are quantized already and are quantized again, which adds to their error; connect "
            "a float model for the best result",
            len(again),
        )
    quantizer = LayerQuantizer(
        selection.targets, device, lambda layer, _: patched_float(patcher, _weight(layer), device)
    )
    compute = compute_dtype or patcher.model.get_dtype_inference()
    state = {
        name: original(patcher, _PREFIX + name)
        if name.removesuffix(".weight") in selection.targets
        else patched_float(patcher, _PREFIX + name, patcher.offload_device)
        for name in tensors
    }
    new = _rebuild(patcher, state, quantizing_operations(compute, quantizer), compute)
    missed = set(selection.targets).difference(quantizer.done)
    for name in missed:  # not a Linear: what was loaded there is the unpatched weight
        weight = patched_float(patcher, _weight(name), patcher.offload_device)
        comfy.utils.set_attr_param(new.model, _weight(name), weight)
    if patcher.cached_patcher_init is not None:
        again_from = (patcher.cached_patcher_init, patcher.patches, recipe, device, compute)
        new.cached_patcher_init = (_quantize_again, again_from)
    _attach(new, patcher, recipe.to_dict(), {name: info.dtype for name, info in tensors.items()})
    logger.info("%d layers quantized with %s", len(quantizer.done), recipe.recipe_method)
    return new


def _quantize_again(
    init: tuple,
    patches: dict[str, Any],
    recipe: Recipe,
    device: torch.device,
    compute_dtype: torch.dtype,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """Make the quantized model once more, for ComfyUI's copies of it."""
    source = init[0](*init[1], disable_dynamic=disable_dynamic)
    if len(init) > 2:
        source = source[init[2]]
    source.patches = {key: list(entries) for key, entries in patches.items()}
    return quantize_model(source, recipe, device, compute_dtype)


def dequantize_model(patcher: ModelPatcher, dtype: torch.dtype | None = None) -> ModelPatcher:
    """Return a float copy of a model, with the values that its quantized weights stand for.

    Args:
        patcher: the model; its patches stay patches.
        dtype: of the weights; None is what the model computes in.
    """
    refuse_hooks(patcher, "dequantized")
    refuse_bypass(patcher, "dequantized")
    compute = patcher.model.get_dtype_inference()
    state = {}
    for name in own_names(patcher.model.diffusion_model):
        comfy.model_management.throw_exception_if_processing_interrupted()
        weight = original(patcher, _PREFIX + name)
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize().to(dtype or compute)
        state[name] = weight.to(patcher.offload_device)
    operations = comfy.ops.pick_operations(dtype or compute, compute)
    new = _rebuild(patcher, state, operations, dtype or compute)
    new.patches = {key: list(entries) for key, entries in patcher.patches.items()}
    new.patches_uuid = patcher.patches_uuid
    new.model.manual_cast_dtype = None if (dtype or compute) == compute else compute
    remember(new, LoadedModel(_source(patcher), None, {}, known_metadata(patcher)))
    return new


def _weight(layer: str) -> str:
    return f"{_PREFIX}{layer}.weight"


def _infos(patcher: ModelPatcher) -> dict[str, TensorInfo]:
    tensors = {}
    for name in own_names(patcher.model.diffusion_model):
        weight = original(patcher, _PREFIX + name)
        tensors[name] = TensorInfo(weight.dtype, tuple(weight.shape), 0, 0)
    return tensors


def _attach(new: ModelPatcher, old: ModelPatcher, recipe: dict[str, Any], dtypes: dict[str, torch.dtype]) -> None:
    loaded = recall(old)
    known = {} if loaded is None else loaded.dtypes
    remember(new, LoadedModel(_source(old), recipe, {**dtypes, **known}, known_metadata(old)))
    watch_patches(new)


def _source(patcher: ModelPatcher) -> str:
    loaded = recall(patcher)
    return type(patcher.model).__name__ if loaded is None else loaded.source


def _rebuild(
    patcher: ModelPatcher, state: dict[str, torch.Tensor], operations: type, dtype: torch.dtype
) -> ModelPatcher:
    """Return a clone of a patcher with a model of its own, whose diffusion model has these weights."""
    old = patcher.model
    model = copy.copy(old)
    model._modules = dict(old._modules)
    model._buffers, model._parameters = dict(old._buffers), dict(old._parameters)
    for name in _LOAD_STATE:
        model.__dict__.pop(name, None)
    model.current_patcher = None
    for name, value in patcher.object_patches_backup.items():
        if not name.startswith(_PREFIX):
            comfy.utils.set_attr(model, name, value)  # what an applied object patch replaced
    # copy.copy asks for __setstate__, which a model configuration seems to have, like any other name.
    model.model_config = object.__new__(type(old.model_config))
    model.model_config.__dict__.update(old.model_config.__dict__)
    model.model_config.custom_operations = operations
    model.model_config.unet_config = {**old.model_config.unet_config, "dtype": dtype}
    model.manual_cast_dtype = dtype
    device = patcher.offload_device
    inner = type(old.diffusion_model)(**model.model_config.unet_config, device=device, operations=operations)
    inner.requires_grad_(False)
    inner.eval()
    missing, unexpected = inner.load_state_dict(state, strict=False)
    lost = [name for name in missing if name in state] + list(unexpected)
    if lost:
        raise CheckpointError(f"{type(old).__name__} cannot be made again: {', '.join(lost[:5])} found no place")
    comfy.model_management.archive_model_dtypes(inner)
    model._modules["diffusion_model"] = inner
    new = patcher.clone(model_override=(model, ({}, {}, {}, set())))
    new.patches = {}
    new.patches_uuid = uuid.uuid4()
    new.cached_patcher_init = None
    new.size = 0
    new.parent = None
    return new
