"""`jaxspec chat`: a conversation with a server and with an engine of the process, both the fake one."""

import io

import pytest

from server.cli import chat
from tests.server.fake import TEXT, FakeLLM, byte_tokenizer

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
    assert "Connection refused" in capsys.readouterr().err
    typed("late failure")
    assert chat.main([url]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
