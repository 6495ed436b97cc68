"""The Python client: light, without torch."""
