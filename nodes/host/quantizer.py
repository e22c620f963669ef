"""Decides which Linears of a model are quantized, and quantizes them one at a time while ComfyUI loads the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.quant_ops import QUANT_ALGOS

from quant_core import QUANT_METHODS, QuantizationError, Recipe
from quant_core.backends import load_all_backends
from quant_core.backends.comfy_kitchen import FORMATS, quantize_weight
from quant_core.checkpoint.header import TensorInfo
from quant_core.choice import Weight, choose_weights
from quant_core.selection import choose_layers

from . import adapter
from .user_backends import register_user_backends

logger = logging.getLogger("quant_core")

Bake = Callable[[str, torch.Tensor], torch.Tensor]
"""Takes a layer's name and its float weight, and returns the weight with everything baked in, in the same dtype."""


@dataclass(frozen=True)
class Target:
    """How one layer is quantized: the method, and its options with the layer's fallbacks."""

    method: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """What a recipe makes of a model.

    Attributes:
        targets: ``{layer name: how it is quantized}``.
        kept: ``{layer name: why it stays in float}`` of the others.
    """

    targets: dict[str, Target]
    kept: dict[str, str]


def all_methods() -> list[str]:
    """Every registered method, also one that another pack registered; ComfyUI's own formats first."""
    load_all_backends()
    register_user_backends()
    native = [method for method in QUANT_METHODS if is_native(method)]
    return native + [method for method in QUANT_METHODS if method not in native]


def usable_methods() -> list[str]:
    """The methods whose library is installed here."""
    usable: list[str] = []
    for method in all_methods():
        try:
            adapter.FORMATS.backend(method, {})
        except ImportError:
            continue
        usable.append(method)
    return usable


def is_native(method: str) -> bool:
    """Whether this ComfyUI has the method's format itself; others live in the adapter's layout."""
    return method in FORMATS and FORMATS[method].name in QUANT_ALGOS


def select(recipe: Recipe, tensors: Mapping[str, TensorInfo]) -> Selection:
    """Choose the layers of a float model, as :func:`quant_core.plan.plan` does for a file with these tensors.

    Args:
        recipe: methods, options, and which layers.
        tensors: of the model, under the names that ComfyUI loads them by.

    Raises:
        ValueError: an entry of the recipe matches no layer, two of its parts claim one, or nothing is left to quantize.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    weights = {
        name.removesuffix(".weight"): Weight(info.shape, info.dtype)
        for name, info in tensors.items()
        if name.endswith(".weight")
    }

    def halves_width(part: Any) -> bool:
        return adapter.FORMATS.is_packed(part.method, options_of(part))

    recipe, structure, note = recipe.for_model(weights, choose_layers(shapes), halves_width)
    if note:
        logger.warning("%s", note)
    choices = choose_weights(weights, recipe, structure, halves_width)
    targets: dict[str, Target] = {}
    kept: dict[str, str] = {}
    for layer, choice in choices.items():
        if choice.part is None:
            kept[layer] = choice.decision.reason
            continue
        fallback = choice.part.backend.layer_options(*weights[layer].shape)
        targets[layer] = Target(choice.part.method, {**options_of(choice.part), **fallback})
    return Selection(targets, kept)


def options_of(part: Any) -> dict[str, Any]:
    """The user's options of a recipe's part, JSON-serializable."""
    return part.to_dict().get("backend_config_kwargs", {})


class LayerQuantizer:
    """Quantizes the chosen layers of one model while it is loaded.

    Args:
        targets: ``{layer name: how to quantize it}``.
        device: where to quantize.
        bake: changes a float weight before it is quantized: a LoRA.

    Attributes:
        done: names of the layers quantized so far.
    """

    def __init__(self, targets: Mapping[str, Target], device: torch.device, bake: Bake | None = None) -> None:
        self.targets = targets
        self.device = device
        self.bake = bake
        self.done: list[str] = []
        self._progress = comfy.utils.ProgressBar(len(targets))

    def replace_weight(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Replace a float weight in ``state_dict`` by what a Linear of ours loads.

        Args:
            state_dict: the tensors of one layer; changed in place.
            prefix: the layer's name and a dot.

        Raises:
            QuantizationError: the weight cannot be quantized; the message names the layer.
        """
        name = prefix.removesuffix(".")
        target = self.targets.get(name)
        if target is None or prefix + "weight" not in state_dict:
            return
        comfy.model_management.throw_exception_if_processing_interrupted()
        weight = state_dict.pop(prefix + "weight")
        try:
            made = self._quantize(name, weight, target)
        except (RuntimeError, ValueError, ImportError, MemoryError) as error:
            if _is_out_of_memory(error):
                raise _out_of_memory(name, weight, self.device, error) from error
            raise QuantizationError(
                f"layer {name} {list(weight.shape)} ({weight.dtype}) cannot be quantized with {target.method}: {error}"
            ) from error
        for key, tensor in made.items():
            state_dict[prefix + key] = tensor.to(weight.device)
        self.done.append(name)
        self._progress.update(1)

    def _quantize(self, name: str, weight: torch.Tensor, target: Target) -> dict[str, torch.Tensor]:
        if self.bake is not None:
            weight = self.bake(name, weight)
        if is_native(target.method):
            config = adapter.FORMATS.backend(target.method, target.options).config
            return quantize_weight(weight.to(self.device), config)
        return {"weight": adapter.quantize(weight, target.method, target.options, self.device)}


def _is_out_of_memory(error: BaseException) -> bool:
    # torch has no exception of its own for the CPU's memory.
    return isinstance(error, MemoryError) or comfy.model_management.is_oom(error) or "DefaultCPUAllocator" in str(error)


def _out_of_memory(name: str, weight: torch.Tensor, device: torch.device, error: BaseException) -> BaseException:
    """Return an error of the kind that ComfyUI frees memory for, which says what to lower."""
    large = f"layer {name} {list(weight.shape)} ({weight.dtype}) could not be quantized on {device}: out of memory"
    if device.type == "cpu":
        return MemoryError(
            f"{large}. The quantized model does not fit into memory: choose a method with fewer bits, close other "
            "programs, or convert the file with Convert Checkpoint, which needs little memory, and load the result"
        )
    return type(error)(f"{large}. Set quantize_device to cpu, or free the card: unload other models first")
