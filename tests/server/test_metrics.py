"""Metrics: one fixed table, labels from closed sets, documentation that equals the table."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from realtime_omni.server.hub import WorldHub
from realtime_omni.server.metrics import TABLE, Metrics, table_markdown
from server.fake_values import FakeStatistics
from server.fakes import FakeManager
from server.wire import Client, make_hub

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_LABELS = {"session", "session_id", "request", "request_id", "connection", "prompt", "event_id", "user", "key"}


@pytest.mark.req("AC-50")
def test_labels_are_closed_sets_without_ids_or_prompts() -> None:
    for spec in TABLE:
        assert not FORBIDDEN_LABELS & set(spec.labels), spec.name
        for values in spec.labels.values():
            assert 1 < len(values) <= 64, spec.name
            assert all(re.fullmatch(r"[a-z0-9_]+", value) for value in values), spec.name


@pytest.mark.req("AC-50")
def test_every_metric_documents_unit_labels_and_aggregation() -> None:
    page = (ROOT / "protocols" / "metrics.md").read_text(encoding="utf-8")
    assert table_markdown() in page
    for spec in TABLE:
        assert spec.unit
        assert spec.help.endswith(".")
        assert spec.aggregate
    assert len({spec.name for spec in TABLE}) == len(TABLE)


@pytest.mark.req("AC-50")
def test_a_label_value_outside_the_table_is_refused() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="not a value"):
        metrics.count("events_total", status="s-123")
    with pytest.raises(ValueError, match="labels"):
        metrics.count("blocks_total", session_id="s-123")
    with pytest.raises(KeyError):
        metrics.count("made_up_total")


@pytest.mark.req("AC-50")
async def test_what_is_scraped_after_a_session_is_exactly_the_table() -> None:
    manager = FakeManager()
    hub = make_hub(manager)
    hub.metrics.watch("world", lambda: FakeStatistics(ticks_settled=3, pages_total=10, pages_used=4))
    client = Client(hub)
    await client.start(session_id="secret-session", prompt="a secret prompt")
    client.press(0)
    await client.block()
    client.send("session.close")
    await client.end()
    hub.close()
    text = hub.metrics.render().decode()
    assert "secret" not in text
    allowed = {spec.name.removesuffix("_total"): spec for spec in TABLE}
    families = [f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")]
    assert {family.name for family in families} == set(allowed)
    for family in families:
        spec = allowed[family.name]
        assert family.documentation == spec.help
        assert family.type == spec.kind
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert set(labels) == set(spec.labels)
            assert all(value in spec.labels[name] for name, value in labels.items())
    assert hub.metrics.value("sessions_closed_total", reason="client") == 1
    assert hub.metrics.value("kv_pages", model="world", state="used") == 4
    assert hub.metrics.value("open_connections") == 0


async def test_a_scrape_tells_the_moment_at_which_it_was_asked_for() -> None:
    """Its text is written in a thread, while the event loop counts on."""
    held = threading.Event()
    with ThreadPoolExecutor(1) as only:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(only)
        loop.run_in_executor(None, held.wait)
        metrics = Metrics()
        metrics.observe("control_plane_seconds", 0.002)
        then = metrics.render()
        scrape = asyncio.create_task(metrics.scrape())
        await asyncio.sleep(0)
        metrics.observe("control_plane_seconds", 0.002)
        held.set()
        assert await scrape == then
        assert metrics.render() != then


async def test_the_control_plane_of_every_block_is_measured_without_model_and_encoder(hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(cadence="on_demand")
    for _ in range(3):
        client.send("session.next")
        await client.block()
        client.ack()
    client.send("session.close")
    await client.end()
    assert hub.metrics.value("control_plane_seconds_count") == 3
    assert hub.metrics.value("control_plane_seconds_bucket", le="+Inf") == 3


def test_the_control_planes_buckets_are_fine_around_its_bounds() -> None:
    bounds = next(spec.buckets for spec in TABLE if spec.name.endswith("control_plane_seconds"))
    assert {0.001, 0.005} < set(bounds)
    assert (bounds[0], bounds[-1]) == (0.0001, 0.1)
    assert list(bounds) == sorted(bounds)
