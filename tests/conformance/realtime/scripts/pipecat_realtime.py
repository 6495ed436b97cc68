"""Run in the environment of pipecat.lock: Pipecat's Realtime service in a pipeline: greeted, spoken to, interrupted, a tool.

``server`` or ``local``: who finds the turns. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from loguru import logger
from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from sound import RATE, in_real_time, silence, tone

CALLED: list[Any] = []
WAIT_S = 20


class Ear(FrameProcessor):
    """What comes out of the service, in either direction."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.changed = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, InputAudioRawFrame):
            self.frames.append(frame)
            self.changed.set()
        await self.push_frame(frame, direction)

    def of(self, kind: type[Frame]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    async def answers(self, count: int) -> None:
        await self.until(lambda: len(self.of(LLMFullResponseEndFrame)) >= count)

    def text(self) -> str:
        return "".join(frame.text for frame in self.of(TTSTextFrame))

    def audio_ms(self) -> float:
        return sum(len(frame.audio) for frame in self.of(TTSAudioRawFrame)) / 48


async def weather(params: FunctionCallParams) -> None:
    CALLED.append(params.arguments)
    await params.result_callback("It is sunny.")


def service(local: bool) -> OpenAIRealtimeLLMService:
    detection = False if local else events.TurnDetection()
    audio = events.AudioConfiguration(
        input=events.AudioInput(transcription=events.InputAudioTranscription(), turn_detection=detection)
    )
    properties = events.SessionProperties(instructions="Be kind.", audio=audio)
    llm = OpenAIRealtimeLLMService(
        api_key="a key",
        base_url=sys.argv[1].replace("http", "ws") + "/v1/realtime",
        settings=OpenAIRealtimeLLMService.Settings(session_properties=properties),
    )
    llm.register_function("weather", weather)
    return llm


async def speak(worker: PipelineWorker, *sounds: bytes) -> None:
    async for packet in in_real_time(b"".join(sounds)):
        await worker.queue_frame(InputAudioRawFrame(audio=packet, sample_rate=RATE, num_channels=1))


async def converse(worker: PipelineWorker, context: LLMContext, ear: Ear, local: bool) -> dict[str, Any]:
    await worker.queue_frame(LLMRunFrame())
    await ear.answers(1)
    found: dict[str, Any] = {"greeting": ear.text(), "greeting_ms": ear.audio_ms()}

    async def turn(*sounds: bytes) -> None:
        if local:
            await worker.queue_frames([InterruptionFrame(), UserStartedSpeakingFrame()])
        await speak(worker, *sounds)
        if local:
            await worker.queue_frame(UserStoppedSpeakingFrame())

    for count in (2, 3):
        await turn(tone(600), silence(700))
        await ear.answers(count)
    found["turns"] = ear.text().removeprefix(found["greeting"])

    before = ear.audio_ms()
    await turn(tone(400), silence(700))
    await ear.until(lambda: ear.audio_ms() > before + 300)
    said = len(ear.of(LLMFullResponseEndFrame))
    await turn(tone(400), silence(700))  # while the assistant speaks
    await ear.until(lambda: len(ear.of(LLMFullResponseEndFrame)) >= said + 2)
    found["interruptions"] = len(ear.of(InterruptionFrame))
    found["errors"] = [frame.error for frame in ear.of(ErrorFrame)]
    return found


async def call(worker: PipelineWorker, context: LLMContext, ear: Ear) -> dict[str, Any]:
    await worker.queue_frame(LLMRunFrame())
    await ear.until(lambda: "sunny" in ear.text())
    return {"called": CALLED, "answer": ear.text(), "errors": [frame.error for frame in ear.of(ErrorFrame)]}


async def run(text: str, scene: Any, local: bool) -> dict[str, Any]:
    town = {"town": {"type": "string"}}
    tools = ToolsSchema([FunctionSchema("weather", "The weather in a town.", town, ["town"])])
    context = LLMContext([{"role": "user", "content": text}], tools)
    pair = LLMContextAggregatorPair(context, realtime_service_mode=True)
    ear = Ear()
    worker = PipelineWorker(
        Pipeline([pair.user(), service(local), ear, pair.assistant()]),
        params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE),
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(0.3)
    try:
        return await scene(worker, context, ear)
    finally:
        await worker.queue_frame(EndFrame())
        await asyncio.wait([running], timeout=10)


async def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    local = sys.argv[2] == "local"

    async def talk(worker: PipelineWorker, context: LLMContext, ear: Ear) -> dict[str, Any]:
        return await converse(worker, context, ear, local)

    found = {
        "talk": await run("say Good evening.", talk, local),
        "tool": await run('call weather {"town": "Bonn"}', call, local),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
