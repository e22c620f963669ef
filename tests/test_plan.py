"""The plan of a conversion: exact to the byte, from headers only, and editable."""

import csv
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_methods import METHODS
from tiny_models import BLOCK_LINEARS, tiny_model

from quant_core import CheckpointError, MixedQuantizeConfig, QuantizeConfig, load_quantized_model
from quant_core.checkpoint.header import DTYPE_CODES
from quant_core.cli import main
from quant_core.convert import convert
from quant_core.plan import Plan, plan
from quant_core.selection import Reason

INT8, FP8, NVFP4, NF4 = (
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "bitsandbytes_nf4",
)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file(tiny_model().state_dict(), path, metadata={"format": "pt", "note": "kept"})
    return path


def sparse_checkpoint(path, shapes, dtype=torch.bfloat16):
    """A file with a header and no data: reading one of its tensors would read zeros, at no cost on the disk."""
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    return path


@pytest.mark.parametrize("method", METHODS)
def test_size_is_exact_to_the_byte(method, source, tmp_path):
    out = tmp_path / "out.safetensors"
    made = plan(source, QuantizeConfig(method=method))
    convert(made, out)
    assert made.file_bytes == out.stat().st_size
    state = load_file(out)
    assert made.bytes_after == sum(t.numel() * t.element_size() for t in state.values())
    for row in made.rows:
        own = [t for name, t in state.items() if name == row.tensor or name.startswith(row.layer + ".")]
        if row.decision == "quantize":
            own = [t for name, t in state.items() if name.startswith(row.layer + ".") and name != f"{row.layer}.bias"]
            assert row.bytes_after == sum(t.numel() * t.element_size() for t in own)
    assert sorted(row.layer for row in made.quantized) == sorted(BLOCK_LINEARS)


def test_66_gb_are_planned_from_the_header(tmp_path, monkeypatch):
    shapes = {f"blocks.{i}.{name}.weight": (12288, 6144) for i in range(73) for name in "abcdef"}
    shapes |= {f"blocks.{i}.norm.weight": (6144,) for i in range(73)}
    path = sparse_checkpoint(tmp_path / "large.safetensors", shapes)
    assert path.stat().st_size > 66e9
    from quant_core.checkpoint.reader import Checkpoint

    def refuse(*_):
        raise AssertionError("a plan reads no tensor")

    monkeypatch.setattr(Checkpoint, "_read_bytes", refuse)
    made = plan(path, QuantizeConfig(method=NVFP4))
    assert len(made.quantized) == 73 * 6
    # 4 bits, and an fp8 scale for 16 of them, per weight.
    assert made.bytes_after == pytest.approx(sum(12288 * 6144 for _ in range(438)) * 4.5 / 8, rel=1e-3)
    assert made.peak_bytes < 150e6


def test_reasons_come_from_the_list(source, tmp_path):
    state = {
        "blocks.0.a.weight": torch.randn(256, 320).bfloat16(),
        "blocks.0.b.weight": torch.randn(256, 272).bfloat16(),
        "blocks.0.codes.weight": torch.zeros(256, 256, dtype=torch.int8),
        "blocks.0.conv.weight": torch.zeros(8, 8, 3, 3),
        "blocks.0.small.weight": torch.zeros(8, 256),
        "blocks.0.a.bias": torch.zeros(256),
        "blocks.0.attn2.to_k.weight": torch.zeros(256, 256),
        "head.weight": torch.zeros(256, 256),
    }
    save_file(state, tmp_path / "many.safetensors")
    made = plan(tmp_path / "many.safetensors", QuantizeConfig(method=INT8))
    assert {row.tensor.removeprefix("blocks.0."): row.reason for row in made.rows} == {
        "a.weight": Reason.FALLBACK,
        "b.weight": Reason.FALLBACK,
        "codes.weight": Reason.NOT_FLOAT,
        "conv.weight": Reason.NOT_LINEAR,
        "small.weight": Reason.TOO_SMALL,
        "a.bias": Reason.NOT_A_WEIGHT,
        "attn2.to_k.weight": Reason.IN_BLOCK,
        "head.weight": Reason.OUTSIDE_BLOCKS,
    }
    assert made["blocks.0.a"].options == {"convrot_groupsize": 64}
    assert made["blocks.0.b"].options == {"convrot_groupsize": 16}
    packed = plan(tmp_path / "many.safetensors", QuantizeConfig(method=NVFP4, exclude_modules=["0.b"]))
    assert packed["blocks.0.attn2.to_k"].reason is Reason.DETECTION
    assert packed["blocks.0.b"].reason is Reason.EXCLUDED
    targeted = plan(tmp_path / "many.safetensors", QuantizeConfig(method=NVFP4, target_modules=["0.b"]))
    assert (targeted["blocks.0.b"].reason, targeted["head"].reason) == (Reason.TARGETED, Reason.NOT_TARGETED)


