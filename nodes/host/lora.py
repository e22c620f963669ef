"""Adds a LoRA to a model, beside the quantized layers or into the weights.

Which names in a file mean which weights is ComfyUI's own decision, so that every LoRA that works there works here.
"""

from __future__ import annotations

import difflib
import logging
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import comfy.lora
import comfy.lora_convert
import comfy.utils
import safetensors
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter

from quant_core import CheckpointError
from quant_core.lora.names import for_text_encoder

from .bypass import BypassLora, Offset, Part, joined, part_of

logger = logging.getLogger("quant_core")

AUTO, BYPASS, PATCH = "auto", "bypass", "patch (requantize)"
MODES = (AUTO, BYPASS, PATCH)

FEW_BITS = 6
"""A layer with fewer bits a weight loses visibly when it is quantized again with a LoRA in it."""

_NAMED = 3  # how many of many names a message lists
_NEAR = 0.6

# What follows a layer's name in a LoRA file.
_PART = re.compile(
    r"(\.lora_|_lora\.|\.lora\.|\.hada_|\.lokr_|\.oft_|\.[ab][12]\.|"
    r"\.(alpha|dora_scale|diff|diff_b|set_weight|w_norm|b_norm|reshape_weight|rescale)$)"
)


def bits_of_layer(weight: Any) -> float | None:
    """Return the bits that a weight's codes take for each value, scales not counted; None for a float weight."""
    if not isinstance(weight, QuantizedTensor):
        return None
    return 8 * weight._qdata.numel() * weight._qdata.element_size() / max(1, weight.numel())


def has_few_bits(weight: Any) -> bool:
    """Whether a weight is quantized to about 4 bits or fewer."""
    bits = bits_of_layer(weight)
    return bits is not None and bits < FEW_BITS


# ------------------------------------------------------------------ a LoRA file


@dataclass(frozen=True)
class LoraFile:
    """A LoRA matched to a model and a text encoder.

    Attributes:
        name: of the file.
        patches: ``{what ComfyUI patches: how}``, as ``comfy.lora.load_lora`` gives it.
        metadata: of the file.
    """

    name: str
    patches: Mapping[Any, Any]
    metadata: Mapping[str, str] | None


def _target(key: Any) -> tuple[str, Offset | None, Any]:
    """Return ``(tensor name, offset, function)`` of a key of the patches."""
    if isinstance(key, str):
        return key, None, None
    name, offset, function = (*key, None)[:3]
    return name, offset, function


def _layer(key: Any) -> str:
    return _target(key)[0].rpartition(".")[0]


def read_lora(path: str, model: ModelPatcher, clip: Any = None) -> LoraFile:
    """Read a LoRA and match its names to a model, and to a text encoder, as ComfyUI does.

    Names that match nothing are logged.

    Raises:
        CheckpointError: the file cannot be read, is no LoRA, is incomplete, or nothing in it matches.
    """
    name = os.path.basename(path)
    tensors, metadata = _read(path)
    if not any(map(_PART.search, tensors)):
        first = ", ".join(list(tensors)[:_NAMED]) or "none"
        raise CheckpointError(
            f"{name} is not a LoRA ({len(tensors)} tensors: {first}). A model file goes into models/diffusion_models "
            "and has a loader of its own"
        )
    known: dict[str, Any] = comfy.lora.model_lora_keys_unet(model.model, {})
    if clip is not None:
        known = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, known)
    tensors = comfy.lora_convert.convert_lora(tensors)
    try:
        patches = comfy.lora.load_lora(tensors, known, log_missing=False)
    except KeyError as error:
        raise CheckpointError(
            f"{name} is incomplete: the tensor {error} is missing, which belongs to one that is there. Download or "
            "export the LoRA again"
        ) from error
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # an alpha that is not one number, e.g.
        raise CheckpointError(
            f"{name} holds tensors of a form that no LoRA has: {error}. Download or export the LoRA again"
        ) from error
    changed = {_layer(key) for key in patches}
    stems = dict.fromkeys(key[: found.start()] if (found := _PART.search(key)) else key for key in tensors)
    missing = [stem for stem in stems if stem not in known or _layer(known[stem]) not in changed]
    encoder = [stem for stem in missing if clip is None and for_text_encoder(stem)]
    missing = [stem for stem in missing if stem not in encoder]
    _report_unmatched(
        LoraFile(name, patches, metadata), type(model.model).__name__, len(stems), missing, encoder, known
    )
    return LoraFile(name, patches, metadata)


