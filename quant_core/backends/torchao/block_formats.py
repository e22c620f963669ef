"""The torchao formats with block scales of their own dtype: NVFP4 (blocks of 16) and MXFP8/MXFP4 (blocks of 32)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ...constraints import Constraint, DivisibleBy
from . import library
from .schemes import Scheme, TensorSpec, needs_gpu

# The smallest per-tensor scale whose reciprocal, divided by the smallest block scale, stays finite in float32.
_MIN_TENSOR_SCALE = 2.0**-120
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


def _tiles(rows: int, scale_columns: int) -> tuple[int, int]:
    """Shape of scales ``[rows, scale_columns]`` in cuBLAS's tiles of 128 x 4, stored as 32 x 16 each.

    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    return -(-rows // 128) * 32, -(-scale_columns // 4) * 16


def _flag(attributes: Mapping[str, Any], name: str) -> bool:
    if not isinstance(attributes[name], bool):
        raise ValueError(f"{name} is {attributes[name]!r}, not true or false")
    return attributes[name]


def _check_block(attributes: Mapping[str, Any], size: int, in_features: int) -> None:
    if attributes["block_size"] != size or in_features % size:
        raise ValueError(
            f"block_size {attributes['block_size']!r} does not fit rows of {in_features}; it must be {size}"
        )


class NVFP4Scheme(Scheme):
    """torchao's ``NVFP4Tensor``: ``w = e2m1 code * e4m3 block scale * float32 per-tensor scale``."""

    class_name = "NVFP4Tensor"
    dtype_attribute = "orig_dtype"

    def __init__(self, method: str, config: Any) -> None:
        super().__init__(method, config)
        self.dynamic = method == "torchao_nvfp4_w4a4"

    def attributes(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
        act_kwargs = None
        if self.dynamic:
            act_kwargs = library.load().QuantizeTensorToNVFP4Kwargs(
                is_swizzled_scales=True,
                use_triton_kernel=self.config.use_triton_kernel,
                use_dynamic_per_tensor_scale=self.config.use_dynamic_per_tensor_scale,
            )
        return {
            "block_size": 16,
            "orig_dtype": dtype,
            "is_swizzled_scales": True,
            "use_triton_kernel": self.config.use_triton_kernel if self.dynamic else False,
            "act_quant_kwargs": act_kwargs,
        }

    def specs(self, out_features: int, in_features: int, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        _check_block(attributes, 16, in_features)
        scales = (out_features, in_features // 16)
        if _flag(attributes, "is_swizzled_scales"):
            scales = _tiles(*scales)
        return {
            "qdata": TensorSpec((out_features, in_features // 2), (torch.uint8,)),
            "scale": TensorSpec(scales, (torch.float8_e4m3fn,)),
            "per_tensor_scale": TensorSpec((), (torch.float32,), optional=True),
        }

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        low, high = torch.aminmax(weight)
        return self.quantize_scaled(weight, self.tensor_scale(torch.maximum(-low, high).float()))

    def tensor_scale(self, amax: torch.Tensor) -> torch.Tensor | None:
        """Return the scale of a weight whose largest magnitude is ``amax`` (float32), None where there is none."""
        if not self.config.use_dynamic_per_tensor_scale:
            return None
        # Without the floor a weight of zeros becomes 0 / 0 = NaN.
        return (amax / (_E4M3_MAX * _E2M1_MAX)).clamp(min=_MIN_TENSOR_SCALE)

    def quantize_scaled(self, weight: torch.Tensor, tensor_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Quantize a weight, or some of its rows, with the scale of the whole weight."""
        source = weight.to(torch.float32)
        tensor = self.tensor_class.to_nvfp4(source, per_tensor_scale=tensor_scale, is_swizzled_scales=True)
        inner = {"qdata": tensor.qdata, "scale": tensor.scale, "per_tensor_scale": tensor_scale}
        return {name: t for name, t in inner.items() if t is not None}

    def constraints(self) -> tuple[Constraint, ...]:
        return (DivisibleBy("in_features", 16), DivisibleBy("out_features", 16))

    def obstacle(self, attributes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
        if not self.dynamic:
            return "weight-only: the weight is dequantized for every matmul"
        if dtype not in (torch.bfloat16, torch.float32):
            return f"the kernel computes in bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
        return needs_gpu(device, (10, 0))

    def for_compute(self, attributes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        changed = super().for_compute(attributes, dtype)
        kwargs = changed["act_quant_kwargs"]
        if kwargs is not None and kwargs.use_triton_kernel and not self.has_mslk:
            changed["use_triton_kernel"] = False
            changed["act_quant_kwargs"] = dataclasses.replace(kwargs, use_triton_kernel=False)
        return changed

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().linear(x, weight, bias)
        # torchao scales an all-zero input by 0 / 0; what it should give is the bias. No .any(): that would sync.
        zeros = out.new_zeros(out.shape[-1]) if bias is None else bias
        return torch.where(x.abs().amax() == 0, zeros, out)


class MXScheme(Scheme):
    """torchao's ``MXTensor`` (OCP Microscaling Formats 1.0): ``w = element * 2 ** (e8m0 block scale - 127)``."""

    class_name = "MXTensor"
    dtype_attribute = "orig_dtype"

    def __init__(self, method: str, config: Any) -> None:
        super().__init__(method, config)
        fp4 = method == "torchao_mxfp4_w4a4"
        self.elem_dtype = torch.float4_e2m1fn_x2 if fp4 else torch.float8_e4m3fn

    def attributes(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
        act_kwargs = library.load().QuantizeTensorToMXKwargs(
            elem_dtype=self.elem_dtype,
            block_size=32,
            scaling_mode=self.config.scaling_mode,
            kernel_preference=self.config.kernel_preference,
            is_swizzled_scales=True,
        )
        return {
            "elem_dtype": self.elem_dtype,
            "block_size": 32,
            "orig_dtype": dtype,
            "kernel_preference": self.config.kernel_preference,
            "act_quant_kwargs": act_kwargs,
            "is_swizzled_scales": True,
        }

    def specs(self, out_features: int, in_features: int, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        _check_block(attributes, 32, in_features)
        scales = (out_features, in_features // 32)
        if _flag(attributes, "is_swizzled_scales"):
            scales = _tiles(*scales)
        if self.elem_dtype == torch.float4_e2m1fn_x2:
            qdata = TensorSpec((out_features, in_features // 2), (torch.uint8,))
        else:
            qdata = TensorSpec((out_features, in_features), (torch.float8_e4m3fn,))
        return {"qdata": qdata, "scale": TensorSpec(scales, (torch.float8_e8m0fnu,))}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tensor = self.tensor_class.to_mx(
            weight.to(torch.float32),
            self.elem_dtype,
            block_size=32,
            scaling_mode=self.config.scaling_mode,
            is_swizzled_scales=True,
        )
        return {"qdata": tensor.qdata, "scale": tensor.scale}

    def constraints(self) -> tuple[Constraint, ...]:
        return (DivisibleBy("in_features", 32),)

    def obstacle(self, attributes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
        emulated = attributes["kernel_preference"] == self.kernels.EMULATED
        if emulated:  # torchao's own emulation, which quantizes the activations too
            return None if dtype in (torch.bfloat16, torch.float32) else "torchao quantizes bfloat16 and float32 only"
        if dtype != torch.bfloat16:
            return f"the kernel computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
        return needs_gpu(device, (10, 0))
