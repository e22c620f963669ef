"""Quantizing a weight to ComfyUI's formats, a run of rows at a time.

Weights are quantized as float32, whatever their dtype: comfy-kitchen computes in the dtype it is given, and rotating
and dividing in bfloat16 costs up to a tenth more weight error for the same file.

On a CPU, all but the rotated int4 formats are computed here rather than by comfy-kitchen: the same operations on the
same values, written into buffers that stay. Fresh temporaries cost more in page faults than the arithmetic does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...backend import RowQuantizer, finite_range
from ...errors import QuantizationError
from ..scratch import Scratch
from ..strips import ROWS
from .block_rows import mxfp8_rows, nvfp4_rows
from .formats import FORMATS_BY_NAME, MARKER_KEY, ComfyFormat, Marker, as_written, encode_marker, layer_marker
from .kernels import FLOAT_DTYPES, NVFP4_MAX, fp8_scale, kitchen, layout_of

_MXFP8_SMALLEST = 2.0**-117  # the largest code, 448, times the smallest normal power of two


class ComfyRowQuantizer(RowQuantizer):
    """Base of the formats' row quantizers.

    Args:
        config: the config object of a comfy_kitchen method.
        marker: of the layer.
        dtype: of the weight.
    """

    def __init__(self, config: Any, marker: Marker, dtype: torch.dtype) -> None:
        self.config = config
        self.marker = marker
        self.format: ComfyFormat = FORMATS_BY_NAME[marker.format]
        self.dtype = dtype if dtype in FLOAT_DTYPES else config.orig_dtype
        self._scratch = Scratch()
        self.amax: torch.Tensor  # of the whole weight, set by set_range

    def set_range(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.amax = torch.maximum(-low, high).float()
        if not torch.isfinite(self.amax):  # a float64 beyond float32
            raise QuantizationError("the weight holds NaN or infinity (as float32)")

    def quantize(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
        if not self.needs_range:
            finite_range(rows)
        parts = self.codes(rows)
        return {key: as_written(self.format.name, key, t) for key, t in parts.items()}, None

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of the tensors that have rows."""
        raise NotImplementedError

    def scales(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the weight has as a whole."""
        return {}

    def finish(self, kept: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {**self.scales(), MARKER_KEY: encode_marker(self.marker)}

    def as_float(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` as float32 in a buffer that the next call of this thread reuses (on a CPU)."""
        if rows.device.type != "cpu":
            return rows.float()
        return self._scratch.get("float", rows.numel()).view(rows.shape).copy_(rows)


class _Fp8Rows(ComfyRowQuantizer):
    needs_range = True
    scratch = 5

    def scale(self) -> torch.Tensor:
        return fp8_scale(self.amax, self.dtype, self.format.storage_dtype)

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = self.scale()
        if rows.device.type != "cpu":
            return {"weight": kitchen().quantize_per_tensor_fp8(rows.float(), scale, self.format.storage_dtype)}
        # comfy-kitchen also clamps to the largest code. A weight of the largest magnitude times the reciprocal of its
        # scale is at most a rounding error beyond that code, and the cast rounds it back.
        return {"weight": self.as_float(rows).mul_(1.0 / scale).to(self.format.storage_dtype)}

    def scales(self) -> dict[str, torch.Tensor]:
        return {"weight_scale": self.scale()}


class _Int8TensorRows(ComfyRowQuantizer):
    needs_range = True
    scratch = 5

    def scale(self) -> torch.Tensor:
        return (self.amax / 127.0).clamp(min=1e-30)

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if rows.device.type != "cpu":
            return {"weight": layout_of(self.format).quantize(rows.float(), scale=self.scale())[0]}
        return {"weight": self.as_float(rows).div_(self.scale()).round_().to(torch.int8)}

    def scales(self) -> dict[str, torch.Tensor]:
        return {"weight_scale": self.scale()}


class _Int8ChannelRows(ComfyRowQuantizer):
    scratch = 9

    def quantize(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
        if rows.device.type != "cpu":
            return super().quantize(rows)
        values = self.as_float(rows)
        if self.marker.rotation:
            values = self._rotated(values)
        # Two reductions are ten times as fast as one torch.aminmax over rows.
        amax = torch.maximum(values.amax(dim=1, keepdim=True), values.amin(dim=1, keepdim=True).neg_())
        if not bool(torch.isfinite(amax).all()):
            raise QuantizationError("the weight holds NaN or infinity (as float32)")
        scale = (amax / 127.0).clamp_(min=1e-30)
        return {"weight": values.div_(scale).round_().to(torch.int8), "weight_scale": scale}, None

    def _rotated(self, values: torch.Tensor) -> torch.Tensor:
        """``values @ H.T`` for each group of columns, as comfy-kitchen rotates, into a buffer that stays."""
        group = self.marker.rotation
        hadamard = kitchen().tensor.int8_utils._build_hadamard(group, device="cpu", dtype=torch.float32)
        out = self._scratch.get("rotated", values.numel()).view(-1, group)
        return torch.matmul(values.view(-1, group), hadamard.T, out=out).view(values.shape)

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        rotation = {"convrot": True, "convrot_groupsize": self.marker.rotation} if self.marker.rotation else {}
        codes, params = layout_of(self.format).quantize(rows.float(), per_channel=True, **rotation)
        return {"weight": codes, "weight_scale": params.scale}


class _NVFP4Rows(ComfyRowQuantizer):
    needs_range = True
    multiple = ROWS
    scratch = 4

    def scale(self) -> torch.Tensor:
        scale = self.amax / NVFP4_MAX
        return torch.where(scale == 0, torch.ones_like(scale), scale)

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if rows.device.type == "cpu":
            codes, blocks = nvfp4_rows(rows, self.scale(), self._scratch)
        else:
            codes, blocks = kitchen().quantize_nvfp4(rows.float(), self.scale())
        return {"weight": codes, "weight_scale": blocks.reshape(-1)}

    def scales(self) -> dict[str, torch.Tensor]:
        return {"weight_scale_2": self.scale()}


class _MXFP8Rows(ComfyRowQuantizer):
    multiple = ROWS
    scratch = 4

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if rows.device.type == "cpu":
            codes, blocks = mxfp8_rows(rows, self._scratch)
        else:
            # A block below the smallest exponent would be divided by a scale that underflows to 0, giving NaN codes.
            codes, blocks = kitchen().quantize_mxfp8(nn.functional.hardshrink(rows.float(), _MXFP8_SMALLEST))
        return {"weight": codes, "weight_scale": blocks.reshape(-1)}


class _ConvRotInt4Rows(ComfyRowQuantizer):
    scratch = 36

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, params = layout_of(self.format).quantize(self.as_float(rows), convrot_groupsize=self.marker.rotation)
        return {"weight": codes, "weight_scale": params.scale}


class _AsymW4A8Rows(ComfyRowQuantizer):
    """Takes the weight in one run: one codebook is chosen from the whole layer."""

    def codes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, params = layout_of(self.format).quantize(
            rows.float(), group_size=self.marker.group_size, convrot_groupsize=self.marker.rotation
        )
        return {
            "weight": codes,
            "weight_s_rel": params.scale,
            "weight_s_channel": params.s_channel,
            "weight_codebook": params.codebook,
        }


_QUANTIZERS: dict[str, type[ComfyRowQuantizer]] = {
    "float8_e4m3fn": _Fp8Rows,
    "float8_e5m2": _Fp8Rows,
    "mxfp8": _MXFP8Rows,
    "nvfp4": _NVFP4Rows,
    "convrot_w4a4": _ConvRotInt4Rows,
    "asym_w4a8_int8": _AsymW4A8Rows,
}


def row_quantizer(config: Any, in_features: int, dtype: torch.dtype) -> ComfyRowQuantizer:
    """Return the row quantizer of a layer of this width under a method's config."""
    marker = layer_marker(config, in_features)
    if marker.format == "int8_tensorwise":
        return (_Int8ChannelRows if config.per_channel else _Int8TensorRows)(config, marker, dtype)
    return _QUANTIZERS[marker.format](config, marker, dtype)


def takes_runs(config: Any) -> bool:
    """Whether the format can be quantized in more than one run."""
    return config.format != "asym_w4a8_int8"
