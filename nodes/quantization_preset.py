"""The node *Quantization Preset*."""

from __future__ import annotations

from comfy_api.latest import io

from quant_core.presets import policies, preset, targets

from .recipe import QuantRecipe

THIS_MACHINE = "this machine"


class QuantizationPreset(io.ComfyNode):
    """Makes a recipe of a wish instead of a method."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        wishes = "; ".join(f"{name}: {text}" for name, text in policies().items())
        places = "; ".join(f"{name}: {text}" for name, text in targets().items())
        return io.Schema(
            node_id="QuantCore_QuantizationPreset",
            display_name="Quantization Preset",
            category="quantization",
            description=(
                "A recipe for those who do not want to choose a method: say how small the model shall be, and which "
                "hardware runs it."
            ),
            search_aliases=["preset", "quantization recipe", "8 bit", "4 bit", "low vram"],
            inputs=[
                io.Combo.Input("policy", options=list(policies()), tooltip=f"How small. {wishes}."),
                io.Combo.Input(
                    "hardware",
                    options=[THIS_MACHINE, *targets()],
                    default=THIS_MACHINE,
                    optional=True,
                    tooltip=f"Where the model will run; decides which format has a fast kernel. {places}.",
                ),
            ],
            outputs=[
                QuantRecipe.Output(display_name="recipe", tooltip="The recipe, for a node that quantizes."),
                io.String.Output(display_name="method", tooltip="The method that the preset chose."),
            ],
        )

    @classmethod
    def execute(cls, policy: str, hardware: str = THIS_MACHINE) -> io.NodeOutput:
        recipe = preset(policy, None if hardware == THIS_MACHINE else hardware)
        return io.NodeOutput(recipe, recipe.recipe_method)
