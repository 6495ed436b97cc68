"""MiniCPM-o's networks against transformers 5.24 and OpenBMB's spectrogram; ``make_minicpm_golden.py`` made the files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding

from parity.rebuilt import minicpm
from realtime_omni.kv.attention.growing import GrowingPlan
from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.kv.window import FrameRef
from realtime_omni.models.minicpmo import mel
from realtime_omni.models.minicpmo.config import read_config
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.network import Language, rotate, turns
from realtime_omni.models.minicpmo.sampling import CodeChance
from realtime_omni.models.minicpmo.talker import CODES, Line, Talker
from realtime_omni.models.minicpmo.weights import Checkpoint, load_networks

GOLDEN = minicpm() / "minicpm"
PROMPT, SEEN = 20, 4


@pytest.fixture(scope="module")
def trace() -> dict[str, Tensor]:
    return load_file(GOLDEN / "trace.safetensors")


@pytest.fixture(scope="module")
def networks() -> tuple[Language, Ears, Talker]:
    torch.set_num_threads(1)
    sizes = read_config(GOLDEN)
    with torch.device("meta"):
        made = Language(sizes.language, sizes.vocab_size), Ears(sizes.ears, sizes.language.hidden_size), Talker(sizes)
    load_networks(Checkpoint(GOLDEN), *made, dtype=torch.float32, device="cpu")
    return made


def seconds(count: int) -> Tensor:
    """As ``make_minicpm_golden.sound``, [count, 16000]."""
    random = np.random.default_rng(11)
    loudness = 10 ** random.uniform(-3, -0.5, 41)
    noise = random.normal(0, 1, (41, 16_000)) * loudness[:, None]
    return torch.from_numpy(np.clip(noise, -1, 1).astype(np.float32)[:count])


def units(count: int) -> list[Tensor]:
    sound = seconds(count)
    return [mel.features(n, sound[max(0, n + 1 - mel.KEPT_UNITS) : n + 1]) for n in range(count)]


def test_the_spectrogram_of_a_unit_is_the_references(trace: dict[str, Tensor]) -> None:
    """Absolute loudness below five seconds, relative above; behind 30 s ten seconds of the past leave at once."""
    made = units(41)
    for number, expected in zip(trace["mel_units"].tolist(), trace["mels"], strict=True):
        frames = made[number]
        assert frames.shape[1] == (104 if number else 102)
        padded = torch.nn.functional.pad(frames, (0, 104 - frames.shape[1]))[::9, ::7]
        assert float((padded - expected).abs().max()) <= 1e-5, f"unit {number}"


@pytest.mark.parametrize("together", [False, True])
@torch.inference_mode()
def test_a_streamed_encoder_is_the_whole_clips(
    networks: tuple[Language, Ears, Talker], trace: dict[str, Tensor], together: bool
) -> None:
    """Second by second, with keys and values of those before: transformers' layers over the whole clip, block-causal; past the
    end of the table of positions, and with a second call two seconds late in the same batch, in its own pass and in the
    same (as on a GPU)."""
    ears, made, late = networks[1], units(9), 2
    assert ears.most_seconds == 4
    pasts: list[tuple[Tensor, ...]] = [(), ()]
    for step in range(len(made) + late):
        due = [call for call in range(2) if 0 <= step - late * call < len(made)]
        mels = [made[step - late * call] for call in due]
        tokens, after = ears.hear(mels, [pasts[call] for call in due], together=together)
        for call, got, past in zip(due, tokens, after, strict=True):
            pasts[call] = past
            assert float((got - trace["heard"][step - late * call]).abs().max()) <= 1e-5, f"step {step} of call {call}"


@torch.inference_mode()
def test_a_clip_at_once_is_the_stream(networks: tuple[Language, Ears, Talker], trace: dict[str, Tensor]) -> None:
    made = units(5)
    whole = torch.cat([made[0][:, :100], *(unit[:, 2:102] for unit in made[1:])], dim=1)[:, :402]
    clip = networks[1].clip(whole[:, :400])
    assert float((clip[:30] - trace["heard"][:3].flatten(0, 1)).abs().max()) <= 1e-5


class Paged:
    """One sequence of units on pages: a prompt that stays, and the newest ``seen`` units, however long each is."""

    def __init__(self, language: Language, seen: int) -> None:
        size = language.decoder.config
        self.spec = KVSpec(
            num_layers=size.num_hidden_layers,
            num_kv_heads=size.num_key_value_heads,
            head_dim=size.head_dim,
            tokens_per_frame=32,
            frames_per_block=1,
            window_frames=seen,
            sink_frames=1,
            page_tokens=8,
            dtype_bytes=4,
        )
        self.language, self.book = language, KVBook(self.spec, sessions=1)
        pages = self.spec.managed_pages(1) + self.spec.scratch_pages
        self.storage = KVStorage(self.spec, pages, dtype=torch.float32)
        self.book.begin("a")
        self.lengths: list[int] = []

    def feed(self, x: Tensor, pieces: list[int]) -> Tensor:
        """One unit [T, D] in passes of so many tokens; hidden states [T, D]."""
        block = self.book.plan_block("a")
        row = RowPlan.of(block.branches[0])
        row = replace(row, history=tuple(FrameRef(f.index, f.pages, self.lengths[f.index]) for f in row.history))
        plan = GrowingPlan([row], self.storage, turn=self._turn)
        out, at, start = [], 0, sum(self.lengths)
        for count in pieces:
            positions = torch.arange(start + at, start + at + count)[None]
            out.append(
                self.language.decoder(
                    x[None, at : at + count], positions, lambda layer, q, k, v: plan.attend(layer, q, k, v, rows=[0])
                )[0]
            )
            at += count
        assert not plan.complete(0)
        plan.finish([0])
        assert plan.complete(0)
        plan.close()
        self.book.commit(block)
        self.lengths.append(len(x))
        return torch.cat(out)

    def _turn(self, row: int, keys: Tensor) -> None:
        gone = sum(self.lengths) - keys.shape[1]
        if gone:
            size = self.language.decoder.config
            keys[:, :PROMPT] = rotate(keys[:, :PROMPT], turns(torch.tensor(gone), size.head_dim, size.rope_theta))


@torch.inference_mode()
def test_units_that_leave_are_the_references_renumbered_ones(
    networks: tuple[Language, Ears, Talker], trace: dict[str, Tensor]
) -> None:
    """Qwen3 over ten units of 13 to 32 tokens of which four are seen. The reference drops whole units and turns the keys behind
    them back; here nothing that is written changes, and the prompt's keys are turned ahead."""
    language = networks[0]
    paged, at = Paged(language, SEEN), 0
    for number, count in enumerate((PROMPT, *trace["lengths"].tolist())):
        x = embedding(trace["tokens"][at : at + count].long(), language.embed)
        pieces = [11, *[1] * (count - 13), 2] if number else [count]
        last = paged.feed(x, pieces)[-1]
        assert float((last - trace["hidden"][number]).abs().max()) <= 1e-5, f"unit {number}"
        assert language.logits(last).topk(5).indices.tolist() == trace["words"][number].tolist()
        at += count
    assert sum(paged.lengths) == at
    paged.book.check()


