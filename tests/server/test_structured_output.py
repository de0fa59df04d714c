"""Structured output over HTTP: every spelling means one grammar; the real engine keeps to it; tool calls read back."""

import asyncio
import json

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from jaxspec import AsyncLLM, SamplingParams, StructuredOutput
from jaxspec.structured import grammar
from jaxspec.structured.grammar import Grammars
from server.app import create_app
from server.chat.speech import Formats, Speech
from server.parsers import join
from server.protocol import ChatRequest
from tests.server.fake import byte_tokenizer
from tests.server.live import ENGINE, serving
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
ASK = {"model": "fake/model", "messages": [{"role": "user", "content": "hello"}]}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
BOTH = [{"regex": "a", "ebnf": 'root ::= "a"'}, {"response_format": NAMED, "guided_choice": ["a"]}]


@pytest.mark.parametrize("fields,expected", [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "regex": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json": True}),
    ({"response_format": NAMED}, {"json": SCHEMA, "strict": True}),
    ({"response_format": NAMED, "guided_whitespace_pattern": "x"},
     {"json": SCHEMA, "strict": True, "whitespace_pattern": "x"}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object", "schema": None, "json_schema": None}}, {"json": True}),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}},
     {"json": SCHEMA, "whitespace_pattern": ""}),
    ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, {"regex": "a+"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json": True}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "x"}}, {"json": SCHEMA, "whitespace_pattern": "x"}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, {"json": SCHEMA, "whitespace_pattern": ""}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
])  # fmt: skip
def test_spellings(client, fake, fields, expected):
    client.chat.completions.create(**ASK, extra_body=fields)
    assert fake.started[-1][1].structured == (expected and StructuredOutput(**expected))


@pytest.mark.parametrize("fields,param,words", [
    *((fields, list(fields)[1], "send one") for fields in BOTH),
    ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object, json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name and schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name", "string"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "scheme": {}}}},
     "response_format.json_schema.scheme", "scheme"),
    ({"response_format": 5}, "response_format", "must be an object, got 5"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
     "response_format.json_schema.schema", "json_schema.schema must be a JSON schema, which is an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{"}}},
     "response_format.json_schema.schema", "json_schema.schema is not a JSON text"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "structured_outputs.choice takes a list"),
    ({"structured_outputs": {"json": True, "json_object": 5}}, "structured_outputs.json_object", "got 5"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": 1}},
     "structured_outputs.disable_any_whitespace", "true or false, got 1"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
     "structured_outputs.disable_any_whitespace", "without whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace", "goes with json"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "additionalProperties: false"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "of type text has an unknown"),
    ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict", "known: type, schema"),
    ({"response_format": {**NAMED, "strict": True}}, "response_format.strict", "known: type, json_schema"),
    ({"response_format": {"type": ["text"]}}, "response_format.type", "must be one of"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs a JSON schema beside it"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs a JSON schema"),
    ({"tools": [{"type": "function", "function": {"name": "f"}, "strct": True}]}, "tools[0].strct", "unknown"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function":
      {"name": "f", "arguments": "{}"}}}, "tool_choice.function.arguments", "unknown field"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"guided_choice": []}, "guided_choice", "guided_choice takes a list of non-empty strings to choose from"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "got '' at place 1"),
    ({"json_schema": "{"}, "json_schema", "json_schema is not a JSON text"),
    ({"guided_json": [1]}, "guided_json", "guided_json: must be a JSON schema, as an object or as text, got [1]"),
    ({"guided_regex": ""}, "guided_regex", "guided_regex must be a non-empty string"),
    ({"structured_outputs": {"json": {"a": [[]]}, "whitespace_pattern": 3}},
     "structured_outputs.whitespace_pattern", "string"),
])  # fmt: skip
def test_what_is_refused(client, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, extra_body=fields)
    assert caught.value.param == param and words in caught.value.body["message"]


# -- the real engine ---------------------------------------------------------------------------------------------------


class Item(BaseModel):
    name: str = Field(max_length=5)
    sizes: list[int] = Field(max_length=2)


@pytest.fixture(scope="module")
def engine_url():
    folder = tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, max_position_embeddings=4096, num_hidden_layers=1)
    llm = AsyncLLM(str(folder), "ngram", **ENGINE)
    with serving(create_app(llm, served_name="tiny")) as address:
        yield address
    llm.close()


