"""Kernels over the paged KV cache. `reference` holds the XLA twin of each, under the same signature."""
