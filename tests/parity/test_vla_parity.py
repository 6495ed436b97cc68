"""pi0, pi0.5 and SmolVLA against lerobot 0.6.1, stage by stage; ``make_vla_golden.py`` made the files.

Each golden folder is a checkpoint as lerobot saved it (tiny dimensions; its random weights are drawn again by ``rebuilt.py``)
and a trace of one chunk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from parity.rebuilt import KEPT, golden
from realtime_omni.models.common.vla.attention import DensePrefixAttention
from realtime_omni.models.common.vla.flow import integrate
from realtime_omni.models.common.vla.network import PolicyInputs, encode, picture_features, sample
from realtime_omni.models.common.vla.policy import LoadOptions, Policy
from realtime_omni.models.common.weights import match_names
from realtime_omni.models.pi0.loader import load_lerobot as load_pi0
from realtime_omni.models.pi0.loader import names as pi0_names
from realtime_omni.models.pi0.network import Pi0Config, Pi0Network
from realtime_omni.models.smolvla.loader import NAMES as SMOLVLA_NAMES
from realtime_omni.models.smolvla.loader import load_lerobot as load_smolvla
from realtime_omni.models.smolvla.network import SmolVLAConfig, SmolVLANetwork
from realtime_omni.rtc.modes import Mode, Settings, step_rule
from realtime_omni.rtc.previous import Previous
from realtime_omni.rtc.weights import Schedule

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    policy: Policy
    trace: dict[str, Tensor]
    task: str

    @property
    def images(self) -> dict[str, np.ndarray]:
        prefix = "raw.observation.images."
        return {
            key.removeprefix(prefix): value.permute(1, 2, 0).contiguous().numpy()
            for key, value in self.trace.items()
            if key.startswith(prefix)
        }

    def inputs(self) -> PolicyInputs:
        state = self.trace["raw.observation.state"].numpy()
        return self.policy.processing.inputs(self.images, state, self.task)


@pytest.fixture(scope="module", params=["pi0", "pi05", "smolvla"])
def case(request: pytest.FixtureRequest) -> Case:
    torch.set_num_threads(1)
    folder = golden() / request.param
    load = load_smolvla if request.param == "smolvla" else load_pi0
    with safe_open(folder / "trace.safetensors", "pt") as file:
        trace = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        task = file.metadata()["task"]
    return Case(load(folder, LoadOptions()), trace, task)


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_preprocessing_gives_the_references_state_and_tokens(case: Case) -> None:
    inputs = case.inputs()
    state = case.trace["prepared.state"]
    assert difference(inputs.state[:, : state.shape[1]], state) <= 1e-6
    assert not inputs.state[:, state.shape[1] :].any()
    mask = case.trace["prepared.token_mask"]
    assert inputs.tokens[0].tolist() == case.trace["prepared.tokens"][mask].tolist()


def test_every_picture_becomes_the_references_tokens(case: Case) -> None:
    inputs = case.inputs()
    features = case.policy.network.embed_images(inputs.images[0])
    for slot in range(features.shape[0]):  # an absent camera too: its picture is all -1
        assert difference(features[slot : slot + 1], case.trace[f"image.{slot}"]) <= TOLERANCE


def test_prefix_embeddings_equal_the_references_where_it_looks(case: Case) -> None:
    inputs, mask = case.inputs(), case.trace["prefix.mask"]
    prefix = case.policy.network.embed_prefix(picture_features(case.policy.network, inputs), inputs)
    assert prefix.embeddings[prefix.mask].shape == case.trace["prefix.embeddings"][mask].shape
    assert difference(prefix.embeddings[prefix.mask], case.trace["prefix.embeddings"][mask]) <= TOLERANCE


def test_prefix_keys_and_values_equal_the_references(case: Case) -> None:
    network, mask = case.policy.network, case.trace["prefix.mask"]
    inputs = case.inputs()
    kv = network.prefill(network.embed_prefix(picture_features(network, inputs), inputs).pack())
    for layer in range(network.shape.layers):
        theirs_k, theirs_v = case.trace[f"prefix.keys.{layer}"], case.trace[f"prefix.values.{layer}"]
        if isinstance(network, SmolVLANetwork) and not network.config.is_joint(layer):
            theirs_k, theirs_v = network.expert[layer].keys_of(theirs_k, theirs_v)
        assert difference(kv.keys[layer][kv.mask], theirs_k[mask]) <= TOLERANCE
        assert difference(kv.values[layer][kv.mask], theirs_v[mask]) <= TOLERANCE


@pytest.mark.parametrize("pack", [True, False])
def test_every_denoise_step_predicts_the_references_velocity(case: Case, pack: bool) -> None:
    network = case.policy.network
    attention = DensePrefixAttention(encode(network, case.inputs(), pack=pack))
    for step in range(network.shape.steps):
        x, t, v = (case.trace[f"step.{step}.{name}"] for name in "xtv")
        assert difference(network.denoise_step(x, t, attention), v) <= TOLERANCE


@pytest.mark.req("AC-40")
def test_the_flow_loop_equals_the_references_within_1e6(case: Case) -> None:
    """The loop alone: the reference's own velocities, replayed at the points where our loop asks for them."""
    steps = case.policy.network.shape.steps
    asked: list[float] = []

    def replay(x: Tensor, t: Tensor) -> Tensor:
        step = len(asked)
        asked.append(max(difference(x, case.trace[f"step.{step}.x"]), difference(t, case.trace[f"step.{step}.t"])))
        return case.trace[f"step.{step}.v"]

    actions = integrate(replay, case.trace["noise"], steps)
    assert len(asked) == steps
    assert max(asked) <= 1e-6
    channels = case.policy.processing.action_channels
    assert difference(actions[:, :, :channels], case.trace["actions"]) <= 1e-6


