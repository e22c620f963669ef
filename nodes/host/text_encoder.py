"""Loads text encoder files into a ComfyUI CLIP, quantizing their layers on the way.

ComfyUI computes text encoders in float, quantized ones too: it marks every layer for float arithmetic and hands it
float32. The Linear here multiplies by its quantized weight instead, in one dtype, and returns the dtype that it got.
CLIP-L, CLIP-G and CLIP-H stay in float: they are small, and a prompt's first reader.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher, wipe_lowvram_weight
from comfy.quant_ops import QuantizedTensor

from quant_core import CheckpointError, QuantizationError, Recipe

from .adapter import is_adapted
from .lora import watch_patches
from .ops import MARKER, quantizing_operations
from .quantizer import LayerQuantizer, Target
from .text_encoder_files import TextEncoderFile, choose, describe, read_file, through_cache

logger = logging.getLogger("quant_core")

# An encoder that is not made for what it is given fails in its own way.
_MISFITS = (RuntimeError, KeyError, AttributeError, TypeError, ValueError, IndexError)
_LONGEST = 300  # characters of such an error that a message repeats


@dataclass(frozen=True)
class TextEncoder:
    """What was loaded.

    Attributes:
        clip: ComfyUI's CLIP.
        notes: a line for each file, saying what became of it.
    """

    clip: comfy.sd.CLIP
    notes: list[str]


def clip_types() -> list[str]:
    """The kinds of text encoders that ComfyUI's loaders know; ``sdxl`` is what two files of no kind make."""
    names = [kind.name.lower() for kind in comfy.sd.CLIPType]
    return [names[0], "sdxl", *names[1:]]


def load_text_encoder(
    paths: Sequence[str],
    clip_type: str,
    recipe: Recipe,
    compute_dtype: torch.dtype | None = None,
    run_device: torch.device | None = None,
    quantize_device: torch.device | None = None,
    embeddings: Sequence[str] = (),
    model_options: Mapping[str, Any] | None = None,
    cached: bool = False,
    disable_dynamic: bool = False,
) -> TextEncoder:
    """Load the text encoders in ``paths`` and quantize them by ``recipe`` while loading.

    A file that is quantized already is loaded as it is, whatever tool wrote it; CLIP text models are loaded in float.

    Args:
        paths: one to four files; they may come in any order.
        clip_type: one of :func:`clip_types`.
        recipe: methods, options, and which layers. Layer names are those in the files.
        compute_dtype: what quantized layers compute in; None is float32 on a CPU and on cards without bfloat16, and
            bfloat16 on others.
        run_device: where the encoders run; None lets ComfyUI choose.
        quantize_device: where to quantize; None is where ComfyUI runs models.
        embeddings: folders of textual inversions.
        model_options: further options for ComfyUI's text encoders.
        cached: keep the quantized files in the disk cache, and take them from there if they are in it.
        disable_dynamic: ComfyUI asks for a patcher without dynamic memory management, when it loads a model again.

    Raises:
        CheckpointError: a file cannot be read, or is rewritten meanwhile, or the files are not the text encoders that
            ``clip_type`` is made of.
        QuantizationError: a layer cannot be quantized. Both messages name the file.
    """
    files = [read_file(path) for path in paths]
    names = ", ".join(file.source.name for file in files)
    try:
        choose(files, recipe)
    except ValueError as error:
        raise CheckpointError(f"{names}: {error}") from error
    options = dict(model_options or {})
    if run_device is not None:
        options["load_device"] = options["offload_device"] = run_device
    runs_on = options.get("load_device", comfy.model_management.text_encoder_device())
    options.setdefault("initial_device", options.get("offload_device", _offload_device()))
    compute = compute_dtype or _usual_dtype(runs_on)
    quantizes_on = quantize_device or comfy.model_management.get_torch_device()
    if cached:
        files = [through_cache(file, quantizes_on) for file in files]
    quantizer = _FileQuantizer(files, quantizes_on)
    operations = _text_operations(compute, quantizer)
    options["custom_operations"] = operations
    try:
        clip = comfy.sd.load_text_encoder_state_dicts(
            [file.source.state_dict for file in files],
            embedding_directory=list(embeddings),
            clip_type=getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
            model_options=options,
            disable_dynamic=disable_dynamic,
        )
    except QuantizationError as error:
        raise QuantizationError(f"{names}: {error}") from error
    except _MISFITS as error:
        if comfy.model_management.is_oom(error):
            raise
        # What torch and ComfyUI say themselves helps; what Python says of an object that is missing does not.
        said = str(error) if isinstance(error, (RuntimeError, ValueError)) else "ComfyUI finds none in them"
        raise CheckpointError(_misfit(names, clip_type, said)) from error
    for file in files:
        file.source.check_unchanged()
    _check(clip, operations.Linear, names, clip_type)
    _compute_quantized(clip)
    arguments = (tuple(paths), clip_type, recipe, compute_dtype, run_device, quantize_device, tuple(embeddings))
    clip.patcher.cached_patcher_init = (_load_patcher, (*arguments, model_options, cached))
    watch_patches(clip.patcher)
    notes = [describe(file, quantizer.done_in(index)) for index, file in enumerate(files)]
    for note in notes:
        logger.info("%s", note)
    return TextEncoder(clip, notes)


def _load_patcher(*arguments: Any, disable_dynamic: bool = False) -> ModelPatcher:
    """Load once more, for ComfyUI's copies of the patcher."""
    return load_text_encoder(*arguments, disable_dynamic=disable_dynamic).clip.patcher


def _offload_device() -> torch.device:
    return comfy.model_management.text_encoder_offload_device()


