"""`/tokenize`, `/detokenize` and `/tokenizer_info`, vLLM's."""

import httpx
import pytest

from server.app import create_app
from tests.server.fake import CONTEXT, FakeLLM, byte_tokenizer
from tests.server.live import serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_prompt_is_tokenised_and_decoded_back(http):
    reply = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert reply == {"count": 3, "max_model_len": CONTEXT, "tokens": [104, 195, 169], "token_strs": ["h", "Ã", "©"]}
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "hé"}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None


def test_a_chat_has_the_tokens_that_a_request_with_it_has(http, fake):
    for options in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 1}, "max_tokens": 3}):
        http.post("/v1/chat/completions", json=CHAT | options)
        reply = http.post("/tokenize", json=CHAT | options).json()
        assert reply["tokens"] == fake.started[-1][0] and reply["count"] == len(reply["tokens"])
    special = http.post("/detokenize", json={"tokens": reply["tokens"]}).json()["prompt"]
    assert special.startswith("<|im_start|>user\nhi")


def test_the_tokenizer_describes_itself(http):
    info = http.get("/tokenizer_info").json()
    assert info["chat_template"] == byte_tokenizer().chat_template and "Tokenizer" in info["tokenizer_class"]
    assert info["eos_token"] == "<|im_end|>" and not any("/" in str(info.get(key)) for key in ("name_or_path",))


@pytest.mark.parametrize("path,body,param,says", [
    ("/tokenize", {}, "prompt", "neither was given"),
    ("/tokenize", CHAT | {"prompt": "a"}, "prompt", "both was given"),
    ("/tokenize", CHAT | {"add_special_tokens": True}, "add_special_tokens", "template"),
    ("/tokenize", {"messages": []}, "messages", "at least one"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "outside the vocabulary"),
    ("/detokenize", {"tokens": [10**6]}, "tokens", "outside the vocabulary"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "integer"),
])  # fmt: skip
def test_bad_requests_are_named(http, path, body, param, says):
    reply = http.post(path, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert says in reply.json()["error"]["message"]


def test_another_model_is_not_found(http):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert http.post(path, json=body | {"model": "other"}).status_code == 404


def test_without_a_tokenizer_there_is_none_to_ask():
    with serving(create_app(FakeLLM(tokenizer=None))) as url:
        assert httpx.get(f"{url}/tokenizer_info").status_code == 404
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 404
