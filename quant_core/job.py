"""One run of a conversion: every item of a blueprint goes through the pipeline into the output."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from .backend import QuantBackend, RowQuantizer, finite_range
from .blueprint import Blueprint
from .checkpoint.formats import dequantize_layer
from .checkpoint.raw import RawReader
from .checkpoint.writer import tensor_bytes
from .errors import CheckpointError, QuantizationError
from .layout import Item
from .measure import relative_error
from .output import Output
from .pipeline import Pipeline
from .plan import DEQUANTIZE, KEEP, PlanRow
from .runs import BUDGET, COPY_BYTES, RUN_ELEMENTS, run_cost, run_rows
from .selection import Reason

Progress = Callable[[int, int, str], None]
_Result = TypeVar("_Result")
_REPORT_BYTES = 16 << 20  # within a large tensor, progress is told about this often


class WeightTransform(Protocol):
    """Changes weights while they are converted, before they are quantized: a LoRA that is baked in."""

    identity: str
    """What distinguishes this transform from others, for resuming."""

    def applies_to(self, layer: str) -> bool:
        """Whether the weight of this layer is changed."""

    def __call__(self, layer: str, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Return the new values of the rows from ``start`` on, float32 as given. May be called by several threads.

        The result is rounded to the weight's dtype, as if it had been saved and then quantized.
        """


class _Layer:
    """A tensor that is computed: where its runs come from, and what is kept of them until its end."""

    def __init__(self, item: Item, row: PlanRow, backend: QuantBackend | None, quantizer: RowQuantizer | None) -> None:
        self.name = row.layer
        self.item = item
        self.row = row
        self.backend = backend
        self.quantizer = quantizer
        self.dtype: torch.dtype = getattr(torch, row.dtype)
        self.shape = row.shape
        self.range_begun = False
        self.ranges_left = 0
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None
        self.kept: list[Any] = []


