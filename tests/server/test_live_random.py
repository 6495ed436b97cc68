"""Live sessions of the whole server under random clients: the promises of the wire hold, and nothing is left behind."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest

from protocols.live.drive import CONTEXTS, Judge
from realtime_omni_protocols.live import PRIMARY, Close, LiveClose, LiveError, Send
from server.voices import LiveClient, VoiceServer, pcm, speech, voice_server

TONE, SILENCE = pcm(speech(1)), bytes(3840)


class Crowd:
    """A primary connection and its sidebands, all judged."""

    def __init__(self, server: VoiceServer, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.judge = Judge()
        self.clients: dict[int, LiveClient] = {}
        self.read: dict[int, int] = {}
        self.count = 0

    async def run(self, steps: int) -> None:
        self.join(PRIMARY, self.server.connect())
        self.say(PRIMARY, "session.start", session={"model": "puppet", "store": self.rng.random() < 0.3})
        await self.server.until(lambda: bool(self.clients[PRIMARY].sent))
        for _ in range(steps):
            await self.step()
            self.judge_all()
        primary = self.clients[PRIMARY]
        if primary.closed is None and self.rng.random() < 0.7:
            self.say(PRIMARY, "session.close")
        else:
            primary.drop()
            self.judge.lost(PRIMARY)
        await self.server.gone()
        self.judge_all()
        self.judge.over()

    async def step(self) -> None:
        if self.rng.random() < 0.6:
            sound = self.rng.choice([TONE, SILENCE])
            self.clients[PRIMARY].append(sound)
            await self.server.tick()
            return
        peer = self.rng.choice(list(self.clients))
        match self.rng.randrange(9):
            case 0:
                self.say(peer, self.rng.choice(["session.input_audio.mute", "session.input_audio.unmute"]))
            case 1:
                kind = f"session.{self.rng.choice(CONTEXTS)}.append"
                self.say(peer, kind, content="say Aha.", delegation_id=self.rng.choice([None, None, "d"]))
            case 2:
                audio = base64.b64encode(TONE * self.rng.randrange(1, 4)).decode()
                self.say(peer, "session.output_audio.fixture.play", audio=audio)
            case 3:
                self.say(peer, "session.update", session={"delegation": {"type": "client"}})
            case 4:
                self.say(peer, "response.create")
            case 5:
                self.clients[peer].inbound.put_nowait(self.rng.choice(["", "[]", '{"type":3}', b"\x00", "{" * 99]))
            case 6:
                self.attach()
            case 7 if peer != PRIMARY:
                self.clients.pop(peer).drop()
                self.judge.lost(peer)
            case _:
                await self.server.tick()
        await self.server.rest()

    def attach(self) -> None:
        primary = self.clients[PRIMARY]
        if not primary.of("session.started"):
            return
        session = self.server.live.find(primary.of("session.started")[0]["session"]["id"])
        client = LiveClient()
        try:
            peer, out = session.attach(client)
        except LiveError:
            return
        self.server.serve(self.server.live.serve_sideband(client, session, peer, out))
        self.judge.attached(peer)
        self.join(peer, client)

    def join(self, peer: int, client: LiveClient) -> None:
        self.clients[peer], self.read[peer] = client, 0

    def say(self, peer: int, kind: str, **fields: Any) -> None:
        self.count += 1
        event = {"type": kind, "event_id": f"c{self.count}", **fields}
        self.judge.asks(peer, event)
        self.clients[peer].inbound.put_nowait(json.dumps(event))

    def judge_all(self) -> None:
        for peer, client in self.clients.items():
            new, self.read[peer] = client.sent[self.read[peer] :], len(client.sent)
            gone = peer in self.judge._gone
            self.judge.reads([Send(peer, frame) for frame in new if not gone])
            if client.closed is not None and not gone and peer not in self.judge._gone:
                self.judge.reads([Close(peer, LiveClose(client.closed[0]), client.closed[1])])


@pytest.mark.req("AC-43")
@pytest.mark.parametrize("overrides", [(), ("options.yields=true", "options.greeting=Hello there my friend.")])
async def test_random_clients_find_nothing_broken(overrides: tuple[str, ...]) -> None:
    for seed in range(8):
        async with voice_server(*overrides) as server:
            await Crowd(server, seed).run(60)
