"""The choice of a device and of a dtype, as several nodes have it."""

from __future__ import annotations

import torch
from comfy_api.latest import io

COMPUTE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICES = {"auto": None, "cpu": torch.device("cpu")}


def compute_dtype_input() -> io.Combo.Input:
    """What a model computes in."""
    return io.Combo.Input(
        "compute_dtype",
        options=list(COMPUTE_DTYPES),
        default="auto",
        optional=True,
        advanced=True,
        tooltip="The dtype the model computes in. auto is what ComfyUI chooses for this model and card.",
    )


def quantize_device_input() -> io.Combo.Input:
    """Where layers are quantized."""
    return io.Combo.Input(
        "quantize_device",
        options=list(DEVICES),
        default="auto",
        optional=True,
        advanced=True,
        tooltip=(
            "Where the layers are quantized, one at a time. auto is the graphics card; choose cpu when its memory is "
            "too small for the largest layer in float, or when another program needs it."
        ),
    )
