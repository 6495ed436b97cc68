"""live.md and the machine agree on states, codes and events."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from protocols.live.drive import Driver, random_steps
from protocols.live.make_vectors import REFUSED, TAKEN
from realtime_omni_protocols import docs
from realtime_omni_protocols.live import LiveClose, LiveCode, LiveState
from realtime_omni_protocols.live.client_events import AnyClientEvent, event_type
from realtime_omni_protocols.live.states import refusal

SPEC = (Path(__file__).parents[3] / "protocols" / "live.md").read_text(encoding="utf-8")
STATES = [LiveState.NEW, LiveState.STARTING, LiveState.ACTIVE, LiveState.CLOSING]
KINDS = {event_type(kind): kind for kind in typing.get_args(AnyClientEvent)}
TABLE = re.findall(r"^\| `(session\.[a-z_.]+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", SPEC, re.MULTILINE)


def test_the_table_has_rows() -> None:
    assert len(TABLE) == 5


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_state_table_is_the_machines(row: tuple[str, ...]) -> None:
    for state, cell in zip(STATES, row[1:], strict=True):
        code = refusal(state, KINDS[row[0]])
        assert cell == (f"(`{code.value}`)" if code is not None else cell)
        assert cell.startswith("(") is (code is not None), (row[0], state)


def test_every_code_and_close_code_is_in_the_text() -> None:
    for code in LiveCode:
        assert f"`{code.value}`" in SPEC, code
    for close in LiveClose:
        assert str(int(close)) in SPEC, close


def test_every_client_event_is_in_the_text() -> None:
    for name in KINDS:
        family = re.sub(r"\.[a-z_.]+$", ".*", name)
        short = "`." + name.rpartition(".")[2]
        assert name in SPEC or family in SPEC or short in SPEC, name


SCHEMA = json.loads(docs.LIVE_SCHEMA.read_text(encoding="utf-8"))
BEYOND_SCHEMA = {
    "PCM at 8 kHz",
    "G.711 at 16 kHz",
    "a user who holds output_text",
    "client delegation with a backend",
}
"""Rules between fields."""


def validator(name: str) -> Any:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


def test_the_schema_is_current() -> None:
    assert docs.LIVE_SCHEMA.read_text(encoding="utf-8") == docs.live_schema_text(), (
        "run python -m realtime_omni_protocols.docs"
    )


def test_the_schema_and_the_vectors_agree() -> None:
    checks = {False: validator("ClientEvent"), True: validator("ForkStart")}
    for vector in TAKEN:
        checks[vector["fork"]].validate(json.loads(vector["wire"]))
    for vector in REFUSED:
        if vector["expect"]["code"] != "invalid_json":
            good = checks[vector["fork"]].is_valid(json.loads(vector["wire"]))
            assert good is (vector["name"] in BEYOND_SCHEMA), vector["name"]
    server = validator("ServerEvent")
    for event in Driver().run(random_steps(3)).events:
        server.validate(event)
