"""Each client once with the embedded voice: what it says is its own matter, that it is heard and said is ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.realtime.clients import need, run, serve
from realtime_omni.models.voice import weights


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    need("openai")
    if weights.missing(weights.cache_folder()):
        pytest.skip("the weights of the voice are not here: realtime-omni fetch voice")
    with serve("voice") as url:
        yield url


@pytest.mark.timeout(300)
def test_clients_of_openai_and_livekit(server: str) -> None:
    found = run("openai", "embedded_openai.py", server, timeout_s=280)
    for name in ("sdk", "agents", "livekit"):
        assert found[name]["greeting"].strip()
        assert found[name]["ms"] > 300
        assert not found[name].get("errors")
    assert found["sdk"]["answer"].strip()
    said, heard = (
        set(text.lower().replace(".", " ").split()) for text in (found["sdk"]["greeting"], found["sdk"]["heard"])
    )
    assert len(said & heard) >= 3, "it understood the beginning of what it had said itself"


@pytest.mark.timeout(120)
def test_pipecat(server: str) -> None:
    found = run("pipecat", "embedded_pipecat.py", server, timeout_s=110)
    assert found["greeting"].strip()
    assert found["ms"] > 300
    assert found["errors"] == []
