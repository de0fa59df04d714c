"""Chats in forms that templates write whole, with the rules of public templates."""

import pytest
from tokenizers import Tokenizer as Backend

from jaxspec.text import chat_forms
from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer
from tests.support.tokenizers import MERGED
from tests.text import templates

BACKEND = MERGED._fast.backend_tokenizer.to_str()
SYSTEM, DEVELOPER = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}
USER, ANSWER = {"role": "user", "content": "What now?"}, {"role": "assistant", "content": "<think>hm</think>\n\nhello"}
CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "8", "tool_call_id": "a1"}
NAMES = templates.QWEN3.replace("\n{{- call.function.arguments | tojson }}", "")  # and no arguments
FIRST_CALL = templates.QWEN3.replace("message.tool_calls or ()", "message.tool_calls[:1]")
WRITERS = ("QWEN25", "QWEN3", "QWEN3_CODER", "LLAMA3", "MISTRAL", "GEMMA", "DEEPSEEK", "FIRST_SYSTEM")


def written(template: str, *messages: dict, **options) -> str:
    source = getattr(templates, template, template)
    return Tokenizer.from_backend(Backend.from_str(BACKEND), source).write_chat(list(messages), **options)


@pytest.mark.parametrize("template", WRITERS)
@pytest.mark.parametrize(
    "chat",
    [
        [DEVELOPER, USER],
        [SYSTEM, DEVELOPER, USER],
        [USER, ANSWER, DEVELOPER, USER],
        [SYSTEM, USER, ANSWER, SYSTEM, USER],
        [DEVELOPER, USER, ANSWER, USER, SYSTEM],
        [USER, DEVELOPER],
    ],
    ids=lambda chat: " ".join(message["role"] for message in chat),
)
def test_instructions_reach_the_prompt_wherever_they_stand(template, chat):
    text = written(template, *chat)
    for message in (SYSTEM, DEVELOPER):
        assert (message["content"] in text) == (message in chat)
    assert text.count("What now?") == chat.count(USER) and "developer" not in text


def test_developers_stay_where_the_template_knows_them():
    knows = "{% if m.role in ('developer', 'user') %}{{ m.role + ':' + m.content }}{% endif %}"
    knows = "{% for m in messages %}" + knows + "{% endfor %}"
    assert written(knows, DEVELOPER, USER) == "developer:Be kind.user:What now?"
    assert written(knows.replace("'developer'", "'system'"), DEVELOPER, USER) == "system:Be kind.user:What now?"


def test_folded_instructions_keep_their_order():
    assert written("FIRST_SYSTEM", SYSTEM, USER, ANSWER, DEVELOPER, USER).startswith("Be brief.\n\nBe kind.user:")
    assert "<start_of_turn>user\nBe brief.\n\nWhat now?<end_of_turn>" in written("GEMMA", SYSTEM, USER)
    middle = written("QWEN3", SYSTEM, USER, ANSWER, SYSTEM, USER)
    assert middle.count("<|im_start|>system\nBe brief.") == 2, "which this template takes where it stands"


@pytest.mark.parametrize("template", ["QWEN3", "LLAMA3", "MISTRAL", "QWEN25"])
def test_text_beside_calls_reaches_the_prompt(template):
    text = written(template, USER, CALLS, RESULT)
    assert text.index("What now?") < text.index("I look.") < text.index("8")


@pytest.mark.parametrize("template, role", [("QWEN3", "critic"), ("DEEPSEEK", "tool"), ("QWEN25", "function")])
def test_a_message_that_the_template_drops_is_refused(template, role):
    dropped = {"role": role, "content": " Mind the gap, please. "}
    with pytest.raises(TokenizerError, match=rf"doesn't write the message of role '{role}' that begins 'Mind the gap"):
        written(template, USER, dropped, ANSWER)
    assert "What now?" in written(template, USER, {**dropped, "content": "  "}), "without text nothing is lost"


def call(name: str, arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    "template, calls, lost",
    [
        ("DEEPSEEK", [CALL], "the call of 'f'"),
        ("DEEPSEEK", [{"function": {"name": "f"}}], "the call of 'f'"),
        (NAMES, [CALL], "the arguments in the call of 'f'"),
        (NAMES, [call("f", "x = 1")], "the arguments in the call of 'f'"),
        (FIRST_CALL, [CALL, call("g", {})], "the call of 'g'"),
    ],
)
def test_a_call_that_the_template_drops_is_refused(template, calls, lost):
    asks = {"role": "assistant", "content": "", "tool_calls": calls}
    assert written(template, USER, {**asks, "tool_calls": []}), "without calls nothing is lost"
    with pytest.raises(TokenizerError, match=f"the chat template doesn't write {lost}; leave it out"):
        written(template, USER, asks)


def test_calls_without_arguments_lose_none():
    asks = {"role": "assistant", "content": "", "tool_calls": [call("list", {})]}
    assert "<tool_call>list<|im_end|>" in written(NAMES, USER, asks)
    with pytest.raises(TokenizerError, match="the arguments"):
        written(NAMES, USER, {**asks, "tool_calls": [call("list", {"of": 1})]})


def test_a_short_text_isnt_found_in_another():
    with pytest.raises(TokenizerError, match="role 'critic'"):
        written("QWEN3", USER, {"role": "critic", "content": "now"})


def test_the_templates_complaint_is_told():
    with pytest.raises(TokenizerError, match="conversation roles must alternate"):
        written("MISTRAL", USER, USER)


def test_arguments_that_are_no_object_reach_the_prompt():
    broken = {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"x": '}}]}
    assert '"{\\"x\\": "' in written("QWEN25", USER, broken, RESULT)
    assert '<parameter=arguments>{"x": ' in written("QWEN3_CODER", USER, broken, RESULT)
    shown = "{{- call.function.arguments | tojson }}"
    mappings = templates.QWEN3.replace(shown, "{%- if call.function.arguments is mapping %}" + shown + "{% endif %}")
    assert '<tool_call>f{"arguments": "{\\"x\\": "}' in written(mappings, USER, broken, RESULT)


def test_a_shape_is_probed_once(monkeypatch):
    monkeypatch.setattr(chat_forms, "_forms", {})
    tokenizer = Tokenizer.from_backend(Backend.from_str(BACKEND), templates.GEMMA)
    rendered, apply = [], tokenizer._fast.apply_chat_template
    tokenizer._fast.apply_chat_template = lambda *args, **more: rendered.append(args) or apply(*args, **more)
    tokenizer.write_chat([SYSTEM, USER])
    probes, rendered[:] = len(rendered), []
    assert "other" in tokenizer.write_chat([{**SYSTEM, "content": "other"}, USER]) and probes > len(rendered) == 1
    monkeypatch.setattr(chat_forms, "MAX_SHAPES", 2)
    for n in range(1, 5):
        tokenizer.write_chat([USER, ANSWER] * n)
    assert len(chat_forms._forms) == 2
