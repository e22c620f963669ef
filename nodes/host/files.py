"""Model files of ComfyUI's folders, files in its output folder, and how a long run on a file reports and ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
from comfy.cli_args import args

from quant_core import CheckpointError
from quant_core.checkpoint.header import MAX_HEADER_BYTES, parse_header
from quant_core.checkpoint.journal import journal_path, partial_path
from quant_core.job import Progress
from quant_core.output import output_paths

FOLDERS = {"diffusion_models": "diffusion_models", "text_encoders": "clip", "checkpoints": "checkpoints"}
"""``{model folder: the subfolder of the output folder in which ComfyUI finds models of the same kind}``."""

INDEX = ".safetensors.index.json"
EXTENSIONS = (".safetensors", ".sft", ".gguf", INDEX)

WORKFLOW_ENTRIES = ("prompt", "workflow")
"""The metadata entries in which ComfyUI's savers keep what was run."""


def list_files() -> list[str]:
    """Return the files that quant_core opens, as ``folder/name``; folders of ComfyUI may lie in several places.

    ComfyUI's own lists hold neither GGUF files nor the indices of sharded models.
    """
    found: dict[str, None] = {}
    for folder in FOLDERS:
        names: set[str] = set()
        for place in folder_paths.get_folder_paths(folder):
            names.update(_files_below(place))
        chosen = [name.replace(os.sep, "/") for name in names if name.lower().endswith(EXTENSIONS)]
        found.update(dict.fromkeys(f"{folder}/{name}" for name in sorted(chosen)))
    return list(found)


_walked: dict[str, tuple[list[str], dict[str, float]]] = {}


def _files_below(place: str) -> list[str]:
    """Return the files below a folder, which is walked again when a folder in it has changed: disks may be far away."""
    files, folders = _walked.get(place, ([], {}))
    if not folders or any(_modified(folder) != time for folder, time in folders.items()):
        files, folders = _walked[place] = folder_paths.recursive_search(place, excluded_dir_names=[".git"])
    return files


def _modified(folder: str) -> float | None:
    try:
        return os.path.getmtime(folder)
    except OSError:
        return None


def full_path(entry: str) -> str:
    """Return the path of an entry of :func:`list_files`.

    Raises:
        FileNotFoundError: there is no such file in the folder.
    """
    folder, _, name = entry.partition("/")
    path = folder_paths.get_full_path(folder, name) if folder in FOLDERS and name else None
    if path is None:
        raise FileNotFoundError(
            f"{entry} is not found in ComfyUI's model folders ({', '.join(FOLDERS)}). It may have been moved; refresh "
            "the node list with the key R and choose a file again"
        )
    return path


def fingerprint(entry: str | None) -> Any:
    """Return what changes when the content of a file, or of a shard of an index, changes."""
    if entry is None:  # it comes from another node, whose own changes count
        return None
    try:
        path = Path(full_path(entry))
    except FileNotFoundError:
        return None
    return tuple(_identity(file) for file in (path, *_shards(path)))


def _shards(path: Path) -> list[Path]:
    if not path.name.endswith(INDEX):
        return []
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return [path.with_name(name) for name in sorted(names)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # reading it says what is wrong


def _identity(path: Path) -> tuple[str, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (str(path), status.st_size, status.st_mtime_ns)


# ------------------------------------------------------------------ output


def output_file(prefix: str) -> Path:
    """Return the next free ``<prefix>_<number>_.safetensors`` in ComfyUI's output folder, numbered as ComfyUI does.

    Args:
        prefix: may have subfolders, and parts such as ``%year%`` that ComfyUI replaces.

    Raises:
        ValueError: it leads out of the output folder, or names no file.
    """
    root = folder_paths.get_output_directory()
    if not _is_inside(root, prefix):
        raise ValueError(
            f"filename_prefix {prefix!r} does not name a file in ComfyUI's output folder {root}; write a name, or "
            "subfolder/name, where the subfolder is no link that leads out of it"
        )
    # ComfyUI counts the files of a prefix as it is written, and would begin at 1 again and again for "name/".
    folder, name, counter, _, _ = folder_paths.get_save_image_path(os.path.normpath(prefix), root)
    while (path := Path(folder) / f"{name}_{counter:05}_.safetensors").exists():
        counter += 1  # a disk that takes "Name" and "name" for one, which ComfyUI's count does not
    return path


def repaired_file(entry: str) -> Path:
    """Return the file for a repaired copy of an entry of :func:`list_files`, where ComfyUI lists files of its kind."""
    folder, _, name = entry.partition("/")
    name = name.rpartition("/")[2]
    stem = name.removesuffix(INDEX) if name.endswith(INDEX) else name.rpartition(".")[0]
    return output_file(f"{FOLDERS[folder]}/{stem}_repaired")


def _is_inside(root: str, prefix: str) -> bool:
    """Whether a prefix names a file below ``root``, links followed; ComfyUI refuses others without saying which."""
    name = os.path.basename(os.path.normpath(prefix))
    if "\0" in prefix or name in ("", os.curdir, os.pardir):
        return False
    real = os.path.realpath(root)
    folder = os.path.realpath(os.path.join(root, os.path.dirname(os.path.normpath(prefix))))
    return folder == real or folder.startswith(real.rstrip(os.sep) + os.sep)


def workflow_metadata(hidden: Any) -> dict[str, str]:
    """Return the entries by which ComfyUI's savers keep the workflow in a file; none with ``--disable-metadata``.

    Args:
        hidden: the node's hidden inputs, with ``prompt`` and ``extra_pnginfo``.
    """
    if args.disable_metadata:
        return {}
    entries: dict[str, Any] = {"prompt": hidden.prompt, "workflow": (hidden.extra_pnginfo or {}).get("workflow")}
    return {key: json.dumps(value) for key, value in entries.items() if value is not None}


def started_metadata(destination: Path, count: int) -> dict[str, str] | None:
    """Return the workflow entries of an unfinished conversion to ``destination``; None when there is none.

    A run is continued with the header that it began with, and a workflow hardly ever stays the same to the byte.

    Args:
        destination: of the conversion.
        count: how many files it writes.
    """
    partial = partial_path(output_paths(destination, count)[0])
    if not partial.exists() or not journal_path(destination).exists():
        return None
    with open(partial, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(min(length, MAX_HEADER_BYTES))
    try:
        metadata = parse_header(partial, raw).get("__metadata__", {})
    except CheckpointError:
        return None  # not even the header was completed
    return {key: metadata[key] for key in WORKFLOW_ENTRIES if key in metadata}


# ------------------------------------------------------------------ while it runs


def report_progress(node_id: str | None) -> Progress:
    """Return a progress function for quant_core: it moves the node's bar, and ends the run when the user cancels."""
    bar = comfy.utils.ProgressBar(1, node_id=node_id)

    def progress(done: int, total: int, name: str) -> None:
        check_cancelled()
        bar.update_absolute(done, total)

    return progress


def check_cancelled() -> None:
    """Raise ComfyUI's exception when the user cancelled the run."""
    comfy.model_management.throw_exception_if_processing_interrupted()
