"""torchao's plain int4 layout in plain torch: the arithmetic of the ``mslk`` functions that ``Int4Tensor`` calls.

A weight ``[N, K]`` is cut along K into groups of ``group_size``. Codes are signed, -8..7, two in a byte, the even
column in the low nibble; ``scale`` and ``zero_point`` are ``[K / group_size, N]`` in the weight's dtype, and

    w = code * scale + zero_point

where ``zero_point`` is a float: the value of code 0, ``min + 8 * scale``.
"""

from __future__ import annotations

import torch

_MIN_RANGE = 1e-6  # torchao's floor of a group's range (max - min, or absmax): keeps the scale from 0


def quantize_int4(
    weight: torch.Tensor, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize ``weight [N, K]`` to ``(qdata int8 [N, K/2], scale [K/group, N], zero_point [K/group, N])``.

    Args:
        symmetric: absmax / 8 as the scale and 0 as the zero point, which kernels with float8 activations need;
            otherwise the group's range is spread over the 16 codes.
    """
    groups = weight.to(torch.float32).reshape(weight.shape[0], -1, group_size)
    if symmetric:
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=_MIN_RANGE) / 8
        zero_point = torch.zeros_like(scale)
        codes = (groups / scale).round().clamp_(-8, 7)
    else:
        low = groups.amin(dim=-1, keepdim=True)
        high = groups.amax(dim=-1, keepdim=True)
        scale = (high - low).clamp(min=_MIN_RANGE) / 15
        zero_point = low + 8 * scale
        codes = ((groups - low) / scale).round().clamp_(0, 15) - 8
        if weight.dtype == torch.float16:
            # The scale of an all-zero group is subnormal in float16: rounded, -8 * scale + zero_point is not 0.
            dead = (low == 0) & (high == 0)
            scale = torch.where(dead, 1.0, scale)
            zero_point = torch.where(dead, 0.0, zero_point)
            codes = torch.where(dead, 0.0, codes)
    qdata = _pack(codes.to(torch.int8).reshape(weight.shape))

    def per_group(t: torch.Tensor) -> torch.Tensor:
        return t.squeeze(-1).t().contiguous().to(weight.dtype)

    return qdata, per_group(scale), per_group(zero_point)


def dequantize_int4(qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    """Return the float32 weight ``[N, K]``; the group size is read from the shapes."""
    codes = _unpack(qdata)
    groups = codes.reshape(qdata.shape[0], scale.shape[0], -1).to(torch.float32)
    weight = groups * scale.t().to(torch.float32).unsqueeze(-1) + zero_point.t().to(torch.float32).unsqueeze(-1)
    return weight.reshape(codes.shape)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, 1::2] << 4) | (codes[:, ::2] & 0xF)


def _unpack(qdata: torch.Tensor) -> torch.Tensor:
    # On int8 the right shift carries the sign, which is the two's complement of the nibble.
    return torch.stack(((qdata << 4) >> 4, qdata >> 4), dim=-1).reshape(qdata.shape[0], -1)
