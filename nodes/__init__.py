"""The pack's nodes. Imported by ComfyUI's door only, since every module below imports ComfyUI."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .core import provide_quant_core

provide_quant_core()  # Before the node modules, which import quant_core by its name.

from .checkpoint_doctor import CheckpointDoctor  # noqa: E402
from .clear_quantization_cache import ClearQuantizationCache  # noqa: E402
from .convert_checkpoint import ConvertCheckpoint  # noqa: E402
from .dequantize_model import DequantizeModel  # noqa: E402
from .list_methods import ListMethods  # noqa: E402
from .load_diffusion_model import LoadDiffusionModelQuantized  # noqa: E402
from .load_lora import LoadLoraQuantized  # noqa: E402
from .load_text_encoder import LoadTextEncoderQuantized  # noqa: E402
from .lora_to_bake import LoraToBake  # noqa: E402
from .mixed_quantization import MixedQuantization  # noqa: E402
from .quantization_method import QuantizationMethod  # noqa: E402
from .quantization_plan import QuantizationPlan  # noqa: E402
from .quantization_preset import QuantizationPreset  # noqa: E402
from .quantize_model import QuantizeModel  # noqa: E402
from .save_checkpoint import SaveQuantizedCheckpoint  # noqa: E402

NODES: list[type[io.ComfyNode]] = [
    LoadDiffusionModelQuantized,
    LoadTextEncoderQuantized,
    LoraToBake,
    LoadLoraQuantized,
    QuantizeModel,
    DequantizeModel,
    QuantizationPreset,
    QuantizationMethod,
    MixedQuantization,
    SaveQuantizedCheckpoint,
    QuantizationPlan,
    ConvertCheckpoint,
    CheckpointDoctor,
    ClearQuantizationCache,
    ListMethods,
]


class QuantCoreExtension(ComfyExtension):
    """What ComfyUI asks the pack for."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
