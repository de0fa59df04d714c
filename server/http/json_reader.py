"""JSON from strangers: a parser that other threads can interrupt, with limits that hold before memory is spent.

`json.loads` keeps the interpreter's lock from a document's first byte to its last, so 60 MB of `{},` stop every stream
for seconds, even from another thread. So a reader in C (pydantic's) reads a document at once only if that takes a few
milliseconds, whatever it holds: what it holds is counted before, by a few calls into C. Any other document, and one
that C refuses, is walked in Python, where the lock changes hands; strings and runs of integers are left to C, a bounded
piece at a time.

Invariants: whatever `parse` returns, `json.loads` returns too. It builds at most `MAX_VALUES` values, of which
`MAX_ITEMS` aren't integers, and no call into C handles more than `MAX_STRING` bytes.
"""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from json.decoder import JSONDecodeError, scanstring
from typing import Any

import numpy as np
from pydantic_core import from_json

from jaxspec.config.request import RequestError

AT_ONCE = 2**20  # bytes that C reads at once, in 3 ms if they are all escapes
VALUES_AT_ONCE = 40_000  # and values, in 4 ms if they are all objects
INTEGERS_AT_ONCE = 150_000  # or integers, in 4 ms
MAX_DEPTH = 100  # arrays and objects within one another
MAX_ITEMS = 50_000  # keys, strings, arrays, objects, fractions, true, false and null
MAX_VALUES = 2**20  # these and integers: the token ids of a batch of prompts
MAX_STRING = 28 * 2**20  # bytes: the largest picture in base64
MAX_KEY = AT_ONCE  # bytes
MAX_DIGITS = 4000  # of one number; Python converts no integer of more than 4300

_DIGITS = b"0123456789"
_AROUND = 201 - MAX_DEPTH  # the reader in C takes 200 arrays within one another, and one more that is empty
_SPACE = re.compile(rb"[ \t\n\r]{0,4096}")
_INTEGERS = re.compile(rb"(?:-?(?:0|[1-9]\d{0,18})[ \n]{0,2},[ \n]{0,2}){1,1024}+")
_NUMBER = re.compile(rb"(-?(?:0|[1-9]\d{0,%d}))((?:\.\d{1,%d})?(?:[eE][-+]?\d{1,%d})?)" % (3 * (MAX_DIGITS,)))
# Of a string: text, or what a backslash begins. Two surrogates that are one character stay together.
_CHARACTERS = re.compile(rb'(?:[^"\\]{1,4096}+|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[^"\\]{4}|\\.){1,256}+', re.DOTALL)
_utf8 = codecs.getincrementaldecoder("utf-8")
_WORDS = {
    b"true": True,
    b"false": False,
    b"null": None,
    b"NaN": float("nan"),
    b"Infinity": float("inf"),
    b"-Infinity": float("-inf"),
}
_WORD = re.compile(b"|".join(_WORDS))


def parse(body: bytes) -> Any:
    """The value that a JSON document in UTF-8 holds. Of a key that comes twice, the last value counts.

    **Raises:** `RequestError` that says where the document isn't JSON, or which limit it passes.
    """
    if len(body) <= AT_ONCE and (_is_brief(body) or _is_brief(_without_strings(body))):
        with suppress(ValueError):  # the walk reads half of a surrogate pair, or says what is wrong
            return _read_at_once(body)
    return walk(body)


def _read_at_once(body: bytes) -> Any:
    """Read a document by C code, and as deep as `MAX_DEPTH`: the arrays around it take the rest of the reader's depth.

    **Raises:** `ValueError`, also for some documents that are as deep as that.
    """
    value = from_json(
        b"".join((b"[" * _AROUND, body.removeprefix(b"\xef\xbb\xbf"), b"]" * _AROUND)), cache_strings="keys"
    )
    for _ in range(_AROUND):
        (value,) = value
    return value


def _is_brief(text: bytes) -> bool:
    """Whether a document has few values, by an upper bound: each value and key but the first follows a mark."""
    marks = len(text) if len(text) <= VALUES_AT_ONCE else _count(text, b",:[{")
    if marks > VALUES_AT_ONCE and (marks > INTEGERS_AT_ONCE or _count(text, b':[{".eEtfnNI') > VALUES_AT_ONCE):
        return False
    return not _has_long_number(text)


def _count(text: bytes, marks: bytes) -> int:
    """How many bytes of `text` are `marks`. numpy has no branches to mispredict, as `bytes.translate` has."""
    each = np.frombuffer(text, np.uint8)
    return sum(int(np.count_nonzero(each == mark)) for mark in marks)


