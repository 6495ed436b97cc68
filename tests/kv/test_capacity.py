"""The byte arithmetic, against numbers worked out by hand; the marks name the acceptance checks and rows they come from."""

from dataclasses import replace

import pytest

from realtime_omni.errors import ConfigError
from realtime_omni.kv.capacity import CrossAttentionSpec, DoesNotFitError, KVBranch, KVSpec, plan_capacity

GIB = 1 << 30
TINY = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
    "tokens_per_frame": 1,
    "frames_per_block": 3,
    "window_frames": 3,
    "sink_frames": 3,
    "cross_attention": (CrossAttentionSpec("text", 2),),
    "dtype_bytes": 4,
}
TWO_BRANCHES = (KVBranch("positive", 0), KVBranch("negative", 1))


def tiny(**changes) -> KVSpec:
    """One layer, one head of one float32: a page is 2 * 4 = 8 bytes, a text cache 2 * 2 * 4 = 16."""
    return KVSpec(**{**TINY, **changes})


def lingbot(**changes) -> KVSpec:
    """The shipped geometry: 480 x 832, 1,560 tokens a frame, 40 layers of 40 heads of 128 in bf16."""
    geometry = {
        "num_layers": 40,
        "num_kv_heads": 40,
        "head_dim": 128,
        "tokens_per_frame": 1560,
        "frames_per_block": 3,
        "window_frames": 9,
        "sink_frames": 9,
        "cross_attention": (CrossAttentionSpec("text", 512),),
        "model_owned_bytes_per_session": 7_488_000,
        "requested_sessions": 8,
    }
    return KVSpec(**{**geometry, **changes})


def dreamzero(**changes) -> KVSpec:
    """Two layers, 4 heads of 64, float32, two guidance branches: a page of 16 tokens is 65,536 bytes."""
    geometry = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 64,
        "tokens_per_frame": 16,
        "frames_per_block": 4,
        "window_frames": 6,
        "branches": TWO_BRANCHES,
        "cross_attention": (CrossAttentionSpec("text", 8),),
        "dtype_bytes": 4,
        "requested_sessions": 64,
    }
    return KVSpec(**{**geometry, **changes})


@pytest.mark.req("AC-18")
def test_one_tiny_session_needs_128_bytes_and_gets_them():
    plan = plan_capacity(tiny(), available_bytes=128)
    assert (plan.spec.page_bytes, plan.spec.cross_bytes_per_session) == (8, 16)
    assert (plan.sessions, plan.managed_pages, plan.scratch_pages, plan.required_bytes) == (1, 11, 3, 128)


@pytest.mark.req("AC-18")
def test_b5_192_bytes_hold_two_sessions_with_17_managed_and_3_scratch_pages():
    plan = plan_capacity(tiny(requested_sessions=2), available_bytes=192)
    assert (plan.sessions, plan.managed_pages, plan.scratch_pages, plan.total_pages) == (2, 17, 3, 20)


@pytest.mark.req("AC-18")
def test_b4_127_bytes_cannot_hold_one_session_and_the_error_names_both_numbers():
    with pytest.raises(ValueError, match=r"cannot fit one session .*available=127 bytes.*required=128 bytes") as caught:
        plan_capacity(tiny(), available_bytes=127)
    assert isinstance(caught.value, DoesNotFitError)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.req("AC-19")
def test_b6_64_requested_sessions_are_capped_at_two_and_the_budget_is_spent_to_the_byte():
    plan = plan_capacity(tiny(requested_sessions=64), available_bytes=192)
    assert (plan.requested_sessions, plan.sessions, plan.cross_bytes) == (64, 2, 32)
    assert plan.total_pages * 8 + 32 == plan.effective_bytes == 192


@pytest.mark.req("AC-19")
def test_b7_a_fraction_never_denies_the_first_session():
    plan = plan_capacity(tiny(requested_sessions=4), available_bytes=1280, fraction=0.05)
    assert (plan.configured_bytes, plan.effective_bytes, plan.sessions) == (64, 128, 1)


