"""`"token_sources": true`: chunks say how each token came, and the whole says the same."""

import httpx
import pytest

from jaxspec.config.request import TOKEN_SOURCES
from server.app import create_app
from tests.server.fake import TEXT, FakeLLM
from tests.server.live import serving

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chunks(client, body, path=CHATS):
    """The choices of all chunks of a stream."""
    return [
        choice
        for chunk in client.post(path, json={**body, "stream": True}).text.split("\n\n")
        if chunk.startswith("data: {")
        for choice in httpx.Response(200, content=chunk.removeprefix("data: ")).json()["choices"]
    ]


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, {"prompt": "hello"})])
def test_a_stream_says_what_the_whole_says(http, path, body):
    asked = {**body, "n": 2, "max_tokens": 17, "token_sources": True}
    whole = http.post(path, json=asked).json()["choices"]
    parts = chunks(http, asked, path)
    for index in range(2):
        told = [pair for part in parts if part["index"] == index for pair in part.get("token_sources", [])]
        assert told == whole[index]["token_sources"]
        assert [source for _, source in told] == [TOKEN_SOURCES[i % 4] for i in range(17)]
        said = whole[index]["message"]["content"] if path == CHATS else whole[index]["text"]
        assert "".join(text for text, _ in told) == said == TEXT[: len(said)]


def test_nothing_is_said_unasked(http):
    for body in (CHAT, {**CHAT, "token_sources": False}):
        assert "token_sources" not in http.post(CHATS, json=body).json()["choices"][0]
        assert not any("token_sources" in part for part in chunks(http, body))


def test_a_token_within_a_character_has_no_text_yet(http):
    told = http.post(CHATS, json={**CHAT, "token_sources": True}).json()["choices"][0]["token_sources"]
    assert [text for text, _ in told[:4]] == ["h", "", "é", "l"]


def test_what_is_not_shown_has_no_source(http):
    body = {"prompt": "hello", "echo": True, "max_tokens": 0, "token_sources": True}
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["token_sources"] == []


def test_without_a_tokenizer_ids_are_named():
    with serving(create_app(FakeLLM(tokenizer=None))) as url:
        body = {"prompt": [65], "max_tokens": 1, "token_sources": True}
        told = httpx.post(url + COMPLETIONS, json=body).json()["choices"][0]["token_sources"]
    assert told == [[f"token_id:{TEXT.encode()[0]}", "accepted"]]
