"""The recipe that a preset is: it chooses methods and layers when it meets a model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from ..choice import Weight, check_fit
from ..config import MixedQuantizeConfig, QuantizeConfig, Recipe
from ..selection import MIN_WIDTH, Decision, Reason, choose_layers
from ..sites import LinearSite, find_sites, name_endings
from .architectures import Architecture, Tier, detect

UNKNOWN = "unknown architecture, structural rule: all layers of its blocks are treated alike"


@functools.cache
def _data() -> dict[str, Any]:
    text = files(__package__).joinpath("policies.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def policies() -> dict[str, str]:
    """Return ``{policy: what it gives, in a sentence}``."""
    return {name: policy["text"] for name, policy in _data()["policies"].items()}


def targets() -> dict[str, str]:
    """Return ``{hardware target: what belongs to it}``."""
    return dict(_data()["targets"])


def methods_of(policy: str, target: str) -> dict[Tier, list[str]]:
    """Return ``{tier: methods}`` of a policy on some hardware; the first one that a layer fits is for it."""
    formats = _data()["formats"]
    wanted = _data()["policies"][policy]["tiers"]
    return {Tier(tier): formats[bits].get(target, formats[bits]["any"]) for tier, bits in wanted.items()}


@dataclass
class PresetRecipe(Recipe):
    """A recipe for any model: what the policy gives each tier of layers of the model's architecture.

    Of an architecture that is not known, all layers of the blocks are body.

    Args:
        policy: a key of :func:`policies`.
        target: a key of :func:`targets`: the hardware that runs the model.
        load_prequantized: see :class:`quant_core.QuantizeConfig`.

    Raises:
        ValueError: unknown policy or target.
    """

    policy: str
    target: str = "any"
    load_prequantized: bool = False
    depends_on_model = True

    def __post_init__(self) -> None:
        if self.policy not in policies():
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(policies())}")
        if self.target not in targets():
            raise ValueError(f"unknown hardware target {self.target!r}; known: {', '.join(targets())}")

    def parts(self) -> list[QuantizeConfig]:
        """Return what is sure before the model is known: the method of the body."""
        return [QuantizeConfig(method=methods_of(self.policy, self.target)[Tier.BODY][0])]

    @property
    def recipe_method(self) -> str:
        return f"the preset {self.policy} ({self.target})"

    def to_dict(self) -> dict[str, Any]:
        return {"preset": self.policy, "target": self.target}

    def for_model(
        self,
        weights: Mapping[str, Weight],
        by_structure: Mapping[str, Decision],
        halves_width: Callable[[QuantizeConfig], bool],
    ) -> tuple[Recipe, Mapping[str, Decision], str]:
        architecture = detect({layer: weight.shape for layer, weight in weights.items() if len(weight.shape) == 2})
        methods = methods_of(self.policy, self.target)
        configs = {name: QuantizeConfig(method=name) for names in methods.values() for name in names}
        layers: dict[str, list[str]] = {}
        decisions = dict(by_structure)
        for layer, weight in weights.items():
            tier, reason = _tier(layer, weight, by_structure[layer], architecture)
            if tier is Tier.KEEP:
                decisions[layer] = Decision(False, Reason.PRESET, reason)
            elif tier is not None:
                fits = (n for n in methods[tier] if not check_fit(layer, weight, configs[n], halves_width(configs[n])))
                method = next(fits, None)
                if method is None:
                    decisions[layer] = Decision(False, Reason.SHAPE, "fits no format of the preset")
                else:
                    layers.setdefault(method, []).append(layer)
        if not layers:
            raise ValueError(f"{self.recipe_method} finds no layer to quantize in this model; name a method instead")
        parts = [_exactly(method, chosen, weights) for method, chosen in layers.items()]
        note = UNKNOWN if architecture is None else ""
        return parts[0] if len(parts) == 1 else MixedQuantizeConfig(configs=parts), decisions, note

    def assign_layers(self, model: nn.Module) -> list[tuple[LinearSite, QuantizeConfig]]:
        weights = {site.name: Weight(tuple(site.module.weight.shape), torch.float32) for site in find_sites(model)}
        structure = choose_layers({f"{name}.weight": weight.shape for name, weight in weights.items()})
        return self.for_model(weights, structure, lambda part: False)[0].assign_layers(model)


def _tier(
    layer: str, weight: Weight, structure: Decision, architecture: Architecture | None
) -> tuple[Tier | None, str]:
    """Return the tier of a layer, None for what no preset quantizes, and why."""
    if structure.why in (Reason.OTHER_PART, Reason.NOT_LINEAR, Reason.NORM) or weight.quantized:
        return None, ""
    if architecture is None:
        return (Tier.BODY if structure.quantize else None), ""
    tier, reason = architecture.tier(layer)
    if tier is Tier.KEEP:
        return tier, reason
    if tier is Tier.BODY and not structure.quantize:
        return None, ""
    return (tier if min(weight.shape) >= MIN_WIDTH else None), reason


def _exactly(method: str, layers: list[str], weights: Mapping[str, Weight]) -> QuantizeConfig:
    """A config for these layers alone, also where the name of another ends like one of theirs."""
    wanted = set(layers)
    others = [layer for layer in weights if layer not in wanted and wanted.intersection(name_endings(layer))]
    return QuantizeConfig(method=method, target_modules=layers, exclude_modules=others or None)
