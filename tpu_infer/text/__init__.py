"""Text to token ids and back: tokenizers, incremental detokenising, stop strings, chat templates. Imports no JAX."""
