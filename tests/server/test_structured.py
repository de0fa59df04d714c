"""Structured output over HTTP: every spelling means one grammar; the real engine keeps to it; tool calls read back."""

import json
import random

import httpx
import jsonschema
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import OpenAI
from pydantic import BaseModel, Field

from jaxspec import AsyncLLM, RequestError, StructuredOutput
from jaxspec.structured.grammar import source
from server.app import create_app
from server.parsers.hermes import Hermes
from server.parsers.llama3_json import Llama3Json
from server.parsers.mistral import Mistral
from server.parsers.qwen3_coder import Qwen3Coder
from server.structured import tool_call_grammar
from tests.server.fake import byte_tokenizer
from tests.server.live import serving
from tests.tiny import BYTE_VOCAB, tiny_checkpoint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASK = {"model": "fake/model", "messages": [{"role": "user", "content": "hello"}]}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
BOTH = [{"regex": "a", "ebnf": 'root ::= "a"'}, {"response_format": NAMED, "guided_choice": ["a"]}]


@pytest.mark.parametrize("fields,expected", [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "regex": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json": True}),
    ({"response_format": NAMED}, {"json": SCHEMA}),
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
     "response_format.json_schema", "scheme"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "whitespace_pattern"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    ({"json_schema": "{"}, "json_schema", "not a JSON text"),
    ({"guided_json": [1]}, "guided_json", "guided_json"),
    ({"structured_outputs": {"json": {"a": [[]]}, "whitespace_pattern": 3}},
     "structured_outputs.whitespace_pattern", "string"),
])  # fmt: skip
def test_what_is_refused(client, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, extra_body=fields)
    assert caught.value.param.startswith(param) and words in caught.value.body["message"]


# -- the real engine ---------------------------------------------------------------------------------------------------


class Item(BaseModel):
    name: str = Field(max_length=5)
    sizes: list[int] = Field(max_length=2)


@pytest.fixture(scope="module")
def engine_url():
    folder = tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True)
    options = {"max_running_requests": 2, "max_total_tokens": 2048, "chunked_prefill_size": 64}
    llm = AsyncLLM(str(folder), "ngram", context_length=1024, skip_warmup=True, few_programs=True, **options)
    with serving(create_app(llm, served_name="tiny")) as address:
        yield address
    llm.close()


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
     "response_format", "multipleOf"),
    ({"ebnf": "root ::= ("}, "ebnf", "Expected"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs", "missing"),
])  # fmt: skip
def test_grammars_that_do_not_compile_are_named(real, engine_url, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        real.chat.completions.create(**CHAT, extra_body=fields)
    assert caught.value.param == param and words in caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]
    assert httpx.get(f"{engine_url}/health").status_code == 200


# -- tool calls --------------------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "required": ["query", "limit"], "additionalProperties": False,
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 50},
            "order": {"enum": ["up", "down"]},
            "where": {"type": "array", "items": {"$ref": "#/$defs/degrees"}, "maxItems": 2},
        },
        "$defs": {"degrees": {"type": "number", "minimum": -180}},
    }}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
PARSERS = {"hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral, "qwen3_coder": Qwen3Coder}


CLOSES = b"\n</parameter>\n"


def samples(structured, count=40):
    """Texts drawn from a grammar, all tokens alike."""
    tokenizer = LLTokenizer(byte_tokenizer().to_json(), n_vocab=BYTE_VOCAB, eos_token=258)
    rng = random.Random(0)
    for _ in range(count):
        matcher, tokens = LLMatcher(tokenizer, source(structured), log_level=0), []
        assert not matcher.is_error(), matcher.get_error()
        while not matcher.is_stopped() and len(tokens) < 2000:
            if rng.random() < 0.2 and matcher.validate_tokens(list(CLOSES)) == len(CLOSES):
                matcher.consume_tokens(list(CLOSES))
                tokens += CLOSES  # free text, which chance would never close
                continue
            bits = matcher.compute_bitmask()
            allowed = [t for t in range(BYTE_VOCAB) if bits[t >> 3] >> (t & 7) & 1]
            ends = [t for t in allowed if chr(t % 256) in '"]}<\n/' or t == 258]
            token = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
            if token == 258:
                break
            assert matcher.consume_token(token)
            tokens.append(token)
        if matcher.is_accepting():
            yield bytes(tokens).decode()


@pytest.mark.parametrize("named", [None, "now", "find"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("format", PARSERS)
def test_calls_that_the_grammar_allows_are_read_back(format, parallel, named):
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    counts = []
    for text in samples(tool_call_grammar(TOOLS, format, named, parallel)):
        parser = PARSERS[format](TOOLS)
        pieces = [*parser.push(text), *parser.finish()]
        calls = {}
        for piece in pieces:
            assert piece.kind != "content" or not piece.text.strip(), (text, piece)
            if piece.kind == "call":
                calls[piece.index] = [piece.text, ""]
            elif piece.kind == "arguments":
                calls[piece.index][1] += piece.text
        assert calls
        counts.append(len(calls))
        for name, arguments in calls.values():
            assert named in (None, name)
            jsonschema.validate(json.loads(arguments), schemas[name])
    assert len(counts) > 10
    assert (max(counts) > 1) == (parallel and named is None)


def test_markers_that_are_special_tokens_are_named_by_id():
    grammar = tool_call_grammar(TOOLS, "mistral", special_ids={"[TOOL_CALLS]": 257})
    tokenizer = LLTokenizer(byte_tokenizer().to_json(), n_vocab=BYTE_VOCAB, eos_token=258)
    matcher = LLMatcher(tokenizer, source(grammar))
    assert matcher.compute_ff_tokens()[0] == 257


def test_a_call_that_cannot_be_demanded():
    with pytest.raises(RequestError, match="harmony"):
        tool_call_grammar(TOOLS, "harmony")
    with pytest.raises(RequestError, match="'absent'"):
        tool_call_grammar(TOOLS, "hermes", "absent")
