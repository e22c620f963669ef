"""The node *Quantization Methods on This Machine*."""

from __future__ import annotations

import importlib.util
import time

from comfy_api.latest import io

from quant_core.cli.methods import method_rows

from .core import quantizes
from .tables import ROWS, columns

LIBRARIES = {"comfy_kitchen": "comfy-kitchen", "bitsandbytes": "bitsandbytes", "torchao": "torchao"}
"""``{module: what pip calls it}``."""


class ListMethods(io.ComfyNode):
    """Says which methods there are, how each runs here, and what is missing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_ListMethods",
            display_name="Quantization Methods on This Machine",
            category="quantization",
            description=(
                "Lists every method with how it runs here: native (the library has a kernel for this hardware), "
                "emulated (the weight is turned back to float for each multiplication), or not at all, with the "
                "library that is missing and how to install it."
            ),
            search_aliases=["quantization methods", "which method", "bitsandbytes missing", "install torchao"],
            is_output_node=True,
            inputs=[],
            outputs=[io.String.Output(display_name="text", tooltip="The list as text.")],
        )

    @classmethod
    def fingerprint_inputs(cls) -> float:
        return time.time()  # what is installed may have changed

    @classmethod
    def execute(cls) -> io.NodeOutput:
        if quantizes():
            from .recipe import method_names

            method_names()  # lets other packs register theirs
        rows = method_rows()
        table = [("method", "runs", "what")]
        table += [(r["method"], r["runs"], r["note"] if r["runs"] == "not here" else r["label"]) for r in rows]
        missing = [name for module, name in LIBRARIES.items() if not _is_installed(module)]
        advice = [f"{name} is missing: install it into ComfyUI's Python, pip install {name}" for name in missing]
        text = "\n".join([*advice, *([""] if advice else []), columns(table)])
        return io.NodeOutput(text, ui={"text": [text], ROWS: rows})


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
