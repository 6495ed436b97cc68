"""Attention over paged KV memory, one module per backend."""
