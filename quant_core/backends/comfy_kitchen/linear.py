"""The Linear of ComfyUI's formats: one class for all of them."""

from __future__ import annotations

from typing import Any

import torch

from ...packed_linear import PackedLinear
from .formats import (
    FORMATS_BY_NAME,
    MARKER_KEY,
    ComfyFormat,
    Marker,
    TensorSpec,
    as_written,
    decode_marker,
    encode_marker,
    layer_marker,
    marker_problems,
    tensor_specs,
)
from .kernels import decode, linear


class ComfyKitchenLinear(PackedLinear):
    """A Linear in one of ComfyUI's formats.

    Args:
        config: the config object of a comfy_kitchen method.
        tensors: the packed tensors as ``quantize_weight`` returns them; None makes an empty shell on meta.
        in_features, out_features, bias, compute_dtype, device: as in :class:`PackedLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "meta",
        *,
        config: Any,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, compute_dtype, device)
        self.config = config
        self.marker = layer_marker(config, in_features)
        specs = self._specs(self.marker)
        if tensors is None:
            tensors = {
                key: spec.empty() for key, spec in specs.items() if key not in ("input_scale", "pre_quant_scale")
            }
            tensors[MARKER_KEY] = torch.empty(encode_marker(self.marker).shape, dtype=torch.uint8, device="meta")
        for key in (*specs, MARKER_KEY):
            self.register_packed(key, tensors.get(key))

    @property
    def format(self) -> ComfyFormat:
        """The format of the layer, an entry of ``FORMATS``."""
        return FORMATS_BY_NAME[self.config.format]

    def _specs(self, marker: Marker) -> dict[str, TensorSpec]:
        per_channel = getattr(self.config, "per_channel", True)
        return tensor_specs(marker, self.out_features, self.in_features, per_channel)

    # ------------------------------------------------------------------ arithmetic

    def _stored(self) -> tuple:
        marker = self.marker
        scales = [self._buffers[key] for key in self.format.scale_keys]
        codebook = self._buffers.get("weight_codebook")
        shape = (self.out_features, self.in_features)
        return self.weight, scales, codebook, marker.format, *shape, marker.rotation, marker.group_size

    def dequantize_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the float weight ``[out_features, in_features]``, as comfy-kitchen dequantizes it to ``dtype``.

        A file's ``pre_quant_scale``, which the forward multiplies the input by, is multiplied into the columns.
        """
        weight = decode(*self._stored(), dtype or self.compute_dtype)
        smoothing = self._buffers.get("pre_quant_scale")
        return weight if smoothing is None else weight * smoothing.to(weight.dtype)

    def quantized_forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        smoothing = self._buffers.get("pre_quant_scale")
        if smoothing is not None:
            x = x * smoothing.to(x.dtype)
        marker = self.marker
        input_scale = self._buffers.get("input_scale")
        return linear(x, *self._stored(), marker.linear_dtype, marker.full_precision, input_scale, bias)

    # ------------------------------------------------------------------ loading

    def check_packed(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        if not tensors:
            return []
        if MARKER_KEY not in tensors:
            return [
                f"{MARKER_KEY} is missing, the marker that says which ComfyUI format this is: the file does not hold "
                "this layer quantized, or was written without it"
            ]
        try:
            marker = decode_marker(tensors[MARKER_KEY])
        except ValueError as error:
            return [str(error)]
        if marker.format != self.config.format:
            return [self._wrong_format(marker.format)]
        problems = marker_problems(marker, self.in_features)
        if problems:
            return problems
        specs = self._specs(marker)
        for key in ("weight", *self.format.scale_keys):
            if key not in tensors:
                problems.append(f"{key} is missing, without which the format {marker.format} cannot be read")
        for key, spec in specs.items():
            if key != "weight" and key in tensors and not spec.accepts(tensors[key]):
                found = tensors[key]
                problems.append(f"{key} is {found.dtype} {list(found.shape)}, expected {spec.describe()}")
        if problems or self.config.format != "int8_tensorwise":
            return problems
        one_scale = tensors["weight_scale"].dim() < 2
        if marker.rotation and one_scale:
            return ["the marker says rotated (convrot), but weight_scale is one scale for the whole weight"]
        expected = layer_marker(self.config, self.in_features).rotation
        if expected and not marker.rotation and not one_scale:
            return [
                f"the marker says not rotated, the recipe says rotated (convrot, group {expected}): the result is "
                "wrong (relative error 1.2) if one of them is; where the file really is not rotated, load it with "
                "backend_config_kwargs={'convrot': False}"
            ]
        return []

    def _wrong_format(self, name: str) -> str:
        reader = FORMATS_BY_NAME.get(name)
        way_out = f"load it with method {reader.method!r}" if reader else "no method here reads that format"
        return (
            f"the marker says format {name!r}, but this layer was made for method {self.format.method!r} "
            f"({self.format.name}): {way_out}"
        )

    def accepts_packed(self, key: str, value: torch.Tensor, current: torch.Tensor) -> bool:
        # check_packed has looked at all the others already, by the shapes that the file's own marker gives them.
        return key != "weight" or super().accepts_packed(key, value, current)

    def _load_packed(
        self,
        tensors: dict[str, torch.Tensor],
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
    ) -> list[str]:
        name = self.config.format
        tensors = {key: as_written(name, key, t) for key, t in tensors.items()}
        codebook = self._buffers.get("weight_codebook")
        if MARKER_KEY in tensors and "weight_codebook" not in tensors and codebook is not None:
            self._buffers["weight_codebook"] = None  # optional in a file: its codes are then evenly spaced
        problems = super()._load_packed(tensors, prefix, strict, missing_keys, unexpected_keys)
        if problems and codebook is not None:
            self._buffers["weight_codebook"] = codebook
        if not problems and MARKER_KEY in tensors:
            self.marker = decode_marker(tensors[MARKER_KEY])
        return problems

    def extra_repr(self) -> str:
        rotation = f", rotation={self.marker.rotation}" if self.marker.rotation else ""
        return f"{super().extra_repr()}, format={self.marker.format}{rotation}"
