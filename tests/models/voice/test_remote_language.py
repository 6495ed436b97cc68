"""The language model as an endpoint: a stub on a real socket that answers well, slowly, badly, too much, or not."""

import json
import logging
import threading
import time

import pytest

from models.voice.endpoints import CHAT, KEY, WEATHER, chat, ended, talk_with
from models.voice.stand_ins import hum, parts
from models.voice.stub_endpoint import event, says, sends
from models.voice.talk import Talk
from realtime_omni.errors import ConfigError
from realtime_omni.models.voice.answering import SPEECHLESS
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.remote import web as remote_web
from realtime_omni.models.voice.remote.chat import ChatEndpoint, Lines, messages
from realtime_omni.models.voice.remote.settings import LanguageEndpoint
from realtime_omni.models.voice.speaker import Called, Returned
from realtime_omni.session.frame import AddText, Cancel, Configure, Respond, ToolResult
from realtime_omni.session.signals import OutputText, ResponseEnded, ToolCall


def test_a_question_is_answered_by_the_endpoint_which_reads_the_conversation(stub, web):
    stub.answers[CHAT] = says("It is ", "Paris. ", "It is old.")
    talk = talk_with(language=chat(web, stub, body={"temperature": 0.2, "max_tokens": None}))
    talk.tell(Configure(instructions="Be brief."), AddText("Hello.", "user"), AddText("Hi!", "assistant"))
    talk.hear(hum(0.1, 800))
    ended(talk)
    assert list(talk.said().values()) == ["It is Paris. It is old."]
    [request] = stub.requests
    assert request.json == {
        "model": "m",
        "stream": True,
        "temperature": 0.2,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hi!"},
            {"role": "user", "content": "What is the capital of France?"},
        ],
    }
    assert "authorization" not in request.headers
    assert [e.text for e in talk.facts.entries][-1] == "It is Paris. It is old."


def test_an_answer_is_spoken_while_it_still_comes(stub, web):
    async def slow(request, send):
        await send(event({"content": "The first sentence. And "}))
        await stub.going_on.wait()
        await send(event({"content": "the second."}, finish="stop"))

    stub.answers[CHAT] = slow
    talk = Talk(EmbeddedVoice(parts(skills=False, language=chat(web, stub, patient=False)), threads=0))
    talk.tell(AddText("Tell me."), Respond("x"))
    talk.until(OutputText, 10**7)
    assert not talk.of(ResponseEnded)
    stub.go_on()
    ended(talk)
    assert talk.said()["x"] == "The first sentence. And the second."


