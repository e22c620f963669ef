"""torchao's tensors as its safetensors form and DiffSynth-Studio store them.

A layer ``L`` is ``L._weight_qdata``, ``L._weight_scale`` and, depending on the class, ``_weight_zero_point`` or
``_weight_per_tensor_scale``; the metadata entry ``L.weight`` is a JSON with the tensor's class and attributes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from .arithmetic import e2m1, e8m0, nibbles, scale_blocks, signed4
from .base import FLOAT_DTYPES, FP8_DTYPES, Parts, StoredLayer, dtype_of

if TYPE_CHECKING:
    from ..reader import Checkpoint

_PREFIX = "_weight_"
_NAMES = "tensor_names"
_QDATA, _SCALE = _PREFIX + "qdata", _PREFIX + "scale"


def _element(data: Mapping[str, Any]) -> str:
    return "mxfp4" if "float4" in json.dumps(data.get("elem_dtype")) else "mxfp8"


# The tensor's class -> its format, and the method by whether activations are quantized too.
_CLASSES: dict[str, Callable[[Mapping[str, Any]], tuple[str, str | None]]] = {
    "Int8Tensor": lambda d: ("int8", _method("int8_w8a8", "int8_w8a16", d)),
    "Float8Tensor": lambda d: ("fp8", _method("fp8_w8a8", "fp8_w8a16", d)),
    "NVFP4Tensor": lambda d: ("nvfp4", _method("nvfp4_w4a4", "nvfp4_w4a16", d)),
    "MXTensor": lambda d: (_element(d), _method("mxfp4_w4a4" if _element(d) == "mxfp4" else "mxfp8_w8a8", None, d)),
    "Int4Tensor": lambda d: (
        "int4",
        "torchao_int4_w4a8" if "float8" in json.dumps(d.get("activation_dtype")) else "torchao_int4_w4a16",
    ),
}


def _method(with_activations: str, weight_only: str | None, data: Mapping[str, Any]) -> str | None:
    name = with_activations if data.get("act_quant_kwargs") else weight_only
    return None if name is None else f"torchao_{name}"


def find(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """Return every torchao layer.

    Raises:
        CheckpointError: the metadata does not describe a layer's tensors, or as a class that is not known.
    """
    _check_names(checkpoint)
    parts: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        layer, _, leaf = name.rpartition(".")
        if leaf.startswith(_PREFIX):
            parts.setdefault(layer, []).append(name)
    return {
        layer: _describe(checkpoint, layer, tuple(keys)) for layer, keys in parts.items() if f"{layer}.{_QDATA}" in keys
    }


def _check_names(checkpoint: Checkpoint) -> None:
    """torchao's own reader goes by a list of the names in the metadata; what is written from it goes by it too."""
    text = checkpoint.metadata.get(_NAMES, "[]")
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path}: the metadata entry {_NAMES!r} is not JSON ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{checkpoint.path}: the metadata entry {_NAMES!r} is not a list of tensor names, as torchao writes it; "
            "save the file again with its metadata"
        )


def _describe(checkpoint: Checkpoint, layer: str, keys: tuple[str, ...]) -> StoredLayer:
    try:
        entry = json.loads(checkpoint.metadata[layer + ".weight"])
        data = entry["_data"]
        kind, method = _CLASSES[entry["_type"]](data)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: layer {layer!r} holds torchao tensors, but the metadata does not describe them "
            f"({type(error).__name__}: {error}); the file's header was lost, save it again with its metadata"
        ) from error
    codes = checkpoint.tensors[f"{layer}.{_QDATA}"]
    if len(codes.shape) != 2:
        raise CheckpointError(
            f"{checkpoint.path}: layer {layer!r} has {_QDATA} of shape {list(codes.shape)}, expected two dimensions"
        )
    packed = kind in ("nvfp4", "mxfp4", "int4")
    shape = (codes.shape[0], codes.shape[1] * 2 if packed else codes.shape[1])
    recorded = data.get("orig_dtype") or data.get("dtype")
    dtype = dtype_of(recorded.get("_data") if isinstance(recorded, dict) else recorded)
    return StoredLayer(layer, "torchao", kind, method, shape, dtype, keys, data)


