"""What the doctor says: findings, and the report that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

COMFYUI, QUANT_CORE = "comfyui", "quant_core"

LOADERS = {
    COMFYUI: "ComfyUI's own loaders, without this pack (v0.33)",
    QUANT_CORE: "load_quantized_model of quant_core",
}
"""The loaders that a report speaks of."""


class Level(str, Enum):
    """How bad a finding is for one loader."""

    FATAL = "fatal"  # loading, or the first forward, raises
    WRONG = "wrong output"  # it loads without a word and computes something else
    ADVICE = "advice"  # it works, and could be better

    def __str__(self) -> str:
        return self.value


_ORDER = list(Level)


# ------------------------------------------------------------------ edits: what a repair does, as data


@dataclass(frozen=True)
class Rename:
    """The tensor takes another name."""

    tensor: str
    to: str


@dataclass(frozen=True)
class View:
    """The tensor's bytes are declared to be another dtype of the same size."""

    tensor: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Cast:
    """The tensor's values are stored in another dtype; refused if one of them changes."""

    tensor: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Reshape:
    """The tensor gets another shape, its values keep their order."""

    tensor: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AddMarker:
    """A layer gets the marker that its tensors imply."""

    layer: str
    conf: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class CutTail:
    """The bytes behind the last tensor are left out."""


Edit = Rename | View | Cast | Reshape | AddMarker | CutTail


def describe_edit(edit: Edit) -> str:
    """Return the edit as a sentence without its full stop."""
    if isinstance(edit, Rename):
        return f"rename {edit.tensor} to {edit.to}"
    if isinstance(edit, View):
        return f"declare the bytes of {edit.tensor} as {_name(edit.dtype)}"
    if isinstance(edit, Cast):
        return f"store {edit.tensor} as {_name(edit.dtype)}, values unchanged"
    if isinstance(edit, Reshape):
        return f"reshape {edit.tensor} to {list(edit.shape)}"
    if isinstance(edit, AddMarker):
        return f"add the marker {dict(edit.conf)} to {edit.layer}"
    return "leave out the bytes behind the last tensor"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ findings


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a file.

    Attributes:
        code: the rule's name, a key of :data:`quant_core.doctor.rules.RULES`.
        levels: ``{loader: Level}``; a loader that is not in it does not mind.
        layer: the layer, or empty for the whole file.
        cause: what is wrong, expected against found.
        fix: what to do about it.
        mirrors: the part of the loader that the rule transcribes.
        edits: what :func:`quant_core.doctor.repair` would do; empty where there is no lossless repair.
    """

    code: str
    levels: dict[str, Level]
    layer: str
    cause: str
    fix: str
    mirrors: str = ""
    edits: tuple[Edit, ...] = ()

    @property
    def level(self) -> Level:
        """The worst of its levels."""
        return min(self.levels.values(), key=_ORDER.index)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data."""
        return {
            "code": self.code,
            "level": str(self.level),
            "levels": {loader: str(level) for loader, level in self.levels.items()},
            "layer": self.layer,
            "cause": self.cause,
            "fix": self.fix,
            "mirrors": self.mirrors,
            "repair": [describe_edit(edit) for edit in self.edits],
        }


@dataclass
class Report:
    """What the doctor found in one file.

    Attributes:
        path: the file.
        findings: the worst first, then in the order of the file.
        layers: how many quantized layers were looked at.
        unchecked: what the report says nothing about, a sentence each.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    layers: int = 0
    unchecked: list[str] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings and keep the order."""
        self.findings = sorted([*self.findings, *findings], key=lambda f: _ORDER.index(f.level))

    def of(self, loader: str) -> list[Finding]:
        """Return the findings that concern one loader."""
        return [finding for finding in self.findings if loader in finding.levels]

    def verdict(self, loader: str) -> str:
        """Return ``"loads"``, ``"loads, wrong output"`` or ``"does not load"``."""
        levels = {finding.levels[loader] for finding in self.of(loader)}
        if Level.FATAL in levels:
            return "does not load"
        return "loads, wrong output" if Level.WRONG in levels else "loads"

    @property
    def repairable(self) -> bool:
        """Whether a finding has a lossless repair."""
        return any(finding.edits for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data."""
        return {
            "path": self.path,
            "verdicts": {loader: self.verdict(loader) for loader in LOADERS},
            "layers": self.layers,
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": self.unchecked,
        }
