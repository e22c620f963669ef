"""The node *Mixed Quantization*."""

from __future__ import annotations

from comfy_api.latest import io

from quant_core import Recipe

from .recipe import QuantRecipe, mix

MOST_RECIPES = 50


class MixedQuantization(io.ComfyNode):
    """Makes one recipe of several."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_MixedQuantization",
            display_name="Mixed Quantization",
            category="quantization",
            description=(
                "Several methods in one model, each on layers of its own. At most one recipe may leave target_layers "
                "empty: it takes the layers that the others do not name."
            ),
            search_aliases=["mixed precision", "several methods", "combine recipes", "per layer quantization"],
            inputs=[
                io.Autogrow.Input(
                    "recipes",
                    template=io.Autogrow.TemplatePrefix(
                        QuantRecipe.Input(
                            "recipe", tooltip="A recipe; a further input appears for each connected one."
                        ),
                        prefix="recipe",
                        min=2,
                        max=MOST_RECIPES,
                    ),
                    tooltip="The recipes. Each names its target layers; one may leave them out and takes the rest.",
                )
            ],
            outputs=[QuantRecipe.Output(display_name="recipe", tooltip="All of them as one recipe.")],
        )

    @classmethod
    def execute(cls, recipes: dict[str, Recipe]) -> io.NodeOutput:
        return io.NodeOutput(mix(list(recipes.values())))
