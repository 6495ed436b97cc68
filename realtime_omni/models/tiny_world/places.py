"""The places tiny-world was trained on: their names, and the words that mean them.

Owns: the order of the place embedding (a place's index is its row) and the vocabulary. It
must not know how a prompt is matched; that is the adapter's.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """One place: `name` is its id, `title` the prompt that is suggested for it, `words` what a prompt may call it."""

    name: str
    title: str
    words: tuple[str, ...]


PLACES: tuple[Place, ...] = (
    Place(
        "dungeon",
        "Brick dungeon",
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


def place_index(name: str) -> int:
    """The row of a place by its name; ValueError if there is none."""
    for index, place in enumerate(PLACES):
        if place.name == name:
            return index
    raise ValueError(f"unknown place {name!r}")
