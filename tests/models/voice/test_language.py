"""The language model from its file to its words: a tiny GGUF checkpoint, written here, with a tokenizer of its own."""

import gguf
import numpy as np
import pytest
import torch

from models.voice.dense_llama import dense_logits
from realtime_omni.errors import ConfigError
from realtime_omni.models.voice.lm.convert import load
from realtime_omni.models.voice.lm.language import MOST_TOKENS, SYSTEM, Language
from realtime_omni.models.voice.lm.network import Llama, Matrix
from realtime_omni.models.voice.lm.sequences import Sequences
from realtime_omni.models.voice.lm.tokens import ChatTokens

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYERS, MODEL, HIDDEN, HEADS, KV_HEADS = 2, 32, 48, 4, 2


def byte_letters():
    """GPT-2's printable stand-ins for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Path of a random checkpoint, and its weights as they went in."""
    path = tmp_path_factory.mktemp("lm") / "tiny.gguf"
    pieces = [*CONTROL, *byte_letters(), "he", "ll", "hell"]
    rng = np.random.default_rng(0)
    weights = {"token_embd.weight": rng.normal(0, 1, (len(pieces), MODEL)), "output_norm.weight": np.ones(MODEL)}
    kv = MODEL // HEADS * KV_HEADS
    for i in range(LAYERS):
        shapes = {"attn_q": (MODEL, MODEL), "attn_k": (kv, MODEL), "attn_v": (kv, MODEL), "attn_output": (MODEL, MODEL)}
        shapes |= {"ffn_gate": (HIDDEN, MODEL), "ffn_up": (HIDDEN, MODEL), "ffn_down": (MODEL, HIDDEN)}
        for name, shape in shapes.items():
            weights[f"blk.{i}.{name}.weight"] = rng.normal(0, shape[1] ** -0.5, shape)
        for name in ("attn_norm", "ffn_norm"):
            weights[f"blk.{i}.{name}.weight"] = rng.normal(1, 0.1, MODEL)
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    write(path, pieces, weights)
    return path, weights


def write(path, pieces, weights, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(MODEL)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_vocab_size(len(pieces))
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if p in CONTROL else 1 for p in pieces])
    writer.add_token_merges(["h e", "l l", "he ll"])
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def language(tiny):
    made = Language(tiny[0], calls=2, context=200, threaded=False)
    yield made
    made._sequences.check()


def test_a_checkpoint_is_converted_once_and_is_the_same_the_second_time(tiny):
    path, weights = tiny
    first = load(path)
    [cached] = path.parent.glob("*.safetensors")
    stamp = cached.stat().st_mtime_ns
    second = load(path)
    assert cached.stat().st_mtime_ns == stamp
    assert first.config == second.config
    assert first.tensors["layers.1.qkv"].dtype == torch.int8
    assert all(torch.equal(second.tensors[name], tensor) for name, tensor in first.tensors.items())
    restored = first.tensors["layers.1.gate_up"].float() * first.tensors["layers.1.gate_up.scale"].float()[:, None]
    up = torch.from_numpy(weights["blk.1.ffn_up.weight"])
    torch.testing.assert_close(restored[HIDDEN:], up, rtol=0, atol=0.02)


def test_the_converted_network_computes_what_the_files_weights_do(tiny):
    path, weights = tiny
    checkpoint = load(path)
    exact = {"embedding": weights["token_embd.weight"], "norm": weights["output_norm.weight"]}
    for i in range(LAYERS):
        b, p = f"blk.{i}.", f"layers.{i}."
        exact[p + "qkv"] = np.concatenate([weights[f"{b}attn_{x}.weight"] for x in "qkv"])
        exact[p + "gate_up"] = np.concatenate([weights[f"{b}ffn_{x}.weight"] for x in ("gate", "up")])
        exact[p + "out"], exact[p + "down"] = weights[b + "attn_output.weight"], weights[b + "ffn_down.weight"]
        exact[p + "norm1"], exact[p + "norm2"] = weights[b + "attn_norm.weight"], weights[b + "ffn_norm.weight"]
    tokens = [5, 100, 20, 7, 250, 33, 90]
    want = dense_logits(checkpoint.config, {n: torch.from_numpy(w) for n, w in exact.items()}, torch.tensor(tokens))[-1]
    sequences = Sequences(Llama(checkpoint.config, checkpoint.tensors), places=1, context=64, chunk=16)
    sequences.begin("a", tokens)
    got = sequences.feed({"a": tokens})[0].double()
    assert torch.corrcoef(torch.stack((got, want)))[0, 1] > 0.999


