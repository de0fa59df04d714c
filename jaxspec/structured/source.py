"""Write a request's grammar as the library takes it: a schema, a regular expression or choices in its own language.

Invariant: whatever a client wrote is checked here before the library sees it. Both may take long, so this runs only in
a process that can be ended (`compile_server`), which has no jax.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from jaxspec.config.request import StructuredOutput
from jaxspec.structured.limits import check_lark, check_literal, check_regex, check_schema, schemas_within
from jaxspec.structured.lowering import lower
from jaxspec.structured.regex import JSON_SPACE, with_classes

WHITESPACE = r"[ \t\r\n]{1,64}"  # between a JSON text's parts: without an end, some models write nothing else
MANY_PATTERNS = 16  # of one object; the library's time grows with their number's cube


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
    schema = lower(schema, strict=wanted.strict)
    _merge_patterns(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _merge_patterns(schema: Any) -> None:
    """Make one of the many patterns of an object that have equal schemas."""
    for each in schemas_within(schema):
        patterns = each.get("patternProperties")
        if not isinstance(patterns, dict) or len(patterns) < MANY_PATTERNS:
            continue
        alike = defaultdict(list)
        for pattern, inner in patterns.items():
            alike[json.dumps(inner)].append(pattern)
        each["patternProperties"] = {
            several[0] if len(several) == 1 else "|".join(f"(?:{pattern})" for pattern in several): patterns[several[0]]
            for several in alike.values()
        }


def behind(base: str, opens: str, closes: str, tokens: Mapping[str, int]) -> str:
    """A grammar behind free text between markers: see `StructuredOutput.after`. A marker that is one of the added
    `tokens` is written as that token, since special ones aren't text."""
    mark = lambda marker: f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)  # noqa: E731
    ends = f"inner: ANY {mark(closes)}" if closes in tokens else f"inner[suffix={mark(closes)}]: ANY"
    start = f"start: block? @body\nblock: {mark(opens)} inner SPACE" if opens else "start: inner SPACE @body"
    around = f"%llguidance {{}}\n{start}\n{ends}\nANY: /(.|\\n)*/\nSPACE: /[ \\t\\r\\n]{{0,8}}/\n"
    (body,) = json.loads(base)["grammars"] if base.startswith('{"grammars"') else [{"lark_grammar": base}]
    return json.dumps({"grammars": [{"lark_grammar": around}, {**body, "name": "body"}]})
