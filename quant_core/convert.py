"""Converts a checkpoint file to file as planned, in memory that does not grow with the file.

Large weights are quantized in runs of rows where the method allows it, with the bytes that the whole weight gives.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .blueprint import Blueprint, draw
from .checkpoint.hashing import FileHash
from .config import Recipe
from .job import Progress, WeightTransform, carry_out
from .plan import Plan, plan
from .replace import check_device


@dataclass
class LayerRow:
    """What became of one ``*.weight``."""

    name: str
    shape: tuple[int, ...]
    method: str  # empty when it was not quantized
    reason: str
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None


@dataclass
class ConversionReport:
    """The result of a conversion."""

    source: str
    destination: str
    method: str
    rows: list[LayerRow]
    bytes_before: int
    bytes_after: int = 0
    hash: FileHash | None = None
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[LayerRow]:
        return [row for row in self.rows if row.method]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data."""
        data = asdict(self)
        data["hash"] = None if self.hash is None else {"structure": self.hash.structure, "content": self.hash.content}
        return data


def convert_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    config: Recipe,
    *,
    compute_device: torch.device | str | None = None,
    measure: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Plan and convert in one step; see :func:`quant_core.plan.plan` and :func:`convert`."""
    return convert(plan(source, config), destination, device=compute_device, measure=measure, progress=progress)


def convert(
    plan: Plan,
    destination: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    resume: bool = False,
    shard_size: int | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    measure: bool = False,
    transform: WeightTransform | None = None,
) -> ConversionReport:
    """Carry out a plan.

    What is not quantized is copied byte for byte, in its own dtype. The result appears under its name when it is
    complete; a failure or an interrupt leaves nothing behind, or, with ``resume``, what a later run continues.

    Args:
        plan: possibly edited since it was made.
        destination: the file to write; with several shards, the name that theirs and the index's are made from.
        device: where to quantize; None means the CPU.
        resume: continue what an earlier run of the same plan left, after comparing what it wrote.
        shard_size: replaces the plan's.
        progress: called as ``progress(bytes done, bytes in all, layer name)``; what it raises ends the conversion.
        threads: that read and quantize; None means one for each CPU, up to 4. The bytes do not depend on it.
        measure: also dequantize each layer and report its relative weight error; takes the layers whole.
        transform: changes weights before they are quantized, or copied.

    Raises:
        FileNotFoundError, CheckpointError: the source cannot be read, was changed, or the earlier run was another.
        ValueError: the plan is not possible, or destination and source are the same file.
        QuantizationError: a layer failed; the message names it.
        OSError: the disk is full.
    """
    check_device("device", device)
    destination = Path(destination)
    if shard_size is not None:
        plan.shard_size = shard_size
    blueprint = draw(plan)
    on = torch.device(device or "cpu")
    paths, content, errors = carry_out(
        blueprint,
        destination,
        _describe(plan, blueprint, on, transform),
        device=on,
        resume=resume,
        threads=threads,
        measure=measure,
        transform=transform,
        progress=progress,
    )
    report = _report(plan, destination, errors)
    report.hash = content
    report.files = [str(path) for path in paths]
    report.bytes_after = sum(os.stat(path).st_size for path in paths)
    return report


def _describe(plan: Plan, blueprint: Blueprint, device: torch.device, transform: WeightTransform | None) -> str:
    """What a later run must have in common to continue this one."""
    described = {
        "files": [
            [[n, str(d), list(s)] for n, (d, s) in f.tensors.items()] + [f.metadata, f.manifest]
            for f in blueprint.files
        ],
        "rows": [[row.tensor, row.decision, row.method, row.options] for row in plan.rows],
        "device": device.type,
        "transform": "" if transform is None else transform.identity,
    }
    return json.dumps(described, sort_keys=True)


def _report(plan: Plan, destination: Path, errors: dict[str, float]) -> ConversionReport:
    rows = [
        LayerRow(r.layer, r.shape, r.method, r.why, r.bytes_before, r.bytes_after, errors.get(r.layer))
        for r in plan.rows
        if r.is_weight
    ]
    return ConversionReport(
        plan.source, str(destination), plan.method, rows, plan.bytes_before, notes=list(plan.warnings)
    )
