"""The command `merge-lora`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.reader import open_checkpoint
from ..convert import ConversionReport
from ..lora import LoraMerge, merge_lora
from ..output import index_path
from ..plan import plan
from ..replace import check_device
from .common import EXIT_OK, add_recipe, add_source, recipe_of
from .running import add_running, interrupted, run_plan
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
    add_running(command)
    command.set_defaults(run=run_merge_lora)
    return command


def run_merge_lora(options: argparse.Namespace) -> int:
    """Run the command."""
    loras = [_lora(given) for given in options.lora]
    try:
        merge, report = _bake(options, loras)
    except KeyboardInterrupt:
        return interrupted(options)
    for item in merge.unmatched:
        print(f"warning: {item}", file=sys.stderr)
    if options.json:
        data = {"baked": [*merge.layers, *merge.others], "unmatched": [str(item) for item in merge.unmatched]}
        print(json.dumps({**data, "report": None if report is None else report.to_dict()}))
        return EXIT_OK
    if report is not None:
        print_report(report)
    others = f", {len(merge.others)} other tensors" if merge.others else ""
    where = "" if report is not None else f"; written to {_written(options)}"
    print(f"LoRAs baked: {len(loras)}; layers changed: {len(merge.layers)}{others}{where}")
    return EXIT_OK


def _written(options: argparse.Namespace) -> str:
    index = index_path(Path(options.destination))
    return f"{index} and its shards" if options.shard_size and index.exists() else options.destination


def _bake(options: argparse.Namespace, loras: list[tuple[str, float]]) -> tuple[LoraMerge, ConversionReport | None]:
    check_device("--device", options.device)
    if options.method is None and options.recipe is None and options.preset is None:
        with progress_bar() as progress:
            merge, _ = merge_lora(
                options.source,
                options.destination,
                loras,
                progress=progress,
                resume=options.resume,
                shard_size=options.shard_size,
                threads=options.threads,
            )
        return merge, None
    merge = LoraMerge(open_checkpoint(options.source), loras)
    made = plan(options.source, recipe_of(options), part=options.part, requantize=options.requantize)
    return merge, run_plan(made, options, transform=merge)


def _lora(given: Sequence[str]) -> tuple[str, float]:
    if len(given) > 2:
        raise ValueError(f"--lora takes a file and a strength, got {' '.join(given)}")
    try:
        return given[0], float(given[1]) if len(given) == 2 else 1.0
    except ValueError:
        raise ValueError(f"--lora {given[0]}: the strength is a number, got {given[1]!r}") from None
