"""Where quantized models are kept on disk, how much they may take, and what makes one of them the same as another."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import folder_paths
import torch
from comfyui_version import __version__ as comfyui_version

import quant_core
from quant_core import QUANT_BACKENDS, Recipe
from quant_core.disk_cache import DiskCache, entry_key, file_identity
from quant_core.environment import library_version
from quant_core.registry import find_method

logger = logging.getLogger("quant_core")

FOLDER_VARIABLE = "QUANTCORE_CACHE"
LIMIT_VARIABLE = "QUANTCORE_CACHE_GB"
DEFAULT_GB = 50.0
GIGABYTE = 10**9
LEFT_FREE = 5 * GIGABYTE
"""How much of the disk the cache leaves to others."""


def disk_cache() -> DiskCache:
    """Return the cache in the folder and with the limit that hold now.

    Raises:
        ValueError: the environment variable with the limit holds no number of gigabytes.
    """
    folder = cache_folder()
    cache = DiskCache(folder, round(_gigabytes_allowed() * GIGABYTE))
    possible = cache.size() + _free(folder) - LEFT_FREE
    if possible < cache.limit_bytes:
        logger.info("the quantization cache may take %.1f GB: %s is nearly full", max(0, possible) / GIGABYTE, folder)
        cache.limit_bytes = max(0, possible)
    return cache


def cache_folder() -> Path:
    """Return the folder: that of the environment variable, or one in ComfyUI's user directory."""
    chosen = os.environ.get(FOLDER_VARIABLE, "").strip()
    return Path(os.path.abspath(os.path.expanduser(chosen or _default_folder())))


def _default_folder() -> str:
    return os.path.join(folder_paths.get_user_directory(), "quantcore_cache")


def _gigabytes_allowed() -> float:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        value = float(text) if text else DEFAULT_GB
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"the environment variable {LIMIT_VARIABLE} is {text!r}, expected a number of gigabytes such as 50, or 0 "
            "for no cache. Change it and restart ComfyUI"
        )
    return value


def _free(folder: Path) -> int:
    """Return the free bytes of the disk on which a folder is, or will be made."""
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def clear_cache(keep_gb: float = 0.0) -> str:
    """Remove the least recently used entries until ``keep_gb`` hold, and say what that freed.

    Raises:
        PermissionError: the folder cannot be written; the message says what to do.
        TimeoutError: another process does not let go of it.
    """
    cache = DiskCache(cache_folder(), 0)
    try:
        freed = cache.clear(round(keep_gb * GIGABYTE))
    except PermissionError as error:
        raise PermissionError(
            f"the quantization cache cannot be cleared: {error}. Give ComfyUI the right to write to {cache.folder}, or "
            f"name another folder in the environment variable {FOLDER_VARIABLE}"
        ) from error
    count = len(cache)
    return (
        f"{freed / GIGABYTE:.2f} GB freed; {count} quantized model{'' if count == 1 else 's'} of "
        f"{cache.size() / GIGABYTE:.2f} GB left in {cache.folder}"
    )


def cache_key(
    paths: Sequence[str],
    recipe: Recipe,
    compute_dtype: torch.dtype,
    loras: Sequence[tuple[str, float]] = (),
) -> str:
    """Return the key under which a quantized model is kept.

    Args:
        paths: of the model's files.
        recipe: what it is quantized by.
        compute_dtype: what it computes in: the one chosen for this machine, where the user leaves it to ComfyUI.
        loras: ``(path, strength)`` of what is added before quantizing.

    Raises:
        OSError: a file cannot be read.
        ValueError: the recipe names an unknown method.
    """
    baked = [(file_identity(path), float(strength)) for path, strength in loras]
    sources = [file_identity(path) for path in paths]
    return entry_key(sources, recipe.to_dict(), baked, str(compute_dtype), _versions(recipe))


def _versions(recipe: Recipe) -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "quant_core": f"{quant_core.__version__} {_code_digest()}",
        "comfyui": comfyui_version,  # it chooses the layers' names
    }
    for part in recipe.parts():
        name = find_method(part.method).backend
        versions[name] = library_version(name)
        # The backend of another node pack has no version that is known here.
        module = sys.modules[QUANT_BACKENDS[name].__module__]
        if getattr(module, "__file__", None):
            versions[f"{name} code"] = file_identity(module.__file__)[-1]
    return versions


@functools.lru_cache(maxsize=1)
def _code_digest() -> str:
    """Return a digest of all code that has a part in the bytes.

    The version alone would not do: most packs are updated from git, where many states have one version, and an error
    that was mended would live on in the cache.
    """
    digest = hashlib.sha256()
    for folder in (Path(quant_core.__file__).parent, Path(__file__).parent):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".py", ".toml")):
            digest.update(path.relative_to(folder).as_posix().encode("utf-8") + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
