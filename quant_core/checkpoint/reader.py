"""One way to read a checkpoint, whether it is one file, an index with shards, a folder, a diffusers model, or GGUF."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError
from .header import Header, TensorInfo, read_header

DIFFUSION_PREFIX = "model.diffusion_model."

_INDEX_SUFFIX = ".safetensors.index.json"
# What an all-in-one checkpoint holds besides the diffusion model, by the first words of its keys.
_PARTS = {
    DIFFUSION_PREFIX: "diffusion_model",
    "first_stage_model.": "vae",
    "vae.": "vae",
    "cond_stage_model.": "text_encoders",
    "conditioner.": "text_encoders",
    "text_encoders.": "text_encoders",
}
_DIFFUSERS_FOLDERS = ("transformer", "unet")


@dataclass(frozen=True)
class FileIdentity:
    """Which file was opened: enough to notice that another one, or other bytes, took its place."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result | None = None) -> FileIdentity:
        status = path.stat() if status is None else status
        return cls(path, status.st_size, status.st_mtime_ns)


class Checkpoint:
    """A checkpoint that is read tensor by tensor, or some rows of one at a time.

    Args:
        path: what was opened.
        files: the checked header of every file, with the file's identity from before its header was read.

    Attributes:
        path: what was opened.
        tensors: ``{name: TensorInfo}`` over all files.
        metadata: the first file's metadata, extended by the others'.
    """

    def __init__(self, path: Path, files: Iterable[tuple[Header, FileIdentity]]) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, FileIdentity] = {}
        self._identities: list[FileIdentity] = []
        for header, identity in files:
            self._identities.append(identity)
            for name, info in header.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name!r} is in {self._files[name].path} and in {header.path}")
                self.tensors[name] = info
                self._files[name] = identity
            for key, value in header.metadata.items():
                self.metadata.setdefault(key, value)

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors, each once."""
        return list(dict.fromkeys(identity.path for identity in self._files.values()))

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._files[name].path

    def identity(self) -> list[FileIdentity]:
        """Return path, size and modification time of every file, as they were when it was opened."""
        return list(self._identities)

    def check_unchanged(self) -> None:
        """Compare every file with what was opened.

        Raises:
            CheckpointError: a file was truncated, rewritten, replaced or removed since; the message names it.
        """
        for identity in self._identities:
            try:
                status = identity.path.stat()
            except FileNotFoundError as error:
                raise CheckpointError(f"{identity.path} was removed while it was being read") from error
            _check_identity(identity, status)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own.

        Own memory rather than a map of the file: a file that is truncated or rewritten later cannot kill the process
        or change the model, and the tensor is aligned for the CPU's kernels.

        Raises:
            CheckpointError: the file was changed since it was opened.
        """
        info = self.tensors[name]
        return _as_tensor(self._read_bytes(name, info.start, info.end), info.dtype, info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read the rows ``start`` to ``stop`` of a tensor, counted along its first dimension; see :meth:`read`.

        Raises:
            CheckpointError: the file was changed since it was opened.
            IndexError: the tensor has no such rows.
        """
        info = self.tensors[name]
        self._check_rows(name, start, stop)
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        data = self._read_bytes(name, info.start + start * row, info.start + stop * row)
        return _as_tensor(data, info.dtype, (stop - start, *info.shape[1:]))

    def _check_rows(self, name: str, start: int, stop: int) -> None:
        shape = self.tensors[name].shape
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise IndexError(f"{self.path}: tensor {name!r} {list(shape)} has no rows {start} to {stop}")

    def _read_bytes(self, name: str, start: int, end: int) -> bytearray:
        identity = self._files[name]
        data = bytearray(end - start)
        with open(identity.path, "rb", buffering=0) as file:
            _check_identity(identity, os.fstat(file.fileno()))
            file.seek(start)
            view = memoryview(data)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{identity.path} ended in tensor {name!r}: it was truncated just now")
                done += count
        return data


def _as_tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _check_identity(identity: FileIdentity, status: os.stat_result) -> None:
    found = FileIdentity.of(identity.path, status)
    if found.size < identity.size:
        raise CheckpointError(
            f"{identity.path} was truncated while it was being read: it had {identity.size} bytes, it has {found.size}"
        )
    if found != identity:
        raise CheckpointError(
            f"{identity.path} was rewritten while it was being read; wait until it is complete and start again"
        )


# ------------------------------------------------------------------ the parts of an all-in-one checkpoint


def diffusion_prefix(checkpoint: Checkpoint) -> str:
    """Return ``"model.diffusion_model."`` if the diffusion model's keys start with it, else an empty string."""
    return DIFFUSION_PREFIX if any(name.startswith(DIFFUSION_PREFIX) for name in checkpoint.tensors) else ""


def part_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return ``{tensor name: part}``, the part being ``diffusion_model``, ``text_encoders``, ``vae`` or ``other``.

    In a file without the prefix of an all-in-one checkpoint every tensor belongs to the diffusion model.
    """
    if not diffusion_prefix(checkpoint):
        return dict.fromkeys(checkpoint.tensors, "diffusion_model")
    return {
        name: next((part for prefix, part in _PARTS.items() if name.startswith(prefix)), "other")
        for name in checkpoint.tensors
    }


# ------------------------------------------------------------------ opening


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and check its header(s); no tensor is read.

    Args:
        path: a safetensors file, a ``*.safetensors.index.json``, a folder that holds one of these or shards, the root
            folder of a diffusers model (its ``transformer`` or ``unet``), or a GGUF file.

    Raises:
        FileNotFoundError: nothing is there.
        ImportError: a GGUF file, and the package gguf is missing.
        CheckpointError: the file, the index or a shard is not what it should be.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".json"):
        return _open_index(path)
    identity = FileIdentity.of(path)
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            from .gguf_file import GGUFCheckpoint, read_gguf_header

            return GGUFCheckpoint(path, [(read_gguf_header(path), identity)])
    return Checkpoint(path, [(read_header(path), identity)])


def _open_files(path: Path, files: Iterable[Path]) -> Checkpoint:
    # The identity comes first: a file rewritten between the two is then noticed at the first read.
    identities = [FileIdentity.of(file) for file in files]
    return Checkpoint(path, [(read_header(identity.path), identity) for identity in identities])


def _open_folder(folder: Path) -> Checkpoint:
    indices, files = _weights_in(folder)
    models = [folder / name for name in _DIFFUSERS_FOLDERS]
    models = [model for model in models if (model / "config.json").is_file() and any(_weights_in(model))]
    if len(models) + bool(indices or files) > 1:
        places = [str(model) for model in models] + [str(folder)] * bool(indices or files)
        raise CheckpointError(f"{folder}: weights are in {' and in '.join(places)}; name the one to read")
    if models:
        return _open_folder(models[0])
    if len(indices) == 1:
        return _open_index(indices[0])
    if len(indices) > 1 or not files:
        found = ", ".join(p.name for p in indices) or "no safetensors file"
        raise CheckpointError(f"{folder}: expected one index or safetensors files, found {found}; name the file itself")
    return _open_files(folder, files)


def _weights_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the indices and the safetensors files that lie in a folder."""
    return sorted(folder.glob("*" + _INDEX_SUFFIX)), sorted(folder.glob("*.safetensors"))


def _open_index(path: Path) -> Checkpoint:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: it has no 'weight_map' object ({error})") from error
    if not shards:
        raise CheckpointError(f"{path}: the index lists no tensor")
    for shard in shards:
        # A shard is a file beside the index: no folders, no way out of it.
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{path}: shard {shard!r} is not the name of a file beside the index")
        try:
            found = (path.parent / shard).is_file()
        except OSError as error:  # a name that is too long, or a folder that may not be entered
            raise CheckpointError(f"{path}: shard {shard[:200]!r} cannot be looked up: {error.strerror}") from error
        if not found:
            raise CheckpointError(f"{path}: shard {shard!r} is missing; download the whole model")
    checkpoint = _open_files(path, [path.parent / shard for shard in shards])
    where = {name: identity.path for name, identity in checkpoint._files.items()}
    lost = [name for name, shard in weight_map.items() if where.get(name) != path.parent / shard]
    if lost:
        raise CheckpointError(f"{path}: tensor {lost[0]!r} is not in {weight_map[lost[0]]!r} ({len(lost)} in all)")
    return checkpoint
