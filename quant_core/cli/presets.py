"""The command `preset`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from ..checkpoint import open_checkpoint
from ..plan import QUANTIZE, plan
from ..presets import Tier, architectures, detect, policies, preset, targets, this_target
from .common import EXIT_OK, size


def add_preset(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `preset`."""
    command = commands.add_parser("preset", help="what the presets make of a checkpoint, or which there are")
    command.add_argument("source", metavar="IN", nargs="?", help="a checkpoint; without one the presets are listed")
    command.add_argument("--hardware", choices=targets(), help="what runs the model (default: this machine)")
    command.set_defaults(run=_preset)
    return command


def _preset(options: argparse.Namespace) -> int:
    target = options.hardware or this_target()
    data = _known() if options.source is None else _of(options.source, target)
    if options.json:
        print(json.dumps(data))
        return EXIT_OK
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if options.source is None:
        for title in ("policies", "hardware"):
            table = Table(title, "", box=box.SIMPLE)
            for name, text in data[title].items():
                table.add_row(name, text)
            console.print(table)
        console.print("Architectures whose layers are known: " + "; ".join(data["architectures"].values()) + ".")
        return EXIT_OK
    console.print(data["title"] or "Unknown architecture: all layers of its blocks are treated alike.")
    if data["tiers"]:
        counts = ", ".join(f"{count} {tier}" for tier, count in data["tiers"].items())
        console.print(f"Layers by what they need: {counts}.")
    table = Table("policy", "size", "bits a weight", "layers", box=box.SIMPLE)
    for name, row in data["policies"].items():
        methods = ", ".join(f"{count} {method}" for method, count in row["layers"].items())
        table.add_row(name, size(row["bytes"]), f"{row['bits']:.2f}", methods)
    console.print(table)
    console.print(f"For {targets()[target]} ({target}). The file has {size(data['bytes'])}.")
    return EXIT_OK


def _known() -> dict[str, Any]:
    return {
        "policies": policies(),
        "hardware": targets(),
        "architectures": {name: one.title for name, one in architectures().items()},
    }


def _of(source: str, target: str) -> dict[str, Any]:
    """Return what is known of a checkpoint, and the plan of each policy in figures."""
    tensors = open_checkpoint(source).tensors
    shapes = {k.removesuffix(".weight"): info.shape for k, info in tensors.items() if k.endswith(".weight")}
    shapes = {layer: shape for layer, shape in shapes.items() if len(shape) == 2}
    architecture = detect(shapes)
    tiers: Counter[str] = Counter()
    if architecture is not None:
        tiers.update(architecture.tier(layer)[0].value for layer in shapes)
    rows = {}
    for name in policies():
        made = plan(source, preset(name, target))
        quantized = [row for row in made.rows if row.decision == QUANTIZE]
        weights = sum(row.shape[0] * row.shape[1] for row in quantized)
        rows[name] = {
            "bytes": made.file_bytes,
            "bits": 8 * sum(row.bytes_after for row in quantized) / weights,
            "layers": dict(Counter(row.method for row in quantized).most_common()),
        }
    return {
        "architecture": "" if architecture is None else architecture.name,
        "title": "" if architecture is None else architecture.title,
        "tiers": {tier.value: tiers[tier.value] for tier in Tier if tiers[tier.value]},
        "bytes": sum(info.nbytes for info in tensors.values()),
        "policies": rows,
    }
