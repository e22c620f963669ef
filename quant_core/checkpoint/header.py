"""Reads and checks the header of a safetensors file.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes. Everything that a
reader has to check is checked here, once, before a byte of data is used; nothing in a header can run code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

MAX_HEADER_BYTES = 32 << 20
"""The format itself allows 100 MB, of which Python would make 600. Headers of real files, workflows included, have less
than a tenth of this."""

_MAX_ITEMS = 1_000_000  # each takes up to 150 bytes once it is parsed; a tensor has 8

_MAX_EMPTY = 1 << 31

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its dtype, its shape, and where its bytes are, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """A checked header.

    Attributes:
        path: the file.
        tensors: ``{name: TensorInfo}`` in the order of their bytes.
        metadata: the ``__metadata__`` strings.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str], *, trailing_bytes: bool = False) -> Header:
    """Read and check the header of ``path``.

    Args:
        path: the file.
        trailing_bytes: accept bytes behind the last tensor, which the format forbids.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is not a safetensors file, is truncated, or its header breaks a rule of the format.
    """
    path = Path(path)
    if not path.is_file() and path.exists():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise CheckpointError(f"{path} is {what}, expected a safetensors file")
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        # A header of 640 bytes begins like a pickle; of the beginnings of other files, none is a possible length.
        if size < 8 or length > MAX_HEADER_BYTES:
            _check_magic(path, prefix, size)
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise CheckpointError(
                f"{path} is not a safetensors file, or was cut off: its header would take {length} bytes, "
                f"the file has {size}; headers up to {MAX_HEADER_BYTES} bytes are read"
            )
        raw = file.read(length)
    header = parse_header(path, raw)
    metadata = _check_metadata(path, header.pop("__metadata__", {}))
    return Header(path, _check_tensors(path, header, 8 + length, size, trailing_bytes), metadata)


def _check_magic(path: Path, prefix: bytes, size: int) -> None:
    known = {
        b"PK\x03\x04": "a PyTorch pickle archive (.pt/.pth); it can run code when loaded and is not read. "
        "Convert it to safetensors with the tool it came from",
        b"GGUF": "a GGUF file, which cannot be part of a safetensors checkpoint; name it by itself",
        b"\x80\x02": "a Python pickle; it can run code when loaded and is not read. Convert it to safetensors",
        b"version ": "a Git LFS pointer: the file itself was never downloaded",
        b"<!DOCTYP": "an HTML page: the download was a web page, not the file",
    }
    for magic, meaning in known.items():
        if prefix.startswith(magic):
            raise CheckpointError(f"{path} is {meaning}")
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes: empty or truncated, not a safetensors file")


def parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object that is a header's text, its entries unchecked.

    Raises:
        CheckpointError: it is no JSON object, names a tensor twice, or has more items than any model's.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > _MAX_ITEMS:
        raise CheckpointError(
            f"{path}: its header of {len(raw)} bytes has more than {_MAX_ITEMS} items, which no model has"
        )

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{path}: the header names {twice!r} twice")
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of 5000 digits
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    return header


def _check_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    return metadata


def _check_tensors(
    path: Path, header: Mapping[str, Any], base: int, size: int, trailing_bytes: bool
) -> dict[str, TensorInfo]:
    tensors = {name: _check_tensor(path, name, entry, base) for name, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    position = base
    for name, info in ordered.items():
        if info.start != position:
            problem = "overlaps the tensor before it" if info.start < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {name!r} {problem} (starts at {info.start}, expected {position})")
        position = info.end
    if position > size or (position < size and not trailing_bytes):
        what = "truncated" if position > size else "longer than its header says"
        raise CheckpointError(
            f"{path} is {what}: the tensors end at byte {position}, the file has {size}. Download or copy it again"
        )
    return ordered


def _check_tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: tensor {name!r} lacks dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise CheckpointError(f"{path}: the tensor name {name!a} is not Unicode text")
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {code!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_size(s) for s in shape) or is_endless(shape):
        raise CheckpointError(f"{path}: tensor {name!r} has the impossible shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(o) for o in offsets):
        raise CheckpointError(f"{path}: tensor {name!r} has the impossible data_offsets {offsets!r}")
    dtype = DTYPES[code]
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r} {code} {shape} takes {expected} bytes, its offsets span {offsets[1] - offsets[0]}"
        )
    return TensorInfo(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def is_endless(shape: Sequence[int]) -> bool:
    """Whether a tensor of no elements has dimensions so large that going through its rows would not end.

    A shape with elements is bounded by the size of the file; ``[2**62, 0]`` takes no byte.
    """
    return 0 in shape and math.prod(n for n in shape if n) > _MAX_EMPTY


def _is_size(value: Any) -> bool:
    # bool is an int in Python, and not a size.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Lay out a file.

    Args:
        tensors: ``{name: (dtype, shape)}``.
        metadata: string entries.

    Returns:
        The first bytes of the file (length and JSON, padded with spaces to a multiple of 8), and for each tensor its
        ``(start, end)`` in the file. Wide dtypes come first, so that every tensor is aligned to its element size;
        within a dtype width, the order is that of ``tensors``.
    """
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    spans: dict[str, tuple[int, int]] = {}
    position = 0
    for name in order:
        dtype, shape = tensors[name]
        if dtype not in DTYPE_CODES:
            raise CheckpointError(f"tensor {name!r} has dtype {dtype}, which safetensors cannot store")
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        spans[name] = (position, end)
        position = end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header would take {len(raw)} bytes, the format allows {MAX_HEADER_BYTES}")
    base = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {n: (base + a, base + b) for n, (a, b) in spans.items()}
