"""What a planned file consists of: its tensors, its metadata, its shards. From headers only, exact to the byte."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .backend import QuantBackend
from .checkpoint.header import build_header
from .checkpoint.writer import Layout, with_manifest
from .registry import make_backend

if TYPE_CHECKING:
    from .plan import PlanRow

PLACEHOLDER = "\x1flayer"
"""A layer's name until it has one. No tensor name has a control character: this and nothing else is replaced."""

Shape = tuple[int, ...]


def tensor_size(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class StoredForm:
    """How a layer of one shape is stored: ``{key below the layer: (dtype, shape)}`` and its metadata entries."""

    tensors: dict[str, tuple[torch.dtype, Shape]]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor_size(*entry) for entry in self.tensors.values())

    def of_layer(self, layer: str) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return ``{tensor name: (dtype, shape)}``."""
        return {f"{layer}.{key}": entry for key, entry in self.tensors.items()}

    def metadata_of(self, layer: str) -> dict[str, str]:
        """Return the metadata entries that the layer needs."""
        escaped = json.dumps(PLACEHOLDER)[1:-1]
        return {
            key.replace(PLACEHOLDER, layer): value.replace(escaped, json.dumps(layer)[1:-1])
            for key, value in self.metadata.items()
        }


def join_metadata(
    metadata: Mapping[str, str], layers: Iterable[tuple[str, str, Mapping[str, str]]], plain: Layout
) -> dict[str, str]:
    """Return the metadata of a file with the entries that its layers need.

    Args:
        metadata: of the file itself.
        layers: ``(method, options as JSON, the entries of one layer)``.
        plain: the tensors that belong to no quantized layer. torchao's own reader drops what is not listed, so where
            a layer brings such a list they are listed too.
    """
    result = dict(metadata)
    names: list[str] = []
    lister: tuple[str, str] | None = None
    for method, options, entries in layers:
        if "tensor_names" in entries:
            names += json.loads(entries["tensor_names"])
            lister = (method, options)
        result.update({key: value for key, value in entries.items() if key != "tensor_names"})
    if lister is None:
        return result
    backend = make_backend(lister[0], json.loads(lister[1]))
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in plain.items()}
    entries = backend.flatten_state_dict(empty)[1]
    names += json.loads(entries["tensor_names"])
    result.update({key: value for key, value in entries.items() if key != "tensor_names"})
    return {**result, "tensor_names": json.dumps(names)}


class Formats:
    """The backends of a plan's methods, and the stored forms of its shapes; each made once."""

    def __init__(self) -> None:
        self._backends: dict[tuple[str, str], QuantBackend] = {}
        self._forms: dict[tuple[str, str, Shape, torch.dtype], StoredForm] = {}
        self._packed: dict[tuple[str, str], bool] = {}

    def backend(self, method: str, options: Mapping[str, Any]) -> QuantBackend:
        """Return the backend of a method with these options.

        Raises:
            ValueError: unknown method or option.
            ImportError: the method's library is missing.
        """
        key = (method, json.dumps(options, sort_keys=True))
        if key not in self._backends:
            self._backends[key] = make_backend(method, options)
        return self._backends[key]

    def form(self, method: str, options: Mapping[str, Any], shape: Shape, dtype: torch.dtype) -> StoredForm:
        """Return how a weight ``[out_features, in_features]`` of a float dtype is stored."""
        key = (method, json.dumps(options, sort_keys=True), shape, dtype)
        if key not in self._forms:
            backend = self.backend(method, options)
            linear = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=dtype)
            shell = backend.create_quantized_linear_shell(linear, dtype)
            state = {f"{PLACEHOLDER}.{name}": value for name, value in shell.state_dict().items()}
            flat, metadata = backend.flatten_state_dict(state)
            tensors = {name[len(PLACEHOLDER) + 1 :]: (t.dtype, tuple(t.shape)) for name, t in flat.items()}
            self._forms[key] = StoredForm(tensors, metadata)
        return self._forms[key]

    def is_packed(self, method: str, options: Mapping[str, Any]) -> bool:
        """Whether the format stores a narrower weight than the layer has: less than a byte a weight."""
        key = (method, json.dumps(options, sort_keys=True))
        if key not in self._packed:
            form = self.form(method, {**options}, (4096, 4096), torch.bfloat16)
            self._packed[key] = max(tensor_size(*entry) for entry in form.tensors.values()) < 4096**2
        return self._packed[key]


@dataclass
class OutputFile:
    """One file to write."""

    tensors: dict[str, tuple[torch.dtype, Shape]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    checksums_of: Layout = field(default_factory=dict)
    """The tensors whose checksums its manifest holds: of all files, in the first."""

    @property
    def nbytes(self) -> int:
        """The size of the file, header included."""
        head, _ = build_header(self.tensors, with_manifest(self.metadata, self.manifest, self.checksums_of, {}))
        return len(head) + sum(tensor_size(*entry) for entry in self.tensors.values())


@dataclass(frozen=True)
class Item:
    """One step of a conversion: a tensor that is copied (``row`` None), or a layer that is converted."""

    name: str
    row: PlanRow | None
    outputs: tuple[str, ...]


def split_files(
    items: Sequence[Item],
    tensors: Layout,
    metadata: dict[str, str],
    manifest: dict[str, Any],
    shard_size: int | None,
) -> list[OutputFile]:
    """Distribute the items over files of at most ``shard_size`` bytes; the tensors of a layer stay together.

    A layer that is larger than a shard gets a shard of its own. The first file holds the metadata.
    """
    files = [OutputFile(metadata=metadata, manifest=manifest, checksums_of=dict(tensors))]
    filled = 0
    for item in items:
        size = sum(tensor_size(*tensors[name]) for name in item.outputs)
        if shard_size is not None and files[-1].tensors and filled + size > shard_size:
            files.append(OutputFile(metadata={"format": "pt"}))
            filled = 0
        files[-1].tensors.update({name: tensors[name] for name in item.outputs})
        filled += size
    return files
