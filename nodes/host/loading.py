"""Loads a diffusion model file into a ComfyUI MODEL, quantizing its layers on the way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from quant_core import CheckpointError, QuantizationError, QuantizeConfig, Recipe

from .baking import LoraBaking
from .cache import cache_key, disk_cache
from .detection import Detected, detect, renames_layers, unwrap
from .loaded import LoadedModel, metadata_of_model, remember
from .lora import watch_patches
from .ops import MARKER, quantizing_operations
from .quantizer import LayerQuantizer, Target, select
from .saving import save_model
from .source import Source, adapt_native, read_source

logger = logging.getLogger("quant_core")

Loras = Sequence[tuple[str, float]]


def load_diffusion_model(
    path: str,
    recipe: Recipe,
    compute_dtype: torch.dtype | None = None,
    loras: Loras = (),
    device: torch.device | None = None,
    cached: bool = False,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """Load ``path`` and quantize it by ``recipe`` while loading.

    A file that is quantized already is loaded as it is, whatever tool wrote it; the recipe then serves for layers in
    a format that nothing here runs, and for layers that ComfyUI fuses.

    Args:
        path: a diffusion model, or a checkpoint that contains one.
        recipe: methods, options, and which layers.
        compute_dtype: what the model computes in; None lets ComfyUI choose for this machine.
        loras: ``(path, strength)`` of LoRAs that are added in float before the layers are quantized.
        device: where to quantize; None is where ComfyUI runs models.
        cached: keep the result in the disk cache, and take it from there if it is in it.
        disable_dynamic: ComfyUI asks for a patcher without dynamic memory management, when it loads a model again.

    Raises:
        CheckpointError: the file cannot be read, is rewritten meanwhile, or holds no diffusion model that ComfyUI
            knows.
        QuantizationError: a layer cannot be quantized. Both messages name the file.
    """
    source = read_source(path)
    state_dict = unwrap(dict(source.state_dict), source.metadata)
    if source.is_quantized and renames_layers(state_dict, source.metadata):
        adapt_native(source)
        state_dict = unwrap(dict(source.state_dict), source.metadata)
    detected = detect(state_dict, source.metadata)
    if detected is None:
        raise CheckpointError(_unknown(state_dict, source.name))
    run_device = comfy.model_management.get_torch_device()
    if compute_dtype is None:
        supported = detected.config.supported_inference_dtypes
        compute_dtype = comfy.model_management.unet_manual_cast(None, run_device, supported)
    again = (load_diffusion_model, (path, recipe, compute_dtype, tuple(loras), device, cached))
    key = cache_key([path], recipe, compute_dtype, loras) if cached and not source.is_quantized else ""
    if key:
        patcher = _from_cache(key, source.name, recipe, compute_dtype, again, disable_dynamic)
        if patcher is not None:
            return patcher
    baking = _baking(loras, source, detected)
    try:
        targets, kept = _choose(source, detected, recipe)
    except ValueError as error:
        raise CheckpointError(f"{source.name} ({detected.architecture}): {error}") from error
    quantizer = LayerQuantizer(targets, device or run_device, baking and baking.bake)
    dtypes = {key: info.dtype for key, info in detected.tensors.items() if not key.endswith("." + MARKER)}

    try:
        patcher = _build(state_dict, source.metadata, compute_dtype, quantizer, disable_dynamic)
    except QuantizationError as error:
        raise QuantizationError(f"{source.name}: {error}") from error
    if baking is not None:
        baking.bake_rest(patcher.model.diffusion_model, quantizer.done, dtypes)
    source.check_unchanged()
    patcher.cached_patcher_init = again
    used = None if source.is_quantized else recipe.to_dict()
    about = metadata_of_model(source.metadata, source.file_names)
    remember(patcher, LoadedModel(source.name, used, dtypes, about))
    watch_patches(patcher)
    _report(source, detected, quantizer, kept)
    if key and _into_cache(key, patcher):
        # The file's own memory is shared with the page cache; what was quantized in memory is not needed any more.
        return _from_cache(key, source.name, recipe, compute_dtype, again, disable_dynamic) or patcher
    return patcher


def _build(
    state_dict: dict[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    compute_dtype: torch.dtype,
    quantizer: LayerQuantizer | None,
    disable_dynamic: bool,
) -> ModelPatcher:
    options = {"custom_operations": quantizing_operations(compute_dtype, quantizer), "dtype": compute_dtype}
    patcher = comfy.sd.load_diffusion_model_state_dict(
        state_dict, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
    )
    # A dtype that ComfyUI would not pick by itself (bf16 on a CPU) makes it plan a cast to another one, and every
    # forward would then copy every weight.
    if patcher.model.get_dtype_inference() != compute_dtype:
        patcher.model.manual_cast_dtype = compute_dtype
    return patcher


def _from_cache(
    key: str, name: str, recipe: Recipe, compute_dtype: torch.dtype, again: tuple, disable_dynamic: bool
) -> ModelPatcher | None:
    """Load an entry of the disk cache; None when there is none."""
    entry = disk_cache().get(key)
    if entry is None:
        return None
    try:
        source = read_source(str(entry))
    except CheckpointError:
        if entry.exists():
            raise
        return None  # another process made room for an entry of its own
    dtypes = {key: tensor.dtype for key, tensor in source.state_dict.items() if not key.endswith("." + MARKER)}
    patcher = _build(unwrap(source.state_dict, source.metadata), source.metadata, compute_dtype, None, disable_dynamic)
    patcher.cached_patcher_init = again
    about = metadata_of_model(source.metadata, source.file_names)
    remember(patcher, LoadedModel(name, recipe.to_dict(), dtypes, about))
    watch_patches(patcher)
    logger.info("%s: quantized before with %s, loaded from the disk cache", name, recipe.recipe_method)
    return patcher


def _into_cache(key: str, patcher: ModelPatcher) -> bool:
    """Keep a quantized model in the disk cache; False when it is not kept, which the cache has logged."""
    with disk_cache().entry(key, patcher.model_size()) as target:
        if target is not None:
            save_model(target, patcher)
    return target is not None


def _baking(loras: Loras, source: Source, detected: Detected) -> LoraBaking | None:
    if not loras:
        return None
    if source.is_quantized:
        raise CheckpointError(
            f"{source.name} is quantized already ({source.describe()}), so no LoRA can be added before quantizing. "
            "Load it without LoRAs and add them with Load LoRA (Quantized), or start from the original float file."
        )
    return LoraBaking({name: info.shape for name, info in detected.tensors.items()}, loras)


def _unknown(state_dict: Mapping[str, torch.Tensor], name: str) -> str:
    if any(".lora_" in key or "lora_up" in key or "lora_down" in key for key in state_dict):
        return f"{name} is a LoRA, not a model. Put it into models/loras and load it with a LoRA node."
    first = ", ".join(list(state_dict)[:3]) or "none"
    return (
        f"{name} is not a diffusion model that this ComfyUI knows ({len(state_dict)} tensors: {first}, ...). "
        "A text encoder or a VAE has a loader of its own; a newer model may need a newer ComfyUI."
    )


def _choose(source: Source, detected: Detected, recipe: Recipe) -> tuple[dict[str, Target], dict[str, str]]:
    """Return ``({layer: how it is quantized}, {layer: why not})``."""
    if not source.is_quantized:
        selection = select(recipe, detected.tensors)
        return selection.targets, selection.kept
    logger.warning(
        "%s is quantized already (%s) and is loaded as it is; the method %s is not applied",
        source.name,
        source.describe(),
        recipe.recipe_method,
    )
    again = {name for name in detected.float_again if name + ".weight" in detected.tensors}
    again |= {name.removeprefix(_prefix(source)) for name in source.again} & _layers(detected)
    if not again:
        return {}, {}
    # Fused layers go back to the method that held their parts; a format that no method holds takes the recipe's.
    method = source.methods.most_common(1)[0][0] if source.methods else recipe.parts()[0].method
    targets = select(QuantizeConfig(method=method), detected.tensors).targets
    chosen = {name: target for name, target in targets.items() if name in again}
    logger.warning("%s: %d layers are quantized again, with %s", source.name, len(chosen), method)
    return chosen, {}


def _layers(detected: Detected) -> set[str]:
    return {name.removesuffix(".weight") for name in detected.tensors if name.endswith(".weight")}


def _prefix(source: Source) -> str:
    import comfy.model_detection

    prefix = comfy.model_detection.unet_prefix_from_state_dict(source.state_dict)
    return prefix if any(key.startswith(prefix) for key in source.state_dict) else ""


def _report(source: Source, detected: Detected, quantizer: LayerQuantizer, kept: Mapping[str, str]) -> None:
    missed = set(quantizer.targets).difference(quantizer.done)
    if missed:
        logger.info("%s: kept in float, not Linear layers of the model: %s", source.name, ", ".join(sorted(missed)))
    methods = Counter(quantizer.targets[name].method for name in quantizer.done)
    if methods:
        logger.info(
            "%s (%s): %s; %d kept in float",
            source.name,
            detected.architecture,
            ", ".join(f"{count} layers quantized with {method}" for method, count in methods.items()),
            len(kept) + len(missed),
        )
