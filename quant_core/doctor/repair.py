"""Writes a repaired copy of a file: what can be put right without loss, and a proof that nothing else changed."""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..backends.comfy_kitchen.formats import MARKER_KEY
from ..checkpoint.formats import StoredLayer, dequantize_layer, stored_layers
from ..checkpoint.manifest import read_manifest
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.writer import METADATA_KEY, CheckpointWriter, tensor_bytes
from ..errors import CheckpointError
from .comfy import dtype_name, marker_text
from .container import open_for_examination
from .findings import AddMarker, Cast, Edit, Finding, Rename, Report, Reshape, View, describe_edit
from .scan import METADATA_MARKERS, split_name
from .values import tiles

# With one of these the bytes themselves are in doubt, and nothing proves what they should have been.
_HOPELESS = ("bytes-changed", "file-truncated", "file-unreadable", "manifest-unreadable")
_TILE_ELEMENTS = 1 << 20

SAME = "dequantizes to the same weight as before, bit for bit"
UNREADABLE = "could not be read before; reads now, and every value of its tensors is unchanged"


@dataclass
class RepairResult:
    """What :func:`repair` did.

    Attributes:
        destination: the file that was written.
        edits: every change, a sentence each.
        refused: repairs that would have changed a value, a sentence each.
        proofs: ``{layer: how it was shown that its weight is the same}``, for each layer that was changed. All other
            tensors are the same bytes.
        report: the doctor's on the repaired file.
    """

    destination: str
    edits: list[str]
    refused: list[str]
    proofs: dict[str, str]
    report: Report

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data."""
        return {**self.__dict__, "report": self.report.to_dict()}


@dataclass
class _Plan:
    """The repaired file: what each of its tensors is made from, and how."""

    sources: dict[str, str]  # new name -> name in the file
    chains: dict[str, list[Edit]]  # name in the file -> dtype and shape edits, in order
    markers: dict[str, torch.Tensor]
    layers: dict[str, str]  # new layer name -> name in the file
    touched: set[str] = field(default_factory=set)  # new layer names


def repair(path: str | os.PathLike[str], destination: str | os.PathLike[str], report: Report) -> RepairResult:
    """Write a copy of a file with every lossless repair of a report applied.

    Args:
        path: the file that the report is of.
        destination: the file to write; it appears when it is complete and proven.
        report: of :func:`quant_core.doctor.doctor` on ``path``.

    Raises:
        ValueError: nothing can be repaired, or destination and source are the same file.
        CheckpointError: the file is damaged beyond repair, or the proof fails; nothing is written then.
    """
    path, destination = Path(path), Path(destination)
    if destination.exists() and path.exists() and destination.samefile(path):
        raise ValueError(f"{destination} is the file itself; write the repaired copy to another name")
    hopeless = next((finding for finding in report.findings if finding.code in _HOPELESS), None)
    if hopeless is not None:
        raise CheckpointError(f"{path} cannot be repaired: {hopeless.cause}; {hopeless.fix}")
    checkpoint, _ = open_for_examination(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} was changed since it was examined; examine it again")
    done, refused = _possible(checkpoint, [finding for finding in report.findings if finding.edits])
    if not done:
        why = f": {'; '.join(refused)}" if refused else "; each finding says what to do instead"
        raise ValueError(f"{path}: nothing can be repaired without loss{why}")
    plan = _plan(checkpoint, [edit for finding in done for edit in finding.edits])
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}-{secrets.token_hex(4)}.repair")
    try:
        _write(checkpoint, plan, temporary)
        proofs = _prove(checkpoint, open_checkpoint(temporary), plan)
        after = _examine_again(temporary, report, done)
        os.replace(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)
    after.path = str(destination)
    edits = list(dict.fromkeys(describe_edit(edit) for finding in done for edit in finding.edits))
    return RepairResult(str(destination), edits, refused, proofs, after)


def _possible(checkpoint: Checkpoint, findings: Sequence[Finding]) -> tuple[list[Finding], list[str]]:
    """Sort out the casts that would change a value."""
    done, refused = [], []
    for finding in findings:
        cast = next((edit for edit in finding.edits if isinstance(edit, Cast)), None)
        if cast is None or cast.tensor not in checkpoint.tensors:
            done.append(finding)
            continue
        values = checkpoint.read(cast.tensor)
        there_and_back = values.to(cast.dtype).to(values.dtype)
        if torch.equal(torch.nan_to_num(there_and_back), torch.nan_to_num(values)):
            done.append(finding)
        else:
            refused.append(f"{cast.tensor} has values that {dtype_name(cast.dtype)} cannot hold")
    return done, refused


# ------------------------------------------------------------------ planning


def _plan(checkpoint: Checkpoint, edits: Sequence[Edit]) -> _Plan:
    renames = {edit.tensor: edit.to for edit in edits if isinstance(edit, Rename)}
    sources: dict[str, str] = {}
    for name in checkpoint.tensors:
        new = renames.get(name, name)
        if new in sources:
            raise CheckpointError(f"{checkpoint.path}: two tensors would be named {new!r}; rename one by hand")
        sources[new] = name
    chains: dict[str, list[Edit]] = defaultdict(list)
    touched: set[str] = set()
    for edit in edits:
        if isinstance(edit, (View, Cast, Reshape)):
            chains[edit.tensor].append(edit)
            touched.add(split_name(renames.get(edit.tensor, edit.tensor))[0])
    touched.update(split_name(new)[0] for new in renames.values())
    markers = {}
    for edit in edits:
        if isinstance(edit, AddMarker):
            layer = renames.get(f"{edit.layer}.weight", f"{edit.layer}.weight").removesuffix(".weight")
            markers[f"{layer}.{MARKER_KEY}"] = marker_text(dict(edit.conf))
            touched.add(layer)
    layers = {split_name(new)[0]: split_name(old)[0] for new, old in sources.items() if new.endswith(".weight")}
    return _Plan(sources, dict(chains), markers, layers, touched)


def _apply(tensor: torch.Tensor, chain: Sequence[Edit]) -> torch.Tensor:
    for edit in chain:
        if isinstance(edit, View):
            tensor = tensor.view(edit.dtype)
        elif isinstance(edit, Cast):
            tensor = tensor.to(edit.dtype)
        elif isinstance(edit, Reshape):
            tensor = tensor.reshape(edit.shape)
    return tensor


# ------------------------------------------------------------------ writing


def _write(checkpoint: Checkpoint, plan: _Plan, temporary: Path) -> None:
    layout = {}
    for new, old in plan.sources.items():
        info = checkpoint.tensors[old]
        empty = _apply(torch.empty(info.shape, dtype=info.dtype, device="meta"), plan.chains.get(old, ()))
        layout[new] = (empty.dtype, tuple(empty.shape))
    layout.update({name: (marker.dtype, tuple(marker.shape)) for name, marker in plan.markers.items()})
    metadata, manifest = _headers(checkpoint, plan)
    with CheckpointWriter(temporary, layout, metadata, manifest) as writer:
        for new, old in plan.sources.items():
            writer.write(new, _apply(checkpoint.read(old), plan.chains.get(old, ())))
        for name, marker in plan.markers.items():
            writer.write(name, marker)


def _headers(checkpoint: Checkpoint, plan: _Plan) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Return the metadata and the manifest, with layers under their new names."""
    new_names = {old: new for new, old in plan.layers.items()}
    metadata = {key: value for key, value in checkpoint.metadata.items() if key != METADATA_KEY}
    if METADATA_MARKERS in metadata and any(old != new for old, new in new_names.items()):
        entry = json.loads(metadata[METADATA_MARKERS])
        entry["layers"] = {new_names.get(name, name): conf for name, conf in entry["layers"].items()}
        metadata[METADATA_MARKERS] = json.dumps(entry)
    if read_manifest(checkpoint.path, checkpoint.metadata) is None:
        return metadata, None
    manifest = json.loads(checkpoint.metadata[METADATA_KEY])
    manifest["layers"] = [[new_names.get(name, name) for name in names] for names in manifest["layers"]]
    manifest.pop("checksums", None)
    return metadata, manifest


