"""What ComfyUI will make of a state dict, found out before it loads it.

Quantizing while loading needs two facts in advance: the dtype that the model will compute in, and the names and shapes
that its layers will have once ComfyUI has renamed and fused the file's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_detection
import comfy.utils
import torch

from quant_core.checkpoint.header import TensorInfo

from .adapter import is_adapted
from .ops import MARKER

_PREDICTION_MARKS = {"v_pred", "ztsnr", "edm_vpred.sigma_max", "edm_vpred.sigma_min", "edm_mean", "edm_std"}
"""Tensors beside the diffusion model's that say how a model of the SDXL kind was trained to predict."""


@dataclass(frozen=True)
class Detected:
    """A diffusion model that ComfyUI recognizes.

    Attributes:
        config: ComfyUI's model configuration.
        tensors: dtype and shape of every tensor, under the names that ComfyUI loads them by.
        float_again: layers that ComfyUI makes from weights in the adapter's layout by fusing or cutting them, which
            leaves them in float.
    """

    config: Any
    tensors: dict[str, TensorInfo]
    float_again: frozenset[str] = frozenset()

    @property
    def architecture(self) -> str:
        return type(self.config).__name__


class _Traced(torch.Tensor):
    """Stands for a weight in the adapter's layout; what torch makes of it is of this class too."""


def renames_layers(state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bool:
    """Whether ComfyUI recognizes the model under other names only (diffusers'), and would rename and fuse layers."""
    return comfy.model_detection.model_config_from_unet(state_dict, "", metadata=metadata) is None


def unwrap(state_dict: dict[str, torch.Tensor], metadata: Mapping[str, str] | None) -> dict[str, torch.Tensor]:
    """Return the diffusion model's tensors without the prefix of a full checkpoint, each layer with its marker.

    Older quantized files say which layers are quantized in the header or by one tensor for all; ComfyUI turns both
    into one marker a layer, but not for a loader that brings its own operations.
    """
    state_dict, metadata = comfy.utils.convert_old_quants(state_dict, "", metadata=metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state_dict)
    inner = comfy.utils.state_dict_prefix_replace(state_dict, {prefix: ""}, filter_keys=True)
    if not inner:
        return state_dict
    inner, _ = comfy.utils.convert_old_quants(inner, "", metadata=metadata)
    # A header that lists layers with the prefix has just added markers for layers of that name.
    ending = "." + MARKER
    inner.update({key: state_dict[key] for key in _PREDICTION_MARKS & state_dict.keys()})
    return {k: v for k, v in inner.items() if not k.endswith(ending) or k.removesuffix(MARKER) + "weight" in inner}


def detect(state_dict: dict[str, torch.Tensor], metadata: Mapping[str, str] | None) -> Detected | None:
    """Recognize a diffusion model from its unwrapped tensors; None when ComfyUI would not recognize it.

    Reads shapes and dtypes; the conversions of keys run on tensors without data.
    """
    empty = {key: _without_data(tensor) for key, tensor in state_dict.items()}
    whole = {id(tensor) for tensor in empty.values()}
    config = comfy.model_detection.model_config_from_unet(state_dict, "", metadata=metadata)
    if config is None:
        converted = comfy.model_detection.convert_diffusers_mmdit(empty, "")
        if converted is not None:
            config = comfy.model_detection.model_config_from_unet(converted, "")
        else:
            config = comfy.model_detection.model_config_from_diffusers_unet(state_dict)
            names = {} if config is None else comfy.utils.unet_to_diffusers(config.unet_config)
            converted = {names[key]: tensor for key, tensor in empty.items() if key in names}
        if config is None:
            return None
        empty = converted
    final = config.process_unet_state_dict(empty)
    # The file's byte positions mean nothing for a tensor that was renamed or fused.
    tensors = {key: TensorInfo(t.dtype, tuple(t.shape), 0, 0) for key, t in final.items()}
    cut = (key for key, tensor in final.items() if isinstance(tensor, _Traced) and id(tensor) not in whole)
    return Detected(config, tensors, frozenset(key.removesuffix(".weight") for key in cut))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return empty.as_subclass(_Traced) if is_adapted(tensor) else empty
