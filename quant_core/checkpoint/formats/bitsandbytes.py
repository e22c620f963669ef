"""bitsandbytes as transformers, diffusers and the older NF4 files for ComfyUI store it.

4 bit: ``L.weight`` holds the codes of the flattened weight, two a byte, the earlier one in the high nibble. Each block
has an ``absmax``, in float32 or, nested, in 8 bits with its own codebook, block scales and offset. The JSON in
``L.weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) names block sizes, shape and dtype.

8 bit: ``L.weight`` int8 in rows, ``L.SCB`` their absmax, so that a weight is ``code * SCB / 127``.

NF4: QLoRA, https://arxiv.org/abs/2305.14314, appendix E. FP4: a sign and eight magnitudes over 12.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from .arithmetic import lookup, nibbles
from .base import Parts, StoredLayer, dtype_of, read_marker

if TYPE_CHECKING:
    from ..reader import Checkpoint

_STATE = ".weight.quant_state.bitsandbytes__"
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_CODEBOOKS = {
    "nf4": torch.tensor([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]),
    "fp4": torch.tensor([*_FP4, *(-v for v in _FP4)]) / 12,
}  # fmt: skip
_PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


def find(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """Return every bitsandbytes layer.

    Raises:
        CheckpointError: a quant state cannot be read, or is of an unknown type.
    """
    found = {}
    for name in checkpoint.tensors:
        if _STATE in name:
            layer, _, kind = name.partition(_STATE)
            found[layer] = _four_bit(checkpoint, name, layer, kind)
        elif name.endswith(".SCB"):
            layer = name.removesuffix(".SCB")
            weight = checkpoint.tensors.get(f"{layer}.weight")
            if weight is not None and weight.dtype == torch.int8 and len(weight.shape) == 2:
                keys = tuple(
                    k for p in ("weight", "SCB", "weight_format") if (k := f"{layer}.{p}") in checkpoint.tensors
                )
                found[layer] = StoredLayer(layer, "bitsandbytes", "int8", None, weight.shape, torch.float16, keys)
    return found


def _four_bit(checkpoint: Checkpoint, name: str, layer: str, kind: str) -> StoredLayer:
    if kind not in _CODEBOOKS:
        raise CheckpointError(f"{checkpoint.path}: layer {layer!r} is bitsandbytes {kind!r}; known: nf4, fp4")
    state = read_marker(checkpoint, name)
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(n) is int and n > 0 for n in shape):
        raise CheckpointError(
            f"{checkpoint.path}: {name!r} says shape {shape!r}, expected [out_features, in_features]; the stored codes "
            "are flat, so the layer cannot be decoded without it"
        )
    _check_size(checkpoint, layer, shape)
    keys = [key for part in _PARTS if (key := f"{layer}.{part}") in checkpoint.tensors]
    dtype = dtype_of(state.get("dtype"))
    return StoredLayer(layer, "bitsandbytes", kind, f"bitsandbytes_{kind}", tuple(shape), dtype, (*keys, name), state)


def _check_size(checkpoint: Checkpoint, layer: str, shape: list[int]) -> None:
    """Hold the shape, which is a mere claim of the quant state, against the bytes that are there."""
    where = f"{checkpoint.path}: layer {layer!r}"
    weight = checkpoint.tensors.get(f"{layer}.weight")
    if weight is None:
        raise CheckpointError(f"{where} has a bitsandbytes quant state, but no {layer + '.weight'!r}")
    expected, width = -(-math.prod(shape) // 2), weight.dtype.itemsize  # the bytes may be stored as a wider dtype
    first = weight.shape[0] if weight.shape else 0
    if weight.nbytes != -(-expected // width) * width or first * width != weight.nbytes:
        raise CheckpointError(
            f"{where}: 'weight' is {weight.dtype} {list(weight.shape)}, expected {expected} bytes of codes for the "
            f"shape {shape} of its quant state"
        )


def decode(checkpoint: Checkpoint, layer: StoredLayer, start: int, stop: int) -> torch.Tensor:
    """Return the rows ``start`` to ``stop`` of the weight in float32."""
    parts = Parts(checkpoint, layer)
    if layer.format == "int8":
        return _eight_bit(parts, start, stop)
    total, row = math.prod(layer.shape), math.prod(layer.shape[1:])
    size = _size(parts, "blocksize")
    _check_codebook(parts, _CODEBOOKS[layer.format])
    first, last = start * row, stop * row
    # Whole blocks, then the wanted part of them: neither rows nor the layer's end need to be where a block ends.
    low, high = first // size, -(-last // size)
    values = torch.zeros((high - low) * size, dtype=torch.float32)
    end = min(high * size, total)
    codes = _codes(parts, low * size, end)
    values[: len(codes)] = lookup(codes, _CODEBOOKS[layer.format])
    values.view(-1, size).mul_(_absmax(parts, low, high, -(-total // size)).unsqueeze(1))
    return values[first - low * size : last - low * size].reshape(stop - start, *layer.shape[1:])


def _eight_bit(parts: Parts, start: int, stop: int) -> torch.Tensor:
    parts.info("SCB", torch.float32, shape=(parts.layer.shape[0],))
    if parts.has("weight_format") and int(parts.read("weight_format").reshape(-1)[:1].sum()) != 0:
        raise parts.fail("weight_format is not 0 (rows): an order of columns that only old GPUs used")
    scale = parts.rows("SCB", start, stop) / 127
    return parts.rows("weight", start, stop).float().mul_(scale.unsqueeze(1))


def _size(parts: Parts, key: str) -> int:
    size: Any = parts.layer.options.get(key)
    if type(size) is not int or size < 2 or size & (size - 1) or size > 1 << 16:
        raise parts.fail(f"the quant state says {key} {size!r}, expected a power of two")
    return size


def _check_codebook(parts: Parts, codebook: torch.Tensor) -> None:
    """bitsandbytes decodes with its own table whatever the file holds; another one would have two readings."""
    if parts.has("weight.quant_map"):
        parts.info("weight.quant_map", torch.float32, shape=(16,))
        if not torch.allclose(parts.read("weight.quant_map"), codebook, rtol=0.0, atol=1e-6):
            raise parts.fail("weight.quant_map is not the codebook of this type")


def _codes(parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the codes ``first`` to ``last`` of the flattened weight; ``first`` is even, a block's beginning."""
    width = parts.info("weight").dtype.itemsize
    low, high = first // 2, -(-last // 2)
    packed = parts.rows("weight", low // width, -(-high // width)).reshape(-1).view(torch.uint8)
    packed = packed[low - low // width * width :][: high - low]
    return nibbles(packed, low_first=False)[: last - first]


def _absmax(parts: Parts, low: int, high: int, blocks: int) -> torch.Tensor:
    """Return the absmax of the blocks ``low`` to ``high`` in float32."""
    state = parts.layer.options
    if "nested_offset" not in state:
        if parts.has("weight.nested_absmax"):
            raise parts.fail("there is a nested_absmax, but the quant state has no nested_offset")
        parts.info("weight.absmax", torch.float32, shape=(blocks,))
        return parts.rows("weight.absmax", low, high)
    size = _size(parts, "nested_blocksize")
    offset = state["nested_offset"]
    if not isinstance(offset, int | float) or isinstance(offset, bool):
        raise parts.fail(f"the quant state says nested_offset {offset!r}, expected a number")
    parts.info("weight.absmax", torch.uint8, shape=(blocks,))
    parts.info("weight.nested_absmax", torch.float32, shape=(-(-blocks // size),))
    parts.info("weight.nested_quant_map", torch.float32, shape=(256,))
    outer = parts.rows("weight.nested_absmax", low // size, -(-high // size))
    values = lookup(parts.rows("weight.absmax", low, high), parts.read("weight.nested_quant_map"))
    return values * outer[torch.arange(low, high) // size - low // size] + offset
