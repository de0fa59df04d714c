"""`/v1/chat/completions` through the official client, against the fake engine."""

import asyncio
import threading

import pytest
from openai import AsyncOpenAI

from jaxspec.text.chat_template import reserved_template_variables
from tests.server.fake import TEXT, byte_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
ASK = {"model": "fake/model", "messages": HELLO}


def prompt_text(fake):
    return byte_tokenizer().decode(fake.started[-1][0], skip_special_tokens=False)


def test_whole(client, fake):
    reply = client.chat.completions.create(**ASK)
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.index) == ("chat.completion", "fake/model", 0)
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is None
    tokens = len(TEXT.encode())
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (tokens, tokens + reply.usage.prompt_tokens)
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert prompt_text(fake) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert fake.started[-1][1].max_tokens is None, "a chat runs up to the context"


def test_stream_says_what_the_whole_says(client):
    asked = {**ASK, "n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 9, "seed": 1}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index, expected in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and all(part.delta.role is None for part in mine[1:])
        assert "".join(part.delta.content or "" for part in mine) == expected.message.content
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [item for part in mine if part.logprobs for item in part.logprobs.content] == expected.logprobs.content


def test_stream_without_usage(client):
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    assert chunks and all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("last", [False, True])
def test_stream_with_usage_in_each_chunk(client, last):
    options = {"continuous_usage_stats": True, "include_usage": last}
    chunks = list(client.chat.completions.create(**ASK, max_tokens=5, stream=True, stream_options=options))
    parts = [chunk for chunk in chunks if chunk.choices]
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.usage.completion_tokens for part in parts] == [1, 1, 3, 4, 5], "the third token completes a character"
    assert all(part.usage.total_tokens == part.usage.prompt_tokens + part.usage.completion_tokens for part in parts)
    assert len(chunks) - len(parts) == last


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_is_an_empty_message(client, name):
    reply = client.chat.completions.create(**ASK, **{name: 0})
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "length")
    assert reply.usage.completion_tokens == 0
    opening, end = client.chat.completions.create(**ASK, **{name: 0}, stream=True)
    assert (opening.choices[0].delta.role, opening.choices[0].delta.content) == ("assistant", "")
    assert (end.choices[0].delta.content, end.choices[0].finish_reason) == (None, "length")


def test_logprobs(client):
    reply = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, max_tokens=2)
    first, second = reply.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("h", -1.5, [ord("h")])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("?", -0.1), ("h", -1.5), ("#", -9999.0)]
    assert (second.token, second.bytes) == ("\ufffd", [0xC3]), "half a character"
    bare = client.chat.completions.create(**ASK, logprobs=True, max_tokens=1)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


def test_sampling_fields_reach_the_engine(client, fake):
    client.chat.completions.create(
        **ASK,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop="x",
        max_completion_tokens=5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"65": 3},
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        tool_choice="none",
        top_logprobs=0,
        extra_body={
            "priority": 0,
            "bad_words": [],
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "speculative": False,
        },
    )
    params = fake.started[-1][1]
    assert (params.temperature, params.top_p, params.seed, params.stop, params.max_tokens) == (0.5, 0.9, 7, ("x",), 5)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (1, -1, {65: 3})
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (4, 0.1, 1.2, 2)
    assert (params.stop_token_ids, params.ignore_eos, params.speculative) == ((9,), True, False)


def test_content_parts_and_a_reply_sent_back(client, fake):
    reply = client.chat.completions.create(**ASK, max_tokens=1).choices[0].message
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="fake/model", messages=[*HELLO, reply, {"role": "user", "content": parts}])
    assert prompt_text(fake).endswith(
        "assistant\nh<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_options(client, fake):
    client.chat.completions.create(**ASK, extra_body={"add_generation_prompt": False})
    assert prompt_text(fake).endswith("hello<|im_end|>\n")
    unfinished = [*HELLO, {"role": "assistant", "content": "I th"}]
    client.chat.completions.create(
        model="fake/model",
        messages=unfinished,
        extra_body={"continue_final_message": True, "chat_template_kwargs": {"x": 1}},
    )
    assert prompt_text(fake).endswith("assistant\nI th")


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": ""}] * 2000, [{"role": "x" * 20_000, "content": ""}]]
)
def test_a_chat_long_in_any_way_is_written_beside_the_streams(http, fake, messages):
    threads = []

    class Noting:
        measure = byte_tokenizer().measure

        def write_chat(self, *_, **__):
            threads.append(threading.current_thread())
            return ""

        def encode_within(self, *_):
            return [65]

        def encode_all(self, texts, *_):
            return [[65] for _ in texts]

    fake.tokenizer = Noting()
    for asked in (messages, HELLO):
        assert http.post("/v1/chat/completions", json={"messages": asked}).status_code == 200
    assert [thread.name.startswith("jaxspec-tokenize") for thread in threads] == [True, False]


def test_no_argument_of_the_tokenizer_is_unknown():
    """A new one must be looked at: whether a client may set it decides how prompts are made."""
    assert reserved_template_variables() == {
        *("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }


@pytest.mark.parametrize("name", sorted(reserved_template_variables()))
def test_template_kwargs_of_the_tokenizer_are_refused(http, name):
    reply = http.post("/v1/chat/completions", json={"messages": HELLO, "chat_template_kwargs": {name: 1}})
    assert reply.status_code == 400 and name in reply.json()["error"]["message"]


def test_prompt_logprobs_are_a_field_of_the_chat(client):
    """Report them once, as vLLM does, however many choices there are."""
    asked = {**ASK, "max_tokens": 1, "n": 2, "extra_body": {"prompt_logprobs": 1}}
    reply = client.chat.completions.create(**asked).model_dump()
    first, second, *_ = reply["prompt_logprobs"]
    token = str(byte_tokenizer().encode("user")[0])
    assert first is None
    assert second[token] == {"logprob": -1.5, "rank": None, "decoded_token": "u"}
    assert second[str(ord("?"))] == {"logprob": -0.1, "rank": 1, "decoded_token": "?"}
    usage = {"stream_options": {"include_usage": True}}
    for options in ({}, usage):
        opening, *rest = [part.model_dump() for part in client.chat.completions.create(**asked, stream=True, **options)]
        assert opening["choices"][0]["delta"]["role"] == "assistant"
        assert opening["prompt_logprobs"] == reply["prompt_logprobs"]
        assert not any("prompt_logprobs" in part for part in rest)
    assert not any("prompt_logprobs" in choice for part in (reply, opening, *rest) for choice in part["choices"])


async def test_async_client_many_at_once(url):
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(index):
            stream = await client.chat.completions.create(**ASK, stream=True, max_tokens=index + 1)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*map(one, range(16)))
    assert texts == [TEXT.encode()[: index + 1].decode("utf-8", "ignore") for index in range(16)]
