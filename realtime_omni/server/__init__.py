"""The server: one file per protocol, turning messages into commands."""
