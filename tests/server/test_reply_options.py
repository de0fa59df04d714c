"""Optional parts of a response: token ids, the names of tokens, and speculation's figures."""

import json

import pytest

from jaxspec.config.request import Delta, RequestMetrics
from server.replies.logprobs import Offsets
from server.replies.speculation import Speculation
from tests.server.fake import TEXT, byte_tokenizer

PATHS = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}, "/v1/completions": {"prompt": "hi"}}
both = pytest.mark.parametrize("path", PATHS)


def events(http, path, body):
    reply = http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    *chunks, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert done == "[DONE]"
    return list(map(json.loads, chunks))


@both
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_speculation_is_told_once_at_the_end(http, path, fields):
    """vLLM's shape. The fake engine says of each completion: 4 drafts of 8 tokens, of which 0, 1, 2 and 2 accepted."""
    n = fields.get("n", 1)
    expected = {
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 0.625,
        "acceptance_histogram": [n, n, 2 * n],
        "num_spec_steps": 4 * n,
        "num_accepted_draft_tokens": 5 * n,
        "num_draft_tokens": 8 * n,
        "num_spec_tokens": 2,
    }
    whole = http.post(path, json=PATHS[path] | {"n": n}).json()
    assert whole["metrics"] == {"speculative_decoding": expected}
    *chunks, last = events(http, path, PATHS[path] | fields)
    assert last["metrics"] == whole["metrics"] and not any("metrics" in chunk for chunk in chunks)
    assert len(last["choices"]) == ("stream_options" not in fields), "in the chunk of the usage, if there is one"


@both
def test_without_drafts_there_are_no_figures_of_speculation(http, path):
    body = PATHS[path] | {"speculative": False}
    assert "metrics" not in http.post(path, json=body).json()
    assert not any("metrics" in chunk for chunk in events(http, path, body))


VERSIONED = PATHS | {
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [104], "sampling_params": {}},
    "/generate": {"text": "hi"},
}


@pytest.mark.parametrize("path", VERSIONED)
def test_every_reply_says_which_weights_made_it(http, path):
    whole = http.post(path, json=VERSIONED[path]).json()
    assert whole.get("meta_info", whole)["weight_version"] == "default"
    streamed = http.post(path, json=VERSIONED[path] | {"stream": True}).text
    assert streamed.count('"weight_version":"default"') == 1


def test_completions_without_drafts_count_nothing():
    figures = Speculation()
    for drafted, histogram in ((0, []), (6, [1, 0, 1]), (0, [0, 0, 0]), (3, [0, 1, 0])):
        figures.add(RequestMetrics(drafted_tokens=drafted, acceptance_histogram=histogram))
    assert (figures.drafts, figures.accepted, figures.drafted, figures.histogram) == (3, 3, 9, [1, 1, 1])
    assert Speculation().fields() == {}


@both
@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_of_prompts_and_choices(http, fake, path, n):
    """Streamed, each token comes with the delta that has it, though its text may come later."""
    body = PATHS[path] | {"return_token_ids": True, "n": n, "max_tokens": 7}
    whole = http.post(path, json=body).json()
    prompt = fake.started[-1][0]
    expected = list(TEXT.encode()[:7])
    assert [choice["token_ids"] for choice in whole["choices"]] == [expected] * n
    places = [whole] if path.endswith("chat/completions") else whole["choices"]
    assert [place["prompt_token_ids"] for place in places] == [prompt] * len(places)
    chunks = events(http, path, body)
    for index in range(n):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == expected
    first = chunks[0] if path.endswith("chat/completions") else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt


@both
def test_without_asking_there_are_no_token_ids(http, path):
    assert "token_ids" not in http.post(path, json=PATHS[path]).text
    assert "token_ids" not in http.post(path, json=PATHS[path] | {"stream": True}).text


def test_tokens_are_named_by_their_ids(http):
    body = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    chat = http.post("/v1/chat/completions", json=PATHS["/v1/chat/completions"] | body | {"logprobs": True}).json()
    first, second = chat["choices"][0]["logprobs"]["content"]
    assert (first["token"], second["token"]) == ("token_id:104", "token_id:195")
    assert (first["bytes"], second["bytes"]) == ([104], [195])
    text = http.post("/v1/completions", json={"prompt": "hi", "logprobs": 2} | body).json()["choices"][0]["logprobs"]
    assert text["tokens"] == ["token_id:104", "token_id:195"] and text["text_offset"] == [0, 1]
    assert set(text["top_logprobs"][0]) == {"token_id:63", "token_id:104"}


@both
def test_special_tokens_and_stop_strings_are_the_engines_to_keep(http, fake, path):
    http.post(path, json=PATHS[path] | {"skip_special_tokens": False, "include_stop_str_in_output": True})
    http.post(path, json=PATHS[path] | {"spaces_between_special_tokens": True})
    (_, kept), (_, default) = fake.started
    assert (kept.skip_special_tokens, kept.include_stop_str_in_output) == (False, True)
    assert (default.skip_special_tokens, default.include_stop_str_in_output) == (True, False)
    refused = http.post(path, json=PATHS[path] | {"spaces_between_special_tokens": False})
    assert refused.status_code == 400 and "spaces_between_special_tokens" in refused.text


def test_offsets_count_the_special_tokens_that_are_shown():
    special, names = byte_tokenizer().eos_token_ids[0], byte_tokenizer()
    shown, hidden = Offsets(names, skip=False), Offsets(names)
    assert [shown.take(token) for token in (special, 65)] == [0, len(names.token_text(special))]
    assert [hidden.take(token) for token in (special, 65)] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_a_request_aborted_before_its_prompt_is_known_is_answered(http, fake, fields, stream, monkeypatch):
    async def aborted(prompt, params):
        metrics = RequestMetrics(latency=0.1, prompt_tokens=len(prompt))
        yield Delta("id", 0, finish_reason="abort", metrics=metrics)

    monkeypatch.setattr(fake, "_deltas", aborted, raising=False)
    reply = http.post("/v1/completions", json={"prompt": "hi", "stream": stream} | fields)
    assert reply.status_code == 200 and '"finish_reason":"abort"' in reply.text
