"""Quantizing to block scales that are stored in tiles of 128 rows and 4 columns, a small rectangle at a time.

The tiles of 128 rows lie one behind the other, from left to right; so the scales of a rectangle of 128 rows, and of a
multiple of 4 blocks in width, are a stretch of the whole weight's.
https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

ROWS = 128
_TILE_COLUMNS = 4
_COLUMNS = 1024  # a multiple of 4 blocks of any size in use


def quantize_strips(
    rows: torch.Tensor, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize some rows in rectangles that stay in a CPU's cache.

    Args:
        rows: ``[n, in_features]``; ``n`` is a multiple of 128, or the rows are the weight's last.
        quantize: ``[n, columns] -> (codes [n, columns or half], scales of that rectangle in tiles)``.

    Returns:
        ``(codes [n, in_features or half], scales)``, the scales with one dimension.
    """
    if rows.device.type != "cpu":
        codes, scales = quantize(rows)
        return codes, scales.reshape(-1)
    all_codes, all_scales = [], []
    for strip in rows.split(ROWS):
        parts = [quantize(part.contiguous()) for part in strip.split(_COLUMNS, dim=1)]
        all_codes.append(torch.cat([_as_bytes(codes) for codes, _ in parts], dim=1))
        all_scales += [_as_bytes(scales).reshape(-1) for _, scales in parts]
    codes, scales = parts[0]
    return torch.cat(all_codes).view(codes.dtype), torch.cat(all_scales).view(scales.dtype)


def tiled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Put the scales ``[n, blocks in a row]`` of some rows in tiles, filled up with zeros; the result is flat.

    A tile's 128 rows are stored as 32 of 16: row ``r`` has the columns from ``r // 32 * 4`` on in row ``r % 32``.
    """
    rows, columns = scales.shape
    plain = _as_bytes(scales)
    if rows % ROWS or columns % _TILE_COLUMNS:
        plain = nn.functional.pad(plain, (0, -columns % _TILE_COLUMNS, 0, -rows % ROWS))
    split = plain.view(-1, 4, ROWS // 4, plain.shape[1] // _TILE_COLUMNS, _TILE_COLUMNS)
    return split.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """torch concatenates no block scales of their own dtypes, but bytes."""
    return tensor.view(torch.uint8)
