"""The places tiny-world was trained on: their names, the words that mean them, their prompts.

Owns: the order of the place embedding (a place's index is its row) and the vocabulary. It
must not know how a prompt is matched; that is the adapter's.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """One place: `name` is its id on the wire, `words` what a prompt may call it."""

    name: str
    title: str
    prompt: str
    words: tuple[str, ...]


PLACES: tuple[Place, ...] = (
    Place(
        "dungeon",
        "Brick dungeon",
        "A torch-lit brick dungeon with heavy wooden doors",
        (
            "dungeon",
            "brick",
            "bricks",
            "castle",
            "cellar",
            "crypt",
            "prison",
            "torch",
            "torches",
            "keep",
            "underground",
            "vault",
            "medieval",
            "catacombs",
            "stone corridor",
        ),
    ),
    Place(
        "snow",
        "Snowy valley",
        "A snowy valley with log cabins, pines and mountains",
        (
            "snow",
            "snowy",
            "winter",
            "ice",
            "icy",
            "frost",
            "frozen",
            "cabin",
            "cabins",
            "pine",
            "pines",
            "mountain",
            "mountains",
            "cold",
            "valley",
            "arctic",
            "alpine",
        ),
    ),
    Place(
        "desert",
        "Desert ruins",
        "Sandstone ruins in the desert under a hot sun",
        (
            "desert",
            "sand",
            "sandy",
            "sandstone",
            "ruin",
            "ruins",
            "dune",
            "dunes",
            "egypt",
            "temple",
            "palm",
            "palms",
            "oasis",
            "hot",
            "arid",
            "sahara",
        ),
    ),
    Place(
        "garden",
        "Green garden",
        "A green garden with hedges, round trees and white walls",
        (
            "garden",
            "green",
            "hedge",
            "hedges",
            "park",
            "grass",
            "meadow",
            "tree",
            "trees",
            "flower",
            "flowers",
            "summer",
            "spring",
            "lawn",
            "forest",
            "countryside",
        ),
    ),
    Place(
        "city",
        "Night city",
        "A city at night with lit windows and street lamps",
        (
            "city",
            "night",
            "street",
            "streets",
            "town",
            "urban",
            "building",
            "buildings",
            "windows",
            "neon",
            "lamp",
            "lamps",
            "downtown",
            "skyline",
            "midnight",
            "skyscraper",
        ),
    ),
    Place(
        "lava",
        "Lava cave",
        "A dark cave with glowing cracks of lava",
        (
            "lava",
            "cave",
            "cavern",
            "volcano",
            "volcanic",
            "magma",
            "fire",
            "fiery",
            "hell",
            "molten",
            "glowing",
            "ember",
            "embers",
            "inferno",
            "underworld",
        ),
    ),
)

KEYS: tuple[str, ...] = ("w", "a", "s", "d", "i", "j", "k", "l")
"""The order of the key vector: move forward, left, back, right; look up, left, down, right."""


def place_index(name: str) -> int:
    """The row of a place by its name; ValueError if there is none."""
    for index, place in enumerate(PLACES):
        if place.name == name:
            return index
    raise ValueError(f"unknown place {name!r}")
