"""ComfyUI's own quantized formats, through comfy-kitchen.

A layer's state dict is what ComfyUI reads and writes, so a saved model opens in ComfyUI's stock loader. The formats as
data are in :mod:`.formats`, the layer in :mod:`.linear`, the arithmetic in :mod:`.rows` and :mod:`.kernels`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...backend import BackendConfig, QuantBackend, RowQuantizer, Support
from ...constraints import Constraint, DivisibleBy
from ...environment import require_library
from ...registry import register_quant_backend, register_quant_method
from .formats import FORMATS, FORMATS_BY_NAME, ComfyFormat, is_group_size, is_power_of_four, layer_marker
from .kernels import FLOAT_DTYPES, format_support
from .linear import ComfyKitchenLinear
from .quantize import quantize_weight
from .rows import row_quantizer, takes_runs

__all__ = [
    "FORMATS",
    "ComfyKitchenBackend",
    "ComfyKitchenFp8Config",
    "ComfyKitchenFp8E5M2Config",
    "ComfyKitchenInt4ConvRotConfig",
    "ComfyKitchenInt4W4A8Config",
    "ComfyKitchenInt8Config",
    "ComfyKitchenLinear",
    "ComfyKitchenMXFP8Config",
    "ComfyKitchenNVFP4Config",
    "quantize_weight",
]

logger = logging.getLogger("quant_core")


# ------------------------------------------------------------------ options


class _ComfyKitchenConfig(BackendConfig):
    """Base of the formats' options. ``orig_dtype`` is the float dtype of a layer that has none of its own."""

    # Fields of the subclasses, which fix their order; this class is no dataclass.
    format: str
    orig_dtype: torch.dtype
    convrot_groupsize: int

    def constraints(self) -> tuple[Constraint, ...]:
        """The limits of the format on a weight's shape under these options."""
        alignment = FORMATS_BY_NAME[self.format].alignment
        if alignment == 1:
            return ()
        return (DivisibleBy("in_features", alignment), DivisibleBy("out_features", alignment))

    def validate(self) -> None:
        if self.orig_dtype not in FLOAT_DTYPES:
            names = ", ".join(map(str, FLOAT_DTYPES))
            raise ValueError(f"{type(self).__name__}: orig_dtype must be one of {names}, got {self.orig_dtype!r}")

    def _validate_rotation(self) -> None:
        size = self.convrot_groupsize
        if type(size) is not int or size < 4 or size & (size - 1):  # `type`: True is an int
            raise ValueError(
                f"{type(self).__name__}: convrot_groupsize must be a power of 4 (4, 16, 64, 256, ...), got {size!r}"
            )
        if not is_power_of_four(size):
            self.convrot_groupsize = size // 2
            logger.warning(
                "convrot_groupsize %d is not a power of 4, which the rotation needs: using %d",
                size,
                self.convrot_groupsize,
            )


@dataclass
class ComfyKitchenInt8Config(_ComfyKitchenConfig):
    """int8 with one scale a row, or (``per_channel=False``) one for the whole weight.

    ``convrot`` rotates groups of ``convrot_groupsize`` columns by a Hadamard matrix first, which spreads outliers; a
    layer whose width is no multiple of the group takes the next smaller group of 256, 64, 16, or is not rotated.
    """

    per_channel: bool = True
    convrot: bool = True
    convrot_groupsize: int = 256
    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="int8_tensorwise")

    def validate(self) -> None:
        super().validate()
        for name in ("per_channel", "convrot"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{type(self).__name__}: {name} must be True or False, got {getattr(self, name)!r}")
        self._validate_rotation()
        if self.convrot and not self.per_channel:
            raise ValueError(
                f"{type(self).__name__}: convrot needs one scale a row; use per_channel=True or convrot=False"
            )


@dataclass
class ComfyKitchenFp8Config(_ComfyKitchenConfig):
    """fp8 E4M3 with one scale for the whole weight."""

    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="float8_e4m3fn")


@dataclass
class ComfyKitchenFp8E5M2Config(_ComfyKitchenConfig):
    """fp8 E5M2 with one scale for the whole weight."""

    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="float8_e5m2")


@dataclass
class ComfyKitchenMXFP8Config(_ComfyKitchenConfig):
    """fp8 E4M3 in blocks of 32 columns, each with a power-of-two scale."""

    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="mxfp8")


@dataclass
class ComfyKitchenNVFP4Config(_ComfyKitchenConfig):
    """fp4 E2M1 in blocks of 16 columns, each with an fp8 scale, and one float32 scale for the whole weight."""

    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="nvfp4")


