"""`PolicyClient`: ask a robot policy for actions, one call at a time, as with openpi-client.

    policy = PolicyClient("127.0.0.1", 8000)
    actions = policy.infer({"observation.images.top": image, "state": state, "prompt": "pick up the cube"})["actions"]
    policy.reset()

Owns: the blocking socket, which wire the server speaks, and the retry after a lost connection.  Must not know: the
rules of the wires (`StreamClientSide`, `PolicyClientSide`). With a realtime_omni server it speaks our subprotocol: a
late answer is recognised and dropped, `reset` is real, errors have a code and a path, and a lost connection resumes its
session. With any other openpi server it speaks openpi's wire, where `reset` sends nothing. An error is always raised,
never returned.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from realtime_omni_protocols.openpi import (
    MAX_FRAME_BYTES,
    PATH,
    STREAM_PROTOCOL,
    PolicyClientSide,
    PolicyError,
    PolicyServerError,
    StreamClientSide,
    StreamState,
)
from realtime_omni_protocols.openpi.stream_messages import (
    ActionChunk,
    Closed,
    ErrorMessage,
    Hello,
    ResetDone,
    Resumed,
    Started,
)

from .errors import ConnectError, ConnectionLostError, ProtocolViolation, answered

T = TypeVar("T")


class PolicyTimeoutError(TimeoutError):
    """The policy did not answer in time. Its answer, should it still come, is dropped."""


def policy_url(host: str, port: int | None = None) -> str:
    """The WebSocket URL for what a user types: a host, or a ``ws``/``http`` address with or without a path."""
    for http, ws in (("http://", "ws://"), ("https://", "wss://")):
        if host.startswith(http):
            host = ws + host.removeprefix(http)
    address = host if "://" in host else f"ws://{host}"
    scheme, _, rest = address.partition("://")
    name, slash, path = rest.partition("/")
    return f"{scheme}://{name}{'' if port is None else f':{port}'}{slash + path if path else PATH}"


class PolicyClient:
    """A policy behind a socket. Connects when it is made; threads may share it, calls take turns.

    Args:
        host, port: as openpi-client takes them; a whole ``ws://host:port/path`` is a host too.
        api_key: sent as ``Authorization: Api-Key``.
        timeout_s: for connecting and for each answer.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int | None = None, api_key: str | None = None, *, timeout_s: float = 60.0
    ) -> None:
        self.url = policy_url(host, port)
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened = contextlib.ExitStack()
        self._ws: ClientConnection | None = None
        self._stream = StreamClientSide()
        self._openpi: PolicyClientSide | None = None
        self._metadata: dict[str, Any] = {}
        self._label: str | None = None
        self._calls = 0
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the three calls of openpi's policies

    def infer(self, obs: Mapping[str, Any], *, tick: int | None = None) -> dict[str, Any]:
        """The answer to an observation: ``actions`` (float32 ``[H, A]``, writable), ``policy_timing``,
        ``server_timing``.

        ``tick``: the control step of the capture (by default the number of the call). ``session_id``, ``seed`` and
        ``sampling_params`` in the observation mean what they mean on the wire; another ``session_id`` is a `reset`.

        Raises:
            PolicyServerError: the server refused the observation (``code``), or its policy failed.
            PolicyTimeoutError, ConnectError, ConnectionLostError: no answer.
            ProtocolViolation: the server broke the protocol.
        """
        with self._lock:
            at = self._calls if tick is None else tick
            self._calls += 1
            return self._again(lambda: self._infer(obs, at))

    def reset(self) -> None:
        """A new episode. Returns when the server has dropped the old one; on openpi's wire there is nothing to send."""
        with self._lock:
            self._again(self._reset)

    def get_server_metadata(self) -> dict[str, Any]:
        """The deployment's handshake map."""
        return dict(self._metadata)

    def close(self) -> None:
        """End the session and the connection. Harmless when repeated; a later call connects again."""
        with self._lock:
            with contextlib.suppress(Exception):
                if self._ws is not None and self._openpi is None and self._stream.state is StreamState.LIVE:
                    self._ws.send(self._stream.close())
                    self._until(Closed, min(2.0, self._timeout_s))
            self._drop()

    # ---- inside

    def _again(self, call: Callable[[], T]) -> T:
        """Run ``call``, once more on a new connection when the one there was turned out to be dead."""
        while True:
            fresh = self._ws is None
            try:
                if fresh:
                    self._connect()
                return call()
            except PolicyTimeoutError:
                raise
            except PolicyError as error:
                self._drop()
                raise ProtocolViolation(str(error)) from None
            except (ConnectionClosed, OSError):
                self._drop()
                if fresh:
                    raise ConnectionLostError("the connection broke") from None

    def _infer(self, obs: Mapping[str, Any], tick: int) -> dict[str, Any]:
        if self._openpi is not None:
            return self._infer_openpi(obs)
        self._settle()
        message = dict(obs)
        label, seed = message.pop("session_id", None), message.pop("seed", None)
        steps = (message.pop("sampling_params", None) or {}).get("num_inference_steps")
        if self._label is not None and label is not None and label != self._label:
            self._reset()
        self._label = label or self._label
        self._send(self._stream.observe(message, tick, seed=seed, steps=steps))
        chunk = self._until(ActionChunk, self._timeout_s)
        timing = dict(chunk.timing)
        policy_timing = {"infer_ms": timing.get("infer_ms", 0.0)}
        return {"actions": chunk.actions.copy(), "policy_timing": policy_timing, "server_timing": timing}

    def _infer_openpi(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        assert self._openpi is not None
        self._send(self._openpi.infer(obs))
        try:
            answer = self._openpi.receive(self._receive(time.monotonic() + self._timeout_s))
        except PolicyServerError as error:
            if not error.open:
                self._drop()
            raise
        except PolicyTimeoutError:
            self._drop()  # on this wire a late answer could not be told from the next one
            raise
        assert answer is not None
        return {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in answer.items()}

    def _settle(self) -> None:
        """Wait for the end of a reset that a timeout cut short."""
        if self._stream.state is StreamState.RESETTING:
            self._until(ResetDone, self._timeout_s)

    def _reset(self) -> None:
        if self._openpi is None:
            self._settle()
            self._send(self._stream.reset())
            self._until(ResetDone, self._timeout_s)

    def _connect(self) -> None:
        headers = None if self._api_key is None else {"Authorization": f"Api-Key {self._api_key}"}
        try:
            self._ws = self._opened.enter_context(
                connect(
                    self.url,
                    subprotocols=[Subprotocol(STREAM_PROTOCOL)],
                    additional_headers=headers,
                    compression=None,
                    max_size=MAX_FRAME_BYTES,
                    open_timeout=self._timeout_s,
                )
            )
        except InvalidStatus as error:
            status = error.response.status_code
            raise ConnectError(answered(status), status=status) from None
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, ValueError) as error:
            raise ConnectError(f"no connection to the server: {error}") from error
        try:
            self._greet()
        except BaseException as error:  # whoever makes a client has none to close yet
            self._drop()
            if isinstance(error, ConnectionClosed | TimeoutError):
                raise ConnectError("the server did not greet") from None
            if isinstance(error, PolicyError):
                raise ProtocolViolation(str(error)) from None
            raise

    def _greet(self) -> None:
        assert self._ws is not None
        if self._ws.subprotocol != STREAM_PROTOCOL:
            self._openpi = PolicyClientSide()
            self._metadata = dict(self._openpi.handshake(self._receive(time.monotonic() + self._timeout_s)))
            return
        self._openpi = None
        hello = self._until(Hello, self._timeout_s)
        self._metadata = dict(hello.metadata)
        self._send(self._stream.start())
        try:
            self._until((Started, Resumed), self._timeout_s)
        except PolicyServerError as error:
            if error.code != "session_not_found":
                raise
            self._start_afresh()
        if self._stream.owes_reset:
            self._reset()

    def _start_afresh(self) -> None:
        """The session did not outlive its connection; the next one begins here."""
        self._stream.forget()
        self._send(self._stream.start())
        self._until(Started, self._timeout_s)

    def _until(self, kind: Any, timeout_s: float) -> Any:
        """The next event of a kind; an error that concerns this call is raised, what is late is passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._stream.receive(self._receive(deadline))
            if isinstance(event, ErrorMessage) and event.seq in (None, self._stream.seq):
                message = event.message if event.path in (None, "$") else f"{event.path}: {event.message}"
                raise PolicyServerError(message, event.code, open_=not event.fatal)
            if isinstance(event, kind) and (not isinstance(event, ActionChunk) or event.seq == self._stream.seq):
                return event
            if isinstance(event, Closed):
                self._stream.forget()
                self._drop()
                raise ConnectionLostError(f"the server ended the session ({event.reason})")

    def _send(self, frame: bytes) -> None:
        assert self._ws is not None
        self._ws.send(frame)

    def _receive(self, deadline: float) -> str | bytes:
        assert self._ws is not None
        try:
            return self._ws.recv(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise PolicyTimeoutError("the policy did not answer in time") from None

    def _drop(self) -> None:
        self._ws = None
        with contextlib.suppress(Exception):
            self._opened.close()
        self._openpi = None
        if not self._stream.disconnected():
            self._stream.forget()
