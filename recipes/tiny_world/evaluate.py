"""Measure tiny-world against its simulator on maps it never saw.

    python -m recipes.tiny_world.evaluate [--quick] [--device cuda] [--weights DIR] [--out results.json]

Owns: the held-out conditions and every number of the model card. The thing under test is a
`Rollout` (see `rollout`): by default the reference loop, or one injected by a caller that wants
the same numbers through a server. Seeds start at HELD_OUT; training seeds are far below.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from realtime_omni.bench.arguments import MOST_SEED, count
from realtime_omni.errors import ConfigError
from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet
from realtime_omni.models.tiny_world.places import PLACES
from recipes.tiny_world.classifier import PlaceClassifier, load_classifier
from recipes.tiny_world.data import to_signed
from recipes.tiny_world.rollout import ReferencePlay, Rollout, reference_rollout
from recipes.tiny_world.simulator import TURN, Clips, J, L, Maps, Player, Simulator, advance, random_maps

HELD_OUT = 50_000_000
FRAMES = (3, 6, 12, 24, 48)
WINDOW = 50
CLIP_PLAYER = Player(
    still_start=0.5, switch=0.0, one_way=0.32, turning=0.2
)  # a third turns throughout: 270 degrees and more
CONTEXT = 3
PLAIN = 0.5  # of a place's mean sharpness: below it a player that sees thinks of a wall and turns
WEIGHTS = Path(__file__).parents[2] / "realtime_omni/models/tiny_world/weights"


def load_net(folder: Path, device: torch.device | str, name: str = "model.safetensors") -> TinyWorldNet:
    """The network of `folder` (config.json beside the weights) in float32."""
    net = TinyWorldNet(NetworkConfig.load(folder / "config.json"))
    net.load_state_dict({key: value.float() for key, value in load_file(str(folder / name)).items()})
    return net.to(device).eval()


def generator_for(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(HELD_OUT + seed)


def gradient_energy(frames_BCHW: Tensor) -> Tensor:
    """[B]: mean absolute pixel difference after a 3x3 mean, so that noise does not count as sharpness."""
    soft = functional.avg_pool2d(frames_BCHW, 3, 1)
    across = (soft[..., 1:] - soft[..., :-1]).abs().mean((1, 2, 3))
    return across + (soft[..., 1:, :] - soft[..., :-1, :]).abs().mean((1, 2, 3))


def decibels(squared: Tensor) -> float:
    """From a mean squared error in the -1..1 scale to dB of the 0..1 scale."""
    return -10 * math.log10(max(squared.mean().item() / 4, 1e-10))


def per_frame(values: dict[int, float]) -> dict[str, float]:
    return {str(frame): round(value, 3) for frame, value in values.items()}


def picture_scores(truth: Tensor, ours: Tensor) -> dict:
    """psnr, copy-last psnr and sharpness at FRAMES of clips [B, F, 3, H, W] in -1..1."""
    last = truth[:, CONTEXT - 1]

    def squared(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().mean((1, 2, 3))

    return {
        "psnr_db": per_frame({f: decibels(squared(ours[:, f], truth[:, f])) for f in FRAMES}),
        "psnr_db_copy_last": per_frame({f: decibels(squared(last, truth[:, f])) for f in FRAMES}),
        "psnr_db_autoencoder": None,
        "psnr_db_autoencoder_note": "the model works on pixels; there is no autoencoder",
        "sharpness_ratio": per_frame(
            {f: (gradient_energy(ours[:, f]).mean() / gradient_energy(truth[:, f]).mean()).item() for f in FRAMES}
        ),
    }


def yaw_scores(simulator: Simulator, clips: Clips, ours: Tensor, per: int, last_block: int, reach: int) -> dict:
    """How far each generated block turned, against the keys.

    The last frame of a block is matched with renders at the true position and candidate yaws;
    a block's turn is its match minus that of the block before. Blocks that turn less than 10
    degrees are left out.
    """
    device, side = ours.device, min(64, ours.shape[-1])
    small = Simulator(side, device, supersample=2)
    offsets = torch.arange(-reach, reach + 1, device=device) * math.radians(1.5)
    clips_count, found = len(ours), [torch.zeros(len(ours), device=device)]
    for block in range(1, last_block + 1):
        frame = (block + 1) * per - 1
        pose = clips.pose[:, frame].repeat_interleave(len(offsets), 0)
        pose[:, 2] += offsets.repeat(clips_count)
        row = torch.arange(clips_count, device=device).repeat_interleave(len(offsets))
        renders = [
            small.picture(clips.maps.rows(row[part]), clips.place[row[part], frame], pose[part])
            for part in torch.arange(len(row), device=device).split(8 if device.type == "cpu" else 512)
        ]
        candidates = torch.cat(renders).view(clips_count, len(offsets), 3, side, side) * 2 - 1
        shown = functional.avg_pool2d(ours[:, frame], ours.shape[-1] // side)
        best = (candidates - shown[:, None]).square().mean((2, 3, 4)).argmin(1)
        found.append(offsets[best])
    errors, signs = [], []
    for block in range(1, last_block + 1):
        held = clips.keys[:, block * per : (block + 1) * per]
        turn = (held[..., L] - held[..., J]).sum(1) * TURN
        off = found[block] - found[block - 1]
        turned = turn.abs() > math.radians(10)
        errors.append((off.abs() / turn.abs().clamp_min(1e-6))[turned])
        signs.append(((turn + off) * turn > 0)[turned])
    return {
        "yaw_error_pct": round(100 * torch.cat(errors).mean().item(), 2),
        "yaw_sign_ok": round(torch.cat(signs).float().mean().item(), 4),
        "yaw_blocks": sum(len(part) for part in signs),
    }


def switch_score(
    simulator: Simulator, rollout: Rollout, judge: PlaceClassifier, count: int, seed: int, per: int
) -> float:
    """Share of clips whose first block after a change of place shows the new place."""
    generator = generator_for(seed + 1, simulator.device)
    maps = random_maps(count, generator, simulator.device)
    keys, place, pose = simulator.drive(maps, 5 * per, Player(switch=0.0), generator)
    old = torch.arange(count, device=place.device) % len(PLACES)
    new = (old + 1 + torch.arange(count, device=place.device) // len(PLACES) % (len(PLACES) - 1)) % len(PLACES)
    place = torch.cat((old[:, None].expand(-1, 4 * per), new[:, None].expand(-1, per)), dim=1)
    start = to_signed(simulator.draw(maps, place[:, :per], pose[:, :per]))
    frames = rollout(start, keys, place, seed)[:, 4 * per :]
    named = judge(frames.flatten(0, 1)).unflatten(0, (count, per)).mean(1).argmax(1)
    return round((named == new).float().mean().item(), 4)


def sharpness_of_places(simulator: Simulator, count: int = 24) -> Tensor:
    """Mean gradient energy of the simulator's pictures of each place [places]."""
    generator = generator_for(2, simulator.device)
    maps = random_maps(count, generator, simulator.device)
    _, place, pose = simulator.drive(maps, 6, Player(switch=0.0, still_start=0.0), generator)
    energies = []
    for index in range(len(PLACES)):
        frames = simulator.draw(maps, torch.full_like(place[:, -1:], index), pose[:, -1:])
        energies.append(gradient_energy(to_signed(frames[:, 0])).mean())
    return torch.stack(energies)


