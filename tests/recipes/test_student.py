"""Stage B's rows: whose keys they play after their clip, and when they turn away; and what the judge's halves see."""

import pytest
import torch

from recipes.tiny_world.data import ClipPool
from recipes.tiny_world.evaluate import gradient_energy
from recipes.tiny_world.losses import Discriminator
from recipes.tiny_world.simulator import J, L, Simulator, W
from recipes.tiny_world.student import ALONE, Bank, alone
from recipes.tiny_world.train import tiny_config

PER, FRAMES, ROWS = 3, 12, 4


def bank() -> tuple[ClipPool, Bank]:
    torch.manual_seed(0)
    pool = ClipPool(Simulator(32, "cpu", supersample=1), 6, FRAMES, 60, seed=1, step=6)
    return pool, Bank.fresh(tiny_config(), pool, ROWS, torch.full((6,), 0.1))


def test_a_row_past_its_clip_plays_the_blocks_of_another_in_their_order():
    pool, rows = bank()
    rows.way.fill_(-1)
    rows.kept.block.fill_(FRAMES // PER)  # their own clips are over
    played = []
    for _ in range(7):
        before = rows.beat.clone()
        _, keys, _, known = rows.told(pool, PER)
        assert not known.any()
        follows = before < FRAMES // PER  # else the row has begun another clip, at any block but the first
        assert (rows.beat[follows] == before[follows] + 1).all()
        assert ((rows.beat >= 2) & (rows.beat <= FRAMES // PER)).all()
        expected = pool.blocks(rows.tune, rows.beat - 1, PER)[1]
        torch.testing.assert_close(keys, expected)
        played.append(rows.beat.clone())
    assert len(torch.stack(played).unique()) > 1


def test_a_row_turns_where_its_picture_is_plain_and_only_if_its_player_looks():
    _, rows = bank()
    checks = torch.zeros(32, 32)
    checks[::4], checks[1::4] = 1, 1
    rows.kept.pictures[:] = 0.0
    rows.kept.pictures[3] = checks  # the fourth row sees something
    assert gradient_energy(rows.kept.picture)[3] > 0.1
    rows.way = torch.tensor([L, J, -1, L])
    keys = torch.zeros(ROWS, PER, 8)
    keys[..., 0] = 1
    told = rows.turned_away(keys)
    for row, held in enumerate((L, J, 0, 0)):
        alone = torch.zeros(PER, 8)
        alone[:, held] = 1
        torch.testing.assert_close(told[row], alone)


def test_the_truth_is_certain_where_true_blocks_looked_from_the_same_spot():
    _, rows = bank()
    width, full = 32, 72
    keys = torch.zeros(ROWS, PER, 8)

    def pose(turned: int, looked: int = 0) -> torch.Tensor:
        return torch.tensor([0, turned, looked]).expand(ROWS, PER, 3)

    assert not rows.certain(keys, pose(0), width).any()
    rows.look(keys, pose(0), torch.tensor([True, True, True, False]))
    assert rows.certain(keys, pose(full), width).float().mean((1, 2)).tolist() == pytest.approx([1, 1, 1, 0], abs=0.13)
    beside = rows.certain(keys, pose(8), width)[0, 0]  # turned to the right: what was in the middle is at the left
    assert beside[: width // 4].all()
    assert not beside[-width // 4 :].any()
    assert not rows.certain(keys, pose(0, looked=1), width).any()
    moved = keys.clone()
    moved[1, 1, W] = 1
    assert rows.certain(moved, pose(0), width)[1].any(1).tolist() == [True, False, False]
    rows.look(moved, pose(0), torch.zeros(ROWS, dtype=torch.bool))
    assert rows.certain(keys, pose(0), width).flatten(1).any(1).tolist() == [True, False, True, False]
    rows.restart(bank()[0], torch.tensor([True, False, False, False]))
    assert rows.certain(keys, pose(0), width).flatten(1).any(1).tolist() == [False, False, True, False]


def test_rows_that_draw_alone_are_shown_no_picture_and_the_others_theirs():
    pool, rows = bank()
    keys, place = torch.zeros(ROWS, PER, 8), torch.zeros(ROWS, PER, dtype=torch.long)
    rows.kept.block += 1
    told = rows.kept.told(keys, place)
    marked = torch.tensor([True, False, False, True])
    for part, before in zip(alone(told, marked), told, strict=True):
        if part is before:
            continue
        assert before is told[4]
        assert before[..., 0, 4].all()
        torch.testing.assert_close(part[1:3], before[1:3])
        assert not part[marked].any()
    shares = [Bank.fresh(tiny_config(), pool, count, rows.expected).alone.float().mean() for count in (10, 100)]
    assert shares == pytest.approx([ALONE, ALONE])


def test_the_judge_of_the_whole_view_sees_neither_the_frame_before_nor_the_keys():
    torch.manual_seed(0)
    judge, place = Discriminator(tiny_config(), width=16), torch.zeros(2, dtype=torch.long)
    pictures, keys = torch.randn(2, 3 * (1 + PER), 32, 32), torch.zeros(2, PER, 8)
    other = pictures.clone()
    other[:, :3] = torch.randn(2, 3, 32, 32)
    pressed = keys.clone()
    pressed[:, :, 0] = 1
    first, second = judge(pictures, keys, place), judge(other, pressed, place)
    side = first.shape[-1] // 2
    assert first.shape == (2, 1, side, 2 * side)
    torch.testing.assert_close(first[..., side:], second[..., side:])
    assert (first[..., :side] - second[..., :side]).abs().max() > 1e-3
    other[:, 3:] = torch.randn(2, 3 * PER, 32, 32)
    assert (judge(other, keys, place)[..., side:] - first[..., side:]).abs().max() > 1e-3
