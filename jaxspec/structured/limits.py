"""Bounds on grammars that anyone may send: their size, and the time that one may take to compile.

The library bounds the cost of a step, with two exceptions that are refused here before it sees them: regular
expressions that counts make huge, and large multiples. The rest is bounded by time.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from decimal import Decimal
from typing import Any

from jaxspec.config.request import RequestError, StructuredOutput

MAX_EXPANDED = 20_000  # characters that a regular expression stands for, its counts written out
MAX_MULTIPLE = 10_000  # multipleOf, as a whole number: an automaton has a state for each remainder
COMPILE_SECONDS = 5.0
MAX_LATE = 2  # compilations that go on after their request was refused; while there are as many, all others are

_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_LITERAL = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\\n])+)/'
)  # of Lark: strings, which are passed over, and regexes


def check(wanted: StructuredOutput) -> None:
    """**Raises:** `RequestError` for a grammar that could cost any amount of time or memory."""
    if wanted.whitespace_pattern is not None:
        _check_regex(wanted, wanted.whitespace_pattern)
    if wanted.kind == "regex":
        _check_regex(wanted, wanted.text)
    elif wanted.kind == "grammar":
        for literal in _LITERAL.finditer(wanted.text):
            _check_regex(wanted, literal[1] or "")
    elif wanted.kind == "json":
        for key, value in _members(json.loads(wanted.text)):
            if key == "pattern" and isinstance(value, str):
                _check_regex(wanted, value)
            if key == "patternProperties" and isinstance(value, dict):
                for pattern in value:
                    _check_regex(wanted, pattern)
            if key == "multipleOf" and isinstance(value, int | float) and _whole(value) > MAX_MULTIPLE:
                raise _refusal(wanted, f"multipleOf {value} needs {_whole(value)} states, at most {MAX_MULTIPLE}")


def expanded(regex: str) -> int:
    """About how many characters a regular expression stands for, with its counts written out."""
    sizes, last, at = [0], 0, 0
    while at < len(regex):
        char, count = regex[at], None
        if char == "{" and (count := _COUNT.match(regex, at)):
            times = max((int(n) for n in count.groups() if n), default=1)
            sizes[-1] += last * (times - 1)
            last *= times
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
            if char == "[":  # a class is one character, whatever is in it
                at = max(regex.find("]", at + 2), at)
            elif char == "\\":
                at += 1
        at += 1
    return sum(sizes)


class Watch:
    """Runs compilations with a time limit. One that is late goes on in its thread, since nothing can end it."""

    def __init__(self):
        self._late = 0
        self._counting = threading.Lock()

    def run[T](self, wanted: StructuredOutput, work: Callable[[], T]) -> T:
        """Run `work` and return its result. **Raises:** `RequestError` if it takes too long, or others still do."""
        if self._late >= MAX_LATE:
            raise _refusal(wanted, f"{self._late} grammars that take too long are still compiling; try again later")
        result: Future = Future()

        def compile_() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=compile_, name="jaxspec-grammar", daemon=True)
        thread.start()
        try:
            return result.result(COMPILE_SECONDS)
        except LateError:
            self._count(1)
            result.add_done_callback(lambda _: self._count(-1))
            raise _refusal(wanted, f"it takes longer than {COMPILE_SECONDS:g} seconds to compile") from None

    def _count(self, change: int) -> None:
        with self._counting:
            self._late += change


def _check_regex(wanted: StructuredOutput, regex: str) -> None:
    if (size := expanded(regex)) > MAX_EXPANDED:
        raise _refusal(
            wanted, f"the regular expression {regex[:60]!r} stands for {size} characters, at most {MAX_EXPANDED}"
        )


def _refusal(wanted: StructuredOutput, why: str) -> RequestError:
    return RequestError(f"{wanted.label}: {why}", wanted.field)


def _members(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object in a schema, with its value."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _whole(number: float) -> int:
    """A decimal number without its point: 0.25 is 25. Zeros at its end don't count."""
    digits = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits.digits)) or "0") * 10 ** max(min(digits.exponent, 20), 0)
