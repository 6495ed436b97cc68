"""DreamZero in the engine: the contract, both branches against a dense forward, windows, robots and worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.dreamzero.tiny import ROBOT, seen, tiny_dreamzero
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError, OmniError
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.dreamzero.model import DreamZero
from realtime_omni.models.dreamzero.network import Registers
from realtime_omni.models.dreamzero.passes import guided
from realtime_omni.models.dreamzero.sampler import Schedule, step
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Chunk, ControlInput, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.inline import InlineEngine, small_config

ALL = ("actions", "frames", "latents")


def engine_of(
    model: DreamZero, observe: Callable[[int], Observation | None] = seen, *, dtype: str = "float32", **how: Any
) -> InlineEngine:
    engine = InlineEngine(model, small_config(dtype=dtype, **how))
    engine.observe = observe
    return engine


def imagine(chunk: int) -> None:
    """A world's tick."""


def run(engine: InlineEngine, name: str, chunks: int, outputs: tuple[str, ...] = ("actions", "latents")) -> list[Chunk]:
    return [engine.next(name, outputs=outputs) for _ in range(chunks)]


def data(chunk: Chunk, name: str) -> np.ndarray:
    return chunk.artifacts[name].data  # type: ignore[no-any-return]


def test_the_contract_is_kept() -> None:
    report = check_model(tiny_dreamzero(steps=2), dtype="float32")
    assert report.passed, str(report)


@pytest.mark.slow
def test_the_contract_is_kept_with_wans_autoencoder() -> None:
    report = check_model(tiny_dreamzero(wan=True, steps=2), dtype="float32")
    assert report.passed, str(report)


# ---- history


@pytest.mark.req("AC-27")
@pytest.mark.parametrize("how", [{}, {"guidance": 1.0}, {"final_noise": 0.3}])
@torch.no_grad()
def test_two_windows_of_both_branches_are_those_of_a_dense_forward_with_an_explicit_mask(how: dict[str, float]) -> None:
    """One forward per denoise step over the whole window: clean blocks at timestep 0, the block ahead and its registers, and a
    mask that lets every block see itself and what came before it. No cache, no pages."""
    model = tiny_dreamzero(dtype=torch.float64, **how)
    engine = engine_of(model, dtype="float64")
    engine.create("a", seed=5)
    history: list[Tensor] = []
    for chunk in range(7):
        got = engine.next("a", outputs=("actions", "latents"))
        state = engine.state_of("a")
        if chunk % 4 == 0:
            history = []
        history.append(context_of(model, state, chunk))
        video, actions = dense_chunk(model, state, history, chunk, seed=5)
        assert np.abs(data(got, "latents") - video.numpy()).max() <= 1e-5, f"chunk {chunk}"
        assert np.abs(data(got, "actions") - actions).max() <= 1e-5, f"chunk {chunk}"


def context_of(model: DreamZero, state: Any, chunk: int) -> Tensor:
    """The latents of what was seen, encoded again: one frame that opens a window, then blocks."""
    vae = model._vae
    whole = [ROBOT.canvas(seen(i).images, 32, 64).float() / 127.5 - 1 for i in range(chunk + 1)]
    if chunk % 4 == 0:
        return vae.encode(whole[-1], vae_fresh())[0]
    stream = vae.encode(whole[0], vae_fresh())[1]
    latents = torch.zeros(0)
    for number in range(1, chunk + 1):
        if number % 4 == 0:
            continue
        shown = torch.cat(whole[max(0, number - 3) : number + 1])
        shown = torch.cat((shown[:1].expand(4 - len(shown), -1, -1, -1), shown)).repeat_interleave(2, dim=0)
        latents, stream = vae.encode(shown, stream)
    return latents[-2:]


def vae_fresh() -> Any:
    from realtime_omni.models.common.wan.vae import CodecState

    return CodecState()


