"""Plans and findings as text for people, and as rows for a table in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from quant_core.cli.common import size
from quant_core.doctor import LOADERS, Finding, RepairResult, Report
from quant_core.plan import QUANTIZE, Plan, PlanRow

ROWS = "quantcore_rows"
"""The key of the rows in what a node shows."""

_MOST_EDITS = 20


def columns(table: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of cells as lines, the columns aligned; those in ``right`` to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    lines = []
    for row in table:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ------------------------------------------------------------------ plans


def plan_text(plan: Plan) -> str:
    """Return the plan's totals, its warnings, and what becomes of each weight."""
    weights = [row for row in plan.rows if row.is_weight and (len(row.shape) >= 2 or row.decision == QUANTIZE)]
    table = [("layer", "shape", "dtype", "before", "after", "decision")]
    for row in weights:
        sizes = (size(row.bytes_before), size(row.bytes_after))
        table.append((row.layer, "x".join(map(str, row.shape)), row.dtype, *sizes, decision_text(row)))
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join([plan_summary(plan), *warnings, "", columns(table, right=(3, 4))])


def plan_summary(plan: Plan) -> str:
    """Return the totals in one line."""
    share = plan.bytes_after / plan.bytes_before if plan.bytes_before else 1.0
    shards = f" in {len(plan.file_sizes)} shards" if len(plan.file_sizes) > 1 else ""
    return (
        f"{len(plan.quantized)} of {sum(row.is_weight for row in plan.rows)} weights quantized with {plan.method}: "
        f"{size(plan.bytes_before)} -> {size(plan.bytes_after)} ({share:.1%}); the file takes {plan.file_bytes:,} "
        f"bytes{shards}, converting it about {size(plan.peak_bytes)} of memory"
    )


def decision_text(row: PlanRow) -> str:
    """Return what becomes of a tensor, and why."""
    return f"{row.method or row.decision}: {row.why}"


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return every tensor as JSON-serializable data."""
    return [
        {
            "layer": row.layer,
            "tensor": row.tensor,
            "shape": list(row.shape),
            "dtype": row.dtype,
            "decision": row.decision,
            "method": row.method,
            "why": row.why,
            "bytes_before": row.bytes_before,
            "bytes_after": row.bytes_after,
        }
        for row in plan.rows
    ]


# ------------------------------------------------------------------ the doctor's report


def doctor_text(report: Report, repaired: RepairResult | None = None, refusal: str = "") -> str:
    """Return a report, the loaders' verdicts first.

    Args:
        report: on the file.
        repaired: what was written, if anything was.
        refusal: why nothing was, where it was asked for.
    """
    lines = [f"{report.path}: {report.layers} layers in ComfyUI's formats", *_verdicts(report)]
    for _, group in groupby(report.findings, key=lambda finding: (finding.level, finding.code)):
        lines += _finding_lines(list(group))
    lines += [] if report.findings else ["no findings"]
    lines += ["", "not checked: " + "; ".join(report.unchecked)]
    if repaired is not None:
        lines += ["", *_repair_lines(repaired)]
    if refusal:
        lines += ["", f"not repaired: {refusal}"]
    return "\n".join(lines)


def _verdicts(report: Report) -> list[str]:
    return [f"  {text}: {report.verdict(loader)}" for loader, text in LOADERS.items()]


def _finding_lines(group: Sequence[Finding]) -> list[str]:
    first = group[0]
    lines = ["", f"{first.code} ({', '.join(f'{loader}: {level}' for loader, level in first.levels.items())})"]
    if first.layer:
        more = f" and {len(group) - 3} more" if len(group) > 3 else ""
        lines.append(f"  layer: {', '.join(finding.layer for finding in group[:3])}{more}")
    lines += [f"  cause: {first.cause}", f"  fix: {first.fix}"]
    return lines


def _repair_lines(result: RepairResult) -> list[str]:
    lines = [f"repaired copy: {result.destination}", *_verdicts(result.report)]
    lines += [f"  {edit}" for edit in result.edits[:_MOST_EDITS]]
    if len(result.edits) > _MOST_EDITS:
        lines.append(f"  and {len(result.edits) - _MOST_EDITS} more changes")
    return lines + [f"  not done: {sentence}" for sentence in result.refused]


def doctor_rows(report: Report) -> list[dict[str, Any]]:
    """Return every finding as JSON-serializable data."""
    return [finding.to_dict() for finding in report.findings]
