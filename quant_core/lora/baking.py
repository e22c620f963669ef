"""Writes a copy of a float model with LoRAs baked in, in the pipeline of every conversion."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..blueprint import Blueprint
from ..checkpoint.hashing import FileHash
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.writer import METADATA_KEY
from ..job import Progress, carry_out
from ..layout import Formats, Item, split_files
from .merge import LoraMerge


def merge_lora(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    loras: Sequence[tuple[str | os.PathLike[str], float]],
    *,
    progress: Progress | None = None,
    resume: bool = False,
    shard_size: int | None = None,
    threads: int | None = None,
) -> tuple[LoraMerge, FileHash]:
    """Write a copy of a float model with LoRAs baked in; every tensor keeps its dtype, what no LoRA changes its bytes.

    Args:
        source: the model.
        destination: the safetensors file to write; it appears when it is complete. With several shards, the name that
            theirs and the index's are made from.
        loras: ``(file, strength)`` each.
        progress: called as ``progress(bytes done, bytes in all, layer name)``.
        resume: continue what an earlier run left, and leave what is written when this one fails.
        shard_size: write files of at most this many bytes of tensors, with an index.
        threads: that read and compute; None means one for each CPU, up to 4. The bytes do not depend on it.

    Returns:
        The matched LoRAs, and the hash of the file.

    Raises:
        CheckpointError: see :class:`LoraMerge`; or the earlier run was another one.
        ValueError: destination and source are the same file.
        OSError: the disk is full.
    """
    checkpoint, destination = open_checkpoint(source), Path(destination)
    merge = LoraMerge(checkpoint, loras)
    tensors = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    items = [Item(name, None, (name,)) for name in tensors]
    # A manifest's checksums are those of the weights before.
    metadata = {key: value for key, value in checkpoint.metadata.items() if key != METADATA_KEY}
    files = split_files(items, tensors, metadata, {}, shard_size)
    files[0].manifest = None
    names = [name for file in files for name in (*file.tensors, "")]
    blueprint = Blueprint(checkpoint, {}, Formats(), items, files)
    _, content, _ = carry_out(
        blueprint,
        destination,
        f"{merge.identity} {names}",
        resume=resume,
        threads=threads,
        transform=merge,
        progress=progress,
    )
    return merge, content
