"""The HTTP face: the page, health, metrics, discovery, session list, and the WebSocket route.

Owns routes and headers. Everything a route says is an explicit translation of the manager's values; errors carry codes.
``create_app`` gives an application that can be mounted elsewhere; whoever calls it starts and stops the manager. Its lifespan
ends the sessions; a server that does not run lifespans (``server.run``, a mount) shuts down ``app.state.hubs`` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from realtime_omni.errors import ErrorCode, OmniError, SessionGoneError
from realtime_omni.media import FORMATS
from realtime_omni.server.auth import AccessMiddleware, Refusal, RequestFacts, bearer_tokens, deny
from realtime_omni.server.backend import Backend, PolicyFacts
from realtime_omni.server.client_secrets import ClientSecrets
from realtime_omni.server.clock import Clock
from realtime_omni.server.codes import describe_error
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.kinds import by_kind, first_kinds, kinds_of
from realtime_omni.server.live import LiveHub, add_live_routes
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.moshi import add_moshi_routes
from realtime_omni.server.openpi import PolicyHub, add_policy_routes
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.policy import PolicyBackend
from realtime_omni.server.realtime import add_realtime_routes
from realtime_omni.server.settings import ServerSettings
from realtime_omni.server.transport import StarletteTransport, TransportLost
from realtime_omni.server.voice import VoiceHub
from realtime_omni_protocols.openpi import PATH as ROBOT_PATH
from realtime_omni_protocols.realtime import DUPLEX_PATH
from realtime_omni_protocols.realtime import PATH as REALTIME_PATH
from realtime_omni_protocols.world import PATH, PROTOCOL, WireCode
from realtime_omni_protocols.world_messages import ErrorMessage

if TYPE_CHECKING:
    from realtime_omni.call import Calls

_log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' blob: data:; connect-src 'self' ws: wss:; worker-src 'self' blob:;"
        " object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_STATUS = {
    WireCode.SESSION_NOT_FOUND: 404,
    WireCode.MODEL_UNKNOWN: 404,
    WireCode.SESSION_GONE: 410,
    WireCode.SESSION_STATE: 409,
    WireCode.CAPACITY: 503,
    WireCode.SHUTDOWN: 503,
    WireCode.INTERNAL: 500,
}
_FORMAT_NEEDS = {"h264": "av", "jpeg": "simplejpeg"}


def create_app(
    manager: Backend,
    settings: ServerSettings,
    *,
    clock: Clock | None = None,
    robots: PolicyBackend | None = None,
    calls: Calls | None = None,
    beside: Sequence[Backend] = (),
) -> FastAPI:
    """The application of one manager, or of several: one for each kind of model at most. With the robot endpoint where there
    are robots, and the voice endpoints where there are calls (which whoever calls this opens and closes); both belong to one of
    the managers.

    ``beside``: the managers after the first, whose settings are the server's. Raises ConfigError for two of the same kind.
    ``app.state.hub`` is the world hub, ``app.state.hubs`` every hub: shut them down before the manager stops. The robots' one,
    ``app.state.robots``, may serve a port of its own too (:func:`realtime_omni.server.openpi.create_policy_app`).
    """
    models = by_kind((manager, *beside))
    metrics = Metrics()
    engines = first_kinds(models)
    for kind, each in engines.items():
        metrics.watch(kind, each.statistics)

    def settings_of(each: Backend) -> ServerSettings:
        """How long a session waits for its client is its model's matter."""
        return settings if each is manager else replace(settings, grace_s=each.config.session.grace_s)

    world = models.get("world", manager)
    hub = WorldHub(world, settings_of(world), metrics, clock)
    voice = models.get("voice", manager)
    voice_hub = None if calls is None else VoiceHub(calls, voice.describe().name, settings_of(voice), metrics, clock)
    policy = models.get("policy", manager)
    robot_hub = None if robots is None else PolicyHub(robots, settings_of(policy), clock, metrics)

    keys = ClientSecrets()

    def admits(facts: RequestFacts) -> bool:
        """A client secret opens Realtime sessions and nothing else."""
        if voice_hub is None or not facts.websocket or facts.path not in (REALTIME_PATH, DUPLEX_PATH):
            return False
        tokens = bearer_tokens(facts.authorization, facts.subprotocols)
        return any(keys.find(token, voice_hub.clock.now_s()) is not None for token in tokens)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for hub in app.state.hubs:
            await hub.shutdown(settings.shutdown_timeout_s)
            hub.close()

    app = FastAPI(title="realtime-omni", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.hub = hub
    app.state.robots = robot_hub
    app.state.hubs = tuple(each for each in (hub, robot_hub, voice_hub) if each is not None)
    app.state.metrics = metrics
    app.add_middleware(
        AccessMiddleware,
        settings=settings,
        refused=lambda refusal: metrics.count("refusals_total", code=refusal.code),
        admits=admits,
    )
    app.add_exception_handler(OmniError, _known_error)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _unknown_error)
    managers = tuple(engines.values())
    _add_status_routes(app, managers, metrics)
    _add_session_routes(app, managers)
    _add_model_routes(app, managers)

    @app.websocket(PATH)
    async def serve_world(socket: WebSocket) -> None:
        await _serve_world(hub, socket)

    if robot_hub is not None:
        add_policy_routes(app, robot_hub, ROBOT_PATH)
    if voice_hub is not None:
        add_live_routes(app, LiveHub(voice_hub))
        add_moshi_routes(app, voice_hub)
        add_realtime_routes(app, voice_hub, keys)
    home = "talk.html" if "voice" in models and "world" not in models else "index.html"
    app.mount("/", _Page(home, [route.path for route in app.routes if isinstance(route, WebSocketRoute)]))
    return app


