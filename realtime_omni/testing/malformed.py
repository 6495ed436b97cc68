"""What a declared control looks like, and the ways in which it can be wrong: values made from a JSON schema.

Owns the part of JSON schema that control vocabularies use: ``type``, ``properties``, ``required``, ``additionalProperties``,
``items``, ``minItems``, ``maxItems``, ``minimum``, ``maximum``, ``const``, ``enum``;
and ``examples``, for what no schema can say. Where a schema says nothing, nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_OF_TYPE: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 0,
    "number": 0.5,
    "string": "x",
    "array": [],
    "object": {},
}
"""One value of each JSON type."""


def example(schema: Schema, *, full: bool = False) -> Any:
    """The schema's own example, or the plainest value that it allows: an object's required fields and no other, empty lists.

    ``full``: every field, and lists with something in them.
    """
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("examples"):
        return schema["examples"][0]
    match schema.get("type"):
        case "object":
            names = schema.get("properties", {}) if full else schema.get("required", ())
            return {name: example(schema["properties"][name], full=full) for name in names}
        case "array":
            return [example(schema.get("items", {}), full=full)] * max(schema.get("minItems", 0), int(full))
        case "integer" | "number":
            return schema.get("minimum", schema.get("maximum", int(full)))
        case kind:
            return _OF_TYPE.get(kind or "null")


def malformed(schema: Schema, value: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    """Values that differ from ``value`` (an allowed one) in one thing that the schema forbids, each with what it is."""
    if "const" in schema or "enum" in schema:
        yield f"{path} is a value that is not in the list", "no such value"
    kind = schema.get("type")
    if kind is not None:
        for other, wrong in _OF_TYPE.items():
            if other != kind and (kind, other) != ("number", "integer"):
                yield f"{path} is {other}", wrong
    if kind == "object":
        yield from _malformed_object(schema, value, path)
    elif kind == "array":
        yield from _malformed_array(schema, value, path)
    elif kind in ("integer", "number"):
        yield f"{path} is NaN", float("nan")
        if "minimum" in schema:
            yield f"{path} is below its minimum", schema["minimum"] - 1
        if "maximum" in schema:
            yield f"{path} is above its maximum", schema["maximum"] + 1


def _malformed_object(schema: Schema, value: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name in schema.get("required", ()):
        yield f"{path}.{name} is missing", {key: item for key, item in value.items() if key != name}
    if schema.get("additionalProperties") is False:
        yield f"{path} has a field too many", {**value, "no_such_field": 1}
    for name, inner in schema.get("properties", {}).items():
        for what, wrong in malformed(inner, value.get(name, example(inner)), f"{path}.{name}"):
            yield what, {**value, name: wrong}


def _malformed_array(schema: Schema, value: list[Any], path: str) -> Iterator[tuple[str, Any]]:
    items = schema.get("items", {})
    one = value[0] if value else example(items)
    if "maxItems" in schema:
        yield f"{path} is too long", [one] * (schema["maxItems"] + 1)
    if schema.get("minItems", 0):
        yield f"{path} is too short", value[:-1]
    for what, wrong in malformed(items, one, f"{path}[0]"):
        yield what, [wrong, *value[1:]]
