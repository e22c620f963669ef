"""What several commands share: exit codes, options of methods, sizes for people."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import QuantizeConfig, Recipe, recipe_from_dict
from ..presets import policies, preset, targets

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_source(command: argparse.ArgumentParser) -> None:
    """Add the argument for a checkpoint that is read."""
    command.add_argument(
        "source",
        metavar="IN",
        help="a .safetensors file, a .safetensors.index.json, a folder of shards or of a diffusers model, or a .gguf",
    )


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add the options that say what is quantized, and how."""
    how = command.add_argument_group("what to quantize, and how")
    how.add_argument("--method", help="see `methods`")
    how.add_argument("--recipe", metavar="FILE", help="a recipe as JSON (several methods), instead of --method")
    how.add_argument("--preset", choices=policies(), help="methods by the model's layers, instead of --method")
    how.add_argument("--hardware", choices=targets(), help="what the preset is for (default: this machine)")
    how.add_argument(
        "--exclude",
        action="append",
        metavar="LAYER",
        help="keep this layer as it is (repeatable); a full name or its end",
    )
    how.add_argument(
        "--target",
        action="append",
        metavar="LAYER",
        help="quantize exactly these layers (repeatable) instead of choosing by structure",
    )
    how.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="K=V",
        help="an option of the method, see `describe` (repeatable)",
    )
    how.add_argument(
        "--part",
        default="diffusion",
        choices=("diffusion", "text_encoders", "vae"),
        help="what of an all-in-one checkpoint (default: diffusion)",
    )
    how.add_argument(
        "--requantize",
        action="store_true",
        help="also quantize what IN holds quantized, which adds to its error",
    )
    how.add_argument(
        "--shard-size", type=parse_size, metavar="SIZE", help="write shards of at most this size and an index, e.g. 5GB"
    )


def recipe_of(options: argparse.Namespace) -> Recipe:
    """Return the recipe that the options of :func:`add_recipe` describe."""
    if sum(given is not None for given in (options.recipe, options.method, options.preset)) != 1:
        raise ValueError("give one of --method, --preset and --recipe")
    if options.method is None and (options.target or options.exclude or options.option):
        raise ValueError("--target, --exclude and --option belong to --method; write them into a recipe")
    if options.hardware is not None and options.preset is None:
        raise ValueError("--hardware belongs to --preset")
    if options.preset is not None:
        return preset(options.preset, options.hardware)
    if options.recipe is not None:
        try:
            return recipe_from_dict(json.loads(Path(options.recipe).read_text(encoding="utf-8")))
        except json.JSONDecodeError as error:
            raise ValueError(f"{options.recipe} is not JSON: {error}") from error
    return QuantizeConfig(
        method=options.method,
        target_modules=options.target,
        exclude_modules=options.exclude,
        backend_config_kwargs=parse_options(options.option),
    )


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB``, ``500MiB`` or ``1000000``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|)", text.strip(), re.IGNORECASE)
    if match is None or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write e.g. 5GB, 500MiB or a number of bytes")
    return size


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn ``["blocksize=128", "convrot=false"]`` into keywords; a value is JSON where it can be, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--option {pair!r}: expected KEY=VALUE, e.g. --option blocksize=128")
        literal = {"True": "true", "False": "false", "None": "null"}.get(value, value)
        try:
            options[key] = json.loads(literal)
        except json.JSONDecodeError:
            options[key] = value
    return options


def size(count: int) -> str:
    """Return a byte count for people: ``1.50 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
