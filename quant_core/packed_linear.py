"""The ``nn.Linear`` base class whose packed tensors no dtype cast can touch.

A backend that derives its Linear from :class:`PackedLinear` gets the four clauses of the contract from here:

(a) it is an ``nn.Linear`` with a ``forward(x)``;
(b) ``.to(dtype)``, ``.half()``, ``.float()``, ``.double()`` move the packed tensors between devices and never
    change one byte of them; what they do change is ``compute_dtype`` and the dtype of the bias;
(c) ``state_dict()`` and ``load_state_dict()`` round-trip, and a tensor of the wrong shape or dtype is refused;
(d) gradients reach the input, also where the forward quantizes its activations.

The subclass supplies the packed tensors (``register_packed``), ``dequantize_weight`` and, where it has a kernel,
``quantized_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def saturate(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a decoded float32 weight in ``dtype``; rounding up never makes an infinity of float16's largest values."""
    if dtype == torch.float16:
        weight = weight.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return weight.to(dtype)


class _FrozenWeightLinear(torch.autograd.Function):
    """``linear`` whose weight is a frozen quantized one: the gradient of the input is ``grad @ W``.

    ``W`` is dequantized again in the backward, so no float copy of it lives between forward and backward, and the
    rounding of quantized activations is treated as the identity (the straight-through estimator).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        return layer.quantized_forward(x, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.layer.dequantize_weight(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.sum(dim=0).to(ctx.bias_dtype)
        return grad_x, grad_bias, None


class PackedLinear(nn.Linear):
    """A Linear that stores a packed weight in buffers instead of a float ``weight`` parameter.

    Args:
        in_features, out_features: as in ``nn.Linear``.
        bias: whether there is a bias; it stays a float parameter in ``compute_dtype`` and is frozen.
        compute_dtype: the float dtype that the weight is dequantized to in ``forward``.
        device: where the bias is made; the default, meta, makes an empty shell that costs no memory.

    ``state_dict`` holds, under the layer's name, the bias and one entry for each packed tensor.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "meta",
    ) -> None:
        # nn.Linear.__init__ would allocate and initialize a float weight; only its attributes are wanted.
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.compute_dtype = compute_dtype
        self._packed_keys: dict[str, str] = {}
        if bias:
            empty = torch.empty(out_features, dtype=compute_dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        else:
            self.register_parameter("bias", None)

    # ------------------------------------------------------------------ what a subclass supplies

    def register_packed(self, name: str, tensor: torch.Tensor | None, key: str | None = None) -> None:
        """Register one packed tensor.

        Args:
            name: the attribute it is reached by; a valid Python identifier.
            tensor: its value, or a meta tensor of the right shape and dtype in a shell. None for an optional tensor
                that a file may bring (a static input scale).
            key: its name in ``state_dict`` below the layer's own, when that is not ``name`` (it may contain dots).
        """
        self.register_buffer(name, tensor)
        self._packed_keys[name] = key or name

    def dequantize_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the float weight ``[out_features, in_features]`` in ``dtype`` (``compute_dtype`` when None)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement dequantize_weight")

    def quantized_forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``x @ W.T + bias`` for a 2-D ``x [rows, in_features]`` of at least one row.

        The default is the emulation that works everywhere: dequantize, then matmul.
        """
        return nn.functional.linear(x, self.dequantize_weight(x.dtype), bias)

    def check_packed(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Look at the tensors that are about to be loaded, ``{key below the layer: tensor}``.

        Return one sentence for everything that makes them another format than this layer's, e.g. a marker that
        names another method. An empty list accepts them. The layer's name is added by the caller.
        """
        return []

    # ------------------------------------------------------------------ forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} expects inputs [..., {self.in_features}], got {list(x.shape)}; "
                "the layer before it has another width"
            )
        if any(self._buffers[name] is not None and self._buffers[name].is_meta for name in self._packed_keys):
            if x.is_meta:
                return x.new_empty(*x.shape[:-1], self.out_features)
            raise RuntimeError(
                f"{type(self).__name__} is an empty shell on the meta device; load a quantized state dict first"
            )
        if not x.is_floating_point():
            raise TypeError(f"{type(self).__name__} expects a float input, got {x.dtype}")
        compute = self.compute_dtype
        x2d = x.reshape(-1, self.in_features).to(compute)
        bias = None if self.bias is None else self.bias.to(compute)
        if x2d.shape[0] == 0:
            # No library kernel takes an empty batch; an empty matmul keeps the graph to the input.
            out = x2d @ x2d.new_zeros(self.in_features, self.out_features)
        elif torch.is_grad_enabled() and (x2d.requires_grad or (bias is not None and bias.requires_grad)):
            out = _FrozenWeightLinear.apply(x2d, bias, self)
        else:
            out = self.quantized_forward(x2d, bias)
        return out.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    # ------------------------------------------------------------------ clause (b)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        packed = {id(t) for name in self._packed_keys if (t := self._buffers[name]) is not None}

        def device_only(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if id(tensor) in packed and moved.dtype != tensor.dtype:
                return tensor.to(device=moved.device)
            return moved

        # What would the cast make of a float tensor? That is the dtype the user wants to compute in.
        with torch.no_grad():
            probe = fn(torch.empty(0, dtype=self.compute_dtype))
        if probe.dtype in _COMPUTE_DTYPES:
            self.compute_dtype = probe.dtype
        return super()._apply(device_only, recurse)

    # ------------------------------------------------------------------ clause (c)

    def packed_state(self) -> dict[str, torch.Tensor]:
        """Return ``{key below the layer: packed tensor}`` as ``state_dict`` writes it."""
        return {key: t for name, key in self._packed_keys.items() if (t := self._buffers[name]) is not None}

    def packed_bytes(self) -> int:
        """Return how many bytes the packed tensors take, without the bias."""
        return sum(t.numel() * t.element_size() for t in self._packed_buffers())

    def _packed_buffers(self) -> list[torch.Tensor]:
        return [t for name in self._packed_keys if (t := self._buffers[name]) is not None]

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for key, tensor in self.packed_state().items():
            destination[prefix + key] = tensor
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layer = prefix.rstrip(".") or "(the model itself)"
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        tensors = {k: v for k, v in given.items() if k != "bias"}

        if "bias" in given and self.bias is not None:
            self._load_bias(given["bias"], layer, assign, error_msgs)
        elif self.bias is not None and strict:
            missing_keys.append(prefix + "bias")

        errors = self._load_packed(tensors, prefix, strict, missing_keys, unexpected_keys)
        error_msgs.extend(f"{layer}: {error}" for error in errors)
        if strict and "bias" in given and self.bias is None:
            unexpected_keys.append(prefix + "bias")

    def _load_bias(self, value: torch.Tensor, layer: str, assign: bool, error_msgs: list[str]) -> None:
        if tuple(value.shape) != (self.out_features,):
            error_msgs.append(f"{layer}: bias has shape {list(value.shape)}, expected [{self.out_features}]")
            return
        if assign or self.bias.is_meta:
            self.bias = nn.Parameter(value.detach(), requires_grad=False)
        else:
            with torch.no_grad():
                self.bias.copy_(value)

    def _load_packed(
        self,
        tensors: dict[str, torch.Tensor],
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
    ) -> list[str]:
        """Take the packed tensors; return what is wrong with them, in which case nothing was taken."""
        expected = {key: name for name, key in self._packed_keys.items()}
        problems = self.check_packed(tensors)
        for key, name in expected.items():
            current = self._buffers[name]
            if key not in tensors:
                if current is not None and strict:
                    missing_keys.append(prefix + key)
                continue
            value = tensors[key]
            if current is None:
                continue
            if not self.accepts_packed(key, value, current):
                found = f"{key} is {value.dtype} {list(value.shape)}"
                if value.is_floating_point() and tuple(value.shape) == (self.out_features, self.in_features):
                    found += " (a float weight: the file does not hold this layer quantized)"
                problems.append(f"{found}, expected {current.dtype} {list(current.shape)}")
        if strict:
            unexpected_keys.extend(prefix + key for key in tensors if key not in expected)
        if problems:
            return problems
        device = next((t.device for t in self._packed_buffers() if not t.is_meta), None)
        for key, name in expected.items():
            if key in tensors:
                value = tensors[key].detach()
                self._buffers[name] = value if device is None else value.to(device)
        return []

    def accepts_packed(self, key: str, value: torch.Tensor, current: torch.Tensor) -> bool:
        """Whether a loaded tensor has the dtype and shape that this format has for ``key``."""
        return value.dtype == current.dtype and tuple(value.shape) == tuple(current.shape)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, compute_dtype={self.compute_dtype}"
        )
