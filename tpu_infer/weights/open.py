"""Opening a checkpoint of any known format."""

import os
from pathlib import Path

from tpu_infer.errors import ModelFileError, ModelNotFoundError
from tpu_infer.weights.checkpoint import Checkpoint
from tpu_infer.weights.gguf import GGUFCheckpoint
from tpu_infer.weights.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, or a directory with config.json and safetensors; what it holds has been checked.

    Raises ModelNotFoundError, ModelFileError and UnsupportedModelError.
    """
    if not os.path.exists(path):
        raise ModelNotFoundError(f"{path}: no such file or directory.")
    if os.path.isdir(path):
        return SafetensorsCheckpoint(path)
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path}: name its directory, which also holds config.json, and not the file.")
    return GGUFCheckpoint(path)
