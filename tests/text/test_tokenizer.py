"""The tokenizer, against transformers' decoding."""

import json
import random
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.checkpoint import CheckpointError, demo
from jaxspec.checkpoint.gguf import tokenizer as gguf_tokenizer
from jaxspec.checkpoint.gguf.file import GgufFile
from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint
from tests.support.tokenizers import BYTES, MERGED, SENTENCEPIECE, TEXT


def test_byte_level_tokens_spelt_in_other_characters_are_text_as_it_stands():
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary | {"世界": 256, "Ġ世": 257}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_backend(backend)
    for ids in ([256], [257], [vocabulary["a"], 256, vocabulary["Ġ"]]):
        assert tokenizer.decode(ids) == backend.decode(ids)


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
    ({"pre": "bloom"}, "pre is 'bloom'; supported: a.x-4.0, .*, qwen2, .*, tekken, trillion$"),
    ({"pre": None}, "pre is None"),
    ({"model": "t5"}, "model is 't5'; supported: 'gpt2' .*'llama'.*'gemma4'"),
    ({"model": "llama"}, "lacks tokenizer.ggml.scores"),
    ({"model": "llama", "scores": [1.0]}, "scores must be .* numbers"),
    ({"model": "gemma4", "unknown_token_id": 10**6}, "unknown_token_id must be a token's"),
    ({"merges": None}, "lacks tokenizer.ggml.merges"),
    ({"add_bos_token": True, "bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
    ({"add_eos_token": True, "eos_token_id": 10**6}, "no tokenizer.ggml.eos_token_id within the vocabulary"),
])  # fmt: skip
def test_gguf_tokenizers_that_are_not_known(changes, message):
    with pytest.raises(TokenizerError, match=message):
        gguf_tokenizer.build(gguf_metadata(**changes), "x.gguf")


SPM = json.loads((Path(__file__).resolve().parents[1] / "golden" / "spm.json").read_text())


def spm(**changes) -> Tokenizer:
    """The vocabulary of golden/spm.json as GGUF has it."""
    pieces, scores, types = map(list, zip(*SPM["pieces"], strict=True))
    named = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": types, "bos_token_id": 1} | changes
    return gguf_tokenizer.build({f"tokenizer.ggml.{key}": value for key, value in named.items()}, "x.gguf")


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_pieces_are_those_of_sentencepiece(prefix):
    """Texts come back, but for a literal mark, which is a space to SentencePiece, too."""
    tokenizer = spm() if prefix else spm(add_space_prefix=False)
    for text, *ids in SPM["texts"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids[0 if prefix else 1], text
        assert tokenizer.encode(text)[0] == 1
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_gguf_pieces_begin_anew_behind_a_special_token():
    """llama.cpp puts a space before each text between special tokens."""
    tokenizer = spm()
    of = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert of("a round</s>a round") == [*of("a round"), 2, *of("a round")]


def test_gguf_merges_of_gemma_4_are_those_of_its_pieces():
    """SentencePiece's merges, by score, in its own list; runs of newlines are apart from other text."""
    merges = [f"{a} {b}" for a, b in gguf_tokenizer._by_score(*map(list, zip(*[
        (score, piece, kind) for piece, score, kind in SPM["pieces"]
    ], strict=True)), "x.gguf")]  # fmt: skip
    gemma, plain = spm(model="gemma4", merges=merges, scores=None), spm(add_space_prefix=False)
    for text in ("The draft model\n\nis small", "naïve 🦙", "\n", "  two"):
        assert gemma.encode(text) == plain.encode(text) and gemma.decode(gemma.encode(text)) == text


@pytest.mark.parametrize("names, text, pieces", [
    # by hand, from the patterns in llama.cpp's llama-vocab.cpp
    ("llama-bpe llama3 llama-v3 pixtral smaug-bpe dbrx glm4 chatglm-bpe", "I'LL x1234.\n\ny", "I 'LL _x 123 4 .\n\n y"),
    ("qwen2 deepseek-r1-qwen megrez", "I'LL x1234.\n\ny", "I 'LL _x 1 2 3 4 .\n\n y"),
    ("seed-coder", "I'LL x1234.\n\ny", "I 'LL _x 1 2 3 4 . \n\n y"),
    ("gpt-2 phi-2 olmo", "I'll I'LL x1234.\n\ny", "I 'll _I ' LL _x 1234 . \n \n y"),
    ("smollm starcoder refact", "I'll I'LL x12.\n\ny", "I 'll _I ' LL _x 1 2 . \n \n y"),
    ("default", "I'll x1234.\n\ny", "I ' ll _x 123 4 . \n \n y"),
    ("tekken", "HelloWorld 12.\n\ny", "Hello World _ 1 2 .\n\n y"),
    ("deepseek-coder", "ab 12.\n\ny 你", "ab _ 1 2 . \n \n y _ 你"),
    ("deepseek-v3", "ab 1234.\n\ny你好z", "ab _ 123 4 .\n\n y 你好 z"),
])  # fmt: skip
def test_gguf_pre_tokenizers_cut_as_llama_cpp_does(names, text, pieces):
    for name in names.split():
        cut = gguf_tokenizer.build(gguf_metadata(pre=name, add_bos_token=False), "x.gguf")._backend.pre_tokenizer
        found = [text[slice(*span)] for _, span in cut.pre_tokenize_str(text)]
        assert " ".join(piece.replace(" ", "_") for piece in found) == pieces, name


def test_a_gguf_file_whose_pre_tokenizer_is_default_is_told(caplog):
    gguf_tokenizer.build(gguf_metadata(pre="default"), "x.gguf")
    assert "x.gguf: tokenizer.ggml.pre is default" in caplog.text


CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def test_a_chat_ends_at_its_templates_end_of_turn_whatever_the_eos_id_is():
    metadata = gguf_metadata(eos_token_id=3, bos_token_id=None)
    end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    ends = lambda **template: gguf_tokenizer.build(metadata | template, "x.gguf").eos_token_ids  # noqa: E731
    assert ends() == (3,)
    assert ends(**{"tokenizer.chat_template": "{{ messages[0].content }}"}) == (3,)
    assert ends(**{"tokenizer.chat_template": CHATML}) == (3, end)
    for eos in (10**6, 2**32 - 1, "x", True):  # nothing that the vocabulary has
        metadata["tokenizer.ggml.eos_token_id"] = eos
        assert ends(**{"tokenizer.chat_template": CHATML}) == (end,), eos
    metadata["tokenizer.ggml.token_type"][end] = 1  # a plain token, which a text may have
    assert ends(**{"tokenizer.chat_template": CHATML}) == ()


@pytest.mark.parametrize(
    "specials, ends",
    [
        (["<|end|>", "<|user|>"], ["<|end|>"]),  # Phi
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>"]),  # Harmony, where <|end|> ends a message
        (["</s>", "[/INST]"], ["</s>"]),
    ],
)
def test_ends_of_turn_by_the_special_tokens_that_a_template_writes(specials, ends):
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    tokenizer = Tokenizer.from_backend(backend, "".join(specials))
    assert [tokenizer.token_text(token) for token in tokenizer.eos_token_ids] == ends


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