def test_a_batch_compiles_its_grammar_once_and_beside_the_event_loop(engine_url, monkeypatch):
    """Neither the prompts nor the choices of each compile it again."""
    made, making, matcher = [], Grammars._compile, grammar.LLMatcher
    note = lambda: made.append(asyncio._get_running_loop())  # noqa: E731
    monkeypatch.setattr(Grammars, "_compile", lambda *args: (note(), making(*args))[1])
    monkeypatch.setattr(grammar, "LLMatcher", lambda *args, **options: (note(), matcher(*args, **options))[1])
    schema = {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(1000)}}
    body = {"model": "tiny", "prompt": [[65 + i] for i in range(4)], "n": 2, "max_tokens": 1, "guided_json": schema}
    reply = httpx.post(f"{engine_url}/v1/completions", json=body, timeout=100)
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 8
    assert made == [None, None]  # proven by another process, then compiled here


def test_who_meets_a_busy_compiler_is_asked_to_come_again(engine_url, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_COMING", 0)
    body = {"model": "tiny", "prompt": [65], "max_tokens": 1}
    refused = httpx.post(f"{engine_url}/v1/completions", json={**body, "regex": "never seen"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["code"] == "busy"
    assert httpx.post(f"{engine_url}/v1/completions", json=body, timeout=100).status_code == 200


@pytest.mark.parametrize("fields,param", [
    ({"guided_json": '{"multipleOf": 1e999}'}, "guided_json"),
    ({"guided_json": '{"multipleOf": NaN}'}, "guided_json"),
    ({"guided_json": '{"items": {"pattern": "a{%s}"}}' % ("9" * 5000)}, "guided_json"),
    ({"structured_outputs": {"regex": "(ab){1,%s}" % ("9" * 5000)}}, "structured_outputs.regex"),
    ({"guided_json": {}, "guided_whitespace_pattern": " ?" * 1000}, "guided_json.whitespace_pattern"),
])  # fmt: skip
def test_what_can_not_be_computed_is_the_clients_mistake(engine_url, fields, param):
    body = {"model": "tiny", "prompt": [65], "max_tokens": 1, **fields}
    reply = httpx.post(f"{engine_url}/v1/completions", json=body, timeout=100)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


@pytest.fixture
def real(engine_url):
    with OpenAI(base_url=f"{engine_url}/v1", api_key="none", max_retries=0) as client:
        yield client


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "an item"}], "seed": 1}


def test_parse_gives_the_model_of_the_official_client(real):
    bias = {str(ord(char)): 8 for char in '"]}'}  # so that a random model comes to an end
    reply = real.chat.completions.parse(**CHAT, response_format=Item, max_tokens=200, logit_bias=bias)
    assert isinstance(reply.choices[0].message.parsed, Item)


def test_streams_and_completions_keep_to_the_grammar(real):
    asked = {"extra_body": {"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, "max_tokens": 30}
    whole = real.completions.create(model="tiny", prompt=["x", "y"], **asked)
    chunks = real.chat.completions.create(**CHAT, stream=True, **asked)
    texts = [choice.text for choice in whole.choices]
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    for text in texts:
        assert len(text) == 6 and set(text[:3]) <= set("ab") and text[3] == "-" and text[4:].isdigit()


@pytest.mark.parametrize("fields,param,words", [
    ({"regex": "(a"}, "regex", "unclosed"),
    ({"regex": "(a{1000}){1000}"}, "regex", "1000000 characters"),
    ({"guided_json": {"type": "strange"}}, "guided_json", "strange"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"multipleOf": 1e9}}}},
     "response_format.json_schema.schema", "multipleOf"),
    ({"ebnf": "root ::= ("}, "ebnf", "Expected"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar", "missing"),
])  # fmt: skip
def test_grammars_that_do_not_compile_are_named(real, engine_url, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        real.chat.completions.create(**CHAT, extra_body=fields)
    assert caught.value.param == param and words in caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]
    assert httpx.get(f"{engine_url}/health").status_code == 200


