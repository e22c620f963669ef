"""Makes ``.venv``: created once, redone when its requirements change or when it was interrupted."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .process import DevError, capture

ROOT = Path(__file__).absolute().parent.parent
STAMP = "quantcore-setup.json"
LOG = "quantcore-setup.log"

_GROUP = re.compile(r"^#\s*\[(required|backends|without dependencies)\]")


def read_requirements(text: str) -> dict[str, list[str]]:
    """Return ``{group: requirements}`` of requirements-dev.txt; a ``# [group]`` line starts a group.

    Raises:
        ValueError: a requirement stands before the first group.
    """
    groups: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if heading := _GROUP.match(line):
            current = groups.setdefault(heading[1], [])
        elif line.strip() and not line.startswith("#"):
            if current is None:
                raise ValueError(f"requirement {line!r} belongs to no group")
            current.append(line.strip())
    return groups


def venv_python(folder: Path) -> Path:
    """Return where the interpreter of a virtual environment lies."""
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def explain_unavailable(pip_output: str) -> bool:
    """Whether pip failed because no release fits this platform, and not because of the network, disk or build."""
    no_release = "No matching distribution found" in pip_output
    no_network = re.search(r"Retrying \(|ConnectionError|timed out|ProxyError|SSLError", pip_output)
    return no_release and not no_network


@dataclass
class Environment:
    """The virtual environment of a checkout.

    Attributes:
        folder: where it lies.
        python: its interpreter.
        missing: backend libraries that have no release for this platform.
    """

    folder: Path
    missing: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return venv_python(self.folder)


def prepare(root: Path = ROOT, recreate: bool = False) -> Environment:
    """Return the checkout's environment, set up. Does nothing but read the stamp when it is ready.

    Raises:
        DevError: Python cannot make virtual environments, or an installation failed.
    """
    requirements = (root / "requirements-dev.txt").read_text(encoding="utf-8")
    environment = Environment(root / ".venv")
    key = hashlib.sha256(json.dumps([requirements, str(root)]).encode()).hexdigest()
    stamp = environment.folder / STAMP
    if not recreate and environment.python.exists():
        try:
            data = json.loads(stamp.read_text(encoding="utf-8"))
        except FileNotFoundError:
            data = {}
        if data.get("key") == key:
            environment.missing = tuple(data["missing"])
            return environment
    started = time.monotonic()
    print(f"dev.py: setting up {environment.folder} (once; downloads about 1 GB)", flush=True)
    stamp.unlink(missing_ok=True)
    if recreate or not _usable(environment):
        _create(environment)
    environment.missing = tuple(_install(environment, read_requirements(requirements), root))
    partial = stamp.with_suffix(".part")
    partial.write_text(json.dumps({"key": key, "missing": environment.missing}), encoding="utf-8")
    os.replace(partial, stamp)
    print(f"dev.py: ready after {time.monotonic() - started:.0f} s", flush=True)
    return environment


def _usable(environment: Environment) -> bool:
    if not environment.python.exists():
        return False
    try:
        return capture([environment.python, "-m", "pip", "--version"]).returncode == 0
    except OSError:
        return False


def _create(environment: Environment) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise DevError(
            f"{sys.executable} cannot make virtual environments: its venv or ensurepip module is missing. "
            f"On Debian and Ubuntu: sudo apt install python{version}-venv. Then run this command again."
        )
    if environment.folder.exists():
        shutil.rmtree(environment.folder)
    result = capture([sys.executable, "-m", "venv", environment.folder], timeout=600)
    if result.returncode:
        raise DevError(f"{environment.folder} could not be made:\n{result.stdout.strip()}")


def _install(environment: Environment, groups: dict[str, list[str]], root: Path) -> list[str]:
    """Install everything; return the backend libraries that this platform does not have."""
    first, *others = groups["required"]  # torch: by far the largest
    log = environment.folder / LOG
    log.unlink(missing_ok=True)
    _pip(environment, [first])
    _pip(environment, others)
    missing = []
    for requirement in groups["backends"]:
        try:
            _pip(environment, [requirement])
        except PipError as error:
            if not explain_unavailable(error.output):
                raise
            missing.append(requirement.partition("==")[0])
            print(f"dev.py: {requirement} has no release for this platform: its tests will not run", flush=True)
    _pip(environment, ["--no-deps", *groups["without dependencies"]])
    _pip(environment, ["--no-deps", "--no-build-isolation", "--editable", str(root)])
    return missing


class PipError(DevError):
    """pip failed; ``output`` is all it said."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


def _pip(environment: Environment, arguments: list[str]) -> None:
    command = [str(environment.python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    names = [re.split(r"[=;]", a)[0] for a in arguments if not a.startswith("-")]
    print(f"dev.py: installing {', '.join(dict.fromkeys(names))}", flush=True)
    lines = []
    log = environment.folder / LOG
    with (
        log.open("a", encoding="utf-8") as record,
        subprocess.Popen(
            [*command, "--progress-bar", "off", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            record.write(line)
            if line.lstrip().startswith(("Downloading", "WARNING: Retrying")):
                print(f"  {line.strip()[:110]}", flush=True)
    if process.returncode:
        tail = "".join(lines[-12:]).rstrip()
        raise PipError(
            f"pip could not install {', '.join(names)}:\n{tail}\n"
            f"All of its output: {log}\n"
            "Check the network connection (pip's proxy: the HTTPS_PROXY variable) and the free disk space (3 GB), then "
            "run the command again: it goes on where it stopped. `--recreate` starts from nothing.",
            "".join(lines),
        )
