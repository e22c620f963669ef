"""Chooses the weights of a checkpoint that are worth quantizing, by names and shapes alone.

A checkpoint tells no module classes, so a Linear is recognized by structure: a 2-D ``*.weight`` inside an indexed
block (``blocks.7.``, ``layers.0.``). What diffusion models keep outside their blocks (input and output projections,
time, text and guidance embedders, the head) is a few percent of the parameters and carries most of the sensitivity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

MIN_WIDTH = 256
"""A Linear narrower than this is a head or a gate: a small saving for a large error."""

DIFFUSION_PREFIX = "model.diffusion_model."

# Segments of a dotted name that mean something other than an ordinary Linear of a block, or a sensitive one.
_KEPT_SEGMENT = re.compile(
    r"embed|guidance|adapter|^(time|t|temb|pos|rope|rotary|rel_pos)(_|$)|(^|_)emb(_|$)|^caption_projection$|scale_shift"
    r"|register|router|gate_logits|(^|_)(final|head)(_|$)",
    re.IGNORECASE,
)

# ComfyUI's architecture detection reads widths from the stored shapes of these keys; a packed 4-bit tensor there
# halves the width and the file loads as another model, or not at all.
_DETECTION_KEY = re.compile(
    r"(^|\.)(img_in|txt_in|vector_in|cap_embedder\.\d+|condition_proj|label_emb\.\d+\.\d+|attn2\.to_k)$"
)


class Reason(str, Enum):
    """Why a tensor is quantized or not: the whole list. The value is what people read."""

    IN_BLOCK = "2-D weight in an indexed block"
    TARGETED = "in the target list"
    FALLBACK = "quantized with a smaller group"
    EDITED = "edited in the plan"
    EXCLUDED = "excluded by rule"
    PRESET = "kept in float by the preset"
    NOT_TARGETED = "not in the target list"
    NOT_A_WEIGHT = "not a weight"
    OTHER_PART = "not part of the diffusion model"
    NOT_LINEAR = "not a Linear"
    OUTSIDE_BLOCKS = "outside the indexed blocks"
    SENSITIVE = "an embedding, conditioning or a head"
    NORM = "a norm"
    TOO_SMALL = "too small"
    EMPTY = "no elements"
    NOT_FLOAT = "not stored as float"
    SHAPE = "the shape does not fit the format"
    DETECTION = "its width is read by ComfyUI's architecture detection, which a packed format would halve"
    QUANTIZED = "quantized already"


@dataclass(frozen=True)
class Decision:
    """Whether a weight is quantized, and why (not): ``why`` from the closed list, ``detail`` for this weight."""

    quantize: bool
    why: Reason
    detail: str = ""

    @property
    def reason(self) -> str:
        """One line for people."""
        return self.detail or self.why.value


def layer_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return ``{layer name: shape}`` of every ``*.weight``, the suffix cut off."""
    return {k.removesuffix(".weight"): tuple(s) for k, s in shapes.items() if k.endswith(".weight")}


def read_by_detection(layer: str) -> bool:
    """Whether ComfyUI's architecture detection reads this layer's stored width."""
    return _DETECTION_KEY.search(layer) is not None


def choose_layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, Decision]:
    """Decide for every ``*.weight`` of a checkpoint.

    Args:
        shapes: ``{tensor name: shape}`` of the whole file, names with or without ``model.diffusion_model.``.

    Returns:
        ``{layer name: Decision}``, in the order of ``shapes``.
    """
    all_in_one = any(name.startswith(DIFFUSION_PREFIX) for name in shapes)
    return {
        layer: Decision(False, Reason.OTHER_PART)
        if all_in_one and not layer.startswith(DIFFUSION_PREFIX)
        else decide_layer(layer, shape)
        for layer, shape in layer_weights(shapes).items()
    }


def decide_layer(layer: str, shape: Sequence[int]) -> Decision:
    """Decide for one weight of the part of the model that is to be quantized."""
    if len(shape) != 2:
        return Decision(False, Reason.NOT_LINEAR, f"not a Linear ({len(shape)}-D weight)")
    segments = layer.removeprefix(DIFFUSION_PREFIX).split(".")
    if not any(segment.isdigit() for segment in segments[:-1]):
        return Decision(False, Reason.OUTSIDE_BLOCKS)
    kept = next((s for s in segments if _KEPT_SEGMENT.search(s)), None)
    if kept is not None:
        return Decision(False, Reason.SENSITIVE, f"{kept!r} names an embedding, conditioning or a head")
    if "norm" in segments[-1].lower():
        return Decision(False, Reason.NORM)
    if min(shape) < MIN_WIDTH:
        return Decision(False, Reason.TOO_SMALL, f"narrower than {MIN_WIDTH}")
    return Decision(True, Reason.IN_BLOCK)