def _read(path: str) -> tuple[dict[str, torch.Tensor], Mapping[str, str] | None]:
    name = os.path.basename(path)
    try:
        tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    except pickle.UnpicklingError as error:  # torch's own text advises to load it unsafely
        raise CheckpointError(
            f"{name} cannot be read as a LoRA: it is no PyTorch file, or holds more than tensors, which could run "
            "code. Get the LoRA as a safetensors file"
        ) from error
    except (safetensors.SafetensorError, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. The file is damaged or not finished downloading; get it again"
        ) from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{name} holds a {type(tensors).__name__}, not named tensors: it is no LoRA")
    return {key: tensor for key, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}, metadata


def _report_unmatched(
    lora: LoraFile,
    architecture: str,
    count: int,
    missing: Sequence[str],
    encoder: Sequence[str],
    known: Mapping[str, Any],
) -> None:
    """Log what matches nothing; raise CheckpointError if nothing matches."""
    if not lora.patches and missing and missing[0] in known:
        raise CheckpointError(
            f"{lora.name} is incomplete, or of a kind that this ComfyUI does not have: the layer {missing[0]!r} is in "
            f"{architecture}, but what the file has for it changes nothing. Download or export the LoRA again"
        )
    if not lora.patches and missing:
        raise CheckpointError(
            f"{lora.name} does not fit the model: none of its {len(missing)} layers is in {architecture}. The first "
            f"is {missing[0]!r}{_nearest(missing[0], known)}. Choose a LoRA that was trained for {architecture}"
        )
    if not lora.patches:
        raise CheckpointError(
            f"{lora.name} changes a text encoder only (the first of {len(encoder)} layers is {encoder[0]!r}). Connect "
            "the CLIP as well"
        )
    if missing:
        named = [f"{stem!r}{_nearest(stem, known)}" for stem in missing[:_NAMED]]
        logger.warning(
            "%s: %d of %d layers match nothing in %s: %s%s",
            lora.name,
            len(missing),
            count,
            architecture,
            "; ".join(named),
            "; ..." if len(missing) > _NAMED else "",
        )
    if encoder:
        logger.info("%s: %d layers of a text encoder are not used: no CLIP is connected", lora.name, len(encoder))


