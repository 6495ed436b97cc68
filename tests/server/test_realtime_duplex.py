"""The duplex dialect: a session outlives its connection, and tells more than OpenAI's events can."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import websockets

from server.test_realtime import Client, attach, connect
from server.test_realtime_loopback import created, served, socket
from server.voices import VoiceServer, speech, voice_server

Json = dict[str, Any]


def token_of(client: Client) -> str:
    (event,) = client.of("session.resumable")
    return str(event["resume_token"])


def told(client: Client) -> list[Json]:
    """Without judging the order: a client that came back begins in the middle."""
    return [json.loads(frame) for frame in client.sent]


async def talk(server: VoiceServer, client: Client) -> None:
    client.write("say one two three four five six")
    client.say("response.create")
    await server.tick(6)


@pytest.mark.parametrize("read", [3, 6, 10, 14])
async def test_a_lost_connection_loses_no_event(read: int) -> None:
    """The socket is cut behind some event, and the client comes back while the assistant speaks on."""
    async with voice_server() as server:
        client = await connect(server, duplex=True)
        await talk(server, client)
        client.drop()
        await server.tick(4)
        last = told(client)[read - 1]["server_event_seq"]
        token = client.session.resume(token_of(client))
        assert token is not None
        again = attach(server, client.session, last)
        await server.tick(20)
        events = told(client)[:read] + told(again)
        assert [event["server_event_seq"] for event in events] == list(range(1, len(events) + 1))
        (done,) = [event for event in events if event["type"] == "response.done"]
        assert done["response"]["status"] == "completed"
        said = [e["delta"] for e in events if e["type"] == "response.output_audio_transcript.delta"]
        assert "".join(said) == "one two three four five six"
        again.say("session.close")
        await server.gone()


async def test_a_token_is_good_once_and_for_nobody_else() -> None:
    async with voice_server() as server:
        client = await connect(server, duplex=True)
        first = token_of(client)
        assert client.session.resume("x" + first) is None
        lost = client.session.resume(first)
        second = client.session.resume(first)
        assert second is not None, "the answer with the next one may have been lost"
        assert client.session.resume(lost or "") is None
        again = attach(server, client.session)
        again.say("session.heartbeat")
        await server.rest()
        assert client.session.resume(first) is None
        third = client.session.resume(second)
        assert third is not None
        again.say("session.close")
        await server.gone()
        assert client.session.resume(third) is None


async def test_who_does_not_come_back_in_time_finds_the_session_over() -> None:
    async with voice_server(grace_s=1.0) as server:
        client = await connect(server, duplex=True)
        client.drop()
        await server.tick(10)
        assert len(server.calls) == 1
        await server.tick(4)
        await server.gone()
        assert len(server.calls) == 0


async def test_a_second_connection_takes_the_place_of_the_first() -> None:
    async with voice_server() as server:
        client = await connect(server, duplex=True)
        again = attach(server, client.session, client.events[-1]["server_event_seq"])
        await server.until(lambda: client.closed is not None)
        assert client.events[-1]["type"] == "session.replaced"
        client.say("session.heartbeat")
        again.say("session.heartbeat")
        await server.rest()
        assert [event["type"] for event in told(again)] == ["session.heartbeat_ack"]
        again.say("session.close")
        await server.gone()
        assert [event["type"] for event in told(again)][-1] == "session.closed"
        assert again.closed == (1000, "client")


async def test_playback_decides_what_was_heard() -> None:
    """200 ms were played when the user spoke; without a truncation the model knows it."""
    async with voice_server() as server:
        client = await connect(server, duplex=True)
        detection = {"type": "server_vad", "create_response": False}
        client.update(audio={"input": {"turn_detection": detection}})
        client.write("say one two three four five six seven eight")
        client.say("response.create")
        await server.tick(10)
        item_id = client.of("response.output_item.added")[0]["item"]["id"]
        for ms in (100, 200):
            client.say("playback.ack", item_id=item_id, played_ms=ms)
        await server.talk(client, speech(6))  # type: ignore[arg-type]
        assert client.responses[0]["status"] == "cancelled"
        assert [event["played_ms"] for event in client.of("playback.acknowledged")] == [100, 200]
        await server.talk(client, np.zeros(24_000, np.float32))  # type: ignore[arg-type]
        client.write("repeat")
        client.say("response.create")
        await server.tick(10)
        assert client.said[-1] == "one two"
        client.say("session.close")


async def test_a_client_that_hears_the_user_itself_may_barge_in() -> None:
    async with voice_server() as server:
        client = await connect(server, duplex=True)
        await talk(server, client)
        client.say("barge_in")
        client.say("barge_in")
        await server.tick(2)
        assert client.responses[0]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert not client.of("error")
        client.say("session.close")


async def test_a_silent_microphone_is_reported() -> None:
    async with voice_server() as server:
        client = await connect(server, duplex=True)
        await server.talk(client, np.zeros(24_000 * 8, np.float32))  # type: ignore[arg-type]
        (report,) = client.of("input_audio_buffer.report")
        assert report["kind"] == "silent_microphone"
        client.say("session.close")


async def test_without_opting_in_nothing_of_it_exists() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.say("session.heartbeat")
        await server.talk(client, np.zeros(24_000 * 8, np.float32))  # type: ignore[arg-type]
        assert [event["type"] for event in client.events] == ["session.created", "conversation.created", "error"]
        assert all("server_event_seq" not in event for event in client.events)
        client.drop()


async def test_a_connection_comes_back_over_a_real_socket() -> None:
    async with served() as url:
        target = url.replace("http", "ws") + "/v1/duplex"
        async with websockets.connect(target) as client:
            session = await created(client)
            events = [json.loads(await client.recv()) for _ in range(2)]
            (resumable,) = [event for event in events if event["type"] == "session.resumable"]
        query = f"?session_id={session['id']}&resume_token={resumable['resume_token']}&last_server_event_seq=1"
        async with websockets.connect(target + query) as client:
            kinds = [json.loads(await client.recv())["type"] for _ in range(3)]
            assert kinds == ["session.resumed", "conversation.created", "session.resumable"]
            await client.send('{"type": "session.close"}')
            assert json.loads(await client.recv())["type"] == "session.closed"
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with websockets.connect(target + query):
                pass
        assert refused.value.response.status_code == 404
        async with socket(url, None) as client:
            assert "id" in await created(client)
