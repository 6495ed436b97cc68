"""Draw the start pictures of tiny-world: held-out maps, a view that shows the place.

    python -m recipes.tiny_world.make_starts

Owns: the choice of the views (fixed seeds) and the files `weights/starts/<place>-<n>.png`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from realtime_omni.models.tiny_world.places import PLACES
from recipes.tiny_world.evaluate import WEIGHTS, generator_for
from recipes.tiny_world.renderer import cast
from recipes.tiny_world.simulator import Simulator, random_maps, random_starts

CANDIDATES = 24
SEED = 100
PER_PLACE = 3
ROOM_AHEAD = 3.0  # cells: a first walk should not end at once


def liveliness(pictures_NCHW: Tensor) -> Tensor:
    """[N]: how much there is to see: colour variety of a coarse view, on both halves."""
    coarse = torch.nn.functional.avg_pool2d(pictures_NCHW, 8)
    left, right = coarse.chunk(2, dim=-1)
    return torch.minimum(left.flatten(2).std(-1).sum(1), right.flatten(2).std(-1).sum(1))


def main(folder: Path = WEIGHTS / "starts", size: int = 128) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    simulator = Simulator(size, "cpu")
    for index, place in enumerate(PLACES):
        generator = generator_for(SEED + index, "cpu")
        maps = random_maps(CANDIDATES, generator, "cpu")
        position, yaw = random_starts(maps, generator)
        pose = torch.cat((position, yaw[:, None], torch.zeros(CANDIDATES, 1)), dim=-1)
        chosen = torch.full((CANDIDATES,), index)
        views = torch.cat(
            [simulator.picture(maps.rows(part), chosen[part], pose[part]) for part in torch.arange(CANDIDATES).split(4)]
        )
        ahead = torch.stack((yaw.cos(), yaw.sin()), dim=-1)[:, None]
        open_view = cast(maps.walls, position, ahead)[0][:, 0] > ROOM_AHEAD
        for number, best in enumerate((liveliness(views) * open_view).topk(PER_PLACE).indices):
            picture = (views[best] * 255 + 0.5).to(torch.uint8).permute(1, 2, 0).numpy()
            Image.fromarray(picture).save(folder / f"{place.name}-{number + 1}.png", optimize=True)


if __name__ == "__main__":
    main()
