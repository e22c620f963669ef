"""How a 4-bit bitsandbytes layer lies in a state dict, and how to tell whether a file's tensors are one.

Needs no bitsandbytes: a file can be examined where the library is not installed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCKSIZE = 256
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# What each 4-bit code stands for. bitsandbytes decodes with its own copy, whatever quant_map a file holds.
CODEBOOKS = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25,
        0.0, -0.0625 / 12, -8 / 12, -1.0, -4 / 12, -0.5, -2 / 12, -0.25,
    ),
}  # fmt: skip

_MARKER_PREFIX = "weight.quant_state.bitsandbytes__"
_MARKER_LIMIT = 4096
_LONGEST_FLOAT = 24  # characters of the longest float64 in JSON, "-2.2250738585072014e-308"

Tensors = dict[str, torch.Tensor]


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Layout:
    """The format of one layer.

    Attributes:
        quant_type: ``"nf4"`` or ``"fp4"``.
        blocksize: elements that share one absmax.
        nested: whether the absmax values are stored in 8 bits.
        storage: dtype of the packed weight.
        nested_offset: mean of the absmax values; 0.0 where they are not nested, and in a shell.
    """

    quant_type: str
    blocksize: int
    nested: bool
    storage: torch.dtype = torch.uint8
    nested_offset: float = 0.0

    @property
    def marker_key(self) -> str:
        """The key of the marker below the layer."""
        return _MARKER_PREFIX + self.quant_type

    def tensors(self, out_features: int, in_features: int) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Return ``{key below the layer: (dtype, shape)}`` of every tensor but the marker."""
        elements = out_features * in_features
        blocks = -(-elements // self.blocksize)
        expected = {
            "weight": (self.storage, [-(-elements // 2) // self.storage.itemsize, 1]),
            "weight.absmax": (torch.uint8 if self.nested else torch.float32, [blocks]),
            "weight.quant_map": (torch.float32, [16]),
        }
        if self.nested:
            expected["weight.nested_absmax"] = (torch.float32, [-(-blocks // NESTED_BLOCKSIZE)])
            expected["weight.nested_quant_map"] = (torch.float32, [256])
        return expected

    def marker_length(self, out_features: int, in_features: int, source_dtype: torch.dtype) -> int:
        """Bytes of the marker, whatever the value of ``nested_offset``: shorter ones are padded with spaces.

        A length that depends on the digits of a mean could not be planned before the weight is quantized.
        """
        marker: dict[str, Any] = {"quant_type": self.quant_type, "blocksize": self.blocksize}
        marker["dtype"] = dtype_name(source_dtype if source_dtype in FLOAT_DTYPES else torch.float32)
        marker["shape"] = [out_features, in_features]
        if not self.nested:
            return len(json.dumps(marker))
        marker |= {"nested_blocksize": NESTED_BLOCKSIZE, "nested_dtype": "float32", "nested_offset": 0}
        return len(json.dumps(marker)) - 1 + _LONGEST_FLOAT

    def shell(self, out_features: int, in_features: int, source_dtype: torch.dtype) -> Tensors:
        """Return the layer's tensors on the meta device."""
        expected = self.tensors(out_features, in_features)
        expected[self.marker_key] = (torch.uint8, [self.marker_length(out_features, in_features, source_dtype)])
        return {key: torch.empty(shape, dtype=dtype, device="meta") for key, (dtype, shape) in expected.items()}


def read_layout(tensors: Tensors, quant_type: str, out_features: int, in_features: int) -> Layout | list[str]:
    """Return the layout that one layer's tensors describe, or one sentence for everything that is wrong with it.

    Args:
        tensors: ``{key below the layer: tensor}``.
        quant_type: what the layer must be; another one is refused.
        out_features, in_features: shape of the layer's weight, which the marker must confirm.
    """
    shape = [out_features, in_features]
    key = _MARKER_PREFIX + quant_type
    others = [k for k in tensors if k.startswith(_MARKER_PREFIX) and k != key]
    if others:
        other = others[0].removeprefix(_MARKER_PREFIX)
        return [f"{others[0]} marks the layer as {other}, not {quant_type}: load it with method 'bitsandbytes_{other}'"]
    if key not in tensors:
        weight = tensors.get("weight")
        if weight is not None and weight.is_floating_point() and list(weight.shape) == shape:
            return [f"weight is a float weight ({weight.dtype}): the file does not hold this layer quantized"]
        return [f"{key} is missing: the layer was stored by another method, or a tool dropped it"]
    info = _parse_marker(tensors[key])
    if isinstance(info, str):
        return [f"{key} {info}: the file is damaged or was written by another tool"]
    problems = _marker_problems(info, quant_type, shape)
    if problems:
        return [f"{key} {problem}" for problem in problems]
    nested = "nested_offset" in info
    stray = [k for k in ("weight.nested_absmax", "weight.nested_quant_map") if k in tensors and not nested]
    if stray:
        return [f"{stray[0]} is there, but {key} has no 'nested_offset': they come from different files"]
    storage = tensors["weight"].dtype if "weight" in tensors else torch.uint8
    if storage not in STORAGE_DTYPES:
        return [f"weight is {storage}, expected {' or '.join(map(str, STORAGE_DTYPES))}"]
    return Layout(quant_type, info["blocksize"], nested, storage, info.get("nested_offset", 0.0))


def tensor_problems(tensors: Tensors, layout: Layout, out_features: int, in_features: int) -> list[str]:
    """Return one sentence for every tensor that is missing or that ``layout`` does not have like this."""
    problems = []
    for key, (dtype, shape) in layout.tensors(out_features, in_features).items():
        value = tensors.get(key)
        if value is None:
            problems.append(f"{key} is missing, and the weight cannot be decoded without it")
        elif value.dtype != dtype or list(value.shape) != shape:
            problems.append(
                f"{key} is {value.dtype} {list(value.shape)}, expected {dtype} {shape} for a weight "
                f"[{out_features}, {in_features}] with block size {layout.blocksize}"
            )
    if problems:
        return problems
    codebook = torch.tensor(CODEBOOKS[layout.quant_type])
    if not torch.allclose(tensors["weight.quant_map"].cpu(), codebook, rtol=0.0, atol=1e-6):
        return [f"weight.quant_map is not the {layout.quant_type} codebook, the only one that bitsandbytes decodes"]
    return []


def _parse_marker(marker: torch.Tensor) -> dict[str, Any] | str:
    """Return the JSON object that a marker tensor holds, or why it holds none."""
    if marker.dtype != torch.uint8 or marker.ndim != 1:
        return f"is {marker.dtype} {list(marker.shape)}, expected torch.uint8 and one dimension"
    if marker.is_meta:
        return "is on the meta device and holds no data"
    if marker.numel() > _MARKER_LIMIT:
        return f"is {marker.numel()} bytes long, expected at most {_MARKER_LIMIT}"
    try:
        parsed = json.loads(bytes(marker.tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return parsed if isinstance(parsed, dict) else f"is a JSON {type(parsed).__name__}, expected an object"


def _marker_problems(info: dict[str, Any], quant_type: str, shape: list[int]) -> list[str]:
    """Compare a marker with what this layer can be. Keys that bitsandbytes does not write are ignored."""
    accepted: dict[str, tuple[Any, ...]] = {
        "quant_type": (quant_type,),
        "blocksize": BLOCKSIZES,
        "dtype": tuple(map(dtype_name, FLOAT_DTYPES)),
        "shape": (shape,),
    }
    if "nested_offset" in info:
        accepted |= {"nested_blocksize": (NESTED_BLOCKSIZE,), "nested_dtype": ("float32",)}
    problems = []
    for key, values in accepted.items():
        if key not in info:
            problems.append(f"has no {key!r}")
        elif not any(type(info[key]) is type(value) and info[key] == value for value in values):
            problems.append(f"says {key} {info[key]!r}, expected {' or '.join(map(str, values))}")
    offset = info.get("nested_offset", 0.0)
    if type(offset) is not float or not math.isfinite(offset):
        problems.append(f"says nested_offset {offset!r}, expected a finite number")
    return problems
