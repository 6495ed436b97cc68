"""tiny-policy's data, loss, checkpoint and evaluation, at a toy size."""

from __future__ import annotations

import csv
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from realtime_omni.models.common.vla.attention import DensePrefixAttention  # noqa: E402
from realtime_omni.models.common.vla.network import encode as reference_encode  # noqa: E402
from realtime_omni.models.common.vla.policy import LoadOptions, Policy  # noqa: E402
from realtime_omni.models.pi0.loader import load_lerobot  # noqa: E402
from realtime_omni.models.pi0.network import Pi0Network  # noqa: E402
from realtime_omni.rtc.modes import Mode  # noqa: E402
from recipes.tiny_policy import checkpoint, evaluate, expert, train  # noqa: E402
from recipes.tiny_policy.data import LONGEST_GIVEN, Collector, Labelled, Observed, Pool  # noqa: E402
from recipes.tiny_policy.pictures import CAMERAS, pictures  # noqa: E402
from recipes.tiny_policy.policy import FlowLoss, Request, Statistics, encode, inputs_of  # noqa: E402
from recipes.tiny_policy.shape import (  # noqa: E402
    EXECUTED,
    HORIZON,
    SHIPPED,
    TRY,
    network_config,
    tokens_of,
)
from recipes.tiny_policy.table import (  # noqa: E402
    ACTION_DIM,
    INSTRUCTIONS,
    TASKS,
    Scene,
    new_scenes,
    state_of,
    step,
)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scenes(count: int) -> Scene:
    return new_scenes(count, generator(), torch.arange(count) % len(TASKS))


def network(seed: int = 1) -> Pi0Network:
    torch.manual_seed(seed)
    net = Pi0Network(network_config(TRY))
    train.initialise(net)
    torch.nn.init.normal_(net.action_out.weight, std=0.1)
    return net.eval()


