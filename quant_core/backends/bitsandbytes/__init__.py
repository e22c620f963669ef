"""bitsandbytes: 4-bit codebook quantization (NF4 and FP4), weights only.

A weight ``[out_features, in_features]`` is read as one row-major run of elements, cut into blocks of ``blocksize``.
Element = ``codebook[4-bit code] * absmax[block]``; with ``compress_statistics`` the absmax values themselves are
stored in 8 bits: ``nested_quant_map[absmax] * nested_absmax[block of 256] + nested_offset``
(Dettmers et al., QLoRA, https://arxiv.org/abs/2305.14314).

The state dict of a layer is the one that ``bitsandbytes.nn.Linear4bit`` writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...backend import BackendConfig, QuantBackend, RowQuantizer, Support
from ...constraints import Constraint
from ...environment import require_library
from ...packed_linear import PackedLinear, saturate
from ...registry import register_quant_backend, register_quant_method
from .layout import (
    BLOCKSIZES,
    FLOAT_DTYPES,
    NESTED_BLOCKSIZE,
    STORAGE_DTYPES,
    Layout,
    Tensors,
    dtype_name,
    read_layout,
    tensor_problems,
)
from .rows import BitsAndBytesRows, library, quantize_weight

_NESTED_BUFFERS = ("weight_nested_absmax", "weight_nested_quant_map")


@dataclass
class BitsAndBytes4bitConfig(BackendConfig):
    """Options of both 4-bit methods; ``quant_type`` is pinned by the method.

    Args:
        compress_statistics: store the absmax values in 8 bits too: 4.13 instead of 4.5 bits per weight at block
            size 64.
        blocksize: elements that share one absmax; None means 64.
        quant_storage: dtype that the packed bytes are kept in (uint8, float16, bfloat16 or float32). Anything but
            uint8 only serves sharding code that cannot move integers.
    """

    compress_statistics: bool = True
    blocksize: int | None = None
    quant_storage: torch.dtype = torch.uint8

    def validate(self) -> None:
        owner = type(self).__name__
        if not isinstance(self.compress_statistics, bool):
            raise ValueError(f"{owner}: compress_statistics must be True or False, got {self.compress_statistics!r}")
        if self.blocksize is not None and (type(self.blocksize) is not int or self.blocksize not in BLOCKSIZES):
            accepted = ", ".join(map(str, BLOCKSIZES))
            raise ValueError(f"{owner}: blocksize must be one of {accepted} or None, got {self.blocksize!r}")
        if self.quant_storage not in STORAGE_DTYPES:
            accepted = ", ".join(map(dtype_name, STORAGE_DTYPES))
            raise ValueError(f"{owner}: quant_storage must be one of {accepted}, got {self.quant_storage!r}")


@dataclass
class BitsAndBytesNF4Config(BitsAndBytes4bitConfig):
    """4-bit NormalFloat: the codebook holds quantiles of a normal distribution."""

    quant_type: str = field(init=False, default="nf4")


@dataclass
class BitsAndBytesFP4Config(BitsAndBytes4bitConfig):
    """4-bit float: sign, two exponent bits, one mantissa bit."""

    quant_type: str = field(init=False, default="fp4")


@dataclass(frozen=True)
class FillsStorage:
    """The 4-bit codes of a weight must fill whole elements of ``storage``."""

    storage: torch.dtype

    def check(self, in_features: int, out_features: int) -> str | None:
        elements, factor = in_features * out_features, 2 * self.storage.itemsize
        if elements % factor == 0:
            return None
        return (
            f"in_features * out_features = {elements} is not a multiple of {factor}, "
            f"the number of codes in one {dtype_name(self.storage)} of quant_storage"
        )

    def describe(self) -> str:
        return f"in_features * out_features % {2 * self.storage.itemsize} == 0"


class BitsAndBytesLinear(PackedLinear):
    """A Linear whose weight is 4-bit codes with one absmax per block.

    Args:
        in_features, out_features, bias, compute_dtype, device: see :class:`PackedLinear`.
        layout: the format. Loading replaces it by the file's own: block size, nesting and storage dtype are read
            from the file, only ``quant_type`` must be the same.
        tensors: the packed tensors by their key below the layer; None makes a shell on the meta device.

    State dict, besides the bias, for ``E = out_features * in_features`` elements in ``B = ceil(E / blocksize)``
    blocks: ``weight`` uint8 ``[ceil(E / 2), 1]`` (two codes a byte, the first in the high half); ``weight.absmax``
    float32 ``[B]``, or uint8 with nested statistics; ``weight.quant_map`` float32 ``[16]``;
    ``weight.nested_absmax`` float32 ``[ceil(B / 256)]``; ``weight.nested_quant_map`` float32 ``[256]``; and the
    marker ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``), uint8, a JSON object.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        bias: bool = True,
        compute_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "meta",
        tensors: Tensors | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, compute_dtype, device)
        self.layout = layout
        if tensors is None:
            tensors = layout.shell(out_features, in_features, compute_dtype)
        for key in ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"):
            self.register_packed(key.replace(".", "_"), tensors.get(key), key)
        self.register_packed("weight_quant_state", tensors[layout.marker_key], layout.marker_key)

    # ------------------------------------------------------------------ values

    def _absmax(self) -> torch.Tensor:
        """Return the absmax of every block, float32."""
        if not self.layout.nested:
            return self.weight_absmax
        centred = library().dequantize_blockwise(
            self.weight_absmax,
            absmax=self.weight_nested_absmax,
            code=self.weight_nested_quant_map,
            blocksize=NESTED_BLOCKSIZE,
        )
        return centred + self.layout.nested_offset

    def dequantize_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the float weight ``[out_features, in_features]`` in ``dtype`` (``compute_dtype`` when None)."""
        dtype = dtype or self.compute_dtype
        functional = library()
        elements = self.out_features * self.in_features
        absmax, blocksize = self._absmax(), self.layout.blocksize
        if blocksize > 1024 and self.weight.device.type == "cpu":
            # For these the library leaves its CPU kernel for a torch.compile of each shape. A block is as well
            # several smaller blocks that have the same absmax.
            absmax, blocksize = absmax.repeat_interleave(blocksize // 1024), 1024
        # Blocks run over the whole weight, but the library's CPU kernel starts a new one at every row, with wrong
        # values when in_features is not a multiple of the block size. So the rows shown to it are blocks, or one row.
        shape = (elements // blocksize, blocksize) if elements % blocksize == 0 else (1, elements + elements % 2)
        state = functional.QuantState(
            absmax=absmax,
            shape=torch.Size(shape),
            code=self.weight_quant_map,
            blocksize=blocksize,
            quant_type=self.layout.quant_type,
            dtype=dtype if dtype == torch.bfloat16 else torch.float32,  # float16 would overflow, see saturate
        )
        flat = functional.dequantize_4bit(self.weight, quant_state=state).reshape(-1)
        return saturate(flat[:elements].view(self.out_features, self.in_features), dtype)

    def quantized_forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ W.T + bias``: the library's 4-bit kernels on CUDA, dequantize and matmul elsewhere.

        ``bitsandbytes.nn.Linear4bit`` is no base for this: on some CPUs its forward repacks the stored weight.
        """
        fits_kernel = self.in_features % self.layout.blocksize == 0 and x.dtype in FLOAT_DTYPES
        if not (x.is_cuda and fits_kernel):
            return super().quantized_forward(x, bias)
        import bitsandbytes

        return bitsandbytes.matmul_4bit(x, self.weight.t(), quant_state=self._quant_state(x.dtype), bias=bias)

    def _quant_state(self, dtype: torch.dtype) -> Any:
        """Build the library's state object around this layer's tensors; a kept one would not follow them."""
        functional = library()
        offset = nested = None
        if self.layout.nested:
            offset = torch.full((), self.layout.nested_offset, dtype=torch.float32, device=self.weight.device)
            nested = functional.QuantState(
                absmax=self.weight_nested_absmax,
                code=self.weight_nested_quant_map,
                blocksize=NESTED_BLOCKSIZE,
                dtype=torch.float32,
            )
        return functional.QuantState(
            absmax=self.weight_absmax,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.weight_quant_map,
            blocksize=self.layout.blocksize,
            quant_type=self.layout.quant_type,
            dtype=dtype,
            offset=offset,
            state2=nested,
        )

    # ------------------------------------------------------------------ loading

    def _layout_of(self, tensors: Tensors) -> Layout | list[str]:
        return read_layout(tensors, self.layout.quant_type, self.out_features, self.in_features)

    def check_packed(self, tensors: Tensors) -> list[str]:
        """Return what is wrong with a file's tensors, measured by the layout that they describe themselves."""
        if not tensors:
            return []
        layout = self._layout_of(tensors)
        if isinstance(layout, list):
            return layout
        return tensor_problems(tensors, layout, self.out_features, self.in_features)

    def accepts_packed(self, key: str, value: torch.Tensor, current: torch.Tensor) -> bool:
        """Always True: :meth:`check_packed` compares with the file's layout, ``current`` may have another one."""
        return True

    def _load_packed(
        self,
        tensors: Tensors,
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
    ) -> list[str]:
        layout = self._layout_of(tensors)
        if isinstance(layout, list):
            return super()._load_packed(tensors, prefix, strict, missing_keys, unexpected_keys)
        before = {name: self._buffers[name] for name in _NESTED_BUFFERS}
        for name, tensor in before.items():
            if not layout.nested:
                self._buffers[name] = None
            elif tensor is None:
                self._buffers[name] = torch.empty(0, device=self.weight.device)
        problems = super()._load_packed(tensors, prefix, strict, missing_keys, unexpected_keys)
        if problems:
            self._buffers.update(before)
        else:
            self.layout = layout
        return problems

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, quant_type={self.layout.quant_type}, blocksize={self.layout.blocksize}, "
            f"nested={self.layout.nested}"
        )


