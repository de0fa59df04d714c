"""The tokenizer and the detokeniser, against transformers' decoding and a plain definition of stopping."""

import json
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxspec.checkpoint import CheckpointError, demo, gguf_tokenizer
from jaxspec.checkpoint.gguf_file import GgufFile
from jaxspec.tokenizer import Detokenizer, Tokenizer, TokenizerError
from tests.tiny import BYTE_VOCAB, tiny_checkpoint

TEXT = "Hello wörld, 你好世界! 👩‍👩‍👧 e\u0301 안녕 stop here… 😀😀 END\n"


def merged() -> Tokenizer:
    """Byte-level BPE with merges, so tokens begin and end in the middle of characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT, "世界你好世 好世 wörld 😀 stop"] * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer.from_backend(backend, eos_token="<|im_end|>")


def sentencepiece() -> Tokenizer:
    """SentencePiece's shape: "▁" for spaces, byte fallback, the first space dropped."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁Hi": 256, "▁": 257, "there": 258, "<s>": 259}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer.from_backend(backend, bos_token="<s>")


MERGED, SENTENCEPIECE = merged(), sentencepiece()
BYTES = Tokenizer.from_folder(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True))  # one a byte, then 3 special ones


def test_byte_level_tokens_spelt_in_other_characters_are_text_as_it_stands():
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary | {"世界": 256, "Ġ世": 257}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_backend(backend)
    for ids in ([256], [257], [vocabulary["a"], 256, vocabulary["Ġ"]]):
        assert tokenizer.decode(ids) == backend.decode(ids)


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where to cut: the beginning of the stop string that ends first, the longest if several end there."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def groups(ids: list[int], rng: random.Random) -> list[list[int]]:
    out, start = [], 0
    while start < len(ids):
        out.append(ids[start : start + rng.randint(1, 9)])
        start += len(out[-1])
    return out


