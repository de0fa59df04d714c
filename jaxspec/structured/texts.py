"""Regular expressions of strings in JSON schemas: formats, patterns that the grammar library can't read as they stand,
and patterns that hold for a whole text instead of within it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

FORMATS = frozenset(  # of all drafts; others say nothing, by JSON Schema itself
    {
        *("color", "date", "date-time", "duration", "email", "hostname", "host-name", "idn-email", "idn-hostname"),
        *("ip-address", "ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "phone", "regex"),
        *("relative-json-pointer", "style", "time", "uri", "uri-reference", "uri-template", "utc-millisec", "uuid"),
    }
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_PERIOD = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_SIGN = r"([A-Za-z0-9._~!$&'()*+,;=:@\-]|%[0-9A-Fa-f]{2})"
# Texts of each format that the grammar library knows, for places where it knows none: names of members, and outside of
# JSON. None is of another.
FORMAT_PATTERNS = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": f"^{_DATE}$",
    "time": f"^{_CLOCK}$",
    "date-time": f"^{_DATE}T{_CLOCK}$",
    "duration": f"^P(([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)({_PERIOD})?|{_PERIOD}|[0-9]+W)$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": (
        f"^(({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,7}}:|:(:{_HEX}){{1,7}}|({_HEX}:){{1,6}}:{_HEX}"
        f"|({_HEX}:){{1,5}}(:{_HEX}){{2}}|({_HEX}:){{1,4}}(:{_HEX}){{3}}|({_HEX}:){{1,3}}(:{_HEX}){{4}}"
        f"|({_HEX}:){{1,2}}(:{_HEX}){{5}}|{_HEX}:(:{_HEX}){{6}}|::)$"
    ),
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "email": rf"^{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*$",
    "uri": (
        rf"^[A-Za-z][A-Za-z0-9+.\-]*:(//[A-Za-z0-9.\-]+(:[0-9]{{1,5}})?)?"
        rf"(/{_SIGN}*)*(\?({_SIGN}|[/?])*)?(#{_SIGN}*)?$"
    ),
}
# Patterns that libraries write with look-around, which the grammar library lacks, and their equals without; digits are
# written out.
_DAYS = "([0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_SECONDS = "[0-9]+([.,][0-9]+)?S"
_TIME = f"([0-9]+H([0-9]+M)?({_SECONDS})?|[0-9]+M({_SECONDS})?|{_SECONDS})"
_SAME = {
    # pydantic's Decimal
    r"^(?!^[-+.]*$)[+-]?0*[0-9]*\.?[0-9]*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
    # Zod's duration
    "^P(?:([0-9]+W)|(?!.*W)(?=[0-9]|T[0-9])([0-9]+Y)?([0-9]+M)?([0-9]+D)?"
    "(T(?=[0-9])([0-9]+H)?([0-9]+M)?([0-9]+([.,][0-9]+)?S)?)?)$": f"^P([0-9]+W|{_DAYS}(T{_TIME})?|T{_TIME})$",
    # Zod's email, before 4.2
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
_SIGNS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|^$]", re.DOTALL)


def looks_around(pattern: str) -> bool:
    """Whether a regular expression has look-ahead or look-behind."""
    return re.search(r"\(\?<?[=!]", re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern)) is not None


def without_lookahead(pattern: str) -> list[str]:
    """Patterns that hold together where this one does, which begins with looks ahead: `^(?=A)B$` is `^B$` and `^A`."""
    found, rest = [], _SAME.get(pattern.replace(r"\d", "[0-9]"), pattern)
    while rest.startswith("^(?=") and (ends := _places(rest, ")")):
        found.append(f"^(?:{rest[4 : ends[0]]})")
        rest = "^" + rest[ends[0] + 1 :]
    return [pattern] if found and _places(rest, "|") else [rest, *found]


def whole(pattern: str) -> str:
    """A regular expression of the whole texts in which a pattern finds itself. **Raises:** `ValueError` for an anchor
    within the pattern."""
    bars = [-1, *_places(pattern, "|"), len(pattern)]
    if len(bars) > 2:
        return "|".join(f"({whole(pattern[at + 1 : end])})" for at, end in pairwise(bars))
    if _places(pattern, ")") == [len(pattern) - 1] and (opens := re.match(r"\((\?:)?(?!\?)", pattern)):
        return whole(pattern[opens.end() : -1])
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and any(sign.span() == (len(body) - 1, len(body)) for sign in _SIGNS.finditer(body))
    inner = body[:-1] if ends else body
    if any(sign[0] in "^$" for sign in _SIGNS.finditer(inner)):
        raise ValueError(f"the pattern {pattern!r} has anchors within")
    return f"{'' if body != pattern else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _places(pattern: str, sign: str) -> list[int]:
    """Where a sign stands in a regular expression outside of its groups, or ends one of those."""
    depth, places = 0, []
    for found in _SIGNS.finditer(pattern):
        depth += (found[0] == "(") - (found[0] == ")")
        if found[0] == sign and depth == 0:
            places.append(found.start())
    return places


def matches(pattern: Any, text: str) -> bool | None:
    """Whether a pattern finds itself in a text; None if that can't be told."""
    try:
        return re.search(re.sub(r"(?<!\\)\$", r"\\Z", pattern), text, re.ASCII) is not None
    except (TypeError, re.error, RecursionError):
        return None


def other_texts(texts: Sequence[str]) -> str:
    """A regular expression of every text but these."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_other_than(tree)}$"


def _other_than(node: Mapping[str, Any]) -> str:
    chars = [char for char in node if char]
    options = [escape(char) + _other_than(node[char]) for char in chars]
    options.append(f"[^{''.join(map(_in_class, chars))}][\\s\\S]*" if chars else "[\\s\\S]+")
    return f"(?:{'|'.join(options)}){'' if '' in node else '?'}"


def escape(text: str) -> str:
    """A regular expression of this text alone, in Python's syntax and in Rust's."""
    return re.sub(r"[\\.^$|?*+()\[\]{}]", lambda sign: f"\\{sign[0]}", text)


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[&~" else char
