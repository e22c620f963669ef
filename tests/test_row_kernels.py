"""The quantizers that compute on a CPU themselves, run by run, against the libraries' own quantize functions."""

from __future__ import annotations

import pytest
import torch

from quant_core.backend import finite_range
from quant_core.backends.comfy_kitchen.kernels import NVFP4_MAX
from quant_core.backends.scratch import TILE
from quant_core.backends.search import CodeSearch, beyond, magnitudes
from quant_core.errors import QuantizationError
from quant_core.registry import make_backend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NF4, FP4 = "bitsandbytes_nf4", "bitsandbytes_fp4"
MXFP8, NVFP4 = "comfy_kitchen_mxfp8_w8a8", "comfy_kitchen_nvfp4_w4a4"


def around(values: torch.Tensor) -> torch.Tensor:
    """The values, the next float32 above and below, and all of them negated."""
    infinity = torch.full_like(values, torch.inf)
    near = torch.cat([values, torch.nextafter(values, infinity), torch.nextafter(values, -infinity)])
    return torch.cat([near, -near])


def filled(values: torch.Tensor, block: int, first: float) -> torch.Tensor:
    """``[n, 4 * block]`` of blocks that begin with ``first`` and go on with ``values``, again and again."""
    count = -(-values.numel() // (block - 1) // 4) * 4 + 4
    blocks = values.repeat(-(-count * (block - 1) // values.numel()))[: count * (block - 1)].view(count, block - 1)
    return torch.cat([torch.full((count, 1), first), blocks], dim=1).view(-1, 4 * block)


def weights(block: int, ties: torch.Tensor, largest: float) -> dict[str, torch.Tensor]:
    """Weights that hold what rounding can go wrong at; all widths are multiples of 32.

    Args:
        block: elements that share a scale.
        ties: values halfway between two codes, of a block whose largest magnitude is ``largest``.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    exponents = torch.randint(-44, 4, (64, 256), generator=generator)
    rows_apart = torch.randint(-30, 28, (130, 1), generator=generator)
    sparse = normal(40, 256)
    sparse[sparse.abs() < 0.7] = -0.0
    dead = normal(33, 256)
    dead[::3] = 0.0
    dead[1::3, :128] = -0.0
    tie = around(ties)
    cases = {
        "normal": normal(129, 96),
        "one row": normal(1, 32),
        "more than a tile": normal(TILE // 1024 + 5, 1024),
        "every magnitude": normal(64, 256) * 10.0 ** exponents.float(),
        "rows far apart": normal(130, 64) * 10.0 ** rows_apart.float(),
        "denormal": normal(32, 64) * 1e-40,
        "huge": normal(32, 64).clamp(-3, 3) * 1e29,
        "zeros": torch.zeros(16, 64),
        "negative zeros": torch.full((16, 64), -0.0),
        "zeros of both signs": sparse,
        "zero blocks": dead,
        "negative": -normal(32, 64).abs(),
        "ties": filled(tie, block, largest),
        "scaled ties": filled(tie * 0.75, block, -largest * 0.75),
    }
    scales = 2.0 ** torch.randint(-20, 20, (cases["ties"].shape[0], 1), generator=generator).float()
    cases["ties of every scale"] = cases["ties"] * scales
    return cases


def in_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = weight.to(dtype)
    return torch.where(torch.isfinite(cast), cast, torch.ones_like(cast))


def quantize(method: str, weight: torch.Tensor, step: int, **options) -> dict[str, torch.Tensor]:
    """Quantize in runs of about ``step`` rows, and join what they give."""
    quantizer = make_backend(method, options).row_quantizer(*weight.shape, weight.dtype)
    if quantizer.needs_range:
        quantizer.set_range(*finite_range(weight))
    step = -(-step // quantizer.multiple) * quantizer.multiple
    runs = [quantizer.quantize(rows) for rows in weight.split(step)]
    joined = {key: torch.cat([as_bytes(parts[key]) for parts, _ in runs]) for key in runs[0][0]}
    return joined | {key: as_bytes(t) for key, t in quantizer.finish([kept for _, kept in runs]).items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    for key, tensor in expected.items():
        assert torch.equal(ours[key], as_bytes(tensor)), f"{name}: {key}"


# ------------------------------------------------------------------ bitsandbytes


@pytest.mark.parametrize("blocksize", [32, 64, 256, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [NF4, FP4])
def test_four_bit_rows_are_the_library_s(method, dtype, blocksize):
    from bitsandbytes import functional

    quant_type = method.removeprefix("bitsandbytes_")
    values = functional.get_4bit_type(quant_type, device="cpu").sort().values
    cases = weights(blocksize, (values[1:] + values[:-1]) / 2, 1.0)
    cases["odd"] = torch.randn(7, 333)
    cases["a zero block that is not full"] = torch.cat([torch.ones(blocksize), torch.zeros(3)])[None]
    for name, weight in cases.items():
        weight = in_dtype(weight, dtype)
        for nested in (True, False):
            codes, state = functional.quantize_4bit(
                weight, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested
            )
            expected = {f"weight.{key}": t for key, t in state.as_dict(packed=True).items() if "__" not in key}
            ours = quantize(method, weight, 16, blocksize=blocksize, compress_statistics=nested)
            assert_same(ours, expected | {"weight": codes}, name)


@pytest.mark.parametrize("method", [NF4])
def test_absmax_waits_in_the_weight_s_dtype(method):
    quantizer = make_backend(method, {}).row_quantizer(64, 64, torch.bfloat16)
    _, kept = quantizer.quantize(torch.randn(64, 64).bfloat16())
    assert kept.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e31])
@pytest.mark.parametrize("method", [NF4, MXFP8])
def test_what_no_format_holds_is_refused(method, value):
    weight = torch.ones(128, 64)
    weight[3, 5] = value
    for dtype in (torch.bfloat16, torch.float64):
        quantizer = make_backend(method, {}).row_quantizer(128, 64, dtype)
        with pytest.raises(QuantizationError, match="beyond 1e\\+30" if value == 1e31 else "NaN or infinity"):
            quantizer.quantize(weight.to(dtype))


# ------------------------------------------------------------------ comfy-kitchen


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("method", [NVFP4])
def test_nvfp4_rows_are_the_library_s(method, dtype):
    import comfy_kitchen

    for name, weight in weights(16, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), 6.0).items():
        weight = in_dtype(weight, dtype)
        scale = weight.abs().max().float() / NVFP4_MAX
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes, blocks = comfy_kitchen.quantize_nvfp4(weight.float(), scale)
        expected = {"weight": codes, "weight_scale": blocks, "weight_scale_2": scale}
        assert_same(quantize(method, weight, 16), expected, name)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("method", [MXFP8])
def test_mxfp8_rows_are_the_library_s(method, dtype):
    import comfy_kitchen

    values = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    cases = weights(32, (values[1:] + values[:-1]) / 2, 448.0)
    powers = 448.0 * 2.0 ** torch.arange(-120.0, 80.0)  # where the exponent of the scale changes
    steps = torch.stack([powers, torch.nextafter(powers, powers * 2), torch.nextafter(powers, powers * 0)], dim=1)
    cases["scales at a power of two"] = steps.view(-1, 1) * torch.linspace(-1, 1, 32)
    for name, weight in cases.items():
        weight = in_dtype(weight, dtype)
        codes, blocks = comfy_kitchen.quantize_mxfp8(weight.float())
        amax = weight.float().view(-1, 32).abs().amax(dim=1, keepdim=True)
        # The library divides these by 0, which makes NaN codes.
        lost = (amax > 0) & (amax <= 448 * 2.0**-127)
        expected = codes.view(torch.uint8).view(-1, 32).masked_fill(lost, 0)
        assert_same(quantize(method, weight, 16), {"weight": expected, "weight_scale": blocks}, name)


# ------------------------------------------------------------------ torchao


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("torchao_fp8_w8a8", {}),
        ("torchao_int8_w8a16", {"granularity": "per_tensor"}),
        ("torchao_int8_w8a8", {"granularity": "per_tensor"}),
    ],
)
def test_one_scale_of_a_whole_weight_is_the_same_in_runs(method, options, dtype):
    from quant_core.backends.torchao.rows import TorchAORows

    scheme = make_backend(method, options).scheme
    for weight in (torch.randn(96, 64), -torch.rand(64, 48), torch.randn(40, 48) * 1e-7, torch.zeros(32, 64)):
        weight = weight.to(dtype)
        rows = TorchAORows(scheme, dtype)
        rows.set_range(*finite_range(weight))
        runs = [rows.quantize(part) for part in weight.split(13)]
        ours = {"_weight_qdata": torch.cat([as_bytes(parts["_weight_qdata"]) for parts, _ in runs])}
        ours |= {key: as_bytes(t) for key, t in rows.finish([kept for _, kept in runs]).items()}
        expected = {f"_weight_{key}": t for key, t in scheme.quantize(weight).items()}
        assert set(ours) == set(expected)
        assert_same(ours, expected, method)


# ------------------------------------------------------------------ search


def test_search_compares_with_every_step():
    positive, negative = magnitudes([0.25, 0.75, 1.75, 3.0]), magnitudes([0.5, 2.5])
    search = CodeSearch(positive=(2, positive), negative=(-2, negative))
    exponents = 10.0 ** torch.randint(-40, 37, (20_000,)).float()
    values = torch.cat([around(torch.cat([positive, negative])), torch.randn(20_000) * exponents])
    expected = torch.where(
        torch.signbit(values),
        2 - (values[:, None] <= -negative).sum(dim=1),
        2 + (values[:, None] >= positive).sum(dim=1),
    )
    packed = torch.empty(values.numel() // 2, dtype=torch.uint8)
    search.pack(values.clone(), packed)
    assert torch.equal(torch.stack([packed >> 4, packed & 15], dim=1).view(-1).long(), expected)


def test_search_refuses_steps_that_share_a_bin():
    with pytest.raises(ValueError, match="too close"):
        CodeSearch(positive=(0, magnitudes([1.0, 1.1])), negative=(8, beyond(magnitudes([1.0]))))


@pytest.mark.parametrize("method", [NF4, FP4, MXFP8, NVFP4, "comfy_kitchen_fp8_w8a8", "comfy_kitchen_int8_w8a8"])
def test_in_and_out_of_inference_mode(method):
    # ComfyUI runs its nodes in that mode, and loads a model again outside it; a buffer must serve both.
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    backend = make_backend(method, {})
    quantizer = backend.row_quantizer(256, 512, weight.dtype)
    results = []
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            if quantizer.needs_range:
                quantizer.set_range(*torch.aminmax(weight))
            results.append({key: part.clone() for key, part in quantizer.quantize(weight)[0].items()})
    for key, part in results[0].items():
        assert all(torch.equal(other[key].view(torch.uint8), part.view(torch.uint8)) for other in results[1:]), key
