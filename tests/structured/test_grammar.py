"""Grammars are refused by name if they can't compile, bounded if they could cost anything, and kept for reuse."""

import json
import time

import pytest

from jaxspec import LLM, RequestError, SamplingParams, StructuredOutput
from jaxspec.config.request import MAX_GRAMMAR
from jaxspec.structured import grammar, limits
from jaxspec.structured.grammar import Grammar, Grammars
from tests.server.fake import byte_tokenizer
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), BYTE_VOCAB, [258])


def accepts(grammars, structured, text):
    _, matcher = grammars.compile(structured).take()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("given,yes,no", [
    ({"json": True}, ['{"a": [1, null]}', "{}"], ["[]", "1"]),
    ({"json": {"type": "integer"}}, ["12"], ["1.5", '"1"']),
    ({"json": '{"enum": ["x", 2]}'}, ['"x"', "2"], ["x"]),
    ({"json": {"type": "array", "items": {}, "maxItems": 1}}, ["[ 1 ]"], ["[" + " " * 65 + "1]"]),
    ({"json": {"type": "array", "items": {}}, "whitespace_pattern": ""}, ["[1,2]"], ["[1, 2]"]),
    ({"json": {"type": "string", "format": "date"}}, ['"2026-01-31"'], ['"yesterday"']),
    ({"json": {"type": "string", "format": "nickname"}}, ['"yesterday"'], ["1"]),
    ({"json": {"const": {"format": "nickname"}}}, ['{"format": "nickname"}'], ["{}"]),
    ({"regex": "[a-z]+é"}, ["abcé"], ["é", "abc"]),
    ({"choice": ["a \"b\"\n\\", "日本"]}, ["a \"b\"\n\\", "日本"], ["日", "a"]),
    ({"grammar": 'start: "a" b?\nb: /[0-9]/'}, ["a", "a7"], ["b", "a77"]),
    ({"grammar": 'root ::= ("a" | [x-z])+'}, ["axz"], ["b", ""]),
])  # fmt: skip
def test_what_a_grammar_allows(grammars, given, yes, no):
    assert [accepts(grammars, StructuredOutput(**given), text) for text in (*yes, *no)] == [True] * len(yes) + [
        False
    ] * len(no)


def nested(depth, leaf):
    for _ in range(depth):
        leaf = {"type": "array", "items": leaf}
    return leaf


