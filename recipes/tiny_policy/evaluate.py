"""Does the policy solve the tasks? Thousands of scenes at once, in this process.

    realtime-omni eval tiny-policy [--episodes 540] [--delay 4] [--rtc trained] [--json]    # the weights of the package
    realtime-omni eval tiny-policy --url ws://127.0.0.1:8000    # the same over a socket, of what is served there
    python -m recipes.tiny_policy.evaluate out/model    # another checkpoint; the command takes one, too

Owns: the clock of ticks, the delay, the count. Every run has the same scenes and the same noise (both by ``--seed``), so runs
are paired: a difference is the condition's. A robot asks for a new chunk every ``EXECUTED`` ticks; the chunk is computed
from the pictures of that tick and arrives ``delay`` ticks later, while the old one goes on. Its action 0 belongs to the tick
that was looked at, so the first ``delay`` actions are never executed.

Controls: ``--instruction shuffled`` gives every robot another task's words, ``--cameras blank`` black pictures, ``--policy
expert`` the scripted expert, ``--policy random`` noise in place of a policy.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realtime_omni.bench.arguments import MOST_SEED, count
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.policy import LoadOptions
from realtime_omni.models.pi0.loader import load_lerobot
from realtime_omni.models.pi0.model import TINY_POLICY
from realtime_omni.models.pi0.network import Pi0Network
from realtime_omni.rtc.modes import Mode, Settings, step_rule
from realtime_omni.rtc.previous import Previous
from realtime_omni_client.errors import WorldError
from realtime_omni_protocols.openpi import PolicyServerError
from recipes.tiny_policy import expert
from recipes.tiny_policy.policy import Request, Statistics, chunks, inputs_of, look
from recipes.tiny_policy.shape import EXECUTED, HORIZON
from recipes.tiny_policy.table import ACTION_DIM, EPISODE_TICKS, TASKS, Scene, new_scenes, step, succeeded

Z95 = 1.959964  # of the normal distribution, two-sided


Ask = Callable[[Request], Tensor]
"""A request to a chunk [B, H, 3] in robot units."""

SEED = 1_000_003
"""Of scenes and noise; training never draws these."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What one run of episodes is done under. ``tasks``: the episodes are spread evenly over these. ``rtc`` None: the server's
    own; in this process, none."""

    episodes: int = 60 * len(TASKS)
    delay: int = 0
    rtc: Mode | None = None
    instruction: str = "own"
    cameras: str = "as they are"
    policy: str = "checkpoint"
    tasks: tuple[int, ...] = tuple(range(len(TASKS)))
    seed: int = SEED


DEFAULT = Conditions()
FLEET = 63
"""Robots at once on a server, seven for each task; the recipe has room for 64."""
MOST_EPISODES = 20_000
"""All scenes are drawn at once, 0.2 MB each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``success`` [B] bool; ``ticks`` [B]: until then, or all; ``jumps`` [n]: of the motion between the last action of one
    chunk and the first of the next, in standard deviations of an action, while an episode ran."""

    success: Tensor
    ticks: Tensor
    jumps: Tensor

    @staticmethod
    def joined(parts: Sequence[Outcome]) -> Outcome:
        return Outcome(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Outcome)))


Tell = Callable[[int, int, int], None]
"""What hears how far a run is: tick, solved so far, robots."""


def silent(tick: int, solved: int, robots: int) -> None:
    """Nobody watches."""


def on_stderr(tick: int, solved: int, robots: int) -> None:
    print(f"tick {tick} of {EPISODE_TICKS} at most: {solved} of {robots} solved", file=sys.stderr, flush=True)


def longest_delay() -> int:
    """Ticks. Beyond it the old chunk would end before the new one arrives, or another be asked for before."""
    return min(EXECUTED, HORIZON - EXECUTED)


def run(
    scene: Scene, ask: Ask, *, delay: int, generator: torch.Generator, scale: Tensor, tell: Tell = silent
) -> Outcome:
    """Every scene until it has succeeded or ``EPISODE_TICKS`` have passed. ``scale`` [2]: the unit of jumps, m/s. ``tell``
    is called at each new chunk.

    Raises ValueError for a delay beyond :func:`longest_delay`."""
    longest = longest_delay()
    if not 0 <= delay <= longest:
        raise ValueError(f"a delay of 0 to {longest} ticks is bridged by a chunk of {HORIZON}, not {delay}")
    rows, device = len(scene), scene.task.device
    success = torch.zeros(rows, dtype=torch.bool, device=device)
    ticks = torch.full((rows,), EPISODE_TICKS, device=device)
    jumps: list[Tensor] = []

    def noise() -> Tensor:
        return torch.randn(rows, HORIZON, ACTION_DIM, generator=generator, device=device)

    # The robot stands still until its first chunk is there.
    current, start = ask(Request(scene, nothing_left(rows, device), delay, noise())), 0
    asked = 0
    coming: Tensor | None = None
    before: Tensor | None = None
    for tick in range(EPISODE_TICKS):
        # A chunk that is due takes its place before the next is asked for.
        switched = coming is not None and tick == asked + delay
        if coming is not None and switched:
            current, start, coming = coming, asked, None
        if tick - asked == EXECUTED:
            tell(tick, int(success.sum()), rows)
            chunk = ask(Request(scene, current[:, tick - start :], delay, noise()))
            asked = tick
            if delay:
                coming = chunk
            else:
                current, start, switched = chunk, tick, True
        action = current[:, tick - start]
        if switched and before is not None:
            jumps.append(((action - before)[:, :2] / scale).norm(dim=1)[~success])
        scene, before = step(scene, action), action
        ticks = torch.where(~success & succeeded(scene), tick + 1, ticks)
        success = success | succeeded(scene)
        if bool(success.all()):
            break
    return Outcome(success, ticks, torch.cat(jumps) if jumps else torch.zeros(0))


def nothing_left(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, 0, ACTION_DIM, device=device)


def network_policy(
    network: Pi0Network, statistics: Statistics, rtc: Mode, *, cameras: str = "as they are", task: Tensor | None = None
) -> Ask:
    """The network in this process. ``task`` [B]: whose words the robots are given."""

    def ask(request: Request) -> Tensor:
        frames = look(request.scene, network.shape.image_size)
        if cameras == "blank":
            frames = torch.zeros_like(frames)
        inputs = inputs_of(request.scene, frames, statistics, task)
        left = statistics.model_actions(request.left)
        previous = Previous.of(list(left.cpu()), HORIZON, ACTION_DIM).to(frames.device)
        rule = step_rule(Settings(mode=rtc), previous, [request.delay] * len(left)) if left.shape[1] else None
        return statistics.robot_actions(chunks(network, inputs, request.noise, rule))

    return ask


def compared(ask: Ask, delay: int, squares: list[Tensor]) -> Ask:
    """``ask`` itself, which leaves in ``squares`` how far the motion of each chunk's executed actions is from the expert's:
    squared errors [B] in (m/s)^2. A beginning that is given counts as far as it differs from what the expert would do."""

    def both(request: Request) -> Tensor:
        chunk = ask(request)
        error = (chunk - expert.chunk(request.scene, HORIZON))[:, delay : delay + EXECUTED, :2]
        squares.append(error.square().sum(dim=-1).mean(dim=1))
        return chunk

    return both


def expert_policy(request: Request) -> Tensor:
    return expert.chunk(request.scene, HORIZON)


def random_policy(request: Request) -> Tensor:
    """Noise in the range of actions: what success by chance is."""
    return torch.cat((request.noise[..., :2] * 0.2, (request.noise[..., 2:] > 0).float()), dim=-1)


def load(folder: Path, device: torch.device) -> tuple[Pi0Network, Statistics]:
    """The folder through the ordinary loader."""
    policy = load_lerobot(folder, LoadOptions(device=device))
    network, processing = policy.network, policy.processing
    assert isinstance(network, Pi0Network)
    numbers = (processing.state.first, processing.state.second, processing.action.first, processing.action.second)
    return network, Statistics(*(torch.from_numpy(value).to(device) for value in numbers))


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927)."""
    p, z2 = successes / count, Z95**2
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def shuffled(task: Tensor, generator: torch.Generator) -> Tensor:
    """Another task for every row, each as likely."""
    other = torch.randint(1, len(TASKS), task.shape, generator=generator, device=task.device)
    return (task + other) % len(TASKS)


