"""How each torchao method lays out a weight ``[N, K]``: which torchao tensor it is, its inner tensors and attributes.

The tensors are built directly, with the attributes that torchao's own ``quantize_`` would set, because that function
refuses on machines without the matching kernels although quantizing needs none of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...constraints import Constraint, Dimension, DivisibleBy
from . import library
from .int4 import dequantize_int4, quantize_int4

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class AtLeast:
    """The dimension must be ``minimum`` or more: torchao's reduction over a row of one element fails."""

    dim: Dimension
    minimum: int

    def check(self, in_features: int, out_features: int) -> str | None:
        value = in_features if self.dim == "in_features" else out_features
        return None if value >= self.minimum else f"{self.dim} {value} is less than {self.minimum}"

    def describe(self) -> str:
        return f"{self.dim} >= {self.minimum}"


@dataclass(frozen=True)
class TensorSpec:
    """What an inner tensor must be: its shape and the dtypes that may hold it.

    The usual dtype is the weight's source dtype where ``like_source`` says so, otherwise the first one.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    like_source: bool = False


def source_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that torchao records for a float weight; it has no float64."""
    return dtype if dtype in SOURCE_DTYPES else torch.float32


def block_of(granularity: Any, out_features: int, in_features: int) -> list[int]:
    """The block that shares one scale, as ``[rows, columns]``."""
    api = library.load()
    if isinstance(granularity, api.PerTensor):
        return [out_features, in_features]
    if isinstance(granularity, api.PerGroup):
        return [1, granularity.group_size]
    return [1, in_features]


@functools.cache
def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for what is none."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return (0, 0)
    return torch.cuda.get_device_capability(index)


def needs_gpu(device: torch.device, minimum: tuple[int, int]) -> str | None:
    if device.type == "cuda" and capability(device.index) >= minimum:
        return None
    return f"the kernel needs an NVIDIA GPU of compute capability {minimum[0]}.{minimum[1]} or newer"


