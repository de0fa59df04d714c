"""Texts collected for training: what the trainer reads, of whom it was allowed, and nothing else."""

import json
import logging
import stat

import httpx
import pytest

from jaxspec.train.data import holds_texts, read_texts
from server.app import create_app
from server.cli.options import UsageError, parse
from server.prompt_log import PromptLog
from tests.server.fake import FakeLLM
from tests.server.live import serving
from tests.support.tiny import BYTE_VOCAB

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


def collect(path, *requests):
    """Send these to a server that keeps its texts at `path`: the status of each, and the prompts of the engine."""
    kept, llm = PromptLog(path), FakeLLM()
    with serving(create_app(llm, prompt_log=kept)) as url, httpx.Client(base_url=url) as http:
        codes = [http.post(route, json=body).status_code for route, body in requests]
    kept.close()
    return codes, [prompt for prompt, _ in llm.started]


def test_the_trainer_reads_what_the_server_wrote(tmp_path):
    path = tmp_path / "log.jsonl"
    completion = {"prompt": ["one", "three"], "n": 2, "max_tokens": 4}
    codes, prompts = collect(
        path,
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", completion),
    )
    assert codes == [200] * 3 and holds_texts(path)
    texts = read_texts(path, BYTE_VOCAB)
    said = list(FakeLLM().said.encode())
    assert [text.category for text in texts] == ["/v1/chat/completions"] * 2 + ["/v1/completions"] * 4
    for text, prompt, count in zip(texts[:2], prompts, (5, 5), strict=False):
        assert text.tokens.tolist() == prompt + said[:count]
        assert text.answers == ((len(prompt), len(prompt) + count),)
    assert sorted(bytes(text.tokens[: text.answers[0][0]].tolist()) for text in texts[2:]) == [
        b"one", b"one", b"three", b"three"
    ]  # fmt: skip


def test_what_is_not_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    codes, _ = collect(
        path,
        ("/v1/chat/completions", CHAT | {"store": False}),
        ("/v1/completions", {"prompt": "x", "store": False}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "store": False}),
        ("/v1/completions", {"prompt": "late failure"}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    )
    assert codes == [200, 200, 200, 500, 200, 400] and path.read_text() == ""


def test_the_file_is_its_owners_and_is_appended_to(tmp_path):
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        collect(path, ("/v1/chat/completions", CHAT | {"store": True}))
    assert len(path.read_text().splitlines()) == 2 and all(map(json.loads, path.read_text().splitlines()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_told_at_start(tmp_path):
    with pytest.raises(UsageError, match=r"--log-prompts .*no.*log: No such file or directory; name a file"):
        PromptLog(tmp_path / "no" / "log")
    assert parse([]).log_prompts is None


def test_a_full_disk_ends_the_log_and_not_the_server(caplog):
    kept = PromptLog("/dev/full")
    with serving(create_app(FakeLLM(), prompt_log=kept)) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200
    kept.close()
    assert any("no further text is written" in r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)
