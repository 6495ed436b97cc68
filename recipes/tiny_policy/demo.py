"""``realtime-omni demo robot``: a served policy, one robot of the simulator, and a page that shows what it does.

    realtime-omni demo robot [--port 8000] [--no-browser] [--task 0] [--delay 4] [--joining none]

Three parts that a lab has too: a policy server in a process of its own, a robot that talks to it over a real WebSocket
(``robot``), and this page. Owns: start and end of the three, the pictures and numbers that the page is sent, and its
commands. The page's socket sends, ten times a second, the report as text and after it a JPEG per camera.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import simplejpeg  # type: ignore[import-untyped]
import torch
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.staticfiles import StaticFiles

from realtime_omni.errors import ConfigError
from realtime_omni_client import PolicyStream, WorldError
from realtime_omni_client.policy import policy_url
from realtime_omni_client.transport import websocket_connector
from realtime_omni_protocols.openpi import STREAM_PROTOCOL, PolicyServerError
from recipes.tiny_policy.pictures import WRIST_HALF, view
from recipes.tiny_policy.robot import MAX_DELAY, Answer, Done, Latency, Phase, Robot, Score, keep_time, slow
from recipes.tiny_policy.shape import HORIZON
from recipes.tiny_policy.table import EPISODE_TICKS, HALF, INSTRUCTIONS, TICK_S, Scene

PAGE = Path(__file__).parent / "page"
TOP_SIDE, WRIST_SIDE = 256, 128
"""Pixels of the pictures that the page shows; the policy is sent its own, of 96."""
JPEG_QUALITY = 88
RESET_TIMEOUT_S = 15.0


# ---------------------------------------------------------------------- what the page is told, and what it may ask


class Setup(msgspec.Struct, frozen=True, tag="setup", tag_field="type"):
    """Once, first."""

    policy: str
    instructions: tuple[str, ...]
    joinings: tuple[str, ...]
    max_delay: int
    horizon: int
    limit: int
    half_m: float
    tick_s: float


class Report(msgspec.Struct, frozen=True, tag="report", tag_field="type"):
    """One control step. ``task``: what the robot is told; ``chosen``: the user's choice, None for another each episode.
    ``plan``: what comes next; ``tool``: where the gripper is, m; ``low``: it is closed on nothing, down on the table."""

    tick: int
    episode_tick: int
    phase: Phase
    task: int
    chosen: int | None
    delay: int
    joining: str
    past: tuple[Done, ...]
    plan: tuple[tuple[float, ...], ...]
    answer: Answer | None
    tool: tuple[float, float]
    low: bool
    late_ms: float
    scores: tuple[Score, ...]


class ChooseTask(msgspec.Struct, frozen=True, tag="task", tag_field="type", forbid_unknown_fields=True):
    """``task``: None for another one each episode."""

    task: int | None


class ChooseDelay(msgspec.Struct, frozen=True, tag="delay", tag_field="type", forbid_unknown_fields=True):
    delay: int


class ChooseJoining(msgspec.Struct, frozen=True, tag="joining", tag_field="type", forbid_unknown_fields=True):
    joining: str


class NewScene(msgspec.Struct, frozen=True, tag="new_scene", tag_field="type", forbid_unknown_fields=True):
    pass


Command = ChooseTask | ChooseDelay | ChooseJoining | NewScene


@dataclass(frozen=True, slots=True)
class Frame:
    report: bytes
    top: bytes
    wrist: bytes


class Board:
    """The latest frame, for however many viewers; a slow one misses some."""

    def __init__(self) -> None:
        self.number = 0
        self._frame: Frame | None = None
        self._changed = asyncio.Event()

    def publish(self, frame: Frame) -> None:
        self.number, self._frame = self.number + 1, frame
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, number: int) -> tuple[int, Frame]:
        """The latest frame, once it is not the one of this number."""
        while self._frame is None or self.number == number:
            await self._changed.wait()
        return self.number, self._frame


class Show:
    """The robot at work and everybody who watches it."""

    def __init__(self, robot: Robot, setup: Setup) -> None:
        self.board = Board()
        self.robot = robot
        self.setup = setup
        self._late_s = 0.0
        self._stepped = asyncio.Event()

    async def run(self) -> None:
        """For ever. Painting goes on beside the control loop and leaves steps out when it is slower."""
        await first_of(self._paint(), keep_time(self.robot, self.setup.tick_s, self._note))

    def _note(self, late_s: float) -> None:
        self._late_s = late_s
        self._stepped.set()

    async def _paint(self) -> None:
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            report, scene = msgspec.json.encode(self.report()), self.robot.scene
            self.board.publish(Frame(report, *await asyncio.to_thread(painted, scene)))

    def report(self) -> Report:
        robot = self.robot
        scene = robot.scene
        x, y = scene.tool[0].tolist()
        return Report(
            tick=robot.tick,
            episode_tick=robot.episode_tick,
            phase=robot.phase,
            task=int(scene.task[0]),
            chosen=robot.task,
            delay=robot.delay,
            joining=robot.joining,
            past=tuple(robot.past),
            plan=tuple(robot.plan()),
            answer=robot.answer,
            tool=(x, y),
            low=bool(scene.closed[0]) and int(scene.held[0]) < 0,
            late_ms=self._late_s * 1000,
            scores=tuple(robot.scores.values()),
        )

    def carry_out(self, text: str) -> None:
        """What a page asks for. Raises ValueError for what no page of ours asks."""
        command = msgspec.json.decode(text, type=Command)
        match command:
            case ChooseTask(task):
                if task is not None and not 0 <= task < len(INSTRUCTIONS):
                    raise ValueError("no such instruction")
                self.robot.set_task(task)
            case ChooseDelay(delay):
                self.robot.set_delay(delay)
            case ChooseJoining(joining):
                if joining not in self.setup.joinings:
                    raise ValueError("the server does not offer this")
                self.robot.set_joining(joining)
            case NewScene():
                self.robot.new_scene()


def painted(scene: Scene) -> tuple[bytes, bytes]:
    """JPEGs of both cameras."""
    top = view(scene, torch.zeros_like(scene.tool), HALF, TOP_SIDE)
    wrist = view(scene, scene.tool, WRIST_HALF, WRIST_SIDE)
    return _jpeg(top), _jpeg(wrist)


def _jpeg(picture: torch.Tensor) -> bytes:
    rgb = (picture[0].permute(1, 2, 0) * 255).round().to(torch.uint8).contiguous().numpy()
    return bytes(simplejpeg.encode_jpeg(rgb, quality=JPEG_QUALITY, colorsubsampling="444"))


def create_app(show: Show) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.websocket("/live")
    async def live(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(msgspec.json.encode(show.setup).decode())
        sending = asyncio.create_task(_send(socket, show.board))
        try:
            async for text in socket.iter_text():
                show.carry_out(text)
        except ValueError:  # msgspec's errors are ones too
            await socket.close(1008, "not understood")
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


async def _send(socket: WebSocket, board: Board) -> None:
    number = 0
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # starlette's word for a socket that is closed
        while True:
            number, frame = await board.after(number)
            await socket.send_text(frame.report.decode())
            await socket.send_bytes(frame.top)
            await socket.send_bytes(frame.wrist)


# ---------------------------------------------------------------------- the parts, and their end


@contextlib.asynccontextmanager
async def policy_server(recipe: str, overrides: list[str]) -> AsyncIterator[str]:
    """``realtime-omni serve`` in a process of its own, on a free port; its address. ConfigError when it does not start; what
    it complains about is on stderr then."""
    flags = [flag for override in overrides for flag in ("--set", override)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "realtime_omni.cli", "serve", recipe, "--port", "0", "--log-level", "warning", *flags),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours: the robot says goodbye before its server goes
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise ConfigError("the policy server did not start")
        yield found[0]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def listening(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the port is taken, or none."""
    if not host:
        raise ConfigError("--host is empty: the page would be open to every network")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError) as error:  # OverflowError: 65,536 and more
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; name another with --port") from None
    return listener


