"""``python -m realtime_omni.models.pi0.convert CHECKPOINT TARGET --horizon N``: openpi's JAX checkpoint to one that loads here.

Needs the extra ``openpi-jax`` (orbax reads ``params/``), and only for this one step. The target has the layout of
openpi's PyTorch port: ``model.safetensors`` under this network's names, ``config.json``, the checkpoint's ``assets``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from realtime_omni.errors import BackendUnavailable, ConfigError, OmniError
from realtime_omni.models.pi0.jax_params import convert

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_params(folder: Path) -> dict[str, NDArray[Any]]:
    """``params/`` of an openpi checkpoint: names joined with ``/``, float32 arrays on the host.

    Raises ConfigError when there is none, BackendUnavailable without orbax."""
    try:
        orbax = importlib.import_module("orbax.checkpoint")
    except ImportError:
        raise BackendUnavailable("reading params/ needs orbax: pip install 'realtime-omni[openpi-jax]'") from None
    if not (folder / "params").is_dir():
        raise ConfigError("the checkpoint has no params folder", path="params")
    source, reader = (folder / "params").resolve(), orbax.PyTreeCheckpointer()
    stored = reader.metadata(source).item_metadata.tree
    # As host arrays: the devices that the checkpoint was saved from need not be here.
    restored = reader.restore(source, restore_args=_for_each(stored, orbax.RestoreArgs(restore_type=np.ndarray)))
    flat = flatten(restored.get("params", restored))
    if all(name.endswith("/value") for name in flat):  # saved from a training state
        flat = {name.removesuffix("/value"): value for name, value in flat.items()}
    return flat


def _for_each(tree: Any, leaf: object) -> Any:
    """The same nested maps with ``leaf`` in place of every leaf."""
    return {key: _for_each(value, leaf) for key, value in tree.items()} if isinstance(tree, Mapping) else leaf


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, NDArray[Any]]:
    """Nested maps to one, keys joined with ``/``."""
    flat: dict[str, NDArray[Any]] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = np.asarray(value).astype(np.float32)
    return flat


def write(params: Mapping[str, NDArray[Any]], source: Path, target: Path, horizon: int, dtype: torch.dtype) -> None:
    """The converted checkpoint; ``target`` must not exist. Arrays of ``params`` as :func:`read_params` gives them."""
    weights = {name: torch.from_numpy(value).to(dtype) for name, value in convert(params).items()}
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors")
    config = {"action_dim": weights["action_out.bias"].shape[0], "action_horizon": horizon}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (source / "assets").is_dir():
        shutil.copytree(source / "assets", target / "assets")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="realtime_omni.models.pi0.convert", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="the folder that holds params and assets")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--horizon", type=int, required=True, help="actions per chunk; openpi keeps it in its code")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    given = parser.parse_args(arguments)
    try:
        if given.target.exists():
            raise ConfigError("the target exists already", path="target")
        write(read_params(given.checkpoint), given.checkpoint, given.target, given.horizon, DTYPES[given.dtype])
    except OmniError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
