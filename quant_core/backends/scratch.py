"""Memory for temporaries that stays, one piece for each thread and purpose.

On a CPU a fresh temporary costs more in page faults than most arithmetic on it does.
"""

from __future__ import annotations

import threading

import torch

TILE = 1 << 17
"""Elements that are worked on at a time on a CPU: few enough for its caches, enough for a call to cost little."""


class Scratch(threading.local):
    """Named buffers on the CPU, of which every thread has its own."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``[elements]`` of ``dtype`` with any values; this thread's next call with the name gives it again."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < elements:
            with torch.inference_mode(False):  # a tensor made inside could not be written to outside
                buffer = self._buffers[name, dtype] = torch.empty(elements, dtype=dtype, device="cpu")
        return buffer[:elements]
