"""Measures a quantized file against the float file it was made from, layer by layer.

The weights are read back by the decoders of :mod:`quant_core.checkpoint.formats`, which are written from the formats
alone and share no code with what quantized them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .checkpoint.formats import StoredLayer, dequantize_layer, stored_layers
from .checkpoint.reader import DIFFUSION_PREFIX, Checkpoint, open_checkpoint
from .errors import CheckpointError

Progress = Callable[[int, int, str], None]

_TILE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class VerifyRow:
    """One quantized layer against the source.

    Attributes:
        name: the layer, as in the quantized file.
        family, format: how it is stored.
        shape: of the float weight.
        relative_error: Frobenius norm of the difference over that of the source; infinite where the
            layer holds NaN, or the source is 0 and the layer is not.
        max_error: the largest absolute difference of a weight.
    """

    name: str
    family: str
    format: str
    shape: tuple[int, ...]
    relative_error: float
    max_error: float


@dataclass
class VerifyReport:
    """The result of :func:`verify`.

    Attributes:
        path, source: the two files.
        rows: the quantized layers, in the order of the file.
        identical: how many other tensors are the same bytes in both.
        changed: other tensors whose dtype, shape or bytes differ.
        missing: tensors of the source that the file does not have.
        added: tensors and layers of the file that the source does not have.
    """

    path: str
    source: str
    rows: list[VerifyRow] = field(default_factory=list)
    identical: int = 0
    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def worst(self) -> VerifyRow | None:
        """The row with the largest relative error."""
        return max(self.rows, key=lambda row: row.relative_error, default=None)

    def problems(self, max_error: float | None = None) -> list[str]:
        """Return a sentence for everything that is not as a quantized copy of the source should be.

        Args:
            max_error: also name the layers whose relative error is above this.
        """
        limit = math.inf if max_error is None else max_error
        problems = [
            f"layer {row.name!r} ({row.format}) has a relative error of {row.relative_error:.2%}"
            + ("" if max_error is None else f", more than {max_error:.2%}")
            for row in self.rows
            if not row.relative_error < math.inf or row.relative_error > limit
        ]
        for names, what in (
            (self.changed, "differ from the source without being quantized"),
            (self.missing, "are in the source and not in the file"),
            (self.added, "are in the file and not in the source"),
        ):
            if names:
                problems.append(f"{len(names)} tensors {what}, first {names[0]!r}")
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data; an infinite error, which JSON has no number for, is None."""
        data = asdict(self)
        for row in data["rows"]:
            for key in ("relative_error", "max_error"):
                row[key] = row[key] if math.isfinite(row[key]) else None
        return data


def verify(
    path: str | os.PathLike[str], source: str | os.PathLike[str], *, progress: Progress | None = None
) -> VerifyReport:
    """Compare a quantized file with its source; memory holds a tile of about a million weights of each.

    Args:
        path: the quantized file.
        source: the float file it was made from; if it is quantized itself, its weights are dequantized too. Names with
            and without ``model.diffusion_model.`` are taken for the same.
        progress: called as ``progress(layers done, layers in all, layer name)``.

    Raises:
        FileNotFoundError, CheckpointError: one of the files cannot be read, or a layer's shapes do not fit.
    """
    checkpoint, original = open_checkpoint(path), open_checkpoint(source)
    layers, original_layers = stored_layers(checkpoint), stored_layers(original)
    report = VerifyReport(str(path), str(source))
    names = _Names(original)
    seen: set[str] = set()
    for done, layer in enumerate(layers.values()):
        if progress is not None:
            progress(done, len(layers), layer.name)
        stored = original_layers.get(names.layer(layer.name) or "")
        weight = names.tensor(f"{layer.name}.weight")
        if stored is None and weight is None:
            report.added.append(layer.name)
            continue
        seen.update((weight,) if stored is None and weight is not None else stored.keys if stored else ())
        report.rows.append(_measure(checkpoint, layer, original, stored, weight or ""))
    _compare_kept(checkpoint, original, names, {key for layer in layers.values() for key in layer.keys}, seen, report)
    checkpoint.check_unchanged()
    original.check_unchanged()
    return report