@pytest.mark.req("AC-20")
def test_b8_state_that_the_model_owns_comes_off_before_the_pages():
    free = plan_capacity(tiny(requested_sessions=2), available_bytes=200)
    owned = plan_capacity(tiny(requested_sessions=2, model_owned_bytes_per_session=16), available_bytes=200)
    assert (free.sessions, owned.sessions, owned.model_owned_bytes) == (2, 1, 16)
    assert owned.spec.required_bytes(1) == 144
    assert owned.spec.required_bytes(2) == 224
    assert owned.required_bytes <= owned.effective_bytes == 200


@pytest.mark.req("AC-22")
def test_b9_44_pages_hold_two_sessions_of_two_branches():
    plan = plan_capacity(dreamzero(), available_bytes=44 * 65_536)
    assert plan.spec.page_bytes == 65_536
    assert (plan.sessions, plan.managed_pages, plan.scratch_pages) == (2, 34, 8)
    assert plan.cross_bytes == 2 * 65_536
    assert plan.required_bytes == 44 * 65_536
    assert plan.spec.required_bytes(1) == 31 * 65_536
    assert plan.spec.required_bytes(3) == 57 * 65_536


@pytest.mark.req("AC-21")
def test_b10_a_tenth_of_100_gib_holds_one_shipped_session():
    plan = plan_capacity(lingbot(), available_bytes=100 * GIB, fraction=0.1)
    assert plan.spec.page_bytes == 1_277_952_000
    assert plan.spec.cross_bytes_per_session == 419_430_400
    assert plan.configured_bytes == 10 * GIB
    assert (plan.effective_bytes, plan.sessions) == (33_653_670_400, 1)


@pytest.mark.req("AC-21")
def test_b11_six_tenths_of_100_gib_hold_two():
    plan = plan_capacity(lingbot(), available_bytes=100 * GIB, fraction=0.6)
    assert (plan.configured_bytes, plan.sessions) == (60 * GIB, 2)
    assert plan.required_bytes == 57_083_724_800
    assert plan.spec.required_bytes(3) == 80_513_779_200


def test_b12_cross_attention_and_scratch_come_off_before_the_pages():
    available = 200 * 65_536
    plan = plan_capacity(dreamzero(requested_sessions=1), available_bytes=available, fraction=0.5)
    cross = 2 * 2 * 8 * 4 * 64 * 4 * 2  # K and V, both branches, 8 tokens, 4 heads of 64, float32, two layers
    scratch = 8 * 65_536
    assert plan.cross_bytes == cross
    assert plan.affordable_pages == (int(available * 0.5) - cross - scratch) // 65_536
    assert plan.managed_pages <= plan.affordable_pages
    assert plan.total_pages * 65_536 + cross <= plan.configured_bytes


@pytest.mark.parametrize(
    ("spec", "managed", "scratch"),
    [
        (tiny(sink_frames=0, window_frames=4, frames_per_block=2, scratch_tokens_per_branch=3), 1 * (4 + 2) + 2, 2 + 3),
        (dreamzero(scratch_tokens_per_branch=33), 2 * (6 + 4) + 2, 2 * (4 + 3)),
    ],
)
def test_b19_the_closed_form_of_one_session_holds(spec, managed, scratch):
    assert (spec.managed_pages(1), spec.scratch_pages) == (managed, scratch)


def test_b1_the_spec_cannot_be_changed():
    with pytest.raises(AttributeError):
        tiny().num_layers = 2  # type: ignore[misc]


def test_pages_of_16_round_every_frame_up_to_98_pages():
    fine = lingbot(page_tokens=16)
    assert fine.pages_per_frame == 98
    assert fine.page_bytes == 13_107_200
    assert fine.managed_pages(1) == (18 + 3) * 98 + 2 == 2060
    assert fine.scratch_pages == 3 * 98
    # 2.4 GB less than with pages of a frame: the null page and the slack page are a hundredth of the size.
    assert fine.required_bytes(1) == (2060 + 294) * 13_107_200 + 419_430_400 + 7_488_000 == 31_281_267_200


