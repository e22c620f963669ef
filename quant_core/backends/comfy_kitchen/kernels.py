"""Decoding and multiplying in ComfyUI's formats, done by comfy-kitchen.

Both are ``torch.library`` ops with fake versions, so that torch.compile and fake tensors never run comfy-kitchen's own
code: its caches of Hadamard matrices would keep what they get.
"""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

import torch

from ...backend import Support
from ...packed_linear import saturate
from .formats import FORMATS_BY_NAME, ComfyFormat

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8_ACTIVATION = torch.float8_e4m3fn
NVFP4_MAX = 448.0 * 6.0  # the largest block scale times the largest code


_IMPORT = threading.Lock()


@functools.cache
def kitchen() -> ModuleType:
    """Import comfy-kitchen.

    Its module-level tables are real tensors, so a ``torch.device("meta")`` context of the caller must not reach them.
    Its CUDA kernels are built for CUDA 13; under an older one ComfyUI switches them off, and so does this. Nothing else
    imports it: two threads that first import different modules of it at once wait for each other.
    """
    with _IMPORT, torch.device("cpu"):
        import comfy_kitchen
        import comfy_kitchen.tensor
        import comfy_kitchen.tensor.int8_utils
    cuda = torch.version.cuda
    if cuda is None or int(cuda.split(".")[0]) < 13:
        comfy_kitchen.registry.disable("cuda")
    return comfy_kitchen


def layout_of(fmt: ComfyFormat) -> Any:
    """Return the layout class of a format: comfy-kitchen's own, also where ComfyUI registered another by its name."""
    return getattr(kitchen().tensor, fmt.layout)


