"""Calls that a request demands, as a grammar of the text in which the model writes them.

Invariant: a text that follows the grammar is read by the format's parser (`server.parsers`, told that the reply is
constrained) as one call or several of the tools given, their arguments valid by the tools' schemas. The model may
reason first, where it does so at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxspec.config.request import RequestError, StructuredOutput, shown
from jaxspec.structured.lowering import SchemaError, lower
from jaxspec.structured.regex import with_classes
from jaxspec.structured.schema import member, resolve, types
from jaxspec.structured.texts import FORMAT_PATTERNS, escape, whole
from server.parsers import PARSERS, REASONING_PARSERS
from server.parsers.deepseek import DeepseekV3, DeepseekV31
from server.parsers.glm45 import Glm45, MinimaxM2
from server.parsers.hermes import Hermes
from server.parsers.kimi_k2 import KimiK2
from server.parsers.llama3_json import Llama3Json
from server.parsers.mistral import Mistral
from server.parsers.qwen3_coder import Qwen3Coder
from server.parsers.think import Think

# JSON as models are shown it, which leaves nothing to choose between its parts
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OBJECT = {"type": "object", "properties": {}}
TEXT = r"/(?s:.*)/"
# Texts that the parser may read as a value of another type.
_READ_AS = {
    "null": r"/\s*([nN][uU][lL][lL]|[nN][oO][nN][eE])\s*/",
    "boolean": r"/\s*([tT][rR][uU][eE]|[fF][aA][lL][sS][eE])\s*/",
    "integer": (_NUMBER := r"/\s*[-+]?([0-9._]+([eE][-+]?[0-9]+)?|0[xXoObB][0-9a-fA-F_]+)\s*/"),
    "number": _NUMBER,
    "array": r"/\s*\[(?s:.*)/",
    "object": r"/\s*\{(?s:.*)/",
}
_BEGINS_A_NUMBER = r"/\s*[-+0-9.](?s:.*)/"
_SCALARS = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
}


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    format: str,
    named: str | None = None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    *,
    reasoning: str | None = None,
    thinking: str | None = None,
) -> StructuredOutput:
    """The grammar of at least one call.

    **Arguments:** `format` is a tool format of `PARSERS`. `named`: one call, of that tool. `parallel`: several may
    follow each other. `special_ids`: token ids of texts that no other tokens spell (`Tokenizer.added_tokens`).
    `reasoning` and `thinking` are those of `server.parsers.Parser`.

    **Raises:** `RequestError` for a format whose calls can't be demanded.
    """
    kind = PARSERS[format]
    if kind not in _CALLS:
        raise RequestError(f"tool_choice can't demand a call in the format {format}; send auto or none", "tool_choice")
    lark = _Lark(special_ids or {})
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    if not functions:
        wanted = "a function" if named is None else f"the function {named!r}"
        raise RequestError(f"tool_choice demands {wanted}, which tools lacks", "tool_choice")
    start = _CALLS[kind](lark, functions, parallel and named is None)
    lark.rules["start"] = f"{_thought(lark, reasoning, thinking)} {start}"
    rules = [f"start: {lark.rules.pop('start')}", *(f"{name}: {body}" for name, body in lark.rules.items())]
    schemas = tuple((_what(function), json.dumps(_arguments(function))) for function in functions)
    return StructuredOutput(grammar="\n".join(rules), name="tools", schemas=schemas)


class _Tags(NamedTuple):
    """Tags around a call, before a parameter's key, between it and its value, and behind that. A value's text ends at
    `closes`, for the parser of a constrained reply too, so the text can't have it."""

    opens: tuple[str, ...]
    ends: tuple[str, ...]
    key: tuple[str, ...] = ("<parameter=",)
    value: tuple[str, ...] = (">\n",)
    closes: str = "\n</parameter>"


_CODER = _Tags(("<tool_call>", "\n", "<function={name}>", "\n"), ("</function>", "\n", "</tool_call>"))
_GLM = _Tags(
    ("<tool_call>", "{name}", "\n"),
    ("</tool_call>",),
    ("<arg_key>",),
    ("</arg_key>", "\n", "<arg_value>"),
    "</arg_value>",
)
_MINIMAX = _Tags(('<invoke name="{name}">\n',), ("</invoke>",), ('<parameter name="',), ('">',), "</parameter>")


