"""One way to read a checkpoint, whether it is one safetensors file, an index with shards, or a folder of shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ..errors import CheckpointError
from .header import Header, TensorInfo, read_header

_INDEX_SUFFIX = ".safetensors.index.json"


class Checkpoint:
    """A checkpoint that is read tensor by tensor.

    Attributes:
        path: what was opened.
        tensors: ``{name: TensorInfo}`` over all files.
        metadata: the first file's metadata, extended by the others'.
    """

    def __init__(self, path: Path, headers: list[Header]) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        for header in headers:
            for name, info in header.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name!r} is in {self._files[name]} and in {header.path}")
                self.tensors[name] = info
                self._files[name] = header.path
            for key, value in header.metadata.items():
                self.metadata.setdefault(key, value)

    @property
    def files(self) -> list[Path]:
        """The safetensors files, each once."""
        return list(dict.fromkeys(self._files.values()))

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own.

        Own memory rather than a map of the file: a file that is truncated or rewritten later cannot kill the process
        or change the model, and the tensor is aligned for the CPU's kernels.
        """
        info = self.tensors[name]
        data = bytearray(info.nbytes)
        with open(self._files[name], "rb", buffering=0) as file:
            file.seek(info.start)
            view = memoryview(data)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{self._files[name]} ended in tensor {name!r}: it was truncated just now")
                done += count
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(info.dtype).reshape(info.shape)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and check its header(s); no tensor is read.

    Args:
        path: a safetensors file, a ``*.safetensors.index.json``, or a folder that holds one of these.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: the file, the index or a shard is not what it should be.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".json"):
        return _open_index(path)
    return Checkpoint(path, [read_header(path)])


def _open_folder(folder: Path) -> Checkpoint:
    indices = sorted(folder.glob("*" + _INDEX_SUFFIX))
    if len(indices) == 1:
        return _open_index(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if len(indices) > 1 or not files:
        found = ", ".join(p.name for p in indices) or "no safetensors file"
        raise CheckpointError(f"{folder}: expected one index or safetensors files, found {found}; name the file itself")
    return Checkpoint(folder, [read_header(file) for file in files])


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
        if not (path.parent / shard).is_file():
            raise CheckpointError(f"{path}: shard {shard!r} is missing; download the whole model")
    checkpoint = Checkpoint(path, [read_header(path.parent / shard) for shard in shards])
    lost = [name for name, shard in weight_map.items() if checkpoint._files.get(name) != path.parent / shard]
    if lost:
        raise CheckpointError(f"{path}: tensor {lost[0]!r} is not in {weight_map[lost[0]]!r} ({len(lost)} in all)")
    return checkpoint
