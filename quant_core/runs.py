"""How large the pieces are that a conversion works in, and so how much memory it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .backend import RowQuantizer
from .pipeline import default_workers

if TYPE_CHECKING:
    from .layout import Formats
    from .plan import PlanRow

RUN_ELEMENTS = 1 << 19
"""Weights of a run on a CPU: few megabytes in all, and long enough that threads seldom wait for each other between the
operations. A quarter of it doubles the CPU time of two threads."""

RUN_ELEMENTS_DEVICE = 1 << 24
COPY_BYTES = 1 << 20
BUDGET = 16 << 20
"""Bytes that the runs under way may take together."""

_AROUND = 12 << 20  # headers, the plan, and what the allocator keeps
_WHOLE_SCRATCH = 32  # bytes of temporaries a weight, where a backend takes a layer whole: float32 copies and codes


def run_rows(quantizer: RowQuantizer, in_features: int, on_cpu: bool = True) -> int:
    """Return how many rows of ``in_features`` weights a run has."""
    elements = RUN_ELEMENTS if on_cpu else RUN_ELEMENTS_DEVICE
    return max(1, elements // max(in_features, 1) // quantizer.multiple) * quantizer.multiple


def run_cost(quantizer: RowQuantizer | None, shape: tuple[int, ...], itemsize: int, on_cpu: bool = True) -> int:
    """Return about how many bytes one run, or the whole layer, takes while it is quantized."""
    if quantizer is None:
        return math.prod(shape) * (itemsize + _WHOLE_SCRATCH)
    elements = min(run_rows(quantizer, shape[1], on_cpu) * shape[1], math.prod(shape))
    return elements * (itemsize + quantizer.scratch)


def peak_bytes(rows: Iterable[PlanRow], formats: Formats) -> int:
    """Return about how much memory converting these rows takes at most, beyond the imports."""
    run = whole = end = 0
    seen: set[tuple[str, str, tuple[int, ...], str]] = set()
    for row in rows:
        key = (row.method, repr(row.options), row.shape, row.dtype)
        if not row.method or key in seen:
            continue
        seen.add(key)
        dtype: torch.dtype = getattr(torch, row.dtype)
        quantizer = formats.backend(row.method, row.options).row_quantizer(row.shape[0], row.shape[1], dtype)
        cost = run_cost(quantizer, row.shape, dtype.itemsize)
        if quantizer is None:
            whole = max(whole, cost)
        else:
            run = max(run, cost)
            end = max(end, int(math.prod(row.shape) * quantizer.until_end))
    # Each worker takes a run at a time, a layer that is taken whole is alone if it exceeds the budget.
    return max(default_workers() * (run + COPY_BYTES) + end, whole) + _AROUND
