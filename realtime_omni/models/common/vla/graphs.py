"""Captured stages: a small batch costs the device's time, not the interpreter's.

At batch 1 a chunk of pi0 launches some ten thousand kernels of a few microseconds each, so a process that launches them one by
one is what a robot waits for. Here every stage of a few fixed sizes is recorded once as a CUDA graph and replayed: pictures,
prefix, one denoise step, with and without the state's token. Rows and prompts are filled up to the next size; what is filled
up is masked, so results are those of :class:`Stages`. What has no graph runs plainly: larger batches of pictures and prefixes
(their kernels are long), a guided step's backward pass, and a size whose capture failed.

Owns the graphs and their buffers, nothing of a session: a buffer says only weakly whose prefix it holds. On the CPU the
same buffers are filled and the same work runs without a graph, so tests see all but the capture.

Shape legend: R rows of a graph, T prefix tokens, S suffix tokens, h query heads, g key heads, d channels of a head.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.capture import Capture
from realtime_omni.models.common.vla.attention import (
    Prefix,
    PrefixKV,
    attend,
    fold,
    fold_mask,
    positions,
    unfold,
    visible,
)
from realtime_omni.models.common.vla.decoder import DecoderLayer
from realtime_omni.models.common.vla.devices import placed
from realtime_omni.models.common.vla.flow import Velocity
from realtime_omni.models.common.vla.gated import runs
from realtime_omni.models.common.vla.images import signed
from realtime_omni.models.common.vla.network import FlowNetwork, PolicyInputs
from realtime_omni.models.common.vla.siglip import VisionLayer
from realtime_omni.models.common.vla.stages import Stages

log = logging.getLogger(__name__)

PREFIX_ROWS = (1, 2, 4)
"""Above, the kernels of a prefix are so long that launching them costs nothing."""
STEP_ROWS = (1, 2, 4, 8, 16, 32)
FUSED_ROWS = 16
"""From so many rows on a fused kernel fills the device."""
ALIGNMENT = 16
"""Tokens; fused attention copies a mask whose rows are not aligned."""

Speed = Literal["auto", "plain", "graphs", "compiled"]
Graph = TypeVar("Graph", bound="PictureGraph | PrefixGraph | StepGraph")


def open_stages(network: FlowNetwork, device: torch.device, cameras: int, speed: Speed) -> Stages:
    """The stages in one of three speeds: ``plain``; ``graphs``: fused projections and captured stages; ``compiled``: the same
    with compiled layers, which takes a compiler and about a minute at the start. ``auto``: graphs where there are any."""
    if speed == "plain" or (speed == "auto" and device.type != "cuda"):
        return Stages(network, device)
    fuse(network)
    if speed == "compiled":
        compile_layers(network)
    return GraphStages(network, device, cameras=cameras, compiled=speed == "compiled")


def fuse(network: FlowNetwork) -> None:
    """One product where layers have several over one input; see :meth:`DecoderLayer.fuse`."""
    for module in cast(nn.Module, network).modules():
        if isinstance(module, DecoderLayer | VisionLayer):
            module.fuse()


def compile_layers(network: FlowNetwork) -> None:
    """What lies between products and attention becomes few kernels. All layers of a tower share their compiled code. Called
    when layers are fused."""
    import torch._dynamo  # slow to import, and only this needs it

    torch._dynamo.config.recompile_limit = 64  # per function: towers, batches of one and more, lengths
    takes: dict[int, bool] = {}
    for module in cast(nn.Module, network).modules():
        if isinstance(module, DecoderLayer):
            if module.gelu and module.mlp_weight is not None:
                width = len(module.mlp_weight)
                if width not in takes:
                    takes[width] = runs(module.mlp_weight)
                module.one_pass = takes[width]
            for name in ("project", "finish"):
                setattr(module, name, torch.compile(getattr(module, name)))
        elif isinstance(module, VisionLayer):
            module.compile()


class PictureGraph:
    """Features of R pictures."""

    def __init__(self, network: FlowNetwork, capture: Capture, images: Tensor) -> None:
        """``images`` [R, ...]: of the size, dtype and device that will come."""
        self._images = torch.zeros_like(images)
        self._network = network
        self._features = torch.empty_like(network.embed_images(signed(self._images)))
        self._replay = capture(self._work)

    def __call__(self, images: Tensor) -> Tensor:
        self._images[: len(images)].copy_(images)
        self._replay()
        return self._features[: len(images)].clone()

    def _work(self) -> None:
        self._features.copy_(self._network.embed_images(signed(self._images)))


@dataclass(frozen=True, slots=True)
class _FixedPrefix(Prefix):
    """A prefix whose positions and mask are in buffers."""

    at: Tensor
    bias: Tensor

    @property
    def positions(self) -> Tensor:
        return self.at

    def visible(self) -> Tensor:
        return self.bias


class PrefixGraph:
    """Keys and values of R prefixes with prompts of up to ``words`` tokens."""

    def __init__(
        self, network: FlowNetwork, capture: Capture, rows: int, words: int, features: Tensor, state: Tensor
    ) -> None:
        """``features`` [B, N, K, D] and ``state`` [B, state_dim]: of the kind that will come."""
        self._network = network
        self._features = features.new_zeros(rows, *features.shape[1:])
        self._inputs = PolicyInputs(
            images=features.new_empty(0),
            image_mask=torch.ones(rows, features.shape[1], dtype=torch.bool),
            tokens=torch.zeros(rows, words, dtype=torch.long, device=features.device),
            token_mask=torch.ones(rows, words, dtype=torch.bool),
            state=state.new_zeros(rows, state.shape[1]),
        )
        mask, block = network.layout(self._inputs)
        self._at = positions(mask).to(features.device)
        self._bias = _bias(_seen(mask, block), features.dtype).to(features.device)
        kv = self._compute()
        self._keys, self._values = torch.empty_like(kv.keys), torch.empty_like(kv.values)
        self._replay = capture(self._work)

    def __call__(self, features: Tensor, inputs: PolicyInputs) -> list[PrefixKV]:
        rows, free = len(features), self._inputs.tokens.shape[1] - inputs.tokens.shape[1]
        mask, block = self._network.layout(replace(inputs, token_mask=functional.pad(inputs.token_mask, (0, free))))
        self._features[:rows].copy_(features)
        self._inputs.tokens[:rows].copy_(functional.pad(inputs.tokens, (0, free)))
        self._inputs.state[:rows].copy_(inputs.state)
        self._at[:rows].copy_(placed(positions(mask), self._at.device))
        self._bias[:rows].copy_(placed(_bias(_seen(mask, block), self._bias.dtype), self._bias.device))
        self._replay()
        kv = PrefixKV(self._keys[:, :rows], self._values[:, :rows], mask)
        return [kv.row(number) for number in range(rows)]

    def _compute(self) -> PrefixKV:
        prefix = self._network.embed_prefix(self._features, self._inputs)
        return self._network.prefill(
            _FixedPrefix(prefix.embeddings, prefix.mask, prefix.block, at=self._at, bias=self._bias)
        )

    def _work(self) -> None:
        kv = self._compute()
        self._keys.copy_(kv.keys)
        self._values.copy_(kv.values)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a step's attention is made of, see :class:`FixedPrefixAttention`. ``weigh``: as :func:`weigh`; ``fused``: as
    :func:`masked`."""

    weigh: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
    fused: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, *, compiled: bool) -> Kernels:
        if not compiled:
            return cls(weigh, masked)
        return cls(torch.compile(weigh), torch.compile(biased, dynamic=False))


