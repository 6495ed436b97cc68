"""What the machine asks of the session, what the assistant is remembered to have said, and where its bounds are."""

from __future__ import annotations

import base64
import json

import pytest

from protocols.realtime.driver import PROFILE, Driver, kinds, pcm
from realtime_omni_protocols.errors import LocalError
from realtime_omni_protocols.realtime import (
    AddItem,
    AppendAudio,
    CancelResponse,
    ClearInput,
    ClearOutput,
    CommitInput,
    Configure,
    IdleTimeout,
    InputTrouble,
    Played,
    Profile,
    RealtimeClose,
    RealtimeCode,
    RealtimeError,
    RemoveItem,
    ResponseCompleted,
    ResponseOpened,
    ResponseSpeech,
    ResponseText,
    StartResponse,
    ToolCall,
    TruncateItem,
    UserStarted,
    UserStopped,
    UserTranscribed,
    UserTranscriptFailed,
)
from realtime_omni_protocols.realtime.conversation import MAX_ITEMS, Spoken
from realtime_omni_protocols.realtime.items import MessageItem


def speak(driver: Driver, words: list[tuple[str, int, int]], ms: int) -> str:
    """A response under way that says these words at these times of the session, in audio from 0 to ``ms``."""
    driver.send("response.create")
    driver.apply(ResponseSpeech(driver.response, pcm(ms), 0, ms))
    for word, start, end in words:
        driver.apply(ResponseText(driver.response, word, start, end))
    return driver.grammar.order[-1]


def said(driver: Driver, item_id: str) -> str:
    (event,) = driver.send("conversation.item.retrieve", item_id=item_id)
    return str(event["item"]["content"][0]["transcript"])


def test_a_session_is_configured_before_anything_is_said() -> None:
    driver = Driver()
    assert driver.commands == [Configure(driver.side.config)]
    driver.update(instructions="be brief")
    (configure,) = driver.commands
    assert isinstance(configure, Configure)
    assert configure.config.instructions == "be brief"


def test_a_sample_cut_in_two_is_put_together() -> None:
    driver = Driver()
    driver.send("input_audio_buffer.append", audio=base64.b64encode(b"abc").decode())
    assert [command.audio for command in driver.commands if isinstance(command, AppendAudio)] == [b"ab"]
    driver.send("input_audio_buffer.append", audio=base64.b64encode(b"def").decode())
    assert [command.audio for command in driver.commands if isinstance(command, AppendAudio)] == [b"cdef"]


def test_half_a_sample_does_not_survive_a_clear_or_another_format() -> None:
    driver = Driver()
    driver.send("input_audio_buffer.append", audio=base64.b64encode(b"abc").decode())
    driver.send("input_audio_buffer.clear")
    assert driver.commands == [ClearInput()]
    driver.send("input_audio_buffer.append", audio=base64.b64encode(b"xyz").decode())
    driver.update(audio={"input": {"format": {"type": "audio/pcmu"}}})
    driver.send("input_audio_buffer.append", audio=base64.b64encode(b"q").decode())
    (append,) = driver.commands
    assert isinstance(append, AppendAudio)
    assert append.audio == b"q"


def test_a_response_is_started_from_what_was_said_so_far() -> None:
    driver = Driver()
    driver.say("hello", id="mine")
    (added,) = driver.commands
    assert isinstance(added, AddItem)
    assert (added.previous, added.last) == (None, True)
    driver.send("response.create", response={"instructions": "shout", "max_output_tokens": 7})
    (start,) = driver.commands
    assert isinstance(start, StartResponse)
    assert [item.id for item in start.context] == ["mine"]
    assert (start.config.instructions, start.config.max_output_tokens) == ("shout", 7)
    assert not start.out_of_band
    assert driver.side.config.instructions == "", "an override is of one response"


@pytest.mark.parametrize(
    ("heard_ms", "answered", "remembered"),
    [
        (0, 0, ""),
        (300, 300, ""),
        (499, 499, "One"),
        (500, 500, "One "),
        (1200, 1200, "One two "),
        (1500, 1500, "One two three"),
        (1585, 1500, "One two three"),
        (-5, 0, ""),
    ],
)
def test_the_model_remembers_what_was_heard(heard_ms: int, answered: int, remembered: str) -> None:
    """Words of half a second each; one that was cut in the middle was not heard."""
    driver = Driver()
    item_id = speak(driver, [("One ", 0, 500), ("two ", 500, 1000), ("three", 1000, 1500)], 1500)
    response = driver.response
    driver.send("response.cancel")
    (event,) = driver.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=heard_ms)
    assert event["audio_end_ms"] == answered
    assert driver.commands == [TruncateItem(item_id, response, answered, remembered)]
    assert said(driver, item_id) == remembered
    driver.send("response.create")
    (start,) = driver.commands
    assert isinstance(start, StartResponse)
    (message,) = start.context
    assert isinstance(message, MessageItem)
    assert message.text == remembered, "the next answer is made from what was heard"