def _usual_dtype(device: torch.device) -> torch.dtype:
    # Quantized multiplication on a graphics card is made for 16 bit; float16 overflows in T5.
    on_card = not comfy.model_management.is_device_cpu(device)
    return torch.bfloat16 if on_card and comfy.model_management.should_use_bf16(device) else torch.float32


# ------------------------------------------------------------------ layers


class _FileQuantizer(LayerQuantizer):
    """Quantizes the layers of several files, each with names of its own.

    ComfyUI loads each file into a model of its own and renames layers on the way, so two layers may arrive under one
    name. It hands on the tensors themselves: by them it is known where a layer comes from.
    """

    def __init__(self, files: Sequence[TextEncoderFile], device: torch.device) -> None:
        self._origin: dict[int, tuple[torch.Tensor, str]] = {}
        targets: dict[str, Target] = {}
        for index, file in enumerate(files):
            for layer, target in file.targets.items():
                name = f"{index}:{layer}"
                weight = file.source.state_dict[f"{layer}.weight"]
                self._origin[id(weight)] = (weight, name)
                targets[name] = target
        super().__init__(targets, device)

    def replace_weight(self, state_dict: dict[str, Any], prefix: str) -> None:
        weight = state_dict.get(prefix + "weight")
        if id(weight) not in self._origin:
            return
        name = self._origin.pop(id(weight))[1]
        layer = {f"{name}.weight": state_dict.pop(prefix + "weight")}
        super().replace_weight(layer, f"{name}.")
        for key, tensor in layer.items():
            state_dict[prefix + key.removeprefix(f"{name}.")] = tensor

    def done_in(self, index: int) -> list[str]:
        """Return the names of the layers of a file that were quantized."""
        return [name.removeprefix(f"{index}:") for name in self.done if name.startswith(f"{index}:")]


def _compute_quantized(clip: comfy.sd.CLIP) -> None:
    """Take back that every layer is to compute in float, which ComfyUI asks of text encoders.

    It also takes such layers for offloaded ones, so that a LoRA would be left out of layers that are offloaded later.
    Layers of ours cast their weights to what they compute in anyway.
    """
    clip.patcher.force_cast_weights = False
    for module in clip.cond_stage_model.modules():  # some were marked when they were loaded to a CPU, just now
        if hasattr(module, "prev_comfy_cast_weights"):
            wipe_lowvram_weight(module)
        if getattr(module, "comfy_force_cast_weights", False):
            module.comfy_force_cast_weights = False


def _text_operations(compute_dtype: torch.dtype, quantizer: _FileQuantizer) -> type:
    """Return the operations that text encoders are made of.

    Args:
        compute_dtype: what quantized layers compute in; others have the dtype that ComfyUI gives their encoder.
        quantizer: decides about a float weight and quantizes it.
    """
    base = quantizing_operations(compute_dtype, None)

    class TextOperations(base):
        class Linear(base.Linear):
            is_substitute = False
            """The file has no such weight, and none is needed."""

            def __init__(
                self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
            ) -> None:
                super().__init__(in_features, out_features, bias=False, device=device)
                self.factory_kwargs = {"device": device, "dtype": dtype or compute_dtype}
                self.register_parameter("weight", None)  # for an encoder that no file is for
                if bias:
                    self.bias = torch.nn.Parameter(torch.empty(out_features, **self.factory_kwargs))

            def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
                quantizer.replace_weight(state_dict, prefix)
                weight = state_dict.get(prefix + "weight")
                if prefix + MARKER in state_dict or is_adapted(weight):
                    self.factory_kwargs = {**self.factory_kwargs, "dtype": compute_dtype}
                elif weight is None and prefix.endswith("text_projection."):
                    # Many files of CLIP-L leave it out, since their models do not use it; it is computed all the same.
                    self.is_substitute = True
                    state_dict[prefix + "weight"] = torch.zeros(self.out_features, self.in_features)
                super()._load_from_state_dict(state_dict, prefix, *rest)

            def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
                # Older ComfyUIs list a weight that is not there, and then ask for its size.
                result = super().state_dict(*args, **kwargs)
                for name in [name for name, tensor in result.items() if tensor is None]:
                    del result[name]
                return result

            def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if not isinstance(self.weight, QuantizedTensor) or input.dtype == compute_dtype:
                    return super().forward(input, *args, **kwargs)
                return super().forward(input.to(compute_dtype), *args, **kwargs).to(input.dtype)

    return TextOperations


# ------------------------------------------------------------------ files that do not fit


def _check(clip: comfy.sd.CLIP, linear: type, names: str, clip_type: str) -> None:
    """Raise CheckpointError when an encoder of the CLIP got no weights."""
    encoders: dict[str, bool] = {}
    for name, module in clip.cond_stage_model.named_modules():
        if isinstance(module, linear):
            filled = module.weight is not None and not module.is_substitute
            title = name.partition(".")[0]
            encoders[title] = encoders.get(title, False) or filled
    empty = [title for title, filled in encoders.items() if not filled]
    if empty:
        made = ", ".join(encoders)
        problem = f"ComfyUI would make {made} of them, and none of the files holds {', '.join(empty)}"
        raise CheckpointError(_misfit(names, clip_type, problem))


def _misfit(names: str, clip_type: str, problem: str) -> str:
    problem = " ".join(problem.split())  # torch lists every tensor that does not fit
    problem = problem.rstrip(".") if len(problem) < _LONGEST else problem[:_LONGEST] + " ..."
    return (
        f"{names}: not the text encoders of the type {clip_type!r}: {problem}. Choose the type of your diffusion "
        "model, and the files that its page names for it."
    )