def _add_status_routes(app: FastAPI, managers: Sequence[Backend], metrics: Metrics) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        ok, reason = _health(managers)
        if any(hub.stopping for hub in app.state.hubs):
            ok, reason = False, "the server is stopping"
        return JSONResponse({"status": "ok" if ok else "unhealthy", "reason": reason}, 200 if ok else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await metrics.scrape(), media_type=CONTENT_TYPE_LATEST)


def _add_session_routes(app: FastAPI, managers: Sequence[Backend]) -> None:
    @app.get("/v1/sessions")
    async def sessions() -> Response:
        rows = [_session(each, view) for each in managers for view in each.sessions()]
        return JSONResponse({"sessions": rows})

    @app.delete("/v1/sessions/{session_id}")
    async def close_session(session_id: str) -> Response:
        await _holder(managers, session_id).close_session(session_id, "operator")
        return Response(status_code=204)


def _add_model_routes(app: FastAPI, managers: Sequence[Backend]) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        ids = [each.describe().name for each in managers]
        named = [{"id": name, "object": "model", "created": 0, "owned_by": "realtime-omni"} for name in ids]
        return JSONResponse({"object": "list", "data": named, "models": [_model(each) for each in managers]})

    @app.get("/v1/models/{name}/starts/{start}.png")
    async def start_picture(name: str, start: str) -> Response:
        for each in managers:
            if name == each.describe().name and start in each.describe().starts:
                picture = await asyncio.to_thread(each.start_image, start)
                return Response(picture, media_type="image/png", headers={"cache-control": "max-age=3600"})
        return _error(404, WireCode.INVALID_ARGUMENT, "no such start picture")


def _health(managers: Sequence[Backend]) -> tuple[bool, str]:
    """Well when every engine is; of several the ill ones are named."""
    if len(managers) == 1:
        report = managers[0].health()
        return report.ok, report.reason
    ill = [f"{each.describe().name}: {report.reason}" for each in managers if not (report := each.health()).ok]
    return not ill, "; ".join(ill) or "ok"


def _holder(managers: Sequence[Backend], session_id: str) -> Backend:
    """Whose session this is; else whose it was, else the first: they know which error to raise."""
    last = managers[0]
    for each in managers:
        try:
            each.get_session(session_id)
        except SessionGoneError as error:
            if error.code is ErrorCode.SESSION_GONE:
                last = each
        else:
            return each
    return last


async def _serve_world(hub: WorldHub, socket: WebSocket) -> None:
    """Admit the connection, then hand it to the hub."""
    if hub.full or hub.stopping:
        hub.metrics.count("connections_total", outcome="capacity")
        code = WireCode.SHUTDOWN if hub.stopping else WireCode.CAPACITY
        await socket.send_denial_response(_error(503, code, "no more connections are accepted now"))
        return
    transport = StarletteTransport(socket, hub.settings.send_timeout_s)
    if PROTOCOL not in socket.scope.get("subprotocols", ()):
        hub.metrics.count("connections_total", outcome="version")
        await socket.accept()
        await _refuse_version(hub, transport)
        return
    hub.metrics.count("connections_total", outcome="accepted")
    await socket.accept(subprotocol=PROTOCOL)
    await hub.serve(transport)


