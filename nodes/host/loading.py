"""Loads a diffusion model file into a ComfyUI MODEL, quantizing its layers on the way."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import safetensors
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QUANT_ALGOS

from quant_core import CheckpointError, QuantizationError, QuantizeConfig

from .detection import Detected, detect, unwrap
from .ops import MARKER, quantizing_operations
from .quantizer import LayerQuantizer

logger = logging.getLogger("quant_core")

# Keys that other tools' quantized files have, which ComfyUI would load as noise or not at all.
_FOREIGN = {".absmax": "bitsandbytes", "._weight_qdata": "torchao"}


def load_diffusion_model(
    path: str, recipe: QuantizeConfig, compute_dtype: torch.dtype | None = None, disable_dynamic: bool = False
) -> ModelPatcher:
    """Load ``path`` and quantize it by ``recipe`` while loading.

    A file that is quantized already is loaded as it is; the recipe then does nothing.

    Args:
        path: a diffusion model, or a checkpoint that contains one.
        recipe: the method, its options, and the layers to leave out.
        compute_dtype: what the model computes in; None lets ComfyUI choose for this machine.
        disable_dynamic: ComfyUI asks for a patcher without dynamic memory management, when it loads a model again.

    Raises:
        CheckpointError: the file cannot be read, or holds no diffusion model that ComfyUI knows.
        QuantizationError: a layer cannot be quantized. Both messages name the file.
    """
    name = os.path.basename(path)
    state_dict, metadata = _read(path, name)
    state_dict = unwrap(state_dict, metadata)
    _refuse_foreign(state_dict, name)
    detected = detect(state_dict, metadata)
    if detected is None:
        raise CheckpointError(_unknown(state_dict, name))
    device = comfy.model_management.get_torch_device()
    if compute_dtype is None:
        supported = detected.config.supported_inference_dtypes
        compute_dtype = comfy.model_management.unet_manual_cast(None, device, supported)
    quantizer = _quantizer(state_dict, detected, recipe, device, name)

    options = {"custom_operations": quantizing_operations(compute_dtype, quantizer), "dtype": compute_dtype}
    try:
        patcher = comfy.sd.load_diffusion_model_state_dict(
            state_dict, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
        )
    except QuantizationError as error:
        raise QuantizationError(f"{name}: {error}") from error
    # A dtype that ComfyUI would not pick by itself (bf16 on a CPU) makes it plan a cast to another one, and every
    # forward would then copy every weight.
    if patcher.model.get_dtype_inference() != compute_dtype:
        patcher.model.manual_cast_dtype = compute_dtype
    patcher.cached_patcher_init = (load_diffusion_model, (path, recipe, compute_dtype))
    if quantizer is not None:
        _report(quantizer, detected, name)
    return patcher


def _read(path: str, name: str) -> tuple[dict[str, torch.Tensor], Mapping[str, str] | None]:
    try:
        state_dict, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    except (safetensors.SafetensorError, pickle.UnpicklingError, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{name} cannot be read as a model file: {error}. It may be an unfinished download, or a file of another "
            "kind under this name; compare its size with the source's and fetch it again."
        ) from error
    if not isinstance(state_dict, dict):
        raise CheckpointError(f"{name} holds a {type(state_dict).__name__}, not named tensors: it is no model file")
    return {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}, metadata


def _refuse_foreign(state_dict: Mapping[str, torch.Tensor], name: str) -> None:
    for ending, library in _FOREIGN.items():
        key = next((key for key in state_dict if key.endswith(ending)), None)
        if key is not None:
            raise CheckpointError(
                f"{name} is quantized with {library} ({key}), which this node does not load. Start from the "
                "original float file."
            )


def _unknown(state_dict: Mapping[str, torch.Tensor], name: str) -> str:
    if any(".lora_" in key or "lora_up" in key or "lora_down" in key for key in state_dict):
        return f"{name} is a LoRA, not a model. Put it into models/loras and load it with a LoRA node."
    first = ", ".join(list(state_dict)[:3]) or "none"
    return (
        f"{name} is not a diffusion model that this ComfyUI knows ({len(state_dict)} tensors: {first}, ...). "
        "A text encoder or a VAE has a loader of its own; a newer model may need a newer ComfyUI."
    )


def _quantizer(
    state_dict: Mapping[str, torch.Tensor],
    detected: Detected,
    recipe: QuantizeConfig,
    device: torch.device,
    name: str,
) -> LayerQuantizer | None:
    """Return what quantizes this file's layers, or None for a file that is quantized already."""
    markers = [key for key in state_dict if key.endswith("." + MARKER)]
    if markers:
        formats = Counter(_marker_format(state_dict[key], key, name) for key in markers)
        logger.warning(
            "%s is quantized already (%s) and is loaded as it is; the method %s is not applied",
            name,
            ", ".join(f"{count} layers {form}" for form, count in formats.items()),
            recipe.method,
        )
        return None
    try:
        return LayerQuantizer(recipe, detected.tensors, device)
    except ValueError as error:
        raise CheckpointError(f"{name} ({detected.architecture}): {error}") from error


def _marker_format(marker: torch.Tensor, key: str, name: str) -> str:
    try:
        content: Any = json.loads(marker.cpu().numpy().tobytes())
        form = content["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{name}: {key} is not a JSON object that names a format: {error}") from error
    if form not in QUANT_ALGOS:
        raise CheckpointError(
            f"{name}: {key} names the format {form!r}, which this ComfyUI does not know "
            f"(it knows {', '.join(QUANT_ALGOS)}); a newer ComfyUI may"
        )
    return form


def _report(quantizer: LayerQuantizer, detected: Detected, name: str) -> None:
    missed = quantizer.chosen.difference(quantizer.done)
    if missed:
        logger.info("%s: kept in float, not Linear layers of the model: %s", name, ", ".join(sorted(missed)))
    logger.info(
        "%s (%s): %d layers quantized with %s, %d kept in float",
        name,
        detected.architecture,
        len(quantizer.done),
        quantizer.recipe.method,
        len(quantizer.kept) + len(missed),
    )
