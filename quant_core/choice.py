"""Decides for every weight of a checkpoint whether a recipe quantizes it, with which of its methods, and why (not)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from .checkpoint.header import TensorInfo
from .config import QuantizeConfig, Recipe
from .constraints import violations
from .selection import Decision, Reason, choose_layers, layer_weights, read_by_detection
from .sites import FLOAT_WEIGHTS, name_endings, name_matches

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One ``*.weight``: its float shape and dtype, and whether the source holds it quantized (and it is to stay so)."""

    shape: Shape
    dtype: torch.dtype
    quantized: bool = False


@dataclass(frozen=True)
class Choice:
    """The decision for one weight, and the part of the recipe that quantizes it."""

    decision: Decision
    part: QuantizeConfig | None = None


def choose(
    tensors: Mapping[str, TensorInfo], config: QuantizeConfig, halves_width: bool
) -> tuple[dict[str, Decision], dict[str, torch.dtype]]:
    """Decide for every weight of a float checkpoint.

    Args:
        tensors: the checkpoint's.
        config: its ``target_modules`` replace the choice by structure, its ``exclude_modules`` apply to either.
        halves_width: the format packs two weights a byte along the width (see ``read_by_detection``).

    Returns:
        ``({layer: Decision}, {layer: dtype of its weight})``.

    Raises:
        ValueError: an entry matches no weight, a target cannot be quantized, or nothing is left to quantize.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    weights = {layer: Weight(shape, tensors[layer + ".weight"].dtype) for layer, shape in layer_weights(shapes).items()}
    choices = choose_weights(weights, config, choose_layers(shapes), lambda part: halves_width)
    return (
        {layer: choice.decision for layer, choice in choices.items()},
        {layer: weight.dtype for layer, weight in weights.items()},
    )


def choose_weights(
    weights: Mapping[str, Weight],
    recipe: Recipe,
    by_structure: Mapping[str, Decision],
    halves_width: Callable[[QuantizeConfig], bool],
) -> dict[str, Choice]:
    """Decide for every weight.

    Args:
        weights: ``{layer: Weight}``.
        recipe: parts without targets take what ``by_structure`` says.
        by_structure: a decision for every layer.
        halves_width: says of a part whether its format stores half the width.

    Raises:
        ValueError: an entry matches no weight, a target cannot be quantized, two parts claim one layer, or nothing is
            left to quantize.
    """
    parts = recipe.parts()
    for part in parts:
        _check_entries(part, weights)
    choices = {
        layer: _choose(layer, weight, parts, by_structure[layer], halves_width) for layer, weight in weights.items()
    }
    if not any(choice.decision.quantize for choice in choices.values()):
        reasons = sorted({choice.decision.reason for choice in choices.values()})
        hint = "name the layers to quantize as targets"
        if any(choice.decision.why is Reason.QUANTIZED for choice in choices.values()):
            hint = "start from the float file, or ask for it with requantize (which adds a second error)"
        raise ValueError(
            f"no weight of the file is quantized ({'; '.join(reasons[:6]) or 'it has no *.weight'}); {hint}"
        )
    return choices


def _check_entries(part: QuantizeConfig, weights: Mapping[str, Weight]) -> None:
    matched = {ending for layer in weights for ending in name_endings(layer)}
    for title, entries in (("target", part.target_modules), ("exclude", part.exclude_modules)):
        for entry in entries or ():
            if entry not in matched:
                raise ValueError(f"{title} {entry!r} matches no weight of the file; {_hint(entry, weights, matched)}")


def _hint(entry: str, layers: Iterable[str], matched: Container[str]) -> str:
    bare = entry.removesuffix(".weight")
    if bare in matched:
        return f"leave out .weight: {bare!r} does"
    inside = next((layer for layer in layers if f".{bare}." in f".{layer}"), "")
    if inside:
        return f"it is a part of the model, not a layer; name the layers in it, such as {inside!r}, or ends of names"
    return "an entry is a layer name or its end"


def _choose(
    layer: str,
    weight: Weight,
    parts: list[QuantizeConfig],
    structure: Decision,
    halves_width: Callable[[QuantizeConfig], bool],
) -> Choice:
    claims = [p for p in parts if p.matches(layer) and (p.target_modules is not None or structure.quantize)]
    if len(claims) > 1:
        raise ValueError(
            f"layer {layer!r} is selected by more than one config ({' and '.join(p.method for p in claims)}); "
            "exclude it from all but one with exclude_modules"
        )
    if not claims:
        if structure.why is Reason.PRESET:
            return Choice(structure)
        if any(name_matches(layer, p.exclude_modules or ()) for p in parts):
            return Choice(Decision(False, Reason.EXCLUDED))
        if all(p.target_modules is not None for p in parts):
            return Choice(Decision(False, Reason.NOT_TARGETED))
        return Choice(Decision(False, Reason.QUANTIZED) if weight.quantized else structure)
    part = claims[0]
    decision = check_fit(layer, weight, part, halves_width(part)) or _quantize(weight, part, structure)
    if part.target_modules is not None and not decision.quantize:
        raise ValueError(f"target layer {layer!r} {list(weight.shape)} cannot be quantized: {decision.reason}")
    return Choice(decision, part if decision.quantize else None)


def check_fit(layer: str, weight: Weight, part: QuantizeConfig, halves_width: bool) -> Decision | None:
    """Return why a method cannot take a weight, None when it can."""
    if weight.quantized:
        return Decision(False, Reason.QUANTIZED)
    if len(weight.shape) != 2:
        return Decision(False, Reason.NOT_LINEAR, f"not a Linear ({len(weight.shape)}-D weight)")
    if 0 in weight.shape:
        return Decision(False, Reason.EMPTY)
    if weight.dtype not in FLOAT_WEIGHTS:
        stored = str(weight.dtype).removeprefix("torch.")
        return Decision(False, Reason.NOT_FLOAT, f"stored as {stored}, not a float weight")
    misfits = violations(part.backend.constraints(), in_features=weight.shape[1], out_features=weight.shape[0])
    if misfits:
        return Decision(False, Reason.SHAPE, "; ".join(misfits))
    if halves_width and read_by_detection(layer):
        return Decision(False, Reason.DETECTION)
    return None


def _quantize(weight: Weight, part: QuantizeConfig, structure: Decision) -> Decision:
    fallback = part.backend.layer_options(weight.shape[0], weight.shape[1])
    if fallback:
        text = ", ".join(f"{key} {value}" for key, value in fallback.items())
        return Decision(True, Reason.FALLBACK, f"{text}: the group does not divide in_features {weight.shape[1]}")
    return Decision(True, Reason.TARGETED) if part.target_modules is not None else structure
