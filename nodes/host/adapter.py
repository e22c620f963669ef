"""The one layout through which a weight of any backend lives in ComfyUI.

ComfyUI's memory manager moves, pins, streams, copies and counts a ``QuantizedTensor`` by the tensor fields of its
parameters, whatever they mean. Here those fields are the tensors that a backend flattens a layer to, so that a
bitsandbytes, a torchao or a user's own weight is handled like one of ComfyUI's own formats; what it means is asked of
the backend, which makes its own Linear of them again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class, register_layout_op
from torch import nn

from quant_core import QuantBackend
from quant_core.layer import quantize_layer
from quant_core.layout import PLACEHOLDER, Formats, StoredForm

from .compat import requantized

LAYOUT = "QuantCoreAdapterLayout"
"""Layout names are shared by all packs of a ComfyUI, so ours has a prefix."""

FORMATS = Formats()
"""The backends of the methods in use, and how they store layers; each made once."""

FIELD_PREFIX = "quantcore_"
"""What the names of a layer's further tensors start with, in the parameters and in a module's state dict."""


@dataclass(frozen=True)
class LayerSpec:
    """What the tensors of a layer mean.

    Attributes:
        method: the quantization method.
        options: its options, as JSON.
        keys: below the layer, as in a file; the first is the weight's codes.
        metadata: the file's metadata entries that the layer needs, as JSON.
        dtype: of the float weight that was quantized. A patched weight is quantized from this dtype again, since
            formats record it.
    """

    method: str
    options: str
    keys: tuple[str, ...]
    metadata: str
    dtype: torch.dtype

    @property
    def backend(self) -> QuantBackend:
        return FORMATS.backend(self.method, json.loads(self.options))

    def to_json(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps([self.method, self.options, self.keys, self.metadata, dtype])

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def from_json(cls, text: str) -> LayerSpec:
        method, options, keys, metadata, dtype = json.loads(text)
        return cls(method, options, tuple(keys), metadata, getattr(torch, dtype))


class AdapterParams:
    """Base of the parameters; :func:`params_class` adds a field for each tensor.

    Attributes:
        orig_dtype: what the weight dequantizes to.
        orig_shape: ``(out_features, in_features)``; the other way round when ``transposed``.
        spec: what the tensors mean.
        transposed: the tensor stands for the transposed weight.
    """

    orig_dtype: torch.dtype
    orig_shape: tuple[int, ...]
    spec: LayerSpec
    transposed: bool

    def _tensor_fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if field.name.startswith(FIELD_PREFIX)]  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors other than the codes, in the order of ``spec.keys[1:]``."""
        return [getattr(self, name) for name in self._tensor_fields()]

    def _with(self, change: Any) -> AdapterParams:
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in self._tensor_fields()})  # type: ignore[type-var]

    def to_device(self, device: torch.device) -> AdapterParams:
        return self._with(lambda tensor: tensor.to(device=device))

    def clone(self) -> AdapterParams:
        return self._with(torch.clone)

    def copy_from(self, src: AdapterParams, non_blocking: bool = False) -> None:
        for name in self._tensor_fields():
            getattr(self, name).copy_(getattr(src, name), non_blocking=non_blocking)
        for name in ("orig_dtype", "orig_shape", "spec", "transposed"):
            object.__setattr__(self, name, getattr(src, name))
        self.__dict__.pop("_module", None)

    def module(self, qdata: torch.Tensor) -> nn.Module:
        """Return the backend's Linear over these tensors, without a bias; made once for the tensors where they are."""
        made = self.__dict__.get("_module")
        if made is None or made[0] is not qdata or made[1] != self.orig_dtype:
            made = (qdata, self.orig_dtype, rebuild(self.spec, [qdata, *self.tensors()], self.orig_dtype, self.shape))
            self.__dict__["_module"] = made
        return made[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(out_features, in_features)``."""
        return self.orig_shape[::-1] if self.transposed else self.orig_shape


@functools.cache
def params_class(keys: tuple[str, ...]) -> type:
    """Return the dataclass of the parameters of layers with these keys."""
    fields: list[Any] = [("orig_dtype", torch.dtype), ("orig_shape", tuple), ("spec", LayerSpec)]
    fields += [(name, torch.Tensor) for name in field_names(keys)]
    fields.append(("transposed", bool, dataclasses.field(default=False)))
    return dataclasses.make_dataclass("AdapterLayerParams", fields, bases=(AdapterParams,), frozen=True)


def field_names(keys: tuple[str, ...]) -> list[str]:
    """Return a name for each key but the first: a valid identifier with our prefix."""
    names: list[str] = []
    for key in keys[1:]:
        name = FIELD_PREFIX + re.sub(r"\W", "_", key).strip("_")
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def rebuild(spec: LayerSpec, tensors: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Module:
    """Return the backend's Linear that holds these tensors; ``dtype`` is what it computes in."""
    backend = spec.backend
    linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    shell = backend.create_quantized_linear_shell(linear, dtype)
    flat = {f"{PLACEHOLDER}.{key}": tensor for key, tensor in zip(spec.keys, tensors, strict=True)}
    state = backend.unflatten_state_dict(flat, json.loads(spec.metadata))
    own = {name.removeprefix(f"{PLACEHOLDER}."): value for name, value in state.items()}
    shell.load_state_dict(own, strict=True, assign=True)
    return shell


def wrap(
    method: str,
    options: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> QuantizedTensor:
    """Return a weight of ComfyUI that holds a backend's tensors.

    Args:
        method, options: of the backend.
        tensors: ``{key below the layer: tensor}``, without a bias.
        metadata: the entries that the layer needs, as for a layer of the name ``PLACEHOLDER``.
        shape: ``(out_features, in_features)``.
        dtype: of the float weight; what it dequantizes to at first.
    """
    # Memory managers look at the codes alone for a device, a size and a place in a file: the largest tensor.
    largest = max(sorted(tensors), key=lambda key: tensors[key].nbytes)
    keys = (largest, *sorted(set(tensors) - {largest}))
    spec = LayerSpec(method, json.dumps(dict(options), sort_keys=True), keys, json.dumps(dict(metadata)), dtype)
    values = dict(zip(field_names(keys), [tensors[key] for key in keys[1:]], strict=True))
    params = params_class(keys)(orig_dtype=dtype, orig_shape=tuple(shape), spec=spec, **values)
    return QuantizedTensor(tensors[largest], LAYOUT, params)


def is_adapted(weight: Any) -> bool:
    """Whether a weight is held by this layout."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == LAYOUT


def stored_tensors(weight: QuantizedTensor, layer: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return ``({tensor name: tensor}, metadata)`` as a file holds the weight of ``layer``, without a bias."""
    params: AdapterParams = weight._params
    names = [f"{layer}.{key}" for key in params.spec.keys]
    tensors = dict(zip(names, [weight._qdata, *params.tensors()], strict=True))
    return tensors, StoredForm({}, json.loads(params.spec.metadata)).metadata_of(layer)


def quantize(
    weight: torch.Tensor, method: str, options: Mapping[str, Any], device: torch.device | None = None
) -> QuantizedTensor:
    """Quantize a float weight ``[out_features, in_features]`` with any backend, on ``device`` or where it is."""
    tensors, metadata = quantize_layer(FORMATS, method, options, weight, device)
    return wrap(method, options, tensors, metadata, tuple(weight.shape), weight.dtype)


def dequantize(spec: LayerSpec, module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Return the float weight ``[out_features, in_features]`` of a backend's Linear."""
    return spec.backend.dequantize_to_linear(module, dtype).weight.detach()


class QuantCoreAdapterLayout(QuantizedLayout):
    """See the module."""

    Params = AdapterParams

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        scale: Any = None,
        stochastic_rounding: int | None = 0,
        inplace_ops: bool = False,
        method: str = "",
        options: str = "{}",
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, AdapterParams]:
        """Quantize as the backend does; its own rounding and scales apply, whatever ComfyUI asks for.

        Raises:
            LookupError: there is no ``method``, and :func:`.compat.requantizing` is not in force.
        """
        if not method:
            spec: LayerSpec = requantized()
            method, options, dtype = spec.method, spec.options, spec.dtype
        made = quantize(tensor.to(dtype or tensor.dtype), method, json.loads(options)).to(dtype=tensor.dtype)
        return made._qdata, made._params

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: AdapterParams) -> torch.Tensor:
        if _is_traced(qdata):
            return torch.ops.quantcore.dequantize(
                qdata, params.tensors(), params.spec.to_json(), *params.shape, params.orig_dtype
            )
        return dequantize(params.spec, params.module(qdata), params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        return (qtensor._qdata, *qtensor._params.tensors())

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: AdapterParams) -> dict[str, torch.Tensor]:
        return {"": qdata, **{f".{name}": getattr(params, name) for name in params._tensor_fields()}}

    @classmethod
    def requantize_kwargs(cls, qtensor: QuantizedTensor) -> dict[str, Any]:
        spec: LayerSpec = qtensor._params.spec
        return {"method": spec.method, "options": spec.options, "dtype": spec.dtype}


register_layout_class(LAYOUT, QuantCoreAdapterLayout)


# ------------------------------------------------------------------ arithmetic


class _FrozenWeight(torch.autograd.Function):
    """``x @ W.T + bias`` by the backend's kernel; the gradient of the input is ``grad @ W``.

    The weight is dequantized again in the backward, so that no float copy of it is kept in between.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: QuantizedTensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _run(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            params = ctx.weight._params
            grad_x = grad @ dequantize(params.spec, params.module(ctx.weight._qdata), grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_bias, None


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether torch.compile is tracing with a stand-in for a tensor, which no library could look into."""
    return type(tensor) not in (torch.Tensor, nn.Parameter)


def _run(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    params: AdapterParams = weight._params
    if _is_traced(weight._qdata):
        spec = params.spec.to_json()
        return torch.ops.quantcore.linear(
            x, bias, weight._qdata, params.tensors(), spec, *params.shape, params.orig_dtype
        )
    return _forward(params.module(weight._qdata), x, bias)


def _forward(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # The bias belongs to ComfyUI's module, which may move or patch it; the backend's Linear borrows it, since adding
    # it here would round twice.
    module._parameters["bias"] = bias
    try:
        return module(x)
    finally:
        module._parameters["bias"] = None


def linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with the backend's own Linear.

    Args:
        x: float ``[..., in_features]``.
        weight: of this layout, not transposed.
        bias: ``[out_features]``; gradients reach it, and ``x``.
    """
    if torch.compiler.is_compiling():
        # What is traced may not look into the weight; torch hands it to the functions at the end of this module.
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _FrozenWeight.apply(x, bias, weight)
    return _run(x, weight, bias)


@torch.library.custom_op("quantcore::dequantize", mutates_args=())
def _dequantize_op(
    qdata: torch.Tensor, tensors: list[torch.Tensor], spec: str, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    layer = LayerSpec.from_json(spec)
    return dequantize(layer, rebuild(layer, [qdata, *tensors], dtype, (rows, columns)), dtype)


@_dequantize_op.register_fake
def _(qdata, tensors, spec, rows, columns, dtype):  # type: ignore[no-untyped-def]
    return qdata.new_empty((rows, columns), dtype=dtype)


@torch.library.custom_op("quantcore::linear", mutates_args=())
def _linear_op(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    qdata: torch.Tensor,
    tensors: list[torch.Tensor],
    spec: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    layer = LayerSpec.from_json(spec)
    return _forward(rebuild(layer, [qdata, *tensors], dtype, (rows, columns)), x, bias)


@_linear_op.register_fake
def _(x, bias, qdata, tensors, spec, rows, columns, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], rows))


def _save_for_backward(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, bias, qdata, tensors, ctx.spec, ctx.rows, ctx.columns, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(qdata, *tensors)


def _input_gradient(ctx: Any, grad: torch.Tensor) -> tuple:
    qdata, *tensors = ctx.saved_tensors
    weight = torch.ops.quantcore.dequantize(qdata, tensors, ctx.spec, ctx.rows, ctx.columns, grad.dtype)
    grad_bias = None if ctx.bias_dtype is None else grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad @ weight, grad_bias, None, None, None, None, None, None


torch.library.register_autograd("quantcore::linear", _input_gradient, setup_context=_save_for_backward)


# ------------------------------------------------------------------ for code that calls torch with such a weight


def _float(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


@register_layout_op(torch.ops.aten.linear.default, QuantCoreAdapterLayout)
def _linear_handler(qt: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    x, weight, bias = (*args, None)[:3]
    if not is_adapted(weight) or weight._params.transposed:
        return torch.nn.functional.linear(_float(x), _float(weight), _float(bias))
    return _run(_float(x), weight, bias)


@register_layout_op(torch.ops.aten.t.default, QuantCoreAdapterLayout)
def _transpose_handler(qt: Any, args: tuple, kwargs: dict) -> QuantizedTensor:
    params = args[0]._params
    flipped = dataclasses.replace(params, orig_shape=params.orig_shape[::-1], transposed=not params.transposed)
    if "_module" in params.__dict__:
        flipped.__dict__["_module"] = params.__dict__["_module"]
    return QuantizedTensor(args[0]._qdata, LAYOUT, flipped)


@register_layout_op(torch.ops.aten.mm.default, QuantCoreAdapterLayout)
def _mm_handler(qt: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    x, weight = args[:2]
    if is_adapted(weight) and weight._params.transposed:
        return _run(_float(x), weight, None)
    return torch.mm(_float(x), _float(weight))


@register_layout_op(torch.ops.aten.addmm.default, QuantCoreAdapterLayout)
def _addmm_handler(qt: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    bias, x, weight = args[:3]
    if is_adapted(weight) and weight._params.transposed and kwargs.get("alpha", 1) == kwargs.get("beta", 1) == 1:
        return _run(_float(x), weight, bias)
    return torch.addmm(_float(bias), _float(x), _float(weight), **kwargs)
