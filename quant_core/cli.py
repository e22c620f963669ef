"""The command line: ``python -m quant_core quantize | methods | describe | inspect``."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from . import backends
from .checkpoint.hashing import structure_hash
from .checkpoint.manifest import read_manifest
from .checkpoint.reader import open_checkpoint
from .checkpoint.recognize import recognize_layers
from .config import QuantizeConfig
from .convert import ConversionReport, Progress, convert_file
from .errors import CheckpointError, QuantizationError
from .registry import QUANT_METHODS, describe_quant_method, find_method, make_backend, method_options
from .replace import check_device
from .version import __version__

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a layer's or file's name may not fit the terminal
    options = _parser().parse_args(arguments)
    try:
        for module in options.modules:
            import_module(module)
        code = options.run(options)
        sys.stdout.flush()  # a closed pipe shows here
        return code
    except BrokenPipeError:
        # The reader, `head` for one, has what it wanted; the interpreter must not write to the pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (CheckpointError, QuantizationError, ValueError, ImportError, NotImplementedError, OSError) as error:
        _fail(options, error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def _fail(options: argparse.Namespace, error: Exception) -> None:
    if options.json:
        print(json.dumps({"error": str(error), "type": type(error).__name__}))
    print(f"error: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quant_core", description="Quantize checkpoints of diffusion models."
    )
    parser.add_argument("--version", action="version", version=f"quant_core {__version__}")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="first import a module that registers methods of your own (repeatable); found as `python -m` finds it",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    quantize = commands.add_parser("quantize", help="quantize a checkpoint file to file")
    quantize.add_argument(
        "source", metavar="IN", help="a .safetensors file, a .safetensors.index.json, or a folder of shards"
    )
    quantize.add_argument("destination", metavar="OUT", help="the .safetensors file to write")
    quantize.add_argument("--method", required=True, help="see `methods`")
    quantize.add_argument(
        "--exclude",
        action="append",
        metavar="LAYER",
        help="keep this layer as it is (repeatable); a full name or its end",
    )
    quantize.add_argument(
        "--target",
        action="append",
        metavar="LAYER",
        help="quantize exactly these layers (repeatable) instead of choosing by structure",
    )
    quantize.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="K=V",
        help="an option of the method, see `describe` (repeatable)",
    )
    quantize.add_argument("--device", default=None, help="where to compute, e.g. cuda (default: cpu)")
    quantize.add_argument("--measure", action="store_true", help="also report each layer's weight error")
    quantize.set_defaults(run=_quantize)

    methods = commands.add_parser("methods", help="list the methods and how each runs on this machine")
    methods.set_defaults(run=_methods)

    describe = commands.add_parser("describe", help="show a method's options")
    describe.add_argument("method", metavar="METHOD")
    describe.set_defaults(run=_describe)

    inspect = commands.add_parser("inspect", help="say how a file is quantized")
    inspect.add_argument("file", metavar="FILE")
    inspect.set_defaults(run=_inspect)
    for command in (quantize, methods, describe, inspect):
        command.add_argument("--json", action="store_true", help="print JSON on standard output")
    return parser


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


def _quantize(options: argparse.Namespace) -> int:
    config = QuantizeConfig(
        method=options.method,
        target_modules=options.target,
        exclude_modules=options.exclude,
        backend_config_kwargs=parse_options(options.option),
    )
    check_device("--device", options.device)
    support = config.backend.support(options.device or "cpu")
    if support.kind != "native":
        print(f"{config.method} runs {support.kind} on {options.device or 'cpu'}: {support.reason}", file=sys.stderr)
    with _progress_bar() as progress:
        report = convert_file(
            options.source,
            options.destination,
            config,
            compute_device=options.device,
            measure=options.measure,
            progress=progress,
        )
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        _print_report(report)
    return EXIT_OK


@contextmanager
def _progress_bar() -> Iterator[Progress]:
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


def _print_report(report: ConversionReport) -> None:
    from rich.console import Console
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
    console = Console()
    console.print(table)
    if vectors:
        console.print(f"{len(vectors)} norms and other 1-D weights kept as they are.")
    share = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    console.print(
        f"{len(report.quantized)} of {len(report.rows)} weights quantized with {report.method}: "
        f"{size(report.bytes_before)} -> {size(report.bytes_after)} ({share:.1%}), written to {report.destination}",
        soft_wrap=True,
    )


def size(count: int) -> str:
    """Return a byte count for people: ``1.50 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def _method_rows() -> list[dict[str, str]]:
    backends.load_all_backends()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    runs: str
    for name, spec in sorted(QUANT_METHODS.items()):
        try:
            support = make_backend(name).support(device)
            runs, note = support.kind, support.reason
        except (ImportError, RuntimeError) as error:
            runs, note = "not here", str(error)
        rows.append({"method": name, "backend": spec.backend, "label": spec.label, "runs": runs, "note": note})
    return rows


def _methods(options: argparse.Namespace) -> int:
    rows = _method_rows()
    if options.json:
        print(json.dumps(rows))
        return EXIT_OK
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("method", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    table.add_column("what")
    for row in rows:
        table.add_row(row["method"], row["runs"], row["note"] if row["runs"] == "not here" else row["label"])
    console = Console()
    console.print(table)
    console.print(
        "native: the library has a kernel for it here. emulated: the same file and weights, dequantized and "
        "multiplied in float; --json says why."
    )
    return EXIT_OK


def _describe(options: argparse.Namespace) -> int:
    if not options.json:
        describe_quant_method(options.method)
        return EXIT_OK
    spec = find_method(options.method)
    tunable, pinned = method_options(spec.config_factory({}))
    data = {
        "method": options.method,
        "backend": spec.backend,
        "label": spec.label,
        "options": {k: repr(v) for k, v in tunable.items()},
        "pinned": {k: repr(v) for k, v in pinned.items()},
    }
    print(json.dumps(data))
    return EXIT_OK


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
        layers = [{"method": m, "layers": names} for (m, _), names in recognize_layers(checkpoint).items()]
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
