"""The list of the pack's nodes."""

from __future__ import annotations

from comfy_api.latest import io

from .checkpoint_doctor import CheckpointDoctor
from .clear_quantization_cache import ClearQuantizationCache
from .convert_checkpoint import ConvertCheckpoint
from .dequantize_model import DequantizeModel
from .list_methods import ListMethods
from .load_diffusion_model import LoadDiffusionModelQuantized
from .load_lora import LoadLoraQuantized
from .load_text_encoder import LoadTextEncoderQuantized
from .lora_to_bake import LoraToBake
from .mixed_quantization import MixedQuantization
from .quantization_method import QuantizationMethod
from .quantization_plan import QuantizationPlan
from .quantization_preset import QuantizationPreset
from .quantize_model import QuantizeModel
from .save_checkpoint import SaveQuantizedCheckpoint

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
