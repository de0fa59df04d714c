"""`/v1/completions` through the official client, against the fake engine."""

import json
import threading

import pytest

from jaxspec.config.request import TokenLogprobs
from server.replies.logprobs import FLOOR, Offsets, TokenNames, completion_logprobs
from tests.server.fake import TEXT
from tests.support.tokenizers import SENTENCEPIECE

MODEL = {"model": "fake/model"}


def ids(text):
    return list(text.encode())


@pytest.mark.parametrize("prompt,expected", [
    ("ab", ["ab"]),
    (["ab", "c"], ["ab", "c"]),
    (ids("ab"), ["ab"]),
    ([ids("ab"), ids("c")], ["ab", "c"]),
])  # fmt: skip
def test_prompt_spellings(client, fake, prompt, expected):
    reply = client.completions.create(**MODEL, prompt=prompt, max_tokens=3)
    assert [given for given, _ in fake.started] == [ids(text) for text in expected]
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))
    assert reply.usage.prompt_tokens == sum(map(len, expected))
    assert reply.usage.completion_tokens == 3 * len(expected)


def test_default_length_is_openais(client, fake):
    client.completions.create(**MODEL, prompt="ab")
    assert fake.started[-1][1].max_tokens == 16


def test_choices_are_in_openais_order(client):
    reply = client.completions.create(**MODEL, prompt=["one", "two"], n=2, best_of=2, echo=True, max_tokens=1)
    assert [(choice.index, choice.text) for choice in reply.choices] == [
        (0, "oneh"),
        (1, "oneh"),
        (2, "twoh"),
        (3, "twoh"),
    ]
    assert reply.usage.prompt_tokens == 6, "a prompt counts once"
    assert reply.usage.prompt_tokens_details.cached_tokens == 4, "and so does what was cached of it"


@pytest.mark.parametrize("prompt", ["ab☃", "reverse"])  # "reverse": the engine's last completion comes first
@pytest.mark.parametrize("options", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2}])
def test_stream_says_what_the_whole_says(client, options, prompt):
    asked = {**MODEL, "prompt": [prompt, "c"], "n": 2, "max_tokens": 9, **options}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    for index, expected in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(part.text for part in mine) == expected.text
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
        assert (expected.logprobs is None) == ("logprobs" not in options)
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if expected.logprobs else ():
            assert [x for part in mine if part.logprobs for x in getattr(part.logprobs, key)] == getattr(
                expected.logprobs, key
            )


def test_logprobs_with_echo(client):
    choice = client.completions.create(**MODEL, prompt="é!", logprobs=2, echo=True, max_tokens=3).choices[0]
    logprobs = choice.logprobs
    assert choice.text == "é!hé"
    assert logprobs.tokens == [r"bytes:\xc3", r"bytes:\xa9", "!", "h", r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs.text_offset == [0, 0, 1, 2, 3, 3]
    assert logprobs.token_logprobs == [None, -1.5, -1.5, -1.5, -1.5, -1.5]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[3] == {"?": -0.1, "h": -1.5}


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_is_an_empty_text(client, fake, stream):
    asked = {**MODEL, "prompt": ["ab", "c"], "n": 2, "max_tokens": 0, "stream": stream}
    reply = client.completions.create(**asked)
    choices = [choice for part in reply for choice in part.choices] if stream else reply.choices
    assert sorted((c.index, c.text, c.finish_reason) for c in choices) == [(i, "", "length") for i in range(4)]
    assert stream or (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 0)


def test_no_tokens_need_no_room_in_the_context(client, http, fake):
    client.completions.create(**MODEL, prompt="ab", max_tokens=0, logprobs=1, echo=True)
    assert http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 0}}).status_code == 200
    assert [(params.max_tokens, params.no_tokens) for _, params in fake.started] == [(1, True)] * 2
    client.completions.create(**MODEL, prompt="ab", max_tokens=1)
    assert not fake.started[-1][1].no_tokens


def test_usage_in_each_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**MODEL, "prompt": ["ab", "c"], "n": 2, "max_tokens": 4}
    *chunks, last = client.completions.create(**asked, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 16
    assert all(chunk.usage.prompt_tokens == 3 and chunk.choices for chunk in chunks)
    assert last.choices == [] and last.usage == client.completions.create(**asked).usage


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"extra_body": {"prompt_logprobs": 2}}])
def test_echo_alone(client, options):
    """No tokens asked for, which is how prompts are scored: the prompt, and nothing of what the engine made of it."""
    asked = {**MODEL, "prompt": ["ab", "c"], "n": 2, "max_tokens": 0, "echo": True, **options}
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == ["ab", "ab", "c", "c"]
    assert {(choice.finish_reason, choice.stop_reason) for choice in whole.choices} == {("length", None)}
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, 0, 3)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for index, expected in enumerate(whole.choices):
        opening, end = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert (opening.text, opening.logprobs) == (expected.text, expected.logprobs)
        assert (end.text, end.logprobs, end.finish_reason, end.stop_reason) == ("", None, "length", None)
    first = whole.choices[0]
    if "logprobs" in options:
        assert (first.logprobs.tokens, first.logprobs.token_logprobs) == (["a", "b"], [None, -1.5])
    assert ("extra_body" in options) == hasattr(first, "prompt_logprobs")