# -- demands and reasoning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_demanded_call_is_made(real, choice, stream):
    tools = [{"type": "function", "function": {"name": "now", "parameters": SCHEMA | {"properties": {"a": SMALL}}}}]
    asked = {**CHAT, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 150}
    if stream:
        deltas = [chunk.choices[0].delta for chunk in real.chat.completions.create(**asked, stream=True)]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
    else:
        (call,) = real.chat.completions.create(**asked).choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "now" and 0 <= json.loads(arguments)["a"] <= 9


NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def test_a_demanded_call_comes_in_place_of_a_format(real):
    asked = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False, "response_format": NAMED}
    (call,) = real.chat.completions.create(**CHAT, **asked, max_tokens=150).choices[0].message.tool_calls
    assert call.function.name == "now"


@pytest.mark.parametrize("format,call", [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
])  # fmt: skip
def test_beside_tools_a_reply_follows_the_format_or_calls(format, call):
    """Agents ask for a form of their last answer, and for tools on the way to it, as at OpenAI."""
    tokenizer = byte_tokenizer()
    speech = Speech("qwen3", format, [NOW])
    wanted = speech.sampling(SamplingParams(structured=StructuredOutput(json=SCHEMA))).structured
    compiled = Grammars(tokenizer, BYTE_VOCAB, [258]).compile(wanted)
    said = ('{"a":1}', call, f"{call}\n{call}", f"<think>hm</think>\n\n{call}")
    for text in (*said, "now", '{"b":1}', f"<think>hm{call}"):
        (_, matcher), tokens = compiled.take(), tokenizer.encode(text)
        whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert whole == (text in said), text


@pytest.mark.parametrize("thinking,grammar_is", [
    (None, ("<think>", "</think>")), ("prompt", ("", "</think>")), ("off", None),
])  # fmt: skip
def test_a_grammar_is_of_the_answer_behind_the_reasoning(thinking, grammar_is):
    params = Speech("qwen3", None, thinking=thinking).sampling(SamplingParams(structured=StructuredOutput(json=SCHEMA)))
    assert params.structured.prefix == grammar_is


@pytest.mark.parametrize("begun,thinking", [
    ("It is", "off"), ("<think>hm</think>\nIt is", "off"), ("<think>\nhm", "prompt"), (None, "off"),
])  # fmt: skip
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_an_answer_that_goes_on_is_past_its_reasoning(reasoning, begun, thinking):
    """So its text is content, and a grammar is of it."""
    turns = [*ASK["messages"], {"role": "assistant", "content": begun}]
    body = ChatRequest.model_validate({"messages": turns, "continue_final_message": True})
    tokenizer = byte_tokenizer()
    speech = Formats(reasoning, None, True).speech(body, tokenizer.encode(begun or ""), tokenizer)
    read = join(speech.parser(SamplingParams()).push("so"))
    assert speech.thinking == thinking and read["content" if thinking == "off" else "reasoning_content"] == "so"


@pytest.mark.parametrize("markers,texts,others", [
    (("<think>", "</think>"), ['{"a":1}', '<think>{"a"</think>\n\n{"a":1}'], ['hm{"a":1}', '<think>{"a":1}']),
    (("", "</think>"), ['</think>{"a":1}', 'hm</think>\n{"a":1}'], ['{"a":1}']),
    (("<think>", "<|im_start|>"), ['<think>hm<|im_start|>{"a":1}'], ['<think></think>{"a":1}']),
])  # fmt: skip
@pytest.mark.parametrize("wanted", [
    StructuredOutput(json=SCHEMA), StructuredOutput(regex='\\{"a":1\\}'), StructuredOutput(choice=['{"a":1}', "b"]),
    StructuredOutput(grammar='start: "{" x "1}"\nx: "\\"a\\":"'),
    StructuredOutput(grammar='root ::= "{" x "1}"\nx ::= "\\"a\\":"'),
])  # fmt: skip
def test_reasoning_may_come_before(wanted, markers, texts, others):
    tokenizer = byte_tokenizer()
    compiled = Grammars(tokenizer, BYTE_VOCAB, [258]).compile(wanted.after(*markers))
    for text in (*texts, *others):
        (_, matcher), tokens = compiled.take(), tokenizer.encode(text)
        whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert whole == (text in texts), text
