"""The wire protocols: sans-I/O machines, message types and error codes."""
