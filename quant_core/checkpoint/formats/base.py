"""What every format family shares: the description of a quantized layer, and how its parts are read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from .arithmetic import TILE_COLUMNS, TILE_ROWS, untile

if TYPE_CHECKING:
    from ..header import TensorInfo
    from ..reader import Checkpoint

MAX_MARKER_BYTES = 65536

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEFAULT_DTYPE = torch.bfloat16
"""What a layer is taken to have been where its file does not say."""


@dataclass(frozen=True)
class StoredLayer:
    """One quantized layer of a file.

    Attributes:
        name: the dotted layer name, as in the file.
        family: ``"comfy"``, ``"bitsandbytes"``, ``"torchao"``, ``"scaled_fp8"``, ``"fp8_cast"``,
            ``"convert_to_quant"`` or ``"gguf"``.
        format: the name of the format within its family: ``"int8_tensorwise"``, ``"nf4"``, ``"Q4_K"``.
        method: the quantization method that loads the layer; None when none does.
        shape: of the float weight, ``(out_features, in_features)``.
        dtype: the float dtype that the layer stands for; bfloat16 when the file does not say.
        keys: every tensor of the layer in the file, without the bias.
        options: what the layer's marker says.
    """

    name: str
    family: str
    format: str
    method: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    keys: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def key(self, part: str) -> str:
        """Return the file's name of one of the layer's tensors: ``key("weight_scale")``."""
        return f"{self.name}.{part}"


class Parts:
    """The tensors of one layer, read and checked on the way.

    Every problem is a CheckpointError that names the file, the layer, what was expected and what was found.
    """

    def __init__(self, checkpoint: Checkpoint, layer: StoredLayer) -> None:
        self.checkpoint = checkpoint
        self.layer = layer

    def fail(self, problem: str) -> CheckpointError:
        """Return the error to raise."""
        return CheckpointError(f"{self.checkpoint.path}: layer {self.layer.name!r} ({self.layer.format}): {problem}")

    def has(self, part: str) -> bool:
        return self.layer.key(part) in self.checkpoint.tensors

    def info(self, part: str, *dtypes: torch.dtype, shape: Sequence[int] | None = None) -> TensorInfo:
        """Return the dtype and shape of a part.

        Raises:
            CheckpointError: it is missing, its dtype is none of ``dtypes`` (if any are given), or its shape is not
                ``shape`` (if one is given).
        """
        key = self.layer.key(part)
        info = self.checkpoint.tensors.get(key)
        if info is None:
            raise self.fail(f"{key!r} is missing, and the weight cannot be decoded without it")
        if dtypes and info.dtype not in dtypes:
            raise self.fail(f"{key!r} is {info.dtype}, expected {' or '.join(map(str, dtypes))}")
        if shape is not None and info.shape != tuple(shape):
            raise self.fail(f"{key!r} has shape {list(info.shape)}, expected {list(shape)}")
        return info

    def read(self, part: str) -> torch.Tensor:
        return self.checkpoint.read(self.layer.key(part))

    def rows(self, part: str, start: int, stop: int) -> torch.Tensor:
        return self.checkpoint.read_rows(self.layer.key(part), start, stop)

    def scalar(self, part: str) -> torch.Tensor:
        """Return a single number as float32 ``[]``."""
        info = self.info(part, *FLOAT_DTYPES)
        if math.prod(info.shape) != 1:
            raise self.fail(f"{self.layer.key(part)!r} has shape {list(info.shape)}, expected a single number")
        return self.read(part).float().reshape(())

    def scaled(self, codes: str, scale: str, start: int, stop: int) -> torch.Tensor:
        """Return rows of ``codes * scale`` in float32.

        Args:
            codes: the part with one code a weight, in the layer's shape.
            scale: the part with the scales: a single number, or one for each block of rows, of columns, or of both.
                The block's size follows from the two shapes.
        """
        values = self.rows(codes, start, stop).float()
        info = self.info(scale, *FLOAT_DTYPES)
        if math.prod(info.shape) == 1:
            return values.mul_(self.scalar(scale))
        shape, grid = self.layer.shape, list(info.shape)
        while len(grid) > len(shape) and grid[-1] == 1:
            grid.pop()
        grid += [1] * (len(shape) - len(grid))
        if len(grid) > len(shape) or any(g == 0 or n % g for n, g in zip(shape, grid, strict=True)):
            raise self.fail(
                f"{self.layer.key(scale)!r} has shape {list(info.shape)}, which does not divide that of the weight, "
                f"{list(shape)}"
            )
        height = shape[0] // grid[0]
        block_rows = self.rows(scale, start // height, -(-stop // height)).float().reshape(-1, *grid[1:])
        of_row = torch.arange(start, stop) // height - start // height
        scales = block_rows[of_row]
        for dim in range(1, len(shape)):
            if grid[dim] not in (1, shape[dim]):
                scales = scales.repeat_interleave(shape[dim] // grid[dim], dim)
        return values.mul_(scales)

    def tiled(self, part: str, start: int, stop: int, columns: int, *dtypes: torch.dtype) -> torch.Tensor:
        """Return rows of block scales that are stored in tiles of 128 x 4, ``[stop - start, columns]``.

        Args:
            columns: scales in a row of the weight, without padding.
        """
        info = self.info(part, *dtypes)
        down = -(-self.layer.shape[0] // TILE_ROWS)
        size = down * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
        if math.prod(info.shape) != size or not info.shape or info.shape[0] % max(down, 1):
            raise self.fail(
                f"{self.layer.key(part)!r} has shape {list(info.shape)}, expected {size} scales in tiles of 128 x 4"
            )
        first, height = start // TILE_ROWS, info.shape[0] // max(down, 1)
        tiles = self.rows(part, first * height, -(-stop // TILE_ROWS) * height)
        rows = untile(tiles.view(torch.uint8), stop - first * TILE_ROWS, columns)
        return rows[start - first * TILE_ROWS :].view(info.dtype)


def read_marker(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Read a uint8 tensor that holds a JSON object.

    Raises:
        CheckpointError: it is not one.
    """
    info = checkpoint.tensors[name]
    if info.nbytes > MAX_MARKER_BYTES:
        raise CheckpointError(f"{checkpoint.path}: marker {name!r} has {info.nbytes} bytes, it should be a short JSON")
    try:
        marker = json.loads(bytes(checkpoint.read(name).reshape(-1).tolist()))
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: not bytes, not UTF-8, not JSON
        raise CheckpointError(f"{checkpoint.path}: marker {name!r} is not JSON ({error})") from error
    if not isinstance(marker, dict):
        raise CheckpointError(
            f"{checkpoint.path}: marker {name!r} is a JSON {type(marker).__name__}, expected an object"
        )
    return marker


def dtype_of(name: Any) -> torch.dtype:
    """Return the float dtype of a name like ``bfloat16`` or ``torch.bfloat16``, bfloat16 for anything else."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}
    return names.get(name.removeprefix("torch."), DEFAULT_DTYPE) if isinstance(name, str) else DEFAULT_DTYPE