def dense_chunk(
    model: DreamZero, state: Any, history: list[Tensor], chunk: int, seed: int
) -> tuple[Tensor, np.ndarray]:
    settings, network = model.settings, model.network
    past, tokens = torch.cat(history), 8
    starts = np.cumsum([0, *(len(block) for block in history)])
    ahead = int(starts[-1])
    blocks = [*history, torch.zeros(2, *past.shape[1:])]
    sizes = [len(block) * tokens for block in blocks]
    sizes[-1] += settings.actions + settings.states
    mask = torch.block_diag(*(torch.ones(size, size) for size in sizes)).bool()
    mask |= torch.ones_like(mask).tril() & ~mask  # everything before a block
    video, acted = block_noise(seed, chunk, 0, model.latent_shape), block_noise(seed, chunk, 1, (settings.actions, 6))
    robot = torch.zeros(1, 1, 10)
    robot[0, 0, :4] = torch.from_numpy(ROBOT.state.normalised(seen(chunk).state))
    ends = Schedule.of(settings.steps, settings.shift, final_noise=settings.final_noise)
    schedule, memories = Schedule.of(settings.steps, settings.shift), [None, None]
    for index in range(settings.steps):
        flows = []
        for branch in model.branches:
            given = state.conditioning.branches[branch]
            text, image = ([(k[None], v[None]) for k, v in given[part]] for part in ("text", "image"))
            flows.append(
                dense_pass(network, state.window.condition, past, video, ahead, ends.timestep(index), text, image,
                           Registers(acted[None], robot, torch.tensor([schedule.timestep(index)]),
                                     torch.tensor([(ahead - 1) // 2])), mask, sizes)
            )  # fmt: skip
        flow, flow_acted = guided(*(torch.cat(each) for each in zip(*flows, strict=True)), 1, settings.guidance)
        video, memories[0] = step(ends, index, video, flow[0], memories[0])
        acted, memories[1] = step(schedule, index, acted, flow_acted[0], memories[1])
    return video, ROBOT.act(acted.numpy(), seen(chunk).state)


def dense_pass(
    network: Any,
    condition: Tensor,
    past: Tensor,
    video: Tensor,
    ahead: int,
    t: int,
    text: Any,
    image: Any,
    registers: Registers,
    mask: Tensor,
    sizes: list[int],
) -> tuple[Tensor, Tensor]:
    """The pass ahead, whose keys and values of the past are made in the same forward, layer by layer."""
    own: list[tuple[Tensor, Tensor, Tensor]] = []
    split = len(past) * 8

    def remember(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own.append((k, v, q))
        return attend_masked(q, k, v, mask[:split, :split])

    frames = torch.arange(len(past))[None]
    clean = torch.cat((past, condition[: len(past)]), dim=1)[None]
    network.joint(clean, torch.zeros(1), frames, text, image, remember)

    def look_back(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, _ = own[layer]
        return attend_masked(q, torch.cat((keys, k), 1), torch.cat((values, v), 1), mask[split:])

    latents = torch.cat((video, condition[ahead : ahead + 2]), dim=1)[None]
    flow, acted = network.joint(
        latents, torch.tensor([float(t)]), ahead + torch.arange(2)[None], text, image, look_back, registers
    )
    return flow, acted


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k.double()) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v.double()).to(q.dtype)


def test_guidance_moves_pictures_away_from_the_unconditional_and_leaves_actions_alone() -> None:
    flow, acted = torch.tensor([[2.0], [3.0], [1.0], [5.0]]), torch.tensor([[1.0], [2.0], [8.0], [9.0]])
    video, actions = guided(flow, acted, 2, 5.0)
    assert video.tolist() == [[6.0], [-5.0]]
    assert actions.tolist() == [[1.0], [2.0]]
    alone, same = guided(flow[:2], acted[:2], 2, 5.0)
    assert alone is not video
    assert (alone.tolist(), same.tolist()) == ([[2.0], [3.0]], [[1.0], [2.0]])


def test_a_window_is_one_frame_and_three_blocks_and_its_pages_come_back() -> None:
    engine = engine_of(tiny_dreamzero())
    engine.create("a", seed=1)
    pages = []
    for _ in range(6):
        engine.next("a")
        pages.append(engine.runner.pages_of("a"))
    assert pages == [2, 6, 10, 0, 2, 6]  # two branches of a page a frame; the fourth block fills the window
    engine.reset("a")
    assert engine.runner.pages()[0] == 0
    engine.next("a")
    engine.close("a")
    assert engine.runner.pages()[0] == 0
    assert engine.runner.memory().states == 0


def test_capacity_counts_both_branches() -> None:
    both, one = tiny_dreamzero().spec.kv, tiny_dreamzero(guidance=1.0).spec.kv
    assert [branch.name for branch in both.branches] == ["conditional", "unconditional"]
    assert len(one.branches) == 1
    assert both.managed_pages(3) - 2 == 2 * (one.managed_pages(3) - 2) == 2 * (3 * 7 + 2)
    assert both.scratch_pages == 2 * one.scratch_pages
    assert both.model_owned_bytes_per_session > one.model_owned_bytes_per_session


def test_what_a_session_holds_is_within_what_is_declared_and_branches_share_nothing_by_accident() -> None:
    engine = engine_of(tiny_dreamzero())
    engine.create("a", seed=1)
    run(engine, "a", 5, ALL)
    held = engine.state_of("a").conditioning.branches
    assert set(held) == {"conditional", "unconditional"}
    assert not torch.equal(held["conditional"]["text"][0][0], held["unconditional"]["text"][0][0])
    assert 0 < engine.runner.state_bytes("a") <= 2 * tiny_dreamzero().spec.kv.model_owned_bytes_per_session


def test_the_unconditional_text_is_one_storage_for_all_sessions() -> None:
    engine = engine_of(tiny_dreamzero())
    for name in "ab":
        engine.create(name, seed=1)
    engine.next_all("ab")
    texts = [engine.state_of(name).conditioning.branches["unconditional"]["text"] for name in "ab"]
    assert all(k is other and v is same for (k, v), (other, same) in zip(*texts, strict=True))


# ---- robots


def test_sessions_out_of_step_share_a_batch_and_are_what_they_are_alone() -> None:
    """One opens its window while others are in the middle of theirs: clean passes of different lengths in one tick."""
    together, alone = engine_of(tiny_dreamzero()), engine_of(tiny_dreamzero())
    for engine in (together, alone):
        for number, name in enumerate("abc"):
            engine.create(name, seed=number)
            run(engine, name, number)
    for _ in range(5):
        for name, got in zip("abc", together.next_all("abc", outputs=ALL), strict=True):
            assert isinstance(got, Chunk), got
            want = alone.next(name, outputs=ALL)
            assert got.timings.batch_size == 3
            for artifact in ("actions", "latents"):
                assert np.abs(data(got, artifact) - data(want, artifact)).max() <= 1e-5


def test_a_stack_of_pictures_is_the_same_as_the_pictures_one_by_one() -> None:
    """Four pictures at once are the last four; a robot that sends one a call is seen in its latest four."""
    stacked, single = engine_of(tiny_dreamzero()), engine_of(tiny_dreamzero())
    for engine in (stacked, single):
        engine.create("a", seed=1)
        engine.next("a")
    four = [seen(i) for i in range(1, 5)]
    images = {name: np.stack([each.images[name] for each in four]) for name in four[0].images}
    stacked.observe = lambda _: Observation(images, four[-1].state, "push")
    last = stacked.next("a", outputs=("actions",))
    for i in range(1, 5):
        single.observe = lambda _, i=i: seen(i)  # type: ignore[misc]
        single.next("a", outputs=("actions",))
    assert not np.allclose(data(last, "actions"), 0)
    assert torch.equal(stacked.state_of("a").shown, single.state_of("a").shown)


def test_steps_seed_and_noise_can_be_asked_for_one_observation_at_a_time() -> None:
    engine = engine_of(tiny_dreamzero())
    for name in "abcd":
        engine.create(name, seed=ord(name))
    asked = {
        "a": seen(0, seed=7),
        "b": seen(0, seed=7),
        "c": seen(0, steps=1, seed=7),
        "d": seen(0, noise=np.zeros((5, 6), np.float32)),
    }
    tickets = {n: engine.send(c.Next(ticket=0, session_id=SessionId(n), observation=o)) for n, o in asked.items()}
    engine.rest()
    got = {name: data(engine.result(ticket), "actions") for name, ticket in tickets.items()}
    assert np.abs(got["a"] - got["b"]).max() <= 1e-5
    assert np.abs(got["a"] - got["c"]).max() > 1e-4
    assert np.abs(got["a"] - got["d"]).max() > 1e-4


@pytest.mark.parametrize(
    ("observation", "path"),
    [
        (seen(0, noise=np.zeros((4, 6), np.float32)), "noise"),
        (seen(0, samples=2), "samples"),
        (seen(0, pictures=9), "images.wrist"),
        (seen(0, prompt="a" * 250), "prompt"),
        (Observation(seen(0).images, np.zeros(3, np.float32), "push"), "state"),
        (Observation({"top": np.zeros((9, 9, 3), np.uint8)}, np.zeros(4, np.float32), "push"), "images.top"),
        (Observation({}, np.zeros(4, np.float32), "push"), "images"),
        (Observation({**seen(0).images, "left": seen(1, pictures=2).images["left"]}, seen(0).state, "push"), "images"),
    ],
    ids=["noise", "samples", "too many pictures", "long prompt", "state", "camera", "no camera", "uneven stacks"],
)
def test_an_observation_that_cannot_be_is_refused_before_anything_runs(observation: Observation, path: str) -> None:
    engine = engine_of(tiny_dreamzero(), lambda _: observation)
    engine.create("a", seed=1)
    with pytest.raises(ArgumentError) as caught:
        engine.next("a")
    assert caught.value.path == path
    engine.observe = seen
    engine.next("a")


# ---- worlds


def test_a_world_imagines_without_observations_across_windows() -> None:
    engine = engine_of(tiny_dreamzero(), imagine)
    random = np.random.default_rng(0)
    engine.create("a", seed=1, prompt="push", image=random.integers(0, 255, (40, 70, 3), dtype=np.uint8))
    engine.create("b", seed=1, prompt="push")
    chunks = run(engine, "a", 6, ALL)
    assert [(chunk.first_frame, chunk.frames) for chunk in chunks] == [(8 * i, 8) for i in range(6)]
    assert all(data(chunk, "frames").shape == (8, 3, 32, 64) for chunk in chunks)
    black = engine.next("b", outputs=ALL)
    assert not np.array_equal(data(black, "latents"), data(chunks[0], "latents"))
    assert not np.array_equal(data(chunks[3], "latents"), data(chunks[4], "latents"))


def test_what_is_imagined_becomes_history() -> None:
    model = tiny_dreamzero()
    engine = engine_of(model, imagine)
    engine.create("a", seed=1)
    imagined = data(engine.next("a", outputs=("latents",)), "latents")
    scene = model.scenes.of(step_row(engine, "a"))
    assert torch.equal(scene.context, torch.from_numpy(imagined))
    assert (scene.start, scene.ahead) == (1, 3)


def step_row(engine: InlineEngine, name: str) -> Any:
    """The next tick's row, as the model would get it."""
    from realtime_omni.models.base import StepRow
    from realtime_omni.session.values import ChunkIndex, TickRequest

    resident = engine.runner.resident(SessionId(name))
    tick = TickRequest(SessionId(name), "t", ChunkIndex(1), (), None, ())
    return StepRow(tick, resident.state, resident.seed, engine.runner.book.completed_frames(name), ("latents",))


def test_the_robot_is_where_its_last_action_put_it_unless_the_client_says() -> None:
    engine = engine_of(tiny_dreamzero(), imagine)
    for name in "ab":
        engine.create(name, seed=1)
    first = engine.next_all("ab", outputs=("actions",))
    assert isinstance(first[0], Chunk)
    assert np.array_equal(engine.state_of("a").robot, data(first[0], "actions")[-1])
    engine.accept("b", 0, controls=[ControlInput("robot", "robot.state.v1", {"state": [0.5, 0.5, 0.5, 0.5]})])
    told, other = engine.next("b", outputs=("actions",)), engine.next("a", outputs=("actions",))
    assert np.abs(data(told, "actions") - data(other, "actions")).max() > 1e-4
    engine.next("b", outputs=("actions",))  # it holds for one block
    assert not engine.engine.registry.get(SessionId("b")).session.controls


def test_a_prompt_acts_from_the_next_block_on() -> None:
    engine = engine_of(tiny_dreamzero(), imagine)
    for name in "ab":
        engine.create(name, seed=1, prompt="push")
        engine.next(name)
    engine.accept("b", 0, prompt="pull")
    one, other = (engine.next(name, outputs=("latents",)) for name in "ab")
    assert np.abs(data(one, "latents") - data(other, "latents")).max() > 1e-4


def test_a_robot_that_was_imagined_for_a_while_can_be_seen_again() -> None:
    engine = engine_of(tiny_dreamzero(), lambda chunk: None if chunk in (1, 2, 5) else seen(chunk))
    engine.create("a", seed=1)
    assert all(np.isfinite(data(chunk, "latents")).all() for chunk in run(engine, "a", 7, ALL))


def test_pictures_that_nobody_asked_for_leave_no_hole() -> None:
    engine = engine_of(tiny_dreamzero(), imagine)
    engine.create("a", seed=1)
    shapes = [
        data(engine.next("a", outputs=("frames",) if asked else ("latents",)), "frames" if asked else "latents").shape
        for asked in (True, False, True)
    ]
    assert shapes == [(8, 3, 32, 64), (2, 4, 4, 8), (8, 3, 32, 64)]


@pytest.mark.parametrize("state", [[1.0], [1.0, 2.0, 3.0, float("inf")], [1.0, 2.0, 3.0, True], "here"])
def test_a_state_that_is_none_is_refused(state: object) -> None:
    engine = engine_of(tiny_dreamzero(), imagine)
    engine.create("a", seed=1)
    with pytest.raises(OmniError):
        engine.accept("a", 0, controls=[ControlInput("robot", "robot.state.v1", {"state": state})])


def test_a_network_without_a_picture_and_without_a_condition_runs_as_well() -> None:
    """The other published size has neither: only what is in the checkpoint decides."""
    from dataclasses import replace

    from models.dreamzero.tiny import CONFIG, PatchVAE, tiny_network
    from models.lingbot.tiny import HashedText

    base = tiny_dreamzero()
    config = replace(CONFIG, image_width=0, trunk=replace(CONFIG.trunk, in_channels=4))
    model = DreamZero(
        tiny_network(config=config), HashedText(16), PatchVAE(), None, ROBOT, base.settings, fingerprint="0" * 64
    )
    engine = engine_of(model)
    engine.create("a", seed=1)
    assert all(np.isfinite(data(chunk, "actions")).all() for chunk in run(engine, "a", 6, ALL))
