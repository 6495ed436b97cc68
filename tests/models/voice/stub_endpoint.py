"""A server that speaks OpenAI's three languages badly or well, as a test scripts it. It listens on a port of this machine.

Each request is answered by ``answers[path]``, a coroutine function (request, send); ``send`` writes bytes of the body. What
came is in ``requests``, and ``gone`` is set when a client hangs up in the middle of an answer.
"""

import asyncio
import json
import threading
from dataclasses import dataclass, field


@dataclass
class Request:
    path: str
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class StubEndpoint:
    def __init__(self):
        self.answers = {}
        self.requests = []
        self.gone = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.going_on = asyncio.Event()
        """Set by :meth:`go_on`; an answer that awaits it is slow for as long as the test wants."""
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def go_on(self):
        self.loop.call_soon_threadsafe(self.going_on.set)

    def close(self):
        self._run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self):
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def _serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(head[0].split()[1], headers, body)
            self.requests.append(request)
            answer = asyncio.create_task(self.answers[request.path](request, Reply(writer)))
            hung_up = asyncio.create_task(reader.read())
            await asyncio.wait({answer, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.gone.set()
                answer.cancel()
            hung_up.cancel()
        finally:
            writer.close()


@dataclass
class Reply:
    """The answer under way. The first byte sends the head; without :meth:`begin` it is a plain 200."""

    writer: asyncio.StreamWriter
    begun: bool = field(default=False)

    async def begin(self, status=200, kind="application/octet-stream", **headers):
        self.begun = True
        more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{more}connection: close\r\n\r\n"
        self.writer.write(head.encode())
        await self.writer.drain()

    async def __call__(self, data: bytes):
        if not self.begun:
            await self.begin()
        self.writer.write(data)
        await self.writer.drain()


def event(delta=None, finish=None, **more):
    """One chunk of a chat's stream."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]} | more).encode() + b"\n\n"


def says(*texts, finish="stop"):
    """A chat endpoint that says these pieces."""

    async def answer(request, send):
        await send.begin(kind="text/event-stream")
        for text in texts:
            await send(event({"content": text}))
        await send(event(finish=finish) + b"data: [DONE]\n\n")

    return answer


def sends(data, status=200, kind="application/octet-stream", **headers):
    """Any answer."""

    async def answer(request, send):
        await send.begin(status, kind, **headers)
        await send(data)

    return answer
