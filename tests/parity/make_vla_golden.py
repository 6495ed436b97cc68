"""Makes the golden files of tests/parity/test_vla_parity.py with lerobot 0.6.1; run once, by hand, never in CI.

    python3.12 -m venv /some/where
    /some/where/bin/pip install 'lerobot[pi,smolvla]==0.6.1' 'torch==2.11.0'
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 /some/where/bin/python tests/parity/make_vla_golden.py

For each policy it writes a checkpoint as lerobot saves it (tiny, random weights) and ``trace.safetensors``: a raw
observation, what lerobot's preprocessor makes of it, every stage of one chunk, and the chunk in robot units.

lerobot fixes the dimensions of pi0 and pi0.5 (SigLIP So400m, Gemma 2b and 300m, 257,152 words), so three places are
patched: the Gemma table, the PaliGemma configuration, the vocabulary of the expert's unused head. SmolVLA needs none: its
dimensions come from a folder. Tokenizers come from the hub in lerobot, so the tokenizer step gets a local one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, RTCAttentionSchedule
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.smolvla import smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from lerobot.processor import tokenizer_processor
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, SmolVLMConfig

GOLDEN = Path(__file__).parent / "golden"
STATE_DIM, ACTION_DIM, PADDED, CHUNK, STEPS = 6, 5, 8, 6, 4
VOCABULARY = 320
WORDS = ["<pad>", "<bos>", "<unk>", "pick", "up", "the", "red", "block", "push", "left", "Task", "State", "Action"]
WORDS += [",", ";", ":", "-", "\n", "_"]
WORDS += [str(i) for i in range(256)]
WORDS += ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]


_HEADS = {"layers": 3, "heads": 8, "kv_heads": 1, "head_dim": 8}
PI_GEOMETRY = {
    "vision": {"image_size": 28, "patch": 14, "width": 24, "layers": 2, "heads": 3, "mlp_width": 40},
    "language": {"width": 32, "mlp_width": 48, **_HEADS},
    "expert": {"width": 24, "mlp_width": 40, **_HEADS},
}


def word_tokenizer(bos: bool) -> Tokenizer:
    """One token per word, digit group and sign; line ends are tokens, as in PaliGemma's vocabulary."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|[A-Za-z]+|\d+|[^\w\s]"), behavior="isolated"),
            pre_tokenizers.Split(" ", "removed"),
        ]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", WORDS.index("<bos>"))]
        )
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>")


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Weights that exercise every term: no zero gates, no unit norms, logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)


def shrink_pi(module: Any) -> None:
    """The three patches: tiny dimensions in place of the ones that lerobot fixes."""
    original_pali = module.PaliGemmaForConditionalGenerationWithPiGemma
    original_expert = module.PiGemmaForCausalLM

    def gemma(variant: str) -> Any:
        dims = PI_GEOMETRY["language" if variant == "gemma_2b" else "expert"]
        return module.GemmaConfig(dims["width"], dims["layers"], dims["mlp_width"], 8, 1, dims["head_dim"])

    def pali(config: Any) -> Any:
        dims, vision = PI_GEOMETRY["vision"], config.vision_config
        vision.hidden_size, vision.intermediate_size = dims["width"], dims["mlp_width"]
        vision.num_hidden_layers, vision.num_attention_heads = dims["layers"], dims["heads"]
        vision.patch_size, vision.projection_dim = dims["patch"], PI_GEOMETRY["language"]["width"]
        config.text_config.vocab_size = VOCABULARY
        config.image_token_index = config.image_token_id = VOCABULARY - 1
        config.projection_dim = 32
        return original_pali(config=config)

    def expert(config: Any) -> Any:
        config.vocab_size = 2
        return original_expert(config=config)

    module.get_gemma_config = gemma
    module.PaliGemmaForConditionalGenerationWithPiGemma = pali
    module.PiGemmaForCausalLM = expert


def features(cameras: list[str]) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    inputs = {f"observation.images.{c}": PolicyFeature(FeatureType.VISUAL, (3, 28, 28)) for c in cameras}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    return inputs, {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}


def statistics() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    result = {}
    for key, dim in (("observation.state", STATE_DIM), ("action", ACTION_DIM)):
        q01 = -1.0 - torch.rand(dim, generator=generator)
        q99 = 1.0 + torch.rand(dim, generator=generator)
        result[key] = {
            "mean": torch.randn(dim, generator=generator),
            "std": 0.5 + torch.rand(dim, generator=generator),
            "min": q01 - 0.5,
            "max": q99 + 0.5,
            "q01": q01,
            "q10": q01 / 2,
            "q90": q99 / 2,
            "q99": q99,
        }
    return result