async def _refuse_version(hub: WorldHub, transport: StarletteTransport) -> None:
    side = hub.new_side()
    message = ErrorMessage(
        code=WireCode.UNSUPPORTED_VERSION, message=f"offer the WebSocket subprotocol {PROTOCOL}", fatal=True
    )
    try:
        await transport.send(side.send(message))
        await transport.close(4400, WireCode.UNSUPPORTED_VERSION.value)
    except (TransportLost, ConnectionEnded):
        pass


def _session(manager: Backend, view: Any) -> dict[str, object]:
    return {
        "session_id": view.session_id,
        "model": manager.describe().name,
        "state": view.state,
        "epoch": view.epoch,
        "chunk_index": view.chunk_index,
        "pending_event_count": view.pending_event_count,
        "pages_used": view.pages_used,
        "attached": view.attached,
    }


def _model(manager: Backend) -> dict[str, object]:
    model = manager.describe()
    return {
        "name": model.name,
        "width": model.width,
        "height": model.height,
        "fps": manager.config.session.fps or model.fps,
        "frames_per_block": model.pictures_per_block,
        "formats": [name for name in FORMATS if "world" in kinds_of(model) and _available(name, model)],
        "default_prompt": model.default_prompt,
        "prompts": list(model.prompts),
        "starts": list(model.starts),
        "takes_image": model.takes_image,
        "controls": [
            {
                "track": item.track,
                "schema": item.schema,
                "json_schema": dict(item.json_schema),
                "description": item.description,
            }
            for item in model.controls
        ],
        "max_sessions": manager.max_sessions,
        "policy": None if model.policy is None else _policy(model.policy),
        "voice": None if model.duplex is None else asdict(model.duplex),
    }


def _policy(policy: PolicyFacts) -> dict[str, object]:
    return {
        "cameras": list(policy.cameras),
        "image_size": policy.image_size,
        "state_dim": policy.state_dim,
        "action_horizon": policy.horizon,
        "action_dim": policy.action_dim,
        "relative": policy.relative,
        "statistics": dict(policy.statistics),
    }


def _available(format_name: str, model: Any) -> bool:
    if format_name == "latent":
        return any(spec.representation == "latent" for spec in model.artifacts)
    package = _FORMAT_NEEDS.get(format_name)
    return package is None or importlib.util.find_spec(package) is not None


def _error(status: int, code: WireCode, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code.value, "message": message}}, status)


async def _known_error(request: Request, error: Exception) -> Response:
    fault = describe_error(error, path=request.scope.get("path", "-"))
    return _error(_STATUS.get(fault.code, 400), fault.code, fault.message)


async def _no_route(_: Request, error: Exception) -> Response:
    """A path or method that nobody serves, in the form of every other error."""
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, WireCode.INVALID_ARGUMENT, error.detail)
    response.headers.update(error.headers or {})
    return response


async def _unknown_error(request: Request, error: Exception) -> Response:
    fault = describe_error(error, path=request.scope.get("path", "-"))
    return _error(500, fault.code, fault.message)


class _Page(StaticFiles):
    """The built page, under a content security policy of its own files only. ``home``: what is shown at its root.

    It is the last route, so a WebSocket that nobody serves ends here; it is told ``sockets``, the paths that there are."""

    def __init__(self, home: str, sockets: Sequence[str]) -> None:
        super().__init__(directory=PAGE, html=True, check_dir=False)
        self._home = home
        self._sockets = ", ".join(sockets)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await super().__call__(scope, receive, send)
            return
        refused = Refusal(404, WireCode.INVALID_ARGUMENT, f"no WebSocket at this path; there are {self._sockets}")
        _log.info("refused status=404 path=%.80r: WebSockets are at %s", scope["path"], self._sockets)
        await deny(scope, send, refused)

    async def get_response(self, path: str, scope: Scope) -> Response:
        if not (PAGE / self._home).is_file():
            return PlainTextResponse("The page is not part of this build; the API is at /v1.\n", 404)
        response = await super().get_response(self._home if path == "." else path, scope)
        response.headers.update(_PAGE_HEADERS)
        response.headers["cache-control"] = "no-cache"
        return response
