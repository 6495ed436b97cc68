"""tiny-policy's robots on the real server: the same chunks as in the simulator's process, and the delay that was meant."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from realtime_omni.config import load as load_config  # noqa: E402
from realtime_omni.manager import SessionManager  # noqa: E402
from realtime_omni.models.common.noise import block_noise  # noqa: E402
from realtime_omni.models.pi0.model import TINY_POLICY  # noqa: E402
from realtime_omni.models.pi0.network import Pi0Network  # noqa: E402
from realtime_omni.rtc.modes import Mode  # noqa: E402
from realtime_omni.server.run import robot_backend  # noqa: E402
from recipes.tiny_policy import checkpoint, evaluate, train  # noqa: E402
from recipes.tiny_policy.policy import Request, Statistics  # noqa: E402
from recipes.tiny_policy.shape import EXECUTED, HORIZON, TRY, network_config  # noqa: E402
from recipes.tiny_policy.sockets import SocketRobots, noise_seed  # noqa: E402
from recipes.tiny_policy.table import ACTION_DIM, STATE_DIM, new_scenes  # noqa: E402
from server.robot_server import served  # noqa: E402

ROBOTS, SEED, DELAY = 3, 5, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_policy")
    torch.manual_seed(1)
    net = Pi0Network(network_config(TRY))
    train.initialise(net)
    torch.nn.init.normal_(net.action_out.weight, std=0.1)
    states, actions = torch.ones(STATE_DIM), torch.ones(ACTION_DIM)
    checkpoint.write(
        path, net.state_dict(), Statistics(states * 0.1, states * 0.3, actions * 0.05, actions * 0.15), TRY
    )
    return path


@contextmanager
def serving(*overrides: str) -> Iterator[str]:
    """The server on a thread of its own: the robots' side is synchronous, as the simulator is."""
    ready, stop, found = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        config = load_config("tiny-policy", {}, overrides)
        async with SessionManager(config=config) as manager:
            backend = robot_backend(manager)
            assert backend is not None
            async with served(backend) as address:
                found.append(address)
                ready.set()
                await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()
    loop.close()


def assert_same_chunks(url: str, folder: Path, mode: Mode, asked: str | None = None) -> None:
    """Three chunks of every robot, each a continuation of the one before and late, there and here. ``asked``: the mode that
    the observations ask for; None: ``mode`` is the server's own."""
    scene = new_scenes(ROBOTS, torch.Generator().manual_seed(2), torch.tensor([0, 1, 7]))
    network, statistics = evaluate.load(folder, torch.device("cpu"))
    here = evaluate.network_policy(network, statistics, mode)
    left = evaluate.nothing_left(ROBOTS, torch.device("cpu"))
    with SocketRobots(url, ROBOTS, scene.task, SEED, network.shape.image_size, "as they are", rtc=asked) as robots:
        for number in range(3):
            seeds = [noise_seed(SEED, row, number) for row in range(ROBOTS)]
            noise = torch.stack([block_noise(seed, 0, 0, (HORIZON, ACTION_DIM)) for seed in seeds])
            request = Request(scene, left, DELAY, noise)
            there = robots.ask(request)
            assert torch.allclose(there, here(request), atol=1e-4)
            left = there[:, EXECUTED:]
    assert robots.delays_used == [0] * ROBOTS + [DELAY] * 2 * ROBOTS


def test_over_the_socket_robots_get_the_chunks_of_the_network_and_the_delay_that_was_meant(folder: Path):
    with serving(f"options.checkpoint={folder}", "options.rtc.mode=identity") as url:
        assert_same_chunks(url, folder, Mode.IDENTITY)


def test_the_policy_of_the_package_is_the_same_over_the_socket():
    with serving() as url:
        assert_same_chunks(url, TINY_POLICY, Mode.TRAINED)
        assert_same_chunks(url, TINY_POLICY, Mode.AUTO, asked="auto")


def test_an_evaluation_is_not_of_a_mode_that_the_server_does_not_offer():
    gc.collect()
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        with serving() as url, pytest.raises(SystemExit, match="this deployment offers trained, auto, none"):
            evaluate.main(["--episodes", "1", "--url", url, "--rtc", "vjp"])
        gc.collect()
    assert [str(each.message) for each in left if each.category is ResourceWarning] == [], "a socket was left open"