def decode(checkpoint: Checkpoint, layer: StoredLayer, start: int, stop: int) -> torch.Tensor:
    """Return the rows ``start`` to ``stop`` of the weight in float32."""
    return _DECODERS[layer.format](Parts(checkpoint, layer), start, stop)


def _fp8(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info(_QDATA, *FP8_DTYPES)
    return parts.scaled(_QDATA, _SCALE, start, stop)


def _int8(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info(_QDATA, torch.int8)
    values = parts.scaled(_QDATA, _SCALE, start, stop)
    if parts.has(_PREFIX + "zero_point") and bool(parts.read(_PREFIX + "zero_point").any()):
        raise parts.fail("has zero points that are not 0, which no symmetric int8 tensor has")
    return values


def _mx(parts: Parts, start: int, stop: int) -> torch.Tensor:
    return scale_blocks(_elements(parts, start, stop), e8m0(_scales(parts, 32, start, stop, torch.float8_e8m0fnu)))


def _nvfp4(parts: Parts, start: int, stop: int) -> torch.Tensor:
    scales = _scales(parts, 16, start, stop, torch.float8_e4m3fn).float()
    if parts.has(_PREFIX + "per_tensor_scale"):
        scales = scales * parts.scalar(_PREFIX + "per_tensor_scale")
    return scale_blocks(_elements(parts, start, stop), scales)


def _elements(parts: Parts, start: int, stop: int) -> torch.Tensor:
    if parts.layer.format == "mxfp8":
        parts.info(_QDATA, *FP8_DTYPES)
        return parts.rows(_QDATA, start, stop).float()
    parts.info(_QDATA, torch.uint8)
    return e2m1(nibbles(parts.rows(_QDATA, start, stop), low_first=True))


def _scales(parts: Parts, block: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the block scales, ``[stop - start, in_features / block]``."""
    rows, width = parts.layer.shape
    given, swizzled = parts.layer.options.get("block_size"), parts.layer.options.get("is_swizzled_scales")
    if given != block or width % block or not isinstance(swizzled, bool):
        raise parts.fail(
            f"the metadata says block_size {given!r} and is_swizzled_scales {swizzled!r} for a width of {width}, "
            f"expected {block} and true or false"
        )
    if swizzled:
        return parts.tiled(_SCALE, start, stop, width // block, dtype)
    parts.info(_SCALE, dtype, shape=(rows, width // block))
    return parts.rows(_SCALE, start, stop)


def _int4(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info(_QDATA, torch.int8, torch.uint8)
    block = parts.layer.options.get("block_size")
    rows, width = parts.layer.shape
    if not isinstance(block, list) or len(block) != 2 or type(block[1]) is not int or block[1] < 1 or width % block[1]:
        raise parts.fail(f"the metadata says block_size {block!r}, which does not fit a width of {width}")
    for part in (_SCALE, _PREFIX + "zero_point"):
        parts.info(part, *FLOAT_DTYPES, shape=(width // block[1], rows))
    values = signed4(nibbles(parts.rows(_QDATA, start, stop), low_first=True))
    scale_blocks(values, parts.read(_SCALE).float().t()[start:stop])
    zeros = parts.read(_PREFIX + "zero_point").float().t()[start:stop]
    values.view(stop - start, -1, block[1]).add_(zeros.unsqueeze(-1))
    return values


_DECODERS: dict[str, Callable[[Parts, int, int], torch.Tensor]] = {
    "int8": _int8,
    "fp8": _fp8,
    "nvfp4": _nvfp4,
    "mxfp8": _mx,
    "mxfp4": _mx,
    "int4": _int4,
}
