"""The torchao backend: int8, float8, int4, NVFP4 and MX weights, with and without quantized activations.

Files are torchao's own, see :mod:`.state`. On a machine whose hardware has no kernel for a method, the same
weights are dequantized and multiplied in float.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...backend import QuantBackend, RowQuantizer, Support
from ...constraints import Constraint, violations
from ...errors import QuantizationError
from ...registry import register_quant_backend, register_quant_method
from . import library, options, state
from .block_formats import MXScheme, NVFP4Scheme
from .linear import TorchAOLinear
from .rows import TorchAORows
from .schemes import Float8Scheme, Int4Scheme, Int8Scheme, Scheme, source_dtype

_MX_METHODS = {torch.float8_e4m3fn: "torchao_mxfp8_w8a8", torch.float4_e2m1fn_x2: "torchao_mxfp4_w4a4"}
_SCHEMES: dict[str, tuple[type[Scheme], str]] = {
    "Int8WeightOnlyConfig": (Int8Scheme, "torchao_int8_w8a16"),
    "Int8DynamicActivationInt8WeightConfig": (Int8Scheme, "torchao_int8_w8a8"),
    "Float8WeightOnlyConfig": (Float8Scheme, "torchao_fp8_w8a16"),
    "Float8DynamicActivationFloat8WeightConfig": (Float8Scheme, "torchao_fp8_w8a8"),
    "Int4WeightOnlyConfig": (Int4Scheme, "torchao_int4_w4a16"),
    "Float8DynamicActivationInt4WeightConfig": (Int4Scheme, "torchao_int4_w4a8"),
    "NVFP4WeightOnlyConfig": (NVFP4Scheme, "torchao_nvfp4_w4a16"),
    "NVFP4DynamicActivationNVFP4WeightConfig": (NVFP4Scheme, "torchao_nvfp4_w4a4"),
}


@register_quant_backend("torchao")
class TorchAOBackend(QuantBackend):
    """Adapter to torchao. ``config`` is torchao's own config object, e.g. ``Int8WeightOnlyConfig``."""

    project_url = "https://github.com/pytorch/ao"

    @functools.cached_property
    def scheme(self) -> Scheme:
        """The format that ``config`` describes."""
        name = type(self.config).__name__
        if name == "MXDynamicActivationMXWeightConfig" and self.config.weight_dtype in _MX_METHODS:
            return MXScheme(_MX_METHODS[self.config.weight_dtype], self.config)
        if name not in _SCHEMES:
            accepted = ", ".join([*_SCHEMES, "MXDynamicActivationMXWeightConfig"])
            raise ValueError(f"the torchao backend takes a config of {accepted}; got {name}")
        scheme, method = _SCHEMES[name]
        return scheme(method, self.config)

    def capabilities(self) -> dict[str, bool]:
        # torch.compile cannot trace a torchao tensor that holds a class of activation options: it breaks the graph.
        weight_only = "WeightOnly" in type(self.config).__name__
        return super().capabilities() | {
            "is_serializable": True,
            "is_differentiable": True,
            "is_compileable": weight_only,
        }

    def validate_environment(self) -> None:
        library.check_installed()

    def support(self, device: torch.device | str = "cpu") -> Support:
        device = torch.device(device)
        try:
            library.check_installed()
        except ImportError as error:
            return Support("refused", str(error))
        if device.type == "cuda" and not torch.cuda.is_available():
            return Support("refused", "this torch sees no CUDA device")
        attributes = self.scheme.attributes(256, 256, torch.bfloat16)
        reason = self.scheme.obstacle(attributes, device, torch.bfloat16)
        return Support("native") if reason is None else Support("emulated", reason)

    def constraints(self) -> tuple[Constraint, ...]:
        return self.scheme.constraints()

    def quantized_linear_classes(self) -> tuple[type[nn.Module], ...]:
        return (TorchAOLinear,)

    # ------------------------------------------------------------------ one layer

    @torch.no_grad()
    def create_quantized_linear(
        self,
        linear: nn.Linear,
        compute_device: torch.device | str | None = None,
        model_device: torch.device | str | None = None,
    ) -> TorchAOLinear:
        """See :meth:`QuantBackend.create_quantized_linear`.

        Raises:
            QuantizationError: the weight holds NaN or infinity.
            ValueError: the shape does not fit the format.
        """
        weight = linear.weight.detach().to(device=compute_device or linear.weight.device)
        dtype = weight.dtype
        if reasons := violations(self.constraints(), linear.in_features, linear.out_features):
            shape = [linear.out_features, linear.in_features]
            raise ValueError(f"{self.scheme.method} cannot quantize a weight {shape}: {'; '.join(reasons)}")
        low, high = torch.aminmax(weight)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise QuantizationError("the weight holds NaN or infinite values; the source model is damaged")
        layer = TorchAOLinear(
            self.scheme, linear.in_features, linear.out_features, linear.bias is not None, dtype, weight.device
        )
        layer.set_packed(self.scheme.quantize(weight.to(source_dtype(dtype)).contiguous()))
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().to(weight.device), requires_grad=False)
        return layer if model_device is None else layer.to(device=model_device)

    def row_quantizer(self, out_features: int, in_features: int, dtype: torch.dtype) -> RowQuantizer:
        return TorchAORows(self.scheme, dtype)

    def create_quantized_linear_shell(self, linear: nn.Linear, compute_dtype: torch.dtype) -> TorchAOLinear:
        return TorchAOLinear(
            self.scheme, linear.in_features, linear.out_features, linear.bias is not None, compute_dtype
        )

    # ------------------------------------------------------------------ state dicts

    def flatten_state_dict(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return state.flatten(state_dict)

    def unflatten_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        return state.unflatten(self.scheme, state_dict, metadata)


for _name, _factory, _label in (
    ("int8_w8a16", options.int8_weight_only, "8bit, int8, weight-only"),
    ("int4_w4a16", options.int4_weight_only, "W4A16, int4 weight-only"),
    ("fp8_w8a16", options.float8_weight_only, "8bit, fp8, weight-only"),
    ("int8_w8a8", options.int8_dynamic, "W8A8, int8 weight + int8 dynamic activation"),
    ("fp8_w8a8", options.float8_dynamic, "W8A8, fp8 weight + fp8 dynamic activation"),
    ("int4_w4a8", options.int4_float8_dynamic, "W4A8, int4 weight + fp8 dynamic activation"),
    ("mxfp8_w8a8", options.mx_dynamic("float8_e4m3fn"), "W8A8, MXFP8 microscaling weight + activation"),
    ("mxfp4_w4a4", options.mx_dynamic("float4_e2m1fn_x2"), "W4A4, MXFP4 microscaling weight + activation"),
    ("nvfp4_w4a4", options.nvfp4_dynamic, "W4A4, NVFP4 weight + activation"),
    ("nvfp4_w4a16", options.nvfp4_weight_only, "W4A16, NVFP4 weight-only"),
):
    register_quant_method(f"torchao_{_name}", "torchao", _factory, _label)
