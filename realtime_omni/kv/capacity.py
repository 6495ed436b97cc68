"""How many sessions fit: the byte arithmetic of KV memory, exact and before anything is allocated.

Owns: ``KVSpec`` (what a model declares) and ``CapacityPlan`` (what a device affords). Must not know: tensors,
devices, sessions.

The formula, with b local branches, W window, S sink, F frames a block, R blocks of rewind (1 by default), D dense frames (W by
default), A frames that a block may write anew beside its own (0 by default), p pages a frame, m blocks in flight, c sessions::

    page_bytes  = 2 * page_tokens * kv_heads * head_dim * dtype_bytes * layers        K and V of all layers
    retained    = S + D + ceil((W - D) / F) + (R - 1) * F                             frames
    managed(c)  = b * (c * retained + m * (F + A)) * p + 2                            +2: the null page and one of slack
    scratch     = m * b * (F * p + ceil(scratch_tokens / page_tokens))
    cross(c)    = c * sum over caches of 2 * b * tokens * heads * head_dim * dtype_bytes * layers
    required(c) = (managed(c) + scratch) * page_bytes + cross(c) + c * model_owned_bytes
    budget      = max(int(available * fraction), required(1))      a fraction only buys *extra* sessions
    capacity    = the largest c <= requested with required(c) <= budget

Blocks in flight are shared by all sessions: with m = 1 one session at a time is between plan and settle (the
published engine this follows), with m = N a batched tick of N sessions is. Only the pages that ``managed(capacity)``
names are allocated, because no schedule can reach more.
"""

from __future__ import annotations

from dataclasses import dataclass

from realtime_omni.errors import ConfigError
from realtime_omni.kv.geometry import WindowGeometry


class DoesNotFitError(ConfigError, ValueError):
    """Not even one session fits; the message names both byte counts."""


