"""Robots of the simulator on a served policy: every one its own connection, pictures in, chunks out.

Owns: what is sent, and the ticks that the server is told. The simulator stands still while an answer is on its way, so a
delay is what the simulation says and not what this machine happens to need; the server learns it as from any robot, by
which actions were consumed before a chunk came. Must not know: the weights.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import torch
from torch import Tensor

from realtime_omni_client.policy_stream import PolicyStream
from recipes.tiny_policy.pictures import CAMERAS
from recipes.tiny_policy.policy import Request, look
from recipes.tiny_policy.shape import EXECUTED
from recipes.tiny_policy.table import INSTRUCTIONS, TICK_S, state_of


class SocketRobots:
    """``count`` robots on the server at ``url``; ``task`` [count]: whose words each is given; ``first``: the number of the
    first robot, for its noise; ``rtc``: the mode that every observation asks for, refused by a server that does not offer it
    (None: the server's own). One per set of episodes."""

    def __init__(
        self,
        url: str,
        count: int,
        task: Tensor,
        seed: int,
        size: int,
        cameras: str,
        *,
        first: int = 0,
        rtc: str | None = None,
    ) -> None:
        self._words = [INSTRUCTIONS[number] for number in task.tolist()]
        self._seed, self._size, self._blank, self._first = seed, size, cameras == "blank", first
        self._rtc = rtc
        self._streams = [PolicyStream.connect(url, control_hz=1 / TICK_S) for _ in range(count)]
        self._runner = asyncio.Runner()
        self.delays_used: list[int] = []
        """What the server planned for, chunk by chunk."""
        self._asked = 0
        self._popped = 0

    def __enter__(self) -> Self:
        try:
            self._runner.run(self._open())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._close())
        finally:
            self._runner.close()

    def ask(self, request: Request) -> Tensor:
        """Chunks [B, H, 3] in robot units, all robots' observations sent together."""
        return self._runner.run(self._ask(request))

    async def _open(self) -> None:
        await asyncio.gather(*(stream.__aenter__() for stream in self._streams))

    async def _close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))

    async def _ask(self, request: Request) -> Tensor:
        tick = self._asked * EXECUTED
        frames = look(request.scene, self._size).permute(0, 1, 3, 4, 2).cpu().numpy()
        states = state_of(request.scene).cpu().numpy()
        answers = await asyncio.gather(
            *(
                self._one(
                    row, {**self._views(frames[row]), "state": states[row], "prompt": self._words[row]}, tick, request
                )
                for row in range(len(self._streams))
            )
        )
        self._asked += 1
        self._popped = tick + request.delay
        return torch.stack(answers).to(request.noise.device)

    def _views(self, frames: Any) -> dict[str, Any]:
        return {name: frames[n] * 0 if self._blank else frames[n] for n, name in enumerate(CAMERAS)}

    async def _one(self, row: int, observation: dict[str, Any], tick: int, request: Request) -> Tensor:
        stream = self._streams[row]
        _consume(stream, self._popped, tick)
        seed = noise_seed(self._seed, self._first + row, self._asked)
        if not await stream.observe(observation, tick, seed=seed, rtc=self._rtc):
            raise ConnectionError("the connection to the policy was lost")
        # What the robot does while the chunk is on its way; nothing is merged before it has been done.
        _consume(stream, tick, tick + request.delay)
        chunk = await stream.next_chunk()
        self.delays_used.append(chunk.delay_used)
        return torch.tensor(chunk.actions)


def noise_seed(seed: int, row: int, number: int) -> int:
    """The noise of a robot's observation ``number``, the same in every run: runs are paired."""
    return (seed + row * 1_000_003 + number * 7919) % 2**31


def _consume(stream: PolicyStream, start: int, end: int) -> None:
    """Take the planned actions of these ticks out of the robot's queue, as its control loop would."""
    for tick in range(start, end):
        stream.actions.pop(tick)