class FixedPrefixAttention:
    """:class:`~realtime_omni.models.common.vla.attention.PrefixAttention` over buffers [layers, R, tokens, g, d]: what the
    suffix brings is written behind the prefix, at ``own``, instead of being joined to a copy of it.

    ``bias`` [R, 1, tokens] is added to the scores: 0 for a key that is there, -inf for a place that is empty. ``leads``: the
    first token of ``own`` sees none behind itself (a state that comes with its actions). Few rows take two
    products and a softmax: some hundred queries of one key head would keep only a few of the device's processors busy with a
    fused kernel (one layer on an H200: 19 against 52 us for one row, 75 against 55 for 16)."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        lengths: Tensor,
        own: slice,
        kernels: Kernels,
        *,
        leads: bool = False,
    ) -> None:
        self.lengths, self._leads = lengths, leads
        self._keys, self._values, self._bias, self._own, self._kernels = keys, values, bias, own, kernels

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer][:, self._own], self._values[layer][:, self._own]

    def joint(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]  # k and v are there, see ``own``
        bias = self._bias[..., : self._own.stop]
        if self._leads:
            end = self._own.start + 1
            leader = self._attend(q[:, :1].contiguous(), keys[:, :end], values[:, :end], bias[..., :end])
            others = self._attend(q[:, 1:].contiguous(), keys[:, : self._own.stop], values[:, : self._own.stop], bias)
            return torch.cat((leader, others), dim=1)
        if causal:
            later = torch.full((q.shape[1], q.shape[1]), -torch.inf, dtype=bias.dtype, device=bias.device).triu(1)
            bias = bias + functional.pad(later, (self._own.start, 0))
        return self._attend(q, keys[:, : self._own.stop], values[:, : self._own.stop], bias)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        before = slice(0, self._own.start)
        return self._attend(q, self._keys[layer][:, before], self._values[layer][:, before], self._bias[..., before])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        rows, groups = q.shape[0], k.shape[2]
        if rows >= FUSED_ROWS and bias.shape[1] == 1:
            fused = self._kernels.fused(fold(q, groups), k.transpose(1, 2), v.transpose(1, 2), bias)
            return unfold(fused, q.shape[1])
        if rows >= FUSED_ROWS:
            return attend(q, k, v, bias)
        queries = fold(q, groups).flatten(0, 1)
        keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
        bias = fold_mask(bias, q.shape[2] // groups)
        bias = bias if groups == 1 else bias.repeat_interleave(groups, dim=0)
        weights = self._kernels.weigh(_scores(queries, keys), bias, q.shape[3] ** -0.5, v.dtype)
        return unfold(torch.unflatten(torch.bmm(weights, values), 0, (rows, groups)), q.shape[1])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[n, S, T] of q [n, S, d] and k [n, T, d], in float32 at least: bfloat16 scores would move weights by percents."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):  # all that ``out_dtype`` takes, and on CUDA only
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.bmm(q.to(wide), k.to(wide).transpose(1, 2))


def weigh(scores: Tensor, bias: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Softmax of scores, which are float32 or float64, as ``dtype``."""
    return torch.softmax(scores * scale + bias, dim=-1).to(dtype)


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of q [B, g, S, d] over k, v [B, g, T, d]; ``bias`` [B, 1, T] is added to the scores."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same as FlexAttention, to be compiled: ten steps of 16 rows on an H200 took 22.8 instead of 28.0 ms."""
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, and only this needs it

    def score_mod(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[row, 0, key]

    return flex_attention(q, k, v, score_mod=score_mod)


class StepGraph:
    """The velocity of R rows, over prefixes of up to ``room`` tokens that are held here while their rows go through it.

    The room's last place is the state's own token, where the network has one; the places behind it are the actions'."""

    def __init__(
        self,
        network: FlowNetwork,
        capture: Capture,
        rows: int,
        room: int,
        prefix: PrefixKV,
        state: Tensor,
        t: Tensor,
        kernels: Kernels,
    ) -> None:
        """``prefix``, ``state`` [state_dim] and ``t`` [B] or [B, H]: of the kind that will come."""
        shape, device = network.shape, prefix.keys.device
        self._network, self._room, self._kernels = network, room, kernels
        kv = (shape.layers, rows, room + shape.horizon, shape.kv_heads, shape.head_dim)
        self._keys, self._values = prefix.keys.new_zeros(kv), prefix.keys.new_zeros(kv)
        self._bias = prefix.keys.new_zeros(rows, 1, room + shape.horizon)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._state = state.new_zeros(rows, shape.state_dim)
        self._x = torch.zeros(rows, shape.horizon, shape.action_dim, device=device)
        self._t = t.new_zeros(rows, *t.shape[1:])
        self._v = torch.zeros_like(self._x)
        self._held: list[tuple[Callable[[], object], Callable[[], object]]] = [(_nothing, _nothing)] * rows
        self._first = capture(self._first_work) if shape.state_token else None
        self._step = capture(self._step_work)

    def __call__(self, prefixes: Sequence[PrefixKV], states: Sequence[Tensor], x: Tensor, t: Tensor) -> Tensor:
        """The velocity [B, H, A]; a buffer, valid until the next call."""
        loaded = self._load(prefixes, states)
        self._x[: len(x)].copy_(x)
        self._t[: len(x)].copy_(t)
        if loaded and self._first is not None:
            self._first()
        else:
            self._step()
        return self._v[: len(x)]

    def _load(self, prefixes: Sequence[PrefixKV], states: Sequence[Tensor]) -> bool:
        """Whether a row holds another prefix or state than before."""
        new = [
            row
            for row, (kv, state) in enumerate(zip(prefixes, states, strict=True))
            if self._held[row][0]() is not kv or self._held[row][1]() is not state
        ]
        if not new:
            return False
        bias = torch.zeros(len(prefixes), 1, self._bias.shape[-1])
        lengths = [kv.mask.shape[1] for kv in prefixes]
        own = 1 if self._network.shape.state_token else 0
        for row, length in enumerate(lengths):
            bias[row, :, length : self._room - own] = -torch.inf
        self._bias[: len(prefixes)].copy_(placed(bias.to(self._bias.dtype), self._bias.device))
        self._lengths[: len(prefixes)].copy_(placed(torch.tensor(lengths), self._lengths.device))
        for row in new:
            kv, state = prefixes[row], states[row]
            self._keys[:, row, : lengths[row]].copy_(kv.keys[:, 0])
            self._values[:, row, : lengths[row]].copy_(kv.values[:, 0])
            self._state[row].copy_(state)
            self._held[row] = weakref.ref(kv), weakref.ref(state)
        return True

    def _first_work(self) -> None:
        """A step, and the state's token with it: a row that is not new gets the same numbers once more."""
        own = slice(self._room - 1, self._bias.shape[-1])
        attention = FixedPrefixAttention(
            self._keys, self._values, self._bias, self._lengths, own, self._kernels, leads=True
        )
        self._v.copy_(self._network.first_step(self._x, self._t, self._state, attention))

    def _step_work(self) -> None:
        lengths = self._lengths + 1 if self._network.shape.state_token else self._lengths
        own = slice(self._room, self._bias.shape[-1])
        attention = FixedPrefixAttention(self._keys, self._values, self._bias, lengths, own, self._kernels)
        self._v.copy_(self._network.denoise_step(self._x, self._t, attention))


class GraphStages(Stages):
    """The stages of ``network``, replayed where a graph fits; ``cameras``: its slots, ``compiled``: whether
    :func:`compile_layers` was applied to it."""

    def __init__(self, network: FlowNetwork, device: torch.device, *, cameras: int, compiled: bool = False) -> None:
        super().__init__(network, device)
        shape = network.shape
        self._compiled = compiled
        self._kernels = Kernels.of(compiled=compiled)
        self._cameras = cameras
        self._capture = Capture(device)
        self._graphs: dict[Hashable, PictureGraph | PrefixGraph | StepGraph | None] = {}
        self._picture_sizes = sorted({*range(1, cameras + 1), *(rows * cameras for rows in PREFIX_ROWS)})
        part = -(-shape.prompt_tokens // (3 * ALIGNMENT)) * ALIGNMENT
        self._prompt_sizes = [part * n for n in (1, 2, 3) if part * (n - 1) < shape.prompt_tokens]
        tokens = cameras * shape.picture_tokens + shape.prompt_tokens + 1
        self._room = -(-(tokens + shape.horizon) // ALIGNMENT) * ALIGNMENT - shape.horizon

    def features(self, images: Tensor) -> Tensor:
        size = _fitting(self._picture_sizes, len(images))
        if size is None:
            return super().features(images)
        example = images[:1].expand(size, -1, -1, -1)
        graph = self._graph(
            ("pictures", size, images.dtype), lambda: PictureGraph(self.network, self._capture, example)
        )
        return super().features(images) if graph is None else graph(images)

    def prefixes(self, features: Tensor, inputs: PolicyInputs) -> list[PrefixKV]:
        rows, words = _fitting(PREFIX_ROWS, len(features)), _fitting(self._prompt_sizes, inputs.tokens.shape[1])
        if rows is None or words is None:
            return super().prefixes(features, inputs)
        graph = self._graph(
            ("prefix", rows, words),
            lambda: PrefixGraph(self.network, self._capture, rows, words, features, inputs.state),
        )
        return super().prefixes(features, inputs) if graph is None else graph(features, inputs)

    def velocity(self, prefixes: Sequence[PrefixKV], states: Sequence[Tensor]) -> Velocity:
        """A step under gradients (a true Jacobian's) runs plainly: a graph has no backward pass."""
        rows = _fitting(STEP_ROWS, len(prefixes))
        plain: list[Velocity] = []

        def plainly(x: Tensor, t: Tensor) -> Tensor:
            with self._uncompiled():
                if not plain:
                    with torch.no_grad():
                        plain.append(super(GraphStages, self).velocity(prefixes, states))
                return plain[0](x, t)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            if rows is None or torch.is_grad_enabled():
                return plainly(x, t)
            graph = self._graph(
                ("step", rows, t.ndim),
                lambda: StepGraph(
                    self.network, self._capture, rows, self._room, prefixes[0], states[0], t, self._kernels
                ),
            )
            return plainly(x, t) if graph is None else graph(prefixes, states, x, t)

        return velocity

    def warm_up(self, rows: int) -> None:
        """Make the graphs that up to ``rows`` robots need, so that no robot waits for one."""
        shape = self.network.shape
        with torch.no_grad():
            for size in self._picture_sizes:
                images = torch.zeros(size, shape.image_size, shape.image_size, 3, dtype=torch.uint8, device=self.device)
                features = self.features(images)
            for count in (n for n in STEP_ROWS if n < 2 * rows):
                there = torch.ones(count, self._cameras, dtype=torch.bool)
                state = torch.zeros(count, shape.state_dim, device=self.device)
                for words in self._prompt_sizes if count in PREFIX_ROWS else self._prompt_sizes[-1:]:
                    tokens = torch.zeros(count, words, dtype=torch.long)
                    inputs = PolicyInputs(
                        torch.empty(0), there, tokens, torch.ones_like(tokens, dtype=torch.bool), state
                    )
                    seen = features[:1].expand(count, self._cameras, -1, -1)
                    prefixes = self.prefixes(seen, inputs.to(self.device))
                x = torch.zeros(count, shape.horizon, shape.action_dim, device=self.device)
                self.velocity(prefixes, list(state))(x, torch.ones(count, device=self.device))

    @property
    def without_graph(self) -> list[Hashable]:
        """Sizes whose capture failed, which run plainly."""
        return [key for key, graph in self._graphs.items() if graph is None]

    def _graph(self, key: Hashable, make: Callable[[], Graph]) -> Graph | None:
        """The graph of one size, made when it is first needed. One that cannot be made is not tried again."""
        if key not in self._graphs:
            try:
                self._graphs[key] = make()
            except RuntimeError:
                log.warning("no graph could be captured: this size runs plainly size=%s", key, exc_info=True)
                self._graphs[key] = None
        return cast("Graph | None", self._graphs[key])

    def _uncompiled(self) -> AbstractContextManager[object]:
        """Compiled code would be compiled once more for gradients, in the middle of a chunk."""
        if self._compiled and torch.is_grad_enabled():
            return cast("AbstractContextManager[object]", torch.compiler.set_stance("force_eager"))
        return nullcontext()


def _fitting(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest that is large enough."""
    return next((size for size in sizes if size >= wanted), None)


def _seen(mask: Tensor, block: Tensor) -> Tensor:
    seen = visible(mask, block)
    return mask[:, None] if seen is None else seen


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where a query sees a key, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _nothing() -> None:
    return None
