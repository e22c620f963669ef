"""NVFP4 and MXFP8 on a CPU: comfy-kitchen's operations on float32 values, tile by tile, in buffers that stay.

A block lies in one row, and rows are a multiple of it, so that a run of rows is worked on as one run of blocks.
"""

from __future__ import annotations

import functools

import torch

from ..scratch import TILE, Scratch
from ..search import CodeSearch, beyond, magnitudes
from ..strips import tiled_scales

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E8M0_BIAS = 127
_E8M0_MIN = 2.0**-_E8M0_BIAS
_MANTISSA_BITS = 23


@functools.cache
def _e2m1() -> CodeSearch:
    """Return the rounding to 0, 0.5, 1, 1.5, 2, 3, 4 and 6, a tie to the even code, the sign in the fourth bit."""
    to_lower, to_upper = beyond(magnitudes([0.25, 1.25, 2.5, 5.0])), magnitudes([0.75, 1.75, 3.5])
    steps = torch.cat([to_lower, to_upper]).sort().values
    return CodeSearch(positive=(0, steps), negative=(8, steps))


@functools.cache
def _e4m3_values() -> torch.Tensor:
    """Return the float32 value of every fp8 code: looking one up takes a quarter of torch's cast."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def nvfp4_rows(rows: torch.Tensor, tensor_scale: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows ``[n, in_features]`` as ``comfy_kitchen.quantize_nvfp4`` does.

    Args:
        rows: float, contiguous, on the CPU; ``n`` is a multiple of 128, or they are the weight's last.
        tensor_scale: of the whole weight, float32 scalar.
        scratch: buffers.

    Returns:
        ``(codes uint8 [n, in_features // 2], block scales float8_e4m3fn, in tiles, one dimension)``.
    """
    block = 16
    flat = rows.view(-1)
    packed = torch.empty(flat.numel() // 2, dtype=torch.uint8, device="cpu")
    scales = torch.empty(flat.numel() // block, dtype=torch.float8_e4m3fn, device="cpu")
    for start in range(0, flat.numel(), TILE):
        tile = flat[start : start + TILE]
        values, amax = _values_and_amax(tile, block, scratch)
        part = scales[start // block : (start + tile.numel()) // block]
        part.copy_((amax / _E2M1_MAX / tensor_scale).clamp_(max=_E4M3_MAX))
        total = tensor_scale * _e4m3_values().index_select(0, part.view(torch.uint8).int())
        zeros = total == 0
        blocks = values.view(-1, block)
        blocks.div_(total.masked_fill_(zeros, 1.0)[:, None])
        codes = packed[start // 2 : (start + tile.numel()) // 2]
        _e2m1().pack(values, codes)
        if bool(zeros.any()):  # also where the scale is too small for its dtype: all codes, and their signs, are 0
            codes.view(-1, block // 2).masked_fill_(zeros[:, None], 0)
    return packed.view(rows.shape[0], -1), tiled_scales(scales.view(rows.shape[0], -1))


def mxfp8_rows(rows: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows ``[n, in_features]`` as ``comfy_kitchen.quantize_mxfp8`` does.

    A block whose scale would be below the smallest exponent counts as zeros: comfy-kitchen divides it by a scale that
    underflows to 0, which gives NaN.

    Args:
        rows: as for :func:`nvfp4_rows`.
        scratch: buffers.

    Returns:
        ``(codes float8_e4m3fn [n, in_features], block scales float8_e8m0fnu, in tiles, one dimension)``.
    """
    block = 32
    flat = rows.view(-1)
    codes = torch.empty(flat.numel(), dtype=torch.float8_e4m3fn, device="cpu")
    scales = torch.empty(flat.numel() // block, dtype=torch.uint8, device="cpu")
    for start in range(0, flat.numel(), TILE):
        tile = flat[start : start + TILE]
        values, amax = _values_and_amax(tile, block, scratch)
        needed = amax.div_(_E4M3_MAX).clamp_(min=_E8M0_MIN)
        exponents = needed.log2_().ceil_().to(torch.int32).add_(_E8M0_BIAS).clamp_(0, 254)
        scales[start // block : (start + tile.numel()) // block].copy_(exponents)
        zeros = exponents == 0
        scale = exponents.bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32).masked_fill_(zeros, 1.0)
        values.view(-1, block).div_(scale[:, None])
        if bool(zeros.any()):
            values.view(-1, block).masked_fill_(zeros[:, None], 0.0)
        codes[start : start + tile.numel()].copy_(values)
    tiles = tiled_scales(scales.view(rows.shape[0], -1))
    return codes.view(rows.shape), tiles.view(torch.float8_e8m0fnu)


def _values_and_amax(tile: torch.Tensor, block: int, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(the elements as float32 in a buffer, largest magnitude of each block)``."""
    values = scratch.get("values", tile.numel()).copy_(tile)
    sizes = torch.abs(values, out=scratch.get("magnitudes", tile.numel()))
    # Their bits have the same order, and torch finds the largest of a few integers three times as fast.
    return values, sizes.view(torch.int32).view(-1, block).amax(dim=1).view(torch.float32)
