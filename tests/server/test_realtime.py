"""Realtime connections over the puppet in memory: conversations, and what happens where wire and call meet."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols.realtime.driver import dump
from protocols.realtime.grammar import Grammar
from realtime_omni.server.realtime import RealtimeConnection
from realtime_omni.server.realtime_session import LIMITS, RealtimeSession, RealtimeSessions
from realtime_omni_protocols.realtime import RealtimeClose
from server.voices import VoiceServer, VoiceTransport, pcm, speech, voice_server

Json = dict[str, Any]


class Client(VoiceTransport):
    """A client of the Realtime protocol on a socket in memory; every event that it gets is judged by the grammar."""

    def __init__(self, session: RealtimeSession) -> None:
        super().__init__()
        self.session = session
        self._grammar = Grammar()
        self._read = 0
        self._events: list[Json] = []

    def say(self, kind: str, **fields: Any) -> None:
        self.inbound.put_nowait(json.dumps({"type": kind, **fields}))

    def update(self, **session: Any) -> None:
        self.say("session.update", session={"type": "realtime", **session})

    def write(self, text: str, **fields: Any) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}
        self.say("conversation.item.create", item=item)

    def append(self, data: bytes) -> None:
        self.say("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    @property
    def events(self) -> list[Json]:
        for frame in self.sent[self._read :]:
            if "server_event_seq" not in frame:
                dump(frame.encode())
            self._events.append(json.loads(frame))
            self._grammar.see(self._events[-1])
        self._read = len(self.sent)
        return self._events

    def of(self, kind: str) -> list[Json]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events if not event["type"].endswith(".delta")]

    @property
    def responses(self) -> list[Json]:
        return [event["response"] for event in self.of("response.done")]

    @property
    def said(self) -> list[str]:
        parts = [part for response in self.responses for item in response["output"] for part in item.get("content", ())]
        return [part.get("transcript", part.get("text")) for part in parts]

    def sound(self, item_id: str) -> bytes:
        deltas = self.of("response.output_audio.delta")
        return b"".join(base64.b64decode(event["delta"]) for event in deltas if event["item_id"] == item_id)


async def connect(server: VoiceServer, session: Json | None = None, *, duplex: bool = False) -> Client:
    """A client that was greeted, in a session of its own."""
    sessions = RealtimeSessions(server.voice)
    made, life = await sessions.open(session or {}, duplex=duplex)
    client = attach(server, made)
    server.serve(life)
    await server.until(lambda: len(client.sent) >= 2)
    assert client.kinds[:2] == ["session.created", "conversation.created"]
    return client


def attach(server: VoiceServer, session: RealtimeSession, after: int = 0) -> Client:
    client = Client(session)
    server.serve(RealtimeConnection(server.voice, client, session, after).run())
    return client


async def speak(server: VoiceServer, client: Client, voiced: int, silent: int) -> None:
    """Frames of speech and of silence, in real time."""
    await server.talk(client, np.concatenate([speech(voiced), speech(silent) * 0]))  # type: ignore[arg-type]


async def test_a_greeting_by_text_alone() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.write("say Good evening.")
        client.say("response.create", response={"metadata": {"n": "1"}})
        await server.tick(12)
        assert client.said == ["Good evening."]
        (response,) = client.responses
        assert (response["status"], response["metadata"]) == ("completed", {"n": "1"})
        assert response["usage"]["output_tokens"] > 0
        assert len(client.sound(response["output"][0]["id"])) == 7 * 1920 * 2, "seven frames: all that was said"
        client.drop()


async def test_two_polite_turns_are_heard_and_answered() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.update(audio={"input": {"transcription": {"model": "m"}}})
        for _ in range(2):
            await speak(server, client, 8, 20)
        assert client.said == ["I hear you.", "Please go on."]
        heard = client.of("conversation.item.input_audio_transcription.completed")
        assert [event["transcript"] for event in heard] == ["0.6 seconds of sound"] * 2
        items = [event["item_id"] for event in client.of("input_audio_buffer.committed")]
        assert [event["item_id"] for event in heard] == items
        stopped = client.of("input_audio_buffer.speech_stopped")[0]
        assert 640 + 500 <= stopped["audio_end_ms"] <= 640 + 500 + 160
        client.drop()


async def test_who_speaks_is_listened_to_and_only_what_was_heard_is_remembered() -> None:
    async with voice_server() as server:
        client = await connect(server)
        detection = {"type": "server_vad", "create_response": False}
        client.update(audio={"input": {"turn_detection": detection}})
        client.write("say one two three four five six seven eight nine ten")
        client.say("response.create")
        await server.tick(10)
        await speak(server, client, 6, 12)
        (response,) = client.responses
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert client.kinds.index("input_audio_buffer.speech_started") < client.kinds.index("response.done")
        (item,) = response["output"]
        assert item["status"] == "incomplete"
        client.say("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=300)
        client.say("conversation.item.retrieve", item_id=item["id"])
        client.write("repeat")
        client.say("response.create")
        await server.tick(10)
        (retrieved,) = client.of("conversation.item.retrieved")
        assert retrieved["item"]["content"][0]["transcript"] == "one two"
        assert client.said[-1] == "one two"
        client.drop()


@pytest.mark.req("AC-42")
async def test_create_right_after_cancel_is_answered_and_the_rest_of_the_first_never_comes() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.write("say one two three four five six seven eight nine ten")
        client.say("response.create")
        await server.tick(5)
        client.write("say Something else.")
        client.say("response.cancel")
        client.say("response.create")
        await server.tick(20)
        assert [response["status"] for response in client.responses] == ["cancelled", "completed"]
        assert client.said[-1] == "Something else."
        assert not client.of("error")
        client.drop()


async def test_a_function_is_called_and_its_result_is_spoken() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.update(tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}}])
        client.write('call weather {"town": "Bonn"}')
        client.say("response.create")
        await server.tick(3)
        (call,) = client.responses[0]["output"]
        assert (call["name"], call["arguments"]) == ("weather", '{"town": "Bonn"}')
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is sunny."}
        client.say("conversation.item.create", item=output)
        client.say("response.create")
        await server.tick(12)
        assert client.said == ["It is sunny."]
        client.drop()


async def test_a_text_answer_out_of_band_leaves_the_conversation_alone() -> None:
    async with voice_server() as server:
        client = await connect(server)
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say Aside."}]}
        response = {"conversation": "none", "output_modalities": ["text"], "input": [item]}
        client.say("response.create", response=response)
        await server.tick(3)
        assert client.said == ["Aside."]
        assert not client.of("conversation.item.added")
        client.write("repeat")
        client.say("response.create")
        await server.tick(12)
        assert client.said == ["Aside.", "nothing"]
        client.drop()


@pytest.mark.parametrize("kind", ["pcmu", "pcma"])
async def test_g711_in_and_out(kind: str) -> None:
    async with voice_server() as server:
        client = await connect(server)
        form = {"format": {"type": f"audio/{kind}"}}
        client.update(audio={"input": form, "output": form})
        client.write("say Good evening.")
        client.say("response.create")
        await server.tick(12)
        sound = client.sound(client.responses[0]["output"][0]["id"])
        assert abs(len(sound) - 560 * 8) <= 8, "not a millisecond is lost"
        client.drop()


async def test_a_client_that_finds_the_turns_commits_them() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.update(audio={"input": {"turn_detection": None, "transcription": {"model": "m"}}})
        await speak(server, client, 6, 10)
        assert "input_audio_buffer.speech_started" not in client.kinds
        client.say("input_audio_buffer.commit")
        client.say("response.create")
        await server.tick(10)
        assert client.said == ["I hear you."]
        (committed,) = client.of("input_audio_buffer.committed")
        (heard,) = client.of("conversation.item.input_audio_transcription.completed")
        assert heard["item_id"] == committed["item_id"]
        client.drop()


async def test_a_recording_may_come_at_once() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.append(pcm(np.concatenate([speech(40), np.zeros(24_000, np.float32)])))
        await server.tick(12)
        assert client.said == ["I hear you."]
        client.drop()


async def test_who_does_not_want_to_be_interrupted_is_not() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.update(audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
        client.write("say one two three four five six seven eight nine ten")
        client.say("response.create")
        await server.tick(5)
        await speak(server, client, 6, 40)
        assert [response["status"] for response in client.responses] == ["completed", "completed"]
        assert client.said == ["one two three four five six seven eight nine ten", "I hear you."]
        client.drop()


async def test_a_deleted_item_is_forgotten() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.write("say This.", id="this")
        client.write("say That.", id="that")
        client.say("conversation.item.delete", item_id="that")
        client.say("response.create")
        await server.tick(10)
        assert client.said == ["This."]
        client.drop()


@pytest.mark.req("AC-43")
async def test_a_server_that_stops_ends_the_response_and_says_why() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.write("say one two three four five six seven eight")
        client.say("response.create")
        await server.tick(4)
        await server.voice.shutdown(5)
        assert client.responses[0]["status"] == "failed"
        assert client.events[-1]["error"]["code"] == "server_shutdown"
        assert client.closed == (1001, "server_shutdown")


async def test_a_session_comes_to_its_end() -> None:
    async with voice_server() as server:
        server.voice.max_session_s = 0.5
        client = await connect(server)
        await server.tick(8)
        assert client.events[-1]["error"]["code"] == "session_expired"
        assert client.closed == (1001, "session_expired")


async def test_nonsense_and_binary_frames_end_nothing() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.inbound.put_nowait("{")
        client.inbound.put_nowait(b"\x00")
        client.append(b"\x00")
        client.write("say Still here.")
        client.say("response.create")
        await server.tick(12)
        assert [event["error"]["code"] for event in client.of("error")] == ["invalid_json", "invalid_json"]
        assert client.said == ["Still here."]
        client.drop()


async def test_more_sound_than_may_wait_is_refused_and_the_session_goes_on() -> None:
    async with voice_server() as server:
        client = await connect(server)
        minute = base64.b64encode(bytes(48 * 60_000)).decode()
        for _ in range(7):
            client.say("input_audio_buffer.append", audio=minute)
        await server.until(lambda: bool(client.of("error")))
        assert client.of("error")[0]["error"]["code"] == "rate_limit_exceeded"
        assert client.closed is None
        client.drop()


async def test_a_secret_brings_its_session() -> None:
    async with voice_server() as server:
        client = await connect(server, {"instructions": "Be brief.", "output_modalities": ["text"]})
        assert client.events[0]["session"]["instructions"] == "Be brief."
        client.write("say Written.")
        client.say("response.create")
        await server.tick(3)
        assert client.said == ["Written."]
        client.drop()


async def test_a_client_that_reads_late_does_not_hear_what_was_cancelled() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.write("say one two three four five six seven eight nine ten")
        client.say("response.create")
        await server.tick(2)
        client.flowing.clear()
        await server.tick(12)
        client.say("response.cancel")
        await server.rest()
        client.flowing.set()
        await server.rest()
        assert client.responses[0]["status"] == "cancelled"
        deltas = client.of("response.output_audio.delta")
        assert 0 < len(deltas) < 12, "what waited was dropped"
        client.drop()


async def test_a_client_that_sends_too_fast_is_read_more_slowly_and_loses_nothing() -> None:
    async with voice_server(max_messages_per_s=20.0) as server:
        client = await connect(server)
        for _ in range(50):
            client.append(bytes(48 * 2))
        client.write("say Through.")
        client.say("response.create")
        await server.tick(5)
        assert not client.responses
        await server.tick(40)
        assert client.said == ["Through."]
        assert not client.of("error")
        client.drop()


async def test_what_a_client_asks_for_and_does_not_read_is_bounded() -> None:
    """An item of 30 kB, asked for again and again: the journal stays within its bytes, and who reads on is told the truth."""
    async with voice_server() as server:
        client = await connect(server)
        client.write("a" * 30_000)
        await server.rest()
        item_id = client.of("conversation.item.added")[0]["item"]["id"]
        client.flowing.clear()
        for _ in range(400):
            client.say("conversation.item.retrieve", item_id=item_id)
        await server.rest()
        held = sum(len(text) for _, text in client.session._journal.after(0) if isinstance(text, str))
        assert held <= LIMITS.max_bytes
        client.flowing.set()
        await server.gone()
        assert client.closed == (RealtimeClose.OVERLOADED, "events were lost")


async def test_a_fault_of_ours_ends_that_session_with_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async with voice_server() as server:
        client, other = await connect(server), await connect(server)

        def broken(_: object) -> None:
            raise ZeroDivisionError("/secret/path")

        monkeypatch.setattr(client.session._bridge, "_configure", broken)
        client.update(instructions="x")
        await server.until(lambda: client.closed is not None)
        assert client.events[-1]["error"]["code"] == "internal_error"
        assert "secret" not in client.sent[-1]
        assert client.closed == (1011, "internal_error")
        other.write("say Alive.")
        other.say("response.create")
        await server.tick(10)
        assert other.said == ["Alive."]
        other.drop()


async def test_a_connection_that_is_cancelled_at_any_moment_leaves_nothing() -> None:
    """``voice_server`` counts tasks, calls and sessions at its end."""
    async with voice_server() as server:
        for moment in range(1, 60, 2):
            sessions = RealtimeSessions(server.voice)
            client: list[Client] = []

            async def connection(sessions: RealtimeSessions = sessions, client: list[Client] = client) -> None:
                made, life = await sessions.open({}, duplex=False)
                client.append(Client(made))
                client[0].write("say Good evening.")
                client[0].say("response.create")
                await RealtimeConnection(server.voice, client[0], made).run()
                await asyncio.shield(life)

            task = asyncio.create_task(connection())
            for _ in range(moment):
                await asyncio.sleep(0)
            if moment % 3 == 0:
                await server.tick()
            task.cancel()
            await asyncio.wait([task])
            for made in client:
                made.session.detach(1)


async def test_a_model_that_decides_when_it_speaks_answers_when_it_does() -> None:
    """It takes no requests and no text, and ends turns itself, as Moshi does."""
    async with voice_server() as server:
        server.calls.spec = replace(
            server.calls.spec,
            takes_requests=False,
            takes_text=False,
            text_only=False,
            takes_tools=False,
            turn_modes=("model",),
        )
        client = await connect(server)
        client.update(instructions="unheard", tools=[{"type": "function", "name": "f"}])
        client.write("unheard too")
        client.say("response.create", response={"metadata": {"n": "1"}})
        await server.tick(3)
        assert client.kinds[-1] == "response.created"
        client.update(audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
        await speak(server, client, 6, 20)
        assert [response["status"] for response in client.responses] == ["completed"]
        assert client.responses[0]["metadata"] == {"n": "1"}
        assert client.said == ["I hear you."]
        await speak(server, client, 6, 20)
        assert client.said == ["I hear you.", "Please go on."]
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
        client.say("response.create", response={"conversation": "none", "input": [item]})
        await server.rest()
        assert client.responses[-1]["status_details"]["error"]["code"] == "invalid_value"
        assert not client.of("error")
        client.drop()


@pytest.mark.req("AC-41")
async def test_two_calls_at_a_time_hear_their_own_answers_only() -> None:
    async with voice_server() as server:
        clients = [await connect(server) for _ in range(2)]
        for client, line in zip(clients, ("say One two three.", "say Four five six."), strict=True):
            client.write(line)
            client.say("response.create")
        await server.tick(15)
        assert [client.said for client in clients] == [["One two three."], ["Four five six."]]
        for client in clients:
            (response,) = client.responses
            assert {e["response_id"] for e in client.of("response.output_audio.delta")} == {response["id"]}
            client.drop()
