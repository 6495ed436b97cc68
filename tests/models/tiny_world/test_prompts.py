"""Which place a prompt means."""

from __future__ import annotations

import pytest

from realtime_omni.errors import ArgumentError
from realtime_omni.models.tiny_world.places import PLACES, Place
from realtime_omni.models.tiny_world.prompts import nearest_place


@pytest.mark.parametrize("place", PLACES, ids=lambda p: p.name)
def test_every_suggested_prompt_and_name_means_its_own_place(place: Place) -> None:
    for text in (place.title, place.name, place.title.upper(), f"please show me: {place.title}!"):
        assert nearest_place(text)[1] is place
        assert PLACES[nearest_place(text)[0]] is place


@pytest.mark.parametrize(("word", "place"), [(w, p) for p in PLACES for w in p.words], ids=str)
def test_every_word_of_a_place_means_it(word: str, place: Place) -> None:
    assert place in [p for p in PLACES if word in p.words]
    assert word in nearest_place(f"there is {word} here")[1].words


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A torch-lit brick dungeon with heavy wooden doors", "dungeon"),
        ("A snowy valley with log cabins, pines and mountains", "snow"),
        ("Sandstone ruins in the desert under a hot sun", "desert"),
        ("A green garden with hedges, round trees and white walls", "garden"),
        ("A city at night with lit windows and street lamps", "city"),
        ("A dark cave with glowing cracks of lava", "lava"),
        ("a snowwy valey", "snow"),
        ("deserrt", "desert"),
        ("dungeoon", "dungeon"),
        ("a gardn with flowrs", "garden"),
        ("neon strets", "city"),
        ("vulcano", "lava"),
        ("SNOW", "snow"),
        ("Winter-time", "snow"),
        ("desert at night, a hot desert of sand", "desert"),
        ("city, then snow", "city"),
        ("snow, then city", "snow"),
        ("ein Schneetal mit snow", "snow"),
    ],
)
def test_free_text_and_typing_errors_find_the_nearest_place(prompt: str, name: str) -> None:
    assert nearest_place(prompt)[1].name == name


@pytest.mark.parametrize("prompt", ["a spaceship", "xyzzy", "???", "12345", "的", "ham", "cit"])
def test_a_prompt_without_any_known_place_is_refused_naming_the_known_ones(prompt: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        nearest_place(prompt)
    assert (refused.value.code, refused.value.path) == ("prompt_unknown", "prompt")
    assert all(p.title.lower() in refused.value.message for p in PLACES)


def test_a_word_inside_another_word_is_not_that_word() -> None:
    """Sandwich holds sand, nicety holds ice and city; neither is a place."""
    with pytest.raises(ArgumentError):
        nearest_place("a sandwich of great nicety")
