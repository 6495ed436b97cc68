"""The wires of the vectors that repeat themselves: a list of ``[piece, times]`` in place of one long text."""

from __future__ import annotations

from typing import Any


def written_out(vector: dict[str, Any]) -> dict[str, Any]:
    """The vector with its wire as one text."""
    return {key: _joined(value) if key in ("wire", "wire_hex") else value for key, value in vector.items()}


def _joined(wire: str | list[tuple[str, int]]) -> str:
    return wire if isinstance(wire, str) else "".join(piece * times for piece, times in wire)