def test_tools_are_offered_called_and_their_results_go_back(stub, web):
    async def brain(request, send):
        if any(m["role"] == "tool" for m in request.json["messages"]):
            return await says("It rains in Paris.")(request, send)
        await send(event({"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": '{"ci'}}]}))
        more = [{"index": 0, "function": {"arguments": 'ty": "Paris"}'}}]
        await send(event({"tool_calls": more}, finish="tool_calls"))
        return None

    stub.answers[CHAT] = brain
    talk = talk_with(language=chat(web, stub))
    talk.tell(Configure(tools=(WEATHER,)), AddText("What is the weather?"), Respond("x"))
    ended(talk)
    [call] = talk.of(ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    asked = stub.requests[0].json
    assert asked["tools"][0]["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert asked["tool_choice"] == "auto"
    talk.tell(ToolResult(call.call_id, "rain"), Respond("y"))
    ended(talk)
    assert talk.said() == {"y": "It rains in Paris."}
    told = stub.requests[1].json["messages"][-2:]
    assert told[0]["tool_calls"][0]["id"] == told[1]["tool_call_id"] == call.call_id
    assert told[1]["content"] == "rain"
    talk.tell(Respond("z", tool_choice="none"))
    ended(talk)
    assert "tools" not in stub.requests[2].json
    talk.tell(Respond("w", tool_choice="weather"))
    ended(talk)
    assert stub.requests[3].json["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_a_call_without_a_result_is_told_as_one():
    said = [("user", "a"), Called("1", "f", "{}"), Called("2", "g", "{}"), Returned("2", "yes"), ("user", "b")]
    roles = [(m["role"], m.get("content")) for m in messages(said)]
    assert roles == [
        ("user", "a"),
        ("assistant", None),
        ("tool", "There is no result yet."),
        ("tool", "yes"),
        ("user", "b"),
    ]
    assert messages([Returned("lost", "x")]) == []


def test_a_barge_in_closes_the_connection(stub, web):
    async def endless(request, send):
        await send(event({"content": "One two three four five. "}))
        await stub.loop.create_future()

    stub.answers[CHAT] = endless
    talk = Talk(EmbeddedVoice(parts(skills=False, language=chat(web, stub, patient=False)), threads=0))
    talk.tell(AddText("Count."), Respond("x"))
    talk.until(OutputText, 10**7)
    assert not stub.gone.is_set()
    talk.tell(Cancel(heard_ms=10_000))
    assert stub.gone.wait(10)
    assert [s.reason for s in talk.of(ResponseEnded)] == ["cancelled"]


BAD_CHATS = {
    "refused": sends(b'{"error": "no such model"}', 404, "application/json"),
    "no stream": sends(b'{"choices": []}', kind="application/json"),
    "no json": sends(b"data: {broken\n\n"),
    "not utf-8": sends(b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n'),
    "other fields": sends(b'data: {"choices": "none"}\n\n'),
    "an error": sends(b'data: {"error": {"message": "overloaded"}}\n\n'),
    "broken off": sends(event({"role": "assistant"})),
    "huge": sends(b": " + b"x" * 65_000 + (b"\n: " + b"x" * 60_000) * 20),
    "a line without end": sends(b"data: " + b"x" * 200_000),
    "compressed": sends(b"\x1f\x8b", content_encoding="gzip"),
    "a tool that was not offered": sends(
        event({"tool_calls": [{"function": {"name": "rm", "arguments": "{}"}}]}, finish="stop")
    ),
}


@pytest.mark.parametrize("answer", BAD_CHATS.values(), ids=BAD_CHATS)
def test_a_language_model_that_fails_is_said_and_the_call_goes_on(stub, web, caplog, answer):
    stub.answers[CHAT] = answer
    talk = talk_with(language=chat(web, stub))
    talk.tell(AddText("Hello?"), Respond("x"))
    ended(talk)
    assert talk.said()["x"] == SPEECHLESS
    assert talk.of(ResponseEnded)[0].reason == "failed"
    assert "the language model's endpoint does not answer" in caplog.text
    assert "Traceback" not in caplog.text
    stub.answers[CHAT] = says("Here I am.")
    talk.tell(Respond("y"))
    ended(talk)
    assert talk.said()["y"] == "Here I am."
    assert [m["content"] for m in stub.requests[-1].json["messages"]][1:] == ["Hello?"]


DEEP = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a"', '"text"', '{"a": NaN}', DEEP])
def test_arguments_that_are_no_object_are_not_passed_on(stub, web, caplog, arguments):
    calls = [{"function": {"name": "weather", "arguments": arguments}}]
    stub.answers[CHAT] = sends(event({"tool_calls": calls}, finish="stop"))
    talk = talk_with(language=chat(web, stub))
    talk.tell(Configure(tools=(WEATHER,)), AddText("Hello?"), Respond("x"))
    ended(talk)
    assert [json.loads(c.arguments) for c in talk.of(ToolCall)] == ([{}] if arguments == "" else [])
    assert "Traceback" not in caplog.text


def test_long_arguments_of_a_call_are_read_back_whole(stub, web):
    arguments = json.dumps({"city": "x" * 5000})
    call = event({"tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}, finish="stop")
    stub.answers[CHAT] = sends(call)
    talk = talk_with(language=chat(web, stub))
    talk.tell(Configure(tools=(WEATHER,)), AddText("Hello?"), Respond("x"))
    ended(talk)
    stub.answers[CHAT] = says("It rains.")
    talk.tell(ToolResult(talk.of(ToolCall)[0].call_id, "rain"), Respond("y"))
    ended(talk)
    assert stub.requests[1].json["messages"][-2]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("second", [0, 1])
def test_two_calls_of_one_answer_are_two_even_under_one_index(stub, web, second):
    def part(index, name, arguments, call_id):
        return event(
            {"tool_calls": [{"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}]}
        )

    stream = part(0, "weather", '{"city": ', "a") + part(0, None, '"Paris"}', "of a piece alone")
    stream += part(second, "weather", '{"city": "Rome"}', "b")
    stub.answers[CHAT] = sends(stream + event(finish="tool_calls"))
    talk = talk_with(language=chat(web, stub))
    talk.tell(Configure(tools=(WEATHER,)), AddText("Hello?"), Respond("x"))
    ended(talk)
    assert [json.loads(c.arguments)["city"] for c in talk.of(ToolCall)] == ["Paris", "Rome"]


def test_a_call_that_ends_or_is_interrupted_leaves_the_answer_of_one_that_asked_the_same(stub, web):
    async def slow(request, send):
        await send(event({"content": f"The first sentence of {len(stub.requests)}. And "}))
        await stub.going_on.wait()
        await send(event({"content": "the second."}, finish="stop"))

    stub.answers[CHAT] = slow
    model = EmbeddedVoice(parts(skills=False, language=chat(web, stub, patient=False)), threads=0)
    one, other = Talk(model, "one"), Talk(model, "other")
    for talk in (one, other):
        talk.tell(AddText("Tell me."), Respond("x"))
        talk.until(OutputText, 10**7)
    one.tell(Cancel())
    stub.go_on()
    ended(other)
    assert other.said() == {"x": "The first sentence of 2. And the second."}
    assert len(stub.requests) == 2


def test_more_answers_than_are_remembered_are_asked_for_once_while_somebody_looks(stub, web, monkeypatch):
    async def endless(request, send):
        await send(event({"content": "One. "}))
        await stub.loop.create_future()

    stub.answers[CHAT] = endless
    monkeypatch.setattr(remote_web, "_MOST_KEPT", 2)
    language = chat(web, stub, patient=False)
    prompts = [language.prompt(None, [("user", str(n))]) for n in range(4)]
    until_s = time.monotonic() + 10
    while not min(len(language.draft(prompt).text) for prompt in prompts):
        assert time.monotonic() < until_s
    for _ in range(3):
        for prompt in prompts:
            language.draft(prompt)
    assert len(stub.requests) == 4
    monkeypatch.setattr(remote_web, "_WANTED_S", 0.0)
    language.draft(language.prompt(None, [("user", "new")]))
    assert stub.gone.wait(10)


def test_an_answer_that_breaks_off_is_spoken_as_far_as_it_came(stub, web):
    stub.answers[CHAT] = sends(event({"content": "It is Pa"}))
    talk = talk_with(language=chat(web, stub))
    talk.tell(AddText("Hello?"), Respond("x"))
    ended(talk)
    assert talk.said() == {"x": "It is Pa"}
    assert talk.of(ResponseEnded)[0].reason == "failed"


def test_nobody_there_and_a_silent_endpoint_are_said(web, stub):
    async def silent(request, send):
        await stub.loop.create_future()

    stub.answers[CHAT] = silent
    for url, timeout_s in (("http://127.0.0.1:9/v1", 5.0), (stub.url, 0.2)):
        language = ChatEndpoint(web, LanguageEndpoint(url=url, model="m", timeout_s=timeout_s), patient=True)
        talk = talk_with(language=language)
        talk.tell(AddText("Hello?"), Respond("x"))
        ended(talk)
        assert talk.said()["x"] == SPEECHLESS


def test_the_key_comes_from_the_environment_and_is_never_logged(stub, web, monkeypatch, caplog):
    monkeypatch.setenv("VOICE_KEY", KEY)
    stub.answers[CHAT] = sends(f"wrong key {KEY}".encode(), 400)
    with caplog.at_level(logging.DEBUG):
        talk = talk_with(language=chat(web, stub, key_env="VOICE_KEY"))
        talk.tell(AddText("Hello?"), Respond("x"))
        ended(talk)
    assert stub.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert "wrong key ..." in caplog.text
    assert KEY not in caplog.text
    assert KEY not in str(talk.facts)


def test_a_refusal_that_quotes_the_key_is_not_logged_with_the_beginning_of_it(stub, web, monkeypatch, caplog):
    monkeypatch.setenv("VOICE_KEY", KEY)
    for before in range(512 - len(KEY), 513):
        caplog.clear()
        stub.answers[CHAT] = sends(b"x" * before + KEY.encode() + b"y" * 600, 400)
        language = chat(web, stub, key_env="VOICE_KEY")
        assert language.draft(language.prompt(None, [("user", "Hello?")])).failed
        assert "status 400: xxx" in caplog.text
        assert KEY[:3] not in caplog.text


@pytest.mark.parametrize("key", ["sk-one\ntwo", "sk-one two", "sk-\u00e9"])
def test_a_key_that_no_header_may_carry_is_refused_without_its_text(monkeypatch, key):
    monkeypatch.setenv("VOICE_KEY", key)
    with pytest.raises(ConfigError, match="VOICE_KEY has a blank") as refused:
        LanguageEndpoint(url="http://localhost/v1", model="m", key_env="VOICE_KEY").key()
    assert "sk-" not in str(refused.value)


def test_nothing_is_asked_of_where_a_refusal_points(stub, web, caplog):
    for target in ("file:///etc/passwd", f"{stub.url}/elsewhere"):
        stub.answers[CHAT] = sends(b"", 302, location=target)
        language = chat(web, stub)
        assert language.draft(language.prompt(None, [("user", target)])).failed
    assert [request.path for request in stub.requests] == [CHAT, CHAT]
    assert "status 302" in caplog.text


def test_two_hundred_interrupted_answers_leave_no_connection_and_no_thread(stub, web):
    async def endless(request, send):
        await send(event({"content": "One. "}))
        await stub.loop.create_future()

    stub.answers[CHAT] = endless
    language, threads = chat(web, stub, patient=False), threading.active_count()
    prompt = language.prompt(None, [("user", "Count.")])
    for number in range(200):
        while number % 10 == 9 and not language.draft(prompt).text:
            pass  # every tenth is heard before it is interrupted, the others anywhere on their way
        language.draft(prompt)
        language.drop(prompt)
    stub.answers[CHAT] = says("Here I am.")
    while not (draft := language.draft(prompt)).done:
        pass
    assert (draft.text, draft.failed) == ("Here I am.", False)
    assert threading.active_count() == threads
    assert len(web._clients[LanguageEndpoint]._transport._pool.connections) <= 1


def test_a_letter_of_several_bytes_may_come_in_pieces(stub, web):
    async def bytewise(request, send):
        for byte in (
            b'data: {"choices": [{"delta": {"content": "Gr\xc3\xbc\xc3\x9fe \xf0\x9f\x98\x80."}}]}\n\ndata: [DONE]\n\n'
        ):
            await send(bytes([byte]))

    stub.answers[CHAT] = bytewise
    language = chat(web, stub)
    assert language.draft(language.prompt(None, [("user", "Hello?")])).text == "Gr\u00fc\u00dfe \U0001f600."


def test_events_come_in_any_pieces():
    stream = b": ping\r\ndata: {}\r\n\r\ndata:{}\nid: 7\n\ndata: [DONE]\n\n"
    for size in (1, 3, len(stream)):
        lines = Lines()
        found = [e for i in range(0, len(stream), size) for e in lines.feed(stream[i : i + size])]
        assert found == [b"{}", b"{}", b"[DONE]"]
