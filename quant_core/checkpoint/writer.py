"""Writes a safetensors file tensor by tensor, so that a model is never in memory as a whole.

The bytes go to a temporary file in the target folder; only a complete file, flushed to the disk, takes the final
name. A write that fails, is cancelled, or is interrupted leaves nothing behind, and an old file of that name intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from ..errors import CheckpointError
from .hashing import FileHash, content_hash, digest, structure_hash
from .header import build_header

CHECKSUM_LENGTH = 16
"""Hex digits of a tensor's BLAKE3 that the metadata keeps."""

METADATA_KEY = "quant_core"

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class CheckpointWriter:
    """A safetensors file being written. Use it as a context manager; leaving it normally completes the file.

    Args:
        path: the final name. Its folder is made if it is missing.
        layout: ``{tensor name: (dtype, shape)}`` of everything that will be written.
        metadata: string entries for the header.
        manifest: written as JSON under the metadata key ``quant_core``, with a checksum of every tensor added.
            None leaves both out.

    After a normal exit ``hash`` holds the :class:`FileHash`.
    """

    def __init__(
        self, path: str | os.PathLike[str], layout: Layout, metadata: Mapping[str, str], manifest: dict | None
    ) -> None:
        self.path = writable_file(path)
        self.layout = dict(layout)
        self.hash: FileHash | None = None
        self._metadata = dict(metadata)
        self._manifest = manifest
        self._digests: dict[str, str] = {}
        head, self._spans = build_header(self.layout, self._with_manifest())
        self._head_length = len(head)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not made from the file's name: that may have the longest length already that the file system takes.
        self._temporary = self.path.with_name(f".quantcore-{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self._file = open(self._temporary, "xb")  # noqa: SIM115 -- closed in __exit__
        self._file.write(head)

    def _with_manifest(self) -> dict[str, str]:
        if self._manifest is None:
            return self._metadata
        # Until a tensor is written its checksum is a placeholder of the same length, so the header never moves.
        checksums = {
            name: self._digests.get(name, "")[:CHECKSUM_LENGTH].ljust(CHECKSUM_LENGTH, "0") for name in self.layout
        }
        manifest = {**self._manifest, "checksums": checksums}
        return {**self._metadata, METADATA_KEY: json.dumps(manifest, separators=(",", ":"))}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of the layout; each exactly once, in any order.

        Raises:
            CheckpointError: the name, dtype or shape is not the one of the layout.
        """
        if name not in self.layout or name in self._digests:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is not expected {'again' if name in self.layout else ''}"
            )
        dtype, shape = self.layout[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, planned {dtype} {list(shape)}"
            )
        data = tensor_bytes(tensor)
        self._digests[name] = digest(data)
        self._file.seek(self._spans[name][0])
        self._file.write(data)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._temporary.unlink()

    def _complete(self) -> None:
        missing = [name for name in self.layout if name not in self._digests]
        if missing:
            raise CheckpointError(f"{self.path}: {len(missing)} tensors were not written, first {missing[0]!r}")
        head, _ = build_header(self.layout, self._with_manifest())
        assert len(head) == self._head_length
        self._file.seek(0)
        self._file.write(head)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.chmod(self._temporary, 0o644)  # a server under another user has to be able to read a model
        os.replace(self._temporary, self.path)
        _sync_folder(self.path.parent)
        self.hash = FileHash(
            structure_hash({n: shape for n, (_, shape) in self.layout.items()}),
            content_hash({n: (dtype, shape, self._digests[n]) for n, (dtype, shape) in self.layout.items()}),
        )


def writable_file(path: str | os.PathLike[str]) -> Path:
    """Return the file that ``path`` means, a link followed to its target.

    Raises:
        CheckpointError: something that is no regular file has the name: it would be replaced. Or the folder is none.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise CheckpointError(f"{path} is a folder; name the file to write, e.g. {real / 'model.safetensors'}")
    if real.exists() and not real.is_file():
        raise CheckpointError(f"{path} is a device or a pipe, not a file; write to another name")
    ancestor = next(parent for parent in real.parents if parent.exists())
    if not ancestor.is_dir():
        raise CheckpointError(f"{path} cannot be written: {ancestor} is a file, not a folder")
    return real


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order, without a copy where it lies so on the CPU already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())


def _sync_folder(folder: Path) -> None:
    """Flush the directory entry; Windows has no handle for that and orders it itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
