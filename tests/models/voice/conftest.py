"""A call with stand-ins; a stub of every endpoint, and the web that asks it."""

import pytest

from models.voice.stub_endpoint import StubEndpoint
from models.voice.talk import Talk
from realtime_omni.models.voice.remote.web import Web


@pytest.fixture
def talk():
    return Talk()


@pytest.fixture
def stub():
    made = StubEndpoint()
    yield made
    made.close()


@pytest.fixture
def web():
    made = Web()
    yield made
    made.close()