def test_a_later_truncation_cannot_bring_words_back() -> None:
    driver = Driver()
    item_id = speak(driver, [("One ", 0, 500), ("two", 500, 1000)], 1000)
    for ms in (600, 900):
        (event,) = driver.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=ms)
        assert event["audio_end_ms"] == 600
    driver.apply(ResponseCompleted(driver.response))
    assert said(driver, item_id) == "One "


def test_a_phrase_is_cut_at_a_word() -> None:
    spoken = Spoken("r")
    spoken.write("seven words are said in one second", None, None)
    spoken.say(1000, None)
    spoken.cut(500)
    assert spoken.heard() == "seven words are"


def test_text_that_comes_before_its_audio_is_placed_by_it() -> None:
    spoken = Spoken("r")
    spoken.write("later", 5_400, 5_800)
    spoken.say(1000, 5_000)
    spoken.cut(399)
    assert spoken.heard() == ""
    spoken = Spoken("r")
    spoken.write("later", 5_400, 5_800)
    spoken.say(1000, 5_000)
    spoken.cut(800)
    assert spoken.heard() == "later"


def test_a_pause_of_the_session_is_no_audio_of_the_item() -> None:
    """480 ms are said, then 2 s nothing, then the rest: its words are at 480 ms of the item."""
    spoken = Spoken("r")
    spoken.say(480, 1_000)
    spoken.write("first ", 1_000, 1_480)
    spoken.say(480, 3_480)
    spoken.write("second", 3_480, 3_960)
    spoken.cut(480)
    assert spoken.heard() == "first "


def test_a_text_item_is_truncated_to_nothing_and_keeps_its_text() -> None:
    """A client that restored a conversation may truncate what was never audio."""
    driver = Driver()
    driver.say("as before", "assistant", id="old")
    (event,) = driver.send("conversation.item.truncate", item_id="old", content_index=0, audio_end_ms=300)
    assert (event["type"], event["audio_end_ms"]) == ("conversation.item.truncated", 0)
    (event,) = driver.send("conversation.item.retrieve", item_id="old")
    assert event["item"]["content"] == [{"type": "output_text", "text": "as before"}]


def test_a_turn_that_ends_during_a_response_is_answered_after_it() -> None:
    driver = Driver()
    driver.update(audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
    driver.send("response.create")
    first = driver.response
    driver.apply(UserStarted(0))
    assert "response.created" not in kinds(driver.apply(UserStopped(900)))
    events = kinds(driver.apply(ResponseCompleted(first)))
    assert events == ["response.done", "response.created"]


def test_a_cancel_out_of_band_leaves_the_owed_answer() -> None:
    driver = Driver()
    driver.update(audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
    driver.send("response.create")
    (beside,) = driver.send("response.create", response={"conversation": "none"})
    driver.apply(UserStarted(0))
    driver.apply(UserStopped(900))
    driver.send("response.cancel", response_id=beside["response"]["id"])
    assert kinds(driver.apply(ResponseCompleted(driver.response))) == ["response.done", "response.created"]


def test_a_client_that_cancels_gets_no_answer_it_did_not_ask_for() -> None:
    driver = Driver()
    driver.update(audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}})
    driver.send("response.create")
    driver.apply(UserStarted(0))
    driver.apply(UserStopped(900))
    assert kinds(driver.send("response.cancel")) == ["response.done"]
    assert kinds(driver.send("response.create")) == ["response.created"]
    assert kinds(driver.apply(ResponseCompleted(driver.response))) == ["response.done"]


def test_without_create_response_a_turn_is_only_committed() -> None:
    driver = Driver()
    driver.update(audio={"input": {"turn_detection": {"type": "semantic_vad", "create_response": False}}})
    driver.apply(UserStarted(0))
    driver.apply(UserStopped(900))
    (commit,) = driver.commands
    assert isinstance(commit, CommitInput)
    assert not commit.by_client


def test_where_the_model_decides_a_turn_starts_no_response() -> None:
    driver = Driver(Profile(session_id="s", model="m", model_decides=True))
    driver.apply(UserStarted(0))
    assert "response.created" not in kinds(driver.apply(UserStopped(900)))
    assert kinds(driver.apply(ResponseOpened("own"))) == ["response.created"]
    with pytest.raises(LocalError):
        driver.side.apply(ResponseOpened("another"))


