"""What runs beside a layer of a model: a LoRA whose part of the output is added to the layer's own.

A layer's output becomes ``f(x) + strength * up(down(x))``: the weight is not touched, so nothing is rounded a second
time. ComfyUI's injections switch that on when it loads the model and off when it unloads it; this is a forward hook on
each layer, so that any number of LoRAs lie beside one layer and go in any order. Layers of ComfyUI's own int8 format,
which it may compute without calling them, get the difference added to their dequantized weight at every forward.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter
from torch.nn import functional

INJECTION = "quantcore_bypass_lora"
"""What the names of our injections start with; each LoRA has a name of its own, or the last would replace the rest."""

Offset = tuple[int, int, int]
"""``(dimension, start, length)`` of the part of a weight that a LoRA changes."""


@dataclass(frozen=True)
class Part:
    """A change of a layer's output that is linear in its input.

    Attributes:
        tensors: its factors.
        scale: what the change is multiplied by.
        offset: ``(dimension, start, length)`` of the weight that it changes; None is all of it.
        rows: the layer's number of outputs.
    """

    tensors: tuple[torch.Tensor, ...]
    scale: float
    offset: Offset | None
    rows: int

    def __call__(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the change ``[..., rows]`` for ``x`` ``[..., columns]``; ``tensors`` in the dtype of ``x``."""
        dimension, start, length = self.offset or (None, 0, 0)
        if dimension == 1:
            x = x.narrow(-1, start, length)
        change = self.change(x, tensors)
        return functional.pad(change, (start, self.rows - start - length)) if dimension == 0 else change

    def change(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def add_to(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a float weight ``[rows, columns]`` with the difference added to it, in place."""
        difference = self.difference(tensors)
        (weight if self.offset is None else weight.narrow(*self.offset)).add_(difference.to(weight.dtype))
        return weight

    def difference(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the difference of the weight, or of its part, that makes the change."""
        raise NotImplementedError


class _LowRank(Part):
    """``down`` ``[rank, columns]`` and ``up`` ``[rows, rank]``."""

    def change(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        down, up = tensors
        return functional.linear(functional.linear(x, down) * self.scale, up)

    def difference(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        down, up = tensors
        return up @ (down * self.scale)


class _Dense(Part):
    """The whole difference ``[rows, columns]``."""

    def change(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return functional.linear(x, tensors[0]) * self.scale

    def difference(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0] * self.scale


class _Hadamard(Part):
    """LoHa: ``(a1 @ b1) * (a2 @ b2)``."""

    def change(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return functional.linear(x, self.difference(tensors))

    def difference(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        a1, b1, a2, b2 = tensors
        return (a1 @ b1) * (a2 @ b2) * self.scale


class _Kronecker(Part):
    """LoKr: ``outer`` ``[p, q]`` and ``inner`` ``[rows / p, columns / q]``, or the two factors of ``inner``."""

    def change(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        outer, *inner = tensors
        blocks = x.unflatten(-1, (outer.shape[1], -1))
        for factor in reversed(inner):
            blocks = functional.linear(blocks, factor)
        return (outer @ blocks).flatten(-2) * self.scale

    def difference(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        outer, *inner = tensors
        return torch.kron(outer, inner[0] if len(inner) == 1 else inner[0] @ inner[1]) * self.scale


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy out of the file's map."""
    return tensor.detach().to("cpu", copy=True)


def _spread(factor: torch.Tensor, dimension: int, offset: Offset | None, size: int) -> torch.Tensor:
    """Place a factor that changes a part of the weight among zeros, so that parts add up to one factor."""
    if offset is None or offset[0] != dimension:
        return factor
    shape = list(factor.shape)
    shape[dimension] = size
    whole = torch.zeros(shape, dtype=factor.dtype)
    whole.narrow(dimension, offset[1], offset[2]).copy_(factor)
    return whole


@torch.inference_mode(False)  # gradients may pass through what is made here, in a workflow too
def part_of(patch: Any, shape: tuple[int, ...], offset: Offset | None, strength: float) -> Part | None:
    """Return a patch of a Linear's weight as a part beside it; None for one that needs the weight itself."""
    rows, columns = shape
    span = [rows, columns]
    if offset is not None:
        span[offset[0]] = offset[2]
    if isinstance(patch, tuple):
        kind, values = patch if len(patch) == 2 else ("diff", patch)
        if kind != "diff" or list(values[0].shape) != span:
            return None
        return _Dense((_own(values[0]),), strength, offset, rows)
    if type(patch) is LoRAAdapter:
        up, down, alpha, mid, magnitudes, reshape = patch.weights
        if any(value is not None for value in (mid, magnitudes, reshape)):
            return None
        rank = down.shape[0]
        up = _spread(_own(up.flatten(1)), 0, offset, rows)
        down = _spread(_own(down.flatten(1)), 1, offset, columns)
        return _LowRank((down, up), strength * (1.0 if alpha is None else alpha / rank), None, rows)
    if type(patch) is LoHaAdapter:
        a1, b1, alpha, a2, b2, core1, core2, magnitudes = patch.weights
        if any(value is not None for value in (core1, core2, magnitudes)):
            return None
        scale = strength * (1.0 if alpha is None else alpha / b1.shape[0])
        return _Hadamard(tuple(map(_own, (a1, b1, a2, b2))), scale, offset, rows)
    if type(patch) is LoKrAdapter:
        outer, inner, alpha, outer_a, outer_b, inner_a, inner_b, core, magnitudes = patch.weights
        if core is not None or magnitudes is not None or any(t is not None and t.ndim != 2 for t in (outer, inner)):
            return None
        rank = None
        if outer is None:
            rank = outer_b.shape[0]
            outer = outer_a.float() @ outer_b.float()
        factors = (inner,)
        if inner is None:
            rank = inner_b.shape[0]
            factors = (inner_a, inner_b)
        scale = strength * (1.0 if alpha is None or rank is None else alpha / rank)
        return _Kronecker(tuple(map(_own, (outer, *factors))), scale, offset, rows)
    return None


@torch.inference_mode(False)
def joined(parts: Iterable[Part]) -> list[Part]:
    """Join what a LoRA has for the query, key and value of one layer: one pair of multiplications instead of three."""
    low: dict[float, list[Part]] = {}
    rest = []
    for part in parts:
        if isinstance(part, _LowRank):
            low.setdefault(part.scale, []).append(part)
        else:
            rest.append(part)
    for scale, same in low.items():
        down = torch.cat([part.tensors[0] for part in same], 0)
        up = torch.cat([part.tensors[1] for part in same], 1)
        rest.append(_LowRank((down, up), scale, None, same[0].rows))
    return rest


class _Beside:
    """What lies beside one layer, with its tensors where the model runs; its forward hook, or its weight function."""

    def __init__(self, module: torch.nn.Module, parts: Sequence[Part], device: torch.device, dtype: torch.dtype):
        self._module = module
        self._parts = parts
        with torch.inference_mode(False):
            self._tensors = [[tensor.to(device, dtype) for tensor in part.tensors] for part in parts]
        self._handle = None
        if _may_be_fused(module.weight):
            module.weight_function = [*module.weight_function, self._change_weight]
        else:
            self._handle = module.register_forward_hook(self._change_output, with_kwargs=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            return
        # ComfyUI empties the list, too, when it loads or unloads the model.
        self._module.weight_function = [f for f in self._module.weight_function if f != self._change_weight]

    def _change_output(
        self, module: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor:
        x = args[0] if args else kwargs["input"]
        if isinstance(x, QuantizedTensor):
            x = x.dequantize()
        for part, tensors in zip(self._parts, self._tensors, strict=True):
            change = part(x, [tensor.to(x.device, x.dtype) for tensor in tensors])
            output = output + change.to(output.dtype)
        return output

    def _change_weight(self, weight: torch.Tensor) -> torch.Tensor:
        for part, tensors in zip(self._parts, self._tensors, strict=True):
            weight = part.add_to(weight, [tensor.to(weight.device) for tensor in tensors])
        return weight


def _may_be_fused(weight: Any) -> bool:
    """Whether ComfyUI may compute a layer without calling it, so that a hook would never run.

    It joins the activation of many MLPs with the int8 layer after it. With a weight function that layer multiplies by
    the dequantized weight, which ComfyUI then hands over as a copy of its own.
    """
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == "TensorWiseINT8Layout"


_ACTIVE: WeakKeyDictionary[torch.nn.Module, dict[BypassLora, list[Any]]] = WeakKeyDictionary()
"""``{model: {LoRA beside its layers: the hooks}}``; the patchers of a model share it."""


class BypassLora:
    """A LoRA that lies beside the layers of any model of one architecture.

    Args:
        parts: ``{layer: what lies beside it}``.
    """

    def __init__(self, parts: Mapping[str, Sequence[Part]]) -> None:
        self.parts = parts

    def add_to(self, patcher: ModelPatcher, name: str) -> None:
        """Make a patcher and its clones put this LoRA beside the layers while their model is loaded."""
        injection = PatcherInjection(inject=self.inject, eject=self.eject)
        patcher.set_injections(f"{INJECTION} {name} {uuid.uuid4()}", [injection])

    def inject(self, patcher: ModelPatcher) -> None:
        """Put the LoRA beside the layers of a patcher's model; once, however often it is called."""
        active = _ACTIVE.setdefault(patcher.model, {})
        wanted = {getattr(one.inject, "__self__", None) for many in patcher.injections.values() for one in many}
        # A clone of a loaded patcher may have put its own LoRAs here before this patcher was used again.
        for lora in [self, *(lora for lora in active if lora not in wanted)]:
            _remove(active, lora)
        active[self] = [self._hook(patcher, layer, parts) for layer, parts in self.parts.items()]

    def eject(self, patcher: ModelPatcher) -> None:
        """Take it away again; nothing happens if it is not there."""
        _remove(_ACTIVE.get(patcher.model, {}), self)

    @staticmethod
    def _hook(patcher: ModelPatcher, layer: str, parts: Sequence[Part]) -> Any:
        module = comfy.utils.get_attr(patcher.model, layer)
        dtype = getattr(patcher.model, "manual_cast_dtype", None) or module.weight.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):  # stored in 8 bits, computed in the input's
            dtype = torch.float32
        return _Beside(module, parts, patcher.load_device, dtype)


def _remove(active: dict[BypassLora, list[Any]], lora: BypassLora) -> None:
    for handle in active.pop(lora, []):
        handle.remove()
