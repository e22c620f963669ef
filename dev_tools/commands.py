"""The commands of dev.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from .comfyui import HOW_TO, find_comfyui, linked_pack
from .environment import ROOT, prepare
from .process import DevError, capture, run
from .testing import run_tests

USAGE = """\
usage: python dev.py [--recreate] COMMAND [arguments]

  demo [FILE] [--method METHOD]   quantize a small trained model that comes along (or FILE, a safetensors file),
                                  save it, load it back, and show sizes and errors; --method all compares them
  test [pytest arguments]         run all tests, and the host tests where a ComfyUI is found
  comfyui [ComfyUI arguments]     start the ComfyUI of this machine with this pack in it
  lint                            check style and types

  --recreate                      make .venv from nothing first
"""


def demo(arguments: list[str], recreate: bool) -> int:
    """Run the demo in .venv, in the user's current folder."""
    python = prepare(recreate=recreate).python
    file = next((a for a in arguments if a.endswith(".safetensors")), None)
    if file is not None and not Path(file).exists():
        raise DevError(f"{file} does not exist")  # said here, before torch is imported
    return run([python, ROOT / "demo" / "run.py", *arguments])


def test(arguments: list[str], recreate: bool) -> int:
    """Run the tests."""
    return run_tests(prepare(recreate=recreate), arguments)


def lint(arguments: list[str], recreate: bool) -> int:
    """Run every checker, also after one has failed."""
    python = prepare(recreate=recreate).python
    commands = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
    codes = [run([python, "-m", *command, *arguments], cwd=ROOT) for command in commands]
    return max(codes)


def comfyui(arguments: list[str], recreate: bool) -> int:
    """Start ComfyUI with this pack linked into its custom_nodes, without touching anything else of it."""
    found = find_comfyui(ROOT)
    if found is None:
        raise DevError(f"no ComfyUI was found: {HOW_TO}")
    if not {"--cpu", "--directml"} & set(arguments) and not _has_accelerator(found.python):
        print("dev.py: its torch sees no accelerator, adding --cpu", flush=True)
        arguments = ["--cpu", *arguments]
    if {"-h", "--help"} & set(arguments):
        return run([found.python, found.folder / "main.py", *arguments], cwd=found.folder)
    with linked_pack(found.folder, ROOT) as place:
        print(f"dev.py: starting {found.folder} with this pack as {place}", flush=True)
        return run([found.python, found.folder / "main.py", *arguments], cwd=found.folder)


def _has_accelerator(python: Path) -> bool:
    probe = (
        "import sys, torch; "
        "sys.exit(not (torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()))"
    )
    return capture([python, "-c", probe]).returncode == 0


COMMANDS = {"demo": demo, "test": test, "comfyui": comfyui, "lint": lint}


def main(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    recreate = "--recreate" in argv
    argv = [a for a in argv if a != "--recreate"]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"dev.py: unknown command {argv[0]!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    # Let SIGTERM unwind, so that a link made in ComfyUI is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return COMMANDS[argv[0]](argv[1:], recreate)
    except DevError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 1
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndev.py: interrupted", file=sys.stderr)
        return 130
