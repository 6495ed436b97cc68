"""``serve``: one process, a manager for each model, one listening socket, and an orderly end.

Owns the socket, the signals and the order of start and stop: check the settings, bind, start the managers, say the URL; on
SIGTERM or SIGINT close every session with its last word, then the sockets, then the managers, each within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from fastapi import FastAPI

from realtime_omni.config import Config
from realtime_omni.errors import ConfigError
from realtime_omni.server.app import create_app
from realtime_omni.server.deployment import read_contract
from realtime_omni.server.engine_policy import EnginePolicy
from realtime_omni.server.guard import GuardedHttp
from realtime_omni.server.kinds import by_kind
from realtime_omni.server.openpi import create_policy_app
from realtime_omni.server.peer import PeerProtocol
from realtime_omni.server.settings import ServerSettings

if TYPE_CHECKING:
    from realtime_omni.manager import SessionManager

_log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005
"""A block passes between the event loop, the engine and an encoder five times. Each of them may keep the interpreter
for this long when another one wants it; with Python's own 5 ms that wait is most of what a block costs."""


def serve(config: Config, *beside: Config, note: str = "") -> None:
    """Serve until SIGTERM or SIGINT. ``beside``: models of other kinds; the server's settings are the first's. ``note``: a
    line for whoever started it, once it serves.

    Raises:
        ConfigError: refused settings (a public host without a key) or an address that cannot be bound.
    """
    settings = ServerSettings.from_config(config)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bind(settings))
        robots = None if settings.openpi_port is None else sockets.enter_context(bind(settings, settings.openpi_port))
        from realtime_omni.manager import SessionManager

        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                managers = [SessionManager(config=each) for each in (config, *beside)]
                runner.run(_serve(managers, settings, listener, robots, note))
        except asyncio.CancelledError:  # a signal before anybody was served, or a second one
            _leave()


def _leave() -> NoReturn:
    """End at once. The thread of a model that is being loaded is in native code, and an interpreter that shuts down would end
    it there by aborting the process."""
    logging.shutdown()
    os._exit(0)


YOUNG_OBJECTS = 10_000
"""New containers before the collector looks at them. A batch of calls makes some thousand and gives them all back, so Python's
700 are reached twenty times a second by nothing that stays: a tick leaves no cycles. Ten times ten of these are before a
full collection, so garbage in cycles, which ended sessions leave, is bounded by a million objects."""


def keep_for_good() -> None:
    """What was made up to now stays until the end, and the garbage collector need not look at it again; at what sessions
    make it looks when something may have been left.

    Modules and models are 200,000 objects: once in two or three thousand blocks it went through all of them, and everything
    stood still for 0.15 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: half the time per message. None: asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    managers: Sequence[SessionManager],
    settings: ServerSettings,
    listener: socket.socket,
    robots: socket.socket | None,
    note: str,
) -> None:
    stop, serving = asyncio.Event(), asyncio.Event()
    with _signals(stop, serving):
        async with contextlib.AsyncExitStack() as stack:
            for manager in managers:  # in turn: two threads that import torch's parts at once could meet half-made ones
                sys.stderr.write(f"loading {manager.config.model}\n")
                sys.stderr.flush()
                await stack.enter_async_context(manager)
            where = await stack.enter_async_context(_listening(managers, settings, listener, robots))
            keep_for_good()
            serving.set()
            *others, last = (manager.describe().name for manager in managers)
            names = f"{', '.join(others)} and {last}" if others else last
            ready = f"realtime-omni serves {names} on {where}  (Ctrl-C stops it)"
            sys.stdout.write("\n".join((ready, note, "") if note else (ready, "")))
            sys.stdout.flush()
            await stop.wait()
            _log.info("stopping")


@contextlib.asynccontextmanager
async def _listening(
    managers: Sequence[SessionManager], settings: ServerSettings, listener: socket.socket, robots: socket.socket | None
) -> AsyncIterator[str]:
    """The application; for a voice its calls, for a policy robots on its port and on one of their own. Yields where, in
    words."""
    backends = [backend for manager in managers if (backend := robot_backend(manager)) is not None]
    if not backends and robots is not None:
        raise ConfigError("server.openpi_port: no policy is served", path="server.openpi_port")
    voice = by_kind(managers).get("voice")
    async with contextlib.AsyncExitStack() as stack:
        calls = None
        if voice is not None:
            from realtime_omni.call import Calls

            calls = await stack.enter_async_context(Calls(voice))
        first, *beside = managers
        backend = backends[0] if backends else None
        app = create_app(first, settings, robots=backend, calls=calls, beside=beside)
        where = await stack.enter_async_context(running(app, settings, listener))
        if _is_every_address(settings.host):
            where += " and this computer's other addresses"
        if robots is not None:
            url = await stack.enter_async_context(running(create_policy_app(app.state.robots), settings, robots))
            where += f", robots also on {url.replace('http', 'ws', 1)}"
        yield where


def robot_backend(manager: SessionManager) -> EnginePolicy | None:
    """Robots over a started manager; None when its model is no policy. Raises ConfigError (``deploy``)."""
    model = manager.describe()
    if model.policy is None:
        if manager.config.deploy:
            raise ConfigError(f"deploy: {model.name} is no policy", path="deploy")
        return None
    return EnginePolicy(manager, read_contract(manager.config.deploy, model.name, model.policy), model.policy)


@contextlib.asynccontextmanager
async def running(app: FastAPI, settings: ServerSettings, listener: socket.socket) -> AsyncIterator[str]:
    """Serve ``app`` (of :func:`create_app`) on a bound socket while the block runs; yields the URL."""
    server = _Server(
        uvicorn.Config(
            app,
            http=GuardedHttp,
            ws=PeerProtocol,
            lifespan="off",
            ws_max_size=settings.max_message_bytes + 1024,  # a little more, so that the refusal has a code
            ws_ping_interval=settings.ping_interval_s,
            ws_ping_timeout=settings.ping_timeout_s,
            ws_per_message_deflate=False,  # media is compressed already; text is small
            timeout_graceful_shutdown=2,
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="warning",
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
    try:
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            raise ConfigError("server: the listening side did not start", path="server")
        host, port = listener.getsockname()[:2]
        if _is_every_address(host):  # no address that a browser could open
            host = "::1" if ":" in host else "127.0.0.1"
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await asyncio.gather(*(hub.shutdown(settings.shutdown_timeout_s) for hub in app.state.hubs))
        server.should_exit = True
        await asyncio.wait([task], timeout=settings.shutdown_timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        for hub in app.state.hubs:
            hub.close()


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def bind(settings: ServerSettings, port: int | None = None) -> socket.socket:
    """A listening socket on the settings' port, or another. Raises ConfigError naming the address."""
    port = settings.port if port is None else port
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and with it on
    # every block would wait some 40 ms for the peer's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = error.strerror or "the address cannot be used"
        hint = "; --port takes another" if error.errno == errno.EADDRINUSE and port == settings.port else ""
        raise ConfigError(f"server.port: cannot listen on {settings.host}:{port}: {reason}{hint}") from None
    return listener


@contextlib.contextmanager
def _signals(stop: asyncio.Event, serving: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT stops in order, a second one, or one before anybody is served, cuts the wait
    short."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def received() -> None:
        if stop.is_set() or not serving.is_set():
            main.cancel()
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would answer 1012 before the sessions said their last word."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
