"""Adds LoRAs to a model's float weights while it is loaded, before they are quantized."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from quant_core.lora import LoraMerge

logger = logging.getLogger("quant_core")

_RUN_ELEMENTS = 1 << 22  # a run of rows is merged in float32: 16 MiB and a few copies, whatever the layer's size


class LoraBaking:
    """LoRAs matched to a model.

    Args:
        shapes: ``{tensor name: shape}``, under the names that ComfyUI loads them by.
        loras: ``(path, strength)`` each.

    Raises:
        CheckpointError: a file holds no LoRA, or one that does not fit.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], loras: Sequence[tuple[str, float]]) -> None:
        self._merge = LoraMerge(shapes, [(path, strength) for path, strength in loras if strength])
        for unmatched in self._merge.unmatched:
            logger.warning("%s", unmatched)

    def bake(self, layer: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a layer's weight with every LoRA added, in its dtype; ``weight`` itself where none changes it."""
        if not self._merge.applies_to(layer):
            return weight
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if not weight.dim():
            return self._merge(layer, weight.float().reshape(1), 0).reshape(()).to(weight.dtype)
        step = max(1, _RUN_ELEMENTS // max(1, weight[0].numel()))
        for start in range(0, weight.shape[0], step):
            out[start : start + step] = self._merge(layer, weight[start : start + step].float(), start)
        return out

    def bake_rest(self, model: torch.nn.Module, done: Collection[str], dtypes: Mapping[str, torch.dtype]) -> None:
        """Change the parameters of a loaded model that no quantizer saw: kept weights, biases, other parameters.

        Args:
            model: the diffusion model.
            done: the layers whose weights were baked while they were quantized.
            dtypes: of the tensors in the file; values are rounded to it first, as a file with them would hold them.
        """
        parameters = dict(model.named_parameters())
        for layer in self._merge.layers + self._merge.others:
            name = layer if layer in parameters else f"{layer}.weight"
            parameter = parameters.get(name)
            if parameter is None or (name != layer and layer in done):
                continue
            merged = self.bake(layer, parameter.detach().to(dtypes.get(name, parameter.dtype)))
            parent, _, leaf = name.rpartition(".")
            value = torch.nn.Parameter(merged.to(parameter.dtype), requires_grad=False)
            setattr(model.get_submodule(parent), leaf, value)
