"""The number formats that quantized weights are made of, decoded in plain torch.

Nothing here calls a quantization library: what these functions return is also what the libraries are checked against.
"""

from __future__ import annotations

import torch

# OCP Microscaling Formats 1.0, section 5.3.3: FP4 E2M1, a sign bit and eight magnitudes.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1, *(-v for v in _E2M1)])

_E8M0_VALUES = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")])

# cuBLAS stores block scales in tiles of 128 rows and 4 columns:
# https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
TILE_ROWS, TILE_COLUMNS = 128, 4


def nibbles(packed: torch.Tensor, low_first: bool) -> torch.Tensor:
    """Split bytes ``[..., K/2]`` into codes 0..15, uint8 ``[..., K]``.

    Args:
        low_first: whether the earlier code of a byte is its low nibble.
    """
    data = packed.view(torch.uint8)
    low, high = data & 0xF, data >> 4
    pair = (low, high) if low_first else (high, low)
    return torch.stack(pair, dim=-1).flatten(-2)


def lookup(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return ``table[codes]`` for integer codes of any shape."""
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of FP4 E2M1 codes 0..15."""
    return lookup(codes, _E2M1_VALUES)


def signed4(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of two's complement codes 0..15: -8..7."""
    return ((codes.to(torch.int8) ^ 8) - 8).float()


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return ``2 ** (code - 127)`` of E8M0 exponents, float32; 255 is NaN (OCP Microscaling Formats 1.0, 5.4.1)."""
    return lookup(codes.view(torch.uint8), _E8M0_VALUES)


def untile(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bring block scales from tiles of 128 x 4 into row-major order.

    Args:
        scales: whole tiles, any shape of one-byte elements; each row of tiles holds those of ``columns`` columns.
        rows, columns: the result's shape; the rest is padding.

    Within a tile, row ``r`` and column ``c`` lie at byte ``(r % 32) * 16 + (r // 32) * 4 + c``.
    """
    across = -(-columns // TILE_COLUMNS)
    tiles = scales.reshape(-1, across, 32, 4, TILE_COLUMNS)
    straight = tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * TILE_COLUMNS)
    return straight[:rows, :columns]


def scale_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply ``values [N, K]`` by ``scales [N, K / block]`` in place; the block is read from the shapes."""
    rows, groups = scales.shape
    values.view(rows, groups, -1).mul_(scales.unsqueeze(-1))
    return values


def rotate(values: torch.Tensor, group: int) -> torch.Tensor:
    """Multiply each group of ``group`` columns of ``values [..., K]`` by the orthonormal regular Hadamard matrix.

    For a power of 4 that matrix is a Kronecker power of ``[[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1],
    [-1, 1, 1, 1]] / 2``. It is symmetric, so it undoes its own rotation, and it is applied in log4(group) passes over
    4 values each, ``sum - 2 * (the mirrored one)``.
    """
    shape = values.shape
    passes = (group.bit_length() - 1) // 2
    result = values
    for level in range(passes):
        result = result.reshape(-1, 4, 4**level)
        result = result.sum(dim=1, keepdim=True) - 2 * result.flip(1)
    return (result * (0.5**passes)).reshape(shape)
