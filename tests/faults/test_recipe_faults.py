"""Recipes, overrides and environment values written to hurt: each is refused in one line, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from realtime_omni.config import load
from realtime_omni.errors import ConfigError
from realtime_omni.recipe import parse_recipe, read_recipe


def laughs(item: str, many: str, levels: int = 12) -> str:
    """Every level stands for ten of the level below."""
    lines = [f"  a0: &a0 {item}"]
    for level in range(1, levels):
        below = ", ".join(many.format(i, level - 1) for i in range(10))
        lines.append(f"  a{level}: &a{level} {'{' if ':' in many else '['}{below}{'}' if ':' in many else ']'}")
    return "options:\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize("text", [laughs("x", "*a{1}"), laughs("{x: 1}", "k{0}: *a{1}")], ids=["lists", "mappings"])
def test_aliases_that_stand_for_billions_of_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="more than 10000 values"):
        parse_recipe(text, "r.yaml")


def test_aliases_in_moderation_are_read() -> None:
    recipe = parse_recipe("options:\n  a: &a [1, 2]\n  b: *a\n", "r.yaml")
    assert [item.value for item in recipe.assignments] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("open_", ["[", "{a: ", "- "])
def test_nesting_beyond_the_stack_is_refused(open_: str) -> None:
    with pytest.raises(ConfigError, match="nested deeper than 16 levels"):
        parse_recipe("options:\n  a: " + ("\n    " if open_ == "- " else "") + open_ * 3000, "r.yaml")


def test_overrides_beyond_the_stack_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a YAML value"):
        load("null", {}, ["options=" + "[" * 3000])
    with pytest.raises(ConfigError, match="nested deeper than 16 levels"):
        load("null", {}, ["options." + "a." * 3000 + "b=1"])
    with pytest.raises(ConfigError, match="nested deeper than 16 levels"):
        load("null", {"REALTIME_OMNI__OPTIONS" + "__A" * 3000: "1"})


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="larger than"):
        read_recipe(endless)
