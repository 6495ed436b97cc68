"""LingBot-World's geometry on several GPUs of one host: every way to share it, one JSON line each.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/parallel_speed.py [--ranks 2|4|8] [--limit-s 480] [--only NAME ...]

Each part is ``python -m realtime_omni.bench.lingbot_ranks`` (its docstring says what the numbers mean) in a process of its
own, which is ended with its ranks when its time is up: then its line says so, and the next part runs. Later parts are held to
the first one's latents. ``--scale tiny --device cpu --dtype float32`` rehearses all of it without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ONE = ["--parallel", "sp=1", "--compile", "--blocks", "8"]
PARTS: dict[int, dict[str, list[str]]] = {
    2: {
        "sp2": ["--parallel", "sp=2", "--compile", "--sessions", "2"],
        "tp2": ["--parallel", "tp=2", "--compile"],
        "one": ONE,
        "sp2_pixels_tiny": ["--parallel", "sp=2", "--compile", "--pixels", "tiny", "--blocks", "12"],
        "one_pixels_tiny_elsewhere": [*ONE, "--pixels", "tiny", "--decoder-device", "cuda:1"],
        "sp2_fp8": ["--parallel", "sp=2", "--compile", "--fp8", "linear", "--blocks", "12"],
        "sp2_no_clean_pass": ["--parallel", "sp=2", "--compile", "--no-clean-pass", "--blocks", "12"],
        "sp2_eager": ["--parallel", "sp=2", "--blocks", "8"],
    },
    4: {
        "sp4": ["--parallel", "sp=4", "--compile", "--sessions", "2"],
        "sp2_tp2": ["--parallel", "sp=2,tp=2", "--compile", "--sessions", "2"],
        "sp4_fp8": ["--parallel", "sp=4", "--compile", "--fp8", "linear", "--blocks", "12"],
        "sp2": ["--parallel", "sp=2", "--compile", "--blocks", "12"],
        "one": ONE,
    },
    8: {
        "sp8": ["--parallel", "sp=8", "--compile", "--sessions", "2"],
        "sp4_tp2": ["--parallel", "sp=4,tp=2", "--compile", "--sessions", "2"],
        "sp4": ["--parallel", "sp=4", "--compile", "--sessions", "2"],
        "sp2_tp2": ["--parallel", "sp=2,tp=2", "--compile", "--sessions", "2"],
    },
}
"""By number of GPUs, most important first. Steady blocks: 20 where nothing is said."""
PART_S = 240.0
"""At most, of one part."""
SHORTEST_S = 45.0
"""With less left no part is begun."""


def run(name: str, given: list[str], limit_s: float) -> dict[str, object]:
    command = [sys.executable, "-m", "realtime_omni.bench.lingbot_ranks", *given]
    began_s = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks end with their pipes
        out, errors = process.communicate()
        return {"part": name, "error": f"not done after {limit_s:.0f} s", "said": errors[-1500:]}
    spent_s = round(time.monotonic() - began_s, 1)
    try:
        return {"part": name, "spent_s": spent_s, **json.loads(out)}
    except ValueError:
        return {"part": name, "spent_s": spent_s, "error": f"ended with {process.returncode}", "said": errors[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, choices=sorted(PARTS), default=2)
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some parts, in this order")
    parser.add_argument("--scale", default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    parts = PARTS[args.ranks]
    ends_s = time.monotonic() + args.limit_s
    common = ["--scale", args.scale, "--device", args.device, "--dtype", args.dtype, "--timeout-s", "150"]
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first.npy"
        for name in args.only or parts:
            left_s = ends_s - time.monotonic()
            if left_s < SHORTEST_S:
                print(json.dumps({"part": name, "error": "no time left"}), flush=True)
                continue
            held = ["--against", str(first)] if first.exists() else ["--keep", str(first)]
            line = run(name, [*parts[name], *common, *held], min(left_s, PART_S))
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
