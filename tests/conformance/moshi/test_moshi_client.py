"""Kyutai's own client talks with the puppet."""

from __future__ import annotations

import asyncio
from pathlib import Path

from conformance.live.served import served
from conformance.realtime.clients import need, run


async def test_kyutais_client_holds_a_conversation() -> None:
    need("moshi")
    script = str(Path(__file__).parent / "talk_moshi.py")
    async with served() as url:
        where = url.removesuffix("/v1").replace("http", "ws")
        result = await asyncio.to_thread(run, "moshi", script, where, timeout_s=60)
    assert result["client"] == "client.py"
    assert result["text"] == "I hear you. Please go on."
    assert not [line for line in result["logs"] if line.startswith("error")]
    assert result["loud"] >= 10, "two lines of about half a second"
    assert result["heard_after_frame"] >= 16, "nothing before the first turn is over"
    assert result["lags"] < result["frames"] / 4
