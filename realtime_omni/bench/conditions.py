"""What a number needs beside it: commit, machine, software, workload; and percentiles computed one way everywhere."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_STAT = Path("/proc/stat")


def _processor_time() -> tuple[int, int]:
    """(all, stolen) of all processors since the machine started; proc_stat(5). Zeros where there is no such file."""
    try:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, _STAT.read_text(encoding="utf-8").split()[1:9])
    except (OSError, ValueError):
        return 0, 0
    return user + nice + system + idle + iowait + irq + softirq + steal, steal


_BEGAN = _processor_time()


def stolen_percent() -> float:
    """Of the processors' time since this process began: what a virtual machine's host gave to others. A few per cent are
    stalls of tens of milliseconds, which a 99th percentile shows."""
    everything, stolen = (now - began for now, began in zip(_processor_time(), _BEGAN, strict=True))
    return round(100 * stolen / everything, 2) if everything else 0.0


def commit() -> str:
    """The checkout's commit, marked when files differ from it; the package's version outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = ["git", "-C", str(root)]
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        dirty = subprocess.run(
            [*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True, timeout=10
        )
        return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return f"package {_version('realtime-omni')}"


def hardware() -> dict[str, object]:
    """Processor, cores that this process may use, memory in MB; load and stolen time up to now, so ask when a run is over."""
    name = platform.processor() or platform.machine()
    memory_mb = 0
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
        first = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[0]
        memory_mb = int(first.split()[1]) // 1024
    except (OSError, ValueError, IndexError):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": name,
        "cores": cores,
        "memory_mb": memory_mb,
        "load_1min": round(os.getloadavg()[0], 2),
        "stolen_pct": stolen_percent(),
    }


def software() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "av": _version("av"),
        "uvicorn": _version("uvicorn"),
        "uvloop": _version("uvloop"),
        "websockets": _version("websockets"),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank, ``share`` in 0..1; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * share) - 1))], 3)


def summary(values: Sequence[float], *shares: float) -> dict[str, float | None]:
    return {f"p{share * 100:g}": percentile(values, share) for share in shares}


def histogram_percentile(counts: Mapping[float, float], share: float) -> float | None:
    """Of a cumulative histogram (upper bound -> how many are at or below it), straight within a bucket; None of nothing.

    What lies beyond the last finite bound is given as that bound: at least so much."""
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank = counts[bounds[-1]] * share
    low = below = 0.0
    for bound in bounds:
        if counts[bound] >= rank and counts[bound] > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