def test_silence_can_be_answered_too() -> None:
    driver = Driver()
    events = kinds(driver.apply(IdleTimeout(1_000, 6_000)))
    assert events[0] == "input_audio_buffer.timeout_triggered"
    assert events[-1] == "response.created"


def test_a_commit_in_the_middle_of_speech_ends_it() -> None:
    driver = Driver()
    driver.append(20)
    (started,) = driver.apply(UserStarted(0))
    (committed, *_) = driver.send("input_audio_buffer.commit")
    assert committed["item_id"] == started["item_id"]
    assert driver.apply(UserStopped(900)) == []
    (again,) = driver.apply(UserStarted(950))
    assert again["item_id"] != started["item_id"]


def test_a_transcript_that_is_ready_before_the_turn_is_told_after_its_item() -> None:
    driver = Driver()
    driver.update(audio={"input": {"transcription": {"model": "m"}}})
    driver.apply(UserStarted(0))
    assert driver.side.user_item is not None
    assert driver.apply(UserTranscribed(driver.side.user_item, "hi", 0.5)) == []
    events = kinds(driver.apply(UserStopped(900)))
    told = events.index("conversation.item.input_audio_transcription.completed")
    assert told > events.index("conversation.item.done")


def test_a_transcript_that_failed_is_told_with_its_item() -> None:
    driver = Driver()
    driver.update(audio={"input": {"transcription": {"model": "m"}}})
    driver.append(20)
    (committed, *_) = driver.send("input_audio_buffer.commit")
    (event,) = driver.apply(UserTranscriptFailed(committed["item_id"], "nothing was understood"))
    assert event["type"] == "conversation.item.input_audio_transcription.failed"
    assert event["item_id"] == committed["item_id"]
    assert (event["error"]["type"], event["error"]["code"]) == ("server_error", "model_failed")


def test_audio_of_a_clients_item_is_its_transcript() -> None:
    driver = Driver()
    audio = base64.b64encode(b"abcd").decode()
    content = [{"type": "input_audio", "audio": audio, "transcript": "hm"}]
    events = driver.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    (added,) = driver.commands
    assert isinstance(added, AddItem)
    assert isinstance(added.item, MessageItem)
    assert added.item.text == "hm"
    assert events[0]["item"]["content"] == [{"type": "input_audio", "transcript": "hm"}]


def test_long_audio_leaves_in_deltas_of_bounded_size_with_their_times() -> None:
    driver = Driver()
    driver.send("response.create")
    events = driver.apply(ResponseSpeech(driver.response, pcm(5_000), 1_000, 6_000))
    deltas = [event for event in events if event["type"] == "response.output_audio.delta"]
    assert [(event["start_ms"], event["end_ms"]) for event in deltas] == [(1000, 3048), (3048, 5096), (5096, 6000)]
    assert b"".join(base64.b64decode(event["delta"]) for event in deltas) == pcm(5_000)