class Scheme:
    """One method's format; ``config`` is torchao's config object."""

    class_name = ""
    dtype_attribute: str | None = None

    def __init__(self, method: str, config: Any) -> None:
        api = library.load()
        self.method = method
        self.config = config
        # What forward needs is kept here: torch.compile does not trace the import.
        self.tensor_class: Any = getattr(api, self.class_name)
        self.kernels = api.KernelPreference
        self.has_mslk = library.has_mslk()

    def attributes(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
        """The non-tensor arguments of the torchao tensor for a weight of this shape and source dtype."""
        raise NotImplementedError

    def declared(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Drop what the installed torchao's tensor does not have yet."""
        names = attribute_names(self.tensor_class)
        return {k: v for k, v in attributes.items() if k in names}

    def specs(self, out_features: int, in_features: int, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """The inner tensors. Raises ValueError if ``attributes`` do not fit the shape."""
        raise NotImplementedError

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize a contiguous finite ``weight [N, K]`` of one of SOURCE_DTYPES to the inner tensors."""
        raise NotImplementedError

    def dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the float32 weight."""
        return tensor.dequantize(torch.float32)

    def constraints(self) -> tuple[Constraint, ...]:
        return ()

    def takes_runs(self) -> bool:
        """Whether rows can be quantized apart from each other."""
        return True

    def obstacle(self, attributes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
        """Why torchao's kernel cannot compute the layer here, None when it can."""
        raise NotImplementedError

    def for_compute(self, attributes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """The attributes to compute with in ``dtype``."""
        changed = dict(attributes)
        if self.dtype_attribute is not None:
            changed[self.dtype_attribute] = dtype
        return changed

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Run torchao's kernel."""
        return nn.functional.linear(x, weight, bias)


def attribute_names(cls: Any) -> list[str]:
    """The non-tensor attributes of a torchao tensor class."""
    return [*cls.tensor_attribute_names, *getattr(cls, "optional_tensor_attribute_names", ())]


def tensor_names(cls: Any) -> tuple[list[str], list[str]]:
    """The required and the optional inner tensors of a torchao tensor class."""
    return list(cls.tensor_data_names), list(getattr(cls, "optional_tensor_data_names", ()))


class _BlockScaled(Scheme):
    """int8 and float8: one code an element, one float32 scale a block ``[rows, columns]``."""

    dtype_attribute = "dtype"
    qdata_dtypes: tuple[torch.dtype, ...] = ()
    dynamic = False

    def granularities(self) -> tuple[Any, Any]:
        """Granularity of ``(activation, weight)``."""
        given = getattr(self.config, "granularity", None)
        per_row = library.load().PerRow()
        if isinstance(given, list | tuple):
            return given[0] or per_row, given[1] or per_row
        return given or per_row, given or per_row

    def specs(self, out_features: int, in_features: int, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        block = _integers(attributes["block_size"], 2)
        rows, columns = block
        whole = block in ([1, in_features], [out_features, in_features])
        group = not self.dynamic and rows == 1 and columns > 1 and in_features % columns == 0
        if not (whole or group):
            raise ValueError(f"block_size {block} does not fit a weight [{out_features}, {in_features}]")
        scales = (out_features // rows, in_features // columns)
        return {
            "qdata": TensorSpec((out_features, in_features), self.qdata_dtypes),
            "scale": TensorSpec(scales, (torch.float32,)),
        }

    def takes_runs(self) -> bool:
        return not isinstance(self.granularities()[1], library.load().PerTensor)

    def constraints(self) -> tuple[Constraint, ...]:
        weight = self.granularities()[1]
        if isinstance(weight, library.load().PerGroup):
            return (DivisibleBy("in_features", weight.group_size),)
        return (AtLeast("in_features", 2),)


class Int8Scheme(_BlockScaled):
    """torchao's ``Int8Tensor``: ``w = code * scale``, symmetric."""

    class_name = "Int8Tensor"
    qdata_dtypes = (torch.int8,)

    def __init__(self, method: str, config: Any) -> None:
        super().__init__(method, config)
        self.dynamic = method == "torchao_int8_w8a8"

    def attributes(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
        activation, weight = self.granularities()
        act_kwargs = None
        if self.dynamic:
            act_kwargs = library.load().QuantizeTensorToInt8Kwargs(
                granularity=activation, mapping_type=self.config.act_mapping_type, **self._reduced()
            )
        block = block_of(weight, out_features, in_features)
        values = {"block_size": block, "dtype": dtype, "act_quant_kwargs": act_kwargs, "reduce_range": False}
        return self.declared(values | self._reduced())

    def _reduced(self) -> dict[str, bool]:
        return {"reduce_range": True} if getattr(self.config, "reduce_range", False) else {}

    def specs(self, out_features: int, in_features: int, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        specs = super().specs(out_features, in_features, attributes)
        # Up to 0.17 torchao kept the scale in the weight's dtype; such files exist.
        old = library.installed_version() < (0, 18)
        specs["scale"] = dataclasses.replace(specs["scale"], dtypes=(torch.float32, *SOURCE_DTYPES), like_source=old)
        if "zero_point" in tensor_names(self.tensor_class)[1]:
            specs["zero_point"] = TensorSpec(specs["scale"].shape, (torch.int8,), optional=True)
        return specs

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tensor = self.tensor_class.from_hp(weight, self.granularities()[1], **self._reduced())
        return _inner(tensor, self.specs(weight.shape[0], weight.shape[1], {"block_size": tensor.block_size}))

    def obstacle(self, attributes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype == torch.float16:
            # It multiplies by the codes, up to 127, and by the scale after: sums beyond 65504 become infinite.
            return "torchao's int8 kernels overflow in float16"
        if not self.dynamic:
            return None
        if device.type not in ("cpu", "cuda"):
            return f"torch has no int8 matmul on {device.type}"
        return "torchao does not quantize float64 activations" if dtype == torch.float64 else None


class Float8Scheme(_BlockScaled):
    """torchao's ``Float8Tensor``: ``w = code * scale``."""

    class_name = "Float8Tensor"
    qdata_dtypes = _FLOAT8

    def __init__(self, method: str, config: Any) -> None:
        super().__init__(method, config)
        self.dynamic = method == "torchao_fp8_w8a8"

    def attributes(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
        api = library.load()
        activation, weight = self.granularities()
        values = {
            "block_size": block_of(weight, out_features, in_features),
            "mm_config": None,
            "act_quant_kwargs": None,
            "kernel_preference": self.kernels.AUTO,
            "dtype": dtype,
        }
        if self.dynamic:
            values["mm_config"] = self.config.mm_config
            values["kernel_preference"] = self.config.kernel_preference
            values["act_quant_kwargs"] = api.QuantizeTensorToFloat8Kwargs(
                self.config.activation_dtype,
                activation,
                hp_value_lb=self.config.activation_value_lb,
                hp_value_ub=self.config.activation_value_ub,
                kernel_preference=self.config.kernel_preference,
            )
        return values

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # torchao divides absmax by 448 in the weight's dtype; in float16 that underflows to a scale of 0.
        source = weight.to(torch.float32) if weight.dtype == torch.float16 else weight
        tensor = self.tensor_class.from_hp(
            source,
            self.config.weight_dtype,
            self.granularities()[1],
            # Same bytes with and without mslk's kernel.
            kernel_preference=self.kernels.TORCH,
        )
        qdata, scale = tensor.qdata, tensor.scale
        dead = scale == 0
        if bool(dead.any()):  # torchao computes 0 / 0 = NaN for a block of zeros
            rows, columns = tensor.block_size
            block = dead.repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
            qdata = qdata.view(torch.uint8).masked_fill(block, 0).view(qdata.dtype)
            scale = scale.masked_fill(dead, 1.0)
        return {"qdata": qdata, "scale": scale}

    def constraints(self) -> tuple[Constraint, ...]:
        if self.dynamic:  # what torch._scaled_mm takes; torchao leaves other layers unquantized without a word
            return (DivisibleBy("in_features", 16), DivisibleBy("out_features", 16))
        return super().constraints()

    def obstacle(self, attributes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
        if not self.dynamic:
            return "weight-only: the weight is dequantized for every matmul"
        if attributes["kernel_preference"] == self.kernels.MSLK and not self.has_mslk:
            return "kernel_preference mslk needs the package mslk"
        if dtype != torch.bfloat16:
            return f"the kernel computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
        return needs_gpu(device, (8, 9))

    def for_compute(self, attributes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        changed = super().for_compute(attributes, dtype)
        kwargs = changed["act_quant_kwargs"]
        if kwargs is not None and kwargs.hp_value_lb is None and kwargs.kernel_preference != self.kernels.MSLK:
            # An all-zero input would get a scale of 0 and become NaN.
            changed["act_quant_kwargs"] = dataclasses.replace(kwargs, hp_value_lb=1e-12)
        return changed


class Int4Scheme(Scheme):
    """torchao's ``Int4Tensor`` in plain packing, see :mod:`.torchao_int4`."""

    class_name = "Int4Tensor"

    def __init__(self, method: str, config: Any) -> None:
        super().__init__(method, config)
        self.dynamic = method == "torchao_int4_w4a8"
        # The config of the float8-activation method has no such field: its kernel takes 128 only.
        self.group_size = getattr(config, "group_size", 128)

    def attributes(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
        values = {
            "block_size": [1, self.group_size],
            "shape": torch.Size((out_features, in_features)),
            "activation_dtype": torch.float8_e4m3fn if self.dynamic else torch.bfloat16,
        }
        return self.declared(values)

    def specs(self, out_features: int, in_features: int, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        block = _integers(attributes["block_size"], 2)
        if block[0] != 1 or block[1] < 2 or block[1] % 2 or in_features % block[1]:
            raise ValueError(f"block_size {block} does not fit a weight [{out_features}, {in_features}]")
        if _integers(attributes["shape"], 2) != [out_features, in_features]:
            raise ValueError(f"shape {list(attributes['shape'])} is not [{out_features}, {in_features}]")
        groups = TensorSpec((in_features // block[1], out_features), SOURCE_DTYPES, like_source=True)
        qdata = TensorSpec((out_features, in_features // 2), (torch.int8,))
        return {"qdata": qdata, "scale": groups, "zero_point": groups}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        qdata, scale, zero_point = quantize_int4(weight, self.group_size, symmetric=self.dynamic)
        return {"qdata": qdata, "scale": scale, "zero_point": zero_point}

    def dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return dequantize_int4(tensor.qdata, tensor.scale, tensor.zero_point)

    def constraints(self) -> tuple[Constraint, ...]:
        return (DivisibleBy("in_features", self.group_size),)

    def obstacle(self, attributes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
        if not self.has_mslk:
            return "the int4 kernels are in the package mslk, which is not installed"
        if dtype != torch.bfloat16:
            return f"the kernel computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
        return needs_gpu(device, (9, 0))

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The kernel takes bfloat16 scales; those of a float16 or float32 model have its dtype.
        weight.scale, weight.zero_point = weight.scale.to(x.dtype), weight.zero_point.to(x.dtype)
        return super().linear(x, weight, bias)


def _inner(tensor: torch.Tensor, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {name: t for name in specs if (t := getattr(tensor, name)) is not None}


def _integers(value: Any, count: int) -> list[int]:
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != count or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ValueError(f"{value!r} is not a list of {count} positive numbers")
    return numbers
