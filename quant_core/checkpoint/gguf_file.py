"""Reads GGUF, llama.cpp's container, as a source of weights.

The header is parsed here, with every count checked against the file's size: the gguf package's reader maps the file
and trusts what it says, so a damaged count can keep it busy for hours and a truncated file can kill the process. The
block formats are llama.cpp's own and are decoded by its own package, which a machine without GGUF files does not need.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError
from .header import Header, TensorInfo, is_endless
from .reader import Checkpoint

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_OWN_SHAPE = "comfy.gguf.orig_shape."
_MAX_TEXT = 1 << 20
_MAX_ARRAY = 16
_MAX_HEADER = 64 << 20
# Type codes of metadata values: struct format, or what follows is a string or an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
DECODED_DTYPE = torch.bfloat16
"""What :meth:`Checkpoint.read` gives of a quantized tensor: the dtype of the models that GGUF files are made from."""
_CHUNK_WEIGHTS = 1 << 20  # a multiple of every block


@dataclass(frozen=True)
class GGUFTensorInfo(TensorInfo):
    """A tensor of a GGUF file. ``shape`` is the float tensor's; ``nbytes`` is what the file holds.

    Attributes:
        kind: ``F16``, ``Q4_K``, ...
        block: ``(weights, bytes)`` of one block.
    """

    kind: str = ""
    block: tuple[int, int] = (1, 1)

    @property
    def quantized(self) -> bool:
        return self.kind not in _PLAIN


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. ``read`` and ``read_rows`` give the values of a quantized tensor in bfloat16."""

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        if not isinstance(info, GGUFTensorInfo) or not info.quantized:
            return super().read(name)
        return self.decode_rows(name, 0, info.shape[0]).to(info.dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        info = self.tensors[name]
        if not isinstance(info, GGUFTensorInfo) or not info.quantized:
            return super().read_rows(name, start, stop)
        return self.decode_rows(name, start, stop).to(info.dtype)

    def decode_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows of a quantized tensor in float32, ``[stop - start, ...]``, a bounded piece at a time."""
        from gguf import GGMLQuantizationType, quants

        info = self.tensors[name]
        assert isinstance(info, GGUFTensorInfo)
        self._check_rows(name, start, stop)
        weights, size = info.block
        row = math.prod(info.shape[1:])
        out = torch.empty((stop - start) * row, dtype=torch.float32)
        first, last = start * row, stop * row
        # A block may reach over the end of a row, where the tensor was stored in another shape than its own.
        for position in range(first // weights * weights, last, _CHUNK_WEIGHTS):
            end = min(position + _CHUNK_WEIGHTS, -(-last // weights) * weights)
            data = self._read_bytes(name, info.start + position // weights * size, info.start + end // weights * size)
            blocks = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, size).numpy()
            try:
                values = quants.dequantize(blocks, GGMLQuantizationType[info.kind]).reshape(-1)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is {info.kind}, which the installed gguf cannot decode"
                ) from error
            low, high = max(position, first), min(end, last)
            out[low - first : high - first] = torch.from_numpy(values[low - position : high - position])
        return out.reshape(stop - start, *info.shape[1:])


class _Cursor:
    """Reads little-endian values and never past the file's end or the header's limit."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.left = min(size, _MAX_HEADER)

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.left else b""
        if len(data) != count:
            raise CheckpointError(f"{self.path}: the GGUF header runs past the end of the file: truncated or damaged")
        self.left -= count
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.number("Q")
        if length > _MAX_TEXT:
            raise CheckpointError(f"{self.path}: the GGUF header holds a name of {length} bytes: damaged")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: the GGUF header holds a name that is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self._string_value()
        if kind == _ARRAY:
            return self._array()
        raise CheckpointError(f"{self.path}: the GGUF header holds a value of the unknown type {kind}")

    def _string_value(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def _array(self) -> list[Any] | None:
        """Read a short array of numbers; step over vocabularies and the like, which no weight depends on."""
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS and count <= _MAX_ARRAY:
            return [self.number(_SCALARS[kind]) for _ in range(count)]
        if kind in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):  # every turn takes at least 8 bytes of a bounded header
                self.take(self.number("Q"))
        else:
            raise CheckpointError(f"{self.path}: the GGUF header holds an array of the unknown type {kind}")
        return None


def read_gguf_header(path: Path) -> Header:
    """Read and check the header of a GGUF file.

    Raises:
        ImportError: the package gguf is missing.
        CheckpointError: it is truncated, damaged, or holds a tensor of an unknown type.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        cursor = _Cursor(path, file, size)
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file")
        version = cursor.number("I")
        if version not in _VERSIONS:
            big = " (a big-endian file)" if version > 0xFFFF else ""
            raise CheckpointError(f"{path} is GGUF version {version}{big}; versions 2 and 3, little-endian, are read")
        tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
        values: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.text()
            if key in values:
                raise CheckpointError(f"{path}: the GGUF header names {key!r} twice")
            values[key] = cursor.value()
        entries = {}
        for _ in range(tensor_count):
            name = cursor.text()
            if name in entries:
                raise CheckpointError(f"{path}: the GGUF header names tensor {name!r} twice")
            dimensions = cursor.number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise CheckpointError(f"{path}: tensor {name!r} has {dimensions} dimensions: damaged")
            # GGUF names the fastest dimension first; the reverse of torch.
            shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
            entries[name] = (shape, cursor.number("I"), cursor.number("Q"))
        header_end = file.tell()

    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ImportError(f"reading {path} needs the package gguf, which is missing: pip install gguf") from error

    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    base = -(-header_end // alignment) * alignment
    types = {int(t): (t.name, GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType if t in GGML_QUANT_SIZES}
    tensors = {n: _tensor(path, n, entry, values, types, base, size) for n, entry in entries.items()}
    metadata = {key: str(value) for key, value in values.items() if value is not None}
    return Header(path, dict(sorted(tensors.items(), key=lambda item: item[1].start)), metadata)


def _tensor(
    path: Path,
    name: str,
    entry: tuple[tuple[int, ...], int, int],
    values: dict[str, Any],
    types: dict[int, tuple[str, tuple[int, int]]],
    base: int,
    size: int,
) -> GGUFTensorInfo:
    shape, code, offset = entry
    if code not in types:
        raise CheckpointError(f"{path}: tensor {name!r} has the type {code}, which the installed gguf does not know")
    kind, (weights, block_bytes) = types[code]
    if any(n >= 2**63 for n in shape) or is_endless(shape):
        raise CheckpointError(f"{path}: tensor {name!r} has the impossible shape {list(shape)}")
    if (shape[-1] if shape else 1) % weights:
        raise CheckpointError(f"{path}: tensor {name!r} {list(shape)} is {kind}, whose rows are multiples of {weights}")
    nbytes = math.prod(shape) // weights * block_bytes
    start = base + offset
    if start + nbytes > size:
        raise CheckpointError(
            f"{path} is truncated or damaged: tensor {name!r} ends at byte {start + nbytes}, the file has {size}"
        )
    # ComfyUI-GGUF folds tensors whose rows are no multiple of a block, and notes the shape that they had.
    own = values.get(_OWN_SHAPE + name)
    if own is not None:
        if not isinstance(own, list) or not all(type(n) is int and n >= 0 for n in own) or is_endless(own):
            raise CheckpointError(f"{path}: {_OWN_SHAPE}{name} is {own!r}, expected a shape")
        if math.prod(own) != math.prod(shape):
            raise CheckpointError(f"{path}: tensor {name!r} {list(shape)} cannot have the shape {own} that is noted")
        shape = tuple(own)
    dtype = _PLAIN.get(kind, DECODED_DTYPE)
    return GGUFTensorInfo(dtype, shape, start, start + nbytes, kind, (weights, block_bytes))