def test_a_response_with_more_text_than_a_frame_holds_ends() -> None:
    driver = Driver()
    driver.send("response.create")
    response = driver.response
    driver.apply(ResponseText(response, "a" * 90_000))
    events = driver.apply(ResponseText(response, "b" * 10_000))
    assert events[-1]["response"]["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert driver.commands == [CancelResponse(response)]
    driver.send("response.create")
    events = driver.apply(ToolCall(driver.response, "f", "\n" * 60_000))
    assert events[-1]["response"]["status"] == "incomplete"


def test_a_session_and_an_item_have_a_size() -> None:
    driver = Driver()
    (event,) = driver.update(instructions="x" * 70_000)
    assert event["error"]["code"] == "invalid_value"
    tool = {"type": "function", "name": "f", "description": "x" * 65_000}
    (event,) = driver.update(instructions="x" * 65_000, tools=[tool, tool])
    assert event["error"]["code"] == "message_too_large"
    assert driver.side.config.instructions == ""
    (event,) = driver.say("\x01" * 50_000)
    assert event["error"]["code"] == "message_too_large"
    assert not driver.commands


def test_the_oldest_items_go_when_there_are_too_many_and_the_client_is_told() -> None:
    driver = Driver()
    for number in range(MAX_ITEMS):
        driver.say("x", id=f"item_{number}_of_many")
    events = driver.say("one more")
    assert kinds(events) == ["conversation.item.added", "conversation.item.done", "conversation.item.deleted"]
    assert events[-1]["item_id"] == "item_0_of_many"
    assert driver.commands[-1] == RemoveItem("item_0_of_many")


def test_at_most_eight_responses_run() -> None:
    driver = Driver()
    for _ in range(8):
        driver.send("response.create", response={"conversation": "none"})
    (event,) = driver.send("response.create", response={"conversation": "none"})
    assert event["error"]["code"] == "too_many_responses"


def test_a_voice_is_known_by_name_and_fixed_once_it_was_heard() -> None:
    driver = Driver()
    for voice in ("ash", {"id": "puppet"}, "marin"):
        (event,) = driver.update(audio={"output": {"voice": voice}})
        assert event["session"]["audio"]["output"]["voice"] == "puppet"
    speak(driver, [], 20)
    (event,) = driver.update(audio={"output": {"voice": "second"}}, instructions="lost")
    assert event["error"]["code"] == "cannot_update_voice"
    assert driver.side.config.instructions == ""
    (event,) = driver.update(audio={"output": {"voice": "cedar"}})
    assert event["type"] == "session.updated"


def test_null_clears_and_absent_keeps() -> None:
    driver = Driver()
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    driver.update(instructions="x", tools=[tool], audio={"input": {"transcription": {"model": "m", "language": "en"}}})
    (event,) = driver.update(audio={"input": {"transcription": {"prompt": "p"}}})
    session = event["session"]
    assert session["audio"]["input"]["transcription"] == {"model": "m", "language": "en", "prompt": "p"}
    assert session["tools"] == [tool]
    (event,) = driver.update(instructions=None, tools=[], audio={"input": {"transcription": None}})
    session = event["session"]
    assert (session["instructions"], session["tools"]) == ("", [])
    assert session["audio"]["input"]["transcription"] is None
    driver.update(audio={"output": {"voice": "second"}})
    for cleared in ({"output": {"voice": None}}, {"output": None}, None):
        driver.update(audio={"output": {"voice": "second"}})
        (event,) = driver.update(audio=cleared)
        assert event["session"]["audio"]["output"]["voice"] == "puppet"


def test_audio_that_waits_is_dropped_on_request() -> None:
    driver = Driver()
    assert driver.send("output_audio_buffer.clear") == []
    driver.send("response.create")
    response = driver.response
    (event,) = driver.send("output_audio_buffer.clear")
    assert event["response_id"] == response
    assert driver.commands == [ClearOutput()]


def test_a_server_that_goes_ends_what_runs_and_says_why() -> None:
    driver = Driver()
    driver.send("response.create")
    error = RealtimeError(RealtimeCode.SHUTDOWN, "the server restarts")
    events = driver.take(driver.side.end(error, RealtimeClose.SHUTDOWN))
    assert kinds(events) == ["response.done", "error"]
    assert events[0]["response"]["status_details"]["error"]["code"] == "server_shutdown"
    assert driver.close is not None
    assert driver.close.code == 1001
    assert driver.side.receive('{"type": "response.create"}') == []
    assert driver.side.apply(UserStarted(0)) == []


def test_a_binary_frame_is_refused_and_nothing_ends() -> None:
    driver = Driver()
    (event,) = driver.take(driver.side.receive_binary())
    assert event["error"]["code"] == "invalid_json"
    assert driver.close is None


def test_every_error_is_within_its_bounds() -> None:
    driver = Driver()
    (event,) = driver.take(driver.side.receive(json.dumps({"type": "x" * 10**6, "event_id": "y" * 10**6})))
    assert len(event["error"]["event_id"]) == 512
    assert len(json.dumps(event)) < 4_000
    (event,) = driver.update(tool_choice="z" * 10**6)
    assert len(json.dumps(event)) < 4_000
    assert driver.side.statistics().errors == 2
    assert driver.side.profile is PROFILE


def test_the_duplex_dialect_numbers_its_events_and_knows_four_more() -> None:
    driver = Driver(duplex=True)
    item_id = speak(driver, [("One", 0, 500)], 500)
    (acknowledged,) = driver.send("playback.ack", item_id=item_id, played_ms=9_000.5)
    assert acknowledged["played_ms"] == 500
    assert driver.commands == [Played(driver.response, 500)]
    assert kinds(driver.send("session.heartbeat")) == ["session.heartbeat_ack"]
    events = driver.send("barge_in")
    assert events[-1]["response"]["status_details"]["reason"] == "turn_detected"
    assert driver.send("barge_in") == []
    driver.send("response.create")
    events = driver.send("session.close")
    assert kinds(events) == ["response.done", "session.closed"]
    assert events[0]["response"]["status"] == "failed"
    assert driver.close is not None
    assert driver.close.code == 1000
    assert driver.numbers == list(range(1, len(driver.numbers) + 1))


def test_without_opting_in_the_dialect_is_unknown() -> None:
    driver = Driver()
    for kind in ("session.heartbeat", "session.close", "playback.ack", "barge_in"):
        (event,) = driver.send(kind)
        assert event["error"]["code"] == "invalid_value"
    assert driver.apply(InputTrouble("wrong_rate", 10.0, 16_000.0)) == []
    assert driver.numbers == []
