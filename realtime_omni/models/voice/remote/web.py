"""Requests to endpoints: one event loop in a thread of its own, and values that grow while an answer comes.

Owns the connections, their bounds and their end. What an answer means is for who asks. Whoever looks at a request's
result does so from another thread: results only grow, and are complete once :attr:`Request.done` is true.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from realtime_omni.models.voice.remote.settings import Endpoint

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
WHOLE_S = 60.0
"""Of any request from beginning to end, however lively."""
_CONNECT_S = 2.0
"""Longer than any reachable host needs; a turn waits this long before a fallback takes it."""
_MOST_CONNECTIONS = 64
"""To one endpoint: one that is slow takes none of another's."""
_MOST_ERROR_BYTES = 512
_MOST_KEPT = 64
_MOST_WANTED = 1024
_WANTED_S = 5.0
"""Who wants a result looks at it in every frame: forgotten sooner, it would be asked for anew by each of too many calls."""
R = TypeVar("R", bound="Request")


class EndpointFailed(Exception):
    """An endpoint refused, answered something else, or too much. Its text names no key."""


class Request:
    """One request under way. ``failed``: it ended without being complete."""

    def __init__(self) -> None:
        self.failed = False
        self.looked_s = math.inf
        """When its result was looked at last (``time.monotonic``)."""
        self._over = threading.Event()
        self._future: Future[None] | None = None

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def follow(self, future: Future[None]) -> None:
        """Called once, by who begins it."""
        self._future = future
        future.add_done_callback(self._end)

    def stop(self) -> None:
        """Nobody wants the rest: the connection is closed."""
        if self._future is not None:
            self._future.cancel()

    def wait(self) -> None:
        """Until it is done."""
        self._over.wait()

    def _end(self, future: Future[None]) -> None:
        self.failed = future.cancelled() or future.exception() is not None
        self._over.set()


class Web:
    """The loop, and a client for each kind of endpoint. ``transport``: in place of the network, for tests. Needs httpx.

    Certificates, proxies and their exceptions are taken from the environment, as httpx does."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._transport = transport
        self._clients: dict[type[Endpoint], httpx.AsyncClient] = {}
        self._works: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="voice-web", daemon=True)
        self._thread.start()

    def begin(self, name: str, work: Callable[[], Awaitable[None]]) -> Future[None]:
        """Run ``work`` in the loop; what fails is logged under ``name``, once, with its reason and no traceback."""
        return asyncio.run_coroutine_threadsafe(self._guarded(name, work), self._loop)

    @asynccontextmanager
    async def post(self, endpoint: Endpoint, path: str, **content: Any) -> AsyncIterator[httpx.Response]:
        """The answer's head; its body is read with :func:`pieces`. Raises EndpointFailed for a status but 200."""
        import httpx

        headers = {"accept-encoding": "identity"}  # a piece is then no longer than what was received
        key = endpoint.key()
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        timeout = httpx.Timeout(endpoint.timeout_s, connect=min(_CONNECT_S, endpoint.timeout_s))
        url = f"{endpoint.url.rstrip('/')}{path}"
        client = self._client_of(type(endpoint))
        async with client.stream("POST", url, headers=headers, timeout=timeout, **content) as response:
            if response.status_code in (401, 403):
                raise EndpointFailed(f"status {response.status_code}: it wants another key")
            if response.status_code != 200:
                raise EndpointFailed(f"status {response.status_code}: {await _beginning(response, key)}")
            yield response

    def close(self) -> None:
        """Requests under way are stopped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _client_of(self, kind: type[Endpoint]) -> httpx.AsyncClient:
        import httpx

        client = self._clients.get(kind)
        if client is None:
            limits = httpx.Limits(max_connections=_MOST_CONNECTIONS)
            client = self._clients[kind] = httpx.AsyncClient(transport=self._transport, limits=limits)
        return client

    async def _guarded(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        import httpx

        task = asyncio.current_task()
        assert task is not None
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        try:
            async with asyncio.timeout(WHOLE_S):
                await work()
        except (EndpointFailed, httpx.HTTPError, TimeoutError) as error:
            log.warning("%s does not answer: %s", name, str(error) or type(error).__name__)
            raise
        except Exception:
            log.exception("%s: the answer could not be read", name)
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(asyncio.sleep(0))  # what was begun is known in self._works
        for work in self._works:
            work.cancel()  # and nothing below it: a connection's own tasks are anyio's to cancel
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        for client in self._clients.values():
            self._loop.run_until_complete(client.aclose())
        self._loop.close()


async def pieces(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises EndpointFailed beyond ``most`` bytes, and for an encoded one."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise EndpointFailed("the answer is compressed, which was not asked for")
    got = 0
    async for piece in response.aiter_raw():
        got += len(piece)
        if got > most:
            raise EndpointFailed(f"the answer is longer than {most} bytes")
        yield piece


async def whole(response: httpx.Response, most: int) -> bytes:
    return b"".join([piece async for piece in pieces(response, most)])


async def _beginning(response: httpx.Response, key: str | None) -> str:
    """Of a refusal, for the log: one printable line, without the key, of which none is cut in two either."""
    body, secret = b"", (key or "").encode()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) >= _MOST_ERROR_BYTES + len(secret):
            break
    if secret:
        body = body.replace(secret, b"...")
    text = body[:_MOST_ERROR_BYTES].decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)


class Asked(Generic[R]):
    """Requests by what they ask, begun when they are asked for first; bounded: the oldest that nobody looks at any
    more are stopped and forgotten."""

    def __init__(self, begin: Callable[[Any], R], *, patient: bool) -> None:
        """``patient``: whoever asks waits for the end; slow, and the same every time."""
        self._begin = begin
        self._patient = patient
        self._known: OrderedDict[Hashable, R] = OrderedDict()

    def look(self, key: Hashable, question: Any) -> R:
        """The request, as far as it has come. Called from one thread."""
        now_s = time.monotonic()
        request = self._known.get(key)
        if request is None:
            request = self._known[key] = self._begin(question)
            self._forget(now_s)
        else:
            self._known.move_to_end(key)
        request.looked_s = now_s
        if self._patient:
            request.wait()
        return request

    def _forget(self, now_s: float) -> None:
        while len(self._known) > _MOST_KEPT:
            key, oldest = next(iter(self._known.items()))
            if len(self._known) <= _MOST_WANTED and now_s - oldest.looked_s < _WANTED_S:
                return
            self.drop(key)

    def forgive(self, key: Hashable) -> None:
        """Where it failed, it is asked again the next time."""
        request = self._known.get(key)
        if request is not None and request.done and request.failed:
            del self._known[key]

    def drop(self, key: Hashable) -> None:
        """Nobody wants it any more; who does asks again."""
        request = self._known.pop(key, None)
        if request is not None:
            request.stop()