def _without_strings(body: bytes) -> bytes:
    """A document with empty strings in place of its strings."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # now each quote begins or ends a string
    return b'""'.join(body.split(b'"')[::2])


def _has_long_number(text: bytes) -> bool:
    """Whether there are more than `MAX_DIGITS` digits in a row, which would be at one of the places that are looked
    at."""
    for place in range(MAX_DIGITS, len(text), MAX_DIGITS):
        before, after = text[place - MAX_DIGITS : place], text[place : place + MAX_DIGITS]
        if len(before) - len(before.rstrip(_DIGITS)) + len(after) - len(after.lstrip(_DIGITS)) > MAX_DIGITS:
            return True
    return False


def walk(body: bytes) -> Any:
    """Parse by the reader that can be interrupted. **Raises:** as `parse`."""
    reader = _Reader(body)
    value = reader.value(reader.skip(3 if body.startswith(b"\xef\xbb\xbf") else 0), MAX_DEPTH)
    if (end := reader.skip(reader.end)) != len(body):
        raise reader.invalid("nothing may follow the value", end)
    return value


class _Reader:
    """`end` is where the value ends that was read last."""

    def __init__(self, body: bytes):
        self.body = body
        self.end = 0
        self._items = self._values = 0

    def skip(self, start: int) -> int:
        """Where the space after `start` ends."""
        while (end := _SPACE.match(self.body, start).end()) > start:
            start = end
        return start

    def value(self, start: int, depth: int) -> Any:
        """The value at `start`, which isn't space, in no more than `depth` further arrays and objects."""
        first = self.body[start : start + 1]
        if found := _NUMBER.match(self.body, start):
            return self._number(found)
        self._count_item()
        if first == b'"':
            return self._string(start, MAX_STRING, "a string")
        if first == b"[" or first == b"{":
            if depth == 0:
                raise RequestError(f"the body is nested too deeply: more than {MAX_DEPTH} arrays and objects")
            return (self._array if first == b"[" else self._object)(self.skip(start + 1), depth - 1)
        if found := _WORD.match(self.body, start):
            self.end = found.end()
            return _WORDS[found.group()]
        raise self.invalid("a value is missing", start)

    def invalid(self, problem: str, place: int) -> RequestError:
        return RequestError(f"the body is not valid JSON: {problem} at byte {place}")

    def _array(self, place: int, depth: int) -> list[Any]:
        values: list[Any] = []
        if self._closes(b"]", place):
            return values
        while True:
            while run := _INTEGERS.match(self.body, place):
                integers = run.group().rstrip(b", \n").split(b",")
                self._count(len(integers))
                values += map(int, integers)
                place = run.end()
            values.append(self.value(self.skip(place), depth))
            place = self.skip(self.end)
            if self._closes(b"]", place):
                return values
            place = self._after(b",", place, "a comma or ] is missing")

    def _object(self, place: int, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self._closes(b"}", place):
            return values
        while True:
            if self.body[place : place + 1] != b'"':
                raise self.invalid("a key in double quotes is missing", place)
            self._count_item()
            key = self._string(place, MAX_KEY, "a key")
            place = self._after(b":", self.skip(self.end), "a colon is missing")
            values[key] = self.value(place, depth)
            place = self.skip(self.end)
            if self._closes(b"}", place):
                return values
            place = self._after(b",", place, "a comma or } is missing")

    def _closes(self, bracket: bytes, place: int) -> bool:
        self.end = place + 1
        return self.body[place : place + 1] == bracket

    def _after(self, mark: bytes, place: int, problem: str) -> int:
        """Where something begins that follows the `mark` at `place`."""
        if self.body[place : place + 1] != mark:
            raise self.invalid(problem, place)
        return self.skip(place + 1)

    def _number(self, found: re.Match[bytes]) -> int | float:
        self.end = found.end()
        if self.body[self.end : self.end + 1].isdigit():
            if found.end() - found.start() < MAX_DIGITS:
                raise self.invalid("a number begins with 0", found.start())
            raise RequestError(f"the body has a number of thousands of digits, at most {MAX_DIGITS} are read")
        whole, rest = found.groups()
        if rest:
            self._count_item()
            return float(found.group())
        self._count(1)
        return int(whole)

    def _string(self, start: int, limit: int, what: str) -> str:
        parts, utf8, end = [], _utf8(), start + 1
        try:
            while run := _CHARACTERS.match(self.body, end):
                end = run.end()
                if end - start > limit + 1:
                    raise RequestError(f"{what} of more than {limit} bytes begins at byte {start} of the body")
                parts.append(scanstring(f'{utf8.decode(run.group())}"', 0)[0])
            if self.body[end : end + 1] != b'"':
                raise self.invalid("a string doesn't end that begins", start)
            utf8.decode(b"", True)
        except UnicodeDecodeError:
            raise RequestError(f"the body isn't UTF-8 in the string that begins at byte {start}") from None
        except JSONDecodeError as error:  # a control character, or an escape that isn't one
            raise self.invalid(f"{error.msg.lower()} in the string", start) from None
        self.end = end + 1
        return "".join(parts)

    def _count(self, integers: int) -> None:
        self._values += integers
        if self._values > MAX_VALUES:
            raise RequestError(f"the body has more than {MAX_VALUES} values; send fewer or shorter prompts at once")

    def _count_item(self) -> None:
        self._count(1)
        self._items += 1
        if self._items > MAX_ITEMS:
            raise RequestError(
                f"the body has more than {MAX_ITEMS} strings, objects, arrays and other values that aren't integers; "
                "send less at once"
            )
