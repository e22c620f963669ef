"""Says whether a quantized file loads, in ComfyUI and here, and if not why, layer by layer; and repairs it.

One module a family of rules; their texts, levels and the loader code that they transcribe are data in :mod:`.rules`.
"""

from __future__ import annotations

import os
from pathlib import Path

from .comfy import check_comfy
from .container import open_for_examination
from .findings import COMFYUI, LOADERS, QUANT_CORE, Finding, Level, Report, describe_edit
from .foreign import check_foreign
from .names import check_names, check_nature
from .repair import RepairResult, repair
from .rules import RULES, Rule
from .scan import scan
from .unmarked import check_unmarked
from .values import check_values

__all__ = [
    "COMFYUI",
    "LOADERS",
    "QUANT_CORE",
    "RULES",
    "Finding",
    "Level",
    "RepairResult",
    "Report",
    "Rule",
    "describe_edit",
    "doctor",
    "repair",
]

_NEVER_CHECKED = (
    "whether names and shapes are those of an architecture that ComfyUI knows",
    "whether the weights are the right ones: `verify` compares them with the float file",
    "whether this machine has kernels for the formats: `methods` says that",
)


def doctor(path: str | os.PathLike[str], *, read_weights: bool = True) -> Report:
    """Examine a checkpoint.

    Args:
        path: what ``open_checkpoint`` opens; also a file that is truncated, too long, or no safetensors file.
        read_weights: also read every weight, for NaN, zeros and the file's own checksums. False reads the header,
            markers and scales alone.

    Returns:
        The findings for each loader, and what was not checked.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: the file changes while it is read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    report = Report(str(path), unchecked=list(_NEVER_CHECKED))
    checkpoint, findings = open_for_examination(path)
    report.add(findings)
    if checkpoint is None:
        report.unchecked.insert(0, "everything behind the header, which cannot be read")
        return report
    examined = scan(checkpoint)
    nature = check_nature(examined)
    if nature:
        report.add(nature)
        return report
    names = check_names(examined)  # first: it puts scales that carry another prefix where they belong
    report.add([*examined.findings, *names, *check_comfy(examined), *check_unmarked(examined)])
    report.add([*check_foreign(examined), *check_values(examined, read_weights)])
    marked = [layer for layer in examined.layers.values() if layer.marked]
    banks = [layer for layer in marked if len(getattr(layer.parts.get("weight"), "shape", ())) == 3]
    report.layers = len(marked)
    if banks:
        report.unchecked.insert(0, f"{len(banks)} banks of experts (3-D weights), first {banks[0].name}")
    if not read_weights:
        report.unchecked.insert(0, "the weights' own bytes (NaN, zeros, checksums): they were not read")
    return report