def _nearest(stem: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(stem, known, n=1, cutoff=_NEAR)
    return f" (the nearest name is {near[0]!r})" if near else ""


# ------------------------------------------------------------------ adding it


def add_to_model(model: ModelPatcher, lora: LoraFile, strength: float, mode: str) -> ModelPatcher:
    """Return a clone of a model with a LoRA; the model itself for a strength of 0."""
    if not strength:
        return model
    added = model.clone()
    _add(added, lora, strength, mode)
    return added


def add_to_clip(clip: Any, lora: LoraFile, strength: float, mode: str) -> Any:
    """Return a clone of a text encoder with a LoRA; the text encoder itself for a strength of 0, and None for None."""
    if clip is None or not strength:
        return clip
    added = clip.clone()
    _add(added.patcher, lora, strength, mode)
    return added


def _add(patcher: ModelPatcher, lora: LoraFile, strength: float, mode: str) -> None:
    state = patcher.model.state_dict()
    patches: dict[Any, Any] = {}
    beside: dict[str, list[Part]] = {}
    baked: dict[str, str] = {}
    unfit: list[str] = []
    for key, patch in lora.patches.items():
        name, offset, function = _target(key)
        if name not in state:
            continue
        layer, _, leaf = name.rpartition(".")
        weight = comfy.utils.get_attr(patcher.model, name)
        problem = _misfit(patch, tuple(weight.shape), offset)
        if problem:
            unfit.append(f"{layer}: {problem}")
            continue
        module = comfy.utils.get_attr(patcher.model, layer) if layer else patcher.model
        part = None
        if leaf == "weight" and _goes_beside(weight, module, mode) and function is None:
            part = part_of(patch, tuple(weight.shape), offset, strength)
        if part is not None:
            beside.setdefault(layer, []).append(part)
            continue
        if mode != PATCH and isinstance(weight, QuantizedTensor) and (mode == BYPASS or has_few_bits(weight)):
            baked[layer] = _kind(patch)
        patches[key] = patch
    if unfit:
        _report_unfit(lora, patcher, unfit, len(patches) + len(beside))
    if baked:
        logger.warning(
            "%s: %d quantized layers are changed by %s, which needs the weight itself; they are quantized again with "
            "it, which costs accuracy: %s",
            lora.name,
            len(baked),
            ", ".join(sorted(set(baked.values()))),
            ", ".join(list(baked)[:_NAMED]) + (", ..." if len(baked) > _NAMED else ""),
        )
    if patches:
        patcher.add_patches(patches, strength)
    if beside:
        BypassLora({layer: joined(parts) for layer, parts in beside.items()}).add_to(patcher, lora.name)
    if lora.metadata:
        patcher.set_attachments("lora_metadata", lora.metadata)
    if patches or beside:
        logger.info("%s: %d layers beside the weights, %d in the weights", lora.name, len(beside), len(patches))


def _goes_beside(weight: Any, module: torch.nn.Module, mode: str) -> bool:
    if mode == PATCH or not hasattr(module, "in_features") or weight.ndim != 2:
        return False
    return mode == BYPASS or has_few_bits(weight)


def _misfit(patch: Any, shape: tuple[int, ...], offset: Offset | None) -> str:
    """Return what is wrong with the factors of a patch for a weight; empty for kinds that ComfyUI checks."""
    found = _size(patch)
    if found is None:
        return ""
    if not found:
        return "its matrices are incomplete, or do not fit together"
    expected = list(shape)
    if offset is not None:
        expected[offset[0]] = offset[2]
    columns = torch.Size(expected[1:]).numel()
    if found == (expected[0], columns):
        return ""
    return f"the model has {expected[0]} x {columns}, the LoRA {found[0]} x {found[1]}"


def _size(patch: Any) -> tuple[int, ...] | None:
    """Return ``(rows, columns)`` of the change that a LoRA, LoHa or LoKr makes, empty where its factors make none.

    None for other kinds, and for those with a core, which are left to ComfyUI.
    """
    if type(patch) is LoRAAdapter:
        up, down, _, mid, _, reshape = patch.weights
        return _product(up, down) if mid is None and reshape is None else None
    if type(patch) is LoHaAdapter:
        a1, b1, _, a2, b2, core1, core2, _ = patch.weights
        if core1 is not None or core2 is not None:
            return None
        size = _product(a1, b1)
        return size if size == _product(a2, b2) else ()
    if type(patch) is LoKrAdapter:
        outer, inner, _, outer_a, outer_b, inner_a, inner_b, core, _ = patch.weights
        if core is not None or any(tensor is not None and tensor.ndim < 2 for tensor in (outer, inner)):
            return None
        outer_size = _product(outer_a, outer_b) if outer is None else outer.flatten(1).shape
        inner_size = _product(inner_a, inner_b) if inner is None else inner.flatten(1).shape
        return tuple(a * b for a, b in zip(outer_size, inner_size, strict=True)) if outer_size and inner_size else ()
    return None


def _product(left: torch.Tensor | None, right: torch.Tensor | None) -> tuple[int, ...]:
    """Return the size of a product of two factors, empty where there is none."""
    if left is None or right is None or min(left.ndim, right.ndim) < 2:
        return ()
    left, right = left.flatten(1), right.flatten(1)
    return (left.shape[0], right.shape[1]) if 0 < left.shape[1] == right.shape[0] else ()


def _report_unfit(lora: LoraFile, patcher: ModelPatcher, unfit: Sequence[str], fitting: int) -> None:
    text = f"{len(unfit)} layers do not fit {type(patcher.model).__name__} ({unfit[0]})"
    if not fitting:
        raise CheckpointError(
            f"{lora.name} does not fit the model: {text}. It was trained for another model of the same architecture, "
            "or is damaged"
        )
    logger.warning("%s: %s; they are left out", lora.name, text)


def _kind(patch: Any) -> str:
    if isinstance(patch, tuple):
        return f"'{patch[0] if len(patch) == 2 else 'diff'}'"
    magnitudes = {LoRAAdapter: 4, LoHaAdapter: 7, LoKrAdapter: 8}.get(type(patch))
    if magnitudes is not None and patch.weights[magnitudes] is not None:
        return "DoRA"
    return type(patch).__name__.removesuffix("Adapter")


# ------------------------------------------------------------------ a stock LoRA in 4-bit layers


def watch_patches(patcher: ModelPatcher) -> None:
    """Make ComfyUI call :func:`warn_about_patches` whenever it has loaded this patcher or a clone of it."""
    patcher.add_callback_with_key(CallbacksMP.ON_LOAD, "quantcore", warn_about_patches)


_WARNED: WeakSet[torch.nn.Module] = WeakSet()


def warn_about_patches(patcher: ModelPatcher, *_: Any) -> None:
    """Log, once a model, that patches were quantized again with layers of few bits.

    Layers that ComfyUI keeps off the device get their patches in float at each forward, and count only when they are
    loaded.
    """
    if patcher.model in _WARNED:
        return
    again = 0
    for key in patcher.patches:
        layer, _, leaf = key.rpartition(".")
        module = comfy.utils.get_attr(patcher.model, layer) if layer else patcher.model
        if leaf == "weight" and has_few_bits(module.weight) and not getattr(module, "weight_function", None):
            again += 1
    if again:
        _WARNED.add(patcher.model)
        logger.warning(
            "A LoRA was added to %d layers of %s that have about 4 bits a weight. Each was quantized again with it, "
            "which about doubles the error of the picture. Load LoRA (Quantized) leaves such layers as they are.",
            again,
            type(patcher.model).__name__,
        )