@dataclass
class ComfyKitchenInt4ConvRotConfig(_ComfyKitchenConfig):
    """Rotated int4 with one scale a row. ``linear_dtype`` is what the kernel multiplies in, ``int4`` or ``int8``."""

    convrot_groupsize: int = 256
    linear_dtype: str = "int4"
    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="convrot_w4a4")

    def validate(self) -> None:
        super().validate()
        self._validate_rotation()
        if self.linear_dtype not in ("int4", "int8"):
            raise ValueError(f"{type(self).__name__}: linear_dtype must be 'int4' or 'int8', got {self.linear_dtype!r}")

    def constraints(self) -> tuple[Constraint, ...]:
        return (DivisibleBy("in_features", 64),)


@dataclass
class ComfyKitchenInt4W4A8Config(_ComfyKitchenConfig):
    """Rotated 4-bit codes of a 16-entry codebook, with an fp8 scale for each ``group_size`` columns."""

    group_size: int = 16
    convrot_groupsize: int = 256
    orig_dtype: torch.dtype = torch.bfloat16
    format: str = field(init=False, default="asym_w4a8_int8")

    def validate(self) -> None:
        super().validate()
        self._validate_rotation()
        if type(self.group_size) is not int or not is_group_size(self.group_size):
            raise ValueError(
                f"{type(self).__name__}: group_size must be 4, 8, 16 or a multiple of 16, got {self.group_size!r}"
            )

    def constraints(self) -> tuple[Constraint, ...]:
        return (DivisibleBy("in_features", math.lcm(16, self.group_size)),)


# ------------------------------------------------------------------ the backend


@register_quant_backend("comfy_kitchen")
class ComfyKitchenBackend(QuantBackend):
    """Adapter to comfy-kitchen, the library that ComfyUI runs its quantized formats with."""

    project_url = "https://github.com/Comfy-Org/comfy-kitchen"

    @property
    def format(self) -> ComfyFormat:
        """The format of this backend's method, an entry of ``FORMATS``."""
        return FORMATS_BY_NAME[self.config.format]

    def capabilities(self) -> dict[str, bool]:
        return {
            "is_serializable": True,
            "is_differentiable": True,
            "is_compileable": True,
            "requires_calibration": False,
        }

    def validate_environment(self) -> None:
        require_library(self.name, self.format.min_version, self.format.method)

    def support(self, device: torch.device | str = "cpu") -> Support:
        return format_support(self.format, device)

    def constraints(self) -> tuple[Constraint, ...]:
        return self.config.constraints()

    def quantized_linear_classes(self) -> tuple[type[nn.Module], ...]:
        return (ComfyKitchenLinear,)

    def create_quantized_linear(
        self,
        linear: nn.Linear,
        compute_device: torch.device | str | None = None,
        model_device: torch.device | str | None = None,
    ) -> ComfyKitchenLinear:
        weight = linear.weight.detach()
        if compute_device is not None:
            weight = weight.to(compute_device)
        tensors = quantize_weight(weight, self.config)
        layer = ComfyKitchenLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=weight.dtype if weight.dtype in FLOAT_DTYPES else self.config.orig_dtype,
            config=self.config,
            tensors=tensors,
        )
        if linear.bias is not None:
            bias = linear.bias.detach().to(weight.device, copy=True)
            layer.bias = nn.Parameter(bias, requires_grad=False)
        layer.train(linear.training)
        return layer if model_device is None else layer.to(device=model_device)

    def row_quantizer(self, out_features: int, in_features: int, dtype: torch.dtype) -> RowQuantizer | None:
        return row_quantizer(self.config, in_features, dtype) if takes_runs(self.config) else None

    def layer_options(self, out_features: int, in_features: int) -> dict[str, Any]:
        rotation = layer_marker(self.config, in_features).rotation
        if not getattr(self.config, "convrot", rotation > 0) or rotation == self.config.convrot_groupsize:
            return {}
        return {"convrot_groupsize": rotation} if rotation else {"convrot": False}

    def create_quantized_linear_shell(
        self, linear: nn.Linear, compute_dtype: torch.dtype | None = None
    ) -> ComfyKitchenLinear:
        return ComfyKitchenLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype or self.config.orig_dtype,
            config=self.config,
        )


for _config in (
    ComfyKitchenInt8Config,
    ComfyKitchenFp8Config,
    ComfyKitchenFp8E5M2Config,
    ComfyKitchenMXFP8Config,
    ComfyKitchenNVFP4Config,
    ComfyKitchenInt4ConvRotConfig,
    ComfyKitchenInt4W4A8Config,
):
    _format = FORMATS_BY_NAME[_config.format]
    register_quant_method(_format.method, "comfy_kitchen", _config.from_kwargs, label=_format.label)
