"""The one table of the alternating protocols: which answer a client gets is decided by where it connects.

Owns: `ROWS` (the table of openpi.md section 2) and the choice of a row.  Must not know: frames, sessions, sockets.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from msgspec import Struct

PATH = "/v1/realtime/robot/openpi"
ROOT_PATH = "/"
"""Served on the port of ``--openpi-port`` only."""
STREAM_PROTOCOL: Final = "realtime-omni.vla.v1"
"""Our own WebSocket subprotocol; it goes before everything that the path says."""


class Row(StrEnum):
    """How a connection is answered."""

    BARE = "bare"
    """The source documents' shape."""
    OPENPI = "openpi"
    ROBOARENA = "roboarena"
    DREAMZERO = "dreamzero"
    """roboarena's envelope with a bare array as reply, as DreamZero's server has it."""


class RowRules(Struct, frozen=True):
    """One line of the table.

    ``handshake``: the deployment's own map, or roboarena's six fields of it. ``reply``: bare array (or named chunks),
    openpi's map with timings, or a map with ``actions`` only. ``errors``: a binary coded map and the socket stays open,
    or a text frame and close 1011: what stock openpi clients raise, and never execute.
    """

    handshake: Literal["deployment", "roboarena"]
    reply: Literal["array", "timed", "actions"]
    errors: Literal["coded", "text"]


ROWS: dict[Row, RowRules] = {
    Row.BARE: RowRules("deployment", "array", "coded"),
    Row.OPENPI: RowRules("deployment", "timed", "text"),
    Row.ROBOARENA: RowRules("roboarena", "actions", "text"),
    Row.DREAMZERO: RowRules("roboarena", "array", "text"),
}
WITH_ENDPOINT = {Row.BARE: Row.DREAMZERO, Row.OPENPI: Row.ROBOARENA}
"""A request that names an ``endpoint`` makes its connection a roboarena one from then on; arrays stay arrays, maps stay
maps."""
RESET_TEXT = "reset successful"


def choose_row(path: str, reply: str | None) -> Row | None:
    """The row of a connection by its path and ``reply`` parameter; None when there is no such row."""
    if reply is None:
        return Row.OPENPI if path == ROOT_PATH else Row.BARE
    return Row(reply) if reply in set(Row) else None
