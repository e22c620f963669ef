"""The options of the torchao methods: from JSON-friendly keywords to torchao's own config objects.

torchao checks most values at the first layer or at the first matmul, by assertion; here they are checked when the
config is made.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from ...backend import parse_dtype, reject_unknown_keywords
from . import library

_BOOLEANS = (
    "set_inductor_config",
    "weight_only_decode",
    "reduce_range",
    "use_triton_kernel",
    "use_dynamic_per_tensor_scale",
)
INT4_GROUP_SIZES = (32, 64, 128, 256)


def _build(cls: type, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Make torchao's config ``cls`` from user keywords; ValueError for what it does not know or cannot take."""
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    reject_unknown_keywords(cls.__name__, kwargs, sorted(names))
    values = {k: v for k, v in defaults.items() if k in names}
    for key, value in kwargs.items():
        values[key] = _convert(cls, key, value)
    if values.get("version", 2) != 2:
        raise ValueError(f"{cls.__name__}: version must be 2, got {values['version']!r}; torchao has dropped version 1")
    try:
        return cls(**values)
    except AssertionError as error:  # how torchao's configs refuse a value
        raise ValueError(f"{cls.__name__}: {error}") from error


def _convert(cls: type, key: str, value: Any) -> Any:
    owner = f"{cls.__name__}: {key}"
    if key in ("weight_dtype", "activation_dtype"):
        return _dtype(owner, value)
    if key == "granularity":
        return (
            [_granularity(owner, v) for v in value] if isinstance(value, list | tuple) else _granularity(owner, value)
        )
    if key in _BOOLEANS:
        return _expect(owner, value, isinstance(value, bool), "true or false")
    if key in ("activation_value_lb", "activation_value_ub"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return _expect(owner, value, value is None or (number and value > 0), "a positive number or null")
    if key == "mm_config":
        return _mm_config(owner, value)
    annotation = typing.get_type_hints(cls).get(key)
    enum_class = _enum_in(annotation)
    if enum_class is not None and value is not None:
        return _enum_member(owner, enum_class, value)
    if annotation is int:
        return _expect(owner, value, isinstance(value, int) and not isinstance(value, bool), "an integer")
    return value


def _expect(owner: str, value: Any, accepted: bool, expected: str) -> Any:
    if not accepted:
        raise ValueError(f"{owner} must be {expected}, got {value!r}")
    return value


def _dtype(owner: str, value: Any) -> torch.dtype:
    if value == "float4_e2m1fn_x2":
        value = torch.float4_e2m1fn_x2
    value = parse_dtype(value)
    return _expect(owner, value, isinstance(value, torch.dtype), 'a torch dtype or its name, e.g. "float8_e4m3fn"')


def _granularity(owner: str, value: Any) -> Any:
    """``"per_row"``, ``"per_tensor"``, ``"per_group(64)"``, or torchao's own object."""
    api = library.load()
    if value is None or isinstance(value, api.PerTensor):
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"per_?(row|tensor|group)\s*(?:\(\s*(\d+)\s*\))?", value.strip().lower())
        kind, size = match.groups() if match else ("", None)
        if kind in ("row", "tensor") and size is None:
            return api.PerRow() if kind == "row" else api.PerTensor()
        if kind == "group" and size is not None:
            value = api.PerGroup(int(size))
    if isinstance(value, api.PerGroup):
        # Groups of one element would be no quantization; torchao fails on them.
        ok = isinstance(value.group_size, int) and value.group_size > 1
        return _expect(f"{owner}: group size", value, ok, "at least 2")
    row = isinstance(value, api.PerRow) and value.dim in (-1, 1)
    return _expect(owner, value, row, 'one of "per_row", "per_tensor", "per_group(<size>)"')


def _mm_config(owner: str, value: Any) -> Any:
    cls = library.load().Float8MMConfig
    if value is None or isinstance(value, cls):
        return value
    ok = (
        isinstance(value, Mapping)
        and set(value) <= set(cls._fields)
        and all(isinstance(v, bool) for v in value.values())
    )
    return cls(**_expect(owner, value, ok, f"an object of true and false for {', '.join(cls._fields)}"))


def _enum_in(annotation: Any) -> type[enum.Enum] | None:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((found for arg in typing.get_args(annotation) if (found := _enum_in(arg))), None)
    return None


def _enum_member(owner: str, cls: type[enum.Enum], value: Any) -> enum.Enum:
    for member in cls:
        same_text = isinstance(value, str) and value.lower() in (member.name.lower(), str(member.value).lower())
        if value is member or same_text or (not isinstance(value, str) and value == member.value):
            return member
    raise ValueError(f"{owner} must be one of {', '.join(m.name.lower() for m in cls)}, got {value!r}")


def _only(config: Any, field: str, accepted: tuple[Any, ...], why: str) -> None:
    value = getattr(config, field, accepted[0])
    if value not in accepted:
        shown = ", ".join(str(getattr(v, "value", v)) for v in accepted)
        raise ValueError(
            f"{type(config).__name__}: {field} must be {shown}, got {getattr(value, 'value', value)!r}: {why}"
        )


