"""The command `doctor`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import groupby

from ..doctor import LOADERS, Finding, RepairResult, Report, doctor, repair
from .common import EXIT_FAILED, EXIT_OK


def add_doctor(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `doctor`."""
    command = commands.add_parser(
        "doctor", help="say whether a quantized file loads, in ComfyUI and here, and if not why; repair it"
    )
    command.add_argument("file", metavar="FILE")
    command.add_argument("--fix", metavar="OUT", help="write a repaired copy: what can be put right without loss")
    command.add_argument(
        "--loader",
        choices=tuple(LOADERS),
        help="speak of one loader only; the exit code is 1 where a loader that is spoken of does not load the file, or "
        "loads it wrong",
    )
    command.add_argument("--quick", action="store_true", help="read the header, markers and scales, not the weights")
    command.set_defaults(run=run_doctor)
    return command


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command; with ``--fix`` the exit code is that of the repaired file."""
    report = doctor(options.file, read_weights=not options.quick)
    result = None if options.fix is None else repair(options.file, options.fix, report)
    loaders = list(LOADERS) if options.loader is None else [options.loader]
    if options.json:
        print(json.dumps({**report.to_dict(), "repaired": None if result is None else result.to_dict()}))
    else:
        _print_report(report, loaders)
        if result is not None:
            _print_repair(result, loaders)
    final = report if result is None else result.report
    return EXIT_OK if all(final.verdict(loader) == "loads" for loader in loaders) else EXIT_FAILED


def _print_report(report: Report, loaders: Sequence[str]) -> None:
    print(f"{report.path}: {report.layers} layers in ComfyUI's formats")
    _print_verdicts(report, loaders)
    shown = [finding for finding in report.findings if any(loader in finding.levels for loader in loaders)]
    for _, group in groupby(shown, key=lambda finding: (finding.level, finding.code)):
        _print_group(list(group))
    if not shown:
        print("no findings")
    print("not checked: " + "; ".join(report.unchecked))


def _print_verdicts(report: Report, loaders: Sequence[str]) -> None:
    for loader in loaders:
        print(f"  {report.verdict(loader):20} {LOADERS[loader]}")


def _print_group(group: Sequence[Finding]) -> None:
    first = group[0]
    levels = ", ".join(f"{loader}: {level}" for loader, level in first.levels.items())
    print(f"\n{first.code} ({levels})")
    if first.layer:
        more = f" and {len(group) - 3} more" if len(group) > 3 else ""
        print(f"  layer: {', '.join(finding.layer for finding in group[:3])}{more}")
    print(f"  cause: {first.cause}")
    print(f"  fix:   {first.fix}")
    if first.mirrors:
        print(f"  rule:  {first.mirrors}")


def _print_repair(result: RepairResult, loaders: Sequence[str]) -> None:
    print(f"\nwritten to {result.destination}:")
    _print_verdicts(result.report, loaders)
    for edit in result.edits[:20]:
        print(f"  {edit}")
    if len(result.edits) > 20:
        print(f"  and {len(result.edits) - 20} more changes")
    for sentence in result.refused:
        print(f"  not done: {sentence}")
    for proof, layers in groupby(sorted(result.proofs, key=lambda layer: result.proofs[layer]), result.proofs.get):
        print(f"  proof, {len(list(layers))} layers: {proof}")
