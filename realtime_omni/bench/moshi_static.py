"""Many Moshi calls in buffers of fixed size: the same networks as the model's, arranged so that a tick is four CUDA graphs.

Keys and values are rings of one slot per step of the window, a row a call. Every row has its own step; a row that does not
run in a tick computes and changes nothing: its step stays, and the slot that it wrote is beyond its reach and written again.
Resetting a row is setting its step to 0 and its memories to zero. What a server would add (forks, rewinds, saved calls) is not
here: it is what the geometry costs at best, and what the model's own tick is measured against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from realtime_omni.models.common.capture import Capture
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.sampling import Chance, draw
from realtime_omni.models.moshi.streams import Streams


class Calls:
    """``rows`` calls. ``masked``: windows may be part empty; otherwise every slot holds a key, and none is masked.

    A tick reads ``sound`` [B, samples], ``running`` bool [B] and ``races`` [B, 1 + S, W]; it leaves ``out`` [B, samples] and
    ``newest`` [B, generated], the newest whole frame's tokens (negative where there is none)."""

    def __init__(
        self, lm: MoshiLM, mimi: Mimi, rows: int, depth: int, text: Chance, audio: Chance, *, masked: bool
    ) -> None:
        """Raises ValueError: ``depth`` is no number of depth steps that write the agent's streams."""
        config, codec = lm.config, mimi.config
        if not config.own_streams <= depth <= config.dep_q:
            raise ValueError(f"depth must lie in {config.own_streams}..{config.dep_q}")
        some = lm.temporal.text_head
        self.lm, self.mimi = lm, mimi
        self._device = device = some.device
        self._depth, self._text, self._audio, self._masked = depth, text, audio, masked
        self.streams = Streams(config, 1 + config.own_streams, device)
        shape = (config.num_layers, rows, config.num_heads, config.context, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=some.dtype, device=device) for _ in range(2))
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rings = self.streams.start().repeat(rows, 1, 1)
        past = (rows, codec.layers, 2, codec.context, codec.heads, codec.head_dim)
        self.sides = {
            "ears": Side(mimi.encoder.carried, past, device),
            "mouth": Side(mimi.decoder.carried, past, device),
        }
        width = max(text.width(config.text_card), audio.width(config.card), 1)
        self.sound = torch.zeros(rows, codec.frame_samples, device=device)
        self.running = torch.ones(rows, dtype=torch.bool, device=device)
        self.races = torch.ones(rows, 1 + depth, width, device=device)
        self.heard = torch.zeros(rows, config.n_q - config.own_streams, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(rows, config.dim, dtype=some.dtype, device=device)
        self.word = torch.zeros(rows, dtype=torch.int64, device=device)
        self.newest = torch.zeros(rows, self.streams.generated, dtype=torch.int64, device=device)
        self.out = torch.zeros(rows, codec.frame_samples, device=device)
        self._rows = torch.arange(rows, device=device)
        self._slots = torch.arange(config.context, device=device)
        self.stages: dict[str, Callable[[], None]] = {
            "listen": self.listen,
            "temporal": self.temporal,
            "depth": self.depth,
            "speak": self.speak,
        }

    def tick(self) -> None:
        """All four, in order."""
        for stage in self.stages.values():
            stage()

    def capture(self) -> None:
        """Replace the stages by CUDA graphs. No row may run meanwhile: they are run to warm up."""
        self.running.fill_(False)
        capture = Capture(self._device)
        self.stages = {name: capture(stage) for name, stage in self.stages.items()}
        self.running.fill_(True)

    @torch.no_grad()
    def listen(self) -> None:
        """Sound to codes."""
        codes = self.sides["ears"].step(self.mimi.encode, self.sound, self.running, self.mimi.config.per_frame)
        self.heard.copy_(codes)

    @torch.no_grad()
    def temporal(self) -> None:
        """Codes to a hidden state and a word."""
        tokens, rings = self.streams.read(self.rings, self.steps, self.heard)
        slots = self.steps % self._slots.shape[0]
        mask = None
        if self._masked:  # a slot is empty until the ring has come round to it
            mask = (self._slots <= self.steps[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[self._rows, :, slots] = k[:, 0]
            values[self._rows, :, slots] = v[:, 0]
            return attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)

        hidden, logits = self.lm.temporal(self.lm.temporal.embed(tokens), self.steps[:, None], attend)
        self.hidden.copy_(hidden)
        self.word.copy_(draw(logits.float(), self._text, self.races[:, 0]))
        self._update(self.rings, rings)

    @torch.no_grad()
    def depth(self) -> None:
        """The frame's codes, and the streams after the step."""

        def choose(step: int, logits: Tensor) -> Tensor:
            return draw(logits, self._audio, self.races[:, 1 + step])

        codes = self.lm.depth(self.hidden, self.word, self._depth, choose)[:, : self.streams.generated - 1]
        rings = self.streams.write(self.rings, self.steps, torch.cat((self.word[:, None], codes), dim=1))
        self.newest.copy_(self.streams.frame(rings, self.steps))
        self._update(self.rings, rings)
        self.steps += self.running

    @torch.no_grad()
    def speak(self) -> None:
        """The newest whole frame to sound."""
        whole = self.running & (self.newest[:, 0] >= 0)
        codes = self.newest[:, 1:].clamp_min(0)
        sound = self.sides["mouth"].step(self.mimi.decode, codes, whole, self.mimi.config.per_frame)
        self.out.copy_(sound.masked_fill(~whole[:, None], 0.0))

    def _update(self, tensor: Tensor, new: Tensor) -> None:
        tensor.copy_(torch.where(self.running.view(-1, *[1] * (new.dim() - 1)), new, tensor))


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """One query per head, q [B, H, 1, d], over ``keys`` and ``values`` [B, H, T, d]; ``mask`` bool [B, 1, 1, T].

    Two products, which read keys and values once. torch's own choice on an H200 is a tenth faster (0.93 of the memory's
    speed against 0.83), but in a graph it gave other tokens than outside of one."""
    scores = _scores(q, keys) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(q.shape)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """float32 [B, H, 1, T]: rounded to bfloat16 they would move weights by percents."""
    left, right = q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    if q.is_cuda and q.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32).view(*q.shape[:3], -1)
    return torch.bmm(left.float(), right.float()).view(*q.shape[:3], -1)


class Side:
    """One direction of the codec: its memory, and a ring of keys and values."""

    def __init__(self, carried: int, past: tuple[int, ...], device: torch.device) -> None:
        rows, context = past[0], past[3]
        self.memory = torch.zeros(rows, carried, device=device)
        self.past = torch.zeros(past, device=device)
        self.frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self._slots = torch.arange(context, device=device)

    def step(
        self,
        direction: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
        frame: Tensor,
        running: Tensor,
        per_frame: int,
    ) -> Tensor:
        """One frame; rows that do not run stay as they are."""
        newest, context = self.frames[:, None] * per_frame - 1, self._slots.shape[0]
        places = newest - (newest - self._slots) % context  # of each slot; negative: nothing there yet
        result, memory, new = direction(frame, self.memory, self.past, places, self.frames)
        slots = (newest + 1 + torch.arange(per_frame, device=newest.device)) % context
        self.past[self._rows, :, :, slots] = new.permute(0, 3, 1, 2, 4, 5)
        self.memory.copy_(torch.where(running[:, None], memory, self.memory))
        self.frames += running
        return result
