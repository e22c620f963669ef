"""Reading and writing checkpoints."""

from .hashing import FileHash, structure_hash
from .reader import Checkpoint, open_checkpoint
from .saved import MODEL_CONFIGS, load_quantized_model, register_model_config, save_quantized_model
from .writer import CheckpointWriter

__all__ = [
    "MODEL_CONFIGS",
    "Checkpoint",
    "CheckpointWriter",
    "FileHash",
    "load_quantized_model",
    "open_checkpoint",
    "register_model_config",
    "save_quantized_model",
    "structure_hash",
]
