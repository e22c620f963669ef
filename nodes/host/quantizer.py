"""Decides which Linears of a model are quantized, and quantizes them one at a time while ComfyUI loads the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.quant_ops import QUANT_ALGOS

from quant_core import QuantizationError, QuantizeConfig
from quant_core.backends.comfy_kitchen import FORMATS, quantize_weight
from quant_core.checkpoint.header import TensorInfo
from quant_core.choice import choose


def usable_methods() -> list[str]:
    """The methods whose format this ComfyUI can load."""
    return [method for method, form in FORMATS.items() if form.name in QUANT_ALGOS]


class LayerQuantizer:
    """Quantizes the chosen layers of one model while it is loaded.

    The choice is the one that :func:`quant_core.convert.convert_file` makes for a file with these tensors.

    Args:
        recipe: the method, its options, and the layers to leave out.
        tensors: of the model, under the names that ComfyUI loads them by.
        device: where to quantize.

    Attributes:
        chosen: names of the layers to quantize.
        kept: ``{layer name: why it stays in float}`` of the others.
        done: names of the layers quantized so far.

    Raises:
        ValueError: an entry of ``recipe.exclude_modules`` matches no layer, or nothing is left to quantize.
    """

    def __init__(self, recipe: QuantizeConfig, tensors: Mapping[str, TensorInfo], device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        decisions, _ = choose(dict(tensors), recipe, halves_width=FORMATS[recipe.method].packed)
        self.chosen = {name for name, decision in decisions.items() if decision.quantize}
        self.kept = {name: decision.reason for name, decision in decisions.items() if not decision.quantize}
        self.done: list[str] = []
        self._progress = comfy.utils.ProgressBar(len(self.chosen))

    def replace_weight(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Replace a float weight in ``state_dict`` by the tensors that a quantized file holds for its layer.

        Args:
            state_dict: the tensors of one layer; changed in place.
            prefix: the layer's name and a dot.

        Raises:
            QuantizationError: the weight cannot be quantized; the message names the layer.
        """
        name = prefix.removesuffix(".")
        if name not in self.chosen:
            return
        comfy.model_management.throw_exception_if_processing_interrupted()
        weight = state_dict.pop(prefix + "weight")
        try:
            tensors = quantize_weight(weight.to(self.device), self.recipe.backend.config)
        except (RuntimeError, ValueError) as error:
            if comfy.model_management.is_oom(error):
                raise  # ComfyUI frees memory and tells the user.
            raise QuantizationError(
                f"layer {name} {list(weight.shape)} ({weight.dtype}) cannot be quantized with {self.recipe.method}: "
                f"{error}"
            ) from error
        for key, tensor in tensors.items():
            state_dict[prefix + key] = tensor.to(weight.device)
        self.done.append(name)
        self._progress.update(1)
