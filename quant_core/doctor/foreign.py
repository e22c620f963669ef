"""Rules for the layouts of other libraries: bitsandbytes, torchao, GGUF."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from .comfy import describe
from .findings import Finding
from .rules import found
from .scan import Layer, Scan

_STATE = "weight.quant_state.bitsandbytes__"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def check_foreign(scan: Scan) -> list[Finding]:
    """Apply the rules for layers that are not in ComfyUI's formats."""
    findings: list[Finding] = []
    counts: dict[str, int] = defaultdict(int)
    for layer in scan.layers.values():
        if "weight.absmax" in layer.parts or any(key.startswith(_STATE) for key in layer.parts):
            counts["bitsandbytes"] += 1
            findings.extend(_check_bitsandbytes(scan, layer))
        elif "_weight_qdata" in layer.parts:
            counts["torchao"] += 1
            findings.extend(_check_torchao(scan, layer))
    if scan.checkpoint.path.suffix.lower() == ".gguf":
        findings.append(found("gguf"))
    findings.extend(found("not-comfyui", count=n, family=family) for family, n in counts.items())
    return findings


def _check_bitsandbytes(scan: Scan, layer: Layer) -> Iterable[Finding]:
    state_key = next((key for key in layer.parts if key.startswith(_STATE)), None)
    for key, present in (
        (_STATE + "nf4", state_key is not None),
        ("weight", "weight" in layer.parts),
        ("weight.absmax", "weight.absmax" in layer.parts),
        ("weight.quant_map", "weight.quant_map" in layer.parts),
    ):
        if not present:
            yield found("part-missing", layer.name, tensor=key)
    if state_key is None or "weight" not in layer.parts or "weight.absmax" not in layer.parts:
        return
    try:
        state = json.loads(bytes(scan.checkpoint.read(layer.tensor(state_key)).reshape(-1).tolist()))
        blocksize, shape = int(state["blocksize"]), [int(n) for n in state["shape"]]
        if blocksize < 1 or min(shape, default=0) < 0:
            raise ValueError(f"blocksize {blocksize}, shape {shape}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield found(
            "state-unreadable", layer.name, error=f"{state_key} cannot be read ({type(error).__name__}: {error})"
        )
        return
    weight, absmax = layer.parts["weight"], layer.parts["weight.absmax"]
    blocks, half = math.ceil(math.prod(shape) / blocksize), math.ceil(math.prod(shape) / 2)
    if weight.dtype != torch.uint8 or math.prod(weight.shape) != half:
        yield found("part-wrong", layer.name, tensor="weight", found=describe(weight), expected=f"{half} bytes uint8")
    if math.prod(absmax.shape) != blocks:
        yield found("part-wrong", layer.name, tensor="weight.absmax", found=describe(absmax), expected=f"[{blocks}]")
    if absmax.dtype == torch.uint8:
        for key in _NESTED:
            if key not in layer.parts:
                yield found("part-missing", layer.name, tensor=key)
        if "nested_offset" not in state:
            yield found("part-missing", layer.name, tensor=f"nested_offset in {state_key}")


def _check_torchao(scan: Scan, layer: Layer) -> Iterable[Finding]:
    entry = scan.checkpoint.metadata.get(layer.tensor("weight"))
    try:
        kind = None if entry is None else json.loads(entry)["_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = None
    if not isinstance(kind, str):
        error = "the metadata does not describe its torchao tensors: the file's header was lost or rewritten"
        yield found("state-unreadable", layer.name, error=error)
    elif not any(key.startswith("_weight_scale") for key in layer.parts):
        yield found("part-missing", layer.name, tensor="_weight_scale")