class _Lark:
    """Rules in Lark's syntax, and how to write what they are made of."""

    tags = _CODER

    def __init__(self, tokens: Mapping[str, int]):
        self.tokens = tokens
        self.rules: dict[str, str] = {}

    def literal(self, *texts: str) -> str:
        """These texts one after the other, each a token where the tokenizer has one for it."""
        parts = [f"<[{self.tokens[text]}]>" if text in self.tokens else json.dumps(text) for text in texts]
        return " ".join(parts)

    def rule(self, body: str, options: str = "") -> str:
        """A new rule's name."""
        name = f"r{len(self.rules)}"
        self.rules[f"{name}{options}"] = body
        return name

    def terminal(self, body: str) -> str:
        """A new terminal's name: what a regular expression could say."""
        name = f"T{len(self.rules)}"
        self.rules[name] = body
        return name

    def between(self, before: Sequence[str], body: str, after: Sequence[str]) -> str:
        """A terminal's `body` between texts. It is one terminal with these unless some are tokens of their own: of
        several, the lexer would take the longest."""
        if self.tokens.keys() & {*before, *after}:
            return " ".join(filter(None, [self.literal(*before), self.terminal(body), self.literal(*after)]))
        return self.terminal(" ".join(filter(None, [self.literal(*before), f"({body})", self.literal(*after)])))

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a lowered schema."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': SPACING})}")

    def until(self, marker: str) -> str:
        """Any text up to `marker`, and it."""
        if marker in self.tokens:
            never = f"~/(?s:.*){_in_lark(escape(marker))}(?s:.*)/"  # spelled by other tokens
            return f"{self.terminal(f'{TEXT} & {never}')} {self.literal(marker)}"
        return self.rule(TEXT, f"[suffix={json.dumps(marker)}]")

    def choice(self, options: Sequence[str]) -> str:
        return self.rule(" | ".join(options))


def _what(function: Mapping[str, Any]) -> str:
    return f"the parameters of the function {function['name']!r}"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, lowered: an object, and an empty one where the tool names no parameters."""
    given, what = function.get("parameters") or {}, _what(function)
    if "object" not in types(given, given):
        kind = given.get("type", sorted(types(given, given)))
        raise RequestError(f"{what} must have the type object, got {shown(kind)}", "tools")
    try:
        return lower(given, {"allOf": [given, _OBJECT]}, strict=function.get("strict") is True, arguments=True)
    except SchemaError as error:
        raise RequestError(f"{what}: {error}", "tools") from None


def _object(lark: _Lark, function: Mapping[str, Any], key: str) -> str:
    opening = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f"{lark.literal(opening)} {lark.json(_arguments(function))} {lark.literal('}')}"


def _sequence(lark: _Lark, call: str, separator: str, parallel: bool) -> str:
    return f"{call} ({lark.literal(separator)} {call})*" if parallel else call


def _hermes(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    said = lark.choice([_object(lark, function, "arguments") for function in functions])
    call = lark.rule(f"{lark.literal('<tool_call>', chr(10))} {said} {lark.literal(chr(10), '</tool_call>')}")
    return _sequence(lark, call, "\n", parallel)


def _llama(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    call = lark.choice([_object(lark, function, "parameters") for function in functions])
    return _sequence(lark, call, "; ", parallel)


def _mistral(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    call = lark.choice([_object(lark, function, "arguments") for function in functions])
    return f"{lark.literal('[TOOL_CALLS]', '[')} {_sequence(lark, call, ', ', parallel)} {lark.literal(']')}"


def _section(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool, kind: type[DeepseekV31]) -> str:
    """Calls in a section: each call's head and tail are the format's, and the number of one is any."""

    def one(function: Mapping[str, Any]) -> str:
        head = [
            "/[0-9]{1,3}/" if part == "{number}" else lark.literal(part.replace("{name}", function["name"]))
            for part in kind.HEAD
        ]
        return " ".join([*head, lark.json(_arguments(function)), lark.literal(*kind.TAIL)])

    call = lark.choice([one(function) for function in functions])
    more = f"({lark.literal(chr(10))}? {call})*" if parallel else ""
    return f"{lark.literal(kind.SECTION)} {call} {more} {lark.literal(kind.SECTION_END)}"


def _coder(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    return _sequence(lark, lark.choice([_tagged(lark, function) for function in functions]), "\n", parallel)


def _glm(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    lark.tags = _GLM
    return _coder(lark, functions, parallel)


def _minimax(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    lark.tags = _MINIMAX
    calls = _coder(lark, functions, parallel)
    return f"{lark.literal(MinimaxM2.SECTION, chr(10))} {calls} {lark.literal(chr(10), MinimaxM2.SECTION_END)}"


def _tagged(lark: _Lark, function: Mapping[str, Any]) -> str:
    """A call between tags: parameters in the schema's order, those that aren't required optional."""
    schema = _arguments(function)
    try:
        options = [_parameters(lark, each, schema) for each in _leaves(schema, schema)]
    except ValueError as error:
        raise RequestError(f"{_what(function)} in this format: {error}", "tools") from None
    opening = lark.literal(*(part.replace("{name}", function["name"]) for part in lark.tags.opens))
    return f"{opening} ({' | '.join(options)}) {lark.literal(*lark.tags.ends)}"


def _leaves(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of a lowered schema, none of them a union."""
    whole = resolve(schema, root)
    options = [each for each in whole.get("anyOf", ()) if each is not False]
    return [leaf for each in options for leaf in _leaves(each, root)] if options else [whole]