@register_quant_backend("bitsandbytes")
class BitsAndBytesBackend(QuantBackend):
    """NF4 and FP4 weights, in the files that bitsandbytes, transformers and diffusers write."""

    project_url = "https://github.com/bitsandbytes-foundation/bitsandbytes"

    def capabilities(self) -> dict[str, bool]:
        return {
            "is_serializable": True,
            "is_differentiable": True,
            "is_compileable": True,
            "requires_calibration": False,
        }

    def validate_environment(self) -> None:
        # Older releases have no 4-bit kernels for a CPU, or wrong ones for weights of some shapes.
        require_library("bitsandbytes", "0.50", f"bitsandbytes_{self.config.quant_type}")

    def support(self, device: torch.device | str = "cpu") -> Support:
        if torch.device(device).type == "cuda":
            return Support("native", "bitsandbytes 4-bit kernels")
        return Support("emulated", "dequantize, then float matmul")

    def constraints(self) -> tuple[Constraint, ...]:
        if self.config.quant_storage == torch.uint8:
            return ()
        return (FillsStorage(self.config.quant_storage),)

    def quantized_linear_classes(self) -> tuple[type[nn.Module], ...]:
        return (BitsAndBytesLinear,)

    def create_quantized_linear(
        self,
        linear: nn.Linear,
        compute_device: torch.device | str | None = None,
        model_device: torch.device | str | None = None,
    ) -> nn.Module:
        weight = linear.weight.detach()
        if compute_device is not None:
            weight = weight.to(device=compute_device)
        tensors, layout = quantize_weight(weight, self.config)
        tensors = {key: tensor.to(device=weight.device) for key, tensor in tensors.items()}
        layer = self._make(linear, weight.dtype, layout, tensors)
        if linear.bias is not None:
            bias = linear.bias.detach().to(device=weight.device, copy=True)
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer if model_device is None else layer.to(device=model_device)

    def row_quantizer(self, out_features: int, in_features: int, dtype: torch.dtype) -> RowQuantizer | None:
        return BitsAndBytesRows(out_features, in_features, dtype, self.config)

    def create_quantized_linear_shell(self, linear: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
        config = self.config
        layout = Layout(config.quant_type, config.blocksize or 64, config.compress_statistics, config.quant_storage)
        return self._make(linear, compute_dtype, layout)

    def _make(
        self, linear: nn.Linear, compute_dtype: torch.dtype, layout: Layout, tensors: Tensors | None = None
    ) -> BitsAndBytesLinear:
        return BitsAndBytesLinear(
            linear.in_features,
            linear.out_features,
            layout,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            tensors=tensors,
        )


register_quant_method(
    "bitsandbytes_nf4", "bitsandbytes", BitsAndBytesNF4Config.from_kwargs, label="4bit, nf4, weight-only"
)
register_quant_method(
    "bitsandbytes_fp4", "bitsandbytes", BitsAndBytesFP4Config.from_kwargs, label="4bit, fp4, weight-only"
)
