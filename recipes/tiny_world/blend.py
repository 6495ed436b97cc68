"""Weights between those of several moments of a training, as float16.

    python -m recipes.tiny_world.blend one.safetensors two.safetensors ... --out model.safetensors [--shares 0.5 0.5]

Owns: nothing but the command; all files are of one network. What a blend is worth is measured, not known (`choose`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def blend(files: Sequence[Path], shares: Sequence[float]) -> dict[str, torch.Tensor]:
    """The weighted sum of the files' weights; computed in float32, rounded once.

    Raises KeyError or RuntimeError where the files are not of one network."""
    parts = [load_file(file) for file in files]
    odd = set().union(*parts) - set(parts[0]).intersection(*parts[1:])
    if odd:
        raise KeyError(f"not in all files: {', '.join(sorted(odd))}")
    weighted = list(zip(parts, shares, strict=True))
    return {name: sum(share * part[name].float() for part, share in weighted).half() for name in parts[0]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_world.blend")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--shares", type=float, nargs="+", help="of each file; default: their mean")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    shares = args.shares or [1 / len(args.files)] * len(args.files)
    if len(shares) != len(args.files):
        parser.error(f"{len(shares)} shares for {len(args.files)} files")
    save_file(blend(args.files, shares), str(args.out))


if __name__ == "__main__":
    main()
