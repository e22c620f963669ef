"""Starts programs: no shell, exit codes handed on, Ctrl-C left to the program itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class DevError(Exception):
    """Ends dev.py with a message for people instead of a traceback."""


def run(
    command: Sequence[str | os.PathLike[str]], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Run a program on this terminal and return its exit code.

    Args:
        env: variables to set on top of the current ones.
    """
    with subprocess.Popen([os.fspath(c) for c in command], cwd=cwd, env={**os.environ, **(env or {})}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the program too: give that time to end by itself.
            try:
                process.wait(timeout=20)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.terminate()
                process.wait()
            raise
        except BaseException:
            process.terminate()
            process.wait()
            raise


def capture(command: Sequence[str | os.PathLike[str]], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program quietly and return its exit code and output (stderr joined to stdout).

    Raises:
        OSError: the program cannot be started.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
    """
    return subprocess.run(
        [os.fspath(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        check=False,
    )