def window_faults(
    frames: Tensor, keys: Tensor, place: Tensor, expected: Tensor, judge: PlaceClassifier
) -> tuple[list, list]:
    """What is wrong in each 50-frame window of one run [F, 3, H, W]: (start, reason, sharpness, place, motion); and
    the windows' sharpness ratios."""
    energy = torch.cat([gradient_energy(part) for part in frames.split(100)])
    named = torch.cat([judge(part).argmax(-1) for part in frames.split(100)])
    moved = torch.cat((torch.zeros(1, device=frames.device), (frames[1:] - frames[:-1]).abs().mean((1, 2, 3))))
    faults, ratios = [], []
    for begin in range(0, len(frames) - WINDOW + 1, WINDOW):
        part = slice(begin, begin + WINDOW)
        ratio = (energy[part] / expected[place[part]]).mean().item()
        right = (named[part] == place[part]).float().mean().item()
        pressed = keys[part].any(-1)
        motion = moved[part][pressed].mean().item() if pressed.any() else 1.0
        ratios.append(ratio)
        for wrong, reason in (
            (not 0.3 <= ratio <= 2.0, "sharpness"),
            (right < 0.5, "place"),
            (motion < 0.004, "still"),
        ):
            if wrong:
                faults.append([begin, reason, round(ratio, 2), round(right, 2), round(motion, 4)])
    return faults, ratios


