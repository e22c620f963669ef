"""Writes a copy of a float model with LoRAs baked in, in the pipeline of every conversion."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..blueprint import Blueprint, identity_of
from ..checkpoint.hashing import FileHash, digest
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.writer import METADATA_KEY
from ..job import Job, Progress
from ..layout import Formats, Item, split_files
from ..output import Output, check_destination, output_paths
from ..pipeline import default_workers
from ..version import __version__
from .merge import LoraMerge


def merged_weight(checkpoint: Checkpoint, layer: str, merge: LoraMerge) -> torch.Tensor:
    """Return one weight with its LoRAs, in the dtype that the file stores it in; for layers that stay float."""
    weight = checkpoint.read(layer + ".weight")
    return merge(layer, weight.float()).to(weight.dtype)


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
    check_destination(checkpoint, destination, output_paths(destination, len(files)))
    names = [name for file in files for name in (*file.tensors, "")]
    identity = {
        "version": __version__,
        "plan": digest(f"{merge.identity} {names}".encode()),
        "source": identity_of(checkpoint),
    }
    output = Output(destination, files, identity, resume)
    blueprint = Blueprint(checkpoint, {}, Formats(), items, files)
    try:
        Job(blueprint, output, torch.device("cpu"), threads or default_workers(), False, merge, progress).run()
        checkpoint.check_unchanged()
        content = output.complete()
    except BaseException:
        output.abandon()
        raise
    return merge, content
