"""``geometry.json``: the dimensions of a checkpoint whose configuration only names a published size.

LeRobot's pi0 configuration says ``gemma_2b``, SmolVLA's names a model on a hub; neither holds numbers. A checkpoint of any
other size brings this file of our own: objects ``vision``, ``language``, ``expert`` with the fields of the dimension classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from realtime_omni.errors import ConfigError

FILE = "geometry.json"

_Geometry = TypeVar("_Geometry")


def read_geometry(folder: Path, kind: type[_Geometry]) -> _Geometry | None:
    """The file as ``kind``, or None when the checkpoint has none. Raises ConfigError for unknown or impossible values."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{FILE}: {error}", path=FILE) from None
