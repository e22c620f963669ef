"""The node *Load LoRA (Quantized)*."""

from __future__ import annotations

import os
from typing import Any

import folder_paths
from comfy_api.latest import io

from .host.lora import AUTO, MODES, add_to_clip, add_to_model, read_lora

_STRENGTH = {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01}


class LoadLoraQuantized(io.ComfyNode):
    """Adds a LoRA to a quantized model without quantizing its weights again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_LoadLora",
            display_name="Load LoRA (Quantized)",
            category="quantization",
            description=(
                "Adds a LoRA to a model. In 4-bit layers it runs beside the weights, which stay as they are: the "
                "stock LoRA loader quantizes them again, which about doubles the error. Any number of these nodes "
                "can be chained."
            ),
            search_aliases=["lora", "load lora", "bypass lora", "quantized lora", "nvfp4 lora", "4 bit lora"],
            inputs=[
                io.Model.Input("model", tooltip="The model that the LoRA is for, quantized or not."),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="The LoRA file, from models/loras.",
                ),
                io.Float.Input(
                    "strength_model",
                    tooltip="How strongly the LoRA changes the model. 0 leaves it as it is; it may be negative.",
                    **_STRENGTH,
                ),
                io.Float.Input(
                    "strength_clip",
                    tooltip="How strongly the LoRA changes the text encoder. Does nothing when no CLIP is connected.",
                    **_STRENGTH,
                ),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default=AUTO,
                    optional=True,
                    tooltip=(
                        "auto: beside the weights in layers of about 4 bits, into the weights elsewhere. bypass: "
                        "beside the weights wherever that is possible; slower, and more exact in 8 bits too. "
                        "patch (requantize): into the weights, which are quantized again; that about doubles the "
                        "error (nvfp4 8 -> 16 %, convrot int4 14 -> 21 %, fp8 2.2 -> 4.2 %, int8 0.8 -> 1.2 %)."
                    ),
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoder, for a LoRA that changes it too. May be left open.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The model with the LoRA, for a sampler or another LoRA node."),
                io.Clip.Output(tooltip="The text encoder with the LoRA; empty when no CLIP is connected."),
            ],
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        lora_name: str,
        strength_model: float,
        strength_clip: float,
        mode: str = AUTO,
        model: Any = None,
        clip: Any = None,
    ):
        path = folder_paths.get_full_path("loras", lora_name)
        stat = None if path is None else os.stat(path)
        file = None if stat is None else (stat.st_size, stat.st_mtime_ns)
        return (path, file, strength_model, strength_clip, mode)

    @classmethod
    def execute(
        cls,
        model: Any,
        lora_name: str,
        strength_model: float,
        strength_clip: float,
        mode: str = AUTO,
        clip: Any = None,
    ) -> io.NodeOutput:
        if not strength_model and (clip is None or not strength_clip):
            return io.NodeOutput(model, clip)
        lora = read_lora(folder_paths.get_full_path_or_raise("loras", lora_name), model, clip)
        return io.NodeOutput(
            add_to_model(model, lora, strength_model, mode), add_to_clip(clip, lora, strength_clip, mode)
        )
