"""The command `inspect`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..checkpoint.formats import stored_layers
from ..checkpoint.hashing import structure_hash
from ..checkpoint.manifest import read_manifest
from ..checkpoint.reader import open_checkpoint
from .common import EXIT_OK, size


def add_inspect(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `inspect`."""
    command = commands.add_parser("inspect", help="say how a file is quantized")
    command.add_argument("file", metavar="FILE")
    command.set_defaults(run=_inspect)
    return command


def inspect_file(path: str) -> dict[str, Any]:
    """Return what is known of a checkpoint: sizes, structure hash, recipe, and the layers of each method."""
    checkpoint = open_checkpoint(path)
    manifest = read_manifest(checkpoint.path, checkpoint.metadata)
    if manifest is not None:
        recipe = manifest.recipe
        methods = [part["method"] for part in recipe.get("configs", [recipe])]
        layers = [{"method": m, "layers": names} for m, names in zip(methods, manifest.layers, strict=True)]
    else:
        recipe = None
        groups: dict[str, list[str]] = {}
        for layer in stored_layers(checkpoint).values():
            groups.setdefault(layer.method or f"{layer.family} {layer.format}", []).append(layer.name)
        layers = [{"method": m, "layers": names} for m, names in groups.items()]
    dtypes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        name = str(info.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + info.nbytes
    return {
        "path": str(checkpoint.path),
        "files": [str(f) for f in checkpoint.files],
        "tensors": len(checkpoint.tensors),
        "bytes": sum(dtypes.values()),
        "bytes_by_dtype": dtypes,
        "structure_hash": structure_hash({n: i.shape for n, i in checkpoint.tensors.items()}),
        "written_by": None if manifest is None else f"quant_core {manifest.version}",
        "recipe": recipe,
        "quantized": layers,
    }


def _inspect(options: argparse.Namespace) -> int:
    data = inspect_file(options.file)
    if options.json:
        print(json.dumps(data))
        return EXIT_OK
    print(f"file: {data['path']}")
    print(f"tensors: {data['tensors']}, {size(data['bytes'])} ({len(data['files'])} file(s))")
    for dtype, count in sorted(data["bytes_by_dtype"].items(), key=lambda item: -item[1]):
        print(f"  {dtype}: {size(count)}")
    print(f"structure hash: {data['structure_hash']}")
    print(f"written by: {data['written_by'] or 'unknown (no manifest)'}")
    if data["recipe"] is not None:
        print(f"recipe: {json.dumps(data['recipe'])}")
    if not data["quantized"]:
        print("quantized layers: none (a float checkpoint)")
    for group in data["quantized"]:
        names = group["layers"]
        print(f"{group['method']}: {len(names)} layers ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    return EXIT_OK
