"""The recipe's ``deploy`` section: which robot a policy serves, as the contract that its observations are judged by.

Owns the section's fields, and that they fit the policy. Must not know: connections, a model beyond what it declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from realtime_omni.errors import ConfigError
from realtime_omni.server.backend import PolicyFacts
from realtime_omni_protocols.openpi import ActionContract, ActionField, Camera, PolicyContract, StateField


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section ``deploy``. What is left out follows from the policy.

    ``cameras``: a slot for every camera of the policy; those left out are required. ``state``: the vectors that follow each
    other in the policy's state. ``handshake``: sent as it is; without one, a description of the contract.
    """

    cameras: tuple[Camera, ...] = ()
    state: tuple[StateField, ...] = ()
    control_hz: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    action_names: tuple[str, ...] = ()
    action_fields: tuple[ActionField, ...] = ()
    units: str | None = None
    prompt_keys: tuple[str, ...] = ("prompt", "task")
    default_prompt: str | None = None
    ignored: tuple[str, ...] = ()
    handshake: dict[str, Any] = {}


def read_contract(deploy: Mapping[str, object], name: str, policy: PolicyFacts) -> PolicyContract:
    """The contract of a policy in this deployment. Raises ConfigError: the field that is wrong or does not fit."""
    try:
        given = msgspec.convert(deploy, Deployment)
        _check_state(given, policy)
        contract = PolicyContract(
            policy=name,
            cameras=_cameras(given, policy),
            state=given.state or (StateField(dim=policy.state_dim),),
            state_dim=policy.state_dim,
            action=ActionContract(
                horizon=policy.horizon,
                dim=policy.action_dim,
                fields=given.action_fields,
                names=given.action_names,
                units=given.units,
                relative=policy.relative,
                control_hz=given.control_hz,
            ),
            prompt_keys=given.prompt_keys,
            default_prompt=given.default_prompt,
            ignored=given.ignored,
            max_steps=policy.max_steps,
        )
    except (msgspec.ValidationError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"deploy: {error}", path="deploy") from None
    _check_handshake(given.handshake, contract, policy)
    handshake = dict(given.handshake) or _description(contract, policy)
    if len(policy.rtc_modes) > 1:
        handshake["rtc_modes"] = list(policy.rtc_modes)
    if policy.statistics:
        handshake["statistics"] = dict(policy.statistics)
    return msgspec.structs.replace(contract, handshake=handshake)


def _cameras(given: Deployment, policy: PolicyFacts) -> tuple[Camera, ...]:
    """In the policy's order."""
    slots = {camera.name: camera for camera in given.cameras}
    unknown = sorted(set(slots) - set(policy.cameras))
    if unknown:
        raise ConfigError(
            f"deploy.cameras: the policy has no camera {unknown[0]!r}; it has {', '.join(policy.cameras)}",
            path="deploy.cameras",
        )
    stacked = [camera.name for camera in given.cameras if camera.max_frames > policy.max_frames]
    if stacked:
        most = "one picture" if policy.max_frames == 1 else f"{policy.max_frames} pictures at most"
        raise ConfigError(f"deploy.cameras: {stacked[0]}: this policy takes {most}", path="deploy.cameras")
    return tuple(slots.get(name, Camera(name=name)) for name in policy.cameras)


def _check_state(given: Deployment, policy: PolicyFacts) -> None:
    channels = sum(field.dim for field in given.state)
    if channels > policy.state_dim:
        raise ConfigError(
            f"deploy.state: {channels} channels, but the policy reads {policy.state_dim}", path="deploy.state"
        )


def _check_handshake(handshake: Mapping[str, Any], contract: PolicyContract, policy: PolicyFacts) -> None:
    """What a client reads in the handshake is what it gets."""
    known = {
        "action_horizon": policy.horizon,
        "action_dim": policy.action_dim,
        "max_cameras": len(policy.cameras),
        "control_hz": contract.action.control_hz,
    }
    for key, value in known.items():
        if key in handshake and handshake[key] != value:
            raise ConfigError(
                f"deploy.handshake.{key}: {handshake[key]!r}, but the policy's is {value!r}",
                path=f"deploy.handshake.{key}",
            )


def _description(contract: PolicyContract, policy: PolicyFacts) -> dict[str, Any]:
    action = contract.action
    described = {
        "policy": contract.policy,
        "image_resolution": [policy.image_size, policy.image_size],
        "cameras": [camera.name for camera in contract.cameras if camera.rule != "empty"],
        "state_dim": contract.state_dim,
        "action_horizon": action.horizon,
        "action_dim": action.dim,
        "action_names": list(action.names) or None,
        "units": action.units,
        "control_hz": action.control_hz,
    }
    return {key: value for key, value in described.items() if value is not None}
