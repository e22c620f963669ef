"""The plan of a conversion: for every tensor of a checkpoint, what becomes of it, why, and how many bytes it takes.

Made from headers alone, so that the plan of a file of any size takes a moment. The resulting file has exactly the
planned size. A plan is plain data: it may be edited, in Python or as JSON, and converts as edited.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .selection import Decision, Reason, choose_layers, decide_layer

if TYPE_CHECKING:
    import os

    from .config import QuantizeConfig, Recipe

PLAN_VERSION = 1
QUANTIZE, KEEP, DEQUANTIZE = "quantize", "keep", "dequantize"
DECISIONS = (QUANTIZE, KEEP, DEQUANTIZE)
PARTS = {"diffusion": "diffusion_model", "text_encoders": "text_encoders", "vae": "vae"}
"""What of an all-in-one checkpoint can be quantized."""


@dataclass
class PlanRow:
    """What becomes of one tensor, or of the tensors that make up one quantized layer of the source.

    Attributes:
        layer: the dotted name of the layer; for a tensor that is no weight, its own name.
        tensor: the tensor, ``<layer>.weight`` for a weight.
        shape: of the (float) tensor.
        dtype: of the (float) tensor, e.g. ``"bfloat16"``.
        decision: ``"quantize"``, ``"keep"`` (copied byte for byte), or ``"dequantize"`` (a quantized layer becomes a
            float one). Yours to edit.
        reason: why; an entry of the closed list :class:`Reason`.
        detail: the same for this tensor, where there is more to say.
        method: the quantization method; empty unless it is quantized. Yours to edit.
        options: the method's options for this layer, after fallbacks. Yours to edit.
        bytes_before, bytes_after: what the tensor and its scales take in the source, and will take.
        stored: the family and format that the source holds the layer in; empty for a float one.
    """

    layer: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    decision: str
    reason: Reason
    detail: str = ""
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    stored: str = ""

    @property
    def is_weight(self) -> bool:
        return self.tensor.endswith(".weight")

    @property
    def why(self) -> str:
        """The reason as one line for people."""
        return self.detail or self.reason.value

    def to_dict(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "shape": list(self.shape), "reason": self.reason.name}

    @classmethod
    def from_dict(cls, data: Any) -> PlanRow:
        known = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or not {"layer", "tensor", "decision"} <= set(data) <= known:
            raise ValueError(f"a row of a plan has {', '.join(sorted(known))}; got {data!r}"[:1000])
        values = dict(data)
        if values["decision"] not in DECISIONS:
            raise ValueError(
                f"layer {values['layer']!r}: decision must be one of {', '.join(DECISIONS)}, got {values['decision']!r}"
            )
        reason = values.get("reason", "EDITED")
        if reason not in Reason.__members__:
            raise ValueError(
                f"layer {values['layer']!r}: unknown reason {reason!r}; known: {', '.join(Reason.__members__)}"
            )
        values["reason"] = Reason[reason]
        values["shape"] = tuple(values.get("shape", ()))
        values.setdefault("dtype", "")
        if not isinstance(values.get("options", {}), dict) or not isinstance(values.get("method", ""), str):
            raise ValueError(f"layer {values['layer']!r}: options must be an object and method a name")
        return cls(**values)


@dataclass
class Plan:
    """A planned conversion; :func:`plan` makes it, :func:`quant_core.convert.convert` carries it out.

    Attributes:
        source: path of the checkpoint.
        files: ``[name, size, modification time in ns]`` of the files of the source when it was planned.
        recipe: the recipe, as ``Recipe.to_dict`` gives it.
        part: what of an all-in-one checkpoint is quantized.
        rows: every tensor, in the order of the source.
        shard_size: the most bytes of tensors a file may hold; None writes one file.
        warnings: what the user should know before converting.
        file_sizes: the exact size of each resulting file, in bytes.
        peak_bytes: about how much memory the conversion takes at most, beyond the imports.
        extra_metadata: entries for the metadata of the resulting file, such as the workflow that asked for it; they
            replace entries of the source with the same names. Part of the planned size.
    """

    source: str
    files: list[list[Any]]
    recipe: dict[str, Any]
    part: str
    rows: list[PlanRow]
    shard_size: int | None = None
    warnings: list[str] = field(default_factory=list)
    file_sizes: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    extra_metadata: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> PlanRow:
        """Return the row of a layer or tensor."""
        for row in self.rows:
            if layer in (row.layer, row.tensor):
                return row
        raise KeyError(f"the plan has no layer {layer!r}")

    @property
    def quantized(self) -> list[PlanRow]:
        return [row for row in self.rows if row.decision == QUANTIZE]

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors of the result: what the whole model takes on a device."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def file_bytes(self) -> int:
        """The exact size of the resulting file, or files together, headers included."""
        return sum(self.file_sizes)

    @property
    def method(self) -> str:
        """The methods in use, joined by ``" + "``."""
        return " + ".join(dict.fromkeys(row.method for row in self.quantized))

    # ------------------------------------------------------------------ as text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable data; :meth:`from_dict` reads it back."""
        return {
            "plan": PLAN_VERSION,
            "source": self.source,
            "files": self.files,
            "part": self.part,
            "recipe": self.recipe,
            "shard_size": self.shard_size,
            "extra_metadata": self.extra_metadata,
            "warnings": self.warnings,
            "totals": {
                "quantized": len(self.quantized),
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "file_sizes": self.file_sizes,
                "vram_bytes": self.bytes_after,
                "peak_bytes": self.peak_bytes,
            },
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        """Return the plan as JSON, a row a line, ready to be edited."""
        data = self.to_dict()
        rows = ",\n".join("  " + json.dumps(row) for row in data.pop("rows"))
        return json.dumps(data, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n'

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Read a plan; its totals are worked out again when it is converted.

        Raises:
            ValueError: it is not a plan, or one of a newer version.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("rows"), list) or "source" not in data:
            raise ValueError("this is not a plan: expected an object with 'source', 'recipe' and 'rows'")
        if data.get("plan") != PLAN_VERSION:
            raise ValueError(f"the plan has version {data.get('plan')!r}, this quant_core reads {PLAN_VERSION}")
        rows = [PlanRow.from_dict(row) for row in data["rows"]]
        extra = data.get("extra_metadata", {})
        if not isinstance(extra, Mapping):
            raise ValueError(f"extra_metadata of a plan is an object of texts, got {extra!r}"[:1000])
        totals = data.get("totals", {})
        return cls(
            str(data["source"]),
            [list(entry) for entry in data.get("files", [])],
            dict(data.get("recipe", {})),
            str(data.get("part", "diffusion")),
            rows,
            data.get("shard_size"),
            list(data.get("warnings", [])),
            list(totals.get("file_sizes", [])),
            int(totals.get("peak_bytes", 0)),
            dict(extra),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote, edited or not.

        Raises:
            ValueError: the text is not JSON, or not a plan.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"the plan is not JSON: {error}") from error
        return cls.from_dict(data)

    def to_csv(self) -> str:
        """Return the rows as CSV with a header line."""
        text = io.StringIO()
        names = [f.name for f in fields(PlanRow)]
        table = csv.writer(text, lineterminator="\n")
        table.writerow(names)
        for row in self.rows:
            values = {**row.to_dict(), "shape": "x".join(map(str, row.shape)), "options": json.dumps(row.options)}
            table.writerow([values[name] for name in names])
        return text.getvalue()


def plan(
    source: str | os.PathLike[str],
    recipe: Recipe,
    *,
    part: str = "diffusion",
    requantize: bool = False,
    shard_size: int | None = None,
    extra_metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the conversion of a checkpoint from its headers; no tensor but the small format markers is read.

    Args:
        source: what :func:`quant_core.checkpoint.open_checkpoint` opens.
        recipe: methods, options, and which layers (targets None: chosen by structure, see
            :mod:`quant_core.selection`).
        part: what of an all-in-one checkpoint to quantize: ``"diffusion"``, ``"text_encoders"`` or ``"vae"``.
        requantize: also quantize layers that the source holds quantized, instead of keeping them.
        shard_size: write files of at most this many bytes of tensors, with an index.
        extra_metadata: see :class:`Plan`.

    Raises:
        FileNotFoundError, CheckpointError: the source cannot be read.
        ValueError: the choice of layers is not possible, or ``extra_metadata`` holds an entry that describes tensors.
    """
    from .blueprint import draw, identity_of, owners_of, weight_name
    from .checkpoint.formats import describe_cost, stored_layers
    from .checkpoint.reader import open_checkpoint, part_of
    from .choice import Weight, choose_weights
    from .layout import Formats

    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    if shard_size is not None and shard_size < 1:
        raise ValueError(f"shard_size must be a number of bytes, got {shard_size!r}")
    checkpoint = open_checkpoint(source)
    stored = stored_layers(checkpoint)
    owners = owners_of(stored)
    rows: dict[str, PlanRow] = {}
    weights: dict[str, Weight] = {}
    for name, info in checkpoint.tensors.items():
        owner = owners.get(name)
        tensor, layer = (name, name) if owner is None else (weight_name(owner), owner.name)
        if tensor in rows:
            continue
        shape, dtype = (info.shape, info.dtype) if owner is None else (tuple(owner.shape), owner.dtype)
        layer = tensor.removesuffix(".weight") if owner is None else layer
        kept = DEQUANTIZE if owner is not None and owner.family == "gguf" else KEEP
        rows[tensor] = PlanRow(layer, tensor, shape, str(dtype).removeprefix("torch."), kept, Reason.NOT_A_WEIGHT)
        if tensor.endswith(".weight"):
            weights[layer] = Weight(shape, dtype, owner is not None and not requantize and kept == KEEP)
    formats = Formats()
    structure: Mapping[str, Decision] = _structure(weights, part, {} if part == "diffusion" else part_of(checkpoint))

    def halves_width(config: QuantizeConfig) -> bool:
        return formats.is_packed(config.method, _options(config))

    chosen, structure, note = recipe.for_model(weights, structure, halves_width)
    choices = choose_weights(weights, chosen, structure, halves_width)
    for layer, choice in choices.items():
        row = rows[f"{layer}.weight"]
        row.reason, row.detail = choice.decision.why, choice.decision.detail
        if choice.part is not None:
            row.decision, row.method = QUANTIZE, choice.part.method
            fallback = choice.part.backend.layer_options(row.shape[0], row.shape[1])
            row.options = {**_options(choice.part), **fallback}
    again = [layer for layer in stored.values() if rows[weight_name(layer)].decision == QUANTIZE]
    warnings = [f"{len(again)} layers are quantized already. {describe_cost(again)}"] if again else []
    warnings += [note] if note else []
    result = Plan(
        str(source), identity_of(checkpoint), recipe.to_dict(), part, list(rows.values()), shard_size, warnings
    )
    result.extra_metadata = dict(extra_metadata or {})
    draw(result, checkpoint, formats)
    return result


def _options(config: Any) -> dict[str, Any]:
    """The user's options of a config, JSON-serializable."""
    return config.to_dict().get("backend_config_kwargs", {})


def _structure(weights: Mapping[str, Any], part: str, parts: Mapping[str, str]) -> dict[str, Decision]:
    """What the structure of the model says about every weight."""
    if part == "diffusion":
        return choose_layers({f"{layer}.weight": weight.shape for layer, weight in weights.items()})
    text = f"not part of the {part.replace('_', ' ')}"
    return {
        layer: decide_layer(layer, weight.shape)
        if parts.get(f"{layer}.weight") == PARTS[part]
        else Decision(False, Reason.OTHER_PART, text)
        for layer, weight in weights.items()
    }