@pytest.mark.req("AC-40")
def test_a_chunk_from_a_raw_observation_equals_the_references(case: Case) -> None:
    network, processing = case.policy.network, case.policy.processing
    actions = sample(network, encode(network, case.inputs()), case.trace["noise"])
    assert difference(actions[:, :, : processing.action_channels], case.trace["actions"]) <= TOLERANCE
    robot = processing.robot_actions(actions[0], case.trace["raw.observation.state"].numpy())
    assert difference(torch.from_numpy(robot), case.trace["actions.robot"][0]) <= TOLERANCE


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.EXP])
def test_guided_chunks_equal_the_references(case: Case, schedule: Schedule) -> None:
    """lerobot's guidance takes the Jacobian as 1; its ``execution_horizon`` is our ``soft_end``."""
    network, tail = case.policy.network, case.trace["rtc.tail"]
    previous = Previous.of([tail[0]], network.shape.horizon, network.shape.action_dim)
    rule = step_rule(Settings(Mode.IDENTITY, schedule, limit=5.0, soft_end=5), previous, [2])
    actions = sample(network, encode(network, case.inputs()), case.trace["noise"], rule=rule)
    theirs = case.trace[f"rtc.{schedule}.actions"]
    assert difference(actions[:, :, : theirs.shape[2]], theirs) <= TOLERANCE


@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla"])
def test_published_sizes_have_exactly_the_names_and_shapes_that_lerobot_stores(family: str) -> None:
    """``make_vla_names.py`` wrote them; nothing is allocated. pi0.5's unused head aside, no name is left over or missing."""
    stored: dict[str, tuple[int, ...]] = {}
    for key, layers in json.loads((KEPT / "names.json").read_text())[family].items():
        name, shape = key.split(" ", 1)
        for layer in layers or [0]:
            stored[name.replace("*", str(layer))] = tuple(json.loads(shape))
    with torch.device("meta"):
        network: torch.nn.Module
        if family == "smolvla":
            network, names = SmolVLANetwork(SmolVLAConfig()), SMOLVLA_NAMES
        else:
            network, names = Pi0Network(Pi0Config(adaptive=family == "pi05")), pi0_names(family == "pi05")
    wanted = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    found = match_names(stored, names, wanted, "names.json")
    assert found.keys() == wanted.keys()
    unused = {names.of(name) for name in stored} - found.keys()
    assert all("lm_head" in name or name.endswith("_model.norm.weight") for name in unused)
