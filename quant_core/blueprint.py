"""From a plan to what is written: validates its rows against the source, and lays out the files to the byte."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint.formats import StoredLayer, stored_layers
from .checkpoint.manifest import make_manifest
from .checkpoint.reader import Checkpoint, open_checkpoint
from .choice import Weight, check_fit
from .config import QuantizeConfig, Recipe, recipe_from_dict
from .errors import CheckpointError
from .layout import Formats, Item, OutputFile, Shape, split_files, tensor_size
from .plan import DEQUANTIZE, KEEP, QUANTIZE, Plan, PlanRow
from .runs import peak_bytes
from .selection import Reason

_DESCRIBING = ("format", "quant_core", "tensor_names", "_quantization_metadata")
"""Metadata entries by which a reader knows what the tensors of a file mean."""

_QUANTIZE_REASONS = (Reason.IN_BLOCK, Reason.TARGETED, Reason.FALLBACK, Reason.EDITED)


@dataclass
class Blueprint:
    """A validated plan: the open source, and the files to write."""

    checkpoint: Checkpoint
    stored: dict[str, StoredLayer]
    formats: Formats
    items: list[Item]
    files: list[OutputFile]


def identity_of(checkpoint: Checkpoint) -> list[list[Any]]:
    """Return ``[name, size, modification time]`` of the files of a checkpoint, as a plan holds them."""
    return [[entry.path.name, entry.size, entry.mtime_ns] for entry in checkpoint.identity()]


def owners_of(stored: Mapping[str, StoredLayer]) -> dict[str, StoredLayer]:
    """Return ``{tensor name: the quantized layer it belongs to}``."""
    return {key: layer for layer in stored.values() for key in layer.keys}


def weight_name(layer: StoredLayer) -> str:
    """Return the name that the float weight of a quantized layer has."""
    return layer.keys[0] if layer.family == "gguf" else f"{layer.name}.weight"


def draw(plan: Plan, checkpoint: Checkpoint | None = None, formats: Formats | None = None) -> Blueprint:
    """Validate a plan and lay out its files; its byte counts are filled in.

    Raises:
        CheckpointError: the source cannot be read, or is not the one that was planned.
        ValueError: a row does not belong to the source, or asks for what cannot be done; the message names the layer.
    """
    checkpoint = open_checkpoint(plan.source) if checkpoint is None else checkpoint
    formats = Formats() if formats is None else formats
    found = identity_of(checkpoint)
    if plan.files != found:
        raise CheckpointError(
            f"{checkpoint.path} was changed after it was planned (found {found}, planned {plan.files}); plan it again"
        )
    stored = stored_layers(checkpoint)
    owners = owners_of(stored)
    rows = _rows_by_tensor(plan, checkpoint, stored)
    tensors: dict[str, tuple[torch.dtype, Shape]] = {}
    items: list[Item] = []
    for name, info in checkpoint.tensors.items():
        owner = owners.get(name)
        row = rows.get(weight_name(owner) if owner else name)
        if row is None:
            raise ValueError(f"{checkpoint.path}: the plan has no row for tensor {name!r}; plan the file again")
        if owner is not None and row.decision != KEEP:
            if name != owner.keys[0]:
                continue
        elif row.decision != QUANTIZE:
            tensors[name] = (info.dtype, info.shape)
            items.append(Item(name, None, (name,)))
            continue
        outputs = _outputs(row, formats)
        tensors.update(outputs)
        items.append(Item(row.layer, row, tuple(outputs)))
    _count_bytes(plan, tensors, items)
    metadata = _metadata(plan, checkpoint, stored, tensors, formats)
    recipe, layers = _file_recipe(plan, stored)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    weights = {row.layer: (row.method, row.shape, getattr(torch, row.dtype)) for row in plan.quantized}
    manifest = make_manifest(recipe, layers, {"name": checkpoint.path.name, "bytes": total}, weights)
    files = split_files(items, tensors, metadata, manifest, plan.shard_size)
    plan.file_sizes = [file.nbytes for file in files]
    plan.peak_bytes = peak_bytes(plan.rows, formats)
    return Blueprint(checkpoint, stored, formats, items, files)


# ------------------------------------------------------------------ rows


def _rows_by_tensor(plan: Plan, checkpoint: Checkpoint, stored: Mapping[str, StoredLayer]) -> dict[str, PlanRow]:
    """Return ``{tensor: row}``, each row checked and brought up to date with the header."""
    layers = {weight_name(layer): layer for layer in stored.values()}
    rows: dict[str, PlanRow] = {}
    for row in plan.rows:
        layer, info = layers.get(row.tensor), checkpoint.tensors.get(row.tensor)
        if row.tensor in rows or (layer is None and info is None):
            what = "twice" if row.tensor in rows else "but the source does not hold it"
            raise ValueError(f"the plan names tensor {row.tensor!r} {what}")
        if layer is not None:
            row.layer, row.shape, dtype = layer.name, tuple(layer.shape), layer.dtype
            row.bytes_before = sum(checkpoint.tensors[key].nbytes for key in layer.keys)
            row.stored = f"{layer.family} {layer.format}"
        else:
            assert info is not None
            row.shape, dtype, row.bytes_before, row.stored = info.shape, info.dtype, info.nbytes, ""
        row.dtype = str(dtype).removeprefix("torch.")
        if row.decision == KEEP and layer is not None and layer.family == "gguf":
            raise ValueError(f"layer {row.layer!r}: GGUF blocks cannot be kept in a safetensors file; dequantize it")
        if row.decision == DEQUANTIZE and layer is None:
            raise ValueError(f"layer {row.layer!r} cannot be dequantized: the source holds it in float")
        if row.decision != QUANTIZE:
            row.method, row.options = "", {}
        fitting = (row.decision == QUANTIZE) == (row.reason in _QUANTIZE_REASONS)
        if not fitting and (row.decision == QUANTIZE or layer is None):
            row.reason, row.detail = Reason.EDITED, ""
        rows[row.tensor] = row
    return rows


def _outputs(row: PlanRow, formats: Formats) -> dict[str, tuple[torch.dtype, Shape]]:
    """The tensors that a converted layer is stored as."""
    dtype = getattr(torch, row.dtype)
    if row.decision == DEQUANTIZE:
        return {row.tensor: (dtype, row.shape)}
    if not row.method or not row.is_weight:
        raise ValueError(
            f"layer {row.layer!r} is to be quantized, but {'names no method' if row.is_weight else 'is no weight'}"
        )
    part = QuantizeConfig(method=row.method, backend_config_kwargs=dict(row.options))
    part.backend = formats.backend(row.method, row.options)
    packed = formats.is_packed(row.method, row.options)
    misfit = check_fit(row.layer, Weight(row.shape, dtype), part, packed)
    if misfit is not None:
        raise ValueError(f"layer {row.layer!r} {list(row.shape)} cannot be quantized: {misfit.reason}")
    return formats.form(row.method, row.options, row.shape, dtype).of_layer(row.layer)


def _count_bytes(plan: Plan, tensors: Mapping[str, tuple[torch.dtype, Shape]], items: list[Item]) -> None:
    converted = {item.row.tensor: item for item in items if item.row is not None}
    for row in plan.rows:
        item = converted.get(row.tensor)
        row.bytes_after = row.bytes_before if item is None else sum(tensor_size(*tensors[n]) for n in item.outputs)


# ------------------------------------------------------------------ metadata


def _metadata(
    plan: Plan,
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredLayer],
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    formats: Formats,
) -> dict[str, str]:
    """The metadata of the source, without what described layers that are replaced, and with what the new ones need.

    The plan's extra entries come last.
    """
    gone = {row.layer for row in plan.rows if row.stored and row.decision != KEEP}
    metadata = {k: v for k, v in checkpoint.metadata.items() if k not in ("format", "quant_core", "tensor_names")}
    needed = {*_DESCRIBING, *checkpoint.tensors, *tensors}  # torchao's entries have the names of their tensors
    for layer in gone:
        metadata.pop(f"{layer}.weight", None)
    if gone and "_quantization_metadata" in metadata:
        markers = json.loads(metadata["_quantization_metadata"])
        markers["layers"] = {k: v for k, v in markers.get("layers", {}).items() if k not in gone}
        metadata["_quantization_metadata"] = json.dumps(markers)
    names: list[str] = []
    if "tensor_names" in checkpoint.metadata:
        names = [n for n in json.loads(checkpoint.metadata["tensor_names"]) if n.removesuffix(".weight") not in gone]
    backend = None
    for row in plan.quantized:
        form = formats.form(row.method, row.options, row.shape, getattr(torch, row.dtype))
        extra = form.metadata_of(row.layer)
        if "tensor_names" in extra:
            names += json.loads(extra.pop("tensor_names"))
            backend = formats.backend(row.method, row.options)
        needed.update(extra)
        metadata.update(extra)
    if backend is not None:
        # torchao's own reader drops every tensor that is not listed.
        owned = owners_of(stored)
        plain = {n: torch.empty(shape, dtype=dtype, device="meta") for n, (dtype, shape) in tensors.items()}
        kept = {n: t for n, t in plain.items() if n in checkpoint.tensors and n not in owned and n not in names}
        kept_metadata = backend.flatten_state_dict(kept)[1]
        names += json.loads(kept_metadata.pop("tensor_names"))
        needed.update(kept_metadata)
        metadata.update(kept_metadata)
    if names:
        metadata["tensor_names"] = json.dumps(names)
    _check_extra(plan.extra_metadata, needed)
    return {"format": "pt", **metadata, **plan.extra_metadata}


def _check_extra(extra: Mapping[str, str], needed: Collection[str]) -> None:
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"extra_metadata holds {key!r}: {value!r}; names and values must be text"[:1000])
        if key in needed:
            raise ValueError(
                f"extra_metadata holds {key!r}, by which readers of the file know what its tensors mean; "
                "give the entry another name"
            )


def _file_recipe(plan: Plan, stored: Mapping[str, StoredLayer]) -> tuple[dict[str, Any], list[list[str]]]:
    """The recipe that describes the file, and the layers of each of its parts.

    It is the plan's own recipe where every layer follows it; layers that were edited, or are kept quantized as the
    source had them, come as further parts.
    """
    recipe: Recipe = recipe_from_dict(plan.recipe)
    parts = recipe.parts()
    layers: list[list[str]] = [[] for _ in parts]
    others: dict[tuple[str, str], list[str]] = {}
    for row in plan.quantized:
        matching = (i for i, part in enumerate(parts) if part.matches(row.layer) and _follows(row, part))
        # A recipe that depends on the model would choose anew whenever the file is read.
        index = None if recipe.depends_on_model else next(matching, None)
        if index is None:
            options = json.dumps(row.options, sort_keys=True)
            others.setdefault((row.method, options), []).append(row.layer)
        else:
            layers[index].append(row.layer)
    for row in plan.rows:
        layer = stored.get(row.layer) if row.stored and row.decision == KEEP else None
        if layer is not None and layer.method is not None and layer.family != "fp8_cast":
            # With convrot off an int8 layer takes the rotation from its marker.
            own = {"convrot": False} if layer.format == "int8_tensorwise" else {}
            others.setdefault((layer.method, json.dumps(own)), []).append(row.layer)
    if not others:
        return recipe.to_dict(), layers
    configs = []
    for part, names in zip(parts, layers, strict=True):
        if names:
            configs.append({**part.to_dict(), "target_modules": names})
            configs[-1].pop("exclude_modules", None)
    groups = [names for names in layers if names]
    for (method, options), names in others.items():
        config: dict[str, Any] = {"method": method, "mode": recipe.recipe_mode, "target_modules": names}
        if json.loads(options):
            config["backend_config_kwargs"] = json.loads(options)
        if config["mode"] == "dynamic":
            del config["mode"]
        configs.append(config)
        groups.append(names)
    return ({"configs": configs} if len(configs) > 1 else configs[0]), groups


def _follows(row: PlanRow, part: QuantizeConfig) -> bool:
    if row.method != part.method:
        return False
    own = part.to_dict().get("backend_config_kwargs", {})
    return row.options == {**own, **part.backend.layer_options(row.shape[0], row.shape[1])}
