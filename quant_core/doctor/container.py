"""Opens a file for examination, also one that the format forbids, and says what its bytes look like."""

from __future__ import annotations

from pathlib import Path

import torch

from ..checkpoint.header import MAX_HEADER_BYTES, parse_header, read_header
from ..checkpoint.reader import Checkpoint, FileIdentity, open_checkpoint
from ..errors import CheckpointError
from .findings import CutTail, Finding, View
from .rules import found


def open_for_examination(path: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Open a checkpoint; None where its header cannot be used.

    Raises:
        FileNotFoundError: nothing is there.
    """
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        if not path.is_file():
            return None, [found("file-unreadable", error=str(error))]
        return _open_damaged(path, error)
    return checkpoint, _container_findings(checkpoint)


def _open_damaged(path: Path, error: CheckpointError) -> tuple[Checkpoint | None, list[Finding]]:
    size, end = path.stat().st_size, claimed_end(path)
    if end is None or end == size:
        return None, [found("file-unreadable", error=str(error))]
    if end > size:
        return None, [found("file-truncated", end=end, size=size, missing=end - size)]
    identity = FileIdentity.of(path)
    try:
        header = read_header(path, trailing_bytes=True)
    except CheckpointError as other:  # more is wrong than its tail
        return None, [found("file-unreadable", error=str(other))]
    checkpoint = Checkpoint(path, [(header, identity)])
    tail = found("trailing-bytes", edits=(CutTail(),), extra=size - end, end=end, size=size)
    return checkpoint, [tail, *_container_findings(checkpoint)]


def claimed_end(path: Path) -> int | None:
    """Return where a safetensors header says that its file ends; None where it does not say."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            return None
        if 8 + length > size:
            # A header that starts like one and is cut off; anything else is no safetensors file.
            return 8 + length if file.read(2) == b'{"' else None
        raw = file.read(length)
    try:
        entries = parse_header(path, raw)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (CheckpointError, KeyError, TypeError, IndexError):
        return None


def _container_findings(checkpoint: Checkpoint) -> list[Finding]:
    findings = []
    if len(checkpoint.files) > 1:
        findings.append(found("several-files", count=len(checkpoint.files)))
    misaligned = [name for name, info in checkpoint.tensors.items() if info.nbytes and info.start % info.dtype.itemsize]
    if misaligned:
        findings.append(found("tensor-misaligned", count=len(misaligned), first=misaligned[0]))
    for name, info in checkpoint.tensors.items():
        if info.dtype == torch.float8_e8m0fnu:
            edits = (View(name, torch.uint8),)
            layer = name.rpartition(".")[0]
            findings.append(found("dtype-unknown-to-loader", layer, edits, tensor=name, found="float8_e8m0fnu"))
    return findings
