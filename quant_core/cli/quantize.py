"""The command `quantize`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..plan import Plan, plan
from ..replace import check_device
from .common import EXIT_OK, add_recipe, add_source, recipe_of
from .running import add_running, interrupted, run_plan
from .tables import print_report


def add_quantize(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `quantize`."""
    command = commands.add_parser("quantize", help="quantize a checkpoint file to file")
    add_source(command)
    command.add_argument("destination", metavar="OUT", help="the .safetensors file to write")
    add_recipe(command)
    command.add_argument("--plan", metavar="FILE", help="a plan of `plan`, edited or not, instead of --method")
    command.add_argument("--measure", action="store_true", help="also report each layer's weight error")
    add_running(command)
    command.set_defaults(run=_quantize)
    return command


def _plan_of(options: argparse.Namespace) -> Plan:
    if options.plan is None:
        recipe = recipe_of(options)
        check_device("--device", options.device)
        for part in recipe.parts():
            support = part.backend.support(options.device or "cpu")
            if support.kind != "native":
                where = options.device or "cpu"
                print(f"{part.method} runs {support.kind} on {where}: {support.reason}", file=sys.stderr)
        return plan(options.source, recipe, part=options.part, requantize=options.requantize)
    if options.method or options.recipe or options.target or options.exclude or options.option or options.requantize:
        raise ValueError("--plan says what is quantized, and how; leave out --method and the options beside it")
    made = Plan.from_json(Path(options.plan).read_text(encoding="utf-8"))
    made.source = options.source
    return made


def _quantize(options: argparse.Namespace) -> int:
    made = _plan_of(options)
    try:
        report = run_plan(made, options, measure=options.measure)
    except KeyboardInterrupt:
        return interrupted(options)
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        print_report(report)
    return EXIT_OK