def _parameters(lark: _Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """An object's members. **Raises:** `ValueError` for a schema that parameters between tags can't follow."""
    if unable := schema.keys() & {"allOf", "minProperties", "maxProperties"}:
        raise ValueError(f"{min(unable)} can't be enforced")
    named, patterns, others = (
        schema.get(key, {}) for key in ("properties", "patternProperties", "additionalProperties")
    )
    required, parts = schema.get("required") or (), []
    keys = dict.fromkeys([*named, *required])
    for key in keys:
        value = _value(lark, member(named, patterns, others, key), root)
        if value and not set(key) & set("<>\n"):
            parameter = f"{lark.literal(*lark.tags.key, key, *lark.tags.value)} {value} {lark.literal(chr(10))}"
            parts.append(parameter if key in required else f"({parameter})?")
        elif key in required:
            raise ValueError(f"the parameter {key!r} can't be written")
    taken = "".join(f" & ~/{_in_lark(escape(key))}/" for key in keys)
    kinds = {f"/{_in_lark(with_classes(whole(pattern)))}/": each for pattern, each in patterns.items()}
    free = "".join(f" & ~{kind}" for kind in kinds)
    further = []
    for kind, each in {**{f" & {kind}": each for kind, each in kinds.items()}, free: others}.items():
        if value := _value(lark, each, root):
            key = lark.between(lark.tags.key, rf"/[^<>\n]{{1,128}}/{taken}{kind}", lark.tags.value)
            further.append(f"{key} {value} {lark.literal(chr(10))}")
    parts += [f"({' | '.join(further)})*"] if further else []
    return " ".join(parts) or '""'


def _value(lark: _Lark, schema: Any, root: Mapping[str, Any]) -> str | None:
    """A parameter's text and the marker that closes it; None where there is none.

    Its parser reads a text as a string if the schema names that type before others, and else as JSON where it is some.
    """
    definitions, closes = {"$defs": root.get("$defs", {})}, lark.tags.closes
    if schema is False:
        return None
    kinds = types(schema, root)
    texts: list[dict[str, Any]] = []
    options: list[str] = []
    if alone := _of_types(schema, ["string"], definitions):
        texts = _leaves(alone, {**definitions, **alone})
    others = kinds - {"string"}
    if texts and _first_kind(schema, root) == "string":
        others &= {"null"}
    scalars: list[str] = []
    in_json: set[str] = set()
    beside = _of_types(schema, sorted(others), definitions) if others else None
    for leaf in _leaves(beside, beside) if beside else ():
        listed = leaf.get("enum", [leaf["const"]] if "const" in leaf else None)
        scalars += [json.dumps(json.dumps(each)) for each in listed or () if not isinstance(each, dict | list)]
        for kind in types(leaf, beside) & others:
            plain = listed is None and (kind in ("null", "boolean") or leaf.keys() <= {"type", "$defs"})
            scalars += [_SCALARS[kind]] if plain and kind in _SCALARS else []
            in_json |= {kind} if kind in ("array", "object") or not (plain or listed is not None) else set()
    if in_json:
        beside = _of_types(schema, sorted(in_json), definitions)
        options.append(f"{lark.json({**definitions, **(beside or {})})} {lark.literal(closes)}")
    never = "" if schema in (True, {}) else "".join(f" & ~{_READ_AS[kind]}" for kind in sorted(others))
    never += f" & ~{_BEGINS_A_NUMBER}" if in_json & {"integer", "number"} else ""
    unmarked = f"~/(?s:.*){_in_lark(escape(closes))}(?s:.*)/"
    scalars += [f"({_text(text)} & {unmarked}{never})" for text in texts]
    if scalars:
        options.append(lark.between((), " | ".join(scalars), (closes,)))
    return lark.choice(options) if options else None


def _of_types(schema: Any, kinds: list[str], definitions: Mapping[str, Any]) -> dict[str, Any] | None:
    """Lower a schema to its values of some types; None if it has none."""
    try:
        return lower(definitions, {"allOf": [schema, {"type": kinds}]})
    except SchemaError:  # no value of these
        return None


def _first_kind(schema: Any, root: Mapping[str, Any]) -> str | None:
    """The type, other than null, that a schema names first."""
    for leaf in _leaves(schema, root):
        given = leaf.get("type", sorted(types(leaf, root)))
        for kind in given if isinstance(given, list) else [given]:
            if kind != "null":
                return kind
    return None


def _text(schema: Mapping[str, Any]) -> str:
    """Texts of a lowered schema of strings, as a terminal. **Raises:** `ValueError` for what can't be one."""
    parts = []
    for part in (schema, *schema.get("allOf", ())):
        for listed in (part.get("enum"), [part["const"]] if "const" in part else None):
            if listed is not None:
                parts.append(f"({' | '.join(json.dumps(text) for text in listed if isinstance(text, str))})")
        patterns = [part["pattern"]] if "pattern" in part else []
        if "format" in part:
            patterns.append(FORMAT_PATTERNS[part["format"]])
        parts += [f"/{_in_lark(with_classes(whole(pattern)))}/" for pattern in patterns]
        if part.keys() & {"minLength", "maxLength"}:
            parts.append(f"/(?s:.{{{part.get('minLength', 0)},{part.get('maxLength', '')}}})/")
    return " & ".join(parts or [TEXT])


def _in_lark(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"\\.|/|\n", lambda sign: {"/": r"\/", "\n": r"\n"}.get(sign[0], sign[0]), regex, flags=re.DOTALL)


def _thought(lark: _Lark, reasoning: str | None, thinking: str | None) -> str:
    """Grammar of the reasoning that may come before the calls."""
    kind = REASONING_PARSERS[reasoning] if reasoning else None
    if kind is None or not issubclass(kind, Think) or thinking == "off":
        return ""
    body, space = lark.until(kind.CLOSES), r"/\n{0,2}/"
    if thinking == "prompt" or kind.FORCED:
        return f"{body} {space}"
    return f"({lark.literal(kind.OPENS)} {body} {space})?"


_CALLS = {
    Hermes: _hermes,
    Qwen3Coder: _coder,
    Llama3Json: _llama,
    Mistral: _mistral,
    Glm45: _glm,
    MinimaxM2: _minimax,
    **{kind: partial(_section, kind=kind) for kind in (DeepseekV3, DeepseekV31, KimiK2)},
}
