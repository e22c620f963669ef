"""Which tensor of a model, and which of its rows, a name in a LoRA file means."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..checkpoint.reader import DIFFUSION_PREFIX
from .tables import LAYERS, UNET_LAYERS, UNET_RESNET, Row

Shape = tuple[int, ...]
Span = tuple[int, int]


@dataclass(frozen=True)
class Target:
    """Rows of a layer's weight (or of its bias, or of another tensor).

    Attributes:
        layer: the layer; for a tensor that is no weight, the tensor.
        start, stop: the rows, counted along the first dimension.
        swapped: the two halves of these rows are the other way round in the LoRA.
    """

    layer: str
    start: int
    stop: int
    swapped: bool = False


def _fused(part: int) -> Callable[[Shape], Span]:
    """The query, key or value of a fused ``qkv``.

    The query is as wide as the layer's input; key and value share the rest, and are narrower with grouped queries.
    """

    def span(shape: Shape) -> Span:
        query, key = shape[1], (shape[0] - shape[1]) // 2
        return ((0, query), (query, query + key), (query + key, query + 2 * key))[part]

    return span


PARTS: dict[str, Callable[[Shape], Span]] = {
    "": lambda shape: (0, shape[0]),
    "swap": lambda shape: (0, shape[0]),
    "q": _fused(0),
    "k": _fused(1),
    "v": _fused(2),
    "first half": lambda shape: (0, shape[0] // 2),
    "second half": lambda shape: (shape[0] // 2, shape[0]),
    # Of a layer that computes query, key, value and the input of the MLP at once.
    "1st square": lambda shape: (0, shape[1]),
    "2nd square": lambda shape: (shape[1], 2 * shape[1]),
    "3rd square": lambda shape: (2 * shape[1], 3 * shape[1]),
    "qkv": lambda shape: (0, 3 * shape[1]),
    "mlp": lambda shape: (3 * shape[1], shape[0]),
}
"""``{part: the rows it is, of a weight of this shape}``."""

# What names a layer's place in the model and is no part of its name there.
_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "model.",
)
_KOHYA_PREFIXES = ("lora_unet__", "lora_unet_", "lora_transformer_", "lora_prior_unet_", "lycoris_")
_TEXT_ENCODER = re.compile(r"^(lora_te\d?_|lora_prior_te_|text_encoder(_\d)?\.|text_encoders\.|cond_stage_model\.)")


def for_text_encoder(name: str) -> bool:
    """Whether a name in a LoRA file means a layer of a text encoder."""
    return _TEXT_ENCODER.match(name) is not None


class NameIndex:
    """Finds what a LoRA's names mean.

    Args:
        shapes: ``{tensor name: shape}`` of the model.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._layers = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
        whole = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if shape}
        self._own: dict[str, Target | None] = {}
        self._other: dict[str, Target | None] = {}
        for layer, shape in whole.items():
            target = Target(layer, 0, shape[0])
            bare = layer.removeprefix(DIFFUSION_PREFIX)
            for alias in {layer, bare, bare.removeprefix("decoder.")}:
                _add(self._own, alias, target)
        bare_shapes = {layer.removeprefix(DIFFUSION_PREFIX): layer for layer in self._layers if layer in whole}
        for bare, other, part in _other_names(bare_shapes):
            layer = bare_shapes[bare]
            part_of = _part(layer, whole[layer], part)
            if part_of is not None:
                _add(self._other, other, part_of)
                if other.endswith(".to_out.0"):
                    _add(self._other, other.removesuffix(".0"), part_of)

    def find(self, name: str) -> Target | None:
        """Return what a name means; None if nothing, or if it could mean two layers."""
        for alias in _aliases(name):
            for index in (self._own, self._other):
                found = index.get(alias)
                if found is not None:
                    return found
        return None

    def nearest(self, name: str) -> str:
        """Return the layer whose name is most like that of the LoRA's, in its own spelling; empty if none is."""
        if for_text_encoder(name):
            return ""
        wanted = _aliases(name)[-1].replace(".", "_")
        spelled = {layer.removeprefix(DIFFUSION_PREFIX).replace(".", "_"): layer for layer in self._layers}
        near = difflib.get_close_matches(wanted, spelled, n=1, cutoff=0.4)
        return spelled[near[0]] if near else ""


def _add(index: dict[str, Target | None], alias: str, target: Target) -> None:
    for spelling in {alias, alias.replace(".", "_")}:
        index[spelling] = None if index.get(spelling, target) != target else target


