r"""Regular expressions as JSON Schema reads them, in Rust's syntax.

Invariant: `\d`, `\D`, `\w` and `\W` are ASCII's, wherever they stand. Rust's own are Unicode's, so that a model could
write the digits of any script. `\s` is any white space in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
JSON_SPACE = ASCII | {r"\s": r"[ \t\r\n]"}  # between the parts of a JSON text no other white space may stand

_OPENS = r"(?P<opens>\[\^?(?:-+|\])?)"  # a hyphen or a bracket that comes first is a character
_CLASS = r"\\[dDwWsS]"
_OUTSIDE = re.compile(rf"{_OPENS}|\\.|.", re.DOTALL)
_INSIDE = re.compile(
    r"\[:\^?\w+:\]"
    rf"|{_OPENS}|(?P<closes>\])|&&|--|~~"
    rf"|(?P<apart>{_CLASS}(?=-[^\]-])|(?:\\.|.)(?=-{_CLASS}))-"  # no range: an end of it would be a class
    r"|(?:\\.|.)-(?![\]-])(?:\\.|.)"
    r"|\\.|.",
    re.DOTALL,
)


def with_classes(regex: str, classes: Mapping[str, str] = ASCII) -> str:
    r"""Write out `classes` in an expression. A hyphen beside a class is itself: `[\w-.]` has three parts."""
    parts, depth, at = [], 0, 0
    while at < len(regex):
        found = (_INSIDE if depth else _OUTSIDE).match(regex, at)
        at, part, named = found.end(), found.group(), found.groupdict()
        depth += bool(named["opens"]) - bool(named.get("closes"))
        apart = named.get("apart")
        parts.append(classes.get(part, part) if apart is None else classes.get(apart, apart) + r"\-")
    return "".join(parts)
