"""Write a request's grammar as the library takes it: a schema, a regular expression or choices in its own language.

Invariant: whatever a client wrote is checked here before the library sees it. Both may take long, so this runs only in
a process that can be ended (`compile_server`), which has no jax.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from jaxspec.config.request import StructuredOutput
from jaxspec.structured.limits import check_lark, check_literal, check_regex, check_schema
from jaxspec.structured.lowering import lower
from jaxspec.structured.regex import JSON_SPACE, with_classes

WHITESPACE = r"[ \t\r\n]{1,64}"  # between a JSON text's parts: without an end, some models write nothing else


def source(wanted: StructuredOutput) -> str:
    """The grammar as the library takes it. **Raises:** anything, for text that can't be read."""
    if wanted.kind == "json":
        return _of_schema(wanted)
    if wanted.kind == "regex":
        check_regex(wanted.text)
        return LLMatcher.grammar_from_regex(with_classes(wanted.text))
    if wanted.kind == "choice":
        choices = json.loads(wanted.text)
        for choice in choices:
            check_literal(choice)
        # A terminal: one of thousands of rules would be too many items in a row.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
    lark = any_to_lark(wanted.text)  # of text that isn't GBNF, that changes nothing
    check_lark(lark)
    return LLMatcher.grammar_from_lark(lark)


def _of_schema(wanted: StructuredOutput) -> str:
    space = WHITESPACE if wanted.whitespace_pattern is None else wanted.whitespace_pattern
    check_regex(space)
    options = {"whitespace_pattern": with_classes(space, JSON_SPACE)} if space else {"whitespace_flexible": False}
    schema = json.loads(wanted.text)
    check_schema(schema, wanted.kind)
    lowered = lower(schema, strict=wanted.strict)
    return LLMatcher.grammar_from_json_schema(json.dumps(lowered), overrides=options)


def at_fault(wanted: StructuredOutput, refusal: Callable[[dict[str, Any]], str]) -> tuple[str, str, str]:
    """The innermost part of a refused grammar's schemas that is refused alone: the schema's label, the part's path and
    why; all "" if there is none. `refusal` gives the library's reason against a schema, "" if it takes it."""
    schemas = [(label, json.loads(text)) for label, text in wanted.schemas]
    if wanted.kind == "json":
        schemas = [("the JSON schema", lower(json.loads(wanted.text), strict=wanted.strict))]
    for label, root in schemas:
        definitions, path, why, inner, seen = root.get("$defs", {}), "", refusal(root), root, set()
        while found := next(
            (
                (name, part, said)
                for name, part in _parts(inner, definitions)
                if id(part) not in seen and _akin(said := refusal({**part, "$defs": definitions}), why)
            ),
            None,
        ):
            path, inner, why = path + found[0], *found[1:]
            seen.add(id(inner))
        if why:
            return label, path or "/", why
    return "", "", ""


def _akin(said: str, why: str) -> bool:
    """Whether a part's refusal may be the whole's reason."""
    first, kind = said.partition("\n")[0], "Unsatisfiable schema"
    return bool(said) and (
        not why or first == why.partition("\n")[0] or (said.startswith(kind) and why.startswith(kind))
    )


def _parts(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas within a lowered one, or the one that it refers to, each with its path."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for key in ("properties", "patternProperties", "prefixItems", "anyOf", "allOf", "items", "additionalProperties"):
        inner = schema.get(key)
        named = {"": inner} if key in ("items", "additionalProperties") else inner or {}
        for name, part in named.items() if isinstance(named, dict) else enumerate(named):
            if isinstance(part, dict):
                yield f"/{key}/{name}".rstrip("/"), part


def beside_free_text(base: str, wanted: StructuredOutput, tokens: Mapping[str, int]) -> str:
    """A grammar behind free text between markers, or with free text in its place: see `StructuredOutput.after` and
    `unless`. A marker that is one of the added `tokens` is written as that token, since special ones aren't text."""
    mark = lambda marker: f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)  # noqa: E731
    rules, start = ["ANY: /(.|\\n)*/", "SPACE: /[ \\t\\r\\n]{0,8}/"], "@body"
    if wanted.others is not None:
        openings, markers = (" | ".join(map(mark, each)) for each in wanted.others)
        start = "(other | @body)"
        rules.append(f"other: ({openings}) (ANY ({markers}))* ANY")
    if wanted.prefix is not None:
        opens, closes = wanted.prefix
        start = f"block? {start}" if opens else f"inner SPACE {start}"
        rules += [f"block: {mark(opens)} inner SPACE"] if opens else []
        rules.append(f"inner: ANY {mark(closes)}" if closes in tokens else f"inner[suffix={mark(closes)}]: ANY")
    around = "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])
    (body,) = json.loads(base)["grammars"] if base.startswith('{"grammars"') else [{"lark_grammar": base}]
    return json.dumps({"grammars": [{"lark_grammar": around}, {**body, "name": "body"}]})
