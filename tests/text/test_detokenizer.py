"""The detokeniser, against whole decoding and a plain definition of stopping."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.text.detokenizer import Detokenizer
from tests.support.tokenizers import BYTES, MERGED, SENTENCEPIECE, TEXT


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


def test_special_tokens_kept_by_name_are_shown_among_those_skipped():
    for tokenizer, ids, kept, shown in (
        (BYTES, [257, 97, 258, 98], ["<|im_end|>"], "a<|im_end|>b"),
        (BYTES, [257, 97, 258, 98], ["<|im_end|>", "a", "<unknown>"], "a<|im_end|>b"),
        (BYTES, [257, 97, 258, 98], [], "ab"),
    ):
        detokenizer = Detokenizer(tokenizer, kept=kept)
        assert detokenizer.push(ids)[0] + detokenizer.finish() == shown
    assert BYTES.decode([97, 258]) == "a", "others still skip it"
