"""Writes a safetensors file tensor by tensor, or part of a tensor by part, so that a model is never in memory.

The bytes go to a temporary file in the target folder; only a complete file, flushed to the disk, takes the final
name. A write that fails, is cancelled, or is interrupted leaves an old file of that name intact, and nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError
from .hashing import FileHash, content_hash, new_hasher, structure_hash
from .header import build_header

CHECKSUM_LENGTH = 16
"""Hex digits of a tensor's BLAKE3 that the metadata keeps."""

METADATA_KEY = "quant_core"

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_READ = 1 << 20


def with_manifest(
    metadata: Mapping[str, str], manifest: Mapping[str, Any] | None, names: Layout, digests: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata with the manifest as JSON, which holds a checksum of every tensor in ``names``.

    A tensor without a digest gets a placeholder of the same length, so that the header never moves.
    """
    if manifest is None:
        return dict(metadata)
    checksums = {n: digests.get(n, "")[:CHECKSUM_LENGTH].ljust(CHECKSUM_LENGTH, "0") for n in names}
    text = json.dumps({**manifest, "checksums": checksums}, separators=(",", ":"))
    return {**metadata, METADATA_KEY: text}


class CheckpointWriter:
    """A safetensors file being written. Use it as a context manager; leaving it normally completes the file.

    Args:
        path: the final name. Its folder is made if it is missing.
        layout: ``{tensor name: (dtype, shape)}`` of everything that will be written.
        metadata: string entries for the header.
        manifest: written as JSON under the metadata key ``quant_core``, with a checksum of every tensor added.
            None leaves both out.
        checksums_of: the tensors that the manifest holds checksums of, where they are not those of ``layout``.
        partial: the temporary file, where its name has to be known to a later run; it may exist then.

    After a normal exit ``hash`` holds the :class:`FileHash`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Layout,
        metadata: Mapping[str, str],
        manifest: Mapping[str, Any] | None,
        *,
        checksums_of: Layout | None = None,
        partial: Path | None = None,
    ) -> None:
        self.path = writable_file(path)
        self.layout = dict(layout)
        self.digests: dict[str, str] = {}
        self.hash: FileHash | None = None
        self._metadata = dict(metadata)
        self._manifest = manifest
        self._checksums_of = self.layout if checksums_of is None else checksums_of
        head, self._spans = build_header(self.layout, self._with_manifest({}))
        self._head_length = len(head)
        self._written: dict[str, int] = {}
        self._hashers: dict[str, Any] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not made from the file's name: that may have the longest length already that the file system takes.
        self._temporary = partial or self.path.with_name(f".quantcore-{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self._thread = threading.local()
        self._files: list[BinaryIO] = []
        if not self._temporary.exists():
            with open(self._temporary, "xb") as file:
                file.write(head)

    def _with_manifest(self, digests: Mapping[str, str]) -> dict[str, str]:
        return with_manifest(self._metadata, self._manifest, self._checksums_of, digests)

    # ------------------------------------------------------------------ tensors

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of the layout; each exactly once, in any order.

        Raises:
            CheckpointError: the name, dtype or shape is not the one of the layout.
        """
        if name not in self.layout or name in self.digests:
            again = "again" if name in self.layout else ""
            raise CheckpointError(f"{self.path}: tensor {name!r} is not expected {again}")
        dtype, shape = self.layout[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, planned {dtype} {list(shape)}"
            )
        self.write_part(name, tensor_bytes(tensor))

    def write_part(self, name: str, data: memoryview | bytes) -> None:
        """Write the next bytes of a tensor of the layout. Threads may write different tensors at the same time.

        Raises:
            CheckpointError: they are more than the tensor has.
        """
        start, end = self._spans[name]
        done = self._written.get(name, 0)
        if name in self.digests or start + done + len(data) > end:
            raise CheckpointError(f"{self.path}: tensor {name!r} takes {end - start} bytes, more were written")
        hasher = self._hashers.get(name)
        if hasher is None:
            hasher = self._hashers[name] = new_hasher()
        hasher.update(data)
        file = self._open()
        file.seek(start + done)
        _write_all(file, data)
        self._written[name] = done + len(data)
        if start + done + len(data) == end:
            self.digests[name] = self._hashers.pop(name).hexdigest()

    def adopt(self, name: str, digest: str) -> bool:
        """Take a tensor that an earlier run wrote, if the temporary file holds the bytes of this digest."""
        start, end = self._spans[name]
        file = self._open()
        file.seek(start)
        hasher = new_hasher()
        left = end - start
        while left:
            data = file.read(min(left, _READ))
            if not data:
                return False
            hasher.update(data)
            left -= len(data)
        if hasher.hexdigest() != digest:
            return False
        self.digests[name] = digest
        return True

    def forget(self, name: str) -> None:
        """Have a tensor written again, from its first byte."""
        self.digests.pop(name, None)

    def _open(self) -> BinaryIO:
        """Return this thread's open file: its position is its own."""
        file: BinaryIO | None = getattr(self._thread, "file", None)
        if file is None or file.closed:
            file = self._thread.file = open(self._temporary, "r+b", buffering=0)  # noqa: SIM115 -- see close
            self._files.append(file)
        return file

    # ------------------------------------------------------------------ the end

    def seal(self, digests: Mapping[str, str] | None = None) -> None:
        """Write the header, flush to the disk and close the file, which has all its tensors now.

        Args:
            digests: of all the tensors in ``checksums_of``; None takes those of this file.
        """
        missing = [name for name in self.layout if name not in self.digests]
        if missing:
            raise CheckpointError(f"{self.path}: {len(missing)} tensors were not written, first {missing[0]!r}")
        head, _ = build_header(self.layout, self._with_manifest(self.digests if digests is None else digests))
        assert len(head) == self._head_length
        file = self._open()
        file.seek(0)
        _write_all(file, head)
        os.fsync(file.fileno())
        self.close()

    def publish(self) -> None:
        """Give the sealed file its final name."""
        os.chmod(self._temporary, 0o644)  # a server under another user has to be able to read a model
        os.replace(self._temporary, self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the temporary file and leave it where it is; no thread may be writing."""
        for file in self._files:
            file.close()
        self._files.clear()

    def discard(self) -> None:
        """Remove the temporary file."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.seal()
                self.publish()
                self.hash = file_hash(self.layout, self.digests)
        finally:
            self.discard()


def file_hash(layout: Layout, digests: Mapping[str, str]) -> FileHash:
    """Return both hashes of a checkpoint with these tensors."""
    return FileHash(
        structure_hash({n: shape for n, (_, shape) in layout.items()}),
        content_hash({n: (dtype, shape, digests[n]) for n, (dtype, shape) in layout.items()}),
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


def _write_all(file: BinaryIO, data: memoryview | bytes) -> None:
    """Write without buffer; a raw file may write less than it is given."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def sync_folder(folder: Path) -> None:
    """Flush the directory entry; Windows has no handle for that and orders it itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
