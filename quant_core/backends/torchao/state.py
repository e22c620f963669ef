"""torchao's safetensors form: flat tensors plus one JSON entry a tensor, written and read in linear time.

A layer ``a.b`` becomes ``a.b._weight_qdata``, ``a.b._weight_scale``, ...; the header holds ``a.b.weight`` =
``{"_type": class, "_data": attributes, "_tensor_data_names": [...]}`` and ``tensor_names``, the list of all names.

Reading makes objects of a closed set of classes only and runs nothing that the file names.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import CheckpointError
from . import library
from .linear import find_problems, identify_method, take_apart
from .schemes import Scheme, attribute_names, tensor_names

_TENSOR_CLASSES = ("Int8Tensor", "Float8Tensor", "Int4Tensor", "NVFP4Tensor", "MXTensor")
_VALUE_CLASSES = (
    "PerRow",
    "PerTensor",
    "Float8MMConfig",
    "KernelPreference",
    "MappingType",
    "ScaleCalculationMode",
    "QuantizeTensorToInt8Kwargs",
    "QuantizeTensorToFloat8Kwargs",
    "QuantizeTensorToMXKwargs",
    "QuantizeTensorToNVFP4Kwargs",
)
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float4_e2m1fn_x2,
    )
}
_MAX_ENTRY = 16384  # characters; torchao's own entries have about 600
_PREFIX = "_weight_"


def flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Turn torchao tensors into plain ones and metadata; see :meth:`QuantBackend.flatten_state_dict`.

    Every plain tensor is listed in the metadata too: torchao's reader, and DiffSynth-Studio's, drops what is not.
    """
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name, value in state_dict.items():
        class_name = type(value).__name__
        if class_name not in _TENSOR_CLASSES:
            tensors[name] = value
            metadata[name] = '{"_type": "Tensor"}'
            continue
        head, dot, leaf = name.rpartition(".")
        attributes, inner = take_apart(value)
        for part, tensor in inner.items():
            tensors[f"{head}{dot}_{leaf}_{part}"] = tensor.detach()
        metadata[name] = _entry(class_name, attributes, inner)
    metadata["tensor_names"] = json.dumps(list(state_dict))
    return tensors, metadata


def _entry(class_name: str, attributes: Mapping[str, Any], inner: Mapping[str, torch.Tensor]) -> str:
    """The JSON of one tensor, in the order of torchao's own encoder (which in 0.16 does not know NVFP4 and MX)."""
    cls = getattr(library.load(), class_name)
    required, optional = tensor_names(cls)
    names = attribute_names(cls)
    optional_first = [n for n in names if n not in cls.tensor_attribute_names] + list(cls.tensor_attribute_names)
    entry = {
        "_type": class_name,
        "_data": {name: _encode(attributes[name]) for name in optional_first},
        "_tensor_data_names": [name for name in optional + required if name in inner],
    }
    return json.dumps(entry)


def _encode(value: Any) -> Any:
    """The inverse of :func:`_decode`."""
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum):
        return {"_type": type(value).__name__, "_data": value.name}
    fields: Any = getattr(value, "_fields", None)
    if fields is None and dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value)]
    if fields is not None:
        return {"_type": type(value).__name__, "_data": {name: _encode(getattr(value, name)) for name in fields}}
    return list(value) if isinstance(value, list | tuple) else value


def unflatten(
    scheme: Scheme, state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Any]:
    """Rebuild the torchao tensors of every layer that has tensors here; see :meth:`QuantBackend.unflatten_state_dict`.

    Only the entries of those layers are read, so that one layer costs the same in a file of any size.

    Raises:
        CheckpointError: no metadata, damaged or unknown metadata, another method's tensors, or some are missing.
    """
    metadata = metadata or {}
    result: dict[str, Any] = {}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state_dict.items():
        head, dot, leaf = key.rpartition(".")
        name = f"{head}{dot}weight"
        if leaf.startswith(_PREFIX) and (leaf == _PREFIX + "qdata" or name in metadata):
            layers.setdefault(name, {})[leaf.removeprefix(_PREFIX)] = value
        else:
            result[key] = value
    for name, inner in layers.items():
        if name not in metadata:
            raise CheckpointError(
                f"{name}: the file holds torchao tensors ({name.removesuffix('weight')}_weight_qdata) but its metadata "
                "has no entry for them: it was lost, e.g. by a tool that rewrote the file without its header. "
                "The method cannot be told from the tensors alone; quantize the source model again"
            )
        result[name] = _rebuild(scheme, name, metadata[name], inner)
    return result


