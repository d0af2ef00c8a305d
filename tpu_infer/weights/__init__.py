"""Checkpoints: finding and fetching them, reading GGUF and safetensors, placing them on the mesh."""
