"""What is remembered of a model that was loaded or quantized here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from quant_core import CheckpointError
from quant_core.checkpoint import open_checkpoint

_ATTACHMENT = "quantcore"
_ABOUT_THE_FILE = {
    "format",
    "quant_core",
    "tensor_names",
    "_quantization_metadata",
    "workflow",
    "prompt",
    "modelspec.hash_sha256",
}
"""Metadata entries that describe a file's tensors or how it came about, which another file of the model has not."""


@dataclass(frozen=True)
class LoadedModel:
    """What is known of a model; it goes with its patcher and all clones of it.

    Attributes:
        source: name of the file.
        recipe: what it was quantized by, as ``Recipe.to_dict`` gives it; None for a file that was quantized before.
        dtypes: of the model's tensors in the file, under the names that ComfyUI loads them by.
        metadata: the file's entries about the model as a whole. ComfyUI builds some models by them (LTXV's ``config``).
    """

    source: str
    recipe: dict[str, Any] | None
    dtypes: dict[str, torch.dtype]
    metadata: dict[str, str] = field(default_factory=dict)


def remember(patcher: ModelPatcher, loaded: LoadedModel) -> None:
    """Attach what is known to a patcher."""
    patcher.set_attachments(_ATTACHMENT, loaded)


def recall(patcher: ModelPatcher) -> LoadedModel | None:
    """Return what :func:`remember` attached, None for a model from elsewhere."""
    loaded = patcher.get_attachment(_ATTACHMENT)
    return loaded if isinstance(loaded, LoadedModel) else None


def metadata_of_model(metadata: Mapping[str, str] | None, names: Collection[str]) -> dict[str, str]:
    """Return the entries of a file's metadata that hold for the model in any other file, too.

    Args:
        metadata: of the file.
        names: of its tensors; torchao's files have an entry for each.
    """
    return {key: text for key, text in (metadata or {}).items() if key not in _ABOUT_THE_FILE and key not in names}


def known_metadata(patcher: ModelPatcher) -> dict[str, str]:
    """Return what is known of a model's metadata: from when it was loaded here, or from the file it was loaded from."""
    loaded = recall(patcher)
    if loaded is not None:
        return loaded.metadata
    arguments = (getattr(patcher, "cached_patcher_init", None) or (None, ()))[1]
    path = arguments[0] if arguments and isinstance(arguments[0], str) else ""
    if not path.lower().endswith((".safetensors", ".sft")) or not Path(path).is_file():
        return {}
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        return {}  # ComfyUI read it; what it says of itself is only missed
    return metadata_of_model(checkpoint.metadata, checkpoint.tensors)
