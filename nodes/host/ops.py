"""ComfyUI's mixed-precision operations with a Linear that quantizes its weight while it is loaded.

ComfyUI builds the model from this class and then loads the state dict into it, one layer at a time, after all its
renaming and fusing of keys. A float weight that arrives at a Linear is quantized there. In one of ComfyUI's own formats
it is handed on as a quantized file has it, so what follows is ComfyUI's own loading of such a file; in any other it
arrives in the adapter's layout, and this Linear takes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor

from .adapter import FIELD_PREFIX, LAYOUT, is_adapted, linear
from .compat import requantizing

if TYPE_CHECKING:
    from .quantizer import LayerQuantizer

MARKER = "comfy_quant"

STATE_KEYS = frozenset(
    {
        MARKER,
        "weight_scale",
        "weight_scale_2",
        "weight_s_rel",
        "weight_s_channel",
        "weight_codebook",
        "weight_correction",
    }
)
"""What a quantized Linear has in its state dict beside ``weight`` and ``bias``."""


def native_operations(compute_dtype: torch.dtype) -> type:
    """ComfyUI's operations for a quantized model on this machine.

    ComfyUI itself decides which formats run natively here and which are emulated; asking it with a configuration that
    says "quantized" keeps that decision in one place.
    """
    return comfy.ops.pick_operations(
        None, compute_dtype, model_config=SimpleNamespace(quant_config={"mixed_ops": True})
    )


def quantizing_operations(compute_dtype: torch.dtype, quantizer: LayerQuantizer | None) -> type:
    """Return an operations class for ``model_options["custom_operations"]``.

    Args:
        compute_dtype: the dtype that the model computes in; quantized weights dequantize to it.
        quantizer: decides about a float weight and quantizes it; None loads a file as it is.
    """
    native = native_operations(compute_dtype)

    class QuantizingOperations(native):
        class Linear(_adapted_linear(_steady_linear(native.Linear))):
            def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
                if quantizer is not None:
                    quantizer.replace_weight(state_dict, prefix)
                super()._load_from_state_dict(state_dict, prefix, *rest)

    return QuantizingOperations


def _is_normal_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedTensor) and not value.is_inference()


def _steady_linear(native_linear: type) -> type:
    """ComfyUI's quantized Linear, cured of two faults that show after loading.

    ComfyUI runs a workflow under ``torch.inference_mode`` and unloads models outside it. Outside, it replaces a
    quantized weight by a normal tensor, which the next workflow then cannot wrap in a Parameter ("Cannot set
    version_counter for inference tensor"). Here a weight stays the kind of tensor that it was loaded as.
    """

    class SteadyLinear(native_linear):
        _loaded_in_inference_mode = False

        def _load_from_state_dict(self, *args: Any) -> None:
            self._loaded_in_inference_mode = torch.is_inference_mode_enabled()
            super()._load_from_state_dict(*args)

        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
            with torch.inference_mode(self._loaded_in_inference_mode):
                return super()._apply(fn, recurse)

        def __setattr__(self, name: str, value: Any) -> None:
            # A patched weight is restored by assignment, also outside inference mode.
            if name == "weight" and self._loaded_in_inference_mode and _is_normal_quantized(value):
                with torch.inference_mode():
                    rewrapped = QuantizedTensor(value._qdata, value._layout_cls, value._params)
                    value = torch.nn.Parameter(rewrapped, requires_grad=False)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            # ComfyUI lists the scales and the marker in the state dict and then asks the module for an attribute of
            # that name, e.g. when models are merged; the tensors live inside the weight.
            if name in STATE_KEYS or name.startswith(FIELD_PREFIX):
                weight = self.__dict__.get("_parameters", {}).get("weight")
                stored = self.state_dict() if isinstance(weight, QuantizedTensor) else {}
                if name in stored:
                    return stored[name]
            return super().__getattr__(name)

    return SteadyLinear


def _adapted_linear(steady_linear: type) -> type:
    """The Linear that also takes a weight in the adapter's layout, from a state dict that holds it ready made."""

    class AdaptedLinear(steady_linear):
        def _load_from_state_dict(
            self,
            state_dict: dict[str, Any],
            prefix: str,
            local_metadata: dict[str, Any],
            strict: bool,
            missing_keys: list[str],
            *rest: Any,
        ) -> None:
            key = prefix + "weight"
            if not is_adapted(state_dict.get(key)):
                super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
                return
            self._loaded_in_inference_mode = torch.is_inference_mode_enabled()
            weight = state_dict.pop(key).to(dtype=self.factory_kwargs["dtype"])
            self.layout_type = LAYOUT
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            torch.nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *rest)
            if key in missing_keys:
                missing_keys.remove(key)

        def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
            if not is_adapted(getattr(self, "weight", None)):
                return super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)
            result = {} if destination is None else destination
            if self.bias is not None:
                result[prefix + "bias"] = self.bias
            params = self.weight._params
            result[prefix + "weight"] = self.weight._qdata
            result.update({prefix + name: getattr(params, name) for name in params._tensor_fields()})
            return result

        def _forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if is_adapted(weight):
                return linear(input, weight, bias)
            return super()._forward(input, weight, bias)

        def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not is_adapted(self.weight):
                return super().forward(input, *args, **kwargs)
            comfy.ops.run_every_op()
            if getattr(self, "weight_lowvram_function", None) is None:
                return self._forward_adapted(input)
            with requantizing(self.weight._params.spec):
                return self._forward_adapted(input)

        def set_weight(self, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            with requantizing(self.weight._params.spec) if is_adapted(self.weight) else contextlib.nullcontext():
                return super().set_weight(weight, *args, **kwargs)

        def _forward_adapted(self, input: torch.Tensor) -> torch.Tensor:
            patched = self.weight_function or self.bias_function
            if patched or getattr(self, "comfy_force_cast_weights", False):
                # A LoRA that is applied on the fly needs the weight in float.
                return self.forward_comfy_cast_weights(input, input.dtype)
            weight, bias, stream = comfy.ops.cast_bias_weight(
                self,
                input=None,
                dtype=self.weight.dtype,
                device=input.device,
                bias_dtype=input.dtype,
                offloadable=True,
                compute_dtype=input.dtype,
                want_requant=True,
            )
            try:
                return self._forward(input, weight.to(dtype=input.dtype), bias)
            finally:
                comfy.ops.uncast_bias_weight(self, weight, bias, stream)

    return AdaptedLinear
