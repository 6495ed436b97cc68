"""JSON text to typed message and back: the strict door every control message passes.

Owns: size, depth, duplicate keys, number ranges, surrogates, and the translation of a decoder's complaint to code + path.
Must not know: which messages exist (the caller passes a typed decoder) nor any session state.
Invariant: `decode_text` returns a value of the decoder's type or raises `WireError`, in time linear in the size of the text.

Two passes on purpose: the standard ``json`` reports duplicate keys (msgspec silently keeps the last one), msgspec then
checks types and ranges much faster and more strictly than we could by hand. A short message in which no key can have come
twice is spared the first.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar, get_args

import msgspec

from .errors import CloseCode, WireCode, WireError

MAX_SAFE_INT = 2**53
"""Ids and numbers inside data stay exactly representable in a JavaScript number."""
MAX_DATA_DEPTH = 16
"""Nesting of control data; camera scripts need 3, body poses about 6."""
MAX_DATA_BYTES = 16_384
"""Encoded size of the data of one control."""
MAX_TEXT_DEPTH = 32
"""Nesting of a whole message; keeps every parser far away from the recursion limit."""
MAX_TOKENS = 50_000
"""Strings and brackets (and commas) of one message, more than any message within 64 KiB needs. A 4 MiB message is one
long string."""
MAX_ESCAPES = 100_000
"""Backslashes of one message; a 4 MiB base64 picture whose every slash is escaped has 65,536."""
MAX_NUMBER_CHARS = 400
"""A longer number literal has no meaning here, and converting one is quadratic."""

Format: TypeAlias = Literal["h264", "jpeg", "rgb24", "latent"]
"""How a world's pictures are coded on the wire."""

JsonObject = dict[str, Any]
"""Opaque JSON that only the model's own schema can judge; the one place where a dict crosses the boundary."""

# The closing quote is optional on purpose: a string that never ends must match once, or the search restarts at each of
# its escaped quotes and becomes quadratic.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_AT = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>[^`]*)`")
_OWN = re.compile(r"^bad_message: (?P<text>.*?) \(at \$(?P<rel>.*)\)$", re.DOTALL)  # str() of what `semantic` makes
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_encoder = msgspec.json.Encoder()

T_co = TypeVar("T_co", covariant=True)


class TextDecoder(Protocol[T_co]):
    """The part of ``msgspec.json.Decoder`` that is used here."""

    def decode(self, buf: str, /) -> T_co: ...


def bad(message: str, path: str = "$") -> WireError:
    return WireError(WireCode.BAD_MESSAGE, message, path=path)


class _DuplicateKey:
    """Stands for an object in which ``key`` came twice; found again by `_find_duplicate` to learn its path."""

    def __init__(self, key: str) -> None:
        self.key = key


class _Scan:
    """The standard parser's hooks. A class, so that one call's findings never leak into another call."""

    def __init__(self) -> None:
        self.duplicate = False

    def pairs(self, pairs: list[tuple[str, object]]) -> object:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        self.duplicate = True
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return _DuplicateKey(key)
            seen.add(key)
        raise AssertionError("unreachable")  # fewer distinct keys than pairs means one came twice

    @staticmethod
    def constant(name: str) -> NoReturn:
        raise bad(f"{name} is not a JSON number")

    @staticmethod
    def number(literal: str) -> float:
        if len(literal) > MAX_NUMBER_CHARS:
            raise bad("a number has too many digits")
        return 0.0  # only the shape matters in this pass


def _find_duplicate(value: object, path: str) -> tuple[str, str] | None:
    if isinstance(value, _DuplicateKey):
        return path, value.key
    if isinstance(value, dict):
        children = [(child, child_path(path, key)) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(child, f"{path}[{index}]") for index, child in enumerate(value)]
    else:
        return None
    for child, where in children:
        found = _find_duplicate(child, where)
        if found is not None:
            return found
    return None


def child_path(path: str, key: str) -> str:
    """The path of a member; an odd key is quoted and cut, so that a hostile key cannot fill a log line."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", key):
        return f"{path}.{key}"
    return f"{path}[{json.dumps(key[:64])}]"


def check_depth(text: str, limit: int = MAX_TEXT_DEPTH) -> None:
    """Refuse deep nesting, and what costs far more time than it has bytes, before any parser sees the text."""
    if text.count("\\") > MAX_ESCAPES:
        raise bad("too many escapes")
    if text.count(",") > MAX_TOKENS:
        raise bad("too many values")
    if text.count("{") + text.count("[") <= limit:
        return  # cannot be deeper: spares the scan of a picture
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(text)):
        if count >= MAX_TOKENS:
            raise bad("too many values")
        char = token.group()[0]
        if char == "{" or char == "[":
            depth += 1
            if depth > limit:
                raise bad(f"nested deeper than {limit} levels")
        elif char != '"':
            depth -= 1


def to_text(data: str | bytes) -> str:
    """UTF-8, strictly: no lone surrogates, neither raw nor later as escapes."""
    try:
        if isinstance(data, str):
            data.encode("utf-8")
            return data
        return bytes(data).decode("utf-8")
    except UnicodeError:
        raise bad("the text is not valid UTF-8") from None


def check_size(data: str | bytes, max_bytes: int) -> int:
    """Bytes of the message; a cheap upper bound first, so that a huge string is not encoded to be measured."""
    size = len(data)
    if isinstance(data, str) and size <= max_bytes < 4 * size:
        size = len(data.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise WireError(
            WireCode.MESSAGE_TOO_LARGE,
            f"the message is larger than {max_bytes} bytes",
            path="$",
            close=CloseCode.TOO_LARGE,
        )
    return size


def decode_text(data: str | bytes, decoder: TextDecoder[T_co], max_bytes: int) -> T_co:
    """One strict JSON object as the decoder's type, or `WireError` with code and path."""
    check_size(data, max_bytes)
    text = to_text(data)
    check_depth(text)
    if not _is_plain(text):
        _scan(text)
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as complaint:
        raise _tie(_translate(str(complaint)), text) from None
    except (ValueError, RecursionError):
        # What the lenient parser takes and the strict one does not: lone surrogates in escapes, odd white space.
        reason = "a lone surrogate in a string" if _ESCAPED_SURROGATE.search(text) else "the text is not strict JSON"
        raise bad(reason) from None


