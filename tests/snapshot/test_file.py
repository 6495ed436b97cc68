"""The file: whatever was changed in it is noticed, and a write that fails leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime_omni.errors import ArgumentError, ErrorCode, SnapshotError
from realtime_omni.snapshot import file
from realtime_omni.snapshot.header import VERSION, decode_header
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, move


def made(**how: int) -> Snapshot:
    engine = InlineEngine(TinyKVWorld(**how))  # type: ignore[arg-type]
    engine.create("walk-1", seed=7)
    for number in range(3):
        engine.accept("walk-1", number, prompt="blue", controls=[move(number)])
        engine.next("walk-1")
    engine.accept("walk-1", 9, prompt="red")
    return engine.snapshot("walk-1")


SNAPSHOT = made()
NO_SINK = made(sink_frames=0)
DATA = SNAPSHOT.to_bytes()
HEADER_BYTES = 8 + int.from_bytes(DATA[:8], "little")


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(SnapshotError) as error:
        act()
    assert "/" not in error.value.message, "a path is shown"
    return str(error.value.code)


def with_header(change: Callable[[dict[str, object]], object]) -> bytes:
    """The same file with another header and a checksum that fits: what an attacker, or a later release, can make."""
    header = json.loads(file.from_bytes(DATA)[0])
    change(header)
    return file.to_bytes(json.dumps(header), SNAPSHOT.tensors)


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    SNAPSHOT.save(tmp_path / "a.safetensors")
    loaded = Snapshot.load(tmp_path / "a.safetensors")
    assert loaded.header == SNAPSHOT.header
    assert loaded.tensors.keys() == SNAPSHOT.tensors.keys()
    assert all(torch.equal(t, SNAPSHOT.tensors[n]) for n, t in loaded.tensors.items())
    assert Snapshot.from_bytes((tmp_path / "a.safetensors").read_bytes()).header == SNAPSHOT.header
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_an_empty_tensor_is_saved_whatever_its_strides() -> None:
    tensors = {"a": torch.ones(2), "none": torch.zeros(1).expand(0)}
    header, back = file.from_bytes(file.to_bytes('{"x":1}', tensors))
    assert header == '{"x":1}'
    assert back["none"].shape == (0,)


def test_any_safetensors_tool_opens_it(tmp_path: Path) -> None:
    SNAPSHOT.save(tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(SNAPSHOT.tensors)
        assert json.loads(opened.metadata()["header"])["setup"]["session_id"] == "walk-1"


@settings(max_examples=150, deadline=None)
@given(bit=st.integers(0, 8 * len(DATA) - 1))
def test_one_flipped_bit_anywhere_is_noticed(bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    assert refused(lambda: Snapshot.from_bytes(bytes(damaged))) == ErrorCode.SNAPSHOT_CORRUPT


@settings(max_examples=150, deadline=None)
@given(bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_one_flipped_bit_in_the_index_or_the_header_is_noticed(bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    assert refused(lambda: Snapshot.from_bytes(bytes(damaged))) == ErrorCode.SNAPSHOT_CORRUPT


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(DATA) - 1])
def test_a_file_cut_short_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(DATA[:length])
    assert refused(lambda: Snapshot.load(tmp_path / "cut")) == ErrorCode.SNAPSHOT_CORRUPT


def test_every_boundary_between_tensors_is_a_cut_that_is_refused() -> None:
    index = json.loads(DATA[8:HEADER_BYTES])
    ends = {HEADER_BYTES + entry["data_offsets"][1] for name, entry in index.items() if name != "__metadata__"}
    for end in sorted(ends - {len(DATA)}):
        assert refused(lambda end=end: Snapshot.from_bytes(DATA[:end])) == ErrorCode.SNAPSHOT_CORRUPT  # type: ignore[misc]


def test_something_behind_the_end_is_refused() -> None:
    assert refused(lambda: Snapshot.from_bytes(DATA + b"\0")) == ErrorCode.SNAPSHOT_CORRUPT


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)  # a hole: a terabyte that costs nothing
    assert refused(lambda: Snapshot.load(tmp_path / "huge")) == ErrorCode.SNAPSHOT_TOO_LARGE
    assert refused(lambda: Snapshot.from_bytes(DATA, max_bytes=len(DATA) - 1)) == ErrorCode.SNAPSHOT_TOO_LARGE
    Snapshot.from_bytes(DATA, max_bytes=len(DATA))


@pytest.mark.parametrize("length", [(1 << 63) + 5, 1 << 40, file.MAX_HEADER_BYTES + 1])
def test_a_lie_about_the_length_of_the_index_allocates_nothing(length: int) -> None:
    lie = length.to_bytes(8, "little") + DATA[8:]
    assert refused(lambda: Snapshot.from_bytes(lie)) == ErrorCode.SNAPSHOT_CORRUPT


def test_a_lie_about_a_shape_allocates_nothing() -> None:
    index = json.loads(DATA[8:HEADER_BYTES])
    name = next(n for n in index if n != "__metadata__")
    index[name]["shape"] = [1 << 40, 1 << 10]
    text = json.dumps(index).encode()
    lie = len(text).to_bytes(8, "little") + text + DATA[HEADER_BYTES:]
    assert refused(lambda: Snapshot.from_bytes(lie)) == ErrorCode.SNAPSHOT_CORRUPT


def test_deep_nesting_is_refused() -> None:
    deep = b'{"__metadata__":' + b"[" * 100_000
    assert refused(lambda: Snapshot.from_bytes(len(deep).to_bytes(8, "little") + deep)) == ErrorCode.SNAPSHOT_CORRUPT
    assert refused(lambda: decode_header('{"format":' + "[" * 100_000)) == ErrorCode.SNAPSHOT_CORRUPT


def test_other_safetensors_files_are_no_sessions() -> None:
    weights = safetensors.torch.save({"w": torch.zeros(3)})
    assert refused(lambda: Snapshot.from_bytes(weights)) == ErrorCode.SNAPSHOT_CORRUPT


def test_a_later_version_is_named() -> None:
    later = with_header(lambda h: h.update(version=VERSION + 1, surprise=1))
    assert refused(lambda: Snapshot.from_bytes(later)) == ErrorCode.SNAPSHOT_VERSION


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(format="something.else"),
        lambda h: h.update(version=0),
        lambda h: h.update(surprise=1),
        lambda h: h.pop("worker"),
        lambda h: h["session"]["present"].update(chunk_index=-1),
        lambda h: h["session"]["present"].update(chunk_index=1.5),
        lambda h: h["session"]["present"].update(prompt="x" * 3000),
        lambda h: h["session"]["intake"].update(floor=-2),
        lambda h: h["setup"].update(session_id="../../etc"),
        lambda h: h["setup"].update(seed=1 << 60),
        lambda h: h["identity"].update(fingerprint="no digest"),
        lambda h: h["worker"]["present"].update(frames=-1),
    ],
)
def test_a_header_that_is_out_of_bounds_is_refused(change: Callable[[dict[str, object]], object]) -> None:
    assert refused(lambda: Snapshot.from_bytes(with_header(change))) == ErrorCode.SNAPSHOT_CORRUPT


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["session"]["intake"].update(floor=3),
        lambda h: (
            h["session"]["intake"]["pending"].reverse()
            or h["session"]["intake"]["pending"].append(h["session"]["intake"]["pending"][0])
        ),
        lambda h: h["session"]["intake"]["remembered"].pop(),
        lambda h: h["session"]["intake"]["pending"][0].update(prompt="another"),
        lambda h: h["session"]["present"]["controls"].append({"track": "", "schema": "s", "data": {}}),
        lambda h: h["session"]["present"].update(memory={"held": 1}),
        lambda h: h["session"]["present"].update(prompt=" "),
        lambda h: h["setup"].update(outputs=["no such output"]),
        lambda h: h["session"]["present"].update(chunk_index=7),
        lambda h: h["session"]["present"].update(chunk_index=1 << 52),
        lambda h: h["session"]["past"][0].update(memory=[]),
        lambda h: h["session"]["past"][0].update(lineage="0" * 64),
        lambda h: h["session"].update(past=[]),
        lambda h: h["session"].update(journal="{}"),
        lambda h: h["session"].update(journal=h["session"]["journal"].replace("tiny-kv", "tiny-xx")),
        lambda h: h["session"].update(journal=h["session"]["journal"].replace("blue", "green")),
        lambda h: h["setup"].update(seed=8),
        lambda h: h["session"]["present"].update(lineage="0" * 64),
        lambda h: h["worker"].update(past=[]),
        lambda h: h["worker"]["past"][0].update(frames=7),
        lambda h: h["worker"]["past"][0].update(frames=0),
        lambda h: h["worker"]["past"][0]["values"].update(drift=99),
        lambda h: h["worker"]["present"].update(frames=7),
        lambda h: h["worker"]["present"].update(frames=1 << 50),
        lambda h: h["worker"].update(retained=[[]]),
        lambda h: h["worker"].update(retained=[]),
        lambda h: h["worker"].update(retained=[list(range(6)), list(range(6))]),
        lambda h: h["worker"].update(retained=[[5, 4, 3, 2, 1, 0]]),
        lambda h: h["worker"]["present"]["values"].update(drift=99),
        lambda h: h["worker"]["present"]["values"].update(surprise=1),
        lambda h: h["worker"]["present"]["values"].pop("drift"),
    ],
)
def test_a_valid_file_with_impossible_values_is_refused_and_nothing_changes(
    change: Callable[[dict[str, object]], object],
) -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("other")
    engine.next("other")
    free = engine.free_pages

    def restore() -> None:
        engine.restore(Snapshot.from_bytes(with_header(change)))

    assert refused(restore) == ErrorCode.SNAPSHOT_CORRUPT
    assert engine.free_pages == free
    engine.cycle()
    engine.restore(SNAPSHOT)


def test_a_moment_whose_frames_were_not_saved_is_none_that_a_session_can_go_back_to() -> None:
    kept = {name: tensor[1:] if name.startswith("kv.") else tensor for name, tensor in NO_SINK.tensors.items()}
    worker = msgspec.structs.replace(NO_SINK.header.worker, retained=(NO_SINK.header.worker.retained[0][1:],))
    engine = InlineEngine(TinyKVWorld(sink_frames=0))
    view = engine.restore(Snapshot(msgspec.structs.replace(NO_SINK.header, worker=worker), kept))
    assert view.oldest_rewind == view.chunk_index
    with pytest.raises(ArgumentError) as error:
        engine.rewind("walk-1", view.chunk_index - 1)
    assert error.value.code == ErrorCode.NOT_RETAINED


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype", "image"])
def test_tensors_that_do_not_fit_are_refused(change: str) -> None:
    tensors = dict(SNAPSHOT.tensors)
    name = next(iter(tensors))
    if change == "missing":
        del tensors[name]
    else:
        odd = {"extra": "kv.9.9.k", "image": "setup.image"}.get(change, name)
        tensors[odd] = tensors[name].float() if change == "dtype" else tensors[name][:1].clone()
    engine = InlineEngine(TinyKVWorld())
    snapshot = Snapshot.from_bytes(Snapshot(SNAPSHOT.header, tensors).to_bytes())
    assert refused(lambda: engine.restore(snapshot)) == ErrorCode.SNAPSHOT_CORRUPT


@pytest.mark.parametrize(
    "how", [{"window_frames": 6}, {"sink_frames": 0}, {"branches": ("cond", "free")}], ids=lambda how: next(iter(how))
)
def test_another_geometry_is_foreign(how: dict[str, object]) -> None:
    engine = InlineEngine(TinyKVWorld(**how))  # type: ignore[arg-type]
    assert refused(lambda: engine.restore(SNAPSHOT)) == ErrorCode.SNAPSHOT_FOREIGN


def test_another_model_other_weights_and_another_dtype_are_foreign() -> None:
    assert refused(lambda: InlineEngine(dtype="float32").restore(SNAPSHOT)) == ErrorCode.SNAPSHOT_FOREIGN
    other_weights = msgspec.structs.replace(SNAPSHOT.header.identity, fingerprint="0" * 64)
    other_dtype = msgspec.structs.replace(SNAPSHOT.header.identity, dtype="float32")
    for identity in (other_weights, other_dtype):
        foreign = Snapshot(msgspec.structs.replace(SNAPSHOT.header, identity=identity), SNAPSHOT.tensors)
        assert refused(lambda f=foreign: InlineEngine(TinyKVWorld()).restore(f)) == ErrorCode.SNAPSHOT_FOREIGN  # type: ignore[misc]


def test_a_file_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    assert refused(lambda: Snapshot.load(tmp_path / "none")) == ErrorCode.SNAPSHOT_READ_FAILED
    assert refused(lambda: Snapshot.load(tmp_path)) == ErrorCode.SNAPSHOT_READ_FAILED


def test_a_folder_that_is_not_there_or_not_a_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none" / "a", tmp_path / "file" / "a"):
        assert refused(lambda p=path: SNAPSHOT.save(p)) == ErrorCode.SNAPSHOT_WRITE_FAILED  # type: ignore[misc]


def test_what_cannot_be_a_file_name_is_refused() -> None:
    for path in ("", "a\0b"):
        assert refused(lambda p=path: SNAPSHOT.save(p)) == ErrorCode.SNAPSHOT_WRITE_FAILED  # type: ignore[misc]
        assert refused(lambda p=path: Snapshot.load(p)) == ErrorCode.SNAPSHOT_READ_FAILED  # type: ignore[misc]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refused(lambda: SNAPSHOT.save(tmp_path / "a")) == ErrorCode.SNAPSHOT_WRITE_FAILED


@pytest.mark.parametrize("step", ["save_file", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "walk"
    target.write_bytes(b"what was there before")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    where = {"save_file": safetensors.torch, "fsync": os, "replace": Path}[step]
    monkeypatch.setattr(where, step, fail)
    with pytest.raises(SnapshotError, match="No space left") as error:
        SNAPSHOT.save(target)
    assert error.value.code == ErrorCode.SNAPSHOT_WRITE_FAILED
    assert str(tmp_path) not in error.value.message
    assert target.read_bytes() == b"what was there before"
    assert os.listdir(tmp_path) == ["walk"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> object:
    """A file system of 64 KiB, where the system lets us mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no permission to mount a tmpfs")
    except OSError:
        pytest.skip("there is no mount command")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_a_coded_error_and_the_session_lives_on(tiny_disk: Path) -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.next("a")
    snapshot = engine.snapshot("a")
    padded = Snapshot(snapshot.header, {**snapshot.tensors, "state.padding": torch.zeros(1 << 16)})
    snapshot.save(tiny_disk / "walk")
    before = (tiny_disk / "walk").read_bytes()
    with pytest.raises(SnapshotError, match="No space left") as error:
        padded.save(tiny_disk / "walk")
    assert error.value.code == ErrorCode.SNAPSHOT_WRITE_FAILED
    assert os.listdir(tiny_disk) == ["walk"]
    assert (tiny_disk / "walk").read_bytes() == before
    engine.next("a")


CONTINUE = """
import sys
from pathlib import Path
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld

engine = InlineEngine(TinyKVWorld())
engine.create("other", seed=3)
engine.next("other")
engine.restore(Snapshot.load(Path(sys.argv[1])))
for _ in range(4):
    sys.stdout.write(engine.next("walk-1").artifacts["frames"].data.tobytes().hex() + "\\n")
"""


def test_another_process_continues_bit_for_bit(tmp_path: Path) -> None:
    SNAPSHOT.save(tmp_path / "walk")
    child = subprocess.run(
        [sys.executable, "-c", CONTINUE, str(tmp_path / "walk")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.returncode == 0, child.stderr
    engine = InlineEngine(TinyKVWorld())
    engine.restore(SNAPSHOT)
    expected = [engine.next("walk-1").artifacts["frames"].data.tobytes().hex() for _ in range(4)]
    assert child.stdout.split() == expected
