"""Measurements of the embedded voice, by hand: they need its weights and another synthesiser."""