@given(
    st.lists(st.integers(0, 410), max_size=40),
    st.lists(st.sampled_from(["a", "世", "世界", "界!", "stop", "st", "op", "aa", "aab", "😀😀", "lo w"]), max_size=3),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_pushes_join_to_the_decoded_text_cut_at_the_first_stop(noise, stops, rng, skip, keep):
    ids = noise[:20] + MERGED.encode(TEXT[rng.randint(0, 9) :]) + noise[20:]
    detokenizer = Detokenizer(MERGED, tuple(stops), skip, keep_stop=keep)
    used, hit, out = 0, None, []
    for group in groups(ids, rng):
        text, hit, count = detokenizer.push(group)
        out.append(text)
        used += count
        if hit:
            assert detokenizer.push([0]) == ("", hit, 0)
            break
        assert count == len(group)
    out.append(detokenizer.finish())
    whole = MERGED.decode(ids, skip)
    cut = first_stop(whole, tuple(stops))
    shown = whole if cut is None else whole[: cut + len(hit) * keep]
    assert "".join(out) == detokenizer.text == shown
    assert (hit is None) == (cut is None)
    if hit:  # exactly the tokens up to the one that completed it
        assert whole.startswith(hit, cut)
        assert hit in MERGED.decode(ids[:used], skip) and hit not in MERGED.decode(ids[: used - 1], skip)


@given(st.text(max_size=30), st.randoms(use_true_random=False), st.sampled_from([(), ("世界", "ab"), ("x\ny",)]))
@settings(max_examples=150, deadline=None)
def test_no_push_shows_part_of_a_character_and_text_waits_only_for_a_stop(text, rng, stops):
    text = text.replace("\ufffd", "") + "世 ax\n"
    ids = list(text.encode("utf-8", "ignore"))
    detokenizer, seen = Detokenizer(BYTES, stops), 0
    for group in groups(ids, rng):
        shown, hit, _ = detokenizer.push(group)
        seen += len(group)
        assert "\ufffd" not in shown
        if hit:
            return
        complete = bytes(ids[:seen]).decode("utf-8", "ignore")
        assert complete.startswith(detokenizer.text)
        held = complete[len(detokenizer.text) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("min_tokens, expected, used", [(0, "x", 3), (2, "x", 3), (3, "xaba", 6), (6, "xabaabc", 7)])
def test_stop_strings_wait_for_min_tokens(min_tokens, expected, used):
    """`min_tokens` tokens may hold stop strings, whole or in part; a later token must complete the one that counts."""
    ids = BYTES.encode("xabaabc")
    whole = Detokenizer(BYTES, ("ab",), min_tokens=min_tokens)
    text, hit, count = whole.push(ids)
    assert (text + whole.finish(), count, hit) == (expected, used, "ab" if min_tokens < 6 else None)
    single = Detokenizer(BYTES, ("ab",), min_tokens=min_tokens)
    for token in ids:
        if single.push([token])[1]:
            break
    single.finish()
    assert single.text == expected


def test_the_longest_beginning_of_a_stop_is_held():
    """After "xaa" two characters must wait, though one alone could begin the stop string too."""
    detokenizer = Detokenizer(BYTES, ("aab",))
    assert [detokenizer.push([token]) for token in BYTES.encode("xaaab")][-1] == ("", "aab", 1)
    assert detokenizer.text == "xa"


def test_of_two_stops_in_one_token_the_first_to_end_counts():
    there = [258]
    assert Detokenizer(SENTENCEPIECE, ("there", "he")).push(there) == ("t", "he", 1)
    assert Detokenizer(SENTENCEPIECE, ("re", "there")).push(there) == ("", "there", 1)  # both end with it: the longest


def test_a_passed_over_stop_stays_passed_over():
    # "ab" ends within min_tokens; it is held only as the beginning of "xabc", and mustn't match once it is not that.
    detokenizer = Detokenizer(BYTES, ("ab", "xabc"), min_tokens=3)
    assert detokenizer.push(BYTES.encode("xabz")) == ("xabz", None, 4)


def test_an_incomplete_character_shows_at_the_end_only():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(list("né".encode()[:2])) == ("n", None, 2)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == "n\ufffd"


def test_a_prompt_with_text_keeps_the_space():
    assert Detokenizer(SENTENCEPIECE, prompt_ids=[256]).push([256])[0] == " Hi"
    assert Detokenizer(SENTENCEPIECE).push([256])[0] == "Hi" == SENTENCEPIECE.decode([256])
    assert Detokenizer(SENTENCEPIECE, prompt_ids=[259]).push([256])[0] == "Hi", "<s> alone has no text"


def test_sentencepiece_text_streams_as_transformers_decodes_it():
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice([" Hi", " ", "there", "é", "世", "😀"]) for _ in range(rng.randint(0, 8)))
        ids = [259]
        for piece in text.replace(" Hi", "\x00").replace("there", "\x01"):
            ids += {"\x00": [256], " ": [257], "\x01": [258]}.get(piece) or list(piece.encode())
        for skip in (True, False):
            detokenizer = Detokenizer(SENTENCEPIECE, skip_special_tokens=skip)
            shown = "".join(detokenizer.push(group)[0] for group in groups(ids, rng)) + detokenizer.finish()
            assert shown == SENTENCEPIECE.decode(ids, skip) == SENTENCEPIECE._fast.decode(ids, skip_special_tokens=skip)


def test_decode_equals_transformers_on_random_tokens():
    rng = random.Random(1)
    for _ in range(500):
        ids = [rng.randrange(420) for _ in range(rng.randint(0, 15))]  # some beyond the vocabulary
        for skip in (True, False):
            assert MERGED.decode(ids, skip) == MERGED._fast.decode(ids, skip_special_tokens=skip)


def test_a_token_alone():
    assert BYTES.token_bytes(0xE4) == b"\xe4"
    assert BYTES.token_text(0xE4) == "\ufffd"
    assert BYTES.token_text(258) == "<|im_end|>"
    assert BYTES.token_bytes(10**6) == b""
    assert SENTENCEPIECE.token_text(256) == " Hi"
    assert BYTES.vocab_size == BYTE_VOCAB
    assert BYTES.eos_token_ids == (258,)


def test_special_tokens_are_recognised_and_skipped():
    ids = BYTES.encode("a<|im_end|>b")
    assert ids == [97, 258, 98]
    assert BYTES.decode(ids) == "ab"
    assert BYTES.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_special_tokens_kept_by_name_are_shown_among_those_skipped():
    for tokenizer, ids, kept, shown in (
        (BYTES, [257, 97, 258, 98], ["<|im_end|>"], "a<|im_end|>b"),
        (BYTES, [257, 97, 258, 98], ["<|im_end|>", "a", "<unknown>"], "a<|im_end|>b"),
        (BYTES, [257, 97, 258, 98], [], "ab"),
    ):
        detokenizer = Detokenizer(tokenizer, kept=kept)
        assert detokenizer.push(ids)[0] + detokenizer.finish() == shown
    assert BYTES.decode([97, 258]) == "a", "others still skip it"


@pytest.mark.parametrize("text", ["a\ud800", 5])
def test_text_that_is_not_unicode_is_an_error(text):
    with pytest.raises(TokenizerError, match="surrogates"):
        BYTES.encode(text)


def test_texts_together_have_the_ids_of_each_alone():
    texts = [TEXT, "", "a<|im_end|>b", 100 * TEXT]
    for tokenizer in (MERGED, SENTENCEPIECE, BYTES):
        for special in (True, False):
            assert tokenizer.encode_all(texts, special) == [tokenizer.encode(text, special) for text in texts]
            alone = [tokenizer._backend.encode(text, add_special_tokens=special).ids for text in texts]
            assert tokenizer.encode_all(texts, special) == alone


def test_other_threads_run_while_a_text_is_encoded():
    encoding = threading.Thread(target=MERGED.encode, args=(5_000 * TEXT,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5, "for all of the text, the interpreter's lock was held"


def test_chat_template():
    user = {"role": "user", "content": "hi"}
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert BYTES.decode(BYTES.apply_chat_template([user]), False) == text + "<|im_start|>assistant\n"
    assert BYTES.decode(BYTES.apply_chat_template([user], add_generation_prompt=False), False) == text
    open_end = [user, {"role": "assistant", "content": "The"}]
    ids = BYTES.apply_chat_template(open_end, add_generation_prompt=False, continue_final_message=True)
    assert BYTES.decode(ids, False).endswith("assistant\nThe")
    with pytest.raises(TokenizerError, match="tokenize can't be set"):
        BYTES.apply_chat_template([user], tokenize=False)
    with pytest.raises(TokenizerError, match="no chat template"):
        MERGED.apply_chat_template([user])


def test_a_template_that_refuses_says_why():
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    picky = Tokenizer.from_backend(Backend.from_str(MERGED._fast.backend_tokenizer.to_str()), template + "{% endfor %}")
    with pytest.raises(TokenizerError, match="no tools here"):
        picky.apply_chat_template([{"role": "tool", "content": "x"}])


def test_unreadable_tokenizers_are_errors(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="can't read the tokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="decoder is none; supported"):
        Tokenizer.from_backend(Backend(models.BPE({"a": 0}, [])))


def gguf_metadata(**changes) -> dict:
    """`merged()` as GGUF would describe it, with a user-defined and an unused token at the end."""
    model = json.loads(MERGED._fast.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    extra = ["<|im_end|>", "<think>", "[PAD]"]
    metadata = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens + extra,
        "token_type": [1] * len(tokens) + [3, 4, 5],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": len(tokens),
        "bos_token_id": len(tokens),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items() if value is not None}


def test_gguf_tokenizer_knows_token_types():
    tokenizer = gguf_tokenizer.build(gguf_metadata(), "x.gguf")
    end = gguf_metadata()["tokenizer.ggml.eos_token_id"]
    ids = tokenizer.encode("<think>你好[PAD]<|im_end|>")
    assert (ids[0], ids[-1]) == (end + 1, end)
    assert end + 2 not in ids
    assert tokenizer.decode(ids) == "<think>你好[PAD]"
    assert tokenizer.eos_token_ids == (end,)


@pytest.mark.parametrize(
    "pre, flag, begins",
    [("qwen2", None, False), ("qwen2", True, True), ("llama-bpe", None, True), ("glm4", None, False)],
)
def test_gguf_tokenizer_adds_bos_when_asked(pre, flag, begins):
    tokenizer = gguf_tokenizer.build(gguf_metadata(pre=pre, add_bos_token=flag), "x.gguf")
    end = gguf_metadata()["tokenizer.ggml.bos_token_id"]
    assert (tokenizer.encode("hi")[0] == end) == begins
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != end


@pytest.mark.parametrize("changes, message", [
    ({"pre": "tekken"}, "pre is 'tekken'; supported: glm4, gpt-2, llama-bpe, qwen2, smollm"),
    ({"pre": None}, "pre is None"),
    ({"model": "llama"}, "model is 'llama'; supported: 'gpt2'"),
    ({"merges": None}, "lacks tokenizer.ggml.merges"),
    ({"add_bos_token": True, "bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
])  # fmt: skip
def test_gguf_tokenizers_that_are_not_known(changes, message):
    with pytest.raises(TokenizerError, match=message):
        gguf_tokenizer.build(gguf_metadata(**changes), "x.gguf")


# Token ids from transformers' AutoTokenizer reading the same file.
DEMO_IDS = {
    "  two  spaces   three": [216, 827, 216, 5600, 256, 1296],
    "tabs\tand\nnewlines\n\n\n  x": [100, 7366, 197, 397, 198, 2241, 5110, 1116, 3805, 1792],
    "3.14159e-10, 1,000,000": [35, 30, 33, 36, 33, 37, 41, 85, 29, 33, 32, 28, 216, 33, 28, 32, 32, 32, 28, 32, 32, 32],
    "über naïve café": [7170, 593, 15486, 46494, 37366],
    "你好，世界": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230],
    "안녕하세요": [183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238],
    "def f(x):\n    return x**2  # comment\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 5189, 198],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "don't I'll we've they're it's he'd I'm DON'T I'LL": [
        12420, 982, 339, 3060, 392, 3543, 502, 2316, 357, 506, 384, 6737, 339, 5248, 422, 2154, 23, 68,
        339, 23, 16421
    ],
    "😀🎉👨‍👩‍👧‍👦🏳️‍🌈": [
        10813, 242, 218, 10813, 232, 227, 10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813,
        235, 117, 321, 231, 10813, 235, 116, 10813, 233, 128, 31752, 321, 231, 10813, 230, 226
    ],
}  # fmt: skip


def test_demo_tokenizer_equals_transformers():
    try:
        tokenizer = GgufFile(demo.fetch()).tokenizer()
    except CheckpointError as error:
        pytest.skip(f"the demo model can't be fetched: {error}")
    for text, ids in DEMO_IDS.items():
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.decode(chat, False).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert chat[:4] == [1, 9690, 198, 2683]


def test_a_saved_tokenizer_reads_as_the_same(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True))
    tokenizer.save(tmp_path)
    again, messages = Tokenizer.from_folder(tmp_path), [{"role": "user", "content": "hé"}]
    assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert again.eos_token_ids == tokenizer.eos_token_ids
    assert '"PreTrainedTokenizerFast"' in (tmp_path / "tokenizer_config.json").read_text(), "what transformers 4 knows"
