"""The node *Clear Quantization Cache*."""

from __future__ import annotations

import time
from typing import Any

from comfy_api.latest import io

from .host.cache import clear_cache


class ClearQuantizationCache(io.ComfyNode):
    """Removes quantized models that were kept on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_ClearCache",
            display_name="Clear Quantization Cache",
            category="quantization",
            description=(
                "Removes the quantized models that the loaders keep on disk, and says how much that freed. Nothing is "
                "lost but time: a model that is loaded again is quantized again. Original files are not touched."
            ),
            search_aliases=["free disk space", "delete cache", "disk cache", "trim cache", "purge"],
            is_output_node=True,
            inputs=[
                io.Float.Input(
                    "keep_gb",
                    default=0.0,
                    min=0.0,
                    max=100000.0,
                    step=1.0,
                    optional=True,
                    tooltip=(
                        "How many gigabytes (of 1,000,000,000 bytes) to keep; the models used least recently go "
                        "first. 0 removes all."
                    ),
                ),
            ],
            outputs=[
                io.String.Output(
                    "report", display_name="report", tooltip="How much was freed, what is left, and in which folder."
                )
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        return time.time_ns()  # what there is to remove has nothing to do with the inputs

    @classmethod
    def execute(cls, keep_gb: float = 0.0) -> io.NodeOutput:
        report = clear_cache(keep_gb)
        return io.NodeOutput(report, ui={"text": [report]})