def statistics() -> Statistics:
    return Statistics(
        torch.tensor([0.02, -0.01, 0.0, 0.01, 0.6]),
        torch.tensor([0.2, 0.25, 0.14, 0.15, 0.4]),
        torch.tensor([0.01, 0.0, 0.4]),
        torch.tensor([0.15, 0.14, 0.49]),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_policy")
    checkpoint.write(path, network().state_dict(), statistics(), TRY)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Policy:
    return load_lerobot(folder, LoadOptions())


def test_the_shipped_size_fits_into_ten_megabytes():
    values = sum(p.numel() for p in Pi0Network(network_config(SHIPPED)).parameters())
    assert 2 * values < 9_900_000  # float16


def test_the_ordinary_loader_reads_the_folder_and_its_statistics(loaded: Policy):
    stored = network().state_dict()
    for name, value in loaded.network.state_dict().items():
        assert torch.equal(value, stored[name].half().float()), name
    assert loaded.processing.cameras == CAMERAS
    assert loaded.processing.state.first.tolist() == pytest.approx(statistics().state_mean.tolist())
    assert loaded.statistics["action"].startswith("mean_std")


def test_a_robot_over_the_wire_and_a_scene_in_the_simulator_give_equal_inputs(loaded: Policy):
    scene = scenes(len(TASKS))
    frames = pictures(scene, TRY.vision.image_size)
    ours = inputs_of(scene, frames, statistics())
    for row, instruction in enumerate(INSTRUCTIONS):
        views = {name: frames[row, n].permute(1, 2, 0).numpy() for n, name in enumerate(CAMERAS)}
        theirs = loaded.processing.inputs(views, state_of(scene)[row].numpy(), instruction)
        assert torch.allclose(theirs.images[0], ours.images[row], atol=1e-6)
        assert torch.allclose(theirs.state[0], ours.state[row], atol=1e-6)
        assert theirs.tokens[0].tolist() == ours.tokens[row][ours.token_mask[row]].tolist()


def test_unknown_words_are_one_token(loaded: Policy):
    words = loaded.processing.tokenizer.encode("push the sofa\n")
    assert list(words) == tokens_of("push the sofa")
    assert words[3] == 1


def test_the_prefix_of_training_is_the_prefix_of_serving():
    net, scene = network(), scenes(9)
    inputs = inputs_of(scene, pictures(scene, TRY.vision.image_size), statistics())
    x, t = torch.randn(9, HORIZON, ACTION_DIM, generator=generator()), torch.full((9,), 0.5)
    with torch.no_grad():
        ours, theirs = (
            net.denoise_step(x, t, DensePrefixAttention(kv))
            for kv in (encode(net, inputs), reference_encode(net, inputs))
        )
    assert torch.allclose(ours, theirs, atol=1e-5)


class Constant(Pi0Network):
    """Its velocity is 0 everywhere, so the loss is that of predicting nothing."""

    def denoise_step(self, x, t, attention):
        return torch.zeros_like(x)


def test_the_loss_of_a_silent_network_is_the_variance_of_noise_and_actions():
    scene = scenes(90)
    inputs = inputs_of(scene, pictures(scene, TRY.vision.image_size), statistics())
    torch.manual_seed(1)
    actions = torch.randn(90, HORIZON, ACTION_DIM)
    loss = FlowLoss(Constant(network_config(TRY)), draws=4)(inputs, actions, torch.arange(90) % 9)
    assert loss.item() == pytest.approx(2.0, abs=0.1)  # noise and actions of variance 1 each


def test_the_loss_compiles_into_one_graph_and_stays_what_it_was():
    scene = scenes(6)
    inputs = inputs_of(scene, pictures(scene, TRY.vision.image_size), statistics())
    loss_of, actions = FlowLoss(network(), draws=2), torch.randn(6, HORIZON, ACTION_DIM, generator=generator())
    told = []
    for loss in (loss_of, torch.compile(loss_of, backend="eager", fullgraph=True)):
        torch.manual_seed(3)
        told.append(loss(inputs, actions, torch.arange(6)).item())
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_a_collector_labels_every_scene_with_the_experts_own_chunk():
    collector = Collector(64, generator())
    for _ in range(3):
        seen = collector.gather()
    assert torch.equal(seen.free, expert.chunk(seen.scene, HORIZON))


def test_a_continued_chunk_is_the_experts_answer_to_what_was_already_decided():
    collector = Collector(64, generator())
    for _ in range(3):
        seen = collector.gather()
    for given in seen.given.unique().tolist():
        rows = seen.given == given
        scene, continued = seen.scene[rows], seen.continued[rows]
        for tick in range(given):
            scene = step(scene, continued[:, tick])
        assert torch.equal(continued[:, given:], expert.chunk(scene, HORIZON)[:, : HORIZON - given])
        assert not torch.equal(continued[:, :given], seen.free[rows, :given])  # hands were disturbed


def labelled(count: int, led: bool) -> Labelled:
    return replace(Collector(count, generator()).gather(), led=torch.full((2 * count,), led))


def test_free_and_continued_chunks_are_mixed_by_share():
    seen = labelled(200, led=False)
    actions, given = seen.chosen(0.25, 1.0)
    continues = given > 0
    assert 60 < int(continues.sum()) < 140
    assert torch.equal(actions[continues], seen.continued[continues])
    assert torch.equal(actions[~continues], seen.free[~continues])


def test_only_what_the_policy_itself_decided_is_ever_to_be_made_up():
    for led in (False, True):
        seen = labelled(200, led=led)
        actions, given = seen.chosen(1.0, 0.75)
        untold = given == 0
        assert 60 < int(untold.sum()) < 140
        assert torch.equal(actions[untold], (seen.continued if led else seen.free)[untold])


def test_a_policy_leads_its_share_of_new_episodes():
    collector = Collector(100, generator(), tasks=[1, 2])
    asked = []

    def stand_still(observed: Observed) -> torch.Tensor:
        asked.append(len(observed.given))
        return torch.zeros(len(observed.given), HORIZON, ACTION_DIM)

    for _ in range(20):
        seen = collector.gather(stand_still, share=0.5)
    assert set(collector.scene.task.tolist()) == {1, 2}
    assert asked == sorted(asked)  # those who stand still go on to the end
    assert 20 < asked[-1] < 70
    assert int(seen.led.sum()) == 2 * asked[-1]


def test_led_robots_execute_the_old_chunk_until_the_new_one_arrives():
    collector = Collector(200, generator(), tasks=[1])
    chunks = 0

    def tells_its_number(observed: Observed) -> torch.Tensor:
        nonlocal chunks
        chunks += 1
        plan = torch.zeros(len(observed.given), HORIZON, ACTION_DIM)
        plan[..., 0] = 0.001 * chunks
        return plan

    delays = set()
    while chunks < 12:
        led, begins, delay = collector._led.clone(), collector._begins.clone(), collector._delay.clone()
        seen = collector.gather(tells_its_number, share=0.5)
        rows = led & ~begins
        if chunks and bool(rows.any()):
            given = int(seen.given[0])
            done = (seen.continued[: len(led)][rows, :given, 0] * 1000).round().long()
            late = torch.arange(given) < delay[rows, None]
            assert torch.equal(done, torch.where(late, chunks - 1, chunks))
            delays |= set(delay[rows].tolist())
    assert {0, 1, LONGEST_GIVEN} <= delays


def test_a_pool_keeps_the_latest():
    pool = Pool(96, generator())
    with pytest.raises(ValueError, match="empty"):
        pool.batch(1)
    collector = Collector(32, generator())
    for _ in range(3):
        pool.add(latest := collector.gather())
    assert pool.count == 96
    drawn = {tuple(row) for row in pool.batch(1200).scene.tool.tolist()}
    assert {tuple(row) for row in latest.scene.tool.tolist()} <= drawn


def test_flow_matching_learns_a_batch_by_heart():
    net, scene = network(), scenes(9)
    inputs = inputs_of(scene, pictures(scene, TRY.vision.image_size), statistics())
    actions = statistics().model_actions(expert.chunk(scene, HORIZON))
    loss_of = FlowLoss(net, draws=4)
    optimizers = train.make_optimizers(net, muon_lr=0.02, adam_lr=3e-3)
    losses = []
    for _ in range(40):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(inputs, actions, torch.arange(9) % 2 * 4)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_training_goes_on_where_it_was(tmp_path: Path):
    places = ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    size = ["--tiny", "--no-compile", "--batch=8", "--robots=32", "--pool=2000", "--first-rounds=2", "--gather-every=2"]
    clock = ["--seconds=1000", "--call-steps=4", "--agree-every=1", "--note-every=1", "--dagger-from=0"]
    train.main([*places, *size, *clock])
    kept = torch.load(tmp_path / "state" / "checkpoint.pt", weights_only=True)
    train.main([*places, *size, *clock])
    after = torch.load(tmp_path / "state" / "checkpoint.pt", weights_only=True)
    assert (kept["steps"], after["steps"]) == (4, 8)
    assert after["spent"] > kept["spent"]
    assert after["rows"][: len(kept["rows"])] == kept["rows"]
    assert torch.equal(after["statistics"][0], kept["statistics"][0])
    assert load_lerobot(tmp_path / "out" / "model", LoadOptions()).family == "pi0"


def test_a_run_watches_held_out_episodes_and_ends_with_every_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluate, "EPISODE_TICKS", 2 * HORIZON)
    places = [f"--{name}={tmp_path / name}" for name in ("state", "out", "results")]
    size = ["--tiny", "--no-compile", "--batch=8", "--robots=32", "--pool=2000", "--first-rounds=1", "--tasks", "1"]
    clock = ["--call-steps=1", "--agree-every=1", "--save-every-s=0", "--watched=2", "--episodes=2"]
    train.main([*places, *size, *clock])
    with (tmp_path / "out" / "loss.csv").open() as file:
        noted = {row["name"]: float(row["value"]) for row in csv.DictReader(file)}
    assert {"success_delay_0", "success_delay_4"} <= set(noted)
    assert 0 < noted["off_m_s_delay_0"] < 1
    told = json.loads((tmp_path / "results" / "results.json").read_text())
    asked = [report["conditions"] for report in told]
    assert [(c["delay"], c["rtc"]) for c in asked[3:]] == [(d, m) for d in (4, 7) for m in ("none", "auto", "trained")]
    assert (asked[1]["instruction"], asked[2]["cameras"]) == ("shuffled", "blank")
    assert len({c["seed"] for c in asked}) == 1  # paired
    assert (tmp_path / "results" / "episodes.webp").is_file()
    with tarfile.open(tmp_path / "results" / "model.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    assert load_lerobot(tmp_path / "model", LoadOptions()).family == "pi0"


def test_the_distance_to_the_expert_is_of_the_actions_that_are_executed():
    squares: list[torch.Tensor] = []

    def late_and_off(request: Request) -> torch.Tensor:
        chunk = expert.chunk(request.scene, HORIZON)
        chunk[:, :4, :2] += 9.0
        chunk[:, 4:12, 0] += 0.3
        return chunk

    ask = evaluate.compared(late_and_off, 4, squares)
    ask(Request(scenes(3), evaluate.nothing_left(3, torch.device("cpu")), 4, torch.zeros(3, HORIZON, ACTION_DIM)))
    assert squares[0].tolist() == pytest.approx([0.09] * 3, rel=1e-4)


def outcome(ask: evaluate.Ask, count: int = 90, delay: int = 0) -> evaluate.Outcome:
    return evaluate.run(scenes(count), ask, delay=delay, generator=generator(7), scale=torch.ones(2))


@pytest.mark.parametrize("delay", [0, 4, 7])
def test_the_expert_in_chunks_succeeds_with_and_without_delay(delay: int):
    assert outcome(evaluate.expert_policy, delay=delay).success.float().mean() > 0.9


@pytest.mark.parametrize("delay", [0, 3, 4])
def test_the_expert_in_short_chunks_succeeds_up_to_a_delay_of_one_of_them(delay: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluate, "EXECUTED", 4)
    assert outcome(evaluate.expert_policy, 45, delay=delay).success.float().mean() > 0.9
    with pytest.raises(ValueError, match="0 to 4 ticks"):
        outcome(evaluate.expert_policy, 1, delay=5)


@pytest.mark.parametrize("continues", [False, True])
def test_small_errors_are_fatal_late_unless_chunks_go_on_from_what_was_decided(continues: bool):
    hands = generator(3)

    def shaky_expert(request: Request) -> torch.Tensor:
        given = min(request.delay, request.left.shape[1]) if continues else 0
        scene, decided = request.scene, request.left[:, :given]
        for tick in range(given):
            scene = step(scene, decided[:, tick])
        rest = expert.chunk(scene, HORIZON)[:, : HORIZON - given]
        rest[..., :2] += 0.02 * torch.randn(len(rest), 1, 2, generator=hands)
        rest[..., :2] += 0.03 * torch.randn(len(rest), HORIZON - given, 2, generator=hands)
        return torch.cat((decided, rest), dim=1)

    scene = new_scenes(60, generator(), torch.ones(60, dtype=torch.long))
    told = evaluate.run(scene, shaky_expert, delay=4, generator=generator(7), scale=torch.ones(2))
    rate = told.success.float().mean()
    assert rate > 0.95 if continues else rate < 0.8


def test_noise_in_place_of_a_policy_fails():
    assert outcome(evaluate.random_policy, 45).success.float().mean() < 0.1


def test_a_chunk_that_arrives_late_goes_on_at_its_own_tick():
    asked: list[tuple[int, int]] = []
    executed: list[float] = []

    def ask(request: Request) -> torch.Tensor:
        tick = len(executed)
        asked.append((request.left.shape[1], request.delay))
        plan = torch.zeros(1, HORIZON, ACTION_DIM)
        plan[0, :, 0] = (tick + torch.arange(HORIZON)) * 1e-4  # says the tick that it is meant for
        return plan

    original = evaluate.step

    def counted(scene: Scene, action: torch.Tensor) -> Scene:
        executed.append(action[0, 0].item() * 1e4)
        return original(scene, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "step", counted)
        outcome(ask, 1, delay=5)
    assert executed[:40] == pytest.approx(list(range(40)), abs=1e-2)
    assert asked[:3] == [(0, 5), (HORIZON - EXECUTED, 5), (HORIZON - EXECUTED, 5)]


def test_a_delay_that_a_chunk_cannot_bridge_is_refused():
    with pytest.raises(ValueError, match="bridged"):
        outcome(evaluate.expert_policy, 1, delay=9)


def test_a_guided_chunk_keeps_to_what_is_left_of_the_old_one(loaded: Policy):
    net, scene = loaded.network, scenes(6)
    assert isinstance(net, Pi0Network)
    left = torch.randn(6, HORIZON - EXECUTED, ACTION_DIM, generator=generator()) * statistics().action_std
    noise = torch.randn(6, HORIZON, ACTION_DIM, generator=generator(2))
    off = {}
    for mode in (Mode.NONE, Mode.IDENTITY, Mode.VJP, Mode.TRAINED):
        chunk = evaluate.network_policy(net, statistics(), mode)(Request(scene, left, 4, noise))
        off[mode] = (chunk[:, :4] - left[:, :4]).abs().mean().item()
    assert off[Mode.IDENTITY] < 0.5 * off[Mode.NONE]
    assert off[Mode.VJP] < 0.5 * off[Mode.NONE]
    assert off[Mode.TRAINED] == pytest.approx(0.0, abs=1e-5)


def test_wilsons_interval_is_the_published_one():
    low, high = evaluate.wilson(81, 263)  # Newcombe 1998, table I, method 3: 0.2553 to 0.3662
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_a_shuffled_instruction_is_never_the_own_one():
    task = torch.arange(900) % len(TASKS)
    other = evaluate.shuffled(task, generator())
    assert not (task == other).any()
    assert set(other.tolist()) == set(range(len(TASKS)))


def test_the_command_prints_one_object_and_equal_seeds_give_equal_numbers(folder: Path, capsys):
    told = []
    for _ in range(2):
        assert (
            evaluate.main(
                [str(folder), "--episodes", "3", "--tasks", "1", "7", "--delay", "4", "--rtc", "auto", "--json"]
            )
            == 0
        )
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert told[0]["episodes"] == 3
    assert {"success_rate", "interval_95", "action_jump_p99", "by_task"} <= set(told[0])
