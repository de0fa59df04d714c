"""Bounds on a text before it is encoded, against tokenizers of the kinds that models have."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxspec.text import length_bounds, tokenizer
from jaxspec.text.errors import TokenizerError, TooLong
from tests.support.tokenizers import SENTENCEPIECE

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = ["Hello there, it's the 1234th word\n\n  of    many; and (so) on.\n", "aaaa bbbb Ünïcode ☃ 漢字 ====\nd"]
LIKELY = "abZ09 \n\t.,'!=é☃漢\u0301한\u1112\u1161\u11ab"


def byte_level(split=None, **more):
    """A tokenizer as GPT-2's, or, with `split`, one as Llama 3's and Qwen's."""
    backend = Tokenizer(models.BPE())
    parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split:
        parts.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(more.pop("first", []) + parts)
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = more.pop("normalizer", None)
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS * 20, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    backend.add_tokens(more.pop("added", []))
    if more.pop("wrap", False):
        ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer.Tokenizer.from_backend(backend, eos_token="</s>")


@functools.cache
def kinds():
    return {
        "gpt2": byte_level(),
        "gpt4": byte_level(GPT4, normalizer=normalizers.NFC(), wrap=True),
        "digits": byte_level(first=[pre_tokenizers.Digits(individual_digits=True)]),
        "sentencepiece": SENTENCEPIECE,
    }


@pytest.mark.parametrize("kind", ["gpt2", "gpt4", "digits", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from(LIKELY) | st.characters(codec="utf-8"), max_size=200))
def test_pieces_and_least_agree_with_the_whole(kind, text):
    one = kinds()[kind]
    whole = one.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_bounds, "PIECE", 16)
        patch.setattr(tokenizer, "PIECE", 16)
        pieces = one.measure.pieces(text)
        assert "".join(pieces) == text
        assert one.encode_within(text, len(whole)) == whole
    assert one.measure.least_tokens(text) <= len(whole)
    assert one.measure.least_tokens(text * 40) <= len(one.encode(text * 40))


def test_long_text_is_cut_and_short_of_its_end_when_too_long():
    one = kinds()["gpt4"]
    text = "".join(random.Random(0).choices(["word ", "it's ", "12345", "\n", " x", "==", "é"], k=30_000))
    whole = one.encode(text)
    calls = []
    assert len(one.measure.pieces(text)) > 3
    assert one.encode_within(text, len(whole), check=lambda: calls.append(1)) == whole
    assert len(calls) > 3
    seen = []
    with pytest.raises(TooLong) as error:
        one.encode_within(text, 1000, check=lambda: seen.append(1))
    assert 1000 < error.value.least <= len(whole) and len(seen) < 5, "nothing is encoded beyond what decides"


def test_a_text_without_words_is_refused_by_its_bytes():
    one = kinds()["gpt2"]
    text = "a" * 300_000
    least = one.measure.least_tokens(text)
    assert one.measure.longest > 4, "a token that the text can't have"
    assert len(text) / 5 < least <= len(one.encode(text))
    with pytest.raises(TooLong):
        one.encode_within(text, 1000, check=lambda: pytest.fail("it was encoded"))


@pytest.mark.parametrize("kind", ["gpt2", "sentencepiece"])
def test_a_text_that_can_only_be_encoded_whole_is_bounded(kind, monkeypatch):
    one = kinds()[kind]
    monkeypatch.setattr(tokenizer, "UNCUT", 40_000)
    text = "a" * 40_000
    assert one.encode_within(text, 10**9) == one.encode(text)
    monkeypatch.setattr(one, "encode", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(TokenizerError, match="40001 characters that can only be encoded as one piece, at most 40000"):
        one.encode_within(text + "a", 10**9)


def test_who_asks_no_more_ends_it():
    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kinds()["gpt2"].encode_within("a b " * 10_000, 10**9, check=leave)


@pytest.mark.parametrize("options", [
    {"added": [AddedToken("two words")]},
    {"added": [AddedToken("x", rstrip=True)]},
    {"added": [AddedToken("x", single_word=True)]},
    {"normalizer": normalizers.Lowercase()},
    {"split": r"\s?\S+\s?"},
    {"split": r"\S+ b|\s+"},
    {"first": [pre_tokenizers.UnicodeScripts()]},
])  # fmt: skip
def test_a_tokenizer_that_reaches_across_words_is_not_cut(options):
    assert len(byte_level(**options).measure.pieces("a b " * 20_000)) == 1


@pytest.mark.parametrize("options", [
    {"normalizer": normalizers.Strip()},
    {"normalizer": normalizers.Replace("aaa", "")},
    {"first": [pre_tokenizers.Split(" ", "removed")]},
])  # fmt: skip
def test_a_tokenizer_that_drops_text_says_nothing_of_its_least(options):
    one = byte_level(**options)
    assert one.measure.least_tokens("aaa" * 100_000) == 0


def test_space_that_a_special_token_takes_along_is_not_counted():
    one = byte_level(added=[AddedToken("<mask>", lstrip=True)])
    text = " " * 200_000 + "<mask>"
    assert one.measure.least_tokens(text) <= len(one.encode(text)) < 10


def test_composed_text_is_not_counted_by_its_parts():
    one = kinds()["gpt4"]
    for text in ("\u1112\u1161\u11ab" * 40_000, "e\u0301" * 40_000):
        assert 0 < one.measure.least_tokens(text) <= len(one.encode(text))
