"""Recipes for people who do not want to choose methods or layers: a policy, the hardware and the model give one.

What is known of each architecture's layers is data, a TOML file each; so is what each policy makes of it.
"""

from __future__ import annotations

import torch

from .architectures import Architecture, Tier, architectures, detect
from .recipe import PresetRecipe, policies, targets

__all__ = [
    "Architecture",
    "PresetRecipe",
    "Tier",
    "architectures",
    "detect",
    "policies",
    "preset",
    "targets",
    "this_target",
]


def preset(policy: str, target: str | None = None) -> PresetRecipe:
    """Return the recipe of a policy for some hardware.

    Args:
        policy: a key of :func:`policies`.
        target: a key of :func:`targets`; None is the hardware of this machine.

    Raises:
        ValueError: unknown policy or target.
    """
    return PresetRecipe(policy, target or this_target())


def this_target() -> str:
    """Return the hardware target of this machine, by what torch finds."""
    if torch.version.hip is not None and torch.cuda.is_available():
        return "amd"
    if torch.cuda.is_available():
        return _cuda_target(torch.cuda.get_device_capability())
    return "apple" if torch.backends.mps.is_available() else "cpu"


def _cuda_target(capability: tuple[int, int]) -> str:
    if capability >= (10, 0):
        return "blackwell"
    if capability >= (8, 9):
        return "ada"
    if capability >= (8, 0):
        return "ampere"
    return "turing" if capability >= (7, 5) else "any"