def _part(layer: str, shape: Shape, part: str) -> Target | None:
    if len(shape) < 2 and part not in ("", "swap"):
        return None
    start, stop = PARTS[part](shape)
    if not 0 <= start < stop <= shape[0]:
        return None
    return Target(layer, start, stop, part == "swap")


def _aliases(name: str) -> list[str]:
    """Return the names that a LoRA's layer may have in the model, the most literal first."""
    if for_text_encoder(name):
        return [name]
    aliases = [name]
    for prefix in _KOHYA_PREFIXES:
        if name.startswith(prefix):
            aliases.append(name.removeprefix(prefix))
    stripped = name
    while prefix := next((p for p in _PREFIXES if stripped.startswith(p)), ""):
        stripped = stripped.removeprefix(prefix)
        aliases.append(stripped)
    if ".processor." in stripped:  # the attention processors of older diffusers
        aliases.append(stripped.replace(".processor.", "."))
    return aliases


# ------------------------------------------------------------------ other names


def model_names(other: str) -> list[str]:
    """Return the names that ComfyUI's models may have for a layer that diffusers calls ``other``, U-Nets left out.

    Several models have a table entry for the same name; which is meant, only the model's other layers tell.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", other)
    number = numbers[0] if numbers else ""
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", other, count=1)
    return [ours.replace("*", number) for key in dict.fromkeys((other, pattern)) for ours in _by_other().get(key, ())]


@functools.cache
def _by_other() -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for ours, theirs, _ in LAYERS:
        names.setdefault(theirs, []).append(ours)
    return names


def _other_names(layers: Iterable[str]) -> Iterator[Row]:
    """Yield ``(layer, other name, part)`` for every other name that the tables give the layers of a model."""
    layers = list(layers)
    by_pattern: dict[str, list[tuple[str, str]]] = {}
    for ours, theirs, part in LAYERS:
        by_pattern.setdefault(ours, []).append((theirs, part))
    last = max((int(match[1]) for layer in layers if (match := re.match(r"joint_blocks\.(\d+)\.", layer))), default=-1)
    for layer in layers:
        number = next(iter(re.findall(r"(?<=\.)\d+(?=\.)", layer)), "")
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer, count=1)
        for key in {layer, pattern}:
            for theirs, part in by_pattern.get(key, ()):
                if part == "swap in the last":  # only the last block's has two halves instead of six sixths
                    part = "swap" if number == str(last) else ""
                yield layer, theirs.replace("*", number), part
    if any(layer.startswith("input_blocks.") for layer in layers):
        yield from _unet_names(layers)


def _unet_names(layers: Sequence[str]) -> Iterator[Row]:
    """The names in a U-Net: its blocks are numbered through, diffusers numbers them within each resolution."""
    known = {ours: [theirs for o, theirs, _ in UNET_LAYERS if o == ours] for ours, _, _ in UNET_LAYERS}
    places = {**_places(layers, "input_blocks", "down_blocks"), **_places(layers, "output_blocks", "up_blocks")}
    places |= {
        "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0",
        "middle_block.2": "mid_block.resnets.1",
    }
    for layer in layers:
        for theirs in known.get(layer, ()):
            yield layer, theirs, ""
        match = re.match(r"((?:input_blocks|output_blocks)\.\d+\.\d+|middle_block\.\d+)\.(.+)", layer)
        if match and match[1] in places:
            place = places[match[1]]
            inner = UNET_RESNET.get(match[2]) if ".resnets." in place else match[2]
            if place.endswith("samplers.0"):
                inner = "conv"
            if inner is not None:
                yield layer, f"{place}.{inner}", ""


def _places(layers: Sequence[str], ours: str, theirs: str) -> dict[str, str]:
    """Return ``{"input_blocks.4.1": "down_blocks.1.attentions.0", ...}``."""
    inner: dict[tuple[int, int], set[str]] = {}
    for layer in layers:
        if match := re.match(rf"{ours}\.(\d+)\.(\d+)\.([^.]+)", layer):
            inner.setdefault((int(match[1]), int(match[2])), set()).add(match[3])
    places: dict[str, str] = {}
    level, count = 0, 0
    for block in sorted({block for block, _ in inner} - ({0} if ours == "input_blocks" else set())):
        sampled = False
        for part in sorted(part for other, part in inner if other == block):
            found = inner[block, part]
            if "in_layers" in found:
                kind = f"resnets.{count}"
            elif found & {"op", "conv"}:
                kind, sampled = ("downsamplers.0" if "op" in found else "upsamplers.0"), True
            else:
                kind = f"attentions.{count}"
            places[f"{ours}.{block}.{part}"] = f"{theirs}.{level}.{kind}"
        level, count = (level + 1, 0) if sampled else (level, count + 1)
    return places
