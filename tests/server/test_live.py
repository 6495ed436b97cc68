"""Live sessions with the puppet: sound in, sound out at the same pace, and everything that a client may do between."""

from __future__ import annotations

import asyncio
import base64
import gc
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from realtime_omni.handle import Session
from realtime_omni.server.sound import SoundDecoder, SoundEncoder, SoundFormat
from realtime_omni_protocols.live import LiveCode, LiveError
from server.voices import LiveClient, is_loud, pcm, speech, voice_server


async def test_a_polite_conversation_of_two_turns() -> None:
    async with voice_server() as server:
        client = await server.start(instructions="Be kind.")
        for _ in range(2):
            await server.talk(client, speech(10))
            await server.hush(client, 25)
        assert client.transcript == "I hear you. Please go on."
        heard = "".join(event["delta"] for event in client.of("session.input_transcript.delta"))
        assert heard == "0.8 seconds of sound 0.8 seconds of sound"
        assert "xxx" in client.loud
        client.say("session.close", event_id="bye")
        await server.gone()
        (closed,) = client.of("session.closed")
        assert (closed["reason"], closed["client_event_id"], closed["usage"]) == (
            "close_requested",
            "bye",
            {"seconds": 5},
        )
        assert client.closed == (1000, "close_requested")


async def test_output_is_as_long_as_input_with_silence() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.talk(client, speech(6))
        await server.hush(client, 34)
        out, sent = sum(len(data) // 2 for data in client.audio), 40 * 1920
        assert abs(out - sent) <= 1920
        assert client.loud.startswith("......")


async def test_a_client_that_sends_nothing_hears_the_greeting_and_silence() -> None:
    async with voice_server("options.greeting=Hello.") as server:
        client = await server.start()
        await server.tick(30)
        assert client.transcript == "Hello."
        assert len(client.audio) >= 28
        assert client.loud.endswith(".....")


async def test_the_agent_speaks_when_it_is_asked_by_text_alone() -> None:
    async with voice_server() as server:
        client = await server.start(input=[{"role": "user", "content": [{"text": "say Good evening."}]}])
        await server.hush(client, 3)
        client.say("session.commentary.append", event_id="c", content="Greet them.", delegation_id=None)
        await server.hush(client, 15)
        (ack,) = client.of("session.commentary.appended")
        assert ack["client_event_id"] == "c"
        assert ack["end_ms"] - ack["start_ms"] == 80
        assert ack["start_ms"] % 80 == 0
        assert client.transcript == "Good evening."


@pytest.mark.req("AC-41")
async def test_two_sessions_of_one_batch_never_hear_each_other() -> None:
    async with voice_server() as server:
        words = {"a": "Alpha one.", "b": "Beta two.", "silent": ""}
        clients = {}
        for name, text in words.items():
            client = clients[name] = await server.start(input=[{"role": "user", "content": [{"text": f"say {text}"}]}])
            if text:
                client.say("session.commentary.append", event_id=name, content="Go.", delegation_id=None)
        before = server.manager.statistics().ticks_settled
        for _ in range(20):
            for client in clients.values():
                client.append(bytes(3840))
            await server.tick()
        assert server.manager.statistics().ticks_settled - before < 3 * 20, "they share batches"
        assert {name: client.transcript for name, client in clients.items()} == words
        assert "x" not in clients["silent"].loud
        acks = {
            name: [e["client_event_id"] for e in c.of("session.commentary.appended")] for name, c in clients.items()
        }
        assert acks == {"a": ["a"], "b": ["b"], "silent": []}


async def test_words_have_their_time_on_the_timeline() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.talk(client, speech(10))
        await server.hush(client, 25)
        words = client.of("session.output_transcript.delta")
        first = client.loud.index("x") * 80
        assert first <= words[0]["start_ms"] < first + 160
        assert all(a["end_ms"] <= b["start_ms"] for a, b in pairwise(words))
        (heard,) = client.of("session.input_transcript.delta")
        assert abs(heard["start_ms"] - 0) <= 80
        assert abs(heard["end_ms"] - 800) <= 80


async def test_barge_in_silences_the_agent() -> None:
    async with voice_server("options.greeting=One two three four five six seven eight nine ten.") as server:
        client = await server.start()
        await server.hush(client, 10)
        assert client.loud.endswith("xxx")
        await server.talk(client, speech(12))
        began = len(client.loud) - 12
        assert "x" not in client.loud[began + 5 :], "400 ms after the first loud sample nothing is heard"
        await server.hush(client, 20)
        assert client.transcript.endswith("I hear you."), "and the conversation goes on"


async def test_muted_the_model_hears_silence() -> None:
    async with voice_server() as server:
        client = await server.start()
        client.say("session.input_audio.mute", event_id="m")
        await server.talk(client, speech(10))
        await server.hush(client, 20)
        assert client.of("session.input_audio.muted")[0]["client_event_id"] == "m"
        assert client.transcript == ""
        client.say("session.input_audio.unmute")
        await server.talk(client, speech(10))
        await server.hush(client, 20)
        assert client.transcript == "I hear you."


async def test_a_fixture_takes_the_place_of_the_model() -> None:
    async with voice_server("options.greeting=One two three four five six seven eight.") as server:
        client = await server.start()
        await server.hush(client, 8)
        sound = (np.arange(1920 * 2 + 480) % 1000).astype("<i2")
        client.say("session.output_audio.fixture.play", event_id="f", audio=base64.b64encode(sound.tobytes()).decode())
        before = len(client.audio)
        await server.talk(client, speech(2))
        client.say("session.thinking.append", event_id="t", content="x", delegation_id=None)
        await server.talk(client, speech(1))
        await server.hush(client, 3)
        played = np.frombuffer(b"".join(client.audio[before : before + 3]), "<i2")
        np.testing.assert_array_equal(played[: len(sound)], sound)
        assert client.of("error")[0]["error"]["code"] == "fixture_active"
        kinds = [kind for kind in client.kinds if "fixture" in kind]
        assert kinds == ["session.output_audio.fixture.playing", "session.output_audio.fixture.played"]
        assert client.of("session.output_audio.fixture.played")[0]["client_event_id"] == "f"
        await server.hush(client, 10)
        assert set(client.loud[before + 3 :]) == {"."}, "what the model was saying was interrupted"


@pytest.mark.parametrize(("encoding", "rate"), [("audio/pcm", 16_000), ("audio/pcmu", 8_000), ("audio/pcma", 8_000)])
async def test_other_formats_are_understood_and_keep_time(encoding: str, rate: int) -> None:
    form = SoundFormat({"audio/pcm": "pcm16", "audio/pcmu": "pcmu", "audio/pcma": "pcma"}[encoding], rate)  # type: ignore[arg-type]
    async with voice_server() as server:
        client = await server.start(audio={"format": {"type": encoding, "rate": rate}})
        encoder = SoundEncoder(rate, form)
        await server.talk(client, speech(10, rate), rate, encoder.feed)
        await server.talk(client, np.zeros(25 * rate * 80 // 1000, np.float32), rate, encoder.feed)
        assert client.transcript == "I hear you."
        decoder = SoundDecoder(form, rate)
        heard = np.concatenate([decoder.feed(data) for data in client.audio])
        assert abs(len(heard) / rate - 35 * 0.08) <= 0.16
        assert np.abs(heard).max() > 0.05


WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}
ASKED = [{"role": "user", "content": [{"text": 'call weather {"city":"Rome"}'}]}]


async def test_a_function_is_called_and_its_result_spoken() -> None:
    """As LiveKit and Pipecat do it: the functions are the hosted backend's, the model stands in for it."""
    async with voice_server() as server:
        delegation = {"type": "responses", "responses": {"model": "b", "tools": [WEATHER]}}
        client = await server.start(input=ASKED, delegation=delegation)
        client.say("session.commentary.append", content="Go.", delegation_id=None)
        await server.hush(client, 5)
        created, called, completed = (event["event"] for event in client.of("response.event"))
        assert created["response"]["id"] == completed["response"]["id"]
        item = called["item"]
        assert (item["name"], item["arguments"], item["status"]) == ("weather", '{"city":"Rome"}', "completed")
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "It rains."}
        client.say("response.item.create", item=output)
        client.say("response.create")
        await server.hush(client, 15)
        assert client.transcript == "It rains."
        assert client.of("error") == []


async def test_functions_that_come_later_are_called_too() -> None:
    async with voice_server() as server:
        client = await server.start(input=ASKED, delegation={"type": "responses", "responses": {"model": "b"}})
        update = {"delegation": {"type": "responses", "responses": {"tools": [WEATHER]}}}
        client.say("session.update", session=update)
        client.say("session.commentary.append", content="Go.", delegation_id=None)
        await server.hush(client, 5)
        assert len(client.of("response.event")) == 3


async def test_a_sideband_sees_both_directions_and_the_end() -> None:
    async with voice_server() as server:
        client = await server.start(audio={"format": {"type": "audio/pcm", "rate": 16_000}})
        session_id = client.events[0]["session"]["id"]
        await server.hush(client, 2)
        side = server.attach(session_id)
        side.say("session.input_audio.mute", event_id="m")
        await server.talk(client, speech(10, 16_000), 16_000)
        assert any(is_loud(base64.b64decode(e["audio"])) for e in side.of("session.input_audio.append"))
        spans = [(e["start_ms"], e["end_ms"]) for e in side.of("session.output_audio.delta")]
        assert all(end - start == 80 for start, end in spans)
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(len(data) == 3840 for data in side.audio), "PCM16 at 24 kHz, whatever the session's format"
        assert client.transcript == "", "the sideband muted it"
        client.drop()
        await server.gone()
        assert side.of("session.closed")[0]["reason"] == "connection_lost"
        assert side.closed == (1000, "connection_lost")
        with pytest.raises(LiveError):
            server.attach(session_id)


async def test_a_sideband_that_sends_too_much_is_read_more_slowly() -> None:
    async with voice_server(max_messages_per_s=10.0) as server:
        client = await server.start()
        sideband = server.attach(client.of("session.started")[0]["session"]["id"])
        for _ in range(40):
            sideband.inbound.put_nowait("{}")
        await server.rest()
        assert len(sideband.of("error")) == 10
        for _ in range(40):
            server.clock.advance(0.1)
            await server.rest()
        assert len(sideband.of("error")) == 40
        client.drop()


async def test_a_sideband_that_reads_nothing_delays_nobody() -> None:
    async with voice_server() as server:
        client = await server.start()
        side = server.attach(client.events[0]["session"]["id"])
        side.flowing.clear()
        await server.talk(client, speech(10))
        await server.hush(client, 20)
        assert client.transcript == "I hear you."
        side.flowing.set()


async def test_a_client_that_takes_nothing_loses_sound_and_no_words() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.hush(client, 2)
        client.flowing.clear()
        await server.talk(client, speech(10))
        await server.hush(client, 250)
        assert len(client.audio) < 10
        client.flowing.set()
        await server.hush(client, 4)
        assert client.transcript == "I hear you."


@pytest.mark.parametrize("ended", [False, True])
async def test_a_fork_goes_on_where_the_stored_session_is(ended: bool) -> None:
    async with voice_server() as server:
        client = await server.start(store=True)
        session_id = client.events[0]["session"]["id"]
        await server.talk(client, speech(10))
        await server.hush(client, 25)
        assert client.transcript == "I hear you."
        if ended:
            client.say("session.close")
            await server.until(lambda: client.closed is not None)
        fork = await server.start(server.live.find_origin(session_id))
        assert fork.events[0]["session"]["id"] != session_id
        assert fork.events[0]["session"]["store"] is True
        await server.talk(fork, speech(10))
        await server.hush(fork, 25)
        assert fork.transcript == "Please go on.", "the second line, not the first"
        assert fork.of("session.output_transcript.delta")[0]["start_ms"] < 35 * 80, "a timeline of its own"


async def test_who_comes_back_while_the_session_that_was_lost_still_ends_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with voice_server() as server:
        storing, coming, going_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        store, begin = server.live.store, server.live.open

        async def stored(*what: Any) -> None:
            storing.set()
            await going_on.wait()
            await store(*what)

        async def opened(*what: Any) -> Any:
            coming.set()
            return await begin(*what)

        client = await server.start(store=True)
        await server.talk(client, speech(10))
        await server.hush(client, 25)
        monkeypatch.setattr(server.live, "store", stored)
        monkeypatch.setattr(server.live, "open", opened)
        client.drop()
        await storing.wait()
        starting = asyncio.create_task(server.start(server.live.find_origin(client.events[0]["session"]["id"])))
        await coming.wait()
        going_on.set()
        again = await starting
        await server.talk(again, speech(10))
        await server.hush(again, 25)
        assert again.transcript == "Please go on.", "the second line"


async def test_a_fork_does_not_keep_the_session_that_it_goes_on_from() -> None:
    """A client that comes back again and again would leave a chain of sessions behind it."""
    async with voice_server() as server:
        client = await server.start(store=True)
        name = client.events[0]["session"]["id"]
        first = weakref.ref(server.live.find(name))
        fork = await server.start(server.live.find_origin(name))
        client.drop()
        await server._serving.pop(0)
        del client
        server.clock.advance(3601)
        with pytest.raises(LiveError):
            server.live.find_origin(name)
        gc.collect()
        assert first() is None
        await server.hush(fork, 3)
        assert fork.audio


async def test_a_session_that_cannot_be_saved_is_released_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with voice_server() as server:
        client = await server.start(store=True)

        async def broken(self: Session) -> None:
            raise ValueError("not to be told")

        monkeypatch.setattr(Session, "snapshot", broken)
        client.say("session.close")
        await server.gone()
        assert client.of("session.closed")
        assert len(server.calls) == 0
        assert not server.live._running


async def test_what_was_not_stored_cannot_be_forked() -> None:
    async with voice_server() as server:
        client = await server.start()
        with pytest.raises(LiveError) as caught:
            server.live.find_origin(client.events[0]["session"]["id"])
        assert caught.value.code is LiveCode.SESSION_NOT_FOUND


async def test_stored_sessions_are_forgotten_after_an_hour() -> None:
    async with voice_server() as server:
        client = await server.start(store=True)
        client.say("session.close")
        await server.gone()
        session_id = client.events[0]["session"]["id"]
        assert server.live.find_origin(session_id).config.store
        server.clock.advance(3601)
        with pytest.raises(LiveError):
            server.live.find_origin(session_id)


async def test_a_full_server_refuses_the_start_and_the_client_may_try_again() -> None:
    async with voice_server("session.max_sessions=1") as server:
        first = await server.start()
        second = server.connect()
        second.say("session.start", event_id="s", session={"model": "puppet"})
        await server.until(lambda: bool(second.sent))
        assert second.events[0]["error"]["code"] == "capacity_exceeded"
        assert second.events[0]["error"]["type"] == "rate_limit_error"
        first.say("session.close")
        await server.until(lambda: first.closed is not None)
        second.say("session.start", session={"model": "gpt-live-1", "audio": {"output": {"voice": "marin"}}})
        await server.until(lambda: len(second.sent) > 1)
        assert second.events[1]["session"]["model"] == "puppet"
        assert second.events[1]["session"]["audio"]["output"]["voice"] == "tones"


@pytest.mark.parametrize(
    ("session", "code"),
    [({"model": "other"}, "model_not_found"), ({"audio": {"output": {"voice": "nobody"}}}, "voice_not_found")],
)
async def test_what_is_not_here_is_refused(session: dict[str, Any], code: str) -> None:
    async with voice_server() as server:
        client = server.connect()
        client.say("session.start", session={"model": "puppet", **session})
        await server.until(lambda: bool(client.sent))
        assert client.events[0]["error"]["code"] == code
        assert len(server.calls) == 0


async def test_a_connection_without_a_start_is_ended() -> None:
    async with voice_server() as server:
        client = server.connect()
        await server.rest()
        server.clock.advance(10.1)
        await server.gone()
        assert client.events[0]["error"]["code"] == "start_timeout"
        assert client.closed == (1008, "start_timeout")


async def test_a_lost_connection_releases_the_call() -> None:
    async with voice_server() as server:
        client = await server.start()
        client.drop()
        await server.gone()
        assert len(server.calls) == 0


async def test_a_session_expires() -> None:
    async with voice_server() as server:
        server.voice.max_session_s = 60.0
        client = await server.start()
        await server.hush(client, 2)
        server.clock.advance(60.1)
        await server.gone()
        assert client.of("session.closed")[0]["reason"] == "expired"


async def test_a_server_that_stops_says_so() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.voice.shutdown(5)
        await server.gone()
        assert client.events[-1]["error"]["code"] == "server_shutdown"
        assert client.closed == (1001, "server_shutdown")


async def test_an_operator_ends_a_session_in_order() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.manager.close_session(client.events[0]["session"]["id"], "operator")
        await server.gone()
        assert client.of("session.closed")[0]["reason"] == "close_requested"


async def test_input_faster_than_real_time_is_said_once() -> None:
    async with voice_server() as server:
        client = await server.start()
        for _ in range(8):
            client.append(pcm(speech(25)))
        await server.tick(3)
        (error,) = client.of("error")
        assert error["error"]["code"] == "input_audio_overrun"


async def test_late_audio_is_replaced_and_said() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.hush(client, 5)
        await server.tick(5)
        await server.hush(client, 2)
        (gap,) = [event for event in client.of("info") if event["code"] == "input_audio_gap"]
        assert "silence" in gap["message"]


async def test_usage_is_told_every_ten_seconds() -> None:
    async with voice_server() as server:
        client = await server.start()
        await server.tick(260)
        assert [event["usage"]["seconds"] for event in client.of("session.usage.updated")] == [10, 20]


async def test_a_connection_that_is_cancelled_anywhere_leaves_nothing() -> None:
    """The server's task is cancelled after every possible number of turns of the loop, from the upgrade to the close."""
    async with voice_server() as server:
        for turns in range(120):
            client = LiveClient()
            serving = asyncio.create_task(server.live.serve(client))
            client.say("session.start", session={"model": "puppet", "store": turns % 2 == 1})
            client.append(pcm(speech(1)))
            client.say("session.thinking.append", content="x", delegation_id=None)
            client.say("session.close")
            for _ in range(turns):
                await asyncio.sleep(0)
            serving.cancel()
            await asyncio.wait([serving], timeout=10)
            assert serving.done()
            await server.until(lambda: not server.voice._closing)
            assert len(server.calls) == 0, turns
            assert server.voice.connections == 0
            assert not server.live._running
        assert not server.manager.sessions()


@pytest.mark.parametrize("moment", ["opening", "storing", "closing"])
async def test_a_client_that_leaves_while_the_engine_answers_leaves_nothing(moment: str) -> None:
    async with voice_server() as server:
        client = server.connect()
        client.say("session.start", session={"model": "puppet", "store": moment == "storing"})
        if moment != "opening":
            await server.until(lambda: bool(client.sent))
            client.say("session.close")
        await asyncio.sleep(0)
        client.drop()
        await server.gone()
        await server.until(lambda: not server.voice._closing)
        assert len(server.calls) == 0
