"""A stub of every endpoint, and the web that asks it."""

import pytest

from models.voice.stub_endpoint import StubEndpoint
from realtime_omni.models.voice.remote.web import Web


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
