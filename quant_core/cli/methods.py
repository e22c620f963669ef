"""The commands `methods` and `describe`."""

from __future__ import annotations

import argparse
import json

import torch

from .. import backends
from ..registry import QUANT_METHODS, describe_quant_method, find_method, make_backend, method_options
from .common import EXIT_OK


def add_methods(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `methods`."""
    command = commands.add_parser("methods", help="list the methods and how each runs on this machine")
    command.set_defaults(run=_methods)
    return command


def add_describe(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command `describe`."""
    command = commands.add_parser("describe", help="show a method's options")
    command.add_argument("method", metavar="METHOD")
    command.set_defaults(run=_describe)
    return command


def method_rows() -> list[dict[str, str]]:
    """Return every method with how it runs on this machine; ``not here`` where its library is missing."""
    backends.load_all_backends()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, spec in sorted(QUANT_METHODS.items()):
        try:
            support = make_backend(name).support(device)
            runs, note = str(support.kind), support.reason
        except (ImportError, RuntimeError) as error:
            runs, note = "not here", str(error)
        rows.append({"method": name, "backend": spec.backend, "label": spec.label, "runs": runs, "note": note})
    return rows


def _methods(options: argparse.Namespace) -> int:
    rows = method_rows()
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