def fp8_scale(amax: torch.Tensor, source_dtype: torch.dtype, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Return ComfyUI's scale of a tensor with the largest magnitude ``amax`` (float32 scalar).

    ``amax / max(fp8)``; for float16 sources its reciprocal is kept inside float16. Zeros get scale 1, where ComfyUI
    would write a 0 that decodes to NaN.
    """
    scale = amax / torch.finfo(fp8_dtype).max
    if source_dtype == torch.float16:
        scale = 1.0 / (1.0 / scale).clamp(max=torch.finfo(torch.float16).max)
    # The reciprocal of anything smaller than this is infinite, and infinity times a zero weight is NaN.
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


# ------------------------------------------------------------------ where a kernel exists


def format_support(fmt: ComfyFormat, device: torch.device | str) -> Support:
    """Say whether comfy-kitchen multiplies in this format on ``device``."""
    device = torch.device(device)
    if device.type == "cpu":
        if fmt.native_on_cpu:
            return Support("native")
        return Support("emulated", f"comfy-kitchen has no {fmt.name} matmul for a CPU")
    if device.type != "cuda" or torch.version.hip is not None:
        where = "ROCm" if device.type == "cuda" else device.type
        return Support("emulated", f"{fmt.name} kernels are used on NVIDIA GPUs only, not on {where}")
    if not torch.cuda.is_available():
        return Support("emulated", "this torch finds no CUDA device")
    found = torch.cuda.get_device_capability(device)
    if found >= fmt.min_capability:
        return Support("native")
    need = ".".join(map(str, fmt.min_capability))
    return Support("emulated", f"{fmt.name} kernels need compute capability {need}, this GPU has {found[0]}.{found[1]}")


@functools.cache
def _has_kernel(name: str, device: torch.device) -> bool:
    return format_support(FORMATS_BY_NAME[name], device).kind == "native"


# ------------------------------------------------------------------ decoding

_LAYER = (
    "Tensor weight, Tensor[] scales, Tensor? codebook, str format, int out_features, int in_features, "
    "int rotation, int group_size"
)


def _params(
    scales: list[torch.Tensor],
    codebook: torch.Tensor | None,
    fmt: ComfyFormat,
    shape: tuple[int, int],
    rotation: int,
    group_size: int,
    dtype: torch.dtype,
) -> Any:
    extra: dict[str, Any] = {}
    scale = scales[0]
    if fmt.name == "int8_tensorwise":
        extra = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
    elif fmt.name == "mxfp8":
        scale = scale.view(torch.float8_e8m0fnu)
    elif fmt.name == "nvfp4":
        scale, extra = scales[1], {"block_scale": scales[0]}
    elif fmt.name == "convrot_w4a4":
        extra = {"convrot_groupsize": rotation}
    elif fmt.name == "asym_w4a8_int8":
        extra = {
            "s_channel": scales[1],
            "codebook": codebook,
            "group_size": group_size,
            "convrot_groupsize": rotation,
        }
    return layout_of(fmt).Params(scale=scale, orig_dtype=dtype, orig_shape=shape, **extra)


@torch.library.custom_op(
    "quant_core::comfy_kitchen_decode", mutates_args=(), schema=f"({_LAYER}, ScalarType dtype) -> Tensor"
)
def decode(
    weight: torch.Tensor,
    scales: list[torch.Tensor],
    codebook: torch.Tensor | None,
    format: str,
    out_features: int,
    in_features: int,
    rotation: int,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize a layer's tensors to ``[out_features, in_features]`` in ``dtype``, bit-equal to comfy-kitchen.

    ``scales`` come in the order of ``ComfyFormat.scale_keys``. float64 and float16 are decoded through float32:
    comfy-kitchen's float16 arithmetic loses the scales of small weights, and overflows at large ones.
    """
    fmt = FORMATS_BY_NAME[format]
    compute = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    params = _params(scales, codebook, fmt, (out_features, in_features), rotation, group_size, compute)
    return saturate(layout_of(fmt).dequantize(weight.contiguous(), params), dtype)


@decode.register_fake
def _decode_fake(weight, scales, codebook, format, out_features, in_features, rotation, group_size, dtype):
    return weight.new_empty((out_features, in_features), dtype=dtype)


# ------------------------------------------------------------------ multiplying


@torch.library.custom_op(
    "quant_core::comfy_kitchen_linear",
    mutates_args=(),
    schema=f"(Tensor x, {_LAYER}, str linear_dtype, bool emulate, Tensor? input_scale, Tensor? bias) -> Tensor",
)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: list[torch.Tensor],
    codebook: torch.Tensor | None,
    format: str,
    out_features: int,
    in_features: int,
    rotation: int,
    group_size: int,
    linear_dtype: str,
    emulate: bool,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute ``x [rows, in_features] @ W.T + bias`` in ``x.dtype``.

    With the format's kernel where ``x.device`` has one, otherwise (or with ``emulate``) by dequantizing.
    """
    fmt = FORMATS_BY_NAME[format]
    if emulate or not _has_kernel(format, x.device) or not _kernel_takes(fmt, x.dtype, out_features, in_features):
        w = decode(weight, scales, codebook, format, out_features, in_features, rotation, group_size, x.dtype)
        return torch.nn.functional.linear(x, w, bias)
    x = x.contiguous()
    ck = kitchen()
    if fmt.name == "int8_tensorwise":
        options = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        return ck.int8_linear(x, weight, scales[0], bias, x.dtype, **options)
    if fmt.name == "convrot_w4a4":
        return ck.tensor.convrot_w4a4_linear(
            x, weight, scales[0], bias, convrot_groupsize=rotation, linear_dtype=linear_dtype
        )
    if fmt.name == "asym_w4a8_int8":
        return ck.tensor.w4a8_int8_linear(
            x,
            weight,
            scales[0],
            scales[1],
            codebook=codebook,
            bias=bias,
            group_size=group_size,
            convrot_groupsize=rotation,
            out_dtype=x.dtype,
        )
    return scaled_linear(x, weight, scales, fmt, input_scale, bias)


@linear.register_fake
def _linear_fake(x, weight, scales, codebook, format, out_features, *_):
    return x.new_empty((x.shape[0], out_features))


def _kernel_takes(fmt: ComfyFormat, dtype: torch.dtype, out_features: int, in_features: int) -> bool:
    if fmt.block:
        return dtype in (torch.float16, torch.bfloat16)
    if fmt.layout == "TensorCoreFP8Layout":
        return dtype in _KERNEL_DTYPES and out_features % 16 == 0 and in_features % 16 == 0
    return dtype in _KERNEL_DTYPES


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: list[torch.Tensor],
    fmt: ComfyFormat,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The formats whose activations are quantized like their weights: fp8, mxfp8, nvfp4.

    The activation's scale is ``input_scale`` where the file has one, and otherwise its largest magnitude. ComfyUI
    takes 1 for fp8 without an ``input_scale``, which clips activations beyond 448.
    """
    ck = kitchen()
    fused = bias if x.dtype != torch.float32 else None  # the matmul takes no bias for a float32 result
    if fmt.name == "mxfp8":
        codes, blocks = ck.quantize_mxfp8(x, pad_32x=True)
        out = ck.scaled_mm_mxfp8(
            codes,
            weight,
            block_scale_a=blocks,
            block_scale_b=scales[0].view(torch.float8_e8m0fnu),
            bias=fused,
            out_dtype=x.dtype,
        )
    elif fmt.name == "nvfp4":
        scale = _amax(x) / NVFP4_MAX if input_scale is None else input_scale.float()
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes, blocks = ck.quantize_nvfp4(x, scale, pad_16x=True)
        out = ck.scaled_mm_nvfp4(
            codes,
            weight,
            tensor_scale_a=scale,
            tensor_scale_b=scales[1],
            block_scale_a=blocks,
            block_scale_b=scales[0],
            bias=fused,
            out_dtype=x.dtype,
        )
    else:
        kitchen()
        from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2

        scale = fp8_scale(_amax(x), x.dtype, _FP8_ACTIVATION) if input_scale is None else input_scale.float()
        codes = ck.quantize_per_tensor_fp8(x, scale, _FP8_ACTIVATION)
        out = scaled_mm_v2(codes, weight.t(), scale_a=scale, scale_b=scales[0], bias=fused, out_dtype=x.dtype)
    out = out[: x.shape[0]]  # block formats pad the rows
    return out + bias if bias is not None and fused is None else out.contiguous()


def _amax(x: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()
