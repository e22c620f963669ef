"""Quantizing a weight to 4 bits with bitsandbytes, whole or a run of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...backend import RowQuantizer, finite_range
from .layout import NESTED_BLOCKSIZE, Layout, Tensors

# On a CPU the library makes several float32 and integer copies of what it is given; a million elements bound them.
_CPU_CHUNK = 1 << 20


def library() -> ModuleType:
    """Import and return ``bitsandbytes.functional``."""
    import bitsandbytes.functional

    return bitsandbytes.functional


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
    flat = weight.contiguous().view(-1)
    runs = [quantizer.run(part) for part in flat.split(_CPU_CHUNK if weight.device.type == "cpu" else flat.numel())]
    tensors = {"weight": torch.cat([codes for codes, _ in runs])}
    tensors |= quantizer.finish([absmax for _, absmax in runs])
    return tensors, quantizer.layout


class BitsAndBytesRows(RowQuantizer):
    """Quantizes a weight in runs of rows; only the absmax values are kept until the end."""

    scratch = 24

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

    def quantize(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        finite_range(rows)
        codes, absmax = self.run(rows.view(-1))
        return {"weight": codes}, absmax

    def run(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(packed codes, absmax of each block)`` of the next elements ``[n]``."""
        codes, state = library().quantize_4bit(
            flat.to(self.dtype),
            blocksize=self.layout.blocksize,
            quant_type=self.config.quant_type,
            quant_storage=self.config.quant_storage,
        )
        return codes, state.absmax

    def finish(self, kept: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        functional = library()
        absmax = torch.cat(list(kept))
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
            state.absmax, state.state2 = functional.quantize_blockwise(absmax - mean, blocksize=NESTED_BLOCKSIZE)
            state.offset, state.nested = mean, True
        tensors = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        marker = tensors[self.layout.marker_key]
        padding = self.layout.marker_length(self.shape[0], self.shape[1], self.dtype) - marker.numel()
        tensors[self.layout.marker_key] = nn.functional.pad(marker, (0, padding), value=ord(" "))
        return tensors
