"""Typed media: by name, against what was declared and what was asked for; nothing substituted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realtime_omni.artifacts import check_artifacts, resolve_outputs
from realtime_omni.errors import AbortedError, ArgumentError, ArtifactError
from realtime_omni.session.values import Artifact, ArtifactSpec, Modality, Representation
from realtime_omni.testing.faults import at
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import RUNTIME_RATE_HZ, ArtifactFault, Knobs, TinyKVWorld

FRAMES = ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", primary=True)
LATENT = ArtifactSpec("latent", Modality.VIDEO, Representation.LATENT, "CTHW")
SOUND = ArtifactSpec("sound", Modality.AUDIO, Representation.DECODED, "CT", sample_rate_hz=24000)
DECLARED = (FRAMES, LATENT, SOUND)


def made(spec: ArtifactSpec, data: Any, **changes: Any) -> Artifact:
    fields = {
        "name": spec.name,
        "modality": spec.modality,
        "representation": spec.representation,
        "layout": spec.layout,
    }
    return Artifact(**{**fields, **changes}, data=data)


def picture(**changes: Any) -> Artifact:
    return made(FRAMES, np.zeros((2, 3, 4, 4), np.uint8), **changes)


def check(*got: Artifact, requested: tuple[str, ...] = ("frames",)) -> Any:
    return check_artifacts("tiny", "ar-a-7", DECLARED, requested, got)


@pytest.mark.req("AC-33")
@pytest.mark.parametrize(
    ("fault", "artifact", "expected", "actual"),
    [
        ("missing", "frames", "the requested artifact", "absent"),
        ("undeclared", "depth", "one of ['frames', 'latent', 'sound']", "an undeclared artifact"),
        ("duplicate", "frames", "one", "a duplicate"),
        ("unrequested", "latent", "only ['frames']", "an artifact that was not requested"),
    ],
)
def test_a_wrong_set_of_artifacts_is_refused_naming_model_artifact_expected_actual_and_request(
    fault: ArtifactFault, artifact: str, expected: str, actual: str
) -> None:
    model = TinyKVWorld()
    engine = InlineEngine(model)
    engine.create("a")
    engine.next("a")
    model.knobs = Knobs(artifact=fault)
    with pytest.raises(ArtifactError) as refused:
        engine.next("a")
    assert refused.value.message == (
        f"model 'tiny-kv', artifact '{artifact}': expected {expected}, actual {actual} (request ar-a-1)"
    )
    assert refused.value.code == "artifact"
    assert engine.view("a").chunk_index == 1


@pytest.mark.req("AC-34")
def test_the_decoder_runs_only_when_something_decoded_is_requested() -> None:
    decoded: list[tuple[str, ...]] = []
    model = TinyKVWorld(trace=lambda what, sessions: decoded.append(sessions) if what == "decode" else None)
    engine = InlineEngine(model)
    engine.create("a", outputs=("latent",))
    engine.create("b", outputs=("latent",))
    chunk = engine.next("a")
    assert decoded == []
    assert tuple(chunk.artifacts) == ("latent",)
    tickets = [engine.post_next("a"), engine.post_next("b", outputs=("frames",))]
    engine.cycle()
    assert decoded == [("b",)]
    assert [tuple(engine.result(t).artifacts) for t in tickets] == [("latent",), ("frames",)]


@pytest.mark.req("AC-34")
@pytest.mark.parametrize("fault", ["latent_as_frames", "missing"])
def test_a_missing_preview_is_an_error_and_never_latents_under_its_name(fault: ArtifactFault) -> None:
    engine = InlineEngine(TinyKVWorld(knobs=Knobs(artifact=fault)))
    engine.create("a")
    with pytest.raises(ArtifactError, match="frames"):
        engine.next("a", outputs=("frames",))


@pytest.mark.req("AC-34")
def test_a_chunk_without_its_primary_artifact_says_so_instead_of_picking_another() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    chunk = engine.next("a", outputs=("latent", "sound"))
    assert chunk.primary_artifact is None
    assert engine.next("a", outputs=("sound", "frames")).primary_artifact.name == "frames"  # type: ignore[union-attr]


@pytest.mark.req("AC-35")
def test_decoded_frames_are_uint8_audio_is_float_and_its_runtime_rate_beats_the_declared_one() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    chunk = engine.next("a", outputs=("frames", "latent", "sound"))
    frames, latent, sound = (chunk.artifacts[n] for n in ("frames", "latent", "sound"))
    assert (frames.data.dtype, frames.data.shape, frames.layout) == (np.uint8, (2, 3, 2, 4), "TCHW")
    assert latent.data.dtype == np.float64
    assert sound.data.dtype == np.float32
    assert RUNTIME_RATE_HZ != 24000
    assert sound.sample_rate_hz == RUNTIME_RATE_HZ


@pytest.mark.req("AC-35")
def test_an_aborted_tick_yields_an_error_and_no_artifact() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    aborted: list[int] = []
    with at(engine, "decode", lambda: aborted.append(engine.send(_abort()))), pytest.raises(AbortedError):
        engine.next("a")
    assert engine.result(aborted[0]) == 0


def _abort() -> Any:
    from realtime_omni.engine.commands import Abort
    from realtime_omni.session.values import SessionId

    return Abort(ticket=0, session_id=SessionId("a"))


@pytest.mark.req("AC-35")
@pytest.mark.parametrize(
    ("artifact", "what"),
    [
        (picture(representation=Representation.LATENT), "video/latent"),
        (picture(modality=Modality.IMAGE), "image/decoded"),
        (made(FRAMES, np.zeros((2, 3, 4, 4), np.float32)), "float32"),
        (made(FRAMES, np.zeros((2, 3, 4, 4), np.int16)), "int16"),
        (made(FRAMES, [[1]]), "list"),
        (picture(layout="THWC"), "THWC"),
        (made(FRAMES, np.zeros((3, 4, 4), np.uint8)), r"\(3, 4, 4\)"),
    ],
    ids=["latent", "image", "float32", "int16", "list", "THWC", "rank"],
)
def test_a_picture_of_the_wrong_kind_is_refused(artifact: Artifact, what: str) -> None:
    with pytest.raises(ArtifactError, match=what):
        check(artifact)


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_audio_never_passes_as_integers(dtype: Any) -> None:
    with pytest.raises(ArtifactError, match="float"):
        check(made(SOUND, np.zeros((1, 8), dtype)), requested=("sound",))


def test_latents_keep_their_own_layout_and_any_float_dtype() -> None:
    import torch

    for data in (np.zeros((3, 4), np.float16), torch.zeros(2, dtype=torch.bfloat16)):
        assert check(made(LATENT, data, layout="packed"), requested=("latent",))["latent"].data is data
    with pytest.raises(ArtifactError, match="float dtype"):
        check(made(LATENT, np.zeros(3, np.uint8)), requested=("latent",))


def test_the_right_artifacts_pass_and_cannot_be_edited() -> None:
    out = check(picture())
    assert list(out) == ["frames"]
    with pytest.raises(TypeError):
        out["more"] = picture()


def test_no_request_means_the_primary_one_and_an_empty_request_is_refused() -> None:
    assert resolve_outputs(None, DECLARED) == ("frames",)
    assert resolve_outputs(["latent", "frames"], DECLARED) == ("latent", "frames")
    for wrong in ([], ["frames", "frames"], ["depth"], ""):
        with pytest.raises(ArgumentError) as refused:
            resolve_outputs(wrong, DECLARED)
        assert refused.value.path == "outputs"


@pytest.mark.parametrize("wrong", ["frames", b"frames", [1], [["frames"]], 7], ids=repr)
def test_outputs_that_are_no_list_of_names_are_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError):
        resolve_outputs(wrong, DECLARED)
