"""Recording work as CUDA graphs; the one place where a model knows whether there are any, and in which sizes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from realtime_omni.errors import ConfigError

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
"""Rows of a graph."""
WARM_UPS = 3
"""Runs before a capture, in which libraries choose kernels and compilers compile."""


def fitting(rows: int) -> int:
    """The smallest size that is large enough; above the largest, the number itself."""
    return next((size for size in SIZES if size >= rows), rows)


def sizes_up_to(most: int) -> list[int]:
    """What batches of up to ``most`` rows need."""
    return sorted({*(size for size in SIZES if size < fitting(most)), fitting(most)})


def has_kernels(device: str) -> bool:
    """Whether graphs may read keys where they lie there: on a GPU that takes Triton; on the CPU nothing is captured."""
    return not device.startswith("cuda") or find_spec("triton") is not None


def check_kernels(device: str, path: str) -> None:
    """Raises ConfigError for the recipe's field ``path``, which asks for graphs that this device has no kernels for."""
    if not has_kernels(device):
        raise ConfigError("graphs need Triton, which torch brings for CUDA on Linux", path=path)


class Capture:
    """Records work as graphs that share one pool of memory; on the CPU work stays what it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @torch.no_grad()
    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """A replay of ``work``, which reads and writes buffers that stay where they are, and waits for nothing."""
        if self._pool is None:
            return work
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        return graph.replay