class Job:
    """One run of a conversion.

    Args:
        blueprint: what to do.
        output: where to.
        device: where to quantize.
        workers: threads that read and quantize.
        measure: dequantize each layer and compare it.
        transform: see :class:`WeightTransform`.
        progress: see :func:`quant_core.convert.convert`.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        output: Output,
        device: torch.device,
        workers: int,
        measure: bool,
        transform: WeightTransform | None,
        progress: Progress | None,
    ) -> None:
        self.blueprint = blueprint
        self.checkpoint = blueprint.checkpoint
        self.output = output
        self.device = device
        self.on_cpu = device.type == "cpu"
        self.workers = workers
        self.measure = measure
        self.transform = transform
        self.progress = progress
        self.reader = RawReader(self.checkpoint)
        self.errors: dict[str, float] = {}
        self.total = sum(info.nbytes for info in self.checkpoint.tensors.values())
        self.done = 0
        self.reported = 0

    def run(self) -> dict[str, float]:
        """Convert every item; return the measured errors, ``{layer: relative weight error}``."""
        try:
            with Pipeline(self.workers, BUDGET if self.on_cpu else 64 * BUDGET) as pipeline:
                items = [item for item in self.blueprint.items if not self._adopted(item)]
                layers = [self._layer(item) for item in items]
                for index, (item, layer) in enumerate(zip(items, layers, strict=True)):
                    # The range of the next layer is looked for while this one is quantized.
                    for ahead in layers[index : index + 2]:
                        if ahead is not None:
                            self._begin_range(pipeline, ahead)
                    if layer is None:
                        self._copy(pipeline, item)
                    else:
                        self._compute(pipeline, layer)
                    self.checkpoint.check_unchanged()
        finally:
            self.reader.close()
        return self.errors

    def _adopted(self, item: Item) -> bool:
        if not self.output.adopt(item.outputs):
            return False
        size = self.checkpoint.tensors[item.name].nbytes if item.row is None else item.row.bytes_before
        self._advance(size, item.name, True)
        return True

    def _layer(self, item: Item) -> _Layer | None:
        """What computes an item; None copies it as it is."""
        row = item.row
        if row is None:
            name = item.name.removesuffix(".weight")
            if self.transform is None or name == item.name or not self.transform.applies_to(name):
                return None
            info = self.checkpoint.tensors[item.name]
            dtype = str(info.dtype).removeprefix("torch.")
            row = PlanRow(name, item.name, info.shape, dtype, KEEP, Reason.EDITED, bytes_before=info.nbytes)
            return _Layer(item, row, None, None)
        if row.decision == DEQUANTIZE:
            return _Layer(item, row, None, None)
        backend = self.blueprint.formats.backend(row.method, row.options)
        quantizer = None
        if not self.measure:
            quantizer = backend.row_quantizer(row.shape[0], row.shape[1], getattr(torch, row.dtype))
        return _Layer(item, row, backend, quantizer)

    def _advance(self, count: int, name: str, end: bool) -> None:
        self.done += count
        if self.progress is not None and (end or self.done - self.reported >= _REPORT_BYTES):
            self.reported = self.done
            self.progress(min(self.done, self.total), self.total, name)

    # ------------------------------------------------------------------ reading

    def _rows(self, layer: _Layer, start: int, stop: int) -> torch.Tensor:
        """Return rows of a layer's float weight, in its dtype, in memory that is this thread's until its next call."""
        stored = self.blueprint.stored.get(layer.name) if layer.row.stored else None
        if stored is not None:
            rows = dequantize_layer(self.checkpoint, stored, slice(start, stop))
        else:
            rows = self.reader.read_rows(layer.row.tensor, start, stop)
        if self.transform is not None and self.transform.applies_to(layer.name):
            rows = self.transform(layer.name, rows.float(), start)
        rows = rows.to(layer.dtype)
        return rows if self.on_cpu else rows.to(self.device)

    def _guarded(self, layer: _Layer, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` and have its errors name the file and the layer."""
        try:
            return work()
        except (CheckpointError, OSError, MemoryError):
            raise
        except Exception as error:
            what = f"{self.checkpoint.path}: layer {layer.name!r} {list(layer.shape)}"
            raise QuantizationError(f"{what} ({layer.row.method or 'copied'}): {error}") from error

    # ------------------------------------------------------------------ copying

    def _copy(self, pipeline: Pipeline, item: Item) -> None:
        size = self.checkpoint.tensors[item.name].nbytes
        for start in range(0, max(size, 1), COPY_BYTES):
            stop = min(start + COPY_BYTES, size)
            pipeline.submit(
                partial(self.reader.read_bytes, item.name, start, stop),
                partial(self._copied, item.name, stop == size),
                stop - start,
            )

    def _copied(self, name: str, end: bool, data: memoryview) -> None:
        self.output.write(name, data)
        self._advance(len(data), name, end)

    # ------------------------------------------------------------------ computing

    def _spans(self, layer: _Layer) -> list[tuple[int, int]]:
        rows = layer.shape[0] if layer.shape else 1
        width = max(1, math.prod(layer.shape[1:]))
        if layer.quantizer is not None:
            step = run_rows(layer.quantizer, layer.shape[1], self.on_cpu)
        else:
            step = max(rows, 1) if layer.backend is not None else max(1, RUN_ELEMENTS // width)
        return [(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]

    def _cost(self, layer: _Layer) -> int:
        if layer.backend is None:
            return RUN_ELEMENTS * 12
        return run_cost(layer.quantizer, layer.shape, layer.dtype.itemsize, self.on_cpu)

    def _begin_range(self, pipeline: Pipeline, layer: _Layer) -> None:
        if layer.range_begun or layer.quantizer is None or not layer.quantizer.needs_range:
            return
        layer.range_begun = True
        spans = self._spans(layer)
        layer.ranges_left = len(spans)
        for start, stop in spans:
            task = partial(self._guarded, layer, partial(self._range_task, layer, start, stop))
            pipeline.submit(task, partial(self._ranged, layer), self._cost(layer))

    def _range_task(self, layer: _Layer, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return finite_range(self._rows(layer, start, stop))

    @staticmethod
    def _ranged(layer: _Layer, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        low, high = found
        layer.low = low if layer.low is None else torch.minimum(layer.low, low)
        layer.high = high if layer.high is None else torch.maximum(layer.high, high)
        layer.ranges_left -= 1

    def _compute(self, pipeline: Pipeline, layer: _Layer) -> None:
        if layer.range_begun:
            while layer.ranges_left:
                pipeline.consume_one()
            assert layer.quantizer is not None and layer.low is not None and layer.high is not None
            low, high, quantizer = layer.low, layer.high, layer.quantizer
            self._guarded(layer, lambda: quantizer.set_range(low, high))
        spans = self._spans(layer)
        source = layer.row.bytes_before
        for index, (start, stop) in enumerate(spans):
            share = source * (index + 1) // len(spans) - source * index // len(spans)
            task = partial(self._guarded, layer, partial(self._run_task, layer, start, stop))
            pipeline.submit(task, partial(self._computed, layer, share, stop == spans[-1][1]), self._cost(layer))

    def _run_task(self, layer: _Layer, start: int, stop: int) -> tuple[dict[str, torch.Tensor], Any]:
        rows = self._rows(layer, start, stop)
        if layer.backend is None:
            return {layer.row.tensor: rows.clone()}, None
        if layer.quantizer is None:
            return self._whole(layer, layer.backend, rows), None
        parts, kept = layer.quantizer.quantize(rows)
        return {f"{layer.name}.{key}": part.cpu() for key, part in parts.items()}, kept

    def _whole(self, layer: _Layer, backend: QuantBackend, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        finite_range(weight)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        quantized = backend.create_quantized_linear(linear)
        state = {f"{layer.name}.{key}": value for key, value in quantized.state_dict().items()}
        flat, _ = backend.flatten_state_dict(state)
        if self.measure:
            restored = backend.dequantize_to_linear(quantized, torch.float32).weight
            self.errors[layer.name] = relative_error(weight, restored.detach())
        return {key: tensor.cpu() for key, tensor in flat.items()}

    def _computed(self, layer: _Layer, share: int, end: bool, result: tuple[dict[str, torch.Tensor], Any]) -> None:
        parts, kept = result
        self._write(parts)
        if layer.quantizer is not None:
            layer.kept.append(kept)
            if end:
                quantizer = layer.quantizer
                rest = self._guarded(layer, lambda: quantizer.finish(layer.kept))
                layer.kept = []
                self._write({f"{layer.name}.{key}": tensor for key, tensor in rest.items()})
        if end:
            self.output.check_complete(layer.item.outputs)
        self._advance(share, layer.name, end)

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.output.expect(name, tensor)
            self.output.write(name, tensor_bytes(tensor))