def test_an_entry_that_matches_nothing_gets_a_hint(source):
    layer = BLOCK_LINEARS[0]
    for entry, hint in (
        (f"{layer}.weight", f"leave out .weight: '{layer}' does"),
        (layer.rpartition(".")[0], "a part of the model, not a layer; .*'blocks.0.(up|down)'"),
        ("nothing", "a layer name or its end"),
    ):
        with pytest.raises(ValueError, match=hint):
            plan(source, QuantizeConfig(method="bitsandbytes_nf4", exclude_modules=[entry]))


def test_text_forms(source):
    made = plan(source, QuantizeConfig(method=INT8))
    assert Plan.from_json(made.to_json()) == made
    rows = list(csv.DictReader(io.StringIO(made.to_csv())))
    assert sorted(row["tensor"] for row in rows) == sorted(load_file(source))
    assert {row["reason"] for row in rows} <= set(Reason.__members__)
    assert sum(int(row["bytes_after"]) for row in rows) == made.bytes_after


def test_edited_plan_converts_as_edited(source, tmp_path):
    made = plan(source, QuantizeConfig(method=INT8))
    made["blocks.0.up"].decision = "keep"
    made["blocks.1.up"].method, made["blocks.1.up"].options = NF4, {"blocksize": 128}
    made["head"].decision, made["head"].method = "quantize", FP8
    data = json.loads(made.to_json())
    for row in data["rows"]:
        if row["layer"] == "blocks.1.down":
            row["options"] = {"convrot": False}
    edited = Plan.from_json(json.dumps(data))
    out = tmp_path / "out.safetensors"
    convert(edited, out)
    assert edited.file_bytes == out.stat().st_size
    assert (edited["head"].reason, edited["blocks.0.up"].reason) == (Reason.EDITED, Reason.EDITED)
    state = load_file(out)
    assert state["blocks.0.up.weight"].dtype == torch.bfloat16
    assert state["head.weight"].dtype == torch.float8_e4m3fn
    assert "blocks.1.up.weight.quant_state.bitsandbytes__nf4" in state
    assert b"convrot" not in bytes(state["blocks.1.down.comfy_quant"].tolist())
    assert b"convrot" in bytes(state["blocks.0.down.comfy_quant"].tolist())
    model = tiny_model(seed=3)
    load_quantized_model(model, out)  # what the file says of itself is what was edited
    assert torch.isfinite(model(torch.randn(2, 64, dtype=torch.bfloat16))).all()


def test_mixed_recipe(source, tmp_path):
    recipe = MixedQuantizeConfig(
        configs=[
            QuantizeConfig(method=NVFP4, exclude_modules=["down"]),
            QuantizeConfig(method=INT8, target_modules=["down"]),
        ]
    )
    made = plan(source, recipe)
    assert {row.layer: row.method for row in made.quantized} == {
        "blocks.0.up": NVFP4,
        "blocks.0.down": INT8,
        "blocks.1.up": NVFP4,
        "blocks.1.down": INT8,
    }
    convert(made, tmp_path / "out.safetensors")
    assert made.file_bytes == (tmp_path / "out.safetensors").stat().st_size
    model = tiny_model(seed=3)
    assert load_quantized_model(model, tmp_path / "out.safetensors").to_dict() == recipe.to_dict()
    overlap = [QuantizeConfig(method=NVFP4), QuantizeConfig(method=INT8, target_modules=["down"])]
    with pytest.raises(ValueError, match="'blocks.0.down' is selected by more than one config"):
        plan(source, MixedQuantizeConfig(configs=overlap))


def change(row, **values):
    for key, value in values.items():
        setattr(row, key, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: change(p["blocks.0.norm"], decision="quantize", method=INT8), "blocks.0.norm.*not a Linear"),
        (lambda p: change(p["head"], decision="quantize"), "'head'.*names no method"),
        (lambda p: change(p["head"], decision="dequantize"), "'head' cannot be dequantized"),
        (lambda p: change(p["head"], decision="quantize", method="nf5"), "unknown quantization method"),
        (lambda p: change(p["blocks.0.up"], options={"rotate": 1}), "does not accept 'rotate'"),
        (lambda p: p.rows.pop(), "no row for tensor"),
        (lambda p: p.rows.append(p.rows[0]), "names tensor .* twice"),
        (lambda p: change(p.rows[0], tensor="nothing"), "'nothing' but the source does not hold it"),
    ],
)
def test_impossible_edits_are_refused_before_anything_is_written(source, tmp_path, edit, message):
    made = plan(source, QuantizeConfig(method=INT8))
    edit(made)
    with pytest.raises(ValueError, match=message):
        convert(made, tmp_path / "out" / "out.safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"plan": 9, "source": "a", "rows": []}', '{"rows": [1], "source": ""}']
)
def test_what_is_no_plan(text):
    with pytest.raises(ValueError, match="plan"):
        Plan.from_json(text)


