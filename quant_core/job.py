"""One run of a conversion: every item of a blueprint is a task of the pipeline, from the source into the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from .backend import QuantBackend, RowQuantizer, finite_range
from .blueprint import Blueprint, identity_of
from .checkpoint.formats import dequantize_layer
from .checkpoint.hashing import FileHash, digest
from .checkpoint.raw import RawReader
from .checkpoint.writer import tensor_bytes
from .errors import CheckpointError, QuantizationError
from .layout import Item
from .measure import relative_error
from .output import Output, check_destination, output_paths
from .pipeline import Cancelled, Pipeline, default_workers
from .plan import DEQUANTIZE, KEEP, PlanRow
from .runs import BUDGET, COPY_BYTES, RUN_ELEMENTS, run_cost, run_rows
from .selection import Reason
from .version import __version__

Progress = Callable[[int, int, str], None]
_Result = TypeVar("_Result")
_REPORT_BYTES = 16 << 20  # within a large tensor, progress is told about this often


class WeightTransform(Protocol):
    """Changes weights while they are converted, before they are quantized: a LoRA that is baked in.

    ``layer`` is a layer's name for its weight, and the tensor's own name for what is no weight, e.g. ``"out.bias"``.
    """

    identity: str
    """What distinguishes this transform from others, for resuming."""

    def applies_to(self, layer: str) -> bool:
        """Whether the weight of this layer, or this tensor, is changed."""

    def __call__(self, layer: str, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Return the new values of the rows from ``start`` on, float32 as given. May be called by several threads.

        The result is rounded to the weight's dtype, as if it had been saved and then quantized.
        """


