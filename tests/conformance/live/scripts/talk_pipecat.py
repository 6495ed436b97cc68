"""Pipecat's OpenAILiveLLMService in a pipeline against our server: python talk_pipecat.py BASE_URL.

Asked to open the conversation, spoken to, interrupted, and with a function of the pipeline called. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "realtime" / "scripts"))

from loguru import logger
from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMContextFrame,
    OutputAudioRawFrame,
    TranscriptionFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService
from pipecat.workers.runner import WorkerRunner
from sound import RATE, in_real_time, silence, tone

CALLED: list[Any] = []


class Ear(FrameProcessor):
    """What passes, in either direction."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, InputAudioRawFrame):
            self.frames.append(frame)
        await self.push_frame(frame, direction)

    def of(self, kind: type[Frame]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def text(self) -> str:
        return "".join(frame.text for frame in self.of(TTSTextFrame))


async def weather(params: FunctionCallParams) -> None:
    CALLED.append(params.arguments)
    await params.result_callback("sunny")


async def run(text: str, seconds: float, *sounds: bytes, again: bool = False) -> dict[str, Any]:
    """``again``: then the conversation is begun anew, over a connection of its own, and the sounds come once more."""
    backend = OpenAILiveLLMService.ResponsesDelegation(OpenAIResponsesLLMService.Settings(model="backend"))
    llm = OpenAILiveLLMService(
        api_key="-",
        base_url=sys.argv[1].replace("http", "ws") + "/live/sessions",
        settings=OpenAILiveLLMService.Settings(system_instruction="Be brief."),
        delegation=backend,
    )
    llm.register_function("weather", weather)
    before, after = Ear(), Ear()
    parameters = PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
    worker = PipelineWorker(Pipeline([before, llm, after]), params=parameters)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(0.5)
    town = {"town": {"type": "string"}}
    tools = ToolsSchema([FunctionSchema("weather", "The weather in a town.", town, ["town"])])
    messages = [{"role": "user", "content": text}, {"role": "developer", "content": "Open the conversation."}]
    try:
        await worker.queue_frame(LLMContextFrame(LLMContext(messages, tools)))
        rest = silence(int(seconds * 1000))
        for number in range(1 + again):
            if number:
                await llm.reset_conversation()
            async for packet in in_real_time(b"".join([rest, *(sound + rest for sound in sounds)])):
                await worker.queue_frame(InputAudioRawFrame(audio=packet, sample_rate=RATE, num_channels=1))
    finally:
        await worker.queue_frame(EndFrame())
        await asyncio.wait([running], timeout=12)
    return {
        "said": after.text(),
        "heard": [frame.text for frame in before.of(TranscriptionFrame)],
        "audio_s": sum(len(frame.audio) for frame in after.of(OutputAudioRawFrame)) / 2 / RATE,
        "errors": [frame.error for ear in (before, after) for frame in ear.of(ErrorFrame)],
    }


async def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    talk = await run("say Good evening.", 2.5, tone(1000), tone(1000))
    tool = await run('call weather {"town": "Bonn"}', 4.0)
    print(json.dumps({"talk": talk, "tool": tool, "called": CALLED}))


if __name__ == "__main__":
    asyncio.run(main())
