"""Rounding float32 values to one of 16 codes, as exactly as comparing them with every threshold does.

The bits of a float32, read as an integer, grow with its magnitude. Their upper 11 bits (sign, exponent and a quarter
of the binade) choose a bin with at most one threshold in it. Adding the number of that bin in a table to the bits
carries into the upper bits if the threshold is reached, and leaves the code there: two integer additions and a look-up
in 8 kB, where 15 comparisons or a binary search take five times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .scratch import Scratch

_SHIFT = 21
_BINS = 1 << (32 - _SHIFT)


class CodeSearch:
    """Turns float32 values into packed 4-bit codes, on a CPU.

    Codes are counted from one for zero: it grows by 1 at every step that the magnitude reaches.

    Args:
        positive: code of +0, and the float32 magnitudes ``[n]`` from which on each next code is taken; ascending.
        negative: the same for the negative values, from -0 on. The code of -0 may be below zero; codes are the
            magnitudes of what is counted.
        codes: what the counted codes, 0 to 15, stand for, uint8; None where they are the codes.

    Raises:
        ValueError: two steps of one sign are in one bin.
    """

    def __init__(
        self,
        positive: tuple[int, torch.Tensor],
        negative: tuple[int, torch.Tensor],
        codes: torch.Tensor | None = None,
    ) -> None:
        self._table = torch.cat([_side(*positive), _side(*negative)])
        self._codes = codes
        self._scratch = Scratch()

    def pack(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the codes of ``values`` (float32 ``[2 * n]``, contiguous, finite; overwritten) to ``out`` (uint8
        ``[n]``), the first of two in the upper half of a byte."""
        bits = values.view(torch.int32)
        index = self._scratch.get("index", bits.numel(), torch.int32)
        torch.bitwise_right_shift(bits, _SHIFT, out=index).bitwise_and_(_BINS - 1)
        steps = self._scratch.get("steps", bits.numel(), torch.int32)
        torch.index_select(self._table, 0, index, out=steps)
        bits.add_(steps).bitwise_right_shift_(_SHIFT)
        codes = self._scratch.get("codes", bits.numel(), torch.uint8).copy_(bits)  # keeps the lower 8 bits
        codes.view(torch.int8).abs_()
        if self._codes is not None:
            torch.index_select(self._codes, 0, index.copy_(codes), out=codes)
        torch.add(codes[1::2], codes[::2], alpha=16, out=out)


def _side(first: int, steps: torch.Tensor) -> torch.Tensor:
    """Return the table's half for one sign, int32 ``[1024]``."""
    bits = steps.contiguous().view(torch.int32).long()
    bins = torch.arange(_BINS // 2, device="cpu")
    step_bins = bits >> _SHIFT
    if step_bins.unique().numel() != step_bins.numel():
        raise ValueError("two thresholds are too close to tell apart by the upper bits of a float32")
    code = first + (step_bins < bins[:, None]).sum(dim=1)
    # Only the code's lower 8 bits are used, so a multiple of 256 bins may stay in the sum: no int32 overflows.
    table = ((code % 256) - bins % 256) << _SHIFT
    table[step_bins] += (1 << _SHIFT) - (bits & ((1 << _SHIFT) - 1))
    return table.int()


def magnitudes(values: Sequence[float]) -> torch.Tensor:
    """Return steps that are taken from these magnitudes on, float32."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def beyond(values: torch.Tensor) -> torch.Tensor:
    """Return steps that are taken above these magnitudes only: the next float32 of each."""
    return torch.nextafter(values, torch.full_like(values, torch.inf))
