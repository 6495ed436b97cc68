"""How the small ONNX networks are run: one thread each, never spinning, so that they share two cores with everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_session(path: Path) -> Any:
    """A CPU session over ``.onnx`` or ``.ort``. Raises onnxruntime's errors for a file it cannot read."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
