"""Judges a JSONL file of Live events by `openai`'s types, strictly: python validate_live.py FILE.

No type is converted, and a field that the types do not know is a failure. Prints {"failed", "first", "seen"}.
"""

import collections
import json
import pathlib
import sys

import pydantic
from openai import BaseModel
from openai.types.live.connect_server_event import ConnectServerEvent

ADAPTER = pydantic.TypeAdapter(ConnectServerEvent)


def unknown(value: object, path: str) -> str | None:
    if isinstance(value, BaseModel):
        if value.model_extra:
            return f"{path}: {sorted(value.model_extra)}"
        children = [(getattr(value, name), f"{path}.{name}") for name in type(value).model_fields]
    elif isinstance(value, list):
        children = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        return None
    return next((found for child, where in children if (found := unknown(child, where))), None)


failed, first, seen = 0, None, collections.Counter()
for line in pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    seen[json.loads(line)["type"]] += 1
    try:
        event = ADAPTER.validate_json(line, strict=True)
        problem = unknown(event, "$")
        if event.type != json.loads(line)["type"]:
            problem = f"taken for {type(event).__name__}"
    except pydantic.ValidationError as error:
        problem = str(error)
    if problem:
        failed += 1
        first = first or f"{line[:500]}: {problem[:2000]}"
print(json.dumps({"failed": failed, "first": first, "seen": seen}))
