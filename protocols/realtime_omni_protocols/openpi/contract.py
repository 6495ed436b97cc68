"""What a policy takes and gives, declared: cameras, state, prompt, actions, and the handshake map of its deployment.

Owns: the values and their consistency.  Must not know: a frame (`observation` judges those), a model, a server.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from .errors import PolicyCode, PolicyError

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Dim = Annotated[int, Meta(ge=1, le=65_536)]
Float32 = npt.NDArray[np.float32]
_FLOAT32 = np.dtype(np.float32)

ROBOARENA_DEFAULTS: dict[str, object] = {
    "image_resolution": [224, 224],
    "needs_wrist_camera": True,
    "n_external_cameras": 1,
    "needs_stereo_camera": False,
    "needs_session_id": False,
    "action_space": "joint_position",
}
"""roboarena's six metadata fields; its client refuses a seventh, and fills in these where one is missing."""


def to_float32(numbers: npt.NDArray[np.floating]) -> Float32:
    """Contiguous and as float32; what is too large for that is infinite."""
    if numbers.dtype == _FLOAT32:
        return np.ascontiguousarray(numbers)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(numbers, dtype=_FLOAT32)


class Camera(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One camera slot of the policy.

    ``keys`` are the names it may have in an observation (nested maps are joined by ``/``); without any, the usual
    spellings. ``required``: an observation without it is refused. ``optional``: it may be absent and is masked then.
    ``empty``: this deployment has no such camera; the slot is always masked, and a picture for it is refused. Without
    ``height`` and ``width`` any size up to 4096 is taken (the policy resizes). ``max_frames`` above 1: stacks of
    pictures.
    """

    name: Name
    keys: tuple[Name, ...] = ()
    rule: Literal["required", "optional", "empty"] = "required"
    height: Dim | None = None
    width: Dim | None = None
    max_frames: Dim = 1

    @property
    def wire_names(self) -> tuple[str, ...]:
        return self.keys or (
            self.name,
            f"observation.images.{self.name}",
            f"observation/{self.name}",
            f"images/{self.name}",
            f"video/{self.name}",
        )


class StateField(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vector of the state; the fields follow each other in the order of the contract. ``min_dim`` allows a shorter
    vector, which is filled with zeros (a generic checkpoint whose robot the deployment does not know)."""

    name: Name = "state"
    keys: tuple[Name, ...] = ()
    dim: Dim
    min_dim: Dim | None = None

    @property
    def wire_names(self) -> tuple[str, ...]:
        name = self.name
        return self.keys or (name, f"observation/{name}", f"observation.{name}", f"state/{name}")


class ActionField(Struct, frozen=True, forbid_unknown_fields=True):
    """A named range of action dimensions (GR00T); they follow each other."""

    name: Name
    dim: Dim


class ActionContract(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chunk is float32 ``[horizon, dim]``, finite. ``fields`` makes the bare reply a dict of ``[1, horizon,
    field.dim]``.

    ``names`` (one per dimension), ``units`` and ``control_hz`` tell a client how to execute a chunk; nothing here uses
    them.
    """

    horizon: Dim
    dim: Dim
    fields: tuple[ActionField, ...] = ()
    names: tuple[str, ...] = ()
    units: str | None = None
    relative: bool = False
    control_hz: Annotated[float, Meta(gt=0, le=10_000)] | None = None

    def __post_init__(self) -> None:
        if self.fields and sum(field.dim for field in self.fields) != self.dim:
            raise ValueError("action.fields: their dimensions do not add up to action.dim")
        if self.names and len(self.names) != self.dim:
            raise ValueError("action.names: one name per dimension")


class PolicyContract(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an observation is judged by.

    ``state_dim``: the policy's own state width, at least the fields' sum; the rest is zeros. ``handshake`` is sent as
    it is. ``prompt_keys`` name the instruction; without one in the observation ``default_prompt`` acts, or the
    observation is refused. ``ignored``: keys that clients send and this policy does not use. ``max_steps``: denoise
    steps a request may ask for.
    """

    policy: Name
    cameras: tuple[Camera, ...]
    state: tuple[StateField, ...]
    state_dim: Dim
    action: ActionContract
    handshake: dict[str, Any] = {}
    prompt_keys: tuple[Name, ...] = ("prompt", "task")
    default_prompt: str | None = None
    ignored: tuple[Name, ...] = ()
    max_steps: Dim | None = None

    def __post_init__(self) -> None:
        if sum(field.dim for field in self.state) > self.state_dim:
            raise ValueError("state: its fields are wider than state_dim")
        wire = [name for slot in self.slots for name in slot.wire_names]
        twice = [name for name, count in Counter([*wire, *self.prompt_keys, *self.ignored]).items() if count > 1]
        if twice:
            raise ValueError(f"the key {twice[0]!r} is declared twice")
        if len({slot.name for slot in self.slots}) != len(self.slots):
            raise ValueError("cameras and state fields have names of their own")

    @property
    def slots(self) -> tuple[Camera | StateField, ...]:
        return (*self.cameras, *self.state)

    def roboarena_metadata(self) -> dict[str, object]:
        """Exactly roboarena's six fields, from the handshake where it has them."""
        return {name: self.handshake.get(name, default) for name, default in ROBOARENA_DEFAULTS.items()}

    def check_actions(self, actions: object) -> Float32:
        """The policy's output as float32 ``[horizon, dim]``.

        Raises:
            PolicyError: ``bad_action``; such a chunk must not reach a robot.
        """
        shape = (self.action.horizon, self.action.dim)
        if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f" or actions.shape != shape:
            raise PolicyError(PolicyCode.BAD_ACTION, f"the policy did not return a float array {list(shape)}")
        checked = to_float32(actions)
        if not np.isfinite(checked).all():
            raise PolicyError(PolicyCode.BAD_ACTION, "the policy returned an action that is not finite")
        return checked
