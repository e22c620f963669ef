"""Quantizing a weight to torchao's formats, a run of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...backend import RowQuantizer, finite_range
from ..strips import ROWS, quantize_strips
from .block_formats import MXScheme, NVFP4Scheme
from .schemes import Int4Scheme, Scheme, source_dtype


class TorchAORows(RowQuantizer):
    """Row quantizer of the formats whose scales belong to one row, or to a block of one.

    Args:
        scheme: the method's format.
        dtype: of the weight.
    """

    scratch = 24

    def __init__(self, scheme: Scheme, dtype: torch.dtype) -> None:
        self.scheme = scheme
        self.dtype = source_dtype(dtype)
        if isinstance(scheme, MXScheme | NVFP4Scheme):
            self.multiple = ROWS
            self.scratch = 12
        self.needs_range = isinstance(scheme, NVFP4Scheme)
        self._tensor_scale: torch.Tensor | None = None

    def set_range(self, low: torch.Tensor, high: torch.Tensor) -> None:
        if isinstance(self.scheme, NVFP4Scheme):
            amax = torch.maximum(-low, high).to(self.dtype).float()
            self._tensor_scale = self.scheme.tensor_scale(amax)

    def quantize(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
        if not self.needs_range:
            finite_range(rows)
        rows = rows.to(self.dtype)
        if isinstance(self.scheme, MXScheme | NVFP4Scheme):
            codes, scales = quantize_strips(rows, self._block_scaled)
            return {"_weight_qdata": codes, "_weight_scale": scales}, None
        parts = {f"_weight_{name}": tensor for name, tensor in self.scheme.quantize(rows).items()}
        if isinstance(self.scheme, Int4Scheme):  # its scales [in_features / group, out_features] have no rows
            return {"_weight_qdata": parts.pop("_weight_qdata")}, parts
        return parts, None

    def _block_scaled(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.scheme, NVFP4Scheme):
            inner = self.scheme.quantize_scaled(rows, self._tensor_scale)
        else:
            inner = self.scheme.quantize(rows)
        return inner["qdata"], inner["scale"]

    def finish(self, kept: Sequence[Any]) -> dict[str, torch.Tensor]:
        if isinstance(self.scheme, Int4Scheme):
            return {key: torch.cat([part[key] for part in kept], dim=1) for key in kept[0]}
        return {} if self._tensor_scale is None else {"_weight_per_tensor_scale": self._tensor_scale}
