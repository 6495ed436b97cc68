"""Weights on the way from one sitting of a training to the next, as float16.

    python -m recipes.tiny_world.blend first.safetensors second.safetensors --share 0.5 --out model.safetensors

Owns: nothing but the command; both files are of one network. What a blend is worth is measured, not known (`choose`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def blend(first: Path, second: Path, share: float) -> dict[str, torch.Tensor]:
    """The first one's weights moved by `share` towards the second's; computed in float32, rounded once.

    Raises KeyError or RuntimeError where the files are not of one network."""
    start, end = load_file(first), load_file(second)
    if start.keys() != end.keys():
        raise KeyError(f"not in both files: {', '.join(sorted(start.keys() ^ end.keys()))}")
    return {name: torch.lerp(start[name].float(), end[name].float(), share).half() for name in start}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_world.blend")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, required=True, help="0 is the first file, 1 the second")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    save_file(blend(args.first, args.second, args.share), str(args.out))


if __name__ == "__main__":
    main()
