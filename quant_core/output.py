"""The files of a conversion while they are written: partial files and their journal, then, all at once, the result."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .checkpoint.hashing import FileHash
from .checkpoint.journal import Journal, partial_path
from .checkpoint.reader import Checkpoint
from .checkpoint.writer import CheckpointWriter, file_hash, sync_folder, writable_file
from .errors import CheckpointError
from .layout import OutputFile


def output_paths(destination: Path, count: int) -> list[Path]:
    """Return the names of ``count`` files: ``destination`` itself, or ``<stem>-00001-of-00003.safetensors``, ..."""
    if count == 1:
        return [destination]
    stem = destination.name.removesuffix(".safetensors")
    return [destination.with_name(f"{stem}-{i + 1:05}-of-{count:05}.safetensors") for i in range(count)]


def index_path(destination: Path) -> Path:
    """Return the name of the index of a destination that is written in shards."""
    return destination.with_name(destination.name.removesuffix(".safetensors") + ".safetensors.index.json")


def check_destination(checkpoint: Checkpoint, destination: Path, paths: Sequence[Path]) -> None:
    """Refuse a destination that is a folder, or one of the source's own files, by whatever name.

    Raises:
        ValueError: the message says what to write to instead.
    """
    for path in paths:
        writable_file(path)
    for path in (destination, *paths):
        if path.exists() and any(file.samefile(path) for file in checkpoint.files):
            raise ValueError(f"{path} is the source itself; write to another name")


def check_space(destination: Path, needed: int) -> None:
    """Raise OSError if the disk of ``destination`` has not ``needed`` bytes free."""
    folder = destination.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(28, f"{destination} needs {needed:,} bytes, {folder} has {free:,} bytes free")


class Output:
    """The files being written.

    Args:
        destination: the final name; with several files, the name that theirs and the index's are made from.
        files: what is in them.
        identity: what is being converted, for the journal.
        resume: continue what an earlier run left, and leave what is written when this run fails.
    """

    def __init__(
        self, destination: Path, files: Sequence[OutputFile], identity: Mapping[str, Any], resume: bool
    ) -> None:
        self.destination = destination
        self.resume = resume
        self._paths = output_paths(destination, len(files))
        partials = [partial_path(path) for path in self._paths]
        self.journal = Journal(destination, identity, partials, resume)
        self._writers: list[CheckpointWriter] = []
        self._writer_of: dict[str, CheckpointWriter] = {}
        self._sealed: set[CheckpointWriter] = set()
        self._layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        try:
            written = sum(p.stat().st_size for p in partials if p.exists())
            check_space(destination, sum(file.nbytes for file in files) - written)
            for file, path, partial in zip(files, self._paths, partials, strict=True):
                writer = CheckpointWriter(
                    path, file.tensors, file.metadata, file.manifest, checksums_of=file.checksums_of, partial=partial
                )
                self._writers.append(writer)
                self._writer_of.update(dict.fromkeys(file.tensors, writer))
                self._layout.update(file.tensors)
        except BaseException:
            self.abandon()
            raise

    def adopt(self, names: Sequence[str]) -> bool:
        """Take over an item's tensors if an earlier run wrote all of them, and they are still what it wrote."""
        done = self.journal.done
        if all(name in done and self._writer_of[name].adopt(name, done[name]) for name in names):
            self._seal_if_full(self._writer_of[names[0]])
            return True
        for name in names:
            self._writer_of[name].forget(name)
        return False

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor. Several threads may write, each tensor in one of them."""
        self._writer_of[name].write_part(name, data)

    def expect(self, name: str, tensor: torch.Tensor) -> None:
        """Compare the dtype of a part of a tensor with the plan's.

        Raises:
            CheckpointError: it is another; the message names the tensor.
        """
        planned = self._layout[name][0] if name in self._layout else None
        if tensor.dtype != planned:
            raise CheckpointError(f"{self.destination}: tensor {name!r} is {tensor.dtype}, planned {planned}")

    def finish(self, names: Sequence[str]) -> None:
        """Note that the tensors of an item are written; called by one thread.

        Raises:
            CheckpointError: one has not all its bytes.
        """
        for name in names:
            digest = self._writer_of[name].digests.get(name)
            if digest is None:
                raise CheckpointError(f"{self.destination}: tensor {name!r} was not written as it was planned")
            self.journal.record(name, digest)
        for name in names:
            self._seal_if_full(self._writer_of[name])

    def _seal_if_full(self, writer: CheckpointWriter) -> None:
        # The first file's header has the checksums of all, and is written at the end.
        if writer not in {self._writers[0], *self._sealed} and len(writer.digests) == len(writer.layout):
            writer.seal()
            self._sealed.add(writer)

    def complete(self) -> FileHash:
        """Give the files their final names, and the index last."""
        digests: dict[str, str] = {}
        for writer in self._writers:
            digests |= writer.digests
        for writer in self._writers:
            if writer not in self._sealed:
                writer.seal(digests)
        index = index_path(self.destination)
        if len(self._writers) > 1:
            index.unlink(missing_ok=True)  # an old index must not name new shards
        for writer in self._writers:
            writer.publish()
        if len(self._writers) > 1:
            self._write_index(index)
        self.journal.remove()
        return file_hash(self._layout, digests)

    def _write_index(self, index: Path) -> None:
        weight_map = {name: writer.path.name for name, writer in self._writer_of.items()}
        total = sum(writer.path.stat().st_size for writer in self._writers)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        partial = partial_path(index)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, index)
        sync_folder(index.parent)

    def abandon(self) -> None:
        """Leave what is written to a later run, or, without ``resume``, remove it."""
        for writer in self._writers:
            writer.close() if self.resume else writer.discard()
        if self.resume:
            self.journal.close()
            return
        with contextlib.suppress(FileNotFoundError):
            partial_path(index_path(self.destination)).unlink()
        self.journal.remove()
