"""The null model: sessions, KV and artifacts without arithmetic."""
