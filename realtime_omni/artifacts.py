"""Typed media: what a model may hand out, checked by name against what it declared and what was asked for.

Owns the checks of rows H4-H10: decoded pictures are uint8 in CHW or TCHW, decoded audio is float and never passes through
visual quantisation, latents keep their float dtype and their own layout; nothing missing, undeclared, duplicate or absent
passes; nothing is substituted, merged or picked by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from realtime_omni.errors import ArgumentError, ArtifactError
from realtime_omni.session.values import Artifact, ArtifactSpec, Modality, Representation

DECODED_LAYOUTS = {
    Modality.IMAGE: ("CHW",),
    Modality.VIDEO: ("TCHW", "CHW"),
    Modality.AUDIO: ("CT", "T"),
    Modality.ACTION: ("TA", "NTA"),
}


def resolve_outputs(requested: Sequence[str] | None, declared: Sequence[ArtifactSpec]) -> tuple[str, ...]:
    """The names to compute: the primary one by default; an empty request is not the same as none.

    Raises ArgumentError for an unknown, repeated or empty request.
    """
    if requested is None:
        return tuple(a.name for a in declared if a.primary)
    if (
        isinstance(requested, str)
        or not isinstance(requested, Sequence)
        or any(not isinstance(n, str) for n in requested)
    ):
        raise ArgumentError("outputs must be a list of artifact names", path="outputs")
    names = tuple(requested)
    known = {a.name for a in declared}
    if not names:
        raise ArgumentError("outputs must name at least one artifact", path="outputs")
    if len(set(names)) != len(names):
        raise ArgumentError("outputs names an artifact twice", path="outputs")
    for name in names:
        if name not in known:
            raise ArgumentError(f"outputs names {name!r}; this model has {', '.join(sorted(known))}", path="outputs")
    return names


def check_artifacts(
    model: str, request_id: str, declared: Sequence[ArtifactSpec], requested: Sequence[str], got: Sequence[Artifact]
) -> Mapping[str, Artifact]:
    """Artifacts by name. Raises ArtifactError naming model, artifact, expected, actual and request."""
    specs = {a.name: a for a in declared}

    def refuse(artifact: str, expected: str, actual: str) -> ArtifactError:
        return ArtifactError(
            f"model {model!r}, artifact {artifact!r}: expected {expected}, actual {actual} (request {request_id})",
            path=artifact,
        )

    out: dict[str, Artifact] = {}
    for artifact in got:
        name = artifact.name
        if name not in specs:
            raise refuse(name, f"one of {sorted(specs)}", "an undeclared artifact")
        if name in out:
            raise refuse(name, "one", "a duplicate")
        if name not in requested:
            raise refuse(name, f"only {sorted(requested)}", "an artifact that was not requested")
        spec = specs[name]
        if (artifact.modality, artifact.representation) != (spec.modality, spec.representation):
            raise refuse(
                name,
                f"{spec.modality}/{spec.representation}",
                f"{artifact.modality}/{artifact.representation}",
            )
        if artifact.representation is Representation.DECODED and artifact.layout not in DECODED_LAYOUTS[spec.modality]:
            raise refuse(name, f"layout {' or '.join(DECODED_LAYOUTS[spec.modality])}", f"layout {artifact.layout}")
        wrong = _wrong_dtype(artifact)
        if wrong:
            raise refuse(name, *wrong)
        rank = len(artifact.layout) if artifact.representation is Representation.DECODED else None
        if rank is not None and len(artifact.data.shape) != rank:
            raise refuse(name, f"{rank} dimensions ({artifact.layout})", f"shape {tuple(artifact.data.shape)}")
        out[name] = artifact
    for name in requested:
        if name not in out:
            raise refuse(name, "the requested artifact", "absent")
    return MappingProxyType(out)


def _wrong_dtype(artifact: Artifact) -> tuple[str, str] | None:
    dtype = _dtype_name(artifact.data)
    if artifact.representation is Representation.LATENT:
        return None if "float" in dtype else ("a float dtype", dtype)
    if artifact.modality in (Modality.IMAGE, Modality.VIDEO):
        return None if dtype == "uint8" else ("uint8", dtype)
    return None if "float" in dtype else ("a float dtype", dtype)


def _dtype_name(data: Any) -> str:
    return _name(getattr(data, "dtype", type(data).__name__))


@lru_cache(maxsize=64)
def _name(dtype: object) -> str:
    """Kept, because numpy takes some ten microseconds to spell a dtype."""
    return str(dtype).removeprefix("torch.")
