"""The one place that imports torchao, when the first config or layer is made."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
from collections.abc import Iterator
from types import SimpleNamespace

from ...environment import library_version, require_library, version_numbers

MINIMUM = "0.16"


@functools.cache
def installed_version() -> tuple[int, ...]:
    """Version numbers, empty when torchao is not installed. Does not import it."""
    return version_numbers(library_version("torchao") or "")


def check_installed() -> None:
    """Raise ImportError with an install hint when torchao is missing or too old. Does not import it."""
    require_library("torchao", MINIMUM, "a torchao method")


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Hide what torchao logs while it is imported: that its CUDA kernels cannot load on a machine without CUDA, and a
    deprecation in torch. Neither is anything that a user can act on."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@functools.cache
def load() -> SimpleNamespace:
    """Return torchao's names that the formats use, importing it on the first call.

    Raises:
        ImportError: torchao is missing, too old, or does not fit this torch.
    """
    check_installed()
    try:
        with _quiet_import():
            from torchao.float8.inference import Float8MMConfig
            from torchao.prototype.mx_formats import inference_workflow as mx
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
            from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
            from torchao.quantization import Float8Tensor, Int4Tensor, Int8Tensor, MappingType, quant_api
            from torchao.quantization.granularity import PerGroup, PerRow, PerTensor
            from torchao.quantization.quantize_.common import KernelPreference
            from torchao.quantization.quantize_.workflows import (
                QuantizeTensorToFloat8Kwargs,
                QuantizeTensorToInt8Kwargs,
            )
    except ImportError as error:
        raise ImportError(f'torchao cannot be imported ({error}): pip install "torchao>={MINIMUM}"') from error
    return SimpleNamespace(
        quant_api=quant_api,
        mx=mx,
        Float8MMConfig=Float8MMConfig,
        KernelPreference=KernelPreference,
        MappingType=MappingType,
        ScaleCalculationMode=ScaleCalculationMode,
        PerGroup=PerGroup,
        PerRow=PerRow,
        PerTensor=PerTensor,
        Int8Tensor=Int8Tensor,
        Float8Tensor=Float8Tensor,
        Int4Tensor=Int4Tensor,
        NVFP4Tensor=NVFP4Tensor,
        MXTensor=MXTensor,
        QuantizeTensorToInt8Kwargs=QuantizeTensorToInt8Kwargs,
        QuantizeTensorToFloat8Kwargs=QuantizeTensorToFloat8Kwargs,
        QuantizeTensorToMXKwargs=QuantizeTensorToMXKwargs,
        QuantizeTensorToNVFP4Kwargs=QuantizeTensorToNVFP4Kwargs,
    )


@functools.cache
def has_mslk() -> bool:
    """Whether the package ``mslk``, which holds torchao's int4 and Blackwell kernels, is there to be used."""
    try:
        # The name is also registered on PyPI by an empty placeholder of version 0.0.0.
        return int(importlib.metadata.version("mslk").split(".")[0]) >= 1
    except importlib.metadata.PackageNotFoundError:
        return False