def report(scene: Scene, outcome: Outcome, conditions: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one run, JSON-ready."""
    count, successes = len(scene), int(outcome.success.sum())
    by_task = {
        TASKS[n][0]: round(float(outcome.success[scene.task == n].float().mean()), 4)
        for n in range(len(TASKS))
        if bool((scene.task == n).any())
    }
    jump = float(outcome.jumps.quantile(0.99)) if len(outcome.jumps) else None
    return {
        "conditions": conditions,
        "episodes": count,
        "success_rate": round(successes / count, 4),
        "interval_95": [round(edge, 4) for edge in wilson(successes, count)],
        "by_task": by_task,
        "median_ticks": int(outcome.ticks.median()),
        "action_jump_p99": None if jump is None else round(jump, 4),
    }


def measure(
    network: Pi0Network,
    statistics: Statistics,
    asked: Conditions,
    *,
    url: str | None = None,
    ask: Ask | None = None,
    tell: Tell = silent,
) -> dict[str, Any]:
    """The report of one run: of the network in this process, of a server at ``url`` that owns the weights, or of ``ask``."""
    device = statistics.action_std.device
    generator = torch.Generator(device=device).manual_seed(asked.seed)
    task = torch.tensor(asked.tasks, device=device).repeat(-(-asked.episodes // len(asked.tasks)))[: asked.episodes]
    scene = new_scenes(asked.episodes, generator, task)
    # Of its own: the noise of a run does not depend on whether words were shuffled.
    shuffling = torch.Generator(device=device).manual_seed(asked.seed)
    words = shuffled(task, shuffling) if asked.instruction == "shuffled" else task

    def episodes(ask: Ask, rows: slice = slice(None)) -> Outcome:
        scale = statistics.action_std[:2]
        return run(scene[rows], ask, delay=asked.delay, generator=generator, scale=scale, tell=tell)

    if url is not None:
        outcome = Outcome.joined(
            [
                _fleet(url, words, first, asked, network.shape.image_size, episodes)
                for first in range(0, len(scene), FLEET)
            ]
        )
    else:
        here = ask or network_policy(network, statistics, asked.rtc or Mode.NONE, cameras=asked.cameras, task=words)
        outcome = episodes({"expert": expert_policy, "random": random_policy}.get(asked.policy, here))
    conditions = {name: getattr(asked, name) for name in ("delay", "instruction", "cameras", "policy", "seed")}
    mode = asked.rtc or ("the server's own" if url else Mode.NONE)
    return report(scene, outcome, {**conditions, "rtc": mode, "over": "socket" if url else device.type})


def _fleet(
    url: str, words: Tensor, first: int, asked: Conditions, size: int, episodes: Callable[[Ask, slice], Outcome]
) -> Outcome:
    """The episodes of up to ``FLEET`` robots from number ``first`` on, each on a connection of its own."""
    from recipes.tiny_policy.sockets import SocketRobots

    rows = slice(first, first + FLEET)
    task = words[rows]
    robots = SocketRobots(url, len(task), task, asked.seed, size, asked.cameras, first=first, rtc=asked.rtc)
    with robots:
        return episodes(robots.ask, rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="realtime-omni eval tiny-policy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folder", type=Path, nargs="?", default=TINY_POLICY, help="a checkpoint; default: the package's"
    )
    parser.add_argument(
        "--episodes", type=count(1, MOST_EPISODES), default=DEFAULT.episodes, help="spread evenly over the tasks"
    )
    parser.add_argument(
        "--seed", type=count(0, MOST_SEED), default=SEED, help="of scenes and noise; training never draws these"
    )
    parser.add_argument(
        "--delay", type=count(0, longest_delay()), default=0, help="ticks between an observation and its chunk"
    )
    parser.add_argument(
        "--rtc",
        type=Mode,
        choices=[m for m in Mode if m is not Mode.ENSEMBLE],
        help="how chunks join; a server that does not offer it refuses. Default: none, over a socket the server's own",
    )
    parser.add_argument("--instruction", choices=("own", "shuffled"), default="own")
    parser.add_argument("--cameras", choices=("as they are", "blank"), default="as they are")
    parser.add_argument("--policy", choices=("checkpoint", "expert", "random"), default="checkpoint")
    parser.add_argument("--tasks", type=count(0, len(TASKS) - 1), nargs="+", default=DEFAULT.tasks)
    parser.add_argument("--url", help="robots over a socket; the server then owns the weights")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args(argv)
    if args.url is not None and args.policy != DEFAULT.policy:
        parser.error("--policy is of this process; at --url the server's acts")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        network, statistics = load(args.folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except OSError as error:
        raise ConfigError(f"{args.folder}: {error.strerror}") from None
    asked = {name: getattr(args, name) for name in (f.name for f in fields(Conditions))}
    conditions = Conditions(**{**asked, "tasks": tuple(args.tasks)})
    try:
        told = measure(network, statistics, conditions, url=args.url, tell=silent if args.json else on_stderr)
    except PolicyServerError as refused:
        raise SystemExit(f"the server refuses: {refused}") from None
    except (WorldError, OSError) as lost:
        raise ConfigError(f"--url {args.url}: {lost or 'no answer'}") from None
    sys.stdout.write(json.dumps(told, indent=None if args.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
