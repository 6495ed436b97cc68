"""Makes the golden files of tests/parity/test_token2wav_parity.py with minicpmo-utils; run once, by hand, never in CI.

    python3 -m venv /some/where
    /some/where/bin/pip install torch==2.13.0 numpy scipy einops safetensors onnxruntime
    pip download --no-deps minicpmo-utils==1.0.7    # an sdist, Apache-2.0; unpack it
    TORCHDYNAMO_DISABLE=1 /some/where/bin/python tests/parity/make_token2wav_golden.py minicpmo_utils-1.0.7/src

Its own ``CausalMaskedDiffWithXvec``, ``UpsampleConformerEncoderV2``, ``DiT``, ``CausalConditionalCFM`` and
``HiFTGenerator`` run with tiny random weights in float64 (a pitch's phase after a second magnifies float32's last
digits), whose names and shapes are kept in the order in which they were drawn (``rebuilt.py`` draws them again). How a
turn is streamed is written down once more: the flow as in ``Token2wav.stream`` of 1.0.7, the sound as in 1.0.6, which
is the release for the published ``hift.pt``.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from rebuilt import token2wav_weights

GOLDEN = Path(__file__).parent / "golden" / "token2wav"
MELS, STEPS, CODES, SPEAKER = 8, 3, 40, 12
PROMPT = 10
PIECES = (11, 28, 28, 28, 28, 7)
"""Codes of each call; all but the last look three ahead."""
THINNED = 13
SILENCE = 4218


def reference(source: Path) -> tuple[Any, Any]:
    """The flow and the generator, in evaluation mode."""
    sys.modules["stepaudio2"] = types.ModuleType("stepaudio2")  # its own __init__ loads what is not needed here
    sys.modules["stepaudio2"].__path__ = [str(source / "stepaudio2")]
    from stepaudio2.cosyvoice2.flow.decoder_dit import DiT
    from stepaudio2.cosyvoice2.flow.flow import CausalMaskedDiffWithXvec
    from stepaudio2.cosyvoice2.flow.flow_matching import CausalConditionalCFM
    from stepaudio2.cosyvoice2.transformer.upsample_encoder_v2 import UpsampleConformerEncoderV2
    from stepaudio2.flashcosyvoice.modules.hifigan import ConvRNNF0Predictor, HiFTGenerator

    encoder = UpsampleConformerEncoderV2(16, 16, num_blocks=2, num_up_blocks=1, attention_heads=2, linear_units=24)
    dit = DiT(4 * MELS, MELS, depth=2, num_heads=2, head_dim=8, hidden_size=16)
    dit.att_cache_buffer = torch.zeros(2, 2, 2, 400, 16)
    dit.cnn_cache_buffer = torch.zeros(2, 2, 32, 2)
    cfm = CausalConditionalCFM(dit)
    cfm.att_cache_buffer = torch.zeros(STEPS, 2, 2, 2, 400, 16)
    cfm.cnn_cache_buffer = torch.zeros(STEPS, 2, 2, 32, 2)
    noise = torch.randn((30 * 50 + 100 + 2 * 1024, MELS), generator=torch.Generator().manual_seed(0))
    cfm.rand_noise = noise.T[None].contiguous()
    flow = CausalMaskedDiffWithXvec(16, MELS, SPEAKER, vocab_size=CODES, encoder=encoder, decoder=cfm)
    pitch = ConvRNNF0Predictor(in_channels=MELS, cond_channels=6)
    hift = HiFTGenerator(in_channels=MELS, base_channels=16, f0_predictor=pitch)
    return flow.eval(), hift.eval()


def drawn_noise(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape[1:], generator=torch.Generator().manual_seed(seed))[None].double()


def trimmed(cache: dict[str, Tensor], prompt: int, depth: int) -> None:
    """As ``Token2wav.stream`` of 1.0.7 forgets."""
    att = cache["estimator_att_cache"]
    if att.shape[4] > prompt + 100:
        cache["estimator_att_cache"] = torch.cat([att[..., :prompt, :], att[..., -100:, :]], dim=4)
    att = cache["conformer_att_cache"]
    if att.shape[3] > prompt + 100:
        codes = att[:depth, :, :, : att.shape[3] // 2]
        codes = torch.cat([codes[:, :, :, : prompt // 2], codes[:, :, :, -50:]], dim=3)
        frames = torch.cat([att[depth:, :, :, :prompt], att[depth:, :, :, -100:]], dim=3)
        cache["conformer_att_cache"] = torch.cat([codes.repeat(1, 1, 1, 2, 1), frames])


def main() -> None:
    flow, hift = reference(Path(sys.argv[1]))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    shapes = {
        "flow": {name: list(value.shape) for name, value in flow.state_dict().items()},
        "hift": {name: list(value.shape) for name, value in hift.state_dict().items()},
    }
    kept = {"seed": 5, "steps": STEPS, "pieces": PIECES, "prompt": PROMPT, "thinned": THINNED, "shapes": shapes}
    (GOLDEN / "weights.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    weights = token2wav_weights()
    flow.load_state_dict(weights["flow"])
    hift.load_state_dict(weights["hift"])
    flow.double()
    hift.double().stft_window = hift.stft_window.double()
    generator = torch.Generator().manual_seed(11)
    inputs = {
        "codes": torch.randint(CODES, (sum(PIECES) - 3 * (len(PIECES) - 1),), generator=generator),
        "voice_codes": torch.randint(CODES, (PROMPT,), generator=generator),
        "voice_mel": torch.randn((2 * PROMPT, MELS), generator=generator),
        "voice_speaker": torch.randn((SPEAKER,), generator=generator),
    }
    answers: dict[str, Tensor] = {}
    with torch.inference_mode():
        silence = torch.full((1, 3), min(SILENCE, CODES - 1))
        padded = torch.cat((inputs["voice_codes"][None], silence), dim=1)
        encoded, _, _ = flow.encoder.forward_chunk(flow.input_embedding(padded), False, None, None)
        answers["encoder"] = encoded[0].clone()
        speaker, mel = inputs["voice_speaker"][None].double(), inputs["voice_mel"][None].double()
        inputs["x"] = torch.randn((MELS, 9), generator=generator)
        x, t = inputs["x"][None].double(), torch.tensor([0.3]).double()
        step, _, _ = flow.decoder.estimator.forward_chunk(x, x * 0.5, t, torch.ones(1, MELS).double(), x * 0.2)
        answers["estimator"] = step[0].clone()
        source = 0.1 * torch.randn((1, 1, 9 * 480), generator=torch.Generator().manual_seed(1)).double()
        answers["decoded"] = hift.decode(x, source)[0, ::THINNED].clone()
        cache = flow.setup_cache(padded, mel, speaker, n_timesteps=STEPS)
        mels, sounds = stream(flow, hift, inputs["codes"], speaker, cache)
    answers["mel"] = torch.cat(mels, dim=1)
    answers["sound"] = torch.cat(sounds)[::THINNED]
    answers = {name: value.float() for name, value in answers.items()}
    lengths = torch.tensor([len(sound) for sound in sounds])
    values = {**inputs, **answers, "lengths": lengths}
    save_file({name: value.clone().contiguous() for name, value in values.items()}, GOLDEN / "trace.safetensors")
    voiced = hift.f0_predictor(answers["mel"][None].double()) > 10
    print("loudest", answers["sound"].abs().max(), "at the limit", (answers["sound"].abs() > 0.98).float().mean())
    print("voiced", voiced.float().mean(), "mel", answers["mel"].std(), "lengths", lengths.tolist())


def stream(
    flow: Any, hift: Any, codes: Tensor, speaker: Tensor, cache: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Mel frames [M, T] and sound [S] of every piece."""
    window = torch.from_numpy(np.hamming(2 * 3840))
    before = {"mel": torch.zeros(1, MELS, 0), "source": torch.zeros(1, 1, 0), "speech": torch.zeros(1, 0)}
    mels, sounds, made, begin = [], [], 0, 0
    for number, size in enumerate(PIECES):
        last = number == len(PIECES) - 1
        piece = codes[None, begin : begin + size]
        begin += size - 3
        mel, cache = flow.inference_chunk(piece, speaker, cache, last, STEPS)
        cache = {name: value.clone() for name, value in cache.items()}
        trimmed(cache, 2 * PROMPT, 2)
        mels.append(mel[0].clone())
        heard = torch.cat((before["mel"], mel), dim=2)
        seed = made
        made += mel.shape[2]
        random = torch.randn_like
        torch.randn_like = lambda like, seed=seed: drawn_noise(like.shape, seed)
        speech, source = hift(heard, before["source"])
        torch.randn_like = random
        first = before["speech"].shape[1] == 0
        if not first:
            speech = speech.clone()
            speech[:, :3840] = speech[:, :3840] * window[:3840] + before["speech"] * window[3840:]
        before = {"mel": heard[..., -8:], "source": source[..., -3840:], "speech": speech[:, -3840:]}
        sound = speech if last else speech[:, :-3840]
        sounds.append((torch.cat((torch.zeros(1, 3840), sound), dim=1) if first and not last else sound)[0])
    return mels, sounds


if __name__ == "__main__":
    main()
