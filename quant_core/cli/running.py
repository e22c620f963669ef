"""What the commands share that write a file: where they compute, resuming, and what an interrupt leaves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..checkpoint.journal import journal_path
from ..convert import ConversionReport, convert
from ..job import WeightTransform
from ..plan import Plan
from .common import EXIT_INTERRUPTED
from .tables import progress_bar


def add_running(command: argparse.ArgumentParser) -> None:
    """Add the options that say where and how a file is written."""
    command.add_argument("--device", default=None, help="where to quantize, e.g. cuda (default: cpu)")
    command.add_argument(
        "--threads", type=int, default=None, help="how many read and compute (default: the CPUs, to 4)"
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="continue what an interrupted run left, and leave what is written when this one is interrupted",
    )


def run_plan(
    made: Plan, options: argparse.Namespace, *, measure: bool = False, transform: WeightTransform | None = None
) -> ConversionReport:
    """Convert as planned and as the options of :func:`add_running` say, with the plan's warnings and a bar."""
    for warning in made.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with progress_bar() as progress:
        return convert(
            made,
            options.destination,
            device=options.device,
            resume=options.resume,
            shard_size=options.shard_size,
            progress=progress,
            threads=options.threads,
            measure=measure,
            transform=transform,
        )


def interrupted(options: argparse.Namespace) -> int:
    """Say what an interrupt left of the file that was being written; return the exit code."""
    kept = options.resume and journal_path(Path(options.destination)).exists()
    left = "what is written stays; the same command continues it" if kept else "nothing was written"
    print(f"interrupted; {left}", file=sys.stderr)
    return EXIT_INTERRUPTED
