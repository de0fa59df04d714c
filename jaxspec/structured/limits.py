"""Bounds on grammars that anyone may send: their size, the time and memory of compiling, and the cost of a step.

Every check is linear in the text. The library bounds the cost of a step, with a few exceptions that are refused here
before it sees them. The rest is bounded by time and memory (`compile_server`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from math import isfinite
from typing import Any

from llguidance import LLParserLimits

from jaxspec.config.request import shown

MAX_EXPANDED = 20_000  # characters that a regular expression stands for, its counts written out
MAX_COUNT_DIGITS = 15  # of a repetition count; more are too many whatever they say
MAX_MULTIPLE = 10_000  # multipleOf, as a whole number: an automaton has a state for each remainder
MAX_LITERAL = 2**14  # characters of one: the tokens that it forces are looked for at each step, 2 us a character
COMPILE_SECONDS = 5  # of CPU time
COMPILE_BYTES = 192 * 2**20

# A row of the library's parser takes time that grows with its items' square, and more in an ambiguous grammar, while
# Python's lock is held. JSON isn't ambiguous; 16,384 items took 0.2 s. Other grammars keep the library's bound.
MAX_ROW = {"json": 2**14}
MAX_ROW_ELSE = 2_000
MAX_STEP = {"json": 2**17}  # items of all rows that a step makes
MAX_STEP_ELSE = 25_000  # 0.1 s in the most ambiguous grammar, where 50,000 took 1.1
ITEMS_PER_OPTIONAL = 4  # of a row, for each property that may come next
MAX_STATES = 50_000  # of a lexer, 0.5 kB each

_COUNT = re.compile(r"\{([0-9]*+)(?:,([0-9]*+))?\}")
# Of Lark: strings and comments, which are passed over, regular expressions and schemas. Each takes what it begins with,
# whether it ends or not, so that a scan is linear.
_LARK = re.compile(
    r'"(?P<text>(?:\\.|[^"\\\n])*+)"?|//[^\n]*+|/(?P<regex>(?:\\.|[^/\\\n])++)/?|%json\b\s*+(?P<json>)', re.DOTALL
)
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "examples"})


class TooCostly(ValueError):
    """A grammar that could cost any amount of time or memory; the message says why, without its field."""


def parser_limits(kind: str) -> LLParserLimits:
    """Bound what the library spends on a step of a grammar of this kind."""
    return LLParserLimits(
        verbose_errors=False,
        max_items_in_row=MAX_ROW.get(kind, MAX_ROW_ELSE),
        step_max_items=MAX_STEP.get(kind, MAX_STEP_ELSE),
        max_lexer_states=MAX_STATES,
    )


def check_regex(regex: str) -> None:
    """**Raises:** `TooCostly`."""
    if (size := expanded(regex)) > MAX_EXPANDED:
        many = f"{size} characters" if size < 10**18 else "too many characters"
        raise TooCostly(f"the regular expression {regex[:60]!r} stands for {many}, at most {MAX_EXPANDED}")


def check_literal(text: str) -> None:
    """**Raises:** `TooCostly`."""
    if len(text) > MAX_LITERAL:
        raise TooCostly(f"the text {text[:40]!r}... has {len(text)} characters, at most {MAX_LITERAL} of one text")


def check_lark(lark: str) -> None:
    """Check a grammar's literals, its regular expressions and the schemas in it. **Raises:** `TooCostly`."""
    at = 0
    while found := _LARK.search(lark, at):
        at = found.end()
        if found["text"]:
            check_literal(found["text"])
        elif found["regex"]:
            check_regex(found["regex"])
        elif found["json"] is not None:
            try:
                schema, at = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError) as error:
                raise TooCostly(f"%json isn't followed by a JSON text: {error}") from None
            check_schema(schema, "grammar")


def check_schema(schema: Any, kind: str) -> None:
    """Check a schema in a grammar of this kind. **Raises:** `TooCostly`."""
    most = MAX_ROW.get(kind, MAX_ROW_ELSE) // ITEMS_PER_OPTIONAL - 16
    for each in schemas_within(schema):
        if isinstance(pattern := each.get("pattern"), str):
            check_regex(pattern)
        for pattern in _object(each, "patternProperties"):
            check_regex(pattern)
        multiple = each.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            _check_multiple(multiple)
        listed = each.get("enum")
        for text in (each.get("const"), *(listed if isinstance(listed, list) else ())):
            if isinstance(text, str):
                check_literal(text)
        if (run := _optional_run(each)) > most:
            raise TooCostly(
                f"an object has {run} optional properties in a row, at most {most} can be followed; require some of "
                "them"
            )


def schemas_within(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a schema, itself included; parts of a keyword that isn't known count as schemas. One may be
    changed when it comes."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in _MAPS and isinstance(inner, dict):
                    waiting += inner.values()
                elif key not in _DATA:
                    waiting.append(inner)


def expanded(regex: str) -> int:
    """About how many characters a regular expression stands for, with its counts written out."""
    sizes, last, at, closes = [0], 0, 0, 0
    while at < len(regex):
        char, count = regex[at], None
        if char == "{" and (count := _COUNT.match(regex, at)):
            digits = max((each.lstrip("0") for each in count.groups() if each), key=lambda n: (len(n), n), default="1")
            times = 10**18 if len(digits) > MAX_COUNT_DIGITS else int(digits or "0")
            sizes[-1] = min(sizes[-1] + last * (times - 1), 10**18)
            last = min(last * times, 10**18)
            at = count.end()
            continue
        if char == "(":
            sizes.append(0)
            last = 0
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif char not in "*+?|":
            last = 1
            sizes[-1] += 1
            if char == "[" and closes >= 0:  # a class is one character, whatever is in it
                closes = regex.find("]", at + 2)
                at = max(closes, at)
            elif char == "\\":
                at += 1
        at += 1
    return sum(sizes)


def _check_multiple(number: float) -> None:
    if (isinstance(number, float) and not isfinite(number)) or number <= 0:
        raise TooCostly(f"multipleOf must be a finite number above 0, got {shown(number)}")
    if isinstance(number, float):  # without its point: 0.25 is 25
        digits = Decimal(repr(number)).as_tuple()
        number = int("".join(map(str, digits.digits))) * 10 ** max(digits.exponent, 0)
    if number > MAX_MULTIPLE:
        raise TooCostly(
            f"multipleOf {shown(number)} needs that many states, at most {MAX_MULTIPLE} (0.25 counts as 25)"
        )


def _object(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return value if isinstance(value := schema.get(key), dict) else {}


def _optional_run(schema: dict[str, Any]) -> int:
    """The most properties of an object that may each be left out, one after the other."""
    listed = schema.get("required")
    required = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    run = most = 0
    for name in _object(schema, "properties"):
        run = 0 if name in required else run + 1
        most = max(most, run)
    return most
