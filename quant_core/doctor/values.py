"""Rules about values: one pass over the bytes, a few MiB at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..checkpoint.reader import Checkpoint
from ..checkpoint.writer import CHECKSUM_LENGTH, tensor_bytes
from .findings import Finding
from .rules import found
from .scan import Layer, Scan

_TILE_BYTES = 4 << 20
_SCALES = ("weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "input_scale", "scale_weight")
_FOREIGN_SCALES = ("weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", "_weight_scale")


def check_values(scan: Scan, read_weights: bool) -> list[Finding]:
    """Look for NaN, infinity and zeros, and compare the bytes with the file's own checksums.

    Args:
        scan: the file.
        read_weights: False reads the scales alone, and compares no checksum.
    """
    findings = [finding for layer in scan.layers.values() for finding in _check_scales(scan.checkpoint, layer)]
    if read_weights:
        zero = {finding.layer for finding in findings if finding.code == "all-zero"}
        findings.extend(_check_weights(scan, zero))
    return findings


def tiles(checkpoint: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    """Read a tensor in tiles of whole rows, a few MiB each; one that has no rows at once."""
    info = checkpoint.tensors[name]
    if not info.shape or not info.nbytes:
        yield checkpoint.read(name)
        return
    step = max(1, _TILE_BYTES // (info.nbytes // info.shape[0]))
    for start in range(0, info.shape[0], step):
        yield checkpoint.read_rows(name, start, min(start + step, info.shape[0]))


# ------------------------------------------------------------------ scales


def _check_scales(checkpoint: Checkpoint, layer: Layer) -> Iterator[Finding]:
    name = str((layer.conf or {}).get("format"))
    zero = False
    for key, info in layer.parts.items():
        if key not in _SCALES and key not in _FOREIGN_SCALES:
            continue
        bad, any_set = 0, False
        for tile in tiles(checkpoint, layer.tensor(key)):
            bad += _not_finite(tile, exponents=name == "mxfp8")
            any_set = any_set or bool(tile.view(torch.uint8).any() if tile.dim() else tile.reshape(1).ne(0).any())
        if bad:
            yield found("scale-not-finite", layer.name, tensor=key, count=bad, total=math.prod(info.shape))
        # An exponent of 0 is 2^-127, not 0.
        zero = zero or not (any_set or not info.nbytes or name == "mxfp8" or key in ("input_scale", *_FOREIGN_SCALES))
    if zero:
        yield found("all-zero", layer.name)


def _not_finite(tile: torch.Tensor, exponents: bool) -> int:
    """Count NaN and infinities of scales, also of those that are stored as bytes."""
    if tile.dtype in (torch.uint8, torch.float8_e8m0fnu):
        data = tile.reshape(-1).view(torch.uint8)
        if exponents or tile.dtype == torch.float8_e8m0fnu:
            return int((data == 255).sum())
        return 0
    if tile.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return _bad_fp8(tile)
    return int((~torch.isfinite(tile)).sum()) if tile.is_floating_point() else 0


def _bad_fp8(tile: torch.Tensor) -> int:
    """Count the codes of fp8 that are no number: NaN, and in E5M2 infinity."""
    magnitude = tile.reshape(-1).view(torch.uint8) & 0x7F
    return int((magnitude >= (0x7F if tile.dtype == torch.float8_e4m3fn else 0x7C)).sum())


# ------------------------------------------------------------------ weights


def _check_weights(scan: Scan, zero: set[str]) -> Iterator[Finding]:
    """One pass over every tensor: the checksum of all, zeros and NaN of the weights."""
    checksums = scan.manifest.checksums if scan.manifest is not None else {}
    changed: list[str] = []
    for layer in scan.layers.values():
        for key, info in layer.parts.items():
            name = layer.tensor(key)
            is_weight = key == "weight" and len(info.shape) == 2 and info.nbytes > 0
            expected = checksums.get(name)
            if not is_weight and expected is None:
                continue
            hasher = None if expected is None else _hasher()
            any_set, bad = False, 0
            for tile in tiles(scan.checkpoint, name):
                if hasher is not None:
                    hasher.update(tensor_bytes(tile))
                if is_weight:
                    any_set = any_set or _any_set(tile, layer)
                    bad += _bad_weights(tile)
            if hasher is not None and hasher.hexdigest()[:CHECKSUM_LENGTH] != expected:
                changed.append(name)
            if bad:
                or_inf = "" if info.dtype == torch.float8_e4m3fn else " or infinite"
                yield found("code-not-finite", layer.name, count=bad, or_inf=or_inf)
            if is_weight and not any_set and layer.name not in zero:
                yield found("all-zero", layer.name)
    if changed:
        yield found("bytes-changed", count=len(changed), first=changed[0])


def _hasher() -> Any:
    import blake3

    return blake3.blake3()


def _any_set(tile: torch.Tensor, layer: Layer) -> bool:
    """Whether a tile holds anything but zeros; where a code of 0 is no zero, whether it holds anything."""
    name = str((layer.conf or {}).get("format"))
    if name == "asym_w4a8_int8" or any(key.startswith("weight.") for key in layer.parts):
        return True  # code 0 is an entry of a codebook
    data = tile.reshape(-1)
    if tile.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return bool((data.view(torch.uint8) & 0x7F).any())  # without the sign
    if name == "nvfp4":
        return bool((data.view(torch.uint8) & 0x77).any())
    return bool(data.any())


def _bad_weights(tile: torch.Tensor) -> int:
    if tile.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return _bad_fp8(tile)
    if not tile.is_floating_point() or tile.dtype == torch.float8_e8m0fnu:
        return 0
    low, high = torch.aminmax(tile)
    if bool(torch.isfinite(low) & torch.isfinite(high)):  # a NaN becomes the minimum
        return 0
    return int((~torch.isfinite(tile)).sum())