# ---------------------------------------------------------------------- one factory a method


def int8_weight_only(kwargs: dict[str, Any]) -> Any:
    api = library.load()
    kwargs = dict(kwargs)
    if kwargs.get("group_size") is not None:  # torchao has replaced it by PerGroup, and says so by assertion
        kwargs["granularity"] = f"per_group({kwargs.pop('group_size')})"
    config = _build(api.quant_api.Int8WeightOnlyConfig, kwargs, {"version": 2})
    if config.granularity is None:
        raise ValueError("Int8WeightOnlyConfig: granularity must not be null")
    return config


def int8_dynamic(kwargs: dict[str, Any]) -> Any:
    api = library.load()
    return _build(api.quant_api.Int8DynamicActivationInt8WeightConfig, kwargs, {"version": 2})


def float8_weight_only(kwargs: dict[str, Any]) -> Any:
    config = _build(library.load().quant_api.Float8WeightOnlyConfig, kwargs, {})
    _only(config, "weight_dtype", (torch.float8_e4m3fn, torch.float8_e5m2), "other dtypes have no torchao file")
    return config


def float8_dynamic(kwargs: dict[str, Any]) -> Any:
    api = library.load()
    config = _build(api.quant_api.Float8DynamicActivationFloat8WeightConfig, kwargs, {})
    for field in ("activation_dtype", "weight_dtype"):
        _only(config, field, (torch.float8_e4m3fn,), "the matmul kernels take no other pair")
    kinds = {type(g) for g in config.granularity}
    if len(kinds) != 1 or kinds & {api.PerGroup}:
        raise ValueError(
            "Float8DynamicActivationFloat8WeightConfig: granularity must be per_row or per_tensor, "
            f"the same for activation and weight, got {config.granularity!r}"
        )
    if str(getattr(config.packing_format, "value", config.packing_format)) != "plain":
        raise ValueError(
            "Float8DynamicActivationFloat8WeightConfig: packing_format must be plain: "
            "the sparse formats need weights pruned to 2:4 and have no file format"
        )
    preference = api.KernelPreference
    _only(
        config, "kernel_preference", (preference.AUTO, preference.TORCH, preference.MSLK), "torchao has no other kernel"
    )
    return config


def int4_weight_only(kwargs: dict[str, Any]) -> Any:
    config = _build(library.load().quant_api.Int4WeightOnlyConfig, kwargs, {"version": 2})
    _only(config, "group_size", INT4_GROUP_SIZES, "torchao's kernels know these groups")
    _only_plain_int4(config)
    if config.int4_choose_qparams_algorithm.value != "tinygemm":
        raise ValueError("Int4WeightOnlyConfig: int4_choose_qparams_algorithm 'hqq' exists for tile_packed_to_4d only")
    return config


def int4_float8_dynamic(kwargs: dict[str, Any]) -> Any:
    # torchao's own default, preshuffled, can be made on an H100 only and has no safetensors form.
    defaults = {"int4_packing_format": "plain"}
    api = library.load()
    if "activation_dtype" not in getattr(api.Int4Tensor, "optional_tensor_attribute_names", ()):
        raise ImportError('torchao_int4_w4a8 needs a newer torchao; install it with: pip install "torchao>=0.17"')
    config = _build(api.quant_api.Float8DynamicActivationInt4WeightConfig, kwargs, defaults)
    _only_plain_int4(config)
    return config


def _only_plain_int4(config: Any) -> None:
    found = config.int4_packing_format
    if getattr(found, "value", found) != "plain":
        raise ValueError(
            f"{type(config).__name__}: int4_packing_format must be plain, got {getattr(found, 'value', found)!r}: "
            "the other layouts are made by a kernel of one accelerator and cannot be decoded elsewhere"
        )


def mx_dynamic(elem_dtype: str) -> Any:
    """Return the factory of the MX method whose elements are ``elem_dtype``."""

    def factory(kwargs: dict[str, Any]) -> Any:
        api = library.load()
        dtype = getattr(torch, elem_dtype)
        defaults = {"block_size": 32, "activation_dtype": dtype, "weight_dtype": dtype}
        config = _build(api.mx.MXDynamicActivationMXWeightConfig, kwargs, defaults)
        for field in ("activation_dtype", "weight_dtype"):
            _only(config, field, (dtype,), "the method's name says it")
        _only(config, "block_size", (32,), "the MX formats have blocks of 32 (OCP Microscaling Formats 1.0)")
        preference = api.KernelPreference
        _only(config, "kernel_preference", (preference.AUTO, preference.EMULATED), "torchao has no other MX kernel")
        return config

    return factory


def nvfp4_weight_only(kwargs: dict[str, Any]) -> Any:
    return _build(library.load().mx.NVFP4WeightOnlyConfig, kwargs, {})


def nvfp4_dynamic(kwargs: dict[str, Any]) -> Any:
    config = _build(library.load().mx.NVFP4DynamicActivationNVFP4WeightConfig, kwargs, {})
    if getattr(config, "step", None) is not None:
        raise ValueError("NVFP4DynamicActivationNVFP4WeightConfig: step must be null: static scales need calibration")
    return config
