"""The engine: the one thread that owns sessions, pages and model rows."""