def _is_plain(text: str) -> bool:
    """An object for which `_scan` would do nothing, told at a third of its price: too short for a number that is too long, and
    with as many colons as keys. A key that comes twice leaves a colon too many, as does one inside a string."""
    if len(text) > MAX_NUMBER_CHARS:
        return False
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and text.count(":") == _count_keys(value)


def _count_keys(value: JsonObject | list[Any]) -> int:
    members, keys = (value.values(), len(value)) if isinstance(value, dict) else (value, 0)
    for member in members:
        if isinstance(member, dict | list):
            keys += _count_keys(member)
    return keys


def _scan(text: str) -> None:
    """Raises WireError for what no typed decoder sees: a key that comes twice, a number too long to convert."""
    scan = _Scan()
    try:
        loose = json.loads(
            text,
            object_pairs_hook=scan.pairs,
            parse_constant=scan.constant,
            parse_int=scan.number,
            parse_float=scan.number,
        )
    except WireError:
        raise
    except (ValueError, RecursionError):
        raise bad("the text is not JSON") from None
    if not isinstance(loose, dict | _DuplicateKey):
        raise bad("a message is one JSON object")
    if scan.duplicate:
        where, key = _find_duplicate(loose, "$") or ("$", "?")
        raise bad("a key comes twice in one object", child_path(where, key))


class _Tie(msgspec.Struct):
    """What ties an error to the refused message, where the message is well formed enough to tell."""

    id: object = None
    event_id: object = None


_tie_decoder = msgspec.json.Decoder(_Tie)


def _tie(error: WireError, text: str) -> WireError:
    try:
        tie = _tie_decoder.decode(text)
    except (ValueError, RecursionError):
        return error
    if isinstance(tie.id, str) and 1 <= len(tie.id) <= 64:
        error.re = tie.id
    if isinstance(tie.event_id, int) and not isinstance(tie.event_id, bool) and 0 <= tie.event_id <= MAX_SAFE_INT:
        error.event_id = tie.event_id
    return error


def _translate(complaint: str) -> WireError:
    """A msgspec complaint as code and path; the field's name joins the path for unknown and missing fields."""
    match = _AT.match(complaint)
    text = match["text"] if match else complaint
    path = (match["path"] if match else None) or "$"
    field = _FIELD.search(text)
    if field is not None and ("unknown field" in text or "required field" in text):
        path = child_path(path, field["name"])
    own = _OWN.match(text)
    if own is not None:
        text, path = own["text"], path + own["rel"]
    if path == "$.format" and text.startswith("Invalid enum value"):
        return WireError(WireCode.UNSUPPORTED_FORMAT, f"format must be one of {', '.join(get_args(Format))}", path=path)
    if path == "$.protocol" and text.startswith("Invalid"):
        return WireError(WireCode.UNSUPPORTED_VERSION, "this version of the protocol is unknown", path=path)
    return bad(_clean(text), path)


def semantic(where: str, text: str) -> WireError:
    """For a struct's ``__post_init__``: a complaint whose path is relative to the struct (``.prompt``, or empty).

    A decoder wraps it and adds where the struct lies in the message; who builds the struct by hand gets it as it is.
    """
    return bad(text, "$" + where)


def _clean(text: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 200 else printable[:197] + "..."


def check_data(value: JsonObject, where: str) -> None:
    """Bounds of opaque control data: depth, integers a JavaScript number can hold, encoded size."""
    _check_value(value, where, 1)
    if len(_encoder.encode(value)) > MAX_DATA_BYTES:
        raise semantic(where, f"data is larger than {MAX_DATA_BYTES} bytes")


def _check_value(value: object, where: str, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth > MAX_DATA_DEPTH:
            raise semantic(where, f"data is nested deeper than {MAX_DATA_DEPTH} levels")
        if isinstance(value, dict):
            for key, child in value.items():
                _check_value(child, child_path(where, key), depth + 1)
        else:
            for index, child in enumerate(value):
                _check_value(child, f"{where}[{index}]", depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        if not -MAX_SAFE_INT <= value <= MAX_SAFE_INT:
            raise semantic(where, "an integer beyond 2^53 is not exact for every client")
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise semantic(where, "numbers are finite")


def encode_text(message: msgspec.Struct) -> str:
    """The message as JSON text. Optional fields without a value are left out."""
    return _encoder.encode(message).decode("utf-8")
