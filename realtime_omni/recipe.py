"""Recipe files: where they are found, and how their text becomes plain values with line numbers.

Owns the reading of YAML (strict: YAML 1.2's plain scalars, no duplicate keys, no number that is not finite) and the one
lookup of bundled recipes. Knows nothing of which fields exist: that is ``config``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from realtime_omni.errors import ConfigError

Scalar: TypeAlias = bool | int | float | str | None
# What a recipe can hold once tags and timestamps are left out.
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"
FieldPath: TypeAlias = tuple[str, ...]

# YAML 1.2 core schema. PyYAML's own resolver is YAML 1.1: it reads `on` as true and `1e999` as text.
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|infinity|nan)", re.IGNORECASE)
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TAGS = frozenset({"null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value"})
MAX_DEPTH = 16
_MAX_VALUES = 10_000
"""Of one text, aliases written out: a few lines of them can stand for billions."""
_MAX_BYTES = 1 << 20
"""Of one recipe; the scanner is slow, and no recipe is longer than a few pages."""


@dataclass(frozen=True)
class Assignment:
    """One value for one field, and where it was written (for messages)."""

    path: FieldPath
    value: Value
    origin: str


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe: its assignments in file order."""

    source: str
    assignments: tuple[Assignment, ...]


def read_scalar(text: str) -> Scalar:
    """The value of an unquoted YAML 1.2 scalar. Raises ValueError for a number that is not finite."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text)
    number = math.nan if _NOT_FINITE.fullmatch(text) else float(text) if _FLOAT.fullmatch(text) else None
    if number is None:
        return text
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite; quote it if text is meant")
    return number


def parse_recipe(text: str, source: str) -> Recipe:
    """Parse a recipe's text. ``source`` is the name shown in messages (a path, usually)."""
    return Recipe(source, tuple(_flatten(_compose(text, source), (), source)))


def read_recipe(path: Path) -> Recipe:
    """Read and parse a recipe file."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"cannot read the recipe {path}: it is larger than {_MAX_BYTES} bytes")
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from error
    return parse_recipe(text, str(path))


def parse_value(text: str, origin: str, path: FieldPath) -> Value:
    """Parse the text of one override, such as ``8`` or ``[a, b]``, by the recipe's own rules."""
    try:
        node = _nodes(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: {'.'.join(path)}: not a YAML value", path=".".join(path)) from error
    return None if node is None else _plain(node, origin, path)


def recipe_folder() -> Path:
    """The folder of the bundled recipes: inside an installed wheel, or the checkout's ``recipes/``."""
    package = Path(__file__).resolve().parent
    wheel = package / "_recipes"
    return wheel if wheel.is_dir() else package.parent / "recipes"


def find_recipe(name: str) -> Path | None:
    """The recipe ``name`` stands for: a path to a YAML file, or a bundled recipe's name. None when there is none."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    return recipe_folder() / f"{name}.yaml" if name in bundled_recipes() else None


def bundled_recipes() -> tuple[str, ...]:
    """The names of the bundled recipes, sorted."""
    return tuple(sorted(path.stem for path in recipe_folder().glob("*.yaml")))


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting while it reads, long before Python's own stack does."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH + 4:  # what is only a little too deep is refused with the name of its field
            problem = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _nodes(text: str) -> yaml.Node | None:
    """The text as nodes, bounded in depth and in what they stand for. Raises YAMLError."""
    node = yaml.compose(text, Loader=_Loader)
    if node is not None and _size(node, {}) > _MAX_VALUES:
        raise yaml.MarkedYAMLError(problem=f"more than {_MAX_VALUES} values", problem_mark=node.start_mark)
    return node


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for. One that holds itself is counted once here and refused by its depth later."""
    if id(node) not in known:
        known[id(node)] = 1
        if isinstance(node, yaml.SequenceNode):
            known[id(node)] += sum(_size(child, known) for child in node.value)
        elif isinstance(node, yaml.MappingNode):
            known[id(node)] += sum(_size(child, known) for _, child in node.value)
    return known[id(node)]


def _compose(text: str, source: str) -> yaml.MappingNode | None:
    try:
        node = _nodes(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML") from error
    if node is None:
        return None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}:{_line(node)}: a recipe is a mapping of fields")
    return node


def _flatten(node: yaml.MappingNode | None, path: FieldPath, source: str) -> Iterator[Assignment]:
    """Every leaf below ``node``. An empty mapping below the top is an assignment of its own."""
    if node is None:
        return
    for name, child in _items(node, source, path):
        here = (*path, name)
        if isinstance(child, yaml.MappingNode) and child.value:
            yield from _flatten(child, here, source)
        else:
            origin = f"{source}:{_line(child)}"
            yield Assignment(here, _plain(child, origin, here), origin)


def _items(node: yaml.MappingNode, source: str, path: FieldPath) -> Iterator[tuple[str, yaml.Node]]:
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{source}:{_line(node)}: nested deeper than {MAX_DEPTH} levels")
    seen: set[str] = set()
    for key, child in node.value:
        where = f"{source}:{_line(key)}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: a field name must be text")
        dotted = ".".join((*path, key.value))
        if key.value in seen:
            raise ConfigError(f"{where}: {dotted}: given twice", path=dotted)
        seen.add(key.value)
        yield key.value, child


def _plain(node: yaml.Node, origin: str, path: FieldPath) -> Value:
    dotted = ".".join(path)
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
        raise ConfigError(f"{origin}: {dotted}: the tag {node.tag} is not allowed", path=dotted)
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:  # quoted or a block: text
            return str(node.value)
        try:
            return read_scalar(node.value)
        except ValueError as error:
            raise ConfigError(f"{origin}: {dotted}: {error}", path=dotted) from None
    if isinstance(node, yaml.SequenceNode):
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{origin}: nested deeper than {MAX_DEPTH} levels")
        return [_plain(child, origin, (*path, str(index))) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    return {name: _plain(child, origin, (*path, name)) for name, child in _items(node, origin, path)}


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
