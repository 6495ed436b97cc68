"""Which of several weights is best: clips and walks by the hundred, through the compiled pass of a training run.

Owns: held-out clips and walks that are not those of `evaluate` (other seeds), cheap scores on
them, and the order of candidates by the goals of the model card. The full evaluation of the
best comes after, on its own seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet
from recipes.tiny_world.classifier import PlaceClassifier, load_classifier
from recipes.tiny_world.data import to_signed
from recipes.tiny_world.evaluate import (
    CLIP_PLAYER,
    CONTEXT,
    LongRuns,
    generator_for,
    picture_scores,
    turn_scores,
    watched_run,
    watched_simulator,
    window_faults,
)
from recipes.tiny_world.rollout import KeptRows, clean
from recipes.tiny_world.simulator import Simulator

CLIP_SEED, WALK_SEED, TURN_SEED = 7000, 7100, 7200  # of the held-out seeds, apart from those of `evaluate`
CLIP_FRAMES = 51
GOALS_DB = {"6": 27.0, "12": 24.0, "24": 20.0}
TURN_DB = 20.0  # the view after a full turn
SHARP = {"12": 0.72, "48": 0.72}  # the goal is 0.70; a little more, since other clips decide


def goodness(scores: dict) -> float:
    """Higher is better: shortfalls from the goals count ten times what lies above them; walks that fail count too."""
    total = 0.0
    for frame, goal in GOALS_DB.items():
        above = scores["psnr_db"][frame] - goal
        total += above if above < 0 else 0.1 * above
    if "turn_full_psnr_db" in scores:
        total += min(0.0, scores["turn_full_psnr_db"] - TURN_DB)
    for frame, goal in SHARP.items():
        total -= 10 * max(0.0, goal - scores["sharpness_ratio"][frame])
    for player in ("walks", "walks_watched"):
        if player in scores:
            total -= 3 * scores[player]["collapsed_share"]
    return round(total, 4)


class Play:
    """Rows of sessions played with one sampler step through a (compiled) cached pass, without gradients."""

    def __init__(self, cached: nn.Module, config: NetworkConfig, rows: int, device: torch.device) -> None:
        self.cached, self.config, self.device = cached, config, device
        self.kept = KeptRows.empty(config, rows, device, torch.bfloat16)

    @torch.no_grad()
    def block(self, keys: Tensor, place: Tensor, truth: Tensor | None = None) -> Tensor:
        """The next block [B, F, 3, H, W] in [-1, 1]: `truth`, where given, or its own."""
        kept, per, size = self.kept, self.config.frames_per_block, self.config.image_size
        told = kept.told(keys.contiguous(), place.contiguous())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            if truth is None:
                x = torch.randn(len(keys), per, 3, size, size, device=self.device)
                shown, fine, *_ = self.cached(x, x.new_ones(x.shape[:2]), *told)
                shown = shown.float().clamp(-1, 1)
            else:
                shown, fine = truth.contiguous(), torch.ones_like(truth[:, :, :1])
            level = shown.new_full(shown.shape[:2], self.config.context_noise)
            *_, k, v = self.cached(shown, level, *clean(told))
        kept.write(k, v, told, shown, fine)
        return shown

    def clip(self, truth: Tensor, keys: Tensor, place: Tensor) -> Tensor:
        """Clips [B, F, 3, H, W] played from their first block on."""
        self.kept.reset(torch.ones(len(keys), dtype=torch.bool, device=self.device))
        per, shown = self.config.frames_per_block, []
        for index in range(keys.shape[1] // per):
            part = slice(index * per, (index + 1) * per)
            given = truth[:, part] if index == 0 else None
            shown.append(self.block(keys[:, part], place[:, part], given))
        return torch.cat(shown, dim=1)


class Bench:
    """Held-out clips and walks, as many at a time as the compiled pass has rows."""

    def __init__(self, simulator: Simulator, cached: nn.Module, net: TinyWorldNet, rows: int, walk_frames: int) -> None:
        self.simulator, self.cached, self.net, self.rows = simulator, cached, net, rows
        self.walk_frames = walk_frames
        self.device, self.config = torch.device(simulator.device), net.config
        drawn = simulator.clips(rows, CLIP_FRAMES, generator_for(CLIP_SEED, self.device), CLIP_PLAYER)
        self.truth, self.keys, self.place = drawn.frames, drawn.keys, drawn.place

    def play(self) -> Play:
        return Play(self.cached, self.config, self.rows, self.device)

    @contextmanager
    def wearing(self, weights: dict[str, Tensor], seed: int) -> Iterator[None]:
        """The network with `weights`, and torch's draws from `seed` on; then with its own again."""
        own = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(weights)
        torch.manual_seed(seed)
        yield
        self.net.load_state_dict(own)

    def clips(self, weights: dict[str, Tensor]) -> dict:
        """PSNR and sharpness of `weights` on the clips."""
        truth = to_signed(self.truth)
        with self.wearing(weights, CLIP_SEED):
            scores = picture_scores(truth, self.play().clip(truth[:, :CONTEXT], self.keys, self.place))
        return {name: scores[name] for name in ("psnr_db", "psnr_db_copy_last", "sharpness_ratio")}

    def turns(self, weights: dict[str, Tensor]) -> dict:
        """The view after turns on the spot, in dB (`turn_scores`)."""

        def rollout(start: Tensor, keys: Tensor, places: Tensor, seed: int) -> Tensor:
            return self.play().clip(start, keys, places)

        with self.wearing(weights, TURN_SEED):
            return turn_scores(self.simulator, rollout, self.rows, TURN_SEED, self.config.frames_per_block)

    @functools.cached_property
    def told(self) -> tuple[LongRuns, PlaceClassifier]:
        """What the walks are told, and who names their places; drawn when first asked for."""
        per = self.config.frames_per_block
        runs = LongRuns.draw(self.simulator, self.rows, self.walk_frames, WALK_SEED, per)
        return runs, load_classifier(str(self.device))

    def walks(self, weights: dict[str, Tensor]) -> tuple[dict, Tensor]:
        """Share of walks with a collapsed window, random keys and watched; and the watched walks' pictures."""
        per = self.config.frames_per_block
        runs, _ = self.told
        self.net.load_state_dict(weights)
        torch.manual_seed(WALK_SEED)
        play, blocks = self.play(), []
        for first in range(0, runs.keys.shape[1], per):
            part = slice(first, first + per)
            start = runs.start if first == 0 else None
            blocks.append(play.block(runs.keys[:, part], runs.place[:, part], start))
        scores = {"walks": self.walk_scores(torch.cat(blocks, dim=1), runs.keys)}
        del blocks
        play = self.play()
        play.block(runs.keys[:, :per], runs.place[:, :per], runs.start)
        frames_seen, keys = watched_run(runs, lambda part, keys: play.block(keys, runs.place[:, part]), per)
        scores["walks_watched"] = self.walk_scores(frames_seen, keys)
        return scores, frames_seen

    def simulator_walks(self) -> dict:
        """The same measure of the same walks in the simulator itself. Not under no_grad: its parts would compile again."""
        runs, _ = self.told
        drawn = to_signed(self.simulator.draw(runs.maps, runs.place, runs.pose))
        scores = {"walks": self.walk_scores(drawn, runs.keys)}
        del drawn
        watched, keys = watched_simulator(runs, self.simulator, self.config.frames_per_block)
        return scores | {"walks_watched": self.walk_scores(watched, keys)}

    @torch.no_grad()
    def walk_scores(self, frames: Tensor, keys: Tensor) -> dict:
        runs, namer = self.told
        found = [
            window_faults(frames[row], keys[row], runs.place[row], runs.expected, namer) for row in range(len(frames))
        ]
        ratios = [ratio for _, row in found for ratio in row]
        faults = [fault for faults, _ in found for fault in faults]
        return {
            "collapsed_share": round(sum(bool(faults) for faults, _ in found) / len(found), 4),
            "windows_of_the_wrong_place": sum(fault[1] == "place" for fault in faults),
            "windows_out_of_sharpness": sum(fault[1] == "sharpness" for fault in faults),
            "sharpness_mean": round(sum(ratios) / len(ratios), 3),
            "walks": len(frames),
            "frames": frames.shape[1],
        }


def blends(start: dict[str, Tensor], tuned: dict[str, Tensor], shares: tuple[float, ...]) -> dict[str, dict]:
    """`start` moved by each share towards `tuned`."""
    return {
        f"blend_{share:g}": {name: torch.lerp(start[name], tuned[name], share) for name in start} for share in shares
    }
