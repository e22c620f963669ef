"""The contract of a quantization backend: what a library must supply to be usable everywhere.

A backend sees one ``nn.Linear`` at a time; walking a model is the work of :mod:`quant_core.config`. How to write one,
with a complete example, is in ``docs/backends.md``.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from .constraints import Constraint
from .errors import QuantizationError

logger = logging.getLogger("quant_core")

_Config = TypeVar("_Config", bound="BackendConfig")

DTYPE_NAMES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}


def parse_dtype(value: Any) -> Any:
    """Turn ``"bfloat16"`` or ``"torch.bfloat16"`` into ``torch.bfloat16``; return anything else as it is."""
    if isinstance(value, str):
        return DTYPE_NAMES.get(value.removeprefix("torch."), value)
    return value


def reject_unknown_keywords(owner: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise the ValueError that names the unknown keywords, what is accepted and the nearest spelling."""
    accepted = list(accepted)
    unknown = [key for key in given if key not in accepted]
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], accepted, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(accepted) or "(none)"
    raise ValueError(f"{owner} does not accept {', '.join(map(repr, unknown))}. Accepted: {listed}.{hint}")


@dataclass
class BackendConfig:
    """Base of a backend's typed options.

    Ordinary dataclass fields can be set by the user through ``backend_config_kwargs``; what a method pins is
    declared with ``field(init=False, default=...)``. Override :meth:`validate` to check values.
    """

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError for a value that the format cannot take. Called at construction."""

    @classmethod
    def from_kwargs(cls: type[_Config], kwargs: Mapping[str, Any] | None = None) -> _Config:
        """Build the config from user keywords.

        Dtypes may be given by name (``"bfloat16"``), as they appear in a recipe's JSON.

        Raises:
            ValueError: for an unknown or pinned keyword (the message lists the accepted ones), or a bad value.
        """
        given = dict(kwargs or {})
        reject_unknown_keywords(cls.__name__, given, [f.name for f in dataclasses.fields(cls) if f.init])
        for f in dataclasses.fields(cls):
            if f.name in given and isinstance(f.default, torch.dtype):
                given[f.name] = parse_dtype(given[f.name])
                if not isinstance(given[f.name], torch.dtype):
                    raise ValueError(f"{cls.__name__}: {f.name} must be a torch dtype, got {given[f.name]!r}")
        return cls(**given)


@dataclass(frozen=True)
class Support:
    """How a method runs on one device.

    ``native``: the library's kernel computes the layer. ``emulated``: the weight is dequantized and multiplied in
    float, with the same file and the same weights. ``refused``: not even quantizing is possible; ``reason`` says
    what is missing.
    """

    kind: Literal["native", "emulated", "refused"]
    reason: str = ""


LARGEST_WEIGHT = 1e30
"""Every format's arithmetic multiplies by reciprocals of scales in float32, which overflow from about 1e37."""


def range_problem(low: torch.Tensor, high: torch.Tensor) -> str:
    """Say why nothing can be quantized from a weight with this smallest and largest element, empty when it can."""
    largest = torch.stack((low, high)).abs().max().item()
    if not math.isfinite(largest):
        return "holds NaN or infinity"
    return f"holds values up to {largest:.3g}, beyond {LARGEST_WEIGHT:g}" if largest > LARGEST_WEIGHT else ""


