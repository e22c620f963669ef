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
    """Row quantizer of torchao's formats.

    Where one scale belongs to the whole weight, every run is quantized with one row more, which holds the whole
    weight's smallest and largest element: torchao then finds that scale in each run.

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
        self._one_scale = not scheme.takes_runs()
        self.needs_range = self._one_scale or isinstance(scheme, NVFP4Scheme)
        self._ends: tuple[torch.Tensor, torch.Tensor]
        self._tensor_scale: torch.Tensor | None = None

    def set_range(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self._ends = low.to(self.dtype), high.to(self.dtype)
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
        if self._one_scale:
            return self._with_ends(rows)
        parts = {f"_weight_{name}": tensor for name, tensor in self.scheme.quantize(rows).items()}
        if isinstance(self.scheme, Int4Scheme):  # its scales [in_features / group, out_features] have no rows
            return {"_weight_qdata": parts.pop("_weight_qdata")}, parts
        return parts, None

    def _with_ends(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the codes of ``rows``, and apart from them the tensors that all runs have in common."""
        low, high = (end.to(rows.device) for end in self._ends)
        ends = high.expand(1, rows.shape[1]).clone()
        ends[0, 0] = low
        parts = {f"_weight_{name}": t for name, t in self.scheme.quantize(torch.cat((rows, ends))).items()}
        return {"_weight_qdata": parts.pop("_weight_qdata")[:-1]}, parts

    def _block_scaled(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.scheme, NVFP4Scheme):
            inner = self.scheme.quantize_scaled(rows, self._tensor_scale)
        else:
            inner = self.scheme.quantize(rows)
        return inner["qdata"], inner["scale"]

    def finish(self, kept: Sequence[Any]) -> dict[str, torch.Tensor]:
        if isinstance(self.scheme, Int4Scheme):
            return {key: torch.cat([part[key] for part in kept], dim=1) for key in kept[0]}
        if self._one_scale:
            return kept[0]
        return {} if self._tensor_scale is None else {"_weight_per_tensor_scale": self._tensor_scale}
