"""Weights from a safetensors file into a network, or a refusal that lists every name and shape that does not fit.

Owns: the comparison. A model's loader says what a stored name is called in the network (:class:`Names`); nothing is
dropped or left at its initial value in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from realtime_omni.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Stored formats whose numbers are the weights. Integers are quantised weights, and mean nothing without their scales."""
LISTED = 20
"""Names per list in a refusal; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Names:
    """How stored names become names of the network.

    ``rules``: regular expressions and what replaces them, applied in order. ``ignored``: stored names (after the rules)
    that are known to be without use. ``aliases``: (spare, wanted): a stored spare serves when the wanted one is absent.
    """

    rules: Sequence[tuple[str, str]]
    ignored: Sequence[str] = ()
    aliases: Sequence[tuple[str, str]] = ()

    def of(self, stored: str) -> str:
        for pattern, replacement in self.rules:
            stored = re.sub(pattern, replacement, stored)
        return stored

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Stored names and shapes, without reading a tensor."""
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path.name}: cannot be read as safetensors ({type(error).__name__})", path=path.name
        ) from None


def load_weights(
    network: nn.Module, path: Path, names: Names, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Fill the network's parameters and move it to ``dtype`` and ``device``.

    Raises ConfigError that lists missing and unexpected names and different shapes, or names a tensor that is stored twice or
    quantised; the network is then unchanged."""
    wanted = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    found = match_names(shapes_in(path), names, wanted, path.name)
    with safe_open(path, "pt") as file, torch.no_grad():
        for name in found.values():
            refuse_quantised(name, file.get_slice(name).get_dtype(), path.name)
        network.to(dtype=dtype, device=device)
        for name, parameter in network.named_parameters():
            parameter.copy_(file.get_tensor(found[name]))


def refuse_quantised(name: str, stored_dtype: str, file: str) -> None:
    """Raises ConfigError for a tensor in a format of safetensors that is no floating point."""
    if stored_dtype not in FLOATS:
        raise ConfigError(f"{file}: {name} is {stored_dtype}; quantised weights are not read", path=file)


def match_names(stored: Shapes, names: Names, wanted: Shapes, file: str) -> dict[str, str]:
    """The network's name -> the stored one. Raises ConfigError that lists what does not fit, or names what is there twice."""
    found: dict[str, str] = {}
    for name in sorted(stored):
        other = found.setdefault(names.of(name), name)
        if other != name and names.of(name) in wanted:
            raise ConfigError(f"{file}: {other} and {name} are the same tensor of the model", path=file)
    for spare, name in names.aliases:
        if spare in found:
            found.setdefault(name, found[spare])
            del found[spare]
    found = {name: key for name, key in found.items() if name in wanted or not names.is_ignored(name)}
    _refuse_differences(found, stored, wanted, file)
    return found


def _refuse_differences(found: Mapping[str, str], stored: Shapes, wanted: Shapes, file: str) -> None:
    missing = sorted(set(wanted) - set(found))
    unexpected = sorted(found[name] for name in set(found) - set(wanted))
    shapes = [
        f"{found[name]} is {list(stored[found[name]])}, {list(shape)} is needed"
        for name, shape in sorted(wanted.items())
        if name in found and stored[found[name]] != shape
    ]
    problems = [
        f"{title}: {_listed(items)}"
        for title, items in (("missing", missing), ("unexpected", unexpected), ("other shapes", shapes))
        if items
    ]
    if problems:
        raise ConfigError(f"{file} does not hold this model; " + "; ".join(problems), path=file)


def _listed(items: Sequence[str]) -> str:
    more = len(items) - LISTED
    return ", ".join(items[:LISTED]) + (f" and {more} more" if more > 0 else "")
