"""The simulator of tiny-world: maps, a walker, and clips of what it sees.

Owns: random maps, what each key does, how a random player presses keys, and the clip (frames,
keys, place, pose) that training and evaluation use. Everything is batched torch on one device
and a function of its torch.Generator. Pictures are drawn by `renderer`.

What a key does, per frame: w s d a move MOVE cells ahead, back, right, left (together they
share that length); j and l turn TURN to the left and right; i and k look up and down by LOOK half
pictures, at most LOOK_LIMIT. `keys[f]` are held while frame f comes about from frame f - 1.
The walker is a disc of RADIUS that walls, and props as discs of PROP_RADIUS, push out, so it touches them and slides along.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.models.common.keys import KEYS
from realtime_omni.models.tiny_world.places import PLACES
from recipes.tiny_world.renderer import Renderer, cast

MOVE = 0.11
TURN = math.radians(5.0)
LOOK = 0.06
LOOK_LIMIT = 0.36
RADIUS = 0.3
SIDE = 14
BLOCKS = 17
PROPS = 8
PROP_CELL = 9  # solid for the walker, not for the ray
PROP_RADIUS = 0.5
ROOM = 10  # free cells that a walker can at least walk to from where he starts: nobody is walled in
NEIGHBOURS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
SLACK = 1e-3  # cells that a walker wedged between two things may stand in one of them
W, A, S, D, I, J, K, L = range(len(KEYS))


@dataclasses.dataclass(frozen=True)
class Maps:
    """B maps: `solid` [B, SIDE, SIDE] (0 free, 1.. wall kind, PROP_CELL) and `props` [B, PROPS, 2]."""

    solid: Tensor
    props: Tensor

    @property
    def walls(self) -> Tensor:
        return torch.where(self.solid == PROP_CELL, 0, self.solid)

    def rows(self, index: Tensor) -> Maps:
        return Maps(self.solid[index], self.props[index])


@dataclasses.dataclass(frozen=True)
class Clips:
    """B clips of F frames: frames [B, F, 3, H, W] uint8, keys [B, F, 8], place [B, F], pose [B, F, 4] (x, y, yaw, pitch)."""

    frames: Tensor
    keys: Tensor
    place: Tensor
    pose: Tensor
    maps: Maps


@dataclasses.dataclass(frozen=True)
class Player:
    """How the random player behaves: chances per clip, per block, or per decision."""

    still_start: float = 0.35
    switch: float = 0.03
    forward: float = 0.58
    turning: float = 0.55
    looking: float = 0.12
    idle: float = 0.08
    one_way: float = 0.0
    """Chance that a clip turns the same way throughout (evaluation: long turns)."""
    standing: float = 0.0
    """Chance that a clip stays where it begins: it turns and looks (what was seen comes back)."""
    heed: float = 0.3
    """Chance a frame to turn away from a wall straight ahead; near 0 the player stays in front of it."""


def random_maps(count: int, generator: torch.Generator, device: torch.device | str) -> Maps:
    """Bordered maps with rectangles of wall and props on free cells."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    rows = torch.arange(SIDE, device=device)
    solid = torch.zeros(count, SIDE, SIDE, dtype=torch.long, device=device)
    left, top = integers(1, SIDE - 1, count, BLOCKS), integers(1, SIDE - 1, count, BLOCKS)
    wide, tall = integers(1, 4, count, BLOCKS), integers(1, 4, count, BLOCKS)
    kinds = torch.tensor([1, 1, 1, 2, 2, 3], device=device)[integers(0, 6, count, BLOCKS)]
    for block in range(BLOCKS):
        in_x = (rows >= left[:, block, None]) & (rows < (left + wide)[:, block, None])
        in_y = (rows >= top[:, block, None]) & (rows < (top + tall)[:, block, None])
        inside = in_y[:, :, None] & in_x[:, None, :]
        solid = torch.where(inside, kinds[:, block, None, None], solid)
    stripes = torch.tensor([1, 1, 1, 2, 2, 3], device=device)[integers(0, 6, count, SIDE, SIDE)]
    solid = torch.where((solid == 1) & (stripes == 2), 2, solid)
    edge = (rows == 0) | (rows == SIDE - 1)
    solid = torch.where(edge[:, None] | edge[None, :], stripes, solid)
    free = (solid == 0).flatten(1).float() + 1e-6
    cells = torch.multinomial(free, PROPS, generator=generator)
    solid = solid.flatten(1).scatter(1, cells, PROP_CELL).view(count, SIDE, SIDE)
    props = torch.stack((cells % SIDE, cells // SIDE), dim=-1).float() + 0.5
    return Maps(solid, props)


def room_around(solid_BSS: Tensor) -> Tensor:
    """[B, SIDE, SIDE] long: how many free cells can be walked to from each, itself included; 0 where it is not free."""
    free = solid_BSS == 0
    number = torch.arange(1, SIDE * SIDE + 1, device=free.device).view(SIDE, SIDE)
    label = torch.where(free, number, 0)  # becomes the highest number that can be walked to
    for _ in range(8 * SIDE):
        beside = functional.pad(label, (1, 1, 1, 1))
        label = (
            torch.stack(
                (label, beside[:, :-2, 1:-1], beside[:, 2:, 1:-1], beside[:, 1:-1, :-2], beside[:, 1:-1, 2:])
            ).amax(0)
            * free
        )
    flat = label.flatten(1)
    cells = torch.zeros(len(flat), SIDE * SIDE + 1, dtype=torch.long, device=free.device)
    cells.scatter_add_(1, flat, torch.ones_like(flat))
    return cells.gather(1, flat).view_as(label) * free


def random_starts(maps: Maps, generator: torch.Generator, tries: int = 8) -> tuple[Tensor, Tensor]:
    """A free position [B, 2], not walled in, and the yaw [B] among `tries` that sees about 3 to 7 cells ahead."""
    count, device = len(maps.solid), maps.solid.device
    free = (room_around(maps.solid) >= ROOM).flatten(1).float() + 1e-6
    cell = torch.multinomial(free, 1, generator=generator)[:, 0]
    position = torch.stack((cell % SIDE, cell // SIDE), dim=-1).float() + 0.5
    position = position + (torch.rand(count, 2, generator=generator, device=device) - 0.5) * 0.4
    yaws = torch.rand(count, tries, generator=generator, device=device) * (2 * math.pi)
    seen = cast(maps.walls, position, torch.stack((yaws.cos(), yaws.sin()), dim=-1))[0]
    best = (seen.clamp(0, 7) + torch.rand(count, tries, generator=generator, device=device) * 2).argmax(dim=1)
    return position, yaws.gather(1, best[:, None])[:, 0]


def advance(maps: Maps, pose_B4: Tensor, keys_B8: Tensor) -> Tensor:
    """The pose after one frame with `keys` held."""
    x, y, yaw, pitch = pose_B4.unbind(-1)
    yaw = yaw + (keys_B8[:, L] - keys_B8[:, J]) * TURN
    pitch = (pitch + (keys_B8[:, I] - keys_B8[:, K]) * LOOK).clamp(-LOOK_LIMIT, LOOK_LIMIT)
    ahead, aside = keys_B8[:, W] - keys_B8[:, S], keys_B8[:, D] - keys_B8[:, A]
    length = MOVE / (ahead**2 + aside**2).sqrt().clamp_min(1.0)
    step_x = (yaw.cos() * ahead - yaw.sin() * aside) * length
    step_y = (yaw.sin() * ahead + yaw.cos() * aside) * length
    position = torch.stack((x, y), dim=-1)
    x, y = _stopped(maps, position, position + torch.stack((step_x, step_y), dim=-1)).unbind(-1)
    return torch.stack((x, y, yaw, pitch), dim=-1)


def _stopped(maps: Maps, position_B2: Tensor, wanted_B2: Tensor) -> Tensor:
    """`wanted`, pushed out of what is solid; where there is no room, `position`, which has it."""
    place = wanted_B2
    for _ in range(2):
        for across, down in NEIGHBOURS:
            push, _ = _push(maps, place, across, down)
            place = place + push
    deepest = torch.stack([_push(maps, place, *neighbour)[1] for neighbour in NEIGHBOURS]).amax(0)
    return torch.where((deepest < SLACK)[:, None], place, position_B2)


def _push(maps: Maps, place_B2: Tensor, across: int, down: int) -> tuple[Tensor, Tensor]:
    """Out of the neighbour cell: the shortest way [B, 2], and its length [B]. A wall is its cell, a prop the disc in it."""
    corner = place_B2.floor() + torch.tensor((across, down), device=place_B2.device)
    index = (corner[:, 1] * SIDE + corner[:, 0]).long().clamp(0, SIDE * SIDE - 1)
    kind = maps.solid.flatten(1).gather(1, index[:, None])
    nearest = torch.where(kind == PROP_CELL, corner + 0.5, torch.minimum(place_B2.maximum(corner), corner + 1))
    away = place_B2 - nearest
    distance = away.norm(dim=1, keepdim=True).clamp_min(1e-6)
    reach = torch.where(kind == PROP_CELL, RADIUS + PROP_RADIUS, RADIUS) * (kind != 0)
    depth = (reach - distance).clamp_min(0)
    return away / distance * depth, depth[:, 0]


class RandomPlayer:
    """Presses keys for a few frames at a time; turns away from a wall it walks into."""

    def __init__(self, count: int, player: Player, generator: torch.Generator, device: torch.device | str) -> None:
        self.player, self.generator, self.device = player, generator, device
        self.keys = torch.zeros(count, len(KEYS), device=device)
        self.left = torch.zeros(count, device=device)
        self.way = torch.where(self._uniform(count) < 0.5, J, L)
        self.faithful = self._uniform(count) < player.one_way
        self.standing = self.faithful & False
        if player.standing:  # no draw without it: clips of the same seed stay what they were
            self.standing = self._uniform(count) < player.standing

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def press(self, room_ahead: Tensor) -> Tensor:
        """Keys [B, 8] for the next frame; `room_ahead` [B] is the free distance straight ahead."""
        count, player = len(self.keys), self.player
        pick = self._uniform(6, count)
        fresh = torch.zeros_like(self.keys)
        forward = pick[0] < player.forward
        fresh[:, W] = forward.float()
        other = (pick[0] * 7919.0).frac()
        for index, key in enumerate((A, D, S)):
            fresh[:, key] = (~forward & (other >= index * 0.2) & (other < index * 0.2 + 0.2)).float()
        turn = (pick[1] < player.turning) | self.faithful
        side = torch.where(self.faithful, self.way, torch.where(pick[2] < 0.5, J, L))
        fresh[:, J], fresh[:, L] = (turn & (side == J)).float(), (turn & (side == L)).float()
        fresh[:, I] = (pick[3] < player.looking / 2).float()
        fresh[:, K] = ((pick[3] >= player.looking / 2) & (pick[3] < player.looking)).float()
        fresh = fresh * ((pick[4] >= player.idle) | self.faithful).float()[:, None]
        fresh[:, : D + 1] *= ~self.standing[:, None]
        bumped = (self.keys[:, W] > 0) & (room_ahead < 0.7) & (self._uniform(count) < player.heed)
        away = torch.zeros_like(self.keys)
        away[:, J], away[:, L] = (side == J).float(), (side == L).float()
        renew = (self.left <= 0) | bumped
        self.keys = torch.where(bumped[:, None], away, torch.where(renew[:, None], fresh, self.keys))
        self.left = torch.where(renew, (3 + pick[5] * 11).floor(), self.left) - 1
        return self.keys


class Simulator:
    """Draws clips at one picture size on one device; `compiled` is for CUDA and long runs."""

    def __init__(self, size: int, device: torch.device | str, supersample: int = 2, compiled: bool = False) -> None:
        self.size, self.device = size, device
        self._render = Renderer(size, device, supersample, compiled)

    def picture(self, maps: Maps, place_B: Tensor, pose_B4: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in 0..1 of one pose per map."""
        return self._render(maps.walls, maps.props, place_B, pose_B4)

    def drive(
        self, maps: Maps, frames: int, player: Player, generator: torch.Generator, frames_per_block: int = 3
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(keys [B, F, 8], place [B, F], pose [B, F, 4]) of a random player; no pictures."""
        count, device = len(maps.solid), self.device
        position, yaw = random_starts(maps, generator)
        pose = torch.cat((position, yaw[:, None], torch.zeros(count, 1, device=device)), dim=-1)
        place = torch.randint(0, len(PLACES), (count,), generator=generator, device=device)
        still = torch.rand(count, generator=generator, device=device) < player.still_start
        hands = RandomPlayer(count, player, generator, device)
        walls = maps.walls
        keys_list, place_list, pose_list = [], [], []
        for frame in range(frames):
            if frame and frame % frames_per_block == 0:
                change = torch.rand(count, generator=generator, device=device) < player.switch
                other = torch.randint(1, len(PLACES), (count,), generator=generator, device=device)
                place = torch.where(change, (place + other) % len(PLACES), place)
            ahead = torch.stack((pose[:, 2].cos(), pose[:, 2].sin()), dim=-1)[:, None]
            keys = hands.press(cast(walls, pose[:, :2], ahead)[0][:, 0])
            if frame < frames_per_block:
                keys = torch.where(still[:, None], torch.zeros_like(keys), keys)
            pose = advance(maps, pose, keys)
            keys_list.append(keys)
            place_list.append(place)
            pose_list.append(pose)
        return torch.stack(keys_list, 1), torch.stack(place_list, 1), torch.stack(pose_list, 1)

    def clips(
        self,
        count: int,
        frames: int,
        generator: torch.Generator,
        player: Player | None = None,
        chunk: int | None = None,
    ) -> Clips:
        """Random clips; pictures are drawn `chunk` at a time (see `draw`)."""
        maps = random_maps(count, generator, self.device)
        keys, place, pose = self.drive(maps, frames, player or Player(), generator)
        return Clips(self.draw(maps, place, pose, chunk), keys, place, pose, maps)

    def draw(self, maps: Maps, place_BF: Tensor, pose_BF4: Tensor, chunk: int | None = None) -> Tensor:
        """Pictures [B, F, 3, H, W] uint8 along given poses; small chunks suit a CPU's caches."""
        chunk = chunk or (4 if torch.device(self.device).type == "cpu" else 512)
        count, frames = place_BF.shape
        row = torch.arange(count, device=self.device).repeat_interleave(frames)
        out = torch.empty(count * frames, 3, self.size, self.size, dtype=torch.uint8, device=self.device)
        place, pose = place_BF.reshape(-1), pose_BF4.reshape(-1, 4)
        for start in range(0, count * frames, chunk):
            part = torch.arange(start, start + chunk, device=self.device).clamp_max(count * frames - 1)
            drawn = self.picture(maps.rows(row[part]), place[part], pose[part])
            stop = min(start + chunk, count * frames)
            out[start:stop] = (drawn[: stop - start] * 255 + 0.5).to(torch.uint8)
        return out.view(count, frames, 3, self.size, self.size)
