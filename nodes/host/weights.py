"""The weights of a patcher: where they are, as they were before patches, and with them."""

from __future__ import annotations

from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher, get_key_weight
from comfy.quant_ops import QuantizedTensor

from quant_core import CheckpointError

WITH_WEIGHT = ("input_scale", "pre_quant_scale")
"""Parameters of a quantized Linear that belong to its weight."""


def own_names(root: torch.nn.Module) -> list[str]:
    """Return the names in a module's state dict that are tensors of a module; a quantized weight counts as one."""
    names = []
    for name in root.state_dict():
        layer, _, leaf = name.rpartition(".")
        module = root.get_submodule(layer)
        if (leaf in module._parameters or leaf in module._buffers) and leaf not in WITH_WEIGHT:
            names.append(name)
    return names


def original(patcher: ModelPatcher, key: str) -> Any:
    """Return a weight as it is without patches, wherever it lies; a quantized one as it is held."""
    backup = patcher.backup.get(key)
    return comfy.utils.get_attr(patcher.model, key) if backup is None else backup.weight


def patched(patcher: ModelPatcher, key: str) -> torch.Tensor:
    """Return a weight with the patches of this patcher, rounded as ComfyUI rounds it when it loads the model."""
    weight = original(patcher, key)
    if key not in patcher.patches:
        return weight
    _, set_weight, convert = get_key_weight(patcher.model, key)
    device = patcher.load_device
    dtype = comfy.model_management.lora_compute_dtype(device)
    value = comfy.model_management.cast_to_device(weight, device, dtype, copy=True)
    if convert is not None:
        value = convert(value, inplace=True)
    value = comfy.lora.calculate_weight(patcher.patches[key], value, key)
    seed = comfy.utils.string_to_seed(key)
    if set_weight is None:
        return comfy.float.stochastic_rounding(value, weight.dtype, seed=seed)
    return set_weight(value, seed=seed, return_weight=True)


def patched_float(patcher: ModelPatcher, key: str, device: torch.device) -> torch.Tensor:
    """Return a weight in float on ``device``, with the patches of this patcher and in the dtype that it had."""
    weight = original(patcher, key)
    dtype = weight.dtype
    value = weight.to(device=device)
    if isinstance(value, QuantizedTensor):
        value = value.dequantize()
    if key not in patcher.patches:
        return value
    return comfy.lora.calculate_weight(patcher.patches[key], value.to(torch.float32, copy=True), key).to(dtype)


def refuse_hooks(patcher: ModelPatcher, what: str) -> None:
    """Raise CheckpointError for a model whose weights change while it samples."""
    if getattr(patcher, "hook_patches", None):
        raise CheckpointError(
            f"the model has weight hooks (LoRA schedules), which change its weights while it samples: it cannot be "
            f"{what}. Connect the model from before the hooks, or use a LoRA node in their place."
        )


def refuse_bypass(patcher: ModelPatcher, what: str) -> None:
    """Raise CheckpointError for a model with LoRAs that run beside its layers, which would silently be lost."""
    # Our keys hold the file between a title and what makes them unique.
    keys = [key for key in getattr(patcher, "injections", {}) if "bypass" in key]
    bypass = [" ".join(key.split(" ")[1:-1]) or key for key in keys]
    if bypass:
        raise CheckpointError(
            f"the model has a bypass LoRA ({', '.join(bypass)}), which runs beside the layers and is no part of their "
            f"weights: it would be lost when the model is {what}. Use the stock LoRA loader before this node, or put "
            "the bypass LoRA behind it."
        )
