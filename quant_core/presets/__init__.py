"""Recipes for people who do not want to choose a method: a policy and the hardware give one. The choices are data."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

import torch

from ..config import QuantizeConfig


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


def preset(policy: str, target: str | None = None) -> QuantizeConfig:
    """Return the recipe of a policy for some hardware.

    Args:
        policy: a key of :func:`policies`.
        target: a key of :func:`targets`; None is the hardware of this machine.

    Raises:
        ValueError: unknown policy or target.
        ImportError: the method's library is missing.
    """
    if policy not in policies():
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(policies())}")
    if target is not None and target not in targets():
        raise ValueError(f"unknown hardware target {target!r}; known: {', '.join(targets())}")
    methods = _data()["policies"][policy]["methods"]
    return QuantizeConfig(method=methods.get(target or this_target(), methods["any"]))


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
