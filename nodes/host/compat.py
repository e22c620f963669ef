"""What an older ComfyUI lacks. Asked by feature; version numbers are for messages to the user only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from comfy.quant_ops import QUANT_ALGOS

FIRST_VERSIONS = {"int8_tensorwise": "0.27.0", "convrot_w4a4": "0.28.0", "asym_w4a8_int8": "0.31.0"}
"""The first ComfyUI with a format, for the formats that came after 0.18."""

_LATER_TENSORS = frozenset({"pre_quant_scale"})
"""Tensors of a layer that an older ComfyUI passes over without a word; the layer then computes nonsense."""

_requantized: ContextVar[Any] = ContextVar("quantcore_requantized")


def reads(form: str, names: Iterable[str]) -> bool:
    """Whether this ComfyUI itself computes with a layer of a file.

    Args:
        form: the format that the layer's marker names.
        names: of the layer's tensors, below the layer.
    """
    return form in QUANT_ALGOS and _LATER_TENSORS.intersection(names) <= QUANT_ALGOS[form]["parameters"]


def missing_format(form: str) -> str:
    """Return the end of a message about a format that this ComfyUI does not have: what it has, and what to do."""
    known = f"which this ComfyUI does not have (it has {', '.join(QUANT_ALGOS)})"
    if form not in FIRST_VERSIONS:
        return f"{known}. A newer ComfyUI may have it"
    return f"{known}. It needs ComfyUI {FIRST_VERSIONS[form]} or newer: update ComfyUI, and comfy-kitchen with it"


@contextlib.contextmanager
def requantizing(how: Any) -> Iterator[None]:
    """Say how a patched weight is quantized again, to a layout that is not told.

    ComfyUI before 0.27.0 asks a layout to quantize by its name alone; later ones pass on the ``requantize_kwargs`` of
    the weight, which have precedence.
    """
    token = _requantized.set(how)
    try:
        yield
    finally:
        _requantized.reset(token)


def requantized() -> Any:
    """Return what :func:`requantizing` said.

    Raises:
        LookupError: it is not in force.
    """
    return _requantized.get()
