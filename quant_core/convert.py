"""Quantizes a checkpoint file to file, one layer at a time.

Reads the headers, decides for every weight, lays out the new file from empty shells, then reads, quantizes and
writes layer by layer: peak memory is one layer, whatever the size of the model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .backend import QuantBackend
from .checkpoint.hashing import FileHash
from .checkpoint.header import TensorInfo
from .checkpoint.manifest import make_manifest, read_manifest
from .checkpoint.reader import Checkpoint, open_checkpoint
from .checkpoint.recognize import recognize_layers
from .checkpoint.writer import CheckpointWriter, writable_file
from .config import QuantizeConfig
from .constraints import violations
from .errors import CheckpointError, QuantizationError
from .measure import relative_error
from .replace import check_device, unquantizable_values
from .selection import Decision, choose_layers, layer_weights, read_by_detection
from .sites import FLOAT_WEIGHTS, name_matches

Progress = Callable[[int, int, str], None]


@dataclass
class LayerRow:
    """What became of one ``*.weight``."""

    name: str
    shape: tuple[int, ...]
    method: str  # empty when it was kept
    reason: str
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None


@dataclass
class ConversionReport:
    """The result of :func:`convert_file`."""

    source: str
    destination: str
    method: str
    rows: list[LayerRow]
    bytes_before: int
    bytes_after: int = 0
    hash: FileHash | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[LayerRow]:
        return [row for row in self.rows if row.method]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data."""
        data = asdict(self)
        data["hash"] = None if self.hash is None else {"structure": self.hash.structure, "content": self.hash.content}
        return data


def choose(
    tensors: dict[str, TensorInfo], config: QuantizeConfig, halves_width: bool
) -> tuple[dict[str, Decision], dict[str, torch.dtype]]:
    """Decide for every weight of a checkpoint.

    Args:
        tensors: the checkpoint's.
        config: its ``target_modules`` replace the choice by structure, its ``exclude_modules`` apply to either.
        halves_width: the format packs two weights a byte along the width (see ``read_by_detection``).

    Raises:
        ValueError: an entry matches no weight, a target cannot be quantized, or nothing is left to quantize.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    weights = layer_weights(shapes)
    dtypes = {layer: tensors[layer + ".weight"].dtype for layer in weights}
    for title, entries in (("target", config.target_modules), ("exclude", config.exclude_modules)):
        for entry in entries or ():
            if not any(name_matches(layer, [entry]) for layer in weights):
                raise ValueError(
                    f"{title} {entry!r} matches no weight of the file; an entry is a layer name or its end"
                )
    decisions = choose_layers(shapes)
    constraints = config.backend.constraints()
    for layer, decision in decisions.items():
        shape = weights[layer]
        targeted = config.target_modules is not None and name_matches(layer, config.target_modules)
        if name_matches(layer, config.exclude_modules or ()):
            decisions[layer] = Decision(False, "excluded by rule")
            continue
        if config.target_modules is not None:
            decision = Decision(targeted, "in the target list" if targeted else "not in the target list")
        if decision.quantize:
            decision = _check_fit(layer, shape, dtypes[layer], constraints, halves_width, decision)
        if targeted and not decision.quantize:
            raise ValueError(f"target layer {layer!r} {list(shape)} cannot be quantized: {decision.reason}")
        decisions[layer] = decision
    if not any(d.quantize for d in decisions.values()):
        reasons = sorted({d.reason for d in decisions.values()})
        raise ValueError(
            f"no weight of the file is quantized ({'; '.join(reasons) or 'it has no *.weight'}); "
            "name the layers to quantize as targets"
        )
    return decisions, dtypes


def _check_fit(
    layer: str, shape: tuple[int, ...], dtype: torch.dtype, constraints: Any, halves_width: bool, decision: Decision
) -> Decision:
    if len(shape) != 2:
        return Decision(False, f"not a Linear ({len(shape)}-D weight)")
    if 0 in shape:
        return Decision(False, "no elements")
    if dtype not in FLOAT_WEIGHTS:
        return Decision(False, f"stored as {str(dtype).removeprefix('torch.')}, not a float weight")
    misfits = violations(constraints, in_features=shape[1], out_features=shape[0])
    if misfits:
        return Decision(False, "; ".join(misfits))
    if halves_width and read_by_detection(layer):
        return Decision(
            False, "its width is read by ComfyUI's architecture detection, which a packed format would halve"
        )
    return decision


def convert_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    config: QuantizeConfig,
    *,
    compute_device: torch.device | str | None = None,
    measure: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Quantize the checkpoint ``source`` into the safetensors file ``destination``.

    Weights that are not quantized, and everything else in the file, are copied byte for byte in their own dtype.

    Args:
        source: a safetensors file, an index, or a folder of shards.
        destination: the file to write; it appears when it is complete.
        config: method, options, and which layers (None: chosen by structure, see :mod:`quant_core.selection`).
        compute_device: where to quantize; None means the CPU.
        measure: also dequantize each layer and report its relative weight error.
        progress: called as ``progress(bytes done, bytes in all, layer name)``.

    Raises:
        FileNotFoundError, CheckpointError: the source cannot be read, or is quantized already.
        ValueError: the choice of layers is not possible, or destination and source are the same file.
        QuantizationError: a layer failed; the message names it. Nothing is left under the destination's name.
        OSError: the disk is full.
    """
    check_device("compute_device", compute_device)
    checkpoint = open_checkpoint(source)
    destination = Path(destination)
    _check_destination(checkpoint, destination)
    _check_not_quantized(checkpoint)
    shell_bits = _bytes_per_weight(config.backend)
    decisions, dtypes = choose(checkpoint.tensors, config, halves_width=shell_bits < 1)
    chosen = [layer for layer, d in decisions.items() if d.quantize]

    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    states: dict[str, list[str]] = {}
    metadata = {k: v for k, v in checkpoint.metadata.items() if k != "format"}
    pending: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        layer = name.removesuffix(".weight")
        if not name.endswith(".weight") or not decisions[layer].quantize:
            layout[name] = (info.dtype, info.shape)
            continue
        flat, extra = _planned_tensors(config.backend, layer, info)
        states[layer] = list(flat)
        layout.update({key: (t.dtype, tuple(t.shape)) for key, t in flat.items()})
        _merge_metadata(pending, extra)
    _check_space(destination, sum(_size(*entry) for entry in layout.values()))

    rows = _rows(checkpoint, decisions, states, layout, config.method)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    report = ConversionReport(str(source), str(destination), config.method, rows, total)
    by_name = {row.name: row for row in rows}
    manifest = make_manifest(config.to_dict(), [chosen], {"name": checkpoint.path.name, "bytes": total})
    done = 0
    with CheckpointWriter(destination, layout, {"format": "pt", **metadata, **pending}, manifest) as writer:
        for name, info in checkpoint.tensors.items():
            layer = name.removesuffix(".weight")
            if layer in states and name.endswith(".weight"):
                error = _convert_layer(checkpoint, layer, config, compute_device, writer, measure)
                by_name[layer].relative_error = error
            else:
                writer.write(name, checkpoint.read(name))
            done += info.nbytes
            if progress is not None:
                progress(done, total, layer)
    report.hash = writer.hash
    report.bytes_after = destination.stat().st_size
    return report


