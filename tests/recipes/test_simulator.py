"""The simulator of tiny-world: what each key does, and that places differ and seeds repeat."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.common.keys import KEYS  # noqa: E402
from realtime_omni.models.tiny_world.network import NetworkConfig, poses  # noqa: E402
from realtime_omni.models.tiny_world.places import PLACES  # noqa: E402
from recipes.tiny_world.renderer import HALF_FOV_TAN  # noqa: E402
from recipes.tiny_world.simulator import (  # noqa: E402
    LOOK,
    LOOK_LIMIT,
    MOVE,
    PROP_CELL,
    PROP_RADIUS,
    RADIUS,
    ROOM,
    SIDE,
    SLACK,
    TURN,
    A,
    D,
    I,
    J,
    K,
    L,
    Maps,
    Player,
    S,
    Simulator,
    W,
    advance,
    random_maps,
    random_starts,
    room_around,
)


def room() -> Maps:
    """One empty walled room, its props far away in a corner."""
    solid = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
    solid[:, 0], solid[:, -1], solid[:, :, 0], solid[:, :, -1] = 1, 1, 1, 1
    return Maps(solid, torch.tensor([[[1.5, 1.5]]]))


def pose(x=7.0, y=7.0, degrees=0.0, pitch=0.0) -> torch.Tensor:
    return torch.tensor([[x, y, math.radians(degrees), pitch]])


def press(*keys: int) -> torch.Tensor:
    held = torch.zeros(1, len(KEYS))
    held[:, list(keys)] = 1
    return held


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return Simulator(48, "cpu", supersample=1)


def picture(simulator: Simulator, at: torch.Tensor, place: int = 0, maps: Maps | None = None) -> torch.Tensor:
    return simulator.picture(maps or room(), torch.tensor([place]), at)[0]


def shift_of(before: torch.Tensor, after: torch.Tensor, reach: int = 10) -> int:
    """Columns by which the middle of `before` moved to the right in `after`."""
    side = before.shape[-1]

    def error(shift: int) -> float:
        seen = after[..., reach + shift : side - reach + shift]
        return (seen - before[..., reach : side - reach]).abs().mean().item()

    return min(range(-reach, reach + 1), key=error)


def test_forward_moves_along_the_view_and_back_moves_against_it():
    assert torch.allclose(advance(room(), pose(degrees=90), press(W)), pose(y=7 + MOVE, degrees=90), atol=1e-5)
    assert torch.allclose(advance(room(), pose(), press(S)), pose(x=7 - MOVE), atol=1e-5)


def test_left_and_right_move_sideways_and_a_diagonal_is_no_faster():
    """With y down, looking along +x has its right hand at +y."""
    assert torch.allclose(advance(room(), pose(), press(D)), pose(y=7 + MOVE), atol=1e-5)
    assert torch.allclose(advance(room(), pose(), press(A)), pose(y=7 - MOVE), atol=1e-5)
    step = advance(room(), pose(), press(W, D)) - pose()
    assert step[0, :2].norm().item() == pytest.approx(MOVE, rel=1e-4)


def test_l_turns_right_so_that_the_picture_flows_left_and_j_the_opposite(simulator):
    start = pose(x=3.0, y=5.5)
    right, left = advance(room(), start, press(L)), advance(room(), start, press(J))
    assert right[0, 2].item() == pytest.approx(TURN)
    assert left[0, 2].item() == pytest.approx(-TURN)
    before = picture(simulator, start)
    assert shift_of(before, picture(simulator, right)) < -1
    assert shift_of(before, picture(simulator, left)) > 1


def test_walking_towards_a_wall_makes_it_taller(simulator):
    """Snow: walls are brown in the middle column, sky and ground are not."""
    start = pose(x=9.0)
    near = start
    for _ in range(10):
        near = advance(room(), near, press(W))

    def wall_rows(at: torch.Tensor) -> int:
        red, blue = picture(simulator, at, place=1)[[0, 2], :, 24]
        return int((red > blue + 0.05).sum())

    assert wall_rows(near) > wall_rows(start)


def test_looking_up_lowers_the_horizon_and_stops_at_the_limit(simulator):
    up = pose()
    for _ in range(50):
        up = advance(room(), up, press(I))
    assert up[0, 3].item() == pytest.approx(LOOK_LIMIT)
    assert advance(room(), pose(), press(K))[0, 3].item() < 0
    level, raised = picture(simulator, pose(), place=1), picture(simulator, up, place=1)
    assert raised[2, -16:].mean() < level[2, -16:].mean()  # white ground gives way to brown wall


def test_a_wall_stops_the_walker_where_he_touches_it_and_lets_him_slide_along():
    for x in (12.40, 12.44, 12.48, 12.52):  # any part of a step before it
        at = pose(x=x)
        for _ in range(6):
            at = advance(room(), at, press(W))
        assert at[0, 0].item() == pytest.approx(SIDE - 1 - RADIUS, abs=1e-5)
    moved = advance(room(), pose(x=12.68, degrees=45), press(W))
    assert moved[0, 0].item() == pytest.approx(SIDE - 1 - RADIUS)
    assert moved[0, 1].item() == pytest.approx(7.0 + MOVE * math.sin(math.pi / 4))


def test_a_prop_is_a_disc_that_pushes_the_walker_aside():
    maps = room()
    maps.solid[0, 7, 9] = PROP_CELL
    head_on, beside = pose(x=7.0, y=7.5), pose(x=7.0, y=7.7)
    for _ in range(30):
        head_on, beside = advance(maps, head_on, press(W)), advance(maps, beside, press(W))
    assert head_on[0, :2].tolist() == pytest.approx([9.5 - RADIUS - PROP_RADIUS, 7.5], abs=1e-4)
    assert beside[0, 0].item() > 9.5
    assert beside[0, 1].item() == pytest.approx(7.5 + RADIUS + PROP_RADIUS, abs=0.01)


def test_nobody_ever_stands_in_a_wall_or_a_prop(simulator):
    generator = torch.Generator().manual_seed(8)
    maps = random_maps(64, generator, "cpu")
    _, _, poses = simulator.drive(maps, 120, Player(heed=0.0), generator)
    cells = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy"), dim=-1).float()
    for frame in range(poses.shape[1]):
        at = poses[:, frame, None, None, :2]
        nearest = torch.minimum(at.maximum(cells), cells + 1)
        for solid, thing, reach in (
            (maps.walls > 0, nearest, RADIUS),
            (maps.solid == PROP_CELL, cells + 0.5, RADIUS + PROP_RADIUS),
        ):
            assert (at - thing).norm(dim=-1)[solid].min() > reach - 2 * SLACK
    walked = (poses[:, 1:, :2] - poses[:, :-1, :2]).norm(dim=-1)
    assert walked.max() < MOVE + 2 * SLACK


def test_the_room_around_a_cell_is_what_can_be_walked_to():
    plan = ("####", "#..#", "##.#", "#.##", "####")  # corners do not let anybody through
    solid = torch.ones(1, SIDE, SIDE, dtype=torch.long)
    for y, row in enumerate(plan):
        solid[0, y, : len(row)] = torch.tensor([cell == "#" for cell in row])
    solid[0, 5:, 5:-1] = 0
    solid[0, 9, 5:-1] = PROP_CELL
    room = room_around(solid)[0]
    assert (room[1, 1:3].tolist(), room[2, 2].item(), room[3, 1].item()) == ([3, 3], 3, 1)
    assert room[5, 5].item() == 4 * (SIDE - 6)
    assert room[13, 12].item() == 4 * (SIDE - 6)
    assert room[0, 0] == room[9, 6] == 0


def test_a_winding_way_is_one_room():
    solid = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
    solid[0, 1::2] = 1
    for y in range(1, SIDE - 1, 2):
        solid[0, y, SIDE - 1 if y % 4 == 1 else 0] = 0
    assert set(room_around(solid)[0][solid[0] == 0].tolist()) == {SIDE // 2 * SIDE + (SIDE - 2) // 2}


def test_nobody_starts_walled_in():
    generator = torch.Generator().manual_seed(4)
    maps = random_maps(256, generator, "cpu")
    position, _ = random_starts(maps, generator)
    x, y = position.long().unbind(-1)
    assert int(room_around(maps.solid)[torch.arange(256), y, x].min()) >= ROOM


def test_every_place_looks_different(simulator):
    maps = random_maps(1, torch.Generator().manual_seed(3), "cpu")
    views = [picture(simulator, pose(), place, maps) for place in range(len(PLACES))]
    for a in range(len(PLACES)):
        for b in range(a):
            assert (views[a] - views[b]).abs().mean() > 0.04


def test_maps_are_walled_and_hold_their_props_on_marked_cells():
    maps = random_maps(16, torch.Generator().manual_seed(0), "cpu")
    edge = torch.cat((maps.solid[:, 0], maps.solid[:, -1], maps.solid[:, :, 0], maps.solid[:, :, -1]), dim=1)
    assert bool(((edge > 0) & (edge <= 3)).all())
    x, y = maps.props.long().unbind(-1)
    assert bool((maps.solid[torch.arange(16)[:, None], y, x] == PROP_CELL).all())
    assert int(maps.walls.max()) == 3


def test_a_seed_repeats_its_clips_exactly_and_another_seed_differs(simulator):
    one, same, other = (simulator.clips(2, 6, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(one.frames, same.frames)
    assert torch.equal(one.keys, same.keys)
    assert not torch.equal(one.frames, other.frames)


def test_a_clip_holds_what_its_keys_say(simulator):
    clips = simulator.clips(3, 9, torch.Generator().manual_seed(2))
    for frame in range(1, 9):
        expected = advance(clips.maps, clips.pose[:, frame - 1], clips.keys[:, frame])
        torch.testing.assert_close(clips.pose[:, frame], expected)


def test_the_network_and_the_simulator_agree_where_a_token_looks():
    """A turn and a look move the picture as the network's rotary positions say: same azimuth and elevation, same sight."""
    config = NetworkConfig()
    assert config.turn_steps == round(2 * math.pi / TURN)
    assert (config.half_fov_tan, config.look_step) == (HALF_FOV_TAN, LOOK)
    assert config.look_limit == round(LOOK_LIMIT / LOOK)
    size, generator = 128, torch.Generator().manual_seed(5)
    maps = random_maps(8, generator, "cpu")
    position, yaw = random_starts(maps, generator)
    start = torch.cat((position, yaw[:, None], torch.zeros(8, 1)), dim=-1)
    keys = torch.zeros(8, 4, len(KEYS))
    keys[:, :, L] = 1
    keys[:, :2, I] = 1
    pose = start
    for frame in range(4):
        pose = advance(maps, pose, keys[:, frame])
    _, turned, looked = poses(torch.zeros(8, dtype=torch.long), torch.zeros(8, 2, dtype=torch.long), keys, 6)[
        0, -1
    ].tolist()
    assert (turned, looked) == (4, 2)
    simulator, place = Simulator(size, "cpu"), torch.arange(8) % len(PLACES)
    before, after = (simulator.picture(maps, place, at) for at in (start, pose))
    screen = (torch.arange(size) + 0.5) / size * 2 - 1
    azimuth = torch.atan(screen * config.half_fov_tan)
    there = torch.tan(azimuth - turned * 2 * math.pi / config.turn_steps) / config.half_fov_tan  # of an old column, now
    columns = ((there + 1) / 2 * size - 0.5).round().long()
    inside = (columns >= 0) & (columns < size)
    horizon = size // 2 + torch.arange(-3, 3)
    moved = horizon + round(looked * config.look_step * size / 2)
    same = (before[:, :, horizon][..., inside] - after[:, :, moved][..., columns[inside]]).abs().mean()
    other = (before[:, :, horizon][..., inside] - after[:, :, horizon][..., inside]).abs().mean()
    assert inside.sum() > size // 2
    assert same < 0.35 * other


def test_a_standing_player_turns_and_looks_and_never_moves():
    simulator = Simulator(32, "cpu", supersample=1)
    generator = torch.Generator().manual_seed(3)
    maps = random_maps(6, generator, "cpu")
    keys, _, pose = simulator.drive(maps, 30, Player(standing=1.0, one_way=0.5, still_start=0.0), generator)
    assert not keys[..., : D + 1].any()
    assert keys[..., D + 1 :].any()
    assert (pose[..., :2] == pose[:, :1, :2]).all()
    assert (pose[..., 2] != pose[:, :1, 2]).any()
