"""Run in the environment of openai.lock: every event of a JSONL file through openai-agents' own, strict validator."""

from __future__ import annotations

import collections
import json
import sys

from agents.realtime.openai_realtime import get_server_event_type_adapter


def main() -> None:
    adapter = get_server_event_type_adapter()
    seen: collections.Counter[str] = collections.Counter()
    failures = []
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file:
            event = json.loads(line)
            seen[event["type"]] += 1
            try:
                parsed = adapter.validate_python(event)
                assert parsed.type == event["type"]
            except Exception as error:
                failures.append(f"{line[:500]}: {error}")
    print(json.dumps({"seen": seen, "failed": len(failures), "first": failures[:3]}))


if __name__ == "__main__":
    main()
