"""Reads pieces of a checkpoint's tensors into memory that is used again, from several threads at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

import torch

from ..errors import CheckpointError
from .reader import Checkpoint

_LARGEST_KEPT = 16 << 20  # bytes; a layer that is read whole is not held on to


class RawReader:
    """Reads bytes and rows of tensors as they are stored.

    Every thread has one open file and one buffer of its own. Copies rather than a map of the file: a file that is
    truncated meanwhile gives an error, not a signal that kills the process.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._thread = threading.local()
        self._files: list[BinaryIO] = []

    def read_bytes(self, name: str, start: int, stop: int) -> memoryview:
        """Return the bytes ``start`` to ``stop`` of a tensor, in memory that this thread's next call overwrites.

        Raises:
            CheckpointError: the file ends before; the message names it.
        """
        return _as_bytes(self._read(name, start, stop - start))

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the rows ``start`` to ``stop`` of a tensor, in memory that this thread's next call overwrites."""
        info = self._checkpoint.tensors[name]
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        part = self._read(name, start * row, (stop - start) * row)
        return part.view(info.dtype).view(stop - start, *info.shape[1:])

    def _read(self, name: str, offset: int, size: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._thread, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8)
            if size <= _LARGEST_KEPT:
                self._thread.buffer = buffer
        part = buffer[:size]
        self._read_into(name, offset, _as_bytes(part))
        return part

    def _read_into(self, name: str, offset: int, view: memoryview) -> None:
        path = self._checkpoint.file_of(name)
        file = self._open(path)
        file.seek(self._checkpoint.tensors[name].start + offset)
        while len(view):
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{path} ended in tensor {name!r}: it was truncated just now")
            view = view[count:]

    def _open(self, path: Path) -> BinaryIO:
        if getattr(self._thread, "path", None) != path:
            if (before := getattr(self._thread, "file", None)) is not None:
                before.close()
            self._checkpoint.check_unchanged()
            self._thread.file = open(path, "rb", buffering=0)  # noqa: SIM115 -- closed here and by close
            self._thread.path = path
            self._files.append(self._thread.file)
        return self._thread.file

    def close(self) -> None:
        """Close the files of all threads, which must not read any more."""
        for file in self._files:
            file.close()


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B") if tensor.numel() else memoryview(bytearray())
