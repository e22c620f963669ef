"""LoRAs matched to the weights of a model: what they add to any rows of any of them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import CheckpointError
from ..pipeline import MAX_WORKERS
from .adapters import Adapter, Factors, read_adapters
from .names import NameIndex, Target, for_text_encoder

_EPS = torch.finfo(torch.float32).eps


@dataclass
class Unmatched:
    """A layer of a LoRA that the model does not have, or a tensor that belongs to no adapter."""

    file: str
    name: str
    nearest: str
    tensor: bool = False

    def __str__(self) -> str:
        if self.tensor:
            return (
                f"{self.file}: tensor {self.name!r} belongs to no kind of adapter that is known here, and is not used"
            )
        near = f"; the nearest name is {self.nearest!r}" if self.nearest else ""
        if for_text_encoder(self.name):
            near = ": it is for a text encoder"
        return f"{self.file}: {self.name!r} matches no weight of the model{near}"


@dataclass(frozen=True)
class _Patch:
    """One adapter on some rows of one tensor."""

    adapter: Adapter
    target: Target
    strength: float

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(first row, last row + 1, the adapter's first row)`` for its share of the rows of the tensor."""
        target = self.target
        half = (target.stop - target.start) // 2
        middle = target.start + half
        spans = [(target.start, target.stop, 0)]
        if target.swapped:
            spans = [(target.start, middle, half), (middle, target.stop, 0)]
        for first, last, source in spans:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield low, high, source + low - first


class LoraMerge:
    """LoRAs matched to the weights of a model, ready to be baked in.

    Args:
        checkpoint: the model, or ``{tensor name: shape}`` of one in memory, named as ComfyUI names it.
        loras: ``(file, strength)`` each; they are added in this order.

    Attributes:
        layers: the layers whose weight changes.
        others: other tensors that change: biases, and parameters that are no weight.
        unmatched: what matches no weight, with the nearest name, and what could not be read.
        identity: of the files and strengths, so that an interrupted conversion is not resumed with others.

    Called as ``merge(layer, rows, start)`` it is the ``transform`` of :func:`quant_core.convert.convert`.

    Raises:
        CheckpointError: a file holds no LoRA, an adapter that is not baked, or shapes that do not fit; or nothing
            matches.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | Mapping[str, Sequence[int]],
        loras: Sequence[tuple[str | os.PathLike[str], float]],
    ) -> None:
        if isinstance(checkpoint, Checkpoint):
            self.model = str(checkpoint.path)
            self._shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
        else:
            self.model = "the model"
            self._shapes = {name: tuple(shape) for name, shape in checkpoint.items()}
        self.unmatched: list[Unmatched] = []
        self._stored = checkpoint if isinstance(checkpoint, Checkpoint) else None
        self._patches: dict[str, list[_Patch]] = defaultdict(list)
        index = NameIndex(self._shapes)
        described = [self._match(Path(path), strength, index) for path, strength in loras]
        # Layers are asked for run of rows by run of rows: those of the layers under way stay.
        most = max(map(len, self._patches.values()), default=1)
        self._load = lru_cache(maxsize=MAX_WORKERS * most)(_load)
        self.layers = [name[:-7] for name in self._shapes if name.endswith(".weight") and name[:-7] in self._patches]
        self.others = [name for name in self._shapes if not name.endswith(".weight") and name in self._patches]
        self.identity = "; ".join(described)

    def applies_to(self, layer: str) -> bool:
        """Whether a LoRA changes this layer's weight, or this tensor if it is no weight."""
        return layer in self._patches

    def __call__(self, layer: str, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return some rows of a layer's weight with every LoRA added. May be called by several threads.

        Args:
            layer: its name in the model; for a bias or another tensor the tensor's own name.
            rows: float32, the rows from ``start`` on, on any device; not changed.
            start: index of the first one.

        Returns:
            float32 of the same shape; ``rows`` itself where no LoRA changes the layer.
        """
        patches = self._patches.get(layer)
        if not patches:
            return rows
        merged = rows.reshape(rows.shape[0], -1).clone()
        for patch in patches:
            for low, high, source in patch.pieces(start, start + rows.shape[0]):
                part = merged[low - start : high - start]
                factors, magnitudes = self._load(patch.adapter, merged.device)
                change = patch.adapter.rows(factors, source, source + high - low).to(merged.device)
                if magnitudes is not None:
                    change = _decomposed(part, change, magnitudes[source : source + high - low]) - part
                part.add_(change, alpha=patch.strength)
        return merged.reshape(rows.shape)

    # ------------------------------------------------------------------ matching

    def _match(self, path: Path, strength: float, index: NameIndex) -> str:
        """Match one file; return what it is, for resuming."""
        if not math.isfinite(strength):
            raise ValueError(f"{path}: the strength of a LoRA is a number, got {strength}")
        file = open_checkpoint(path)
        adapters, unread = read_adapters(file)
        unmatched: list[Unmatched] = []
        for adapter in adapters:
            target = self._target(adapter, index)
            if target is None:
                unmatched.append(Unmatched(str(path), adapter.name, index.nearest(adapter.name)))
            else:
                self._check(adapter, target)
                self._patches[target.layer].append(_Patch(adapter, target, strength))
        if len(unmatched) == len(adapters):
            raise CheckpointError(f"none of its {len(adapters)} layers fits {self.model}. {unmatched[0]}")
        self.unmatched += unmatched + [Unmatched(str(path), name, "", True) for name in unread]
        return f"{strength!r} {file.identity()}"

    def _target(self, adapter: Adapter, index: NameIndex) -> Target | None:
        target = index.find(adapter.name)
        if target is None or not adapter.bias:
            return target
        bias = f"{target.layer}.bias"
        if bias not in self._shapes:
            return None
        # What is a part of the weight's rows is the same part of the bias.
        return Target(bias, target.start, target.stop, target.swapped)

    def _check(self, adapter: Adapter, target: Target) -> None:
        tensor = target.layer if target.layer in self._shapes else target.layer + ".weight"
        shape, file = self._shapes[tensor], adapter.checkpoint.path
        dtype = None if self._stored is None else self._stored.tensors[tensor].dtype
        if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise CheckpointError(
                f"{self.model}: layer {target.layer!r} is stored as {str(dtype).removeprefix('torch.')}: a "
                "LoRA is baked into float weights. Start from the float file"
            )
        rows = target.stop - target.start
        if adapter.shape != (rows, math.prod(shape[1:])):
            part = "" if rows == shape[0] else f" (rows {target.start} to {target.stop} of it)"
            raise CheckpointError(
                f"{file}: {adapter.name!r} is a {adapter.describe()}, {tensor!r} in {self.model} is "
                f"{list(shape)}{part}: the LoRA is for another model"
            )


def _load(adapter: Adapter, device: torch.device) -> tuple[Factors, torch.Tensor | None]:
    """Read an adapter's factors, and the magnitudes of DoRA as a column, if it has them."""
    factors = tuple(factor.to(device) for factor in adapter.load())
    if not adapter.dora_scale:
        return factors, None
    return factors, adapter.checkpoint.read(adapter.dora_scale).float().reshape(-1, 1).to(device)


def _decomposed(weight: torch.Tensor, change: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return rows of the weight of DoRA (Liu et al., 2024, equation 5), with the norm of each row of ``weight``.

    The paper divides by the norm of ``weight + change``; ComfyUI (comfy/weight_adapter/base.py weight_decompose)
    divides by that of ``weight``, and so do we, for the file to do here what it does there.
    """
    return (weight + change) * (magnitudes / (weight.norm(dim=1, keepdim=True) + _EPS))
