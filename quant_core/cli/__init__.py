"""The command line: ``python -m quant_core COMMAND``. A command is one file here and one line in ``_COMMANDS``."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import CheckpointError, QuantizationError
from ..version import __version__
from .common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, parse_options
from .doctor import add_doctor
from .inspect import add_inspect
from .merge_lora import add_merge_lora
from .methods import add_describe, add_methods
from .plan import add_plan
from .presets import add_preset
from .quantize import add_quantize
from .verify import add_verify

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_USAGE", "main", "parse_options"]

# Each adds its parser and returns it; the parser's default `run` takes the options and returns the exit code.
_COMMANDS = (
    add_plan,
    add_preset,
    add_quantize,
    add_doctor,
    add_verify,
    add_merge_lora,
    add_methods,
    add_describe,
    add_inspect,
)


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

    for add in _COMMANDS:
        add(commands).add_argument("--json", action="store_true", help="print JSON on standard output")
    return parser
