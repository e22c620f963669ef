"""QuantizeConfig and MixedQuantizeConfig: the recipe, and what it does to a model."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from . import measure, replace
from .backend import BackendConfig, QuantBackend
from .errors import CheckpointError
from .registry import make_backend
from .sites import LinearSite, find_sites, name_matches, select_sites

if TYPE_CHECKING:
    from .choice import Weight
    from .selection import Decision

logger = logging.getLogger("quant_core")

MODES = ("dynamic", "dequant_once")
Device: TypeAlias = torch.device | str | None
Progress = Callable[[int, int, str], None]


class Recipe:
    """What both configs can do. A recipe is a list of parts, each a :class:`QuantizeConfig` with its own layers."""

    load_prequantized: bool
    depends_on_model = False
    """Whether :meth:`for_model` makes another recipe of this one for each model."""

    def for_model(
        self,
        weights: Mapping[str, Weight],
        by_structure: Mapping[str, Decision],
        halves_width: Callable[[QuantizeConfig], bool],
    ) -> tuple[Recipe, Mapping[str, Decision], str]:
        """Return the recipe for one model, what is decided about the layers that it leaves, and a note for the user.

        Args:
            weights, by_structure, halves_width: see :func:`quant_core.choice.choose_weights`.

        Raises:
            ValueError: it finds nothing to quantize.
        """
        return self, by_structure, ""

    def parts(self) -> list[QuantizeConfig]:
        """Return the single-method configs that this recipe consists of."""
        raise NotImplementedError

    @property
    def recipe_mode(self) -> str:
        return self.parts()[0].mode

    @property
    def recipe_method(self) -> str:
        return " + ".join(part.method for part in self.parts())

    # ------------------------------------------------------------------ which layer belongs to whom

    def assign_layers(self, model: nn.Module) -> list[tuple[LinearSite, QuantizeConfig]]:
        """Return every selected layer with the part that quantizes it, in model order, without touching the model.

        Raises:
            ValueError: an entry matches nothing, a targeted layer cannot be replaced, or two parts select the same
                layer (the message names the layers).
        """
        sites = find_sites(model)
        owners: dict[str, list[QuantizeConfig]] = {}
        for part in self.parts():
            for site in select_sites(model, sites, part.target_modules, part.exclude_modules):
                owners.setdefault(site.name, []).append(part)
        overlap = {name: parts for name, parts in owners.items() if len(parts) > 1}
        if overlap:
            name, parts = next(iter(overlap.items()))
            raise ValueError(
                f"{len(overlap)} layer(s) are selected by more than one config: {', '.join(list(overlap)[:8])}. "
                f"{name!r} is claimed by {' and '.join(p.method for p in parts)}; "
                "exclude it from all but one with exclude_modules"
            )
        return [(site, owners[site.name][0]) for site in sites if site.name in owners]

    # ------------------------------------------------------------------ models

    def quantize_model(
        self,
        model: nn.Module,
        compute_device: Device = None,
        model_device: Device = None,
        *,
        keep_originals: bool = True,
        progress: Progress | None = None,
    ) -> list[str]:
        """Replace the selected ``nn.Linear`` layers of ``model`` by quantized ones, in place.

        Each layer keeps its dtype as compute dtype, its training flag and its forward and backward hooks. Does
        nothing when ``load_prequantized`` is set: such a checkpoint is quantized already.

        Args:
            model: with its float weights loaded.
            compute_device: where to quantize; None means where each weight is.
            model_device: where each quantized layer is left; None means on ``compute_device``. With the model on the
                CPU, ``compute_device="cuda", model_device="cpu"`` holds one layer at a time on the accelerator.
            keep_originals: hold the float layers until the last one is done, so that a failure or an interrupt
                leaves the model as it was. False frees each at once: peak memory is lower, and after a failure the
                model is partly quantized.
            progress: called as ``progress(done, total, layer name)`` after each layer.

        Returns:
            The names of the quantized layers.

        Raises:
            ValueError: found before the model is touched: unmatched entries, overlapping configs, a layer whose
                shape the format cannot take, weights on the meta device.
            QuantizationError: a layer failed; the message names it.
        """
        if self.load_prequantized:
            logger.info("load_prequantized is set: the checkpoint is quantized already, nothing to do")
            return []
        return replace.quantize_layers(
            model, self.assign_layers(model), compute_device, model_device, keep_originals, progress
        )

    def prepare_for_prequantized_load(self, model: nn.Module, compute_dtype: torch.dtype = torch.bfloat16) -> list[str]:
        """Replace the selected layers by empty quantized ones, ready for ``load_state_dict(..., assign=True)``.

        Args:
            model: may be on the meta device; its float weights are dropped.
            compute_dtype: what the quantized layers dequantize to in ``forward``.

        Returns:
            The names of the replaced layers.
        """
        return replace.install_shells(model, self.assign_layers(model), compute_dtype)

    def dequantize_model(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype = torch.bfloat16,
        compute_device: Device = None,
        model_device: Device = None,
    ) -> list[str]:
        """Replace this recipe's quantized Linears by plain ``nn.Linear`` that carry the quantization error.

        Only takes effect with ``mode="dequant_once"``; otherwise returns at once.
        """
        if self.recipe_mode != "dequant_once":
            return []
        return replace.dequantize_layers(model, self._backend_of, compute_dtype, compute_device, model_device)

    def is_quantized_linear(self, module: nn.Module) -> bool:
        """Whether ``module`` is a quantized Linear of this recipe's backend(s)."""
        return any(part.backend.is_quantized_linear(module) for part in self.parts())

    def build_quantized_shell(
        self, module: nn.Module, compute_dtype: torch.dtype, layer_name: str | None = None
    ) -> nn.Module:
        """Make an empty quantized Linear on meta with ``module``'s shape and bias presence.

        Args:
            module: a float or a quantized Linear.
            compute_dtype: see :meth:`prepare_for_prequantized_load`.
            layer_name: the layer's dotted name; needed where several configs share one backend.

        Raises:
            ValueError: the owner is not unique and ``layer_name`` does not decide it.
        """
        return self._part_of(module, layer_name).backend.create_quantized_linear_shell(module, compute_dtype)

    def _part_of(self, module: nn.Module, layer_name: str | None) -> QuantizeConfig:
        parts = self.parts()
        candidates = [p for p in parts if p.backend.is_quantized_linear(module)] or parts
        if len(candidates) > 1 and layer_name is not None:
            candidates = [p for p in candidates if p.matches(layer_name)]
        if len(candidates) == 1:
            return candidates[0]
        raise ValueError(
            f"which config layer {layer_name!r} belongs to is not decided: {len(candidates)} of {self.recipe_method} "
            "claim it; pass layer_name, the layer's full dotted name"
        )

    def _backend_of(self, name: str, module: nn.Module) -> QuantBackend | None:
        if not self.is_quantized_linear(module):
            return None
        return self._part_of(module, name).backend

    def measure_quantization_error(
        self, model: nn.Module, compute_device: Device = None, verbose: bool = True, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """See :func:`quant_core.measure_quantization_error`."""
        return measure.measure_quantization_error(model, self, compute_device=compute_device, verbose=verbose, **kwargs)

    # ------------------------------------------------------------------ state dicts

    def flatten_state_dict(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Turn a quantized model's state dict into ``(tensors, metadata)`` for ``safetensors.torch.save_file``.

        Raises:
            NotImplementedError: a backend does not declare ``is_serializable``.
        """
        tensors: dict[str, torch.Tensor] = {}
        metadata: dict[str, str] = {"format": "pt"}
        for part, own in self._split_state_dict(state_dict):
            flat, extra = part.backend.flatten_state_dict(own)
            tensors.update(flat)
            for key, value in extra.items():
                if key == "tensor_names" and key in metadata:  # torchao's list of names: two parts, one list
                    value = json.dumps(json.loads(metadata[key]) + json.loads(value))
                metadata[key] = value
        return tensors, metadata

    def unflatten_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Rebuild what ``load_state_dict`` takes from a file's flat tensors and its metadata.

        Also works on the tensors of one layer with the metadata of the whole file.

        Raises:
            CheckpointError: the tensors belong to another method, or some of a layer's are missing.
        """
        result: dict[str, Any] = {}
        for part, own in self._split_state_dict(state_dict):
            state = part.backend.unflatten_state_dict(own, metadata or {})
            for key, value in state.items():
                # A tensor subclass that reached a plain Linear would load there without a word.
                if type(value) not in (torch.Tensor, nn.Parameter) and not part.matches(layer_of_key(key)):
                    raise CheckpointError(
                        f"layer {layer_of_key(key)!r} is quantized in the file, but the recipe leaves it out: "
                        "load with the target_modules and exclude_modules that it was saved with"
                    )
            result.update(state)
        return result

    def _split_state_dict(self, state_dict: Mapping[str, Any]) -> list[tuple[QuantizeConfig, dict[str, Any]]]:
        """Give every key to the part whose layers it belongs to; what belongs to none goes with the first."""
        parts = self.parts()
        if len(parts) == 1:
            return [(parts[0], dict(state_dict))]
        owned: list[dict[str, Any]] = [{} for _ in parts]
        for key, value in state_dict.items():
            layer = layer_of_key(key)
            index = next((i for i, part in enumerate(parts) if part.matches(layer)), 0)
            owned[index][key] = value
        return list(zip(parts, owned, strict=True))

    # ------------------------------------------------------------------ JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON-serializable data; :func:`recipe_from_dict` reads it back."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the recipe as compact JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))


def layer_of_key(key: str) -> str:
    """Return the layer that a state-dict key belongs to: ``a.b.weight.absmax`` and ``a.b._weight_qdata`` -> ``a.b``."""
    head, found, _ = key.partition(".weight.")
    return head if found else key.rpartition(".")[0]


def _check_names(owner: str, title: str, entries: Any) -> None:
    if entries is None:
        return
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ValueError(f"{owner}: {title} must be a list of layer names, got {entries!r}")
    bad = [e for e in entries if not isinstance(e, str) or not e.strip(".")]
    if bad:
        raise ValueError(f"{owner}: {title} holds {bad[0]!r}, which is not a layer name")


@dataclass
class QuantizeConfig(Recipe):
    """Which method, which layers, which options; and the operations on a model.

    Args:
        method: a name in ``QUANT_METHODS``. Required.
        mode: ``"dynamic"`` keeps quantized Linears; with ``"dequant_once"``, :meth:`dequantize_model` turns them
            into plain float Linears again.
        target_modules: quantize only the layers that match; None means all.
        exclude_modules: leave out the layers that match.
        backend_config_kwargs: the method's options, see ``describe_quant_method``.
        load_prequantized: the checkpoint holds quantized weights already.

    A layer matches an entry when its full dotted name equals it or ends with ``"." + entry``.

    Raises at construction:
        ValueError: unknown method, mode or option, or a value the format cannot take.
        ImportError: the method's library is missing; the message says how to install it.
    """

    method: str = ""
    mode: str = "dynamic"
    target_modules: list[str] | None = None
    exclude_modules: list[str] | None = None
    backend_config_kwargs: dict[str, Any] = field(default_factory=dict)
    load_prequantized: bool = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.mode not in MODES:
            raise ValueError(f"{owner}: mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        _check_names(owner, "target_modules", self.target_modules)
        _check_names(owner, "exclude_modules", self.exclude_modules)
        if self.target_modules is not None and not self.target_modules:
            raise ValueError(f"{owner}: target_modules is empty, nothing would be quantized; None means all layers")
        if not isinstance(self.load_prequantized, bool):
            raise ValueError(f"{owner}: load_prequantized must be True or False, got {self.load_prequantized!r}")
        options = self.backend_config_kwargs if self.backend_config_kwargs is not None else {}
        if not isinstance(options, Mapping):
            raise ValueError(f"{owner}: backend_config_kwargs must map option names to values, got {options!r}")
        self.backend: QuantBackend = make_backend(self.method, options)
        # What is stored is what applies: a config may have adjusted a value.
        config = self.backend.config
        adjusted = isinstance(config, BackendConfig)
        self.backend_config_kwargs = {k: getattr(config, k) if adjusted else v for k, v in options.items()}

    def parts(self) -> list[QuantizeConfig]:
        return [self]

    def matches(self, layer_name: str) -> bool:
        """Whether the target and exclude lists select a layer of this name."""
        if self.target_modules is not None and not name_matches(layer_name, self.target_modules):
            return False
        return not name_matches(layer_name, self.exclude_modules or ())

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"method": self.method}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            default = {} if f.name == "backend_config_kwargs" else f.default
            if f.name not in ("method", "load_prequantized") and value != default:
                data[f.name] = value
        if "backend_config_kwargs" in data:
            data["backend_config_kwargs"] = {k: _plain(v) for k, v in data["backend_config_kwargs"].items()}
        return data


def _plain(value: Any) -> Any:
    """Make an option JSON-serializable: dtypes by name, enums by value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "value", value)


@dataclass
class MixedQuantizeConfig(Recipe):
    """Several :class:`QuantizeConfig`, each responsible for layers of its own.

    Args:
        configs: executed in order. They share one ``mode``, select disjoint layers, and have ``load_prequantized``
            False.
        load_prequantized: set here, not on the configs, to load a mixed checkpoint.
    """

    configs: list[QuantizeConfig] = field(default_factory=list)
    load_prequantized: bool = False

    def __post_init__(self) -> None:
        if not self.configs:
            raise ValueError("MixedQuantizeConfig: configs is empty")
        for index, part in enumerate(self.configs):
            if not isinstance(part, QuantizeConfig):
                raise ValueError(f"MixedQuantizeConfig: configs[{index}] is {part!r}, expected a QuantizeConfig")
            if part.load_prequantized:
                raise ValueError(
                    f"MixedQuantizeConfig: configs[{index}] has load_prequantized=True; set it on the mixed config"
                )
        modes = {part.mode for part in self.configs}
        if len(modes) > 1:
            raise ValueError(f"MixedQuantizeConfig: all configs must share one mode, got {', '.join(sorted(modes))}")

    def parts(self) -> list[QuantizeConfig]:
        return self.configs

    @property
    def method(self) -> str:
        """The methods, joined by ``" + "``."""
        return self.recipe_method

    @property
    def mode(self) -> str:
        """The mode that all configs share."""
        return self.recipe_mode

    def to_dict(self) -> dict[str, Any]:
        return {"configs": [part.to_dict() for part in self.configs]}


def recipe_from_dict(data: Mapping[str, Any], load_prequantized: bool | None = None) -> Recipe:
    """Build the recipe that :meth:`Recipe.to_dict` wrote.

    Args:
        data: ``{"method": ..., ...}``, ``{"configs": [...]}`` or ``{"preset": ..., "target": ...}``.
        load_prequantized: overrides what ``data`` says, if given.

    Raises:
        ValueError: ``data`` is not a recipe, or names an unknown method or option.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a recipe is a JSON object with 'method' or 'configs', got {type(data).__name__}")
    data = dict(data)
    if load_prequantized is not None:
        data["load_prequantized"] = load_prequantized
    if "preset" in data:
        return _preset_from_dict(data)
    if "configs" in data:
        unknown = set(data) - {"configs", "load_prequantized"}
        parts = data["configs"]
        if unknown or not isinstance(parts, list):
            raise ValueError(f"a mixed recipe holds a list 'configs' and nothing else, found {sorted(data)}")
        parts = [QuantizeConfig(**_recipe_fields(part)) for part in parts]
        return MixedQuantizeConfig(configs=parts, load_prequantized=bool(data.get("load_prequantized", False)))
    return QuantizeConfig(**_recipe_fields(data))


def _preset_from_dict(data: Mapping[str, Any]) -> Recipe:
    from .presets import PresetRecipe

    unknown = set(data) - {"preset", "target", "load_prequantized"}
    if unknown:
        raise ValueError(f"a preset's recipe holds 'preset' and 'target', found also {', '.join(sorted(unknown))}")
    return PresetRecipe(data["preset"], data.get("target", "any"), bool(data.get("load_prequantized", False)))


def _recipe_fields(data: Any) -> dict[str, Any]:
    accepted = [f.name for f in dataclasses.fields(QuantizeConfig)]
    if not isinstance(data, Mapping) or "method" not in data or set(data) - set(accepted):
        raise ValueError(f"a recipe has 'method' and may have {', '.join(accepted[1:])}; got {data!r}")
    return dict(data)
