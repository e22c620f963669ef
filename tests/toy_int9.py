"""A backend of one's own, as docs/backends.md explains it: INT9, nine bits per weight and one scale per row."""

from dataclasses import dataclass, field

import torch

from quant_core import BackendConfig, PackedLinear, QuantBackend, register_quant_backend, register_quant_method


def pack_bits(bits):
    """Pack a flat 0/1 uint8 tensor, eight values to a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded << places).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed, count):
    """Undo pack_bits."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & 1).reshape(-1)[:count]


class Int9Linear(PackedLinear):
    """Codes in [-256, 255], stored with an offset of 256: the low 8 bits in `weight`, the ninth in `weight_msb`."""

    def __init__(self, in_features, out_features, bias, compute_dtype):
        super().__init__(in_features, out_features, bias, compute_dtype)
        count = in_features * out_features
        self.register_packed("weight", torch.empty(out_features, in_features, dtype=torch.uint8, device="meta"))
        self.register_packed("weight_msb", torch.empty((count + 7) // 8, dtype=torch.uint8, device="meta"))
        self.register_packed("weight_scale", torch.empty(out_features, dtype=torch.float32, device="meta"))

    def dequantize_weight(self, dtype=None):
        high = unpack_bits(self.weight_msb, self.weight.numel()).view_as(self.weight)
        codes = self.weight.to(torch.int16) + 256 * high.to(torch.int16) - 256
        # In float32: nine bits do not fit the eight significant bits of bfloat16 once a scale is applied.
        return (codes.float() * self.weight_scale.unsqueeze(1)).to(dtype or self.compute_dtype)


@dataclass
class Int9Config(BackendConfig):
    per_channel: bool = True  # user-tunable: one scale a row, or one for the whole weight
    bits: int = field(init=False, default=9)  # pinned by the method


@register_quant_backend("toy_int9")
class Int9Backend(QuantBackend):
    project_url = "https://example.com/toy-int9"

    def capabilities(self):
        return {**super().capabilities(), "is_serializable": True, "is_differentiable": True}

    def quantized_linear_classes(self):
        return (Int9Linear,)

    def create_quantized_linear(self, linear, compute_device=None, model_device=None):
        weight = linear.weight.detach().to(device=compute_device)
        absmax = weight.abs().amax(dim=1) if self.config.per_channel else weight.abs().amax().expand(weight.shape[0])
        scale = (absmax.float() / 255).clamp(min=1e-8)
        codes = (weight.float() / scale.unsqueeze(1)).round().clamp(-256, 255).to(torch.int16) + 256

        layer = self.create_quantized_linear_shell(linear, weight.dtype)
        layer.weight = (codes & 255).to(torch.uint8)
        layer.weight_msb = pack_bits((codes >> 8).to(torch.uint8).reshape(-1))
        layer.weight_scale = scale
        if linear.bias is not None:
            bias = linear.bias.detach().to(scale.device, copy=True)
            layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        return layer if model_device is None else layer.to(model_device)

    def create_quantized_linear_shell(self, linear, compute_dtype):
        return Int9Linear(linear.in_features, linear.out_features, linear.bias is not None, compute_dtype)


register_quant_method("toy_int9_w9a16", "toy_int9", Int9Config.from_kwargs, label="9bit, int9, weight-only (toy)")
