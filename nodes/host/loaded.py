"""What is remembered of a model that was loaded or quantized here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

_ATTACHMENT = "quantcore"


@dataclass(frozen=True)
class LoadedModel:
    """What is known of a model; it goes with its patcher and all clones of it.

    Attributes:
        source: name of the file.
        recipe: what it was quantized by, as ``Recipe.to_dict`` gives it; None for a file that was quantized before.
        dtypes: of the model's tensors in the file, under the names that ComfyUI loads them by.
    """

    source: str
    recipe: dict[str, Any] | None
    dtypes: dict[str, torch.dtype]


def remember(patcher: ModelPatcher, loaded: LoadedModel) -> None:
    """Attach what is known to a patcher."""
    patcher.set_attachments(_ATTACHMENT, loaded)


def recall(patcher: ModelPatcher) -> LoadedModel | None:
    """Return what :func:`remember` attached, None for a model from elsewhere."""
    loaded = patcher.get_attachment(_ATTACHMENT)
    return loaded if isinstance(loaded, LoadedModel) else None


def forget(patcher: ModelPatcher) -> None:
    """Remove what is attached."""
    patcher.attachments.pop(_ATTACHMENT, None)
