"""The demo: quantize a model, save it, load it back, and show sizes and errors. Started by ``python dev.py demo``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minilm
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from quant_core import (
    QUANT_METHODS,
    QuantizationError,
    QuantizeConfig,
    load_quantized_model,
    save_quantized_model,
)
from quant_core.backends import load_all_backends
from quant_core.checkpoint import open_checkpoint
from quant_core.convert import convert_file
from quant_core.measure import relative_error

DEFAULT_METHOD = "comfy_kitchen_int8_w8a8"
OUTPUT = Path("demo-output")
TEXTS = Path(__file__).with_name("held_out.txt")


@dataclass
class Result:
    """One method on the demo model.

    Attributes:
        layers: one row a layer, see ``quant_core.measure_quantization_error``.
        output_error: of the reloaded model's last hidden states on the held-out texts.
        reload_equal: whether the reloaded model gives the same output, bit for bit, as the one that was saved.
        same_neighbours: how many texts keep their most similar other text.
    """

    method: str
    path: Path
    layers: list[dict[str, Any]]
    output_error: float
    reload_equal: bool
    same_neighbours: int
    seconds: float

    @property
    def bytes_before(self) -> int:
        return sum(row["bytes_before"] for row in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(row["bytes_after"] for row in self.layers)

    @property
    def weight_error(self) -> float:
        """The mean of the layers' relative errors."""
        return sum(row["relative_error"] for row in self.layers) / len(self.layers)


def read_texts() -> list[str]:
    """Return the held-out texts, one a line. They were chosen once, before any method was measured."""
    return TEXTS.read_text(encoding="utf-8").splitlines()