def finite_range(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest element (0-d, in the dtype of ``rows``).

    Raises:
        QuantizationError: an element is NaN, infinite, or beyond ``LARGEST_WEIGHT``.
    """
    low, high = torch.aminmax(rows)
    problem = range_problem(low, high)
    if problem:
        raise QuantizationError(f"the weight {problem}; exclude the layer, or repair the file")
    return low, high


class RowQuantizer:
    """Quantizes one weight ``[out_features, in_features]`` a run of rows at a time, for weights of any size.

    The runs cover all rows, in order; together they give the bytes that quantizing the whole weight gives.
    :meth:`quantize` is called by several threads at once.
    """

    multiple: int = 1
    """Every run but the last has a multiple of this many rows."""

    needs_range: bool = False
    """Whether :meth:`set_range` has to be called first."""

    scratch: int = 16
    """Bytes of temporaries for each element of a run: for the estimate of the memory it takes."""

    until_end: float = 0.0
    """Bytes for each element of the weight that :meth:`finish` takes, with what waits for it; for the same estimate."""

    def set_range(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Take the smallest and the largest element of the whole weight (finite, 0-d, of the weight's dtype)."""

    def quantize(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
        """Quantize one run.

        Args:
            rows: ``[n, in_features]``, contiguous, of the weight's dtype. Not changed, and not kept.

        Returns:
            ``({key below the layer: the next part of that tensor's bytes}, what finish needs of this run)``. The keys
            are those of the flattened state dict.

        Raises:
            QuantizationError: an element is NaN or infinite (not looked for again after :meth:`set_range`).
        """
        raise NotImplementedError

    def finish(self, kept: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the tensors that :meth:`quantize` did not give, from what it returned for each run, in order."""
        return {}


class QuantBackend:
    """Adapter between quant_core and one quantization library. Subclass it and register it with
    :func:`quant_core.register_quant_backend`.

    Args:
        config: what the method's ``config_factory`` made of the user's keywords.

    Methods that are not implemented raise a descriptive NotImplementedError, so a backend that supports only some
    of them implements only those.
    """

    name: str = ""
    """Set by ``register_quant_backend``."""

    project_url: str = ""
    """Where users report problems of the library or the hardware."""

    method: str = ""
    """The method this instance was made for, set by QuantizeConfig; empty when made by hand."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    # ------------------------------------------------------------------ declarations

    def capabilities(self) -> dict[str, bool]:
        """What the backend supports, each False unless overridden.

        ``is_serializable`` (state dicts round-trip), ``is_differentiable`` (gradients reach the input),
        ``is_compileable`` (torch.compile traces the forward), ``requires_calibration`` (needs sample inputs).
        """
        return {
            "is_serializable": False,
            "is_differentiable": False,
            "is_compileable": False,
            "requires_calibration": False,
        }

    def validate_environment(self) -> None:
        """Raise ImportError with an install hint, or RuntimeError naming the missing hardware.

        Called when a QuantizeConfig is made. The default accepts every environment.
        """

    def support(self, device: torch.device | str = "cpu") -> Support:
        """Say how this method runs on ``device``. The default says native."""
        return Support("native")

    def constraints(self) -> tuple[Constraint, ...]:
        """The limits on a weight's shape. Checked for every layer before the model is touched."""
        return ()

    def quantized_linear_classes(self) -> tuple[type[nn.Module], ...]:
        """The Linear classes that this backend makes; subclasses of ``torch.nn.Linear``."""
        return ()

    def is_quantized_linear(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of this backend's quantized Linears."""
        return isinstance(module, tuple(self.quantized_linear_classes()))

    def announce_environment(self) -> None:
        """Log once a process which library this is and where its hardware problems belong."""
        from .environment import announce_environment

        announce_environment(self)

    # ------------------------------------------------------------------ one layer

    def create_quantized_linear(
        self,
        linear: nn.Linear,
        compute_device: torch.device | str | None = None,
        model_device: torch.device | str | None = None,
    ) -> nn.Module:
        """Quantize one float Linear, keeping its dtype as the compute dtype.

        Args:
            linear: the float layer; not changed.
            compute_device: where to quantize; None means where the weight is.
            model_device: where to leave the result; None means on ``compute_device``.
        """
        raise NotImplementedError(f"backend {self.name!r} does not support quantizing a float model")

    def create_quantized_linear_shell(self, linear: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
        """Make an empty quantized Linear on the meta device with the shape and bias presence of ``linear``.

        Only ``in_features``, ``out_features`` and the presence of a bias may be read from ``linear``.
        """
        raise NotImplementedError(f"backend {self.name!r} does not support loading a quantized checkpoint")

    def row_quantizer(self, out_features: int, in_features: int, dtype: torch.dtype) -> RowQuantizer | None:
        """Return what quantizes a weight of this shape and dtype in runs of rows; None takes the weight whole."""
        return None

    def layer_options(self, out_features: int, in_features: int) -> dict[str, Any]:
        """Return the options that a layer of this shape falls back to, where they differ from this backend's own.

        A backend made with them quantizes the layer to the same bytes. The default has no fallbacks.
        """
        return {}

    def dequantize_to_linear(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype,
        compute_device: torch.device | str | None = None,
        model_device: torch.device | str | None = None,
    ) -> nn.Linear:
        """Return a plain ``nn.Linear`` in ``compute_dtype`` with the quantized weight's values.

        The default serves every Linear that has ``dequantize_weight(dtype)``.
        """
        if not hasattr(module, "dequantize_weight"):
            raise NotImplementedError(f"backend {self.name!r} does not support mode='dequant_once'")
        if compute_device is not None:
            module = module.to(device=compute_device)
        weight = module.dequantize_weight(compute_dtype)
        linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if module.bias is not None:
            bias = module.bias.detach().to(dtype=compute_dtype, device=weight.device)
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return linear if model_device is None else linear.to(device=model_device)

    # ------------------------------------------------------------------ state dicts

    def flatten_state_dict(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Turn a quantized state dict into plain tensors and string metadata, ready for safetensors.

        The default returns the tensors as they are: right for a backend whose state dict is plain already.
        """
        self._require_serializable()
        return dict(state_dict), {}

    def unflatten_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Undo :meth:`flatten_state_dict`; also called with one layer's tensors and the whole file's metadata."""
        self._require_serializable()
        return dict(state_dict)

    def _require_serializable(self) -> None:
        if not self.capabilities()["is_serializable"]:
            raise NotImplementedError(
                f"backend {self.name!r} does not declare is_serializable: its layers cannot be saved or loaded"
            )