class _Names:
    """Finds a name of the file in the source, with or without the prefix of a full checkpoint."""

    def __init__(self, source: Checkpoint) -> None:
        self._tensors = set(source.tensors)
        self._layers = {name.rpartition(".")[0] for name in source.tensors}
        self._layers |= {name.partition(".weight.")[0] for name in source.tensors}

    def tensor(self, name: str) -> str | None:
        return self._find(name, self._tensors)

    def layer(self, name: str) -> str | None:
        return self._find(name, self._layers)

    @staticmethod
    def _find(name: str, known: set[str]) -> str | None:
        candidates = (name, DIFFUSION_PREFIX + name, name.removeprefix(DIFFUSION_PREFIX))
        return next((candidate for candidate in candidates if candidate in known), None)


def _measure(
    checkpoint: Checkpoint, layer: StoredLayer, original: Checkpoint, stored: StoredLayer | None, weight: str
) -> VerifyRow:
    shape = original.tensors[weight].shape if stored is None else stored.shape
    if tuple(shape) != tuple(layer.shape):
        raise CheckpointError(
            f"{checkpoint.path}: layer {layer.name!r} stands for {list(layer.shape)}, in {original.path} it is "
            f"{list(shape)}: the files belong to different models"
        )
    step = max(1, _TILE_ELEMENTS // max(1, math.prod(layer.shape[1:])))
    squares = norm = largest = 0.0
    for start in range(0, layer.shape[0], step):
        stop = min(start + step, layer.shape[0])
        ours = dequantize_layer(checkpoint, layer, slice(start, stop))
        if stored is None:
            reference = original.read_rows(weight, start, stop).float()
        else:
            reference = dequantize_layer(original, stored, slice(start, stop))
        norm += _sum_of_squares(reference)
        difference = ours.sub_(reference)
        squares += _sum_of_squares(difference)
        if difference.numel():
            low, high = torch.aminmax(difference)
            largest = max(largest, -float(low), float(high))
    ratio = squares / norm if norm else (math.inf if squares else 0.0)
    error = math.sqrt(ratio) if math.isfinite(ratio) else math.inf
    largest = math.inf if math.isnan(squares) else largest
    return VerifyRow(layer.name, layer.family, layer.format, tuple(layer.shape), error, largest)


def _sum_of_squares(rows: torch.Tensor) -> float:
    """Row by row in float32, and the rows in float64: a row is short enough, and it is a tenth of the time."""
    return float(torch.linalg.vector_norm(rows.flatten(1), dim=1).double().square().sum())


def _compare_kept(
    checkpoint: Checkpoint, original: Checkpoint, names: _Names, ours: set[str], seen: set[str], report: VerifyReport
) -> None:
    for name in checkpoint.tensors:
        if name in ours:
            continue
        there = names.tensor(name)
        if there is None:
            report.added.append(name)
            continue
        seen.add(there)
        if _same_bytes(checkpoint, name, original, there):
            report.identical += 1
        else:
            report.changed.append(name)
    report.missing = [name for name in original.tensors if name not in seen]


def _same_bytes(checkpoint: Checkpoint, name: str, original: Checkpoint, there: str) -> bool:
    ours, theirs = checkpoint.tensors[name], original.tensors[there]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    if not ours.shape or not ours.nbytes:
        return _bytes(checkpoint.read(name)) == _bytes(original.read(there))
    step = max(1, (4 * _TILE_ELEMENTS) // max(1, ours.nbytes // ours.shape[0]))
    for start in range(0, ours.shape[0], step):
        stop = min(start + step, ours.shape[0])
        if _bytes(checkpoint.read_rows(name, start, stop)) != _bytes(original.read_rows(there, start, stop)):
            return False
    return True


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
