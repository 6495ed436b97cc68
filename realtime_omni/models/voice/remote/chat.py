"""What to say, from a chat endpoint: ``POST {url}/chat/completions``, streamed, with the client's tools.

Owns the messages that a conversation becomes, and how a stream becomes text and calls. A prompt is the request's own JSON,
so the same conversation asks the same. llama.cpp's server, vLLM and xllamacpp speak this language too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from realtime_omni.models.voice.remote.settings import LanguageEndpoint
from realtime_omni.models.voice.remote.web import Asked, EndpointFailed, Request, Web, pieces
from realtime_omni.models.voice.speaker import SYSTEM, Called, Draft, Returned, Said
from realtime_omni.models.voice.speech import end_of_sentences
from realtime_omni.models.voice.state import NO_TOOLS, Call, Offer, Prompt

_MOST_BYTES = 1 << 20
_MOST_LINE = 1 << 16
_MOST_CHARS = 8_192
_MOST_CALLS = 8
_MOST_ARGUMENTS = 1 << 14
_NO_RESULT = "There is no result yet."


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    index: Annotated[int, Meta(ge=0)] = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_CallPart] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class _Growing:
    """A call of a tool, as far as it has come."""

    index: int
    id: str | None
    name: str = ""
    arguments: str = ""


class Reply(Request):
    """An answer so far. ``calls`` are complete once it is done. ``read``, ``written``: tokens; without a count, the pieces."""

    def __init__(self, tools: frozenset[str]) -> None:
        super().__init__()
        self.text = ""
        self.calls: tuple[Call, ...] = ()
        self.read = self.written = 0
        self._tools = tools
        self._calls: list[_Growing] = []
        self._finished = False

    def take(self, event: bytes) -> bool:
        """One event of the stream; True when it was the last. Raises EndpointFailed for what is none."""
        if event == b"[DONE]":
            self._finished = True
            return True
        try:
            piece = msgspec.json.decode(event, type=_Piece)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EndpointFailed("a piece of the answer is not what a chat endpoint sends") from None
        if piece.error is not None:
            raise EndpointFailed("it broke off with an error")
        if piece.usage is not None:
            self.read, self.written = max(0, piece.usage.prompt_tokens), max(0, piece.usage.completion_tokens)
        for choice in piece.choices[:1]:
            self._grow(choice)
        return len(self.text) >= _MOST_CHARS

    def finish(self) -> None:
        """The stream is over. Raises EndpointFailed when it broke off, or calls what was not offered."""
        if len(self.text) >= _MOST_CHARS:
            self.text, self._finished = end_of_sentences(self.text[:_MOST_CHARS]), True
        if not self._finished:
            raise EndpointFailed("the answer broke off")
        self.calls = tuple(self._checked(c.name, c.arguments) for c in sorted(self._calls, key=lambda c: c.index))

    def _grow(self, choice: _Choice) -> None:
        delta = choice.delta or _Delta()
        if delta.content:
            self.text += delta.content
            self.written += 1
        for part in delta.tool_calls or ():
            call, function = self._growing(part), part.function or _Function()
            call.name += function.name or ""
            call.arguments += function.arguments or ""
            if len(self._calls) > _MOST_CALLS or len(call.arguments) > _MOST_ARGUMENTS:
                raise EndpointFailed("it calls too much")
        if choice.finish_reason is not None:
            self._finished = True

    def _growing(self, part: _CallPart) -> _Growing:
        """The call that a piece belongs to. Some servers give every call the same index: another name under another id is
        another call (an id alone is not; some make one up for every piece)."""
        named = part.function is not None and part.function.name
        for call in reversed(self._calls):
            if call.index == part.index:
                if named and part.id and call.id and part.id != call.id:
                    break
                return call
        self._calls.append(_Growing(part.index, part.id))
        return self._calls[-1]

    def _checked(self, name: str, arguments: str) -> Call:
        if name not in self._tools:
            raise EndpointFailed(f"it calls {name[:64]!r}, which was not offered")
        try:
            msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise EndpointFailed(f"its arguments of {name} are no JSON object") from None
        return Call(name, arguments or "{}")


class ChatEndpoint:
    """A language model behind HTTP; see :class:`~realtime_omni.models.voice.speaker.Speaker`."""

    context = None
    calls_tools = True

    def __init__(self, web: Web, settings: LanguageEndpoint, *, patient: bool = False) -> None:
        self._web = web
        self._settings = settings
        self._asked = Asked(self._begin, patient=patient)
        self._notice: Callable[[], None] | None = None

    @property
    def most_tokens(self) -> int:
        return self._settings.max_tokens

    def prompt(self, system: str | None, said: Sequence[Said], offer: Offer = NO_TOOLS) -> str:
        """JSON: the messages, the tools and their choice."""
        question: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM if system is None else system}]}
        question["messages"] += messages(said)
        if offer.tools and offer.choice != "none":
            question["tools"] = [
                {
                    "type": "function",
                    "function": {"name": t.name, "description": t.description, "parameters": json.loads(t.parameters)},
                }
                for t in offer.tools
            ]
            by_name = {"type": "function", "function": {"name": offer.choice}}
            question["tool_choice"] = offer.choice if offer.choice in ("auto", "required") else by_name
        return json.dumps(question, ensure_ascii=False)

    def draft(self, prompt: Prompt, limit: int = 0, call: str = "") -> Draft:
        """The answer so far; asking begins it. ``limit``: 0 is the settings' own. Each call has an answer of its own: another
        one that asks the same may be interrupted, and asked again it need not be the same."""
        reply = self._asked.look((call, prompt), (prompt, min(limit or self.most_tokens, self.most_tokens)))
        done = reply.done  # before the rest is read: what is complete then stays
        said = reply.text
        text = " ".join(said.split())
        if not done and text and said[-1].isspace():
            text += " "  # a sentence is whole once a blank follows it
        return Draft(text, reply.written, done, done and reply.failed, reply.calls if done else (), reply.read)

    def prepare(self, system: str | None, said: Sequence[Said]) -> None:
        """Nothing: an endpoint keeps no conversation."""

    def watch(self, notice: Callable[[], None]) -> None:
        self._notice = notice

    def drop(self, prompt: Prompt, call: str = "") -> None:
        """The call does not want this answer any more: its connection is closed."""
        self._asked.drop((call, prompt))

    def close(self) -> None:
        """The connections are :class:`Web`'s to close."""

    def _begin(self, question: tuple[str, int]) -> Reply:
        prompt, limit = question
        request = json.loads(prompt)
        reply = Reply(frozenset(tool["function"]["name"] for tool in request.get("tools", ())))
        fields = request | {"model": self._settings.model, "stream": True, "max_tokens": limit} | self._settings.body
        body = {name: value for name, value in fields.items() if value is not None}
        reply.follow(self._web.begin("the language model's endpoint", lambda: self._ask(body, reply)))
        return reply

    async def _ask(self, body: dict[str, Any], reply: Reply) -> None:
        async with self._web.post(self._settings, "/chat/completions", json=body) as response:
            lines = Lines()
            async for piece in pieces(response, _MOST_BYTES):
                over = any(reply.take(event) for event in lines.feed(piece))
                if self._notice is not None:
                    self._notice()
                if over:
                    break
        reply.finish()


class Lines:
    """Events of a ``text/event-stream``: what follows ``data:`` on each line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises EndpointFailed for a line without end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            raise EndpointFailed("a line of the answer has no end")
        return [event for line in lines if line.startswith(b"data:") and (event := line[5:].strip())]


def messages(said: Sequence[Said]) -> list[dict[str, Any]]:
    """The conversation in the endpoint's language. Calls in a row are one message, and each is followed by its result."""
    results = {turn.call_id: turn.output for turn in said if isinstance(turn, Returned)}
    out: list[dict[str, Any]] = []
    waiting: list[Called] = []

    def told() -> None:
        if waiting:
            calls = [
                {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in waiting
            ]
            out.append({"role": "assistant", "tool_calls": calls})
            out.extend(
                {"role": "tool", "tool_call_id": c.call_id, "content": results.get(c.call_id, _NO_RESULT)}
                for c in waiting
            )
            waiting.clear()

    for turn in said:
        if isinstance(turn, Called):
            waiting.append(turn)
            continue
        told()
        if not isinstance(turn, Returned):
            role, text = turn
            out.append({"role": role, "content": text})
    told()
    return out
