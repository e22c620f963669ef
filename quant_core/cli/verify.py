"""The command `verify`."""

from __future__ import annotations

import argparse
import json
import sys

from ..verify import VerifyReport, verify
from .common import EXIT_FAILED, EXIT_OK


def add_verify(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `verify`."""
    command = commands.add_parser(
        "verify", help="measure a quantized file against the float file; exit code 1 if it is no copy of it"
    )
    command.add_argument("file", metavar="FILE")
    command.add_argument("source", metavar="SOURCE", help="what FILE was quantized from")
    command.add_argument(
        "--max-error",
        type=parse_error,
        metavar="E",
        help="exit code 1 if a layer's relative error is above this, e.g. 0.03 or 3%%",
    )
    command.set_defaults(run=run_verify)
    return command


def parse_error(text: str) -> float:
    """Return the share that ``0.03`` or ``3%`` is."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an error; write e.g. 0.03 or 3%")
    return value


def run_verify(options: argparse.Namespace) -> int:
    """Run the command."""
    report = verify(options.file, options.source)
    problems = report.problems(options.max_error)
    if options.json:
        print(json.dumps({**report.to_dict(), "problems": problems}))
    else:
        _print_report(report)
    for problem in problems:
        print(problem, file=sys.stderr)
    return EXIT_FAILED if problems else EXIT_OK


def _print_report(report: VerifyReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("layer", overflow="fold", ratio=1)
    table.add_column("format", no_wrap=True)
    for column in ("shape", "error", "largest"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        shape = "x".join(map(str, row.shape))
        table.add_row(row.name, row.format, shape, f"{row.relative_error:.3%}", f"{row.max_error:.3g}")
    console = Console()
    console.print(table)
    worst = report.worst
    end = "" if worst is None else f"; the largest error is {worst.relative_error:.3%}, of {worst.name}"
    console.print(
        f"{len(report.rows)} quantized layers compared, {report.identical} other tensors are the same bytes{end}",
        soft_wrap=True,
    )
