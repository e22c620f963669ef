"""Tables and the progress bar of the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..convert import ConversionReport
from ..job import Progress
from ..plan import QUANTIZE, Plan
from .common import size

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error with the bytes done, the rate and the time left; yields what moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import (
        Progress as Bar,
    )

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield progress


def plain_console() -> Console:
    """Return a console on standard output; in a file or a pipe, where nobody's window ends, lines are long."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    return console


def written_to(destination: str, files: Sequence[str]) -> str:
    """Return the name of what was written, or of the first shard and how many there are."""
    return destination if len(files) < 2 else f"{files[0]} and {len(files) - 1} more"


def print_report(report: ConversionReport) -> None:
    """Print what became of each weight."""
    from rich.table import Table

    table = Table(title=f"{report.method}: what became of each weight", title_justify="left")
    table.add_column("layer", overflow="fold", ratio=1)
    for column in ("shape", "before", "after", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("choice", overflow="fold", max_width=28)
    vectors = [row for row in report.rows if len(row.shape) < 2]
    for row in report.rows:
        if len(row.shape) >= 2:
            error = "" if row.relative_error is None else f"{row.relative_error:.2%}"
            shape = "x".join(map(str, row.shape))
            choice = "quantized" if row.method else f"kept: {row.reason}"
            table.add_row(row.name, shape, size(row.bytes_before), size(row.bytes_after), error, choice)
    console = plain_console()
    console.print(table)
    if vectors:
        console.print(f"{len(vectors)} norms and other 1-D weights kept as they are.")
    share = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    console.print(
        f"{len(report.quantized)} of {len(report.rows)} weights quantized with {report.method}: "
        f"{size(report.bytes_before)} -> {size(report.bytes_after)} ({share:.1%}), "
        f"written to {written_to(report.destination, report.files)}",
        soft_wrap=True,
    )


def print_plan(plan: Plan) -> None:
    """Print the decision for each weight, and the totals."""
    from rich.table import Table

    table = Table(title=f"plan of {plan.source}", title_justify="left")
    table.add_column("layer", overflow="fold", ratio=1)
    for column in ("shape", "dtype", "before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("decision", overflow="fold", max_width=44)
    weights = [row for row in plan.rows if row.is_weight]
    for row in weights:
        if len(row.shape) >= 2 or row.decision == QUANTIZE:
            shape = "x".join(map(str, row.shape))
            choice = f"{row.method}: {row.why}" if row.decision == QUANTIZE else f"{row.decision}: {row.why}"
            table.add_row(row.layer, shape, row.dtype, size(row.bytes_before), size(row.bytes_after), choice)
    console = plain_console()
    console.print(table)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    share = plan.bytes_after / plan.bytes_before if plan.bytes_before else 1.0
    shards = f" in {len(plan.file_sizes)} shards" if len(plan.file_sizes) > 1 else ""
    console.print(
        f"{len(plan.quantized)} of {len(weights)} weights quantized: {size(plan.bytes_before)} -> "
        f"{size(plan.bytes_after)} ({share:.1%}) on the device; {plan.file_bytes} bytes on disk{shards}; converting "
        f"takes about {size(plan.peak_bytes)} of memory",
        soft_wrap=True,
    )
