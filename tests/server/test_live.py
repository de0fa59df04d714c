"""The official client against the real engine: a tiny random model, a byte-level tokenizer, the ngram drafter."""

import asyncio
import json
import os

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jaxspec import AsyncLLM
from jaxspec.replicas.data_parallel import DataParallelLLM
from server.app import create_app
from tests.server.live import ENGINE, meanwhile, serving, wait_for
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

CHAT = [{"role": "user", "content": "say something"}]
LONG = {"prompt": "abcabcabcabc", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm():
    """One engine, or those of $JAXSPEC_LIVE, which has options more: `{"tp_size": 4}` or `{"dp_size": 2}`."""
    more = json.loads(os.environ.get("JAXSPEC_LIVE", "{}"))
    make = DataParallelLLM if "dp_size" in more else AsyncLLM
    llm = make(
        str(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, max_position_embeddings=4096, num_hidden_layers=1)),
        "ngram",
        **ENGINE | more,
    )
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def url(llm):
    with serving(create_app(llm, served_name="tiny", rollout_routes=True)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def pages_balance(llm):
    yield
    wait_for(lambda: idle(llm))


def idle(llm):
    stats = llm.stats()
    used = stats["total_pages"] - stats["free_pages"] - stats["cached_pages"]
    return stats["num_running"] == stats["num_waiting"] == used == 0


def complete(client, prompt="abcabcabcabc", **asked):
    return client.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 20, "temperature": 0, **asked})


def test_chat_streamed_and_whole(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 24
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_speculation_changes_nothing(client):
    plain = complete(client, max_tokens=64, extra_body={"speculative": False})
    assert complete(client, max_tokens=64).choices[0].text == plain.choices[0].text


def test_completions_of_several_prompts(client):
    alone = [complete(client, prompt).choices[0].text for prompt in ("abc", "xyz")]
    together = complete(client, ["abc", "xyz"], n=2)
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert together.usage.prompt_tokens == 6


def test_seeds(client):
    asked = {"temperature": 1.0, "n": 2, "extra_body": {"ignore_eos": True}}
    first, again, other = (complete(client, seed=seed, **asked) for seed in (1, 1, 2))
    texts = [[choice.text for choice in reply.choices] for reply in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_stop_strings(client):
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[5:7]
    cut = complete(client, max_tokens=40, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert complete(client, max_tokens=3).choices[0].finish_reason == "length"


def test_logprobs_and_echo(client):
    choice = complete(client, "abcd", logprobs=3, echo=True, max_tokens=6).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("abcd") and logprobs.tokens[:4] == list("abcd")
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])
    for chosen, top in zip(logprobs.token_logprobs[4:], logprobs.top_logprobs[4:], strict=True):
        assert chosen == max(top.values()), "greedy takes the likeliest"
    rest = complete(client, "abc", logprobs=0, max_tokens=1, logit_bias={str(ord("d")): 100}).choices[0].logprobs
    assert rest.token_logprobs[0] == pytest.approx(logprobs.token_logprobs[3], abs=1e-4), "prompt and output agree"


def test_a_prompt_is_scored(client):
    scored = complete(client, "abcd", logprobs=3, echo=True, max_tokens=0)
    longer = complete(client, "abcd", logprobs=3, echo=True, max_tokens=6).choices[0].logprobs
    logprobs = scored.choices[0].logprobs
    assert (scored.choices[0].text, scored.usage.completion_tokens) == ("abcd", 0)
    assert (logprobs.tokens, logprobs.token_logprobs) == (list("abcd"), longer.token_logprobs[:4])


def test_chat_logprobs(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert content
    for item in content:
        assert item.logprob == item.top_logprobs[0].logprob >= item.top_logprobs[1].logprob


def test_errors_of_the_engine(client):
    for asked, says in (
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 5000}, "context"),
        ({"prompt": [1, BYTE_VOCAB]}, "vocabulary"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": [BYTE_VOCAB]}}, "vocabulary"),
        ({"prompt": "a", "max_tokens": 5000}, "context"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=says):
                complete(client, stream=stream, **asked)


def test_a_good_request_is_undisturbed_by_bad_ones(client, url):
    good = lambda n: complete(client, max_tokens=n, extra_body={"ignore_eos": True}).choices[0].text  # noqa: E731
    expected = good(200)
    bad = ({"prompt": [BYTE_VOCAB]}, {"prompt": ""}, {"prompt": "a", "n": 0}, {"prompt": ["a", "x" * 5000]})
    with meanwhile(good, 200) as texts:
        while texts == [None]:
            for body in bad:
                assert httpx.post(f"{url}/v1/completions", json=body).status_code == 400
    assert texts == [expected]


def test_leaving_aborts(client, llm, url):
    before = llm.stats()["requests_total"].get("abort", 0)
    stream = client.completions.create(model="tiny", stream=True, n=2, **LONG)
    next(iter(stream))
    stream.close()
    wait_for(lambda: idle(llm))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model="tiny", **LONG)
    wait_for(lambda: idle(llm))
    assert llm.stats()["requests_total"]["abort"] == before + 3


async def test_many_clients_some_of_which_leave(client, llm, url):
    expected = complete(client, max_tokens=30).choices[0].text
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as many:

        async def one(index):
            stream = await many.completions.create(
                model="tiny", prompt="abcabcabcabc", max_tokens=30, temperature=0, stream=True
            )
            parts = []
            async for chunk in stream:
                parts.append(chunk.choices[0].text)
                if index % 3 == 0:
                    await stream.close()
                    return None
            return "".join(parts)

        texts = await asyncio.gather(*map(one, range(12)))
    assert [text for index, text in enumerate(texts) if index % 3] == [expected] * 8


def test_information(client, llm, url):
    complete(client)
    info = httpx.get(f"{url}/server_info").json()
    assert info["avg_spec_accept_length"] >= 1 and info["draft"] and info["engine"]["page_size"] == 8
    assert 'jaxspec_requests_total{reason="length"}' in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/health").status_code == 200
    wait_for(lambda: idle(llm))
    assert httpx.post(f"{url}/flush_cache").json() == {"flushed": True}
    assert llm.stats()["cached_pages"] == 0


def test_profile_is_a_trace_of_what_ran(client, url):
    assert httpx.post(f"{url}/stop_profile").status_code == 409
    assert httpx.post(f"{url}/start_profile", json={"activities": ["CPU"]}).json() == {"started": True}
    assert httpx.post(f"{url}/start_profile").status_code == 409
    complete(client)
    reply = httpx.post(f"{url}/stop_profile")
    assert "jaxspec-trace.json" in reply.headers["content-disposition"]
    events = reply.json()["traceEvents"]
    assert {"prompt", "length", "step"} <= {event["name"] for event in events}
    assert any(event["name"].startswith("round_") for event in events)
    assert httpx.post(f"{url}/stop_profile").status_code == 409