@pytest.mark.parametrize("offset", [1, 4, 8, 16])
def test_a_matrix_may_lie_anywhere_in_a_file(offset):
    """With AVX-512 torch's kernel ends the process at an address that is no multiple of 16."""
    room = torch.randint(-100, 100, (64 * 32 + 16,), dtype=torch.int8)
    weight, scale = room[offset : offset + 64 * 32].view(64, 32), torch.ones(64, dtype=torch.bfloat16)
    matrix = Matrix(weight, scale)
    assert matrix._weight.data_ptr() % 16 == 0
    x = torch.eye(32)
    torch.testing.assert_close(matrix(x), weight.T.float())


@pytest.mark.parametrize(
    ("change", "words"),
    [({"blk.0.ffn_up.weight": None}, "has no tensor"), ({"blk.0.ffn_up.weight": (3, MODEL)}, "has shape")],
)
def test_a_checkpoint_of_another_kind_is_refused(tiny, tmp_path, change, words):
    weights = dict(tiny[1])
    for name, shape in change.items():
        if shape is None:
            del weights[name]
        else:
            weights[name] = np.zeros(shape, np.float32)
    path = tmp_path / "other.gguf"
    write(path, [*CONTROL, *byte_letters(), "he", "ll", "hell"], weights)
    with pytest.raises(ConfigError, match=words):
        load(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_cache_is_named(tiny, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny[0].read_bytes())
    load(path)
    [cached] = tmp_path.glob("*.safetensors")
    cached.write_bytes(cached.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is damaged"):
        load(path)


def test_text_survives_the_tokenizer_and_merges_are_used(tiny):
    tokens = ChatTokens(load(tiny[0]).tokenizer)
    for text in ("hello 42, wörld 🙂", "", " two  blanks\n"):
        assert tokens.decode(tokens.encode(text)) == text
    assert len(tokens.encode("hello")) == 2
    assert tokens.decode(tokens.encode("🙂")[:2]) == ""  # half a character is not shown


def test_marks_for_the_eye_are_unspoken_and_the_end_of_a_turn_is_not(tiny):
    tokens = Language(tiny[0], calls=1, context=200, threaded=False)._tokens
    unspoken = set(tokens.unspoken())
    assert {token for mark in '"*#:' for token in tokens.encode(mark)} <= unspoken
    assert not unspoken & {*tokens.stops, *tokens.encode("It's 20, isn't it? Yes!")}


def test_a_first_sentence_does_not_turn_in_circles_and_a_second_one_may(tiny):
    tokens = ChatTokens(load(tiny[0]).tokenizer)
    assert tokens.circles(tokens.encode("a cat is a ")) == []
    assert tokens.circles(tokens.encode("a cat is a c")) == list(tokens.encode("a"))  # every letter is a token
    assert tokens.circles(tokens.encode("no. a cat is a c")) == []
    assert tokens.circles(tokens.encode("a")) == []


def test_a_prompt_is_the_chat_template(tiny, language):
    tokens = language._tokens
    prompt = language.prompt("be kind", [("user", "hi"), ("user", "there"), ("assistant", "hello"), ("user", "bye")])
    text = tokens._tokenizer.decode(list(prompt), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )
    default = language.prompt(None, [])
    assert SYSTEM in tokens._tokenizer.decode(list(default), skip_special_tokens=False)


def test_without_instructions_there_is_an_example_and_with_them_there_is_none(tiny):
    language = Language(tiny[0], calls=1, context=256, threaded=False)
    opening = language._tokens.opening("user")
    assert "spider" in language._tokens.decode(language.prompt(None, [("user", "hi")]))
    assert language._sequences.knows((*language._head(None), *opening)), "it is read once for all calls"
    assert language._head("s") == language._turn("system", "s")


def test_old_turns_make_room_several_at_once_and_the_last_one_is_always_there(language):
    said = [("user" if i % 2 == 0 else "assistant", f"this is turn {i}") for i in range(40)]
    firsts = set()
    for n in range(1, 41):
        prompt = language.prompt("s", said[:n])
        assert len(prompt) + MOST_TOKENS <= language.context
        text = language._tokens._tokenizer.decode(list(prompt), skip_special_tokens=False)
        assert f"turn {n - 1}<|im_end|>\n<|im_start|>assistant\n" in text
        firsts.add(int(text.split("this is turn ")[1].split("<")[0]))
    assert firsts == set(range(0, max(firsts) + 1, 2))
    assert len(firsts) > 3
    language.prompt("x" * 1000, [("user", "y" * 1000)])
    language.draft(language.prompt("x" * 1000, [("user", "y" * 1000)]))


def a_talk(exchanges, more=""):
    """Some turns have ``more`` of the same."""
    return [("user" if i % 2 == 0 else "assistant", f"{i}" + more * (i % 7)) for i in range(2 * exchanges)]


def test_a_long_conversation_is_read_from_its_last_turns(tiny):
    language, said = Language(tiny[0], calls=2, context=256, threaded=False), a_talk(6)
    read = [
        language._tokens._tokenizer.decode(list(language.prompt("s", said[:n])), skip_special_tokens=False)
        for n in (1, 3, 5, 7, 9, 11)
    ]
    assert [text.count("<|im_start|>") - 2 for text in read] == [1, 3, 5, 3, 5, 3]  # system's and the one to come apart
    assert all(f"<|im_start|>user\n{n - 1}" in text for n, text in zip((1, 3, 5, 7, 9, 11), read, strict=True))


@pytest.mark.parametrize("kept", [1000, 64, 63, 7])
def test_only_the_users_words_are_left_to_read_however_long_the_talk(tiny, kept):
    """``kept``: turns that the conversation still has, the newest ones."""
    language, said = Language(tiny[0], calls=1, context=240, threaded=False), a_talk(40, more=" very")
    tokens = language._tokens
    new = (*tokens.turn("user", "and then?")[len(tokens.opening("user")) :], *tokens.opening("assistant"))
    for turns in range(0, len(said) + 1, 2):
        so_far = said[:turns][-kept:]
        language.prepare("s", so_far)
        following = language.prompt("s", [*so_far, ("user", "and then?")])
        assert language._sequences.knows(following[: -len(new)])
        assert following[-len(new) :] == new


def test_a_question_that_stands_for_itself_is_asked_alone(tiny):
    language = Language(tiny[0], calls=1, context=256, threaded=False)
    before = [("user", "hi"), ("assistant", "yo")]  # half of the room is the default instructions'
    for question, alone in (("How do birds fly?", True), ("Is it big?", False)):
        asked = language.prompt(None, [*before, ("user", question)])
        assert (asked == language.prompt(None, [("user", question)])) is alone
        told = language.prompt("s", [*before, ("user", question)])
        assert told != language.prompt("s", [("user", question)]), "a client's instructions have no example behind them"


def test_long_turns_go_sooner_and_leave_half_of_the_room_to_the_question(tiny):
    language = Language(tiny[0], calls=1, context=256, threaded=False)
    for turn in ("x" * 15, "x" * 40):
        said = [("user", "hi"), ("assistant", turn), ("user", "yes"), ("assistant", turn)]
        so_far = language._so_far("s", said)
        text = language._tokens.decode(so_far)
        assert text.count(turn) == (2 if len(turn) == 15 else 1)
        assert len(language.prompt("s", [*said, ("user", "y" * 60)])) == len(so_far) + len(
            language._tokens.turn("user", "y" * 60)
        ) + len(language._tokens.opening("assistant"))


def test_what_is_read_already_is_not_read_again(tiny):
    language = Language(tiny[0], calls=1, context=240, threaded=False)
    before, passes = language._sequences.names, language._sequences.book.statistics
    language.prepare("s", a_talk(2))
    read = language._sequences.names
    committed = passes().blocks_committed
    language.prepare("s", a_talk(2))
    assert language._sequences.names == read != before
    assert passes().blocks_committed == committed


def test_an_answer_is_the_same_asked_again_forgotten_or_prepared(tiny, language):
    prompt = language.prompt("s", [("user", "hello there")])
    first = language.draft(prompt, 8)
    assert first.done
    assert not first.failed
    assert first.tokens > 0
    assert language.draft(prompt, 8) == first
    language.drop(prompt)
    assert language.draft(prompt, 8) == first
    said = [("user", "hello there"), ("assistant", first.text)]
    language.prepare("s", said)
    following = language.prompt("s", [*said, ("user", "and then?")])
    before = language._sequences.book.statistics().blocks_committed
    answer = language.draft(following)
    used = language._sequences.book.statistics().blocks_committed - before
    new = len(following) - len(language.prompt("s", said)) + 2
    assert used <= -(-new // 16) + answer.tokens + 1  # only the new turn was read
    assert Language(tiny[0], calls=2, context=200, threaded=False).draft(following) == answer
