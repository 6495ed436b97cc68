"""A hosted backend's settings and stream, as far as a model that calls tools by itself can stand in for one.

Owns: the functions in ``delegation.responses``, the Responses events that tell of a call, the items that answer it.  Must
not know: states, who is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .config import Delegation, Name
from .errors import LiveCode, LiveError

MAX_FUNCTIONS = 128
_TOOLS = "session.delegation.responses.tools"


class FunctionTool(Struct, frozen=True, kw_only=True):
    """A function that the client runs. ``parameters``: a JSON schema. Other fields mean nothing here."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionCallOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """What the function returned."""

    call_id: Name
    output: Annotated[str, Meta(max_length=65_536)]


def function_tools(delegation: Delegation | None) -> tuple[FunctionTool, ...] | None:
    """The functions among the backend's tools (others are the hosted backend's own); None: nothing is said of tools.

    Raises:
        LiveError: ``invalid_value``.
    """
    settings = (delegation.responses if delegation is not None else None) or {}
    tools = settings.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or len(tools) > MAX_FUNCTIONS:
        raise LiveError(LiveCode.INVALID_VALUE, f"tools are a list of at most {MAX_FUNCTIONS}", _TOOLS)
    functions = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
    try:
        return msgspec.convert(tuple(functions), tuple[FunctionTool, ...])
    except msgspec.ValidationError:
        raise LiveError(LiveCode.INVALID_VALUE, "a function has a name, a description and a schema", _TOOLS) from None


def tool_choice(delegation: Delegation | None) -> str | None:
    """``auto``, ``none``, ``required`` or a function's name; None: nothing is said of it."""
    choice = ((delegation.responses if delegation is not None else None) or {}).get("tool_choice")
    if isinstance(choice, Mapping):
        choice = choice.get("name")
    return choice if isinstance(choice, str) and 0 < len(choice) <= 128 else None


def read_output(item: Mapping[str, Any]) -> FunctionCallOutput:
    """Raises LiveError: ``unsupported_event`` for another item, ``invalid_value``."""
    if item.get("type") != "function_call_output":
        raise LiveError(LiveCode.UNSUPPORTED_EVENT, "only a function's output can be added", "item.type")
    try:
        return msgspec.convert(item, FunctionCallOutput)
    except msgspec.ValidationError:
        raise LiveError(LiveCode.INVALID_VALUE, "an output has a call_id and a text", "item") from None


def call_events(response: str, model: str, call_id: str, name: str, arguments: str) -> list[dict[str, Any]]:
    """The backend's stream for one call: begun, the call, completed."""
    call = {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }
    begun, completed = empty_events(response, model)
    return [begun, {"type": "response.output_item.done", "output_index": 0, "item": call}, completed]


def empty_events(response: str, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A response that calls nothing: what it has to say is said by the voice."""
    snapshot = {"id": response, "object": "response", "model": model, "output": []}
    begun = {"type": "response.created", "response": {**snapshot, "status": "in_progress"}}
    return begun, {"type": "response.completed", "response": {**snapshot, "status": "completed"}}