@dataclass(frozen=True, slots=True)
class KVBranch:
    """One logical cache of a session, such as the positive or negative pass of guidance.

    ``local_index`` counts the branches on this device; two branches that live on different ranks are declared as one
    each.
    """

    name: str
    local_index: int


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec:
    """A fixed-length cache written once per prompt or image: ``num_tokens`` tokens; heads default to the
    self-attention's.
    """

    name: str
    num_tokens: int
    num_kv_heads: int | None = None


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV geometry that a model declares; head counts are those of this rank. Raises ValueError on a field that
    cannot be.

    Token and frame counts are per branch. ``page_tokens`` is the size of one page, any positive number; it defaults
    to one frame. ``rewrite_frames``: of the window, how many a tick may write anew beside its block (whole blocks).
    ``scratch_tokens_per_branch`` are tokens beside the frames that are attended to and never committed
    (action registers). ``opening_frames``: with ``reset_at_boundary``, frames of the block that begins a window, where
    it is shorter than the others. ``layer_windows``: frames that each layer sees beside the sinks, a block's own
    included, where a layer sees fewer than ``window_frames``; all layers keep the same frames. ``dense_frames``: of the
    window, how many of the newest are seen whole, the block's own included (whole blocks); of every block before them its
    last frame alone, in every layer. None: all are.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_frame: int
    frames_per_block: int
    window_frames: int
    sink_frames: int = 0
    branches: tuple[KVBranch, ...] = (KVBranch("main", 0),)
    cross_attention: tuple[CrossAttentionSpec, ...] = ()
    page_tokens: int | None = None
    rewrite_frames: int = 0
    scratch_tokens_per_branch: int = 0
    model_owned_bytes_per_session: int = 0
    requested_sessions: int = 1
    dtype_bytes: int = 2
    max_in_flight: int = 1
    reset_at_boundary: bool = False
    rewind_blocks: int = 1
    opening_frames: int | None = None
    layer_windows: tuple[int, ...] = ()
    dense_frames: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "requested_sessions", "dtype_bytes", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_layers", "scratch_tokens_per_branch", "model_owned_bytes_per_session"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        names = [branch.name for branch in self.branches]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"branches must be at least one, with unique names, got {names}")
        indices = [branch.local_index for branch in self.branches]
        if indices != list(range(len(indices))):
            raise ValueError(f"branch local indices must count 0, 1, ... in order, got {indices}")
        caches = [cache.name for cache in self.cross_attention]
        if len(set(caches)) != len(caches):
            raise ValueError(f"cross-attention caches must have unique names, got {caches}")
        for cache in self.cross_attention:
            if cache.num_tokens < 1 or (cache.num_kv_heads is not None and cache.num_kv_heads < 1):
                raise ValueError(f"cross-attention cache {cache.name!r} needs at least one token and one head")
        _ = self.window  # validates the frame counts
        if self.dense_frames is not None and self.rewrite_frames:
            raise ValueError(
                "dense_frames: earlier blocks that are written anew would see frames that the window lacks"
            )
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ValueError(f"{len(self.layer_windows)} layer windows for {self.num_layers} layers")
        if not all(self.frames_per_block <= frames <= self.window_frames for frames in self.layer_windows):
            raise ValueError(f"layer windows must lie between a block and the window, got {self.layer_windows}")

    @classmethod
    def none(cls, *, frames_per_block: int, model_owned_bytes_per_session: int) -> KVSpec:
        """For a model that keeps everything in its state: no layers, so frames are counted and cost nothing."""
        return cls(
            num_layers=0,
            num_kv_heads=1,
            head_dim=1,
            tokens_per_frame=1,
            frames_per_block=frames_per_block,
            window_frames=frames_per_block,
            model_owned_bytes_per_session=model_owned_bytes_per_session,
        )

    @property
    def page_size_tokens(self) -> int:
        """Tokens of one page, the default resolved."""
        return self.tokens_per_frame if self.page_tokens is None else self.page_tokens

    @property
    def window_of_layers(self) -> tuple[int | None, ...]:
        """Frames that each layer sees beside the sinks, None for one that sees all that is shown to the block."""
        windows = self.layer_windows or (self.window_frames,) * self.num_layers
        return tuple(frames if frames < self.window_frames else None for frames in windows)

    @property
    def window(self) -> WindowGeometry:
        """The part that the window tables need."""
        return WindowGeometry(
            sink_frames=self.sink_frames,
            window_frames=self.window_frames,
            frames_per_block=self.frames_per_block,
            tokens_per_frame=self.tokens_per_frame,
            page_tokens=self.page_size_tokens,
            reset_at_boundary=self.reset_at_boundary,
            rewind_blocks=self.rewind_blocks,
            opening_frames=self.opening_frames,
            dense_frames=self.dense_frames,
        )

    @property
    def pages_per_frame(self) -> int:
        """Whole pages that one frame owns."""
        return self.window.pages_per_frame

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return 2 * self.page_size_tokens * self.num_kv_heads * self.head_dim * self.dtype_bytes * self.num_layers

    @property
    def cross_bytes_per_session(self) -> int:
        """Bytes of one session's cross-attention caches: keys and values of all layers and branches."""
        return sum(
            2
            * len(self.branches)
            * cache.num_tokens
            * self.cross_heads(cache)
            * self.head_dim
            * self.dtype_bytes
            * self.num_layers
            for cache in self.cross_attention
        )

    @property
    def scratch_pages_per_branch(self) -> int:
        """Scratch pages of one branch of one block in flight: the block's frames, then the extra tokens."""
        return self.frames_per_block * self.pages_per_frame + -(
            -self.scratch_tokens_per_branch // self.page_size_tokens
        )

    @property
    def scratch_pages(self) -> int:
        """All scratch pages: they hold a block's keys and values while it is being denoised, and are never history."""
        return self.max_in_flight * len(self.branches) * self.scratch_pages_per_branch

    def cross_heads(self, cache: CrossAttentionSpec) -> int:
        """Heads of one cross-attention cache."""
        return self.num_kv_heads if cache.num_kv_heads is None else cache.num_kv_heads

    def managed_pages(self, sessions: int) -> int:
        """Pages that ``sessions`` sessions and the blocks in flight can hold, plus the null page and one of slack."""
        in_flight = self.frames_per_block + self.rewrite_frames
        frames = sessions * self.window.retained_frames + self.max_in_flight * in_flight
        return len(self.branches) * frames * self.pages_per_frame + 2

    def required_bytes(self, sessions: int) -> int:
        """Bytes that ``sessions`` sessions need: pages, scratch, cross-attention and what the model owns itself."""
        pages = self.managed_pages(sessions) + self.scratch_pages
        return pages * self.page_bytes + sessions * (self.cross_bytes_per_session + self.model_owned_bytes_per_session)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What a device affords. All ``_bytes`` are bytes; ``configured`` is what was asked for, ``effective`` what is
    spent at most.
    """

    spec: KVSpec
    available_bytes: int
    configured_bytes: int
    effective_bytes: int
    requested_sessions: int
    sessions: int

    @property
    def managed_pages(self) -> int:
        """Pages of the pool, the null page included; page ids below this are the pool's."""
        return self.spec.managed_pages(self.sessions)

    @property
    def scratch_pages(self) -> int:
        """Scratch pages; their ids follow the managed ones."""
        return self.spec.scratch_pages

    @property
    def total_pages(self) -> int:
        """Pages to allocate."""
        return self.managed_pages + self.scratch_pages

    @property
    def cross_bytes(self) -> int:
        """Reserved for cross-attention caches of all sessions."""
        return self.sessions * self.spec.cross_bytes_per_session

    @property
    def model_owned_bytes(self) -> int:
        """Reserved for state that the model keeps itself, such as a streaming decoder's; comes off before the pages."""
        return self.sessions * self.spec.model_owned_bytes_per_session

    @property
    def required_bytes(self) -> int:
        """What the planned sessions need; at most ``effective_bytes``."""
        return self.spec.required_bytes(self.sessions)

    @property
    def affordable_pages(self) -> int:
        """Pages that the budget would pay for once everything else is off; at least ``managed_pages``."""
        rest = (
            self.effective_bytes - self.cross_bytes - self.model_owned_bytes - self.scratch_pages * self.spec.page_bytes
        )
        return rest // self.spec.page_bytes if self.spec.page_bytes else self.managed_pages


def plan_capacity(
    spec: KVSpec, *, available_bytes: int, fraction: float = 1.0, budget_bytes: int | None = None
) -> CapacityPlan:
    """Fit as many of the requested sessions as the budget pays for.

    ``fraction`` in (0, 1] of ``available_bytes`` is a soft budget: one session is always granted when the device can
    hold it. ``budget_bytes`` replaces it by a hard one. Raises DoesNotFitError (a ValueError) when one session does
    not fit.
    """
    one = spec.required_bytes(1)
    if budget_bytes is None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        limit, configured = available_bytes, int(available_bytes * fraction)
    else:
        limit = configured = min(budget_bytes, available_bytes)
    if one > limit:
        kind = "hard budget" if budget_bytes is not None and budget_bytes < available_bytes else "device"
        raise DoesNotFitError(f"cannot fit one session in the {kind}: available={limit} bytes, required={one} bytes")
    effective = max(configured, one)
    per_session = spec.required_bytes(2) - one
    affordable = 1 + (effective - one) // per_session if per_session else spec.requested_sessions
    sessions = min(spec.requested_sessions, affordable)
    return CapacityPlan(spec, available_bytes, configured, effective, spec.requested_sessions, sessions)
