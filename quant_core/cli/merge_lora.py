"""The command `merge-lora`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ..checkpoint.reader import open_checkpoint
from ..convert import convert
from ..lora import LoraMerge, merge_lora
from ..plan import plan
from .common import EXIT_OK, add_recipe, add_source, recipe_of
from .tables import print_report, progress_bar


def add_merge_lora(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `merge-lora`."""
    command = commands.add_parser(
        "merge-lora", help="bake LoRAs into a model in float, and with --method quantize it in the same pass"
    )
    add_source(command)
    command.add_argument("destination", metavar="OUT", help="the .safetensors file to write")
    command.add_argument(
        "--lora",
        action="append",
        nargs="+",
        required=True,
        metavar=("FILE", "STRENGTH"),
        help="a LoRA and its strength (default 1); repeatable",
    )
    add_recipe(command)
    command.add_argument("--device", default=None, help="where to compute, e.g. cuda (default: cpu)")
    command.set_defaults(run=run_merge_lora)
    return command


def run_merge_lora(options: argparse.Namespace) -> int:
    """Run the command."""
    loras = [_lora(given) for given in options.lora]
    if options.method is None and options.recipe is None:
        merge, _ = merge_lora(options.source, options.destination, loras)
        report = None
    else:
        merge = LoraMerge(open_checkpoint(options.source), loras)
        made = plan(options.source, recipe_of(options), part=options.part, requantize=options.requantize)
        with progress_bar() as progress:
            report = convert(
                made,
                options.destination,
                device=options.device,
                shard_size=options.shard_size,
                progress=progress,
                transform=merge,
            )
    for item in merge.unmatched:
        print(f"warning: {item}", file=sys.stderr)
    if options.json:
        data = {"baked": merge.layers, "unmatched": [str(item) for item in merge.unmatched]}
        print(json.dumps({**data, "report": None if report is None else report.to_dict()}))
        return EXIT_OK
    if report is not None:
        print_report(report)
    print(f"{len(merge.layers)} layers baked from {len(loras)} LoRAs, written to {options.destination}")
    return EXIT_OK


def _lora(given: Sequence[str]) -> tuple[str, float]:
    if len(given) > 2:
        raise ValueError(f"--lora takes a file and a strength, got {' '.join(given)}")
    try:
        return given[0], float(given[1]) if len(given) == 2 else 1.0
    except ValueError:
        raise ValueError(f"--lora {given[0]}: the strength is a number, got {given[1]!r}") from None
