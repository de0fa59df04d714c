"""`jaxspec chat`: a conversation with a server and with an engine of the process, both the fake one, and with a tiny
model; `jaxspec send-one`, which shares its HTTP."""

import io
import json

import pytest

from server.cli import chat, send_one
from tests.server.fake import TEXT, FakeLLM, byte_tokenizer
from tests.support.engines import SMALL, checkpoint

LENGTH = len(TEXT.encode())


@pytest.fixture
def typed(monkeypatch):
    def lines(*each):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in each)))

    return lines


def prompts(fake):
    return [byte_tokenizer().decode(prompt, skip_special_tokens=False) for prompt, _ in fake.started]


@pytest.mark.parametrize("where", ["server", "here"])
def test_a_conversation_streams_and_ends_with_its_figures(url, fake, typed, monkeypatch, capsys, where):
    engine = fake if where == "server" else FakeLLM()
    monkeypatch.setattr(chat, "AsyncLLM", lambda **options: engine)
    monkeypatch.setattr(engine, "close", lambda *_: True, raising=False)
    typed("hello", "", "again", "/clear", "anew", "/exit", "never")
    target = [f"{url}/v1"] if where == "server" else []
    assert chat.main([*target, "--system", "Be brief.", "--max-tokens", "99", "--temperature", "0.5"]) == 0
    first, second, third = prompts(engine)
    assert "system\nBe brief." in first and first.endswith("user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert f"assistant\n{TEXT}<|im_end|>\n<|im_start|>user\nagain" in second
    assert "hello" not in third and "Be brief." in third
    assert {params.temperature for _, params in engine.started} == {0.5}
    said = capsys.readouterr().out
    assert said.count(TEXT) == 3 and said.count(f"[{LENGTH} tokens, ") == 3 and said.count("accept len 2.25]") == 3


def test_errors_are_words(url, fake, typed, capsys):
    typed(300 * "a")
    assert chat.main([url]) == 1
    assert "answered 400: the prompt has" in capsys.readouterr().err
    typed("hello")
    assert chat.main(["http://127.0.0.1:9"]) == 1
    assert "can't be reached ([Errno 111] Connection refused); start" in capsys.readouterr().err
    typed("late failure")
    assert chat.main([url]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_model_is_loaded_and_answers(typed, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if value is not True]
    flags += [f"--{name.replace('_', '-')}" for name, value in SMALL.items() if value is True]
    typed("hi", "so")
    assert chat.main([checkpoint(), "--draft=none", "--max-tokens=6", "--temperature=0", *flags]) == 0
    assert capsys.readouterr().out.count("\n[6 tokens, ") == 2


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"]])
def test_one_prompt_and_its_figures(url, fake, capsys, flags):
    assert send_one.main([url, "--max-tokens", "40", *flags]) == 0
    text, head, figures = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert text == TEXT and head.split()[:2] == ["latency", "(s)"]
    latency, tokens, accept, speed = map(float, figures.split())
    assert (
        (tokens, accept) == (LENGTH, 1.8) and latency > 0 and speed == pytest.approx(tokens / latency, rel=0.3)
    )  # both are rounded
    (prompt,), params = prompts(fake)[-1:], fake.started[-1][1]
    assert prompt == (send_one.IN_JSON if "--json" in flags else send_one.PROMPT)
    assert params.temperature == 0 and (params.structured is not None) == ("--json" in flags)


def test_one_picture_is_sent_as_sglangs_is(monkeypatch, tmp_path, capsys):
    (picture := tmp_path / "a.png").write_bytes(b"pixels")
    sent = []
    reply = {"text": "A cat.", "meta_info": {"completion_tokens": 3}}
    monkeypatch.setattr(send_one, "events", lambda request: sent.append(json.loads(request.data)) or [reply])
    for source, data in ((str(picture), "cGl4ZWxz"), ("https://a.org/b.png", "https://a.org/b.png")):
        assert send_one.main(["http://127.0.0.1:9", "--image", source]) == 0
        assert sent[-1]["image_data"] == data and sent[-1]["text"] == send_one.OF_IMAGE
    assert send_one.main(["http://127.0.0.1:9", "--image", str(tmp_path / "none.png")]) == 1
    assert "none.png: No such file" in capsys.readouterr().err


def test_a_prompt_that_fails_says_why(url, capsys):
    assert send_one.main([url, "--prompt", 300 * "a"]) == 1
    assert "answered 400: " in capsys.readouterr().err