def _rebuild(scheme: Scheme, name: str, entry: Any, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    data = _parse(name, entry)
    class_name = data.get("_type")
    if class_name not in _TENSOR_CLASSES:
        raise CheckpointError(
            f"{name}: the file holds a torchao tensor of type {class_name!r}; this version reads "
            f"{', '.join(_TENSOR_CLASSES)}"
        )
    listed = data.get("_tensor_data_names")
    if not isinstance(listed, list) or not all(isinstance(n, str) for n in listed):
        raise CheckpointError(f"{name}: its metadata has no list '_tensor_data_names'")
    missing = [n for n in listed if n not in inner]
    extra = [n for n in inner if n not in listed]
    prefix = name.removesuffix("weight") + _PREFIX
    if missing or extra:
        what = f"{', '.join(prefix + n for n in missing)} missing" if missing else ""
        more = f"{', '.join(prefix + n for n in extra)} not listed in its metadata" if extra else ""
        raise CheckpointError(f"{name}: {'; '.join(filter(None, (what, more)))}; the file is incomplete")
    given = _attributes(name, class_name, data.get("_data"))
    attributes = _constructor_defaults(class_name) | given
    method = identify_method(class_name, attributes)
    if method != scheme.method:
        found = f"method {method!r}" if method else f"a {class_name} that no method here makes"
        raise CheckpointError(
            f"{name}: the file holds {found}, expected {scheme.method!r}; load it with its own method"
        )
    qdata = inner.get("qdata")
    if qdata is None or qdata.dim() != 2:
        raise CheckpointError(f"{name}: {prefix}qdata must have two dimensions, found {inner and list(inner)}")
    in_features = qdata.shape[1] * (2 if _packs_two(scheme, qdata) else 1)
    expected = scheme.attributes(qdata.shape[0], in_features, torch.float32)
    problems = [
        f"its attribute {key} is {value!r}, which is no such value as {expected[key]!r}"
        for key, value in given.items()
        if not _same_kind(value, expected[key])
    ] or find_problems(scheme, class_name, attributes, inner, qdata.shape[0], in_features)
    if problems:
        raise CheckpointError(f"{name}: {'; '.join(problems)}")
    return scheme.tensor_class(**inner, **attributes)


def _packs_two(scheme: Scheme, qdata: torch.Tensor) -> bool:
    return scheme.class_name == "Int4Tensor" or qdata.dtype == torch.uint8


def _parse(name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, str) or len(entry) > _MAX_ENTRY:
        raise CheckpointError(f"{name}: its metadata is not a JSON text of at most {_MAX_ENTRY} characters")
    try:
        data = json.loads(entry)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: its metadata is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{name}: its metadata is a JSON {type(data).__name__}, expected an object")
    return data


def _attributes(name: str, class_name: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise CheckpointError(f"{name}: its metadata has no object '_data'")
    cls = getattr(library.load(), class_name)
    known = attribute_names(cls)
    unknown = [k for k in data if k not in known]
    absent = [k for k in cls.tensor_attribute_names if k not in data]
    if unknown or absent:
        raise CheckpointError(
            f"{name}: the attributes of its {class_name} are not those of the installed torchao "
            f"(unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(absent) or 'none'}); "
            "the file may need a newer torchao"
        )
    try:
        decoded = {key: _decode(value) for key, value in data.items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: its metadata cannot be read: {error}") from error
    if "shape" in decoded and isinstance(decoded["shape"], list):
        decoded["shape"] = torch.Size(decoded["shape"])
    return decoded


@functools.cache
def _constructor_defaults(class_name: str) -> dict[str, Any]:
    """What a file of an older torchao means by an attribute that it does not have."""
    cls = getattr(library.load(), class_name)
    parameters = inspect.signature(cls.__new__).parameters
    return {
        n: parameters[n].default for n in attribute_names(cls) if parameters[n].default is not inspect.Parameter.empty
    }


def _same_kind(value: Any, expected: Any) -> bool:
    """Whether ``value`` is the same sort of thing as ``expected``, field by field for torchao's keyword classes."""
    kind = _kind(value)
    if kind != _kind(expected):
        return False
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return all(_same_kind(getattr(value, f.name), getattr(expected, f.name)) for f in fields)


def _kind(value: Any) -> Any:
    api = library.load()
    if isinstance(value, api.PerTensor) or (isinstance(value, api.PerRow) and value.dim in (-1, 1)):
        return "granularity"
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return "number" if number else type(value)


def _decode(value: Any) -> Any:
    """Turn one JSON value into the object that torchao's encoder wrote, of a closed set of classes."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        if not all(isinstance(n, int) for n in value):
            raise ValueError(f"a list of integers was expected, found {value!r}")
        return value
    if not isinstance(value, dict) or set(value) != {"_type", "_data"}:
        raise ValueError(f"{value!r} is no value that torchao writes")
    kind, data = value["_type"], value["_data"]
    if kind == "torch.dtype":
        if data not in _DTYPES:
            raise ValueError(f"unknown dtype {data!r}")
        return _DTYPES[data]
    if kind not in _VALUE_CLASSES:
        raise ValueError(f"unknown class {kind!r}")
    cls = getattr(library.load(), kind)
    if issubclass(cls, enum.Enum):
        if data not in cls.__members__:
            raise ValueError(f"unknown {kind} {data!r}")
        return cls[data]
    fields = cls._fields if hasattr(cls, "_fields") else [f.name for f in dataclasses.fields(cls)]
    if not isinstance(data, dict) or not set(data) <= set(fields):
        raise ValueError(f"{kind} has the fields {', '.join(fields)}, found {data!r}")
    return cls(**{key: _decode(v) for key, v in data.items()})
