"""Grammars and schemas drawn by structure: each is compiled and followed, or refused by the name of its field."""

import random

import numpy as np
import pytest

from jaxspec import RequestError, StructuredOutput
from jaxspec.structured import compiler
from jaxspec.structured.grammar import GrammarFailed, Grammars, round_masks
from tests.server.fake import byte_tokenizer
from tests.support.tiny import BYTE_VOCAB

ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2.5,
    1e-300,
    1e999,
    float("nan"),
    10**19,
    10**400,
    "",
    "a",
    "\ud800",
    "é☃",
    [],
    {},
]
KINDS = ["object", "array", "string", "integer", "number", "boolean", "null", "any", ["string", "null"], 3]
FORMATS = ["date-time", "email", "uuid", "ipv6", "idn-email", "nickname", "regex", 4]
LARK = [
    '"a"',
    '"b"i',
    "/[ab]+/",
    "/(a|b)*c/",
    "A",
    "B",
    "r0",
    "r1",
    "r2",
    "missing",
    "<[65]>",
    "<[999]>",
    "<a>",
    '"a".."c"',
]


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(byte_tokenizer(), BYTE_VOCAB, [258])
    yield made
    made.close()


def regex(rng, depth=3):
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(
            ["a", "b", r"\d", r"\w", ".", "[a-c]", "[^a]", r"\p{L}", "^", "$", r"\b", "é", "[", ")", r"\x41"]
        )
    inner = regex(rng, depth - 1)
    count = rng.choice(["0", "1", "2", "17", "999", "9" * rng.choice([4, 20, 5000])])
    return rng.choice([
        inner + regex(rng, depth - 1), f"({inner})", f"({inner}|{regex(rng, depth - 1)})", f"{inner}*", f"{inner}+?",
        f"({inner}){{{count}}}", f"({inner}){{1,{count}}}", f"{inner}{{{count},}}", f"(?={inner})", f"(?i:{inner})",
        f"[{inner}]", f"(?<n>{inner})", rf"({inner})\1", f"{inner}{{,{count}}}", f"{inner}{{2,1}}",
    ])  # fmt: skip


def schema(rng, depth=3):
    if rng.random() < 0.08:
        return rng.choice(ODD)
    inner = lambda: schema(rng, depth - 1) if depth else {}  # noqa: E731
    few = lambda make: [make() for _ in range(rng.randrange(4))]  # noqa: E731
    odd = lambda: rng.choice(ODD) if rng.random() < 0.4 else rng.randrange(12)  # noqa: E731
    named = lambda: {rng.choice("abcd") + rng.choice(["", "\n", '"', "type"]): inner() for _ in range(rng.randrange(4))}  # noqa: E731
    makers = {
        "type": lambda: rng.choice(KINDS), "properties": named, "required": lambda: few(lambda: rng.choice("abcd")),
        "additionalProperties": lambda: rng.choice([True, False, inner()]),
        "items": lambda: rng.choice([inner(), few(inner)]),
        "patternProperties": lambda: {regex(rng, 1): inner() for _ in range(rng.randrange(3))},
        "prefixItems": lambda: few(inner), "anyOf": lambda: few(inner), "oneOf": lambda: few(inner),
        "allOf": lambda: few(inner), "not": inner, "enum": lambda: few(lambda: rng.choice(ODD)),
        "const": lambda: rng.choice(ODD), "pattern": lambda: regex(rng), "format": lambda: rng.choice(FORMATS),
        "$ref": lambda: rng.choice(["#", "#/$defs/a", "#/properties/a", "#/nowhere", "https://a.example/b", 3]),
        "$defs": named, "definitions": named, "dependentRequired": named, "if": inner, "then": inner, "else": inner,
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems",
                         "maxItems", "minProperties", "maxProperties", "uniqueItems", "x-guidance", "unknown"), odd),
    }  # fmt: skip
    return {key: makers[key]() for key in rng.sample(list(makers), rng.randrange(1, 5))}


def lark(rng):
    def body(depth=2):
        if depth == 0 or rng.random() < 0.4:
            return rng.choice(LARK)
        one, other = body(depth - 1), body(depth - 1)
        return rng.choice([
            f"{one} {other}", f"({one} | {other})", f"({one})?", f"({one})*",
            f"({one}){{2,{rng.choice([1, 3, 10**6])}}}",
            f"/{regex(rng, 2).replace('/', '')}/", f"{one} & {other}", f"~{one}",
        ])  # fmt: skip

    rules = [f"start: {body()}", *(f"r{i}: {body()}" for i in range(3)), f"A: {body(1)}", f"B: /{regex(rng, 1)}/"]
    if rng.random() < 0.3:
        rules.append(f"r2: %json {StructuredOutput(json=drawn_object(rng)).text}")
    return "\n".join(rng.sample(rules, len(rules) - (rng.random() < 0.2)))


def gbnf(rng):
    parts = ['"a"', "[a-c]", "[^a]", "r", ".", '"\\x41"', "(", ")", "|", "*", "+", "{2,3}", "{%s}" % ("9" * 5000), "#"]
    return f"root ::= {' '.join(rng.choices(parts, k=rng.randrange(1, 8)))}\nr ::= " + rng.choice(parts)


def drawn_object(rng):
    return value if isinstance(value := schema(rng), dict) else {}


def drawn(rng):
    """Arguments of a structured output, of any kind."""
    kind = rng.choice(["json", "json", "json", "regex", "grammar", "grammar", "gbnf", "choice"])
    if kind == "json":
        space = {"whitespace_pattern": rng.choice(["", " ", r"\s*", regex(rng, 1)])} if rng.random() < 0.2 else {}
        return {"json": {} if (value := schema(rng)) is None else value, **space}
    if kind == "choice":
        return {"choice": rng.choices([*ODD[13:17], "b", "x" * 20_000, '"\\'], k=rng.randrange(4))}
    return {"grammar": gbnf(rng)} if kind == "gbnf" else {kind: regex(rng) if kind == "regex" else lark(rng)}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 15))])
def test_every_grammar_is_followed_or_refused_by_its_field(grammars, monkeypatch, seed):
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 1)
    rng, served = random.Random(seed), 0
    for _ in range(145):
        given = drawn(rng)
        try:
            wanted = StructuredOutput(**given, name="its_field")
            matcher = grammars.start(grammars.compile(wanted))
        except RequestError as error:
            assert error.param in ("its_field", "whitespace_pattern"), given
            str(error).encode(errors="backslashreplace")
            continue
        served += 1
        try:
            for _ in range(6):
                bits, _ = round_masks([matcher], np.zeros((1, 2), np.int32), 2, BYTE_VOCAB)
                allowed = [token for token in range(BYTE_VOCAB) if bits[0, 0, token >> 5] >> (token & 31) & 1]
                token = rng.choice(allowed)
                matcher.advance([token])
                if token == 258:
                    break
        except GrammarFailed as error:
            assert error.param == "structured"
        matcher.close()
    assert 20 < served < 120