def test_no_logprob_is_below_the_floor(fake):
    """JSON has no minus infinity, which the log-probability of a chosen token may be: a prompt's can be any."""
    never = TokenLogprobs(ord("a"), float("-inf"), ((ord("b"), -0.5), (ord("#"), float("-inf"))))
    unlikely = TokenLogprobs(ord("a"), -12_345.0, ())
    names = TokenNames(fake.tokenizer)
    for entry, top in ((never, {"b": -0.5, "#": FLOOR, "a": FLOOR}), (unlikely, {"a": FLOOR})):
        reported = completion_logprobs(names, [(ord("a"), entry)], Offsets(fake.tokenizer))
        assert reported["token_logprobs"] == [FLOOR] and reported["top_logprobs"] == [top]
        json.dumps(reported, allow_nan=False)


def test_parts_of_characters_have_names_of_their_own(fake):
    entry = TokenLogprobs(0xA9, -2.0, ((0xC3, -0.5), (0xA8, -1.0)))
    reported = completion_logprobs(TokenNames(fake.tokenizer), [(0xA9, entry)], Offsets(fake.tokenizer))
    assert reported["top_logprobs"] == [{r"bytes:\xc3": -0.5, r"bytes:\xa8": -1.0, r"bytes:\xa9": -2.0}]


def test_logprobs_zero_still_reports_the_chosen(client):
    logprobs = client.completions.create(**MODEL, prompt="a", logprobs=0, max_tokens=1).choices[0].logprobs
    assert (logprobs.token_logprobs, logprobs.top_logprobs) == ([-1.5], [{"h": -1.5}])


def test_prompt_logprobs_alone_are_reported_and_not_echoed(client):
    asked = {**MODEL, "prompt": "ab", "max_tokens": 1, "extra_body": {"prompt_logprobs": 0}}
    choice = client.completions.create(**asked).choices[0]
    expected = [None, {"98": {"logprob": -1.5, "rank": None, "decoded_token": "b"}}]
    assert (choice.text, choice.logprobs, choice.prompt_logprobs) == ("h", None, expected)
    opening, *_ = client.completions.create(**asked, stream=True)
    assert (opening.choices[0].text, opening.choices[0].prompt_logprobs) == ("", expected)


def test_echo_of_token_ids(client):
    choice = client.completions.create(**MODEL, prompt=ids("é"), echo=True, max_tokens=1).choices[0]
    assert choice.text == "éh"


def test_without_a_tokenizer(client, fake):
    fake.tokenizer = None
    assert client.completions.create(**MODEL, prompt=[1, 2], max_tokens=40).choices[0].text == TEXT
    for asked in ({"prompt": "a"}, {"prompt": [1], "echo": True}):
        with pytest.raises(Exception, match="no tokenizer"):
            client.completions.create(**MODEL, **asked)
    with pytest.raises(Exception, match="no tokenizer"):
        client.chat.completions.create(**MODEL, messages=[{"role": "user", "content": "a"}])


def test_offsets_are_those_in_the_returned_text(fake):
    """Special tokens in its midst are reported, and aren't in the text."""
    stop = fake.tokenizer.encode("<|im_end|>")[0]
    tokens = [ord("a"), stop, *"é".encode(), stop, ord("b")]
    names, text = TokenNames(fake.tokenizer), "aéb"
    assert fake.tokenizer.decode(tokens) == text
    reported = completion_logprobs(names, [(token, None) for token in tokens], Offsets(fake.tokenizer))
    assert reported["tokens"][1] == "<|im_end|>"
    assert reported["text_offset"] == [0, 1, 1, 1, 2, 2]
    written = Offsets(fake.tokenizer, echo="a<|im_end|>b")
    assert [written.take(token) for token in (stop, ord("a"), stop, ord("b"))] == [0, 0, 1, 11]
    begun = Offsets(SENTENCEPIECE, echo="Hi there")
    assert [begun.take(token) for token in (259, 256, 257, 258)] == [0, 0, 2, 3], "no <s>, and no space before the text"
    nothing = Offsets(None, 5)
    assert [nothing.take(token) for token in tokens] == [5] * 6, "without a tokenizer there is no text"


def test_long_prompt_is_tokenised(client, fake):
    with pytest.raises(Exception, match=r"the prompt has at least \d+ tokens"):
        client.completions.create(**MODEL, prompt="a" * 30_000)
    assert fake.started == []


def test_many_prompts_are_tokenised_beside_the_streams(client, fake, monkeypatch):
    """Use a thread, as for one long prompt, so that nobody's stream waits."""
    tokenizer, threads = fake.tokenizer, []

    class Noting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode_within(self, text, *_):
            threads.append(threading.current_thread())
            return ids(text)

    monkeypatch.setattr(fake, "tokenizer", Noting())
    client.completions.create(**MODEL, prompt=["a" * 100] * 201, max_tokens=1)
    client.completions.create(**MODEL, prompt=["a", "b"], max_tokens=1)
    assert len(set(threads[:201])) == 1 and threads[0] not in threads[201:]
