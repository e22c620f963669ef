"""Finds a ComfyUI on this machine and its interpreter, and links this pack into it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .environment import venv_python
from .process import DevError

HOW_TO = (
    "set COMFYUI_PATH to the folder of ComfyUI that holds main.py, and COMFYUI_PYTHON to its Python if that is "
    "not in a venv beside it"
)
OLDER = "0.18.5"
"""The oldest ComfyUI that the pack is tested with."""

OLDER_HOW_TO = (
    f"get its tag v{OLDER} (git clone --branch v{OLDER} https://github.com/comfyanonymous/ComfyUI), install its "
    "requirements.txt into a venv, and set COMFYUI_OLDER_PATH to its folder and COMFYUI_OLDER_PYTHON to that venv's "
    "Python"
)


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI: its folder (with ``main.py``) and the Python that runs it."""

    folder: Path
    python: Path


def is_comfyui(folder: Path) -> bool:
    """Whether ``folder`` is a ComfyUI's own folder."""
    return (folder / "main.py").is_file() and (folder / "nodes.py").is_file() and (folder / "comfy").is_dir()


def find_comfyui(root: Path, environ: Mapping[str, str] = os.environ, home: Path | None = None) -> ComfyUI | None:
    """Return the ComfyUI to use, None when this machine has none in the usual places.

    Looks at ``COMFYUI_PATH``, then the ComfyUI whose ``custom_nodes`` holds the checkout ``root``, then
    ``~/comfy/ComfyUI`` and ``~/ComfyUI``. Its Python is ``COMFYUI_PYTHON`` or one that lies with it.

    Raises:
        DevError: a variable names something that is not there, or no Python was found for the ComfyUI.
    """
    folder = _find_folder(root, environ, home or Path.home())
    if folder is None:
        return None
    return ComfyUI(folder, _find_python(folder, environ, "COMFYUI_PYTHON"))


def find_older_comfyui(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> ComfyUI | None:
    """Return the older ComfyUI that some host tests run in as well, None when there is none.

    Looks at ``COMFYUI_OLDER_PATH``, then ``~/comfy/ComfyUI-<version>``. Its Python is ``COMFYUI_OLDER_PYTHON`` or one
    that lies with it; ``venv-<version>`` beside it comes first.

    Raises:
        DevError: as :func:`find_comfyui`.
    """
    folder = _named_folder(environ, "COMFYUI_OLDER_PATH") or (home or Path.home()) / "comfy" / f"ComfyUI-{OLDER}"
    if not is_comfyui(folder):
        return None
    return ComfyUI(folder, _find_python(folder, environ, "COMFYUI_OLDER_PYTHON"))


def _named_folder(environ: Mapping[str, str], variable: str) -> Path | None:
    named = environ.get(variable)
    if not named:
        return None
    folder = Path(named).expanduser().absolute()
    if not is_comfyui(folder):
        raise DevError(f"{variable} is {folder}, which is not a ComfyUI: main.py, nodes.py and comfy/ belong there")
    return folder


def _find_folder(root: Path, environ: Mapping[str, str], home: Path) -> Path | None:
    if named := _named_folder(environ, "COMFYUI_PATH"):
        return named
    above = [path.parent.parent for path in (root, root.resolve()) if path.parent.name == "custom_nodes"]
    return next((f for f in (*above, home / "comfy" / "ComfyUI", home / "ComfyUI") if is_comfyui(f)), None)


def _find_python(folder: Path, environ: Mapping[str, str], variable: str) -> Path:
    if named := environ.get(variable):
        python = Path(named).expanduser().absolute()
        if not python.is_file():
            raise DevError(f"{variable} is {python}, which does not exist")
        return python
    above = folder.parent
    # Where several lie side by side, ComfyUI-1.2.3 has venv-1.2.3.
    venvs = (folder / "venv", folder / ".venv", above / f"venv{folder.name.removeprefix('ComfyUI')}")
    candidates = [venv_python(venv) for venv in (*venvs, above / "venv", above / ".venv")]
    # ComfyUI's portable build for Windows spells it so.
    candidates += [place / "python_embeded" / "python.exe" for place in (folder, above)]
    for python in candidates:
        if python.is_file():
            return python
    raise DevError(f"no Python was found for the ComfyUI in {folder}: set {variable} to the one that runs it")


def pack_link(folder: Path, root: Path) -> Path | None:
    """Return the entry of ``custom_nodes`` that is this checkout, None when there is none."""
    custom_nodes = folder / "custom_nodes"
    entries = custom_nodes.iterdir() if custom_nodes.is_dir() else ()
    return next((e for e in entries if e.is_dir() and os.path.samefile(e, root)), None)


@contextlib.contextmanager
def linked_pack(folder: Path, root: Path) -> Iterator[Path]:
    """Have the checkout in ``custom_nodes`` for a while. A link that was made here is removed again.

    Raises:
        DevError: another folder of this name lies in ``custom_nodes``.
    """
    present = pack_link(folder, root)
    if present is not None:
        yield present
        return
    link = folder / "custom_nodes" / "ComfyUI-QuantCore"
    if os.path.lexists(link):
        raise DevError(f"{link} exists and is not this checkout: move it away first, or run dev.py there")
    _make_link(link, root)
    try:
        yield link
    finally:
        _remove_link(link)


def _make_link(link: Path, target: Path) -> None:
    try:
        link.symlink_to(target, target_is_directory=True)
    except OSError:
        if sys.platform != "win32":
            raise
        # Windows lets only administrators and developers make symbolic links; a junction needs no privilege.
        import _winapi

        _winapi.CreateJunction(str(target), str(link))


def _remove_link(link: Path) -> None:
    if link.is_symlink():
        link.unlink()
    else:
        os.rmdir(link)  # Removes a junction, and refuses a folder with files in it.