def _convert_layer(
    checkpoint: Checkpoint,
    layer: str,
    config: QuantizeConfig,
    device: torch.device | str | None,
    writer: CheckpointWriter,
    measure: bool,
) -> float | None:
    weight = checkpoint.read(layer + ".weight")
    problem = unquantizable_values(weight)
    if problem:
        raise QuantizationError(f"{checkpoint.path}: layer {layer!r} {problem}; exclude it, or repair the file")
    linear = _linear(weight)
    try:
        quantized = config.backend.create_quantized_linear(linear, device, None)
    except Exception as error:
        raise QuantizationError(f"{checkpoint.path}: layer {layer!r} {list(weight.shape)}: {error}") from error
    flat, _ = _flatten(config.backend, layer, quantized)
    for key, tensor in flat.items():
        writer.write(key, tensor)
    if not measure:
        return None
    restored = config.backend.dequantize_to_linear(quantized, torch.float32).weight
    return relative_error(weight, restored.detach().cpu())


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _flatten(backend: QuantBackend, layer: str, module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return backend.flatten_state_dict({f"{layer}.{key}": value for key, value in module.state_dict().items()})


def _planned_tensors(
    backend: QuantBackend, layer: str, info: TensorInfo
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and metadata that a layer will be stored as, from an empty shell."""
    linear = nn.Linear(info.shape[1], info.shape[0], bias=False, device="meta", dtype=info.dtype)
    return _flatten(backend, layer, backend.create_quantized_linear_shell(linear, info.dtype))


def _bytes_per_weight(backend: QuantBackend) -> float:
    """Bytes a weight of the packed ``weight`` tensor takes; below 1 the stored width is not the layer's."""
    shell = backend.create_quantized_linear_shell(nn.Linear(1024, 1024, bias=False, device="meta"), torch.bfloat16)
    flat, _ = _flatten(backend, "l", shell)
    return max(t.numel() * t.element_size() for t in flat.values()) / 1024**2


def _merge_metadata(into: dict[str, str], extra: dict[str, str]) -> None:
    import json

    for key, value in extra.items():
        if key == "tensor_names" and key in into:
            value = json.dumps(json.loads(into[key]) + json.loads(value))
        into[key] = value


def _size(dtype: torch.dtype, shape: Sequence[int]) -> int:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size


def _rows(
    checkpoint: Checkpoint,
    decisions: dict[str, Decision],
    states: dict[str, list[str]],
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    method: str,
) -> list[LayerRow]:
    rows = []
    for layer, decision in decisions.items():
        info = checkpoint.tensors[layer + ".weight"]
        after = sum(_size(*layout[key]) for key in states.get(layer, [layer + ".weight"]))
        chosen = method if decision.quantize else ""
        rows.append(LayerRow(layer, info.shape, chosen, decision.reason, info.nbytes, after))
    return rows


def _check_destination(checkpoint: Checkpoint, destination: Path) -> None:
    destination = writable_file(destination)
    if destination.exists() and any(file.samefile(destination) for file in checkpoint.files):
        raise ValueError(f"{destination} is the source itself; write to another name")


def _check_not_quantized(checkpoint: Checkpoint) -> None:
    quantized = read_manifest(checkpoint.path, checkpoint.metadata) is not None or bool(recognize_layers(checkpoint))
    if quantized or any(name.endswith("scaled_fp8") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path} is quantized already; quantizing it again would add a second error. "
            "Start from the float file (`inspect` shows how it is quantized)"
        )


def _check_space(destination: Path, needed: int) -> None:
    folder = destination.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(28, f"{destination} needs {needed:,} bytes, {folder} has {free:,} bytes free")