@pytest.mark.parametrize("given,param,words", [
    ({}, "structured", "got none"),
    ({"json": {}, "regex": "a"}, "structured", "json and regex"),
    ({"json": False}, "json", "got false"),
    ({"json": "{"}, "json", "not a JSON text"),
    ({"json": "[" * 10**5}, "json", "not a JSON text"),
    ({"json": {"a": {1, 2}}}, "json", "can't be written"),
    ({"json": nested(70, {})}, "json", "deeper than 64"),
    ({"json": {"enum": ["x" * MAX_GRAMMAR]}}, "json", "at most 262144"),
    ({"regex": ""}, "regex", "non-empty"),
    ({"regex": 3}, "regex", "non-empty string, got 3"),
    ({"choice": "ab"}, "choice", "list of non-empty strings"),
    ({"choice": ["a", ""]}, "choice", "list of non-empty strings"),
    ({"grammar": None, "choice": []}, "choice", "list of non-empty strings"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "applies to json alone"),
    ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern", "string"),
    ({"json": {}, "whitespace_pattern": " ?" * 600}, "whitespace_pattern", "1200 characters, at most 1024"),
    ({"json": " " * 2**18 + "{}"}, "json", "at most 262144"),
])  # fmt: skip
def test_what_is_refused_when_made(given, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        StructuredOutput(**given)
    assert caught.value.param == param


def test_it_is_a_field_of_the_sampling_parameters():
    with pytest.raises(RequestError, match="takes a StructuredOutput"):
        SamplingParams(structured={"regex": "a"})


@pytest.mark.parametrize("given,words", [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"json": {"type": "strange"}}, "strange"),
    ({"json": {"$ref": "https://example.com/schema"}}, "does not fetch"),
    ({"json": {"type": "string", "format": "idn-email"}}, "idn-email"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": "root ::= ("}, "Expected"),
    ({"grammar": "start: " + "(" * 50_000}, "nested"),
    # what would cost any amount of time or memory
    ({"regex": "(a{1000}){1000}"}, "1000000 characters"),
    ({"regex": "x{1000000000}"}, "1000000000 characters"),
    ({"json": {"type": "string", "pattern": "^[a-z]{50000}$"}}, "at most 20000"),
    ({"json": {"patternProperties": {"(a{300}){300}": {}}}}, "90"),
    ({"json": {"allOf": [{"multipleOf": 99999989}]}}, "at most 10000"),
    ({"grammar": "start: /(a{500}){500}/"}, "250000 characters"),
    ({"json": {}, "whitespace_pattern": " {100000}"}, "100000 characters"),
    ({"regex": "a{%s}" % ("9" * 5000)}, "too many characters"),
    ({"json": {"pattern": "(a{99999}){%s}" % ("9" * 5000)}}, "too many characters"),
    ({"json": {"multipleOf": float("inf")}}, "finite number above 0, got inf"),
    ({"json": {"anyOf": [{"multipleOf": float("nan")}]}}, "finite number above 0, got nan"),
    ({"json": {"multipleOf": 10**400}}, "at most 10000"),
    ({"json": {"multipleOf": -3}}, "finite number above 0, got -3"),
    ({"json": {"const": "x" * 20_000}}, "20000 characters, at most 16384"),
    ({"choice": ["a", "x" * 20_000]}, "20000 characters, at most 16384"),
    ({"grammar": 'start: "' + "x" * 20_000 + '"'}, "20000 characters, at most 16384"),
    ({"json": {"$defs": {"a": {"properties": {f"p{i}": {} for i in range(5000)}}}}}, "5000 optional properties"),
    ({"grammar": 'start: a\na: %json {"multipleOf": 99999989}'}, "at most 10000"),
    ({"grammar": 'start: "%json" a\na: %json\n {"items": {"pattern": "(a{500}){500}"}}'}, "250000 characters"),
    ({"grammar": "start: a\na: %json {"}, "isn't followed by a JSON text"),
])  # fmt: skip
def test_what_does_not_compile_says_why_in_a_line(grammars, given, words):
    wanted = StructuredOutput(**given, name="the_field")
    started = time.monotonic()
    with pytest.raises(RequestError, match=words) as caught:
        grammars.compile(wanted)
    assert caught.value.param == "the_field"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("regex,size", [
    ("abc", 3), ("[a-z]{3}", 3), ("(ab|c){4}x", 13), ("((a{3}){4})*", 12), (r"\{9}", 3), ("[]a]{5}", 5), ("a{2,7}", 7),
    (r"\d{3}-\d{4}", 8), ("a{,3}", 3), ("(a", 1), ("a)b", 3),
])  # fmt: skip
def test_how_much_a_regular_expression_stands_for(regex, size):
    assert limits.expanded(regex) == size


def test_the_last_grammars_are_kept(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    one, *others = (StructuredOutput(regex=f"[{char}]+") for char in "abc")
    kept = grammars.compile(one)
    assert grammars.compile(StructuredOutput(regex="[a]+", name="other")) is kept
    for other in others:
        grammars.compile(other)
    assert len(grammars._compiled) == 2
    assert grammars.compile(one) is not kept


def test_kept_grammars_are_bounded_by_their_bytes(grammars, monkeypatch):
    first, second = (StructuredOutput(choice=[f"{char}{i}" for i in range(3000)]) for char in "yz")
    size = grammars.compile(first).bytes
    assert size > 2**18
    monkeypatch.setattr(grammar, "KEPT_BYTES", size + 2**10)
    assert first in grammars._compiled
    grammars.compile(second)
    assert second in grammars._compiled and first not in grammars._compiled


def test_completions_of_a_light_grammar_have_lexers_of_their_own_and_those_of_others_share_one(grammars):
    proven = grammars.compile(StructuredOutput(regex="[ab]+"))
    for most in (1, 2):
        one = Grammar(proven._make, proven._fresh[0].deep_copy(), most)
        (first, used), (second, other), (third, _) = (one.take() for _ in range(3))
        assert len({first, second, third}) == most and used is not other
        assert used.try_consume_tokens(list(b"ab")) == 2 and other.try_consume_tokens(list(b"ba")) == 2
        for number in (first, second, third):
            one.give_back(number, failed=False)
        assert len(one._users) == 1


def test_a_lexer_in_which_a_completion_failed_is_given_up(grammars):
    wanted = grammars.compile(StructuredOutput(regex="[ab]+x"))
    number, matcher = wanted.take()
    matcher.consume_token(ord("c"))
    assert matcher.is_error()
    wanted.give_back(number, failed=True)
    another, fresh = wanted.take()
    assert another != number
    assert fresh.try_consume_tokens(list(b"ab")) == 2


def test_a_completion_that_never_begins_gives_its_matcher_back(grammars):
    wanted = grammars.compile(StructuredOutput(regex="[ab]+y"))
    never = grammars.start(wanted)
    assert sum(wanted._users.values()) == 1
    del never
    assert sum(wanted._users.values()) == 0


def test_padding_of_the_vocabulary_is_never_allowed():
    grammars = Grammars(byte_tokenizer(), BYTE_VOCAB + 70, [258])
    bits = grammars.compile(StructuredOutput(regex="(.|\n)*")).take()[1].compute_bitmask()
    allowed = [t for t in range(len(bits) * 8) if bits[t >> 3] >> (t & 7) & 1]
    assert max(allowed) == 258 and len(bits) == -(-(BYTE_VOCAB + 70) // 32) * 4


SMALL = {"max_running_requests": 1, "max_total_tokens": 64, "skip_warmup": True}


@pytest.mark.parametrize("checkpoint,options,words", [
    ({"tokenizer": True}, {"disable_structured_output": True}, "--disable-structured-output"),
    ({}, {}, "has no tokenizer"),
])  # fmt: skip
def test_engines_that_serve_none_say_why(checkpoint, options, words):
    llm = LLM(str(tiny_checkpoint(vocab=BYTE_VOCAB, **checkpoint)), **SMALL, **options)
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate([[1]], SamplingParams(max_tokens=5, structured=StructuredOutput(json=True)))
    assert caught.value.param == "json"
    assert json.dumps(llm.engine.stats()["dispatches"]) == "{}"
