"""Bakes LoRAs into a model's weights in float, before they are quantized.

Baking first is the most exact way: the LoRA is rounded once, together with the weight, and costs nothing at run time.
"""

from __future__ import annotations

from .baking import merge_lora
from .merge import LoraMerge, Unmatched

__all__ = ["LoraMerge", "Unmatched", "merge_lora"]
