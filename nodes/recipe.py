"""Recipes in a workflow: their type, and how widgets and other recipes become one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from quant_core import MixedQuantizeConfig, QuantizeConfig, Recipe
from quant_core.backends import load_all_backends

from .host.quantizer import all_methods

DEFAULT_METHOD = "comfy_kitchen_int8_w8a8"

QuantRecipe = io.Custom("QUANT_RECIPE")
"""What the recipe nodes give and take: a :class:`quant_core.Recipe`."""


def method_names() -> list[str]:
    """Every registered method, also where its library is missing, or where another node pack registered it."""
    load_all_backends()
    return all_methods()


def parse_layers(text: str) -> list[str]:
    """Return the layer names in a text widget: one a line or separated by commas, ``#`` starts a comment."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [name.strip() for line in lines for name in line.split(",") if name.strip()]


def parse_options(text: str) -> dict[str, Any]:
    """Return the options of a method in a text widget: a JSON object, or nothing.

    Raises:
        ValueError: it is something else.
    """
    if not text.strip():
        return {}
    example = 'write them as JSON, e.g. {"convrot_groupsize": 64}'
    try:
        options = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"options cannot be read: {error}; {example}") from error
    if not isinstance(options, dict):
        raise ValueError(f"options are a JSON object with a value for each name, got {text.strip()!r}; {example}")
    return options


def mix(recipes: Sequence[Recipe]) -> MixedQuantizeConfig:
    """Make one recipe of several, mixed ones among them.

    A part without target layers takes the layers that no other part targets, so that none is named twice.

    Raises:
        ValueError: several parts have no target layers, so that each would take every layer, or one is a preset.
    """
    preset = next((recipe for recipe in recipes if recipe.depends_on_model), None)
    if preset is not None:
        raise ValueError(
            f"{preset.recipe_method} chooses a method for every layer and cannot be mixed; connect it to the loader "
            "alone"
        )
    parts = [part for recipe in recipes for part in recipe.parts()]
    rest = [part for part in parts if part.target_modules is None]
    if len(rest) > 1:
        raise ValueError(
            f"{' and '.join(part.method for part in rest)}: each of these recipes would take every layer, since none "
            "of them names target layers. Name target layers in all of them but one, which then takes the others"
        )
    targets = [name for part in parts for name in part.target_modules or ()]
    return MixedQuantizeConfig(configs=[part if part.target_modules else _without(part, targets) for part in parts])


def _without(part: QuantizeConfig, layers: Sequence[str]) -> QuantizeConfig:
    excluded = list(dict.fromkeys([*(part.exclude_modules or ()), *layers]))
    return dataclasses.replace(part, exclude_modules=excluded or None)