@torch.inference_mode()
def test_one_layer_after_units_left_is_a_fresh_forward_at_the_shifted_positions(
    networks: tuple[Language, Ears, Talker], trace: dict[str, Tensor]
) -> None:
    """In one layer keys do not depend on what was seen, so what is kept, renumbered from 0, gives the same numbers."""
    sizes = read_config(GOLDEN)
    small = Language(type(sizes.language)(**{**_fields(sizes.language), "num_hidden_layers": 1}), 1)
    small.decoder.layers[0], small.decoder.norm = networks[0].decoder.layers[0], networks[0].decoder.norm
    table, tokens = networks[0].embed, trace["tokens"].long()
    lengths, at = (PROMPT, *trace["lengths"].tolist()), 0
    paged, fed = Paged(small, SEEN), []
    for count in lengths:
        fed.append(embedding(tokens[at : at + count], table))
        last = paged.feed(fed[-1], [count])
        at += count
    fresh = Paged(small, len(lengths))
    for x in (fed[0], *fed[-SEEN:]):
        expected = fresh.feed(x, [len(x)])
    assert float((last - expected).abs().max()) <= 1e-5


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


@torch.inference_mode()
def test_greedy_codes_of_a_turn_are_the_references(
    networks: tuple[Language, Ears, Talker], trace: dict[str, Tensor]
) -> None:
    """Three units, the last without a word; in one batch with another call that is a unit behind."""
    talker, greedy, counts = networks[2], CodeChance(temperature=0.0), (6, 3, 0)
    pasts: list[tuple[Tensor, ...]] = [(), ()]
    for step in range(4):
        due = [call for call in range(2) if 0 <= step - call < 3]
        lines = []
        for call in due:
            unit = step - call
            spoken = trace["spoken"][unit, : counts[unit]].tolist()
            condition = talker.condition(spoken, list(trace["thoughts"][unit, : counts[unit]]))
            lines.append(Line(condition, pasts[call], unit == 0, [0.0] * CODES))
        codes, after = talker.speak(lines, greedy)
        for call, got, past in zip(due, codes, after, strict=True):
            pasts[call] = past
            assert got == [code for code in trace["codes"][step - call].tolist() if code >= 0]