def observation(cameras: list[str], size: tuple[int, int]) -> dict[str, Any]:
    """One raw robot observation; it has no batch dimension."""
    generator = torch.Generator().manual_seed(11)
    batch: dict[str, Any] = {f"observation.images.{c}": torch.rand(3, *size, generator=generator) for c in cameras}
    batch["observation.state"] = torch.randn(STATE_DIM, generator=generator)
    batch["task"] = "pick up the red_block"
    return batch


class Recorder:
    """Records what the named methods of an object return, in order."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def keep(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = value.detach().clone().contiguous()

    def wrap(self, owner: Any, method: str, record: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        original = getattr(owner, method)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            record(result, args, kwargs)
            return result

        setattr(owner, method, recorded)


def record_stages(policy: Any, recorder: Recorder) -> None:
    model = policy.model
    towers = getattr(model, "paligemma_with_expert", None) or model.vlm_with_expert
    counts = {"image": 0, "step": 0, "prefix": 0}

    def image(result: Any, args: Any, kwargs: Any) -> None:
        recorder.keep(f"image.{counts['image']}", result)
        counts["image"] += 1

    def prefix(result: Any, args: Any, kwargs: Any) -> None:
        recorder.keep("prefix.embeddings", result[0])
        recorder.keep("prefix.mask", result[1])

    def forward(result: Any, args: Any, kwargs: Any) -> None:
        if kwargs["inputs_embeds"][1] is None:
            for index, layer in enumerate(result[1].layers):
                recorder.keep(f"prefix.keys.{index}", layer.keys.transpose(1, 2))
                recorder.keep(f"prefix.values.{index}", layer.values.transpose(1, 2))

    def step(result: Any, args: Any, kwargs: Any) -> None:
        recorder.keep(f"step.{counts['step']}.x", kwargs["x_t"])
        recorder.keep(f"step.{counts['step']}.t", kwargs["timestep"])
        recorder.keep(f"step.{counts['step']}.v", result)
        counts["step"] += 1

    recorder.wrap(towers, "embed_image", image)
    recorder.wrap(model, "embed_prefix", prefix)
    recorder.wrap(towers, "forward", forward)
    recorder.wrap(model, "denoise_step", step)


def rtc_chunks(policy: Any, batch: dict[str, Any], noise: torch.Tensor, recorder: Recorder) -> None:
    """The same observation guided towards a previous tail, for both soft schedules."""
    tail = torch.randn(1, CHUNK - 1, PADDED, generator=torch.Generator().manual_seed(21))
    recorder.keep("rtc.tail", tail)
    for schedule in (RTCAttentionSchedule.LINEAR, RTCAttentionSchedule.EXP):
        policy.config.rtc_config = RTCConfig(
            enabled=True, prefix_attention_schedule=schedule, max_guidance_weight=5.0, execution_horizon=5
        )
        policy.init_rtc_processor()
        actions = policy.predict_action_chunk(
            dict(batch), noise=noise, inference_delay=2, prev_chunk_left_over=tail, execution_horizon=5
        )
        recorder.keep(f"rtc.{schedule.value.lower()}.actions", actions)
    policy.config.rtc_config = None
    policy.init_rtc_processor()


def write(
    name: str, policy: Any, pre: Any, post: Any, raw: dict[str, Any], tokenizer: Tokenizer, geometry: dict[str, Any]
) -> None:
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    policy.save_pretrained(folder)
    pre.save_pretrained(folder)
    post.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    recorder = Recorder()
    for key, value in raw.items():
        if isinstance(value, torch.Tensor):
            recorder.keep(f"raw.{key}", value)
    batch = pre(dict(raw))
    recorder.keep("prepared.state", batch["observation.state"])
    recorder.keep("prepared.tokens", batch["observation.language.tokens"])
    recorder.keep("prepared.token_mask", batch["observation.language.attention_mask"].bool())
    noise = torch.randn(1, CHUNK, PADDED, generator=torch.Generator().manual_seed(17))
    recorder.keep("noise", noise)
    policy.eval()
    rtc_chunks(policy, batch, noise, recorder)
    record_stages(policy, recorder)
    actions = policy.predict_action_chunk(dict(batch), noise=noise)
    recorder.keep("actions", actions)
    recorder.keep("actions.robot", post(actions))
    save_file(recorder.tensors, folder / "trace.safetensors", metadata={"task": raw["task"], "lerobot": "0.6.1"})
    (folder / "geometry.json").write_text(json.dumps(geometry, indent=2) + "\n")
    keep_shapes_alone(folder, seed=2 if name == "smolvla" else 1)
    print(name, sum(f.stat().st_size for f in folder.iterdir()), "bytes", sorted(f.name for f in folder.iterdir()))


def keep_shapes_alone(folder: Path, seed: int) -> None:
    """Instead of the weights: from what ``rebuilt.py`` draws them again."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    (folder / "weights.json").write_text(f'{{"seed": {seed}, "shapes": {{\n{lines}\n}}}}\n')
    (folder / "model.safetensors").unlink()