def test_a35_scratch_is_the_block_in_flight_plus_the_declared_tokens():
    assert tiny().scratch_pages == 3
    assert tiny(scratch_tokens_per_branch=5).scratch_pages == 8
    assert dreamzero(scratch_tokens_per_branch=1).scratch_pages == 2 * (4 + 1)


def test_blocks_and_scratch_in_flight_scale_with_a_batched_tick_and_windows_do_not():
    one, four = tiny(), tiny(max_in_flight=4)
    assert four.managed_pages(4) - one.managed_pages(4) == 3 * 3
    assert four.scratch_pages == 4 * one.scratch_pages


def test_b21_an_explicit_budget_is_hard_and_replaces_the_fraction():
    plan = plan_capacity(tiny(requested_sessions=9), available_bytes=10_000, fraction=0.01, budget_bytes=200)
    assert (plan.configured_bytes, plan.effective_bytes, plan.sessions) == (200, 200, 2)
    with pytest.raises(DoesNotFitError, match=r"hard budget.*available=100 bytes.*required=128 bytes"):
        plan_capacity(tiny(), available_bytes=10_000, budget_bytes=100)


@pytest.mark.parametrize("available", range(128, 460))
def test_b2_the_capacity_is_the_largest_that_the_formula_allows(available):
    plan = plan_capacity(tiny(requested_sessions=5), available_bytes=available)
    fitting = [c for c in range(1, 6) if plan.spec.required_bytes(c) <= available]
    assert plan.sessions == max(fitting)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": -1},
        {"num_kv_heads": 0},
        {"head_dim": 0},
        {"tokens_per_frame": 0},
        {"frames_per_block": 0},
        {"window_frames": 0},
        {"window_frames": 2},
        {"sink_frames": -1},
        {"page_tokens": 0},
        {"scratch_tokens_per_branch": -1},
        {"model_owned_bytes_per_session": -1},
        {"requested_sessions": 0},
        {"dtype_bytes": 0},
        {"max_in_flight": 0},
        {"branches": ()},
        {"branches": (KVBranch("a", 0), KVBranch("a", 1))},
        {"branches": (KVBranch("a", 0), KVBranch("b", 2))},
        {"cross_attention": (CrossAttentionSpec("text", 1), CrossAttentionSpec("text", 2))},
        {"cross_attention": (CrossAttentionSpec("text", 0),)},
        {"cross_attention": (CrossAttentionSpec("text", 1, num_kv_heads=0),)},
        {"window_frames": 9, "dense_frames": 3, "rewrite_frames": 3},
    ],
)
def test_a_geometry_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError):
        tiny(**change)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction"):
        plan_capacity(tiny(), available_bytes=1000, fraction=fraction)


def test_a_model_without_keys_and_values_costs_what_it_owns():
    spec = KVSpec.none(frames_per_block=2, model_owned_bytes_per_session=100)
    assert (spec.page_bytes, spec.required_bytes(3)) == (0, 300)
    plan = plan_capacity(replace(spec, requested_sessions=8), available_bytes=550)
    assert plan.sessions == 5
    with pytest.raises(DoesNotFitError):
        plan_capacity(spec, available_bytes=99)
    free = plan_capacity(
        replace(spec, requested_sessions=8, model_owned_bytes_per_session=0), available_bytes=1, budget_bytes=1
    )
    assert (free.sessions, free.affordable_pages) == (8, free.managed_pages)


def test_every_block_of_rewind_after_the_first_costs_a_block_of_every_session():
    base = {"requested_sessions": 2, "max_in_flight": 2}
    one, four = tiny(**base), tiny(**base, rewind_blocks=4)
    assert four.window.retained_frames == 3 + 3 + 3 * 3
    assert four.managed_pages(2) == 1 * (2 * (3 + 3 + 3 * 3) + 2 * 3) * 1 + 2 == one.managed_pages(2) + 2 * 3 * 3
    assert four.required_bytes(2) - one.required_bytes(2) == 2 * 3 * 3 * 8
    assert plan_capacity(four, available_bytes=four.required_bytes(2) - 1).sessions == 1
    with pytest.raises(ValueError, match="rewind_blocks"):
        _ = tiny(rewind_blocks=0).window
