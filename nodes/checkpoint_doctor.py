"""The node *Checkpoint Doctor*."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from quant_core.doctor import COMFYUI, RepairResult, Report, doctor, repair

from .file_inputs import file_input
from .host.files import check_cancelled, fingerprint, full_path, repaired_file
from .tables import ROWS, doctor_rows, doctor_text


class CheckpointDoctor(io.ComfyNode):
    """Says whether a quantized file loads, and if not why; writes a repaired copy."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_CheckpointDoctor",
            display_name="Checkpoint Doctor",
            category="quantization",
            description=(
                "Why does a quantized file not load, or draw noise? Examines its layers as ComfyUI's own loader would "
                "read them, names what is wrong in each, and repairs what can be repaired without loss."
            ),
            search_aliases=["check quantized file", "repair safetensors", "model draws noise", "does not load", "fix"],
            is_output_node=True,
            inputs=[
                file_input("The file to examine; it is not changed."),
                io.Boolean.Input(
                    "repair",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Also write a repaired copy into the output folder's subfolder for this kind of file, where "
                        "the loaders list it. Only what changes no weight is repaired."
                    ),
                ),
                io.Boolean.Input(
                    "read_weights",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Also read every weight, for NaN, zeros and the file's own checksums. Off: the header, "
                        "markers and scales alone, which takes a moment."
                    ),
                ),
            ],
            outputs=[
                io.String.Output(
                    "report", display_name="report", tooltip="The verdicts, and each finding with its fix."
                ),
                io.Boolean.Output(
                    "loads",
                    display_name="loads",
                    tooltip=(
                        "Whether ComfyUI's own loader loads the file, and computes what was meant; of the repaired "
                        "copy where one was written."
                    ),
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None, **options: Any) -> Any:
        return (fingerprint(file), tuple(sorted(options.items())))

    @classmethod
    def execute(cls, file: str, repair: bool = False, read_weights: bool = True) -> io.NodeOutput:
        path = full_path(file)
        report = doctor(path, read_weights=read_weights)
        check_cancelled()
        repaired, refusal = _repair(file, path, report) if repair else (None, "")
        text = doctor_text(report, repaired, refusal)
        final = report if repaired is None else repaired.report
        return io.NodeOutput(text, final.verdict(COMFYUI) == "loads", ui={"text": [text], ROWS: doctor_rows(report)})


def _repair(file: str, path: str, report: Report) -> tuple[RepairResult | None, str]:
    """Write a repaired copy; return it, or why there is none."""
    if not report.repairable:
        return None, "no finding has a repair without loss" if report.findings else "there is nothing to repair"
    try:
        return repair(path, repaired_file(file), report), ""
    except ValueError as error:  # the findings are worth as much without a repair
        return None, str(error)
