"""The tensors behind the pages weigh what was planned, and slots follow frames through any page size."""

import pytest
import torch

from realtime_omni.kv.capacity import CrossAttentionSpec, KVBranch, KVSpec, plan_capacity
from realtime_omni.kv.cross import CrossKey
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import CrossStore, KVStorage
from realtime_omni.kv.window import FrameRef

KEY = CrossKey("a", "negative", "text")


def spec(**changes) -> KVSpec:
    geometry = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 4,
        "tokens_per_frame": 10,
        "frames_per_block": 2,
        "window_frames": 4,
        "sink_frames": 1,
        "page_tokens": 4,
        "branches": (KVBranch("positive", 0), KVBranch("negative", 1)),
        "cross_attention": (CrossAttentionSpec("text", 5), CrossAttentionSpec("image", 3, num_kv_heads=1)),
        "dtype_bytes": 4,
        "requested_sessions": 2,
    }
    return KVSpec(**{**geometry, **changes})


@pytest.mark.parametrize("requested", [1, 2])
def test_every_planned_byte_is_a_byte_of_a_tensor(requested):
    plan = plan_capacity(spec(requested_sessions=requested), available_bytes=1 << 20)
    storage = KVStorage(plan.spec, plan.total_pages, dtype=torch.float32)
    cross = CrossStore(plan.spec, plan.sessions, dtype=torch.float32)
    assert storage.bytes == plan.total_pages * plan.spec.page_bytes
    assert cross.bytes == plan.cross_bytes
    assert storage.bytes + cross.bytes == plan.required_bytes


def test_a_dtype_of_another_size_than_planned_is_refused():
    for make in (
        lambda: KVStorage(spec(), 3, dtype=torch.float64),
        lambda: CrossStore(spec(), 1, dtype=torch.bfloat16),
    ):
        with pytest.raises(ValueError, match="4 bytes an element"):
            make()


def test_keys_and_values_of_every_layer_are_separate_allocations():
    storage = KVStorage(spec(), 3, dtype=torch.float32)
    assert len({pool.untyped_storage().data_ptr() for pool in (*storage.k, *storage.v)}) == 4
    assert storage.k[0].shape == (3, 4, 3, 4)


def test_slots_of_a_frame_skip_the_rest_of_its_last_page():
    storage = KVStorage(spec(), 12, dtype=torch.float32)
    frames = [FrameRef(0, (5, 2, 7), 10), FrameRef(1, (8, 9, 10), 10)]
    expected = [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, *range(32, 42)]
    assert storage.slots(frames).tolist() == expected
    assert storage.runs(frames) == ((20, 4), (8, 4), (28, 2), (32, 10))
    assert storage.slots([]).tolist() == []


def test_frames_that_fill_their_pages_and_lie_together_are_one_run():
    storage = KVStorage(spec(tokens_per_frame=8), 12, dtype=torch.float32)
    assert storage.runs([FrameRef(0, (3, 4), 8), FrameRef(1, (5, 6), 8)]) == ((12, 16),)


def test_writing_touches_the_named_slots_and_no_others():
    storage = KVStorage(spec(), 12, dtype=torch.float32)
    frame = FrameRef(0, (5, 2, 7), 10)
    k, v = torch.randn(11, 3, 4), torch.randn(11, 3, 4)
    storage.write(1, storage.runs([frame]), k, v)
    got_k, got_v = storage.read(1, [frame])
    assert torch.equal(got_k, k[:10])
    assert torch.equal(got_v, v[:10])
    assert int((storage.flat_k[1] != 0).any(-1).any(-1).sum()) == 10
    assert not storage.k[0].any()
    scattered = KVStorage(spec(), 12, dtype=torch.float32)
    scattered.write_slots(1, scattered.slots([frame]), k[:10], v[:10])
    assert torch.equal(scattered.k[1], storage.k[1])


def layers(count=2, tokens=5, heads=3, leading=True):
    shape = (1, tokens, heads, 4) if leading else (tokens, heads, 4)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(count)]


@pytest.fixture
def kv():
    book = KVBook(spec(), sessions=2)
    book.begin("a")
    return book


@pytest.mark.parametrize("leading", [True, False])
def test_a_cross_attention_entry_is_read_back_under_its_fingerprint(kv, leading):
    store = CrossStore(kv.spec, 2, dtype=torch.float32)
    pairs = layers(leading=leading)
    store.populate(kv.cross, KEY, iter(pairs), "a red door")
    entry = kv.cross.find(KEY, "a red door")
    for layer, (k, v) in enumerate(pairs):
        got_k, got_v = store.read(entry, "text", layer)
        assert torch.equal(got_k, k.view(5, 3, 4))
        assert torch.equal(got_v, v.view(5, 3, 4))
    assert kv.cross.find(KEY, "a blue door") is None
    assert kv.cross.find(KEY._replace(branch="positive"), "a red door") is None
    kv.check()


def interrupted():
    yield layers()[0]
    raise RuntimeError("the text encoder failed")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda: layers(1), ValueError),
        (lambda: layers(3), ValueError),
        (lambda: layers(tokens=4), ValueError),
        (lambda: layers(heads=1), ValueError),
        (interrupted, RuntimeError),
    ],
)
def test_an_entry_is_published_whole_or_not_at_all(kv, bad, error):
    store = CrossStore(kv.spec, 2, dtype=torch.float32)
    with pytest.raises(error):
        store.populate(kv.cross, KEY, bad(), "new")
    assert kv.cross.entries_of("a") == ()
    pairs = layers()
    store.populate(kv.cross, KEY, pairs, "old")
    with pytest.raises(error):
        store.populate(kv.cross, KEY, bad(), "new")
    assert kv.cross.find(KEY, "new") is None
    entry = kv.cross.find(KEY, "old")
    assert torch.equal(store.read(entry, "text", 1)[0], pairs[1][0][0])


def test_a_fault_while_copying_leaves_no_entry_at_all(kv, monkeypatch):
    store = CrossStore(kv.spec, 2, dtype=torch.float32)
    store.populate(kv.cross, KEY, layers(), "old")
    broken = [*layers(1), (torch.randn(5, 3, 4), torch.randn(5, 3, 4, device="meta"))]
    with pytest.raises((RuntimeError, NotImplementedError)):
        store.populate(kv.cross, KEY, broken, "new")
    assert kv.cross.entries_of("a") == ()


def test_sessions_branches_and_caches_have_rows_of_their_own(kv):
    kv.begin("b")
    store = CrossStore(kv.spec, 2, dtype=torch.float32)
    keys = [CrossKey(s, b, "text") for s in "ab" for b in ("positive", "negative")]
    for number, key in enumerate(keys):
        store.populate(kv.cross, key, [(torch.full((5, 3, 4), float(number)),) * 2] * 2, number)
    store.populate(kv.cross, CrossKey("a", "positive", "image"), [(torch.full((3, 1, 4), 9.0),) * 2] * 2, 9)
    for number, key in enumerate(keys):
        assert store.read(kv.cross.find(key, number), "text", 1)[1].unique().tolist() == [number]
    kv.end("a")
    assert [kv.cross.find(key, number) is None for number, key in enumerate(keys)] == [True, True, False, False]
    kv.begin("c")
    assert kv.cross.entries_of("c") == ()
    kv.check()


def test_an_unknown_cache_branch_or_session_is_a_key_error(kv):
    for key in (KEY._replace(cache="smell"), KEY._replace(branch="x"), KEY._replace(session="x")):
        with pytest.raises(KeyError):
            kv.cross.row(key)
