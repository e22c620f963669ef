"""What is known of the layers of each architecture: which to keep in float, and which not to take below 8 bits.

The patterns are written for ComfyUI's names. Names of diffusers are looked up in the tables that LoRAs are matched by.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from typing import Any

from ..lora.names import model_names
from ..selection import DIFFUSION_PREFIX

Shape = Sequence[int]


class Tier(str, Enum):
    """How many bits a layer needs. The value is what the data files call it."""

    KEEP = "keep"
    """Stays in float: a few percent of the weights, and the largest part of the error."""

    MOD = "mod"
    """Modulation: up to 40 % of the weights; good at 8 bits, not at 4."""

    SOFT = "soft"
    """Sensitive at 4 bits."""

    BODY = "body"
    """All other layers of the blocks."""


@dataclass(frozen=True)
class Pattern:
    """Layers of one tier.

    Attributes:
        tier: theirs.
        pattern: a regular expression for the whole name.
        count: how many layers of the published model it names, after the patterns before it.
        reason: why they are in that tier.
    """

    tier: Tier
    pattern: re.Pattern[str]
    count: int
    reason: str


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        name: of its file.
        title: for people.
        classes: names of its classes in ComfyUI's ``supported_models``.
        linears: the number of Linears of the published model.
        layers: names that it has.
        absent: names that it has not, where another has all of the others.
        shapes: shapes ``[out_features, in_features]`` of layers that it has.
        patterns: its layers by tier; the first that matches counts.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    linears: int
    layers: tuple[str, ...]
    absent: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    patterns: tuple[Pattern, ...]

    def tier(self, layer: str) -> tuple[Tier, str]:
        """Return ``(tier, reason)`` of a layer; its name in ComfyUI or in diffusers, with or without a prefix."""
        for name in _names(layer):
            for pattern in self.patterns:
                if pattern.pattern.fullmatch(name):
                    return pattern.tier, pattern.reason
        return Tier.BODY, ""

    def matches(self, shapes: Mapping[str, Iterable[Shape]]) -> bool:
        """Whether a model is of this architecture: ``{name in ComfyUI: possible shapes}``."""
        return self.has_names(shapes) and all(s in map(tuple, shapes[layer]) for layer, s in self.shapes.items())

    def has_names(self, names: Container[str]) -> bool:
        """Whether a model has the names of this architecture, whatever its widths."""
        return all(layer in names for layer in (*self.layers, *self.shapes)) and not any(
            n in names for n in self.absent
        )

    def dead_patterns(self, names: Collection[str]) -> int:
        """Return how many of the patterns match no layer."""
        return sum(not any(map(pattern.pattern.fullmatch, names)) for pattern in self.patterns)


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Return ``{name: Architecture}`` of all that there is data for.

    Raises:
        ImportError: Python is older than 3.11, and the package tomli is missing.
    """
    found = {}
    for file in sorted(files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            found[name] = _read(name, _toml(file.read_text(encoding="utf-8")))
    return found


def detect(shapes: Mapping[str, Shape]) -> Architecture | None:
    """Return the architecture of a model; None when none is known.

    A model with the names of one and other widths is of that one, too. Where several have these names, it is the one
    whose patterns name the most of its layers, then the one with the most similar number of layers.

    Args:
        shapes: ``{layer: shape of its float weight}``, under the names of ComfyUI or of diffusers.
    """
    known: dict[str, list[Shape]] = {}
    for layer, shape in shapes.items():
        for name in _names(layer):
            known.setdefault(name, []).append(shape)
    exact = next((one for one in architectures().values() if one.matches(known)), None)
    alike = [one for one in architectures().values() if one.has_names(known)]
    return exact or min(alike, key=lambda one: (one.dead_patterns(known), abs(one.linears - len(shapes))), default=None)


def _toml(text: str) -> dict[str, Any]:
    # Imported where it is needed: a ComfyUI with an older Python may not have it, and presets are all that needs it.
    parsed: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
    return parsed


def _names(layer: str) -> list[str]:
    """A layer's name without the prefix of a checkpoint, and the names that ComfyUI may have for it."""
    bare = layer.removeprefix(DIFFUSION_PREFIX).removeprefix("diffusion_model.").removeprefix("transformer.")
    return [bare, *model_names(bare)]


def _read(name: str, data: Mapping[str, Any]) -> Architecture:
    detection = data["detect"]
    patterns = [
        Pattern(tier, re.compile(entry["pattern"]), entry["count"], entry["reason"])
        for tier in (Tier.KEEP, Tier.MOD, Tier.SOFT)
        for entry in data.get(tier.value, ())
    ]
    return Architecture(
        name,
        data["title"],
        tuple(data["classes"]),
        data["linears"],
        tuple(detection["layers"]),
        tuple(detection.get("absent", ())),
        {layer: tuple(shape) for layer, shape in detection["shapes"].items()},
        tuple(patterns),
    )