def make_pi(
    name: str, module: Any, config_class: Any, processors_of: Any, norm: NormalizationMode, **extra: Any
) -> None:
    shrink_pi(module)
    cameras = ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    inputs, outputs = features(cameras)
    config = config_class(
        input_features=inputs,
        output_features=outputs,
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=PADDED,
        max_action_dim=PADDED,
        num_inference_steps=STEPS,
        image_resolution=(28, 28),
        device="cpu",
        normalization_mapping={"VISUAL": NormalizationMode.IDENTITY, "STATE": norm, "ACTION": norm},
        **extra,
    )
    policy = (module.PI0Policy if name == "pi0" else module.PI05Policy)(config)
    randomise(policy, 1)
    tokenizer = word_tokenizer(bos=True)
    tokenizer_processor.AutoTokenizer.from_pretrained = staticmethod(lambda *a, **k: wrapped(tokenizer))
    pre, post = processors_of(config, dataset_stats=statistics())
    raw = observation(cameras[:2], (40, 30))  # the right wrist camera is absent
    write(name, policy, pre, post, raw, tokenizer, PI_GEOMETRY)


def make_smolvla() -> None:
    folder = GOLDEN / "smolvla_vlm"
    shutil.rmtree(folder, ignore_errors=True)
    text = {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 64,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
    }
    SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, pad_token_id=0, image_token_id=1
    ).save_pretrained(folder)
    tokenizer = word_tokenizer(bos=False)
    fast = wrapped(tokenizer)
    fast.add_special_tokens({"additional_special_tokens": WORDS[-4:]})
    fast.fake_image_token, fast.image_token = "<fake_token_around_image>", "<image>"
    fast.global_image_token, fast.end_of_utterance_token = "<global-img>", "<end_of_utterance>"
    for attribute in ("fake_image_token", "image_token", "global_image_token"):
        setattr(fast, f"{attribute}_id", WORDS.index(getattr(fast, attribute)))

    class Processor:
        def __init__(self) -> None:
            self.tokenizer = fast

    smolvlm_with_expert.AutoProcessor.from_pretrained = staticmethod(lambda *a, **k: Processor())
    tokenizer_processor.AutoTokenizer.from_pretrained = staticmethod(lambda *a, **k: wrapped(tokenizer))
    cameras = ["top", "wrist"]
    inputs, outputs = features(cameras)
    norm = NormalizationMode.MEAN_STD
    config = SmolVLAConfig(
        input_features=inputs,
        output_features=outputs,
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=PADDED,
        max_action_dim=PADDED,
        num_steps=STEPS,
        resize_imgs_with_padding=(64, 64),
        vlm_model_name=str(folder),
        num_vlm_layers=3,
        device="cpu",
        empty_cameras=1,
        normalization_mapping={"VISUAL": NormalizationMode.IDENTITY, "STATE": norm, "ACTION": norm},
    )
    policy = SmolVLAPolicy(config)
    randomise(policy, 2)
    pre, post = make_smolvla_pre_post_processors(config, dataset_stats=statistics())
    raw = observation(cameras, (40, 30))
    language = {"width": 24, "layers": 3, "mlp_width": 40, "heads": 3, "kv_heads": 1, "head_dim": 8}
    geometry = {
        "vision": {"image_size": 64, "patch": 16, "width": 24, "layers": 2, "heads": 3, "mlp_width": 40},
        "language": {**language, "family": "llama", "eps": 1e-5},
        "shuffle": 2,
    }
    write("smolvla", policy, pre, post, raw, tokenizer, geometry)
    shutil.rmtree(folder)
    for name in ("config.json", "policy_preprocessor.json"):  # no path of this machine in a committed file
        file = GOLDEN / "smolvla" / name
        file.write_text(file.read_text().replace(str(folder), "tiny"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_pi("pi0", modeling_pi0, PI0Config, make_pi0_pre_post_processors, NormalizationMode.MEAN_STD)
    make_pi("pi05", modeling_pi05, PI05Config, make_pi05_pre_post_processors, NormalizationMode.QUANTILES)
    make_smolvla()