class _Layer:
    """A tensor that is computed."""

    def __init__(self, row: PlanRow, backend: QuantBackend | None, quantizer: RowQuantizer | None) -> None:
        self.name = row.layer
        self.row = row
        self.backend = backend
        self.quantizer = quantizer
        self.dtype: torch.dtype = getattr(torch, row.dtype)
        self.shape = row.shape


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

    def run(self) -> dict[str, float]:
        """Convert every item; return the measured errors, ``{layer: relative weight error}``."""
        try:
            with Pipeline(self.workers, BUDGET if self.on_cpu else 64 * BUDGET) as pipeline:
                for item in self.blueprint.items:
                    if self._adopted(item):
                        continue
                    layer = self._layer(item)
                    if layer is None:
                        task, cost = partial(self._copy, pipeline, item), COPY_BYTES
                    else:
                        task, cost = partial(self._compute, pipeline, layer), self._cost(layer)
                    pipeline.submit(task, partial(self._finished, item), cost)
        finally:
            self.reader.close()
        return self.errors

    def _finished(self, item: Item, rest: int) -> None:
        self.output.finish(item.outputs)
        self.checkpoint.check_unchanged()
        self._advance(rest, item.name if item.row is None else item.row.layer)

    def _adopted(self, item: Item) -> bool:
        if not self.output.adopt(item.outputs):
            return False
        size = self.checkpoint.tensors[item.name].nbytes if item.row is None else item.row.bytes_before
        self._advance(size, item.name)
        return True

    def _layer(self, item: Item) -> _Layer | None:
        """What computes an item; None copies it as it is."""
        row = item.row
        if row is None:
            name = item.name.removesuffix(".weight")
            if self.transform is None or not self.transform.applies_to(name):
                return None
            info = self.checkpoint.tensors[item.name]
            dtype = str(info.dtype).removeprefix("torch.")
            row = PlanRow(name, item.name, info.shape, dtype, KEEP, Reason.EDITED, bytes_before=info.nbytes)
            return _Layer(row, None, None)
        if row.decision == DEQUANTIZE:
            return _Layer(row, None, None)
        backend = self.blueprint.formats.backend(row.method, row.options)
        quantizer = None
        if not self.measure:
            quantizer = backend.row_quantizer(row.shape[0], row.shape[1], getattr(torch, row.dtype))
        return _Layer(row, backend, quantizer)

    def _advance(self, count: int, name: str) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, name)

    def _step(self, pipeline: Pipeline, count: int, name: str) -> int:
        """Between the steps of a task: tell about ``count`` bytes if they are enough; return how many are left."""
        pipeline.check()
        if count < _REPORT_BYTES:
            return count
        pipeline.tell(partial(self._advance, count, name))
        return 0

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
        except (CheckpointError, OSError, MemoryError, Cancelled):
            raise
        except Exception as error:
            what = f"{self.checkpoint.path}: layer {layer.name!r} {list(layer.shape)}"
            raise QuantizationError(f"{what} ({layer.row.method or 'copied'}): {error}") from error

    # ------------------------------------------------------------------ tasks

    def _copy(self, pipeline: Pipeline, item: Item) -> int:
        """Copy a tensor; return how many bytes progress has not been told about yet."""
        size = self.checkpoint.tensors[item.name].nbytes
        untold = 0
        for start in range(0, max(size, 1), COPY_BYTES):
            data = self.reader.read_bytes(item.name, start, min(start + COPY_BYTES, size))
            self.output.write(item.name, data)
            untold = self._step(pipeline, untold + len(data), item.name)
        return untold

    def _compute(self, pipeline: Pipeline, layer: _Layer) -> int:
        """Quantize a layer, or write it with other values; return as :meth:`_copy` does."""
        quantizer, backend = layer.quantizer, layer.backend
        if quantizer is not None and quantizer.needs_range:
            self._guarded(layer, lambda: self._find_range(pipeline, layer, quantizer))
        spans = self._spans(layer)
        untold = 0
        kept: list[Any] = []
        for index, (start, stop) in enumerate(spans):
            rows = self._guarded(layer, partial(self._rows, layer, start, stop))
            if quantizer is not None:
                parts, keep = self._guarded(layer, partial(quantizer.quantize, rows))
                kept.append(keep)
                self._write(layer, parts)
            elif backend is not None:
                self._write(layer, self._guarded(layer, partial(self._whole, layer, backend, rows)))
            else:
                self.output.expect(layer.row.tensor, rows)
                self.output.write(layer.row.tensor, tensor_bytes(rows))
            del rows
            share = layer.row.bytes_before
            share = share * (index + 1) // len(spans) - share * index // len(spans)
            untold = self._step(pipeline, untold + share, layer.name)
        if quantizer is not None:
            self._write(layer, self._guarded(layer, lambda: quantizer.finish(kept)))
        return untold

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

    def _find_range(self, pipeline: Pipeline, layer: _Layer, quantizer: RowQuantizer) -> None:
        ends: list[torch.Tensor] = []
        for start, stop in self._spans(layer):
            ends += torch.aminmax(self._rows(layer, start, stop))
            pipeline.check()
        quantizer.set_range(*finite_range(torch.stack(ends)))

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
        return {key.removeprefix(f"{layer.name}."): tensor for key, tensor in flat.items()}

    def _write(self, layer: _Layer, parts: Mapping[str, torch.Tensor]) -> None:
        for key, part in parts.items():
            name = f"{layer.name}.{key}"
            self.output.expect(name, part)
            self.output.write(name, tensor_bytes(part))


def carry_out(
    blueprint: Blueprint,
    destination: Path,
    described: str,
    *,
    device: torch.device | None = None,
    resume: bool = False,
    threads: int | None = None,
    measure: bool = False,
    transform: WeightTransform | None = None,
    progress: Progress | None = None,
) -> tuple[list[Path], FileHash, dict[str, float]]:
    """Write the files of a blueprint: all of them, under their names, or nothing that another run would not continue.

    Args:
        blueprint: what to do.
        destination: the file, or the name that those of the shards are made from.
        described: all that an earlier run must have had in common, beside source and version, to be resumed.
        device, resume, threads, measure, transform, progress: see :func:`quant_core.convert.convert`.

    Returns:
        ``(the files, the hash of their tensors, measured errors of the layers)``.
    """
    checkpoint = blueprint.checkpoint
    paths = output_paths(destination, len(blueprint.files))
    check_destination(checkpoint, destination, paths)
    identity = {"version": __version__, "plan": digest(described.encode("utf-8")), "source": identity_of(checkpoint)}
    output = Output(destination, blueprint.files, identity, resume)
    try:
        errors = Job(
            blueprint,
            output,
            device or torch.device("cpu"),
            threads or default_workers(),
            measure,
            transform,
            progress,
        ).run()
        checkpoint.check_unchanged()
        return paths, output.complete(), errors
    except BaseException:
        output.abandon()
        raise
