"""The command `plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..plan import plan
from .common import EXIT_OK, add_recipe, add_source, recipe_of
from .tables import print_plan


def add_plan(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `plan`."""
    command = commands.add_parser("plan", help="say what quantizing a checkpoint will do, from its header")
    add_source(command)
    add_recipe(command)
    command.add_argument("--output", metavar="FILE", help="also write the plan to FILE: .json (to edit) or .csv")
    command.set_defaults(run=_plan)
    return command


def _plan(options: argparse.Namespace) -> int:
    made = plan(
        options.source,
        recipe_of(options),
        part=options.part,
        requantize=options.requantize,
        shard_size=options.shard_size,
    )
    if options.output is not None:
        path = Path(options.output)
        if path.suffix not in (".json", ".csv"):
            raise ValueError(f"{path}: a plan is written as .json or .csv")
        path.write_text(made.to_csv() if path.suffix == ".csv" else made.to_json(), encoding="utf-8")
    if options.json:
        print(made.to_json(), end="")
    else:
        print_plan(made)
    return EXIT_OK
