"""The node *Quantization Plan*."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from quant_core import Recipe

from .file_inputs import file_input, plan_of, recipe_inputs, requantize_input
from .host.files import fingerprint
from .tables import ROWS, plan_rows, plan_text


class QuantizationPlan(io.ComfyNode):
    """Says what a recipe makes of a file, from its header."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_QuantizationPlan",
            display_name="Quantization Plan",
            category="quantization",
            description=(
                "What a recipe would do to a file: for every layer the method or why it is kept, and the exact size "
                "of the result. Reads the header alone, so it takes a moment for a file of any size."
            ),
            search_aliases=["quantization preview", "estimate size", "which layers", "dry run", "quantize table"],
            is_output_node=True,
            inputs=[file_input("The file to plan for."), *recipe_inputs(), requantize_input()],
            outputs=[
                io.String.Output("table", display_name="table", tooltip="The totals, then a line for each weight."),
                io.String.Output(
                    "json",
                    display_name="json",
                    tooltip="The whole plan as JSON; python -m quant_core quantize --plan reads it, edited or not.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None, **options: Any) -> Any:
        return (fingerprint(file), tuple(sorted(options.items())))

    @classmethod
    def execute(cls, file: str, recipe: Recipe, part: str = "diffusion", requantize: bool = False) -> io.NodeOutput:
        made = plan_of(file, recipe, part, requantize)
        text = plan_text(made)
        return io.NodeOutput(text, made.to_json(), ui={"text": [text], ROWS: plan_rows(made)})
