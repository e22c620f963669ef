"""Bakes LoRAs into a model's weights in float, before they are quantized.

Baking first is the most exact way: the LoRA is rounded once, together with the weight, and costs nothing at run time.
``W + strength * alpha / rank * up @ down`` (Hu et al., LoRA, 2021, equation 3).
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from .checkpoint.hashing import FileHash
from .checkpoint.reader import DIFFUSION_PREFIX, Checkpoint, open_checkpoint
from .checkpoint.writer import METADATA_KEY, CheckpointWriter
from .errors import CheckpointError

Progress = Callable[[int, int, str], None]

# The two matrices of a LoRA in the spellings of kohya, PEFT and older diffusers; an adapter's name may come between.
_UP = re.compile(r"\.(lora_up|lora_B|lora\.up|lora_linear_layer\.up)(\.[^.]+)?\.weight$")
_DOWN = re.compile(r"\.(lora_down|lora_A|lora\.down|lora_linear_layer\.down)(\.[^.]+)?\.weight$")
_ALPHA = re.compile(r"\.alpha$")

# Other adapters: another formula, which would be silently wrong if its tensors were skipped.
_OTHER = {
    r"\.(dora_scale|lora_magnitude_vector)(\.|$)": "DoRA",
    r"\.hada_(w1|w2|t1|t2)(_|$)": "LoHa",
    r"\.lokr_(w1|w2|t2)(_|$)": "LoKr",
    r"\.(oft_blocks|oft_diag|oft_R)(\.|$)": "OFT",
    r"\.(a1|a2|b1|b2)\.weight$": "GLoRA",
    r"\.lora_mid(\.|$)": "LoCon with a Tucker core",
    r"\.(diff|diff_b|set_weight|w_norm|b_norm|reshape_weight)$": "a difference of whole weights",
}

# What names a layer's place in the model and is no part of its name there.
_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "model.",
)
_KOHYA_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
_TEXT_ENCODER = re.compile(r"^(lora_te\d?_|lora_prior_te_|text_encoder(_\d)?\.|text_encoders\.|cond_stage_model\.)")


@dataclass(frozen=True)
class LoraPair:
    """The tensors of one layer in one LoRA file, by their names."""

    name: str
    up: str
    down: str
    alpha: str | None


@dataclass
class Unmatched:
    """A layer of a LoRA that the model does not have."""

    file: str
    name: str
    nearest: str

    def __str__(self) -> str:
        near = f"; the nearest name is {self.nearest!r}" if self.nearest else ""
        if _TEXT_ENCODER.match(self.name):
            near = ": it is for a text encoder"
        return f"{self.file}: {self.name!r} matches no weight of the model{near}"


@dataclass
class _Lora:
    path: Path
    strength: float
    checkpoint: Checkpoint
    pairs: list[LoraPair] = field(default_factory=list)


class LoraMerge:
    """LoRAs matched to the weights of a model, ready to be baked in.

    Args:
        checkpoint: the model.
        loras: ``(file, strength)`` each; they are added in this order.

    Attributes:
        layers: the names of the layers that change.
        unmatched: what matches no weight, with the nearest name.
        identity: of the files and strengths, so that an interrupted conversion is not resumed with others.

    Called as ``merge(layer, rows, start)`` it is the ``transform`` of :func:`quant_core.convert.convert`.

    Raises:
        CheckpointError: a file holds no LoRA, another kind of adapter, or shapes that do not fit; or nothing matches.
    """

    def __init__(self, checkpoint: Checkpoint, loras: Sequence[tuple[str | os.PathLike[str], float]]) -> None:
        self.checkpoint = checkpoint
        self._down = lru_cache(maxsize=8)(_read_down)  # of the layers under way, which are asked for run by run
        described: list[str] = []
        self.unmatched: list[Unmatched] = []
        self._by_layer: dict[str, list[tuple[_Lora, LoraPair]]] = defaultdict(list)
        weights = [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")]
        index = _name_index(weights)
        for path, strength in loras:
            lora = _open_lora(Path(path), strength)
            described.append(f"{strength!r} {lora.checkpoint.identity()}")
            matched = 0
            for pair in lora.pairs:
                layer = _match(pair.name, index)
                if layer is None:
                    self.unmatched.append(Unmatched(str(path), pair.name, _nearest(pair.name, weights)))
                    continue
                self._check_shapes(lora, pair, layer)
                self._by_layer[layer].append((lora, pair))
                matched += 1
            if not matched:
                first = next(item for item in self.unmatched if item.file == str(path))
                raise CheckpointError(f"none of its {len(lora.pairs)} layers fits {checkpoint.path}. {first}")
        self.layers = [layer for layer in weights if layer in self._by_layer]
        self.identity = "; ".join(described)

    def applies_to(self, layer: str) -> bool:
        """Whether a LoRA changes this layer's weight."""
        return layer in self._by_layer

    def __call__(self, layer: str, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return some rows of a layer's weight with every LoRA added. May be called by several threads.

        Args:
            layer: its name in the model.
            rows: float32, the rows from ``start`` on; not changed.
            start: index of the first one.

        Returns:
            float32 of the same shape; ``rows`` itself where no LoRA changes the layer.
        """
        parts = self._by_layer.get(layer)
        if not parts:
            return rows
        merged = rows.reshape(rows.shape[0], -1).clone()
        for lora, pair in parts:
            up = lora.checkpoint.read_rows(pair.up, start, start + rows.shape[0]).float()
            down, scale = self._down(lora.checkpoint, pair)
            up = up.reshape(up.shape[0], -1).to(merged.device)
            merged.addmm_(up, down.to(merged.device), alpha=lora.strength * scale)
        return merged.reshape(rows.shape)

    def _check_shapes(self, lora: _Lora, pair: LoraPair, layer: str) -> None:
        weight = self.checkpoint.tensors[layer + ".weight"]
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.checkpoint.path}: layer {layer!r} is stored as {str(weight.dtype).removeprefix('torch.')}: a "
                "LoRA is baked into float weights. Start from the float file"
            )
        up, down = lora.checkpoint.tensors[pair.up].shape, lora.checkpoint.tensors[pair.down].shape
        fits = (
            min(len(up), len(down), len(weight.shape)) >= 2
            and math.prod(up[1:]) == down[0] > 0
            and up[0] == weight.shape[0]
            and math.prod(down[1:]) == math.prod(weight.shape[1:])
        )
        if not fits:
            raise CheckpointError(
                f"{lora.path}: {pair.name!r} is {list(up)} x {list(down)}, the weight of {layer!r} in "
                f"{self.checkpoint.path} is {list(weight.shape)}: the LoRA is for another model"
            )


def _read_down(checkpoint: Checkpoint, pair: LoraPair) -> tuple[torch.Tensor, float]:
    """Return the down matrix ``[rank, in_features]`` as float32, and alpha / rank."""
    down = checkpoint.read(pair.down).float()
    down = down.reshape(down.shape[0], -1)
    rank = down.shape[0]
    alpha = rank if pair.alpha is None else float(checkpoint.read(pair.alpha).float().reshape(-1)[0])
    return down, alpha / rank


def merged_weight(checkpoint: Checkpoint, layer: str, merge: LoraMerge) -> torch.Tensor:
    """Return one weight with its LoRAs, in the dtype that the file stores it in; for layers that stay float."""
    weight = checkpoint.read(layer + ".weight")
    return merge(layer, weight.float()).to(weight.dtype)


def merge_lora(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    loras: Sequence[tuple[str | os.PathLike[str], float]],
    *,
    progress: Progress | None = None,
) -> tuple[LoraMerge, FileHash]:
    """Write a copy of a float model with LoRAs baked in; every weight keeps its dtype, every other tensor its bytes.

    Args:
        source: the model.
        destination: the safetensors file to write; it appears when it is complete.
        loras: ``(file, strength)`` each.
        progress: called as ``progress(tensors done, tensors in all, name)``.

    Returns:
        The matched LoRAs, and the hash of the file.

    Raises:
        CheckpointError: see :class:`LoraMerge`.
        ValueError: destination and source are the same file.
    """
    checkpoint, destination = open_checkpoint(source), Path(destination)
    if destination.exists() and any(file.samefile(destination) for file in checkpoint.files):
        raise ValueError(f"{destination} is the source itself; write to another name")
    merge = LoraMerge(checkpoint, loras)
    layout = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    changed = {layer + ".weight" for layer in merge.layers}
    # A manifest's checksums are those of the weights before.
    metadata = {key: value for key, value in checkpoint.metadata.items() if key != METADATA_KEY}
    with CheckpointWriter(destination, layout, metadata, None) as writer:
        for done, name in enumerate(layout):
            if progress is not None:
                progress(done, len(layout), name)
            if name in changed:
                writer.write(name, merged_weight(checkpoint, name.removesuffix(".weight"), merge))
            else:
                writer.write(name, checkpoint.read(name))
    assert writer.hash is not None
    return merge, writer.hash


# ------------------------------------------------------------------ reading


def _open_lora(path: Path, strength: float) -> _Lora:
    if not math.isfinite(strength):
        raise ValueError(f"{path}: the strength of a LoRA is a number, got {strength}")
    lora = _Lora(path, strength, open_checkpoint(path))
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in lora.checkpoint.tensors:
        kind = next((kind for pattern, kind in _OTHER.items() if re.search(pattern, name)), None)
        if kind is not None:
            raise CheckpointError(
                f"{path}: {name!r} belongs to {kind}, which is not a plain LoRA and is not baked here. Convert it to a "
                "LoRA, or merge it with the tool that it was trained with"
            )
        for part, pattern in (("up", _UP), ("down", _DOWN), ("alpha", _ALPHA)):
            if match := pattern.search(name):
                found[name[: match.start()]][part] = name
    for name, parts in found.items():
        if "up" in parts and "down" in parts:
            lora.pairs.append(LoraPair(name, parts["up"], parts["down"], parts.get("alpha")))
        elif "up" in parts or "down" in parts:
            there, missing = ("up", "down") if "up" in parts else ("down", "up")
            raise CheckpointError(
                f"{path}: {parts[there]!r} has no {missing} matrix beside it; download the file again"
            )
    if not lora.pairs:
        first = ", ".join(list(lora.checkpoint.tensors)[:3]) or "none"
        raise CheckpointError(f"{path} holds no LoRA: no pair of up and down matrices among its tensors ({first})")
    return lora


# ------------------------------------------------------------------ matching


def _name_index(layers: Iterable[str]) -> dict[str, str | None]:
    """Map every way to name a layer to the layer; None where two layers share one."""
    index: dict[str, str | None] = {}
    for layer in layers:
        bare = layer.removeprefix(DIFFUSION_PREFIX)
        for alias in {layer, bare, layer.replace(".", "_"), bare.replace(".", "_")}:
            index[alias] = None if index.get(alias, layer) != layer else layer
    return index


def _match(name: str, index: dict[str, str | None]) -> str | None:
    return next((index[alias] for alias in _aliases(name) if index.get(alias)), None)


def _aliases(name: str) -> list[str]:
    """Return the names that a LoRA's layer may have in the model, the most literal first."""
    if _TEXT_ENCODER.match(name):
        return [name]
    aliases = [name]
    for prefix in _KOHYA_PREFIXES:
        if name.startswith(prefix):
            aliases.append(name.removeprefix(prefix))
    stripped = name
    while prefix := next((p for p in _PREFIXES if stripped.startswith(p)), ""):
        stripped = stripped.removeprefix(prefix)
        aliases.append(stripped)
    return aliases


def _nearest(name: str, layers: Sequence[str]) -> str:
    """Return the layer whose name is most like that of the LoRA's, in its own spelling."""
    wanted = _aliases(name)[-1].replace(".", "_")
    spelled = {layer.removeprefix(DIFFUSION_PREFIX).replace(".", "_"): layer for layer in layers}
    near = difflib.get_close_matches(wanted, spelled, n=1, cutoff=0.4)
    return spelled[near[0]] if near else ""
