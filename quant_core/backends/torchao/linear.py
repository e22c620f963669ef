"""The Linear of every torchao method: the inner tensors of a torchao tensor as packed buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...packed_linear import PackedLinear, saturate
from .schemes import Scheme, source_dtype


class TorchAOLinear(PackedLinear):
    """A Linear whose weight is a torchao tensor, kept apart as plain tensors.

    A buffer ``weight_<name>`` for each inner tensor (``weight_qdata``, ``weight_scale``, ...) and the non-tensor
    ``attributes``. ``weight`` puts them together again, so ``state_dict()`` holds, like torchao's own models, one
    torchao tensor ``weight``; device moves, dtype casts and ``deepcopy`` see plain buffers only.

    Args:
        scheme: the method's format.
        in_features, out_features, bias, compute_dtype, device: see :class:`PackedLinear`.
        dtype: the source dtype that the torchao tensor records; ``compute_dtype`` when None.
    """

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        out_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "meta",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, compute_dtype, device)
        self.scheme = scheme
        recorded = source_dtype(compute_dtype if dtype is None else dtype)
        self.attributes = scheme.attributes(out_features, in_features, recorded)
        for name, spec in scheme.specs(out_features, in_features, self.attributes).items():
            packed_dtype = recorded if spec.like_source else spec.dtypes[0]
            self.register_packed(
                f"weight_{name}", torch.empty(spec.shape, dtype=packed_dtype, device="meta"), key=f"_weight_{name}"
            )

    def set_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the inner tensors by torchao's names; an optional one that is not given becomes None."""
        for name in self._packed_keys:
            self._buffers[name] = tensors.get(name.removeprefix("weight_"))

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a torchao tensor whose dtype is ``compute_dtype``; it shares memory with the buffers."""
        return self._assemble(self.scheme.for_compute(self.attributes, self.compute_dtype))

    def _assemble(self, attributes: Mapping[str, Any]) -> torch.Tensor:
        tensors = {name.removeprefix("weight_"): self._buffers[name] for name in self._packed_keys}
        return self.scheme.tensor_class(**tensors, **attributes)

    def dequantize_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        weight_only = {k: None if k == "act_quant_kwargs" else v for k, v in self.attributes.items()}
        return saturate(self.scheme.dequantize(self._assemble(weight_only)), dtype or self.compute_dtype)

    def quantized_forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.scheme.obstacle(self.attributes, x.device, x.dtype) is not None:
            return super().quantized_forward(x, bias)
        return self.scheme.linear(x, self.weight, bias)

    # ------------------------------------------------------------------ state dicts

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self._assemble(self.attributes)
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_packed(
        self,
        tensors: dict[str, torch.Tensor],
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
    ) -> list[str]:
        if "weight" not in tensors:
            if any(key in tensors for key in self._packed_keys.values()):
                return super()._load_packed(tensors, prefix, strict, missing_keys, unexpected_keys)
            if strict:
                missing_keys.append(prefix + "weight")
                unexpected_keys.extend(prefix + key for key in tensors)
            return []
        if strict:
            unexpected_keys.extend(prefix + key for key in tensors if key != "weight")
        weight = tensors["weight"]
        if not hasattr(weight, "tensor_data_names"):
            found = f"weight is a plain {weight.dtype} {list(weight.shape)}"
            what = "a float weight: the file does not hold this layer quantized"
            if not weight.is_floating_point():
                what = "the format of another library"
            return [f"{found} ({what}), expected the torchao tensor of {self.scheme.method}"]
        attributes, inner = take_apart(weight)
        problems = find_problems(
            self.scheme, type(weight).__name__, attributes, inner, self.out_features, self.in_features
        )
        if problems:
            return problems
        device = next((t.device for t in self._packed_buffers() if not t.is_meta), None)
        self.attributes = attributes
        self.set_packed({k: t.detach() if device is None else t.detach().to(device) for k, t in inner.items()})
        return []

    def accepts_packed(self, key: str, value: torch.Tensor, current: torch.Tensor) -> bool:
        spec = self.scheme.specs(self.out_features, self.in_features, self.attributes)[key.removeprefix("_weight_")]
        return value.dtype in spec.dtypes and tuple(value.shape) == spec.shape

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self.scheme.method}"


def take_apart(tensor: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the attributes and the inner tensors of a torchao tensor."""
    names, attributes = tensor.__tensor_flatten__()
    return dict(attributes), {name: getattr(tensor, name) for name in names}


def identify_method(class_name: str, attributes: Mapping[str, Any]) -> str | None:
    """Return the method that makes such a torchao tensor, None when no method here does."""
    dynamic = attributes.get("act_quant_kwargs") is not None
    if class_name == "Int8Tensor":
        return "torchao_int8_w8a8" if dynamic else "torchao_int8_w8a16"
    if class_name == "Float8Tensor":
        return "torchao_fp8_w8a8" if dynamic else "torchao_fp8_w8a16"
    if class_name == "NVFP4Tensor":
        return "torchao_nvfp4_w4a4" if dynamic else "torchao_nvfp4_w4a16"
    if class_name == "Int4Tensor":
        float8 = attributes.get("activation_dtype") == torch.float8_e4m3fn
        return "torchao_int4_w4a8" if float8 else "torchao_int4_w4a16"
    if class_name == "MXTensor" and dynamic:
        elements = {torch.float8_e4m3fn: "torchao_mxfp8_w8a8", torch.float4_e2m1fn_x2: "torchao_mxfp4_w4a4"}
        return elements.get(attributes.get("elem_dtype"))
    return None


def find_problems(
    scheme: Scheme,
    class_name: str,
    attributes: Mapping[str, Any],
    inner: Mapping[str, torch.Tensor],
    out_features: int,
    in_features: int,
) -> list[str]:
    """Say everything that makes a torchao tensor unfit for a layer of this scheme and shape."""
    method = identify_method(class_name, attributes)
    if method != scheme.method:
        found = method or f"a {class_name} that no method makes"
        hint = f"; load it with method={method!r}" if method else ""
        return [f"the file holds {found}, expected {scheme.method}{hint}"]
    if scheme.dtype_attribute is not None and not isinstance(attributes[scheme.dtype_attribute], torch.dtype):
        return [f"{scheme.dtype_attribute} is {attributes[scheme.dtype_attribute]!r}, not a dtype"]
    try:
        specs = scheme.specs(out_features, in_features, attributes)
    except ValueError as error:
        return [str(error)]
    problems = [f"{name} is missing" for name, spec in specs.items() if name not in inner and not spec.optional]
    problems += [
        f"{name} is something this method does not use (a static or pre-scaled activation)"
        for name in inner
        if name not in specs
    ]
    for name, spec in specs.items():
        tensor = inner.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in spec.dtypes or tuple(tensor.shape) != spec.shape:
            problems.append(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtypes[0]} {list(spec.shape)}"
            )
        elif scheme.class_name == "Int8Tensor" and name == "zero_point" and not tensor.is_meta and bool(tensor.any()):
            problems.append("zero_point is not 0: torchao's kernel ignores it, the weight would be shifted")
    return problems
