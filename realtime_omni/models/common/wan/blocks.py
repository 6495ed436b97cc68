"""A block of a Wan world as the engine sees it: what is declared of it, and what is handed out. Knows no network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from realtime_omni.session.values import Artifact, ArtifactSpec, Modality, Representation

LATENTS, FRAMES = "latents", "frames"


def declared(fps: float, *, pictures: bool) -> tuple[ArtifactSpec, ...]:
    """Latents, and before them the pictures, which are then what is meant where a client names nothing."""
    latents = ArtifactSpec(LATENTS, Modality.VIDEO, Representation.LATENT, "TCHW", primary=not pictures)
    frames = ArtifactSpec(FRAMES, Modality.VIDEO, Representation.DECODED, "TCHW", fps=fps, primary=True)
    return (frames, latents) if pictures else (latents,)


def latents_of(block: Tensor) -> Artifact:
    """[F, C, h, w], copied to the host."""
    return Artifact(LATENTS, Modality.VIDEO, Representation.LATENT, "TCHW", block.cpu().numpy())


def frames_of(pictures: np.ndarray, fps: float, *, ready: Callable[[], None] | None = None) -> Artifact:
    """uint8 [P, 3, H, W]; ``ready``: waits until they are there."""
    return Artifact(FRAMES, Modality.VIDEO, Representation.DECODED, "TCHW", pictures, fps=fps, ready=ready)