def test_changed_source_is_noticed(source, tmp_path):
    made = plan(source, QuantizeConfig(method=INT8))
    save_file(tiny_model(seed=1).state_dict() | {"more": torch.zeros(3)}, source)
    with pytest.raises(CheckpointError, match=r"source.safetensors was changed after it was planned"):
        convert(made, tmp_path / "out.safetensors")


def test_quantized_layers_are_kept_or_requantized(source, tmp_path):
    once = tmp_path / "once.safetensors"
    first = plan(source, QuantizeConfig(method=INT8, target_modules=["up"]))
    convert(first, once)
    made = plan(once, QuantizeConfig(method=NF4))
    assert made["blocks.0.up"].reason is Reason.QUANTIZED and made["blocks.0.up"].decision == "keep"
    twice = tmp_path / "twice.safetensors"
    convert(made, twice)
    before, after = load_file(once), load_file(twice)
    for name in before:
        if "up." in name:
            assert torch.equal(before[name], after[name])
    model = tiny_model(seed=3)
    load_quantized_model(model, twice)
    assert torch.isfinite(model(torch.randn(2, 64, dtype=torch.bfloat16))).all()

    again = plan(once, QuantizeConfig(method=NF4), requantize=True)
    assert len(again.quantized) == 4 and "2 layers are quantized already" in again.warnings[0]
    convert(again, tmp_path / "again.safetensors")
    assert again.file_bytes == (tmp_path / "again.safetensors").stat().st_size
    assert not [n for n in load_file(tmp_path / "again.safetensors") if n.endswith("comfy_quant")]
    with pytest.raises(ValueError, match="quantized already.*requantize"):
        plan(tmp_path / "again.safetensors", QuantizeConfig(method=NF4))


def test_part_of_an_all_in_one_checkpoint(tmp_path):
    state = {
        f"{prefix}blocks.0.up.weight": torch.randn(256, 256)
        for prefix in ("model.diffusion_model.", "text_encoders.t5.", "first_stage_model.")
    }
    save_file(state, tmp_path / "all.safetensors")
    for part, prefix in (("diffusion", "model."), ("text_encoders", "text"), ("vae", "first")):
        made = plan(tmp_path / "all.safetensors", QuantizeConfig(method=INT8), part=part)
        assert [row.layer for row in made.quantized] == [
            n.removesuffix(".weight") for n in state if n.startswith(prefix)
        ]
        assert [row.reason for row in made.rows if row.decision == "keep"] == [Reason.OTHER_PART] * 2


def test_command(source, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", str(source), "--method", INT8, "--output", str(path)]) == 0
    assert "4 of 8 weights quantized" in capsys.readouterr().out
    text = path.read_text()
    path.write_text(text.replace('"method": "comfy_kitchen_int8_w8a8"', f'"method": "{FP8}"'))
    assert main(["quantize", str(source), str(tmp_path / "out.safetensors"), "--plan", str(path)]) == 0
    assert load_file(tmp_path / "out.safetensors")["blocks.0.up.weight"].dtype == torch.float8_e4m3fn
    assert main(["plan", str(source), "--method", INT8, "--output", str(tmp_path / "plan.csv")]) == 0
    assert (tmp_path / "plan.csv").read_text().startswith("layer,tensor,shape,")
    capsys.readouterr()
    assert main(["plan", str(source), "--json", "--method", INT8]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["quantized"] == 4


def test_memory_counts_what_waits_for_the_end_of_a_large_layer(tmp_path):
    def peak(rows):
        path = tmp_path / f"{rows}.safetensors"
        header = {"blocks.0.up.weight": {"dtype": "BF16", "shape": [rows, 8192], "data_offsets": [0, rows * 16384]}}
        raw = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + rows * 16384)  # holes: only the header is read
        return plan(path, QuantizeConfig(method="bitsandbytes_nf4")).peak_bytes

    # nf4 subtracts the mean of every block's absmax before these are quantized: they all wait, in 2 bytes or more.
    assert peak(65536) - peak(8192) >= (65536 - 8192) * 8192 // 64 * 2