def _neighbours(states: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    embeddings = minilm.pool(states, visible)
    return (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1)


@torch.no_grad()
def run_method(method: str, texts: list[str], folder: Path = OUTPUT) -> Result:
    """Quantize the demo model with ``method``, save it in ``folder``, load it into a fresh model and compare."""
    ids, visible = minilm.tokenize(texts)
    model = minilm.load_minilm()
    reference = model(ids, visible)

    config = QuantizeConfig(method=method)
    layers = sorted(config.measure_quantization_error(model, verbose=False), key=lambda row: row["name"])
    started = time.perf_counter()
    config.quantize_model(model)
    seconds = time.perf_counter() - started
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"minilm-{method}.safetensors"
    save_quantized_model(model, config, path)

    reloaded = minilm.MiniLM().eval()
    load_quantized_model(reloaded, path)
    output = reloaded(ids, visible)
    return Result(
        method,
        path,
        layers,
        minilm.relative_error(reference[visible], output[visible]),
        torch.equal(output, model(ids, visible)),
        int((_neighbours(reference, visible) == _neighbours(output, visible)).sum()),
        seconds,
    )


def show(result: Result, texts: list[str], console: Console) -> None:
    """Print one method: every layer, the totals, and where the file lies."""
    table = Table(title=f"all-MiniLM-L6-v2, quantized with {result.method}")
    table.add_column("layer", no_wrap=True)
    for title in ("shape", "bytes before", "bytes after", "weight error"):
        table.add_column(title, justify="right")
    for row in result.layers:
        table.add_row(
            row["name"],
            "x".join(map(str, row["shape"])),
            f"{row['bytes_before']:,}",
            f"{row['bytes_after']:,}",
            f"{row['relative_error']:.2%}",
        )
    table.add_section()
    table.add_row(
        f"{len(result.layers)} layers",
        "",
        f"{result.bytes_before:,}",
        f"{result.bytes_after:,}",
        f"{result.weight_error:.2%} (mean)",
    )
    console.print(table)
    console.print(
        f"The quantized layers take {result.bytes_before / result.bytes_after:.2f} times fewer bytes than in float32. "
        f"Quantized in {result.seconds:.1f} s."
    )
    console.print(
        f"Output error of the whole model on {len(texts)} held-out texts: {result.output_error:.2%} "
        f"({result.same_neighbours} of {len(texts)} texts keep their nearest neighbour)."
    )
    equal = "the same output, bit for bit" if result.reload_equal else "ANOTHER OUTPUT: this is a bug, please report it"
    console.print(f"Saved and loaded back into a fresh model: {equal}.")
    console.print(f"File: {result.path.absolute()}", soft_wrap=True)


def compare(methods: list[str], texts: list[str], console: Console) -> bool:
    """Print one line a method; returns whether every file loaded back to the same output."""
    table = Table(title=f"all-MiniLM-L6-v2, 36 layers, {len(texts)} held-out texts")
    table.add_column("method", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    for title in ("bytes", "bits a weight", "weight error", "output error", "reload"):
        table.add_column(title, justify="right")
    refused = []
    fine = True
    for method in methods:
        console.print(f"{method} ...", highlight=False)
        try:
            result = run_method(method, texts)
        except (ImportError, ValueError, RuntimeError) as error:
            refused.append(f"{method}: {error}")
            continue
        fine = fine and result.reload_equal
        table.add_row(
            method,
            QuantizeConfig(method=method).backend.support("cpu").kind,
            f"{result.bytes_after:,}",
            f"{result.bytes_after * 8 / (result.bytes_before / 4):.2f}",
            f"{result.weight_error:.2%}",
            f"{result.output_error:.2%}",
            "equal" if result.reload_equal else "DIFFERENT",
        )
    console.print(table)
    for line in refused:
        console.print(f"Not possible here: {line}", markup=False, soft_wrap=True)
    console.print(f"Files: {OUTPUT.absolute()}", soft_wrap=True)
    return fine


@torch.no_grad()
def convert(source: Path, config: QuantizeConfig, console: Console) -> None:
    """Quantize the user's file, read it back, and print every layer: size, weight error, output error.

    The output error is the one of the layer that was read back, against the float layer, on Gaussian inputs: a file
    tells no real ones.
    """
    destination = OUTPUT / f"{source.stem}-{config.method}.safetensors"
    device = "cuda" if torch.cuda.is_available() else None
    report = convert_file(source, destination, config, compute_device=device, measure=True)

    float_file, quantized_file = open_checkpoint(source), open_checkpoint(destination)
    table = Table(title=f"{source.name}, quantized with {config.method}", box=box.SIMPLE)
    table.add_column("layer", overflow="fold")
    for title in ("bytes before", "bytes after", "weight error", "output error"):
        table.add_column(title, justify="right", no_wrap=True)
    torch.manual_seed(0)
    for row in report.quantized:
        weight = float_file.read(f"{row.name}.weight").float()
        own = {key: quantized_file.read(key) for key in quantized_file.tensors if key.startswith(f"{row.name}.")}
        own.pop(f"{row.name}.bias", None)
        state = config.unflatten_state_dict(own, quantized_file.metadata)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer = config.build_quantized_shell(linear, torch.float32, layer_name=row.name)
        layer.load_state_dict({key.removeprefix(f"{row.name}."): value for key, value in state.items()}, assign=True)
        x = torch.randn(64, weight.shape[1])
        error = relative_error(torch.nn.functional.linear(x, weight), layer(x))
        cells = (f"{row.bytes_before:,}", f"{row.bytes_after:,}", f"{row.relative_error:.2%}", f"{error:.2%}")
        table.add_row(row.name, *cells)
    console.print(table)
    kept = [row for row in report.rows if not row.method]
    for reason in dict.fromkeys(row.reason for row in kept):
        names = [row.name for row in kept if row.reason == reason]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        console.print(f"Kept ({reason}): {shown}", markup=False)
    console.print(
        f"{len(report.quantized)} of {len(report.rows)} weights quantized and read back; the file went from "
        f"{report.bytes_before:,} to {report.bytes_after:,} bytes."
    )
    console.print(f"File: {destination.absolute()}", soft_wrap=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py demo", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a safetensors file of yours; default: a small model")
    parser.add_argument(
        "--method",
        action="append",
        help=f"default: {DEFAULT_METHOD}; given several times: compare them; all: compare every method",
    )
    parser.add_argument("--target", action="append", metavar="LAYER", help="with FILE: quantize exactly these layers")
    parser.add_argument("--exclude", action="append", metavar="LAYER", help="with FILE: keep these layers as they are")
    arguments = parser.parse_args(argv)
    methods = arguments.method or [DEFAULT_METHOD]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "120")  # rich would assume 80 and break the tables.
    console = Console()
    if methods == ["all"]:
        load_all_backends()
        methods = sorted(QUANT_METHODS)
    try:
        if arguments.file is not None:
            for method in methods:
                config = QuantizeConfig(method, target_modules=arguments.target, exclude_modules=arguments.exclude)
                convert(arguments.file, config, console)
            return 0
        texts = read_texts()
        if len(methods) > 1:
            return 0 if compare(methods, texts, console) else 1
        result = run_method(methods[0], texts)
    except (ImportError, ValueError, OSError, QuantizationError) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    show(result, texts, console)
    return 0 if result.reload_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