@dataclasses.dataclass(frozen=True)
class LongRuns:
    """What the long runs are told: the simulator's maps, random keys, places (a change in about 25 blocks) and poses."""

    maps: Maps
    keys: Tensor
    place: Tensor
    pose: Tensor
    start: Tensor
    expected: Tensor

    @classmethod
    def draw(cls, simulator: Simulator, seeds: int, frames: int, seed: int, per: int) -> LongRuns:
        generator = generator_for(seed + 3, simulator.device)
        maps = random_maps(seeds, generator, simulator.device)
        player = Player(switch=0.04, still_start=1.0)
        keys, place, pose = simulator.drive(maps, frames // per * per, player, generator)
        start = to_signed(simulator.draw(maps, place[:, :per], pose[:, :per]))
        return cls(maps, keys, place, pose, start, sharpness_of_places(simulator))


def watched_run(runs: LongRuns, show: Callable[[slice, Tensor], Tensor], per: int) -> tuple[Tensor, Tensor]:
    """(frames, keys) of the long runs with a player that sees: where its last frame is plain it turns right.

    `show(part, keys)` returns the frames [B, per, 3, H, W] of the block `part`. The random keys
    of `runs` turn away from the walls of the simulator's map; a model has walls of its own.
    """
    blocks, pressed = [runs.start], [runs.keys[:, :per]]
    right = torch.zeros_like(runs.keys[:1, :1])
    right[..., L] = 1
    for first in range(per, runs.keys.shape[1], per):
        part = slice(first, first + per)
        plain = gradient_energy(blocks[-1][:, -1]) < PLAIN * runs.expected[runs.place[:, first - 1]]
        pressed.append(torch.where(plain[:, None, None], right, runs.keys[:, part]))
        blocks.append(show(part, pressed[-1]))
    return torch.cat(blocks, dim=1), torch.cat(pressed, dim=1)


def watched_model(runs: LongRuns, play: ReferencePlay, per: int) -> tuple[Tensor, Tensor]:
    """`watched_run` in the model's world."""
    play.block(runs.keys[:, :per], runs.place[:, :per], runs.start)
    return watched_run(runs, lambda part, keys: play.block(keys, runs.place[:, part]), per)


def watched_simulator(runs: LongRuns, simulator: Simulator, per: int) -> tuple[Tensor, Tensor]:
    """`watched_run` in the simulator itself: what the same player and the same measure make of the truth."""
    pose = runs.pose[:, per - 1]

    def show(part: slice, keys: Tensor) -> Tensor:
        nonlocal pose
        poses = []
        for frame in range(per):
            pose = advance(runs.maps, pose, keys[:, frame])
            poses.append(pose)
        return to_signed(simulator.draw(runs.maps, runs.place[:, part], torch.stack(poses, 1)))

    return watched_run(runs, show, per)


def turn_scores(simulator: Simulator, rollout: Rollout, count: int, seed: int, per: int) -> dict:
    """PSNR of the view after a turn on the spot against the start, which it should equal.

    `full`: 72 frames to the right, 360 degrees, which with the start is the window; `back`: 45 degrees to
    the right and back in 18 frames.
    """
    generator = generator_for(seed + 4, simulator.device)
    maps = random_maps(count, generator, simulator.device)
    _, place, pose = simulator.drive(maps, per, Player(switch=0.0, still_start=1.0), generator)
    start = to_signed(simulator.draw(maps, place, pose))
    circle = round(2 * math.pi / TURN)
    turns = {"full": [L] * circle, "back": [L] * (3 * per) + [J] * (3 * per)}
    found = {}
    for name, pressed in turns.items():
        keys = torch.zeros(count, per + len(pressed), 8, device=start.device)
        keys[:, torch.arange(per, keys.shape[1]), pressed] = 1
        shown = rollout(start, keys, place[:, :1].expand(-1, keys.shape[1]), seed)
        found[f"turn_{name}_psnr_db"] = round(decibels((shown[:, -1] - start[:, 0]).square()), 2)
    return found


def long_run_scores(ours: Tensor, keys: Tensor, place: Tensor, expected: Tensor, judge: PlaceClassifier) -> dict:
    """How many of the finished runs [B, F, 3, H, W] collapsed, and where.

    A run is collapsed when a 50-frame window has a sharpness outside 0.3 to 2 of the simulator's
    mean for its places, or is mostly taken for another place, or does not move while keys are held.
    """
    found = [window_faults(ours[row], keys[row], place[row], expected, judge) for row in range(len(ours))]
    ratios = [ratio for _, row in found for ratio in row]
    return {
        "collapsed_seeds": sum(bool(faults) for faults, _ in found),
        "long_rollout_seeds": len(ours),
        "long_rollout_frames": ours.shape[1],
        "long_rollout_windows": len(ratios),
        "long_rollout_sharpness_ratio": {"min": round(min(ratios), 3), "mean": round(sum(ratios) / len(ratios), 3)},
        "collapsed_windows": [[row, *fault] for row, (faults, _) in enumerate(found) for fault in faults],
    }


def evaluate(
    quick: bool = False,
    device: str = "cpu",
    seed: int = 0,
    weights: Path = WEIGHTS,
    name: str = "model.safetensors",
    rollout: Rollout | None = None,
    steps: int | None = None,
    keep: dict | None = None,
    simulator_runs: bool = True,
    tell: Callable[[str, dict], None] = lambda part, results: None,
) -> dict:
    """Every number of the model card. `keep`, if given, receives pictures for contact sheets.

    `simulator_runs`: measure the simulator's own long runs too; they do not depend on the weights. `tell` is called
    with a part's name and all results so far whenever a part is done: whole evaluations take an hour on two cores.
    """
    net = load_net(weights, device, name)
    config, per = net.config, net.config.frames_per_block
    rollout = rollout or reference_rollout(net, steps)
    judge = load_classifier(device)
    simulator = Simulator(config.image_size, device)
    count, switches, seeds, long = (6, 12, 1, 200) if quick else (96, 60, 5, 2000)
    with torch.inference_mode():
        clips = simulator.clips(count, 17 * per, generator_for(seed, device), CLIP_PLAYER)
        truth = to_signed(clips.frames)
        ours = rollout(truth[:, :CONTEXT], clips.keys, clips.place, seed)
        turned = (clips.keys[..., L] - clips.keys[..., J]).sum(1).abs() * math.degrees(TURN)
        results = picture_scores(truth, ours)
        tell("pictures", results)
        results |= yaw_scores(simulator, clips, ours, per, 3 if quick else 8, 10)
        tell("yaw", results)
        results["prompt_switch_ok"] = switch_score(simulator, rollout, judge, switches, seed, per)
        tell("prompt switch", results)
        results |= turn_scores(simulator, rollout, 2 if quick else 48, seed, per)
        tell("turns", results)
        runs = LongRuns.draw(simulator, seeds, long, seed, per)
        frames = rollout(runs.start, runs.keys, runs.place, seed)
        results |= long_run_scores(frames, runs.keys, runs.place, runs.expected, judge)
        tell("long runs", results)
        frames, keys = watched_model(runs, ReferencePlay(net, seeds, seed, steps), per)
        results["watched"] = long_run_scores(frames, keys, runs.place, runs.expected, judge)
        tell("watched runs", results)
        if simulator_runs and not quick:
            drawn, keys = watched_simulator(runs, simulator, per)
            results["watched_simulator"] = long_run_scores(drawn, keys, runs.place, runs.expected, judge)
            drawn = to_signed(simulator.draw(runs.maps, runs.place, runs.pose))
            results["simulator"] = long_run_scores(drawn, runs.keys, runs.place, runs.expected, judge)
    if keep is not None:
        keep |= {"truth": truth, "ours": ours, "long": frames[:, :: max(1, long // 20)].cpu()}
    accelerator = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else platform.machine()
    results["conditions"] = {
        "hardware": accelerator,
        "torch": torch.__version__,
        "seed": seed,
        "clips": count,
        "quick": quick,
        "share_of_clips_turning_90_degrees": round((turned >= 90).float().mean().item(), 3),
        "weights_sha256": hashlib.sha256((weights / name).read_bytes()).hexdigest(),
        "sampler_steps": steps or config.sampler_steps,
        "sampler_shift": config.sampler_shift,
        "parameters": sum(p.numel() for p in net.parameters()),
    }
    return results


def contact_sheet(rows: Tensor, path: Path) -> None:
    """Write pictures [R, N, 3, H, W] in -1..1 as a grid."""
    from PIL import Image

    high, wide, _, side, _ = rows.shape
    grid = ((rows.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).permute(0, 3, 1, 4, 2).reshape(high * side, wide * side, 3)
    Image.fromarray(grid.cpu().numpy()).save(path, quality=70, method=6)


def save_sheets(keep: dict, folder: Path, tag: str, ending: str = "png") -> None:
    """Clips (truth above ours, at FRAMES) and long runs."""
    at = [2, *FRAMES]
    pairs = torch.stack((keep["truth"][:6][:, at], keep["ours"][:6][:, at]), dim=1).flatten(0, 1)
    contact_sheet(pairs, folder / f"clips_{tag}.{ending}")
    contact_sheet(keep["long"][:, :12], folder / f"long_{tag}.{ending}")


def check(args: argparse.Namespace) -> None:
    """What would only come out after the first minutes, or the last. Raises ConfigError."""
    kind, _, number = args.device.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())):
        raise ConfigError(f"--device is cpu, cuda or cuda:N, not {args.device!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {args.device}: torch sees {torch.cuda.device_count()} CUDA devices")
    try:
        load_net(args.weights, "cpu", args.name)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--weights {args.weights}, --name {args.name}: {error}") from None
    try:
        if args.out:
            args.out.open("a").close()
        if args.sheets:
            args.sheets.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="realtime-omni eval tiny-world", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few clips, under three minutes on two cores")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=count(0, MOST_SEED), default=0)
    parser.add_argument("--steps", type=count(1, 64), help="sampler steps; default: the config's")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--name", default="model.safetensors")
    parser.add_argument("--json", action="store_true", help="indented JSON on standard output (always so)")
    parser.add_argument("--out", type=Path, help="file for the results; holds what is known after each part")
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets")
    args = parser.parse_args(argv)
    check(args)
    keep: dict = {}
    began_s = time.monotonic()

    def tell(part: str, results: dict) -> None:
        print(f"{part}: done after {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")

    results = evaluate(
        args.quick, args.device, args.seed, args.weights, args.name, steps=args.steps, keep=keep, tell=tell
    )
    tell("all", results)
    text = json.dumps(results, indent=2)
    if args.sheets:
        save_sheets(keep, args.sheets, args.name.split(".")[0] + f"_{results['conditions']['sampler_steps']}")
    print(text)


if __name__ == "__main__":
    main()