# ------------------------------------------------------------------ proving


def _prove(before: Checkpoint, after: Checkpoint, plan: _Plan) -> dict[str, str]:
    """Compare the two files: bytes of what was not touched, float weights of what was."""
    for new, old in plan.sources.items():
        unchanged = old not in plan.chains or all(isinstance(edit, View) for edit in plan.chains[old])
        if unchanged and not _same_bytes(before, old, after, new):
            raise CheckpointError(f"{after.path}: {new!r} is not what {old!r} was; nothing was written")
    after_layers = stored_layers(after)
    try:
        before_layers = stored_layers(before)
    except CheckpointError:
        before_layers = {}
    proofs = {}
    for layer in sorted(plan.touched):
        now = after_layers.get(layer)
        if now is None:
            continue
        was = before_layers.get(plan.layers.get(layer, layer))
        if was is not None and (was.family, was.format, was.shape) == (now.family, now.format, now.shape):
            same = _same_weight(before, was, after, now)
        else:
            dequantize_layer(after, now, slice(0, 1))  # it reads now
            same = None
        if same is False:
            raise CheckpointError(
                f"{before.path}: the repair would change the weight of {layer!r}; nothing was written"
            )
        proofs[layer] = SAME if same else UNREADABLE
    return proofs


def _same_bytes(before: Checkpoint, old: str, after: Checkpoint, new: str) -> bool:
    pairs = zip(tiles(before, old), tiles(after, new), strict=True)
    return all(bytes(tensor_bytes(a)) == bytes(tensor_bytes(b)) for a, b in pairs)


def _same_weight(before: Checkpoint, was: StoredLayer, after: Checkpoint, now: StoredLayer) -> bool | None:
    """Whether two float weights are equal, bit for bit; None where the one before cannot be read."""
    step = max(1, _TILE_ELEMENTS // max(1, now.shape[1]))
    for start in range(0, now.shape[0], step):
        part = slice(start, min(start + step, now.shape[0]))
        new = dequantize_layer(after, now, part)
        try:
            old = dequantize_layer(before, was, part)
        except CheckpointError:
            return None
        if not torch.equal(old.view(torch.int32), new.view(torch.int32)):
            return False
    return True


def _examine_again(temporary: Path, report: Report, done: Sequence[Finding]) -> Report:
    from . import doctor

    after = doctor(temporary, read_weights=not any("bytes" in line for line in report.unchecked))
    known = {(finding.code, finding.layer) for finding in report.findings}
    repaired = {(finding.code, finding.layer) for finding in done}
    worse = [f for f in after.findings if (f.code, f.layer) not in known or (f.code, f.layer) in repaired]
    if worse and worse[0].code != "all-zero":
        raise CheckpointError(f"the repair does not hold: {worse[0].layer} {worse[0].cause}; nothing was written")
    return after