@contextlib.asynccontextmanager
async def page_server(app: FastAPI, listener: socket.socket) -> AsyncIterator[str]:
    """The page's address."""
    server = _Server(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2])
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(options: argparse.Namespace) -> None:
    """Until a signal, or until the policy is gone."""
    torch.set_num_threads(1)  # the other core is the policy's
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with listening(options.host, options.port) as listener:
        await first_of(stop.wait(), _show(options, listener))


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Until one of them has ended; the others are cancelled, and have ended too. Raises what it raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()


async def _show(options: argparse.Namespace, listener: socket.socket) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = options.url or await stack.enter_async_context(policy_server(options.recipe, options.overrides))
        latency = Latency()
        connector = websocket_connector(policy_url(url), api_key=None, open_timeout_s=10, protocol=STREAM_PROTOCOL)
        stream = PolicyStream(slow(connector, latency), control_hz=1 / TICK_S, timeout_s=RESET_TIMEOUT_S)
        await stack.enter_async_context(stream)
        stack.callback(setattr, latency, "s", 0.0)  # the goodbye waits for nothing
        setup = setup_of(stream)
        joining = options.joining or next(iter(setup.joinings), "")
        if options.joining and joining not in setup.joinings:
            raise ConfigError(f"--joining: the server offers {', '.join(setup.joinings) or 'no choice'}")
        robot = Robot(stream, latency, joining=joining, task=options.task, delay=options.delay, seed=options.seed)
        show = Show(robot, setup)
        address = await stack.enter_async_context(page_server(create_app(show), listener))
        print(f"a robot at work: {address}  (Ctrl-C stops it)", flush=True)
        if options.browser:
            webbrowser.open(address)
        await show.run()


def setup_of(stream: PolicyStream) -> Setup:
    """What an open stream's server says of itself."""
    policy = "" if stream.side.hello is None else stream.side.hello.policy
    joinings = tuple(stream.metadata.get("rtc_modes", ()))
    return Setup(policy, INSTRUCTIONS, joinings, MAX_DELAY, HORIZON, EPISODE_TICKS, HALF, TICK_S)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="realtime-omni demo robot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8000, help="of the page")
    parser.add_argument("--host", default="127.0.0.1", help="where the page listens")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="open no page")
    parser.add_argument("--task", type=int, choices=range(len(INSTRUCTIONS)), help="one instruction; default: shuffled")
    parser.add_argument("--delay", type=int, choices=range(MAX_DELAY + 1), default=0, help="added, in control steps")
    parser.add_argument("--joining", help="how a chunk continues the one before: trained, auto or none")
    parser.add_argument("--seed", type=int, default=0, help="of the scenes")
    parser.add_argument("--url", help="a policy server that runs already; default: one is started")
    parser.add_argument("--recipe", default="tiny-policy", help="what the started server serves")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE", help="for it")
    try:
        asyncio.run(run(parser.parse_args(argv)))
    except (WorldError, PolicyServerError) as error:  # what our clients raise
        print(f"the policy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
