"""The node *LoRA to Bake*."""

from __future__ import annotations

import os
from typing import Any

import folder_paths
from comfy_api.latest import io

LoraList = io.Custom("QUANT_LORAS")
"""``[(path, strength), ...]``: LoRAs for a loader that adds them before it quantizes."""


class LoraToBake(io.ComfyNode):
    """Adds a LoRA to the list of those that a quantizing loader bakes in."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_LoraToBake",
            display_name="LoRA to Bake",
            category="quantization",
            description=(
                "A LoRA that Load Diffusion Model (Quantized) adds in full precision before it quantizes: the most "
                "exact way to use one, at no cost while sampling. Connect several one after another."
            ),
            search_aliases=["bake lora", "merge lora", "lora before quantization"],
            inputs=[
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="The LoRA, from models/loras.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How strongly it changes the model; 0 leaves it out. A change quantizes the model again.",
                ),
                LoraList.Input("loras", optional=True, tooltip="The LoRAs before this one."),
            ],
            outputs=[LoraList.Output(display_name="loras", tooltip="For Load Diffusion Model (Quantized).")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str | None = None, strength: float = 1.0, loras: Any = None) -> Any:
        path = None if lora_name is None else folder_paths.get_full_path("loras", lora_name)
        stat = None if path is None else os.stat(path)
        return (path, None if stat is None else (stat.st_size, stat.st_mtime_ns), strength)

    @classmethod
    def execute(cls, lora_name: str, strength: float = 1.0, loras: Any = None) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("loras", lora_name)
        return io.NodeOutput([*(loras or ()), (path, strength)])
