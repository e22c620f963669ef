"""Quantizing a weight to bitsandbytes' 4-bit formats, whole or a run of rows at a time.

On a CPU the codes are computed here: bitsandbytes searches its codebook by bisection, in fresh float32 and integer
copies of all that it is given. The scaled values are the same float32 products, and are compared with the same
thresholds, so the bytes are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...backend import RowQuantizer, finite_range
from ..scratch import TILE, Scratch
from ..search import CodeSearch, beyond
from .layout import NESTED_BLOCKSIZE, Layout, Tensors

_ABSMAX_BYTES = 14  # a block: as it waits, as float32, less the mean, and its code
_SMALLEST_ABSMAX = 1e-38  # bitsandbytes takes the reciprocal of no smaller one


def library() -> ModuleType:
    """Import and return ``bitsandbytes.functional``."""
    import bitsandbytes.functional

    return bitsandbytes.functional


@functools.cache
def _search(quant_type: str) -> CodeSearch:
    """Return the search for the nearest of the library's 16 values, the lower one at a tie."""
    values = library().get_4bit_type(quant_type, device="cpu")
    order = torch.argsort(values)
    thresholds = (values[order[:-1]] + values[order[1:]]) / 2
    below = thresholds[thresholds < 0].neg().flip(0)
    ranks = below.numel()
    return CodeSearch(
        positive=(ranks, beyond(thresholds[thresholds >= 0])),
        negative=(-ranks, below),
        codes=None if torch.equal(order, torch.arange(16, device="cpu")) else order.to(torch.uint8),
    )


def quantize_weight(weight: torch.Tensor, config: Any) -> tuple[Tensors, Layout]:
    """Quantize a float weight on the device it is on.

    Args:
        weight: ``[out_features, in_features]``, float16, bfloat16, float32 or float64; the last is rounded to
            float32 first, the widest dtype that the format knows.
        config: the method's options.

    Returns:
        ``({key below the layer: tensor}, layout)``: the bytes that bitsandbytes itself would store, the marker's JSON
        padded with spaces to a length that depends on the shape alone.

    Raises:
        ValueError: the weight has another dtype.
    """
    quantizer = BitsAndBytesRows(weight.shape[0], weight.shape[1], weight.dtype, config)
    codes, absmax = quantizer.run(weight.contiguous().view(-1))
    return {"weight": codes, **quantizer.finish([absmax])}, quantizer.layout


class BitsAndBytesRows(RowQuantizer):
    """Quantizes a weight in runs of rows; only the absmax values are kept until the end."""

    scratch = 9

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        config: Any,
    ) -> None:
        self.config = config
        self.shape = torch.Size((out_features, in_features))
        self.dtype = torch.float32 if dtype == torch.float64 else dtype
        self.layout = Layout(
            config.quant_type, config.blocksize or 64, config.compress_statistics, config.quant_storage
        )
        # Blocks run over the whole weight, so a run has to end where a block (and a byte of the storage) ends.
        self.multiple = math.lcm(self.layout.blocksize, 2 * config.quant_storage.itemsize)
        self.multiple //= math.gcd(self.multiple, in_features)
        self.until_end = _ABSMAX_BYTES / self.layout.blocksize
        self._scratch = Scratch()

    def quantize(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if rows.dtype == torch.float64:
            finite_range(rows)  # as float32 a large value would be called infinite
        codes, absmax = self.run(rows.view(-1))
        finite_range(absmax)
        # It waits for the layer's end: in the weight's dtype, which has its values exactly, unless raised from zero.
        narrow = absmax.to(self.dtype)
        return {"weight": codes}, narrow if torch.equal(narrow.float(), absmax) else absmax

    def run(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(packed codes, absmax of each block, float32)`` of the next elements ``[n]``."""
        if flat.device.type == "cpu":
            return self._run_on_cpu(flat)
        codes, state = library().quantize_4bit(
            flat.to(self.dtype),
            blocksize=self.layout.blocksize,
            quant_type=self.config.quant_type,
            quant_storage=self.config.quant_storage,
        )
        return codes, state.absmax

    def _run_on_cpu(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        search, blocksize = _search(self.config.quant_type), self.layout.blocksize
        elements = flat.numel()
        packed = torch.empty(-(-elements // 2), dtype=torch.uint8, device="cpu")
        absmax = torch.empty(-(-elements // blocksize), dtype=torch.float32, device="cpu")
        for start in range(0, elements, TILE):
            tile = flat[start : start + TILE]
            size, whole = tile.numel(), tile.numel() // blocksize * blocksize
            values = self._scratch.get("values", size + size % 2)
            values[:size].copy_(tile)
            values[size:].zero_()  # the last byte's second half, in a weight of an odd size
            scaled = torch.abs(values, out=self._scratch.get("scaled", values.numel()))
            found = absmax[start // blocksize : -(-(start + size) // blocksize)]
            if whole:
                blocks = (whole // blocksize, blocksize)
                torch.amax(scaled[:whole].view(blocks), dim=1, out=found[: blocks[0]])
                reciprocal = 1.0 / found[: blocks[0], None].clamp(min=_SMALLEST_ABSMAX)
                torch.mul(values[:whole].view(blocks), reciprocal, out=scaled[:whole].view(blocks))
            if whole < size:  # bitsandbytes divides in a block that is not full, and keeps no absmax of zero for it
                found[-1] = scaled[whole:].amax().clamp(min=_SMALLEST_ABSMAX)
                torch.div(values[whole:], found[-1], out=scaled[whole:])
            search.pack(scaled, packed[start // 2 : (start + size + 1) // 2])
        return packed.view(self.config.quant_storage).unsqueeze(1), absmax

    def finish(self, kept: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        functional = library()
        absmax = torch.empty(sum(part.numel() for part in kept), dtype=torch.float32, device=kept[0].device)
        torch.cat(list(kept), out=absmax)
        state = functional.QuantState(
            absmax=absmax,
            shape=self.shape,
            code=functional.get_4bit_type(self.config.quant_type, device=absmax.device),
            blocksize=self.layout.blocksize,
            quant_type=self.config.quant_type,
            dtype=self.dtype,
        )
        if self.layout.nested:
            mean = absmax.mean()
            self.layout = replace(self.layout, nested_offset=mean.item())
            state.absmax, state.state2 = functional.quantize_blockwise(absmax.sub_(mean), blocksize=NESTED_BLOCKSIZE)
            state.offset, state.nested = mean, True
        tensors = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        marker = tensors[self.layout.marker_key]
        padding = self.layout.marker_length(self.shape[0], self.shape[1], self.dtype) - marker.numel()
        tensors[self.layout.marker_key] = nn.functional.pad(marker, (0, padding), value=ord(" "))
        return tensors
