"""What a format accepts, as data.

The same objects check a layer before it is touched, explain a refusal, and print the documentation, so that a
limit is written down once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Dimension = Literal["in_features", "out_features"]


class Constraint(Protocol):
    """One limit on the shape of a Linear weight ``[out_features, in_features]``."""

    def check(self, in_features: int, out_features: int) -> str | None:
        """Return why the shape does not fit, or None when it does."""

    def describe(self) -> str:
        """Say the limit in a few words, e.g. ``in_features % 16 == 0``."""


def _value(dim: Dimension, in_features: int, out_features: int) -> int:
    return in_features if dim == "in_features" else out_features


@dataclass(frozen=True)
class DivisibleBy:
    """The dimension must be a multiple of ``factor`` (a block, group or rotation size)."""

    dim: Dimension
    factor: int

    def check(self, in_features: int, out_features: int) -> str | None:
        value = _value(self.dim, in_features, out_features)
        if value % self.factor == 0:
            return None
        return f"{self.dim} {value} is not a multiple of {self.factor}"

    def describe(self) -> str:
        return f"{self.dim} % {self.factor} == 0"


def violations(constraints: Iterable[Constraint], in_features: int, out_features: int) -> list[str]:
    """Return every reason why ``[out_features, in_features]`` does not fit, empty when it does."""
    return [reason for c in constraints if (reason := c.check(in_features, out_features)) is not None]
