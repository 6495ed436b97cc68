"""Run in the environment of pipecat.lock: every event of a JSONL file through Pipecat's own parser."""

from __future__ import annotations

import collections
import json
import sys

from pipecat.services.openai.realtime.events import parse_server_event


def main() -> None:
    seen: collections.Counter[str] = collections.Counter()
    failures, ignored = [], set()
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file:
            kind = json.loads(line)["type"]
            seen[kind] += 1
            try:
                if parse_server_event(line) is None:
                    ignored.add(kind)
            except Exception as error:
                failures.append(f"{line[:500]}: {error}")
    print(json.dumps({"seen": seen, "failed": len(failures), "first": failures[:3], "ignored": sorted(ignored)}))


if __name__ == "__main__":
    main()
